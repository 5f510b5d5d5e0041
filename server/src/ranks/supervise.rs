//! The parent of a server's ranks: it starts them, watches them, and starts all again when one of them ends, freezes or differs.
//!
//! [`Supervisor`] and [`Agent`] decide; this does what they say, with processes of this machine. The parent owns the socket that
//! clients connect to and passes it to the first rank, which answers as long as its process runs. Between two processes the parent
//! answers: 503.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use steersman_engine::config::Config;
use steersman_rank_control::{Addresses, Agent, AgentAction, Millis, Supervisor, SupervisorAction};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::control::{FromProcess, ToProcess};
use super::environment::{Hosts, free_addresses};
use super::launch::Launch;
use super::process::{Heard, RankProcess, described};
use super::{Over, Part};
use crate::address::Announced;
use crate::config::ServerConfig;
use crate::models::find;
use crate::serve;
use crate::signals::{Hangups, Signals, StopSignals};

/// Time between two looks at what was not heard.
const TICK: Duration = Duration::from_millis(100);

/// A server whose model is computed by ranks of this machine.
struct Supervised {
    /// How their processes are started.
    launch: Launch,
    /// How many there are.
    count: usize,
    /// The socket that clients connect to.
    listener: TcpListener,
    /// Where the file with the addresses of ranks is.
    data_dir: PathBuf,
}

/// What happens to the parent.
enum Event {
    /// Something is heard of the process of a rank: the one that was started as this.
    Heard(usize, u64, Heard),
    /// A signal stops the server.
    Stop,
    /// A signal reloads its configuration.
    Reload,
}

/// Starts a server whose model is computed by `count` ranks, and starts them again until a signal stops it. `announced` gets its
/// address.
///
/// # Errors
/// If the port is in use, if a rank cannot load its part at the first attempt, or if the first rank fails while the server stops.
pub fn supervise(
    mut config: Config,
    server: &ServerConfig,
    data_dir: PathBuf,
    count: usize,
    over: Option<Over>,
    mut announced: Announced,
) -> Result<()> {
    let runtime = Runtime::new().context("starting the runtime")?;
    let _entered = runtime.enter();
    // Before files are downloaded: a port in use should fail at once.
    let listener = runtime.block_on(serve::listen(server))?.into_std()?;
    announced.listen(listener.local_addr().context("reading the address")?);
    let folder = find(&mut config, &data_dir)?.folder;
    let over = over.unwrap_or_else(|| Over::of(config.model.device));
    let part = Part { folder, config: config.model, data_dir: data_dir.clone() };
    let launch = Launch::new(over, part)?;

    let (sender, events) = channel();
    let Signals { stop, hangups } = Signals::install()?;
    tokio::spawn(forward(sender.clone(), stop, hangups));
    let (why, refused) = watch::channel(None);
    tokio::spawn(refuse(listener.try_clone()?, refused, server.clone()));
    Supervision::new(Supervised { launch, count, listener, data_dir }, sender, why).run(&events)
}

/// Makes events of signals.
async fn forward(events: Sender<Event>, mut stop: StopSignals, mut hangups: Hangups) {
    let stops = async {
        for count in 1.. {
            stop.reach(count).await;
            let _ = events.send(Event::Stop);
        }
    };
    let reloads = async {
        while hangups.next().await {
            let _ = events.send(Event::Reload);
        }
    };
    tokio::join!(stops, reloads);
}

/// Answers clients whenever there is a reason why no rank does.
async fn refuse(
    listener: TcpListener,
    why: watch::Receiver<Option<String>>,
    config: ServerConfig,
) -> Result<()> {
    listener.set_nonblocking(true)?;
    let mut reasons = why.clone();
    while reasons.wait_for(Option::is_some).await.is_ok() {
        let listener = tokio::net::TcpListener::from_std(listener.try_clone()?)?;
        let mut reasons = why.clone();
        let ends = async move { drop(reasons.wait_for(Option::is_none).await) };
        let app = serve::without_ranks(why.clone());
        serve::run(listener, app, &config, ends, std::future::pending()).await;
    }
    Ok(())
}

