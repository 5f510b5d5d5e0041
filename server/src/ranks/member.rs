//! The process of a rank: its end of the connection to its parent, and what it does as the first rank or another one.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use steersman_engine::config::{Config, Device};
use steersman_engine::policy::Policies;
use steersman_engine::tools::ranks::{
    FollowingRank, Outputs, Ranks, join_ranks, read_log, start_as_first_rank, weights_digest,
};
use steersman_engine::{Engine, EngineThread};
use steersman_rank_control::BEAT_MS;
use steersman_rank_control::hello::Key;
use tokio::runtime::Builder;
use tokio::sync::watch;

use super::control::{Assignment, FromProcess, Part, ToProcess, line, read, receive_listener};
use super::log_link;
use crate::exit;
use crate::signals::Signals;

/// The first argument of the first rank, before those of its command.
pub const FIRST: &str = "__first-rank";

/// The only argument of another rank.
pub const FOLLOW: &str = "__following-rank";

/// Time in which the processes join each other. In one of many starts of MLX's ring, one waits for ever for the next.
const JOIN: Duration = Duration::from_secs(20);

/// Returns true if this process runs its command as the first rank.
pub fn is_first() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == FIRST)
}

/// Returns true if this process follows the first rank.
pub fn is_follower() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == FOLLOW)
}

/// The arguments of this process, as its user gave them.
pub fn arguments() -> impl Iterator<Item = OsString> {
    let is_first = is_first();
    let arguments = std::env::args_os().enumerate();
    arguments.filter(move |(place, _)| *place != 1 || !is_first).map(|(_, argument)| argument)
}

/// This process as a rank.
pub struct Member {
    assignment: Assignment,
    control: Mutex<UnixStream>,
    listener: Option<TcpListener>,
    told: watch::Receiver<Told>,
    is_ready: AtomicBool,
    /// Whether it waits for other ranks: what fails then may succeed the next time.
    is_joining: AtomicBool,
}

/// What the parent has told this process.
#[derive(Debug, Clone, Default)]
struct Told {
    stops: u32,
    reloads: u32,
    /// Why the ranks end.
    end: Option<String>,
}

