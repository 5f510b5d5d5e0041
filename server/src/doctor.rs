//! `steersman doctor`: what this machine has, what the server chooses by it, and what to change.
//!
//! Choices are reported by the functions that make them. Nothing is written; the hub is asked for one page at most.

mod choice;
mod init;
mod place;
mod reach;
mod report;

use std::fmt;
use std::io::Write;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, anyhow};
use indicatif::{BinaryBytes, DecimalBytes};
use serde::Serialize;
use steersman_engine::config::{Config, Device};
use steersman_engine::policy::{LimitedBy, compiler_limits};
use steersman_engine::tools::machine::{self, Machine, Speed};

pub use self::choice::Choice;
use self::choice::choices;
pub use self::init::init;
use self::place::{DataFolder, Hub, Port};
use self::reach::{ChipReach, ModelReach};
pub use self::report::write as write_report;
use crate::config::{FileConfig, ServerConfig};
use crate::system::{self, Load};

/// What the command reports.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of this program.
    version: &'static str,
    machine: Hardware,
    mlx: Mlx,
    speed: Measured,
    /// What the chip can reach, if the table of chips has it.
    chip: Option<ChipReach>,
    /// What one request of the configured model can reach, if its files are here.
    model: Option<ModelReach>,
    policies: Policies,
    data_folder: DataFolder,
    hub: Hub,
    address: Port,
    choices: Vec<Choice>,
    /// What to change, the most important first.
    advice: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
struct Hardware {
    /// Operating system.
    os: String,
    processor: String,
    /// Cores that this process may use.
    cores: usize,
    memory_bytes: u64,
    /// That programs can get now.
    available_bytes: u64,
    /// Before the measurements.
    #[serde(flatten)]
    load: Load,
    /// What powers a Mac.
    power_source: Option<String>,
    gpu: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
struct Mlx {
    version: String,
    /// `CPU` or `GPU`.
    device: &'static str,
    /// What computes f32 products on the CPU.
    blas: Option<String>,
    cpu_kernels: &'static str,
    cuda_kernels: Option<String>,
}

/// How the compiler of policies is limited.
#[derive(Debug, Clone, Serialize)]
struct Policies {
    memory_bytes: u64,
    /// What ends a compiler that exceeds it: `system`, `server` or `nothing`.
    memory_limited_by: &'static str,
    processor_s: u64,
    processor_limited_by: &'static str,
    /// Why the compiler cannot be started.
    problem: Option<String>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Measured {
    /// Bytes of the device's memory read in a second.
    read_bytes_per_s: f64,
    /// Operations a second of a product of large matrices.
    product_flops: f64,
    /// Bytes a second of packed weights, in our kernel for one row.
    packed_bytes_per_s: Option<f64>,
}

/// Inspects the machine, and prints the report to `out`: as text, or as JSON.
///
/// # Errors
/// If the configuration is wrong, or its device does not exist.
pub fn run(file: FileConfig, data_dir: &Path, json: bool, out: &mut impl Write) -> Result<()> {
    let (server, config) = file.check()?;
    let report = Report::new(&server, &config, data_dir)?;
    if json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
        return Ok(());
    }
    report.print(out)
}

impl Report {
    fn new(server: &ServerConfig, config: &Config, data_dir: &Path) -> Result<Self> {
        let machine = Machine::inspect(config).context("inspecting the device")?;
        let (memory_bytes, available_bytes) = system::memory();
        let hardware = Hardware {
            os: system::os(),
            processor: machine::processor(),
            cores: machine.cores,
            memory_bytes,
            available_bytes,
            load: Load::now(),
            power_source: system::power_source(),
            gpu: machine.gpu.clone(),
        };
        // The hub may take its time to answer, or not to.
        let (speed, hub) = thread::scope(|scope| {
            let hub = scope.spawn(Hub::inspect);
            (machine.measure(), hub.join())
        });
        let Speed { read_bytes, product_flops, packed_bytes } = speed.context("measuring")?;
        let hub = hub.map_err(|_| anyhow!("asking the hub panicked"))?;
        let chip = machine.chip.map(|chip| ChipReach::new(&chip, machine.gpu_cores, read_bytes));
        let model = ModelReach::of_configured(config, data_dir, read_bytes, chip.as_ref());
        let mut report = Self {
            chip,
            model,
            version: env!("CARGO_PKG_VERSION"),
            machine: hardware,
            speed: Measured {
                read_bytes_per_s: read_bytes,
                product_flops,
                packed_bytes_per_s: packed_bytes,
            },
            policies: Policies::inspect(config),
            data_folder: DataFolder::inspect(data_dir),
            hub,
            address: Port::inspect(server),
            choices: choices(server, config, &machine),
            advice: Vec::new(),
            mlx: Mlx {
                device: if machine.on_cpu { "CPU" } else { "GPU" },
                version: machine.mlx,
                blas: machine.blas,
                cpu_kernels: machine.cpu_kernels,
                cuda_kernels: machine.cuda_kernels,
            },
        };
        report.advice = report.find_advice(server, config, machine.memory_limit.0);
        Ok(report)
    }

