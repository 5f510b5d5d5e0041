//! `steersman policy`: creates, builds, tests and measures policies, and manages those of a running
//! server.
//!
//! A policy runs here as in a server and within the limits of `[policy]`, but in a dry run: nothing is
//! stored, logged or counted, and its deadline is longer.
//!
//! The crate links no MLX. Its binary is `steersman-policy`, which `steersman policy` runs.

mod bench;
mod build;
mod bundle;
mod new;
mod param;
mod remote;
mod sim;
mod unexported;
mod watch;

use param::Param;

pub use remote::url;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Args, Subcommand};
use steersman_policy_host::{
    Bundle, CONTRACT, Component, Context, Decision, Golden, Grant, Host, PolicyConfig, Signer,
    Storage, Trust, nearest, schema_beside, shipped, shipped_names,
};

/// How often work that takes long is reported.
const PROGRESS: Duration = Duration::from_secs(5);

/// From this size on, a component has an interpreter, whose compilation takes half a minute to a minute of processor
/// time.
const LARGE_BYTES: usize = 4 << 20;

/// The commands.
#[derive(Subcommand)]
pub enum Task {
    /// Create a folder with a small policy: source, contract and golden file
    #[command(after_help = "Example:\n  steersman policy new brief --lang rust")]
    New(new::New),
    /// Build a component
    #[command(after_help = "Example:\n  steersman policy build brief")]
    Build(build::Build),
    /// Print size, SHA-256, contract version, hooks and imports of a policy. Fails if a server would
    /// refuse it
    #[command(after_help = "Example:\n  steersman policy check brief/brief.wasm --grants log,kv")]
    Check {
        /// The policy
        #[command(flatten)]
        file: PolicyFile,
        /// Grants of its profile: log, kv, tokenizer, counters. Fails if one is missing
        #[arg(long, value_name = "GRANT", value_delimiter = ',', value_parser = parse_grant)]
        grants: Option<Vec<Grant>>,
    },
    /// Run golden files. Fails if an answer differs from the expected one
    #[command(after_help = "Example:\n  steersman policy test default")]
    Test {
        /// The policy
        #[command(flatten)]
        file: PolicyFile,
        /// Calls and expected answers, one JSON object a line [default: FILE with the extension
        /// .jsonl, or the golden file of the shipped policy]
        #[arg(value_name = "GOLDEN")]
        goldens: Vec<PathBuf>,
        /// The calls
        #[command(flatten)]
        selection: Selection,
    },
    /// Call a policy with the calls of a trace and print its answers, one JSON object a line
    #[command(after_help = "Example:\n  steersman policy replay default trace.jsonl")]
    Replay {
        /// The policy
        #[command(flatten)]
        file: PolicyFile,
        /// The trace of a request, a trace file or a golden file
        trace: PathBuf,
        /// The calls
        #[command(flatten)]
        selection: Selection,
    },
    /// Call two policies with the calls of a trace and print the answers that differ. Fails if any do
    #[command(
        after_help = "Example:\n  steersman policy diff default brief/brief.wasm trace.jsonl"
    )]
    Diff {
        /// The first policy: a component, or the name of one that ships or is in `policy.folder`
        a: PathBuf,
        /// The second policy
        b: PathBuf,
        /// The trace of a request, a trace file or a golden file
        trace: PathBuf,
        /// The calls
        #[command(flatten)]
        selection: Selection,
    },
    /// Measure the time and fuel of each hook
    #[command(after_help = "Example:\n  steersman policy bench default")]
    Bench {
        /// The policy
        #[command(flatten)]
        file: PolicyFile,
        /// A trace or a golden file [default: a request with 501 reasoning tokens and one tool call]
        trace: Option<PathBuf>,
        /// The calls
        #[command(flatten)]
        selection: Selection,
    },
    /// Show what a policy would have done to replies that exist, without a model, and what it would have saved
    #[command(
        after_help = "Example:\n  steersman policy sim default replies.jsonl --param reasoning_budget=500"
    )]
    Sim {
        /// The policy
        #[command(flatten)]
        file: PolicyFile,
        /// The replies
        #[command(flatten)]
        options: sim::Options,
    },
    /// Write a pair of keys that sign bundles, as minisign's
    #[command(after_help = "Example:\n  steersman policy keygen house.key")]
    Keygen(bundle::Keygen),
    /// Test a policy and put it into one signed file, with its golden file, the schema of its parameters and its
    /// README
    #[command(after_help = "Example:\n  steersman policy bundle brief/brief.wasm --key house.key")]
    Bundle(bundle::Options),
    /// Build, test and push a policy whenever a file of its folder is saved. What fails is not pushed
    #[command(after_help = "Example:\n  steersman policy watch brief")]
    Watch(watch::Options),
    /// List the policies of a running server, their versions and profiles
    #[command(after_help = "Example:\n  steersman policy list --url http://127.0.0.1:11436")]
    List {
        /// The server
        #[command(flatten)]
        server: remote::Server,
    },
    /// Upload a component or a bundle to a running server, which validates and activates it
    #[command(after_help = "Example:\n  steersman policy push brief brief/brief.wasm")]
    Push {
        /// Name of the policy on the server
        name: String,
        /// The component NAME.wasm, or the bundle NAME.steer
        file: PathBuf,
        /// The server
        #[command(flatten)]
        server: remote::Server,
    },
    /// Return to the previous version of a policy on a running server
    #[command(after_help = "Example:\n  steersman policy rollback brief")]
    Rollback {
        /// Name of the policy on the server
        name: String,
        /// The server
        #[command(flatten)]
        server: remote::Server,
    },
    /// Print the trace of a request from a running server, as `replay` reads it
    #[command(after_help = "Example:\n  steersman policy trace chatcmpl-1 > trace.jsonl")]
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
pub struct PolicyFile {
    /// A component, or the name of a policy that ships (`default`) or is in `policy.folder`
    file: PathBuf,
}

