//! Models on this machine: downloads, facts about their files, and which of them are loaded. Links no MLX
//! and knows nothing of requests.
//!
//! ```text
//! named.rs     what the name of a model means
//! catalogue.rs short names of published models
//! hub.rs       Hugging Face repos: the cache, downloads
//! snapshots.rs the models in the cache: listing, removing
//! facts.rs     what the files of a model say about it
//! machine.rs   memory and disk
//! pool.rs      which models are loaded: load on demand, unload
//! command.rs   `steersman list`, `show`, `pull`, `rm`, `search`
//! ```

pub mod catalogue;
pub mod command;
pub mod facts;
pub mod hub;
pub mod machine;
pub mod named;
pub mod pool;
pub mod snapshots;
