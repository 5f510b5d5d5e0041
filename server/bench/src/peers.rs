//! `bench peers`: installs other servers, starts them and this one on a model, and runs the suite against all.
//!
//! Each peer is a row of [`PEERS`]: packages of a fixed version in a virtual environment of its own, the format that it
//! loads, and how it is started. A peer that cannot take part is named in the results, with the reason.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::client::Client;
use crate::results::Skip;
use crate::servers::{Found, Named, ServerOptions, named};
use crate::suite::{self, Restart, WhatOptions};

/// How long a server may take until it answers.
const START: Duration = Duration::from_secs(600);

/// Time limit for a server to exit after SIGTERM.
const END: Duration = Duration::from_secs(60);

/// Name of this server in results.
const OURS: &str = "steersman";

/// Requests at once that llama.cpp is started for: the most that the suite sends.
const STREAMS: &str = "32";

/// What a server loads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    /// A folder as mlx-lm saves it.
    Folder,
    /// A file of llama.cpp.
    Gguf,
}

impl Format {
    fn of(path: &Path) -> Self {
        if path.extension().is_some_and(|extension| extension == "gguf") {
            Self::Gguf
        } else {
            Self::Folder
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Folder => "folders of safetensors",
            Self::Gguf => "GGUF files",
        }
    }
}

/// Another server.
struct Peer {
    name: &'static str,
    /// Requirements of pip, with versions; the first is the server.
    packages: &'static [&'static str],
    /// Requirements on a machine with an NVIDIA GPU; `None` if the package has no CUDA.
    cuda: Option<&'static [&'static str]>,
    format: Format,
    /// Variables that it needs to serve all of the suite.
    environment: &'static [(&'static str, &'static str)],
    /// Text in its log that means that it cannot serve although its process runs.
    dead: Option<&'static str>,
    /// Arguments of its Python for a model, a port and a context.
    arguments: fn(model: &str, port: &str, context: &str) -> Vec<String>,
    /// Whether requests name the model by its path.
    by_path: bool,
}

/// llama.cpp's own server, which the package starts within Python.
const LLAMA_CPP: &str = "
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
params.kv_unified, params.use_jinja, params.ui = True, True, False
server = xllamacpp.Server(params)
while True:
    time.sleep(3600)
";

/// Servers of the package registries that load one of the formats.
const PEERS: [Peer; 2] = [
    Peer {
        name: "mlx_lm",
        packages: &["mlx-lm==0.32.2", "mlx[cpu]==0.32.2"],
        cuda: Some(&["mlx-lm==0.32.2", "mlx[cuda13]==0.32.2"]),
        format: Format::Folder,
        // No model is asked for at the hub. On CUDA, MLX's default ends the server after some hundred shapes of passes.
        environment: &[("HF_HUB_OFFLINE", "1"), ("MLX_CUDA_GRAPH_CACHE_SIZE", "100000")],
        dead: Some("generation thread died"),
        arguments: |model, port, _| {
            let fixed = ["-m", "mlx_lm", "server", "--host", "127.0.0.1"];
            fixed.into_iter().chain(["--model", model, "--port", port]).map(Into::into).collect()
        },
        by_path: true,
    },
    Peer {
        name: "llama.cpp",
        packages: &["xllamacpp==2026.10.11549"],
        cuda: None,
        format: Format::Gguf,
        environment: &[],
        dead: None,
        arguments: |model, port, context| {
            ["-c", LLAMA_CPP, model, port, context, STREAMS].map(Into::into).into()
        },
        by_path: false,
    },
];

/// Options of `bench peers`.
#[derive(Args)]
pub struct PeersOptions {
    /// The model: a folder as mlx-lm saves it, or a GGUF file
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// The same model in the other format, for peers that do not load the first
    #[arg(long, value_name = "PATH")]
    also: Option<PathBuf>,
    /// Peers that take part [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    peer: Vec<String>,
    /// Context in tokens that llama.cpp's 32 slots share
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    context: u32,
    /// A variable of a peer's environment. Can be repeated
    #[arg(long, value_name = "NAME=VARIABLE=VALUE", value_parser = peer_variable)]
    peer_env: Vec<Named>,
    /// Context length of a peer in tokens [default: as the peer reports]. Longer cases are skipped and listed. Can be repeated
    #[arg(long, value_name = "NAME=TOKENS", value_parser = peer_value)]
    peer_context: Vec<Named>,
    /// More arguments of `steersman serve`
    #[arg(long, value_name = "ARGUMENTS", allow_hyphen_values = true, value_delimiter = ' ')]
    serve: Vec<String>,
    /// The program `steersman` [default: this one]
    #[arg(long, value_name = "FILE")]
    steersman: Option<PathBuf>,
    /// Folder for the servers' environments, which are kept, and their logs
    #[arg(long, value_name = "DIR", default_value = "bench-peers")]
    work: PathBuf,
    #[command(flatten)]
    what: WhatOptions,
}

