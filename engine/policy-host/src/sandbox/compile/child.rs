//! The child: compiles the component on stdin, within limits that it sets for itself.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use wasmtime::Engine;

use super::super::failure::one_line;
use super::super::settings::settings;

/// First argument of a child. The others are numbers: `policy.memory_bytes`, bytes of its own memory, seconds of
/// processor time.
pub const COMPILE: &str = "compile-component";

/// Last argument of a child that only sets its limits, and writes the names of those that the system refuses.
pub const TRY: &str = "try";

/// Names of limits.
pub const MEMORY: &str = "memory";
pub const PROCESSOR: &str = "processor time";

/// Exit status of a child that refuses the component, with the reason on stdout.
pub const REFUSED: u8 = 3;

/// Priority of the child: added to that of this process, which is 0 by default. On Linux, 5 means a third of
/// the processor time of a thread of the server on the same core.
#[cfg(unix)]
const NICE: i32 = 5;

/// What a child is asked for.
struct Task {
    /// `policy.memory_bytes`.
    memory_bytes: u64,
    /// Most bytes of its own memory.
    data_bytes: u64,
    /// Processor time.
    seconds: u64,
}

/// Compiles a component, if this process was started for that by [`crate::PolicyConfig::compiler`]. The
/// first line of a `main` that names its program there; it must then end with this status.
pub fn compile_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next()? != COMPILE {
        return None;
    }
    let arguments: Vec<String> = arguments.collect();
    let numbers: Vec<u64> = arguments.iter().filter_map(|number| number.parse().ok()).collect();
    let [memory_bytes, data_bytes, seconds] = numbers[..] else {
        eprintln!("{COMPILE} is not a command for people");
        return Some(ExitCode::FAILURE);
    };
    end_with_parent();
    let task = Task { memory_bytes, data_bytes, seconds };
    let refused = task.limit(set);
    let (input, output) = (io::stdin().lock(), io::stdout().lock());
    Some(match arguments.last().is_some_and(|last| last == TRY) {
        true => answer(refused.join("\n").as_bytes(), ExitCode::SUCCESS, output),
        false => task.run(input, output),
    })
}

/// Ends this process when the one that waits for it does, where the system can: nobody else wants the result.
fn end_with_parent() {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, set_parent_process_death_signal};
        // Its processor time is limited in any case.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
    }
}

impl Task {
    /// Limits this process to `data_bytes` more memory than it has now, and all its threads together to `seconds`
    /// of processor time. Returns the names of the limits that `set` refuses: they are no reason not to compile, since
    /// the parent watches both.
    fn limit(&self, set: impl Fn(Limit) -> io::Result<()>) -> Vec<&'static str> {
        let memory = mapped_bytes().map(|mapped| Limit::Memory(mapped + self.data_bytes));
        let memory = memory.ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported));
        let processor = set(Limit::Processor(self.seconds));
        let refused = [(MEMORY, memory.and_then(&set)), (PROCESSOR, processor)];
        // Neither matters: a file of its memory, and its priority.
        for limit in [Limit::Core, Limit::Priority] {
            let _ = set(limit);
        }
        refused.into_iter().filter(|(_, set)| set.is_err()).map(|(name, _)| name).collect()
    }

    /// Compiles the component that `input` has, and writes the machine code, or why there is none.
    fn run(&self, mut input: impl Read, output: impl Write) -> ExitCode {
        let mut bytes = Vec::new();
        if let Err(error) = input.read_to_end(&mut bytes) {
            eprintln!("reading the component: {error}");
            return ExitCode::FAILURE;
        }
        let engine = match Engine::new(&settings(self.memory_bytes as usize)) {
            Ok(engine) => engine,
            Err(error) => {
                eprintln!("starting the compiler: {}", one_line(&error));
                return ExitCode::FAILURE;
            }
        };
        match compile(&engine, &bytes) {
            Ok(code) => answer(&code, ExitCode::SUCCESS, output),
            Err(reason) => answer(reason.as_bytes(), ExitCode::from(REFUSED), output),
        }
    }
}

/// The bytes with which modules and components begin.
const MAGIC: &[u8] = b"\0asm";

/// The machine code of a component.
///
/// # Errors
/// What is wrong with the component.
pub fn compile(engine: &Engine, bytes: &[u8]) -> Result<Vec<u8>, String> {
    if !bytes.starts_with(MAGIC) {
        return Err("is not a valid component: it does not begin as WebAssembly does".into());
    }
    let compiled = engine.precompile_component(bytes);
    compiled.map_err(|error| format!("is not a valid component: {}", one_line(&error)))
}

fn answer(bytes: &[u8], status: ExitCode, mut output: impl Write) -> ExitCode {
    match output.write_all(bytes).and_then(|()| output.flush()) {
        Ok(()) => status,
        Err(_) => ExitCode::FAILURE,
    }
}

/// What a child asks the system for.
#[derive(Debug, Clone, Copy)]
enum Limit {
    /// Most bytes of writable memory, those included that were mapped before `main`. Not the address space:
    /// allocators and stacks reserve much more of it than they use.
    Memory(u64),
    /// Most seconds of processor time.
    Processor(u64),
    /// No core dump.
    Core,
    /// A lower priority.
    Priority,
}

#[cfg(unix)]
fn set(limit: Limit) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, nice, setrlimit};
    let (resource, current, maximum) = match limit {
        Limit::Memory(bytes) => (Resource::Data, bytes, bytes),
        // SIGXCPU at the soft limit names the cause to the parent; at the hard limit Linux kills.
        Limit::Processor(seconds) => (Resource::Cpu, seconds, seconds + 1),
        Limit::Core => (Resource::Core, 0, 0),
        Limit::Priority => return nice(NICE).map(drop).map_err(Into::into),
    };
    let limit = Rlimit { current: Some(current), maximum: Some(maximum) };
    setrlimit(resource, limit).map_err(Into::into)
}

#[cfg(not(unix))]
fn set(_: Limit) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Writable memory of this process, as the limit on it counts; `None` where the system does not say, as macOS. There
/// the limit would count the whole address space, and is refused.
fn mapped_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PolicyConfig;
    use crate::shipped::SHIPPED;

    /// On macOS the system refuses the limit on data, the child ended for that, and no policy compiled on any Mac. As
    /// there: every limit is refused.
    #[test]
    fn every_shipped_policy_compiles_though_the_system_refuses_all_limits() {
        let memory_bytes = PolicyConfig::default().memory_bytes;
        let task = Task { memory_bytes: memory_bytes as u64, data_bytes: 1, seconds: 1 };
        let refused = task.limit(|_| Err(io::ErrorKind::InvalidInput.into()));
        assert_eq!(refused, [MEMORY, PROCESSOR]);
        let engine = Engine::new(&settings(memory_bytes)).unwrap();
        for shipped in SHIPPED {
            let mut code = Vec::new();
            let status = task.run(shipped.component, &mut code);
            assert_eq!(format!("{status:?}"), format!("{:?}", ExitCode::SUCCESS));
            let loaded = super::super::super::compiled::from_compiler(&engine, &code);
            assert!(loaded.is_ok(), "{}", shipped.name);
        }
    }
}
