//! The command `steersman`.

mod cli;

use std::io::Write;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory, Parser};
use clap_complete::Shell;
use futures_util::future::select_all;
use steersman::address::Announced;
use steersman::bench::{model, shape};
use steersman::config::FileConfig;
use steersman::manage::Task;
use steersman::mcp::command;
use steersman::models::{self, Loaded, Models, find};
use steersman::program::Program;
use steersman::ranks::{Joining, Member, On, Over, Part, Places};
use steersman::reload::Reloader;
use steersman::shutdown::Stage;
use steersman::signals::Signals;
use steersman::system::start_time;
use steersman::telemetry::Traces;
use steersman::wiring::Wiring;
use steersman::{
    cache, calibrate, check, doctor, exit, heap, keys, link, manage, ranks, serve, talk, verify,
};
use steersman_engine::loading;
use steersman_engine::policy::{PolicyReport, Storage, compile_if_asked, this_program};
use steersman_engine::{Engine, EngineThread, Info};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use self::cli::{
    Bench, Cache, Calibrate, Chat, Check, Cli, Command, Common, Doctor, Join, Keys, Managed, Mcp,
    Run, Serve, Verify, configured, tip_for,
};

/// Also MLX's: `override` exports its functions under the names of the C library's.
#[cfg(all(feature = "mimalloc", target_os = "linux"))]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Time between two samples of what the server does, for charts.
const SAMPLE_EVERY: Duration = Duration::from_secs(10);

/// Time in which the tasks of the runtime end after the server has.
const TASKS: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    if let Some(status) = compile_if_asked() {
        return status;
    }
    heap::use_one_heap();
    start_time();
    if ranks::is_follower() {
        steersman_log::to_stderr();
        return status_of(ranks::follow());
    }
    let cli = Cli::try_parse_from(ranks::arguments()).unwrap_or_else(|error| exit_with(&error));
    match cli.command {
        Command::Chat(_)
        | Command::Run(_)
        | Command::Doctor(_)
        | Command::Init(_)
        | Command::Check(_) => steersman_log::warnings_to_stderr(),
        Command::Serve(_) => {}
        _ => steersman_log::to_stderr(),
    }
    std::panic::set_hook(Box::new(|panic| {
        let location = panic.location().map(ToString::to_string);
        tracing::error!(location, message = panic.payload_as_str(), "panic");
    }));
    let member = match ranks::is_first().then(Member::from_stdin).transpose() {
        Ok(member) => member,
        Err(error) => return status_of(Err(error)),
    };
    let rank = member.clone();
    let done = match cli.command {
        Command::Serve(options) => traced(|log| serve(options, log, member)),
        Command::Chat(options) => chat(options),
        Command::Run(options) => run(options),
        Command::Doctor(options) => doctor(options),
        Command::Init(options) => doctor::init(&options.file, &mut std::io::stdout().lock()),
        Command::Check(options) => check(options),
        Command::Verify(options) => verify(options, member),
        Command::Join(options) => join_server(options),
        Command::Calibrate(options) => calibrate(options),
        Command::Cache(options) => cache(options),
        Command::Mcp(options) => mcp(options),
        Command::Keys(options) => keys(options),
        Command::Bench(Bench::Shape(options)) => shape::write(&options.name, &options.folder),
        Command::Bench(Bench::Model { common, passes }) => bench_model(common, &passes, member),
        Command::Bench(Bench::Suite(_) | Bench::Peers(_) | Bench::Diff(_) | Bench::Report(_)) => {
            Program::Bench.run("steersman bench", 2)
        }
        Command::Eval(_) => Program::Bench.run("steersman", 1),
        Command::Policy(_) => Program::Policy.run("steersman policy", 2),
        Command::List(options) => managed(options, Task::List),
        Command::Show(options) => managed(options, Task::Show),
        Command::Pull(options) => managed(options, Task::Pull),
        Command::Rm(options) => managed(options, Task::Rm),
        Command::Search(options) => managed(options, Task::Search),
        Command::Completions(options) => completions(options.shell, &mut std::io::stdout()),
    };
    if let Some((rank, error)) = rank.zip(done.as_ref().err()) {
        rank.say_failed(error);
    }
    status_of(done)
}