    /// What to change.
    fn find_advice(
        &self,
        server: &ServerConfig,
        config: &Config,
        memory_limit: u64,
    ) -> Vec<String> {
        let mut advice = Vec::new();
        advice.extend(self.data_folder.problem.clone());
        advice.extend(self.address.problem.clone());
        advice.extend(self.policies.problem.as_ref().map(|problem| {
            format!("policies cannot be compiled ({problem}): check the file of this program")
        }));
        let on_cpu = self.mlx.device == "CPU";
        if on_cpu && config.model.device == Device::Auto && place::has_nvidia() {
            advice.push(
                "an NVIDIA GPU is here, and this build computes on the CPU: install steersman-cuda, or build with \
                 --features steersman/cuda"
                    .into(),
            );
        }
        if let Some(load) = self.machine.load.load
            && load >= self.machine.cores as f64
        {
            advice.push(format!(
                "the machine is busy (load {load} on {} cores), so that it was measured too slow: \
                 repeat this when it is quiet",
                self.machine.cores
            ));
        }
        if let Some(pressure) = self.machine.load.thermal_pressure.filter(|name| *name != "nominal")
        {
            advice.push(format!(
                "the machine is warm, and the system slows it down (thermal pressure: {pressure}): let it cool"
            ));
        }
        if self.machine.power_source.as_deref().is_some_and(|source| source.contains("Battery")) {
            advice.push(
                "the machine runs on its battery, and may be slower: connect it to power".into(),
            );
        }
        if on_cpu && self.mlx.cpu_kernels == "portable" {
            advice.push(
                "this processor has neither AVX2 nor NEON: products with packed weights are slow"
                    .into(),
            );
        }
        if config.store.memory_bytes > memory_limit / 2 {
            advice.push(format!(
                "the prefix cache may take {} of {} for weights, requests and cache: set store.memory_bytes to less",
                BinaryBytes(config.store.memory_bytes),
                BinaryBytes(memory_limit)
            ));
        }
        if let Some(free) = self.data_folder.free_bytes
            && config.store.enabled
            && config.store.path.as_os_str().is_empty()
            && free + self.data_folder.bytes < config.store.budget_bytes
        {
            advice.push(format!(
                "saved state may grow to {}, and its disk has {} free: set store.budget_bytes to less, or choose \
                 another folder with --data-dir",
                BinaryBytes(config.store.budget_bytes),
                BinaryBytes(free)
            ));
        }
        if server.api_keys.is_empty()
            && !["127.0.0.1", "::1", "localhost"].contains(&server.host.as_str())
        {
            advice.push(format!(
                "server.host is {}, so others can use the server without a key: set server.api_keys",
                server.host
            ));
        }
        if self.hub.reachable == Some(false) {
            advice.push(format!(
                "{} cannot be reached, so models cannot be downloaded: check the network or HF_ENDPOINT, or name a \
                 local folder with --model",
                self.hub.endpoint
            ));
        }
        advice
    }

