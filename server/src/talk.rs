//! `steersman chat` and `steersman run`: which server they talk to.
//!
//! The server at `--url`. Or else the server that runs at the configured address or uses the same
//! data folder, if it has the model: a second copy of a large model would not fit beside the first.
//! Or else one in this process.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use secrecy::ExposeSecret;
pub use steersman_chat::*;
use steersman_models::named::same_model;
use tokio::runtime::{Builder, Runtime};

use crate::config::FileConfig;
use crate::local::Local;
use crate::words::suggestion;
use crate::{address, bundled, hub};

/// Time between two looks at a server that loads its models.
const LOADING_PAUSE: Duration = Duration::from_millis(500);

/// Time in which a server that was started together with a command is announced.
const JUST_STARTED: Duration = Duration::from_millis(150);

/// Time between two looks at a server that starts, and most of them. It listens before it loads its models.
const STARTING: (Duration, usize) = (Duration::from_millis(50), 200);

/// A server, and the name by which it has the model; empty for its first one.
type Served = (Client, String);

/// Calls `use_server` with a client of the server to talk to, and with the name by which that has
/// `model`. `read` returns the configuration and the data folder; it is not called if `server` has
/// an address.
///
/// # Errors
/// If no server can be reached or started, or the server that runs requires a key; and the errors
/// of `use_server`.
pub fn with_server(
    server: &Server,
    model: Option<String>,
    read: impl FnOnce() -> Result<(FileConfig, PathBuf)>,
    use_server: impl FnOnce(&Runtime, Client, String) -> Result<()>,
) -> Result<()> {
    if let Some(url) = server.url.as_ref().filter(|_| !server.local) {
        let (client, runtime) = (Client::new(url, server.key.as_deref())?, runtime()?);
        // A short name may be served under another one.
        let served = match &model {
            Some(name) => {
                runtime.block_on(client.models()).ok().and_then(|all| name_in(&all, name))
            }
            None => None,
        };
        return use_server(&runtime, client, served.or(model).unwrap_or_default());
    }
    // Before there is a thread: it may set variables of the environment.
    let (file, data_dir) = read()?;
    let runtime = runtime()?;
    if !server.local {
        let running =
            runtime.block_on(running(&file, &data_dir, server.key.as_deref(), model.as_deref()))?;
        if let Some((client, name)) = running {
            return use_server(&runtime, client, name);
        }
    }
    let was_announced = is_announced(&data_dir);
    let local = in_this_process(file.clone(), &data_dir, model.clone())?;
    // A server that was started together with this command may be seen only now: it is used, and has the files to itself.
    if !server.local && !was_announced && is_announced(&data_dir) {
        local.stop()?;
        let running =
            runtime.block_on(running(&file, &data_dir, server.key.as_deref(), model.as_deref()))?;
        return match running {
            Some((client, name)) => use_server(&runtime, client, name),
            None => use_local(in_this_process(file, &data_dir, model)?, runtime, use_server),
        };
    }
    use_local(local, runtime, use_server)
}

/// Returns true if a server uses `data_dir`, or is about to.
fn is_announced(data_dir: &Path) -> bool {
    address::is_starting(data_dir) || !address::read(data_dir).is_empty()
}

/// One thread besides the main one: it closes connections while that one waits for the user.
fn runtime() -> Result<Runtime> {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.context("starting the runtime")
}

/// Starts a server in this process that has `model`.
fn in_this_process(mut file: FileConfig, data_dir: &Path, model: Option<String>) -> Result<Local> {
    if let Some(model) = model {
        file.model.path = match file.models.get(&model) {
            Some(own) => own.path.clone(),
            // Its name in replies and lists is that of the only bundled model.
            None if model == bundled::NAME => String::new(),
            None => model,
        };
    }
    Local::start(file, data_dir)
}

/// Uses a server in this process, and stops it.
fn use_local(
    local: Local,
    runtime: Runtime,
    use_server: impl FnOnce(&Runtime, Client, String) -> Result<()>,
) -> Result<()> {
    let client = Client::new(&local.url(), Some(local.key()))?.in_this_process();
    let done = use_server(&runtime, client, local.model());
    // Connections that the client keeps open would be waited for.
    runtime.shutdown_background();
    local.stop()?;
    done
}