/// Prints an error in the command line, with what to type for a command of other programs.
fn exit_with(error: &clap::Error) -> ! {
    let tip = error.get(ContextKind::InvalidSubcommand).and_then(|name| match name {
        ContextValue::String(name) => tip_for(name),
        _ => None,
    });
    if let Some(tip) = tip {
        eprintln!("error: {tip}");
        std::process::exit(2);
    }
    error.exit()
}

/// The exit status of a command, whose error is printed.
fn status_of(done: Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has seen enough, as in `steersman cache list | head`.
        Err(error) if steersman_log::is_broken_pipe(error.as_ref()) => ExitCode::SUCCESS,
        // Never print a backtrace: most errors are the user's.
        Err(error) => {
            eprintln!("error: {}", steersman_log::without_numbers_of_errors(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// Does `work` with the log, of which it gets the newest lines, and traces if they are on.
fn traced(work: impl FnOnce(steersman_log::Recent) -> Result<()>) -> Result<()> {
    let traces = Traces::from_env()?;
    let recent = steersman_log::of_server(traces.as_ref().map(|traces| traces.layer()));
    let done = work(recent);
    drop(traces);
    done
}

/// Serves, as the first of several ranks if `member` is that.
fn serve(options: Serve, log: steersman_log::Recent, member: Option<Arc<Member>>) -> Result<()> {
    let began = Instant::now();
    let Serve { common, model, host, port, ranks, over, wait_for, rank_key, rank_address } =
        options;
    let (path, device) = (common.place.config.clone(), common.device);
    let place = common.place.clone();
    let all_problems = |error| {
        let (data_dir, storage) = (place.clone().data_dir().ok(), place.clone().compile_cache());
        let (path, data_dir) = (place.config.as_deref(), data_dir.as_deref());
        check::all_problems(path, data_dir, &storage, this_program(), error)
    };
    let (mut file, data_dir) = common.read(model.clone()).map_err(all_problems)?;
    let apply = move |file: &mut FileConfig| {
        file.server.host = host.clone().unwrap_or(file.server.host.clone());
        file.server.port = port.unwrap_or(file.server.port);
        file.model.path = model.clone().unwrap_or(file.model.path.clone());
        file.model.device = device.unwrap_or(file.model.device);
    };
    apply(&mut file);
    let (server, config) = file.check().map_err(all_problems)?;
    if let Some(problem) = check::problem_of_data_dir(&data_dir) {
        bail!("{problem}");
    }
    // Before policies are compiled and the port is opened: a file that does not exist fails at once.
    steersman::hub::named_as(&config.model.path, 0)?;
    // A command that finds no server loads a model of its own. Ranks are announced by their parent.
    let mut announced = member.is_none().then(|| Announced::start(&data_dir));
    let machines = wait_for.unwrap_or(0);
    if let Some(announced) = announced.take_if(|_| ranks + machines > 1) {
        let joining = rank_key.as_deref().map(|file| {
            let (count, address) = (machines as usize, rank_address);
            ranks::key_in(file).map(|key| Joining { count, address, key })
        });
        let places = Places { here: ranks as usize, over, joining: joining.transpose()? };
        return ranks::supervise(config, &server, data_dir, places, announced);
    }
    let reloader = path
        .as_deref()
        .map(|path| Reloader::new(path, Storage::compile_cache(&data_dir), apply))
        .transpose()?;
    let mut wiring = Wiring {
        keys: Some(Arc::new(keys::KeyFile::open(&data_dir)?)),
        responses: Some(data_dir.join("responses")),
        reloads: reloader.as_ref().map(|(_, reloads)| reloads.clone()),
        reload_counts: reloader.as_ref().map(|(reloader, _)| reloader.counts()).unwrap_or_default(),
        log,
        samples: Some(SAMPLE_EVERY),
        ..Wiring::default()
    };

    let runtime = Runtime::new().context("starting the runtime")?;
    let entered = runtime.enter();
    let Signals { stop: mut stop_signals, hangups } = match &member {
        Some(member) => member.signals()?,
        None => Signals::install()?,
    };
    drop(entered);
    // With a file, a signal that arrives while models are loaded is for the time after.
    let hangups = match reloader {
        Some(_) => Some(hangups),
        None => {
            runtime.spawn(hangups.ignore());
            None
        }
    };
    // Before loading the model: that takes long, and a port in use should fail at once.
    let listener = match &member {
        Some(member) => {
            let _entered = runtime.enter();
            TcpListener::from_std(member.listener()?)?
        }
        None => runtime.block_on(serve::listen(&server))?,
    };
    let address = listener.local_addr().context("reading the address")?;
    if !address.ip().is_loopback() && server.api_keys.is_empty() && !wiring.has_key() {
        tracing::warn!(%address, "server accepts network connections without a key: create one with `steersman keys create`, or set server.api_keys");
    }
    if let Some(announced) = &mut announced {
        announced.listen(address);
    }
    let offered = link::offer(address, &server, wiring.has_created_keys())?;
    let console = offered.map(|(link, url)| {
        wiring.link = Some(Arc::new(link));
        url
    });
    // Answers 503 while the models are loaded.
    let loaded_app = Arc::new(OnceLock::new());
    let (loaded, models) = tokio::sync::oneshot::channel::<Models>();
    let (mut more_signals, rank) = (stop_signals.clone(), member.clone());
    let stop = async move {
        let models = tokio::select! {
            models = models => models,
            () = stop_signals.reach(1) => {
                tracing::info!("server stopped while its models were loaded");
                exit::at_once(0)
            }
        };
        // Fails if loading does, which ends the process: there is nothing to drain.
        let Ok(models) = models else { return std::future::pending().await };
        let ended = select_all(models.engines().iter().map(|engine| Box::pin(engine.ended())));
        tokio::select! {
            () = stop_signals.reach(1) => {}
            // Without its engine the server would refuse every request.
            _ = ended => {}
            () = models.broken() => {}
        }
    };
    let cut_off = async move {
        let lost = async {
            match rank {
                Some(rank) => rank.ends().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = more_signals.reach(2) => Stage::CuttingOff,
            reason = lost => {
                tracing::warn!(reason, "the ranks end");
                Stage::RankLost
            }
        }
    };
    let (app, settings) = (serve::once_loaded(loaded_app.clone()), server.clone());
    let serving =
        runtime.spawn(async move { serve::run(listener, app, &settings, stop, cut_off).await });

    let engine = Arc::new(OnceLock::<Engine>::new());
    let lead = member.as_ref().map(|member| {
        let engine = engine.clone();
        member.beat(move || engine.get()?.info().activity.busy_for())?;
        member.lead(config.model.device)
    });
    let lead = lead.transpose()?;

    let load = loading::begin(&config.model.path, "compiling policies");
    let policies = steersman_engine::policies(&config, &data_dir);
    let policies = policies.map_err(|error| all_problems(error.into()))?;
    drop(load);
    let Loaded { models, threads, bundled } =
        models::load(config, &server, &data_dir, &policies, |config, folder, data, policies| {
            match lead {
                Some(lead) => lead.start(config, folder, data, policies),
                None => steersman_engine::start(config, folder, data, policies),
            }
        })?;
    let (engines, first, all) = (models.engines(), models.first(), models.clone());
    if let Some(member) = &member {
        engine.get_or_init(|| first.clone());
        member.say_ready()?;
    }

    let Info { model, numbers, .. } = first.info();
    let demonstration = if bundled {
        " (the bundled demonstration model, too small for real use; choose a model with --model)"
    } else {
        ""
    };
    let further: String = engines[1..]
        .iter()
        .fold(String::new(), |line, engine| format!("{line} and {}", engine.info().model));
    let line = format!(
        "Steersman serves {model}{demonstration}{further} at http://{address}/v1 on {numbers}"
    );
    let inactive = policies.report().policies.into_iter().filter(|policy| !policy.is_active());
    // The servers of `[mcp]` are started within it.
    let entered = runtime.enter();
    loaded_app.get_or_init(|| steersman::app_with(models, &server, wiring));
    if let Some((reloader, hangups)) = reloader.zip(hangups) {
        runtime.spawn(reloader.0.run(hangups));
    }
    drop(entered);
    let names: Vec<_> = engines.iter().map(|engine| engine.info().model.as_str()).collect();
    tracing::info!(
        seconds = (began.elapsed().as_secs_f64() * 10.0).round() / 10.0,
        models = names.join(", "),
        %address,
        device = numbers,
        memory_limit_bytes = first.info().activity.report().bytes.limit,
        threads = std::thread::available_parallelism().map_or(1, usize::from),
        "ready"
    );
    // Ignore a closed stdout.
    let _ = writeln!(std::io::stdout(), "{line}");
    if let Some(url) = console {
        let _ = writeln!(std::io::stdout(), "Open the console as its operator, once, at {url}");
    }
    for PolicyReport { name, problem, is_pending, .. } in inactive {
        let problem = problem.map(|problem| problem.message).unwrap_or_default();
        let next = match is_pending {
            true => "the server tries it again",
            false => "replace its file, or upload another version",
        };
        let _ = writeln!(
            std::io::stdout(),
            "The policy {name} is not active, and fails in every request: {problem}; {next}"
        );
    }

    // Fails if the server has ended, which the next line reports.
    let _ = loaded.send(all.clone());
    runtime.block_on(serving).context("serving")?;
    // Ends the requests that are still running after the grace period.
    all.engines().iter().for_each(Engine::stop);
    // Ends the programs of MCP servers, which the tasks own.
    runtime.shutdown_timeout(TASKS);
    join(threads.into_iter().chain(all.take_threads()).collect())?;
    tracing::info!("server stopped");
    Ok(())
}

/// Waits for the engine threads; then their saved state is on disk.
///
/// # Errors
/// When one has panicked: the process ends with status 1, and a supervisor restarts it.
fn join(threads: Vec<EngineThread>) -> Result<()> {
    let ended: Vec<_> = threads.into_iter().map(EngineThread::join).collect();
    ensure!(ended.iter().all(Result::is_ok), "an engine panicked, as logged above");
    Ok(())
}

fn keys(options: Keys) -> Result<()> {
    let is_creating = matches!(options.task, keys::Task::Create(_));
    let (file, data_dir) =
        if is_creating { options.place.read()? } else { options.place.read_existing()? };
    let closed = file.profiles.iter().filter(|(_, profile)| !profile.api_keys.is_empty());
    let configured = keys::Configured {
        profiles: file.profiles.keys().cloned().collect(),
        closed_profiles: closed.map(|(name, _)| name.clone()).collect(),
        is_closed: !file.server.api_keys.is_empty(),
        has_operators: !file.server.admin_keys.is_empty(),
    };
    let (mut out, mut messages) = (std::io::stdout().lock(), std::io::stderr().lock());
    keys::run(&options.task, &configured, &data_dir, &mut out, &mut messages)
}

fn chat(options: Chat) -> Result<()> {
    let Chat { model, server, options, common } = options;
    let history = common.place.clone().data_dir().ok().map(|folder| folder.join("chat_history"));
    let server = common.server_to_ask(server);
    talk::with_server(
        &server,
        model,
        || common.read(None),
        |runtime, client, model| {
            talk::chat(runtime, client, talk::Session::new(model, options), history)
        },
    )
}

fn run(options: Run) -> Result<()> {
    let Run { model, once, server, options, common } = options;
    if !talk::is_prompted(&once) {
        return chat(Chat { model: Some(model), server, options, common });
    }
    let server = common.server_to_ask(server);
    talk::with_server(
        &server,
        Some(model),
        || common.read(None),
        |runtime, client, model| {
            // Not locked: the log of the engine's threads goes to stderr, too.
            let (mut out, mut messages) = (std::io::stdout(), std::io::stderr());
            runtime.block_on(talk::run(&client, &model, &options, &once, &mut out, &mut messages))
        },
    )
}

fn doctor(options: Doctor) -> Result<()> {
    let Doctor { common, model, json, report } = options;
    if let Some(path) = report {
        let (file, data_dir) = common.read(model)?;
        // Not locked: loading prints a line.
        return doctor::write_report(file, &data_dir, &path, &mut std::io::stdout());
    }
    let mut file = configured(common.place.config.as_deref())?;
    file.model.device = common.device.unwrap_or(file.model.device);
    file.model.path = model.unwrap_or(file.model.path);
    doctor::run(file, &common.place.data_dir()?, json, &mut std::io::stdout().lock())
}

/// Writes the script of a shell.
///
/// # Errors
/// If it cannot be written.
fn completions(shell: Shell, out: &mut impl Write) -> Result<()> {
    // Into memory first: the generator panics at a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "steersman", &mut script);
    out.write_all(&script).context("writing the script")
}

fn check(options: Check) -> Result<()> {
    let file = options.file.or_else(|| options.place.config.clone());
    let file = file.context("name a configuration file: steersman check CONFIG")?;
    let data_dir = options.place.clone().data_dir().ok();
    let storage = options.place.compile_cache();
    let out = &mut std::io::stdout().lock();
    check::run(&file, data_dir.as_deref(), &storage, this_program(), out)
}

/// Verifies, as the first of several ranks if `member` is that.
fn verify(options: Verify, member: Option<Arc<Member>>) -> Result<()> {
    let (mut file, data_dir) = options.common.read(options.model)?;
    if let Some(model) = options.draft_model {
        file.speculation.draft_model = model;
    }
    let (_, mut config) = file.check()?;
    let found = find(&mut config, &data_dir)?;
    let prompts = verify::prompts(options.prompts.as_deref())?;
    let count = options.ranks as usize;
    let part = Part::of(&config, &found, &data_dir);
    let Some(on) = On::choose(count, options.over, part, member)? else { return Ok(()) };
    verify::run(config, &found, &data_dir, &prompts, options.tokens as usize, on)
}

fn join_server(options: Join) -> Result<()> {
    let key = ranks::key_in(&options.rank_key)?;
    let (file, data_dir) = options.common.read(options.model)?;
    let (_, mut config) = file.check()?;
    let found = find(&mut config, &data_dir)?;
    ranks::join(&options.server, key, Part::of(&config, &found, &data_dir))
}

fn bench_model(
    common: Common,
    options: &model::Options,
    member: Option<Arc<Member>>,
) -> Result<()> {
    let (mut file, data_dir) = common.read(options.model.clone())?;
    if let Some(shape) = &options.shape {
        file.model.path = shape::prepare(shape, &data_dir)?.display().to_string();
    }
    let (_, mut config) = file.check()?;
    let found = find(&mut config, &data_dir)?;
    // Threads of one process would share its device.
    let over = options.over.unwrap_or_else(|| Over::of(config.model.device));
    let part = Part::of(&config, &found, &data_dir);
    let Some(on) = On::choose(options.ranks as usize, Some(over), part, member)? else {
        return Ok(());
    };
    model::run(config, &found, &data_dir, options, on)
}

fn calibrate(options: Calibrate) -> Result<()> {
    let (file, data_dir) = options.common.read(options.model)?;
    let (_, mut config) = file.check()?;
    let found = find(&mut config, &data_dir)?;
    let prompts = verify::prompts(options.prompts.as_deref())?;
    calibrate::run(config, &found, &data_dir, &prompts, options.tokens as usize)
}

fn cache(options: Cache) -> Result<()> {
    let (file, data_dir) = options.place.read_existing()?;
    let (_, config) = file.check()?;
    cache::run(options.task, &config.store, &data_dir)
}

fn mcp(options: Mcp) -> Result<()> {
    let (server, _) = configured(options.place.config.as_deref())?.check()?;
    command::run(options.task, &server.mcp, &mut std::io::stdout().lock())
}

fn managed<T: Args>(options: Managed<T>, task: fn(T) -> Task) -> Result<()> {
    let (file, data_dir) = options.place.read()?;
    manage::run(&task(options.task), file, &data_dir, &mut std::io::stdout().lock())
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use clap::ValueEnum;

    use super::*;

    /// Before, `steersman cache list | head -1` failed.
    #[test]
    fn a_closed_pipe_is_no_error() {
        let error = |kind: ErrorKind| {
            anyhow::Error::from(std::io::Error::from(kind)).context("writing the output")
        };
        assert!(steersman_log::is_broken_pipe(error(ErrorKind::BrokenPipe).as_ref()));
        assert!(!steersman_log::is_broken_pipe(error(ErrorKind::StorageFull).as_ref()));
    }

    /// The arguments of the last `steersman ...` in `example`; what is between quotes is one.
    fn arguments(example: &str) -> Vec<String> {
        let (_, last) = example.rsplit_once("steersman ").expect("an example names the program");
        let parts = last.split('"').enumerate();
        let words = parts.flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().map(Into::into).collect(),
            _ => vec![part.to_owned()],
        });
        std::iter::once("steersman".into()).chain(words).collect()
    }

    /// Checks that the commands below `command`, which is called `name`, have an example that is parsed. Those that
    /// are programs of their own print another help, which their crates check.
    fn check_examples(command: &clap::Command, name: &str) {
        for below in command.get_subcommands().filter(|below| !below.is_disable_help_flag_set()) {
            let name = format!("{name} {}", below.get_name());
            let help = below.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = help.strip_prefix("Example:\n");
            let arguments = arguments(example.unwrap_or_else(|| panic!("{name} has no example")));
            assert!(arguments.join(" ").starts_with(&name), "{name}: {arguments:?}");
            let parsed = Cli::try_parse_from(&arguments);
            assert!(parsed.is_ok(), "{arguments:?}: {:?}", parsed.err());
            check_examples(below, &name);
        }
    }

    #[test]
    fn the_help_of_every_command_has_an_example_that_works() {
        let cli = Cli::command();
        check_examples(&cli, "steersman");
        let everyday = ["serve", "run", "chat", "pull", "list", "show", "rm"];
        let names: Vec<_> = cli.get_subcommands().map(clap::Command::get_name).collect();
        assert_eq!(names[..everyday.len()], everyday);
    }

    #[test]
    fn the_help_of_config_names_the_command_that_writes_a_file() {
        let cli = Cli::command();
        let options = cli.get_subcommands().flat_map(clap::Command::get_arguments);
        let help = options.filter(|option| option.get_id() == "config").map(clap::Arg::get_help);
        let help: Vec<_> = help.map(|help| help.map(ToString::to_string)).collect();
        assert!(help.len() > 10, "{help:?}");
        for help in help.into_iter().map(Option::unwrap_or_default) {
            assert!(help.contains("`steersman init` writes one"), "{help}");
        }
    }

    /// It was "invalid digit found in string".
    #[test]
    fn a_number_that_is_none_is_explained() {
        for (command, range) in [
            ("serve --port abc", "0 to 65535"),
            ("serve --port 65536", "0 to 65535"),
            ("verify --tokens 0", "1 to 65536"),
        ] {
            let error =
                Cli::try_parse_from(arguments(&format!("steersman {command}"))).err().unwrap();
            let expected = format!("must be a whole number from {range}");
            assert!(error.to_string().contains(&expected), "{error}");
        }
        assert!(Cli::try_parse_from(arguments("steersman serve --port 0")).is_ok());
    }

    #[test]
    fn every_shell_completes_every_command() {
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            completions(*shell, &mut script).unwrap();
            let script = String::from_utf8(script).unwrap();
            for command in Cli::command().get_subcommands() {
                assert!(
                    script.contains(command.get_name()),
                    "{shell} lacks {}",
                    command.get_name()
                );
            }
        }
    }

    #[test]
    fn an_engine_that_panicked_is_an_error() {
        let thread = |run: fn()| EngineThread::spawn(run).unwrap();
        assert!(join(vec![thread(|| {}), thread(|| {})]).is_ok());
        let error = join(vec![thread(|| panic!("on purpose")), thread(|| {})]).unwrap_err();
        assert!(error.to_string().contains("panicked"), "{error}");
    }
}
