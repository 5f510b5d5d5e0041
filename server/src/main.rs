//! The command `steersman`.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use futures_util::future::select_all;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;
use steersman::bench::{model, shape};
use steersman::config::FileConfig;
use steersman::manage::{List, Pull, Remove, Show, Task};
use steersman::mcp::command;
use steersman::models::{self, Loaded, Models, find};
use steersman::program::Program;
use steersman::reload::Reloader;
use steersman::signals::Signals;
use steersman::system::start_time;
use steersman::telemetry::Traces;
use steersman::wiring::Wiring;
use steersman::{
    cache, calibrate, check, doctor, environment, exit, heap, keys, link, log, manage, serve, talk,
    verify,
};
use steersman_engine::config::Device;
use steersman_engine::policy::{
    PolicyReport, Storage, compile_if_asked, create_private_folder, this_program,
};
use steersman_engine::{Engine, EngineThread, Info};
use tokio::runtime::Runtime;

/// Also MLX's: `override` exports its functions under the names of the C library's.
#[cfg(all(feature = "mimalloc", target_os = "linux"))]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Time in which the tasks of the runtime end after the server has.
const TASKS: Duration = Duration::from_secs(2);

/// A programmable local LLM server: WebAssembly policies decide whether and how long a model reasons,
/// detect loops, and steer it out of them.
#[derive(Parser)]
#[command(name = "steersman", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve models with the APIs of OpenAI, Anthropic and Ollama, and a console for browsers.
    #[command(after_help = "Example:\n  steersman serve --model mlx-community/Qwen3.5-4B-MLX-4bit")]
    Serve(Serve),
    /// Print the answer to one prompt, or chat if there is none: on the server that runs, or with a model
    /// loaded in this process. Fails without a whole answer.
    #[command(
        after_help = "Example:\n  git diff | steersman run MODEL \"Write a commit title for this diff.\""
    )]
    Run(Run),
    /// Chat with a model in the terminal: on the server that runs, or loaded in this process.
    #[command(after_help = "Example:\n  steersman chat --url http://127.0.0.1:11436")]
    Chat(Chat),
    /// Download a model from Hugging Face, or continue a download.
    #[command(after_help = "Example:\n  steersman pull mlx-community/Qwen3.5-4B-MLX-4bit")]
    Pull(Managed<Pull>),
    /// List the models on this machine and those of the configuration.
    #[command(after_help = "Example:\n  steersman list")]
    List(Managed<List>),
    /// Show one model: family, layers, quantization, files, and the memory that it needs.
    #[command(after_help = "Example:\n  steersman show mlx-community/Qwen3.5-4B-MLX-4bit")]
    Show(Managed<Show>),
    /// Remove a downloaded model.
    #[command(after_help = "Example:\n  steersman rm mlx-community/Qwen3.5-4B-MLX-4bit")]
    Rm(Managed<Remove>),
    /// Report what this machine has, what the server chooses by it and why, and what to change.
    #[command(after_help = "Example:\n  steersman doctor mlx-community/Qwen3.5-4B-MLX-4bit")]
    Doctor(Doctor),
    /// Write a configuration with every key, its default on this machine and a comment.
    #[command(after_help = "Example:\n  steersman init steersman.toml")]
    Init(Init),
    /// Check a configuration without starting a server: its values, and the models, policies and
    /// other files that it names. Prints each problem with its line; fails if there are any.
    #[command(after_help = "Example:\n  steersman check steersman.toml")]
    Check(Check),
    /// Create, list and revoke keys, also while a server runs. The server has those of its configuration, too.
    #[command(after_help = "Example:\n  steersman keys create laptop")]
    Keys(Keys),
    /// Create, build, test, replay and measure policies, and manage those of a running server: the
    /// program steersman-policy.
    #[command(disable_help_flag = true)]
    Policy(Passed),
    /// List and call the tools of the MCP servers in the configuration.
    #[command(after_help = "Example:\n  steersman mcp list --config steersman.toml")]
    Mcp(Mcp),
    /// Inspect and maintain the state saved on disk, while no server has it open. A running server
    /// reports its state at GET /v1/cache.
    #[command(after_help = "Example:\n  steersman cache stats")]
    Cache(Cache),
    /// Check on this machine that all decoding paths of a model give equal replies: prefill in
    /// chunks, resuming from saved state, rewinding and drafts. Fails if any reply differs.
    #[command(after_help = "Example:\n  steersman verify mlx-community/Qwen3.5-4B-MLX-4bit")]
    Verify(Verify),
    /// Measure after which layer a model can exit, for early-exit drafts, and the cost of skipping
    /// feed-forward blocks, for engine.skip_kl. Saves the result in the data folder for `serve`.
    #[command(after_help = "Example:\n  steersman calibrate mlx-community/Qwen3.5-4B-MLX-4bit")]
    Calibrate(Calibrate),
    /// Measure servers with OpenAI's chat completions side by side, or the passes of a model in this process.
    #[command(
        subcommand,
        after_help = "Example:\n  steersman bench model mlx-community/Qwen3.5-4B-MLX-4bit"
    )]
    Bench(Bench),
    /// Ask a server generated questions of ten tasks, and grade the answers by rules: the program
    /// steersman-bench.
    #[command(disable_help_flag = true)]
    Eval(Passed),
    /// Print a script that completes the commands and options of this program in a shell.
    #[command(after_help = "Example:\n  steersman completions bash")]
    Completions(Completions),
}

