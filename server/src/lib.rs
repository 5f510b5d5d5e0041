//! The server: HTTP and JSON in front of [`steersman_engine`], the configuration file, the command
//! line and model downloads.
//!
//! It never sees an array, a token id or Wasm: a [`Request`] goes into the engine, [`Event`]s come
//! out.
//!
//! ```text
//! main.rs      the command line
//! config.rs    the configuration file
//! hub.rs       local folders and Hugging Face repos
//! models.rs    the loaded models and the profiles that use them
//! bundled.rs   the demonstration model inside the executable
//! check.rs     `steersman check`: finds problems of a configuration
//! environment.rs variables that libraries read
//! serve.rs     listening, connections and graceful shutdown
//! connections.rs limits on open connections
//! throttle.rs  a limit on equal log lines
//! verify.rs    `steersman verify`: compares replies of all decoding paths
//! mcp/         tools of MCP servers, and `steersman mcp`
//! cache.rs     `steersman cache`: manages the prefix store
//! calibrate.rs `steersman calibrate`: measures early exits and skipped blocks
//! api/         OpenAI's HTTP interface
//! ```
//!
//! `steersman policy` is the crate [`steersman_policy_cli`], which links no MLX.
//!
//! [`Request`]: steersman_engine::request::Request
//! [`Event`]: steersman_engine::request::Event

pub mod api;
pub mod bundled;
pub mod cache;
pub mod calibrate;
pub mod check;
pub mod config;
mod connections;
pub mod environment;
pub mod hub;
pub mod mcp;
pub mod models;
pub mod serve;
mod throttle;
pub mod verify;

pub use api::app;
pub use steersman_policy_cli as policy;
