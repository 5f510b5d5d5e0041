//! Tokens that were sampled together, and which of them belongs to whom.
//!
//! All tokens of a graph are read at once, when the first is needed. Until then they may still be computed, and
//! can be the input of the next pass.

use std::cell::OnceCell;
use std::ops::Range;
use std::rc::Rc;

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::host;
use super::logprobs::Logprobs;
use super::row::Row;
use super::rows::{sample, sample_with_margins, within};
use crate::error::Result;
use crate::kernels::cpu;
use crate::lazy;
use crate::nn::token_ids;

/// The tokens sampled after the rows of a pass.
#[derive(Debug)]
pub struct Samples {
    /// u32 [R]
    tokens: Array,
    /// f32 [R], if near-ties are to be detected.
    margins: Option<Array>,
    /// On the host: tokens and margins.
    read: OnceCell<(Vec<u32>, Vec<f32>)>,
}

/// Logits of a pass, possibly still being computed.
#[derive(Debug, Clone)]
pub struct Logits {
    /// [R, V]
    array: Array,
    /// The first columns, which are tokens. Some models pad their head to a round number.
    columns: i32,
}

impl Logits {
    /// `array` [R, V], of which the first `columns` are tokens.
    pub fn new(array: Array, columns: i32) -> Self {
        let columns = columns.min(array.dim(1));
        Self { array, columns }
    }

    /// Rows as an array [rows, columns].
    pub fn rows(&self, rows: Range<i32>) -> Result<Array> {
        let whole = rows.len() == self.array.dim(0) as usize;
        let own = if whole { self.array.clone() } else { self.array.try_index(rows)? };
        within(own, self.columns)
    }

    /// What the model would draw after row `row`: the likeliest token, and the logarithms of the probabilities of that
    /// token and of `tokens`.
    pub fn outlook(&self, row: usize, tokens: &[u32]) -> Result<(u32, Vec<f32>)> {
        let (columns, width) = (self.columns as usize, self.array.dim(1) as usize);
        if let Some(numbers) = self.on_host()? {
            return Ok(outlook_of(&numbers[row * width..][..columns], tokens));
        }
        // A pass has fewer than 2^31 rows.
        let row = row as i32;
        let own = self.rows(row..row + 1)?.as_dtype(Dtype::Float32)?;
        Ok(outlook_of(own.contiguous()?.try_as_slice::<f32>()?, tokens))
    }

    /// All rows, each of as many numbers as the array has columns, if they are in the host's memory.
    fn on_host(&self) -> Result<Option<&[f32]>> {
        let is_there = cpu::is_enabled()
            && self.array.dtype() == Dtype::Float32
            && lazy::is_available(&self.array);
        Ok(is_there.then(|| self.array.try_as_slice::<f32>()).transpose()?)
    }
}

/// [`Logits::outlook`] of one row. Sums in f64: their rounding is not that of the order.
fn outlook_of(logits: &[f32], tokens: &[u32]) -> (u32, Vec<f32>) {
    let likeliest = logits.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
    let (best, most) =
        likeliest.map_or((0, 0.0), |(token, logit)| (token as u32, f64::from(*logit)));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - most).exp()).sum();
    let total = most + sum.ln();
    let logprob = |token: &u32| {
        let logit = logits.get(*token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (f64::from(logit) - total) as f32
    };
    (best, [best].iter().chain(tokens).map(logprob).collect())
}

impl Samples {
    /// Samples a token after each of `rows`, the first of which is row `first` of `logits`: on the host if they are there,
    /// else with operations that are not queued.
    pub fn after(logits: &Logits, first: usize, rows: &[Row], with_margins: bool) -> Result<Self> {
        if let Some(numbers) = logits.on_host()? {
            let (width, columns) = (logits.array.dim(1) as usize, logits.columns as usize);
            let numbers = &numbers[first * width..(first + rows.len()) * width];
            return Ok(Self::on_host(numbers, width, columns, rows));
        }
        let first = first as i32;
        let logits = logits.rows(first..first + rows.len() as i32)?;
        let (tokens, margins) = if with_margins {
            let (tokens, margins) = sample_with_margins(&logits, rows)?;
            (tokens, Some(margins))
        } else {
            (sample(&logits, rows)?, None)
        };
        Ok(Self { tokens, margins, read: OnceCell::new() })
    }