/// Selects the calls of one policy from a trace, and adds parameters to them.
#[derive(Args, Default)]
pub struct Selection {
    /// Use only the calls of this policy
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// A parameter: for calls that do not have it, and with `replay` and `diff` in place of the one that was recorded;
    /// `@FILE` is the text of a file. Can be repeated
    #[arg(long = "param", value_name = "NAME=TEXT|@FILE", value_parser = param::parse)]
    params: Vec<Param>,
}

/// Runs a command and writes its output to `out`. `storage` may cache compiled components; `url` is the address of
/// the server that the configuration describes.
///
/// # Errors
/// When a file cannot be read or written, a policy is refused or fails, an answer is not the expected
/// one, or a server refuses a request.
pub fn run(
    task: Task,
    config: &PolicyConfig,
    storage: &Storage,
    url: &str,
    out: &mut impl Write,
) -> Result<()> {
    let load = |file: &Path| load(file, config, storage);
    match task {
        Task::New(options) => new::run(options, out),
        Task::Build(options) => build::run(options, out),
        Task::Check { file, grants } => check(&load(&file.file)?, grants, config, out),
        Task::Test { file, goldens, selection } => {
            let loaded = load(&file.file)?.with_schema_beside(&goldens)?;
            param::check(&loaded, &selection.params)?;
            test(loaded, &goldens, &selection, out)
        }
        Task::Replay { file, trace, selection } => {
            let loaded = load(&file.file)?;
            param::check(&loaded, &selection.params)?;
            replay(&loaded.component, &selection.read_with(&trace, true)?, out)
        }
        Task::Diff { a, b, trace, selection } => {
            let both = [load(&a)?.component, load(&b)?.component];
            diff(&both, &selection.read_with(&trace, true)?, &trace, out)
        }
        Task::Bench { file, trace, selection } => {
            let golden = match trace {
                Some(trace) => selection.read(&trace)?,
                None => bench::example(&selection.params()),
            };
            let loaded = load(&file.file)?;
            param::check(&loaded, &selection.params)?;
            bench::run(&loaded.component, &golden, out)
        }
        Task::Sim { file, options } => {
            let loaded = load(&file.file)?;
            param::check(&loaded, &options.params)?;
            sim::run(&loaded.component, &options, out)
        }
        Task::Keygen(options) => bundle::keygen(options, out),
        Task::Bundle(options) => bundle::run(options, &Host::new(config, storage)?, out),
        Task::Watch(options) => watch::run(&options, config, storage, url, out),
        Task::List { server } => server.at(url).list(out),
        Task::Push { name, file, server } => server.at(url).push(&name, &file, out),
        Task::Rollback { name, server } => server.at(url).roll_back(&name, out),
        Task::Trace { id, server } => server.at(url).trace(&id, out),
    }
}

