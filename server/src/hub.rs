//! Locates a model's files: a local folder, a Hugging Face repo, or the bundled model.
//!
//! A repo is looked up in the cache that Python's tools share (`HF_HUB_CACHE`, `HF_HOME`). A complete
//! snapshot is used without contacting the hub, so the server starts offline, and weights change only
//! when the operator removes or updates the snapshot.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use serde_json::Value;

use crate::bundled;

/// The hub's public address.
const HUGGING_FACE: &str = "https://huggingface.co";

/// How often a failed download is retried.
const RETRIES: usize = 3;

/// Lists the shards of a sharded model.
const INDEX: &str = "model.safetensors.index.json";

/// A model whose files are on this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// The folder with `config.json`, weights and tokenizer.
    pub folder: PathBuf,
    /// Name of the folder, id of the repo, or name of the bundled model.
    pub name: String,
    /// Whether this is the bundled demonstration model.
    pub bundled: bool,
}

/// Finds the model that `[model] path` or `--model` names, downloading a repo that is not cached.
///
/// # Errors
/// If the model does not exist or cannot be downloaded; the message says what to do.
pub fn find(path: &str, data_dir: &Path) -> Result<Found> {
    if path.is_empty() {
        let folder = bundled::unpack(data_dir)?;
        return Ok(Found { folder, name: bundled::NAME.into(), bundled: true });
    }
    if let Some(folder) = local(path)? {
        let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
        return Ok(Found { folder, name, bundled: false });
    }
    let folder = Hub::from_env().fetch(path)?;
    Ok(Found { folder, name: path.into(), bundled: false })
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
fn is_repo_id(text: &str) -> bool {
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

    /// The folder with the files of `repo_id`, from the cache or from the hub.
    ///
    /// # Errors
    /// If the repo is unknown, requires a token or has no safetensors, or the network fails.
    pub fn fetch(&self, repo_id: &str) -> Result<PathBuf> {
        if let Some(snapshot) = self.cached(repo_id) {
            return Ok(snapshot);
        }
        self.may_download(repo_id)?;
        let main = Repo::model(repo_id.into());
        let cache = Cache::new(self.cache.clone());
        let api = self.api().with_context(|| format!("preparing to download {repo_id}"))?;
        let info = api.repo(main.clone()).info().map_err(|error| self.explain(error, repo_id))?;
        // All files come from one commit, even if the repo changes meanwhile.
        let pinned = Repo::with_revision(repo_id.into(), RepoType::Model, info.sha.clone());
        let snapshot = cache.repo(main.clone()).pointer_path(&info.sha);
        let pinned = api.repo(pinned);
        let fetch = |file: &str| {
            if snapshot.join(file).exists() {
                return Ok(());
            }
            pinned.download(file).map(drop).map_err(|error| self.explain(error, repo_id))
        };

        let files: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
        ensure!(files.contains(&"config.json"), "{repo_id} is not a model: it has no config.json");
        for file in files.iter().filter(|file| is_text_file(file)) {
            fetch(file)?;
        }
        let shards: Vec<String> = if files.contains(&INDEX) {
            // MTP layers may be in files that the index does not list.
            let beside = |file: &&&str| file.starts_with("mtp") && file.ends_with(".safetensors");
            let beside = files.iter().filter(beside).map(|file| file.to_string());
            shards(&snapshot.join(INDEX))?.into_iter().chain(beside).collect()
        } else {
            let weights = |file: &&&str| !file.contains('/') && file.ends_with(".safetensors");
            files.iter().filter(weights).map(|file| file.to_string()).collect()
        };
        ensure!(!shards.is_empty(), "{repo_id} has no safetensors weights");
        for shard in &shards {
            ensure!(
                files.contains(&shard.as_str()),
                "{repo_id} has no {shard}, which {INDEX} lists"
            );
            fetch(shard)?;
        }
        cache.repo(main).create_ref(&info.sha).context("recording the snapshot in the cache")?;
        Ok(snapshot)
    }

    /// The complete snapshot of `repo_id` in the cache, if there is one.
    fn cached(&self, repo_id: &str) -> Option<PathBuf> {
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
fn is_complete(snapshot: &Path) -> bool {
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
        asked: Mutex<Vec<String>>,
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
                let names = self.files.keys().map(|name| serde_json::json!({"rfilename": name}));
                let names: Vec<_> = names.collect();
                return axum::Json(serde_json::json!({"sha": SHA, "siblings": names}))
                    .into_response();
            }
            let prefix = format!("/owner/tiny/resolve/{SHA}/");
            let file = path.strip_prefix(&prefix).and_then(|name| self.files.get(name));
            let Some(file) = file else { return StatusCode::NOT_FOUND.into_response() };
            let range = header(header::RANGE).unwrap();
            let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            let from: usize = from.parse().unwrap();
            let to: usize = to.parse().unwrap_or(file.len() - 1);
            Response::builder()
                .status(StatusCode::PARTIAL_CONTENT)
                .header("x-repo-commit", SHA)
                .header(header::ETAG, format!("\"{}\"", path.replace('/', "-")))
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
        FakeHub { files, token: None, asked: Mutex::default() }
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
