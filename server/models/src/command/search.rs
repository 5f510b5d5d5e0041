//! `steersman search`: models on the hub, and which of them this machine can serve.

use std::io::Write;

use anyhow::Result;
use clap::Args;
use indicatif::HumanBytes;
use serde_json::{Value, json};

use super::{Sources, in_memory, table};
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

/// What this machine makes of a model on the hub.
struct Judged<'a> {
    found: &'a Match,
    /// Whether the engine loads its family; `None` if the hub does not tell the family.
    is_supported: Option<bool>,
    /// Bytes of the weights in memory, as an estimate.
    memory: Option<u64>,
    /// Whether they fit, if the family is supported.
    fits: Option<bool>,
}

impl<'a> Judged<'a> {
    fn new(sources: &Sources, found: &'a Match) -> Self {
        let family = found.family.as_deref();
        let is_supported = family.map(|family| sources.families.contains(&family));
        let memory = found
            .weights
            .map(|weights| in_memory(weights.bytes, weights.form != Form::Floats, sources.numbers));
        let fits = match is_supported {
            Some(true) => memory.map(|memory| memory <= sources.memory_limit),
            Some(false) => Some(false),
            None => None,
        };
        Self { found, is_supported, memory, fits }
    }

    fn row(&self) -> [String; 6] {
        let Match { repo_id, downloads, family, weights } = self.found;
        let text = |value: Option<String>| value.unwrap_or_else(|| "-".into());
        let fits = match (self.is_supported, self.fits) {
            (Some(false), _) => "not supported",
            (_, Some(true)) => "yes",
            (_, Some(false)) => "no",
            (_, None) => "-",
        };
        [
            repo_id.clone(),
            text(weights.map(|weights| HumanBytes(weights.bytes).to_string())),
            text(family.clone()),
            text(weights.map(|weights| weights.form.to_string())),
            fits.into(),
            downloads.to_string(),
        ]
    }

    fn object(&self) -> Value {
        let Match { repo_id, downloads, family, weights } = self.found;
        json!({
            "name": repo_id,
            "size": weights.map(|weights| weights.bytes),
            "family": family,
            "weights": weights.map(|weights| weights.form.to_string()),
            "supported": self.is_supported,
            "memory": self.memory,
            "fits": self.fits,
            "downloads": downloads,
        })
    }
}

/// Prints the models on the hub that have the words in their names.
///
/// # Errors
/// If the hub must not be asked, cannot be reached, or answers wrong; if `out` cannot be written.
pub fn search(sources: &Sources, options: &Search, out: &mut impl Write) -> Result<()> {
    let words = options.words.join(" ");
    let found = sources.hub.search(&words)?;
    let judged = found.iter().map(|found| Judged::new(sources, found));
    if options.json {
        let rows: Vec<_> = judged.map(|judged| judged.object()).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&rows)?)?;
        return Ok(());
    }
    if found.is_empty() {
        writeln!(out, "{} has no model with `{words}` in its name", sources.hub.endpoint)?;
        return Ok(());
    }
    let titles = ["NAME", "SIZE", "FAMILY", "WEIGHTS", "FITS", "DOWNLOADS"];
    let rows: Vec<_> = std::iter::once(titles.map(String::from))
        .chain(judged.map(|judged| judged.row()))
        .collect();
    write!(out, "{}", table(&rows))?;
    Ok(())
}
