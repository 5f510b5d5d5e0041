//! What `steersman calibrate` finds out about a model, once, on text of its own: how early it could
//! leave its layers, and which feed-forward blocks it could do without.
//!
//! Both are read off one pass over the text for each case, with the whole model's predictions as
//! the measure: how often the first N layers already name the token that the whole model names,
//! and by how many nats a token the predictions drift (Kullback-Leibler divergence) without a
//! block. Blocks are left out in the order of what each costs alone; what a set of them costs
//! together is measured, not added up.
//!
//! Source: early exit as draft, LayerSkip (arXiv:2404.16710); importance of a layer by what its
//! absence changes, ShortGPT (arXiv:2403.03853).

use std::path::{Path, PathBuf};
use std::time::Instant;

use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis};
use mlx_rs::ops::{concatenate, exp, logsumexp_axis};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use serde::{Deserialize, Serialize};

use super::Decoder;
use super::verify::Way;
use crate::cache::Span;
use crate::error::{Error, Result};
use crate::model::Pass;
use crate::request::Request;

/// Tokens of the drafts whose gain decides about an early exit.
const DRAFTED: usize = 4;

/// Rows whose logits are looked at together.
const BLOCK: i32 = 64;

/// A text and what the whole model says of it, [1, T, D].
struct Text {
    tokens: Vec<u32>,
    hidden: Array,
}

/// What an early exit must promise over plain decoding to be used.
const GAIN: f32 = 1.05;

/// What was found out about one model in one numeric format.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Tokens of the text.
    pub tokens: usize,
    /// How often the first 1, 2, ... layers name the token that the whole model names.
    pub exits: Vec<f32>,
    /// How many first layers draft best, where that pays at all.
    pub exit_layers: Option<usize>,
    /// Sets of feed-forward blocks to leave out, each one larger than the one before.
    pub skips: Vec<Skip>,
}

/// Feed-forward blocks that are left out together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Skip {
    /// Their layers.
    pub layers: Vec<usize>,
    /// What their absence costs, in nats a token.
    pub kl: f32,
}

impl Calibration {
    /// The file for the model of this digest.
    pub fn path(data: &Path, digest: &[u8; 32]) -> PathBuf {
        let name: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        data.join("calibration").join(format!("{name}.json"))
    }

    /// Reads what an earlier run found out; `None` where there was none.
    ///
    /// # Errors
    /// [`Error::Model`] when the file is there but cannot be read.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let problem = |problem: String| Error::Model { path: path.into(), problem };
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(problem(error.to_string())),
        };
        let parsed = serde_json::from_slice(&bytes);
        Ok(Some(parsed.map_err(|e| problem(format!("{e}; run `steersman calibrate` again")))?))
    }

    /// Writes it for later starts.
    ///
    /// # Errors
    /// [`Error::Model`] when it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let problem =
            |e: std::io::Error| Error::Model { path: path.into(), problem: e.to_string() };
        let text = serde_json::to_string_pretty(self).expect("plain data");
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new("."))).map_err(problem)?;
        let half = path.with_extension("part");
        std::fs::write(&half, text + "\n").map_err(problem)?;
        std::fs::rename(&half, path).map_err(problem)
    }

    /// The most blocks whose absence costs at most `kl` nats a token.
    pub fn skip_within(&self, kl: f32) -> Option<&Skip> {
        self.skips.iter().rev().find(|skip| skip.kl <= kl)
    }
}

