//! The addresses of the servers that use a data folder: `chat` and `run` find a server that listens elsewhere than its
//! configuration says.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Name of the file within the data folder.
const FILE: &str = "server.address";

/// Longest file that is read.
const BYTES: u64 = 512;

/// Most addresses in the file.
const SERVERS: usize = 8;

/// The address of this process in the file, from which it is removed on drop. One that a killed server left behind is harmless, as
/// whoever reads the file asks whether a server answers there.
pub struct Announced {
    data_dir: PathBuf,
    address: SocketAddr,
}

impl Announced {
    /// Adds `address` to those in `data_dir`, as the newest.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(data_dir: &Path, address: SocketAddr) -> io::Result<Self> {
        let mut addresses = read(data_dir);
        addresses.retain(|other| *other != address);
        addresses.insert(0, address);
        write(data_dir, &addresses)?;
        Ok(Self { data_dir: data_dir.into(), address })
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        let mut addresses = read(&self.data_dir);
        addresses.retain(|other| *other != self.address);
        let _ = match addresses.is_empty() {
            true => fs::remove_file(self.data_dir.join(FILE)),
            false => write(&self.data_dir, &addresses),
        };
    }
}

/// Writes addresses, one a line.
fn write(data_dir: &Path, addresses: &[SocketAddr]) -> io::Result<()> {
    let lines = addresses.iter().take(SERVERS).map(|address| format!("{address}\n"));
    steersman_files::replace_losable(&data_dir.join(FILE), lines.collect::<String>().as_bytes())
}

/// The addresses that servers of `data_dir` have written, the newest first. A server may have ended without removing its own.
pub fn read(data_dir: &Path) -> Vec<SocketAddr> {
    let bytes = steersman_files::read(&data_dir.join(FILE), BYTES).unwrap_or_default();
    let lines = std::str::from_utf8(&bytes).unwrap_or_default().lines();
    lines.filter_map(|line| line.trim().parse().ok()).take(SERVERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second start that failed, ended or was killed left `chat` and `run` without the server that ran: they loaded another
    /// copy of the model.
    #[test]
    fn servers_of_one_folder_do_not_hide_one_another() {
        let data = tempfile::tempdir().unwrap();
        assert_eq!(read(data.path()), []);
        let [first, second, third] =
            ["127.0.0.1:1", "[::1]:2", "127.0.0.1:3"].map(|address| address.parse().unwrap());
        let announced = Announced::write(data.path(), first).unwrap();
        // It is killed.
        std::mem::forget(Announced::write(data.path(), second).unwrap());
        let newest = Announced::write(data.path(), third).unwrap();
        assert_eq!(read(data.path()), [third, second, first]);
        drop(newest);
        assert_eq!(read(data.path()), [second, first]);
        // It starts again.
        drop(Announced::write(data.path(), second).unwrap());
        assert_eq!(read(data.path()), [first]);
        drop(announced);
        assert_eq!(fs::read_dir(data.path()).unwrap().count(), 0);
        (0..20).for_each(|port| {
            let address = SocketAddr::from(([127, 0, 0, 1], port));
            std::mem::forget(Announced::write(data.path(), address).unwrap());
        });
        assert_eq!(read(data.path()).len(), SERVERS);
        assert_eq!(read(data.path())[0].port(), 19);
    }

    #[test]
    fn what_is_no_address_is_none() {
        let data = tempfile::tempdir().unwrap();
        for text in ["", "localhost:1", "127.0.0.1", &"1".repeat(100_000)] {
            fs::write(data.path().join(FILE), text).unwrap();
            assert_eq!(read(data.path()), [], "{}", text.len());
        }
    }
}
