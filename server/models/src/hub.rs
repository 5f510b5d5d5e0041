//! Hugging Face repos: the cache on this machine, and downloads to it.
//!
//! A repo is looked up in the cache that Python's tools share (`HF_HUB_CACHE`, `HF_HOME`). A complete
//! snapshot is used without contacting the hub, so the server starts offline, and weights change only
//! when the operator removes or updates the snapshot.
//!
//! A download has two steps: [`Hub::plan`] asks the hub what there is, and [`Hub::download`] gets what is
//! missing. Files are kept under their final names only once they have the size and the SHA-256 that the
//! hub says, so an interrupted or damaged download is never taken for a model.
//!
//! A hub, a mirror, or who is on the way to it may be hostile. Nothing that it sends is a path (`cache.rs`), and its
//! answers are bounded in bytes and time (`client.rs`, `plan.rs`, `transfer.rs`).
//!
//! ```text
//! cache.rs    the folder of a repo in the cache
//! client.rs   requests to the hub: limits, redirects, the token
//! plan.rs     which files a download consists of
//! gguf.rs     which GGUF files of a repo, and whether it can be loaded, by its header
//! transfer.rs gets them, continues, verifies
//! search.rs   which models there are, by words
//! ```

mod cache;
mod client;
mod gguf;
mod plan;
mod search;
mod transfer;

use std::collections::BTreeSet;
use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use steersman_files::FilePath;

pub use self::cache::PREFIX;
pub(crate) use self::cache::RepoFolder;
use self::client::{Client, HubError, Times};
pub use self::client::{Stop, is_disk_full};
use self::plan::{INDEX, Info, LIST_BYTES, Sibling, shards};
pub use self::plan::{Plan, Progress, Wanted};
pub use self::search::{Form, Match, Weights, check_words};
use self::transfer::Failure;
pub use crate::named::is_repo_id;
use crate::named::{is_model_id, split_id};

/// The hub's public address.
const HUGGING_FACE: &str = "https://huggingface.co";

/// Most bytes of the file with the token.
const TOKEN_BYTES: u64 = 4 << 10;

/// A hub and its cache on this machine.
#[derive(Debug, Clone)]
pub struct Hub {
    /// `https://huggingface.co`, or a mirror.
    pub endpoint: String,
    /// The cache folder, in the layout of Python's `huggingface_hub`.
    pub cache: PathBuf,
    /// Token for private and gated repos.
    pub token: Option<String>,
    /// Whether to stay off the network.
    pub offline: bool,
}

