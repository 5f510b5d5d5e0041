//! The supervisor of all ranks: it decides when they start, serve and end.

use super::{
    Addresses, BEAT_MS, ENTRY_MS, FromAgent, Generation, LOADING_MS, LONGEST_PAUSE_MS, Millis,
    SILENCE_MS, ToAgent,
};

/// What a supervisor wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SupervisorAction {
    /// Send a message to the agent of a rank.
    Send(usize, ToAgent),
    /// End the connection to the agent of a rank.
    Disconnect(usize),
    /// Find addresses where the ranks can connect to each other, and say so with [`Supervisor::start`].
    FindAddresses,
    /// All ranks are ready: the first one gets the requests.
    Serve(Generation),
    /// The ranks end: requests are refused until they serve again.
    Refuse {
        /// The rank because of which they end.
        rank: usize,
        /// For people.
        why: String,
    },
}

/// The state of a rank's agent and process, as the supervisor knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The agent is not connected.
    Absent,
    /// The agent has no process.
    Idle,
    /// The process starts or loads its part.
    Loading,
    /// The process computes.
    Ready,
    /// The process was told to end.
    Ending,
}

#[derive(Debug)]
struct Member {
    state: State,
    /// When it was last heard of.
    heard: Millis,
    digest: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waits until all agents are there without a process, and until the pause is over.
    Gathering { not_before: Millis },
    /// Addresses are being found.
    Placing,
    /// Processes load since then.
    Loading { since: Millis },
    /// The first rank serves.
    Serving,
    /// Processes end since then.
    Ending { since: Millis },
}

/// The supervisor of all ranks.
#[derive(Debug)]
pub struct Supervisor {
    members: Vec<Member>,
    phase: Phase,
    generation: Generation,
    /// When the supervisor last sent a sign of life.
    beat: Millis,
    /// Attempts in a row that never served.
    failed: u32,
}

impl Supervisor {
    /// Creates the supervisor of `ranks` ranks, whose agents have yet to connect.
    pub fn new(ranks: usize) -> Self {
        let absent = || Member { state: State::Absent, heard: 0, digest: String::new() };
        Self {
            members: (0..ranks).map(|_| absent()).collect(),
            phase: Phase::Gathering { not_before: 0 },
            generation: 0,
            beat: 0,
            failed: 0,
        }
    }

    /// Returns true while the first rank serves.
    pub fn is_serving(&self) -> bool {
        self.phase == Phase::Serving
    }

    /// The ranks whose agents are not connected.
    pub fn absent(&self) -> impl Iterator<Item = usize> {
        let is_absent =
            |(rank, member): (usize, &Member)| (member.state == State::Absent).then_some(rank);
        self.members.iter().enumerate().filter_map(is_absent)
    }

    /// The agent of a rank has connected. It has no process: those of earlier connections have ended.
    pub fn connected(&mut self, now: Millis, rank: usize) -> Vec<SupervisorAction> {
        let mut actions = Vec::new();
        if self.members[rank].state != State::Absent {
            actions.extend(self.disconnected(now, rank));
        }
        self.members[rank] = Member { state: State::Idle, heard: now, digest: String::new() };
        actions.extend(self.proceed(now));
        actions
    }

    /// The connection of the agent of a rank has ended.
    pub fn disconnected(&mut self, now: Millis, rank: usize) -> Vec<SupervisorAction> {
        self.members[rank].state = State::Absent;
        let mut actions = self.end(now, rank, "its connection has ended");
        actions.extend(self.proceed(now));
        actions
    }

    /// A message of the agent of a rank.
    pub fn receive(
        &mut self,
        now: Millis,
        rank: usize,
        message: FromAgent,
    ) -> Vec<SupervisorAction> {
        let current = self.generation;
        let member = &mut self.members[rank];
        if member.state == State::Absent {
            return Vec::new();
        }
        member.heard = now;
        let mut actions = Vec::new();
        match message {
            FromAgent::Ready { generation, digest } if generation == current => {
                if member.state == State::Loading {
                    (member.state, member.digest) = (State::Ready, digest);
                    actions.extend(self.compare(now, rank));
                }
            }
            FromAgent::Beat { generation: Some(generation), executing: Some(time) } => {
                if generation == current && time > ENTRY_MS {
                    actions.extend(self.end(now, rank, "it computes without an end"));
                }
            }
            FromAgent::Ended { generation, why } if generation == current => {
                if member.state != State::Idle {
                    member.state = State::Idle;
                    actions.extend(self.end(now, rank, &why));
                }
            }
            FromAgent::Ready { .. } | FromAgent::Beat { .. } | FromAgent::Ended { .. } => {}
        }
        actions.extend(self.proceed(now));
        actions
    }

