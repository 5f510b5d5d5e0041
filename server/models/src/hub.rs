//! Hugging Face repos: the cache on this machine, and downloads to it.
//!
//! A repo is looked up in the cache that Python's tools share (`HF_HUB_CACHE`, `HF_HOME`). A complete
//! snapshot is used without contacting the hub, so the server starts offline, and weights change only
//! when the operator removes or updates the snapshot.
//!
//! A download has two steps: [`Hub::plan`] asks the hub what there is, and [`Hub::download`] gets what is
//! missing. Files are kept under their final names only once they have the size and the SHA-256 that the
//! hub says, so an interrupted or damaged download is never taken for a model.

use std::env;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use hf_hub::api::Progress as HubProgress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use steersman_gguf::files;
pub use steersman_gguf::files::name_of as name_of_folder;

/// The hub's public address.
const HUGGING_FACE: &str = "https://huggingface.co";

/// How often a failed download is retried.
const RETRIES: usize = 3;

/// Lists the shards of a sharded model.
const INDEX: &str = "model.safetensors.index.json";

/// Bytes that are hashed at a time.
const HASHED_BYTES: usize = 1 << 20;

/// What the path of a model in a configuration or on the command line is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamedAs<'a> {
    /// Empty: the bundled model.
    Nothing,
    /// A folder with a model, or a GGUF file.
    Folder(PathBuf),
    /// The id of a Hugging Face repo.
    Repo(&'a str),
}

/// What `path` is. A folder or file that exists takes precedence over a repo.
///
/// # Errors
/// If it is neither a folder with a model, nor a GGUF file, nor the id of a repo.
pub fn named_as(path: &str) -> Result<NamedAs<'_>> {
    if path.is_empty() {
        return Ok(NamedAs::Nothing);
    }
    Ok(local(path)?.map_or(NamedAs::Repo(path), NamedAs::Folder))
}

/// Whether the files of the model that `path` names are on this machine; otherwise they would be
/// downloaded.
///
/// # Errors
/// If `path` names no model, or may not be downloaded.
pub fn is_here(path: &str) -> Result<bool> {
    if path.is_empty() {
        return Ok(true);
    }
    if let Some(folder) = local(path)? {
        if files::is_gguf(&folder) {
            return Ok(true);
        }
        let tokenizer = folder.join("tokenizer.json");
        ensure!(tokenizer.is_file(), "{path} is not a model: it has no tokenizer.json");
        return Ok(true);
    }
    let hub = Hub::from_env();
    let cached = hub.cached(path).is_some();
    if !cached {
        hub.may_download(path)?;
    }
    Ok(cached)
}

/// The folder that `path` names; `None` if it is a repo id.
fn local(path: &str) -> Result<Option<PathBuf>> {
    let folder = Path::new(path);
    if !folder.exists() {
        ensure!(
            is_repo_id(path),
            "{path} is neither a folder nor a Hugging Face repo id (owner/name)"
        );
        return Ok(None);
    }
    if files::is_gguf(folder) {
        // Not resolved: the hub's cache links to files without an ending.
        let file = std::path::absolute(folder).with_context(|| format!("reading {path}"))?;
        return Ok(Some(file));
    }
    let folder = folder.canonicalize().with_context(|| format!("reading {path}"))?;
    ensure!(
        folder.is_dir(),
        "{path} is a file; use the folder that contains config.json, or a GGUF file"
    );
    if !folder.join("config.json").is_file() {
        let gguf = gguf_in(&folder);
        let gguf = gguf.map(|file| format!("; use the GGUF file in it: {}", file.display()));
        bail!("{path} is not a model: it has no config.json{}", gguf.unwrap_or_default());
    }
    Ok(Some(folder))
}

/// The first GGUF file in a folder.
fn gguf_in(folder: &Path) -> Option<PathBuf> {
    let entries = folder.read_dir().ok()?.flatten().map(|entry| entry.path());
    entries.filter(|path| files::is_gguf(path)).min()
}

