//! The agent of one rank: it starts and ends the rank's process as its supervisor says.

use super::{Addresses, BEAT_MS, FromAgent, GRACE_MS, Generation, Millis, SILENCE_MS, ToAgent};

/// What an agent wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentAction {
    /// Connect to the supervisor, and say so with [`Agent::connected`].
    Connect,
    /// End the connection.
    Disconnect,
    /// Send a message.
    Send(FromAgent),
    /// Start the process.
    Spawn {
        /// The attempt.
        generation: Generation,
        /// Where the ranks find each other.
        addresses: Addresses,
    },
    /// Let the process tell its clients that it ends, and why.
    Warn(String),
    /// End the process now, whatever it does, and say so with [`Agent::process_ended`].
    Kill,
}

/// A process that runs.
#[derive(Debug)]
struct Process {
    generation: Generation,
    /// When it was last heard of.
    heard: Millis,
    executing: Option<Millis>,
    /// When it is killed, if it was warned; 0 when it has been.
    doomed: Option<Millis>,
    why: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// There is none, and none is being made until the process has ended.
    Down,
    /// It is being made.
    Connecting,
    /// It is there. The supervisor was last heard of then.
    Up { heard: Millis, beat: Millis },
}

/// The agent of one rank.
#[derive(Debug)]
pub struct Agent {
    link: Link,
    process: Option<Process>,
    /// The newest generation that was started or stopped since it has connected: it is not started again.
    newest: Generation,
}

impl Agent {
    /// An agent that connects to its supervisor.
    pub fn new() -> (Self, Vec<AgentAction>) {
        (Self { link: Link::Connecting, process: None, newest: 0 }, vec![AgentAction::Connect])
    }

    /// The generation of the process that runs.
    pub fn generation(&self) -> Option<Generation> {
        self.process.as_ref().map(|process| process.generation)
    }

    /// The connection is there.
    pub fn connected(&mut self, now: Millis) -> Vec<AgentAction> {
        debug_assert!(self.process.is_none(), "it connects after its process has ended");
        self.link = Link::Up { heard: now, beat: now };
        self.newest = 0;
        vec![AgentAction::Send(FromAgent::Beat { generation: None, executing: None })]
    }

    /// The connection has ended, or could not be made.
    pub fn disconnected(&mut self, now: Millis) -> Vec<AgentAction> {
        self.link = Link::Down;
        match self.process {
            Some(_) => self.end_process(now, "the connection to the supervisor has ended"),
            None => self.connect(),
        }
    }

    /// A message of the supervisor.
    pub fn receive(&mut self, now: Millis, message: ToAgent) -> Vec<AgentAction> {
        let Link::Up { heard, .. } = &mut self.link else { return Vec::new() };
        *heard = now;
        match message {
            ToAgent::Beat => Vec::new(),
            // A message that comes twice, or after the one that stops it.
            ToAgent::Start { generation, .. } if generation <= self.newest => Vec::new(),
            ToAgent::Start { generation, addresses } => {
                debug_assert!(self.process.is_none(), "the last generation has ended");
                self.newest = generation;
                self.process = Some(Process {
                    generation,
                    heard: now,
                    executing: None,
                    doomed: None,
                    why: String::new(),
                });
                vec![AgentAction::Spawn { generation, addresses }]
            }
            ToAgent::Stop { generation, why } => {
                self.newest = self.newest.max(generation);
                match &self.process {
                    Some(process) if process.generation <= generation => {
                        self.end_process(now, &why)
                    }
                    Some(_) => Vec::new(),
                    None => vec![AgentAction::Send(FromAgent::Ended { generation, why })],
                }
            }
        }
    }

    /// The process has loaded its part.
    pub fn process_ready(&mut self, now: Millis, digest: String) -> Vec<AgentAction> {
        let Some(process) = &mut self.process else { return Vec::new() };
        process.heard = now;
        let generation = process.generation;
        self.send(FromAgent::Ready { generation, digest })
    }

    /// A sign of life of the process, which has computed without an end for so long, if it computes.
    pub fn process_beats(&mut self, now: Millis, executing: Option<Millis>) {
        if let Some(process) = &mut self.process {
            (process.heard, process.executing) = (now, executing);
        }
    }

    /// The process has ended, by itself or killed.
    pub fn process_ended(&mut self, why: &str) -> Vec<AgentAction> {
        let Some(process) = self.process.take() else { return Vec::new() };
        let why = if process.why.is_empty() { why.to_owned() } else { process.why };
        match self.link {
            Link::Down => self.connect(),
            _ => self.send(FromAgent::Ended { generation: process.generation, why }),
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Millis) -> Vec<AgentAction> {
        let mut actions = Vec::new();
        if let Link::Up { heard, .. } = self.link
            && now.saturating_sub(heard) > SILENCE_MS
        {
            actions.push(AgentAction::Disconnect);
            actions.extend(self.disconnected(now));
        }
        if let Some(process) = &mut self.process {
            let is_silent = now.saturating_sub(process.heard) > SILENCE_MS;
            match process.doomed {
                Some(0) => {}
                Some(at) if at <= now => {
                    process.doomed = Some(0);
                    actions.push(AgentAction::Kill);
                }
                Some(_) => {}
                // It would hear no warning.
                None if is_silent => {
                    (process.doomed, process.why) = (Some(0), "the process is frozen".into());
                    actions.push(AgentAction::Kill);
                }
                None => {}
            }
        }
        let generation = self.generation();
        let executing = self.process.as_ref().and_then(|process| process.executing);
        if let Link::Up { beat, .. } = &mut self.link
            && now.saturating_sub(*beat) >= BEAT_MS
        {
            *beat = now;
            actions.push(AgentAction::Send(FromAgent::Beat { generation, executing }));
        }
        actions
    }

    fn connect(&mut self) -> Vec<AgentAction> {
        self.link = Link::Connecting;
        vec![AgentAction::Connect]
    }

    fn send(&self, message: FromAgent) -> Vec<AgentAction> {
        match self.link {
            Link::Up { .. } => vec![AgentAction::Send(message)],
            _ => Vec::new(),
        }
    }

    /// Warns the process, which is killed soon after.
    fn end_process(&mut self, now: Millis, why: &str) -> Vec<AgentAction> {
        match &mut self.process {
            Some(process) if process.doomed.is_none() => {
                process.doomed = Some(now + GRACE_MS);
                process.why = why.into();
                vec![AgentAction::Warn(why.into())]
            }
            _ => Vec::new(),
        }
    }
}
