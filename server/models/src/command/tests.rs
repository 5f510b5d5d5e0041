//! The commands on a folder with three models.

use serde_json::json;

use std::fs;

use axum::extract::Request;
use axum::response::IntoResponse;

use super::*;
use crate::facts::Unpacked;
use crate::hub::tests::hub_at;

const SHA: &str = "0123456789abcdef";

fn write_model(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    let config = json!({
        "model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4,
        "hidden_size": 64, "max_position_embeddings": 2048
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    let header = json!({"a.weight": {"dtype": "BF16", "shape": [64, 64]}}).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    fs::write(folder.join("model.safetensors"), file).unwrap();
}

/// A bundled model, `owner/small` in the cache, and `owner/absent` in the configuration.
fn sources(root: &Path) -> Sources {
    let bundled = root.join("bundled");
    write_model(&bundled);
    let repo = root.join("hub/models--owner--small");
    write_model(&repo.join("snapshots").join(SHA));
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), SHA).unwrap();
    let cache = root.join("hub");
    let hub = Hub { endpoint: "http://127.0.0.1:1".into(), cache, token: None, offline: true };
    let configured = |key: &str, name: &str, path: &str| Configured {
        key: key.into(),
        name: name.into(),
        path: path.into(),
    };
    Sources {
        hub,
        bundled: ("tiny".into(), bundled),
        configured: vec![
            configured("model.path", "tiny", ""),
            configured("models.quick.path", "quick", "owner/small"),
            configured("models.other.path", "other", "owner/absent"),
            configured("models.own.path", "own", "tiny"),
        ],
        families: vec!["llama", "qwen3"],
        numbers: Numbers { float_bytes: 4, unpacked: Unpacked::WithoutKernel },
        memory_limit: 1 << 30,
        room: 6 << 30,
    }
}

fn printed(run: impl FnOnce(&mut Vec<u8>) -> Result<()>) -> String {
    let mut out = Vec::new();
    run(&mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn models_are_listed_from_everywhere_and_once() {
    let root = tempfile::tempdir().unwrap();
    let sources = sources(root.path());
    let text = printed(|out| list(&sources, &List { json: false }, out));
    let lines: Vec<Vec<&str>> =
        text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert_eq!(lines[1].first(), Some(&"tiny"));
    assert!(text.contains("bundled, model.path, models.own.path (own)"), "{text}");
    assert!(text.contains("cache, models.quick.path (quick)"), "{text}");
    assert!(lines[3].starts_with(&["owner/absent", "-"]), "{text}");
    assert!(lines[3].contains(&"missing"), "{text}");
    let text = printed(|out| list(&sources, &List { json: true }, out));
    let rows: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(rows[1]["name"], "owner/small");
    assert_eq!(rows[1]["parameters"], 64 * 64);
    assert_eq!(rows[1]["memory"]["weights"], 2 * 64 * 64);
    // Two layers with keys and values of 64 numbers, in f32.
    assert_eq!(rows[1]["memory"]["cache_per_1000_tokens"], 2 * 2 * 64 * 4 * 1000);
    assert_eq!(rows[2]["state"], "missing");
}

#[test]
fn one_model_is_shown_by_any_of_its_names() {
    let root = tempfile::tempdir().unwrap();
    let mut sources = sources(root.path());
    let show = |sources: &Sources, model: &str| {
        let options = Show { model: model.into(), json: false };
        let mut out = Vec::new();
        show(sources, &options, &mut out).map(|()| String::from_utf8(out).unwrap())
    };
    for model in ["owner/small", "quick"] {
        let text = show(&sources, model).unwrap();
        for words in ["qwen3", "BF16", "2048", "fits", "yes", "model.safetensors"] {
            assert!(text.contains(words), "`{words}` is not in {text}");
        }
    }
    sources.memory_limit = 1000;
    assert!(show(&sources, "tiny").unwrap().contains("no: the weights"));
    let error = show(&sources, "owner/absent").unwrap_err().to_string();
    assert!(error.contains("is missing") && error.contains("steersman pull"), "{error}");
    let error = show(&sources, "owner/smal").unwrap_err().to_string();
    assert!(error.contains("similar: owner/small"), "{error}");
}

/// `list` and `show` said `fits yes` of a model that no engine loads.
#[test]
fn what_cannot_be_loaded_does_not_fit() {
    let root = tempfile::tempdir().unwrap();
    let sources = Sources { families: vec!["llama"], ..sources(root.path()) };
    let text = printed(|out| list(&sources, &List { json: false }, out));
    assert_eq!(text.matches("not supported").count(), 2, "{text}");
    let text = printed(|out| list(&sources, &List { json: true }, out));
    let rows: Value = serde_json::from_str(&text).unwrap();
    let state = |row: usize| (rows[row]["state"].clone(), rows[row]["memory"]["fits"].clone());
    assert_eq!(state(1), (json!("not supported"), json!(false)));
    let options = Show { model: "owner/small".into(), json: false };
    let text = printed(|out| show(&sources, &options, out));
    let fits = text.lines().find(|line| line.starts_with("fits")).unwrap();
    assert!(
        fits.contains("no: the family `qwen3` is not supported; supported are: llama"),
        "{fits}"
    );
}

/// Puts files into the cache as the repo `id`.
fn add_to_cache(sources: &Sources, id: &str, files: &[(&str, Vec<u8>)]) {
    let repo = sources.hub.cache.join(format!("models--{}", id.replace('/', "--")));
    let snapshot = repo.join("snapshots").join(SHA);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), SHA).unwrap();
    files.iter().for_each(|(name, bytes)| fs::write(snapshot.join(name), bytes).unwrap());
}

