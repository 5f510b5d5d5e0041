//! Creates and revokes keys, under a lock that `steersman keys` and a running server share.

use std::fmt;
use std::fs::{File, TryLockError};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jiff::{SignedDuration, Timestamp};
use sha2::{Digest, Sha256};

use super::{Configured, FILE, FILE_BYTES, Key, Keys, Opens, State};
use crate::config::Unit;
use crate::words::suggestion;

/// Name of the file beside it that is locked while keys are changed.
const LOCK: &str = "keys.lock";

/// Longest wait for another process that changes keys.
const LOCK_WAIT: Duration = Duration::from_secs(10);

/// Time between two tries to lock.
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// What keys begin with.
const PREFIX: &str = "sk-";

/// Random bytes of a key.
const BYTES: usize = 32;

/// Characters of a key that are shown in lists.
const SHOWN: usize = 11;

/// Most characters of a name.
const NAME: usize = 64;

/// Seconds that a key with an expiry may live: a minute to ten years.
const LIFETIME_S: RangeInclusive<u64> = 60..=3650 * 86_400;

/// Why keys are not changed as asked; other errors are those of the system.
#[derive(Debug)]
pub struct Refusal {
    /// What is wrong.
    pub kind: RefusalKind,
    message: String,
}

/// What is wrong with a change of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// The name is no name of a key.
    Name,
    /// There is no such profile.
    Profile,
    /// The lifetime is too short or too long.
    Lifetime,
    /// Another key has the name.
    Taken,
    /// There is no such key.
    Unknown,
    /// The key is revoked already.
    Revoked,
    /// Without the key, no operator has one.
    LastOperator,
    /// The file has no room for another key.
    Full,
    /// Another process changes keys.
    Locked,
}

impl Refusal {
    fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

/// What a new key is to be.
#[derive(Debug, Clone)]
pub struct NewKey {
    /// Chosen by the operator.
    pub name: String,
    /// What it opens.
    pub opens: Opens,
    /// Seconds until it expires; `None` for never.
    pub lifetime_s: Option<u64>,
}

/// A key that was created.
pub struct Created {
    /// The key, which is nowhere else.
    pub key: String,
    /// What is kept of it.
    pub entry: Key,
    /// What its creator has to know.
    pub notes: Vec<String>,
}

/// Whether the last working key of an operator may be revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastOperator {
    /// It is refused.
    Stays,
    /// It is done, with a note.
    MayGo,
}

/// The keys of a data folder, which nobody else changes meanwhile.
pub struct Editing<'a> {
    path: PathBuf,
    keys: Keys,
    configured: &'a Configured,
    /// Unlocks when it is dropped.
    _lock: File,
}

impl<'a> Editing<'a> {
    /// Locks and reads the keys in `data_dir`. Blocks for at most ten seconds.
    ///
    /// # Errors
    /// If the file cannot be read, or another process changes it for longer.
    pub fn begin(data_dir: &Path, configured: &'a Configured) -> Result<Self> {
        let lock = lock_within(&data_dir.join(LOCK), LOCK_WAIT)?;
        let path = data_dir.join(FILE);
        let keys = Keys::read(&path)?;
        Ok(Self { path, keys, configured, _lock: lock })
    }

    /// All keys, in the order of their creation.
    pub fn keys(&self) -> &[Key] {
        &self.keys.keys
    }

    /// Whether a key of an operator works, here or in the configuration.
    pub fn has_operator(&self) -> bool {
        self.configured.has_operators || self.keys.has_operator_besides(None, Timestamp::now())
    }

