//! The command line: commands, their options, and what these name.

use std::ffi::OsString;
use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;
use steersman::bench::{model, shape};
use steersman::config::FileConfig;
use steersman::manage::{List, Pull, Remove, Search, Show};
use steersman::mcp::command;
use steersman::ranks::Over;
use steersman::{cache, environment, keys, talk};
use steersman_engine::config::Device;
use steersman_engine::policy::{Storage, create_private_folder, this_program};

/// A programmable local LLM server: WebAssembly policies decide whether and how long a model reasons,
/// detect loops, and steer it out of them.
#[derive(Parser)]
#[command(name = "steersman", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// What to type for the commands of other servers that have none here.
const OTHER_COMMANDS: [(&str, &str); 8] = [
    ("ls", "`steersman list` lists the models"),
    (
        "ps",
        "`steersman ps` is not a command: the console and `GET /api/ps` of the server have the loaded models",
    ),
    (
        "stop",
        "`steersman stop` is not a command: Ctrl-C or SIGTERM stops a server, and the console, or `keep_alive: 0` in a \
         request, unloads a model",
    ),
    (
        "create",
        "`steersman create` is not a command: a table [profiles.NAME] of the configuration is what a Modelfile is; \
         `steersman init` writes a configuration with every key",
    ),
    (
        "cp",
        "`steersman cp` is not a command: the table [aliases] of the configuration gives models further names",
    ),
    ("push", "`steersman policy push` uploads a policy to a server; models are not uploaded"),
    ("remove", "`steersman rm` removes a downloaded model"),
    ("version", "`steersman --version` prints the version"),
];

/// The advice for the unknown command `name`, if it is one of another server.
pub fn tip_for(name: &str) -> Option<&'static str> {
    OTHER_COMMANDS.iter().find(|(other, _)| *other == name).map(|(_, tip)| *tip)
}

#[derive(Subcommand)]
pub enum Command {
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
    /// Search Hugging Face for models, the most downloaded first, and say which this machine can serve.
    #[command(after_help = "Example:\n  steersman search qwen3 4bit")]
    Search(Managed<Search>),
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
    /// Compute a part of the model of a server on another machine, which was started with --wait-for
    #[command(after_help = "Example:\n  steersman join 192.168.0.2:11437 --rank-key rank.key")]
    Join(Join),
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
pub enum Bench {
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
    #[command(after_help = "Example:\n  steersman bench model mlx-community/Qwen3.5-4B-MLX-4bit")]
    Model {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        passes: model::Options,
    },
    /// Write a checkpoint with the dimensions of a published model and random weights in 4 bits
    #[command(after_help = "Example:\n  steersman bench shape qwen3-4b ./random-4b")]
    Shape(shape::Options),
}

/// The arguments of a command that is a program of its own. They are passed on as they are, `--help` included.
#[derive(Args)]
pub struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    pub _arguments: Vec<OsString>,
}

/// A command about models on this machine.
#[derive(Args)]
pub struct Managed<T: Args> {
    #[command(flatten)]
    pub place: Place,
    #[command(flatten)]
    pub task: T,
}

/// Without options, serves the bundled demonstration model on http://127.0.0.1:11436. Options take
/// precedence over the configuration file. The log goes to stderr; RUST_LOG sets its filter (for
/// instance RUST_LOG=debug).
#[derive(Args)]
pub struct Serve {
    #[command(flatten)]
    pub common: Common,
    /// Model to serve: a local folder, a GGUF file, a short name (qwen3:4b, or qwen3 for the size that fits),
    /// or a Hugging Face repo id (owner/name, for GGUF files owner/name:Q4_K_M). A repo is downloaded once
    /// to the cache in HF_HOME; private and gated ones need HF_TOKEN
    #[arg(long, value_name = "PATH|REPO")]
    pub model: Option<String>,
    /// Address to listen on; with 0.0.0.0, which accepts connections from the network, set api_keys
    #[arg(long)]
    pub host: Option<String>,
    /// Port to listen on; 0 chooses a free one
    #[arg(long, value_parser = whole(0..=u16::MAX))]
    pub port: Option<u16>,
    /// Compute the model of [model] with this many processes of this machine, each of which has a part of its weights
    #[arg(long, default_value_t = 1, value_parser = whole(1..=64_u32), value_name = "COUNT")]
    pub ranks: u32,
    /// What carries the arrays of several ranks [default: nccl on NVIDIA GPUs, ring otherwise]
    #[arg(long, value_enum)]
    pub over: Option<Over>,
    /// Wait for this many machines, each of which computes one more part of the model of [model]; run `steersman join` on
    /// each of them
    #[arg(long, value_parser = whole(1..=63_u32), value_name = "COUNT", requires = "rank_key")]
    pub wait_for: Option<u32>,
    /// File with the key that these machines have
    #[arg(long, value_name = "FILE", requires = "wait_for")]
    pub rank_key: Option<PathBuf>,
    /// Address to listen on for these machines
    #[arg(long, value_name = "IP:PORT", default_value = "0.0.0.0:11437", requires = "wait_for")]
    pub rank_address: SocketAddr,
}

