//! The server: HTTP and JSON in front of [`steersman_engine`], the configuration file, the command
//! line and model downloads.
//!
//! It never sees an array, a token id or Wasm: a [`Request`] goes into the engine, [`Event`]s come
//! out.
//!
//! ```text
//! main.rs      the command line
//! config.rs    the configuration file
//! hub.rs       locates models: local folders, repos, the bundled one
//! manage.rs    `steersman list`, `show`, `pull`, `rm`
//! models/      the loaded models and the profiles that use them; [`steersman_models`] decides which are loaded
//! bundled.rs   the demonstration model inside the executable
//! check.rs     `steersman check`: finds problems of a configuration
//! words.rs     errors of deserializers in the words of JSON and TOML
//! ranks.rs, ranks/ processes that compute one model together: how they are started, watched and connected
//! reload.rs    what SIGHUP changes
//! keys.rs      keys in the data folder, and `steersman keys`
//! link.rs      the one-time link that makes the owner of a local server its operator
//! environment.rs variables that libraries read
//! serve.rs     listening, connections and graceful shutdown
//! shutdown.rs  tells running requests when they must end
//! media_type.rs the media type of a body
//! connections.rs limits on open connections
//! telemetry.rs traces for OpenTelemetry
//! wiring.rs    what a running server has besides its configuration
//! system.rs    memory, load and temperature of this machine, for `/health` and `steersman doctor`
//! throttle.rs  a limit on equal log lines
//! verify.rs    `steersman verify`: compares replies of all decoding paths
//! mcp/         tools of MCP servers, and `steersman mcp`
//! cache.rs     `steersman cache`: manages the prefix store
//! talk.rs      which server `steersman chat` and `steersman run` talk to
//! local.rs     a server in this process, for these
//! doctor.rs    `steersman doctor`: the machine, what is chosen by it, what to change
//! doctor/      its parts: chosen settings, files and network, what a chip can reach, the report for others; `steersman init`
//! calibrate.rs `steersman calibrate`: measures early exits and skipped blocks
//! bench.rs, bench/ `steersman bench model`, times of a model's passes, and `bench shape`, checkpoints with random weights
//! program.rs   runs `steersman-policy` and `steersman-bench`, which are found beside this program
//! console.rs   the console: serves the static files of `server/console/`
//! api/         OpenAI's HTTP interface
//! ```
//!
//! Downloads, facts about models, and the rules of loading are in [`steersman_models`]; `steersman chat` and
//! `steersman run` are [`steersman_chat`]; the log is [`steersman_log`]. They link no MLX.
//!
//! [`Request`]: steersman_engine::request::Request
//! [`Event`]: steersman_engine::request::Event

pub mod address;
pub mod api;
pub mod bench;
pub mod bundled;
pub mod cache;
pub mod calibrate;
pub mod check;
pub mod config;
mod connections;
pub mod console;
pub mod doctor;
pub mod environment;
pub mod exit;
pub mod heap;
pub mod hub;
pub mod keys;
pub mod link;
pub mod local;
pub mod manage;
pub mod mcp;
mod media_type;
pub mod models;
pub mod program;
pub mod ranks;
pub mod reload;
pub mod serve;
pub mod shutdown;
pub mod signals;
pub mod system;
pub mod talk;
pub mod telemetry;
mod throttle;
pub mod verify;
pub mod wiring;
mod words;

pub use api::{app, app_with};