#[derive(Subcommand)]
enum Bench {
    /// Run scenarios against one or more servers in turn, and write results, plots and a report: the
    /// program steersman-bench, as the next three
    #[command(disable_help_flag = true)]
    Suite(Passed),
    /// Install other servers, start them and this one on a model, and run the suite against all
    #[command(disable_help_flag = true)]
    Peers(Passed),
    /// Compare two results files, figure by figure
    #[command(disable_help_flag = true)]
    Diff(Passed),
    /// Write the report of results files again
    #[command(disable_help_flag = true)]
    Report(Passed),
    /// Measure the passes of a model in this process: prefill, steps, verification of drafts, several sequences
    Model {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        passes: model::Options,
    },
    /// Write a checkpoint with the dimensions of a published model and random weights in 4 bits
    Shape(shape::Options),
}

/// The arguments of a command that is a program of its own. They are passed on as they are, `--help` included.
#[derive(Args)]
struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _arguments: Vec<OsString>,
}

/// A command about models on this machine.
#[derive(Args)]
struct Managed<T: Args> {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    task: T,
}

/// Without options, serves the bundled demonstration model on http://127.0.0.1:11436. Options take
/// precedence over the configuration file. The log goes to stderr; RUST_LOG sets its filter (for
/// instance RUST_LOG=debug).
#[derive(Args)]
struct Serve {
    #[command(flatten)]
    common: Common,
    /// Model to serve: a local folder, a GGUF file, a short name (qwen3:4b, or qwen3 for the size that fits),
    /// or a Hugging Face repo id (owner/name, for GGUF files owner/name:Q4_K_M). A repo is downloaded once
    /// to the cache in HF_HOME; private and gated ones need HF_TOKEN
    #[arg(long, value_name = "PATH|REPO")]
    model: Option<String>,
    /// Address to listen on; with 0.0.0.0, which accepts connections from the network, set api_keys
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on; 0 chooses a free one
    #[arg(long)]
    port: Option<u16>,
}

