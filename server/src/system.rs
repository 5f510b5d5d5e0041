//! What the system says of this machine and this process now: for `/health` and `steersman doctor`.
//!
//! Values that a system does not give are `None`, never guessed. `calls.rs` has the calls; what needs a program of the
//! system (`vm_stat`, `pmset`) is for `doctor` alone.

mod calls;

use std::fs;
use std::process::Command;
use std::sync::OnceLock;
use std::time::UNIX_EPOCH;

use schemars::JsonSchema;
use serde::Serialize;
use steersman_engine::policy::ProcessUsage;
use steersman_engine::tools::machine::sysctl;

/// This process, and how busy and how warm the machine is.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Load {
    /// Memory of this process: resident, or on macOS its footprint, which has the arrays of a GPU.
    pub process_bytes: Option<u64>,
    /// Processes that ran or waited for a core in the last minute, on average.
    pub load: Option<f64>,
    /// How much the system slows the machine down because it is warm, on macOS: `nominal`, `moderate`, `heavy`,
    /// `trapping` or `sleeping`.
    pub thermal_pressure: Option<&'static str>,
}

impl Load {
    /// The load now. Starts no program.
    pub fn now() -> Self {
        let bytes = ProcessUsage::of(std::process::id()).bytes;
        Self {
            process_bytes: (bytes > 0).then_some(bytes),
            load: calls::load_average().map(|load| (load * 100.0).round() / 100.0),
            thermal_pressure: calls::thermal_pressure().and_then(thermal_name),
        }
    }
}

/// This process, for `/metrics`.
#[derive(Debug, Clone, Default)]
pub struct Process {
    /// Seconds since 1970.
    pub started: f64,
    /// Processor time in seconds.
    pub processor: Option<f64>,
    /// As [`Load::process_bytes`].
    pub resident_bytes: Option<u64>,
    /// Virtual memory.
    pub virtual_bytes: Option<u64>,
    /// Open files, connections included.
    pub open_files: Option<u64>,
    /// The limit on them.
    pub most_files: Option<u64>,
}

impl Process {
    /// The values now.
    pub fn now() -> Self {
        let usage = ProcessUsage::of(std::process::id());
        let has_usage = usage.bytes > 0;
        Self {
            started: start_time(),
            processor: has_usage.then_some(usage.processor.as_secs_f64()),
            resident_bytes: has_usage.then_some(usage.bytes),
            virtual_bytes: virtual_bytes(),
            // On Linux a link to `/proc/self/fd`. The folder that is read here is one of the files.
            open_files: fs::read_dir("/dev/fd").ok().map(|files| files.count() as u64),
            most_files: most_files(),
        }
    }
}

/// When the process started, in seconds since 1970: the time of the first call, which `main` makes.
pub fn start_time() -> f64 {
    static STARTED: OnceLock<f64> = OnceLock::new();
    *STARTED.get_or_init(|| UNIX_EPOCH.elapsed().map_or(0.0, |time| time.as_secs_f64()))
}

/// Virtual memory, on Linux: on macOS it has no meaning, since it contains what all programs share.
fn virtual_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

#[cfg(unix)]
fn most_files() -> Option<u64> {
    rlimit::getrlimit(rlimit::Resource::NOFILE).ok().map(|(soft, _)| soft)
}

#[cfg(not(unix))]
fn most_files() -> Option<u64> {
    None
}

/// The name of a level of `OSThermalNotification.h`.
fn thermal_name(level: u64) -> Option<&'static str> {
    let names = ["nominal", "moderate", "heavy", "trapping", "sleeping"];
    names.get(usize::try_from(level).ok()?).copied()
}

/// Bytes of memory, and those that programs can get now.
pub fn memory() -> (u64, u64) {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
    };
    let total = field("MemTotal:").or_else(|| sysctl("hw.memsize")?.parse().ok()).unwrap_or(0);
    let available = field("MemAvailable:").or_else(|| available_bytes(&output("vm_stat", &[])?));
    (total, available.unwrap_or(total))
}

/// Bytes in the output of macOS's `vm_stat` that programs can get without paging: free pages, and those that hold files.
fn available_bytes(vm_stat: &str) -> Option<u64> {
    let (_, rest) = vm_stat.split_once("page size of ")?;
    let page: u64 = rest.split_whitespace().next()?.parse().ok()?;
    let pages = |name: &str| -> Option<u64> {
        let line = vm_stat.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().trim_end_matches('.').parse().ok()
    };
    let free = pages("Pages free")? + pages("Pages speculative").unwrap_or(0);
    Some((free + pages("File-backed pages").unwrap_or(0)) * page)
}

/// What powers a Mac: `AC Power`, `Battery Power`; `None` on other systems.
pub fn power_source() -> Option<String> {
    power_name(&output("pmset", &["-g", "batt"])?)
}

/// The source in the output of `pmset -g batt`: `Now drawing from 'AC Power'`.
fn power_name(pmset: &str) -> Option<String> {
    pmset.lines().next()?.split('\'').nth(1).map(str::to_owned)
}

/// Version of the operating system: `macOS 15.5`, or the name of a Linux distribution.
pub fn os() -> String {
    if let Some(version) = output("sw_vers", &["-productVersion"]) {
        return format!("macOS {}", version.trim());
    }
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or_else(|| std::env::consts::OS.into(), |name| name.trim_matches('"').to_owned())
}

/// What a program of macOS prints.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_load_of_this_machine_is_known() {
        let load = Load::now();
        assert!(load.process_bytes.unwrap() > 1 << 20, "{load:?}");
        assert!(load.load.unwrap() >= 0.0, "{load:?}");
        let (total, available) = memory();
        assert!(available > 0 && available <= total, "{total} {available}");
        assert!(!os().is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_is_known() {
        let now = UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        let process = Process::now();
        assert!(process.started > 1.6e9 && process.started <= now + 60.0, "{process:?}");
        assert_eq!(process.started, Process::now().started);
        assert!(process.processor.unwrap() >= 0.0, "{process:?}");
        assert!(process.virtual_bytes >= process.resident_bytes, "{process:?}");
        assert!(process.open_files.unwrap() > 2, "{process:?}");
        assert!(process.most_files >= process.open_files, "{process:?}");
    }

    /// Recorded on a Mac with 16 GB.
    #[test]
    fn what_macos_prints_is_read() {
        let vm_stat = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n\
                       Pages free:                               60000.\n\
                       Pages active:                            300000.\n\
                       Pages inactive:                          290000.\n\
                       Pages speculative:                         4000.\n\
                       Pages wired down:                        200000.\n\
                       File-backed pages:                       136000.\n\
                       Anonymous pages:                         458000.\n";
        assert_eq!(available_bytes(vm_stat), Some(200_000 * 16_384));
        assert_eq!(available_bytes("Pages free: 1."), None);
        let pmset = "Now drawing from 'AC Power'\n -InternalBattery-0 (id=1)\t100%; charged;\n";
        assert_eq!(power_name(pmset).as_deref(), Some("AC Power"));
        assert_eq!(power_name(""), None);
        assert_eq!(
            [0, 1, 4, 5].map(thermal_name),
            [Some("nominal"), Some("moderate"), Some("sleeping"), None]
        );
    }
}
