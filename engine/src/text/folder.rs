//! The small files of a model's folder that say how to talk to it.
//!
//! `tokenizer_config.json` (special tokens, older chat templates), `chat_template.jinja`,
//! `generation_config.json` and `config.json` (tokens that end a turn, sampling).
//! Never reads weights or `tokenizer.json`.
//!
//! Source: transformers 5.23 `tokenization_utils_base.py` for the order in which templates count.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::template::Template;
use crate::error::{Error, Result};
use crate::request::Sampling;

/// The files, parsed but not interpreted.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    tokenizer_config: Map<String, Value>,
    generation_config: Map<String, Value>,
    config: Map<String, Value>,
}

/// The chat templates of a model: one for all, or one that is used with tools besides.
#[derive(Debug)]
pub(super) struct Templates {
    default: Template,
    with_tools: Option<Template>,
}

impl Templates {
    /// The one for a request with or without tools.
    pub fn choose(&self, tools: bool) -> &Template {
        self.with_tools.as_ref().filter(|_| tools).unwrap_or(&self.default)
    }
}

impl Folder {
    /// Reads the files in `path`.
    ///
    /// # Errors
    /// [`Error::Model`] names the file that is missing or damaged; `generation_config.json` may be
    /// missing.
    pub fn read(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Err(bad(path, "is no folder; a model is a folder with config.json in it"));
        }
        Ok(Self {
            path: path.into(),
            config: required(path.join("config.json"))?,
            tokenizer_config: required(path.join("tokenizer_config.json"))?,
            generation_config: object(path.join("generation_config.json"))?.unwrap_or_default(),
        })
    }

    /// The chat templates: those of `chat_template.jinja`, `chat_template.json` or the key
    /// `chat_template` of `tokenizer_config.json`, whichever is there first.
    pub fn templates(&self) -> Result<Templates> {
        let jinja = self.path.join("chat_template.jinja");
        if let Some(source) = read(&jinja)? {
            return Ok(Templates { default: compile(&jinja, &source)?, with_tools: None });
        }
        let mut file = self.path.join("chat_template.json");
        let mut found = object(file.clone())?.and_then(|mut all| all.remove("chat_template"));
        if found.is_none() {
            file = self.path.join("tokenizer_config.json");
            found = self.tokenizer_config.get("chat_template").cloned();
        }
        let Some(found) = found.filter(|value| !value.is_null()) else {
            let problem = "is missing, and tokenizer_config.json has no chat_template: this is no \
                chat model, or an incomplete copy; put its template there";
            return Err(bad(&jinja, problem));
        };
        templates_in(&found, &file)
    }

    /// `bos_token`, `eos_token` and the like, as templates read them.
    pub fn special_tokens(&self) -> Map<String, Value> {
        let text = |value: &Value| match value {
            Value::String(_) => Some(value.clone()),
            Value::Object(token) => token.get("content").cloned(),
            _ => None,
        };
        let tokens = self.tokenizer_config.iter().filter(|(key, _)| key.ends_with("_token"));
        tokens.filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect()
    }

    /// Ids of the tokens that end a turn, as the files list them: generation_config.json,
    /// config.json and its `text_config`, without repeats.
    pub fn eos(&self) -> Vec<u32> {
        let text_config = self.config.get("text_config").and_then(Value::as_object);
        let mut ids = Vec::new();
        for file in [Some(&self.generation_config), Some(&self.config), text_config] {
            let found = file.and_then(|file| file.get("eos_token_id"));
            let listed = found.and_then(Value::as_array).map(Vec::as_slice);
            let single = found.map(std::slice::from_ref).unwrap_or_default();
            for id in listed.unwrap_or(single).iter().filter_map(Value::as_u64) {
                if let Ok(id) = u32::try_from(id)
                    && !ids.contains(&id)
                {
                    ids.push(id);
                }
            }
        }
        ids
    }

    /// Sampling as `generation_config.json` has it.
    ///
    /// `do_sample: false` is greedy. Without `do_sample`, a temperature means sampling and none
    /// means greedy; `do_sample: true` without a temperature is temperature 1, as in transformers.
    /// A missing `top_p`, `top_k` or `min_p` filters nothing (transformers' own `top_k` of 50 is
    /// not taken over). Nothing of it counts when greedy.
    pub fn sampling(&self) -> Sampling {
        let number = |key| self.generation_config.get(key).and_then(Value::as_f64);
        let sample = self.generation_config.get("do_sample").and_then(Value::as_bool);
        let temperature = match (sample, number("temperature")) {
            (Some(false), _) | (None, None) => 0.0,
            (Some(true), None) => 1.0,
            (_, Some(temperature)) => temperature,
        };
        if temperature <= 0.0 {
            return Sampling::default();
        }
        let in_range =
            |key, neutral: f64| number(key).filter(|p| (0.0..=1.0).contains(p)).unwrap_or(neutral);
        Sampling {
            temperature: temperature as f32,
            top_p: in_range("top_p", 1.0) as f32,
            top_k: number("top_k").filter(|k| *k >= 0.0).unwrap_or(0.0) as u32,
            min_p: in_range("min_p", 0.0) as f32,
        }
    }

    /// Path of `name` in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// A text, or a list of `{"name", "template"}` with one named `default`.
