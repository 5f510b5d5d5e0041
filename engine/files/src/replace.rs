//! Replaces files as a whole: a reader, or a start after a crash, sees the old file or the new one.
//!
//! | write | function | after a power loss |
//! |---|---|---|
//! | policies, keys, exports of state, references of the hub's cache | [`replace`], [`replace_private`], [`Replacement`] | the new file is there once the function has returned |
//! | calibration, machine profiles, digests of weights, compiled policies and CUDA kernels | [`replace_private`] | the same; they could be made again, but each is written once and takes seconds to minutes to make |
//! | stored responses | [`replace_losable`] | a response of the last seconds may be missing or empty |
//!
//! Durable means that the content is on disk before the file has its name, and the name before the
//! function returns: without the first a crash could leave an empty file under the new name,
//! without the second the old file. A response is written for each reply, while a client waits, and
//! nobody is promised that it outlives the machine: waiting for the disk would cost each reply more
//! than the loss of one costs. Whoever reads such a file takes one that cannot be parsed for one
//! that does not exist.
//!
//! Files that grow (logs, traces, downloads, databases) are not replaced and have durability of
//! their own.
//!
//! A file that root writes keeps the owner of the old one, and a new one has that of its folder, as in
//! `create.rs`.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::create::{check_link, create_private_folder, folder_of, keep_owner};

/// Replaces the file at `path` atomically and durably. It keeps its permissions; a new one has
/// those of the umask.
///
/// # Errors
/// When it cannot be written; the old file remains.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let old = fs::metadata(path).map(|old| old.permissions()).ok();
    let mut replacement = Replacement::with(path, &builder)?;
    if let Some(permissions) = old {
        replacement.file.as_file().set_permissions(permissions)?;
    }
    replacement.write_all(bytes)?;
    replacement.commit()
}

/// As [`replace`], with a file that only its owner can access, and so its folder if that is new.
///
/// # Errors
/// As [`replace`].
pub fn replace_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    create_private_folder(folder_of(path))?;
    let mut replacement = Replacement::private(path)?;
    replacement.write_all(bytes)?;
    replacement.commit()
}

/// As [`replace_private`], without waiting for the disk: a power loss may undo the replacement, or
/// leave an empty file.
///
/// # Errors
/// As [`replace`].
pub fn replace_losable(path: &Path, bytes: &[u8]) -> io::Result<()> {
    create_private_folder(folder_of(path))?;
    let mut replacement = Replacement::private(path)?;
    replacement.write_all(bytes)?;
    replacement.persist().map(drop)
}

/// A file that is being written, and replaces another one when it is complete. Dropped before, it
/// changes nothing.
pub struct Replacement {
    file: NamedTempFile,
    path: PathBuf,
}

impl Replacement {
    /// Begins to replace the file at `path` by one that only its owner can access.
    ///
    /// # Errors
    /// When a file cannot be created in its folder.
    pub fn private(path: &Path) -> io::Result<Self> {
        Self::with(path, &tempfile::Builder::new())
    }

    fn with(path: &Path, builder: &tempfile::Builder<'_, '_>) -> io::Result<Self> {
        check_link(path)?;
        // A link remains: its target is replaced.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        // Its own error names a file that nobody has heard of.
        let file =
            builder.tempfile_in(folder_of(&path)).map_err(|error| io::Error::from(error.kind()))?;
        let old = fs::metadata(&path).or_else(|_| fs::metadata(folder_of(&path)))?;
        keep_owner(file.as_file(), &old)?;
        Ok(Self { file, path })
    }

    /// Replaces the file, durably.
    ///
    /// # Errors
    /// When the file cannot be written; the old one remains.
    pub fn commit(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        let path = self.persist()?;
        sync_folder(folder_of(&path))
    }

    fn persist(self) -> io::Result<PathBuf> {
        self.file.persist(&self.path)?;
        Ok(self.path)
    }
}

impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.as_file_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_file_mut().flush()
    }
}

/// Waits until the names in `folder` are on disk.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        // Some file systems, most of them of networks, cannot sync a folder; it may also be one
        // that may be written and not read. The file is in place.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::InvalidInput | ErrorKind::Unsupported | ErrorKind::PermissionDenied
            ) =>
        {
            Ok(())
        }
        synced => synced,
    }
}

/// Elsewhere a folder cannot be opened as a file.
#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Removes a file; returns whether it existed.
///
/// # Errors
/// When it cannot be removed.
pub fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replacement_that_is_not_committed_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join("file");
        create_private_folder(path.parent().unwrap()).unwrap();
        let mut replacement = Replacement::private(&path).unwrap();
        replacement.write_all(b"half").unwrap();
        drop(replacement);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
        for (write, text) in
            [(replace_private as fn(&Path, &[u8]) -> _, "a"), (replace_losable, "b")]
        {
            write(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        // The library's error ends with `at path ".../.tmpA6NlKv"`.
        let error = Replacement::private(&folder.path().join("absent").join("file")).err();
        assert!(!error.unwrap().to_string().contains("path"));
    }

    #[cfg(unix)]
    #[test]
    fn a_private_file_and_its_new_folder_are_for_their_owner() {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join("file");
        for write in [replace_private as fn(&Path, &[u8]) -> _, replace_losable] {
            write(&path, b"text").unwrap();
            assert_eq!((mode(path.parent().unwrap()), mode(&path)), (0o700, 0o600));
        }
    }

    /// `steersman keys create` as root replaced the keys of a service's user by a file of root, which the running
    /// server could not read: it refused all keys.
    #[cfg(unix)]
    #[test]
    fn what_root_writes_belongs_to_the_owner_of_the_old_file_or_of_the_folder() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
        let folder = tempfile::tempdir().unwrap();
        if chown(folder.path(), Some(65534), Some(65533)).is_err() {
            // Only root may give files away.
            return;
        }
        let owner = |path: &Path| {
            let metadata = fs::metadata(path).unwrap();
            (metadata.uid(), metadata.gid(), metadata.permissions().mode() & 0o777)
        };
        let path = folder.path().join("keys.json");
        for write in [replace_private as fn(&Path, &[u8]) -> _, replace_losable, replace] {
            write(&path, b"new").unwrap();
            assert_eq!(owner(&path), (65534, 65533, 0o600));
            chown(&path, Some(65532), Some(65531)).unwrap();
            write(&path, b"old").unwrap();
            assert_eq!(owner(&path), (65532, 65531, 0o600));
            fs::remove_file(&path).unwrap();
            // `replace` alone keeps a mode instead of setting it.
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            chown(&path, Some(65534), Some(65533)).unwrap();
        }
    }

    /// The owner of a folder would choose by a link which file root replaces there.
    #[cfg(unix)]
    #[test]
    fn root_replaces_no_target_of_another_users_link() {
        use std::os::unix::fs::{lchown, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("keys.json"));
        fs::write(&target, "kept").unwrap();
        symlink(&target, &link).unwrap();
        replace_private(&link, b"own").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "own");
        // Only root may give links away.
        if lchown(&link, Some(65534), Some(65534)).is_ok() {
            let error = replace_private(&link, b"other").unwrap_err().to_string();
            assert!(error.contains("is a link of another user"), "{error}");
            assert_eq!(fs::read_to_string(&target).unwrap(), "own");
        }
    }
}
