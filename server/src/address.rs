//! The addresses of the servers that use a data folder: `chat` and `run` find a server that listens elsewhere than its
//! configuration says, and wait for a server that is starting.
//!
//! Each server has a file, which it keeps locked. The system unlocks the file of a server that is killed: nobody sends keys and
//! prompts to whoever listens at its address later.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Start of the name of each file.
const SERVER: &str = "server-";

/// End of the name of a file with an address, after the port.
const ADDRESS: &str = ".address";

/// End of the name of a file without an address yet.
const STARTING: &str = ".starting";

/// Longest file that is read.
const BYTES: u64 = 64;

/// Most files that are looked at.
const FILES: usize = 64;

/// The announcement of this process in the data folder, which is withdrawn on drop. If it cannot be written, a warning is logged.
pub struct Announced(Option<Own>);

/// The file of this process, which is removed on drop.
struct Own {
    path: PathBuf,
    /// Unlocked when it is closed.
    locked: File,
}

impl Announced {
    /// Announces in `data_dir` a server that starts, and removes the files of servers that have ended.
    pub fn start(data_dir: &Path) -> Self {
        Self(written(Own::write(data_dir)))
    }

    /// Announces that the server listens at `address`.
    pub fn listen(&mut self, address: SocketAddr) {
        let own = self.0.take().map(|own| own.with_address(address)).transpose();
        self.0 = written(own).flatten();
    }
}

/// `value`, or a warning.
fn written<T>(value: io::Result<T>) -> Option<T> {
    value
        .inspect_err(|error| {
            tracing::warn!(%error, "`steersman chat` and `run` find this server at the configured address only");
        })
        .ok()
}

impl Own {
    fn write(data_dir: &Path) -> io::Result<Self> {
        steersman_files::create_private_folder(data_dir)?;
        for Found { path, is_locked, .. } in files(data_dir) {
            if !is_locked {
                let _ = fs::remove_file(path);
            }
        }
        // It is locked before it has its name: nobody takes it for that of a server that has ended.
        let new = tempfile::Builder::new().prefix(&format!(".{SERVER}")).tempfile_in(data_dir)?;
        new.as_file().lock()?;
        let name = new.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = data_dir.join(format!("{}{STARTING}", name.trim_start_matches('.')));
        let locked = new.persist(&path)?;
        Ok(Self { path, locked })
    }

    /// Returns true if the file still has its name.
    fn is_named(&self) -> io::Result<bool> {
        let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        Ok(identity(self.locked.metadata()?) == identity(fs::metadata(&self.path)?))
    }

    fn with_address(mut self, address: SocketAddr) -> io::Result<Self> {
        self.locked.write_all(address.to_string().as_bytes())?;
        let path = self.path.with_file_name(format!("{SERVER}{}{ADDRESS}", address.port()));
        fs::rename(&self.path, &path)?;
        self.path = path;
        Ok(self)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // A server that was started when this one listened no more may have the port, and so the file.
        if self.is_named().unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The file of a server.
struct Found {
    path: PathBuf,
    has_address: bool,
    is_locked: bool,
    written: SystemTime,
}

/// The files of servers in `data_dir`.
fn files(data_dir: &Path) -> Vec<Found> {
    let has_address = |name: &str| {
        let rest = name.strip_prefix(SERVER)?;
        let is_port = |port: &str| port.parse::<u16>().is_ok();
        let has_address = rest.strip_suffix(ADDRESS).is_some_and(is_port);
        (has_address || rest.ends_with(STARTING)).then_some(has_address)
    };
    let entries = fs::read_dir(data_dir).into_iter().flatten().flatten();
    let known =
        entries.filter_map(|entry| Some((has_address(entry.file_name().to_str()?)?, entry.path())));
    let found = known.take(FILES).filter_map(|(has_address, path)| {
        let file = File::open(&path).ok()?;
        let written = file.metadata().and_then(|metadata| metadata.modified()).ok()?;
        let is_locked = match file.try_lock_shared() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            // Nothing is known of it.
            Err(TryLockError::Error(_)) => return None,
        };
        Some(Found { path, has_address, is_locked, written })
    });
    found.collect()
}

/// Whether a server that uses `data_dir` starts, and does not listen yet.
pub fn is_starting(data_dir: &Path) -> bool {
    files(data_dir).iter().any(|file| file.is_locked && !file.has_address)
}

/// The addresses of the servers that use `data_dir`, the newest first.
pub fn read(data_dir: &Path) -> Vec<SocketAddr> {
    let mut found = files(data_dir);
    found.retain(|file| file.is_locked && file.has_address);
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

    fn announced(data_dir: &Path, address: SocketAddr) -> Announced {
        let mut announced = Announced::start(data_dir);
        announced.listen(address);
        announced
    }

    /// `run` beside a server that was about to listen loaded another copy of the model.
    #[test]
    fn a_server_that_starts_is_known_before_it_listens() {
        let data = tempfile::tempdir().unwrap();
        let data = data.path();
        assert!(!is_starting(data));
        let mut first = Announced::start(data);
        let second = Announced::start(data);
        assert_eq!((is_starting(data), read(data)), (true, Vec::new()));
        drop(second);
        assert!(is_starting(data));
        let address = "127.0.0.1:1".parse().unwrap();
        first.listen(address);
        assert_eq!((is_starting(data), read(data)), (false, vec![address]));
        drop(first);
        // One that was killed while it started is none.
        fs::write(data.join("server-killed.starting"), "").unwrap();
        assert!(!is_starting(data));
        drop(Announced::start(data));
        assert_eq!(names(data), 0);
    }

    /// A second start that failed, ended or was killed left `chat` and `run` without the server that ran: they loaded another
    /// copy of the model.
    #[test]
    fn servers_of_one_folder_do_not_hide_one_another() {
        let data = tempfile::tempdir().unwrap();
        let data = data.path().join("new");
        assert_eq!(read(&data), []);
        let [first, second] = ["127.0.0.1:1", "[::1]:2"].map(|address| address.parse().unwrap());
        let older = announced(&data, first);
        assert_eq!(read(&data), [first]);
        // The time of a file may have a resolution of 10 ms.
        sleep(Duration::from_millis(20));
        let newer = announced(&data, second);
        assert_eq!(read(&data), [second, first]);
        drop(newer);
        assert_eq!(read(&data), [first]);
        drop(older);
        assert_eq!((read(&data), names(&data)), (Vec::new(), 0));
    }

    /// A server that ended removed the address of the one that had begun to listen at its port.
    #[test]
    fn a_server_that_ends_leaves_the_address_of_the_next_one_at_its_port() {
        let data = tempfile::tempdir().unwrap();
        let address = "127.0.0.1:1".parse().unwrap();
        let old = announced(data.path(), address);
        let new = announced(data.path(), address);
        drop(old);
        assert_eq!(read(data.path()), [address]);
        drop(new);
        assert_eq!((read(data.path()), names(data.path())), (Vec::new(), 0));
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
        let server = announced(data, address);
        assert!(!killed.exists());
        assert_eq!(read(data), [address]);
        drop(server);
        assert_eq!(names(data), 1);
    }
}
