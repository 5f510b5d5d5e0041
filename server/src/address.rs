//! The address of the server that uses a data folder: `chat` and `run` find a server that listens elsewhere than its
//! configuration says.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Name of the file within the data folder.
const FILE: &str = "server.address";

/// Longest file that is read.
const BYTES: u64 = 64;

/// The file with the address of this process. It is removed on drop; one that a killed server left behind is harmless, as
/// whoever reads it asks whether a server answers there.
pub struct Announced {
    file: PathBuf,
    address: SocketAddr,
}

impl Announced {
    /// Writes `address` into `data_dir`, in place of that of an earlier server.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(data_dir: &Path, address: SocketAddr) -> io::Result<Self> {
        let file = data_dir.join(FILE);
        steersman_files::replace_losable(&file, address.to_string().as_bytes())?;
        Ok(Self { file, address })
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        // Another server of this data folder may have written its own.
        if self.file.parent().and_then(read) == Some(self.address) {
            let _ = fs::remove_file(&self.file);
        }
    }
}

/// The address that the server of `data_dir` has written.
pub fn read(data_dir: &Path) -> Option<SocketAddr> {
    let bytes = steersman_files::read(&data_dir.join(FILE), BYTES).ok()?;
    std::str::from_utf8(&bytes).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_removes_its_own_address_only() {
        let data = tempfile::tempdir().unwrap();
        assert_eq!(read(data.path()), None);
        let [first, second] = ["127.0.0.1:1", "[::1]:2"].map(|address| address.parse().unwrap());
        let announced = Announced::write(data.path(), first).unwrap();
        assert_eq!(read(data.path()), Some(first));
        let newer = Announced::write(data.path(), second).unwrap();
        drop(announced);
        assert_eq!(read(data.path()), Some(second));
        drop(newer);
        assert_eq!(read(data.path()), None);
        assert_eq!(fs::read_dir(data.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_no_address_is_none() {
        let data = tempfile::tempdir().unwrap();
        for text in ["", "localhost:1", "127.0.0.1", &"1".repeat(100_000)] {
            fs::write(data.path().join(FILE), text).unwrap();
            assert_eq!(read(data.path()), None, "{}", text.len());
        }
    }
}