/// A compiled policy.
struct Loaded {
    /// Name of the policy: that of its file.
    stem: String,
    component: Arc<Component>,
    bytes: usize,
    /// `None` for a shipped policy.
    path: Option<PathBuf>,
    bundle: Bundle,
}

fn load(file: &Path, config: &PolicyConfig, storage: &Storage) -> Result<Loaded> {
    let name = file.to_string_lossy();
    // As in profiles: a path contains a `/` or ends in `.wasm`, anything else is a name. A file in
    // `policy.folder` takes precedence over a shipped policy.
    let is_name = file.components().count() == 1 && file.extension().is_none();
    let in_folder = config.folder.join(format!("{name}.wasm"));
    let has_file = is_name && !config.folder.as_os_str().is_empty() && in_folder.is_file();
    let (bytes, path) = match shipped(&name).filter(|_| is_name && !has_file) {
        Some((component, _)) => (component.to_vec(), None),
        None => {
            let path = if has_file { in_folder } else { file.to_path_buf() };
            if is_name && !path.exists() {
                let near = nearest(&name, shipped_names());
                let advice = match near {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => format!(
                        "the shipped policies are {}",
                        shipped_names().collect::<Vec<_>>().join(", ")
                    ),
                };
                bail!("there is no policy `{name}`, neither a shipped one nor a file; {advice}");
            }
            let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
            (bytes, Some(path))
        }
    };
    let host = Host::new(config, storage)?;
    // Nothing is put in force here, so anybody may have signed it.
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let bundle = Bundle::open(&stem, bytes, &Trust::default());
    let mut bundle = bundle.map_err(|problem| anyhow!("{}: {problem}", file.display()))?;
    if let Some(path) = path.as_ref().filter(|_| !bundle.is_archive) {
        bundle.schema = schema_beside(path).map_err(|problem| anyhow!(problem))?;
    }
    let bytes = bundle.component.len();
    if bytes >= LARGE_BYTES && !host.is_compiled(&bundle.component) {
        let megabytes = bytes as f64 / 1e6;
        eprintln!(
            "compiling {name}, {megabytes:.0} MB: up to a minute of processor time, and longer beside \
             other work; once, since the data folder keeps the result"
        );
    }
    let say = |seconds: u64| eprintln!("compiling {name}: {seconds} s");
    let component = patiently(PROGRESS, say, || Component::load(&host, &name, &bundle.component));
    let component = Arc::new(component?);
    Ok(Loaded { stem, component, bytes: bundle.component.len(), path, bundle })
}

impl Loaded {
    /// With the schema beside one of the golden files, if there is none beside the component: the next version of a
    /// policy is tested as `next.wasm` before it has the name of the policy.
    fn with_schema_beside(mut self, goldens: &[PathBuf]) -> Result<Self> {
        if self.bundle.is_archive || self.path.is_none() {
            return Ok(self);
        }
        for golden in goldens {
            if self.bundle.schema.is_some() {
                break;
            }
            self.bundle.schema = schema_beside(golden).map_err(|problem| anyhow!(problem))?;
        }
        Ok(self)
    }
}

/// Does `work`, which may take long, and says in intervals of `every` how many seconds it has taken.
fn patiently<T>(every: Duration, say: impl Fn(u64) + Send, work: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let (working, ended) = sync_channel::<()>(0);
        scope.spawn(move || {
            let started = Instant::now();
            while ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                say(started.elapsed().as_secs());
            }
        });
        let done = work();
        drop(working);
        done
    })
}

impl Selection {
    fn params(&self) -> BTreeMap<String, String> {
        param::texts(&self.params).into_iter().collect()
    }

    /// Reads the selected calls from a file; the parameters are for those that do not have them.
    fn read(&self, path: &Path) -> Result<Golden> {
        self.read_with(path, false)
    }

