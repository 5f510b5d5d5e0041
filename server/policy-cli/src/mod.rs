//! `steersman policy`: what an author does with a policy before a server gets it, and what an operator
//! does with those that a server has.
//!
//! Whatever runs a policy here runs it as a server does, within the limits of `[policy]` but for its
//! deadline, with an inert host: nothing is kept, logged or counted.

mod bench;
pub mod build;
pub mod new;
mod remote;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use steersman_engine::config::{Grant, PolicyConfig};
use steersman_engine::policy::disk::Disk;
use steersman_engine::policy::golden::{Decision, Golden};
use steersman_engine::policy::registry;
use steersman_engine::policy::wasm::{Component, Host, Scene};

/// What to do.
#[derive(Subcommand)]
pub enum Task {
    /// Make a folder with a small policy to begin with: source, contract, golden file
    New(new::New),
    /// Build a policy to a component
    Build(build::Build),
    /// Say what a policy is: size, SHA-256, version of the contract, hooks, imports. Ends with 0 if a
    /// server would load it
    Check {
        /// The policy
        #[command(flatten)]
        file: File,
        /// What its profile shall grant: log, kv, tokenizer, counters
        #[arg(long, value_name = "GRANT", value_delimiter = ',', value_parser = grant)]
        grants: Option<Vec<Grant>>,
    },
    /// Ask a policy what golden files ask. Ends with 0 if all answers are as expected
    Test {
        /// The policy
        #[command(flatten)]
        file: File,
        /// Questions and answers, a JSON object a line [default: FILE with the ending .jsonl,
        /// or what ships with it]
        #[arg(value_name = "GOLDEN")]
        goldens: Vec<PathBuf>,
        /// Whose questions
        #[command(flatten)]
        which: Which,
    },
    /// Ask a policy what was recorded or is in a golden file, and print what it decides, a JSON object
    /// a line
    Replay {
        /// The policy
        #[command(flatten)]
        file: File,
        /// The trace of a request, a trace file or a golden file
        trace: PathBuf,
        /// Whose questions
        #[command(flatten)]
        which: Which,
    },
    /// Ask two policies the same, and print where they decide differently. Ends with 0 if they do not
    Diff {
        /// One policy: a component, or the name of one that ships
        a: PathBuf,
        /// The other
        b: PathBuf,
        /// The trace of a request, a trace file or a golden file
        trace: PathBuf,
        /// Whose questions
        #[command(flatten)]
        which: Which,
    },
    /// Measure what its hooks cost
    Bench {
        /// The policy
        #[command(flatten)]
        file: File,
        /// What to ask: a trace or a golden file [default: a request with a long thought and a call of
        /// a tool]
        trace: Option<PathBuf>,
        /// Whose questions
        #[command(flatten)]
        which: Which,
    },
    /// The policies of a running server, their versions and their profiles
    List {
        /// The server
        #[command(flatten)]
        server: remote::Server,
    },
    /// Give a policy to a running server, which tries it and swaps it in
    Push {
        /// Its name there
        name: String,
        /// The component
        file: PathBuf,
        /// The server
        #[command(flatten)]
        server: remote::Server,
    },
    /// Have a running server go back to the version before
    Rollback {
        /// The policy
        name: String,
        /// The server
        #[command(flatten)]
        server: remote::Server,
    },
    /// What was decided in a request that a running server remembers, as `replay` reads it
    Trace {
        /// The request: `id` of its reply
        id: String,
        /// The server
        #[command(flatten)]
        server: remote::Server,
    },
}

/// A policy.
#[derive(Args)]
pub struct File {
    /// A component, or the name of a policy that ships (`default`) or lies in `policy.folder`
    file: PathBuf,
}

/// Of which policy, where a trace tells of several, and with which parameters.
#[derive(Args)]
pub struct Which {
    /// Take the questions that this policy was asked
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// A parameter, where a question has none of this name; `@FILE` is what the file says. May be given
    /// several times
    #[arg(long = "param", value_name = "NAME=TEXT|@FILE", value_parser = param)]
    params: Vec<(String, String)>,
}

