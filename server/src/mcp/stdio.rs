//! An MCP server that is a program: its processes, its pipes, and the end of what it writes to stderr.
//!
//! It has a process group of its own, which ends with the connection: the program, and what it has started.

use std::io;
use std::pin::Pin;
use std::process::Stdio;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use secrecy::ExposeSecret;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep_until, timeout};

use super::bounds::{Pace, Reason, Shape};
use crate::config::mcp::McpServerConfig;

/// Variables that a program needs to find its files and its user. It inherits no others: they may be
/// secrets of this server or of other programs.
const INHERITED: &[&str] = &[
    "HOME",
    "LANG",
    "LC_ALL",
    "LOGNAME",
    "PATH",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    // Of Windows.
    "APPDATA",
    "LOCALAPPDATA",
    "PATHEXT",
    "PROGRAMFILES",
    "SYSTEMROOT",
    "TEMP",
    "USERPROFILE",
];

/// Time in which a program must end after its input is closed, before it is asked to by a signal.
const END: Duration = Duration::from_secs(2);

/// Time in which it must end after that, before it is killed.
const TERM: Duration = Duration::from_secs(1);

/// Bytes of stderr that are kept.
const LAST_WORDS: usize = 400;

/// A running program. Dropping it kills its process group.
pub struct Program {
    child: Child,
    group: Group,
    stderr: Arc<Mutex<Vec<u8>>>,
    listener: AbortHandle,
}

/// The processes of a program.
struct Group(Option<u32>);

impl Program {
    /// Starts the program of `config`, and returns its output and its input too. Why the output is not read to its end
    /// is in `reason`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(
        name: &str,
        config: &McpServerConfig,
        reason: Reason,
    ) -> io::Result<(Self, Lines, ChildStdin)> {
        let (program, arguments) = config.command.split_first().expect("checked: has a program");
        let mut command = Command::new(program);
        command.args(arguments).env_clear();
        command.envs(INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs(config.env.iter().map(|(name, value)| (name, value.expose_secret())));
        if !config.folder.as_os_str().is_empty() {
            command.current_dir(&config.folder);
        }
        // Ctrl-C in a terminal reaches this server only, whose running requests may still call tools.
        #[cfg(unix)]
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn()?;
        let group = Group(child.id());
        let pipe = || io::Error::other("a pipe is missing");
        let input = child.stdin.take().ok_or_else(pipe)?;
        let output = child.stdout.take().ok_or_else(pipe)?;
        let stderr = Arc::default();
        let words = child.stderr.take().ok_or_else(pipe)?;
        let listener = tokio::spawn(listen(name.to_string(), words, Arc::clone(&stderr)));
        let listener = listener.abort_handle();
        let lines =
            Lines { output, shape: Shape::default(), pace: Pace::default(), pause: None, reason };
        Ok((Self { child, group, stderr, listener }, lines, input))
    }

    /// Waits until the process has ended, after its pipes are closed, or ends it. Returns how it ended, and
    /// its last words.
    pub async fn end(mut self) -> String {
        let mut ended = timeout(END, self.child.wait()).await;
        if ended.is_err() {
            self.group.terminate();
            ended = timeout(TERM, self.child.wait()).await;
        }
        let status = match ended {
            Ok(Ok(status)) => status.to_string(),
            Ok(Err(error)) => error.to_string(),
            // Dropping it kills it.
            Err(_) => "killed: did not end after its input was closed".into(),
        };
        let words = self.stderr.lock();
        let words = String::from_utf8_lossy(&words).trim().escape_debug().to_string();
        if words.is_empty() { status } else { format!("{status}; stderr: {words}") }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // What a program has started may outlive it.
        self.group.kill();
        self.listener.abort();
    }
}

#[cfg(unix)]
impl Group {
    fn terminate(&self) {
        self.signal(nix::sys::signal::Signal::SIGTERM);
    }

    fn kill(&self) {
        self.signal(nix::sys::signal::Signal::SIGKILL);
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        let id = self.0.and_then(|id| i32::try_from(id).ok());
        // Fails if all have ended.
        let _ = id.map(|id| nix::sys::signal::killpg(nix::unistd::Pid::from_raw(id), signal));
    }
}

#[cfg(not(unix))]
impl Group {
    fn terminate(&self) {
        let _ = self.0;
    }

    // The process itself is killed when it is dropped.
    fn kill(&self) {}
}

/// Logs what a program writes to stderr, and keeps the end of it.
async fn listen(server: String, mut stderr: ChildStderr, last: Arc<Mutex<Vec<u8>>>) {
    let mut buffer = [0; 4096];
    let mut pace = Pace::default();
    while let Ok(length @ 1..) = stderr.read(&mut buffer).await {
        let text = &buffer[..length];
        tracing::debug!(server, text = %String::from_utf8_lossy(text).escape_debug(), "mcp server wrote to stderr");
        {
            let mut last = last.lock();
            last.extend_from_slice(text);
            let surplus = last.len().saturating_sub(LAST_WORDS);
            last.drain(..surplus);
        }
        if let Some(until) = pace.count(text) {
            sleep_until(until).await;
        }
    }
}

/// The output of a program: read no faster than its pace, and ended by an error at a line that is no message
/// ([`Shape`]), which the transport would collect whole.
pub struct Lines {
    output: ChildStdout,
    /// Shape of the current line.
    shape: Shape,
    pace: Pace,
    pause: Option<Pin<Box<Sleep>>>,
    reason: Reason,
}

impl AsyncRead for Lines {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            self.pause = None;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.output).poll_read(context, buffer))?;
        let new = &buffer.filled()[before..];
        if let Err(problem) = self.shape.add_lines(new) {
            self.reason.set(problem);
            return Poll::Ready(Err(io::Error::other(problem)));
        }
        self.pause = self.pace.count(new).map(|until| Box::pin(sleep_until(until)));
        Poll::Ready(Ok(()))
    }
}
