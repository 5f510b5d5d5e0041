//! An MCP server that is a program: its process, its pipes, and the end of what it writes to stderr.

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
use tokio::time::timeout;

use super::MESSAGE_BYTES;
use super::config::McpServerConfig;

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

/// Time in which a program must end after its input is closed, before it is killed.
const END: Duration = Duration::from_secs(2);

/// Bytes of stderr that are kept.
const LAST_WORDS: usize = 400;

/// A running program. Dropping it kills the process.
pub struct Program {
    child: Child,
    stderr: Arc<Mutex<Vec<u8>>>,
}

impl Program {
    /// Starts the program of `config`, and returns its output and its input too.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, config: &McpServerConfig) -> io::Result<(Self, Lines, ChildStdin)> {
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
        let pipe = || io::Error::other("a pipe is missing");
        let input = child.stdin.take().ok_or_else(pipe)?;
        let output = child.stdout.take().ok_or_else(pipe)?;
        let stderr = Arc::default();
        let words = child.stderr.take().ok_or_else(pipe)?;
        tokio::spawn(listen(name.to_string(), words, Arc::clone(&stderr)));
        Ok((Self { child, stderr }, Lines { output, line: 0 }, input))
    }

    /// Waits until the process has ended, after its pipes are closed, or kills it. Returns how it ended, and
    /// its last words.
    pub async fn end(mut self) -> String {
        let status = match timeout(END, self.child.wait()).await {
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

/// Logs what a program writes to stderr, and keeps the end of it.
async fn listen(server: String, mut stderr: ChildStderr, last: Arc<Mutex<Vec<u8>>>) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = stderr.read(&mut buffer).await {
        let text = &buffer[..length];
        tracing::debug!(server, text = %String::from_utf8_lossy(text).escape_debug(), "mcp server wrote to stderr");
        let mut last = last.lock();
        last.extend_from_slice(text);
        let surplus = last.len().saturating_sub(LAST_WORDS);
        last.drain(..surplus);
    }
}

/// The output of a program, which ends with an error at a line of more than [`MESSAGE_BYTES`]: the transport
/// would collect it whole.
pub struct Lines {
    output: ChildStdout,
    /// Bytes of the current line.
    line: usize,
}

impl AsyncRead for Lines {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.output).poll_read(context, buffer))?;
        let new = &buffer.filled()[before..];
        self.line = match new.iter().rposition(|byte| *byte == b'\n') {
            Some(at) => new.len() - at - 1,
            None => self.line + new.len(),
        };
        if self.line > MESSAGE_BYTES {
            return Poll::Ready(Err(io::Error::other("a message is too long")));
        }
        Poll::Ready(Ok(()))
    }
}
