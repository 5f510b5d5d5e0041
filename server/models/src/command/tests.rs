//! The commands on a folder with three models.

use serde_json::json;

use std::fs;

use super::*;
use crate::facts::Unpacked;

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
        ],
        numbers: Numbers { float_bytes: 4, unpacked: Unpacked::WithoutKernel },
        memory_limit: 1 << 30,
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
    assert!(text.contains("bundled, model.path"), "{text}");
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
