//! Downloads from a hub on this machine.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use sha2::{Digest, Sha256};

use super::*;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// The families that can be loaded.
const KNOWN: &[&str] = &["llama", "qwen3"];

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
        let answers = fake.clone();
        let hub = hub_at(move |request: &Request| answers.answer(request));
        (fake, Hub { cache: cache.join("hub"), ..hub })
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

/// The client, without a cache, for a hub that gives these answers from a thread of its own.
pub(crate) fn hub_at(answer: impl Fn(&Request) -> Response + Clone + Send + Sync + 'static) -> Hub {
    let (address, ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            address.send(listener.local_addr().unwrap()).unwrap();
            let app = Router::new().fallback(move |request: Request| {
                let answer = answer(&request);
                async move { answer }
            });
            axum::serve(listener, app).await.unwrap();
        });
    });
    let endpoint = format!("http://{}", ready.recv().unwrap());
    Hub { endpoint, cache: "/nonexistent".into(), token: None, offline: false }
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
    let folder = hub.fetch("owner/tiny", KNOWN).unwrap();
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
    assert_eq!(hub.fetch("owner/tiny", KNOWN).unwrap(), folder);
    assert_eq!(fake.asked.lock().unwrap().len(), requests, "no further request to the hub");
    let offline = Hub { offline: true, endpoint: "http://127.0.0.1:1".into(), ..hub };
    assert_eq!(offline.fetch("owner/tiny", KNOWN).unwrap(), folder);
}

/// Ctrl-C between two shards left a snapshot that looked like a model and failed to load.
#[test]
fn incomplete_snapshot_downloads_only_missing_files() {
    let cache = tempfile::tempdir().unwrap();
    let (fake, hub) = fake(SHARDED).start(cache.path());
    let folder = hub.fetch("owner/tiny", KNOWN).unwrap();
    std::fs::remove_file(folder.join("model-2.safetensors")).unwrap();
    fake.asked.lock().unwrap().clear();
    assert_eq!(hub.fetch("owner/tiny", KNOWN).unwrap(), folder);
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
    let folder = hub.fetch("owner/tiny", KNOWN).unwrap();
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    assert_eq!(config, fake.files["config.json"]);
}

#[test]
fn failed_download_says_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let check = |hub: &Hub, repo: &str, words: &str| {
        let error = format!("{:#}", hub.fetch(repo, KNOWN).unwrap_err());
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
    right.fetch("owner/tiny", KNOWN).unwrap();

    let cache = tempfile::tempdir().unwrap();
    let (_, hub) = fake(&SHARDED[..2]).start(cache.path());
    check(&hub, "owner/other", "neither such a repo");
    check(&hub, "owner/tiny", "no safetensors weights");
    let nowhere = Hub { endpoint: "http://127.0.0.1:1".into(), ..hub };
    check(&nowhere, "owner/tiny", "cannot be reached; check the connection");
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

/// A GGUF file of the architecture `name` with one tensor of zeros of `bytes` bytes. It is ASCII.
pub fn gguf(name: &str, bytes: u64) -> Vec<u8> {
    gguf_of(name, bytes, 0)
}

/// As [`gguf`], with the type `kind` of its tensor: 0 is F32, 16 is IQ2_XXS.
fn gguf_of(name: &str, bytes: u64, kind: u32) -> Vec<u8> {
    gguf_with(name, ("token_embd.weight", bytes, kind), &[])
}

/// A GGUF file of the architecture `name` with one tensor, by name, bytes and type, and with further metadata.
fn gguf_with(
    name: &str,
    (tensor, bytes, kind): (&str, u64, u32),
    further: &[(&str, u32)],
) -> Vec<u8> {
    const U32: u32 = 4;
    const TEXT: u32 = 8;
    let mut file = b"GGUF".to_vec();
    let text = |file: &mut Vec<u8>, text: &str| {
        file.extend((text.len() as u64).to_le_bytes());
        file.extend(text.as_bytes());
    };
    file.extend(3_u32.to_le_bytes());
    // Tensors and keys.
    file.extend(1_u64.to_le_bytes());
    file.extend((4 + further.len() as u64).to_le_bytes());
    text(&mut file, "general.architecture");
    file.extend(TEXT.to_le_bytes());
    text(&mut file, name);
    let own = [("block_count", 1_u32), ("embedding_length", 32), ("attention.head_count", 1)];
    let own = own.map(|(key, value)| (format!("{name}.{key}"), value));
    let further = further.iter().map(|(key, value)| (key.to_string(), *value));
    for (key, value) in own.into_iter().chain(further) {
        text(&mut file, &key);
        file.extend(U32.to_le_bytes());
        file.extend(value.to_le_bytes());
    }
    text(&mut file, tensor);
    file.extend(2_u32.to_le_bytes());
    file.extend(32_u64.to_le_bytes());
    file.extend((bytes / (32 * 4)).to_le_bytes());
    file.extend(kind.to_le_bytes());
    file.extend(0_u64.to_le_bytes());
    let weights = file.len().next_multiple_of(32);
    file.resize(weights + usize::try_from(bytes).unwrap(), 0);
    file
}

/// A file of a repo as text.
fn text(file: Vec<u8>) -> &'static str {
    String::from_utf8(file).unwrap().leak()
}

