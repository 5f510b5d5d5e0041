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
    /// A folder with a model.
    Folder(PathBuf),
    /// The id of a Hugging Face repo.
    Repo(&'a str),
}

/// What `path` is. A folder that exists takes precedence over a repo.
///
/// # Errors
/// If it is neither a folder with a model nor the id of a repo.
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
    ensure!(folder.is_dir(), "{path} is a file; use the folder that contains config.json");
    let folder = folder.canonicalize().with_context(|| format!("reading {path}"))?;
    ensure!(folder.join("config.json").is_file(), "{path} is not a model: it has no config.json");
    Ok(Some(folder))
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
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use axum::Router;
    use axum::body::Body;
    use axum::extract::Request;
    use axum::http::{StatusCode, header};
    use axum::response::{IntoResponse, Response};

    use super::*;

    const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

    /// A hub with one repo `owner/tiny`, private if it has a token.
    struct FakeHub {
        files: BTreeMap<&'static str, &'static str>,
        token: Option<&'static str>,
        /// The file that arrives with other bytes than the hub says.
        damaged: Option<&'static str>,
        asked: Mutex<Vec<String>>,
    }

    fn digest(text: &str) -> String {
        hex::encode(Sha256::digest(text))
    }

    impl FakeHub {
        /// Serves it from a thread of its own; returns it with the client for it, which has an
        /// empty cache in `cache`.
        fn start(self, cache: &Path) -> (Arc<Self>, Hub) {
            let fake = Arc::new(self);
            let (address, ready) = std::sync::mpsc::channel();
            let answers = fake.clone();
            std::thread::spawn(move || {
                let runtime =
                    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async move {
                    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                    address.send(listener.local_addr().unwrap()).unwrap();
                    let app = Router::new()
                        .fallback(async move |request: Request| answers.answer(&request));
                    axum::serve(listener, app).await.unwrap();
                });
            });
            let endpoint = format!("http://{}", ready.recv().unwrap());
            let cache = cache.join("hub");
            (fake, Hub { endpoint, cache, token: None, offline: false })
        }

        fn answer(&self, request: &Request) -> Response {
            let path = request.uri().path();
            self.asked.lock().unwrap().push(path.to_string());
            let header =
                |name| request.headers().get(name).map(|value| value.to_str().unwrap().to_string());
            if let Some(token) = self.token
                && header(header::AUTHORIZATION) != Some(format!("Bearer {token}"))
            {
                return StatusCode::UNAUTHORIZED.into_response();
            }
            if path == "/api/models/owner/tiny/revision/main" {
                assert_eq!(request.uri().query(), Some("blobs=true"), "sizes are asked for");
                let file = |(name, text): (&&str, &&str)| {
                    let mut file = serde_json::json!({"rfilename": name, "size": text.len()});
                    if name.ends_with(".safetensors") {
                        file["lfs"] = serde_json::json!({"sha256": digest(text)});
                    }
                    file
                };
                let files: Vec<_> = self.files.iter().map(file).collect();
                return axum::Json(serde_json::json!({"sha": SHA, "siblings": files}))
                    .into_response();
            }
            let prefix = format!("/owner/tiny/resolve/{SHA}/");
            let name = path.strip_prefix(&prefix).unwrap_or_default();
            let Some(file) = self.files.get(name) else {
                return StatusCode::NOT_FOUND.into_response();
            };
            let is_large = name.ends_with(".safetensors");
            let etag = if is_large { digest(file) } else { path.replace('/', "-") };
            let file = if self.damaged == Some(name) { "???" } else { file };
            let range = header(header::RANGE).unwrap();
            let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            let from: usize = from.parse().unwrap();
            let to: usize = to.parse().unwrap_or(file.len() - 1);
            if from >= file.len() {
                return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
            }
            Response::builder()
                .status(StatusCode::PARTIAL_CONTENT)
                .header("x-repo-commit", SHA)
                .header(header::ETAG, format!("\"{etag}\""))
                .header(header::CONTENT_RANGE, format!("bytes {from}-{to}/{}", file.len()))
                .body(Body::from(&file[from..=to]))
                .unwrap()
        }

        /// The files that were downloaded.
        fn downloaded(&self) -> Vec<String> {
            let asked = self.asked.lock().unwrap();
            let names = asked.iter().filter_map(|path| path.rsplit_once(&format!("{SHA}/")));
            let mut names: Vec<_> = names.map(|(_, name)| name.to_string()).collect();
            names.sort();
            names.dedup();
            names
        }
    }

    fn fake(files: &[(&'static str, &'static str)]) -> FakeHub {
        let files = files.iter().copied().collect();
        FakeHub { files, token: None, damaged: None, asked: Mutex::default() }
    }

    const SHARDED: &[(&str, &str)] = &[
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("chat_template.jinja", "{{ x }}"),
        ("README.md", "no"),
        ("original/config.json", "no"),
        ("consolidated.safetensors", "the same weights once more"),
        ("model-1.safetensors", "one"),
        ("model-2.safetensors", "two"),
        ("mtp.safetensors", "drafts"),
        (
            "model.safetensors.index.json",
            r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors",
                               "c": "model-1.safetensors"}}"#,
        ),
    ];

    #[test]
    fn repo_is_downloaded_once_and_then_found_offline() {
        let cache = tempfile::tempdir().unwrap();
        let (fake, hub) = fake(SHARDED).start(cache.path());
        let folder = hub.fetch("owner/tiny").unwrap();
        let wanted = [
            "chat_template.jinja",
            "config.json",
            "model-1.safetensors",
            "model-2.safetensors",
            "model.safetensors.index.json",
            "mtp.safetensors",
            "tokenizer.json",
        ];
        assert_eq!(fake.downloaded(), wanted);
        for name in wanted {
            assert_eq!(std::fs::read_to_string(folder.join(name)).unwrap(), fake.files[name]);
        }
        let requests = fake.asked.lock().unwrap().len();
        assert_eq!(hub.fetch("owner/tiny").unwrap(), folder);
        assert_eq!(fake.asked.lock().unwrap().len(), requests, "no further request to the hub");
        let offline = Hub { offline: true, endpoint: "http://127.0.0.1:1".into(), ..hub };
        assert_eq!(offline.fetch("owner/tiny").unwrap(), folder);
    }

    /// Ctrl-C between two shards left a snapshot that looked like a model and failed to load.
    #[test]
    fn incomplete_snapshot_downloads_only_missing_files() {
        let cache = tempfile::tempdir().unwrap();
        let (fake, hub) = fake(SHARDED).start(cache.path());
        let folder = hub.fetch("owner/tiny").unwrap();
        std::fs::remove_file(folder.join("model-2.safetensors")).unwrap();
        fake.asked.lock().unwrap().clear();
        assert_eq!(hub.fetch("owner/tiny").unwrap(), folder);
        assert_eq!(fake.downloaded(), ["model-2.safetensors"]);
    }

    #[test]
    fn plan_says_how_much_is_here_and_progress_ends_with_everything() {
        let cache = tempfile::tempdir().unwrap();
        let (fake, hub) = fake(SHARDED).start(cache.path());
        let plan = hub.plan("owner/tiny").unwrap();
        let size = |name: &str| fake.files[name].len() as u64;
        let unwanted = ["README.md", "original/config.json", "consolidated.safetensors"];
        let all: u64 = fake.files.keys().map(|name| size(name)).sum();
        assert_eq!(plan.bytes(), all - unwanted.iter().map(|name| size(name)).sum::<u64>());
        // Planning needs the list of shards and the configuration.
        let planned = size(INDEX) + size("config.json");
        assert_eq!(plan.bytes_here(), planned);
        // Two bytes of a shard arrived before, and all of another, which was not renamed.
        std::fs::write(plan.blobs.join(format!("{}.part", digest("one"))), "on").unwrap();
        std::fs::write(plan.blobs.join(format!("{}.part", digest("two"))), "two").unwrap();
        assert_eq!(plan.bytes_here(), planned + 2 + 3);
        let mut reports = Vec::new();
        let folder = hub.download(&plan, &mut |p| reports.push((p.done, p.total))).unwrap();
        assert_eq!(reports.last(), Some(&(plan.bytes(), plan.bytes())));
        assert!(reports.is_sorted(), "{reports:?}");
        for shard in ["model-1.safetensors", "model-2.safetensors"] {
            assert_eq!(std::fs::read_to_string(folder.join(shard)).unwrap(), fake.files[shard]);
        }
        assert_eq!(plan.bytes_here(), plan.bytes());
    }

    #[test]
    fn file_that_is_not_what_the_hub_says_is_not_kept() {
        let cache = tempfile::tempdir().unwrap();
        let (_, hub) =
            FakeHub { damaged: Some("model-2.safetensors"), ..fake(SHARDED) }.start(cache.path());
        let plan = hub.plan("owner/tiny").unwrap();
        let error = format!("{:#}", hub.download(&plan, &mut |_| {}).unwrap_err());
        for words in ["model-2.safetensors", "deleted", "SHA-256", "are left", "continues there"] {
            assert!(error.contains(words), "`{words}` is not in `{error}`");
        }
        assert!(hub.cached("owner/tiny").is_none());
        assert!(!plan.snapshot.join("model-2.safetensors").exists());
        assert!(!plan.blobs.join(digest("two")).exists());
        assert!(plan.snapshot.join("model-1.safetensors").exists(), "the others stay");
    }

    #[test]
    fn interrupted_download_resumes() {
        let cache = tempfile::tempdir().unwrap();
        let (fake, hub) = fake(SHARDED).start(cache.path());
        let blob = format!("-owner-tiny-resolve-{SHA}-config.json");
        let blobs = hub.cache.join("models--owner--tiny/blobs");
        std::fs::create_dir_all(&blobs).unwrap();
        // hf-hub replaces what follows the last dot of the blob's name.
        std::fs::write(blobs.join(blob).with_extension("part"), "{").unwrap();
        let folder = hub.fetch("owner/tiny").unwrap();
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        assert_eq!(config, fake.files["config.json"]);
    }

    #[test]
    fn failed_download_says_what_to_do() {
        let cache = tempfile::tempdir().unwrap();
        let check = |hub: &Hub, repo: &str, words: &str| {
            let error = format!("{:#}", hub.fetch(repo).unwrap_err());
            assert!(error.contains(words), "`{words}` is not in `{error}`");
        };
        let mut gated = fake(SHARDED);
        gated.token = Some("hf_right");
        let (_, hub) = gated.start(cache.path());
        check(&hub, "owner/tiny", "set HF_TOKEN");
        let wrong = Hub { token: Some("hf_wrong".into()), ..hub.clone() };
        check(&wrong, "owner/tiny", "the token in HF_TOKEN is not valid");
        check(&Hub { offline: true, ..hub.clone() }, "owner/tiny", "HF_HUB_OFFLINE");
        let right = Hub { token: Some("hf_right".into()), ..hub };
        right.fetch("owner/tiny").unwrap();

        let cache = tempfile::tempdir().unwrap();
        let (_, hub) = fake(&SHARDED[..2]).start(cache.path());
        check(&hub, "owner/other", "neither such a repo");
        check(&hub, "owner/tiny", "no safetensors weights");
        let nowhere = Hub { endpoint: "http://127.0.0.1:1".into(), ..hub };
        check(&nowhere, "owner/tiny", "the download failed");
    }

    #[test]
    fn repo_ids_have_an_owner_and_a_name() {
        for (text, expected) in [
            ("mlx-community/Qwen3.5-4B-4bit", true),
            ("owner/name/more", false),
            ("./models/x", false),
            ("/models/x", false),
            ("../x", false),
            ("name", false),
            ("owner/", false),
            ("owner/na me", false),
        ] {
            assert_eq!(is_repo_id(text), expected, "{text}");
        }
    }

    #[test]
    fn only_files_that_a_model_needs_are_downloaded() {
        for (name, expected) in [
            ("config.json", true),
            ("chat_template.jinja", true),
            ("merges.txt", true),
            ("README.md", false),
            ("model.gguf", false),
            ("onnx/config.json", false),
        ] {
            assert_eq!(is_text_file(name), expected, "{name}");
        }
    }
}
