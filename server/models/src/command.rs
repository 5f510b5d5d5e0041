//! `steersman list`, `show`, `pull` and `rm`: the models on this machine. `steersman search`: those on the hub.

mod search;

use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use indicatif::HumanBytes;
use serde_json::{Value, json};

use crate::catalogue::{self, Named};
use crate::facts::{self, CACHE_TOKENS, CONFIG_BYTES, Facts, Numbers};
use crate::hub::{self, Hub, Plan};
use crate::machine;
use crate::named::{NamedAs, folder, name_of_folder, named_as, split_id};
use crate::snapshots::{self, Snapshot, similar};

pub use self::search::{Fit, Search, search};

/// Tokens of the request that a model is expected to have room for.
const REQUEST_TOKENS: u64 = 8192;

/// The models on this machine: the bundled one, those of the configuration, and those in the cache that
/// Hugging Face's tools share.
#[derive(Debug, Args)]
pub struct List {
    /// Print JSON: a list of objects
    #[arg(long)]
    json: bool,
}

/// One model: family, layers, numbers, files, and the memory that it needs.
#[derive(Debug, Args)]
pub struct Show {
    /// Name as in `steersman list`, a short name as qwen3:4b, a local folder or a GGUF file
    #[arg(value_name = "MODEL")]
    model: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Download a model from Hugging Face, or continue a download. Says first what it needs.
#[derive(Debug, Args)]
pub struct Pull {
    /// Hugging Face repo id (owner/name), for GGUF files with a quantization (owner/name:Q4_K_M), or a short
    /// name: qwen3:4b, or qwen3 for the size that fits this machine
    #[arg(value_name = "MODEL")]
    model: String,
}

/// Remove a downloaded model from the cache that Hugging Face's tools share.
#[derive(Debug, Args)]
pub struct Remove {
    /// Exact name as in `steersman list`, or a short name with its size
    #[arg(value_name = "MODEL")]
    model: String,
    /// Remove it even if the configuration names it
    #[arg(long)]
    force: bool,
}

/// A model that the configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configured {
    /// The key, as `models.small.path`.
    pub key: String,
    /// The name for clients.
    pub name: String,
    /// A local folder or a repo id.
    pub path: String,
}

/// Where models are, and what they may take.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The cache and where to download from.
    pub hub: Hub,
    /// Name and folder of the bundled model.
    pub bundled: (String, PathBuf),
    /// The models of the configuration.
    pub configured: Vec<Configured>,
    /// The families that the engine loads.
    pub families: Vec<&'static str>,
    /// How this machine keeps weights.
    pub numbers: Numbers,
    /// Most bytes of all weights and caches.
    pub memory_limit: u64,
    /// Bytes by which a short name without a size gets one ([`catalogue::room`]).
    pub room: u64,
}

/// A model that can be listed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Listed {
    name: String,
    /// Where it is known from.
    sources: Vec<String>,
    folder: Option<PathBuf>,
    /// `on disk`, `incomplete` or `missing`.
    state: &'static str,
    /// Bytes on disk.
    bytes: Option<u64>,
}

impl Sources {
    fn all(&self) -> Result<Vec<Listed>> {
        let (name, folder) = self.bundled.clone();
        let bytes = Facts::read(&folder).ok().map(|facts| facts.file_bytes());
        let sources = vec!["bundled".into()];
        let mut all = vec![Listed { name, sources, folder: Some(folder), state: "on disk", bytes }];
        all.extend(snapshots::list(&self.hub)?.into_iter().flat_map(Listed::of));
        for Configured { key, name, path } in &self.configured {
            // The name in the configuration may differ from that of the repo or the folder.
            let key = if *name == path_name(path, &self.bundled.0) {
                key.clone()
            } else {
                format!("{key} ({name})")
            };
            let (folder, id) = match named_as(path, self.room) {
                _ if *path == self.bundled.0 => (Some(self.bundled.1.clone()), None),
                Ok(NamedAs::Folder(folder)) => (Some(folder), None),
                Ok(NamedAs::Nothing) => (Some(self.bundled.1.clone()), None),
                Ok(NamedAs::Repo(id)) => (self.hub.cached(id), Some(id)),
                Err(_) => (None, None),
            };
            let is_same = |listed: &&mut Listed| match &folder {
                Some(folder) => listed.folder.as_ref() == Some(folder),
                None => Some(listed.name.as_str()) == id,
            };
            match all.iter_mut().find(is_same) {
                Some(listed) => listed.sources.push(key),
                None => {
                    let state = if folder.is_some() { "on disk" } else { "missing" };
                    let facts = folder.as_deref().and_then(|folder| Facts::read(folder).ok());
                    let bytes = facts.map(|facts| facts.file_bytes());
                    let name = path_name(path, &self.bundled.0);
                    all.push(Listed { name, sources: vec![key], folder, state, bytes });
                }
            }
        }
        Ok(all)
    }

