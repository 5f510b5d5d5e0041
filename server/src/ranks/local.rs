//! A rank of this machine: its agent and its process.

use std::io;
use std::process::ExitStatus;
use std::time::Instant;

use anyhow::Result;
use steersman_rank_control::{Agent, AgentAction, Millis};

use super::control::{FromProcess, ToProcess};
use super::process::{Heard, RankProcess, described};

/// A rank of this machine.
pub struct Local {
    /// Decides what is done with the process.
    pub agent: Agent,
    process: Option<RankProcess>,
    /// Number of processes that were started.
    started: u64,
    /// Why the process cannot load its part.
    failed: Option<String>,
}

/// The time since `began`, for state machines, which take 0 for never.
pub fn millis_since(began: Instant) -> Millis {
    Millis::try_from(began.elapsed().as_millis()).unwrap_or(Millis::MAX - 1) + 1
}

/// How a process ended.
pub struct End {
    /// For people.
    pub why: String,
    /// The process could not load its part, and the next one could not either.
    pub cannot_load: bool,
    /// Whether its exit status is 0.
    pub is_success: bool,
}

impl Local {
    /// A rank without a process, and what its agent wants done.
    pub fn new() -> (Self, Vec<AgentAction>) {
        let (agent, actions) = Agent::new();
        (Self { agent, process: None, started: 0, failed: None }, actions)
    }

    /// Returns true if there is a process.
    pub fn has_process(&self) -> bool {
        self.process.is_some()
    }

    /// Starts the process by `start`, which gets its number among those of this rank. Returns the system's number of it.
    ///
    /// # Errors
    /// The errors of `start`.
    pub fn start(&mut self, start: impl FnOnce(u64) -> Result<RankProcess>) -> Result<u32> {
        self.started += 1;
        let process = start(self.started)?;
        let id = process.id();
        self.process = Some(process);
        Ok(id)
    }

    /// Takes what is heard of the process with the number `started`; that of an earlier one is ignored. Returns what the agent
    /// wants done, and how the process ended if it has.
    pub fn hear(
        &mut self,
        now: Millis,
        started: u64,
        heard: Heard,
    ) -> (Vec<AgentAction>, Option<End>) {
        if started != self.started {
            return (Vec::new(), None);
        }
        match heard {
            Heard::Message(FromProcess::Ready { digest }) => {
                (self.agent.process_ready(now, digest), None)
            }
            Heard::Message(FromProcess::Beat { computing }) => {
                self.agent.process_beats(now, computing);
                (Vec::new(), None)
            }
            Heard::Message(FromProcess::Failed(why)) => {
                self.failed = Some(why);
                (Vec::new(), None)
            }
            Heard::Closed => {
                let Some(mut process) = self.process.take() else { return (Vec::new(), None) };
                let end = End::of(process.wait(), self.failed.take());
                (self.agent.process_ended(&end.why), Some(end))
            }
        }
    }

    /// Tells the process something, if there is one.
    pub fn tell(&self, message: &ToProcess) {
        if let Some(process) = &self.process {
            process.tell(message);
        }
    }

    /// Kills the process, if there is one.
    pub fn kill(&mut self) {
        if let Some(process) = &mut self.process {
            process.kill();
        }
    }
}

impl End {
    fn of(status: io::Result<ExitStatus>, failed: Option<String>) -> Self {
        let is_success = status.as_ref().is_ok_and(ExitStatus::success);
        let cannot_load = failed.is_some();
        let why = failed.unwrap_or_else(|| match status {
            Ok(status) => described(status),
            Err(error) => error.to_string(),
        });
        Self { why, cannot_load, is_success }
    }
}
