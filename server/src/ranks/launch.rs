//! How the processes of ranks are started.

use std::process::Command;

use anyhow::{Context, Result};
use steersman_engine::policy::this_program;
use steersman_rank_control::Addresses;

use super::Over;
use super::control::{Assignment, Part};
use super::environment::{Hosts, set};
use super::member::{FIRST, FOLLOW, arguments};

/// Bytes of the key of ranks that are started together.
const KEY_BYTES: usize = 32;

/// How the processes of ranks are started.
pub struct Launch {
    /// What carries their arrays.
    pub over: Over,
    /// The model of which the others compute parts.
    pub part: Part,
    /// With which they prove to each other that they belong together.
    key: String,
}

impl Launch {
    /// A launch with a new key.
    ///
    /// # Errors
    /// If there are no random numbers.
    pub fn new(over: Over, part: Part) -> Result<Self> {
        let mut key = [0; KEY_BYTES];
        getrandom::fill(&mut key).context("making a key for the ranks")?;
        Ok(Self::with_key(over, part, hex::encode(key)))
    }

    /// A launch with the key that the ranks of all machines have.
    pub fn with_key(over: Over, part: Part, key: String) -> Self {
        Self { over, part, key }
    }

    /// The command that starts the process of `rank` on the device with this number, and what it is told. The first rank gets
    /// the arguments of this process.
    ///
    /// # Errors
    /// If the program cannot be found, or the rank has no device.
    pub fn process(
        &self,
        rank: usize,
        device: usize,
        addresses: &Addresses,
        hosts: &Hosts,
    ) -> Result<(Command, Assignment)> {
        let mut command =
            Command::new(this_program().context("the path of this program is unknown")?);
        match rank {
            0 => command.arg(FIRST).args(arguments().skip(1)),
            _ => command.arg(FOLLOW),
        };
        set(&mut command, self.over, rank, device, &addresses.ranks, hosts)?;
        let assignment = Assignment {
            rank,
            count: addresses.ranks.len(),
            over: self.over,
            log: addresses.log.clone(),
            key: self.key.clone(),
            model: self.part.clone(),
        };
        Ok((command, assignment))
    }
}
