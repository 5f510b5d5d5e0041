//! The process of a rank, as its parent sees it.

use std::io::{self, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::control::{Assignment, FromProcess, ToProcess, line, read, send_listener};

/// Time in which a process takes a message: it reads them on a thread of its own.
const TAKE: Duration = Duration::from_secs(1);

/// Time in which a process whose connection has ended ends by itself.
const END: Duration = Duration::from_millis(200);

/// What is heard of a process.
#[derive(Debug)]
pub enum Heard {
    /// It says something.
    Message(FromProcess),
    /// It has ended its connection: it ends, or has ended.
    Closed,
}

/// The process of a rank. It is killed on drop.
pub struct RankProcess {
    child: Child,
    control: UnixStream,
}

impl RankProcess {
    /// Starts `command` as the process of a rank, in a group of processes of its own, so that the terminal's signals reach the
    /// parent only. It may get a socket that listens. What is heard of it goes to `hear`, on another thread.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(
        mut command: Command,
        assignment: &Assignment,
        listener: Option<&TcpListener>,
        hear: impl Fn(Heard) + Send + 'static,
    ) -> Result<Self> {
        let starting = || format!("starting rank {}", assignment.rank);
        let (control, its_end) = UnixStream::pair().with_context(starting)?;
        control.set_write_timeout(Some(TAKE))?;
        command.stdin(Stdio::from(OwnedFd::from(its_end))).process_group(0);
        let child = command.spawn().with_context(starting)?;
        // It has the process's end, without which the connection would not end with the process.
        drop(command);
        let process = Self { child, control };
        send_listener(&process.control, listener).with_context(starting)?;
        (&process.control).write_all(&line(assignment)).with_context(starting)?;
        let mut input = BufReader::new(process.control.try_clone()?);
        let listen = move || {
            while let Ok(Some(message)) = read(&mut input) {
                hear(Heard::Message(message));
            }
            hear(Heard::Closed);
        };
        thread::Builder::new().name("rank".into()).spawn(listen).with_context(starting)?;
        Ok(process)
    }

    /// The system's number of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Tells the process something. One that is frozen or has ended does not hear it.
    pub fn tell(&self, message: &ToProcess) {
        if let Err(error) = (&self.control).write_all(&line(message)) {
            tracing::debug!(%error, "a rank's process hears nothing");
        }
    }

    /// Kills the process, whatever it does.
    pub fn kill(&mut self) {
        // Fails if it has ended.
        let _ = self.child.kill();
    }

    /// Waits for the end of a process that ends by itself, for a moment, and kills it then. Returns how it ended.
    ///
    /// # Errors
    /// The system's error, if it cannot wait.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        let end = Instant::now() + END;
        loop {
            match self.child.try_wait()? {
                Some(status) => return Ok(status),
                None if Instant::now() > end => break,
                None => thread::sleep(Duration::from_millis(5)),
            }
        }
        self.kill();
        self.child.wait()
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// How a process ended, for people.
pub fn described(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("its process was ended by signal {signal}"),
        (_, Some(0)) => "its process ended".into(),
        (_, code) => format!("its process ended with status {}", code.unwrap_or_default()),
    }
}
