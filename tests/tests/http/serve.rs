//! Models in the hub's cache that operators serve while the server runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, bail};
use axum::http::{Method, Request as ClientRequest};
use steersman::config::FileConfig;
use steersman::models::{Models, Recipe, Recipes, Running, Settings};
use steersman_models::hub::Hub;
use steersman_tests::tiny_model;
use tempfile::TempDir;

use crate::on_demand::{Kind, Scripted};
use crate::*;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// A model of the cache with a scripted engine.
struct Cached {
    hub: Hub,
    scripted: Arc<Scripted>,
}

impl Recipe for Cached {
    fn folder(&self) -> Result<PathBuf> {
        self.hub.cached_or_error(&self.scripted.name)
    }

    fn bytes(&self) -> Result<u64> {
        self.folder().map(|_| 3)
    }

    fn start(&self) -> Result<Running> {
        self.scripted.start()
    }
}

/// A model of the configuration that has its files in this folder, and is not asked for.
struct At(PathBuf);

impl Recipe for At {
    fn folder(&self) -> Result<PathBuf> {
        Ok(self.0.clone())
    }

    fn bytes(&self) -> Result<u64> {
        Ok(3)
    }

    fn start(&self) -> Result<Running> {
        bail!("nobody asks for it")
    }
}

/// A server of `owner/tiny`, and of `owner/own` for the profile `own`, whose operator has the key `op`. The cache has
/// models that are served by nobody.
struct Server {
    app: Router,
    cache: TempDir,
    /// Those that were served.
    scripted: Arc<Mutex<Vec<Arc<Scripted>>>>,
}

impl Server {
    fn new() -> Self {
        Self::with(Wiring::default(), |_| Vec::new())
    }

    /// `configured` gets the folder of the cache, and returns the folders of further models of the configuration.
    fn with(wiring: Wiring, configured: impl FnOnce(&Path) -> Vec<PathBuf>) -> Self {
        enable_log();
        let cache = tempfile::tempdir().unwrap();
        for repo in ["owner/spare", "owner/foreign", "owner/half", "owner/broken", "owner/slow"] {
            let snapshot = snapshot(cache.path(), repo);
            fs::create_dir_all(&snapshot).unwrap();
            let refs = cache.path().join(folder_of(repo)).join("refs");
            fs::create_dir_all(&refs).unwrap();
            fs::write(refs.join("main"), SHA).unwrap();
            tiny_model(&snapshot);
        }
        let config = snapshot(cache.path(), "owner/foreign").join("config.json");
        let foreign = fs::read_to_string(&config).unwrap().replace("\"qwen3\"", "\"florence2\"");
        fs::write(config, foreign).unwrap();
        fs::remove_file(snapshot(cache.path(), "owner/half").join("tokenizer.json")).unwrap();

        let scripted = Arc::new(Mutex::new(Vec::new()));
        let known = scripted.clone();
        let recipes: Arc<Recipes> =
            Arc::new(move |hub: &Hub, id: &str| -> Result<Arc<dyn Recipe>> {
                let kind = if id == "owner/broken" { Kind::Broken } else { Kind::Ready };
                let script = if id == "owner/slow" { endless } else { answer };
                let starts = AtomicUsize::default();
                let scripted = Arc::new(Scripted { name: id.into(), script, kind, starts });
                known.lock().unwrap().push(scripted.clone());
                Ok(Arc::new(Cached { hub: hub.clone(), scripted }))
            });
        let models = Models::with_budget(engine(8, answer).0, 5, Duration::from_millis(300));
        let mut models = models.with_recipes(recipes);
        models.add(engine_of("owner/own", 8, answer).0, &["own".into()]);
        for (index, folder) in configured(cache.path()).into_iter().enumerate() {
            let name = format!("configured-{index}");
            let settings = Settings { name, keep_alive: None, pinned: false };
            models.add_on_demand(settings, Arc::new(At(folder)), &[]);
        }
        models.set_aliases([("gpt".into(), "owner/tiny".into())].into());
        let config =
            ServerConfig { admin_keys: vec!["op".to_string().into()], ..ServerConfig::default() };
        let hub = Hub {
            endpoint: "http://127.0.0.1:1".into(),
            cache: cache.path().into(),
            token: None,
            offline: true,
        };
        let app = steersman::app_with(models, &config, Wiring { hub: Some(hub), ..wiring });
        Self { app, cache, scripted }
    }