    fn find(&self, model: &str) -> Result<Listed> {
        let all = self.all()?;
        let by_name = |listed: &&Listed| listed.name == model;
        if let Some(listed) = all.iter().find(by_name) {
            return Ok(listed.clone());
        }
        let of_client = self.configured.iter().find(|configured| configured.name == model);
        if let Some(configured) = of_client
            && configured.path != model
        {
            let path = path_name(&configured.path, &self.bundled.0);
            return all
                .into_iter()
                .find(|listed| listed.name == path)
                .with_context(|| format!("{model} is missing"));
        }
        let named = named_as(model, self.room)?;
        let is_short = matches!(&named, NamedAs::Repo(id) if *id != model);
        let id = match named {
            NamedAs::Folder(folder) => {
                let (name, sources) = (name_of_folder(&folder), vec!["folder".into()]);
                let state = "on disk";
                return Ok(Listed { name, sources, folder: Some(folder), state, bytes: None });
            }
            NamedAs::Nothing => &self.bundled.0,
            NamedAs::Repo(id) => id,
        };
        // A short name, or a repo without the quantization of its files.
        let folder = self.hub.cached(id);
        let is_it = |listed: &&Listed| match &folder {
            Some(folder) => listed.folder.as_ref() == Some(folder),
            None => listed.name == id,
        };
        if let Some(listed) = all.iter().find(is_it) {
            return Ok(listed.clone());
        }
        ensure!(
            !is_short,
            "{model} is {id}, which is not on this machine; `steersman pull {model}` downloads it"
        );
        let names: Vec<_> = all.iter().map(|listed| listed.name.as_str()).collect();
        bail!(
            "there is no model `{model}` on this machine{}; `steersman pull {model}` downloads it if it is a \
             Hugging Face repo",
            similar(model, &names)
        );
    }
}

/// The name of a model by its path.
fn path_name(path: &str, bundled: &str) -> String {
    match folder(path) {
        _ if path.is_empty() => bundled.into(),
        Some(folder) => name_of_folder(&folder),
        None => path.into(),
    }
}

impl Listed {
    /// The models of a snapshot: one, several GGUF files, or one that is incomplete.
    fn of(snapshot: Snapshot) -> Vec<Self> {
        let Snapshot { repo_id, folder: _, models, bytes, .. } = snapshot;
        let listed = |name, folder, state, bytes| Self {
            name,
            sources: vec!["cache".into()],
            folder,
            state,
            bytes: Some(bytes),
        };
        if models.is_empty() {
            return vec![listed(repo_id, None, "incomplete", bytes)];
        }
        let is_alone = models.len() == 1;
        let one = |(tag, path): (Option<String>, PathBuf)| {
            let file = std::fs::metadata(&path).map_or(0, |file| file.len());
            let bytes = if is_alone || tag.is_none() { bytes } else { file };
            let name = tag.map_or_else(|| repo_id.clone(), |tag| format!("{repo_id}:{tag}"));
            listed(name, Some(path), "on disk", bytes)
        };
        models.into_iter().map(one).collect()
    }

    /// What its files say; `None` if they are not here or cannot be read.
    fn facts(&self) -> Option<Facts> {
        Facts::read(self.folder.as_deref()?).ok()
    }

    /// The state of the model on this machine, or that the engine cannot load it.
    fn shown_state(&self, facts: Option<&Facts>, families: &[&str]) -> &'static str {
        let can_load = facts.is_some_and(|facts| families.contains(&facts.family.as_str()));
        if self.folder.is_some() && !can_load { "not supported" } else { self.state }
    }
}

