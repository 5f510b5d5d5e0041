//! Ranks: processes that compute one model together, and the commands that start them.
//!
//! The process of the command, the parent, starts one process for each rank and talks with it over a pair of sockets
//! ([`control`], [`process`]). In the process of a rank, a [`Member`] is that rank's end. The first rank runs the command itself,
//! decides everything, and writes a log that the others read ([`log_link`]) and execute. `serve` is parented by a supervisor
//! ([`supervise`]), which starts all ranks again when one of them ends; `verify` and `bench model` by [`On`]. Ranks of other machines are
//! processes of [`join`], which the supervisor tells over [`machines`] what it tells its own.
//!
//! MLX finds the processes of a group by environment variables, so each process is started with its own ([`environment`]). A
//! process can join a group once, and its collectives wait without a deadline; therefore ranks end together.

mod control;
mod environment;
mod join;
mod launch;
mod local;
mod log_link;
mod machines;
mod member;
mod once;
mod process;
mod sealed;
mod supervise;

use std::path::Path;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use steersman_engine::config::Device;
use steersman_engine::tools::ranks::Backend;
use steersman_rank_control::hello::Key;

pub use self::control::Part;
pub use self::join::join;
pub use self::member::{Lead, Member, arguments, follow, is_first, is_follower};
pub use self::once::On;
pub use self::supervise::{Joining, Places, supervise};

/// What carries the arrays of ranks that are processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Over {
    /// TCP connections: ranks compute on the CPU
    Ring,
    /// NVIDIA's library: each rank has a GPU of its machine
    Nccl,
}

impl Over {
    /// What carries arrays if the command does not say: NCCL in a build for CUDA, unless it computes on the CPU.
    pub fn of(device: Device) -> Self {
        if cfg!(feature = "cuda") && device != Device::Cpu { Self::Nccl } else { Self::Ring }
    }

    fn backend(self) -> Backend {
        match self {
            Self::Ring => Backend::Ring,
            Self::Nccl => Backend::Nccl,
        }
    }
}

/// Longest file with a key.
const KEY_FILE_BYTES: u64 = 4096;

/// The key in `file` that all ranks of a server have.
///
/// # Errors
/// If the file cannot be read, or has fewer than 16 characters.
pub fn key_in(file: &Path) -> Result<String> {
    let reading = || {
        let file = file.display();
        format!("{file}: a file with a key is needed, as `openssl rand -hex 32 > {file}` writes it")
    };
    let bytes = steersman_files::read(file, KEY_FILE_BYTES).with_context(reading)?;
    let key = String::from_utf8(bytes).with_context(reading)?.trim().to_owned();
    Key::new(key.as_bytes()).with_context(reading)?;
    Ok(key)
}
