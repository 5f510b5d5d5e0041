//! Random schedules of supervisor, agents and processes, with crashes, freezes, delays, messages that come twice and connections
//! that end. Time is simulated. In each schedule:
//!
//! - nobody waits for ever: after the last fault the ranks serve again;
//! - a fault while they serve is answered within five seconds;
//! - no process starts while one of an older generation runs;
//! - ranks that exchange arrays execute the same entry of the log, so that no token is wrong.

use std::collections::VecDeque;

use steersman_rank_control::{
    Addresses, Agent, AgentAction, ENTRY_MS, FromAgent, GRACE_MS, Generation, LONGEST_PAUSE_MS,
    Millis, SILENCE_MS, Supervisor, SupervisorAction, ToAgent,
};
use steersman_test_support::{Random, fuzz_inputs};

/// Simulated time between two looks at everything.
const STEP_MS: Millis = 50;

/// Faults happen before this time.
const FAULTS_UNTIL: Millis = 30_000;

/// Longest delay of a message, of loading, and of everything else that takes time.
const DELAY_MS: usize = 300;
const LOADING_MS: usize = 2_000;

/// Time in which a client has an error.
const ANSWER_MS: Millis = 5_000;

/// Time in which the ranks serve again when nothing is wrong any more.
const RECOVERY_MS: Millis = ENTRY_MS + 2 * SILENCE_MS + LONGEST_PAUSE_MS + GRACE_MS + 10_000;

/// A queue that delivers in order, each message not before its time.
struct Queue<T>(VecDeque<(Millis, T)>);

impl<T: Clone> Queue<T> {
    fn new() -> Self {
        Self(VecDeque::new())
    }

    fn send(&mut self, now: Millis, random: &mut Random, message: T) {
        let at = now + random.below(DELAY_MS) as Millis;
        let at = at.max(self.0.back().map_or(0, |(at, _)| *at));
        self.0.push_back((at, message));
    }

    /// Sends a message that may come twice, as long as there are faults.
    fn send_unsafely(&mut self, now: Millis, random: &mut Random, message: T) {
        if now < FAULTS_UNTIL && random.below(50) == 0 {
            self.send(now, random, message.clone());
        }
        self.send(now, random, message);
    }

    fn next(&mut self, now: Millis) -> Option<T> {
        let is_due = self.0.front().is_some_and(|(at, _)| *at <= now);
        is_due.then(|| self.0.pop_front().expect("it has one").1)
    }
}

/// A connection between an agent and the supervisor.
struct Link {
    up: Queue<ToAgent>,
    down: Queue<FromAgent>,
}

struct Process {
    /// The supervisor that started it, and its attempt.
    started_by: (usize, Generation),
    generation: Generation,
    ready_at: Millis,
    is_ready: bool,
    is_frozen: bool,
    /// Entries that have come, and the next one that it expects.
    log: Queue<u64>,
    expected: u64,
    /// The entry whose arrays it exchanges.
    at: Option<u64>,
    /// Since when.
    since: Millis,
    beats_at: Millis,
}

/// A machine with one rank.
struct Host {
    agent: Option<Agent>,
    /// When the agent's attempt to connect succeeds.
    connects_at: Option<Millis>,
    /// When the machine is there again after a crash.
    starts_at: Millis,
    link: Option<Link>,
    process: Option<Process>,
    /// When the agent hears that its process has ended.
    ended_at: Option<Millis>,
}

struct World {
    now: Millis,
    random: Random,
    supervisor: Supervisor,
    /// Number of supervisors so far.
    supervisors: usize,
    hosts: Vec<Host>,
    addresses_at: Option<Millis>,
    serving: Option<Generation>,
    /// Entry that the first rank executes next, and tokens that came of it.
    entry: u64,
    tokens: u64,
    /// When each rank was broken last while it served: a second fault may hide the first.
    broken: Vec<Option<Millis>>,
    /// How often the ranks served.
    served: u64,
}

