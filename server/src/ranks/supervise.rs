//! The parent of a server's ranks: it starts them, watches them, and starts all again when one of them ends, freezes or differs.
//!
//! [`Supervisor`] and [`Agent`](steersman_rank_control::Agent) decide; this does what they say, with processes of this machine
//! and connections to those that join it. The parent owns the socket that clients connect to and passes it to the first rank,
//! which answers as long as its process runs. While there is none, the parent answers: 503.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use steersman_engine::config::Config;
use steersman_rank_control::hello::Key;
use steersman_rank_control::{
    Addresses, AgentAction, Millis, Supervisor, SupervisorAction, ToAgent,
};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::control::ToProcess;
use super::environment::{Hosts, LOOPBACK, free_addresses};
use super::launch::Launch;
use super::local::{Local, millis_since};
use super::machines::{FromMachine, Link, LinkEvent, ToMachine, accept};
use super::process::{Heard, RankProcess};
use super::{Over, Part};
use crate::address::Announced;
use crate::config::ServerConfig;
use crate::models::find;
use crate::serve;
use crate::signals::{Hangups, Signals, StopSignals};

/// Time between two looks at what was not heard.
const TICK: Duration = Duration::from_millis(100);

/// The ranks of a server.
pub struct Places {
    /// How many are processes of this machine: one at least.
    pub here: usize,
    /// What carries their arrays; `None` for what fits the device.
    pub over: Option<Over>,
    /// The machines that compute further ranks, if there are any.
    pub joining: Option<Joining>,
}

/// The machines that join a server.
pub struct Joining {
    /// How many there are: each has one rank.
    pub count: usize,
    /// The address at which they connect.
    pub address: SocketAddr,
    /// The key that they have.
    pub key: String,
}

/// A server whose model is computed by ranks.
struct Supervised {
    launch: Launch,
    /// The socket that clients connect to.
    listener: TcpListener,
    /// Where the file with the addresses of ranks is.
    data_dir: PathBuf,
}

/// What happens to the parent.
enum Event {
    /// Something is heard of the process of a rank of this machine: the one that was started as this.
    Heard(usize, u64, Heard),
    /// Something happens to the connection to another machine.
    Linked(LinkEvent<FromMachine>),
    /// A signal stops the server.
    Stop,
    /// A signal reloads its configuration.
    Reload,
}

