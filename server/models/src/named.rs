//! What the name of a model means: the one place for `--model`, the configuration, and all
//! commands.
//!
//! A name is a folder or a GGUF file that exists, or else the id of a model on a hub, or else a
//! short name of [`catalogue`].

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use steersman_gguf::files;
pub use steersman_gguf::files::name_of as name_of_folder;

use crate::catalogue::{self, Named};
use crate::hub::Hub;

/// Most names in a message.
const NEAR: usize = 3;

/// Addresses that a name may begin with.
const HOSTS: [&str; 2] = ["hf.co/", "huggingface.co/"];

/// What the path of a model in a configuration or on the command line is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamedAs<'a> {
    /// Empty: the bundled model.
    Nothing,
    /// A folder with a model, or a GGUF file.
    Folder(PathBuf),
    /// The id of a model on a hub: `owner/name`, and of GGUF files `owner/name:QUANTIZATION`.
    Repo(&'a str),
}

/// What `path` is. A folder or file that exists takes precedence over a repo, and that over a short
/// name, which gets its size by `room` if it has none ([`catalogue::room`]).
///
/// # Errors
/// If it is none of these; says what it may have been meant to be.
pub fn named_as(path: &str, room: u64) -> Result<NamedAs<'_>> {
    if path.is_empty() {
        return Ok(NamedAs::Nothing);
    }
    if Path::new(path).exists() {
        return local(path).map(NamedAs::Folder);
    }
    let id = without_host(path);
    ensure!(!is_written_as_path(id), "{path} does not exist");
    model_id(id, room).map(NamedAs::Repo)
}

/// The folder with a model, or the GGUF file, at `path`; `None` if there is none.
pub fn folder(path: &str) -> Option<PathBuf> {
    if path.is_empty() || !Path::new(path).exists() {
        return None;
    }
    local(path).ok()
}

/// The name without the address of Hugging Face, as users of other programs write it: `hf.co/owner/name:Q4_K_M`.
fn without_host(name: &str) -> &str {
    let name = name.strip_prefix("https://").unwrap_or(name);
    HOSTS.iter().find_map(|host| name.strip_prefix(host)).unwrap_or(name)
}

/// The id on a hub of the model that `name` stands for: the same, or that of a short name, as in [`named_as`]. Looks at
/// no file.
///
/// # Errors
/// If it is neither; with names that are near.
pub fn model_id(name: &str, room: u64) -> Result<&str> {
    let name = without_host(name);
    if is_model_id(name) {
        return Ok(name);
    }
    match catalogue::find(name) {
        Ok(Some(named)) => Ok(named.entry(room).repo),
        Err(problem) => bail!(problem),
        Ok(None) => {
            let names = catalogue::names();
            let near = near(name.split(':').next().unwrap_or(name), &names);
            let advice = match near.is_empty() {
                true => format!(
                    "the short names are {}; `steersman search WORDS` finds others",
                    names.join(", ")
                ),
                false => format!("did you mean {}?", near.join(" or ")),
            };
            bail!(
                "there is no model `{name}`: it is neither a file, nor the id of a Hugging Face \
                 repo (owner/name, for GGUF files owner/name:QUANTIZATION), nor a short name; \
                 {advice}"
            )
        }
    }
}

/// The id on a hub of the one model that `name` stands for; `None` if it may be of any size.
fn only_id(name: &str) -> Option<&str> {
    let name = without_host(name);
    match catalogue::find(name) {
        _ if is_model_id(name) => Some(name),
        Ok(Some(Named::One(entry))) => Some(entry.repo),
        _ => None,
    }
}

/// Whether the model that a server calls `served` is the one that a user calls `asked`: the same
/// model on a hub, in any size or quantization if `asked` has none, or the folder of this name. A server that calls a
/// model by a name without a size does not say which it is.
pub fn same_model(served: &str, asked: &str) -> bool {
    let asked = asked.strip_suffix(":latest").unwrap_or(asked);
    if served == asked {
        return true;
    }
    if Path::new(asked).exists() {
        return local(asked).is_ok_and(|folder| name_of_folder(&folder) == served);
    }
    if let Ok(Some(any @ Named::Any(sizes))) = catalogue::find(asked) {
        let is_one = |id: &str| sizes.iter().any(|entry| entry.repo == id);
        return catalogue::find(served) == Ok(Some(any)) || only_id(served).is_some_and(is_one);
    }
    let (Some(served), Some(asked)) = (only_id(served), only_id(asked)) else { return false };
    served == asked || served.split_once(':').is_some_and(|(repo, _)| repo == asked)
}

