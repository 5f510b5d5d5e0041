//! Models that are loaded on demand, with scripted engines: names, states, and requests that keep their model.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, bail};
use steersman::config::FileConfig;
use steersman::models::{Models, Recipe, Running, Settings};
use steersman_tests::bundled_model;
use tokio::runtime::Handle;

use crate::*;

/// A model that takes three of the five bytes that there are.
pub struct Scripted {
    pub name: String,
    pub script: fn() -> Vec<Act>,
    pub kind: Kind,
    pub starts: AtomicUsize,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Ready,
    /// Its files are not there.
    Missing,
    /// Its files are damaged.
    Broken,
}

impl Recipe for Scripted {
    fn folder(&self) -> Result<PathBuf> {
        if self.kind == Kind::Missing {
            bail!("owner/{} is not on this machine", self.name);
        }
        Ok(bundled_model())
    }

    fn bytes(&self) -> Result<u64> {
        self.folder().map(|_| 3)
    }

    fn start(&self) -> Result<Running> {
        self.starts.fetch_add(1, Ordering::SeqCst);
        if self.kind == Kind::Broken {
            bail!("/secret/path/model.safetensors is damaged");
        }
        let (queue, script) = (Arc::new(Queue::new(8)), self.script);
        let (engine, _) = engine_on(queue.clone(), &self.name, move |_| script());
        let runtime = Handle::current();
        let thread = steersman_engine::EngineThread::spawn(move || {
            while !queue.is_stopping() {
                runtime.block_on(tokio::time::sleep(Duration::from_millis(1)));
            }
            queue.end();
        })?;
        Ok((engine, thread))
    }
}