/// Prints all models.
///
/// # Errors
/// If the cache cannot be read, or `out` not be written.
pub fn list(sources: &Sources, options: &List, out: &mut impl Write) -> Result<()> {
    let all = sources.all()?;
    if options.json {
        let row = |listed: &Listed| object(sources, listed, listed.facts().as_ref());
        let rows: Vec<Value> = all.iter().map(row).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&rows)?)?;
        return Ok(());
    }
    let titles = ["NAME", "SIZE", "FAMILY", "QUANTIZATION", "CONTEXT", "STATE", "FROM"];
    let mut rows = vec![titles.map(String::from)];
    for listed in &all {
        let facts = listed.facts();
        let text = |value: Option<String>| value.unwrap_or_else(|| "-".into());
        rows.push([
            listed.name.clone(),
            text(listed.bytes.map(|bytes| HumanBytes(bytes).to_string())),
            text(facts.as_ref().map(|facts| facts.family.clone())),
            text(facts.as_ref().map(|facts| facts.quantization.clone())),
            text(facts.as_ref().and_then(|facts| facts.context).map(|tokens| tokens.to_string())),
            listed.shown_state(facts.as_ref(), &sources.families).into(),
            listed.sources.join(", "),
        ]);
    }
    write!(out, "{}", table(&rows))?;
    Ok(())
}

/// Columns that are as wide as their widest cell.
fn table<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; COLUMNS] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// A model as JSON.
fn object(sources: &Sources, listed: &Listed, facts: Option<&Facts>) -> Value {
    let mut object = json!({
        "name": listed.name,
        "state": listed.shown_state(facts, &sources.families),
        "from": listed.sources,
        "folder": listed.folder,
        "size": listed.bytes,
    });
    if let Some(facts) = facts {
        let weights = facts.weight_bytes(sources.numbers);
        object["size"] = listed.bytes.unwrap_or_else(|| facts.file_bytes()).into();
        let is_supported = sources.families.contains(&facts.family.as_str());
        object["family"] = facts.family.as_str().into();
        object["parameters"] = facts.parameters.into();
        object["layers"] = facts.layers.into();
        object["quantization"] = facts.quantization.as_str().into();
        object["context"] = facts.context.into();
        object["memory"] = json!({
            "weights": weights,
            "cache_per_1000_tokens": facts.cache_bytes(sources.numbers),
            "limit": sources.memory_limit,
            "fits": is_supported && needed(facts, sources.numbers) <= sources.memory_limit,
        });
    }
    object
}

/// Bytes of the weights and of one request of [`REQUEST_TOKENS`] tokens, or of the whole context.
fn needed(facts: &Facts, numbers: Numbers) -> u64 {
    let tokens = facts.context.unwrap_or(REQUEST_TOKENS).min(REQUEST_TOKENS);
    let cache = facts.cache_bytes(numbers).unwrap_or(0);
    facts.weight_bytes(numbers) + cache * tokens.div_ceil(CACHE_TOKENS)
}

/// Prints one model.
///
/// # Errors
/// If there is no such model on this machine, or it cannot be read.
pub fn show(sources: &Sources, options: &Show, out: &mut impl Write) -> Result<()> {
    let listed = sources.find(&options.model)?;
    let Some(folder) = &listed.folder else {
        bail!(
            "{} is {}: `steersman pull {0}` downloads what is missing",
            listed.name,
            listed.state
        );
    };
    let facts = Facts::read(folder)?;
    if options.json {
        let mut object = object(sources, &listed, Some(&facts));
        let file = |(name, bytes): &(String, u64)| json!({"name": name, "size": bytes});
        object["files"] = facts.files.iter().map(file).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&object)?)?;
        return Ok(());
    }
    let unknown = || "not in config.json".to_string();
    let number = |value: Option<u64>| value.map_or_else(unknown, |value| value.to_string());
    let cache = facts.cache_bytes(sources.numbers);
    let cache = cache.map_or_else(unknown, |bytes| HumanBytes(bytes).to_string());
    let fits = match facts::check_family(&facts.family, &sources.families) {
        Ok(()) => fits(needed(&facts, sources.numbers), sources.memory_limit),
        Err(problem) => format!("no: {problem}"),
    };
    let rows = [
        ["name", &listed.name],
        ["from", &listed.sources.join(", ")],
        ["folder", &folder.display().to_string()],
        ["family", &facts.family],
        ["parameters", &millions(facts.parameters)],
        ["layers", &number(facts.layers)],
        ["quantization", &facts.quantization],
        ["context", &number(facts.context)],
        [
            "weights in memory",
            &format!("about {}", HumanBytes(facts.weight_bytes(sources.numbers))),
        ],
        ["cache of 1,000 tokens", &cache],
        ["fits", &fits],
        ["size on disk", &HumanBytes(facts.file_bytes()).to_string()],
    ];
    write!(out, "{}", table(&rows.map(|row| row.map(String::from))))?;
    let files = facts
        .files
        .iter()
        .map(|(name, bytes)| [format!("  {name}"), HumanBytes(*bytes).to_string()]);
    write!(out, "{}", table(&files.collect::<Vec<_>>()))?;
    Ok(())
}