impl World {
    fn new(ranks: usize, seed: u64) -> Self {
        let host = || Host {
            agent: None,
            connects_at: None,
            starts_at: 0,
            link: None,
            process: None,
            ended_at: None,
        };
        Self {
            now: 0,
            random: Random(seed),
            supervisor: Supervisor::new(ranks),
            supervisors: 1,
            hosts: (0..ranks).map(|_| host()).collect(),
            addresses_at: None,
            serving: None,
            entry: 0,
            tokens: 0,
            broken: vec![None; ranks],
            served: 0,
        }
    }

    fn delay(&mut self, most: usize) -> Millis {
        self.now + self.random.below(most) as Millis
    }

    fn step(&mut self) {
        self.now += STEP_MS;
        if self.now < FAULTS_UNTIL && self.random.below(100) == 0 {
            self.fault();
        }
        if self.addresses_at.is_some_and(|at| at <= self.now) {
            self.addresses_at = None;
            let ranks = (0..self.hosts.len()).map(|rank| rank.to_string()).collect();
            let addresses = Addresses { ranks, log: "log".into() };
            let actions = self.supervisor.start(self.now, &addresses);
            self.supervise(actions);
        }
        let actions = self.supervisor.tick(self.now);
        self.supervise(actions);
        for rank in 0..self.hosts.len() {
            self.run_host(rank);
        }
        self.run_ranks();
        for since in self.broken.iter().flatten() {
            let waited = self.now - since;
            assert!(waited <= ANSWER_MS, "no error {waited} ms after a fault at {since}");
        }
    }

    fn fault(&mut self) {
        let rank = self.random.below(self.hosts.len());
        let kind = self.random.below(7);
        let is_part = self.serving.is_some()
            && self.hosts[rank].process.as_ref().map(|process| process.generation) == self.serving;
        match kind {
            // A process crashes.
            0 => self.crash_process(rank),
            // A process freezes.
            1 => {
                if let Some(process) = &mut self.hosts[rank].process {
                    process.is_frozen = true;
                }
            }
            // A connection ends, and both sides hear of it.
            2 => self.cut(rank),
            // A machine loses its power; the supervisor hears nothing of it.
            3 => {
                let starts_at = self.delay(8_000);
                let host = &mut self.hosts[rank];
                (host.agent, host.process, host.ended_at) = (None, None, None);
                (host.connects_at, host.starts_at) = (None, starts_at);
            }
            // An entry comes twice, or is lost.
            4 => {
                if let Some(process) = &mut self.hosts[rank].process {
                    match process.log.0.pop_front() {
                        Some(entry) if self.random.below(2) == 0 => {
                            process.log.0.push_front(entry);
                            process.log.0.push_front(entry);
                        }
                        _ => {}
                    }
                }
                return;
            }
            // The supervisor crashes, and another one begins.
            5 => {
                self.supervisor = Supervisor::new(self.hosts.len());
                self.supervisors += 1;
                (self.serving, self.addresses_at) = (None, None);
                self.broken.fill(None);
                for rank in 0..self.hosts.len() {
                    if self.hosts[rank].link.take().is_some() {
                        let now = self.now;
                        self.agent(rank, |agent| agent.disconnected(now));
                    }
                }
                return;
            }
            // A process is slow to begin.
            _ => {
                if let Some(process) = &mut self.hosts[rank].process {
                    process.ready_at += 4_000;
                }
                return;
            }
        }
        if self.serving.is_some() && (is_part || self.broken[rank].is_some()) {
            self.broken[rank] = Some(self.now);
        }
    }

    fn crash_process(&mut self, rank: usize) {
        let at = self.delay(DELAY_MS);
        let host = &mut self.hosts[rank];
        if host.process.take().is_some() {
            host.ended_at = Some(at);
        }
    }

    fn cut(&mut self, rank: usize) {
        if self.hosts[rank].link.take().is_none() {
            return;
        }
        let actions = self.supervisor.disconnected(self.now, rank);
        self.supervise(actions);
        if let Some(agent) = &mut self.hosts[rank].agent {
            let actions = agent.disconnected(self.now);
            self.obey(rank, actions);
        }
    }

