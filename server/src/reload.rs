//! Reload of the configuration on SIGHUP: keys, limits of profiles and aliases change while the server runs,
//! the rest needs a restart, which the log says.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use steersman_engine::policy::Storage;
use tokio::sync::watch;
use tokio::task::block_in_place;
use toml::{Table, Value};

use crate::check::problems_of_files;
use crate::config::{FILE_BYTES, FileConfig, Reloads, ServerConfig};
use crate::signals::Hangups;

/// Keys that take effect while the server runs, with `*` for any name.
const LIVE: [&str; 6] = [
    "server.api_keys",
    "server.admin_keys",
    "aliases.*",
    "profiles.*.api_keys",
    "profiles.*.limits.requests",
    "profiles.*.policy_headers",
];

/// The configuration file of a running server.
pub struct Reloader {
    path: PathBuf,
    storage: Storage,
    /// What the file had when the server started: what runs of the keys that need a restart.
    started: Table,
    /// What it had when it was last read without an error: what runs of the live keys.
    applied: Table,
    /// Applies the options of the command line.
    options: Box<dyn Fn(&mut FileConfig) + Send>,
    reloads: watch::Sender<Option<Arc<ServerConfig>>>,
    counts: Arc<ReloadCounts>,
}

/// How reloads have ended since the start, for metrics.
#[derive(Debug, Default)]
pub struct ReloadCounts {
    succeeded: AtomicU64,
    failed: AtomicU64,
    last_failed: AtomicBool,
}

impl ReloadCounts {
    /// Counts a reload.
    pub fn count(&self, success: bool) {
        let count = if success { &self.succeeded } else { &self.failed };
        count.fetch_add(1, Ordering::Relaxed);
        self.last_failed.store(!success, Ordering::Relaxed);
    }

    /// How many reloads succeeded.
    pub fn succeeded(&self) -> u64 {
        self.succeeded.load(Ordering::Relaxed)
    }

    /// How many reloads failed.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Whether the last reload succeeded; true before the first one.
    pub fn last_succeeded(&self) -> bool {
        !self.last_failed.load(Ordering::Relaxed)
    }
}

/// What a reload changes: keys of the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Keys whose values have taken effect.
    pub applied: Vec<String>,
    /// Keys whose values differ from what runs until a restart, also if an earlier reload named them.
    pub need_restart: Vec<String>,
}

impl Reloader {
    /// Begins with the file as it is. `options` applies the options of the command line; policies are compiled with the cache
    /// in `storage`, to find out whether a server would start with a file.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn new(
        path: &Path,
        storage: Storage,
        options: impl Fn(&mut FileConfig) + Send + 'static,
    ) -> Result<(Self, Reloads)> {
        let (reloads, receiver) = watch::channel(None);
        let (path, started, options) = (path.to_path_buf(), read(path)?, Box::new(options));
        let (applied, counts) = (started.clone(), Arc::default());
        Ok((Self { path, storage, started, applied, options, reloads, counts }, receiver))
    }

    /// Reads the file again and applies what can be applied.
    ///
    /// # Errors
    /// If it cannot be read or has a problem; then nothing changes.
    pub fn reload(&mut self) -> Result<Changes> {
        let done = self.apply();
        self.counts.count(done.is_ok());
        done
    }

    /// The counts of [`Self::reload`].
    pub fn counts(&self) -> Arc<ReloadCounts> {
        self.counts.clone()
    }

    fn apply(&mut self) -> Result<Changes> {
        let mut file = FileConfig::read(&self.path)?;
        (self.options)(&mut file);
        let source = file.source.clone();
        let (server, config) = file.check()?;
        let problems = problems_of_files(&server, &config, &self.storage).into_iter();
        let problems: Vec<_> = problems.map(|problem| source.locate(problem)).collect();
        ensure!(problems.is_empty(), "{}", source.message(&problems));
        let new = read(&self.path)?;
        let (applied, _) = changed(&self.applied, &new);
        let (_, need_restart) = changed(&self.started, &new);
        self.reloads.send_replace(Some(Arc::new(server)));
        self.applied = new;
        Ok(Changes { applied, need_restart })
    }

    /// Reloads at each of `hangups`, for ever.
    pub async fn run(mut self, mut hangups: Hangups) {
        while hangups.next().await {
            let path = self.path.display().to_string();
            // Policies that are not in the cache are compiled.
            match block_in_place(|| self.reload()) {
                Ok(Changes { applied, need_restart }) => {
                    let (applied, need_restart) = (applied.join(", "), need_restart.join(", "));
                    tracing::info!(path, applied, need_restart, "configuration reloaded");
                }
                Err(error) => {
                    // A line of the log is one line.
                    let error = format!("{error:#}").replace("\n ", "");
                    tracing::error!(
                        path,
                        error,
                        "configuration not reloaded; keeping the active one"
                    );
                }
            }
        }
    }
}