/// Whether the files of the model that `path` names are on this machine; otherwise they would be
/// downloaded. `room` is that of [`named_as`].
///
/// # Errors
/// If `path` names no model, or may not be downloaded.
pub fn is_here(path: &str, room: u64) -> Result<bool> {
    let repo = match named_as(path, room)? {
        NamedAs::Nothing => return Ok(true),
        NamedAs::Folder(folder) => {
            let has_tokenizer = files::is_gguf(&folder) || folder.join("tokenizer.json").is_file();
            ensure!(has_tokenizer, "{path} is not a model: it has no tokenizer.json");
            return Ok(true);
        }
        NamedAs::Repo(repo) => repo,
    };
    let hub = Hub::from_env();
    let cached = hub.cached(repo).is_some();
    if !cached {
        hub.may_download(repo)?;
    }
    Ok(cached)
}

/// The folder or the GGUF file at `path`, which exists.
fn local(path: &str) -> Result<PathBuf> {
    let folder = Path::new(path);
    if files::is_gguf(folder) {
        // Not resolved: the hub's cache links to files without an ending.
        return std::path::absolute(folder).with_context(|| format!("reading {path}"));
    }
    let folder = folder.canonicalize().with_context(|| format!("reading {path}"))?;
    ensure!(
        folder.is_dir(),
        "{path} is a file; use the folder that contains config.json, or a GGUF file"
    );
    if !folder.join("config.json").is_file() {
        let gguf = gguf_in(&folder);
        let gguf = gguf.map(|file| format!("; use the GGUF file in it: {}", file.display()));
        bail!("{path} is not a model: it has no config.json{}", gguf.unwrap_or_default());
    }
    Ok(folder)
}

/// The first GGUF file in a folder.
fn gguf_in(folder: &Path) -> Option<PathBuf> {
    let entries = folder.read_dir().ok()?.flatten().map(|entry| entry.path());
    entries.filter(|path| files::is_gguf(path)).min()
}

/// Whether a text can only be a path: ids have one `/` and no ending of a file.
fn is_written_as_path(text: &str) -> bool {
    let lower = text.to_lowercase();
    let has_ending = [".gguf", ".safetensors", ".json"].iter().any(|end| lower.ends_with(end));
    has_ending
        || text.starts_with(['.', '~'])
        || text.contains('\\')
        || (text.contains('/') && !is_model_id(text))
}

/// Whether `text` is `owner/name`, in the characters that the hub allows.
pub fn is_repo_id(text: &str) -> bool {
    text.split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name))
}

/// Whether `text` is the id of a model on a hub: `owner/name` or `owner/name:QUANTIZATION`.
pub fn is_model_id(text: &str) -> bool {
    let (repo, tag) = split_id(text);
    is_repo_id(repo) && tag.is_none_or(is_part)
}

/// The repo and the quantization of an id.
pub fn split_id(id: &str) -> (&str, Option<&str>) {
    id.split_once(':').map_or((id, None), |(repo, tag)| (repo, Some(tag)))
}

fn is_part(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !part.is_empty() && !part.starts_with('.') && part.chars().all(allowed)
}

/// Most bytes of a name that others are compared with, which takes as long as the product of two lengths.
const LONGEST: usize = 256;

