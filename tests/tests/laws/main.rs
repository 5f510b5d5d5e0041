//! Laws that hold across crates.
//!
//! One program, because each program of tests links the server, MLX and wasmtime anew. Tests that need a process of
//! their own are elsewhere: `memory` reads how many bytes the process holds, `restart` kills children.

mod agent;
mod behaviour;
mod common_prefix;
mod compiled;
mod contract;
mod gguf;
mod hostile;
mod keep;
mod languages;
mod library;
mod log_lines;
mod mcp;
mod operations;
mod owners;
mod places;
mod prefix_names;
mod profiles;
mod reference;
mod refusals;
mod replay;
mod rooms;
mod route;
mod speculation;
mod structure;
mod text;
mod upstream;
mod walls;