/// Whether `text` is `owner/name`, in the characters that the hub allows.
pub fn is_repo_id(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let part = |part: &str| !part.is_empty() && !part.starts_with('.') && part.chars().all(allowed);
    text.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

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
        let cache =
            var("HF_HUB_CACHE").map_or_else(Cache::from_env, |path| Cache::new(path.into()));
        let off = ["0", "false", "no", "off"];
        Self {
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| HUGGING_FACE.into()),
            cache: cache.path().clone(),
            token: var("HF_TOKEN").or_else(|| cache.token()),
            offline: var("HF_HUB_OFFLINE")
                .is_some_and(|value| !off.contains(&value.to_lowercase().as_str())),
        }
    }

    /// The folder with the files of `repo_id`, from the cache or from the hub, with a progress bar.
    ///
    /// # Errors
    /// If the repo is unknown, requires a token or has no safetensors, or the network fails.
    pub fn fetch(&self, repo_id: &str) -> Result<PathBuf> {
        if let Some(snapshot) = self.cached(repo_id) {
            return Ok(snapshot);
        }
        let plan = self.plan(repo_id)?;
        let bar = bar(&plan);
        let folder = self.download(&plan, &mut |progress| show(&bar, progress));
        bar.finish_and_clear();
        folder
    }

    /// The folder with the files of `repo_id` in the cache.
    ///
    /// # Errors
    /// If the cache has no complete snapshot.
    pub fn cached_or_error(&self, repo_id: &str) -> Result<PathBuf> {
        self.cached(repo_id).with_context(|| {
            format!("{repo_id} is not on this machine; download it with `steersman pull {repo_id}`")
        })
    }

    /// Asks the hub for the files of `repo_id`, and gets the small ones that tell which others are needed.
    ///
    /// # Errors
    /// If the repo is unknown, requires a token or has no safetensors, or the network fails.
    pub fn plan(&self, repo_id: &str) -> Result<Plan> {
        ensure!(is_repo_id(repo_id), "{repo_id} is not a Hugging Face repo id (owner/name)");
        self.may_download(repo_id)?;
        let main = Repo::model(repo_id.into());
        let cache = Cache::new(self.cache.clone());
        let api = self.api().with_context(|| format!("preparing to download {repo_id}"))?;
        let request = api.repo(main.clone()).info_request().query("blobs", "true");
        let read = request.call().and_then(|mut reply| reply.body_mut().read_json::<Info>());
        let info = read.map_err(|error| self.explain(ApiError::from(Box::new(error)), repo_id))?;
        ensure!(
            !info.sha.is_empty() && info.sha.chars().all(|c| c.is_ascii_alphanumeric()),
            "the hub's answer about {repo_id} names the commit `{}`, which is no digest",
            info.sha.escape_debug()
        );
        let snapshot = cache.repo(main).pointer_path(&info.sha);
        let mut plan = Plan {
            repo_id: repo_id.into(),
            blobs: snapshot.ancestors().nth(2).unwrap_or(&self.cache).join("blobs"),
            sha: info.sha,
            snapshot,
            files: Vec::new(),
        };
        let names: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
        ensure!(names.contains(&"config.json"), "{repo_id} is not a model: it has no config.json");
        let weights: Vec<String> = if names.contains(&INDEX) {
            let index = info.siblings.iter().find(|file| file.rfilename == INDEX);
            let index: Vec<_> = index.into_iter().map(Wanted::from).collect();
            self.get(&api, &Plan { files: index, ..plan.clone() }, &mut |_| {})?;
            // MTP layers may be in files that the index does not list.
            let beside = |file: &&&str| file.starts_with("mtp") && file.ends_with(".safetensors");
            let beside = names.iter().filter(beside).map(|file| file.to_string());
            shards(&plan.snapshot.join(INDEX))?.into_iter().chain(beside).collect()
        } else {
            let weights = |file: &&&str| !file.contains('/') && file.ends_with(".safetensors");
            names.iter().filter(weights).map(|file| file.to_string()).collect()
        };
        ensure!(!weights.is_empty(), "{repo_id} has no safetensors weights");
        for shard in &weights {
            ensure!(
                names.contains(&shard.as_str()),
                "{repo_id} has no {shard}, which {INDEX} lists"
            );
        }
        let stays = |name: &str| {
            Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
        };
        if let Some(name) = weights.iter().find(|name| !stays(name)) {
            bail!("{repo_id} has a file `{}` outside of its folder", name.escape_debug());
        }
        // The small files first: without them a snapshot is not taken for a model.
        let (texts, others): (Vec<_>, Vec<_>) =
            info.siblings.iter().partition(|file| is_text_file(&file.rfilename));
        let is_wanted = |file: &&&Sibling| weights.contains(&file.rfilename);
        let wanted = texts.iter().chain(others.iter().filter(is_wanted));
        plan.files = wanted.map(|file| Wanted::from(*file)).collect();
        let config = plan.files.iter().filter(|file| file.name == "config.json").cloned().collect();
        self.get(&api, &Plan { files: config, ..plan.clone() }, &mut |_| {})?;
        Ok(plan)
    }

    /// Gets the files of `plan` that are missing, checks them, and returns the folder. `report` learns how
    /// far it is.
    ///
    /// # Errors
    /// If the network fails, or a file is not what the hub says; the message tells what is left. What has
    /// arrived stays, and the next download continues there.
    pub fn download(&self, plan: &Plan, report: &mut dyn FnMut(&Progress<'_>)) -> Result<PathBuf> {
        let api = self.api().with_context(|| format!("preparing to download {}", plan.repo_id))?;
        self.get(&api, plan, report).map_err(|error| {
            let (here, total) = (plan.bytes_here(), plan.bytes());
            let left = total.saturating_sub(here);
            error.context(format!(
                "{here} of {total} bytes of {} are on this machine, {left} are left; the same                  command continues there",
                plan.repo_id
            ))
        })?;
        let cache = Cache::new(self.cache.clone());
        let main = cache.repo(Repo::model(plan.repo_id.clone()));
        main.create_ref(&plan.sha).context("recording the snapshot in the cache")?;
        Ok(plan.snapshot.clone())
    }

    fn get(&self, api: &Api, plan: &Plan, report: &mut dyn FnMut(&Progress<'_>)) -> Result<()> {
        // All files come from one commit, even if the repo changes meanwhile.
        let pinned = Repo::with_revision(plan.repo_id.clone(), RepoType::Model, plan.sha.clone());
        let pinned = api.repo(pinned);
        let mut done = 0;
        for file in &plan.files {
            if !plan.has(file) {
                plan.drop_finished_part(file);
                self.get_file(&pinned, plan, file, done, report)?;
            }
            done += file.size.unwrap_or(0);
            report(&Progress { file: &file.name, done, total: plan.bytes() });
        }
        Ok(())
    }

    fn get_file(
        &self,
        repo: &ApiRepo,
        plan: &Plan,
        file: &Wanted,
        before: u64,
        report: &mut dyn FnMut(&Progress<'_>),
    ) -> Result<()> {
        let (name, total) = (file.name.as_str(), plan.bytes());
        let counter = Counter { name, before, of_file: 0, total, report };
        let path = repo
            .download_with_progress(name, counter)
            .map_err(|error| self.explain(error, &plan.repo_id))?;
        let Err(problem) = file.verify(&path) else { return Ok(()) };
        // It must not be found again: neither under its name nor as the content that the name points to.
        if let Ok(blob) = path.canonicalize() {
            let _ = fs::remove_file(blob);
        }
        let _ = fs::remove_file(&path);
        Err(problem.context(format!("{name} of {} was deleted again", plan.repo_id)))
    }

    /// The complete snapshot of `repo_id` in the cache, if there is one.
    pub fn cached(&self, repo_id: &str) -> Option<PathBuf> {
        let cache = Cache::new(self.cache.clone());
        let config = cache.repo(Repo::model(repo_id.into())).get("config.json")?;
        config.parent().filter(|snapshot| is_complete(snapshot)).map(Path::to_path_buf)
    }

    fn may_download(&self, repo_id: &str) -> Result<()> {
        ensure!(
            !self.offline,
            "{repo_id} is not in the cache {}, and HF_HUB_OFFLINE forbids downloads",
            self.cache.display()
        );
        Ok(())
    }

    fn api(&self) -> Result<Api, ApiError> {
        ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_endpoint(self.endpoint.trim_end_matches('/').into())
            .with_token(self.token.clone())
            .with_retries(RETRIES)
            .with_user_agent("steersman", env!("CARGO_PKG_VERSION"))
            .build()
    }

    fn explain(&self, error: ApiError, repo_id: &str) -> anyhow::Error {
        let status = status(&error);
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
        anyhow!("{error}").context(format!("{repo_id} from {}: {advice}", self.endpoint))
    }
}

/// The hub's answer about a repo.
#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

/// A file of a repo. Mirrors may leave out sizes and digests.
#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

/// What the hub knows about the content of a large file.
#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
}

/// What a download of one repo consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// `owner/name`
    pub repo_id: String,
    /// The commit.
    pub sha: String,
    /// The folder that the files appear in.
    pub snapshot: PathBuf,
    /// The folder with their contents.
    blobs: PathBuf,
    /// The files that a model needs.
    pub files: Vec<Wanted>,
}