    async fn call(&self, method: Method, path: &str, key: &str, body: &Value) -> (u16, Value) {
        let request = ClientRequest::builder()
            .method(method)
            .uri(path)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .body(Body::from(body.to_string()));
        let response = send(&self.app, request.unwrap()).await;
        let status = response.status().as_u16();
        let bytes = bytes(response).await;
        (status, serde_json::from_slice(&bytes).unwrap_or_default())
    }

    async fn serve(&self, model: &str) -> (u16, Value) {
        self.call(Method::POST, "/v1/models/serve", "op", &json!({"model": model})).await
    }

    async fn withdraw(&self, model: &str) -> (u16, Value) {
        self.call(Method::DELETE, "/v1/models/serve", "op", &json!({"model": model})).await
    }

    async fn remove(&self, model: &str) -> (u16, Value) {
        self.call(Method::DELETE, "/api/delete", "op", &json!({"model": model})).await
    }

    /// Removes a model that was withdrawn, once it is unloaded.
    async fn remove_when_unloaded(&self, model: &str) {
        loop {
            match self.remove(model).await {
                (409, _) => tokio::time::sleep(Duration::from_millis(5)).await,
                (status, error) => break assert_eq!(status, 200, "{error}"),
            }
        }
    }

    async fn get(&self, path: &str) -> Value {
        self.call(Method::GET, path, "op", &Value::Null).await.1
    }

    /// Asks a model for an answer; returns the status and the code of the error.
    async fn ask(&self, model: &str, profile: Option<&str>) -> (u16, String) {
        let mut request = post(body(json!({"model": model})).to_string());
        if let Some(profile) = profile {
            request.headers_mut().insert("x-steersman-profile", profile.parse().unwrap());
        }
        let response = send(&self.app, request).await;
        let status = response.status().as_u16();
        let reply = json_of(response).await;
        (status, reply["error"]["code"].as_str().unwrap_or_default().to_string())
    }

    /// The state of `owner/spare`, where it is shown; `None` if it is shown nowhere.
    async fn state(&self) -> Option<String> {
        let of = |list: &Value, key: &str| {
            let found = list.as_array().unwrap().iter().find(|model| model[key] == "owner/spare");
            found.map(|model| model["state"].as_str().unwrap_or_default().to_string())
        };
        let listed = of(&self.get("/v1/models").await["data"], "id");
        assert_eq!(of(&self.get("/health").await["models"], "model"), listed);
        let tags = self.get("/api/tags").await;
        assert_eq!(of(&tags["models"], "name").is_some(), listed.is_some(), "{tags}");
        listed
    }

    /// Who has `owner/spare` served, as the list of downloads has it.
    async fn served_by(&self) -> Value {
        let list = self.get("/v1/downloads").await;
        let all = list["models"].as_array().unwrap();
        let entry = all.iter().find(|entry| entry["model"] == "owner/spare").unwrap();
        let own = &entry["models"][0];
        assert_eq!(own["model"], "owner/spare", "{list}");
        assert_eq!(entry["served"], !own["served_by"].is_null(), "{list}");
        own["served_by"].clone()
    }
}

/// A reply that ends with its client.
fn endless() -> Vec<Act> {
    vec![Say(Event::Answer("Once".into())), UntilCancelled]
}

fn folder_of(repo: &str) -> String {
    format!("models--{}", repo.replace('/', "--"))
}

fn snapshot(cache: &Path, repo: &str) -> PathBuf {
    cache.join(folder_of(repo)).join("snapshots").join(SHA)
}