/// A server that ends is waited for. The log goes to stderr. Arrays and tokens are sent in the clear: use a network that
/// you trust.
#[derive(Args)]
pub struct Join {
    #[command(flatten)]
    pub common: Common,
    /// Address at which the server waits for machines, HOST:PORT, as in its log
    pub server: String,
    /// File with the key that the server has
    #[arg(long, value_name = "FILE")]
    pub rank_key: PathBuf,
    /// The server's model on this machine [default: the configured model, or else the bundled one]
    #[arg(long, value_name = "PATH|REPO")]
    pub model: Option<String>,
}

/// Reasoning is dimmed; /help lists the commands. Lines are kept in `chat_history` in the data folder.
#[derive(Args)]
pub struct Chat {
    /// Model: a name that the server has, or else a local folder, a GGUF file, a Hugging Face repo id, or a
    /// short name as qwen3:4b [default: the server's first model, or the configured one]
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    #[command(flatten)]
    pub server: talk::Server,
    #[command(flatten)]
    pub options: talk::Options,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Args)]
pub struct Run {
    /// Model: a name that the server has, or else a local folder, a GGUF file, a Hugging Face repo id, a
    /// short name as qwen3:4b, or tiny-hybrid-4bit, which is bundled
    #[arg(value_name = "MODEL")]
    pub model: String,
    #[command(flatten)]
    pub once: talk::Once,
    #[command(flatten)]
    pub server: talk::Server,
    #[command(flatten)]
    pub options: talk::Options,
    #[command(flatten)]
    pub common: Common,
}

/// Measures for about two seconds. Asks the hub for one answer, unless HF_HUB_OFFLINE is set.
#[derive(Args)]
pub struct Doctor {
    #[command(flatten)]
    pub common: Common,
    /// Model whose speed is estimated, or which a report tries: a local folder or a Hugging Face repo id [default: the
    /// configured model, or for a report else the bundled one]
    #[arg(value_name = "PATH|REPO")]
    pub model: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Try kernels, decoding paths and passes on this machine, which takes minutes, and write what an owner of it can send
    /// to the project: no paths, no keys, no texts
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub report: Option<PathBuf>,
}

#[derive(Args)]
pub struct Completions {
    /// The shell that reads the script
    pub shell: Shell,
}

#[derive(Args)]
pub struct Init {
    /// The file, which must not exist
    #[arg(value_name = "FILE", default_value = "steersman.toml")]
    pub file: PathBuf,
}

#[derive(Args)]
pub struct Check {
    /// Configuration file in TOML [default: that of --config or STEERSMAN_CONFIG]
    #[arg(value_name = "CONFIG")]
    pub file: Option<PathBuf>,
    #[command(flatten)]
    pub place: Place,
}

/// Replies are decoded greedily.
#[derive(Args)]
pub struct Verify {
    #[command(flatten)]
    pub common: Common,
    /// Model to check: a local folder or a Hugging Face repo id [default: the configured model, or
    /// else the bundled one]
    #[arg(value_name = "PATH|REPO")]
    pub model: Option<String>,
    /// Draft model: a smaller model with the same vocabulary
    #[arg(long, value_name = "PATH|REPO")]
    pub draft_model: Option<String>,
    /// File with prompts to use instead of the built-in ones: a JSON list of strings, or of objects
    /// with `messages` and optionally `thinking`
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Maximum number of tokens of each reply
    #[arg(long, default_value_t = 128, value_parser = whole(1..=65_536_u32))]
    pub tokens: u32,
    /// Compute with this many ranks: what several machines would compute
    #[arg(long, default_value_t = 1, value_parser = whole(1..=8_u32), value_name = "COUNT")]
    pub ranks: u32,
    /// What carries the arrays of several ranks, which are processes then [default: ranks are threads of one process]
    #[arg(long, value_enum)]
    pub over: Option<Over>,
}

#[derive(Args)]
pub struct Calibrate {
    #[command(flatten)]
    pub common: Common,
    /// Model to calibrate: a local folder or a Hugging Face repo id [default: the configured model,
    /// or else the bundled one]
    #[arg(value_name = "PATH|REPO")]
    pub model: Option<String>,
    /// File with prompts, in the format of `verify`: the replies to them are the text to measure on,
    /// so use typical ones
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Maximum number of tokens of each reply
    #[arg(long, default_value_t = 128, value_parser = whole(1..=65_536_u32))]
    pub tokens: u32,
}

