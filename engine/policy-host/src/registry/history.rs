//! Earlier versions of a policy, in the database, for rollbacks and for a start with a broken file.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::database::{Database, Key};

/// Versions in the history of one policy, and as many that were withdrawn.
const HISTORY: usize = 8;

/// Name of the record with the list of versions; those of components are their SHA-256 in hex.
const LIST: &str = "versions";

/// Origin of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Inside the binary.
    Shipped,
    /// The file of the policy.
    File,
    /// `POST /v1/policies/NAME`.
    Upload,
    /// The history, by a rollback.
    History,
}

impl Origin {
    /// Its name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shipped => "shipped",
            Self::File => "file",
            Self::Upload => "upload",
            Self::History => "history",
        }
    }
}

/// A version in the history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryEntry {
    /// SHA-256 of the component, in hex.
    pub sha256: String,
    /// Size of the component.
    pub bytes: usize,
    /// Its origin.
    pub origin: Origin,
    /// Time of its last activation, in seconds since 1970.
    pub since: u64,
    /// Why a rollback skips it; `None` if it does not.
    pub withdrawn: Option<Withdrawn>,
}

/// Why a rollback skips a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Withdrawn {
    /// It failed its probation, with this reason. A start does not load it from its file either.
    Failed(String),
    /// An operator rolled it back.
    RolledBack,
}

/// Versions of one policy. Changes are on disk soon after.
#[derive(Clone)]
pub struct History {
    database: Arc<Database>,
    policy: String,
    /// [`super::source::Source::identity`], under which its records are.
    identity: String,
    /// Oldest first.
    list: Vec<HistoryEntry>,
}

impl History {
    /// The history of `policy` in `database`. A list that cannot be read is replaced by an empty one.
    pub fn read(database: &Arc<Database>, policy: &str, identity: &str) -> Self {
        let mut history = Self {
            database: database.clone(),
            policy: policy.into(),
            identity: identity.into(),
            list: Vec::new(),
        };
        if let Some(list) = database.get(&history.key(LIST)) {
            history.list = serde_json::from_slice(&list).unwrap_or_else(|error| {
                tracing::warn!(policy, %error, "version history unreadable; starting empty");
                Vec::new()
            });
        }
        history
    }

    /// The versions, oldest first.
    pub fn list(&self) -> &[HistoryEntry] {
        &self.list
    }

    /// The versions that a rollback does not skip, newest first.
    pub fn usable(&self) -> impl Iterator<Item = &HistoryEntry> {
        self.list.iter().rev().filter(|entry| entry.withdrawn.is_none())
    }

    /// Why a version failed its probation, if it did.
    pub fn failure_of(&self, sha256: &str) -> Option<String> {
        match &self.list.iter().find(|entry| entry.sha256 == sha256)?.withdrawn {
            Some(Withdrawn::Failed(reason)) => Some(format!("policy `{}`: {reason}", self.policy)),
            _ => None,
        }
    }

    /// The bytes that brought a version, which [`crate::bundle::Bundle::open`] opens; `None` if they are missing
    /// or damaged.
    pub fn file(&self, sha256: &str) -> Option<Vec<u8>> {
        self.database.get(&self.key(sha256))
    }

    /// Adds a version that was activated.
    pub fn add(&mut self, version: HistoryEntry, file: &[u8]) {
        self.list.retain(|entry| entry.sha256 != version.sha256);
        // Anew, even if the version is known: it may have been signed meanwhile.
        self.database.set(self.key(&version.sha256), Some(file));
        self.list.push(version);
        for withdrawn in [false, true] {
            let of_kind = |entry: &HistoryEntry| entry.withdrawn.is_some() == withdrawn;
            while self.list.iter().filter(|entry| of_kind(entry)).count() > HISTORY {
                let oldest = self.list.iter().position(of_kind).expect("the count is not zero");
                let oldest = self.list.remove(oldest);
                self.database.set(self.key(&oldest.sha256), None);
            }
        }
        self.write();
    }

    /// Marks a version so that rollbacks skip it.
    pub fn withdraw(&mut self, sha256: &str, why: Withdrawn) {
        if let Some(entry) = self.list.iter_mut().find(|entry| entry.sha256 == sha256) {
            entry.withdrawn = Some(why);
            self.write();
        }
    }

    fn write(&self) {
        let list = serde_json::to_vec(&self.list).expect("plain data serializes");
        self.database.set(self.key(LIST), Some(&list));
    }

    fn key(&self, name: &str) -> Key {
        (String::new(), self.identity.clone(), name.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::Storage;

    fn version(since: u64) -> HistoryEntry {
        let (sha256, origin) = (since.to_string(), Origin::File);
        HistoryEntry { sha256, bytes: 1, origin, since, withdrawn: None }
    }

    #[test]
    fn old_versions_are_removed_with_their_files() {
        let database = Storage::in_memory().database;
        let read = |policy: &str| History::read(&database, policy, policy);
        let (mut a, mut b) = (read("a"), read("b"));
        assert_eq!((a.list(), a.file("0")), (&[][..], None));
        for since in 0..12 {
            a.add(version(since), &[since as u8]);
            b.add(version(since), &[since as u8]);
            if since < 2 {
                a.withdraw(&version(since).sha256, Withdrawn::RolledBack);
            }
        }
        let since = |history: &History| history.list().iter().map(|e| e.since).collect::<Vec<_>>();
        assert_eq!(since(&read("a")), [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(since(&read("b")), [4, 5, 6, 7, 8, 9, 10, 11]);
        for n in 0..12 {
            let file = b.file(&n.to_string());
            assert_eq!(file, (n >= 4).then(|| vec![n as u8]));
        }
        // Adding a withdrawn version again makes it the newest, and usable.
        a.add(HistoryEntry { since: 12, ..version(0) }, &[0]);
        assert_eq!(since(&a), [1, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(a.usable().next().map(|entry| entry.since), Some(12));
    }
}
