//! Ranks that are processes of this machine: the first one starts the others, which follow it until it ends.
//!
//! MLX finds the processes of a group by environment variables, which are set when a process starts. So a command that computes
//! with several ranks starts itself again as the first of them ([`become_first`]).

use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use steersman_engine::config::ModelConfig;
use steersman_engine::policy::this_program;
use steersman_engine::tools::ranks::{Backend, follow_first_rank};

/// The number of ranks, in the environment of the first one.
const COUNT: &str = "STEERSMAN_RANKS";

/// The only argument of a rank that follows the first one.
const FOLLOW: &str = "__follow-first-rank";

/// Variables that MLX reads: which rank this is, where a ring finds the others, where NCCL does, and how many they are.
const RANK: &str = "MLX_RANK";
const HOSTS: &str = "MLX_HOSTFILE";
const NCCL_HOST: &str = "NCCL_HOST_IP";
const NCCL_PORT: &str = "NCCL_PORT";
const SIZE: &str = "MLX_WORLD_SIZE";

/// What carries the arrays of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Over {
    /// The memory of this process: ranks are threads
    Threads,
    /// TCP connections of this machine: ranks are processes that compute on the CPU
    Ring,
    /// NVIDIA's library: ranks are processes, each with a GPU of this machine
    Nccl,
}

impl Over {
    /// The backend; `None` for threads.
    fn backend(self) -> Option<Backend> {
        match self {
            Self::Threads => None,
            Self::Ring => Some(Backend::Ring),
            Self::Nccl => Some(Backend::Nccl),
        }
    }
}

/// What the first rank tells another one before its log.
#[derive(Serialize, Deserialize)]
struct Task {
    over: Over,
    folder: PathBuf,
    model: ModelConfig,
}

/// Starts this program again, in place of this process, as the first of `count` ranks. Returns if it is that already.
///
/// # Errors
/// If the addresses of the ranks cannot be found or written, or the program cannot be started.
pub fn become_first(over: Over, count: u32, data_dir: &Path) -> Result<()> {
    if std::env::var(COUNT).is_ok_and(|set| set == count.to_string()) {
        return Ok(());
    }
    let mut first = Command::new(this_program().context("the path of this program is unknown")?);
    first.args(std::env::args_os().skip(1)).env(COUNT, count.to_string()).env(RANK, "0");
    match over {
        Over::Threads => return Ok(()),
        Over::Ring => {
            let file = data_dir.join(format!("ranks-{}.json", std::process::id()));
            let addresses: Vec<_> =
                free_ports(count)?.into_iter().map(|port| [format!("127.0.0.1:{port}")]).collect();
            std::fs::create_dir_all(data_dir)?;
            std::fs::write(&file, serde_json::to_string(&addresses)?)
                .with_context(|| file.display().to_string())?;
            first.env(HOSTS, file);
        }
        Over::Nccl => {
            let [port] = free_ports(1)?[..] else { bail!("there is no free port") };
            first.env(NCCL_HOST, "127.0.0.1").env(NCCL_PORT, port.to_string());
            // A process that sees the other's device uses it in its streams.
            first.env(SIZE, count.to_string()).env("CUDA_VISIBLE_DEVICES", "0");
        }
    }
    Err(first.exec()).context("starting the first rank")
}

/// Ports of this machine that nobody listens to, until somebody takes them.
fn free_ports(count: u32) -> Result<Vec<u16>> {
    let listeners = (0..count).map(|_| TcpListener::bind("127.0.0.1:0"));
    let listeners: Vec<TcpListener> = listeners.collect::<std::io::Result<_>>()?;
    listeners.iter().map(|listener| Ok(listener.local_addr()?.port())).collect()
}

/// What the other ranks read the log from, one each.
type Outputs = Vec<Box<dyn Write>>;

/// The other ranks, which end with this.
pub struct Others {
    processes: Vec<Child>,
}

impl Others {
    /// Starts the other ranks of `count`; returns them with an output for the log of each.
    ///
    /// # Errors
    /// If a process cannot be started, or ends at once.
    pub fn start(
        over: Over,
        count: u32,
        folder: &Path,
        model: &ModelConfig,
    ) -> Result<(Self, Backend, Outputs)> {
        let backend = over.backend().context("threads are no processes")?;
        let program = this_program().context("the path of this program is unknown")?;
        let task = Task { over, folder: folder.into(), model: model.clone() };
        let task = serde_json::to_string(&task)? + "\n";
        let mut others = Self { processes: Vec::new() };
        let mut outputs: Outputs = Vec::new();
        for rank in 1..count {
            let mut command = Command::new(&program);
            command.arg(FOLLOW).env(RANK, rank.to_string()).env_remove(COUNT);
            if over == Over::Nccl {
                command.env("CUDA_VISIBLE_DEVICES", rank.to_string());
            }
            let process = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
            let mut process = process.with_context(|| format!("starting rank {rank}"))?;
            let mut output = process.stdin.take().expect("it is piped");
            others.processes.push(process);
            output.write_all(task.as_bytes()).with_context(|| format!("starting rank {rank}"))?;
            outputs.push(Box::new(output));
        }
        Ok((others, backend, outputs))
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // One that waits for this process in the middle of a pass would wait for ever.
            let _ = process.kill();
            let _ = process.wait();
        }
        if let Some(file) = std::env::var_os(HOSTS) {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Returns true if this process was started to follow the first rank.
pub fn is_follower() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == FOLLOW)
}

/// Follows the first rank, whose task and log are `input`.
///
/// # Errors
/// If the task cannot be read, and those of [`follow_first_rank`].
pub fn follow(mut input: impl BufRead) -> Result<()> {
    let mut task = String::new();
    input.read_line(&mut task)?;
    let Task { over, folder, model } =
        serde_json::from_str(&task).context("only the first rank starts another one")?;
    let backend = over.backend().context("threads are no processes")?;
    follow_first_rank(&model, &folder, backend, input)
        .with_context(|| format!("rank {}", std::env::var(RANK).unwrap_or_default()))
}
