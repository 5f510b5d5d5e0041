//! The folder of a repo in the cache, in the layout of Python's `huggingface_hub`, which finds what is written here.
//!
//! ```text
//! models--owner--name/blobs/DIGEST             contents; DIGEST.part is an unfinished one
//! models--owner--name/snapshots/COMMIT/NAME    a link to a content
//! models--owner--name/refs/main                the commit
//! .locks/models--owner--name/DIGEST.lock       held while a content is downloaded
//! .removing-PROCESS-NUMBER                     a repo that is deleted, or was until its process ended
//! ```
//!
//! Every name is a [`FileName`]; what the hub sends becomes one, or nothing is written. Nothing is written through a link
//! that leads out of the folder.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use steersman_files::{FileName, FilePath};

/// Begins the name of the folder of a model.
pub const PREFIX: &str = "models--";

/// Begins the name of a folder that is being deleted.
const REMOVING: &str = ".removing-";

/// Most bytes of a reference: a commit has 40.
const REFERENCE_BYTES: u64 = 1 << 10;

/// The folder of a repo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoFolder {
    root: PathBuf,
    locks: PathBuf,
}

impl RepoFolder {
    /// The folder of `owner/name` in `cache`, which need not exist.
    ///
    /// # Errors
    /// If the id is too long for the name of a folder.
    pub fn new(cache: &Path, repo_id: &str) -> Result<Self> {
        let name = FileName::new(&format!("{PREFIX}{}", repo_id.replace('/', "--")))?;
        Ok(Self { root: name.within(cache), locks: name.within(&cache.join(".locks")) })
    }

    /// The commit of the newest complete download.
    pub fn commit(&self) -> Option<FileName> {
        let text =
            steersman_files::read_text(&self.root.join("refs/main"), REFERENCE_BYTES).ok()?;
        FileName::new(text.trim()).ok()
    }

