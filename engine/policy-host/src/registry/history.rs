//! Earlier versions of policies, in redb, for rollbacks and for a start with a broken file.

use std::sync::Arc;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Versions in the history of one policy, and as many that were withdrawn.
const HISTORY: usize = 8;

/// By name of the policy: its versions as JSON, oldest first.
const LISTS: TableDefinition<&str, &[u8]> = TableDefinition::new("policy versions");

/// By name of the policy and SHA-256 in hex: the component.
const COMPONENTS: TableDefinition<(&str, &str), &[u8]> = TableDefinition::new("policy components");

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

/// Versions of all policies.
pub struct History {
    database: Arc<Database>,
}

impl History {
    /// The history in `database`.
    pub fn new(database: Arc<Database>) -> Self {
        Self { database }
    }

    /// The versions of a policy, oldest first.
    ///
    /// # Errors
    /// As [`History::record`].
    pub fn list(&self, policy: &str) -> Result<Vec<HistoryEntry>, redb::Error> {
        let read = self.database.begin_read()?;
        match read.open_table(LISTS) {
            Err(redb::TableError::TableDoesNotExist(_)) => Ok(Vec::new()),
            table => Ok(parse(policy, table?.get(policy)?.map(|list| list.value().to_vec()))),
        }
    }

    /// The component of a version; `None` if it is missing or damaged.
    ///
    /// # Errors
    /// As [`History::record`].
    pub fn component(&self, policy: &str, sha256: &str) -> Result<Option<Vec<u8>>, redb::Error> {
        let read = self.database.begin_read()?;
        let table = match read.open_table(COMPONENTS) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            table => table?,
        };
        let component = table.get((policy, sha256))?.map(|bytes| bytes.value().to_vec());
        Ok(component.filter(|bytes| hex::encode(Sha256::digest(bytes)) == sha256))
    }

    /// Adds a version that was activated.
    ///
    /// # Errors
    /// When the database cannot be used; it is then unchanged.
    pub fn record(
        &self,
        policy: &str,
        version: HistoryEntry,
        component: &[u8],
    ) -> Result<(), redb::Error> {
        self.change(policy, |list, components| {
            list.retain(|entry| entry.sha256 != version.sha256);
            let key = (policy, version.sha256.as_str());
            if components.get(key)?.is_none() {
                components.insert(key, component)?;
            }
            list.push(version);
            for withdrawn in [false, true] {
                let of_kind = |entry: &HistoryEntry| entry.withdrawn.is_some() == withdrawn;
                let count = list.iter().filter(|entry| of_kind(entry)).count();
                for _ in HISTORY..count {
                    let oldest = list.iter().position(of_kind).expect("count is not zero");
                    components.remove((policy, list.remove(oldest).sha256.as_str()))?;
                }
            }
            Ok(())
        })
    }

    /// Marks a version so that rollbacks skip it.
    ///
    /// # Errors
    /// As [`History::record`].
    pub fn withdraw(&self, policy: &str, sha256: &str, why: Withdrawn) -> Result<(), redb::Error> {
        self.change(policy, |list, _| {
            if let Some(entry) = list.iter_mut().find(|entry| entry.sha256 == sha256) {
                entry.withdrawn = Some(why);
            }
            Ok(())
        })
    }

    fn change(
        &self,
        policy: &str,
        change: impl FnOnce(
            &mut Vec<HistoryEntry>,
            &mut redb::Table<(&'static str, &'static str), &'static [u8]>,
        ) -> Result<(), redb::Error>,
    ) -> Result<(), redb::Error> {
        let write = self.database.begin_write()?;
        {
            let mut lists = write.open_table(LISTS)?;
            let mut list = parse(policy, lists.get(policy)?.map(|list| list.value().to_vec()));
            change(&mut list, &mut write.open_table(COMPONENTS)?)?;
            let list = serde_json::to_vec(&list).expect("plain data serializes");
            lists.insert(policy, list.as_slice())?;
        }
        Ok(write.commit()?)
    }
}

/// A list that cannot be parsed is replaced by an empty one.
fn parse(policy: &str, list: Option<Vec<u8>>) -> Vec<HistoryEntry> {
    let Some(list) = list else { return Vec::new() };
    serde_json::from_slice(&list).unwrap_or_else(|error| {
        tracing::warn!(policy, %error, "version history unreadable; starting empty");
        Vec::new()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::Storage;

    fn version(component: &[u8], since: u64) -> HistoryEntry {
        let sha256 = hex::encode(Sha256::digest(component));
        HistoryEntry {
            sha256,
            bytes: component.len(),
            origin: Origin::File,
            since,
            withdrawn: None,
        }
    }

    #[test]
    fn old_versions_are_removed_with_their_components() {
        let history = History::new(Storage::in_memory().database);
        assert_eq!(history.list("a").unwrap(), []);
        assert_eq!(history.component("a", "00").unwrap(), None);
        let bytes: Vec<[u8; 1]> = (0..12).map(|n| [n]).collect();
        for (since, bytes) in bytes.iter().enumerate() {
            history.record("a", version(bytes, since as u64), bytes).unwrap();
            history.record("b", version(bytes, since as u64), bytes).unwrap();
            if since < 2 {
                let sha256 = version(bytes, 0).sha256;
                history.withdraw("a", &sha256, Withdrawn::RolledBack).unwrap();
            }
        }
        let since =
            |list: Vec<HistoryEntry>| list.into_iter().map(|entry| entry.since).collect::<Vec<_>>();
        assert_eq!(since(history.list("a").unwrap()), [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(since(history.list("b").unwrap()), [4, 5, 6, 7, 8, 9, 10, 11]);
        for (n, bytes) in bytes.iter().enumerate() {
            let component = history.component("b", &version(bytes, 0).sha256).unwrap();
            assert_eq!(component, (n >= 4).then(|| bytes.to_vec()));
        }
        // Recording a withdrawn version again makes it the newest, and usable.
        history.record("a", version(&bytes[0], 12), &bytes[0]).unwrap();
        let list = history.list("a").unwrap();
        assert_eq!(since(list.clone()), [1, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(list.last().unwrap().withdrawn, None);
    }
}