impl Member {
    /// The rank of which the standard input is told. The process ends if its parent does.
    ///
    /// # Errors
    /// If a parent did not start this process.
    pub fn from_stdin() -> Result<Arc<Self>> {
        let control = std::io::stdin().as_fd().try_clone_to_owned()?;
        let control = UnixStream::from(control);
        let listener = receive_listener(&control)
            .context("only `steersman serve --ranks` and `verify --ranks` start this command")?;
        let mut input = BufReader::new(control.try_clone()?);
        let assignment = read(&mut input)?.context("there is no assignment")?;
        let (tell, told) = watch::channel(Told::default());
        let hear = move || {
            while let Ok(Some(message)) = read(&mut input) {
                tell.send_modify(|told| match message {
                    ToProcess::Stop => told.stops += 1,
                    ToProcess::Reload => told.reloads += 1,
                    ToProcess::End(why) => told.end = Some(why),
                });
            }
            // Its arrays would never be joined by those of others.
            exit::at_once(1)
        };
        thread::Builder::new().name("parent".into()).spawn(hear)?;
        let control = Mutex::new(control);
        let (is_ready, is_joining) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Arc::new(Self { assignment, control, listener, told, is_ready, is_joining }))
    }

    /// Number of ranks.
    pub fn count(&self) -> usize {
        self.assignment.count
    }

    /// The socket that the parent listens to.
    ///
    /// # Errors
    /// If it has passed none.
    pub fn listener(&self) -> Result<TcpListener> {
        let listener = self.listener.as_ref().context("this rank has no socket")?;
        Ok(listener.try_clone()?)
    }

    /// The signals that the parent got, within a runtime; those of this process are ignored, as service managers send them to
    /// all processes of a service.
    ///
    /// # Errors
    /// If the system refuses to ignore them.
    pub fn signals(&self) -> Result<Signals> {
        let of = |count: fn(&Told) -> u32| {
            let (send, counts) = watch::channel(0);
            let mut told = self.told.clone();
            tokio::spawn(async move {
                while told.changed().await.is_ok() {
                    let new = count(&told.borrow_and_update());
                    send.send_if_modified(|count| std::mem::replace(count, new) != new);
                }
            });
            counts
        };
        Signals::of_parent(of(|told| told.stops), of(|told| told.reloads))
    }

    /// Waits until the ranks end; returns why.
    pub async fn ends(&self) -> String {
        let mut told = self.told.clone();
        let end = told.wait_for(|told| told.end.is_some()).await.map(|told| told.end.clone());
        match end {
            Ok(end) => end.unwrap_or_default(),
            // The process ends.
            Err(_) => std::future::pending().await,
        }
    }

    fn say(&self, message: &FromProcess) {
        // Fails if the parent has ended, and this process ends with it.
        let _ = self.control.lock().write_all(&line(message));
    }

    /// Tells the parent that this rank has loaded its part.
    ///
    /// # Errors
    /// If a file of the model cannot be read.
    pub fn say_ready(&self) -> Result<()> {
        let Part { folder, data_dir, .. } = &self.assignment.model;
        let weights = weights_digest(folder, data_dir)?;
        // The same program cuts a model in the same way.
        let digest = format!("{} {}", env!("CARGO_PKG_VERSION"), hex::encode(weights));
        self.is_ready.store(true, Ordering::Relaxed);
        self.say(&FromProcess::Ready { digest });
        Ok(())
    }

    /// Tells the parent why this rank cannot load its part, which it could not the next time either. Says nothing of what fails
    /// later, or while it joins the other ranks.
    pub fn say_failed(&self, why: &anyhow::Error) {
        if !self.is_ready.load(Ordering::Relaxed) && !self.is_joining.load(Ordering::Relaxed) {
            self.say(&FromProcess::Failed(format!("{why:#}")));
        }
    }

    /// Sends signs of life until the process ends. `computing` is how long it has computed without an end, if it does.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn beat(
        self: &Arc<Self>,
        computing: impl Fn() -> Option<Duration> + Send + 'static,
    ) -> Result<()> {
        let member = self.clone();
        let beat = move || loop {
            let computing = computing().map(|time| u64::try_from(time.as_millis()).unwrap_or(0));
            member.say(&FromProcess::Beat { computing });
            thread::sleep(Duration::from_millis(BEAT_MS) / 2);
        };
        thread::Builder::new().name("beat".into()).spawn(beat)?;
        Ok(())
    }

    fn key(&self) -> Result<Key> {
        Key::new(self.assignment.key.as_bytes()).context("the key of the ranks")
    }

    /// Connects the first rank with the others.
    ///
    /// # Errors
    /// If another one does not connect within a minute, or MLX cannot join them.
    pub fn lead(&self, device: Device) -> Result<Lead> {
        let Assignment { count, over, log, .. } = &self.assignment;
        self.is_joining.store(true, Ordering::Relaxed);
        let listener = TcpListener::bind(log).with_context(|| format!("listening on {log}"))?;
        let outputs = log_link::accept(&listener, &self.key()?, *count)?;
        let ranks = in_time(|| join_ranks(device, over.backend()))?;
        self.is_joining.store(false, Ordering::Relaxed);
        Ok(Lead { ranks, outputs })
    }
}

/// What the first rank computes with.
pub struct Lead {
    /// All ranks.
    pub ranks: Ranks,
    /// What the others read its log from.
    pub outputs: Outputs,
}

impl Lead {
    /// Starts the engine of the model in `folder`, as [`steersman_engine::start`].
    ///
    /// # Errors
    /// The errors of `start`; an error names what the ranks cannot divide.
    pub fn start(
        self,
        config: Config,
        folder: &Path,
        data_dir: &Path,
        policies: Arc<Policies>,
    ) -> steersman_engine::Result<(Engine, EngineThread)> {
        if config.store.enabled {
            tracing::warn!(
                "several ranks save no state on disk: prefixes are computed again after a restart"
            );
        }
        let Self { ranks, outputs } = self;
        start_as_first_rank(config, folder, data_dir, policies, ranks, outputs)
    }
}