fn peer_value(text: &str) -> Result<Named, String> {
    let one = named(text)?;
    if !PEERS.iter().any(|peer| peer.name == one.name) {
        let names = PEERS.map(|peer| peer.name).join(", ");
        return Err(format!("{} is not one of {names}", one.name));
    }
    Ok(one)
}

fn peer_variable(text: &str) -> Result<Named, String> {
    let one = peer_value(text)?;
    match one.value.split_once('=') {
        Some((variable, _)) if !variable.is_empty() => Ok(one),
        _ => Err("is not NAME=VARIABLE=VALUE".into()),
    }
}

/// A server process, which is killed when this is dropped.
struct Process {
    name: &'static str,
    command: Command,
    child: Child,
    url: String,
    log: PathBuf,
    /// [`Peer::dead`].
    dead: Option<&'static str>,
}

/// A running server and its description.
struct Running {
    process: RefCell<Process>,
    found: Found,
}

impl Process {
    /// Waits until `/health` answers with status 200.
    fn wait(&mut self) -> Result<()> {
        let client = Client::new(self.name, &self.url, Duration::from_secs(10))?;
        let start = Instant::now();
        while client.healthy() != Some(true) {
            if let Some(status) = self.child.try_wait()? {
                bail!("it ended with {status}");
            }
            if let Some(dead) = self.dead {
                let text = fs::read_to_string(&self.log).unwrap_or_default();
                ensure!(!text.contains(dead), "it cannot serve the model: {dead}");
            }
            ensure!(start.elapsed() < START, "it did not answer within {} s", START.as_secs());
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Ends the server as an operator would, so that it can save its state, and starts it again.
    fn restart(&mut self) -> Result<()> {
        terminate(&mut self.child)?;
        let start = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(start.elapsed() < END, "it did not end within {} s", END.as_secs());
            std::thread::sleep(Duration::from_millis(50));
        }
        self.child = spawn(&mut self.command)?;
        self.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(command: &mut Command) -> Result<Child> {
    command.spawn().with_context(|| command.get_program().to_string_lossy().into_owned())
}

/// Asks a process to end.
fn terminate(child: &mut Child) -> Result<()> {
    #[cfg(unix)]
    if child.try_wait()?.is_none() {
        use rustix::process::{Pid, Signal, kill_process};
        kill_process(Pid::from_child(child), Signal::TERM)?;
    }
    #[cfg(not(unix))]
    child.kill()?;
    Ok(())
}

/// Installs, starts, measures and stops.
pub fn run(options: &PeersOptions, out: &mut impl Write) -> Result<()> {
    options.what.check()?;
    let peers = options.peers()?;
    options.check_models()?;
    fs::create_dir_all(&options.work).with_context(|| options.work.display().to_string())?;
    let mut servers = vec![options.start_ours().context(OURS)?];
    let mut skips = Vec::new();
    for peer in peers {
        match options.start(peer) {
            Ok(server) => servers.push(server),
            Err(error) => {
                let reason = format!("{error:#}");
                eprintln!("{}: does not take part: {reason}", peer.name);
                // A peer that was asked for by name is missed.
                ensure!(options.peer.is_empty(), "{}: {reason}", peer.name);
                let (scenario, case) = ("all".into(), "cases".into());
                skips.push(Skip { server: peer.name.into(), scenario, case, reason });
            }
        }
    }
    ensure!(servers.len() > 1, "no peer takes part; `steersman bench suite` measures one server");
    let found: Vec<_> = servers.iter().map(|server| &server.found).collect();
    let restarts: Vec<_> = servers
        .iter()
        .map(|Running { process, .. }| -> Option<Restart<'_>> {
            Some(Box::new(|| process.borrow_mut().restart()))
        })
        .collect();
    suite::measure(&options.what, &found, &restarts, skips, out)
}

impl PeersOptions {
    fn peers(&self) -> Result<Vec<&'static Peer>> {
        let names = PEERS.map(|peer| peer.name);
        for name in &self.peer {
            let known = names.contains(&name.as_str());
            ensure!(known, "--peer {name}: is not one of {}", names.join(", "));
        }
        let chosen =
            |peer: &&Peer| self.peer.is_empty() || self.peer.iter().any(|name| name == peer.name);
        Ok(PEERS.iter().filter(chosen).collect())
    }

    fn check_models(&self) -> Result<()> {
        let paths = [("--model", Some(&self.model)), ("--also", self.also.as_ref())];
        for (option, path) in paths {
            let Some(path) = path else { continue };
            let shown = path.display();
            ensure!(path.exists(), "{option} {shown}: there is no such file or folder");
            let is_folder = Format::of(path) == Format::Folder;
            ensure!(path.is_dir() == is_folder, "{option} {shown}: is no folder and no GGUF file");
        }
        if let Some(also) = &self.also {
            let differ = Format::of(also) != Format::of(&self.model);
            ensure!(differ, "--also {}: has the format of --model", also.display());
        }
        Ok(())
    }

    fn start_ours(&self) -> Result<Running> {
        let program = match &self.steersman {
            Some(path) => path.clone(),
            None => std::env::current_exe().context("the program that runs")?,
        };
        let stem = program.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let serves = self.steersman.is_some() || !stem.ends_with("-bench");
        ensure!(serves, "{stem} does not serve; name the program with --steersman");
        // What an earlier run has saved would be an advantage.
        let data = self.work.join("data");
        if data.exists() {
            fs::remove_dir_all(&data).with_context(|| data.display().to_string())?;
        }
        let port = free_port()?;
        let mut command = Command::new(program);
        command.args(["serve", "--host", "127.0.0.1", "--port", &port.to_string(), "--model"]);
        command.arg(&self.model).args(&self.serve);
        command.env("STEERSMAN_DATA_DIR", data).env_remove("STEERSMAN_CONFIG");
        self.launch(OURS, command, port, None, None)
    }

    fn start(&self, peer: &'static Peer) -> Result<Running> {
        let packages = if has_gpu() {
            peer.cuda.context("its package has no CUDA, and this machine has a GPU")?
        } else {
            peer.packages
        };
        let mut models = [Some(&self.model), self.also.as_ref()].into_iter().flatten();
        let model = models
            .find(|path| Format::of(path) == peer.format)
            .with_context(|| format!("it loads {}; pass one with --also", peer.format.name()))?;
        let model = std::path::absolute(model)
            .with_context(|| model.display().to_string())?
            .display()
            .to_string();
        let python = self.install(peer.name, packages)?;
        let port = free_port()?;
        let arguments = (peer.arguments)(&model, &port.to_string(), &self.context.to_string());
        let mut command = Command::new(python);
        command.args(arguments).envs(peer.environment.iter().copied());
        let own = self.peer_env.iter().filter(|one| one.name == peer.name);
        command.envs(own.filter_map(|one| one.value.split_once('=')));
        let mut server =
            self.launch(peer.name, command, port, peer.by_path.then_some(model), peer.dead)?;
        server.found.about.version.get_or_insert_with(|| packages[0].to_owned());
        Ok(server)
    }

    /// The Python of an environment with `packages`, which is made if it has others, is missing or does not run.
    fn install(&self, name: &str, packages: &[&str]) -> Result<PathBuf> {
        let folder = std::path::absolute(self.work.join(name))
            .with_context(|| self.work.display().to_string())?;
        let python = folder.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
        let installed = folder.join("installed.txt");
        let runs = || succeed(Command::new(&python).arg("--version")).is_ok();
        if fs::read_to_string(&installed).is_ok_and(|text| text == packages.join("\n")) && runs() {
            return Ok(python);
        }
        eprintln!("{name}: installing {}", packages.join(" "));
        let system = if cfg!(windows) { "python" } else { "python3" };
        succeed(Command::new(system).args(["-m", "venv", "--clear"]).arg(&folder))?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        succeed(Command::new(&python).args(pip).args(packages))?;
        fs::write(&installed, packages.join("\n"))
            .with_context(|| installed.display().to_string())?;
        Ok(python)
    }

    /// Starts a server, waits until it is ready and asks it what it is. Its output goes to a log in the work folder.
    fn launch(
        &self,
        name: &'static str,
        mut command: Command,
        port: u16,
        model: Option<String>,
        dead: Option<&'static str>,
    ) -> Result<Running> {
        eprintln!("{name}: starting");
        let log = self.work.join(format!("{name}.log"));
        let shown = log.display().to_string();
        let file = File::create(&log).with_context(|| shown.clone())?;
        let errors = file.try_clone().with_context(|| shown.clone())?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors);
        let named = |value| Named { name: name.into(), value };
        let url = format!("http://127.0.0.1:{port}");
        let child = spawn(&mut command)?;
        let mut process = Process { name, command, child, url: url.clone(), log, dead };
        let found = process.wait().and_then(|()| {
            let model = model.map(named).into_iter().collect();
            let context = self.peer_context.iter().filter(|one| one.name == name).cloned();
            let options = ServerOptions::of(vec![named(url)], model);
            Ok(ServerOptions { context: context.collect(), ..options }.connect()?.remove(0))
        });
        let found = found.with_context(|| format!("its output is in {shown}"))?;
        Ok(Running { process: process.into(), found })
    }
}

