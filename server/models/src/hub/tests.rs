//! Downloads from a hub on this machine.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use std::fs;

use sha2::{Digest, Sha256};

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
                let app =
                    Router::new().fallback(async move |request: Request| answers.answer(&request));
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
            return axum::Json(serde_json::json!({"sha": SHA, "siblings": files})).into_response();
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
    std::fs::write(plan.folder.root().join("blobs").join(format!("{}.part", digest("one"))), "on")
        .unwrap();
    std::fs::write(plan.folder.root().join("blobs").join(format!("{}.part", digest("two"))), "two")
        .unwrap();
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
    assert!(!plan.folder.root().join("blobs").join(digest("two")).exists());
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

#[test]
fn gguf_files_are_models_by_their_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny-q4_0.gguf");
    fs::write(&file, "GGUF").unwrap();
    let path = file.to_str().unwrap();
    assert_eq!(named_as(path).unwrap(), NamedAs::Folder(file.clone()));
    assert!(is_here(path).unwrap());
    assert_eq!(name_of_folder(&file), "tiny-q4_0");
    let error = named_as(folder.path().to_str().unwrap()).unwrap_err().to_string();
    assert!(error.contains("has no config.json; use the GGUF file in it"), "{error}");
    assert!(error.contains("tiny-q4_0.gguf"), "{error}");
    let other = folder.path().join("tiny.bin");
    fs::write(&other, "x").unwrap();
    let error = named_as(other.to_str().unwrap()).unwrap_err().to_string();
    assert!(error.contains("or a GGUF file"), "{error}");
}
