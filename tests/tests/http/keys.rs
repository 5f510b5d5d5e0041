//! `steersman keys`: keys that are created and revoked while the server runs.

use std::path::Path;
use std::sync::Arc;

use axum::http::Request as ClientRequest;
use clap::Parser;
use steersman::config::ProfileAccess;
use steersman::keys::{Configured, FILE, KeyFile, Task, run};
use tempfile::TempDir;

use crate::connection::Lines;
use crate::*;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

/// Runs a command; returns what it prints, or its error.
fn keys(folder: &Path, command: &str) -> Result<String, String> {
    said(folder, command).map(|(out, _)| out)
}

/// What a command prints, and its warnings.
fn said(folder: &Path, command: &str) -> Result<(String, String), String> {
    let words = std::iter::once("keys").chain(command.split_whitespace());
    let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
    let (mut out, mut messages) = (Vec::new(), Vec::new());
    let configured =
        Configured { profiles: vec!["strict".into(), "other".into()], ..Configured::default() };
    let done = run(&cli.task, &configured, folder, &mut out, &mut messages);
    done.map_err(|error| format!("{error:#}"))?;
    let text = |bytes| String::from_utf8(bytes).unwrap().trim_end().to_string();
    Ok((text(out), text(messages)))
}

fn app_in(folder: &TempDir) -> Router {
    let config = ServerConfig {
        profiles: ["default", "strict"]
            .map(|name| (name.to_string(), ProfileAccess::default()))
            .into(),
        ..ServerConfig::default()
    };
    let keys = Some(Arc::new(KeyFile::open(folder.path()).unwrap()));
    app_wired(&config, Wiring { keys, ..Wiring::default() }, answer).0
}

/// The status of a chat with this key, to this profile.
async fn status(app: &Router, key: &str, profile: &str) -> u16 {
    let mut request = post(body(json!({})).to_string());
    let headers = request.headers_mut();
    if !key.is_empty() {
        headers.insert(header::AUTHORIZATION, format!("Bearer {key}").parse().unwrap());
    }
    if !profile.is_empty() {
        headers.insert("x-steersman-profile", profile.parse().unwrap());
    }
    send(app, request).await.status().as_u16()
}

async fn rolls_back(app: &Router, key: &str) -> u16 {
    let request = ClientRequest::post("/v1/policies/none/rollback")
        .header(header::AUTHORIZATION, format!("Bearer {key}"))
        .body(Body::empty());
    send(app, request.unwrap()).await.status().as_u16()
}

#[tokio::test]
async fn keys_open_and_close_a_running_server() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    assert_eq!(status(&app, "", "").await, 200);
    let laptop = keys(folder.path(), "create laptop").unwrap();
    let phone = keys(folder.path(), "create phone").unwrap();
    assert!(laptop.starts_with("sk-") && laptop.len() == 46 && laptop != phone);
    assert_eq!(status(&app, "", "").await, 401);
    assert_eq!(status(&app, "sk-wrong", "").await, 401);
    assert_eq!(status(&app, &laptop, "").await, 200);
    assert_eq!(status(&app, &phone, "strict").await, 200);
    keys(folder.path(), "revoke laptop").unwrap();
    assert_eq!(status(&app, &laptop, "").await, 401);
    assert_eq!(status(&app, &phone, "").await, 200);
    // The last one is revoked: the server stays closed, also after a restart.
    keys(folder.path(), "revoke phone").unwrap();
    for app in [app, app_in(&folder)] {
        assert_eq!(status(&app, &phone, "").await, 401);
        assert_eq!(status(&app, "", "").await, 401);
    }
}

#[tokio::test]
async fn a_key_of_a_profile_opens_no_other_and_an_operators_key_opens_all() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let strict = keys(folder.path(), "create app-1 --profile strict").unwrap();
    let second = keys(folder.path(), "create app-2 --profile strict").unwrap();
    for key in [&strict, &second] {
        assert_eq!(status(&app, key, "").await, 200);
        assert_eq!(status(&app, key, "default").await, 403);
        assert_eq!(rolls_back(&app, key).await, 403);
    }
    // Others use the profiles that have no keys.
    assert_eq!((status(&app, "", "").await, status(&app, "", "strict").await), (200, 403));
    keys(folder.path(), "revoke app-1").unwrap();
    assert_eq!(status(&app, &strict, "strict").await, 401, "a revoked key is one that nobody has");
    assert_eq!(status(&app, &second, "").await, 200);
    let operator = keys(folder.path(), "create me --operator").unwrap();
    assert_eq!(rolls_back(&app, &operator).await, 404);
    assert_eq!(rolls_back(&app, &second).await, 401);
    assert_eq!(status(&app, &operator, "strict").await, 200);
    keys(folder.path(), "revoke me").unwrap();
    assert_eq!(rolls_back(&app, &operator).await, 401);
}