fn templates_in(found: &Value, file: &Path) -> Result<Templates> {
    if let Some(source) = found.as_str() {
        return Ok(Templates { default: compile(file, source)?, with_tools: None });
    }
    let named = |wanted: &str| {
        let all = found.as_array()?;
        all.iter().find(|one| one["name"] == wanted)?["template"].as_str()
    };
    let with_tools = named("tool_use").map(|source| compile(file, source)).transpose()?;
    match named("default") {
        Some(source) => Ok(Templates { default: compile(file, source)?, with_tools }),
        None => Err(bad(file, "chat_template is neither a text nor a list with one named default")),
    }
}

fn compile(file: &Path, source: &str) -> Result<Template> {
    Template::new(source)
        .map_err(|e| bad(file, &format!("the chat template does not compile: {e}")))
}

fn required(file: PathBuf) -> Result<Map<String, Value>> {
    object(file.clone())?.ok_or_else(|| bad(&file, "is missing; a model folder needs it"))
}

fn object(file: PathBuf) -> Result<Option<Map<String, Value>>> {
    let Some(text) = read(&file)? else { return Ok(None) };
    let parsed =
        serde_json::from_str(&text).map_err(|e| bad(&file, &format!("is damaged: {e}")))?;
    Ok(Some(parsed))
}

fn read(file: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(bad(file, &format!("cannot be read: {e}"))),
    }
}

fn bad(path: &Path, problem: &str) -> Error {
    Error::Model { path: path.into(), problem: problem.into() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A folder with the given files.
    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (name, text) in [("config.json", "{}"), ("tokenizer_config.json", "{}")] {
            std::fs::write(dir.path().join(name), text).expect("it is writable");
        }
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).expect("it is writable");
        }
        dir
    }

    fn read(files: &[(&str, &str)]) -> Folder {
        Folder::read(folder(files).path()).expect("the files are complete")
    }

    fn templates(files: &[(&str, &str)]) -> Result<Templates> {
        let folder = folder(files);
        Folder::read(folder.path())?.templates()
    }

    fn check_sampling(generation_config: Value, expected: [f32; 4]) {
        let folder = read(&[("generation_config.json", &generation_config.to_string())]);
        let Sampling { temperature, top_p, top_k, min_p } = folder.sampling();
        assert_eq!([temperature, top_p, top_k as f32, min_p], expected, "{generation_config}");
    }

    #[test]
    fn sampling_is_greedy_unless_the_files_say_otherwise() {
        const GREEDY: [f32; 4] = [0.0, 1.0, 0.0, 0.0];
        check_sampling(json!({}), GREEDY);
        check_sampling(json!({"do_sample": false, "temperature": 0.6, "top_k": 20}), GREEDY);
        check_sampling(json!({"temperature": 0.0, "top_p": 0.5}), GREEDY);
        check_sampling(json!({"do_sample": true}), [1.0, 1.0, 0.0, 0.0]);
        check_sampling(
            json!({"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
            [0.6, 0.95, 20.0, 0.0],
        );
        check_sampling(
            json!({"do_sample": true, "temperature": 2, "min_p": 0.05}),
            [2.0, 1.0, 0.0, 0.05],
        );
        check_sampling(
            json!({"temperature": null, "do_sample": true, "top_p": 7}),
            [1.0, 1.0, 0.0, 0.0],
        );
    }

    #[test]
    fn tokens_that_end_a_turn_are_those_of_all_files() {
        let folder = read(&[
            ("generation_config.json", r#"{"eos_token_id": [7, 8]}"#),
            ("config.json", r#"{"eos_token_id": 8, "text_config": {"eos_token_id": [9, null]}}"#),
        ]);
        assert_eq!(folder.eos(), [7, 8, 9]);
    }

    #[test]
    fn special_tokens_are_texts_or_objects() {
        let config = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": null}"#;
        let tokens = read(&[("tokenizer_config.json", config)]).special_tokens();
        assert_eq!(Value::from(tokens), json!({"bos_token": "<s>", "eos_token": "</s>"}));
    }

    #[test]
    fn the_template_file_counts_before_the_key_and_a_list_may_have_one_for_tools() {
        let key = ("tokenizer_config.json", r#"{"chat_template": "key"}"#);
        let list = r#"{"chat_template": [
            {"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#;
        for (files, [plain, tools]) in [
            (vec![key], ["key", "key"]),
            (vec![key, ("chat_template.json", r#"{"chat_template": "json"}"#)], ["json", "json"]),
            (vec![key, ("chat_template.jinja", "file")], ["file", "file"]),
            (vec![("tokenizer_config.json", list)], ["d", "t"]),
        ] {
            let templates = templates(&files).expect("there is one");
            assert_eq!(
                [templates.choose(false).source(), templates.choose(true).source()],
                [plain, tools]
            );
        }
    }

    #[test]
    fn errors_name_the_file() {
        let told = |files: &[(&str, &str)]| templates(files).expect_err("incomplete").to_string();
        assert!(told(&[]).contains("chat_template.jinja: is missing"));
        assert!(told(&[("chat_template.jinja", "{% if %}")]).contains("does not compile"));
        let damaged = folder(&[("config.json", "{")]);
        let message = Folder::read(damaged.path()).expect_err("it is damaged").to_string();
        assert!(message.contains("config.json: is damaged"), "{message}");
        let empty = tempfile::tempdir().expect("a temporary folder");
        let message = Folder::read(empty.path()).expect_err("it is empty").to_string();
        assert!(message.contains("config.json: is missing"), "{message}");
        let message =
            Folder::read(&empty.path().join("x")).expect_err("it is not there").to_string();
        assert!(message.contains("is no folder"), "{message}");
    }
}