    /// Reads the selected calls from a file; the parameters take the place of those that they have if it `replaces` them.
    fn read_with(&self, path: &Path, replaces: bool) -> Result<Golden> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        self.parse(&text, path, replaces)
    }

    /// Parses the selected calls from the text of the file `path`.
    fn parse(&self, text: &str, path: &Path, replaces: bool) -> Result<Golden> {
        let path = path.display();
        let mut golden =
            Golden::parse(text).map_err(|problem| anyhow::anyhow!("{path}: {problem}"))?;
        let policies = golden.policies().into_iter().collect::<Vec<_>>().join(", ");
        match &self.policy {
            Some(policy) => golden.retain_policy(policy),
            None if golden.policies().len() > 1 => {
                bail!("{path}: has calls of {policies}; choose one with --policy")
            }
            None => {}
        }
        if let (Some(policy), []) = (&self.policy, &golden.cases[..]) {
            bail!("{path}: has no calls of {policy}, only of {policies}");
        }
        golden.add_params(&self.params(), replaces);
        Ok(golden)
    }
}

fn parse_grant(text: &str) -> Result<Grant, String> {
    Grant::ALL.into_iter().find(|grant| grant.name() == text).ok_or_else(|| {
        let names = Grant::ALL.map(Grant::name).join(", ");
        format!("is not one of {names}")
    })
}

fn check(
    loaded: &Loaded,
    grants: Option<Vec<Grant>>,
    config: &PolicyConfig,
    out: &mut impl Write,
) -> Result<()> {
    let Loaded { component, bytes, bundle, .. } = loaded;
    let imports = component.import_names();
    let imports = if imports.is_empty() { "none".into() } else { imports.join(", ") };
    writeln!(out, "policy    {}", component.name())?;
    writeln!(out, "size      {bytes} bytes")?;
    writeln!(out, "sha256    {}", hex::encode(component.sha256()))?;
    writeln!(out, "contract  {}", CONTRACT)?;
    writeln!(out, "hooks     {}", component.hooks().join(", "))?;
    writeln!(out, "imports   {imports}")?;
    if bundle.is_archive {
        let signed = match Bundle::open(&loaded.stem, bundle.file.clone(), &config.trust()?) {
            Err(problem) => bail!("{}: {problem}", component.name()),
            Ok(Bundle { signer: Signer::Nobody, .. }) => "unsigned".into(),
            Ok(Bundle { signer: Signer::Unknown, .. }) => {
                "signed, not verified (policy.trusted_keys of --config names no key)".into()
            }
            Ok(Bundle { signer: Signer::Key(key), .. }) => format!("signed by {key}"),
        };
        writeln!(out, "bundle    {signed}; golden file of {} bytes", bundle.golden.len())?;
    }
    for (name, param) in bundle.schema.iter().flat_map(|schema| &schema.params) {
        let default = param.default.as_ref().map(|text| format!(" = {text:?}")).unwrap_or_default();
        writeln!(out, "param     {name}: {}{default}  {}", param.kind.name(), param.description)?;
    }
    let needed: Vec<_> =
        component.needed_grants().iter().map(|grant| format!("\"{}\"", grant.name())).collect();
    if !needed.is_empty() {
        writeln!(out, "needs     grants = [{}] in its profile", needed.join(", "))?;
    }
    if let Some(grants) = grants {
        component.check_grants(&grants)?;
        writeln!(out, "grants    sufficient")?;
    }
    if let Some(folder) = loaded.path.as_ref().and_then(|path| path.parent()) {
        unexported::warn(folder, component.hooks(), out)?;
    }
    // The first instance touches memory that the second reuses, as in all but the first request.
    drop(component.instantiate(&Context::dry_run())?);
    let start = Instant::now();
    drop(component.instantiate(&Context::dry_run())?);
    writeln!(out, "starts    in {:.1} us", start.elapsed().as_secs_f64() * 1e6)?;
    Ok(())
}