    /// Samples after rows of `width` numbers, the first `columns` of which are tokens.
    fn on_host(numbers: &[f32], width: usize, columns: usize, rows: &[Row]) -> Self {
        let sampled = numbers.chunks_exact(width).zip(rows);
        let sampled = sampled.map(|(logits, row)| host::sample(&logits[..columns], row));
        let read: (Vec<u32>, Vec<f32>) = sampled.unzip();
        let tokens = token_ids(&read.0);
        Self { tokens, margins: None, read: OnceCell::from(read) }
    }

    /// Whether the tokens are on the host.
    pub fn is_read(&self) -> bool {
        self.read.get().is_some()
    }

    /// [`Logprobs::of`] a single token, sampled from `logits` [1, V].
    pub fn logprobs(
        &self,
        logits: &Array,
        rows: &[Row],
        top: u32,
        with_entropy: bool,
    ) -> Result<Logprobs> {
        Logprobs::of(logits, rows, &self.tokens, top, with_entropy)
    }

    /// The tokens, u32 [R]; possibly still being computed.
    pub fn tokens(&self) -> &Array {
        &self.tokens
    }

    /// All arrays, to evaluate them.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        [&self.tokens].into_iter().chain(&self.margins)
    }

    /// Waits for the tokens; also returns their margins, or nothing without margins.
    pub fn read(&self) -> Result<(&[u32], &[f32])> {
        if !self.is_read() {
            eval(self.arrays())?;
            let tokens = self.tokens.try_as_slice::<u32>()?.to_vec();
            let margins = match &self.margins {
                Some(margins) => margins.try_as_slice::<f32>()?.to_vec(),
                None => Vec::new(),
            };
            // Cannot fail: the cell was empty above, and nothing else sets it.
            let _ = self.read.set((tokens, margins));
        }
        let (tokens, margins) = self.read.get().expect("just read");
        Ok((tokens, margins))
    }
}

/// One of the tokens that were sampled together.
#[derive(Debug, Clone)]
pub struct SampleOf {
    samples: Rc<Samples>,
    row: usize,
}

impl SampleOf {
    pub fn new(samples: Rc<Samples>, row: usize) -> Self {
        Self { samples, row }
    }

    /// Whether the tokens are on the host.
    pub fn is_read(&self) -> bool {
        self.samples.is_read()
    }

    /// Waits for the token.
    pub fn token(&self) -> Result<u32> {
        Ok(self.samples.read()?.0[self.row])
    }

    /// Waits for the token and the `count` after it; also returns their margins, or nothing if they were
    /// sampled without.
    pub fn with_next(&self, count: usize) -> Result<(&[u32], &[f32])> {
        let (tokens, margins) = self.samples.read()?;
        let rows = self.row..self.row + count + 1;
        Ok((&tokens[rows.clone()], margins.get(rows).unwrap_or_default()))
    }

    /// Waits for the token's margin.
    ///
    /// # Panics
    /// If it was sampled without margins.
    pub fn margin(&self) -> Result<f32> {
        Ok(self.samples.read()?.1[self.row])
    }
}

/// The tokens of a draft.
#[derive(Debug, Clone)]
pub enum DraftTokens {
    /// On the host.
    Known(Vec<u32>),
    /// u32 [m], possibly still being computed.
    Computing(Array),
}

impl DraftTokens {
    /// The number of tokens.
    pub fn count(&self) -> usize {
        match self {
            Self::Known(tokens) => tokens.len(),
            Self::Computing(tokens) => tokens.size(),
        }
    }

    /// Waits for the tokens.
    pub fn read(&self) -> Result<&[u32]> {
        match self {
            Self::Known(tokens) => Ok(tokens),
            Self::Computing(tokens) => {
                eval([tokens])?;
                Ok(tokens.try_as_slice::<u32>()?)
            }
        }
    }
}

