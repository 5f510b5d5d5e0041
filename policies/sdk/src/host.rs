//! The imports: what a policy can ask the host for. All but `failure` need a grant of the profile
//! (`grants = ["log"]`), or the component is refused at load. A component imports only the interfaces
//! that its code calls.
//!
//! Native tests use a double of each interface, described in its module.

/// Reports why a policy fails. Needs no grant.
pub mod failure {
    /// Longest message that the host accepts; longer ones are truncated here.
    #[cfg(target_family = "wasm")]
    const BYTES: usize = 1024;

    /// Ends the call as a failure of the policy. The message appears in notes and log.
    ///
    /// # Panics
    /// Natively, with this message.
    pub fn fail(message: &str) -> ! {
        #[cfg(target_family = "wasm")]
        report(message);
        panic!("{message}")
    }

    /// Reports the message and location of each panic as the failure.
    #[doc(hidden)]
    pub fn report_panics() {
        #[cfg(target_family = "wasm")]
        std::panic::set_hook(Box::new(|panic| report(&panic.to_string())));
    }

    #[cfg(target_family = "wasm")]
    fn report(message: &str) {
        let message = &message[..message.floor_char_boundary(BYTES)];
        crate::bindings::steersman::policy::failure::fail(message);
    }
}

/// Lines in the server's log. Needs the grant `log`.
///
/// Natively, lines go to stderr.
pub mod log {
    /// Writes a line for the author of the policy.
    pub fn debug(line: &str) {
        write(Level::Debug, line);
    }

    /// Writes a line for the operator.
    pub fn info(line: &str) {
        write(Level::Info, line);
    }

    /// Writes a line about something unexpected.
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

/// A small map on disk that outlives requests, one for each policy and profile. Needs the grant `kv`.
///
/// Natively it is a thread-local map, empty when a test begins, with the default quota of 1 MiB.
pub mod kv {
    pub use crate::bindings::steersman::policy::kv::{AddRefusal, Refusal};

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
    /// [`Refusal::BadKey`] unless the key has 1 to 256 bytes; [`Refusal::Full`] if the value would
    /// exceed the quota. The map is then unchanged.
    pub fn set(key: &str, value: &str) -> Result<(), Refusal> {
        host::set(key, value)
    }

    /// Removes a key; returns whether it existed.
    pub fn delete(key: &str) -> bool {
        host::delete(key)
    }

    /// Adds to a decimal number, which is 0 if there is none; returns the sum. No other request comes between.
    ///
    /// # Errors
    /// [`AddRefusal::NotANumber`] if the value is not a number or the sum has more than 64 bits; otherwise as
    /// [`set`]. The map is then unchanged.
    pub fn add(key: &str, by: i64) -> Result<i64, AddRefusal> {
        host::add(key, by)
    }

    /// Removes a key after this many seconds, unless it is set again before; 0 keeps it. Returns whether the
    /// key exists. [`add`] leaves the time as it is. Natively, nothing expires.
    pub fn expire(key: &str, seconds: u32) -> bool {
        host::expire(key, seconds)
    }

    /// At most `limit` keys that begin with `prefix` and come after `after`, sorted.
    pub fn list(prefix: &str, after: &str, limit: u32) -> Vec<String> {
        host::list(prefix, after, limit)
    }

    #[cfg(not(target_family = "wasm"))]
    mod double {
        use std::cell::RefCell;
        use std::collections::BTreeMap;

        use super::{AddRefusal, Refusal};

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

        pub fn add(key: &str, by: i64) -> Result<i64, AddRefusal> {
            let old = get(key).map_or(Ok(0), |old| old.parse::<i64>());
            let sum = old.ok().and_then(|old| old.checked_add(by)).ok_or(AddRefusal::NotANumber)?;
            match set(key, &sum.to_string()) {
                Ok(()) => Ok(sum),
                Err(Refusal::BadKey) => Err(AddRefusal::BadKey),
                Err(Refusal::Full) => Err(AddRefusal::Full),
            }
        }

        pub fn expire(key: &str, _: u32) -> bool {
            get(key).is_some()
        }

        pub fn list(prefix: &str, after: &str, limit: u32) -> Vec<String> {
            MAP.with_borrow(|map| {
                let keys = map.keys().filter(|key| key.starts_with(prefix) && key.as_str() > after);
                keys.take(limit as usize).cloned().collect()
            })
        }
    }
}

/// The tokenizer of the served model. Needs the grant `tokenizer`.
///
/// Natively each byte of a text is a token.
pub mod tokenizer {
    #[cfg(target_family = "wasm")]
    use crate::bindings::steersman::policy::tokenizer as host;

    /// Tokens of a text of at most 65,536 bytes, without special tokens. A longer text is a failure of
    /// the policy.
    pub fn encode(text: &str) -> Vec<u32> {
        #[cfg(target_family = "wasm")]
        return host::encode(text);
        #[cfg(not(target_family = "wasm"))]
        text.bytes().map(u32::from).collect()
    }

    /// Text of at most 16,384 tokens; more are a failure of the policy. Tokens outside the vocabulary
    /// are skipped.
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

/// Counters at `GET /metrics`. Needs the grant `counters`.
///
/// Natively they are thread-local, and [`counters::value`] reads them.
pub mod counters {
    /// Adds to a counter, which exists from its first use on. A name has 1 to 64 letters, digits or
    /// `_`; a policy has at most 32 counters.
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

        /// Adds to a counter, which exists from its first use on. A name has 1 to 64 letters, digits
        /// or `_`; a policy has at most 32 counters.
        ///
        /// # Panics
        /// Natively, if the host would drop the call.
        pub fn add(name: &str, by: u64) {
            let fits = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            assert!(fits && (1..=64).contains(&name.len()), "invalid name of a counter: `{name}`");
            COUNTERS.with_borrow_mut(|counters| {
                *counters.entry(name.into()).or_default() += by;
                assert!(counters.len() <= 32, "more than 32 counters: `{name}`");
            });
        }

        /// The value of a counter, for native tests.
        pub fn value(name: &str) -> u64 {
            COUNTERS.with_borrow(|counters| counters.get(name).copied().unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_double_of_kv_refuses_what_the_host_refuses() {
        assert_eq!(kv::get("a"), None);
        assert!(kv::set("a", "1").is_ok());
        assert_eq!(kv::get("a").as_deref(), Some("1"));
        assert!(matches!(kv::set("", "1"), Err(kv::Refusal::BadKey)));
        assert!(matches!(kv::set(&"k".repeat(257), "1"), Err(kv::Refusal::BadKey)));
        assert!(matches!(kv::set("b", &"v".repeat(1 << 20)), Err(kv::Refusal::Full)));
        // Replacing a value frees its bytes first.
        let most = "v".repeat((1 << 20) - 1);
        assert!(kv::set("a", &most).is_ok() && kv::set("a", &most).is_ok());
        assert!(kv::delete("a") && !kv::delete("a"));
    }

    #[test]
    fn the_double_of_the_tokenizer_maps_bytes_to_tokens() {
        assert_eq!(tokenizer::encode("é!"), [0xc3, 0xa9, 33]);
        assert_eq!(tokenizer::decode(&[0xc3, 0xa9, 256, 33]), "é!");
    }

    #[test]
    fn the_double_of_counters_adds_up() {
        counters::add("closed", 1);
        counters::add("closed", 2);
        assert_eq!((counters::value("closed"), counters::value("other")), (3, 0));
    }
}
