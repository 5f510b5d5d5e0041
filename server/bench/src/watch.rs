//! What is used while a server works: its resident memory, and the energy of the machine's processors and NVIDIA GPUs.
//!
//! Energy of processors comes from the counters of Linux's powercap (RAPL), which only root may read on most machines;
//! that of GPUs is the power that `nvidia-smi` reports, times the time between two reports. Virtual machines often have
//! neither.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::machine::resident;

/// Between two looks at the memory of a process and the counters of energy, which wrap after a minute on some machines.
const INTERVAL: Duration = Duration::from_millis(50);

/// Milliseconds between two reports of a GPU's power.
const POWER_INTERVAL: &str = "100";

/// Where Linux has the counters of energy.
const POWERCAP: &str = "/sys/class/powercap";

/// Follows a server's memory and the machine's energy until it is stopped.
pub struct Watch {
    stopped: Arc<AtomicBool>,
    thread: JoinHandle<(u64, Option<f64>)>,
}

impl Watch {
    /// Begins. Without a process, memory is not measured.
    pub fn start(pid: Option<u32>) -> Self {
        let stopped = Arc::new(AtomicBool::new(false));
        let end = stopped.clone();
        let mut energy = Energy::start(Path::new(POWERCAP));
        let thread = std::thread::spawn(move || {
            let mut peak = 0;
            loop {
                peak = peak.max(pid.and_then(resident).unwrap_or(0));
                let joules = energy.joules();
                if end.load(Ordering::Relaxed) {
                    return (peak, joules);
                }
                std::thread::park_timeout(INTERVAL);
            }
        });
        Self { stopped, thread }
    }

    /// The figures `peak_bytes` and `energy_j`, where they could be read.
    pub fn stop(self) -> impl Iterator<Item = (String, f64)> {
        self.stopped.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        let (peak, joules) = self.thread.join().unwrap_or_default();
        let peak = Some(peak as f64).filter(|bytes| *bytes > 0.0);
        let figures = [("peak_bytes", peak), ("energy_j", joules)];
        figures.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)))
    }
}

/// Energy since a moment.
struct Energy {
    packages: Vec<Package>,
    /// Joules of packages.
    joules: f64,
    /// Millijoules of GPUs at the beginning.
    gpu: Option<(&'static AtomicU64, u64)>,
}

/// A counter of a processor.
struct Package {
    counter: PathBuf,
    /// Microjoules when it was read last.
    last: u64,
    /// Microjoules after which it begins again.
    range: u64,
}

impl Energy {
    fn start(powercap: &Path) -> Self {
        let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse().ok();
        let zones = fs::read_dir(powercap).into_iter().flatten().flatten();
        let packages = zones.filter_map(|zone| {
            // Zones of a package are in zones of their own, and would be counted twice.
            let name = fs::read_to_string(zone.path().join("name")).ok()?;
            let counter = zone.path().join("energy_uj");
            let last = name.starts_with("package").then(|| number(counter.clone()))??;
            Some(Package { counter, last, range: number(zone.path().join("max_energy_range_uj"))? })
        });
        let gpu = gpu_millijoules().map(|counter| (counter, counter.load(Ordering::Relaxed)));
        Self { packages: packages.collect(), joules: 0.0, gpu }
    }

    /// Joules since the start; `None` if nothing tells them.
    fn joules(&mut self) -> Option<f64> {
        for package in &mut self.packages {
            let text = fs::read_to_string(&package.counter).ok()?;
            let now: u64 = text.trim().parse().ok()?;
            let used = now.checked_sub(package.last).unwrap_or(package.range - package.last + now);
            self.joules += used as f64 / 1e6;
            package.last = now;
        }
        let gpu = self.gpu.map(|(counter, start)| {
            counter.load(Ordering::Relaxed).saturating_sub(start) as f64 / 1e3
        });
        if self.packages.is_empty() { gpu } else { Some(self.joules + gpu.unwrap_or(0.0)) }
    }
}

/// Millijoules of all NVIDIA GPUs since the first call; `None` if there are none.
fn gpu_millijoules() -> Option<&'static AtomicU64> {
    static MILLIJOULES: AtomicU64 = AtomicU64::new(0);
    static HAS_GPU: OnceLock<bool> = OnceLock::new();
    let start = || {
        let mut command = Command::new("nvidia-smi");
        command.args(["--query-gpu=index,power.draw", "--format=csv,noheader,nounits"]);
        command.args(["--loop-ms", POWER_INTERVAL]).stdout(Stdio::piped()).stderr(Stdio::null());
        // It ends when nobody reads its output any more.
        let reports = command.spawn().ok().and_then(|mut process| process.stdout.take());
        let Some(reports) = reports else { return false };
        std::thread::spawn(move || add_reports(reports, &MILLIJOULES));
        true
    };
    HAS_GPU.get_or_init(start).then_some(&MILLIJOULES)
}

/// Adds the energy of reports of `index, watts`.
fn add_reports(reports: ChildStdout, millijoules: &AtomicU64) {
    let mut last: HashMap<String, Instant> = HashMap::new();
    for line in BufReader::new(reports).lines().map_while(Result::ok) {
        let Some((index, watts)) = line.split_once(", ") else { continue };
        let Ok(watts) = watts.trim().parse::<f64>() else { continue };
        let now = Instant::now();
        if let Some(before) = last.insert(index.to_owned(), now) {
            let used = watts * (now - before).as_secs_f64() * 1e3;
            millijoules.fetch_add(used as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_memory() {
        let figures: HashMap<_, _> = Watch::start(Some(std::process::id())).stop().collect();
        assert!(figures["peak_bytes"] > f64::from(1 << 20));
    }

    /// Counters of packages are added, also when they begin again; those of their parts are not.
    #[test]
    fn energy_of_packages_is_added() {
        let folder = tempfile::tempdir().unwrap();
        let write = |zone: &str, file: &str, text: &str| {
            fs::create_dir_all(folder.path().join(zone)).unwrap();
            fs::write(folder.path().join(zone).join(file), text).unwrap();
        };
        for (zone, name) in [("rapl:0", "package-0"), ("rapl:1", "package-1"), ("rapl:0:0", "core")]
        {
            write(zone, "name", name);
            write(zone, "energy_uj", "9000000\n");
            write(zone, "max_energy_range_uj", "10000000\n");
        }
        let mut energy = Energy::start(folder.path());
        energy.gpu = None;
        write("rapl:0", "energy_uj", "9500000\n");
        write("rapl:1", "energy_uj", "2000000\n");
        write("rapl:0:0", "energy_uj", "9700000\n");
        assert_eq!(energy.joules(), Some(3.5));
        write("rapl:0", "energy_uj", "9750000\n");
        assert_eq!(energy.joules(), Some(3.75));
        let mut none = Energy::start(&folder.path().join("rapl:0"));
        none.gpu = None;
        assert_eq!(none.joules(), None);
    }
}