#[test]
fn a_gguf_file_of_a_repo_is_downloaded_by_its_quantization() {
    let cache = tempfile::tempdir().unwrap();
    let (small, large) = (text(gguf("llama", 4096)), text(gguf("llama", 8192)));
    let files = [("tiny-Q4_K_M.gguf", small), ("tiny-Q8_0.gguf", large), ("README.md", "no")];
    let (fake, hub) = fake(&files).start(cache.path());
    let file = hub.fetch("owner/tiny", KNOWN).unwrap();
    assert_eq!(fake.downloaded(), ["tiny-Q4_K_M.gguf"]);
    assert!(file.ends_with("tiny-Q4_K_M.gguf"), "{}", file.display());
    assert_eq!(std::fs::read(&file).unwrap(), small.as_bytes());
    assert_eq!(hub.cached("owner/tiny").unwrap(), file);
    assert_eq!(hub.cached("owner/tiny:q4_k_m").unwrap(), file);
    assert_eq!(hub.cached("owner/tiny:Q8_0"), None);
    let other = hub.fetch("owner/tiny:Q8_0", KNOWN).unwrap();
    assert_eq!(std::fs::read(&other).unwrap(), large.as_bytes());
    assert_eq!(hub.cached("owner/tiny").unwrap(), file, "the default stays what it was");
    let error = format!("{:#}", hub.plan("owner/tiny:Q6_K").unwrap_err());
    assert!(error.contains("there is no GGUF file `Q6_K`; "), "{error}");
}

/// Files in parts were refused, with the advice to join them by hand.
#[test]
fn a_gguf_file_in_parts_is_downloaded_and_listed_as_one() {
    let cache = tempfile::tempdir().unwrap();
    let part = |no: u32, tensor| {
        let split = [("split.no", no), ("split.count", 2), ("split.tensors.count", 2)];
        text(gguf_with("llama", (tensor, 4096, 0), &split))
    };
    let names = ["tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"];
    let (one, two) = (part(0, "token_embd.weight"), part(1, "output.weight"));
    let (fake_hub, hub) = fake(&[(names[1], two), (names[0], one)]).start(cache.path());
    let first = hub.fetch("owner/tiny:Q8_0", KNOWN).unwrap();
    assert_eq!(fake_hub.downloaded(), names);
    assert!(first.ends_with(names[0]), "{}", first.display());
    assert_eq!(hub.cached("owner/tiny:Q8_0").unwrap(), first);
    let listed = crate::snapshots::list(&hub).unwrap();
    assert_eq!(listed[0].models, [(Some("Q8_0".into()), first.clone())]);
    let facts = crate::facts::Facts::read(&first).unwrap();
    assert_eq!(facts.parameters, 2 * 4096 / 4);
    assert_eq!(facts.file_bytes(), (one.len() + two.len()) as u64);
    // One that is missing is downloaded alone.
    std::fs::remove_file(first.with_file_name(names[1])).unwrap();
    assert_eq!(hub.cached("owner/tiny:Q8_0"), None);
    assert_eq!(hub.fetch("owner/tiny:Q8_0", KNOWN).unwrap(), first);
    // Another model's part is refused by its header.
    let (_, other) = fake(&[(names[0], one), (names[1], one)]).start(&cache.path().join("other"));
    let error = format!("{:#}", other.fetch("owner/tiny:Q8_0", KNOWN).unwrap_err());
    assert!(error.contains("it is part 1 of 2; download it again"), "{error}");
}

#[test]
fn a_download_continues_after_the_header() {
    let cache = tempfile::tempdir().unwrap();
    let file = text(gguf("llama", 4096));
    let (_, hub) = fake(&[("tiny-Q4_K_M.gguf", file)]).start(cache.path());
    let plan = hub.plan("owner/tiny").unwrap();
    assert_eq!(plan.bytes_here(), plan.bytes(), "the file is smaller than what is asked for first");
    let mut reports = Vec::new();
    hub.download(&plan, &mut |progress| reports.push(progress.done)).unwrap();
    assert_eq!(reports, [plan.bytes()], "nothing is asked for twice");
}

/// `pull` downloaded all weights of a model that could not be loaded.
#[test]
fn what_cannot_be_loaded_is_refused_before_its_weights_are_downloaded() {
    let config = ("config.json", r#"{"model_type": "florence2"}"#);
    let weights = [("tokenizer.json", "{}"), ("model.safetensors", "weights")];
    let safetensors = [config, weights[0], weights[1]];
    let unknown = [("tiny-Q4_K_M.gguf", text(gguf("rwkv7", 4096)))];
    let packed = [("tiny-Q4_K_M.gguf", text(gguf_of("llama", 4096, 19)))];
    let damaged = [("tiny-Q4_K_M.gguf", "<html>")];
    for (files, words) in [
        (
            &safetensors[..],
            "owner/tiny: the family `florence2` is not supported; supported are: llama",
        ),
        (&unknown, "the architecture `rwkv7` is not supported; supported are: llama"),
        (&packed, "has the type IQ1_S, which is not supported"),
        (&damaged, "it is not a GGUF file"),
    ] {
        let cache = tempfile::tempdir().unwrap();
        let (fake, hub) = fake(files).start(cache.path());
        let error = format!("{:#}", hub.fetch("owner/tiny", KNOWN).unwrap_err());
        assert!(error.contains(words), "`{words}` is not in {error}");
        assert!(
            !fake.downloaded().contains(&"model.safetensors".into()),
            "{:?}",
            fake.downloaded()
        );
        assert!(hub.cached("owner/tiny").is_none());
        let blobs = hub.cache.join("models--owner--tiny/blobs");
        let left: u64 =
            std::fs::read_dir(blobs).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum();
        assert!(left <= config.1.len() as u64, "{left} bytes are left");
    }
}
