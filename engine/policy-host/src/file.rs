//! Reads files within limits. How files are replaced, `steersman-files` says.

use std::io::ErrorKind;
use std::path::Path;

pub use steersman_files::{create_private_folder, remove, replace, replace_private};

/// A regular file of at most `limit` bytes; `None` if it does not exist.
///
/// # Errors
/// The file and the problem.
pub fn read(path: &Path, limit: usize) -> Result<Option<Vec<u8>>, String> {
    match steersman_files::read(path, limit as u64) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == ErrorKind::FileTooLarge => {
            Err(format!("{} is larger than the limit of {limit} bytes", path.display()))
        }
        Err(error) => Err(format!("{} cannot be read: {error}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