#[test]
fn gguf_files_of_a_repo_are_models_with_names_of_their_own() {
    let root = tempfile::tempdir().unwrap();
    let sources = sources(root.path());
    let file = || crate::hub::tests::gguf("llama", 4096);
    let files = [("x-Q4_K_M.gguf", file()), ("x-Q8_0.gguf", file()), ("mmproj.gguf", file())];
    add_to_cache(&sources, "owner/x-GGUF", &files);
    let text = printed(|out| list(&sources, &List { json: false }, out));
    let rows: Vec<_> = text.lines().filter(|line| line.contains("owner/x-GGUF")).collect();
    assert_eq!(rows.len(), 2, "{text}");
    for (row, name) in rows.iter().zip(["owner/x-GGUF:Q4_K_M ", "owner/x-GGUF:Q8_0 "]) {
        assert!(row.starts_with(name) && row.contains("llama") && row.contains("on disk"), "{row}");
    }
    for (asked, expected) in [
        ("owner/x-GGUF:Q8_0", "owner/x-GGUF:Q8_0"),
        ("owner/x-GGUF:q8_0", "owner/x-GGUF:Q8_0"),
        ("owner/x-GGUF", "owner/x-GGUF:Q4_K_M"),
    ] {
        let options = Show { model: asked.into(), json: true };
        let text = printed(|out| show(&sources, &options, out));
        let found: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(found["name"], expected);
    }
    let removed = |model: &str| {
        let options = Remove { model: model.into(), force: false };
        remove(&sources, &options, &mut Vec::new()).map_err(|error| error.to_string())
    };
    let error = removed("owner/x-GGUF:Q8_0").unwrap_err();
    assert!(error.contains("has 2 models on this machine"), "{error}");
    removed("owner/x-GGUF").unwrap();
    add_to_cache(&sources, "owner/x-GGUF", &files[..1]);
    removed("owner/x-GGUF:q4_k_m").unwrap();
    assert!(!sources.hub.cache.join("models--owner--x-GGUF").exists());
}