/// The server that runs at the configured address, or else the one that uses `data_dir`, if it has
/// `model`, or whichever runs there if no model is named. One that starts is waited for. One line
/// on stderr names it if that is a terminal; the reason why a server is not used is written in any
/// case.
///
/// # Errors
/// If it requires a key that is not known here.
async fn running(
    file: &FileConfig,
    data_dir: &Path,
    key: Option<&str>,
    model: Option<&str>,
) -> Result<Option<Served>> {
    let configured = url(&file.server.host, file.server.port);
    let mut found = answering(file, data_dir, key).await;
    if found.is_none() {
        tokio::time::sleep(JUST_STARTED).await;
        let (pause, most) = STARTING;
        for _ in (0..most).take_while(|_| address::is_starting(data_dir)) {
            tokio::time::sleep(pause).await;
        }
        found = answering(file, data_dir, key).await;
    }
    let Some((client, url)) = found else {
        // A closed stderr is no error.
        let mut stderr = std::io::stderr();
        if stderr.is_terminal() {
            let _ = writeln!(
                stderr,
                "no server at {configured}, so the model is loaded in this process; --url names a server elsewhere"
            );
        }
        return Ok(None);
    };
    let models = client.models().await.map_err(|error| {
        let is_locked = error.downcast_ref().is_some_and(|error: &Refused| error.status == 401);
        if !is_locked {
            return error.context(format!("asking the server at {url} for its models"));
        }
        error.context(format!(
            "the server that runs at {url} requires a key: name one with --key or \
             STEERSMAN_API_KEY, or load the model in this process with --local"
        ))
    })?;
    let mut stderr = std::io::stderr();
    let Some(model) = model else { return Ok(Some((client, String::new()))) };
    let Some(name) = name_in(&models, model) else {
        if !is_loaded_here(file, model)
            && let Err(error) = hub::named_as(model, 0)
        {
            let served = models.join(", ");
            let error = format!("{error:#}");
            // Named once, though this process and the server may mean the same model.
            let near = match error.contains("did you mean") {
                true => String::new(),
                false => suggestion(model, models.iter().map(String::as_str)),
            };
            bail!(
                "the server at {url} does not serve {model}, but {served}{near}; nor can this process load it: {error}"
            );
        }
        // A closed stderr is no error.
        let _ = writeln!(
            stderr,
            "the server at {url} does not serve {model}, so this process tries to load it; to have \
             the server load it on demand, add it to [models] of its configuration"
        );
        return Ok(None);
    };
    if stderr.is_terminal() {
        let _ = writeln!(stderr, "{name} on the server at {url}");
    }
    Ok(Some((client, name)))
}

/// The server that answers at the configured address, or else the newest one that uses `data_dir`, and its address.
async fn answering(
    file: &FileConfig,
    data_dir: &Path,
    key: Option<&str>,
) -> Option<(Client, String)> {
    let configured_key = file.server.api_keys.first().map(|key| key.expose_secret());
    // No server listens on port 0.
    let of_configuration =
        (file.server.port != 0).then(|| url(&file.server.host, file.server.port));
    let of_data_dir = address::read(data_dir).into_iter();
    let of_data_dir = of_data_dir.map(|at| url(&at.ip().to_string(), at.port()));
    // Another key cannot be one of this server.
    let client = |url: String| Some((Client::new(&url, key.or(configured_key)).ok()?, url));
    let known: Vec<_> =
        of_configuration.into_iter().chain(of_data_dir).filter_map(client).collect();
    // One that answers is not passed over for one that loads its models.
    for (client, url) in &known {
        if client.presence().await == Presence::Ready {
            return Some((client.clone(), url.clone()));
        }
    }
    for (client, url) in known {
        if is_ready(&client).await {
            return Some((client, url));
        }
    }
    None
}

/// Whether `model` is a name that [`in_this_process`] knows: one of `[models]`, or that of the bundled model.
fn is_loaded_here(file: &FileConfig, model: &str) -> bool {
    file.models.contains_key(model) || model == bundled::NAME
}

/// Whether a server answers. Waits for one that loads its models.
async fn is_ready(client: &Client) -> bool {
    let mut is_said = false;
    loop {
        match client.presence().await {
            Presence::Ready => return true,
            Presence::Absent => {
                if is_said {
                    let line = format!("the server at {} has ended", client.url());
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
                return false;
            }
            Presence::Loading(model) => {
                if !std::mem::replace(&mut is_said, true) {
                    let model = model.filter(|model| !model.is_empty());
                    let model = model.unwrap_or_else(|| "its models".into());
                    let line =
                        format!("waiting for the server at {}: it loads {model}", client.url());
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
                tokio::time::sleep(LOADING_PAUSE).await;
            }
        }
    }
}

/// The name among `models` of the model that a user calls `name`.
fn name_in(models: &[String], name: &str) -> Option<String> {
    let exact = models.iter().find(|known| *known == name);
    let known = exact.or_else(|| models.iter().find(|known| same_model(known, name))).cloned();
    known.or_else(|| {
        let (model, profile) = name.rsplit_once('@')?;
        Some(format!("{}@{profile}", name_in(models, model)?))
    })
}
