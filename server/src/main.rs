//! The command `steersman`.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;
use steersman::config::FileConfig;
use steersman::hub::{self, Found};
use steersman::serve;
use steersman_engine::config::Device;
use steersman_engine::engine::Info;
use tracing_subscriber::EnvFilter;

/// What is logged unless RUST_LOG says otherwise.
const LOG: &str = "info,wasmtime=warn,cranelift=warn,hf_hub=warn,ureq=warn";

/// A local LLM server that operators program: WebAssembly policies decide whether to think and how
/// long, when a thought is a loop, and what to say to get out of it.
#[derive(Parser)]
#[command(name = "steersman", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a model over OpenAI's chat interface.
    Serve(Serve),
}

/// Without options: the bundled demonstration model on http://127.0.0.1:11436. Options go before
/// the configuration file, which goes before the defaults. RUST_LOG sets what is logged, to stderr
/// (for instance RUST_LOG=debug).
#[derive(Args)]
struct Serve {
    /// Configuration file, in TOML; configs/steersman.toml shows every key with its default
    #[arg(long, value_name = "FILE", env = "STEERSMAN_CONFIG")]
    config: Option<PathBuf>,
    /// Model to serve: a local folder, or a Hugging Face repo id (owner/name), which is downloaded
    /// once to the cache that HF_HOME names; HF_TOKEN opens private and gated repos
    #[arg(long, value_name = "PATH|REPO")]
    model: Option<String>,
    /// Where to compute: auto (the GPU where there is one), cpu or gpu
    #[arg(long, value_parser = device)]
    device: Option<Device>,
    /// Address to listen on; 0.0.0.0 opens the server to the network: then set api_keys
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on; 0 takes a free one
    #[arg(long)]
    port: Option<u16>,
    /// Folder for saved state and the unpacked model
    /// [default: steersman in the user's data folder, as ~/.local/share/steersman]
    #[arg(long, value_name = "DIR", env = "STEERSMAN_DATA_DIR")]
    data_dir: Option<PathBuf>,
}

fn device(text: &str) -> Result<Device, ValueError> {
    Device::deserialize(text.into_deserializer())
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOG));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let done = match cli.command {
        Command::Serve(options) => serve(options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // What a user did wrong needs no backtrace, whatever RUST_BACKTRACE says.
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(options: Serve) -> Result<()> {
    let mut file = match &options.config {
        Some(path) => FileConfig::read(path)?,
        None => FileConfig::default(),
    };
    file.server.host = options.host.unwrap_or(file.server.host);
    file.server.port = options.port.unwrap_or(file.server.port);
    file.model.path = options.model.unwrap_or(file.model.path);
    file.model.device = options.device.unwrap_or(file.model.device);
    let (server, mut config) = file.check()?;
    let data_dir = options
        .data_dir
        .or_else(|| Some(dirs::data_dir()?.join("steersman")))
        .context("this user has no data folder; name one with --data-dir")?;

    let runtime = tokio::runtime::Runtime::new().context("starting the runtime")?;
    // Before the model is loaded, since that takes long and a taken port is known at once.
    let listener = runtime.block_on(serve::listen(&server))?;
    let address = listener.local_addr().context("reading the address")?;
    if !address.ip().is_loopback() && server.api_keys.is_empty() {
        tracing::warn!(%address, "open to the network without a key: set server.api_keys");
    }
    std::fs::create_dir_all(&data_dir)
        .with_context(|| format!("making the data folder {}", data_dir.display()))?;
    let Found { folder, name, bundled } = hub::find(&config.model.path, &data_dir)?;
    if config.model.name.is_empty() {
        config.model.name = name;
    }
    let (engine, thread) = steersman_engine::start(config, &folder, &data_dir)
        .with_context(|| format!("loading the model in {}", folder.display()))?;

    let Info { model, numbers, .. } = engine.info();
    let demonstration = if bundled {
        " (the bundled demonstration model, too small to be of use; choose yours with --model)"
    } else {
        ""
    };
    let line =
        format!("Steersman serves {model}{demonstration} at http://{address}/v1 on {numbers}");
    // Who closed our output does not want to read it.
    let _ = writeln!(std::io::stdout(), "{line}");

    let app = steersman::app(engine, &server);
    let grace = Duration::from_secs(server.shutdown_s);
    runtime.block_on(serve::run(listener, app, serve::asked_to_stop(), grace))?;
    // A request that outlives its grace must not hold the process; dropping its task cancels it.
    runtime.shutdown_background();
    // What the engine has saved is on disk then.
    if thread.join().is_err() {
        tracing::error!("the engine thread panicked");
    }
    tracing::info!("stopped");
    Ok(())
}