#[test]
fn short_names_are_shown_and_removed_as_their_repos() {
    let root = tempfile::tempdir().unwrap();
    let sources = sources(root.path());
    let repo = "mlx-community/Qwen3-4B-4bit";
    let folder = sources.hub.cache.join("models--mlx-community--Qwen3-4B-4bit");
    let show = |model: &str| {
        let options = Show { model: model.into(), json: true };
        let mut out = Vec::new();
        show(&sources, &options, &mut out).map(|()| String::from_utf8(out).unwrap())
    };
    let error = show("qwen3:4b").unwrap_err().to_string();
    let expected = format!(
        "qwen3:4b is {repo}, which is not on this machine; `steersman pull qwen3:4b` downloads it"
    );
    assert_eq!(error, expected);
    write_model(&folder.join("snapshots").join(SHA));
    fs::create_dir_all(folder.join("refs")).unwrap();
    fs::write(folder.join("refs/main"), SHA).unwrap();
    for name in [repo, "qwen3:4b"] {
        let found: Value = serde_json::from_str(&show(name).unwrap()).unwrap();
        assert_eq!((&found["name"], &found["state"]), (&json!(repo), &json!("on disk")));
    }
    let error = show("qwen3:5b").unwrap_err().to_string();
    assert!(error.contains("sizes of qwen3"), "{error}");
    // Without a network: it is here.
    let pulled = printed(|out| pull(&sources, &Pull { model: "qwen3:4b".into() }, out));
    assert!(pulled.starts_with(&format!("{repo} is complete in ")), "{pulled}");
    let error = pull(&sources, &Pull { model: "./absent.gguf".into() }, &mut Vec::new());
    assert_eq!(error.unwrap_err().to_string(), "./absent.gguf does not exist");
    let options = Remove { model: "qwen3:4b".into(), force: false };
    let removed = printed(|out| remove(&sources, &options, out));
    assert!(removed.starts_with(&format!("removed {repo}")), "{removed}");
}

#[test]
fn models_on_the_hub_are_found_with_what_this_machine_can_serve() {
    let root = tempfile::tempdir().unwrap();
    let floats = |id: &str, family: &str, numbers: u64| {
        json!({
            "id": id, "downloads": 5, "config": {"model_type": family},
            "safetensors": {"parameters": {"BF16": numbers}},
        })
    };
    let answer = json!([
        floats("owner/small", "qwen3", 400_000_000),
        floats("owner/large", "llama", 600_000_000),
        floats("owner/other", "florence2", 1),
        {"id": "owner/unknown"},
        {"id": "owner/x-GGUF", "gguf": {"total": 1_000_000_000, "architecture": "llama"}},
        {"id": "owner/y-GGUF", "gguf": {"total": 1_000, "architecture": "mamba"}},
    ]);
    let hub = hub_at(move |_: &Request| axum::Json(&answer).into_response());
    // Floats of 16 bits stay so, in a limit of 1 GiB.
    let sources = Sources { hub, ..sources(root.path()) };
    let found = |json: bool| {
        let options = Search { words: vec!["owner".into(), "x".into()], json };
        printed(|out| search(&sources, &options, out))
    };
    let text = found(false);
    let rows: Vec<Vec<&str>> = text.lines().map(|row| row.split("  ").collect()).collect();
    let cells = |row: &[&str]| {
        let cells = row.iter().map(|cell| cell.trim()).filter(|cell| !cell.is_empty());
        cells.collect::<Vec<_>>().join("|")
    };
    let rows: Vec<_> = rows.iter().map(|row| cells(row)).collect();
    assert_eq!(
        rows,
        [
            "NAME|SIZE|FAMILY|WEIGHTS|FITS|DOWNLOADS",
            "owner/small|762.94 MiB|qwen3|floats|yes|5",
            "owner/large|1.12 GiB|llama|floats|no|5",
            "owner/other|2 B|florence2|floats|not supported|5",
            "owner/unknown|-|-|-|-|0",
            "owner/x-GGUF|596.05 MiB|llama|GGUF|yes|0",
            "owner/y-GGUF|625 B|mamba|GGUF|not supported|0",
        ]
    );
    let rows: Value = serde_json::from_str(&found(true)).unwrap();
    assert_eq!(
        rows[0],
        json!({
            "name": "owner/small", "size": 800_000_000, "family": "qwen3", "weights": "floats",
            "supported": true, "memory": 800_000_000, "fits": true, "downloads": 5,
        })
    );
    let verdict = |row: usize| (rows[row]["supported"].clone(), rows[row]["fits"].clone());
    assert_eq!(verdict(1), (json!(true), json!(false)));
    assert_eq!(verdict(2), (json!(false), json!(false)));
    assert_eq!(verdict(3), (Value::Null, Value::Null));
    let none =
        Sources { hub: hub_at(|_: &Request| axum::Json(json!([])).into_response()), ..sources };
    let options = Search { words: vec!["nothing".into()], json: false };
    let text = printed(|out| search(&none, &options, out));
    assert!(text.ends_with("has no model with `nothing` in its name\n"), "{text}");
}

