//! The machine: what results name, and the memory of a server's process.
//!
//! Reads `/proc`; where there is none, the fields are empty.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the CPU.
    pub cpu: Option<String>,
    /// Threads that the process may use.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Names of NVIDIA GPUs.
    pub gpus: Vec<String>,
    /// Operating system.
    pub os: String,
    /// Architecture.
    pub arch: String,
    /// Load average of the last minute when the run began: other work makes figures worse.
    pub load: Option<f64>,
}

impl Machine {
    /// This machine.
    pub fn this() -> Self {
        let cpus = read("/proc/cpuinfo");
        let os = read("/etc/os-release");
        let named = field(&os, "PRETTY_NAME", '=').map(|name| name.trim_matches('"').to_owned());
        let memory = field(&read("/proc/meminfo"), "MemTotal", ':').and_then(|text| kib(&text));
        let named = named.or_else(|| {
            let version = mac("/usr/bin/sw_vers", &["-productVersion"])?;
            Some(format!("macOS {version}"))
        });
        let sysctl = |name| mac("/usr/sbin/sysctl", &["-n", name]);
        let load = read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok());
        Self {
            cpu: field(&cpus, "model name", ':').or_else(|| sysctl("machdep.cpu.brand_string")),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory.or_else(|| sysctl("hw.memsize")?.parse().ok()),
            gpus: gpus(),
            os: named.unwrap_or_else(|| std::env::consts::OS.into()),
            arch: std::env::consts::ARCH.into(),
            load: load.or_else(|| first_load(&sysctl("vm.loadavg")?)),
        }
    }
}

/// What a program of macOS prints; `None` on other systems.
fn mac(program: &str, arguments: &[&str]) -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    output(Command::new(program).args(arguments))
}

/// The load of the last minute in macOS's `{ 2.11 1.98 1.80 }`.
fn first_load(text: &str) -> Option<f64> {
    text.trim_start_matches('{').split_whitespace().next()?.parse().ok()
}

/// Names of NVIDIA GPUs.
pub fn gpus() -> Vec<String> {
    let mut list = Command::new("nvidia-smi");
    list.args(["--query-gpu=name", "--format=csv,noheader"]);
    output(&mut list).map_or_else(Vec::new, |names| names.lines().map(str::to_owned).collect())
}

/// The commit of the working folder, with `-dirty` if it has changes; `None` outside a repository.
pub fn commit() -> Option<String> {
    let git = |arguments: &[&str]| output(Command::new("git").args(arguments));
    let commit = git(&["rev-parse", "HEAD"])?;
    let is_dirty = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(format!("{commit}{}", if is_dirty { "-dirty" } else { "" }))
}

/// What a program prints, if it is there and succeeds.
fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value of the first line that begins with `name`.
fn field(text: &str, name: &str, separator: char) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(separator)?.1.trim().to_owned())
}

fn kib(text: &str) -> Option<u64> {
    Some(text.strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// The process that listens on a port of this machine.
pub fn listening_pid(port: u16) -> Option<u32> {
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .flat_map(|path| listening_inodes(&read(path), port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|pid: &u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files
            .filter_map(|file| fs::read_link(file.path()).ok())
            .any(|target| inodes.iter().any(|inode| target == Path::new(inode)))
    })
}

/// The inodes of the sockets that listen on a port, in the format of `/proc/net/tcp`.
fn listening_inodes(table: &str, port: u16) -> Vec<String> {
    let ending = format!(":{port:04X}");
    let rows = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    // Columns: number, local address, remote address, state (0A listens), .., inode.
    rows.filter(|row| row.len() > 9 && row[1].ends_with(&ending) && row[3] == "0A")
        .map(|row| row[9].to_owned())
        .collect()
}

/// Resident bytes of a process.
pub fn resident(pid: u32) -> Option<u64> {
    kib(&field(&read(&format!("/proc/{pid}/status")), "VmRSS", ':')?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_sockets_are_found_by_port_and_state() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:2CAC 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n\
             1: 0100007F:2CAC 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4712 1\n\
             2: 0100007F:2CAD 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1\n";
        assert_eq!(listening_inodes(table, 0x2CAC), ["4711"]);
        assert!(listening_inodes(table, 80).is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_is_found_by_its_port_and_has_memory() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let this = std::process::id();
        assert_eq!(listening_pid(port), Some(this));
        assert!(resident(this).unwrap() > 1 << 20);
    }

    #[test]
    fn the_load_of_a_mac_is_read() {
        assert_eq!(first_load("{ 2.11 1.98 1.80 }"), Some(2.11));
        assert_eq!(first_load("{ }"), None);
    }

    #[test]
    fn the_machine_has_cores_and_an_architecture() {
        let machine = Machine::this();
        assert!(machine.cores > 0 && !machine.arch.is_empty() && !machine.os.is_empty());
    }
}