    /// Addresses have been found: the processes start. Ignored if an agent has gone meanwhile.
    pub fn start(&mut self, now: Millis, addresses: &Addresses) -> Vec<SupervisorAction> {
        if self.phase != Phase::Placing {
            return Vec::new();
        }
        self.generation += 1;
        self.phase = Phase::Loading { since: now };
        let generation = self.generation;
        let start = |rank| {
            let addresses = addresses.clone();
            SupervisorAction::Send(rank, ToAgent::Start { generation, addresses })
        };
        self.members.iter_mut().for_each(|member| member.state = State::Loading);
        (0..self.members.len()).map(start).collect()
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Millis) -> Vec<SupervisorAction> {
        let mut actions = Vec::new();
        for rank in 0..self.members.len() {
            let Member { state, heard, .. } = self.members[rank];
            if state != State::Absent && now.saturating_sub(heard) > SILENCE_MS {
                actions.push(SupervisorAction::Disconnect(rank));
                self.members[rank].state = State::Absent;
                actions.extend(self.end(now, rank, "nothing is heard of it"));
            }
        }
        if let Phase::Loading { since } = self.phase
            && now.saturating_sub(since) > LOADING_MS
        {
            let is_loading = |member: &Member| member.state == State::Loading;
            let rank = self.members.iter().position(is_loading).unwrap_or(0);
            actions.extend(self.end(now, rank, "it does not finish loading"));
        }
        if let Phase::Ending { since } = self.phase
            && now.saturating_sub(since) > SILENCE_MS
        {
            // An agent whose connection ends kills its process.
            for rank in 0..self.members.len() {
                if self.members[rank].state == State::Ending {
                    actions.push(SupervisorAction::Disconnect(rank));
                    self.members[rank].state = State::Absent;
                }
            }
        }
        if now.saturating_sub(self.beat) >= BEAT_MS {
            self.beat = now;
            let is_there = |&rank: &usize| self.members[rank].state != State::Absent;
            let there = (0..self.members.len()).filter(is_there);
            actions.extend(there.map(|rank| SupervisorAction::Send(rank, ToAgent::Beat)));
        }
        actions.extend(self.proceed(now));
        actions
    }

    /// Ends the generation if one rank has something else than the first.
    fn compare(&mut self, now: Millis, rank: usize) -> Vec<SupervisorAction> {
        let ready = self.members.iter().filter(|member| member.state == State::Ready);
        let own = &self.members[rank].digest;
        match ready.into_iter().all(|member| member.digest == *own) {
            true => Vec::new(),
            false => self.end(now, rank, "it has another version, other weights or another split"),
        }
    }

    /// Ends all processes because of one rank.
    fn end(&mut self, now: Millis, rank: usize, why: &str) -> Vec<SupervisorAction> {
        match self.phase {
            Phase::Gathering { .. } | Phase::Ending { .. } => return Vec::new(),
            Phase::Placing => {
                self.phase = Phase::Gathering { not_before: now };
                return Vec::new();
            }
            Phase::Serving => self.failed = 0,
            Phase::Loading { .. } => self.failed = (self.failed + 1).min(16),
        }
        self.phase = Phase::Ending { since: now };
        let why = format!("rank {rank}: {why}");
        let mut actions = vec![SupervisorAction::Refuse { rank, why: why.clone() }];
        let generation = self.generation;
        for (rank, member) in self.members.iter_mut().enumerate() {
            if matches!(member.state, State::Loading | State::Ready) {
                member.state = State::Ending;
                let stop = ToAgent::Stop { generation, why: why.clone() };
                actions.push(SupervisorAction::Send(rank, stop));
            }
        }
        actions
    }

    /// Goes to the next phase if nothing stands against it.
    fn proceed(&mut self, now: Millis) -> Vec<SupervisorAction> {
        let all = |state| self.members.iter().all(|member| member.state == state);
        match self.phase {
            Phase::Ending { .. } => {
                let is_over = |member: &Member| matches!(member.state, State::Idle | State::Absent);
                if self.members.iter().all(is_over) {
                    let pause = match self.failed {
                        0 => 0,
                        failed => (BEAT_MS << (failed - 1)).min(LONGEST_PAUSE_MS),
                    };
                    self.phase = Phase::Gathering { not_before: now + pause };
                    return self.proceed(now);
                }
                Vec::new()
            }
            Phase::Gathering { not_before } if now >= not_before && all(State::Idle) => {
                self.phase = Phase::Placing;
                vec![SupervisorAction::FindAddresses]
            }
            Phase::Loading { .. } if all(State::Ready) => {
                self.phase = Phase::Serving;
                vec![SupervisorAction::Serve(self.generation)]
            }
            _ => Vec::new(),
        }
    }
}
