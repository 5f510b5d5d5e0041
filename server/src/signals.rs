//! Signals of a server's process. Their handlers are installed before anything is loaded: none ends the process halfway.
//!
//! | signal | effect |
//! |---|---|
//! | SIGINT, SIGTERM | the server stops; while models are loaded, the process ends at once with status 0 |
//! | SIGHUP | the configuration is read again; ignored without one |
//! | SIGUSR1, SIGUSR2 | ignored |
//! | SIGXFSZ | ignored: a write beyond a limit on the size of files (`ulimit -f`) is an error, as on a full disk |
//! | SIGQUIT | the default of the system: the process ends at once, with a core dump where these are on |

#[cfg(unix)]
use anyhow::Context;
use anyhow::Result;
#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};

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

/// SIGINT and SIGTERM, or Ctrl-C.
pub struct StopSignals {
    #[cfg(unix)]
    interrupt: Signal,
    #[cfg(unix)]
    terminate: Signal,
}

/// SIGHUP.
pub struct Hangups {
    #[cfg(unix)]
    signal: Signal,
}

impl Signals {
    /// Installs the handlers, within a runtime. A signal that arrives before somebody waits for it is kept.
    ///
    /// # Errors
    /// If the system refuses.
    #[cfg(unix)]
    pub fn install() -> Result<Self> {
        let on = |kind| signal(kind).context("installing handlers of signals");
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
        Ok(Self {
            stop: StopSignals::install()?,
            hangups: Hangups { signal: on(SignalKind::hangup())? },
        })
    }

    /// There are none but Ctrl-C.
    ///
    /// # Errors
    /// None.
    #[cfg(not(unix))]
    pub fn install() -> Result<Self> {
        Ok(Self { stop: StopSignals::install()?, hangups: Hangups {} })
    }
}

impl StopSignals {
    /// Installs their handlers, within a runtime.
    ///
    /// # Errors
    /// If the system refuses.
    #[cfg(unix)]
    pub fn install() -> Result<Self> {
        let on = |kind| signal(kind).context("installing handlers of signals");
        Ok(Self {
            interrupt: on(SignalKind::interrupt())?,
            terminate: on(SignalKind::terminate())?,
        })
    }

    /// There are none but Ctrl-C.
    ///
    /// # Errors
    /// None.
    #[cfg(not(unix))]
    pub fn install() -> Result<Self> {
        Ok(Self {})
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        #[cfg(unix)]
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
        #[cfg(not(unix))]
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Hangups {
    /// Waits for the next one. Several that arrive meanwhile are one. False if there will be none.
    pub async fn next(&mut self) -> bool {
        #[cfg(unix)]
        return self.signal.recv().await.is_some();
        #[cfg(not(unix))]
        return std::future::pending().await;
    }

    /// Ignores them, with a line in the log.
    pub async fn ignore(mut self) {
        while self.next().await {
            tracing::info!("SIGHUP ignored: the server was started without --config");
        }
    }
}