fn millions(parameters: u64) -> String {
    match parameters {
        1_000_000_000.. => format!("{:.1} billion", parameters as f64 / 1e9),
        _ => format!("{:.1} million", parameters as f64 / 1e6),
    }
}

/// Whether weights and a request fit, in words.
fn fits(needed: u64, limit: u64) -> String {
    let answer = if needed <= limit { "yes" } else { "no" };
    format!(
        "{answer}: the weights and a request of {REQUEST_TOKENS} tokens take about {}, the limit \
         is {}",
        HumanBytes(needed),
        HumanBytes(limit)
    )
}

/// What a download needs, and what there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Bytes of all files.
    pub total: u64,
    /// Bytes that are on this machine.
    pub here: u64,
    /// Bytes that the disk of the cache has free.
    pub disk_free: Option<u64>,
    /// Bytes of the weights in memory, as an estimate.
    pub memory: u64,
    /// Most bytes of weights and caches.
    pub memory_limit: u64,
    /// Bits of a quantization that fits if this model does not.
    pub quantization: Option<u64>,
}

impl Needs {
    /// Those of `plan`, with the hub's cache in `cache` and weights of at most `memory_limit` bytes.
    pub fn of(plan: &Plan, cache: &Path, numbers: Numbers, memory_limit: u64) -> Self {
        let weights = plan.weight_bytes();
        // A GGUF file has none beside it.
        let config = plan.snapshot.join("config.json");
        let config = steersman_files::read_text(&config, CONFIG_BYTES).unwrap_or_default();
        let is_packed = plan.is_gguf() || config.contains("\"quantization");
        let memory = in_memory(weights, is_packed, numbers);
        // With a scale and a bias of 16 bits for 64 numbers.
        let packed = |bits: u64| weights / 32 * (2 * bits + 1);
        let limit = memory_limit;
        let fits = |bits: &u64| packed(*bits) + packed(*bits) / 8 <= limit;
        let smaller = [8, 4].into_iter().find(fits);
        Self {
            total: plan.bytes(),
            here: plan.bytes_here(),
            disk_free: machine::disk_free(cache),
            memory,
            memory_limit: limit,
            quantization: smaller.filter(|_| !is_packed && memory > limit),
        }
    }

    /// Bytes that are missing.
    pub fn left(&self) -> u64 {
        self.total.saturating_sub(self.here)
    }

    /// What speaks against the download for lack of disk space.
    ///
    /// # Errors
    /// With what is missing.
    pub fn check_disk(&self) -> Result<()> {
        let (left, free) = (self.left(), self.disk_free.unwrap_or(u64::MAX));
        ensure!(
            left <= free,
            "the disk has {} free, and {} are to be downloaded: make room, or move the cache with \
             HF_HUB_CACHE",
            HumanBytes(free),
            HumanBytes(left)
        );
        Ok(())
    }

    /// One line each for download, disk and memory.
    pub fn describe(&self) -> String {
        let mut text = format!(
            "download: {} of {}, {} are here\n",
            HumanBytes(self.left()),
            HumanBytes(self.total),
            HumanBytes(self.here)
        );
        if let Some(free) = self.disk_free {
            let _ = writeln!(text, "disk: {} free", HumanBytes(free));
        }
        let answer = if self.memory <= self.memory_limit { "fit into" } else { "do not fit into" };
        let _ = write!(
            text,
            "memory: the weights take about {}, which {answer} the limit of {}",
            HumanBytes(self.memory),
            HumanBytes(self.memory_limit)
        );
        if let Some(bits) = self.quantization {
            let _ = write!(text, "; with {bits} bits they would fit: look for such a repo");
        }
        text
    }
}

/// Bytes in memory of weights that take `bytes` in files, as an estimate.
fn in_memory(bytes: u64, is_packed: bool, numbers: Numbers) -> u64 {
    // Checkpoints that are not packed have floats of 16 bits. Packed ones have some floats.
    match is_packed {
        true => bytes.saturating_add(bytes / 8),
        false => (bytes / 2).saturating_mul(numbers.short_float_bytes()),
    }
}

