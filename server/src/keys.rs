//! `steersman keys`: keys with names, in the data folder, where a running server finds them at once.
//!
//! The file `keys.json` has the SHA-256 of each key, never the key: keys have 256 random bits, so that no salt and no
//! slow hash is needed. A revoked key stays listed, and what it opened stays closed: revoking the last key opens a
//! server to nobody. Keys in the configuration are separate.

use std::fs::Metadata;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use clap::{Args, Subcommand};
use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::words::suggestion;

/// Name of the file in the data folder.
pub const FILE: &str = "keys.json";

/// Name of the file beside it that a command locks while it changes keys.
const LOCK: &str = "keys.lock";

/// Most bytes of the file: some 60,000 keys.
const FILE_BYTES: u64 = 16 << 20;

/// What keys begin with.
const PREFIX: &str = "sk-";

/// Random bytes of a key.
const BYTES: usize = 32;

/// Characters of a key that are shown in lists.
const SHOWN: usize = 11;

/// Most characters of a name.
const NAME: usize = 64;

/// SHA-256 of a key: digests have equal length, so comparing them takes constant time.
pub type KeyDigest = [u8; 32];

/// A task on the keys.
#[derive(Subcommand)]
pub enum Task {
    /// Create a key and print it, this one time.
    Create(Create),
    /// List the keys: name, beginning, what each opens, when it was created and revoked.
    List,
    /// Revoke a key: a running server refuses it from now on.
    Revoke {
        /// Name of the key
        name: String,
    },
}

/// Options of `create`.
#[derive(Args)]
pub struct Create {
    /// Name of the key, which lists show
    name: String,
    /// The key opens this profile only, which its requests use without naming it
    #[arg(long, conflicts_with = "operator")]
    profile: Option<String>,
    /// The key opens everything, as server.admin_keys do
    #[arg(long)]
    operator: bool,
}

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
    created: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    revoked: Option<Timestamp>,
}