/// A file of a repo that a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Name in the repo.
    pub name: String,
    /// Bytes, if the hub tells.
    pub size: Option<u64>,
    /// SHA-256 of its content in hex digits, if the hub tells.
    pub sha256: Option<String>,
}

/// How far a download is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file that is downloaded.
    pub file: &'a str,
    /// Bytes of all files that are on this machine.
    pub done: u64,
    /// Bytes of all files.
    pub total: u64,
}

impl From<&Sibling> for Wanted {
    fn from(file: &Sibling) -> Self {
        let sha256 = file.lfs.as_ref().and_then(|lfs| lfs.sha256.clone());
        Self { name: file.rfilename.clone(), size: file.size, sha256 }
    }
}

impl Wanted {
    /// Checks the file at `path` against what the hub says.
    fn verify(&self, path: &Path) -> Result<()> {
        let bytes = fs::metadata(path)?.len();
        if let Some(size) = self.size {
            ensure!(bytes == size, "it has {bytes} bytes, the hub says {size}");
        }
        if let Some(expected) = &self.sha256 {
            let found = sha256(path).with_context(|| format!("reading {}", path.display()))?;
            ensure!(
                found.eq_ignore_ascii_case(expected),
                "its SHA-256 is {found}, the hub says {expected}"
            );
        }
        Ok(())
    }
}