    /// Records `commit` as the newest.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn set_commit(&self, commit: &FileName) -> io::Result<()> {
        let refs = self.folder("refs")?;
        // A link is replaced, not followed.
        remove_link(&refs.join("main"))?;
        steersman_files::replace(&refs.join("main"), commit.as_str().as_bytes())
    }

    /// The folder of the files of `commit`.
    pub fn snapshot(&self, commit: &FileName) -> PathBuf {
        commit.within(&self.root.join("snapshots"))
    }

    /// The content `blob`.
    pub fn blob(&self, blob: &FileName) -> PathBuf {
        blob.within(&self.root.join("blobs"))
    }

    /// What has arrived of the content `blob`.
    pub fn part(&self, blob: &FileName) -> PathBuf {
        self.root.join("blobs").join(format!("{blob}.part"))
    }

    /// Opens what has arrived of the content `blob`, to append to it.
    ///
    /// # Errors
    /// If it cannot be created, or is a link.
    pub fn open_part(&self, blob: &FileName) -> io::Result<File> {
        self.folder("blobs")?;
        let path = self.part(blob);
        remove_link(&path)?;
        let mut options = File::options();
        options.read(true).append(true).create(true);
        #[cfg(unix)]
        {
            use rustix::fs::OFlags;
            use std::os::unix::fs::OpenOptionsExt;
            options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
        }
        let file = options.open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
        }
        Ok(file)
    }

    /// Gives the finished content `blob` its name.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn finish(&self, blob: &FileName) -> io::Result<()> {
        fs::rename(self.part(blob), self.blob(blob))
    }

    /// Makes `file` of `commit` a link to the content `blob`.
    ///
    /// # Errors
    /// If the system refuses, or a link leads out of the folder.
    pub fn link(&self, commit: &FileName, file: &FilePath, blob: &FileName) -> io::Result<()> {
        let path = file.within(&self.snapshot(commit));
        let folder = path.parent().unwrap_or(&self.root);
        self.create(folder)?;
        remove_link(&path)?;
        #[cfg(unix)]
        {
            // One level up for the commit, one for `snapshots`, one for each folder of the file.
            let up = "../".repeat(file.names().len() + 1);
            std::os::unix::fs::symlink(format!("{up}blobs/{blob}"), &path)
        }
        #[cfg(not(unix))]
        fs::copy(self.blob(blob), &path).map(drop)
    }

    /// Keeps other processes, Python's too, from downloading `blob` until the file is dropped.
    ///
    /// # Errors
    /// If another process downloads it.
    pub fn lock(&self, blob: &FileName) -> Result<File> {
        let context = || format!("locking {}", self.locks.display());
        fs::create_dir_all(&self.locks).with_context(context)?;
        let path = self.locks.join(format!("{blob}.lock"));
        let file = File::options().append(true).create(true).open(path).with_context(context)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("another process downloads it; wait until that has ended")
            }
            // Some network file systems have no locks.
            Err(TryLockError::Error(error)) => tracing::debug!(%error, "no lock"),
        }
        Ok(file)
    }

    /// Deletes the folder with all commits. First it gets another name, as a folder that is removed halfway must not be
    /// taken for a model. What an earlier removal left behind is deleted, too.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn remove(&self) -> io::Result<()> {
        let cache = self.root.parent().unwrap_or(Path::new("."));
        for rest in rests_of_removals(cache)? {
            // Another process may delete it now; what cannot be deleted stays in nobody's way.
            let _ = fs::remove_dir_all(rest);
        }
        // The number of a process is that of an earlier one, too: in a container, of all of them.
        let mut names =
            (0u64..).map(|n| cache.join(format!("{REMOVING}{}-{n}", std::process::id())));
        let free = names.find(|path| fs::symlink_metadata(path).is_err());
        let removing = free.ok_or_else(|| io::Error::other("no name is free"))?;
        fs::rename(&self.root, &removing)?;
        let _ = fs::remove_dir_all(&self.locks);
        match fs::remove_dir_all(&removing) {
            // Another process deletes the rests of this one.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// The folder with everything of the repo.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn folder(&self, name: &str) -> io::Result<PathBuf> {
        let folder = self.root.join(name);
        self.create(&folder)?;
        Ok(folder)
    }

    /// Creates `folder` within the root.
    fn create(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(&self.root)?;
        let root = self.root.canonicalize()?;
        let mut path = self.root.clone();
        for name in folder.strip_prefix(&self.root).map_err(io::Error::other)? {
            path.push(name);
            match fs::create_dir(&path) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            if !path.canonicalize()?.starts_with(&root) {
                let problem = format!("{} is a link out of the cache; remove it", path.display());
                return Err(io::Error::new(ErrorKind::InvalidInput, problem));
            }
        }
        Ok(())
    }
}

/// The folders in `cache` that removals have not deleted to the end.
fn rests_of_removals(cache: &Path) -> io::Result<Vec<PathBuf>> {
    let is_rest = |entry: &fs::DirEntry| {
        let is_named = entry.file_name().to_str().is_some_and(|name| name.starts_with(REMOVING));
        is_named && entry.file_type().is_ok_and(|kind| kind.is_dir())
    };
    let entries = fs::read_dir(cache)?.flatten();
    Ok(entries.filter(is_rest).map(|entry| entry.path()).collect())
}

/// Whether `text` is a digest in hex digits of `length` characters.
pub fn is_digest(text: &str, length: usize) -> bool {
    text.len() == length && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// Checks that no two of `names` are one file where the case of letters does not count.
///
/// # Errors
/// With the two names.
pub fn check_cases<'a>(names: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut known = std::collections::BTreeMap::new();
    for name in names {
        if let Some(other) = known.insert(name.to_lowercase(), name) {
            ensure!(
                other == name,
                "`{other}` and `{name}` are one file on systems that do not tell cases apart"
            );
        }
    }
    Ok(())
}

/// Removes a link, or a file that stands in its place.
fn remove_link(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => fs::remove_file(path),
        _ => Ok(()),
    }
}
