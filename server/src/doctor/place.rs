//! Files, network and hardware around the server, as `doctor` reports them.

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::BinaryBytes;
use serde::Serialize;
use serde_json::Value;

use crate::config::ServerConfig;
use crate::hub;

/// Time for an answer of the hub.
const HUB: Duration = Duration::from_secs(2);

/// Time for an answer of a server on the port.
const SERVER: Duration = Duration::from_millis(500);

/// Most entries of a folder, and of those in it, that are counted.
const ENTRIES: usize = 100_000;

/// The data folder.
#[derive(Debug, Clone, Serialize)]
pub struct DataFolder {
    pub path: PathBuf,
    pub exists: bool,
    /// Bytes of the files of the folder.
    pub bytes: u64,
    /// Free bytes of the disk; `None` if unknown.
    pub free_bytes: Option<u64>,
    /// Permissions, in octal.
    pub mode: Option<String>,
    pub problem: Option<String>,
}

impl DataFolder {
    pub fn inspect(path: &Path) -> Self {
        let metadata = fs::metadata(path).ok();
        let exists = metadata.is_some();
        // The next folder above that exists has the disk.
        let on_disk = path.ancestors().find(|folder| folder.exists());
        let mode = metadata.as_ref().and_then(mode);
        let shown = path.display();
        let problem = match (&metadata, on_disk) {
            (Some(metadata), _) if !metadata.is_dir() => {
                Some(format!("{shown} is not a folder: choose another with --data-dir"))
            }
            (_, Some(folder)) => match tempfile::tempfile_in(folder) {
                Err(error) => Some(format!(
                    "{} cannot be written ({error}): choose another folder with --data-dir",
                    folder.display()
                )),
                Ok(_) if mode.is_some_and(|mode| mode & 0o077 != 0) => Some(format!(
                    "others have access to {shown}, which holds saved state and keys: chmod 700 {shown}"
                )),
                Ok(_) => None,
            },
            (None, None) => {
                Some(format!("{shown} cannot be created: choose another with --data-dir"))
            }
            (Some(_), None) => None,
        };
        Self {
            path: path.into(),
            exists,
            bytes: size(path, &mut ENTRIES.clone()),
            free_bytes: on_disk.and_then(free_bytes),
            mode: mode.map(|mode| format!("{mode:04o}")),
            problem,
        }
    }
}

impl fmt::Display for DataFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        match &self.mode {
            _ if !self.exists => write!(f, ", created at the first start")?,
            Some(mode) => write!(f, ", {} in mode {mode}", BinaryBytes(self.bytes))?,
            None => write!(f, ", {}", BinaryBytes(self.bytes))?,
        }
        match self.free_bytes {
            Some(free) => write!(f, ", {} free on its disk", BinaryBytes(free)),
            None => Ok(()),
        }
    }
}

/// The hub and its cache.
#[derive(Debug, Clone, Serialize)]
pub struct Hub {
    pub endpoint: String,
    /// `None` if HF_HUB_OFFLINE forbids asking.
    pub reachable: Option<bool>,
    pub has_token: bool,
    pub cache: PathBuf,
    /// Repos of models in the cache.
    pub models: usize,
    pub cache_bytes: u64,
}

impl Hub {
    pub fn inspect() -> Self {
        let hub::Hub { endpoint, cache, token, offline } = hub::Hub::from_env();
        let repos: Vec<_> = fs::read_dir(&cache)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("models--"))
            .collect();
        let mut left = ENTRIES;
        Self {
            reachable: (!offline).then(|| answers(&endpoint, HUB)),
            has_token: token.is_some(),
            models: repos.len(),
            cache_bytes: repos.iter().map(|repo| size(&repo.path(), &mut left)).sum(),
            endpoint,
            cache,
        }
    }
}

impl fmt::Display for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.reachable {
            Some(true) => "reachable",
            Some(false) => "not reachable",
            None => "not asked (HF_HUB_OFFLINE)",
        };
        let token = if self.has_token { "a token" } else { "no token" };
        let (models, bytes) = (self.models, BinaryBytes(self.cache_bytes));
        let cache = self.cache.display();
        write!(f, "{}, {state}, {token}; {models} models with {bytes} in {cache}", self.endpoint)
    }
}

/// The configured address.
#[derive(Debug, Clone, Serialize)]
pub struct Port {
    pub host: String,
    pub port: u16,
    /// What uses it: nothing, `steersman`, or `another program`.
    pub used_by: Option<&'static str>,
    pub problem: Option<String>,
}