/// Finding 12: a model that was downloaded had to be named in the configuration, and the server restarted.
#[tokio::test]
async fn an_operator_serves_a_model_of_the_cache_until_it_is_withdrawn() {
    let server = Server::new();
    assert_eq!((server.state().await, server.served_by().await), (None, Value::Null));
    assert_eq!(server.ask("owner/spare", None).await, (404, "model_not_found".into()));
    let toml = "[models.\"owner/spare\"]\npath = \"owner/spare\"\n";
    let served = |served: bool| json!({"model": "owner/spare", "served": served, "toml": toml});
    for _ in 0..2 {
        assert_eq!(server.serve("owner/spare").await, (200, served(true)));
    }
    assert_eq!(server.state().await.unwrap(), "on disk", "nothing has asked for it");
    assert_eq!(server.served_by().await, "operator");

    // As a model of [models] without a word more: for the profiles without a model of their own.
    for (model, profile) in [
        ("owner/spare", None),
        ("owner/spare@strict", None),
        ("owner/spare:latest", Some("strict")),
    ] {
        assert_eq!(server.ask(model, profile).await, (200, String::new()), "{model} {profile:?}");
    }
    for (model, profile) in [("owner/spare", Some("own")), ("owner/spare@own", None)] {
        assert_eq!(server.ask(model, profile).await, (404, "model_not_found".into()), "{model}");
    }
    assert_eq!(server.state().await.unwrap(), "loaded");
    let starts = || {
        let scripted = server.scripted.lock().unwrap();
        scripted.iter().map(|one| one.starts.load(Ordering::SeqCst)).sum::<usize>()
    };
    assert_eq!(starts(), 1);
    let health = server.get("/health").await;
    let own = health["models"].as_array().unwrap().iter().find(|own| own["model"] == "owner/spare");
    assert_eq!(own.unwrap()["expires_s"], Value::Null, "it has no keep_alive");

    // Its files stay while it is served.
    let files = snapshot(server.cache.path(), "owner/spare");
    let (status, error) = server.remove("owner/spare").await;
    assert_eq!(status, 409, "{error}");
    assert!(error.to_string().contains("is served; end that first"), "{error}");
    assert!(files.is_dir());

    assert_eq!(server.withdraw("owner/spare").await, (200, served(false)));
    assert_eq!((server.state().await, server.served_by().await), (None, Value::Null));
    for model in ["owner/spare", "owner/spare@strict"] {
        assert_eq!(server.ask(model, None).await, (404, "model_not_found".into()), "{model}");
    }
    let (status, error) = server.withdraw("owner/spare").await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("model_not_found")));

    // It is unloaded, as nothing uses it, and may be served again.
    let is_loaded = async || {
        let health = server.get("/health").await;
        health["engines"].as_array().unwrap().iter().any(|one| one["model"] == "owner/spare")
    };
    while is_loaded().await {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.serve("owner/spare").await.0, 200);
    assert_eq!(server.ask("owner/spare", None).await, (200, String::new()));
    assert_eq!(starts(), 2);
    assert_eq!(server.withdraw("owner/spare").await.0, 200);
    server.remove_when_unloaded("owner/spare").await;
    assert!(!files.exists());
    assert_eq!(server.serve("owner/spare").await.0, 404);
}

