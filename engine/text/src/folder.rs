//! The text settings in the small files of a model folder.
//!
//! `tokenizer_config.json` and `special_tokens_map.json` (special tokens, older chat templates),
//! `chat_template.jinja` and `additional_chat_templates/`, `generation_config.json` and `config.json` (end-of-turn tokens, sampling).
//! Never reads weights or `tokenizer.json`.
//!
//! Source: transformers 5.23 `tokenization_utils_base.py`, for the precedence of templates.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use steersman_gguf::files;
use steersman_jinja::Template;

use super::probe::Probe;
use super::tool_call::Format;
use steersman_request::Sampling;
use steersman_request::error::{ConfigError, Error, Result};

/// The files, parsed but not interpreted.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    tokenizer_config: Map<String, Value>,
    special_tokens_map: Map<String, Value>,
    generation_config: Map<String, Value>,
    config: Map<String, Value>,
}

/// The chat templates of a model: one for all requests, or a second one for requests with tools.
#[derive(Debug)]
pub(super) struct Templates {
    default: Template,
    with_tools: Option<Template>,
    /// What `default` and `with_tools` can express, once they are probed.
    probes: Vec<Probe>,
}

impl Templates {
    /// One template for all requests.
    #[cfg(test)]
    pub fn of(default: Template) -> Self {
        Self { default, with_tools: None, probes: Vec::new() }
    }

    /// The template for a request with or without tools.
    pub fn choose(&self, tools: bool) -> &Template {
        self.with_tools.as_ref().filter(|_| tools).unwrap_or(&self.default)
    }

    /// Finds out what they can express; see [`Probe::of`].
    pub fn probe(&mut self, special_tokens: &Map<String, Value>, format: &Format) {
        let all = std::iter::once(&self.default).chain(&self.with_tools);
        self.probes = all.map(|template| Probe::of(template, special_tokens, format)).collect();
    }

    /// What the template for a request with or without tools can express.
    pub fn probed(&self, tools: bool) -> &Probe {
        let of_default = self.probes.first();
        let of_tools = self.probes.last().filter(|_| tools);
        of_tools.or(of_default).expect("the templates are probed when they are loaded")
    }

    /// Whether one of them contains `text`.
    pub fn contain(&self, text: &str) -> bool {
        [Some(&self.default), self.with_tools.as_ref()]
            .into_iter()
            .flatten()
            .any(|template| template.source().contains(text))
    }
}

impl Folder {
    /// Reads the files in the folder `path`; only `generation_config.json` and `special_tokens_map.json`
    /// may be missing.
    pub fn read(path: &Path) -> Result<Self> {
        if !path.is_dir() && !files::is_gguf(path) {
            return Err(bad(
                path,
                "is not a folder; a model is a folder that contains config.json, or a GGUF file",
            ));
        }
        Ok(Self {
            path: path.into(),
            config: required(path.join("config.json"))?,
            tokenizer_config: required(path.join("tokenizer_config.json"))?,
            special_tokens_map: object(path.join("special_tokens_map.json"))?.unwrap_or_default(),
            generation_config: object(path.join("generation_config.json"))?.unwrap_or_default(),
        })
    }

    /// The chat templates: the first of `chat_template.jinja`, `chat_template.json` and the key
    /// `chat_template` of `tokenizer_config.json`. The first may be accompanied by
    /// `additional_chat_templates/tool_use.jinja`.
    pub fn templates(&self) -> Result<Templates> {
        let jinja = self.path.join("chat_template.jinja");
        if let Some(source) = read(&jinja)? {
            let tool_use = self.path.join("additional_chat_templates").join("tool_use.jinja");
            let with_tools = read(&tool_use)?;
            let with_tools = with_tools.map(|source| compile(&tool_use, &source)).transpose()?;
            return Ok(Templates {
                default: compile(&jinja, &source)?,
                with_tools,
                probes: Vec::new(),
            });
        }
        let mut file = self.path.join("chat_template.json");
        let mut found = object(file.clone())?.and_then(|mut all| all.remove("chat_template"));
        if found.is_none() {
            file = self.path.join("tokenizer_config.json");
            found = self.tokenizer_config.get("chat_template").cloned();
        }
        let Some(found) = found.filter(|value| !value.is_null()) else {
            if files::is_gguf(&self.path) {
                let beside = files::template_beside(&self.path);
                let problem = "is missing, and the GGUF file has no tokenizer.chat_template: the \
                    model is not a chat model; add the template as this file";
                return Err(bad(&beside, problem));
            }
            let problem = "is missing, and tokenizer_config.json has no chat_template: the model \
                is not a chat model, or the copy is incomplete; add the template as this file";
            return Err(bad(&jinja, problem));
        };
        templates_in(&found, &file)
    }

    /// The template variables `bos_token`, `eos_token` and so on. `tokenizer_config.json` takes precedence
    /// over `special_tokens_map.json`.
    pub fn special_tokens(&self) -> Map<String, Value> {
        let text = |value: &Value| match value {
            Value::String(_) => Some(value.clone()),
            Value::Object(token) => token.get("content").cloned(),
            _ => None,
        };
        let tokens = self.special_tokens_map.iter().chain(&self.tokenizer_config);
        let tokens = tokens.filter(|(key, _)| key.ends_with("_token"));
        tokens.filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect()
    }