    fn supervise(&mut self, actions: Vec<SupervisorAction>) {
        for action in actions {
            match action {
                SupervisorAction::Send(rank, message) => {
                    if let Some(link) = &mut self.hosts[rank].link {
                        link.up.send_unsafely(self.now, &mut self.random, message);
                    }
                }
                SupervisorAction::Disconnect(rank) => self.cut_one_side(rank),
                SupervisorAction::FindAddresses => self.addresses_at = Some(self.delay(DELAY_MS)),
                SupervisorAction::Serve(generation) => {
                    for (host, broken) in self.hosts.iter().zip(&mut self.broken) {
                        let process = host.process.as_ref();
                        // It may have died since it was ready.
                        if process.is_none_or(|one| one.generation != generation || one.is_frozen) {
                            *broken = Some(self.now);
                        }
                    }
                    (self.serving, self.entry) = (Some(generation), 0);
                    self.served += 1;
                }
                SupervisorAction::Refuse { why, .. } => {
                    assert!(why.starts_with("rank "), "{why}");
                    self.serving = None;
                    self.broken.fill(None);
                }
            }
        }
    }

    /// The supervisor has ended a connection; the agent hears of it if its machine is there.
    fn cut_one_side(&mut self, rank: usize) {
        self.hosts[rank].link = None;
        if let Some(agent) = &mut self.hosts[rank].agent {
            let actions = agent.disconnected(self.now);
            self.obey(rank, actions);
        }
    }

    fn obey(&mut self, rank: usize, actions: Vec<AgentAction>) {
        for action in actions {
            match action {
                AgentAction::Connect => self.hosts[rank].connects_at = Some(self.delay(DELAY_MS)),
                AgentAction::Disconnect => {
                    if self.hosts[rank].link.take().is_some() {
                        let actions = self.supervisor.disconnected(self.now, rank);
                        self.supervise(actions);
                    }
                }
                AgentAction::Send(message) => {
                    if let Some(link) = &mut self.hosts[rank].link {
                        link.down.send_unsafely(self.now, &mut self.random, message);
                    }
                }
                AgentAction::Spawn { generation, addresses } => {
                    assert_eq!(addresses.ranks.len(), self.hosts.len());
                    let others = self.hosts.iter().filter_map(|host| host.process.as_ref());
                    let started_by = (self.supervisors, generation);
                    for other in others {
                        assert_eq!(other.started_by, started_by, "two generations run at once");
                    }
                    let ready_at = self.delay(LOADING_MS);
                    self.hosts[rank].process = Some(Process {
                        started_by,
                        generation,
                        ready_at,
                        is_ready: false,
                        is_frozen: false,
                        log: Queue::new(),
                        expected: 0,
                        at: None,
                        since: 0,
                        beats_at: 0,
                    });
                }
                AgentAction::Warn(why) => assert!(!why.is_empty()),
                AgentAction::Kill => self.crash_process(rank),
            }
        }
    }

    fn run_host(&mut self, rank: usize) {
        let now = self.now;
        if self.hosts[rank].agent.is_none() && self.hosts[rank].starts_at <= now {
            let (agent, actions) = Agent::new();
            // A connection of the time before the crash is answered by nobody.
            self.hosts[rank].link = None;
            self.hosts[rank].agent = Some(agent);
            self.obey(rank, actions);
        }
        if self.hosts[rank].agent.is_none() {
            return;
        }
        if self.hosts[rank].connects_at.is_some_and(|at| at <= now) {
            let host = &mut self.hosts[rank];
            host.connects_at = None;
            host.link = Some(Link { up: Queue::new(), down: Queue::new() });
            // The supervisor hears of it at once, the agent as well.
            let actions = self.supervisor.connected(now, rank);
            self.supervise(actions);
            self.agent(rank, |agent| agent.connected(now));
        }
        if self.hosts[rank].ended_at.is_some_and(|at| at <= now) {
            self.hosts[rank].ended_at = None;
            self.agent(rank, |agent| agent.process_ended("it crashed"));
        }
        while let Some(message) = self.hosts[rank].link.as_mut().and_then(|link| link.up.next(now))
        {
            self.agent(rank, |agent| agent.receive(now, message));
        }
        while let Some(message) =
            self.hosts[rank].link.as_mut().and_then(|link| link.down.next(now))
        {
            let actions = self.supervisor.receive(now, rank, message);
            self.supervise(actions);
        }
        if let Some(process) = self.hosts[rank].process.as_mut().filter(|one| !one.is_frozen) {
            let becomes_ready = !process.is_ready && process.ready_at <= now;
            process.is_ready |= becomes_ready;
            let beats = process.beats_at <= now;
            let executing = process.at.map(|_| now - process.since);
            if beats {
                process.beats_at = now + 1000;
            }
            if becomes_ready {
                self.agent(rank, |agent| agent.process_ready(now, "same".into()));
            }
            if beats {
                self.agent(rank, |agent| {
                    agent.process_beats(now, executing);
                    Vec::new()
                });
            }
        }
        self.agent(rank, |agent| agent.tick(now));
    }