impl Hub {
    /// Reads `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `HF_TOKEN` (or the token stored by
    /// `hf auth login`) and `HF_HUB_OFFLINE`.
    pub fn from_env() -> Self {
        let var = |name| env::var(name).ok().filter(|value| !value.is_empty());
        let home = var("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
            env::home_dir().unwrap_or_default().join(".cache").join("huggingface")
        });
        let token = || {
            let text = steersman_files::read_text(&home.join("token"), TOKEN_BYTES).ok()?;
            Some(text.trim().to_string()).filter(|token| !token.is_empty())
        };
        let off = ["0", "false", "no", "off"];
        Self {
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| HUGGING_FACE.into()),
            cache: var("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            token: var("HF_TOKEN").or_else(token),
            offline: var("HF_HUB_OFFLINE")
                .is_some_and(|value| !off.contains(&value.to_lowercase().as_str())),
        }
    }

    /// The folder with the files of the model `id`, or its GGUF file, from the cache or from the hub, with a progress
    /// bar. `families` are those that can be loaded.
    ///
    /// # Errors
    /// If the repo is unknown, requires a token or has no weights, its family is none of `families`, or the network
    /// fails.
    pub fn fetch(&self, id: &str, families: &[&str]) -> Result<PathBuf> {
        if let Some(model) = self.cached(id) {
            return Ok(model);
        }
        let plan = self.plan(id)?;
        plan.check_family(families)?;
        let bar = bar(&plan);
        let folder = self.download(&plan, &mut |progress| show(&bar, progress));
        bar.finish_and_clear();
        folder
    }

    /// The folder with the files of the model `id` in the cache, or its GGUF file.
    ///
    /// # Errors
    /// If the cache does not have it.
    pub fn cached_or_error(&self, id: &str) -> Result<PathBuf> {
        self.cached(id).with_context(|| {
            format!("{id} is not on this machine; download it with `steersman pull {id}`")
        })
    }

    /// Asks the hub for the files of the model `id`, and gets the small ones that tell which others are needed; of a GGUF
    /// file its header.
    ///
    /// # Errors
    /// If the repo is unknown, requires a token or has no weights, a GGUF file is none that can be loaded, or the network
    /// fails.
    pub fn plan(&self, id: &str) -> Result<Plan> {
        self.plan_until(id, &Stop::default())
    }

    /// As [`Hub::plan`], until `stop` ends it.
    ///
    /// # Errors
    /// As [`Hub::plan`]; if it was stopped.
    pub fn plan_until(&self, id: &str, stop: &Stop) -> Result<Plan> {
        ensure!(is_model_id(id), "{id} is not a Hugging Face repo id (owner/name)");
        self.may_download(id)?;
        self.plan_with(&self.client(stop), id)
    }

    fn plan_with(&self, client: &Client, id: &str) -> Result<Plan> {
        let (repo_id, tag) = split_id(id);
        let path = format!("/api/models/{repo_id}/revision/main?blobs=true");
        let answer = client.get_whole(&path, LIST_BYTES);
        let answer = answer.map_err(|error| self.explain(error, repo_id))?;
        let (info, commit) = Info::parse(&answer, repo_id)?;
        let mut plan = Plan::new(&self.cache, repo_id, commit)?;
        let names: BTreeSet<&str> =
            info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
        if tag.is_some() || gguf::is_of_gguf(&names) {
            self.plan_gguf(client, &mut plan, &info, tag)?;
            return Ok(plan);
        }
        ensure!(names.contains("config.json"), "{repo_id} is not a model: it has no config.json");
        let get_now = |name: &str| {
            let file = info.siblings.iter().find(|file| file.rfilename == name);
            let file: Vec<_> =
                file.into_iter().map(|file| plan.wanted(file)).collect::<Result<_>>()?;
            let got = transfer::get(client, &plan.only(file), &mut |_| {});
            got.map_err(|failure| self.explain_failure(failure, repo_id))
        };
        let weights: BTreeSet<String> = if names.contains(INDEX) {
            get_now(INDEX)?;
            // MTP layers may be in files that the index does not list.
            let beside = |file: &&&str| file.starts_with("mtp") && file.ends_with(".safetensors");
            let beside = names.iter().filter(beside).map(|file| file.to_string());
            shards(&plan.snapshot.join(INDEX))?.into_iter().chain(beside).collect()
        } else {
            let weights = |file: &&&str| !file.contains('/') && file.ends_with(".safetensors");
            names.iter().filter(weights).map(|file| file.to_string()).collect()
        };
        ensure!(!weights.is_empty(), "{repo_id} has no safetensors weights");
        if let Some(shard) = weights.iter().find(|shard| !names.contains(shard.as_str())) {
            bail!("{repo_id} has no {}, which {INDEX} lists", shard.escape_debug());
        }
        // The small files first: without them a snapshot is not taken for a model.
        let (texts, others): (Vec<&Sibling>, Vec<_>) =
            info.siblings.iter().partition(|file| is_text_file(&file.rfilename));
        let is_wanted = |file: &&Sibling| weights.contains(&file.rfilename);
        let wanted = texts.into_iter().chain(others.into_iter().filter(is_wanted));
        let wanted = wanted.map(|file| plan.wanted(file)).collect::<Result<_>>()?;
        get_now("config.json")?;
        plan.set_files(wanted)?;
        Ok(plan)
    }

    /// Plans the download of a GGUF file with its parts, and checks their headers.
    fn plan_gguf(
        &self,
        client: &Client,
        plan: &mut Plan,
        info: &Info,
        tag: Option<&str>,
    ) -> Result<()> {
        let repo_id = plan.repo_id.clone();
        let names: Vec<_> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
        let parts = gguf::choose(&names, tag).map_err(|problem| anyhow!("{repo_id}: {problem}"))?;
        let of_repo = |name: &&str| info.siblings.iter().find(|file| file.rfilename == *name);
        let parts = parts.iter().filter_map(of_repo).map(|file| plan.wanted(file));
        let parts = parts.collect::<Result<_>>()?;
        plan.set_gguf(parts)?;
        if !plan.files.iter().all(|file| plan.has(file)) {
            let checked = gguf::check(client, plan);
            checked.map_err(|failure| self.explain_failure(failure, &repo_id))?;
        }
        Ok(())
    }

    /// Gets the files of `plan` that are missing, checks them, and returns the model's path. `report` learns how
    /// far it is.
    ///
    /// # Errors
    /// If the network fails, or a file is not what the hub says; the message tells what is left. What has
    /// arrived stays, and the next download continues there.
    pub fn download(&self, plan: &Plan, report: &mut dyn FnMut(&Progress<'_>)) -> Result<PathBuf> {
        self.download_until(plan, report, &Stop::default())
    }

    /// As [`Hub::download`], until `stop` ends it.
    ///
    /// # Errors
    /// As [`Hub::download`]; if it was stopped.
    pub fn download_until(
        &self,
        plan: &Plan,
        report: &mut dyn FnMut(&Progress<'_>),
        stop: &Stop,
    ) -> Result<PathBuf> {
        self.download_with(&self.client(stop), plan, report)
    }

    fn download_with(
        &self,
        client: &Client,
        plan: &Plan,
        report: &mut dyn FnMut(&Progress<'_>),
    ) -> Result<PathBuf> {
        transfer::get(client, plan, report).map_err(|failure| {
            let (here, total) = (plan.bytes_here(), plan.bytes());
            let left = total.saturating_sub(here);
            let repo_id = &plan.repo_id;
            self.explain_failure(failure, repo_id).context(format!(
                "{here} of {total} bytes of {repo_id} are on this machine, {left} are left; the same command \
                 continues there"
            ))
        })?;
        plan.folder.set_commit(&plan.sha).context("recording the snapshot in the cache")?;
        Ok(plan.model())
    }

    /// The complete snapshot of the model `id` in the cache, or its GGUF file, if there is one.
    pub fn cached(&self, id: &str) -> Option<PathBuf> {
        let (repo_id, tag) = split_id(id);
        let folder = RepoFolder::new(&self.cache, repo_id).ok()?;
        let snapshot = folder.snapshot(&folder.commit()?);
        if tag.is_none() && is_complete(&snapshot) {
            return Some(snapshot);
        }
        gguf::in_folder(&snapshot, tag)
    }

    pub(crate) fn may_download(&self, repo_id: &str) -> Result<()> {
        ensure!(
            !self.offline,
            "{repo_id} is not in the cache {}, and HF_HUB_OFFLINE forbids downloads",
            self.cache.display()
        );
        Ok(())
    }

    fn client(&self, stop: &Stop) -> Client {
        Client::new(self, Times::default(), stop)
    }

    fn explain_failure(&self, failure: Failure, repo_id: &str) -> anyhow::Error {
        match failure {
            Failure::Hub(error) => self.explain(error, repo_id),
            Failure::Other(error) => error,
        }
    }

    fn explain(&self, error: HubError, repo_id: &str) -> anyhow::Error {
        let status = match &error {
            HubError::Status(status) => Some(*status),
            // Not of the hub: there is nothing to explain.
            HubError::Stopped => return error.into(),
            HubError::Cache(_) => {
                let cache = self.cache.display();
                let context = format!(
                    "the cache {cache} cannot be written: make room, or choose another with HF_HUB_CACHE"
                );
                return anyhow!(error).context(context);
            }
            HubError::Request(cause) if is_unreached(cause) => {
                let context = format!(
                    "{repo_id}: there is no such folder here, nor a finished download, and {} cannot be reached; check \
                     the connection, or name another hub with HF_ENDPOINT. What has arrived of a download is kept",
                    self.endpoint
                );
                return anyhow!(error).context(context);
            }
            _ => None,
        };
        let advice = match (status, &self.token) {
            (Some(401 | 403), None) => {
                "the repo does not exist, or is private or gated: accept its terms on its page, then \
                 set HF_TOKEN (https://huggingface.co/settings/tokens)"
            }
            (Some(401), Some(_)) => {
                "the token in HF_TOKEN is not valid, or the repo does not exist"
            }
            (Some(403), Some(_)) => {
                "the token has no access: accept the repo's terms on its page, or use another token"
            }
            (Some(404), _) => "there is neither such a repo nor a local folder of this name",
            (Some(429), _) => "the hub limits the request rate: wait, or set HF_TOKEN",
            _ => "the download failed; try again, it resumes where it stopped",
        };
        anyhow!(error).context(format!("{repo_id} from {}: {advice}", self.endpoint))
    }
}

/// Whether a request has failed before its server answered.
fn is_unreached(error: &ureq::Error) -> bool {
    matches!(error, ureq::Error::HostNotFound | ureq::Error::ConnectionFailed | ureq::Error::Io(_))
}

/// A progress bar for a download.
pub fn bar(plan: &Plan) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} ({eta} left)",
    );
    let bar = ProgressBar::new(plan.bytes());
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Moves a progress bar.
pub fn show(bar: &ProgressBar, progress: &Progress<'_>) {
    if bar.message() != progress.file {
        bar.set_message(progress.file.to_string());
    }
    bar.set_position(progress.done);
}