    /// Distinct ids of the end-of-turn tokens in generation_config.json, config.json and its
    /// `text_config`.
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

    /// Sampling parameters of `generation_config.json`.
    ///
    /// `do_sample: false` is greedy. Without `do_sample`, a temperature enables sampling;
    /// `do_sample: true` without a temperature is temperature 1, as in transformers. A missing
    /// `top_p`, `top_k` or `min_p` is off (transformers' default `top_k` of 50 is not adopted).
    /// Greedy ignores the filters.
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

    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// `found` is a template, or a list of `{"name", "template"}` with one named `default`.
fn templates_in(found: &Value, file: &Path) -> Result<Templates> {
    if let Some(source) = found.as_str() {
        return Ok(Templates {
            default: compile(file, source)?,
            with_tools: None,
            probes: Vec::new(),
        });
    }
    let named = |wanted: &str| {
        let all = found.as_array()?;
        all.iter().find(|one| one["name"] == wanted)?["template"].as_str()
    };
    let with_tools = named("tool_use").map(|source| compile(file, source)).transpose()?;
    match named("default") {
        Some(source) => {
            Ok(Templates { default: compile(file, source)?, with_tools, probes: Vec::new() })
        }
        None => Err(bad(
            file,
            "chat_template must be a string, or a list with one template named default",
        )),
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
    let parsed = steersman_files::json(text.as_bytes())
        .and_then(serde_json::from_value)
        .map_err(|e| bad(&file, &format!("is damaged: {e}")))?;
    Ok(Some(parsed))
}

fn read(file: &Path) -> Result<Option<String>> {
    let text = steersman_gguf::files::read_at(file).and_then(|bytes| {
        String::from_utf8(bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    });
    match text {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(bad(file, &format!("cannot be read: {e}"))),
    }
}

fn bad(path: &Path, problem: &str) -> Error {
    Error::Config(ConfigError::Model { path: path.into(), problem: problem.into() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A folder with the given files.
    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (name, text) in [("config.json", "{}"), ("tokenizer_config.json", "{}")] {
            std::fs::write(dir.path().join(name), text).expect("writing a file");
        }
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder");
            std::fs::write(path, text).expect("writing a file");
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
    fn sampling_is_greedy_unless_generation_config_enables_it() {
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
    fn end_of_turn_tokens_of_all_files_are_united() {
        let folder = read(&[
            ("generation_config.json", r#"{"eos_token_id": [7, 8]}"#),
            ("config.json", r#"{"eos_token_id": 8, "text_config": {"eos_token_id": [9, null]}}"#),
        ]);
        assert_eq!(folder.eos(), [7, 8, 9]);
    }

    #[test]
    fn special_tokens_map_fills_in() {
        let folder = read(&[
            ("special_tokens_map.json", r#"{"bos_token": "<s>", "eos_token": {"content": "x"}}"#),
            ("tokenizer_config.json", r#"{"eos_token": "</s>", "bos_token": null}"#),
        ]);
        let expected = json!({"bos_token": "<s>", "eos_token": "</s>"});
        assert_eq!(Value::from(folder.special_tokens()), expected);
    }

    #[test]
    fn special_tokens_are_strings_or_objects() {
        let config = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": null}"#;
        let tokens = read(&[("tokenizer_config.json", config)]).special_tokens();
        assert_eq!(Value::from(tokens), json!({"bos_token": "<s>", "eos_token": "</s>"}));
    }

    #[test]
    fn template_file_takes_precedence_and_a_list_may_hold_a_tool_template() {
        let key = ("tokenizer_config.json", r#"{"chat_template": "key"}"#);
        let list = r#"{"chat_template": [
            {"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#;
        for (files, [plain, tools]) in [
            (vec![key], ["key", "key"]),
            (vec![key, ("chat_template.json", r#"{"chat_template": "json"}"#)], ["json", "json"]),
            (vec![key, ("chat_template.jinja", "file")], ["file", "file"]),
            (vec![("tokenizer_config.json", list)], ["d", "t"]),
            (
                vec![
                    ("chat_template.jinja", "d"),
                    ("additional_chat_templates/tool_use.jinja", "t"),
                ],
                ["d", "t"],
            ),
        ] {
            let templates = templates(&files).expect("a template exists");
            assert_eq!(
                [templates.choose(false).source(), templates.choose(true).source()],
                [plain, tools]
            );
        }
    }

    #[test]
    fn errors_name_the_file() {
        let error = |files: &[(&str, &str)]| templates(files).expect_err("incomplete").to_string();
        assert!(error(&[]).contains("chat_template.jinja: is missing"));
        assert!(error(&[("chat_template.jinja", "{% if %}")]).contains("does not compile"));
        let damaged = folder(&[("config.json", "{")]);
        let message = Folder::read(damaged.path()).expect_err("config.json is damaged").to_string();
        assert!(message.contains("config.json: is damaged"), "{message}");
        let empty = tempfile::tempdir().expect("a temporary folder");
        let message = Folder::read(empty.path()).expect_err("the folder is empty").to_string();
        assert!(message.contains("config.json: is missing"), "{message}");
        let message = Folder::read(&empty.path().join("x"))
            .expect_err("the folder does not exist")
            .to_string();
        assert!(message.contains("is not a folder"), "{message}");
    }
}