impl Plan {
    /// Bytes of all files whose size the hub tells.
    pub fn bytes(&self) -> u64 {
        self.files.iter().filter_map(|file| file.size).sum()
    }

    /// Bytes of its weights.
    pub fn weight_bytes(&self) -> u64 {
        let weights = self.files.iter().filter(|file| file.name.ends_with(".safetensors"));
        weights.filter_map(|file| file.size).sum()
    }

    /// Bytes of them that are on this machine, unfinished files included.
    pub fn bytes_here(&self) -> u64 {
        let here = |file: &Wanted| {
            if self.has(file) { file.size.unwrap_or(0) } else { self.part_bytes(file) }
        };
        self.files.iter().map(here).sum()
    }

    fn has(&self, file: &Wanted) -> bool {
        let found = fs::metadata(self.snapshot.join(&file.name));
        found.is_ok_and(|found| file.size.is_none_or(|size| size == found.len()))
    }

    /// The unfinished content of a file, whose name in the cache is its SHA-256.
    fn part(&self, file: &Wanted) -> Option<PathBuf> {
        Some(self.blobs.join(file.sha256.as_ref()?).with_extension("part"))
    }

    fn part_bytes(&self, file: &Wanted) -> u64 {
        self.part(file).and_then(|part| fs::metadata(part).ok()).map_or(0, |part| part.len())
    }

    /// A part that has all bytes cannot be continued: the hub refuses to send what follows the end.
    fn drop_finished_part(&self, file: &Wanted) {
        if let Some(part) = self.part(file)
            && file.size.is_some_and(|size| self.part_bytes(file) >= size)
        {
            let _ = fs::remove_file(part);
        }
    }
}

/// Counts the bytes of one file.
struct Counter<'a> {
    name: &'a str,
    /// Bytes of the files before it.
    before: u64,
    of_file: u64,
    total: u64,
    report: &'a mut dyn FnMut(&Progress<'_>),
}

impl HubProgress for Counter<'_> {
    /// Called again when a download continues, before the bytes that are here already.
    fn init(&mut self, _: usize, _: &str) {
        self.of_file = 0;
    }

    fn update(&mut self, bytes: usize) {
        self.of_file += bytes as u64;
        let done = self.before + self.of_file;
        (self.report)(&Progress { file: self.name, done, total: self.total });
    }

    fn finish(&mut self) {}
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

/// SHA-256 of a file in hex digits.
fn sha256(path: &Path) -> std::io::Result<String> {
    let (mut file, mut sha) = (File::open(path)?, Sha256::new());
    let mut bytes = vec![0; HASHED_BYTES];
    loop {
        match file.read(&mut bytes)? {
            0 => return Ok(hex::encode(sha.finalize())),
            read => sha.update(&bytes[..read]),
        }
    }
}

/// The HTTP status of an error of the hub.
fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        ApiError::TooManyRetries(error) => status(error),
        _ => None,
    }
}

/// Whether a file is a small one that models need: configuration, tokenizer or template.
fn is_text_file(name: &str) -> bool {
    let known = [".json", ".jinja", ".tiktoken"].iter().any(|end| name.ends_with(end))
        || ["tokenizer.model", "merges.txt", "vocab.txt"].contains(&name);
    known && !name.contains('/')
}

/// Whether a snapshot has all files that a model needs: an interrupted download has fewer.
pub(crate) fn is_complete(snapshot: &Path) -> bool {
    let has = |file: &str| snapshot.join(file).is_file();
    let weights = match shards(&snapshot.join(INDEX)) {
        Ok(shards) => shards.iter().all(|shard| has(shard)),
        Err(_) => has("model.safetensors"),
    };
    weights && has("config.json") && has("tokenizer.json")
}

/// The distinct files that an index lists.
fn shards(index: &Path) -> Result<Vec<String>> {
    let context = || format!("reading {}", index.display());
    let text = std::fs::read_to_string(index).with_context(context)?;
    let index: Value = serde_json::from_str(&text).with_context(context)?;
    let Some(map) = index["weight_map"].as_object() else { bail!("{INDEX} has no weight_map") };
    let mut shards: Vec<_> = map.values().filter_map(Value::as_str).map(str::to_string).collect();
    shards.sort();
    shards.dedup();
    Ok(shards)
}

#[cfg(test)]
mod tests;