/// Starts a server whose model is computed by ranks, and starts them again until a signal stops it. `announced` gets its address.
///
/// # Errors
/// If a port is in use, if a rank of this machine cannot load its part at the first attempt, or if the first rank fails while the
/// server stops.
pub fn supervise(
    mut config: Config,
    server: &ServerConfig,
    data_dir: PathBuf,
    places: Places,
    mut announced: Announced,
) -> Result<()> {
    let runtime = Runtime::new().context("starting the runtime")?;
    let _entered = runtime.enter();
    // Before files are downloaded: a port in use should fail at once.
    let listener = runtime.block_on(serve::listen(server))?.into_std()?;
    announced.listen(listener.local_addr().context("reading the address")?);
    let Places { here, over, joining } = places;
    let joining = joining.map(|joining| {
        let address = joining.address;
        let listener = TcpListener::bind(address)
            .with_context(|| format!("listening at {address} for machines that join"))?;
        anyhow::Ok((listener, joining))
    });
    let joining = joining.transpose()?;
    let folder = find(&mut config, &data_dir)?.folder;
    let over = over.unwrap_or_else(|| Over::of(config.model.device));
    let part = Part { folder, config: config.model, data_dir: data_dir.clone() };

    let (sender, events) = channel();
    let Signals { stop, hangups } = Signals::install()?;
    tokio::spawn(forward(sender.clone(), stop, hangups));
    let (why, refused) = watch::channel(None);
    tokio::spawn(refuse(listener.try_clone()?, refused, server.clone()));
    let (launch, there) = match joining {
        None => (Launch::new(over, part)?, 0),
        Some((listener, Joining { count, key, .. })) => {
            let address = listener.local_addr()?;
            tracing::info!(%address, machines = count, "waiting for machines that join");
            why.send_replace(Some(format!("waiting for {count} machines that join at {address}")));
            let sender = sender.clone();
            // Fails when the server has stopped.
            let hear = move |event| drop(sender.send(Event::Linked(event)));
            accept(listener, Key::new(key.as_bytes())?, hear)?;
            (Launch::with_key(over, part, key), count)
        }
    };
    let supervised = Supervised { launch, listener, data_dir };
    Supervision::new(supervised, [here, there], sender, why).run(&events)
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

/// A rank.
enum Rank {
    Here(Local),
    /// It is on another machine, if one has joined for it.
    There(Option<Machine>),
}

/// A machine that has joined.
struct Machine {
    /// The number of the connection.
    number: u64,
    link: Link,
    /// Where its next process can be reached.
    port: u16,
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
    ranks: Vec<Rank>,
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
        [here, there]: [usize; 2],
        events: Sender<Event>,
        why: watch::Sender<Option<String>>,
    ) -> Self {
        let (mut ranks, mut steps) = (Vec::new(), VecDeque::new());
        for rank in 0..here {
            let (local, actions) = Local::new();
            steps.extend(actions.into_iter().map(|action| Step::Obey(rank, action)));
            ranks.push(Rank::Here(local));
        }
        ranks.extend((0..there).map(|_| Rank::There(None)));
        Self {
            supervised,
            events,
            began: Instant::now(),
            supervisor: Supervisor::new(ranks.len()),
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
                if let Some(local) = self.local(rank) {
                    let actions = local.agent.tick(now);
                    self.obey(rank, actions);
                }
            }
            self.perform();
            if let Some(ended) = self.ended.take() {
                return ended;
            }
        }
    }

    fn now(&self) -> Millis {
        millis_since(self.began)
    }

    /// The rank, if it is one of this machine.
    fn local(&mut self, rank: usize) -> Option<&mut Local> {
        match &mut self.ranks[rank] {
            Rank::Here(local) => Some(local),
            Rank::There(_) => None,
        }
    }

    fn supervise(&mut self, actions: Vec<SupervisorAction>) {
        self.steps.extend(actions.into_iter().map(Step::Supervise));
    }

    fn obey(&mut self, rank: usize, actions: Vec<AgentAction>) {
        self.steps.extend(actions.into_iter().map(|action| Step::Obey(rank, action)));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Heard(rank, started, heard) => self.hear(rank, started, heard),
            Event::Linked(event) => self.hear_machine(event),
            Event::Stop => {
                self.is_stopping = true;
                match self.local(0) {
                    Some(first) if first.has_process() => first.tell(&ToProcess::Stop),
                    _ => self.ended = Some(Ok(())),
                }
            }
            Event::Reload => {
                if let Some(first) = self.local(0) {
                    first.tell(&ToProcess::Reload);
                }
            }
        }
        self.perform();
    }

    fn hear(&mut self, rank: usize, started: u64, heard: Heard) {
        let now = self.now();
        let Some(local) = self.local(rank) else { return };
        let (actions, end) = local.hear(now, started, heard);
        if let Some(end) = end {
            if rank == 0 && self.is_stopping {
                let why = &end.why;
                self.ended =
                    Some(if end.is_success { Ok(()) } else { Err(anyhow!("rank 0: {why}")) });
            } else if end.cannot_load && !self.has_served {
                // The next attempt would fail as well.
                self.ended = Some(Err(anyhow!("{}", end.why)));
            }
        }
        self.obey(rank, actions);
    }

    fn hear_machine(&mut self, event: LinkEvent<FromMachine>) {
        match event {
            LinkEvent::Up(number, link) => self.seat(number, link),
            LinkEvent::Said(number, message) => {
                let Some((rank, machine)) = self.machine(number) else { return };
                match message {
                    FromMachine::Port(port) => machine.port = port,
                    FromMachine::Agent(message) => {
                        let now = self.now();
                        let actions = self.supervisor.receive(now, rank, message);
                        self.supervise(actions);
                    }
                }
            }
            LinkEvent::Down(number) => {
                let Some((rank, machine)) = self.machine(number) else { return };
                tracing::warn!(rank, address = %machine.link.other, "a machine has left");
                self.ranks[rank] = Rank::There(None);
                let now = self.now();
                let actions = self.supervisor.disconnected(now, rank);
                self.supervise(actions);
            }
        }
    }

    /// The machine with the connection of this number, and its rank.
    fn machine(&mut self, number: u64) -> Option<(usize, &mut Machine)> {
        self.ranks.iter_mut().enumerate().find_map(|(rank, place)| match place {
            Rank::There(Some(machine)) if machine.number == number => Some((rank, machine)),
            _ => None,
        })
    }

    /// Assigns the first rank without a machine to one that joins.
    fn seat(&mut self, number: u64, mut link: Link) {
        let free = self.ranks.iter().position(|rank| matches!(rank, Rank::There(None)));
        let (Some(rank), Ok(port)) = (free, link.about.parse()) else {
            tracing::debug!(address = %link.other, "a machine joins, and all ranks have one");
            return link.send(&ToMachine::Full);
        };
        let Launch { over, part, .. } = &self.supervised.launch;
        link.send(&ToMachine::Seat { rank, over: *over, config: Box::new(part.config.clone()) });
        tracing::info!(rank, address = %link.other, "a machine has joined");
        self.ranks[rank] = Rank::There(Some(Machine { number, link, port }));
        let now = self.now();
        let actions = self.supervisor.connected(now, rank);
        self.supervise(actions);
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
            SupervisorAction::Send(rank, message) => self.send(now, rank, message),
            SupervisorAction::Disconnect(rank) => match &mut self.ranks[rank] {
                Rank::Here(local) => {
                    let actions = local.agent.disconnected(now);
                    self.obey(rank, actions);
                }
                Rank::There(machine) => *machine = None,
            },
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

    fn send(&mut self, now: Millis, rank: usize, message: ToAgent) {
        match &mut self.ranks[rank] {
            Rank::Here(local) => {
                let actions = local.agent.receive(now, message);
                self.obey(rank, actions);
            }
            Rank::There(Some(machine)) => machine.link.send(&ToMachine::Agent(message)),
            Rank::There(None) => {}
        }
    }

    /// Finds addresses at which each rank reaches the others. Those of this machine have the one at which it was joined.
    fn find_addresses(&mut self) -> Result<Addresses> {
        let joined = self.ranks.iter().find_map(|rank| match rank {
            Rank::There(Some(machine)) => Some(machine.link.own),
            _ => None,
        });
        let mut addresses = free_addresses(joined.unwrap_or(LOOPBACK), self.ranks.len())?;
        for (address, rank) in addresses.ranks.iter_mut().zip(&self.ranks) {
            if let Rank::There(Some(Machine { link, port, .. })) = rank {
                *address = SocketAddr::new(link.other.ip(), *port).to_string();
            }
        }
        // The file of the last ranks is removed before this one is written.
        self.hosts = None;
        self.hosts = Some(Hosts::write(&self.supervised.data_dir, &addresses.ranks)?);
        Ok(addresses)
    }

    /// Does what the agent of a rank of this machine wants done.
    fn perform_of_agent(&mut self, now: Millis, rank: usize, action: AgentAction) {
        let Some(local) = self.local(rank) else { return };
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
                    let actions = self.local(rank).map(|local| local.agent.process_ended(&why));
                    self.obey(rank, actions.unwrap_or_default());
                }
            }
            AgentAction::Warn(why) => local.tell(&ToProcess::End(why)),
            AgentAction::Kill => local.kill(),
        }
    }

    fn spawn(&mut self, rank: usize, addresses: &Addresses) -> Result<()> {
        let hosts = self.hosts.as_ref().context("the ranks have no addresses")?;
        let Supervised { launch, listener, .. } = &self.supervised;
        let (command, assignment) = launch.process(rank, rank, addresses, hosts)?;
        let listener = (rank == 0).then_some(listener);
        let Rank::Here(local) = &mut self.ranks[rank] else { return Ok(()) };
        let events = self.events.clone();
        let process = local.start(|started| {
            let hear = move |heard| drop(events.send(Event::Heard(rank, started, heard)));
            RankProcess::start(command, &assignment, listener, hear)
        })?;
        tracing::info!(rank, process, "rank started");
        if rank == 0 {
            self.why.send_replace(None);
        }
        Ok(())
    }
}