/// Reasoning is dimmed; /help lists the commands. Lines are kept in `chat_history` in the data folder.
#[derive(Args)]
struct Chat {
    /// Model: a name that the server has, or else a local folder, a GGUF file, a Hugging Face repo id, or a
    /// short name as qwen3:4b [default: the server's first model, or the configured one]
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    #[command(flatten)]
    server: talk::Server,
    #[command(flatten)]
    options: talk::Options,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct Run {
    /// Model: a name that the server has, or else a local folder, a GGUF file, a Hugging Face repo id, a
    /// short name as qwen3:4b, or tiny-hybrid-4bit, which is bundled
    #[arg(value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    once: talk::Once,
    #[command(flatten)]
    server: talk::Server,
    #[command(flatten)]
    options: talk::Options,
    #[command(flatten)]
    common: Common,
}

/// Measures for about two seconds. Asks the hub for one answer, unless HF_HUB_OFFLINE is set.
#[derive(Args)]
struct Doctor {
    #[command(flatten)]
    common: Common,
    /// Model whose speed is estimated, or which a report tries: a local folder or a Hugging Face repo id [default: the
    /// configured model, or for a report else the bundled one]
    #[arg(value_name = "PATH|REPO")]
    model: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Try kernels, decoding paths and passes on this machine, which takes minutes, and write what an owner of it can send
    /// to the project: no paths, no keys, no texts
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    report: Option<PathBuf>,
}

#[derive(Args)]
struct Completions {
    /// The shell that reads the script
    shell: Shell,
}

#[derive(Args)]
struct Init {
    /// The file, which must not exist
    #[arg(value_name = "FILE", default_value = "steersman.toml")]
    file: PathBuf,
}

#[derive(Args)]
struct Check {
    /// Configuration file in TOML [default: that of --config or STEERSMAN_CONFIG]
    #[arg(value_name = "CONFIG")]
    file: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
}

/// Replies are decoded greedily.
#[derive(Args)]
struct Verify {
    #[command(flatten)]
    common: Common,
    /// Model to check: a local folder or a Hugging Face repo id [default: the configured model, or
    /// else the bundled one]
    #[arg(value_name = "PATH|REPO")]
    model: Option<String>,
    /// Draft model: a smaller model with the same vocabulary
    #[arg(long, value_name = "PATH|REPO")]
    draft_model: Option<String>,
    /// File with prompts to use instead of the built-in ones: a JSON list of strings, or of objects
    /// with `messages` and optionally `thinking`
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Maximum number of tokens of each reply
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens: u32,
}

#[derive(Args)]
struct Calibrate {
    #[command(flatten)]
    common: Common,
    /// Model to calibrate: a local folder or a Hugging Face repo id [default: the configured model,
    /// or else the bundled one]
    #[arg(value_name = "PATH|REPO")]
    model: Option<String>,
    /// File with prompts, in the format of `verify`: the replies to them are the text to measure on,
    /// so use typical ones
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Maximum number of tokens of each reply
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens: u32,
}

/// Saved state may be deleted without harm: the engine computes it again.
#[derive(Args)]
struct Cache {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    task: cache::CacheTask,
}

/// Starts the servers of the configuration (--config) that it needs, and ends them.
#[derive(Args)]
struct Mcp {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    task: command::Task,
}

/// Keys are in the data folder, as digests; a running server sees changes at once.
#[derive(Args)]
struct Keys {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    task: keys::Task,
}

/// Options of the commands that load a model.
#[derive(Args)]
struct Common {
    #[command(flatten)]
    place: Place,
    /// Device to compute on: auto (a GPU if there is one), cpu or gpu
    #[arg(long, value_parser = device)]
    device: Option<Device>,
}

/// Options that locate files.
#[derive(Args, Clone)]
struct Place {
    /// Configuration file in TOML; `steersman init` writes one with every key, its default and a comment
    #[arg(long, value_name = "FILE", env = "STEERSMAN_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// Folder for saved state, the unpacked model and compiled policies [default: steersman in the
    /// user's data folder, for instance ~/.local/share/steersman]
    #[arg(long, value_name = "DIR", env = "STEERSMAN_DATA_DIR", global = true)]
    data_dir: Option<PathBuf>,
}

impl Common {
    /// `server`, but none that runs if a device is chosen: that is one of this process.
    fn server_to_ask(&self, server: talk::Server) -> talk::Server {
        let local = server.local || (server.url.is_none() && self.device.is_some());
        talk::Server { local, ..server }
    }

    /// The configuration, with the options applied, and the data folder. Sets variables of the environment, so it is
    /// called before the program starts a thread.
    fn read(self, model: Option<String>) -> Result<(FileConfig, PathBuf)> {
        let (mut file, data_dir) = self.place.read()?;
        environment::set_for_cuda(&data_dir);
        file.model.path = model.unwrap_or(file.model.path);
        file.model.device = self.device.unwrap_or(file.model.device);
        Ok((file, data_dir))
    }
}

impl Place {
    fn data_dir(self) -> Result<PathBuf> {
        self.data_dir
            .or_else(|| Some(dirs::data_dir()?.join("steersman")))
            .context("this user has no data folder; choose one with --data-dir")
    }