fn test(
    loaded: Loaded,
    goldens: &[PathBuf],
    selection: &Selection,
    out: &mut impl Write,
) -> Result<()> {
    let Loaded { component, path, bundle, .. } = loaded;
    let read = |path: &PathBuf| Ok((path.clone(), selection.read(path)?));
    let goldens: Vec<(PathBuf, Golden)> = match (goldens, path) {
        ([], Some(path)) if bundle.is_archive => {
            let golden = selection.parse(&bundle.golden, &path, false)?;
            vec![(path, golden)]
        }
        ([], Some(path)) => vec![read(&path.with_extension("jsonl"))?],
        ([], None) => {
            let (_, golden) = shipped(component.name()).expect("a policy without a path ships");
            let path = PathBuf::from(format!("{}.jsonl", component.name()));
            let golden = selection.parse(golden, &path, false)?;
            vec![(path, golden)]
        }
        (goldens, _) => goldens.iter().map(read).collect::<Result<_>>()?,
    };
    let (mut cases, mut failed, mut unchecked) = (0, 0, 0);
    for (path, golden) in &goldens {
        let path = path.display();
        let mismatches = golden.check(&component);
        for one in &mismatches {
            let (line, case, hook) = (one.line, one.case_name(), one.hook.name());
            let problem = one.problem.as_deref().unwrap_or_default();
            writeln!(out, "{path}:{line}: {case}: {hook}: {problem}")?;
        }
        if let Some(why) = golden.inexact().filter(|_| !mismatches.is_empty()) {
            writeln!(out, "{path}: the trace is incomplete: {why}")?;
        }
        cases += golden.cases.len();
        failed += mismatches.len();
        unchecked += golden.without_expectation();
    }
    if failed > 0 {
        let cases = if cases == 1 { "1 case".into() } else { format!("{cases} cases") };
        bail!("unexpected answers: {failed}, in {cases}");
    }
    let passed = if cases == 1 { "1 case passes".into() } else { format!("{cases} cases pass") };
    match unchecked {
        0 => writeln!(out, "{passed}")?,
        lines => writeln!(out, "{passed}; lines without an expected answer: {lines}")?,
    }
    // Those lines pass with the answer of a policy that does nothing.
    for (hook, lines) in goldens.iter().flat_map(|(_, golden)| golden.hooks()) {
        if !component.hooks().contains(&hook.name()) {
            writeln!(out, "lines of `{}`, which the policy does not export: {lines}", hook.name())?;
        }
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
        Some(why) => eprintln!("the trace is incomplete, so answers may differ: {why}"),
        None => {
            let differing = decisions.iter().filter(|one| one.problem.is_some()).count();
            eprintln!("{} answers, {differing} differ from the file", decisions.len());
        }
    }
    Ok(())
}

fn diff(
    both: &[Arc<Component>; 2],
    golden: &Golden,
    path: &Path,
    out: &mut impl Write,
) -> Result<()> {
    let path = path.display();
    let decisions = both.each_ref().map(|component| golden.replay(component));
    let lines: BTreeSet<_> = decisions.iter().flatten().map(|decision| decision.line).collect();
    let mut differing = 0;
    for &line in &lines {
        let at_line = decisions.each_ref().map(|list| list.iter().find(|one| one.line == line));
        let answers = at_line.map(answer_text);
        let Some(Decision { case, hook, step, .. }) = at_line[0].or(at_line[1]) else { continue };
        if answers[0] == answers[1] {
            continue;
        }
        differing += 1;
        let step = step.map_or_else(String::new, |step| format!(" at token {step}"));
        writeln!(out, "{path}:{line}: {case}: {}{step}", hook.name())?;
        for (component, answer) in both.iter().zip(answers) {
            writeln!(out, "  {}: {answer}", component.name())?;
        }
    }
    if let Some(why) = golden.inexact() {
        eprintln!("the trace is incomplete, so answers may differ: {why}");
    }
    if differing > 0 {
        bail!("{differing} of {} answers differ", lines.len());
    }
    writeln!(out, "{} answers, all equal", lines.len())?;
    Ok(())
}

fn answer_text(decision: Option<&Decision>) -> String {
    match decision {
        None => "not called, because an earlier call failed".into(),
        Some(Decision { error: Some(error), .. }) => format!("fails: {error}"),
        Some(Decision { answer, .. }) => {
            serde_json::to_string(answer).expect("answers have string keys only")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{TryRecvError, channel};

    use super::*;

    /// Authors saw nothing for a minute while a component with an interpreter was compiled.
    #[test]
    fn work_that_takes_long_is_reported_again_and_again_until_it_ends() {
        let (said, heard) = channel();
        let every = Duration::from_millis(1);
        let say = move |seconds| said.send(seconds).expect("the test listens");
        let seconds: [u64; 3] = patiently(every, say, || {
            // Without a report the test fails.
            let next = |_| heard.recv_timeout(Duration::from_secs(60)).expect("a report");
            std::array::from_fn(next)
        });
        assert!(seconds.is_sorted(), "{seconds:?}");
        // Who reports has ended: `said` is dropped.
        heard.try_iter().for_each(drop);
        assert_eq!(heard.try_recv(), Err(TryRecvError::Disconnected));
    }
}
