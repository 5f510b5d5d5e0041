//! Compiles components, in a child process with limits on time and memory.
//!
//! Neither the time nor the memory of a compiler is bounded by the size of a component: 3 kB could take
//! gigabytes, and one function of 300 kB minutes. [`super::count`] refuses what no policy contains. The
//! rest is compiled by another process: this program again, whose `main` begins with [`compile_if_asked`].
//! It reads the component from stdin and writes machine code to stdout; its exit status says how it ended
//! (`child.rs`).
//!
//! The machine code is as trustworthy as if it had been compiled here: it comes from the same program
//! through a pipe of our own (`program.rs`), and wasmtime checks that version and settings match.
//!
//! # Why
//! A thread cannot be stopped while it compiles, and its memory cannot be limited. The child sets its own
//! limits, since what a program maps before `main` differs from machine to machine. A system may refuse
//! them (macOS has no limit on data), and a limit that is refused says nothing about the component: so the
//! parent watches the child's memory and processor time as well (`usage.rs`), and kills it.
//!
//! The child yields to requests (`nice`): beside requests on all cores it has a quarter of the processor
//! time. The limit on processor time is that of an idle machine. The one on elapsed time bounds how long
//! somebody waits for an answer; it says more about the machine than about the component, and so do most
//! ends of the child. [`Failed::is_transient`] tells the two apart.

mod child;
mod program;
mod usage;

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use wasmtime::Engine;

use super::count;
use crate::shipped::is_shipped;

pub use child::compile_if_asked;
use child::{COMPILE, REFUSED, compile};
use program::Program;
pub use program::this_program;
pub use usage::Usage;

/// Processor time, in seconds, to compile a component of at most [`SMALL_BYTES`].
const SECONDS: u64 = 8;

/// Memory to compile such a component.
const DATA_BYTES: u64 = 512 << 20;

/// Up to this size components have equal limits. Policies in Rust have 30 to 150 kB and take half a second.
const SMALL_BYTES: usize = 4 << 20;

/// More seconds for each further MiB: a JavaScript interpreter of 12 MB takes 27 s of one core.
const SECONDS_PER_MIB: u64 = 15;

/// Processor time, in seconds, to compile a shipped component, which is known to end: the slowest machine has
/// enough.
const SHIPPED_SECONDS: u64 = 120;

/// Elapsed time, in seconds, after which the parent kills a child that compiles a component of at most
/// [`SMALL_BYTES`] while somebody waits for it. Half a second of work took more than nine beside thirty busy threads, and
/// an upload of a good policy was refused.
const ELAPSED_SECONDS: u64 = 60;

/// More elapsed time for each further MiB.
const ELAPSED_PER_MIB: u64 = 4 * SECONDS_PER_MIB;

/// Elapsed time, in seconds, of a child that nobody waits for, or that compiles a shipped component. A child that
/// a busy machine lets run at all needs less; one that has been stopped does not last for ever.
const LONGEST_SECONDS: u64 = 600;

/// More memory for each further MiB; that interpreter takes 590 MB on two threads.
const DATA_PER_MIB: u64 = 64 << 20;

/// Bytes of machine code.
const CODE_BYTES: u64 = 512 << 20;

/// Threads of the compiler. Each takes memory.
const THREADS: usize = 4;

/// A child that aborted with less than this part of its memory limit found no memory on the machine: it did not
/// meet its own limit.
const LITTLE_MEMORY: u64 = 8;

/// How often the parent looks whether the child has ended.
const POLL: Duration = Duration::from_millis(2);

/// How often it looks at the child's memory and processor time.
const WATCH: Duration = Duration::from_millis(20);

/// Compiles components.
pub struct Compiler {
    /// The program of the child; `None` compiles in this process, without limits.
    program: Option<Program>,
    /// `policy.memory_bytes`, on which the settings of wasmtime depend.
    memory_bytes: usize,
}

/// Why there is no machine code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// What is wrong with the component, the limit that its compilation exceeds, or what ended the compiler.
    pub problem: String,
    /// Whether another attempt may succeed: something other than the component ended the compiler.
    pub is_transient: bool,
}

impl Failed {
    pub fn for_good(problem: String) -> Self {
        Self { problem, is_transient: false }
    }

    pub fn for_now(problem: String) -> Self {
        Self { problem, is_transient: true }
    }
}

/// Whether somebody waits for a component.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// An upload, a changed file or the start of the server.
    Awaited,
    /// Another attempt after one that failed.
    Background,
}

