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

use mlx_rs::ops::indexing::argmax_axis;
use mlx_rs::ops::{exp, logsumexp_axis};
use mlx_rs::{Array, Dtype};
use serde::{Deserialize, Serialize};

use super::Decoder;
use super::verify::Way;
use crate::cache::Span;
use crate::error::{Error, Result};
use crate::model::Pass;
use crate::request::Request;

/// Depth of the drafts whose gain decides about an early exit.
const DEPTH: usize = 4;

/// What an early exit must promise over plain decoding to be used.
const GAIN: f32 = 1.05;

/// Blocks that may be left out at most: half of them. Beyond that nothing is left of a model.
const MOST_SKIPPED: usize = 2;

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
        std::fs::write(path, text + "\n").map_err(problem)
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
        let most_skipped = depth / MOST_SKIPPED;
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
            let text = self.text_of(request, Way::Plain, tokens)?;
            let expected = self.log_probabilities(&text, Pass::WHOLE)?;
            texts.push((text, expected));
            step();
        }
        let mut found = Calibration {
            tokens: texts.iter().map(|(text, _)| text.len()).sum(),
            ..Calibration::default()
        };
        for layers in 1..depth {
            let pass = Pass { exit: Some(layers), ..Pass::WHOLE };
            found.exits.push(self.agreement(&texts, pass)?);
            step();
        }
        found.exit_layers = self.best_exit(&found.exits);

        let mut alone = Vec::new();
        for layer in 0..depth {
            let pass = Pass { skip: &[layer], ..Pass::WHOLE };
            alone.push((self.divergence(&texts, pass)?, layer));
            step();
        }
        alone.sort_by(|a, b| a.0.total_cmp(&b.0));
        for count in 1..=most_skipped {
            let mut layers: Vec<usize> = alone[..count].iter().map(|&(_, layer)| layer).collect();
            layers.sort_unstable();
            let kl = self.divergence(&texts, Pass { skip: &layers, ..Pass::WHOLE })?;
            found.skips.push(Skip { layers, kl });
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
    fn best_exit(&self, exits: &[f32]) -> Option<usize> {
        let costs = self.costs?;
        let rate = |(layers, chance): (usize, f32)| {
            // A drafted token costs its share of the layers, and the whole head.
            let share = layers as f32 / self.model.depth() as f32;
            let drafting = DEPTH as f32 * share * costs.verify[0];
            let tokens: f32 = (0..=DEPTH as i32).map(|i| chance.powi(i)).sum();
            (tokens / (drafting + costs.verify[DEPTH]), layers)
        };
        let rates = (1..).zip(exits.iter().copied()).map(rate);
        let (best, layers) = rates.max_by(|a, b| a.0.total_cmp(&b.0))?;
        (best * costs.plain > GAIN).then_some(layers)
    }

    /// f32 [T, V]: what the model predicts behind each token of `text`, in nats.
    fn log_probabilities(&self, text: &[u32], pass: Pass<'_>) -> Result<Array> {
        let mut cache = self.new_cache()?;
        let rows = text.len() as i32;
        let ids = Array::from_slice(text, &[rows]);
        let hidden = self.model.forward(&ids, &mut [Span { rows, cache: &mut cache }], pass)?;
        let logits = self.model.logits(&hidden)?.squeeze_axes(&[0])?.as_dtype(Dtype::Float32)?;
        Ok(logits.subtract(logsumexp_axis(&logits, -1, true)?)?)
    }

    /// How often `pass` names the token that the whole model names.
    fn agreement(&self, texts: &[(Vec<u32>, Array)], pass: Pass<'_>) -> Result<f32> {
        self.mean(texts, |text, expected| {
            let found = self.log_probabilities(text, pass)?;
            let same = argmax_axis(&found, -1, None)?.eq(argmax_axis(expected, -1, None)?)?;
            Ok(same.as_dtype(Dtype::Float32)?.sum(None)?)
        })
    }

    /// Divergence of the predictions of `pass` from the whole model's, in nats a token.
    fn divergence(&self, texts: &[(Vec<u32>, Array)], pass: Pass<'_>) -> Result<f32> {
        self.mean(texts, |text, expected| {
            let drift = expected.subtract(self.log_probabilities(text, pass)?)?;
            Ok(exp(expected)?.multiply(drift)?.sum(None)?)
        })
    }

    fn mean(
        &self,
        texts: &[(Vec<u32>, Array)],
        sum: impl Fn(&[u32], &Array) -> Result<Array>,
    ) -> Result<f32> {
        let (mut total, mut tokens) = (0.0, 0);
        for (text, expected) in texts {
            let value = sum(text, expected)?.try_item_exact::<f32>();
            total += value.map_err(|e| Error::Array(e.to_string()))?;
            tokens += text.len();
        }
        Ok(total / tokens.max(1) as f32)
    }
}