impl Decoder {
    /// Finds out about the loaded model on `requests` and its own replies to them, of at most
    /// `tokens` tokens. `progress` hears of every measurement that is done, and of how many there
    /// are.
    ///
    /// # Errors
    /// What keeps a request from being run, or MLX's error; [`Error::Model`] when the result cannot
    /// be kept.
    pub fn calibrate(
        &mut self,
        requests: &[Request],
        tokens: usize,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Calibration> {
        let depth = self.model.depth();
        // With half of the blocks gone nothing is left of a model.
        let most_skipped = depth / 2;
        let all = requests.len() + depth - 1 + depth + most_skipped;
        let mut done = 0;
        let mut step = || {
            done += 1;
            progress(done, all);
        };
        // Predictions drift from the whole model, whatever the configuration leaves out.
        self.skip.clear();
        let mut texts = Vec::new();
        for request in requests {
            let tokens = self.text_of(request, Way::Plain, tokens)?;
            let hidden = self.hidden(&tokens, Pass::WHOLE)?;
            texts.push(Text { tokens, hidden });
            step();
        }
        let count = texts.iter().map(|text| text.tokens.len()).sum();
        let mut found = Calibration { tokens: count, ..Calibration::default() };
        for layers in 1..depth {
            let pass = Pass { exit: Some(layers), ..Pass::WHOLE };
            found.exits.push(self.mean(&texts, pass, agreement)?);
            step();
        }
        found.exit_layers = self.best_exit(&found.exits)?;

        let mut alone = Vec::new();
        for layer in 0..depth {
            let pass = Pass { skip: &[layer], ..Pass::WHOLE };
            alone.push((self.mean(&texts, pass, divergence)?, layer));
            step();
        }
        alone.sort_by(|a, b| a.0.total_cmp(&b.0));
        for count in 1..=most_skipped {
            let mut layers: Vec<usize> = alone[..count].iter().map(|&(_, layer)| layer).collect();
            layers.sort_unstable();
            let kl = self.mean(&texts, Pass { skip: &layers, ..Pass::WHOLE }, divergence)?;
            // Numbers that overflow without a block are no number of nats.
            if kl.is_finite() {
                found.skips.push(Skip { layers, kl });
            }
            step();
        }
        found.write(&self.calibration)?;
        Ok(found)
    }

    /// Where the result is kept.
    pub fn calibration_path(&self) -> &Path {
        &self.calibration
    }

    /// The number of first layers that commit the most tokens a second as drafts, where that is
    /// more than plain decoding does.
    fn best_exit(&self, exits: &[f32]) -> Result<Option<usize>> {
        let Some(costs) = self.costs else { return Ok(None) };
        let depth = exits.len() + 1;
        let mut best = (GAIN / costs.plain, None);
        for (layers, chance) in (1..depth).zip(exits) {
            let drafting = DRAFTED as f32 * self.time_exit(layers)?;
            let tokens: f32 = (0..=DRAFTED as i32).map(|i| chance.powi(i)).sum();
            let rate = tokens / (drafting + costs.verify[DRAFTED]);
            if rate > best.0 {
                best = (rate, Some(layers));
            }
        }
        Ok(best.1)
    }

    /// Seconds that a token takes through the first `layers` layers and the head: the least of
    /// three times.
    fn time_exit(&self, layers: usize) -> Result<f32> {
        let mut cache = self.prefixes.empty();
        let token = Array::from_slice(&[0u32], &[1]);
        let mut least = f32::INFINITY;
        for _ in 0..=3 {
            let start = Instant::now();
            let pass = Pass { exit: Some(layers), ..Pass::WHOLE };
            let span = Span { rows: 1, cache: &mut cache };
            let hidden = self.model.forward(&token, &mut [span], pass)?;
            eval([&self.model.logits(&hidden)?])?;
            least = least.min(start.elapsed().as_secs_f32());
        }
        Ok(least)
    }

    /// [1, T, D]: hidden states of all tokens of `text`, read in chunks as prompts are.
    fn hidden(&self, text: &[u32], pass: Pass<'_>) -> Result<Array> {
        let mut cache = self.prefixes.empty();
        let mut parts = Vec::new();
        for chunk in text.chunks(self.prefill_chunk) {
            let rows = chunk.len() as i32;
            let ids = Array::from_slice(chunk, &[rows]);
            let span = Span { rows, cache: &mut cache };
            let hidden = self.model.forward(&ids, &mut [span], pass)?;
            eval([&hidden])?;
            parts.push(hidden);
        }
        Ok(concatenate(&parts, 1)?)
    }

    /// Mean over all tokens of what `measure` says of the whole model's logits and those of `pass`,
    /// both [R, V].
    fn mean(
        &self,
        texts: &[Text],
        pass: Pass<'_>,
        measure: fn(&Array, &Array) -> Result<Array>,
    ) -> Result<f32> {
        let (mut total, mut tokens) = (0.0, 0);
        for text in texts {
            let found = self.hidden(&text.tokens, pass)?;
            let rows = found.dim(1);
            // Logits are large: a vocabulary has up to a quarter of a million entries.
            for start in (0..rows).step_by(BLOCK as usize) {
                let block = |hidden: &Array| -> Result<Array> {
                    let part = hidden.try_index((.., start..rows.min(start + BLOCK), ..))?;
                    Ok(self.model.logits(&part)?.squeeze_axes(&[0])?.as_dtype(Dtype::Float32)?)
                };
                let value = measure(&block(&text.hidden)?, &block(&found)?)?;
                let value = value.try_item_exact::<f32>();
                total += value.map_err(|e| Error::Array(e.to_string()))?;
            }
            tokens += rows;
        }
        Ok(total / tokens.max(1) as f32)
    }
}

/// How many rows name the same token.
fn agreement(whole: &Array, part: &Array) -> Result<Array> {
    let same = argmax_axis(whole, -1, None)?.eq(argmax_axis(part, -1, None)?)?;
    Ok(same.as_dtype(Dtype::Float32)?.sum(None)?)
}

/// Sum of the rows' divergences of `part` from `whole`, in nats.
fn divergence(whole: &Array, part: &Array) -> Result<Array> {
    let nats = |logits: &Array| logits.subtract(logsumexp_axis(logits, -1, true)?);
    let whole = nats(whole)?;
    Ok(exp(&whole)?.multiply(whole.subtract(nats(part)?)?)?.sum(None)?)
}
