//! What the host does for a policy, where the profile grants it (`grants = ["log"]`). A component
//! imports what its code calls and no more, and a host that does not grant it refuses it at load.
//!
//! Natively, in tests, a double stands in for each: it is described with the module.

/// How a policy says why it fails. Needs no grant.
pub mod failure {
    /// Most bytes of words that the host takes.
    #[cfg(target_family = "wasm")]
    const BYTES: usize = 1024;

    /// Ends the call as a failure of the policy, in these words: notes and log have them.
    ///
    /// # Panics
    /// Natively, in these words.
    pub fn fail(why: &str) -> ! {
        #[cfg(target_family = "wasm")]
        tell(why);
        panic!("{why}")
    }

    /// Has each panic tell its words and its place.
    #[doc(hidden)]
    pub fn tell_panics() {
        #[cfg(target_family = "wasm")]
        std::panic::set_hook(Box::new(|panic| tell(&panic.to_string())));
    }

    #[cfg(target_family = "wasm")]
    fn tell(why: &str) {
        let why = &why[..why.floor_char_boundary(BYTES)];
        crate::bindings::steersman::policy::failure::fail(why);
    }
}

/// Lines in the server's log. Needs the grant `log`.
///
/// Natively they go to stderr.
pub mod log {
    /// For the policy's author.
    pub fn debug(line: &str) {
        write(Level::Debug, line);
    }

    /// For the operator.
    pub fn info(line: &str) {
        write(Level::Info, line);
    }

    /// Something that should not be.
    pub fn warn(line: &str) {
        write(Level::Warn, line);
    }

    use crate::bindings::steersman::policy::log as host;
    use host::Level;

    #[cfg(target_family = "wasm")]
    fn write(level: Level, line: &str) {
        host::write(level, line);
    }

    #[cfg(not(target_family = "wasm"))]
    fn write(level: Level, line: &str) {
        eprintln!("{level:?}: {line}");
    }
}

/// What outlives a request: a small map on disk, one for each policy and profile. Needs the grant
/// `kv`.
///
/// Natively it is a map of the thread, empty when a test begins, of 1 MiB as on a server that is
/// not configured otherwise.
pub mod kv {
    pub use crate::bindings::steersman::policy::kv::Refusal;

    #[cfg(target_family = "wasm")]
    use crate::bindings::steersman::policy::kv as host;
    #[cfg(not(target_family = "wasm"))]
    use double as host;

    /// The value of a key.
    pub fn get(key: &str) -> Option<String> {
        host::get(key)
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// [`Refusal::BadKey`] unless the key has 1 to 256 bytes, [`Refusal::Full`] when the quota is
    /// used up. Nothing has changed then.
    pub fn set(key: &str, value: &str) -> Result<(), Refusal> {
        host::set(key, value)
    }

    /// Removes a key; whether there was one.
    pub fn delete(key: &str) -> bool {
        host::delete(key)
    }

    #[cfg(not(target_family = "wasm"))]
    mod double {
        use std::cell::RefCell;
        use std::collections::BTreeMap;

        use super::Refusal;

        const QUOTA_BYTES: usize = 1 << 20;

        thread_local! {
            static MAP: RefCell<BTreeMap<String, String>> = const { RefCell::new(BTreeMap::new()) };
        }

        pub fn get(key: &str) -> Option<String> {
            MAP.with_borrow(|map| map.get(key).cloned())
        }

        pub fn set(key: &str, value: &str) -> Result<(), Refusal> {
            if !(1..=256).contains(&key.len()) {
                return Err(Refusal::BadKey);
            }
            MAP.with_borrow_mut(|map| {
                let others = map.iter().filter(|(name, _)| *name != key);
                let used: usize = others.map(|(name, value)| name.len() + value.len()).sum();
                if used + key.len() + value.len() > QUOTA_BYTES {
                    return Err(Refusal::Full);
                }
                map.insert(key.into(), value.into());
                Ok(())
            })
        }

        pub fn delete(key: &str) -> bool {
            MAP.with_borrow_mut(|map| map.remove(key).is_some())
        }
    }
}

/// The served model's tokenizer. Needs the grant `tokenizer`.
///
/// Natively there is no model, and each byte of a text is a token.
pub mod tokenizer {
    #[cfg(target_family = "wasm")]
    use crate::bindings::steersman::policy::tokenizer as host;

