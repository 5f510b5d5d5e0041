//! Signals of a server's process. Their handlers are installed before anything is loaded: none ends the process halfway.
//!
//! | signal | effect |
//! |---|---|
//! | SIGINT, SIGTERM | the server stops; while models are loaded, the process ends at once with status 0 |
//! | SIGHUP | the configuration is read again; ignored without one. If it comes because the terminal was closed from which the server was started, the server stops |
//! | SIGUSR1, SIGUSR2 | ignored |
//! | SIGXFSZ | ignored: a write beyond a limit on the size of files (`ulimit -f`) is an error, as on a full disk |
//! | SIGQUIT | the default of the system: the process ends at once, with a core dump where these are on |

#[cfg(unix)]
use std::io::IsTerminal;

#[cfg(unix)]
use anyhow::Context;
use anyhow::Result;
#[cfg(unix)]
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// SIGXFSZ, which tokio does not name: its number on macOS, and on Linux with x86-64 and aarch64.
#[cfg(unix)]
const FILE_SIZE_EXCEEDED: std::ffi::c_int = 25;

/// The signals from now on.
pub struct Signals {
    /// Signals that stop the server.
    pub stop: StopSignals,
    /// Signals that reload its configuration.
    pub hangups: Hangups,
}

/// SIGINT and SIGTERM, or Ctrl-C, or what the parent of this process says in their place.
#[derive(Clone)]
pub struct StopSignals(watch::Receiver<u32>);

/// SIGHUP, or what the parent of this process says in its place.
pub struct Hangups(watch::Receiver<u32>);

impl Signals {
    /// Installs the handlers, within a runtime. A signal that arrives before somebody waits for it is kept.
    ///
    /// # Errors
    /// If the system refuses.
    #[cfg(unix)]
    pub fn install() -> Result<Self> {
        for (name, kind) in [
            ("SIGUSR1", SignalKind::user_defined1()),
            ("SIGUSR2", SignalKind::user_defined2()),
            ("SIGXFSZ", SignalKind::from_raw(FILE_SIZE_EXCEEDED)),
        ] {
            let mut signals = on(kind)?;
            tokio::spawn(async move {
                while signals.recv().await.is_some() {
                    tracing::info!(name, "signal ignored");
                }
            });
        }
        let (stops, stop) = watch::channel(0);
        for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
            count(kind, stops.clone())?;
        }
        let (hangups, counted) = watch::channel(0);
        let mut signals = on(SignalKind::hangup())?;
        let had_terminal = std::io::stdin().is_terminal();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                // A closed one is a terminal no more. Nobody would see a server that went on, nor stop it.
                if had_terminal && !std::io::stdin().is_terminal() {
                    tracing::info!("the terminal was closed: the server stops");
                    stops.send_modify(|count| *count += 1);
                } else {
                    hangups.send_modify(|count| *count += 1);
                }
            }
        });
        Ok(Self { stop: StopSignals(stop), hangups: Hangups(counted) })
    }

    /// There are none but Ctrl-C.
    ///
    /// # Errors
    /// None.
    #[cfg(not(unix))]
    pub fn install() -> Result<Self> {
        let (stops, stop) = watch::channel(0);
        tokio::spawn(async move {
            while tokio::signal::ctrl_c().await.is_ok() {
                stops.send_modify(|count| *count += 1);
            }
        });
        Ok(Self { stop: StopSignals(stop), hangups: Hangups(watch::channel(0).1) })
    }

    /// Signals that the parent of this process counts. Its own are ignored.
    ///
    /// # Errors
    /// If the system refuses to ignore them.
    pub fn of_parent(stops: watch::Receiver<u32>, hangups: watch::Receiver<u32>) -> Result<Self> {
        Self::install()?;
        Ok(Self { stop: StopSignals(stops), hangups: Hangups(hangups) })
    }
}

#[cfg(unix)]
fn on(kind: SignalKind) -> Result<tokio::signal::unix::Signal> {
    signal(kind).context("installing handlers of signals")
}

/// Counts signals of one kind.
#[cfg(unix)]
fn count(kind: SignalKind, counted: watch::Sender<u32>) -> Result<()> {
    let mut signals = on(kind)?;
    tokio::spawn(async move {
        while signals.recv().await.is_some() {
            counted.send_modify(|count| *count += 1);
        }
    });
    Ok(())
}

impl StopSignals {
    /// Waits until so many have come.
    pub async fn reach(&mut self, count: u32) {
        if self.0.wait_for(|stops| *stops >= count).await.is_err() {
            // Whoever counts them has ended, with the runtime or the process.
            std::future::pending::<()>().await;
        }
    }
}

impl Hangups {
    /// Waits for the next one. Several that arrive meanwhile are one. False if there will be none.
    pub async fn next(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }

    /// Ignores them, with a line in the log.
    pub async fn ignore(mut self) {
        while self.next().await {
            tracing::info!("SIGHUP ignored: the server was started without --config");
        }
    }
}