    fn print(&self, out: &mut impl Write) -> Result<()> {
        let Self { machine, mlx, speed, policies, data_folder, hub, address, .. } = self;
        let mut line = |name: &str, text: String| writeln!(out, "  {name:<13} {text}");
        line("steersman", format!("{} with MLX {}", self.version, mlx.version))?;
        line(
            "processor",
            format!("{}, {} cores for this process", machine.processor, machine.cores),
        )?;
        let [all, available] = [machine.memory_bytes, machine.available_bytes].map(BinaryBytes);
        line("memory", format!("{all}, {available} available"))?;
        let gpu = machine.gpu.as_deref().unwrap_or(mlx.device);
        line("device", gpu.to_owned())?;
        let cuda = mlx
            .cuda_kernels
            .as_ref()
            .map(|capability| format!("CUDA for compute capability {capability}"));
        let kernels = cuda.unwrap_or_else(|| mlx.cpu_kernels.to_owned());
        line(
            "kernels",
            format!("{kernels}; {}", mlx.blas.as_deref().unwrap_or("products by MLX")),
        )?;
        let read = speed.read_bytes_per_s;
        line(
            "reads",
            format!(
                "{}/s: one request decodes {:.1} tokens/s at most, for each GB of weights that a token needs",
                DecimalBytes(read as u64),
                read / 1e9
            ),
        )?;
        let flops = speed.product_flops;
        let tokens = flops / 2e9;
        line(
            "products",
            format!(
                "{} a second: a prompt is read at {tokens:.0} tokens/s at most, for each billion of parameters",
                operations(flops)
            ),
        )?;
        if let Some(packed) = speed.packed_bytes_per_s {
            line(
                "packed",
                format!(
                    "{}/s of 4-bit weights in a product with one row",
                    DecimalBytes(packed as u64)
                ),
            )?;
        }
        if let Some(chip) = &self.chip {
            line("chip", chip.to_string())?;
        }
        if let Some(model) = &self.model {
            line("model", model.to_string())?;
        }
        line("policies", policies.to_string())?;
        line("data folder", data_folder.to_string())?;
        line("hub", hub.to_string())?;
        line("address", address.to_string())?;
        writeln!(
            out,
            "\nSettings, and why. Those of the configuration and of options always win:"
        )?;
        for choice in &self.choices {
            writeln!(out, "  {choice}")?;
        }
        if self.advice.is_empty() {
            writeln!(out, "\nNothing to change.")?;
        } else {
            writeln!(out, "\nTo change:")?;
        }
        for advice in &self.advice {
            writeln!(out, "  - {advice}")?;
        }
        Ok(())
    }
}

impl Policies {
    fn inspect(config: &Config) -> Self {
        let limits = match config.policy.compiler.clone() {
            Some(program) => compiler_limits(program),
            None => Err("this program cannot be found".into()),
        };
        let name = |limited: LimitedBy| match limited {
            LimitedBy::System => "system",
            LimitedBy::Watch => "server",
            LimitedBy::Nothing => "nothing",
        };
        match limits {
            Ok(limits) => Self {
                memory_bytes: limits.memory_bytes,
                memory_limited_by: name(limits.memory),
                processor_s: limits.seconds,
                processor_limited_by: name(limits.processor),
                problem: None,
            },
            Err(problem) => Self {
                memory_bytes: 0,
                memory_limited_by: "nothing",
                processor_s: 0,
                processor_limited_by: "nothing",
                problem: Some(problem),
            },
        }
    }
}

impl fmt::Display for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(problem) = &self.problem {
            return write!(f, "cannot be compiled: {problem}");
        }
        let Self { memory_bytes, memory_limited_by, processor_s, processor_limited_by, .. } = self;
        write!(
            f,
            "compiled in a process of their own: {} (limited by the {memory_limited_by}), {processor_s} s of \
             processor time (limited by the {processor_limited_by})",
            BinaryBytes(*memory_bytes)
        )
    }
}

/// A number of operations on floats, in GFLOP or TFLOP.
fn operations(flops: f64) -> String {
    if flops < 1e12 {
        format!("{:.1} GFLOP", flops / 1e9)
    } else {
        format!("{:.1} TFLOP", flops / 1e12)
    }
}