/// Runs a command whose output only matters if it fails.
fn succeed(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| {
        format!("{program} does not start; Python 3 with its module venv is needed")
    })?;
    if output.status.success() {
        return Ok(());
    }
    // Debian's venv names the missing package on standard output.
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(4)..];
    bail!("{program} failed: {}", last.join(" / "))
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.port())
}

fn has_gpu() -> bool {
    !crate::machine::gpus().is_empty()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: PeersOptions,
    }

    fn options(arguments: &[&str]) -> PeersOptions {
        Cli::parse_from([&["peers"], arguments].concat()).options
    }

    /// Options are checked before anything is installed or started.
    #[test]
    fn wrong_options_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let [here, work] = ["", "work"].map(|name| folder.path().join(name).display().to_string());
        let file = folder.path().join("notes.txt");
        fs::write(&file, "").unwrap();
        let error = |arguments: &[&str]| {
            let arguments = [arguments, &["--work", &work, "--out", &work]].concat();
            format!("{:#}", run(&options(&arguments), &mut Vec::new()).unwrap_err())
        };
        let expected = [
            (vec!["--model", &here, "--peer", "vllm"], "--peer vllm: is not one of mlx_lm"),
            (vec!["--model", &here, "--scenario", "fast"], "--scenario fast: is not one of"),
            (vec!["--model", "/nowhere/a.gguf"], "--model /nowhere/a.gguf: there is no such"),
            (vec!["--model", file.to_str().unwrap()], "notes.txt: is no folder and no GGUF file"),
            (vec!["--model", &here, "--also", &here], "has the format of --model"),
            (vec!["--model", &here, "--steersman", "/nowhere/x"], "steersman: /nowhere/x"),
        ];
        for (arguments, text) in expected {
            let found = error(&arguments);
            assert!(found.contains(text), "{found}");
        }
    }

    #[test]
    fn variables_of_peers_are_checked() {
        let read = |text: &str| peer_variable(text).map(|one| (one.name, one.value));
        let found = ("mlx_lm".to_owned(), "OPENBLAS_NUM_THREADS=1".to_owned());
        assert_eq!(read("mlx_lm=OPENBLAS_NUM_THREADS=1"), Ok(found));
        assert_eq!(read("mlx_lm=A").unwrap_err(), "is not NAME=VARIABLE=VALUE");
        assert_eq!(read("vllm=A=1").unwrap_err(), "vllm is not one of mlx_lm, llama.cpp");
    }

    /// A peer whose format is not given is refused before anything is installed.
    #[test]
    fn a_peer_needs_its_format() {
        if has_gpu() {
            return;
        }
        let Err(error) = options(&["--model", "model.gguf"]).start(&PEERS[0]) else {
            panic!("it has started")
        };
        assert!(format!("{error:#}").contains("pass one with --also"), "{error:#}");
    }

    /// A server that restarts is another process, which answers when `restart` returns.
    #[cfg(unix)]
    #[test]
    fn servers_restart() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("health"), "ok").unwrap();
        let port = free_port().unwrap();
        let mut command = Command::new("python3");
        command.args(["-m", "http.server", &port.to_string(), "--bind", "127.0.0.1"]);
        command.current_dir(folder.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let url = format!("http://127.0.0.1:{port}");
        let (child, log) = (spawn(&mut command).unwrap(), folder.path().join("log"));
        let mut process = Process { name: "one", command, child, url, log, dead: None };
        process.wait().unwrap();
        let first = process.child.id();
        process.restart().unwrap();
        assert_ne!(process.child.id(), first);
        assert_eq!(process.child.try_wait().unwrap(), None);
    }

    /// A server that ends or says that it cannot serve is an error that names its log.
    #[cfg(unix)]
    #[test]
    fn a_server_that_does_not_serve_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(&["--model", "m", "--work", folder.path().to_str().unwrap()]);
        let error = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            let port = free_port().unwrap();
            match options.launch("one", command, port, None, Some("thread died")) {
                Ok(_) => panic!("it has started"),
                Err(error) => format!("{error:#}"),
            }
        };
        let ended = error("exit 3");
        assert!(ended.contains("one.log: it ended with exit status: 3"), "{ended}");
        let dead = error("echo the thread died; exec sleep 60");
        assert!(dead.contains("it cannot serve the model: thread died"), "{dead}");
    }
}