fn read(path: &Path) -> Result<Table> {
    let text = steersman_files::read_text(path, FILE_BYTES)
        .with_context(|| format!("reading the configuration {}", path.display()))?;
    text.parse().with_context(|| format!("in the configuration {}", path.display()))
}

/// The keys whose values differ: those that are live, and those that need a restart.
fn changed(old: &Table, new: &Table) -> (Vec<String>, Vec<String>) {
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    flatten("", old, &mut before);
    flatten("", new, &mut after);
    let mut keys: Vec<_> = before.keys().chain(after.keys()).collect();
    keys.sort();
    keys.dedup();
    let changed = keys.into_iter().filter(|key| before.get(*key) != after.get(*key));
    changed.cloned().partition(|key| is_live(key))
}

/// Values by their whole key.
fn flatten<'a>(prefix: &str, table: &'a Table, values: &mut BTreeMap<String, &'a Value>) {
    for (name, value) in table {
        let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        match value {
            Value::Table(table) => flatten(&key, table, values),
            value => drop(values.insert(key, value)),
        }
    }
}

fn is_live(key: &str) -> bool {
    LIVE.iter().any(|live| match live.split_once('*') {
        None => key == *live,
        Some((begin, end)) => {
            let name = key.strip_prefix(begin).and_then(|rest| rest.strip_suffix(end));
            name.is_some_and(|name| !name.is_empty())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_tells_what_it_applied_and_what_needs_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write("[server]\napi_keys = ['a']\nport = 1\n[profiles.p.limits]\nrequests = 1\n");
        let (mut reloader, reloads) =
            Reloader::new(&path, Storage::compile_cache(folder.path()), |file| {
                file.model.name = "mine".into();
            })
            .unwrap();
        assert_eq!(reloader.reload().unwrap(), Changes::default());
        write(
            "[server]\napi_keys = ['b']\nport = 2\nadmin_keys = ['c']\n[aliases]\n\"gpt.4\" = 'mine'\n\
             [profiles.p.limits]\nrequests = 2\nmax_tokens = 3\n",
        );
        let changes = reloader.reload().unwrap();
        let applied =
            ["aliases.gpt.4", "profiles.p.limits.requests", "server.admin_keys", "server.api_keys"];
        assert_eq!(changes.applied, applied);
        assert_eq!(changes.need_restart, ["profiles.p.limits.max_tokens", "server.port"]);
        // What needs a restart is compared with what runs: it was named once, and a file with the old value again was
        // said to need a restart.
        let again = reloader.reload().unwrap();
        assert_eq!((again.applied.len(), again.need_restart), (0, changes.need_restart));
        let server = reloads.borrow().clone().unwrap();
        assert_eq!((server.api_keys.len(), server.profiles["p"].requests), (1, 2));

        // A wrong file changes nothing, and the next one is compared with what is active.
        write("[server]\napi_keys = ['']\n");
        let error = format!("{:#}", reloader.reload().unwrap_err());
        assert!(error.contains("server.api_keys"), "{error}");
        write("[server\n");
        assert!(reloader.reload().is_err());
        // A server would not start with it: its operators learn that before they restart it.
        write("[profiles.team]\npolicies = ['defaul']\n");
        let error = format!("{:#}", reloader.reload().unwrap_err());
        assert!(
            error.contains("line 2: profiles.team.policies") && error.contains("defaul"),
            "{error}"
        );
        write("[models.x]\npath = '/absent/m'\n");
        let error = format!("{:#}", reloader.reload().unwrap_err());
        assert!(error.contains("line 2: models.x.path: /absent/m does not exist"), "{error}");
        let counts = reloader.counts();
        assert_eq!((counts.succeeded(), counts.failed(), counts.last_succeeded()), (3, 4, false));
        assert!(Arc::ptr_eq(&server, &reloads.borrow().clone().unwrap()));
        write("[server]\nport = 2\n");
        let changes = reloader.reload().unwrap();
        assert!(changes.applied.contains(&"server.api_keys".into()), "{changes:?}");
        assert_eq!(changes.need_restart, ["server.port"]);
        write("[server]\nport = 1\n");
        assert_eq!(reloader.reload().unwrap(), Changes::default());
        assert!(counts.last_succeeded());
    }
}
