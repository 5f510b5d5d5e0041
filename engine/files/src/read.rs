//! Reads files that somebody else may have replaced by something that never ends.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Opens a regular file, or a link to one, for reading. Never waits: to open a pipe would wait until somebody writes to
/// it.
///
/// # Errors
/// The errors of the system; [`ErrorKind::InvalidInput`] if it is not a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    // Looked at before as well: to open a device may have effects.
    check(&fs::metadata(path)?)?;
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        // The file may have been replaced since.
        options.custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed());
    }
    let file = options.open(path)?;
    check(&file.metadata()?)?;
    Ok(file)
}

fn check(metadata: &fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"))
}

/// The bytes of a regular file of at most `limit` bytes. Never waits.
///
/// # Errors
/// As [`open`]; [`ErrorKind::FileTooLarge`] if it is larger.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let too_large =
        || io::Error::new(ErrorKind::FileTooLarge, format!("it has more than {limit} bytes"));
    let file = open(path)?;
    let length = file.metadata()?.len();
    if length > limit {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0).saturating_add(1));
    // One byte more than the limit shows that the file is longer, even if it grows meanwhile.
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(too_large());
    }
    Ok(bytes)
}

/// The text of a regular file of at most `limit` bytes. Never waits.
///
/// # Errors
/// As [`read`]; [`ErrorKind::InvalidData`] if it is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read(path, limit)?)
        .map_err(|error| io::Error::new(ErrorKind::InvalidData, error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_within_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        assert_eq!(read(&path, 9).unwrap_err().kind(), ErrorKind::NotFound);
        fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        let error = read(&path, 3).unwrap_err();
        assert!(error.to_string().contains("more than 3 bytes"), "{error}");
        assert_eq!(read_text(&path, 4).unwrap(), "four");
        fs::write(&path, [0xff]).unwrap();
        assert_eq!(read_text(&path, 4).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    /// Fault A12: `keys.json` as a pipe blocked every route of a server, as a link to /dev/zero it took all memory.
    #[cfg(unix)]
    #[test]
    fn what_is_not_a_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
        let link = |to: &Path, name| std::os::unix::fs::symlink(to, at(name)).unwrap();
        link(Path::new("/dev/zero"), "zero");
        link(&at("pipe"), "to-pipe");
        link(Path::new("/dev/tty"), "terminal");
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        for name in ["pipe", "zero", "to-pipe", "terminal", "socket", "folder"] {
            let error = read(&at(name), 10).unwrap_err().to_string();
            assert_eq!(error, "it is not a regular file", "{name}");
        }
        fs::write(at("file"), "x").unwrap();
        link(&at("file"), "to-file");
        assert_eq!(read(&at("to-file"), 10).unwrap(), b"x");
    }
}