impl Compiler {
    pub fn new(program: Option<PathBuf>, memory_bytes: usize) -> Self {
        Self { program: program.map(Program::new), memory_bytes }
    }

    /// The machine code of a component.
    ///
    /// # Errors
    /// What is wrong with the component, which limit its compilation exceeds, or what ended the compiler.
    pub fn compile(
        &self,
        engine: &Engine,
        bytes: &[u8],
        urgency: Urgency,
    ) -> Result<Vec<u8>, Failed> {
        let is_shipped = is_shipped(bytes);
        let compiled = count::check(bytes).map_err(Failed::for_good).and_then(|()| {
            let Some(program) = &self.program else {
                return compile(engine, bytes).map_err(Failed::for_good);
            };
            let limits = Limits::of(bytes.len(), is_shipped, urgency);
            compile_in_child(program, bytes, self.memory_bytes, limits)
        });
        // Nothing is wrong with a shipped component, whatever has happened to its compiler.
        compiled
            .map_err(|failed| Failed { is_transient: failed.is_transient || is_shipped, ..failed })
    }
}

/// The limits of one compilation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limits {
    /// Processor time.
    seconds: u64,
    elapsed_seconds: u64,
    data_bytes: u64,
}

/// What the parent kills a child for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Excess {
    Elapsed,
    Processor,
    Memory,
}

/// How a child ended.
#[derive(Debug)]
struct End {
    /// As the system reports it, or why it was killed.
    status: Result<ExitStatus, Excess>,
    /// The most memory that was seen.
    peak_bytes: u64,
}

impl Limits {
    fn of(bytes: usize, is_shipped: bool, urgency: Urgency) -> Self {
        let more = bytes.saturating_sub(SMALL_BYTES).div_ceil(1 << 20) as u64;
        let seconds = if is_shipped { SHIPPED_SECONDS } else { SECONDS };
        let elapsed = ELAPSED_SECONDS + more * ELAPSED_PER_MIB;
        let waits = urgency == Urgency::Awaited && !is_shipped;
        Self {
            seconds: seconds + more * SECONDS_PER_MIB,
            elapsed_seconds: if waits { elapsed } else { elapsed.max(LONGEST_SECONDS) },
            data_bytes: DATA_BYTES + more * DATA_PER_MIB,
        }
    }

    /// The limit that a running child exceeds.
    fn exceeded(self, elapsed: Duration, usage: Usage) -> Option<Excess> {
        match () {
            () if elapsed >= Duration::from_secs(self.elapsed_seconds) => Some(Excess::Elapsed),
            () if usage.bytes > self.data_bytes => Some(Excess::Memory),
            // The child's own limit, where it is in force, ends it one second earlier.
            () if usage.processor > Duration::from_secs(self.seconds + 1) => {
                Some(Excess::Processor)
            }
            () => None,
        }
    }

    /// Why there is no machine code if the child ended without an answer.
    fn failure(self, end: &End) -> Failed {
        let Self { seconds, elapsed_seconds, data_bytes } = self;
        let too_slow = format!("takes more than {seconds} s of processor time to compile");
        let too_large = format!("takes more than {} MiB of memory to compile", data_bytes >> 20);
        match end.status.map(|status| (status, signal(status))) {
            Err(Excess::Elapsed) => Failed::for_now(format!(
                "takes more than {elapsed_seconds} s to compile beside what else the machine does"
            )),
            Err(Excess::Processor) | Ok((_, Some(Signal::OutOfTime))) => Failed::for_good(too_slow),
            Err(Excess::Memory) => Failed::for_good(too_large),
            // Rust aborts when an allocation fails.
            Ok((_, Some(Signal::Aborted))) if end.peak_bytes >= data_bytes / LITTLE_MEMORY => {
                Failed::for_good(too_large)
            }
            Ok((status, _)) => {
                Failed::for_now(format!("cannot be compiled: the compiler ended with {status}"))
            }
        }
    }
}

