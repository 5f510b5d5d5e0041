//! Versions of policies that were once in force, in redb: what a rollback goes back to, and what a
//! start falls back on where a file is broken.

use std::sync::Arc;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::hex;

/// Most good versions that are kept of one policy, and as many that were withdrawn.
pub const VERSIONS: usize = 8;

/// Name of a policy: its versions as JSON, oldest first.
const LISTS: TableDefinition<&str, &[u8]> = TableDefinition::new("policy versions");

/// Name of a policy, and SHA-256 in hex: the component.
const COMPONENTS: TableDefinition<(&str, &str), &[u8]> = TableDefinition::new("policy components");

/// How a version came here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// It ships inside the binary.
    Shipped,
    /// It was in the policy's file.
    File,
    /// It came by `POST /v1/policies/NAME`.
    Upload,
    /// It was kept from earlier, and brought back.
    Kept,
}

impl Origin {
    /// Its name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shipped => "shipped",
            Self::File => "file",
            Self::Upload => "upload",
            Self::Kept => "kept",
        }
    }
}

/// A version that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Of its component, in hex.
    pub sha256: String,
    /// Size of its component.
    pub bytes: usize,
    /// How it came.
    pub origin: Origin,
    /// When it last came into force, in seconds since 1970.
    pub since: u64,
    /// Why it is not gone back to; `None` for good ones.
    pub withdrawn: Option<Withdrawn>,
}

/// Why a version is not gone back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Withdrawn {
    /// It failed, so; a start does not load it from its file either.
    Failed(String),
    /// An operator went back from it to an earlier one.
    RolledBack,
}

/// All versions of all policies.
pub struct Versions {
    database: Arc<Database>,
}

impl Versions {
    /// Those in `database`.
    pub fn new(database: Arc<Database>) -> Self {
        Self { database }
    }

    /// The versions of a policy, oldest first.
    ///
    /// # Errors
    /// As [`Versions::record`].
    pub fn list(&self, policy: &str) -> Result<Vec<Kept>, redb::Error> {
        let read = self.database.begin_read()?;
        match read.open_table(LISTS) {
            Err(redb::TableError::TableDoesNotExist(_)) => Ok(Vec::new()),
            table => Ok(parse(policy, table?.get(policy)?.map(|list| list.value().to_vec()))),
        }
    }

    /// The component of a version; `None` where it is not there, or damaged.
    ///
    /// # Errors
    /// As [`Versions::record`].
    pub fn component(&self, policy: &str, sha256: &str) -> Result<Option<Vec<u8>>, redb::Error> {
        let read = self.database.begin_read()?;
        let table = match read.open_table(COMPONENTS) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            table => table?,
        };
        let component = table.get((policy, sha256))?.map(|bytes| bytes.value().to_vec());
        Ok(component.filter(|bytes| hex(&Sha256::digest(bytes)) == sha256))
    }

    /// Notes that a version came into force, good until it is withdrawn.
    ///
    /// # Errors
    /// When the database cannot be used; nothing has changed then.
    pub fn record(&self, policy: &str, version: Kept, component: &[u8]) -> Result<(), redb::Error> {
        self.change(policy, |list, components| {
            list.retain(|kept| kept.sha256 != version.sha256);
            let key = (policy, version.sha256.as_str());
            if components.get(key)?.is_none() {
                components.insert(key, component)?;
            }
            list.push(version);
            for good in [true, false] {
                let of_kind = |kept: &Kept| kept.withdrawn.is_none() == good;
                let count = list.iter().filter(|kept| of_kind(kept)).count();
                for _ in VERSIONS..count {
                    let oldest = list.iter().position(of_kind).expect("there are some");
                    components.remove((policy, list.remove(oldest).sha256.as_str()))?;
                }
            }
            Ok(())
        })
    }

    /// Notes that a version is not to be gone back to.
    ///
    /// # Errors
    /// As [`Versions::record`].
    pub fn withdraw(&self, policy: &str, sha256: &str, why: Withdrawn) -> Result<(), redb::Error> {
        self.change(policy, |list, _| {
            if let Some(kept) = list.iter_mut().find(|kept| kept.sha256 == sha256) {
                kept.withdrawn = Some(why);
            }
            Ok(())
        })
    }

    fn change(
        &self,
        policy: &str,
        change: impl FnOnce(
            &mut Vec<Kept>,
            &mut redb::Table<(&'static str, &'static str), &'static [u8]>,
        ) -> Result<(), redb::Error>,
    ) -> Result<(), redb::Error> {
        let write = self.database.begin_write()?;
        {
            let mut lists = write.open_table(LISTS)?;
            let mut list = parse(policy, lists.get(policy)?.map(|list| list.value().to_vec()));
            change(&mut list, &mut write.open_table(COMPONENTS)?)?;
            let list = serde_json::to_vec(&list).expect("plain data becomes JSON");
            lists.insert(policy, list.as_slice())?;
        }
        Ok(write.commit()?)
    }
}

/// A list that cannot be read is begun anew: what it named is of no use to anyone else.
fn parse(policy: &str, list: Option<Vec<u8>>) -> Vec<Kept> {
    let Some(list) = list else { return Vec::new() };
    serde_json::from_slice(&list).unwrap_or_else(|error| {
        tracing::warn!(policy, %error, "the versions kept of it are lost");
        Vec::new()
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::disk;
    use super::*;

    fn version(component: &[u8], since: u64) -> Kept {
        let sha256 = hex(&Sha256::digest(component));
        Kept { sha256, bytes: component.len(), origin: Origin::File, since, withdrawn: None }
    }

    #[test]
    fn the_last_good_versions_are_kept_and_no_component_without_its_version() {
        let versions = Versions::new(disk::in_memory().database);
        assert_eq!(versions.list("a").unwrap(), []);
        assert_eq!(versions.component("a", "00").unwrap(), None);
        let bytes: Vec<[u8; 1]> = (0..12).map(|n| [n]).collect();
        for (since, bytes) in bytes.iter().enumerate() {
            versions.record("a", version(bytes, since as u64), bytes).unwrap();
            versions.record("b", version(bytes, since as u64), bytes).unwrap();
            if since < 2 {
                let sha256 = version(bytes, 0).sha256;
                versions.withdraw("a", &sha256, Withdrawn::RolledBack).unwrap();
            }
        }
        let since = |list: Vec<Kept>| list.into_iter().map(|kept| kept.since).collect::<Vec<_>>();
        assert_eq!(since(versions.list("a").unwrap()), [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(since(versions.list("b").unwrap()), [4, 5, 6, 7, 8, 9, 10, 11]);
        for (n, bytes) in bytes.iter().enumerate() {
            let component = versions.component("b", &version(bytes, 0).sha256).unwrap();
            assert_eq!(component, (n >= 4).then(|| bytes.to_vec()));
        }
        // What comes back is the newest, and good again.
        versions.record("a", version(&bytes[0], 12), &bytes[0]).unwrap();
        let list = versions.list("a").unwrap();
        assert_eq!(since(list.clone()), [1, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(list.last().unwrap().withdrawn, None);
    }
}
