//! `bench peers`: installs other servers, starts them and this one on a model, and runs the suite against all.
//!
//! Each peer is a row of [`PEERS`]: packages of a fixed version in a virtual environment of its own, the format that it
//! loads, and how it is started. A peer that cannot take part is named in the results, with the reason.

use std::fs::File;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::client::Client;
use crate::results::Skip;
use crate::servers::{Named, ServerOptions};
use crate::suite::{self, SuiteOptions, WhatOptions};

/// How long a server may take until it answers.
const START: Duration = Duration::from_secs(600);

/// Name of this server in results.
const OURS: &str = "steersman";

/// Requests at once that a server is started for, if it asks: the most that the suite sends.
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
    /// Requirements of pip, with versions.
    packages: &'static [&'static str],
    /// Those on a machine with an NVIDIA GPU, if it can use one.
    cuda: Option<&'static [&'static str]>,
    format: Format,
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
    /// Tokens of all contexts of a server that asks for them together
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    context: u32,
    /// More arguments of `steersman serve`
    #[arg(long, value_name = "ARGUMENTS", allow_hyphen_values = true, value_delimiter = ' ')]
    serve: Vec<String>,
    /// The program of this server [default: the one that runs]
    #[arg(long, value_name = "FILE")]
    steersman: Option<PathBuf>,
    /// Folder for the environments and logs of the servers; environments are kept
    #[arg(long, value_name = "DIR", default_value = "bench-peers")]
    work: PathBuf,
    #[command(flatten)]
    what: WhatOptions,
}

/// A server that runs until it is dropped.
struct Running {
    name: &'static str,
    process: Child,
    port: u16,
    /// What requests call the model, unless the server lists it.
    model: Option<String>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Installs, starts, measures and stops.
pub fn run(options: PeersOptions, out: &mut impl Write) -> Result<()> {
    let peers = options.peers()?;
    for path in [Some(&options.model), options.also.as_ref()].into_iter().flatten() {
        ensure!(path.exists(), "{}: there is no such file or folder", path.display());
    }
    std::fs::create_dir_all(&options.work).with_context(|| options.work.display().to_string())?;
    let mut servers = vec![options.start_ours()?];
    let mut skips = Vec::new();
    for peer in peers {
        match options.start(peer) {
            Ok(server) => servers.push(server),
            Err(error) => {
                eprintln!("{}: does not take part: {error:#}", peer.name);
                skips.push(Skip {
                    server: peer.name.into(),
                    scenario: "all".into(),
                    case: "cases".into(),
                    reason: format!("{error:#}"),
                });
            }
        }
    }
    let url = |server: &Running| format!("http://127.0.0.1:{}", server.port);
    let named = |server: &Running, value| Named { name: server.name.into(), value };
    let against = servers.iter().map(|server| named(server, url(server))).collect();
    let models = servers.iter().filter_map(|s| Some(named(s, s.model.clone()?))).collect();
    let suite = SuiteOptions::of(ServerOptions::of(against, models), options.what);
    suite::measure(&suite, skips, out)
}

impl PeersOptions {
    fn peers(&self) -> Result<Vec<&'static Peer>> {
        let names: Vec<_> = PEERS.iter().map(|peer| peer.name).collect();
        for name in &self.peer {
            let known = names.contains(&name.as_str());
            ensure!(known, "--peer {name}: is not one of {}", names.join(", "));
        }
        let chosen =
            |peer: &&Peer| self.peer.is_empty() || self.peer.iter().any(|name| name == peer.name);
        Ok(PEERS.iter().filter(chosen).collect())
    }

    fn start_ours(&self) -> Result<Running> {
        let program = match &self.steersman {
            Some(path) => path.clone(),
            None => std::env::current_exe().context("the program that runs")?,
        };
        let port = free_port()?;
        let mut command = Command::new(program);
        command.arg("serve").arg("--model").arg(&self.model).args(["--port", &port.to_string()]);
        command.args(&self.serve).env("STEERSMAN_DATA_DIR", self.work.join("data"));
        self.launch(OURS, command, port, None)
    }

