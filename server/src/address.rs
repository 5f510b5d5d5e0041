//! The addresses of the servers that use a data folder: `chat` and `run` find a server that listens elsewhere than its
//! configuration says.
//!
//! Each server has a file, which it keeps locked. The system unlocks the file of a server that is killed: nobody sends keys and
//! prompts to whoever listens at its address later.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The name of a file within the data folder, around the port.
const NAME: [&str; 2] = ["server-", ".address"];

/// Longest file that is read.
const BYTES: u64 = 64;

/// Most files that are looked at.
const FILES: usize = 64;

/// The file with the address of this process, which is removed on drop.
pub struct Announced {
    path: PathBuf,
    /// Unlocked when it is closed.
    _locked: File,
}

impl Announced {
    /// Writes `address` into `data_dir`, and removes the files of servers that have ended.
    ///
    /// # Errors
    /// If the file cannot be written or locked.
    pub fn write(data_dir: &Path, address: SocketAddr) -> io::Result<Self> {
        steersman_files::create_private_folder(data_dir)?;
        for Found { path, is_locked, .. } in files(data_dir) {
            if !is_locked {
                let _ = fs::remove_file(path);
            }
        }
        let port = address.port();
        let path = data_dir.join(format!("{}{port}{}", NAME[0], NAME[1]));
        // It is locked before it has its name: nobody takes it for that of a server that has ended.
        let new = data_dir.join(format!(".{}{port}", NAME[0]));
        let mut file = File::create(&new)?;
        file.lock()?;
        file.write_all(address.to_string().as_bytes())?;
        fs::rename(&new, &path)?;
        Ok(Self { path, _locked: file })
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The file of a server.
struct Found {
    path: PathBuf,
    is_locked: bool,
    written: SystemTime,
}

/// The files of servers in `data_dir`.
fn files(data_dir: &Path) -> Vec<Found> {
    let is_of_server = |name: &str| {
        let port = name.strip_prefix(NAME[0]).and_then(|rest| rest.strip_suffix(NAME[1]));
        port.is_some_and(|port| port.parse::<u16>().is_ok())
    };
    let entries = fs::read_dir(data_dir).into_iter().flatten().flatten();
    let paths = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_of_server));
    let found = paths.take(FILES).filter_map(|entry| {
        let file = File::open(entry.path()).ok()?;
        let written = file.metadata().and_then(|metadata| metadata.modified()).ok()?;
        let is_locked = match file.try_lock_shared() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            // Nothing is known of it.
            Err(TryLockError::Error(_)) => return None,
        };
        Some(Found { path: entry.path(), is_locked, written })
    });
    found.collect()
}

/// The addresses of the servers that use `data_dir`, the newest first.
pub fn read(data_dir: &Path) -> Vec<SocketAddr> {
    let mut found = files(data_dir);
    found.retain(|file| file.is_locked);
    found.sort_by_key(|file| std::cmp::Reverse(file.written));
    let address = |file: Found| {
        let bytes = steersman_files::read(&file.path, BYTES).ok()?;
        std::str::from_utf8(&bytes).ok()?.trim().parse().ok()
    };
    found.into_iter().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    fn names(data_dir: &Path) -> usize {
        fs::read_dir(data_dir).unwrap().count()
    }

    /// A second start that failed, ended or was killed left `chat` and `run` without the server that ran: they loaded another
    /// copy of the model.
    #[test]
    fn servers_of_one_folder_do_not_hide_one_another() {
        let data = tempfile::tempdir().unwrap();
        let data = data.path().join("new");
        assert_eq!(read(&data), []);
        let [first, second] = ["127.0.0.1:1", "[::1]:2"].map(|address| address.parse().unwrap());
        let announced = Announced::write(&data, first).unwrap();
        assert_eq!(read(&data), [first]);
        // The time of a file may have a resolution of 10 ms.
        sleep(Duration::from_millis(20));
        let newer = Announced::write(&data, second).unwrap();
        assert_eq!(read(&data), [second, first]);
        drop(newer);
        assert_eq!(read(&data), [first]);
        drop(announced);
        assert_eq!((read(&data), names(&data)), (Vec::new(), 0));
    }

    /// The key and the prompt of `run` went to whoever listened where a killed server had.
    #[test]
    fn the_address_of_a_server_that_was_killed_is_none() {
        let data = tempfile::tempdir().unwrap();
        let data = data.path();
        let killed = data.join("server-1.address");
        fs::write(&killed, "127.0.0.1:1").unwrap();
        fs::write(data.join("server-x.address"), "127.0.0.1:2").unwrap();
        assert_eq!(read(data), []);
        let address = "127.0.0.1:3".parse().unwrap();
        let announced = Announced::write(data, address).unwrap();
        assert!(!killed.exists());
        assert_eq!(read(data), [address]);
        drop(announced);
        assert_eq!(names(data), 1);
    }
}