    /// Creates a key.
    ///
    /// # Errors
    /// A [`Refusal`]; or the file cannot be written.
    pub fn create(&mut self, new: &NewKey) -> Result<Created> {
        self.check(new)?;
        let mut notes: Vec<String> = self.closed_by(&new.opens).into_iter().collect();
        let created = Timestamp::now();
        let expires = new.lifetime_s.map(|seconds| expiry(created, seconds)).transpose()?;
        if new.opens == Opens::Operator && expires.is_some() && !self.has_operator() {
            notes.push(
                "this is the only key of an operator: create another before it expires, or create one on the \
                 server's machine with `steersman keys create NAME --operator`"
                    .into(),
            );
        }
        let mut bytes = [0; BYTES];
        getrandom::fill(&mut bytes).map_err(|error| anyhow!("no randomness: {error}"))?;
        let key = format!("{PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes));
        let entry = Key {
            name: new.name.clone(),
            prefix: key[..SHOWN].into(),
            sha256: Sha256::digest(&key).into(),
            opens: new.opens.clone(),
            created,
            expires,
            revoked: None,
        };
        self.keys.keys.push(entry.clone());
        self.write()?;
        Ok(Created { key, entry, notes })
    }

    /// Revokes the newest key `name`. Returns it, and what its owner has to know.
    ///
    /// # Errors
    /// A [`Refusal`]; or the file cannot be written.
    pub fn revoke(&mut self, name: &str, last: LastOperator) -> Result<(Key, Vec<String>)> {
        // Of several keys with this name, all but the newest are revoked.
        let known = self.keys.keys.iter().rposition(|key| key.name == name);
        let index = known.ok_or_else(|| {
            let near = suggestion(name, self.keys.keys.iter().map(|key| key.name.as_str()));
            let message = format!("there is no key `{name}`; see `steersman keys list`{near}");
            Refusal::new(RefusalKind::Unknown, message)
        })?;
        let now = Timestamp::now();
        let key = &self.keys.keys[index];
        let state = key.state_at(now);
        if state == State::Revoked {
            let message = format!("the key `{name}` is already revoked");
            return Err(Refusal::new(RefusalKind::Revoked, message).into());
        }
        let is_last = key.opens == Opens::Operator
            && state == State::Active
            && !self.configured.has_operators
            && !self.keys.has_operator_besides(Some(index), now);
        let mut notes = Vec::new();
        if is_last {
            let effect = format!(
                "`{name}` is the last key of an operator: without it nobody can change this server over HTTP until \
                 `steersman keys create NAME --operator` is run on its machine"
            );
            if last == LastOperator::Stays {
                return Err(Refusal::new(RefusalKind::LastOperator, effect).into());
            }
            notes.push(effect);
        }
        let key = &mut self.keys.keys[index];
        key.revoked = Some(now);
        let revoked = key.clone();
        self.write()?;
        notes.extend(self.stays_closed(&revoked, now));
        Ok((revoked, notes))
    }

    /// A note if nobody has a key to what the key `revoked` opened, which stays closed.
    fn stays_closed(&self, revoked: &Key, now: Timestamp) -> Option<String> {
        let (what, option, in_configuration) = match &revoked.opens {
            Opens::AllProfiles => {
                ("this server".to_owned(), String::new(), self.configured.is_closed)
            }
            Opens::Profile(name) => {
                let has_keys = self.configured.closed_profiles.contains(name);
                (format!("the profile `{name}`"), format!(" --profile {name}"), has_keys)
            }
            Opens::Operator => return None,
        };
        // An operator's key opens everything.
        if self.has_operator() {
            return None;
        }
        let opens = |key: &Key| key.opens == revoked.opens && key.state_at(now) == State::Active;
        if in_configuration || self.keys.keys.iter().any(opens) {
            return None;
        }
        let folder = self.path.parent().unwrap_or(Path::new(".")).display();
        Some(format!(
            "this was the last key of {what}, which stays closed to requests without one: `steersman keys create \
             NAME{option}` makes another. To open it to everyone, stop the server, delete {FILE} in {folder}, with all keys, \
             and start it again"
        ))
    }

    /// Refuses what no key can be.
    fn check(&self, new: &NewKey) -> Result<(), Refusal> {
        let name = &new.name;
        let is_plain = !name.is_empty()
            && name.len() <= NAME
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.@".contains(c));
        if !is_plain {
            let message = format!(
                "`{name}` is no name of a key: use 1 to {NAME} letters, digits, and - _ . @"
            );
            return Err(Refusal::new(RefusalKind::Name, message));
        }
        // Only a revoked key leaves its name to a new one: an expired one would be hidden behind it.
        if self.keys.keys.iter().any(|key| key.name == *name && key.revoked.is_none()) {
            let message = format!(
                "there is a key `{name}` already; choose another name, or revoke it first with \
                 `steersman keys revoke {name}`"
            );
            return Err(Refusal::new(RefusalKind::Taken, message));
        }
        let profiles = &self.configured.profiles;
        if let Opens::Profile(profile) = &new.opens
            && profile != "default"
            && !profiles.contains(profile)
        {
            let near = suggestion(profile, profiles.iter().map(String::as_str));
            let message = format!(
                "the configuration has no profile `{profile}`; name its file with --config{near}"
            );
            return Err(Refusal::new(RefusalKind::Profile, message));
        }
        Ok(())
    }

    /// What a first key of its kind closes to requests without a key, in words.
    fn closed_by(&self, opens: &Opens) -> Option<String> {
        let is_closed = self.configured.is_closed || self.keys.has_client_key();
        let closed = match opens {
            Opens::Operator => None,
            _ if is_closed => None,
            Opens::AllProfiles => Some("this server".to_string()),
            Opens::Profile(name) => {
                let is_first = !self.configured.closed_profiles.contains(name)
                    && self.keys.keys.iter().all(|key| key.opens != *opens);
                is_first.then(|| format!("the profile `{name}`"))
            }
        };
        closed.map(|closed| {
            format!(
                "this is the first key of {closed}: from now on, requests without a key are refused there"
            )
        })
    }

    /// Replaces the file at once: a reader sees the old one or the new one, and only this user reads it.
    fn write(&self) -> Result<()> {
        let text = serde_json::to_vec_pretty(&self.keys)?;
        // It could not be read any more, and all keys would be refused.
        if text.len() as u64 > FILE_BYTES {
            let message = format!(
                "{} has no room for another key: remove revoked keys from it",
                self.path.display()
            );
            return Err(Refusal::new(RefusalKind::Full, message).into());
        }
        steersman_files::replace_private(&self.path, &text)
            .with_context(|| format!("writing {}", self.path.display()))
    }
}

/// Seconds of a lifetime as `12h` or `30d`.
///
/// # Errors
/// If it is none, in words.
pub fn lifetime_s(text: &str) -> Result<u64, String> {
    let seconds = Unit::Seconds.number(text).filter(|seconds| LIFETIME_S.contains(seconds));
    seconds.ok_or_else(|| {
        format!("`{text}` is no lifetime: use a duration from 1m to 3650d, such as 12h or 30d")
    })
}

/// The end of a lifetime of `seconds`.
fn expiry(created: Timestamp, seconds: u64) -> Result<Timestamp> {
    let end = i64::try_from(seconds)
        .ok()
        .filter(|_| LIFETIME_S.contains(&seconds))
        .and_then(|seconds| created.checked_add(SignedDuration::from_secs(seconds)).ok());
    end.ok_or_else(|| {
        let message = format!("a key cannot live for {seconds} s: use a minute to ten years");
        Refusal::new(RefusalKind::Lifetime, message).into()
    })
}

/// The lock at `path`, once no other process has it.
fn lock_within(path: &Path, wait: Duration) -> Result<File> {
    let lock =
        steersman_files::open_lock(path).with_context(|| format!("opening {}", path.display()))?;
    let deadline = Instant::now() + wait;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => sleep(LOCK_RETRY),
            Err(TryLockError::WouldBlock) => {
                let message = format!(
                    "another process changes keys and holds {} for {} s: end it, and try again",
                    path.display(),
                    wait.as_secs()
                );
                return Err(Refusal::new(RefusalKind::Locked, message).into());
            }
            Err(TryLockError::Error(error)) => {
                return Err(anyhow!(error).context(format!("locking {}", path.display())));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes_are_bounded() {
        for (text, seconds) in
            [("1m", 60), ("90s", 90), ("12h", 43_200), ("30d", 30 * 86_400), ("2 weeks", 1_209_600)]
        {
            assert_eq!(lifetime_s(text), Ok(seconds), "{text}");
        }
        for text in ["", "30", "59s", "0s", "-1d", "3651d", "1 month", "never", "99999999999999d"] {
            let problem = lifetime_s(text).unwrap_err();
            assert!(problem.contains("from 1m to 3650d"), "{text}: {problem}");
        }
        let now: Timestamp = "9999-12-01T00:00:00Z".parse().unwrap();
        assert!(expiry(now, 60).is_ok() && expiry(now, 86_400 * 365).is_err());
        assert!(expiry(Timestamp::UNIX_EPOCH, u64::MAX).is_err());
    }

    /// A process that never let the lock go kept every other one waiting.
    #[test]
    fn a_lock_that_is_held_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(LOCK);
        let held = lock_within(&path, Duration::ZERO).unwrap();
        let refused = lock_within(&path, Duration::ZERO).unwrap_err();
        let refusal = refused.downcast_ref::<Refusal>().unwrap();
        assert_eq!(refusal.kind, RefusalKind::Locked, "{refusal}");
        drop(held);
        assert!(lock_within(&path, Duration::ZERO).is_ok());
    }

    fn operator(name: &str, lifetime_s: Option<u64>) -> NewKey {
        NewKey { name: name.into(), opens: Opens::Operator, lifetime_s }
    }

    #[test]
    fn the_last_key_of_an_operator_goes_with_a_word_only() {
        let folder = tempfile::tempdir().unwrap();
        let configured = Configured::default();
        let mut keys = Editing::begin(folder.path(), &configured).unwrap();
        let first = keys.create(&operator("me", Some(3600))).unwrap();
        assert!(first.notes[0].contains("only key of an operator"), "{:?}", first.notes);
        let kind = |error: anyhow::Error| error.downcast_ref::<Refusal>().map(|r| r.kind);
        let refused = keys.revoke("me", LastOperator::Stays).unwrap_err();
        assert_eq!(kind(refused), Some(RefusalKind::LastOperator));
        let second = keys.create(&operator("you", Some(3600))).unwrap();
        assert!(second.notes.is_empty(), "{:?}", second.notes);
        let (_, notes) = keys.revoke("me", LastOperator::Stays).unwrap();
        assert!(notes.is_empty(), "{notes:?}");
        let (_, notes) = keys.revoke("you", LastOperator::MayGo).unwrap();
        assert!(notes[0].contains("the last key of an operator"), "{notes:?}");
        drop(keys);
        // Those of the configuration remain.
        let configured = Configured { has_operators: true, ..Configured::default() };
        let mut keys = Editing::begin(folder.path(), &configured).unwrap();
        assert!(keys.create(&operator("me", Some(3600))).unwrap().notes.is_empty());
        assert!(keys.revoke("me", LastOperator::Stays).unwrap().1.is_empty());
    }
}
