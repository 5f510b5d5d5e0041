//! What a download of one repo consists of, as the hub describes it and within limits.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use sha2::{Digest, Sha256};
use steersman_files::{FileName, FilePath};

use super::cache::{RepoFolder, is_digest};

/// Lists the shards of a sharded model.
pub const INDEX: &str = "model.safetensors.index.json";

/// Most bytes of the hub's answer about a repo. One file takes some 300.
pub const LIST_BYTES: u64 = 16 << 20;

/// Most files of a repo.
const FILES: usize = 20_000;

/// Most files of a model: the largest have some 200.
const WANTED: usize = 2_000;

/// Most bytes of a file that is no weights. The largest tokenizers have 40 MB.
pub const TEXT_BYTES: u64 = 128 << 20;

/// The hub's answer about a repo.
#[derive(Deserialize)]
pub struct Info {
    pub sha: String,
    #[serde(deserialize_with = "files")]
    pub siblings: Vec<Sibling>,
}

/// A file of a repo. Mirrors may leave out sizes and digests.
#[derive(Deserialize)]
pub struct Sibling {
    pub rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

/// What the hub knows about the content of a large file.
#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
}

/// What a download of one repo consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// `owner/name`
    pub repo_id: String,
    /// The commit.
    pub sha: FileName,
    /// The folder that the files appear in.
    pub snapshot: PathBuf,
    /// The folder of the repo.
    pub(super) folder: RepoFolder,
    /// The files that a model needs.
    pub files: Vec<Wanted>,
    /// The GGUF file that is the model, or its first part.
    gguf: Option<FilePath>,
}

/// A file of a repo that a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Name in the repo.
    pub name: String,
    /// The same, checked.
    pub(super) path: FilePath,
    /// Bytes, if the hub tells.
    pub size: Option<u64>,
    /// SHA-256 of its content in hex digits, if the hub tells.
    pub sha256: Option<String>,
    /// Name of its content in the cache.
    pub(super) blob: FileName,
}

/// How far a download is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file that is downloaded.
    pub file: &'a str,
    /// Bytes of all files that are on this machine.
    pub done: u64,
    /// Bytes of all files.
    pub total: u64,
}

impl Info {
    /// Reads the hub's answer.
    ///
    /// # Errors
    /// If it is not JSON of this form, or has too many files.
    pub fn parse(text: &[u8], repo_id: &str) -> Result<(Self, FileName)> {
        let info: Self = serde_json::from_slice(text)
            .with_context(|| format!("reading the hub's answer about {repo_id}"))?;
        let is_plain = info.sha.chars().all(|c| c.is_ascii_alphanumeric());
        let commit = FileName::new(&info.sha).ok().filter(|_| is_plain);
        let commit = commit.with_context(|| {
            let sha: String = info.sha.chars().take(60).collect();
            format!(
                "the hub's answer about {repo_id} names the commit `{}`, which is no digest",
                sha.escape_debug()
            )
        })?;
        Ok((info, commit))
    }
}

impl Plan {
    /// A plan without files.
    pub fn new(cache: &Path, repo_id: &str, sha: FileName) -> Result<Self> {
        let folder = RepoFolder::new(cache, repo_id)?;
        let (repo_id, snapshot) = (repo_id.into(), folder.snapshot(&sha));
        Ok(Self { repo_id, sha, snapshot, folder, files: Vec::new(), gguf: None })
    }

    /// The folder with the files, or the GGUF file or its first part.
    pub fn model(&self) -> PathBuf {
        self.gguf.as_ref().map_or_else(|| self.snapshot.clone(), |file| file.within(&self.snapshot))
    }