/// Whether a file is a small one that models need: configuration, tokenizer or template.
fn is_text_file(name: &str) -> bool {
    let known = [".json", ".jinja", ".tiktoken"].iter().any(|end| name.ends_with(end))
        || ["tokenizer.model", "merges.txt", "vocab.txt"].contains(&name);
    known && !name.contains('/')
}

/// The models of a snapshot: each has a path, and GGUF files have a quantization.
pub(crate) fn models_in(snapshot: &Path) -> Vec<(Option<String>, PathBuf)> {
    let mut models = Vec::new();
    if is_complete(snapshot) {
        models.push((None, snapshot.to_path_buf()));
    }
    models.extend(gguf::all_in(snapshot).into_iter().map(|(tag, file)| (Some(tag), file)));
    models
}

/// Whether a snapshot has all files that a model of safetensors needs: an interrupted download has fewer.
fn is_complete(snapshot: &Path) -> bool {
    let has = |file: &str| FilePath::new(file).is_ok_and(|file| file.within(snapshot).is_file());
    let weights = match shards(&snapshot.join(INDEX)) {
        Ok(shards) => shards.iter().all(|shard| has(shard)),
        Err(_) => has("model.safetensors"),
    };
    weights && has("config.json") && has("tokenizer.json")
}

#[cfg(all(test, unix))]
mod hostile;
#[cfg(test)]
pub(crate) mod tests;
