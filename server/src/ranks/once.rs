//! Ranks of a command that ends, as `verify`: nobody starts them again.

use std::path::Path;
use std::sync::mpsc::channel;

use anyhow::{Result, bail};

use super::Over;
use super::control::{FromProcess, Part};
use super::environment::{Hosts, LOOPBACK, free_addresses};
use super::launch::Launch;
use super::process::{Heard, RankProcess, described};

/// Runs the command of this process as the first of `count` ranks, and ends all of them with it. The address file is in `folder`.
///
/// # Errors
/// If a process cannot be started, or one of them fails.
pub fn run_once(over: Over, count: usize, part: Part, folder: &Path) -> Result<()> {
    let launch = Launch::new(over, part)?;
    let addresses = free_addresses(LOOPBACK, count)?;
    let hosts = Hosts::write(folder, &addresses.ranks)?;
    let (sender, heard) = channel();
    let mut processes = Vec::new();
    for rank in 0..count {
        let (command, assignment) = launch.process(rank, rank, &addresses, &hosts)?;
        let sender = sender.clone();
        // Fails when this function has returned.
        let hear = move |what| drop(sender.send((rank, what)));
        processes.push(RankProcess::start(command, &assignment, None, hear)?);
    }
    for (rank, what) in heard {
        match (rank, what) {
            (rank, Heard::Message(FromProcess::Failed(why))) if rank > 0 => bail!("{why}"),
            (_, Heard::Message(_)) => {}
            (rank, Heard::Closed) => {
                let status = processes[rank].wait()?;
                if rank == 0 && status.success() {
                    return Ok(());
                }
                // The first one has said why it failed.
                bail!("rank {rank}: {}", described(status));
            }
        }
    }
    Ok(())
}