    fn start(&self, peer: &'static Peer) -> Result<Running> {
        let packages = match peer.cuda {
            Some(packages) if has_gpu() => packages,
            None if has_gpu() => bail!("its package has no CUDA, and this machine has a GPU"),
            _ => peer.packages,
        };
        let model = [Some(&self.model), self.also.as_ref()].into_iter().flatten();
        let model = model
            .clone()
            .find(|path| Format::of(path) == peer.format)
            .with_context(|| format!("it loads {}; name one with --also", peer.format.name()))?;
        let model = std::path::absolute(model)?.display().to_string();
        let python = self.install(peer.name, packages)?;
        let port = free_port()?;
        let arguments = (peer.arguments)(&model, &port.to_string(), &self.context.to_string());
        let mut command = Command::new(python);
        // No server asks the hub for a model that lies in a folder. On CUDA, MLX's default ends mlx_lm.server after some
        // hundred shapes of passes ("Cache thrashing is happening").
        command.args(arguments).env("HF_HUB_OFFLINE", "1");
        command.env("MLX_CUDA_GRAPH_CACHE_SIZE", "100000");
        self.launch(peer.name, command, port, peer.by_path.then_some(model))
    }

    /// The Python of an environment with `packages`, which is made if it has others or is missing.
    fn install(&self, name: &str, packages: &[&str]) -> Result<PathBuf> {
        let folder = std::path::absolute(self.work.join(name))?;
        let (python, installed) = (folder.join("bin/python"), folder.join("installed.txt"));
        if std::fs::read_to_string(&installed).is_ok_and(|text| text == packages.join("\n")) {
            return Ok(python);
        }
        eprintln!("{name}: installing {}", packages.join(" "));
        let mut create = Command::new("python3");
        create.args(["-m", "venv", "--clear"]).arg(&folder);
        succeed(create)?;
        let mut install = Command::new(&python);
        install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        install.args(packages);
        succeed(install)?;
        std::fs::write(&installed, packages.join("\n"))?;
        Ok(python)
    }

    /// Starts a server and waits until it answers. Its output goes to a log in the work folder.
    fn launch(
        &self,
        name: &'static str,
        mut command: Command,
        port: u16,
        model: Option<String>,
    ) -> Result<Running> {
        eprintln!("{name}: starting");
        let log = self.work.join(format!("{name}.log"));
        let file = File::create(&log).with_context(|| log.display().to_string())?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let process = command
            .spawn()
            .with_context(|| command.get_program().to_string_lossy().into_owned())?;
        let mut server = Running { name, process, port, model };
        let client =
            Client::new(name, &format!("http://127.0.0.1:{port}"), Duration::from_secs(10))?;
        let start = Instant::now();
        while client.healthy() != Some(true) {
            if let Some(status) = server.process.try_wait()? {
                bail!("it ended with {status}; its output is in {}", log.display());
            }
            if start.elapsed() > START {
                bail!("it did not answer within {START:?}; its output is in {}", log.display());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(server)
    }
}

/// Runs a command whose output only matters if it fails.
fn succeed(mut command: Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| program.clone())?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last: Vec<_> = text.trim().lines().rev().take(3).collect();
    let last: Vec<_> = last.into_iter().rev().collect();
    bail!("{program} failed: {}", last.join(" / "))
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
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

    #[test]
    fn unknown_peers_and_missing_models_are_named() {
        let error = |arguments: &[&str]| {
            format!("{:#}", run(options(arguments), &mut Vec::new()).unwrap_err())
        };
        let unknown = error(&["--model", "x", "--peer", "vllm"]);
        assert!(unknown.contains("--peer vllm: is not one of mlx_lm, llama.cpp"), "{unknown}");
        let missing = error(&["--model", "/nowhere/model.gguf"]);
        assert!(missing.contains("/nowhere/model.gguf: there is no such"), "{missing}");
    }

    /// A peer that loads another format says so before anything is installed.
    #[test]
    fn a_peer_needs_its_format() {
        let options = options(&["--model", "model.gguf"]);
        let Err(error) = options.start(&PEERS[0]) else { panic!("it has started") };
        assert!(format!("{error:#}").contains("name one with --also"), "{error:#}");
    }

    /// A server that ends, or cannot be started, is an error that names its log.
    #[test]
    fn a_server_that_ends_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let work = folder.path().to_str().unwrap();
        let options = options(&["--model", "m", "--work", work]);
        let Err(error) = options.launch("one", Command::new("false"), free_port().unwrap(), None)
        else {
            panic!("it has started")
        };
        assert!(format!("{error:#}").contains("one.log"), "{error:#}");
    }
}