    /// Whether the model is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        self.gguf.is_some()
    }

    /// Makes a GGUF file, or the parts of one in their order, the only files.
    ///
    /// # Errors
    /// As [`Plan::set_files`].
    pub fn set_gguf(&mut self, parts: Vec<Wanted>) -> Result<()> {
        self.gguf = parts.first().map(|file| file.path.clone());
        self.set_files(parts)
    }

    /// Checks by `config.json`, which is here, that the family of the model is one of `families`. A GGUF file has been
    /// checked by its header.
    ///
    /// # Errors
    /// If it is another one; with those that are known.
    pub fn check_family(&self, families: &[&str]) -> Result<()> {
        if self.gguf.is_some() {
            return Ok(());
        }
        let config = self.snapshot.join("config.json");
        let family = crate::facts::family(&config).with_context(|| self.repo_id.clone())?;
        // Without a name, loading says what is missing.
        match family {
            Some(family) => crate::facts::check_family(&family, families)
                .map_err(|problem| anyhow!("{}: {problem}", self.repo_id)),
            None => Ok(()),
        }
    }

    /// `file` as a part of this plan.
    ///
    /// # Errors
    /// If its name leads out of the folder, or it has a digest that is none.
    pub fn wanted(&self, file: &Sibling) -> Result<Wanted> {
        let (repo_id, name) = (&self.repo_id, &file.rfilename);
        let path = FilePath::new(name).with_context(|| {
            let begin: String = name.chars().take(60).collect();
            format!("{repo_id} has a file `{}` outside of its folder", begin.escape_debug())
        })?;
        let digest = |text: &Option<String>, length, what| match text {
            Some(text) if !is_digest(text, length) => {
                bail!("{repo_id}: {name} has no valid {what}")
            }
            Some(text) => Ok(Some(text.to_ascii_lowercase())),
            None => Ok(None),
        };
        let sha256 = digest(&file.lfs.as_ref().and_then(|lfs| lfs.sha256.clone()), 64, "SHA-256")?;
        let blob = match &sha256 {
            Some(sha256) => Some(sha256.clone()),
            None => digest(&file.blob_id, 40, "blobId")?,
        };
        // Without a digest of the content, that of its place is as distinct. The ETag, which the content is named by in
        // caches of Python, is only a text of the hub.
        let of_place = || hex::encode(Sha256::digest(format!("{repo_id}\n{}\n{name}", self.sha)));
        let blob = FileName::new(&blob.unwrap_or_else(of_place))?;
        Ok(Wanted { name: name.clone(), path, size: file.size, sha256, blob })
    }

    /// Sets the files.
    ///
    /// # Errors
    /// If there are too many.
    pub fn set_files(&mut self, files: Vec<Wanted>) -> Result<()> {
        let count = files.len();
        ensure!(count <= WANTED, "{}: {count} files are more than {WANTED}", self.repo_id);
        super::cache::check_cases(files.iter().map(|file| file.name.as_str()))
            .with_context(|| format!("{} has two files of one name", self.repo_id))?;
        for file in &files {
            let bytes = file.size.unwrap_or(0);
            let limit = if file.is_weights() { u64::MAX } else { TEXT_BYTES };
            ensure!(
                bytes <= limit,
                "{}: {} has {bytes} bytes, which is more than the limit of {limit}",
                self.repo_id,
                file.name
            );
        }
        self.files = files;
        Ok(())
    }

    /// The plan for `files` only.
    pub fn only(&self, files: Vec<Wanted>) -> Self {
        Self { files, ..self.clone() }
    }

    /// Bytes of all files whose size the hub tells.
    pub fn bytes(&self) -> u64 {
        sum(self.files.iter().filter_map(|file| file.size))
    }

    /// Bytes of its weights.
    pub fn weight_bytes(&self) -> u64 {
        let weights = self.files.iter().filter(|file| file.is_weights());
        sum(weights.filter_map(|file| file.size))
    }

    /// Bytes of them that are on this machine, unfinished files included.
    pub fn bytes_here(&self) -> u64 {
        let here = |file: &Wanted| {
            if self.has(file) { file.size.unwrap_or(0) } else { self.part_bytes(file) }
        };
        sum(self.files.iter().map(here))
    }

    pub(super) fn has(&self, file: &Wanted) -> bool {
        fs::metadata(file.path.within(&self.snapshot)).is_ok_and(|found| file.fits(&found))
    }

    /// Bytes that have arrived of an unfinished file.
    pub(super) fn part_bytes(&self, file: &Wanted) -> u64 {
        fs::symlink_metadata(self.folder.part(&file.blob)).map_or(0, |part| part.len())
    }
}

impl Wanted {
    /// Whether it is a file of weights.
    pub fn is_weights(&self) -> bool {
        self.name.ends_with(".safetensors") || super::gguf::is_name(&self.name)
    }

    /// Whether a file with this metadata may be it.
    pub fn fits(&self, found: &fs::Metadata) -> bool {
        found.is_file() && self.size.is_none_or(|size| size == found.len())
    }
}

/// The sum, at most [`u64::MAX`]: a hub may claim any sizes.
fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// The distinct files that an index lists.
///
/// # Errors
/// If it cannot be read, or lists too many.
pub fn shards(index: &Path) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: Shards,
    }
    let context = || format!("reading {}", index.display());
    let text = steersman_files::read(index, TEXT_BYTES).with_context(context)?;
    let index: Index = serde_json::from_slice(&text).with_context(context)?;
    Ok(index.weight_map.0.into_iter().collect())
}

/// The values of a map, each once.
struct Shards(BTreeSet<String>);

impl<'de> Deserialize<'de> for Shards {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values;

        impl<'de> Visitor<'de> for Values {
            type Value = Shards;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the files of tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shards, A::Error> {
                let mut names = BTreeSet::new();
                while let Some((_, name)) = map.next_entry::<IgnoredAny, String>()? {
                    names.insert(name);
                    if names.len() > WANTED {
                        let problem = format!("it lists more than {WANTED} files");
                        return Err(serde::de::Error::custom(problem));
                    }
                }
                Ok(Shards(names))
            }
        }

        deserializer.deserialize_map(Values)
    }
}

/// The files of a repo, [`FILES`] at most.
fn files<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Sibling>, D::Error> {
    struct Siblings;

    impl<'de> Visitor<'de> for Siblings {
        type Value = Vec<Sibling>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the files of the repo")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<Sibling>, A::Error> {
            let mut files = Vec::new();
            while let Some(file) = items.next_element()? {
                files.push(file);
                if files.len() > FILES {
                    let problem = format!("the repo has more than {FILES} files");
                    return Err(serde::de::Error::custom(problem));
                }
            }
            Ok(files)
        }
    }

    deserializer.deserialize_seq(Siblings)
}
