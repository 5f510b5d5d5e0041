//! The server: HTTP and JSON in front of [`steersman_engine`], the configuration file, and where
//! models come from.
//!
//! It never sees an array, a token id or a policy's Wasm: a [`Request`] goes into the engine,
//! [`Event`]s come out.
//!
//! ```text
//! main.rs      the command line
//! config.rs    the configuration file
//! hub.rs       local folders and Hugging Face repos
//! models.rs    the models that are served, and which profile asks which
//! bundled.rs   the demonstration model inside the executable
//! serve.rs     listening, and stopping in good order
//! verify.rs    `steersman verify`: that replies are the same however they are computed
//! cache.rs     `steersman cache`: the state that is saved on disk
//! ../policy-cli `steersman policy`, a crate without MLX
//! calibrate.rs `steersman calibrate`: what a model could do without
//! api/         OpenAI's interface
//! ```
//!
//! [`Request`]: steersman_engine::request::Request
//! [`Event`]: steersman_engine::request::Event

pub mod api;
pub mod bundled;
pub mod cache;
pub mod calibrate;
pub mod config;
pub mod hub;
pub mod models;
pub mod serve;
pub mod verify;

pub use api::app;
pub use steersman_policy_cli as policy;
