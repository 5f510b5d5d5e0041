//! `steersman join`: a machine that computes one rank of a server on another machine, whenever that runs.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow, bail};
use steersman_engine::config::ModelConfig;
use steersman_rank_control::hello::{Key, Refused};
use steersman_rank_control::{Addresses, AgentAction, FromAgent, Millis, SILENCE_MS};
use tokio::runtime::Runtime;

use super::control::ToProcess;
use super::environment::{Hosts, free_port};
use super::launch::Launch;
use super::local::{Local, millis_since};
use super::machines::{FromMachine, Link, LinkEvent, ToMachine, connect};
use super::process::{Heard, RankProcess};
use super::{Over, Part};
use crate::signals::Signals;

/// Time between two looks at what was not heard.
const TICK: Duration = Duration::from_millis(100);

/// Time between two attempts to connect.
const AGAIN: Duration = Duration::from_secs(1);

/// What happens to the machine.
enum Event {
    /// Something is heard of the process that was started as this.
    Heard(u64, Heard),
    /// Something happens to the connection to the server.
    Linked(LinkEvent<ToMachine>),
    /// The server cannot be reached.
    Unreachable(Error),
    /// A signal ends the command.
    Stop,
}

/// The rank of this machine, as the server says.
struct Seat {
    rank: usize,
    over: Over,
    config: ModelConfig,
}

/// A machine that has joined a server, or tries to.
struct Joined {
    address: String,
    key: String,
    /// The model in this machine's files, and how it is computed: the path and the device are used.
    part: Part,
    events: Sender<Event>,
    began: Instant,
    local: Local,
    actions: VecDeque<AgentAction>,
    /// The number of the newest connection, and the connection if it is there.
    number: u64,
    link: Option<Link>,
    /// When it was made.
    linked: Millis,
    seat: Option<Seat>,
    hosts: Option<Hosts>,
    /// Whether it was said that the server is waited for.
    is_waiting: bool,
    /// Whether the server has proved that it has the key.
    has_joined: bool,
    ended: Option<Result<()>>,
}

/// Computes a rank of the server that waits for machines at `address` until a signal ends the command. A server that ends is
/// waited for. `part` is the model in this machine's files; how it is computed is the server's choice, except the device.
///
/// # Errors
/// If the server has another key, or the model cannot be loaded.
pub fn join(address: &str, key: String, part: Part) -> Result<()> {
    Key::new(key.as_bytes())?;
    let runtime = Runtime::new().context("starting the runtime")?;
    let _entered = runtime.enter();
    let (events, happens) = channel();
    let Signals { mut stop, hangups } = Signals::install()?;
    let sender = events.clone();
    tokio::spawn(async move {
        stop.reach(1).await;
        let _ = sender.send(Event::Stop);
    });
    tokio::spawn(hangups.ignore());
    let (local, actions) = Local::new();
    let joined = Joined {
        address: address.into(),
        key,
        part,
        events,
        began: Instant::now(),
        local,
        actions: actions.into(),
        number: 0,
        link: None,
        linked: 0,
        seat: None,
        hosts: None,
        is_waiting: false,
        has_joined: false,
        ended: None,
    };
    joined.run(&happens)
}