impl Port {
    pub fn inspect(server: &ServerConfig) -> Self {
        let (host, port) = (server.host.clone(), server.port);
        let (used_by, problem) = match TcpListener::bind((host.as_str(), port)) {
            Ok(_) => (None, None),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                let health = get(&format!("http://{host}:{port}/health"), SERVER);
                if health.is_some_and(|health| {
                    health["engines"].is_array() || health["status"] == "loading"
                }) {
                    (Some("steersman"), None)
                } else {
                    let problem = format!(
                        "another program uses port {port}: choose one with --port or server.port"
                    );
                    (Some("another program"), Some(problem))
                }
            }
            Err(error) => {
                let problem = format!(
                    "the server cannot listen on {host}, port {port} ({error}): change server.host or server.port"
                );
                (None, Some(problem))
            }
        };
        Self { host, port, used_by, problem }
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.used_by, &self.problem) {
            (Some("steersman"), _) => "a server is running there",
            (Some(_), _) => "another program is using it",
            (None, Some(_)) => "not available",
            (None, None) => "free",
        };
        write!(f, "{}:{}, {state}", self.host, self.port)
    }
}

/// Whether a server answers at all.
fn answers(url: &str, within: Duration) -> bool {
    agent(within).head(url).call().is_ok()
}

/// The JSON at `url`, whatever its status is.
fn get(url: &str, within: Duration) -> Option<Value> {
    let text = agent(within).get(url).call().ok()?.body_mut().read_to_string().ok()?;
    serde_json::from_str(&text).ok()
}

fn agent(within: Duration) -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(within))
        // A redirection is an answer.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false);
    ureq::Agent::new_with_config(config.build())
}

/// Bytes of the files in a folder and those below it; symbolic links are not followed. Counts at most `left` entries.
fn size(folder: &Path, left: &mut usize) -> u64 {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if *left == 0 {
            return bytes;
        }
        *left -= 1;
        bytes += match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => size(&entry.path(), left),
            Ok(metadata) if metadata.is_file() => metadata.len(),
            _ => 0,
        };
    }
    bytes
}

#[cfg(unix)]
fn mode(metadata: &fs::Metadata) -> Option<u32> {
    Some(std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o7777)
}

#[cfg(not(unix))]
fn mode(_metadata: &fs::Metadata) -> Option<u32> {
    None
}

#[cfg(unix)]
#[allow(clippy::useless_conversion, reason = "the numbers have 32 bits on macOS")]
fn free_bytes(folder: &Path) -> Option<u64> {
    let disk = nix::sys::statvfs::statvfs(folder).ok()?;
    Some(u64::from(disk.blocks_available()) * u64::from(disk.fragment_size()))
}

#[cfg(not(unix))]
fn free_bytes(_folder: &Path) -> Option<u64> {
    None
}

/// Whether the driver of an NVIDIA GPU is loaded.
pub fn has_nvidia() -> bool {
    Path::new("/proc/driver/nvidia/version").exists()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn inspect(port: u16) -> Port {
        Port::inspect(&ServerConfig { port, ..ServerConfig::default() })
    }

    #[test]
    fn a_port_is_free_or_has_a_server_or_another_program() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let serve = |body: &'static str| {
            let listener = listener.try_clone().unwrap();
            std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 1024]);
                let length = body.len();
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
                stream.write_all((head + body).as_bytes()).unwrap();
            })
        };
        let server = serve(r#"{"status": "ok", "engines": []}"#);
        let found = inspect(port);
        server.join().unwrap();
        assert_eq!((found.used_by, found.problem), (Some("steersman"), None));
        let server = serve("hello");
        let found = inspect(port);
        server.join().unwrap();
        assert_eq!(found.used_by, Some("another program"));
        assert!(found.problem.unwrap().contains("--port"));
        drop(listener);
        assert_eq!(inspect(port).used_by, None);
    }

    #[cfg(unix)]
    #[test]
    fn a_data_folder_that_others_can_read_is_a_problem() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let missing = DataFolder::inspect(&path);
        assert_eq!((missing.exists, missing.problem), (false, None));
        fs::create_dir(&path).unwrap();
        fs::write(path.join("state"), [0; 300]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let open = DataFolder::inspect(&path);
        assert_eq!((open.bytes, open.mode.as_deref()), (300, Some("0755")));
        assert!(open.problem.unwrap().contains("chmod 700"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(DataFolder::inspect(&path).problem, None);
        let file = DataFolder::inspect(&path.join("state"));
        assert!(file.problem.unwrap().contains("is not a folder"));
    }
}