    /// The compiled policies in the data folder, if this user has one.
    fn compile_cache(self) -> Storage {
        match self.data_dir() {
            Ok(data_dir) => Storage::compile_cache(&data_dir),
            Err(_) => Storage::in_memory(),
        }
    }

    /// The configuration and the data folder, which is created if missing.
    fn read(self) -> Result<(FileConfig, PathBuf)> {
        let file = configured(self.config.as_deref())?;
        let data_dir = self.data_dir()?;
        create_private_folder(&data_dir)
            .with_context(|| format!("creating the data folder {}", data_dir.display()))?;
        Ok((file, data_dir))
    }
}

/// The configuration file, or the defaults without one.
fn configured(path: Option<&Path>) -> Result<FileConfig> {
    let mut file = path.map_or_else(|| Ok(FileConfig::default()), FileConfig::read)?;
    file.policy.compiler = this_program();
    Ok(file)
}

fn device(text: &str) -> Result<Device, ValueError> {
    Device::deserialize(text.into_deserializer())
}

fn main() -> ExitCode {
    if let Some(status) = compile_if_asked() {
        return status;
    }
    heap::use_one_heap();
    start_time();
    let cli = Cli::parse();
    match cli.command {
        Command::Chat(_)
        | Command::Run(_)
        | Command::Doctor(_)
        | Command::Init(_)
        | Command::Check(_) => log::warnings_to_stderr(),
        Command::Serve(_) => {}
        _ => log::to_stderr(),
    }
    std::panic::set_hook(Box::new(|panic| {
        let location = panic.location().map(ToString::to_string);
        tracing::error!(location, message = panic.payload_as_str(), "panic");
    }));
    let done = match cli.command {
        Command::Serve(options) => traced(|| serve(options)),
        Command::Chat(options) => chat(options),
        Command::Run(options) => run(options),
        Command::Doctor(options) => doctor(options),
        Command::Init(options) => doctor::init(&options.file, &mut std::io::stdout().lock()),
        Command::Check(options) => check(options),
        Command::Verify(options) => verify(options),
        Command::Calibrate(options) => calibrate(options),
        Command::Cache(options) => cache(options),
        Command::Mcp(options) => mcp(options),
        Command::Keys(options) => keys(options),
        Command::Bench(Bench::Shape(options)) => shape::write(&options.name, &options.folder),
        Command::Bench(Bench::Model { common, passes }) => bench_model(common, &passes),
        Command::Bench(Bench::Suite(_) | Bench::Peers(_) | Bench::Diff(_) | Bench::Report(_)) => {
            Program::Bench.run("steersman bench", 2)
        }
        Command::Eval(_) => Program::Bench.run("steersman", 1),
        Command::Policy(_) => Program::Policy.run("steersman policy", 2),
        Command::List(options) => managed(options, Task::List),
        Command::Show(options) => managed(options, Task::Show),
        Command::Pull(options) => managed(options, Task::Pull),
        Command::Rm(options) => managed(options, Task::Rm),
        Command::Completions(options) => completions(options.shell, &mut std::io::stdout()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has seen enough, as in `steersman cache list | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        // Never print a backtrace: most errors are the user's.
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &std::io::Error| error.kind() == ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref().is_some_and(broken))
}

/// Does `work` with the log, and traces if they are on.
fn traced(work: impl FnOnce() -> Result<()>) -> Result<()> {
    match Traces::from_env()? {
        None => log::to_stderr(),
        Some(traces) => {
            log::to_stderr_and(traces.layer());
            let done = work();
            drop(traces);
            return done;
        }
    }
    work()
}

fn serve(options: Serve) -> Result<()> {
    let began = Instant::now();
    let Serve { common, model, host, port } = options;
    let (path, device) = (common.place.config.clone(), common.device);
    let (mut file, data_dir) = common.read(model.clone())?;
    let apply = move |file: &mut FileConfig| {
        file.server.host = host.clone().unwrap_or(file.server.host.clone());
        file.server.port = port.unwrap_or(file.server.port);
        file.model.path = model.clone().unwrap_or(file.model.path.clone());
        file.model.device = device.unwrap_or(file.model.device);
    };
    apply(&mut file);
    let source = file.source.clone();
    let (server, config) = file.check()?;
    let reloader = path.as_deref().map(|path| Reloader::new(path, apply)).transpose()?;
    let mut wiring = Wiring {
        keys: Some(Arc::new(keys::KeyFile::open(&data_dir)?)),
        responses: Some(data_dir.join("responses")),
        reloads: reloader.as_ref().map(|(_, reloads)| reloads.clone()),
        ..Wiring::default()
    };

    let runtime = Runtime::new().context("starting the runtime")?;
    let entered = runtime.enter();
    let Signals { stop: mut stop_signals, hangups } = Signals::install()?;
    drop(entered);
    // With a file, a signal that arrives while models are loaded is for the time after.
    let hangups = match reloader {
        Some(_) => Some(hangups),
        None => {
            runtime.spawn(hangups.ignore());
            None
        }
    };
    // Before loading the model: that takes long, and a port in use should fail at once.
    let listener = runtime.block_on(serve::listen(&server))?;
    let address = listener.local_addr().context("reading the address")?;
    if !address.ip().is_loopback() && server.api_keys.is_empty() && !wiring.has_key() {
        tracing::warn!(%address, "server accepts network connections without a key: create one with `steersman keys create`, or set server.api_keys");
    }
    let offered = link::offer(address, &server, wiring.has_created_keys())?;
    let console = offered.map(|(link, url)| {
        wiring.link = Some(Arc::new(link));
        url
    });
    // Answers 503 while the models are loaded.
    let loaded_app = Arc::new(OnceLock::new());
    let (loaded, models) = tokio::sync::oneshot::channel::<Models>();
    let stop = async move {
        let models = tokio::select! {
            models = models => models,
            () = stop_signals.next() => {
                tracing::info!("server stopped while its models were loaded");
                exit::at_once(0)
            }
        };
        // Fails if loading does, which ends the process: there is nothing to drain.
        let Ok(models) = models else { return std::future::pending().await };
        let ended = select_all(models.engines().iter().map(|engine| Box::pin(engine.ended())));
        tokio::select! {
            () = stop_signals.next() => {}
            // Without its engine the server would refuse every request.
            _ = ended => {}
            () = models.broken() => {}
        }
    };
    let (app, settings) = (serve::once_loaded(loaded_app.clone()), server.clone());
    let serving = runtime.spawn(async move { serve::run(listener, app, &settings, stop).await });

    let policies = steersman_engine::policies(&config, &data_dir).map_err(|error| {
        // That is the first problem of the first profile.
        check::error_of_policies(&config, &source, &Storage::compile_cache(&data_dir), error)
    })?;
    let Loaded { models, threads, bundled } = models::load(config, &server, &data_dir, &policies)?;
    let (engines, first, all) = (models.engines(), models.first(), models.clone());

    let Info { model, numbers, .. } = first.info();
    let demonstration = if bundled {
        " (the bundled demonstration model, too small for real use; choose a model with --model)"
    } else {
        ""
    };
    let further: String = engines[1..]
        .iter()
        .fold(String::new(), |line, engine| format!("{line} and {}", engine.info().model));
    let line = format!(
        "Steersman serves {model}{demonstration}{further} at http://{address}/v1 on {numbers}"
    );
    let inactive = policies.report().policies.into_iter().filter(|policy| !policy.is_active());
    // The servers of `[mcp]` are started within it.
    let entered = runtime.enter();
    loaded_app.get_or_init(|| steersman::app_with(models, &server, wiring));
    if let Some((reloader, hangups)) = reloader.zip(hangups) {
        runtime.spawn(reloader.0.run(hangups));
    }
    drop(entered);
    let names: Vec<_> = engines.iter().map(|engine| engine.info().model.as_str()).collect();
    tracing::info!(
        seconds = (began.elapsed().as_secs_f64() * 10.0).round() / 10.0,
        models = names.join(", "),
        %address,
        device = numbers,
        memory_limit_bytes = first.info().activity.report().bytes.limit,
        threads = std::thread::available_parallelism().map_or(1, usize::from),
        "ready"
    );
    // Ignore a closed stdout.
    let _ = writeln!(std::io::stdout(), "{line}");
    if let Some(url) = console {
        let _ = writeln!(std::io::stdout(), "Open the console as its operator, once, at {url}");
    }
    for PolicyReport { name, problem, is_pending, .. } in inactive {
        let problem = problem.map(|problem| problem.message).unwrap_or_default();
        let next = match is_pending {
            true => "the server tries it again",
            false => "replace its file, or upload another version",
        };
        let _ = writeln!(
            std::io::stdout(),
            "The policy {name} is not active, and fails in every request: {problem}; {next}"
        );
    }

    // Fails if the server has ended, which the next line reports.
    let _ = loaded.send(all.clone());
    runtime.block_on(serving).context("serving")?;
    // Ends the requests that are still running after the grace period.
    all.engines().iter().for_each(Engine::stop);
    // Ends the programs of MCP servers, which the tasks own.
    runtime.shutdown_timeout(TASKS);
    join(threads.into_iter().chain(all.take_threads()).collect())?;
    tracing::info!("server stopped");
    Ok(())
}

/// Waits for the engine threads; then their saved state is on disk.
///
/// # Errors
/// When one has panicked: the process ends with status 1, and a supervisor restarts it.
fn join(threads: Vec<EngineThread>) -> Result<()> {
    let ended: Vec<_> = threads.into_iter().map(EngineThread::join).collect();
    ensure!(ended.iter().all(Result::is_ok), "an engine panicked, as logged above");
    Ok(())
}

fn keys(options: Keys) -> Result<()> {
    let (file, data_dir) = options.place.read()?;
    let profiles: Vec<_> = file.profiles.into_keys().collect();
    keys::run(&options.task, &profiles, &data_dir, &mut std::io::stdout().lock())
}

fn chat(options: Chat) -> Result<()> {
    let Chat { model, server, options, common } = options;
    let history = common.place.clone().data_dir().ok().map(|folder| folder.join("chat_history"));
    let server = common.server_to_ask(server);
    talk::with_server(
        &server,
        model,
        || common.read(None),
        |runtime, client, model| {
            talk::chat(runtime, client, talk::Session::new(model, options), history)
        },
    )
}

fn run(options: Run) -> Result<()> {
    let Run { model, once, server, options, common } = options;
    if !talk::is_prompted(&once) {
        return chat(Chat { model: Some(model), server, options, common });
    }
    let server = common.server_to_ask(server);
    talk::with_server(
        &server,
        Some(model),
        || common.read(None),
        |runtime, client, model| {
            // Not locked: the log of the engine's threads goes to stderr, too.
            let (mut out, mut messages) = (std::io::stdout(), std::io::stderr());
            runtime.block_on(talk::run(&client, &model, &options, &once, &mut out, &mut messages))
        },
    )
}

fn doctor(options: Doctor) -> Result<()> {
    let Doctor { common, model, json, report } = options;
    if let Some(path) = report {
        let (file, data_dir) = common.read(model)?;
        // Not locked: loading prints a line.
        return doctor::write_report(file, &data_dir, &path, &mut std::io::stdout());
    }
    let mut file = configured(common.place.config.as_deref())?;
    file.model.device = common.device.unwrap_or(file.model.device);
    file.model.path = model.unwrap_or(file.model.path);
    doctor::run(file, &common.place.data_dir()?, json, &mut std::io::stdout().lock())
}

/// Writes the script of a shell.
///
/// # Errors
/// If it cannot be written.
fn completions(shell: Shell, out: &mut impl Write) -> Result<()> {
    // Into memory first: the generator panics at a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "steersman", &mut script);
    out.write_all(&script).context("writing the script")
}

fn check(options: Check) -> Result<()> {
    let file = options.file.or_else(|| options.place.config.clone());
    let file = file.context("name a configuration file: steersman check CONFIG")?;
    let data_dir = options.place.clone().data_dir().ok();
    let storage = options.place.compile_cache();
    let out = &mut std::io::stdout().lock();
    check::run(&file, data_dir.as_deref(), &storage, this_program(), out)
}

fn verify(options: Verify) -> Result<()> {
    let (mut file, data_dir) = options.common.read(options.model)?;
    if let Some(model) = options.draft_model {
        file.speculation.draft_model = model;
    }
    let (_, mut config) = file.check()?;
    let found = find(&mut config, &data_dir)?;
    let prompts = verify::prompts(options.prompts.as_deref())?;
    verify::run(config, &found, &data_dir, &prompts, options.tokens as usize)
}

fn bench_model(common: Common, options: &model::Options) -> Result<()> {
    let (mut file, data_dir) = common.read(options.model.clone())?;
    if let Some(shape) = &options.shape {
        file.model.path = shape::prepare(shape, &data_dir)?.display().to_string();
    }
    let (_, mut config) = file.check()?;
    let found = find(&mut config, &data_dir)?;
    model::run(config, &found, &data_dir, options)
}

fn calibrate(options: Calibrate) -> Result<()> {
    let (file, data_dir) = options.common.read(options.model)?;
    let (_, mut config) = file.check()?;
    let found = find(&mut config, &data_dir)?;
    let prompts = verify::prompts(options.prompts.as_deref())?;
    calibrate::run(config, &found, &data_dir, &prompts, options.tokens as usize)
}

fn cache(options: Cache) -> Result<()> {
    let (file, data_dir) = options.place.read()?;
    let (_, config) = file.check()?;
    cache::run(options.task, &config.store, &data_dir)
}

fn mcp(options: Mcp) -> Result<()> {
    let (server, _) = configured(options.place.config.as_deref())?.check()?;
    command::run(options.task, &server.mcp, &mut std::io::stdout().lock())
}

fn managed<T: Args>(options: Managed<T>, task: fn(T) -> Task) -> Result<()> {
    let (file, data_dir) = options.place.read()?;
    manage::run(&task(options.task), file, &data_dir, &mut std::io::stdout().lock())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, ValueEnum};

    use super::*;

    /// Before, `steersman cache list | head -1` failed.
    #[test]
    fn a_closed_pipe_is_no_error() {
        let error = |kind: ErrorKind| {
            anyhow::Error::from(std::io::Error::from(kind)).context("writing the output")
        };
        assert!(is_broken_pipe(&error(ErrorKind::BrokenPipe)));
        assert!(!is_broken_pipe(&error(ErrorKind::StorageFull)));
    }

    /// The arguments of the last `steersman ...` in `example`; what is between quotes is one.
    fn arguments(example: &str) -> Vec<String> {
        let (_, last) = example.rsplit_once("steersman ").expect("an example names the program");
        let parts = last.split('"').enumerate();
        let words = parts.flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().map(Into::into).collect(),
            _ => vec![part.to_owned()],
        });
        std::iter::once("steersman".into()).chain(words).collect()
    }

    #[test]
    fn the_help_of_every_command_has_an_example_that_works() {
        let cli = Cli::command();
        for command in cli.get_subcommands().filter(|command| !command.is_disable_help_flag_set()) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = help.strip_prefix("Example:\n").expect(command.get_name());
            let arguments = arguments(example);
            assert_eq!(arguments[1], command.get_name().to_owned(), "{example}");
            assert!(Cli::try_parse_from(&arguments).is_ok(), "{arguments:?}");
        }
        let everyday = ["serve", "run", "chat", "pull", "list", "show", "rm"];
        let names: Vec<_> = cli.get_subcommands().map(clap::Command::get_name).collect();
        assert_eq!(names[..everyday.len()], everyday);
    }

    #[test]
    fn every_shell_completes_every_command() {
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            completions(*shell, &mut script).unwrap();
            let script = String::from_utf8(script).unwrap();
            for command in Cli::command().get_subcommands() {
                assert!(
                    script.contains(command.get_name()),
                    "{shell} lacks {}",
                    command.get_name()
                );
            }
        }
    }

    #[test]
    fn an_engine_that_panicked_is_an_error() {
        let thread = |run: fn()| EngineThread::spawn(run).unwrap();
        assert!(join(vec![thread(|| {}), thread(|| {})]).is_ok());
        let error = join(vec![thread(|| panic!("on purpose")), thread(|| {})]).unwrap_err();
        assert!(error.to_string().contains("panicked"), "{error}");
    }
}