/// A rank of this machine.
struct Local {
    agent: Agent,
    process: Option<RankProcess>,
    /// Number of processes that were started.
    started: u64,
    /// Why the process cannot load its part.
    failed: Option<String>,
}

/// Something to be done.
enum Step {
    Supervise(SupervisorAction),
    Obey(usize, AgentAction),
}

struct Supervision {
    supervised: Supervised,
    events: Sender<Event>,
    began: Instant,
    supervisor: Supervisor,
    ranks: Vec<Local>,
    steps: VecDeque<Step>,
    /// The addresses of the ranks that run.
    hosts: Option<Hosts>,
    /// Why no rank answers clients, while none does.
    why: watch::Sender<Option<String>>,
    has_served: bool,
    is_stopping: bool,
    /// How the server ended.
    ended: Option<Result<()>>,
}

impl Supervision {
    fn new(
        supervised: Supervised,
        events: Sender<Event>,
        why: watch::Sender<Option<String>>,
    ) -> Self {
        let supervisor = Supervisor::new(supervised.count);
        let (mut ranks, mut steps) = (Vec::new(), VecDeque::new());
        for rank in 0..supervised.count {
            let (agent, actions) = Agent::new();
            steps.extend(actions.into_iter().map(|action| Step::Obey(rank, action)));
            ranks.push(Local { agent, process: None, started: 0, failed: None });
        }
        Self {
            supervised,
            events,
            began: Instant::now(),
            supervisor,
            ranks,
            steps,
            hosts: None,
            why,
            has_served: false,
            is_stopping: false,
            ended: None,
        }
    }