/// Tokens to run next: u32 [R], once they are joined.
#[derive(Debug)]
pub enum Input {
    /// Known to the host.
    Known(Vec<u32>),
    /// Drafted, and possibly still being computed.
    Drafted(Array),
    /// Sampled, and possibly still being computed.
    Sampled(Rc<Samples>, Range<usize>),
}

impl Input {
    /// Number of rows.
    pub fn rows(&self) -> i32 {
        match self {
            Self::Known(tokens) => tokens.len() as i32,
            Self::Drafted(tokens) => tokens.dim(0),
            Self::Sampled(_, rows) => rows.len() as i32,
        }
    }

    /// Adds a sampled token to `inputs`. Neighbours in their pass stay together: as long as the same
    /// sequences run, the input of a pass is the array that the last one sampled.
    pub fn push_sample(inputs: &mut Vec<Self>, sample: SampleOf) {
        let SampleOf { samples, row } = sample;
        match inputs.last_mut() {
            Some(Self::Sampled(last, rows)) if rows.end == row && Rc::ptr_eq(last, &samples) => {
                rows.end += 1;
            }
            _ => inputs.push(Self::Sampled(samples, row..row + 1)),
        }
    }

    /// Adds known tokens to `inputs`. Neighbours become one array.
    pub fn push_known(inputs: &mut Vec<Self>, tokens: &[u32]) {
        match inputs.last_mut() {
            Some(Self::Known(last)) => last.extend_from_slice(tokens),
            _ => inputs.push(Self::Known(tokens.to_vec())),
        }
    }

    /// Adds a draft to `inputs`.
    pub fn push_draft(inputs: &mut Vec<Self>, draft: &DraftTokens) {
        match draft {
            DraftTokens::Known(tokens) => Self::push_known(inputs, tokens),
            DraftTokens::Computing(tokens) => inputs.push(Self::Drafted(tokens.clone())),
        }
    }

    /// All `inputs` in order: u32 [R].
    pub fn join(inputs: Vec<Self>) -> Result<Array> {
        let array = |input| -> Result<Array> {
            match input {
                Self::Known(tokens) => Ok(token_ids(&tokens)),
                Self::Drafted(tokens) => Ok(tokens),
                Self::Sampled(samples, rows) if rows.len() == samples.tokens.size() => {
                    Ok(samples.tokens.clone())
                }
                Self::Sampled(samples, rows) => {
                    Ok(samples.tokens.try_index(rows.start as i32..rows.end as i32)?)
                }
            }
        };
        let parts = inputs.into_iter().map(array).collect::<Result<Vec<_>>>()?;
        match &parts[..] {
            [part] => Ok(part.clone()),
            parts => Ok(concatenate(parts, 0)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Device;

    use super::*;
    use crate::request::Sampling;

    /// Rows in the middle of a pass with a padded head, on the host and in a graph.
    #[test]
    fn samples_on_the_host_are_those_of_the_graph() {
        Device::set_default(&Device::cpu());
        let value = |i: usize| if i % 40 >= 37 { 99.0 } else { ((i * 37 + 11) % 113) as f32 / 9.0 };
        let numbers: Vec<f32> = (0..4 * 40).map(value).collect();
        let logits = Logits::new(Array::from_slice(&numbers, &[4, 40]), 37);
        let warm = Sampling { temperature: 0.7, top_p: 0.9, ..Sampling::default() };
        let rows = [Row::new(Sampling::default(), 0), Row::new(warm, 7)];
        let sampled = [true, false].map(|on| {
            cpu::enable(on);
            let samples = Samples::after(&logits, 1, &rows, true).unwrap();
            cpu::enable(false);
            assert_eq!(samples.is_read(), on);
            let (tokens, margins) = samples.read().unwrap();
            assert_eq!(samples.tokens().as_slice::<u32>(), tokens);
            (tokens.to_vec(), margins.to_vec())
        });
        assert_eq!(sampled[0].0, sampled[1].0);
        let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
        assert!(sampled[0].1.iter().zip(&sampled[1].1).all(near), "{sampled:?}");
    }
}