impl Joined {
    fn run(mut self, happens: &Receiver<Event>) -> Result<()> {
        loop {
            self.perform();
            if let Some(ended) = self.ended.take() {
                return ended;
            }
            match happens.recv_timeout(TICK) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("this has a sender"),
            }
            // What has been heard counts before what has not.
            for event in happens.try_iter() {
                self.perform();
                self.handle(event);
            }
            self.perform();
            let now = self.now();
            if self.link.is_some() && self.seat.is_none() && now > self.linked + SILENCE_MS {
                self.unlink(now);
            }
            let actions = self.local.agent.tick(now);
            self.actions.extend(actions);
        }
    }

    fn now(&self) -> Millis {
        millis_since(self.began)
    }

    fn handle(&mut self, event: Event) {
        let now = self.now();
        match event {
            Event::Heard(started, heard) => {
                let (actions, end) = self.local.hear(now, started, heard);
                if let Some(end) = end.filter(|end| end.cannot_load) {
                    // The next attempt would fail as well.
                    self.ended = Some(Err(anyhow!("{}", end.why)));
                }
                self.actions.extend(actions);
            }
            Event::Linked(LinkEvent::Up(number, link)) if number == self.number => {
                // The server has the key.
                (self.link, self.linked, self.has_joined) = (Some(link), now, true);
            }
            Event::Linked(LinkEvent::Said(number, message)) if number == self.number => {
                self.hear_server(now, message);
            }
            Event::Linked(LinkEvent::Down(number)) if number == self.number => self.unlink(now),
            // An earlier connection, whose end was told already.
            Event::Linked(_) => {}
            Event::Unreachable(error) => self.wait_for_server(now, error),
            Event::Stop => self.ended = Some(Ok(())),
        }
    }

    fn hear_server(&mut self, now: Millis, message: ToMachine) {
        match message {
            ToMachine::Seat { rank, over, config } => {
                tracing::info!(rank, server = self.address, "joined");
                self.is_waiting = false;
                // Files and devices are this machine's.
                let ModelConfig { path, device, .. } = self.part.config.clone();
                let config = ModelConfig { path, device, ..*config };
                self.seat = Some(Seat { rank, over, config });
                let actions = self.local.agent.connected(now);
                self.actions.extend(actions);
            }
            ToMachine::Full => {
                if !std::mem::replace(&mut self.is_waiting, true) {
                    let server = &self.address;
                    tracing::warn!(server, "the server has a machine for each of its ranks");
                }
            }
            ToMachine::Agent(message) => {
                let actions = self.local.agent.receive(now, message);
                self.actions.extend(actions);
            }
        }
    }

    /// The connection has ended.
    fn unlink(&mut self, now: Millis) {
        self.link = None;
        let was_seated = self.seat.take().is_some();
        if was_seated {
            tracing::warn!(server = self.address, "the connection to the server has ended");
        }
        let actions = self.local.agent.disconnected(now);
        self.actions.extend(actions);
    }

    fn wait_for_server(&mut self, now: Millis, error: Error) {
        // A server that ends while it is connected to looks as if it had another key.
        match error.downcast_ref().filter(|_| !self.has_joined) {
            Some(Refused::OtherKey) => {
                let why = "the server has another key, or waits for no machines at this address";
                self.ended = Some(Err(error.context(why)));
            }
            Some(_) => self.ended = Some(Err(error)),
            None => {
                if !std::mem::replace(&mut self.is_waiting, true) {
                    let error = format!("{error:#}");
                    tracing::info!(server = self.address, error, "waiting for the server");
                }
                let actions = self.local.agent.disconnected(now);
                self.actions.extend(actions);
            }
        }
    }

    fn perform(&mut self) {
        while let Some(action) = self.actions.pop_front() {
            match action {
                AgentAction::Connect => {
                    if let Err(error) = self.connect() {
                        self.ended = Some(Err(error));
                    }
                }
                AgentAction::Disconnect => {
                    (self.link, self.seat) = (None, None);
                    // What is still said over it comes too late.
                    self.number += 1;
                }
                AgentAction::Send(message) => self.send(message),
                AgentAction::Spawn { addresses, .. } => {
                    if let Err(error) = self.spawn(&addresses) {
                        let why = format!("{error:#}");
                        let actions = self.local.agent.process_ended(&why);
                        self.actions.extend(actions);
                    }
                }
                AgentAction::Warn(why) => self.local.tell(&ToProcess::End(why)),
                AgentAction::Kill => self.local.kill(),
            }
        }
    }

    /// Connects on another thread, after a pause unless it is the first time.
    fn connect(&mut self) -> Result<()> {
        let pause = if self.number == 0 { Duration::ZERO } else { AGAIN };
        self.number += 1;
        let (number, port, events) = (self.number, free_port()?, self.events.clone());
        let (address, key) = (self.address.clone(), Key::new(self.key.as_bytes())?);
        let connect = move || {
            thread::sleep(pause);
            let sender = events.clone();
            let hear = move |event| drop(sender.send(Event::Linked(event)));
            if let Err(error) = connect(&address, key, port, number, hear) {
                let _ = events.send(Event::Unreachable(error));
            }
        };
        thread::Builder::new().name("connect".into()).spawn(connect)?;
        Ok(())
    }

    fn send(&mut self, message: FromAgent) {
        let Some(link) = &mut self.link else { return };
        // A port that the last process had may not be free yet.
        if matches!(message, FromAgent::Ended { .. }) {
            match free_port() {
                Ok(port) => link.send(&FromMachine::Port(port)),
                Err(error) => self.ended = Some(Err(error)),
            }
        }
        link.send(&FromMachine::Agent(message));
    }

    fn spawn(&mut self, addresses: &Addresses) -> Result<()> {
        let Some(Seat { rank, over, config }) = &self.seat else { bail!("it has no rank") };
        // The file of the last process is removed before this one is written.
        self.hosts = None;
        let hosts = self.hosts.insert(Hosts::write(&self.part.data_dir, &addresses.ranks)?);
        let part = Part { config: config.clone(), ..self.part.clone() };
        let launch = Launch::with_key(*over, part, self.key.clone());
        let (command, assignment) = launch.process(*rank, 0, addresses, hosts)?;
        let events = self.events.clone();
        let process = self.local.start(|started| {
            let hear = move |heard| drop(events.send(Event::Heard(started, heard)));
            RankProcess::start(command, &assignment, None, hear)
        })?;
        tracing::info!(rank, process, "rank started");
        Ok(())
    }
}