#[tokio::test]
async fn keys_are_nowhere_but_with_their_owner() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let lines = Lines::default();
    let _log = lines.capture();
    let key = keys(folder.path(), "create laptop").unwrap();
    assert_eq!(status(&app, &key, "").await, 200);
    let wrong = "sk-0123456789abcdef0123456789abcdef";
    let mut request = post(body(json!({})).to_string());
    request.headers_mut().insert(header::AUTHORIZATION, format!("Bearer {wrong}").parse().unwrap());
    let refused = String::from_utf8(bytes(send(&app, request).await).await.to_vec()).unwrap();
    let metrics = ClientRequest::get("/metrics").header("x-api-key", &key).body(Body::empty());
    let metrics =
        String::from_utf8(bytes(send(&app, metrics.unwrap()).await).await.to_vec()).unwrap();
    let file = std::fs::read_to_string(folder.path().join(FILE)).unwrap();
    let list = keys(folder.path(), "list").unwrap();
    assert!(list.contains(&format!("laptop  {}..  all profiles", &key[..11])), "{list}");
    for text in [&refused, &metrics, &file, &list, &lines.text()] {
        assert!(!text.contains(&key[11..]) && !text.contains(wrong), "{text}");
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(folder.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

#[tokio::test]
async fn a_file_of_keys_that_is_lost_or_damaged_opens_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let key = keys(folder.path(), "create laptop").unwrap();
    assert_eq!(status(&app, &key, "").await, 200);
    let path = folder.path().join(FILE);
    let whole = std::fs::read(&path).unwrap();
    let lines = Lines::default();
    let _log = lines.capture();
    for damage in [None, Some("{"), Some(r#"{"keys": [{"name": "x"}]}"#)] {
        match damage {
            None => std::fs::remove_file(&path).unwrap(),
            Some(text) => std::fs::write(&path, text).unwrap(),
        }
        assert_eq!((status(&app, &key, "").await, status(&app, "", "").await), (401, 401));
        if damage.is_some() {
            let error = KeyFile::open(folder.path()).unwrap_err().to_string();
            assert!(error.contains("keys.json"), "{error}");
        }
    }
    let log = lines.text();
    assert!(
        log.contains("gone") && log.contains("damaged") && !log.contains("cannot be read"),
        "{log}"
    );
    std::fs::write(&path, whole).unwrap();
    assert_eq!(status(&app, &key, "").await, 200);
}

/// A server whose file was lost refused everyone, until the first new key, of whatever kind, opened it to all.
#[tokio::test]
async fn a_new_file_of_keys_opens_nothing_that_a_lost_one_had_closed() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let laptop = keys(folder.path(), "create laptop").unwrap();
    keys(folder.path(), "create app-1 --profile strict").unwrap();
    assert_eq!((status(&app, &laptop, "").await, status(&app, "", "").await), (200, 401));
    std::fs::remove_file(folder.path().join(FILE)).unwrap();
    let me = keys(folder.path(), "create me --operator").unwrap();
    assert_eq!((status(&app, "", "").await, status(&app, &laptop, "").await), (401, 401));
    assert_eq!((status(&app, "", "strict").await, status(&app, &me, "strict").await), (401, 200));
    // The operator, who sees the keys of the file, closes it again for good.
    let (_, made) = create(&app, &me, json!({"name": "laptop"})).await;
    let laptop = made["key"].as_str().unwrap();
    assert_eq!((status(&app, laptop, "").await, status(&app, "", "").await), (200, 401));
}

#[test]
fn wrong_names_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    keys(folder.path(), "create laptop").unwrap();
    keys(folder.path(), "create desk").unwrap();
    keys(folder.path(), "revoke laptop").unwrap();
    let cases = [
        (
            "create desk",
            "choose another name, or revoke it first with `steersman keys revoke desk`",
        ),
        ("create a/b", "use 1 to 64 letters"),
        ("create x --profile none", "no profile `none`; name its file with --config"),
        ("create x --profile strict --operator", "cannot be used with"),
        ("revoke phone", "there is no key `phone`"),
        ("revoke dsk", "did you mean `desk`?"),
        ("revoke laptop", "already revoked"),
    ];
    for (command, words) in cases {
        let error = keys(folder.path(), command).unwrap_err();
        assert!(error.contains(words), "{command}: {error}");
    }
    assert_eq!(keys(folder.path(), "list").unwrap().lines().count(), 3);
}