/// A model's name, what its engine does, and its kind.
type ScriptedModel = (&'static str, fn() -> Vec<Act>, Kind);

/// `owner/tiny` and models on demand, of which one fits at a time.
fn app_of(models: &[ScriptedModel]) -> (Router, Vec<Arc<Scripted>>) {
    let (tiny, _) = engine(8, answer);
    let mut all = Models::with_budget(tiny, 5, Duration::from_millis(300));
    let mut recipes = Vec::new();
    for &(name, script, kind) in models {
        let starts = AtomicUsize::default();
        let recipe = Arc::new(Scripted { name: name.into(), script, kind, starts });
        recipes.push(recipe.clone());
        let settings = Settings { name: name.into(), keep_alive: None, pinned: false };
        all.add_on_demand(settings, recipe, &[]);
    }
    all.set_aliases([("gpt".into(), "a".into()), ("strict-b".into(), "b@strict".into())].into());
    (steersman::app(all, &ServerConfig::default()), recipes)
}

const READY: Kind = Kind::Ready;

async fn get(app: &Router, path: &str) -> Value {
    let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
    json_of(send(app, request).await).await
}

#[tokio::test]
async fn keys_limits_and_aliases_follow_the_configuration() {
    let (reloads, follows) = tokio::sync::watch::channel(None);
    let config = |key: &str, alias: &str| {
        let text = format!(
            "[server]\napi_keys = ['{key}']\n[model]\nname = 'owner/tiny'\n[aliases]\n{alias} = 'owner/tiny'"
        );
        FileConfig::parse(&text).unwrap().check().unwrap().0
    };
    let (engine, _) = engine(8, answer);
    let models = Models::from(engine);
    let first = config("old", "gpt");
    models.set_aliases(first.aliases.clone());
    let wiring = Wiring { reloads: Some(follows), ..Wiring::default() };
    let app = steersman::app_with(models, &first, wiring);
    let status = async |key: &str, model: &str| {
        let mut request = post(body(json!({"model": model})).to_string());
        request
            .headers_mut()
            .insert(header::AUTHORIZATION, format!("Bearer {key}").parse().unwrap());
        send(&app, request).await.status().as_u16()
    };
    assert_eq!((status("old", "gpt").await, status("new", "gpt").await), (200, 401));
    reloads.send_replace(Some(Arc::new(config("new", "gpt-5"))));
    while status("new", "gpt-5").await != 200 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!((status("old", "gpt-5").await, status("new", "gpt").await), (401, 404));
}

/// The states of `a` and `b`, where they are shown.
async fn states(app: &Router) -> [String; 2] {
    let health = get(app, "/health").await;
    let list = get(app, "/v1/models").await;
    ["a", "b"].map(|name| {
        let find = |list: &Value, key: &str| {
            let list = list.as_array().unwrap();
            list.iter().find(|model| model[key] == name).unwrap()["state"].clone()
        };
        let (healthy, listed) = (find(&health["models"], "model"), find(&list["data"], "id"));
        assert_eq!(healthy, listed);
        listed.as_str().unwrap().into()
    })
}

async fn ask(app: &Router, model: &str) -> (StatusCode, Value) {
    chat(app, body(json!({"model": model}))).await
}

#[tokio::test]
async fn a_model_is_loaded_when_it_is_asked_for_and_leaves_for_another() {
    let (app, recipes) = app_of(&[("a", answer, READY), ("b", answer, READY)]);
    let starts = || recipes.iter().map(|r| r.starts.load(Ordering::SeqCst)).collect::<Vec<_>>();
    assert_eq!(states(&app).await, ["on disk", "on disk"]);
    for (model, profile, expected) in [
        ("a", "default", ["loaded", "on disk"]),
        ("a@strict", "strict", ["loaded", "on disk"]),
        ("gpt", "default", ["loaded", "on disk"]),
        ("gpt@strict:latest", "strict", ["loaded", "on disk"]),
        ("strict-b", "strict", ["on disk", "loaded"]),
        ("b:latest", "default", ["on disk", "loaded"]),
        ("owner/tiny", "default", ["on disk", "loaded"]),
        ("a", "default", ["loaded", "on disk"]),
    ] {
        let (status, reply) = ask(&app, model).await;
        assert_eq!(status, StatusCode::OK, "{model}: {reply}");
        assert_eq!(
            (&reply["model"], &reply["steersman"]["profile"]),
            (&json!(model), &json!(profile))
        );
        assert_eq!(states(&app).await, expected, "{model}");
    }
    assert_eq!(starts(), [2, 1]);
    // A wrong name, profile or body unloads nothing.
    for model in ["c", "a@none", "b@", "strict-b@default", "owner/tiny@a"] {
        assert_eq!(ask(&app, model).await.0, StatusCode::NOT_FOUND, "{model}");
    }
    let (status, _) = chat(&app, body(json!({"model": "b", "temperature": 9}))).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!((states(&app).await, starts()), (["loaded".into(), "on disk".into()], vec![2, 1]));
}

#[tokio::test]
async fn models_are_described_whether_or_not_they_are_loaded() {
    let (app, _) = app_of(&[("a", answer, READY), ("b", answer, Kind::Missing)]);
    assert_eq!(ask(&app, "a").await.0, StatusCode::OK);
    let list = get(&app, "/v1/models").await;
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|m| m["id"].clone()).collect();
    assert_eq!(ids, ["owner/tiny", "a", "b", "owner/tiny@strict", "gpt", "strict-b"]);
    let gpt = get(&app, "/v1/models/gpt").await;
    assert_eq!((&gpt["alias_of"], &gpt["state"]), (&json!("a"), &json!("loaded")), "{gpt}");
    assert_eq!(
        (&gpt["family"], &gpt["quantization"]),
        (&json!("qwen3_5"), &json!("4 bits in groups of 64"))
    );
    assert!(gpt["size"].as_u64().unwrap() > 10_000_000, "{gpt}");
    let absent = get(&app, "/v1/models/b").await;
    assert_eq!((&absent["state"], &absent["size"]), (&json!("missing"), &Value::Null), "{absent}");

    let health = get(&app, "/health").await;
    assert_eq!(health["models"][2]["state"], "missing", "{health}");

    let names = |list: Value| -> Vec<Value> {
        list["models"].as_array().unwrap().iter().map(|model| model["name"].clone()).collect()
    };
    let tags = names(get(&app, "/api/tags").await);
    assert_eq!(tags, ["owner/tiny", "a", "owner/tiny@strict", "gpt"]);
    let (status, _) = ask(&app, "owner/tiny").await;
    assert_eq!(status, StatusCode::OK);
    let loaded = get(&app, "/api/ps").await;
    assert!(loaded["models"][0]["context_length"].as_u64() > Some(0), "{loaded}");
    assert_eq!(names(loaded), ["owner/tiny", "a", "owner/tiny@strict", "gpt"]);
    let metrics = axum::http::Request::get("/metrics").body(Body::empty()).unwrap();
    let metrics = bytes(send(&app, metrics).await).await;
    let metrics = String::from_utf8(metrics.to_vec()).unwrap();
    for line in [
        "steersman_model_loads_total{model=\"a\"} 1",
        "steersman_model_loaded{model=\"a\"} 1",
        "steersman_model_loaded{model=\"b\"} 0",
        "steersman_queue_length{model=\"a\"} 0",
    ] {
        assert!(metrics.contains(line), "`{line}` is not in {metrics}");
    }
}

/// Sends a body of Ollama's to `a`; returns the status and the last line.
async fn ollama(app: &Router, mut body: Value) -> (u16, Value) {
    body["model"] = body.get("model").cloned().unwrap_or_else(|| "a".into());
    let request = axum::http::Request::post("/api/generate").body(body.to_string().into());
    let response = send(app, request.unwrap()).await;
    let status = response.status().as_u16();
    let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
    (status, serde_json::from_str(text.lines().last().unwrap()).unwrap())
}

