//! Ranks of a command that ends, as `verify` and `bench model`: nobody starts them again.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

use anyhow::{Result, bail};

use super::Over;
use super::control::{FromProcess, Part};
use super::environment::{Hosts, LOOPBACK, free_addresses};
use super::launch::Launch;
use super::member::{Lead, Member};
use super::process::{Heard, RankProcess, described};

/// What a command computes on.
pub enum On {
    /// So many threads of this process: one computes alone.
    Threads(usize),
    /// Processes, of which this is the first.
    Processes(Lead),
}

impl On {
    /// What this process computes on: as the first of several ranks if it is that `member`. `None` if `count` processes, connected
    /// by `over`, have run the command and ended.
    ///
    /// # Errors
    /// The errors of [`run_once`] and [`Member::lead`].
    pub fn choose(
        count: usize,
        over: Option<Over>,
        part: Part,
        member: Option<Arc<Member>>,
    ) -> Result<Option<Self>> {
        match (over, member) {
            (_, Some(member)) => Ok(Some(Self::Processes(member.lead(part.config.device)?))),
            (Some(over), None) if count > 1 => {
                let folder = part.data_dir.clone();
                run_once(over, count, part, &folder).map(|()| None)
            }
            (_, None) => Ok(Some(Self::Threads(count))),
        }
    }
}

/// Runs the command of this process as the first of `count` ranks, and ends all of them with it. The address file is in `folder`.
///
/// # Errors
/// If a process cannot be started, or one of them fails.
fn run_once(over: Over, count: usize, part: Part, folder: &Path) -> Result<()> {
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