/// A server on which everyone could ask refused everyone else, and nobody had said so.
#[test]
fn the_first_key_warns_of_what_it_closes() {
    let folder = tempfile::tempdir().unwrap();
    for (command, closed) in [
        ("create me --operator", None),
        ("create app-1 --profile strict", Some("first key of the profile `strict`")),
        ("create app-2 --profile strict", None),
        ("create laptop", Some("first key of this server")),
        ("create phone", None),
        // Requests without a key were refused before.
        ("create app-3 --profile other", None),
    ] {
        let (_, text) = said(folder.path(), command).unwrap();
        match closed {
            Some(closed) => assert!(text.contains(closed), "{command}: {text}"),
            None => assert!(!text.contains("refused"), "{command}: {text}"),
        }
    }
}

/// A server whose only key was revoked refused everyone, and nobody had said so, nor how to open it again.
#[test]
fn the_last_key_warns_of_what_stays_closed() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["laptop", "phone", "app --profile strict"] {
        keys(folder.path(), &format!("create {name}")).unwrap();
    }
    let delete = format!("delete keys.json in {}", folder.path().display());
    for (name, closed) in [
        ("laptop", None),
        ("phone", Some("the last key of this server, which stays closed")),
        ("app", Some("the last key of the profile `strict`, which stays closed")),
    ] {
        let (_, text) = said(folder.path(), &format!("revoke {name}")).unwrap();
        match closed {
            Some(closed) => assert!(text.contains(closed) && text.contains(&delete), "{text}"),
            None => assert_eq!(text, ""),
        }
    }
}

/// The error was `creating keys.lock`, without the folder.
#[test]
fn a_lock_that_cannot_be_opened_is_named_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let lock = folder.path().join("keys.lock");
    std::fs::create_dir(&lock).unwrap();
    let error = keys(folder.path(), "create laptop").unwrap_err();
    assert!(error.contains(&lock.display().to_string()), "{error}");
}

/// The name of a revoked key was lost for ever.
#[tokio::test]
async fn a_revoked_key_leaves_its_name_to_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let old = keys(folder.path(), "create laptop").unwrap();
    keys(folder.path(), "revoke laptop").unwrap();
    let new = keys(folder.path(), "create laptop").unwrap();
    assert_eq!((status(&app, &old, "").await, status(&app, &new, "").await), (401, 200));
    // The newest key of this name is meant, and the old one stays listed.
    keys(folder.path(), "revoke laptop").unwrap();
    assert_eq!(status(&app, &new, "").await, 401);
    assert_eq!(keys(folder.path(), "list").unwrap().lines().count(), 3);
}

/// Fault A12: with `keys.json` as a pipe all routes waited for ever, with a link to /dev/zero the server took all memory.
#[cfg(unix)]
#[tokio::test]
async fn a_file_of_keys_that_is_no_regular_file_closes_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let key = keys(folder.path(), "create laptop").unwrap();
    assert_eq!(status(&app, &key, "").await, 200);
    let path = folder.path().join(FILE);
    let lines = Lines::default();
    let _log = lines.capture();
    for make in ["mkfifo", "ln -s /dev/zero", "mkdir"] {
        if path.is_dir() { std::fs::remove_dir(&path) } else { std::fs::remove_file(&path) }
            .unwrap();
        let mut words = make.split(' ');
        let mut command = std::process::Command::new(words.next().unwrap());
        assert!(command.args(words).arg(&path).status().unwrap().success());
        assert_eq!(status(&app, &key, "").await, 401, "{make}");
        let error = keys(folder.path(), "list").unwrap_err();
        assert!(error.contains("not a regular file"), "{make}: {error}");
    }
    // It was called damaged, also where only its permissions were wrong.
    let log = lines.text();
    assert!(log.contains("file of keys cannot be read") && !log.contains("damaged"), "{log}");
    std::fs::remove_dir(&path).unwrap();
}