/// Saved state may be deleted without harm: the engine computes it again.
#[derive(Args)]
pub struct Cache {
    #[command(flatten)]
    pub place: Place,
    #[command(subcommand)]
    pub task: cache::CacheTask,
}

/// Starts the servers of the configuration (--config) that it needs, and ends them.
#[derive(Args)]
pub struct Mcp {
    #[command(flatten)]
    pub place: Place,
    #[command(subcommand)]
    pub task: command::Task,
}

/// Keys are in the data folder, as digests; a running server sees changes at once.
#[derive(Args)]
pub struct Keys {
    #[command(flatten)]
    pub place: Place,
    #[command(subcommand)]
    pub task: keys::Task,
}

/// Options of the commands that load a model.
#[derive(Args)]
pub struct Common {
    #[command(flatten)]
    pub place: Place,
    /// Device to compute on: auto (a GPU if there is one), cpu or gpu
    #[arg(long, value_parser = device)]
    pub device: Option<Device>,
}

/// Options that locate files.
#[derive(Args, Clone)]
pub struct Place {
    /// Configuration file in TOML; `steersman init` writes one with every key, its default and a comment
    #[arg(long, value_name = "FILE", env = "STEERSMAN_CONFIG", global = true)]
    pub config: Option<PathBuf>,
    /// Folder for saved state, the unpacked model and compiled policies [default: steersman in the
    /// user's data folder, for instance ~/.local/share/steersman]
    #[arg(long, value_name = "DIR", env = "STEERSMAN_DATA_DIR", global = true)]
    pub data_dir: Option<PathBuf>,
}

impl Common {
    /// `server`, but none that runs if a device is chosen: that is one of this process.
    pub fn server_to_ask(&self, server: talk::Server) -> talk::Server {
        let local = server.local || (server.url.is_none() && self.device.is_some());
        talk::Server { local, ..server }
    }

    /// The configuration, with the options applied, and the data folder. Sets variables of the environment, so it is
    /// called before the program starts a thread.
    pub fn read(self, model: Option<String>) -> Result<(FileConfig, PathBuf)> {
        let (mut file, data_dir) = self.place.read()?;
        environment::set_for_cuda(&data_dir);
        file.model.path = model.unwrap_or(file.model.path);
        file.model.device = self.device.unwrap_or(file.model.device);
        Ok((file, data_dir))
    }
}

impl Place {
    pub fn data_dir(self) -> Result<PathBuf> {
        self.data_dir
            .or_else(|| Some(dirs::data_dir()?.join("steersman")))
            .context("this user has no data folder; choose one with --data-dir")
    }

    /// The compiled policies in the data folder, if this user has one. A missing folder is not created.
    pub fn compile_cache(self) -> Storage {
        match self.data_dir() {
            Ok(data_dir) if data_dir.is_dir() => Storage::compile_cache(&data_dir),
            _ => Storage::in_memory(),
        }
    }

    /// The configuration and the data folder, for commands that only look at what is there.
    ///
    /// # Errors
    /// If the folder is missing, as a mistyped one is.
    pub fn read_existing(self) -> Result<(FileConfig, PathBuf)> {
        let file = configured(self.config.as_deref())?;
        let data_dir = self.data_dir()?;
        ensure!(
            data_dir.is_dir(),
            "there is no data folder {}: no server has used it yet (--data-dir or STEERSMAN_DATA_DIR names another)",
            data_dir.display()
        );
        Ok((file, data_dir))
    }

    /// The configuration and the data folder, which is created if missing.
    pub fn read(self) -> Result<(FileConfig, PathBuf)> {
        let file = configured(self.config.as_deref())?;
        let data_dir = self.data_dir()?;
        create_private_folder(&data_dir).with_context(|| {
            let folder = data_dir.display();
            format!(
                "creating the data folder {folder} (--data-dir or STEERSMAN_DATA_DIR names another)"
            )
        })?;
        Ok((file, data_dir))
    }
}

/// The configuration file, or the defaults without one.
pub fn configured(path: Option<&Path>) -> Result<FileConfig> {
    let mut file = path.map_or_else(|| Ok(FileConfig::default()), FileConfig::read)?;
    file.policy.compiler = this_program();
    Ok(file)
}

/// Reads whole numbers of a range. The parsers of Rust and clap say "invalid digit found in string".
fn whole<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        let (least, most) = (range.start(), range.end());
        number.ok_or_else(|| format!("it must be a whole number from {least} to {most}"))
    }
}

fn device(text: &str) -> Result<Device, ValueError> {
    Device::deserialize(text.into_deserializer())
}