/// Follows the first rank until the parent ends this process.
///
/// # Errors
/// If the parent did not start this process as a rank; those of loading a part of the model and of executing the log.
pub fn follow() -> Result<()> {
    let member = Member::from_stdin()?;
    let rank = || format!("rank {}", member.assignment.rank);
    let clock = Arc::new(Clock::new());
    let loaded = load_part(&member, &clock).with_context(rank);
    let (own, log) = loaded.inspect_err(|error| member.say_failed(error))?;
    let mut entries = read_log(log);
    let entries = std::iter::from_fn(|| {
        clock.waits();
        let entry = entries.next();
        clock.computes();
        entry
    });
    own.follow(entries).with_context(rank)?;
    // The first rank has ended. The parent says why, and ends this process.
    clock.waits();
    loop {
        thread::park();
    }
}

/// Loads the part of the model that this rank has; returns it with the log.
fn load_part(member: &Arc<Member>, clock: &Arc<Clock>) -> Result<(FollowingRank, impl BufRead)> {
    ignore_signals()?;
    let of_beats = clock.clone();
    member.beat(move || of_beats.computing())?;
    let Assignment { rank, over, log, model, .. } = &member.assignment;
    let Part { folder, config, .. } = model;
    member.is_joining.store(true, Ordering::Relaxed);
    let log = log_link::connect(log, member.key()?, *rank)?;
    let ranks = in_time(|| join_ranks(config.device, over.backend()))?;
    member.is_joining.store(false, Ordering::Relaxed);
    let own = FollowingRank::load(config, folder, ranks)?;
    member.say_ready()?;
    Ok((own, log))
}

/// When a follower began what it computes.
struct Clock {
    start: Instant,
    /// Milliseconds after `start`, plus one; 0 while it waits for the next entry.
    began: AtomicU64,
}

impl Clock {
    fn new() -> Self {
        Self { start: Instant::now(), began: AtomicU64::new(0) }
    }

    fn waits(&self) {
        self.began.store(0, Ordering::Relaxed);
    }

    fn computes(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(0);
        self.began.store(now + 1, Ordering::Relaxed);
    }

    fn computing(&self) -> Option<Duration> {
        let began = Duration::from_millis(self.began.load(Ordering::Relaxed).checked_sub(1)?);
        Some(self.start.elapsed().saturating_sub(began))
    }
}

/// Ignores signals, which are the parent's to handle, until the process ends.
fn ignore_signals() -> Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (sender, installed) = sync_channel(1);
    thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            let signals = Signals::install();
            // Fails if nobody waits for it.
            let _ = sender.send(signals.map(drop));
            std::future::pending::<()>().await;
        });
    })?;
    installed.recv()?
}

/// What `join` returns; the process ends if it does not within [`JOIN`].
fn in_time<T>(join: impl FnOnce() -> steersman_engine::Result<T>) -> Result<T> {
    let (joined, waiting) = sync_channel::<()>(0);
    thread::Builder::new().name("deadline".into()).spawn(move || {
        if waiting.recv_timeout(JOIN) == Err(RecvTimeoutError::Timeout) {
            tracing::error!(seconds = JOIN.as_secs(), "the ranks did not join in time");
            exit::at_once(1);
        }
    })?;
    let result = join();
    drop(joined);
    Ok(result?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_waits_for_work_does_not_compute() {
        let clock = Clock::new();
        assert_eq!(clock.computing(), None);
        clock.computes();
        thread::sleep(Duration::from_millis(20));
        let time = clock.computing().unwrap();
        assert!(time >= Duration::from_millis(15), "{time:?}");
        clock.waits();
        assert_eq!(clock.computing(), None);
    }
}