impl Key {
    /// The digest, unless the key is revoked.
    pub fn digest(&self) -> Option<KeyDigest> {
        self.revoked.is_none().then_some(self.sha256)
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

    /// Replaces the file at once: a reader sees the old one or the new one, and only this user reads it.
    fn write(&self, path: &Path) -> Result<()> {
        Ok(steersman_files::replace_private(path, &serde_json::to_vec_pretty(self)?)?)
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
}

/// Runs a task on the keys in `data_dir`.
///
/// # Errors
/// If the name is taken or unknown, the profile does not exist, or the file cannot be read or written.
pub fn run(
    task: &Task,
    configured: &Configured,
    data_dir: &Path,
    out: &mut impl Write,
) -> Result<()> {
    let path = data_dir.join(FILE);
    // Two commands at the same time would lose the key of one.
    let lock_path = data_dir.join(LOCK);
    let lock = steersman_files::open_lock(&lock_path)
        .with_context(|| format!("opening {}", lock_path.display()))?;
    lock.lock().with_context(|| format!("locking {}", lock_path.display()))?;
    let mut keys = Keys::read(&path)?;
    match task {
        Task::Create(options) => {
            let closed = options.closes(&keys, configured);
            let key = options.create(&mut keys, &configured.profiles)?;
            keys.write(&path).with_context(|| format!("writing {}", path.display()))?;
            if let Some(closed) = closed {
                tracing::warn!(
                    "this is the first key of {closed}: from now on, requests without a key are refused there"
                );
            }
            writeln!(out, "{key}")?;
        }
        Task::List => list(&keys, out)?,
        Task::Revoke { name } => {
            // Of several keys with this name, all but the newest are revoked.
            let known = keys.keys.iter().rposition(|key| key.name == *name);
            let index = known.with_context(|| {
                let near = suggestion(name, keys.keys.iter().map(|key| key.name.as_str()));
                format!("there is no key `{name}`; see `steersman keys list`{near}")
            })?;
            let key = &mut keys.keys[index];
            ensure!(key.revoked.is_none(), "the key `{name}` is already revoked");
            key.revoked = Some(Timestamp::now());
            let prefix = key.prefix.clone();
            keys.write(&path).with_context(|| format!("writing {}", path.display()))?;
            writeln!(out, "revoked {name} ({prefix}..)")?;
        }
    }
    Ok(())
}

impl Create {
    /// What the key closes to requests without a key, as the first of its kind in `keys` and the configuration.
    fn closes(&self, keys: &Keys, configured: &Configured) -> Option<String> {
        if self.operator || configured.is_closed || keys.has_client_key() {
            return None;
        }
        let Some(name) = &self.profile else { return Some("this server".into()) };
        let opens = Opens::Profile(name.clone());
        let is_first = !configured.closed_profiles.contains(name)
            && keys.keys.iter().all(|key| key.opens != opens);
        is_first.then(|| format!("the profile `{name}`"))
    }

    /// Adds a key to `keys`, and returns it.
    fn create(&self, keys: &mut Keys, profiles: &[String]) -> Result<String> {
        let Self { name, profile, operator } = self;
        let is_plain = !name.is_empty()
            && name.len() <= NAME
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.@".contains(c));
        ensure!(
            is_plain,
            "`{name}` is no name of a key: use 1 to {NAME} letters, digits, and - _ . @"
        );
        // Only a revoked key leaves its name to a new one.
        let is_free = keys.keys.iter().all(|key| key.name != *name || key.revoked.is_some());
        ensure!(
            is_free,
            "there is a key `{name}` already; choose another name, or revoke it first with \
             `steersman keys revoke {name}`"
        );
        if let Some(profile) = profile {
            let is_known = profile == "default" || profiles.contains(profile);
            ensure!(
                is_known,
                "the configuration has no profile `{profile}`; name its file with --config{}",
                suggestion(profile, profiles.iter().map(String::as_str))
            );
        }
        let mut bytes = [0; BYTES];
        getrandom::fill(&mut bytes).map_err(|error| anyhow!("no randomness: {error}"))?;
        let key = format!("{PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes));
        keys.keys.push(Key {
            name: name.clone(),
            prefix: key[..SHOWN].into(),
            sha256: Sha256::digest(&key).into(),
            opens: match profile {
                Some(profile) => Opens::Profile(profile.clone()),
                None if *operator => Opens::Operator,
                None => Opens::AllProfiles,
            },
            created: Timestamp::now(),
            revoked: None,
        });
        Ok(key)
    }
}

fn list(keys: &Keys, out: &mut impl Write) -> Result<()> {
    if keys.keys.is_empty() {
        writeln!(out, "no keys; create one with `steersman keys create NAME`")?;
        return Ok(());
    }
    let width = keys.keys.iter().map(|key| key.name.len()).max().unwrap_or_default().max(4);
    let opens = |key: &Key| match &key.opens {
        Opens::AllProfiles => "all profiles".to_string(),
        Opens::Operator => "everything".into(),
        Opens::Profile(name) => format!("profile {name}"),
    };
    let second = |time: Timestamp| time.strftime("%Y-%m-%d %H:%M:%SZ").to_string();
    let opened = keys.keys.iter().map(|key| opens(key).len()).max().unwrap_or_default().max(5);
    writeln!(
        out,
        "{:width$}  {:13}  {:opened$}  {:20}  revoked",
        "name", "key", "opens", "created"
    )?;
    for key in &keys.keys {
        let (opens, created) = (opens(key), second(key.created));
        let revoked = key.revoked.map(second).unwrap_or_default();
        let line =
            format!("{:width$}  {}..  {opens:opened$}  {created}  {revoked}", key.name, key.prefix);
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// The file of a running server, which is read again when it has changed.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    /// What was last read.
    last: Mutex<(Option<Stamp>, Keys)>,
}

/// What changes when a file is replaced, or becomes readable.
#[derive(Debug, PartialEq)]
struct Stamp {
    modified: Option<std::time::SystemTime>,
    bytes: u64,
    inode: u64,
    /// Seconds and nanoseconds of the last change of owner, permissions or content.
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        #[cfg(unix)]
        let (inode, changed) = {
            use std::os::unix::fs::MetadataExt;
            (metadata.ino(), (metadata.ctime(), metadata.ctime_nsec()))
        };
        #[cfg(not(unix))]
        let (inode, changed) = (0, (0, 0));
        Self { modified: metadata.modified().ok(), bytes: metadata.len(), inode, changed }
    }
}

impl KeyFile {
    /// The file in `data_dir`, which may be missing.
    ///
    /// # Errors
    /// As [`Keys::read`].
    pub fn open(data_dir: &Path) -> Result<Self> {
        let path = data_dir.join(FILE);
        let stamp = stamp(&path);
        let keys = Keys::read(&path)?;
        Ok(Self { path, last: Mutex::new((stamp, keys)) })
    }

    /// The keys that were last read.
    pub fn keys(&self) -> Keys {
        self.last.lock().1.clone()
    }

    /// The keys, if the file has changed since they were last read. Without the file, or with one that is damaged or
    /// cannot be read, all keys are revoked.
    pub fn changed(&self) -> Option<Keys> {
        let stamp = stamp(&self.path);
        let mut last = self.last.lock();
        if last.0 == stamp {
            return None;
        }
        let path = self.path.display();
        let keys = match Keys::read(&self.path) {
            Ok(keys) if stamp.is_some() => {
                tracing::info!(%path, keys = keys.keys.len(), "keys read again");
                keys
            }
            Ok(_) => {
                tracing::error!(%path, "file of keys is gone; refusing its keys");
                last.1.revoked()
            }
            Err(error) => {
                let text = format!("{error:#}");
                // A file that can be read and is wrong has no error of the system.
                if error.downcast_ref::<std::io::Error>().is_some() {
                    tracing::error!(error = text, "file of keys cannot be read; refusing its keys");
                } else {
                    tracing::error!(error = text, "file of keys is damaged; refusing its keys");
                }
                last.1.revoked()
            }
        };
        *last = (stamp, keys.clone());
        Some(keys)
    }
}

/// The stamp of the file at `path`, if there is one.
fn stamp(path: &Path) -> Option<Stamp> {
    std::fs::metadata(path).ok().map(|metadata| Stamp::of(&metadata))
}

impl Keys {
    /// The same keys, all revoked.
    fn revoked(&self) -> Self {
        let now = Timestamp::now();
        let revoke = |key: &Key| Key { revoked: key.revoked.or(Some(now)), ..key.clone() };
        Self { keys: self.keys.iter().map(revoke).collect() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The task that creates a key for all profiles.
    pub fn create(name: &str) -> Task {
        Task::Create(Create { name: name.into(), profile: None, operator: false })
    }
}
