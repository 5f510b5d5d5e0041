//! `steersman search`: models on the hub, and which of them this machine can serve.

use std::io::Write;

use anyhow::Result;
use clap::Args;
use indicatif::HumanBytes;
use serde_json::{Value, json};

use super::{Sources, in_memory, table};
use crate::facts::Numbers;
use crate::hub::{Form, Match};

/// Search Hugging Face for models, and say which this machine can serve. Downloads nothing.
#[derive(Debug, Args)]
pub struct Search {
    /// Words of the name, as: qwen3 4bit
    #[arg(value_name = "WORDS", required = true)]
    pub(super) words: Vec<String>,
    /// Print JSON: a list of objects
    #[arg(long)]
    pub(super) json: bool,
}

/// Whether this machine can serve a model on the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fit {
    /// Whether the engine loads its family; `None` if the hub does not tell the family.
    pub is_supported: Option<bool>,
    /// Bytes of the weights in memory, as an estimate.
    pub memory: Option<u64>,
    /// Whether it can be loaded, and its weights fit.
    pub fits: Option<bool>,
}

impl Fit {
    /// Whether the model `found` fits, where the engine loads `families` and weights may take `limit` bytes.
    pub fn of(found: &Match, families: &[&str], numbers: Numbers, limit: u64) -> Self {
        let is_supported = found.family.as_deref().map(|family| families.contains(&family));
        let bytes = |form: Form, bytes: u64| in_memory(bytes, form != Form::Floats, numbers);
        let memory = found.weights.map(|weights| bytes(weights.form, weights.bytes));
        let fits = match is_supported {
            Some(true) => memory.map(|memory| memory <= limit),
            Some(false) => Some(false),
            None => None,
        };
        Self { is_supported, memory, fits }
    }

    fn text(self) -> &'static str {
        match (self.is_supported, self.fits) {
            (Some(false), _) => "not supported",
            (_, Some(true)) => "yes",
            (_, Some(false)) => "no",
            (_, None) => "-",
        }
    }
}

fn row(found: &Match, fit: Fit) -> [String; 6] {
    let Match { repo_id, downloads, family, weights } = found;
    let text = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    [
        repo_id.clone(),
        text(weights.map(|weights| HumanBytes(weights.bytes).to_string())),
        text(family.clone()),
        text(weights.map(|weights| weights.form.name().into())),
        fit.text().into(),
        downloads.to_string(),
    ]
}

fn object(found: &Match, fit: Fit) -> Value {
    let Match { repo_id, downloads, family, weights } = found;
    json!({
        "name": repo_id,
        "size": weights.map(|weights| weights.bytes),
        "family": family,
        "weights": weights.map(|weights| weights.form.name()),
        "supported": fit.is_supported,
        "memory": fit.memory,
        "fits": fit.fits,
        "downloads": downloads,
    })
}

/// Prints the models on the hub that have the words in their names.
///
/// # Errors
/// If the hub must not be asked, cannot be reached, or answers wrong; if `out` cannot be written.
pub fn search(sources: &Sources, options: &Search, out: &mut impl Write) -> Result<()> {
    let words = options.words.join(" ");
    let found = sources.hub.search(&words)?;
    let fit = |found| Fit::of(found, &sources.families, sources.numbers, sources.memory_limit);
    if options.json {
        let rows: Vec<_> = found.iter().map(|found| object(found, fit(found))).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&rows)?)?;
        return Ok(());
    }
    if found.is_empty() {
        writeln!(out, "{} has no model with `{words}` in its name", sources.hub.endpoint)?;
        return Ok(());
    }
    let titles = ["NAME", "SIZE", "FAMILY", "WEIGHTS", "FITS", "DOWNLOADS"];
    let mut rows = vec![titles.map(String::from)];
    rows.extend(found.iter().map(|found| row(found, fit(found))));
    write!(out, "{}", table(&rows))?;
    Ok(())
}