/// Seconds until `a` is unloaded, as `/health` has them, once it has this state.
async fn expires(app: &Router, state: &str) -> Value {
    loop {
        let health = get(app, "/health").await;
        let model = &health["models"][1];
        if model["state"] == state {
            return model["expires_s"].clone();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn keep_alive_of_a_request_decides_how_long_its_model_stays() {
    let (app, recipes) = app_of(&[("a", answer, READY)]);
    let ask = async |keep_alive: Value| {
        let (status, last) = ollama(&app, json!({"prompt": "Hi", "keep_alive": keep_alive})).await;
        assert_eq!((status, &last["done_reason"]), (200, &json!("stop")), "{last}");
    };
    for (keep_alive, least, most) in [
        (json!("10m"), 590, 600),
        (json!("1h30m"), 5390, 5400),
        (json!(120), 110, 120),
        (json!("90"), 80, 90),
        (json!(90.5), 80, 90),
    ] {
        ask(keep_alive.clone()).await;
        let seconds = expires(&app, "loaded").await.as_u64().unwrap();
        assert!((least..=most).contains(&seconds), "{keep_alive}: {seconds}");
    }
    // Without a limit, as the configuration of this model says too.
    for keep_alive in [json!(-1), json!("-1m"), json!("-1"), Value::Null, json!(1e300)] {
        ask(keep_alive).await;
        assert_eq!(expires(&app, "loaded").await, Value::Null);
    }
    ask(json!("20ms")).await;
    expires(&app, "on disk").await;
    ask(json!(0)).await;
    expires(&app, "on disk").await;
    assert_eq!(recipes[0].starts.load(Ordering::SeqCst), 2);
    // Without a prompt it only loads or unloads; what is not loaded is not loaded for that.
    for (keep_alive, state, reason) in
        [(0, "on disk", "unload"), (-1, "loaded", "load"), (0, "on disk", "unload")]
    {
        let (status, last) = ollama(&app, json!({"keep_alive": keep_alive})).await;
        assert_eq!((status, &last["done_reason"]), (200, &json!(reason)), "{last}");
        expires(&app, state).await;
    }
    assert_eq!(recipes[0].starts.load(Ordering::SeqCst), 3);
    // The first model stays.
    let body = json!({"model": "owner/tiny", "prompt": "Hi", "keep_alive": 0});
    let (_, last) = ollama(&app, body).await;
    let notes = last["steersman"]["notes"].to_string();
    assert!(notes.contains("the model stays loaded as configured"), "{last}");
    let (_, last) = ollama(&app, json!({"model": "owner/tiny", "keep_alive": 0})).await;
    assert_eq!(last["done_reason"], "load", "it is not said to be unloaded: {last}");
    let notes = last["steersman"]["notes"].to_string();
    assert!(notes.contains("the model stays loaded as configured"), "{last}");
    for wrong in [json!("soon"), json!([]), json!("")] {
        let (status, last) = ollama(&app, json!({"prompt": "Hi", "keep_alive": wrong})).await;
        assert_eq!(status, 400, "{last}");
        assert!(last["error"].as_str().unwrap().starts_with("keep_alive: is "), "{last}");
    }
}

#[tokio::test]
async fn a_model_stays_until_the_last_reply_has_ended() {
    let endless: fn() -> Vec<Act> = || vec![Say(Event::Answer("Once".into())), UntilCancelled];
    let (app, _) = app_of(&[("a", endless, READY), ("b", answer, READY)]);
    let stream = send(&app, post(body(json!({"model": "a", "stream": true})).to_string())).await;
    assert_eq!(stream.status(), StatusCode::OK);
    let (status, reply) = ask(&app, "b").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{reply}");
    assert_eq!(reply["error"]["code"], "server_busy");
    let words = "no room for `b`, because requests use `a`";
    assert!(reply["error"]["message"].as_str().unwrap().contains(words), "{reply}");
    assert_eq!(states(&app).await, ["loaded", "on disk"]);
    // The others do not wait.
    assert_eq!(ask(&app, "owner/tiny").await.0, StatusCode::OK);
    drop(stream);
    assert_eq!(ask(&app, "b").await.0, StatusCode::OK);
    assert_eq!(states(&app).await, ["on disk", "loaded"]);
}

#[tokio::test]
async fn a_model_that_cannot_be_loaded_is_an_error_of_its_own_requests() {
    let models = [
        ("a", answer as fn() -> Vec<Act>, READY),
        ("missing", answer, Kind::Missing),
        ("broken", answer, Kind::Broken),
        ("b", answer, READY),
    ];
    let (app, recipes) = app_of(&models);
    assert_eq!(ask(&app, "a").await.0, StatusCode::OK);
    let (status, reply) = ask(&app, "missing").await;
    assert_eq!((status.as_u16(), &reply["error"]["code"]), (503, &json!("model_not_downloaded")));
    assert_eq!(states(&app).await[0], "loaded", "nothing leaves for it");
    let (status, reply) = ask(&app, "broken").await;
    assert_eq!((status.as_u16(), &reply["error"]["code"]), (503, &json!("model_load_failed")));
    assert!(!reply.to_string().contains("secret"), "{reply}");
    assert_eq!(recipes[2].starts.load(Ordering::SeqCst), 1);
    assert_eq!(ask(&app, "a").await.0, StatusCode::OK);
}