/// Sends JSON with this key, or nothing if `body` is null; returns status and reply.
async fn call(app: &Router, method: &str, path: &str, key: &str, body: &Value) -> (u16, Value) {
    let mut request = ClientRequest::builder().method(method).uri(path);
    if !key.is_empty() {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let body = match body {
        Value::Null => Body::empty(),
        body => {
            request = request.header(header::CONTENT_TYPE, "application/json");
            Body::from(body.to_string())
        }
    };
    let response = send(app, request.body(body).unwrap()).await;
    (response.status().as_u16(), json_of(response).await)
}

async fn create(app: &Router, key: &str, body: Value) -> (u16, Value) {
    call(app, "POST", "/v1/keys", key, &body).await
}

async fn revoke(app: &Router, key: &str, name: &str, body: Value) -> (u16, Value) {
    call(app, "POST", &format!("/v1/keys/{name}/revoke"), key, &body).await
}

async fn listed(app: &Router, key: &str) -> Vec<Value> {
    let (status, mut list) = call(app, "GET", "/v1/keys", key, &Value::Null).await;
    assert_eq!(status, 200, "{list}");
    list["keys"].take().as_array().unwrap().clone()
}

/// Gives the key `name` in the file another creation and expiry.
fn set_times(folder: &TempDir, name: &str, created: &str, expires: &str) {
    let path = folder.path().join(FILE);
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let keys = file["keys"].as_array_mut().unwrap();
    let key = keys.iter_mut().find(|key| key["name"] == name).unwrap();
    (key["created"], key["expires"]) = (created.into(), expires.into());
    std::fs::write(&path, file.to_string()).unwrap();
}

#[tokio::test]
async fn operators_create_list_and_revoke_keys_over_http() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let me = keys(folder.path(), "create me --operator").unwrap();
    assert_eq!(status(&app, "", "").await, 200);
    let (code, made) = create(&app, &me, json!({"name": "laptop", "expires": "30d"})).await;
    assert_eq!(code, 200, "{made}");
    // Who closes the server is told so.
    let note = made["notes"][0].as_str().unwrap();
    assert!(note.contains("first key of this server"), "{note}");
    let laptop = made["key"].as_str().unwrap();
    assert_eq!((status(&app, laptop, "").await, status(&app, "", "").await), (200, 401));
    let (_, strict) = create(&app, &me, json!({"name": "app", "profile": "strict"})).await;
    let strict = strict["key"].as_str().unwrap();
    assert_eq!(status(&app, strict, "default").await, 403);

    let list = listed(&app, &me).await;
    let shown: Vec<_> = list
        .iter()
        .map(|key| ["name", "opens", "profile", "state", "current"].map(|name| key[name].clone()))
        .collect();
    assert_eq!(
        json!(shown),
        json!([
            ["me", "operator", null, "active", true],
            ["laptop", "all_profiles", null, "active", false],
            ["app", "profile", "strict", "active", false],
        ])
    );
    let lifetime = list[1]["expires"].as_i64().unwrap() - list[1]["created"].as_i64().unwrap();
    assert_eq!((lifetime, &list[0]["expires"]), (30 * 86_400, &Value::Null));
    let text = json!(list).to_string();
    for key in [&me, laptop, strict] {
        assert!(text.contains(&key[..11]) && !text.contains(&key[11..]), "{text}");
    }
    // The same keys as those of the command.
    assert!(keys(folder.path(), "list").unwrap().contains("laptop"));

    let (code, gone) = revoke(&app, &me, "laptop", json!({})).await;
    assert_eq!((code, &gone["entry"]["state"]), (200, &json!("revoked")), "{gone}");
    assert_eq!((status(&app, laptop, "").await, status(&app, "", "").await), (401, 401));
    let (code, again) = revoke(&app, &me, "laptop", json!({})).await;
    assert_eq!((code, &again["error"]["code"]), (409, &json!("key_revoked")));
    assert_eq!(listed(&app, &me).await.len(), 3, "revoked keys stay listed");
}

