//! The address of the server that uses a data folder: `chat` and `run` find a server that listens elsewhere than its
//! configuration says.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the file within the data folder.
const FILE: &str = "server.address";

/// Longest file that is read.
const BYTES: u64 = 64;

/// Time in which a server of this machine accepts a connection.
const ANSWER: Duration = Duration::from_millis(200);

/// The file with the address of this process. On drop it gets the address of the server from before if that still listens, and
/// is removed otherwise. A file that a killed server left behind is harmless, as whoever reads it asks whether a server
/// answers there.
pub struct Announced {
    file: PathBuf,
    address: SocketAddr,
    /// The address that was in the file before.
    earlier: Option<SocketAddr>,
}

impl Announced {
    /// Writes `address` into `data_dir`, in place of that of an earlier server.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(data_dir: &Path, address: SocketAddr) -> io::Result<Self> {
        let earlier = read(data_dir).filter(|earlier| *earlier != address);
        let file = data_dir.join(FILE);
        write(&file, address)?;
        Ok(Self { file, address, earlier })
    }
}

fn write(file: &Path, address: SocketAddr) -> io::Result<()> {
    steersman_files::replace_losable(file, address.to_string().as_bytes())
}

impl Drop for Announced {
    fn drop(&mut self) {
        // Another server of this data folder may have written its own.
        if self.file.parent().and_then(read) != Some(self.address) {
            return;
        }
        let listens = |address: &SocketAddr| TcpStream::connect_timeout(address, ANSWER).is_ok();
        let _ = match self.earlier.filter(listens) {
            Some(earlier) => write(&self.file, earlier),
            None => fs::remove_file(&self.file),
        };
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

    /// A second start that failed, or ended, left `chat` and `run` without the server that ran: they loaded another copy.
    #[test]
    fn a_server_that_ends_leaves_the_address_of_one_that_runs() {
        let data = tempfile::tempdir().unwrap();
        let runs = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = runs.local_addr().unwrap();
        let first = Announced::write(data.path(), address).unwrap();
        let failed = Announced::write(data.path(), "127.0.0.1:1".parse().unwrap()).unwrap();
        drop(failed);
        assert_eq!(read(data.path()), Some(address));
        drop((first, runs));
        assert_eq!(read(data.path()), None);
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