/// What a user is told about a short name without a size, which has `room`; `None` for another name.
pub fn choice(model: &str, room: u64) -> Option<String> {
    catalogue::find(model).ok()??.choice(room)
}

/// Downloads a model, with a progress bar.
///
/// # Errors
/// If there is no such repo, it cannot be loaded, there is not enough disk space, or the download fails; it can be continued.
pub fn pull(sources: &Sources, options: &Pull, out: &mut impl Write) -> Result<()> {
    let model = &options.model;
    if model == &sources.bundled.0 {
        writeln!(out, "{model} is part of the program: nothing is downloaded")?;
        return Ok(());
    }
    if let Some(choice) = choice(model, sources.room) {
        writeln!(out, "{choice}")?;
    }
    let repo = match named_as(model, sources.room)? {
        NamedAs::Repo(repo) => repo,
        NamedAs::Folder(path) => {
            writeln!(out, "{} is on this machine: nothing is downloaded", path.display())?;
            return Ok(());
        }
        NamedAs::Nothing => bail!("name a model: `steersman pull --help` shows how"),
    };
    if let Some(folder) = sources.hub.cached(repo) {
        writeln!(out, "{repo} is complete in {}", folder.display())?;
        return Ok(());
    }
    let plan = sources.hub.plan(repo)?;
    plan.check_family(&sources.families)?;
    let needs = Needs::of(&plan, &sources.hub.cache, sources.numbers, sources.memory_limit);
    let files = if plan.files.len() == 1 { "file" } else { "files" };
    writeln!(out, "{repo}, commit {}, {} {files}", plan.sha, plan.files.len())?;
    writeln!(out, "{}", needs.describe())?;
    needs.check_disk()?;
    let bar = hub::bar(&plan);
    let folder = sources.hub.download(&plan, &mut |progress| hub::show(&bar, progress));
    bar.finish_and_clear();
    writeln!(out, "{repo} is complete in {}", folder?.display())?;
    Ok(())
}

/// Removes a model from the cache.
///
/// # Errors
/// If the cache has no model of exactly this name, or the configuration names it.
pub fn remove(sources: &Sources, options: &Remove, out: &mut impl Write) -> Result<()> {
    let model = &options.model;
    ensure!(*model != sources.bundled.0, "{model} is part of the program and cannot be removed");
    // A name without a size could mean another one than the user does.
    let id = match catalogue::find(model) {
        Ok(Some(Named::One(entry))) => entry.repo,
        _ => model.as_str(),
    };
    let (repo, tag) = split_id(id);
    let all = snapshots::list(&sources.hub)?;
    let in_cache = all.iter().find(|snapshot| snapshot.repo_id == repo);
    if let (Some(tag), Some(snapshot)) = (tag, in_cache) {
        let has = |name: &Option<String>| {
            name.as_deref().is_some_and(|name| name.eq_ignore_ascii_case(tag))
        };
        let is_alone = snapshot.models.len() == 1 && has(&snapshot.models[0].0);
        ensure!(
            is_alone,
            "{repo} has {} models on this machine: `steersman rm {repo}` removes them together",
            snapshot.models.len()
        );
    }
    let root = in_cache.and_then(|snapshot| snapshot.root().canonicalize().ok());
    let is_in_repo = |files: &Path| {
        let files = files.canonicalize().ok();
        files.zip(root.as_ref()).is_some_and(|(files, root)| files.starts_with(root))
    };
    let is_user = |configured: &&Configured| match named_as(&configured.path, sources.room) {
        Ok(NamedAs::Repo(id)) => split_id(id).0 == repo,
        Ok(NamedAs::Folder(files)) => configured.path == *model || is_in_repo(&files),
        _ => configured.path == *model,
    };
    let users = sources.configured.iter().filter(is_user);
    let keys: Vec<_> = users.map(|configured| configured.key.as_str()).collect();
    ensure!(
        options.force || keys.is_empty() || in_cache.is_none(),
        "the configuration names {model} ({}); with --force it is removed anyway",
        keys.join(", ")
    );
    if in_cache.is_none() && folder(model).is_some() {
        bail!("{model} is a folder of yours, not in the cache: remove it yourself");
    }
    let removed = snapshots::remove(&sources.hub, repo)?;
    writeln!(out, "removed {}, {}", removed.repo_id, HumanBytes(removed.bytes))?;
    Ok(())
}

#[cfg(test)]
mod tests;
