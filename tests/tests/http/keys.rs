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
    let words = std::iter::once("keys").chain(command.split_whitespace());
    let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
    let mut out = Vec::new();
    let configured =
        Configured { profiles: vec!["strict".into(), "other".into()], ..Configured::default() };
    run(&cli.task, &configured, folder, &mut out).map_err(|error| format!("{error:#}"))?;
    Ok(String::from_utf8(out).unwrap().trim_end().to_string())
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
    assert_eq!(status(&app, &strict, "strict").await, 403);
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
        let lines = Lines::default();
        let log = lines.capture();
        keys(folder.path(), command).unwrap();
        drop(log);
        let text = lines.text();
        match closed {
            Some(closed) => assert!(text.contains(closed), "{command}: {text}"),
            None => assert!(!text.contains("refused"), "{command}: {text}"),
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