fn compile_in_child(
    program: &Program,
    bytes: &[u8],
    memory_bytes: usize,
    limits: Limits,
) -> Result<Vec<u8>, Failed> {
    let started = Instant::now();
    let path = program.path();
    let failed = |error: io::Error| {
        Failed::for_now(format!("cannot be compiled: {}: {error}", path.display()))
    };
    program.check().map_err(Failed::for_now)?;
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let numbers = [memory_bytes as u64, limits.data_bytes, limits.seconds];
    let mut child = Command::new(path)
        .arg(COMPILE)
        .args(numbers.map(|number| number.to_string()))
        .env("RAYON_NUM_THREADS", threads.to_string())
        // Else mimalloc, if it allocates, maps 1 GiB at once, which the limit counts as memory in use.
        .env("MIMALLOC_ARENA_EAGER_COMMIT", "0")
        // A failed allocation is no reason for twenty lines in the log.
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut stdin = child.stdin.take().expect("it is piped");
    let stdout = child.stdout.take().expect("it is piped");
    let (end, output) = thread::scope(|scope| {
        // Fails if the child has ended, and then its status says why.
        scope.spawn(move || stdin.write_all(bytes));
        let output = scope.spawn(move || {
            let mut output = Vec::new();
            stdout.take(CODE_BYTES).read_to_end(&mut output).map(|_| output)
        });
        (wait(&mut child, started, limits), output.join().expect("reading does not panic"))
    });
    let (end, output) = (end.map_err(failed)?, output.map_err(failed)?);
    match end.status {
        Ok(status) if status.success() => Ok(output),
        Ok(status) if status.code() == Some(REFUSED.into()) => {
            Err(Failed::for_good(String::from_utf8_lossy(&output).into_owned()))
        }
        _ => Err(limits.failure(&end)),
    }
}

/// Waits until `child` has ended, and kills it if it exceeds a limit.
fn wait(child: &mut Child, started: Instant, limits: Limits) -> io::Result<End> {
    let mut watched = started;
    let mut peak_bytes = 0;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(End { status: Ok(status), peak_bytes });
        }
        if watched.elapsed() >= WATCH {
            watched = Instant::now();
            let usage = Usage::of(child.id());
            peak_bytes = peak_bytes.max(usage.bytes);
            if let Some(excess) = limits.exceeded(started.elapsed(), usage) {
                child.kill()?;
                child.wait()?;
                return Ok(End { status: Err(excess), peak_bytes });
            }
        }
        thread::sleep(POLL);
    }
}

/// The signals with which a child ends at a limit of its own.
enum Signal {
    OutOfTime,
    Aborted,
}

#[cfg(unix)]
fn signal(status: ExitStatus) -> Option<Signal> {
    use std::os::unix::process::ExitStatusExt;

    use rustix::process::Signal as Unix;
    match status.signal()? {
        signal if signal == Unix::XCPU.as_raw() => Some(Signal::OutOfTime),
        signal if signal == Unix::ABORT.as_raw() => Some(Signal::Aborted),
        _ => None,
    }
}

#[cfg(not(unix))]
fn signal(_: ExitStatus) -> Option<Signal> {
    None
}

/// How one kind of limit on the compiler is enforced on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitedBy {
    /// The system enforces the limit that the compiler sets for itself.
    System,
    /// The system refuses it, and this process watches the compiler instead.
    Watch,
    /// Neither is possible here.
    Nothing,
}

/// How the limits on the compiler of components are enforced, and what they are for a small component.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompilerLimits {
    /// Memory.
    pub memory: LimitedBy,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Processor time.
    pub processor: LimitedBy,
    /// Processor time, in seconds.
    pub seconds: u64,
}