#[test]
fn a_model_in_use_is_removed_by_force_only() {
    let root = tempfile::tempdir().unwrap();
    let sources = sources(root.path());
    let remove = |model: &str, force: bool| {
        let options = Remove { model: model.into(), force };
        let mut out = Vec::new();
        let removed = remove(&sources, &options, &mut out);
        removed.map(|()| String::from_utf8(out).unwrap()).map_err(|error| error.to_string())
    };
    let error = remove("owner/small", false).unwrap_err();
    assert!(error.contains("models.quick.path"), "{error}");
    assert!(remove("tiny", true).unwrap_err().contains("part of the program"));
    assert!(remove("owner/absent", true).unwrap_err().contains("there is no model"));
    let folder = sources.bundled.1.display().to_string();
    assert!(remove(&folder, true).unwrap_err().contains("remove it yourself"));
    assert!(remove("owner/small", true).unwrap().starts_with("removed owner/small"));
    assert!(snapshots::list(&sources.hub).unwrap().is_empty());
    assert!(sources.bundled.1.exists());
}

/// A repo was removed whose files the configuration names by a path.
#[test]
fn a_repo_of_which_the_configuration_names_a_folder_is_removed_by_force_only() {
    let root = tempfile::tempdir().unwrap();
    let mut sources = sources(root.path());
    let snapshot = root.path().join("hub/models--owner--small/snapshots").join(SHA);
    let path = snapshot.display().to_string();
    sources.configured = vec![Configured { key: "model.path".into(), name: "mine".into(), path }];
    let options = Remove { model: "owner/small".into(), force: false };
    let error = remove(&sources, &options, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("the configuration names owner/small (model.path)"), "{error}");
    assert!(snapshot.is_dir());
    let removed = printed(|out| remove(&sources, &Remove { force: true, ..options }, out));
    assert!(removed.starts_with("removed owner/small"), "{removed}");
}

#[test]
fn needs_name_what_is_missing_and_what_would_fit() {
    let (gib, limit) = (1 << 30, 10 << 30);
    let needs = Needs {
        total: 16 * gib,
        here: gib,
        disk_free: Some(10 * gib),
        memory: 32 * gib,
        memory_limit: limit,
        quantization: Some(4),
    };
    let text = needs.describe();
    for words in ["15.00 GiB of 16.00 GiB", "do not fit", "with 4 bits"] {
        assert!(text.contains(words), "`{words}` is not in {text}");
    }
    let error = needs.check_disk().unwrap_err().to_string();
    assert!(error.contains("10.00 GiB free, and 15.00 GiB"), "{error}");
    assert!(Needs { disk_free: Some(15 * gib), ..needs.clone() }.check_disk().is_ok());
    assert!(Needs { disk_free: None, ..needs }.check_disk().is_ok());
}