    fn run(mut self, events: &Receiver<Event>) -> Result<()> {
        loop {
            // What has been heard counts before what has not.
            match events.recv_timeout(TICK) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("this has a sender"),
            }
            for event in events.try_iter() {
                self.handle(event);
            }
            let now = self.now();
            let actions = self.supervisor.tick(now);
            self.supervise(actions);
            for rank in 0..self.ranks.len() {
                let actions = self.ranks[rank].agent.tick(now);
                self.obey(rank, actions);
            }
            self.perform();
            if let Some(ended) = self.ended.take() {
                return ended;
            }
        }
    }

    fn now(&self) -> Millis {
        // From 1 on: the state machines take 0 for never.
        Millis::try_from(self.began.elapsed().as_millis()).unwrap_or(Millis::MAX - 1) + 1
    }

    fn supervise(&mut self, actions: Vec<SupervisorAction>) {
        self.steps.extend(actions.into_iter().map(Step::Supervise));
    }

    fn obey(&mut self, rank: usize, actions: Vec<AgentAction>) {
        self.steps.extend(actions.into_iter().map(|action| Step::Obey(rank, action)));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Heard(rank, started, heard) if started == self.ranks[rank].started => {
                self.hear(rank, heard);
            }
            Event::Heard(..) => {}
            Event::Stop => {
                self.is_stopping = true;
                match &self.ranks[0].process {
                    Some(first) => first.tell(&ToProcess::Stop),
                    None => self.ended = Some(Ok(())),
                }
            }
            Event::Reload => {
                if let Some(first) = &self.ranks[0].process {
                    first.tell(&ToProcess::Reload);
                }
            }
        }
        self.perform();
    }

    fn hear(&mut self, rank: usize, heard: Heard) {
        let now = self.now();
        let local = &mut self.ranks[rank];
        let actions = match heard {
            Heard::Message(FromProcess::Ready { digest }) => local.agent.process_ready(now, digest),
            Heard::Message(FromProcess::Beat { computing }) => {
                local.agent.process_beats(now, computing);
                Vec::new()
            }
            Heard::Message(FromProcess::Failed(why)) => {
                local.failed = Some(why);
                Vec::new()
            }
            Heard::Closed => {
                let Some(mut process) = local.process.take() else { return };
                let status = process.wait();
                let why = match (local.failed.take(), &status) {
                    (Some(why), _) => {
                        // The next attempt would fail as well.
                        if !self.has_served {
                            self.ended = Some(Err(anyhow!("{why}")));
                        }
                        why
                    }
                    (None, Ok(status)) => described(*status),
                    (None, Err(error)) => error.to_string(),
                };
                let actions = local.agent.process_ended(&why);
                if rank == 0 && self.is_stopping {
                    let is_success = status.as_ref().is_ok_and(ExitStatus::success);
                    self.ended =
                        Some(if is_success { Ok(()) } else { Err(anyhow!("rank 0: {why}")) });
                }
                actions
            }
        };
        self.obey(rank, actions);
    }

    /// Does what is to be done, and what follows from it.
    fn perform(&mut self) {
        while let Some(step) = self.steps.pop_front() {
            let now = self.now();
            match step {
                Step::Supervise(action) => self.perform_of_supervisor(now, action),
                Step::Obey(rank, action) => self.perform_of_agent(now, rank, action),
            }
        }
    }

    fn perform_of_supervisor(&mut self, now: Millis, action: SupervisorAction) {
        match action {
            SupervisorAction::Send(rank, message) => {
                let actions = self.ranks[rank].agent.receive(now, message);
                self.obey(rank, actions);
            }
            SupervisorAction::Disconnect(rank) => {
                let actions = self.ranks[rank].agent.disconnected(now);
                self.obey(rank, actions);
            }
            SupervisorAction::FindAddresses => match self.find_addresses() {
                Ok(addresses) => {
                    let actions = self.supervisor.start(now, &addresses);
                    self.supervise(actions);
                }
                Err(error) => self.ended = Some(Err(error)),
            },
            SupervisorAction::Serve(generation) => {
                self.has_served = true;
                tracing::info!(ranks = self.ranks.len(), generation, "all ranks are ready");
            }
            SupervisorAction::Refuse { why, .. } => {
                if !self.is_stopping {
                    tracing::error!(reason = why, "all ranks are started again");
                }
                self.why.send_replace(Some(why));
            }
        }
    }

    fn find_addresses(&mut self) -> Result<Addresses> {
        let Supervised { count, data_dir, .. } = &self.supervised;
        let addresses = free_addresses(*count)?;
        // The file of the last ranks is removed before this one is written.
        self.hosts = None;
        self.hosts = Some(Hosts::write(data_dir, &addresses.ranks)?);
        Ok(addresses)
    }

    fn perform_of_agent(&mut self, now: Millis, rank: usize, action: AgentAction) {
        let local = &mut self.ranks[rank];
        match action {
            // Supervisor and agents are in one process.
            AgentAction::Connect => {
                let actions = local.agent.connected(now);
                let of_supervisor = self.supervisor.connected(now, rank);
                self.obey(rank, actions);
                self.supervise(of_supervisor);
            }
            AgentAction::Disconnect => {
                let actions = self.supervisor.disconnected(now, rank);
                self.supervise(actions);
            }
            AgentAction::Send(message) => {
                let actions = self.supervisor.receive(now, rank, message);
                self.supervise(actions);
            }
            AgentAction::Spawn { addresses, .. } => {
                if let Err(error) = self.spawn(rank, &addresses) {
                    let why = format!("{error:#}");
                    let actions = self.ranks[rank].agent.process_ended(&why);
                    self.obey(rank, actions);
                }
            }
            AgentAction::Warn(why) => {
                if let Some(process) = &local.process {
                    process.tell(&ToProcess::End(why));
                }
            }
            AgentAction::Kill => {
                if let Some(process) = &mut local.process {
                    process.kill();
                }
            }
        }
    }

    fn spawn(&mut self, rank: usize, addresses: &Addresses) -> Result<()> {
        let hosts = self.hosts.as_ref().context("the ranks have no addresses")?;
        let Supervised { launch, listener, .. } = &self.supervised;
        let (command, assignment) = launch.process(rank, addresses, hosts)?;
        let listener = (rank == 0).then_some(listener);
        let local = &mut self.ranks[rank];
        local.started += 1;
        let (started, events) = (local.started, self.events.clone());
        let hear = move |heard| drop(events.send(Event::Heard(rank, started, heard)));
        let process = RankProcess::start(command, &assignment, listener, hear)?;
        tracing::info!(rank, process = process.id(), "rank started");
        local.process = Some(process);
        if rank == 0 {
            self.why.send_replace(None);
        }
        Ok(())
    }
}
