//! The loaded model, its text, and how passes over it run.

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::threads::{Counts, Products, Threads};
use crate::cache::{Cache, Span};
use crate::config::Pooling;
use crate::error::Result;
use crate::kernels::cpu;
use crate::lazy::{AtOnce, is_available};
use crate::model::{Model, Pass};
use crate::nn::token_ids;
use crate::sample::rows::within;
use crate::text::Text;

/// The loaded model, its text, and how passes over it run.
pub struct Network {
    model: Box<dyn Model>,
    text: Text,
    format: NumberFormat,
    /// Margin, relative to the largest logit, below which rounding may decide a token.
    near_tie_margin: f32,
    /// Number of tokens; logits have as many columns.
    vocabulary: i32,
    /// Layers whose feed-forward block is skipped, as `engine.skip_kl` permits.
    skip: Vec<usize>,
    /// How embeddings are made.
    pooling: Pooling,
    /// Threads of matrix products; `None` if they are not ours to choose.
    threads: Option<Threads>,
    /// Whether passes run on this thread; set once a pass has done so. See [`super::step`].
    runs_at_once: bool,
}

/// The numbers that a model computes with.
#[derive(Debug, Clone, Copy)]
pub struct NumberFormat {
    /// Type of the activations.
    pub dtype: Dtype,
    /// Bits of KV in the cache; 0 if not quantized.
    pub kv_bits: u32,
}

impl NumberFormat {
    /// Returns true if rounding is far smaller than the margins of most tokens.
    fn is_precise(self) -> bool {
        self.dtype == Dtype::Float32 && self.kv_bits == 0
    }

    /// Margin, relative to the largest logit, below which the rounding of passes of different shapes may
    /// swap the two best tokens. In f32 it is about forty times the largest difference seen on the
    /// demonstration model (2.5e-6).
    fn near_tie_margin(self) -> f32 {
        let activations: f32 = match self.dtype {
            Dtype::Float32 => 1e-4,
            Dtype::Float16 => 4e-3,
            _ => 2e-2,
        };
        // A rounding error in the last digit can move a quantized key or value by a whole step.
        let kv: f32 = match self.kv_bits {
            0 => 0.0,
            8 => 4e-3,
            _ => 4e-2,
        };
        activations.max(kv)
    }
}

impl Network {
    /// All of `model` but the feed-forward blocks of the layers `skip`.
    pub fn new(
        model: Box<dyn Model>,
        text: Text,
        format: NumberFormat,
        skip: Vec<usize>,
        pooling: Pooling,
    ) -> Self {
        let vocabulary = i32::try_from(text.vocab_size()).unwrap_or(i32::MAX);
        Self {
            model,
            text,
            format,
            near_tie_margin: format.near_tie_margin(),
            vocabulary,
            skip,
            pooling,
            threads: None,
            runs_at_once: false,
        }
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// Tokenizer and template.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// Number of tokens; logits have as many columns.
    pub fn vocabulary(&self) -> i32 {
        self.vocabulary
    }

    /// Returns true if rounding is far smaller than the margins of most tokens.
    pub fn is_precise(&self) -> bool {
        self.format.is_precise()
    }

    /// Margin, relative to the largest logit, below which rounding may decide a token.
    pub fn near_tie_margin(&self) -> f32 {
        self.near_tie_margin
    }

    /// How embeddings are made.
    pub fn pooling(&self) -> Pooling {
        self.pooling
    }

    /// Number of layers whose feed-forward block is skipped.
    pub fn skipped_layers(&self) -> usize {
        self.skip.len()
    }

    /// Makes passes run the whole model from now on.
    pub fn skip_nothing(&mut self) {
        self.skip.clear();
    }

    /// The part of the model that runs: all but the skipped blocks. It is the same for prompts and
    /// replies, so that saved state equals the state of decoding.
    pub fn pass(&self) -> Pass<'_> {
        Pass { exit: None, skip: &self.skip }
    }

    /// Runs the rows `ids` of `spans`; returns their hidden states [1, R, D].
    pub fn forward(&self, ids: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        self.model.forward(ids, spans, self.pass())
    }

    /// Logits [1, R, V] of hidden states [1, R, D], without padding columns.
    pub fn logits(&self, hidden: &Array) -> Result<Array> {
        within(self.model.logits(hidden)?, self.vocabulary)
    }

    /// Runs a pass of `rows` equal tokens, to measure it; returns its hidden states.
    pub fn run_probe(&self, rows: usize, cache: &mut Cache) -> Result<Array> {
        let ids = token_ids(&vec![0; rows]);
        let hidden = self.forward(&ids, &mut [Span { rows: ids.dim(0), cache }])?;
        eval(cache.arrays()?.iter().chain([&hidden]))?;
        Ok(hidden)
    }

    /// Chooses the threads of `products`, if they are ours to choose: the numbers that are `known`, or those that are fastest
    /// from an `empty` cache. Returns the numbers.
    pub fn choose_threads(
        &mut self,
        products: Products,
        known: Option<Counts>,
        empty: &Cache,
    ) -> Result<Option<Counts>> {
        self.threads = Threads::choose(products, |products| match known {
            Some(counts) => Ok(counts),
            None => Threads::measure(&*self.model, self.pass(), empty, products),
        })?;
        Ok(self.threads.as_ref().map(Threads::counts))
    }

    /// Sets the threads of a pass over `rows` rows.
    pub fn set_threads(&mut self, rows: usize) {
        if let Some(threads) = &mut self.threads {
            threads.set_for(rows);
        }
    }

    /// Calls `run` with the network and with [`Network::set_threads`], for passes that `run` makes itself.
    pub fn with_threads<T>(&mut self, run: impl FnOnce(&Self, &mut dyn FnMut(usize)) -> T) -> T {
        let mut threads = self.threads.take();
        let result =
            run(self, &mut |rows| threads.iter_mut().for_each(|threads| threads.set_for(rows)));
        self.threads = threads;
        result
    }

    /// Returns true if passes run on this thread, so that there is nothing to overlap.
    pub fn runs_at_once(&self) -> bool {
        self.runs_at_once
    }

    /// Notes whether a pass whose hidden states are `hidden` ran while it was made.
    pub fn note_pass(&mut self, hidden: &Array) {
        self.runs_at_once |= is_available(hidden);
    }

    /// Begins a section in which operations run at once ([`cpu::run_at_once`]), if passes do.
    pub fn run_at_once(&self, first: &Array) -> Result<Option<AtOnce>> {
        if self.runs_at_once { cpu::run_at_once(first) } else { Ok(None) }
    }
}

#[cfg(test)]
impl Network {
    /// Replaces the margin of near-ties.
    pub fn set_near_tie_margin(&mut self, margin: f32) {
        self.near_tie_margin = margin;
    }
}