/// Does it, and writes to `out` what was done. What is compiled may be kept on `disk`.
///
/// # Errors
/// What cannot be read or loaded, or what was asked of a policy and did not hold.
pub fn run(task: Task, config: &PolicyConfig, disk: &Disk, out: &mut impl Write) -> Result<()> {
    let load = |file: &Path| load(file, config, disk);
    match task {
        Task::New(options) => new::run(options, out),
        Task::Build(options) => build::run(options, out),
        Task::Check { file, grants } => check(&load(&file.file)?, grants, out),
        Task::Test { file, goldens, which } => test(load(&file.file)?, &goldens, &which, out),
        Task::Replay { file, trace, which } => {
            let component = load(&file.file)?.component;
            replay(&component, &which.read(&trace)?, out)
        }
        Task::Diff { a, b, trace, which } => {
            let both = [load(&a)?.component, load(&b)?.component];
            diff(both, &which.read(&trace)?, &trace, out)
        }
        Task::Bench { file, trace, which } => {
            let component = load(&file.file)?.component;
            let mut asked =
                trace.map_or_else(|| Ok(bench::builtin()), |trace| which.read(&trace))?;
            asked.add_params(&which.params());
            bench::run(&component, &asked, out)
        }
        Task::List { server } => server.list(out),
        Task::Push { name, file, server } => server.push(&name, &file, out),
        Task::Rollback { name, server } => server.rollback(&name, out),
        Task::Trace { id, server } => server.trace(&id, out),
    }
}

/// A policy that was read and compiled.
struct Loaded {
    component: Arc<Component>,
    bytes: usize,
    /// `None` for one that ships.
    path: Option<PathBuf>,
}

fn load(file: &Path, config: &PolicyConfig, disk: &Disk) -> Result<Loaded> {
    let name = file.to_string_lossy();
    // As in profiles: a path has a `/` or ends in `.wasm`, all else is a name.
    let is_name = file.components().count() == 1 && file.extension().is_none();
    let in_folder = config.folder.join(format!("{name}.wasm"));
    let shipped = registry::embedded(&name).filter(|_| is_name);
    let path = if is_name && !config.folder.as_os_str().is_empty() && in_folder.is_file() {
        Some(in_folder)
    } else {
        shipped.is_none().then(|| file.to_path_buf())
    };
    let bytes = match (&path, shipped) {
        (None, Some((bytes, _))) => bytes.into(),
        (path, _) => {
            let path = path.as_deref().unwrap_or(file);
            std::fs::read(path).with_context(|| format!("reading {}", path.display()))?.into()
        }
    };
    let bytes: std::borrow::Cow<'_, [u8]> = bytes;
    let host = Host::new(config, disk)?;
    let component = Arc::new(Component::load(&host, &name, &bytes)?);
    Ok(Loaded { component, bytes: bytes.len(), path })
}

impl Which {
    fn params(&self) -> BTreeMap<String, String> {
        self.params.iter().cloned().collect()
    }

    /// Reads a trace, and of it what this policy was asked.
    fn read(&self, path: &Path) -> Result<Golden> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        self.parse(&text, path)
    }

    /// Reads the text of a trace from `path`, and of it what this policy was asked.
    fn parse(&self, text: &str, path: &Path) -> Result<Golden> {
        let refuse = |problem| anyhow::anyhow!("{}: {problem}", path.display());
        let mut golden = Golden::parse(text).map_err(refuse)?;
        let policies: Vec<_> = golden.policies().into_iter().map(str::to_owned).collect();
        match &self.policy {
            Some(policy) => golden.only(policy),
            None if policies.len() > 1 => bail!(
                "{} tells of {}: choose one with --policy",
                path.display(),
                policies.join(", ")
            ),
            None => {}
        }
        golden.add_params(&self.params());
        if golden.cases.is_empty() {
            let known = policies.join(", ");
            bail!("{} tells nothing of this policy, only of {known}", path.display());
        }
        Ok(golden)
    }
}

fn grant(text: &str) -> Result<Grant, String> {
    Grant::ALL.into_iter().find(|grant| grant.name() == text).ok_or_else(|| {
        let names = Grant::ALL.map(Grant::name).join(", ");
        format!("is none of {names}")
    })
}

fn param(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("is not NAME=TEXT")?;
    let value = match value.strip_prefix('@') {
        None => value.into(),
        Some(file) => std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?,
    };
    Ok((name.into(), value))
}

fn check(loaded: &Loaded, grants: Option<Vec<Grant>>, out: &mut impl Write) -> Result<()> {
    let Loaded { component, bytes, .. } = loaded;
    let sha256: String = component.sha256().iter().map(|byte| format!("{byte:02x}")).collect();
    let imports = component.imports();
    let needs = |grant: &Grant| {
        let name = format!("steersman:policy/{}@", grant.name());
        imports.iter().any(|import| import.starts_with(&name))
    };
    let needed: Vec<_> = Grant::ALL.into_iter().filter(needs).collect();
    writeln!(out, "policy    {}", component.name())?;
    writeln!(out, "size      {bytes} bytes")?;
    writeln!(out, "sha256    {sha256}")?;
    writeln!(out, "contract  {}", component.version())?;
    writeln!(out, "hooks     {}", component.hooks().join(", "))?;
    let imported = if imports.is_empty() { "none".into() } else { imports.join(", ") };
    writeln!(out, "imports   {imported}")?;
    let names: Vec<_> = needed.iter().map(|grant| format!("\"{}\"", grant.name())).collect();
    if !names.is_empty() {
        writeln!(out, "needs     grants = [{}] in its profile", names.join(", "))?;
    }
    if let Some(grants) = grants {
        component.granted(&grants)?;
        writeln!(out, "grants    suffice")?;
    }
    // The first touches memory that the second finds, as all but the first request do.
    drop(component.instantiate(&Scene::trial())?);
    let start = Instant::now();
    drop(component.instantiate(&Scene::trial())?);
    writeln!(out, "starts    in {:.1} us", start.elapsed().as_secs_f64() * 1e6)?;
    Ok(())
}