#[tokio::test]
async fn wrong_changes_of_keys_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let me = keys(folder.path(), "create me --operator").unwrap();
    for (body, status, code, param) in [
        (json!({}), 400, "missing_required_parameter", json!("name")),
        (json!({"name": 1}), 400, "invalid_type", json!("name")),
        (json!({"name": "a/b"}), 400, "invalid_value", json!("name")),
        (json!({"name": "a", "nmae": "b"}), 400, "unknown_parameter", json!("nmae")),
        (json!({"name": "a", "expires": "soon"}), 400, "invalid_value", json!("expires")),
        (json!({"name": "a", "expires": "10s"}), 400, "invalid_value", json!("expires")),
        (json!({"name": "a", "expires": 30}), 400, "invalid_type", json!("expires")),
        (json!({"name": "a", "operator": "yes"}), 400, "invalid_type", json!("operator")),
        (
            json!({"name": "a", "operator": true, "profile": "strict"}),
            400,
            "invalid_value",
            json!("operator"),
        ),
        (json!({"name": "a", "profile": "none"}), 404, "profile_not_found", json!("profile")),
        (json!({"name": "me"}), 409, "key_exists", Value::Null),
    ] {
        let (found, error) = create(&app, &me, body.clone()).await;
        let error = &error["error"];
        assert_eq!(
            (found, &error["code"], &error["param"]),
            (status, &json!(code), &param),
            "{body}: {error}"
        );
    }
    let (code, error) = revoke(&app, &me, "mee", json!({})).await;
    assert_eq!((code, &error["error"]["code"]), (404, &json!("key_not_found")));
    assert!(error["error"]["message"].as_str().unwrap().contains("did you mean `me`?"), "{error}");
    let (code, error) = revoke(&app, &me, "me", json!({"last": 1})).await;
    assert_eq!((code, &error["error"]["param"]), (400, &json!("last")));
    assert_eq!(listed(&app, &me).await.len(), 1, "none of them made a key");
    // A server without a data folder.
    let config = ServerConfig { admin_keys: vec!["sk-operator".into()], ..ServerConfig::default() };
    let (without, _) = app_with(&config, answer);
    let (code, error) = create(&without, "sk-operator", json!({"name": "a"})).await;
    assert_eq!((code, &error["error"]["code"]), (409, &json!("keys_not_kept")));
}

/// A page of another site, and everyone but operators.
#[tokio::test]
async fn keys_are_for_operators_only() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let me = keys(folder.path(), "create me --operator").unwrap();
    let client = keys(folder.path(), "create laptop").unwrap();
    for key in [client.as_str(), "sk-wrong", ""] {
        for (method, path, body) in [
            ("GET", "/v1/keys", Value::Null),
            ("POST", "/v1/keys", json!({"name": "evil", "operator": true})),
            ("POST", "/v1/keys/me/revoke", json!({"last": true})),
        ] {
            let (code, reply) = call(&app, method, path, key, &body).await;
            assert_eq!(code, 401, "{method} {path}: {reply}");
            assert!(!reply.to_string().contains("laptop"), "{reply}");
        }
    }
    for (origin, kind, expected) in [
        ("https://evil.test", "application/json", 403),
        ("", "text/plain", 415),
        ("", "application/x-www-form-urlencoded", 415),
    ] {
        let mut request = ClientRequest::post("/v1/keys")
            .header(header::AUTHORIZATION, format!("Bearer {me}"))
            .header(header::CONTENT_TYPE, kind);
        if !origin.is_empty() {
            request = request.header(header::ORIGIN, origin);
        }
        let request = request.body(Body::from(json!({"name": "evil"}).to_string()));
        assert_eq!(send(&app, request.unwrap()).await.status().as_u16(), expected, "{kind}");
    }
    assert_eq!(listed(&app, &me).await.len(), 2);
}

