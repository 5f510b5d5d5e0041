//! Replaces files as a whole: a reader, or a start after a crash, sees the old file or the new one.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

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

/// As [`replace`], with a file that only its owner can access, and so its folder if that is new.
///
/// # Errors
/// As [`replace`].
pub fn replace_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        create_private_folder(folder)?;
    }
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