#[tokio::test]
async fn what_cannot_be_served_is_named() {
    let server = Server::new();
    for (key, body, status, code, words) in [
        ("other", json!({"model": "owner/spare"}), 401, "invalid_admin_key", "operator"),
        ("op", json!({}), 400, "missing_required_parameter", "owner/name"),
        ("op", json!({"model": 5}), 400, "invalid_type", "string"),
        ("op", json!({"model": "owner/spare", "to": "x"}), 400, "unknown_parameter", "`to`"),
        ("op", json!({"model": "../spare"}), 400, "invalid_value", "`../spare`"),
        ("op", json!({"model": "owner/foreign"}), 400, "invalid_value", "`florence2`"),
        ("op", json!({"model": "owner/half"}), 404, "model_not_found", "/v1/models/pull"),
        ("op", json!({"model": "owner/none"}), 404, "model_not_found", "/v1/models/pull"),
        // A short name is that of its repo, as for a download.
        ("op", json!({"model": "qwen3:4b"}), 404, "model_not_found", "Qwen3-4B"),
        ("op", json!({"model": "owner/tiny"}), 409, "model_configured", "the configuration"),
        ("op", json!({"model": "owner/own"}), 409, "model_configured", "the configuration"),
        ("op", json!({"model": "gpt"}), 409, "model_configured", "the configuration"),
    ] {
        let (found, error) = server.call(Method::POST, "/v1/models/serve", key, &body).await;
        assert_eq!((found, &error["error"]["code"]), (status, &json!(code)), "{body}: {error}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "`{words}` is not in {message}");
    }
    for (model, status) in [("owner/tiny", 409), ("gpt", 409), ("owner/spare", 404)] {
        assert_eq!(server.withdraw(model).await.0, status, "{model}");
    }
    let names = server.get("/v1/models").await["data"].as_array().unwrap().len();
    assert_eq!(names, 4, "owner/tiny, its profile, the model of `own`, and the alias");

    // One that cannot be loaded is an error of its requests, as one of the configuration.
    assert_eq!(server.serve("owner/broken").await.0, 200);
    assert_eq!(server.ask("owner/broken", None).await, (503, "model_load_failed".into()));
    assert_eq!(server.ask("owner/tiny", None).await.0, 200);
    fs::remove_dir_all(server.cache.path().join(folder_of("owner/broken"))).unwrap();
    assert_eq!(server.ask("owner/broken", None).await, (503, "model_not_downloaded".into()));
}

#[tokio::test]
async fn a_reload_keeps_a_model_that_is_served_unless_an_alias_has_its_name() {
    let (reloads, follows) = tokio::sync::watch::channel(None);
    let server =
        Server::with(Wiring { reloads: Some(follows), ..Wiring::default() }, |_| Vec::new());
    let reload = |aliases: &str| {
        let text = format!(
            "[server]\nadmin_keys = ['op']\n[model]\nname = 'owner/tiny'\n[aliases]\n{aliases}"
        );
        let (config, _) = FileConfig::parse(&text).unwrap().check().unwrap();
        reloads.send_replace(Some(Arc::new(config)));
    };
    assert_eq!(server.serve("owner/spare").await.0, 200);
    reload("new = 'owner/tiny'");
    while server.ask("new", None).await.0 != 200 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.ask("owner/spare", None).await.0, 200);
    reload("'owner/spare' = 'owner/tiny'");
    while server.get("/v1/models/owner/spare").await["alias_of"] != "owner/tiny" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.serve("owner/spare").await.0, 409);
    assert_eq!(server.withdraw("owner/spare").await.0, 409);
    let listed = server.get("/v1/models").await;
    let names = listed["data"].as_array().unwrap().iter().filter(|own| own["id"] == "owner/spare");
    assert_eq!(names.count(), 1, "{listed}");
}

/// The files of a model that was withdrawn were removed while it was loaded, and while requests had it.
#[tokio::test]
async fn a_model_that_requests_still_use_is_not_removed() {
    let server = Server::new();
    assert_eq!(server.serve("owner/slow").await.0, 200);
    let request = post(body(json!({"model": "owner/slow", "stream": true})).to_string());
    let reply = send(&server.app, request).await;
    assert_eq!(reply.status(), StatusCode::OK);
    assert_eq!(server.withdraw("owner/slow").await.0, 200);
    let (status, error) = server.remove("owner/slow").await;
    // As Ollama writes errors.
    let message = error["error"].as_str().unwrap_or_default();
    assert_eq!(status, 409, "{error}");
    assert!(message.contains("requests still use it"), "{error}");
    let files = snapshot(server.cache.path(), "owner/slow");
    assert!(files.is_dir());
    drop(reply);
    server.remove_when_unloaded("owner/slow").await;
    assert!(!files.exists());
}

/// A repo was removed while the configuration named its files by a path: where the cache knew no newest commit of it, and
/// where the path was a folder of links.
#[cfg(unix)]
#[tokio::test]
async fn files_that_the_configuration_names_by_a_path_are_not_removed() {
    let server = Server::with(Wiring::default(), |cache| {
        let links = cache.join("links");
        fs::create_dir(&links).unwrap();
        let weights = snapshot(cache, "owner/foreign").join("model.safetensors");
        std::os::unix::fs::symlink(weights, links.join("model.safetensors")).unwrap();
        fs::remove_file(cache.join(folder_of("owner/half")).join("refs/main")).unwrap();
        vec![snapshot(cache, "owner/half"), links]
    });
    let list = server.get("/v1/downloads").await;
    for (model, served) in [("owner/half", true), ("owner/foreign", true), ("owner/spare", false)] {
        let entry = list["models"].as_array().unwrap().iter().find(|own| own["model"] == model);
        assert_eq!(entry.unwrap()["served"], served, "{model}: {list}");
        let status = server.remove(model).await.0;
        assert_eq!(status, if served { 409 } else { 200 }, "{model}");
        assert_eq!(snapshot(server.cache.path(), model).is_dir(), served, "{model}");
    }
}