/// The names among `known` that are like `name`, the nearest first; none for a name longer than [`LONGEST`].
pub fn near<'a>(name: &str, known: &[&'a str]) -> Vec<&'a str> {
    if name.len() > LONGEST {
        return Vec::new();
    }
    let lower = |text: &str| text.to_lowercase();
    let mut near: Vec<_> = known
        .iter()
        .filter_map(|other| {
            let (name, other_name) = (lower(name), lower(other));
            let contains = other_name.contains(&name) || name.contains(&other_name);
            let distance = if contains { 1 } else { strsim::levenshtein(&name, &other_name) };
            (distance <= name.len() / 3 + 1).then_some((distance, *other))
        })
        .collect();
    near.sort();
    near.truncate(NEAR);
    near.into_iter().map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn repo_ids_have_an_owner_and_a_name() {
        for (text, expected) in [
            ("mlx-community/Qwen3.5-4B-4bit", true),
            ("owner/name/more", false),
            ("./models/x", false),
            ("/models/x", false),
            ("../x", false),
            ("name", false),
            ("owner/", false),
            ("owner/na me", false),
        ] {
            assert_eq!(is_repo_id(text), expected, "{text}");
        }
        for (text, expected) in [
            ("owner/name", true),
            ("owner/name-GGUF:Q4_K_M", true),
            ("owner/name:", false),
            ("owner/name:../x", false),
            ("owner/name:a/b", false),
            ("qwen3:4b", false),
        ] {
            assert_eq!(is_model_id(text), expected, "{text}");
        }
    }

    #[test]
    fn gguf_files_are_models_by_their_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tiny-q4_0.gguf");
        fs::write(&file, "GGUF").unwrap();
        let path = file.to_str().unwrap();
        assert_eq!(named_as(path, 0).unwrap(), NamedAs::Folder(file.clone()));
        assert!(is_here(path, 0).unwrap());
        assert_eq!(self::folder(path), Some(file.clone()));
        for absent in ["", "qwen3:4b", "./absent"] {
            assert_eq!(self::folder(absent), None, "{absent}");
        }
        assert_eq!(name_of_folder(&file), "tiny-q4_0");
        let error = named_as(folder.path().to_str().unwrap(), 0).unwrap_err().to_string();
        assert!(error.contains("has no config.json; use the GGUF file in it"), "{error}");
        assert!(error.contains("tiny-q4_0.gguf"), "{error}");
        let other = folder.path().join("tiny.bin");
        fs::write(&other, "x").unwrap();
        let error = named_as(other.to_str().unwrap(), 0).unwrap_err().to_string();
        assert!(error.contains("or a GGUF file"), "{error}");
    }

    /// A missing file was said to be "neither a folder nor a Hugging Face repo id".
    #[test]
    fn a_file_or_folder_that_does_not_exist_is_said_to_be_missing() {
        for path in [
            "./missing.gguf",
            "missing.GGUF",
            "models/missing.gguf",
            "/no/such/folder",
            "~/models/x",
            "../x",
            "a/b/c",
            "./x/model.safetensors",
        ] {
            let error = named_as(path, 0).unwrap_err().to_string();
            assert_eq!(error, format!("{path} does not exist"));
        }
    }

    #[test]
    fn short_names_are_repos_and_unknown_ones_have_near_ones() {
        let repo = NamedAs::Repo("mlx-community/Qwen3-4B-4bit");
        assert_eq!(named_as("qwen3:4b", 0).unwrap(), repo);
        assert_eq!(named_as("Qwen3:4B", 0).unwrap(), repo);
        assert_eq!(named_as("qwen3", 6 << 30).unwrap(), repo);
        assert_eq!(named_as("qwen3", 0).unwrap(), NamedAs::Repo("mlx-community/Qwen3-0.6B-4bit"));
        let id = "owner/name-GGUF:Q4_K_M";
        assert_eq!(named_as(id, 0).unwrap(), NamedAs::Repo(id));
        for host in ["hf.co/", "huggingface.co/", "https://huggingface.co/"] {
            assert_eq!(named_as(&format!("{host}{id}"), 0).unwrap(), NamedAs::Repo(id));
        }
        for (name, words) in [
            ("qwen3:5b", "sizes of qwen3: 0.6b"),
            ("qwn3:4b", "did you mean qwen3"),
            ("lama3.2", "did you mean llama3.2?"),
            ("something-else", "the short names are qwen3.5, qwen3, llama3.2"),
            ("owner/name:a/b", "does not exist"),
        ] {
            let error = named_as(name, 0).unwrap_err().to_string();
            assert!(error.contains(words), "`{words}` is not in {error}");
        }
    }

    #[test]
    fn a_served_model_is_found_by_any_of_its_names() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("mine");
        fs::create_dir(&model).unwrap();
        fs::write(model.join("config.json"), "{}").unwrap();
        let path = model.to_str().unwrap();
        for (served, asked, expected) in [
            ("qwen3:4b", "qwen3:4b", true),
            ("qwen3:4b", "mlx-community/Qwen3-4B-4bit", true),
            ("mlx-community/Qwen3-4B-4bit", "QWEN3:4b", true),
            ("mlx-community/Qwen3-4B-4bit", "qwen3", true),
            ("qwen3:4b", "qwen3", true),
            ("qwen3:4b", "qwen3:latest", true),
            ("qwen3:4b", "qwen3:8b", false),
            ("qwen3.5:4b", "qwen3", false),
            ("qwen3", "qwen3:8b", false),
            ("Qwen3:latest", "qwen3", true),
            ("mine", "mine:latest", true),
            ("mine", path, true),
            ("other", path, false),
            ("a/b-GGUF:Q8_0", "a/b-GGUF", true),
            ("a/b-GGUF", "a/b-GGUF:Q8_0", false),
            ("tiny", "owner/tiny", false),
        ] {
            assert_eq!(same_model(served, asked), expected, "{served}, {asked}");
        }
    }
}
