//! The small files of the folder that a GGUF file stands for.
//!
//! A path below the file names them: `model.gguf/config.json`. There are `config.json`, `tokenizer.json`,
//! `tokenizer_config.json` and `generation_config.json`. `chat_template.jinja` is a file beside it, `model.jinja` for
//! `model.gguf` and for `model-00001-of-00002.gguf`: it takes precedence over the template in the file, and base models have none.

use std::collections::HashSet;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::model::Model;
use crate::parts::Part;
use crate::reader::Header;
use crate::tokenizer::Vocabulary;

/// Texts of control tokens that end a turn. Converters name only one of them in the file.
const ENDS: [&str; 12] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "</s>",
    "<eos>",
    "<EOT>",
];

/// The chat template of a folder.
const TEMPLATE: &str = "chat_template.jinja";

/// Most bytes of the template beside a file.
const TEMPLATE_BYTES: u64 = 16 << 20;

/// Whether `path` is a GGUF file, by its name and its kind.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) && path.is_file()
}

/// The name of the model in a folder or in a GGUF file, for clients.
pub fn name_of(path: &Path) -> String {
    let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    if !is_gguf(path) {
        return file.into_owned();
    }
    match Part::of(&file) {
        Some(part) => part.stem.into(),
        None => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
    }
}

/// The GGUF file that `path` lies below, and the name of the file there.
pub fn within(path: &Path) -> Option<(&Path, &str)> {
    let file = path.ancestors().skip(1).find(|file| is_gguf(file))?;
    Some((file, path.strip_prefix(file).ok()?.to_str()?))
}

/// The file that `path` is read from: below a GGUF file, that file, or the template beside it.
pub fn on_disk(path: &Path) -> PathBuf {
    match within(path) {
        Some((file, TEMPLATE)) => template_beside(file),
        Some((file, _)) => file.into(),
        None => path.into(),
    }
}

/// Most bytes of a file that [`read_at`] reads as a whole. The largest tokenizers have 40 MB.
const FILE_BYTES: u64 = 256 << 20;

/// The bytes of a regular file, or of a file of the folder that a GGUF file stands for, as in `model.gguf/config.json`.
/// Never waits.
///
/// # Errors
/// The errors of [`steersman_files::read`] and [`read`].
pub fn read_at(path: &Path) -> io::Result<Vec<u8>> {
    match within(path) {
        Some((gguf, name)) => read(gguf, name),
        None => steersman_files::read(path, FILE_BYTES),
    }
}

/// The bytes of the file `name` of the folder that the GGUF file at `path` stands for.
///
/// # Errors
/// [`ErrorKind::NotFound`] if there is no such file, [`ErrorKind::InvalidData`] if the GGUF file is not a model that
/// can be read; the message has the reason.
pub fn read(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let invalid = |error: Error| io::Error::new(ErrorKind::InvalidData, error);
    let json = |value: Result<Value>| Ok(value.map_err(invalid)?.to_string().into_bytes());
    match name {
        "config.json" => json(Model::open(path).and_then(|model| model.config())),
        "tokenizer.json" => {
            let header = Header::read_all(path).map_err(invalid)?;
            Vocabulary::of(&header).and_then(|vocabulary| vocabulary.json()).map_err(invalid)
        }
        "tokenizer_config.json" => json(tokenizer_config(path)),
        "generation_config.json" => json(generation_config(path)),
        TEMPLATE => steersman_files::read(&template_beside(path), TEMPLATE_BYTES),
        _ => Err(ErrorKind::NotFound.into()),
    }
}

/// The template beside the file.
pub fn template_beside(path: &Path) -> PathBuf {
    match path.file_name().and_then(|name| Part::of(name.to_str()?)) {
        Some(part) => path.with_file_name(format!("{}.jinja", part.stem)),
        None => path.with_extension("jinja"),
    }
}

/// Special tokens and chat templates.
fn tokenizer_config(path: &Path) -> Result<Value> {
    let header = Header::read_all(path)?;
    let vocabulary = Vocabulary::of(&header)?;
    let mut config = Map::new();
    let names = [("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")];
    for (theirs, ours) in names {
        if let Some((_, token)) = vocabulary.special(theirs)? {
            config.insert(format!("{ours}_token"), token.into());
        }
    }
    let key = "tokenizer.chat_template";
    let named = header.values().filter_map(|(name, _)| name.strip_prefix(&format!("{key}.")));
    let mut named: Vec<_> = named.collect();
    named.sort_unstable();
    let mut templates = Vec::new();
    for name in named {
        templates.push(json!({"name": name, "template": header.text(&format!("{key}.{name}"))?}));
    }
    match header.text(key)? {
        Some(template) if templates.is_empty() => {
            config.insert("chat_template".into(), template.into());
        }
        Some(template) => {
            templates.push(json!({"name": "default", "template": template}));
            config.insert("chat_template".into(), templates.into());
        }
        None if !templates.is_empty() => {
            config.insert("chat_template".into(), templates.into());
        }
        None => {}
    }
    Ok(config.into())
}

/// End-of-turn tokens, and sampling if the file states it.
fn generation_config(path: &Path) -> Result<Value> {
    let header = Header::read_all(path)?;
    let vocabulary = Vocabulary::of(&header)?;
    let mut ends = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ends.extend(vocabulary.special(name)?.map(|(id, _)| id));
    }
    let controls = vocabulary.controls().filter(|(_, token)| ENDS.contains(token));
    ends.extend(controls.map(|(id, _)| id as u64));
    let mut seen = HashSet::new();
    ends.retain(|id| seen.insert(*id));
    let mut config = Map::new();
    config.insert("eos_token_id".into(), ends.into());
    for (theirs, ours) in
        [("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p")]
    {
        if let Some(value) = header.float(&format!("general.sampling.{theirs}"))? {
            config.insert(ours.into(), value.into());
        }
    }
    Ok(config.into())
}