    /// Tokens of a text of at most 65,536 bytes, special tokens off. A longer text is a failure of
    /// the policy.
    pub fn encode(text: &str) -> Vec<u32> {
        #[cfg(target_family = "wasm")]
        return host::encode(text);
        #[cfg(not(target_family = "wasm"))]
        text.bytes().map(u32::from).collect()
    }

    /// Text of at most 16,384 tokens; more is a failure of the policy. Tokens that the vocabulary
    /// lacks are left out.
    pub fn decode(tokens: &[u32]) -> String {
        #[cfg(target_family = "wasm")]
        return host::decode(tokens);
        #[cfg(not(target_family = "wasm"))]
        {
            let bytes: Vec<_> = tokens.iter().filter_map(|t| u8::try_from(*t).ok()).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        }
    }
}

/// Counters that the operator sees at `GET /metrics`. Needs the grant `counters`.
///
/// Natively they are counters of the thread, which [`counters::value`] reads.
pub mod counters {
    /// Adds to a counter, made when it is first named: 1 to 64 letters, digits or `_`, at most 32
    /// for each policy.
    #[cfg(target_family = "wasm")]
    pub fn add(name: &str, by: u64) {
        crate::bindings::steersman::policy::counters::add(name, by);
    }

    #[cfg(not(target_family = "wasm"))]
    pub use double::{add, value};

    #[cfg(not(target_family = "wasm"))]
    mod double {
        use std::cell::RefCell;
        use std::collections::BTreeMap;

        thread_local! {
            static COUNTERS: RefCell<BTreeMap<String, u64>> = const { RefCell::new(BTreeMap::new()) };
        }

        /// Adds to a counter, made when it is first named: 1 to 64 letters, digits or `_`, at most
        /// 32 for each policy.
        ///
        /// # Panics
        /// Natively, when the host would drop it.
        pub fn add(name: &str, by: u64) {
            let fits = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            assert!(fits && (1..=64).contains(&name.len()), "`{name}` is no name of a counter");
            COUNTERS.with_borrow_mut(|counters| {
                *counters.entry(name.into()).or_default() += by;
                assert!(counters.len() <= 32, "`{name}` is one counter too many");
            });
        }

        /// What a counter stands at: in native tests alone.
        pub fn value(name: &str) -> u64 {
            COUNTERS.with_borrow(|counters| counters.get(name).copied().unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_double_of_kv_refuses_what_the_host_does() {
        assert_eq!(kv::get("a"), None);
        assert!(kv::set("a", "1").is_ok());
        assert_eq!(kv::get("a").as_deref(), Some("1"));
        assert!(matches!(kv::set("", "1"), Err(kv::Refusal::BadKey)));
        assert!(matches!(kv::set(&"k".repeat(257), "1"), Err(kv::Refusal::BadKey)));
        assert!(matches!(kv::set("b", &"v".repeat(1 << 20)), Err(kv::Refusal::Full)));
        // The value that is replaced makes room for the new one.
        let most = "v".repeat((1 << 20) - 1);
        assert!(kv::set("a", &most).is_ok() && kv::set("a", &most).is_ok());
        assert!(kv::delete("a") && !kv::delete("a"));
    }

    #[test]
    fn natively_a_token_is_a_byte() {
        assert_eq!(tokenizer::encode("é!"), [0xc3, 0xa9, 33]);
        assert_eq!(tokenizer::decode(&[0xc3, 0xa9, 256, 33]), "é!");
    }

    #[test]
    fn counters_add_up() {
        counters::add("closed", 1);
        counters::add("closed", 2);
        assert_eq!((counters::value("closed"), counters::value("other")), (3, 0));
    }
}
