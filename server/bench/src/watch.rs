//! What is used while a server works: its resident memory, and the energy of the machine's processors and NVIDIA GPUs.
//!
//! Energy of processors comes from the counters of Linux's powercap (RAPL), which only root may read on most machines. They
//! hold the processor package, not the memory. Energy of GPUs is the power that `nvidia-smi` reports, times the time between
//! two reports. Virtual machines often have neither. Where a part is unknown, there is no figure.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::machine::{gpus, resident};

/// Between two looks at the memory of a process and the counters of energy, which wrap after a minute on some machines.
const INTERVAL: Duration = Duration::from_millis(50);

/// Milliseconds between two reports of a GPU's power.
const POWER_INTERVAL: u64 = 100;

/// Reports of each GPU during a request without which it has no figure.
const REPORTS: u64 = 10;

/// Where Linux has the counters of energy.
const POWERCAP: &str = "/sys/class/powercap";

/// Follows a server's memory and the machine's energy until it is stopped.
pub struct Watch {
    stopped: Arc<AtomicBool>,
    thread: JoinHandle<(u64, Option<f64>)>,
}

impl Watch {
    /// Begins. Without a process on this machine, nothing is measured.
    pub fn start(pid: Option<u32>) -> Self {
        let stopped = Arc::new(AtomicBool::new(false));
        let end = stopped.clone();
        let mut energy = pid.map(|_| Energy::start(Path::new(POWERCAP), gpu_power()));
        let thread = std::thread::spawn(move || {
            let mut peak = 0;
            loop {
                peak = peak.max(pid.and_then(resident).unwrap_or(0));
                let joules = energy.as_mut().and_then(Energy::joules);
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

/// Energy used since the start.
struct Energy {
    packages: Vec<Package>,
    /// Joules of packages.
    joules: f64,
    /// Reports of GPUs, and their millijoules and number at the start.
    gpu: Option<(&'static Power, u64, u64)>,
}

/// A counter of a processor.
struct Package {
    counter: PathBuf,
    /// Microjoules when it was read last.
    last: u64,
    /// Microjoules after which it wraps to 0.
    range: u64,
}

/// What the GPUs of the machine have reported.
#[derive(Default)]
struct Power {
    millijoules: AtomicU64,
    /// Reports of the GPU with the fewest.
    reports: AtomicU64,
}

impl Energy {
    fn start(powercap: &Path, gpu: Option<&'static Power>) -> Self {
        let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse().ok();
        let zones = fs::read_dir(powercap).into_iter().flatten().flatten();
        // Some machines show a package twice, by two ways to read it, or once for each of its dies.
        let mut packages = BTreeMap::new();
        for zone in zones {
            let name = fs::read_to_string(zone.path().join("name")).unwrap_or_default();
            let Some(package) = name.trim().strip_prefix("package-") else { continue };
            let package = package.split('-').next().unwrap_or_default().to_owned();
            let counter = zone.path().join("energy_uj");
            let range = number(zone.path().join("max_energy_range_uj"));
            if let (Some(last), Some(range)) = (number(counter.clone()), range) {
                packages.entry(package).or_insert(Package { counter, last, range });
            }
        }
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let gpu = gpu.map(|power| (power, load(&power.millijoules), load(&power.reports)));
        Self { packages: packages.into_values().collect(), joules: 0.0, gpu }
    }

    /// Joules since the start; `None` if a part is unknown, or GPUs have hardly reported.
    fn joules(&mut self) -> Option<f64> {
        for package in &mut self.packages {
            let text = fs::read_to_string(&package.counter).ok()?;
            let now: u64 = text.trim().parse().ok()?;
            let used = now.checked_sub(package.last).unwrap_or(package.range - package.last + now);
            self.joules += used as f64 / 1e6;
            package.last = now;
        }
        let Some((power, millijoules, reports)) = self.gpu else {
            return (!self.packages.is_empty()).then_some(self.joules);
        };
        let known = power.reports.load(Ordering::Relaxed) >= reports + REPORTS;
        let used = power.millijoules.load(Ordering::Relaxed).saturating_sub(millijoules);
        known.then_some(self.joules + used as f64 / 1e3)
    }
}

/// What the NVIDIA GPUs report from the first call on; `None` if there is no `nvidia-smi`.
fn gpu_power() -> Option<&'static Power> {
    static POWER: OnceLock<Option<Power>> = OnceLock::new();
    static START: Once = Once::new();
    let gpus = POWER.get_or_init(|| (!gpus().is_empty()).then(Power::default)).as_ref()?;
    START.call_once(|| {
        let mut command = Command::new("nvidia-smi");
        // `power.draw` is an average over a second on most GPUs.
        command.args(["--query-gpu=index,power.draw.instant", "--format=csv,noheader,nounits"]);
        command.args(["--loop-ms", &POWER_INTERVAL.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        std::thread::spawn(move || {
            let Ok(mut process) = command.spawn() else { return };
            if let Some(reports) = process.stdout.take() {
                add_reports(BufReader::new(reports), gpus);
            }
            // It ends when nobody reads its output any more: with this program at the latest.
            let _ = process.wait();
        });
    });
    Some(gpus)
}

/// Adds the energy of reports of `index, watts`.
fn add_reports(reports: impl BufRead, power: &Power) {
    let mut last: HashMap<String, (Instant, u64)> = HashMap::new();
    for line in reports.lines().map_while(Result::ok) {
        let Some((index, watts)) = line.split_once(", ") else { continue };
        let Ok(watts) = watts.trim().parse::<f64>() else { continue };
        let now = Instant::now();
        let (before, count) = last.get(index).copied().unwrap_or((now, 0));
        let used = watts * (now - before).as_secs_f64() * 1e3;
        power.millijoules.fetch_add(used as u64, Ordering::Relaxed);
        last.insert(index.to_owned(), (now, count + 1));
        let least = last.values().map(|(_, count)| *count).min().unwrap_or(0);
        power.reports.store(least, Ordering::Relaxed);
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
        let mut energy = Energy::start(folder.path(), None);
        let count = |zones: [&str; 2], text: &str| {
            zones.iter().for_each(|zone| write(zone, "energy_uj", text));
        };
        count(["rapl:0", "rapl-mmio:0"], "9500000\n");
        count(["rapl:1", "rapl:2"], "2000000\n");
        count(["rapl:0:0"; 2], "9700000\n");
        assert_eq!(energy.joules(), Some(3.5));
        count(["rapl:0", "rapl-mmio:0"], "9750000\n");
        assert_eq!(energy.joules(), Some(3.75));
        assert_eq!(Energy::start(&folder.path().join("rapl:0"), None).joules(), None);
    }

    /// Reports without watts are none, and energy is unknown until all GPUs have reported.
    #[test]
    fn energy_of_gpus_is_power_times_time() {
        let power: &'static Power = Box::leak(Box::default());
        let mut energy = Energy::start(Path::new("/nowhere"), Some(power));
        add_reports("0, [N/A]\nnonsense\n".as_bytes(), power);
        assert_eq!(energy.joules(), None);
        let reports = "0, 300.00\n1, 100.00\n".repeat(REPORTS as usize);
        add_reports(reports.as_bytes(), power);
        assert!(energy.joules().is_some());
        power.millijoules.store(2500, Ordering::Relaxed);
        assert_eq!(energy.joules(), Some(2.5));
    }
}