fn test(loaded: Loaded, goldens: &[PathBuf], which: &Which, out: &mut impl Write) -> Result<()> {
    let Loaded { component, path, .. } = loaded;
    let asked: Vec<(PathBuf, Golden)> = match (goldens, path) {
        ([], Some(path)) => {
            let beside = path.with_extension("jsonl");
            let golden = which.read(&beside)?;
            vec![(beside, golden)]
        }
        ([], None) => {
            let (_, golden) = registry::embedded(component.name()).unwrap_or_default();
            let name = PathBuf::from(format!("{}.jsonl", component.name()));
            let golden = which.parse(golden, &name)?;
            vec![(name, golden)]
        }
        (goldens, _) => goldens
            .iter()
            .map(|path| Ok((path.clone(), which.read(path)?)))
            .collect::<Result<_>>()?,
    };
    let (mut cases, mut failed, mut unjudged) = (0, 0, 0);
    for (path, golden) in &asked {
        let failures = golden.check(&component);
        for failure in &failures {
            let (line, case, hook) = (failure.line, &failure.case, failure.hook.name());
            writeln!(out, "{}:{line}: {case}: {hook}: {}", path.display(), failure.problem)?;
        }
        if let Some(why) = golden.inexact().filter(|_| !failures.is_empty()) {
            writeln!(out, "{}: is not all that happened: {why}", path.display())?;
        }
        cases += golden.cases.len();
        failed += failures.len();
        unjudged += golden.unjudged();
    }
    if failed > 0 {
        bail!("answers other than expected: {failed}, in {cases} cases");
    }
    match unjudged {
        0 => writeln!(out, "{cases} cases pass")?,
        lines => writeln!(out, "{cases} cases pass; lines without an expected answer: {lines}")?,
    }
    Ok(())
}

fn replay(component: &Arc<Component>, golden: &Golden, out: &mut impl Write) -> Result<()> {
    let decisions = golden.replay(component);
    for decision in &decisions {
        serde_json::to_writer(&mut *out, decision)?;
        writeln!(out)?;
    }
    match golden.inexact() {
        Some(why) => eprintln!("not what happened, since {why}"),
        None => {
            let other = golden.check(component).len();
            eprintln!("{} decisions, {other} other than the file says", decisions.len());
        }
    }
    Ok(())
}

fn diff(
    both: [Arc<Component>; 2],
    golden: &Golden,
    path: &Path,
    out: &mut impl Write,
) -> Result<()> {
    let [a, b] = both.each_ref().map(|component| golden.replay(component));
    let lines: std::collections::BTreeSet<_> =
        a.iter().chain(&b).map(|decision| decision.line).collect();
    let mut differing = 0;
    for line in &lines {
        let [a, b] = [&a, &b].map(|list| list.iter().find(|decision| decision.line == *line));
        let [said_a, said_b] = [a, b].map(said);
        if said_a == said_b {
            continue;
        }
        differing += 1;
        let Some(Decision { case, hook, step, .. }) = a.or(b) else { continue };
        let step = step.map_or_else(String::new, |step| format!(" at token {step}"));
        writeln!(out, "{}:{line}: {case}: {}{step}", path.display(), hook.name())?;
        writeln!(out, "  {}: {said_a}", both[0].name())?;
        writeln!(out, "  {}: {said_b}", both[1].name())?;
    }
    if let Some(why) = golden.inexact() {
        eprintln!("not what happened, since {why}");
    }
    if differing > 0 {
        bail!("they differ in {differing} of {} decisions", lines.len());
    }
    writeln!(out, "{} decisions, all alike", lines.len())?;
    Ok(())
}

fn said(decision: Option<&Decision>) -> String {
    match decision {
        None => "is not asked, since it failed before".into(),
        Some(Decision { error: Some(error), .. }) => format!("fails: {error}"),
        Some(Decision { answer, .. }) => {
            serde_json::to_string(answer).unwrap_or_else(|error| error.to_string())
        }
    }
}