#[tokio::test]
async fn a_key_that_has_expired_is_refused_and_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let me = keys(folder.path(), "create me --operator").unwrap();
    let key = keys(folder.path(), "create app --profile strict --expires 1h").unwrap();
    assert_eq!(status(&app, &key, "").await, 200);
    set_times(&folder, "app", "2020-01-01T00:00:00Z", "2020-02-01T00:00:00Z");
    let lines = Lines::default();
    let log = lines.capture();
    // This server answers everyone, and a mistyped key as none: an expired one is refused.
    assert_eq!(status(&app, "", "default").await, 200);
    let (code, error) = call(&app, "GET", "/v1/models", &key, &Value::Null).await;
    assert_eq!((code, &error["error"]["code"]), (401, &json!("key_expired")));
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("`app` has expired at 2020-02-01T00:00:00Z"), "{message}");
    drop(log);
    let log = lines.text();
    let line = log.lines().find(|line| line.contains("`app` has expired")).expect(&log);
    assert!(line.contains("route=\"/v1/models\"") && line.contains("request_id="), "{line}");
    assert!(!log.contains(&key[11..]), "{log}");
    // What it opened stays closed.
    assert_eq!(status(&app, "", "strict").await, 403);
    let state = |list: &[Value]| list.last().unwrap()["state"].clone();
    assert_eq!(state(&listed(&app, &me).await), "expired");
    assert!(keys(folder.path(), "list").unwrap().contains("expired"));
    // Its name stays taken until it is revoked.
    let (code, _) = create(&app, &me, json!({"name": "app"})).await;
    assert_eq!(code, 409);
    assert_eq!(revoke(&app, &me, "app", json!({})).await.0, 200);
    let (code, _) = create(&app, &me, json!({"name": "app", "profile": "strict"})).await;
    assert_eq!(code, 200);
    // A clock that has lost its time opens nothing that may have expired.
    set_times(&folder, "me", "2900-01-01T00:00:00Z", "2901-01-01T00:00:00Z");
    let (code, error) = call(&app, "GET", "/v1/keys", &me, &Value::Null).await;
    assert_eq!((code, &error["error"]["code"]), (401, &json!("key_expired")));
    assert!(error["error"]["message"].as_str().unwrap().contains("set the clock"), "{error}");
}

#[tokio::test]
async fn the_last_operator_is_not_locked_out_without_a_word() {
    let folder = tempfile::tempdir().unwrap();
    let app = app_in(&folder);
    let me = keys(folder.path(), "create me --operator").unwrap();
    let (code, error) = revoke(&app, &me, "me", json!({})).await;
    assert_eq!((code, &error["error"]["code"]), (409, &json!("last_operator_key")));
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("steersman keys create NAME --operator"), "{message}");
    let (_, second) = create(&app, &me, json!({"name": "you", "operator": true})).await;
    let you = second["key"].as_str().unwrap();
    assert_eq!(revoke(&app, &me, "me", json!({})).await.0, 200);
    assert_eq!(call(&app, "GET", "/v1/keys", &me, &Value::Null).await.0, 401);
    let (code, gone) = revoke(&app, you, "you", json!({"last": true})).await;
    assert_eq!(code, 200, "{gone}");
    assert!(gone["notes"][0].as_str().unwrap().contains("last key of an operator"), "{gone}");
    // The server has operators still, none of whom has a key.
    assert_eq!(call(&app, "GET", "/v1/keys", you, &Value::Null).await.0, 401);
    // At the machine, it is said and done.
    keys(folder.path(), "create third --operator").unwrap();
    let (_, warning) = said(folder.path(), "revoke third").unwrap();
    assert!(warning.contains("last key of an operator"), "{warning}");
}

/// A server with created keys prints no link when it starts again: its owner was no operator any more.
#[tokio::test]
async fn the_operator_of_the_link_is_told_to_keep_a_key() {
    let folder = tempfile::tempdir().unwrap();
    let (link, token) = steersman::link::Link::new().unwrap();
    let wiring = Wiring {
        keys: Some(Arc::new(KeyFile::open(folder.path()).unwrap())),
        link: Some(Arc::new(link)),
        ..Wiring::default()
    };
    let app = app_wired(&ServerConfig::default(), wiring, answer).0;
    let token = json!({"token": token});
    let (_, session) = call(&app, "POST", "/v1/session", "", &token).await;
    let owner = session["key"].as_str().unwrap();
    let about_link = |made: &Value| made["notes"].to_string().contains("by the link");
    let (_, made) = create(&app, owner, json!({"name": "laptop"})).await;
    assert!(about_link(&made), "{made}");
    let (_, made) = create(&app, owner, json!({"name": "me", "operator": true})).await;
    assert!(!about_link(&made), "{made}");
    // The link's key is none of the list.
    assert!(listed(&app, owner).await.iter().all(|key| key["current"] == false));
}