/// Tries the limits of the compiler: in a child of this process, as [`crate::PolicyConfig::compiler`] has one.
///
/// # Errors
/// Why it cannot be started.
pub fn compiler_limits(program: PathBuf) -> Result<CompilerLimits, String> {
    let program = Program::new(program);
    let numbers = [0, DATA_BYTES, SECONDS].map(|number| number.to_string());
    let mut command = Command::new(program.path());
    let output = command.arg(COMPILE).args(numbers).arg(child::TRY).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{}: {error}", program.path().display()))?;
    if !output.status.success() {
        let problem = String::from_utf8_lossy(&output.stderr);
        return Err(format!("the compiler ended with {}: {}", output.status, problem.trim()));
    }
    let refused = String::from_utf8_lossy(&output.stdout).into_owned();
    let own = Usage::of(std::process::id());
    let limited_by = |name: &str, is_seen: bool| match () {
        () if !refused.lines().any(|line| line == name) => LimitedBy::System,
        () if is_seen => LimitedBy::Watch,
        () => LimitedBy::Nothing,
    };
    Ok(CompilerLimits {
        memory: limited_by(child::MEMORY, own.bytes > 0),
        memory_bytes: DATA_BYTES,
        processor: limited_by(child::PROCESSOR, own.processor > Duration::ZERO),
        seconds: SECONDS,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_components_may_take_longer() {
        let of = |bytes| {
            let Limits { seconds, elapsed_seconds, data_bytes } =
                Limits::of(bytes, false, Urgency::Awaited);
            (seconds, elapsed_seconds, data_bytes >> 20)
        };
        assert_eq!(of(0), (8, 60, 512));
        assert_eq!(of(4 << 20), (8, 60, 512));
        assert_eq!(of((4 << 20) + 1), (23, 120, 576));
        assert_eq!(of(12 << 20), (128, 540, 1024));
    }

    /// 9 s of elapsed time at nice 19, beside a compiler on all cores, left `default` without a version for as
    /// long as the server ran, and nothing said so.
    #[test]
    fn a_shipped_component_is_not_ended_because_the_machine_is_busy() {
        for urgency in [Urgency::Awaited, Urgency::Background] {
            let limits = Limits::of(100_000, true, urgency);
            let usage = Usage { bytes: 100 << 20, processor: Duration::from_secs(60) };
            assert_eq!(limits.exceeded(Duration::from_secs(300), usage), None);
        }
        let mine = Limits::of(100_000, false, Urgency::Awaited);
        let usage = Usage::default();
        assert_eq!(mine.exceeded(Duration::from_secs(60), usage), Some(Excess::Elapsed));
        let again = Limits::of(100_000, false, Urgency::Background);
        assert_eq!(again.exceeded(Duration::from_secs(60), usage), None);
    }

    #[test]
    fn a_compiler_that_cannot_be_started_is_named() {
        let compiler = Compiler::new(Some("/nowhere/compiler".into()), 1 << 20);
        let component = b"\0asm\x0d\0\x01\0";
        let failed = compiler.compile(&Engine::default(), component, Urgency::Awaited).unwrap_err();
        assert!(
            failed.problem.starts_with("cannot be compiled: /nowhere/compiler: "),
            "{failed:?}"
        );
        assert!(failed.is_transient);
    }

    /// Compiles with a script in place of the compiler.
    #[cfg(unix)]
    fn compile_with(script: &str, limits: Limits) -> Result<Vec<u8>, Failed> {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("compiler");
        std::fs::write(&path, format!("#!/bin/sh\nulimit -c 0\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = Program::new(path);
        loop {
            let result = compile_in_child(&program, b"", 1 << 20, limits);
            // A child that another test starts has the script open for an instant.
            let is_busy = |failed: &Failed| failed.problem.contains("Text file busy");
            if !result.as_ref().is_err_and(is_busy) {
                return result;
            }
        }
    }

    /// On macOS the system refuses the limit on data, and no policy compiled. A compiler without limits of its own is
    /// still bounded, and only what a component causes is held against it.
    #[cfg(unix)]
    #[test]
    fn a_compiler_without_limits_of_its_own_is_watched_and_killed() {
        let limits = Limits { seconds: 0, elapsed_seconds: 60, data_bytes: 64 << 20 };
        let brief = Limits { elapsed_seconds: 0, ..limits };
        let doubling = "x=0123456789abcdef; while :; do x=$x$x; done";
        let cases = [
            ("printf code", limits, Ok(b"code".to_vec())),
            ("printf 'has no end'; exit 3", limits, Err(("has no end", false))),
            ("exit 1", limits, Err(("the compiler ended with exit status: 1", true))),
            // As the system does when it has no memory left.
            ("kill -KILL $$", limits, Err(("the compiler ended with signal: 9", true))),
            ("kill -ABRT $$", limits, Err(("the compiler ended with signal: 6", true))),
            ("kill -XCPU $$", limits, Err(("takes more than 0 s of processor time", false))),
            ("while :; do :; done", limits, Err(("takes more than 0 s of processor", false))),
            (
                doubling,
                Limits { seconds: 60, ..limits },
                Err(("more than 64 MiB of memory", false)),
            ),
            ("exec sleep 60", brief, Err(("takes more than 0 s to compile beside", true))),
        ];
        for (script, limits, expected) in cases {
            let result = compile_with(script, limits);
            match (&result, expected) {
                (Ok(code), Ok(expected)) => assert_eq!(*code, expected, "{script}"),
                (Err(failed), Err((words, is_transient))) => {
                    assert!(failed.problem.contains(words), "{script}: {failed:?}");
                    assert_eq!(failed.is_transient, is_transient, "{script}: {failed:?}");
                }
                _ => panic!("{script}: {result:?}"),
            }
        }
    }
}
