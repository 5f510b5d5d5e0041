//! Compiles components, in a child process with limits on time and memory.
//!
//! Neither the time nor the memory of a compiler is bounded by the size of a component: 3 kB could take
//! gigabytes, and one function of 300 kB minutes. [`super::count`] refuses what no policy contains. The
//! rest is compiled by another process: this program again, whose `main` begins with [`compile_if_asked`].
//! It reads the component from stdin and writes machine code to stdout; its exit status says how it ended.
//!
//! The machine code is as trustworthy as if it had been compiled here: it comes from the same program
//! through a pipe of our own, and wasmtime checks that version and settings match.
//!
//! # Why
//! A thread cannot be stopped while it compiles, and its memory cannot be limited. The child sets its own
//! limits, since what a program maps before `main` differs from machine to machine; the parent only waits
//! and kills. The child yields to requests (`nice`): beside requests on all cores it has a quarter of the
//! processor time. Of the two limits on time the one on processor time is that of an idle machine; the one on
//! elapsed time bounds how long a busy server waits for an answer.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use wasmtime::Engine;

use super::engine::settings;
use super::{count, one_line};

/// First argument of a child. The others are those of [`compile_component`].
const COMPILE: &str = "compile-component";

/// Processor time, in seconds, to compile a component of at most [`SMALL_BYTES`].
const SECONDS: u64 = 8;

/// Memory to compile such a component.
const DATA_BYTES: u64 = 512 << 20;

/// Up to this size components have equal limits. Policies in Rust have 30 to 150 kB and take half a second.
const SMALL_BYTES: usize = 4 << 20;

/// More seconds for each further MiB: a JavaScript interpreter of 12 MB takes 27 s of one core.
const SECONDS_PER_MIB: u64 = 15;

/// Elapsed time, in seconds, after which the parent kills a child that compiles such a component.
const ELAPSED_SECONDS: u64 = 9;

/// More elapsed time for each further MiB.
const ELAPSED_PER_MIB: u64 = 4 * SECONDS_PER_MIB;

/// More memory for each further MiB; that interpreter takes 590 MB on two threads.
const DATA_PER_MIB: u64 = 64 << 20;

/// Bytes of machine code.
const CODE_BYTES: u64 = 512 << 20;

/// Threads of the compiler. Each takes memory.
const THREADS: usize = 4;

/// Exit status of a child that refuses the component, with the reason on stdout.
const REFUSED: u8 = 3;

/// Priority of the child: added to that of this process, which is 0 by default. On Linux, 5 means a third of
/// the processor time of a thread of the server on the same core.
#[cfg(unix)]
const NICE: i32 = 5;

/// How often the parent looks whether the child has ended.
const POLL: Duration = Duration::from_millis(2);

/// Compiles components.
pub struct Compiler {
    /// The program of the child; `None` compiles in this process, without limits.
    program: Option<PathBuf>,
    /// `policy.memory_bytes`, on which the settings of wasmtime depend.
    memory_bytes: usize,
}

impl Compiler {
    pub fn new(program: Option<PathBuf>, memory_bytes: usize) -> Self {
        Self { program, memory_bytes }
    }

    /// The machine code of a component.
    ///
    /// # Errors
    /// What is wrong with the component, or which limit its compilation exceeds.
    pub fn compile(&self, engine: &Engine, bytes: &[u8]) -> Result<Vec<u8>, String> {
        count::check(bytes)?;
        match &self.program {
            Some(program) => compile_in_child(program, bytes, self.memory_bytes),
            None => compile(engine, bytes),
        }
    }
}

fn compile(engine: &Engine, bytes: &[u8]) -> Result<Vec<u8>, String> {
    let compiled = engine.precompile_component(bytes);
    compiled.map_err(|error| format!("is not a valid component: {}", one_line(&error)))
}

/// The limits of one compilation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limits {
    /// Processor time.
    seconds: u64,
    elapsed_seconds: u64,
    data_bytes: u64,
}

impl Limits {
    fn of(bytes: usize) -> Self {
        let more = bytes.saturating_sub(SMALL_BYTES).div_ceil(1 << 20) as u64;
        Self {
            seconds: SECONDS + more * SECONDS_PER_MIB,
            elapsed_seconds: ELAPSED_SECONDS + more * ELAPSED_PER_MIB,
            data_bytes: DATA_BYTES + more * DATA_PER_MIB,
        }
    }

    /// Why the component is refused if the child ended without an answer.
    fn refusal(self, status: ExitStatus) -> String {
        let Self { seconds, data_bytes, .. } = self;
        match signal(status) {
            Some(Signal::OutOfTime) => {
                format!("takes more than {seconds} s of processor time to compile")
            }
            // Rust aborts when an allocation fails.
            Some(Signal::Aborted) => {
                format!("takes more than {} MiB of memory to compile", data_bytes >> 20)
            }
            None => format!("cannot be compiled: the compiler ended with {status}"),
        }
    }
}

