//! Keys with names, in the data folder, where a running server finds them at once. `steersman keys` and `/v1/keys`
//! create and revoke them, under one lock.
//!
//! The file `keys.json` has the SHA-256 of each key, never the key: keys have 256 random bits, so that no salt and no
//! slow hash is needed. A revoked or expired key stays listed, and what it opened stays closed: revoking the last key
//! opens a server to nobody. Keys in the configuration are separate.
//!
//! The clock of the machine decides when a key has expired. It may be wrong: a key with an expiry is also refused when
//! the clock is more than a day before its creation, as on a machine that starts without a clock.

mod command;
mod edit;
mod file;

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

pub use self::command::{Create, Task, run};
pub use self::edit::{Created, Editing, LastOperator, NewKey, Refusal, RefusalKind, lifetime_s};
pub use self::file::KeyFile;

/// Name of the file in the data folder.
pub const FILE: &str = "keys.json";

/// Most bytes of the file: some 60,000 keys.
const FILE_BYTES: u64 = 16 << 20;

/// How far the clock may be before the creation of a key: the largest difference of time zones, and more.
const CLOCK_SLACK: SignedDuration = SignedDuration::from_hours(24);

/// SHA-256 of a key: digests have equal length, so comparing them takes constant time.
pub type KeyDigest = [u8; 32];

/// What a key opens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Opens {
    /// Every client route and every profile.
    AllProfiles,
    /// Everything.
    Operator,
    /// One profile.
    Profile(String),
}

/// A key at rest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Chosen by the operator.
    pub name: String,
    /// The first characters of the key.
    pub prefix: String,
    #[serde(with = "hex::serde")]
    sha256: KeyDigest,
    /// What it opens.
    pub opens: Opens,
    /// When it was created.
    pub created: Timestamp,
    /// From when on it is refused by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
    /// When it was revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<Timestamp>,
}

/// Whether a key works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It does.
    Active,
    /// Its expiry is over.
    Expired,
    /// It has an expiry, and the clock is long before its creation.
    NotYet,
    /// An operator has revoked it.
    Revoked,
}

impl State {
    /// All names of states.
    pub const NAMES: [&str; 4] = ["active", "expired", "not_yet", "revoked"];

    /// The name in replies.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl Key {
    /// The digest, unless the key is revoked.
    pub fn digest(&self) -> Option<KeyDigest> {
        self.revoked.is_none().then_some(self.sha256)
    }

    /// Whether it is the key with this digest.
    pub fn is(&self, digest: &KeyDigest) -> bool {
        // To the end, so the time taken reveals nothing.
        self.sha256.ct_eq(digest).into()
    }

    /// Whether it works at `now`.
    pub fn state_at(&self, now: Timestamp) -> State {
        match self.expires {
            _ if self.revoked.is_some() => State::Revoked,
            Some(expires) if now >= expires => State::Expired,
            Some(_) if now.saturating_add(CLOCK_SLACK).is_ok_and(|late| late < self.created) => {
                State::NotYet
            }
            _ => State::Active,
        }
    }
}

/// The contents of the file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keys {
    /// In the order of creation.
    pub keys: Vec<Key>,
}

impl Keys {
    /// Reads a file; without one there are no keys.
    ///
    /// # Errors
    /// If it cannot be read or is damaged.
    pub fn read(path: &Path) -> Result<Self> {
        let text = match steersman_files::read(path, FILE_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => {
                return Err(
                    anyhow!(error).context(format!("reading the keys in {}", path.display()))
                );
            }
        };
        let read = || -> Result<Self> {
            let keys: Self = serde_json::from_slice(&text)?;
            // No command writes such a file: revoked keys stay listed.
            ensure!(!keys.keys.is_empty(), "the list of keys is empty");
            Ok(keys)
        };
        read().with_context(|| {
            let path = path.display();
            format!(
                "reading the keys in {path}: restore the file, or delete it and create new keys"
            )
        })
    }

    /// Whether a key was created that opens all profiles: then a server is open to nobody without a key.
    pub fn has_client_key(&self) -> bool {
        self.keys.iter().any(|key| key.opens == Opens::AllProfiles)
    }

    /// Whether a key of an operator works, besides the one at `index`.
    fn has_operator_besides(&self, index: Option<usize>, now: Timestamp) -> bool {
        let mut others = self.keys.iter().enumerate().filter(|(other, _)| Some(*other) != index);
        others.any(|(_, key)| key.opens == Opens::Operator && key.state_at(now) == State::Active)
    }
}

/// What the configuration says of profiles and keys.
#[derive(Debug, Default)]
pub struct Configured {
    /// Names of the profiles.
    pub profiles: Vec<String>,
    /// Names of the profiles that have keys there.
    pub closed_profiles: Vec<String>,
    /// Whether the server has keys there that open all profiles.
    pub is_closed: bool,
    /// Whether operators have keys there.
    pub has_operators: bool,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The task that creates a key for all profiles.
    pub fn create(name: &str) -> Task {
        Task::Create(Create { name: name.into(), profile: None, operator: false, expires: None })
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    /// A key of `2030-01-01`.
    pub fn key(expires: Option<&str>, revoked: bool) -> Key {
        Key {
            name: "laptop".into(),
            prefix: "sk-01234567".into(),
            sha256: [7; 32],
            opens: Opens::Operator,
            created: at("2030-01-01T00:00:00Z"),
            expires: expires.map(at),
            revoked: revoked.then(|| at("2030-01-02T00:00:00Z")),
        }
    }

    #[test]
    fn the_clock_decides_whether_a_key_works() {
        let month = Some("2030-01-31T00:00:00Z");
        for (expires, revoked, now, state) in [
            (None, false, "2030-01-01T00:00:00Z", State::Active),
            (None, false, "2999-01-01T00:00:00Z", State::Active),
            // Without an expiry, a wrong clock closes nothing.
            (None, false, "1970-01-01T00:00:00Z", State::Active),
            (month, false, "2030-01-30T23:59:59Z", State::Active),
            (month, false, "2030-01-31T00:00:00Z", State::Expired),
            // A clock that is set back a little, or to another time zone.
            (month, false, "2029-12-31T10:00:00Z", State::Active),
            // A machine that starts without a clock would open all keys that have expired.
            (month, false, "1970-01-01T00:00:00Z", State::NotYet),
            (month, true, "2030-01-03T00:00:00Z", State::Revoked),
            (month, true, "2031-01-01T00:00:00Z", State::Revoked),
        ] {
            assert_eq!(key(expires, revoked).state_at(at(now)), state, "{expires:?} at {now}");
        }
    }

    /// Files that were written before keys had an expiry.
    #[test]
    fn old_files_are_read_and_written_as_they_were() {
        let digest = "07".repeat(32);
        let old = format!(
            r#"{{"keys": [{{"name": "laptop", "prefix": "sk-01234567", "sha256": "{digest}",
            "opens": "all_profiles", "created": "2030-01-01T00:00:00Z"}}]}}"#
        );
        let keys: Keys = serde_json::from_str(&old).unwrap();
        assert_eq!(keys.keys[0].state_at(at("2999-01-01T00:00:00Z")), State::Active);
        let new = serde_json::to_string(&keys).unwrap();
        assert!(!new.contains("expires") && !new.contains("revoked"), "{new}");
    }
}