    fn agent(&mut self, rank: usize, act: impl FnOnce(&mut Agent) -> Vec<AgentAction>) {
        if let Some(agent) = &mut self.hosts[rank].agent {
            let actions = act(agent);
            self.obey(rank, actions);
        }
    }

    /// The ranks compute: the first one writes an entry, the others follow, all exchange arrays.
    fn run_ranks(&mut self) {
        let Some(generation) = self.serving else { return };
        let is_part = |host: &Host| {
            host.process.as_ref().is_some_and(|one| one.generation == generation && !one.is_frozen)
        };
        if is_part(&self.hosts[0]) {
            let first = self.hosts[0].process.as_mut().expect("it is there");
            if first.at.is_none() {
                (first.at, first.since) = (Some(self.entry), self.now);
                for host in &mut self.hosts[1..] {
                    if let Some(process) = host.process.as_mut()
                        && process.generation == generation
                    {
                        process.log.send(self.now, &mut self.random, self.entry);
                    }
                }
            }
        }
        for rank in 1..self.hosts.len() {
            if !is_part(&self.hosts[rank]) {
                continue;
            }
            let process = self.hosts[rank].process.as_mut().expect("it is there");
            if process.at.is_some() {
                continue;
            }
            if let Some(entry) = process.log.next(self.now) {
                if entry == process.expected {
                    (process.at, process.since) = (Some(entry), self.now);
                    process.expected += 1;
                } else {
                    // It stops before it exchanges arrays.
                    self.broken[rank] = Some(self.now);
                    self.crash_process(rank);
                }
            }
        }
        let at: Option<Vec<u64>> = self
            .hosts
            .iter()
            .map(|host| host.process.as_ref().filter(|_| is_part(host)).and_then(|one| one.at))
            .collect();
        if let Some(at) = at {
            assert!(at.iter().all(|entry| *entry == self.entry), "entries {at:?} were mixed");
            self.tokens += 1;
            self.entry += 1;
            for host in &mut self.hosts {
                host.process.as_mut().expect("all are there").at = None;
            }
        }
    }
}

/// Returns the tokens and how often the ranks served.
fn run(seed: u64) -> (u64, u64) {
    let ranks = 2 + (seed % 3) as usize;
    let mut world = World::new(ranks, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    while world.now < FAULTS_UNTIL + RECOVERY_MS {
        world.step();
    }
    let agents: Vec<_> = world.hosts.iter().map(|host| &host.agent).collect();
    let supervisor = &world.supervisor;
    assert!(supervisor.is_serving(), "the ranks do not serve again: {supervisor:?}, {agents:?}");
    let before = world.tokens;
    (0..100).for_each(|_| world.step());
    assert!(world.tokens > before, "they serve without computing");
    (world.tokens, world.served)
}

#[test]
fn ranks_serve_again_after_every_schedule_of_faults() {
    let (mut tokens, mut served) = (0, 0);
    let schedules = fuzz_inputs() as u64;
    for seed in 0..schedules {
        let done = std::panic::catch_unwind(|| run(seed));
        let (of_one, starts) = done.unwrap_or_else(|_| panic!("schedule {seed} failed"));
        tokens += of_one;
        served += starts;
    }
    println!("{schedules} schedules: {served} starts, {tokens} tokens");
    assert!(served > 2 * schedules, "faults end the service of most schedules");
}