fn compile_in_child(program: &Path, bytes: &[u8], memory_bytes: usize) -> Result<Vec<u8>, String> {
    let limits = Limits::of(bytes.len());
    let started = Instant::now();
    let failed = |error| format!("cannot be compiled: {}: {error}", program.display());
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let numbers = [memory_bytes as u64, limits.data_bytes, limits.seconds];
    let mut child = Command::new(program)
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
    let (status, output) = thread::scope(|scope| {
        // Fails if the child has ended, and then its status says why.
        scope.spawn(move || stdin.write_all(bytes));
        let output = scope.spawn(move || {
            let mut output = Vec::new();
            stdout.take(CODE_BYTES).read_to_end(&mut output).map(|_| output)
        });
        let status = wait(&mut child, started + Duration::from_secs(limits.elapsed_seconds));
        (status, output.join().expect("reading does not panic"))
    });
    match (status.map_err(failed)?, output.map_err(failed)?) {
        (None, _) => Err(format!(
            "takes more than {} s to compile beside what else the machine does",
            limits.elapsed_seconds
        )),
        (Some(status), code) if status.success() => Ok(code),
        (Some(status), reason) if status.code() == Some(REFUSED.into()) => {
            Err(String::from_utf8_lossy(&reason).into_owned())
        }
        (Some(status), _) => Err(limits.refusal(status)),
    }
}

/// The exit status of `child`; `None` if it was killed at the deadline.
fn wait(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    loop {
        let status = child.try_wait();
        if !matches!(status, Ok(None)) {
            return status;
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

/// The signals with which a child ends at a limit.
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

/// Compiles a component, if this process was started for that by [`crate::PolicyConfig::compiler`]. The
/// first line of a `main` that names its program there; it must then end with this status.
pub fn compile_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next()? != COMPILE {
        return None;
    }
    let numbers: Vec<u64> = arguments.filter_map(|number| number.parse().ok()).collect();
    let [memory_bytes, data_bytes, seconds] = numbers[..] else {
        eprintln!("{COMPILE} is not a command for people");
        return Some(ExitCode::FAILURE);
    };
    Some(compile_component(memory_bytes, data_bytes, seconds))
}

/// Compiles the component on stdin, for guests with `memory_bytes` of memory, within `data_bytes` of its own
/// memory and `seconds` of processor time.
fn compile_component(memory_bytes: u64, data_bytes: u64, seconds: u64) -> ExitCode {
    #[cfg(unix)]
    if let Err(error) = limit(data_bytes, seconds) {
        eprintln!("limits of the compiler: {error}");
        return ExitCode::FAILURE;
    }
    let _ = (data_bytes, seconds);
    let mut bytes = Vec::new();
    if let Err(error) = std::io::stdin().lock().read_to_end(&mut bytes) {
        eprintln!("reading the component: {error}");
        return ExitCode::FAILURE;
    }
    let engine = Engine::new(&settings(memory_bytes as usize));
    let engine = engine.map_err(|error| format!("cannot be compiled: {}", one_line(&error)));
    let (output, status) = match engine.and_then(|engine| compile(&engine, &bytes)) {
        Ok(code) => (code, ExitCode::SUCCESS),
        Err(reason) => (reason.into_bytes(), ExitCode::from(REFUSED)),
    };
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(&output).and_then(|()| stdout.flush()) {
        Ok(()) => status,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Limits this process to `data_bytes` more memory than it has now, and all its threads together to `seconds` of
/// processor time.
#[cfg(unix)]
fn limit(data_bytes: u64, seconds: u64) -> std::io::Result<()> {
    use rustix::process::{Resource, Rlimit, nice, setrlimit};
    let data_bytes = mapped_bytes().saturating_add(data_bytes);
    let limits = [
        // Not the address space: allocators and stacks reserve much more of it than they use.
        (Resource::Data, data_bytes, data_bytes),
        // SIGXCPU at the soft limit names the cause to the parent; at the hard limit Linux kills.
        (Resource::Cpu, seconds, seconds + 1),
        (Resource::Core, 0, 0),
    ];
    for (resource, current, maximum) in limits {
        setrlimit(resource, Rlimit { current: Some(current), maximum: Some(maximum) })?;
    }
    nice(NICE)?;
    Ok(())
}

/// Writable memory of this process, as the limit on it counts; 0 where the system does not say.
#[cfg(unix)]
fn mapped_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// This program, for [`crate::PolicyConfig::compiler`]. On Linux also after its file was replaced.
pub fn this_program() -> Option<PathBuf> {
    let own = Path::new("/proc/self/exe");
    if cfg!(target_os = "linux") && own.exists() {
        return Some(own.into());
    }
    std::env::current_exe().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_components_may_take_longer() {
        let of = |bytes| {
            let Limits { seconds, elapsed_seconds, data_bytes } = Limits::of(bytes);
            (seconds, elapsed_seconds, data_bytes >> 20)
        };
        assert_eq!(of(0), (8, 9, 512));
        assert_eq!(of(4 << 20), (8, 9, 512));
        assert_eq!(of((4 << 20) + 1), (23, 69, 576));
        assert_eq!(of(12 << 20), (128, 489, 1024));
    }

    #[test]
    fn a_compiler_that_cannot_be_started_is_named() {
        let compiler = Compiler::new(Some("/nowhere/compiler".into()), 1 << 20);
        let component = b"\0asm\x0d\0\x01\0";
        let error = compiler.compile(&Engine::default(), component).unwrap_err();
        assert!(error.starts_with("cannot be compiled: /nowhere/compiler: "), "{error}");
    }
}
