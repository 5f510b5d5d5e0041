//! Reads files within limits, replaces them atomically, and creates private folders.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;

/// A regular file of at most `limit` bytes; `None` if it does not exist.
///
/// # Errors
/// The file and the problem.
pub fn read(path: &Path, limit: usize) -> Result<Option<Vec<u8>>, String> {
    // Opening a pipe blocks until somebody writes to it, and every push and rollback with it.
    let file = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Ok(metadata) if !metadata.is_file() => {
            Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"))
        }
        metadata => metadata.and_then(|_| File::open(path)),
    };
    let mut bytes = Vec::new();
    // One byte more than the limit shows that the file is longer, even if it grows meanwhile.
    file.and_then(|file| file.take(limit as u64 + 1).read_to_end(&mut bytes))
        .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    if bytes.len() > limit {
        return Err(format!("{} is larger than the limit of {limit} bytes", path.display()));
    }
    Ok(Some(bytes))
}

/// Replaces the file at `path` atomically. It keeps its permissions; a new one has those of the umask.
///
/// # Errors
/// When it cannot be written; the old file remains.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let old = fs::metadata(path).map(|old| old.permissions()).ok();
    replace_with(path, bytes, &builder, old)
}

/// As [`replace`], with a file that only its owner can access.
///
/// # Errors
/// As [`replace`].
pub fn replace_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_with(path, bytes, &tempfile::Builder::new(), None)
}

fn replace_with(
    path: &Path,
    bytes: &[u8],
    builder: &tempfile::Builder<'_, '_>,
    permissions: Option<fs::Permissions>,
) -> io::Result<()> {
    // A link remains: its target is replaced.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut file = builder.tempfile_in(folder.unwrap_or(Path::new(".")))?;
    if let Some(permissions) = permissions {
        file.as_file().set_permissions(permissions)?;
    }
    file.write_all(bytes)?;
    // Without it a crash could leave an empty file under the new name.
    file.as_file().sync_all()?;
    file.persist(&path)?;
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

/// Creates a folder, if missing, that only its owner can access.
///
/// # Errors
/// When it cannot be created.
pub fn create_private_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_atomically_and_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wasm");
        for text in ["one", "two"] {
            replace(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        // A file cannot replace a folder.
        fs::create_dir(folder.path().join("b")).unwrap();
        replace(&folder.path().join("b"), b"three").unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[cfg(unix)]
    #[test]
    fn a_replaced_file_keeps_its_permissions_and_a_new_one_can_be_read() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let (path, reference) = (folder.path().join("a.wasm"), folder.path().join("reference"));
        replace(&path, b"one").unwrap();
        fs::write(&reference, "").unwrap();
        assert_eq!(mode(&path), mode(&reference), "a new file");
        fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(mode(&path), 0o640);
    }

    /// A pipe named `NAME.wasm` blocked the start, and later every push and rollback.
    #[cfg(unix)]
    #[test]
    fn a_pipe_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(read(&pipe, 3).unwrap_err().contains("is not a regular file"));
        assert!(read(folder.path(), 3).unwrap_err().contains("is not a regular file"));
    }

    /// An upload wrote through a link that was planted under the name of its temporary file.
    #[cfg(unix)]
    #[test]
    fn a_planted_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, victim) = (folder.path().join("a.wasm"), folder.path().join("victim"));
        fs::write(&victim, "safe").unwrap();
        let planted = format!(".a.wasm.{}", std::process::id());
        std::os::unix::fs::symlink(&victim, folder.path().join(planted)).unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "safe");
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    }

    #[test]
    fn a_file_beyond_its_limit_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("param");
        assert_eq!(read(&path, 3), Ok(None));
        fs::write(&path, "four").unwrap();
        assert!(read(&path, 3).unwrap_err().contains("larger than the limit of 3 bytes"));
        assert_eq!(read(&path, 4), Ok(Some(b"four".to_vec())));
    }
}
