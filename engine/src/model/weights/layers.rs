//! Layers from tensors. Their shapes are checked against `config.json`, and the error has both.

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;

use super::linear::Form;
use super::{Cut, Weights};
use crate::error::{Error, Result};
use crate::nn::{Activation, Embedding, Gate, GatedMlp, Joined, Linear, PlainMlp, RmsNorm};

impl Weights {
    /// Sets the size of hidden states, in families whose `config.json` may leave it out.
    pub fn set_hidden(&mut self, hidden: i32) {
        self.hidden = Some(hidden);
    }

    /// Takes the norm `NAME.weight` of hidden states.
    ///
    /// # Errors
    /// As [`Weights::norm_of`].
    pub fn norm(&mut self, name: &str, eps: f32) -> Result<RmsNorm> {
        match self.hidden {
            Some(hidden) => self.norm_of(name, eps, &[hidden]),
            None => Ok(RmsNorm { weight: self.take(&format!("{name}.weight"))?, eps }),
        }
    }

    /// Takes the norm `NAME.weight` of one of these `sizes`.
    ///
    /// # Errors
    /// [`Error::Model`] with both shapes if it has another one.
    pub fn norm_of(&mut self, name: &str, eps: f32, sizes: &[i32]) -> Result<RmsNorm> {
        let weight_name = format!("{name}.weight");
        let weight = self.take(&weight_name)?;
        if weight.ndim() != 1 || !sizes.contains(&weight.dim(0)) {
            return Err(self.misfit(&weight_name, weight.shape(), &sizes[..1]));
        }
        Ok(RmsNorm { weight: self.own_part(name, weight, -1)?, eps })
    }

    /// Takes the embedding of tokens, [V, D].
    pub fn embedding(&mut self, name: &str) -> Result<Embedding> {
        let shape = [self.vocabulary, self.hidden];
        self.embedding_of(name, shape)
    }

    /// Takes an embedding of this shape [V, D], as far as it is known.
    pub fn embedding_of(&mut self, name: &str, shape: [Option<i32>; 2]) -> Result<Embedding> {
        let table = self.table(name, shape)?;
        let rows = usize::try_from(table.shape()[0]).unwrap_or(0);
        self.embeddings = self.embeddings.min(rows);
        Ok(Embedding(table))
    }

    /// Takes the output head, which is `embed_tokens` if the two are `tied` or the checkpoint has
    /// no head.
    pub fn lm_head(&mut self, embed_tokens: &Embedding, tied: bool) -> Result<Linear> {
        let is_tied = tied || !self.has("lm_head.weight");
        let form = Form { stack: None, rows: self.vocabulary, inputs: self.hidden };
        self.head_with(is_tied.then_some(&embed_tokens.0), form)
    }

    /// Takes a matrix of this shape, as far as it is known.
    fn table(&mut self, name: &str, [rows, inputs]: [Option<i32>; 2]) -> Result<Linear> {
        self.linear_with(name, Form { stack: None, rows, inputs })
    }

    /// Takes the block of `AT.gate_proj`, `AT.up_proj` and `AT.down_proj`.
    pub fn gated_mlp(&mut self, at: &str, gate: Gate) -> Result<GatedMlp> {
        self.gated(at, gate, None)
    }

    /// Takes a stack of `count` of these blocks.
    pub fn gated_experts(&mut self, at: &str, gate: Gate, count: usize) -> Result<GatedMlp> {
        self.gated(at, gate, Some(stacked(count)))
    }

    fn gated(&mut self, at: &str, gate: Gate, stack: Option<i32>) -> Result<GatedMlp> {
        let name = format!("{at}.gate_proj");
        let size = self.outputs(&name);
        self.cut(at, block_cuts(size));
        let gate_proj =
            self.linear_with(&name, Form { stack, rows: Some(size), inputs: self.hidden })?;
        let hidden = self.hidden.unwrap_or(gate_proj.shape()[1]);
        let up_proj = self.layer(&format!("{at}.up_proj"), stack, [size, hidden])?;
        Ok(GatedMlp {
            gate,
            gate_up: Joined::new([gate_proj, up_proj])?,
            down_proj: self.layer(&format!("{at}.down_proj"), stack, [hidden, size])?,
        })
    }

    /// Takes the block of `AT.up_proj` and `AT.down_proj`.
    pub fn plain_mlp(&mut self, at: &str, activation: Activation) -> Result<PlainMlp> {
        self.plain(at, activation, None, self.hidden)
    }

    /// Takes a stack of `count` of these blocks, of rows of the size `inputs`.
    pub fn plain_experts(
        &mut self,
        at: &str,
        activation: Activation,
        count: usize,
        inputs: i32,
    ) -> Result<PlainMlp> {
        self.plain(at, activation, Some(stacked(count)), Some(inputs))
    }

    fn plain(
        &mut self,
        at: &str,
        activation: Activation,
        stack: Option<i32>,
        inputs: Option<i32>,
    ) -> Result<PlainMlp> {
        let name = format!("{at}.up_proj");
        let size = self.outputs(&name);
        self.cut(at, block_cuts(size));
        let up_proj = self.linear_with(&name, Form { stack, rows: Some(size), inputs })?;
        let inputs = inputs.unwrap_or(up_proj.shape()[1]);
        let down_proj = self.layer(&format!("{at}.down_proj"), stack, [inputs, size])?;
        Ok(PlainMlp { activation, up_proj, down_proj })
    }

    /// Takes the taps of a depthwise convolution, [C] each, oldest first, from `NAME.weight`: published as
    /// [C, 1, K], and by MLX's converter as [C, K, 1].
    pub fn taps(&mut self, name: &str, channels: i32) -> Result<Vec<Array>> {
        let weight_name = format!("{name}.weight");
        let weight = self.take(&weight_name)?;
        let longest = weight.shape().iter().skip(1).copied().max();
        let taps = self.taps.or(longest).unwrap_or(0).max(1);
        let layouts: [&[i32]; 3] = [&[channels, 1, taps], &[channels, taps, 1], &[channels, taps]];
        if !layouts.contains(&weight.shape()) {
            return Err(self.misfit(&weight_name, weight.shape(), layouts[0]));
        }
        let weight = self.own_part(name, weight.reshape(&[channels, taps])?, -2)?;
        let taps = (0..taps).map(|tap| weight.try_index((.., tap))?.contiguous());
        Ok(taps.collect::<std::result::Result<_, _>>()?)
    }

    /// Takes the tensor `name` of `len` elements.
    pub fn vector(&mut self, name: &str, len: i32) -> Result<Array> {
        let vector = self.take(name)?;
        self.expect(name, &vector, &[len])?;
        self.own_part(name, vector, -1)
    }

    /// Takes the tensor `name` of `len` elements as f32.
    pub fn vector_f32(&mut self, name: &str, len: i32) -> Result<Array> {
        let vector = self.take_f32(name)?;
        self.expect(name, &vector, &[len])?;
        self.own_part(name, vector, -1)
    }

    /// Takes the tensor `name` of `len` elements in any shape as f32 [len].
    pub fn flat_f32(&mut self, name: &str, len: i32) -> Result<Array> {
        let array = self.take_f32(name)?;
        if Ok(array.size()) != usize::try_from(len) {
            return Err(self.misfit(name, array.shape(), &[len]));
        }
        self.own_part(name, array.reshape(&[len])?, -1)
    }

    /// Takes a linear layer of `shape` [out, in].
    ///
    /// # Errors
    /// [`Error::Model`] with both shapes if it has another one.
    pub fn linear_of(&mut self, name: &str, shape: [i32; 2]) -> Result<Linear> {
        self.layer(name, None, shape)
    }

    /// Takes a linear layer with `rows` outputs of hidden states.
    pub fn linear_to(&mut self, name: &str, rows: i32) -> Result<Linear> {
        self.table(name, [Some(rows), self.hidden])
    }

    /// Takes a stack of `count` linear layers of `shape` [out, in].
    pub fn stack_of(&mut self, name: &str, count: i32, shape: [i32; 2]) -> Result<Linear> {
        self.layer(name, Some(count), shape)
    }

    fn layer(
        &mut self,
        name: &str,
        stack: Option<i32>,
        [rows, inputs]: [i32; 2],
    ) -> Result<Linear> {
        self.linear_with(name, Form { stack, rows: Some(rows), inputs: Some(inputs) })
    }

    /// Checks the shape of the tensor `name`.
    pub fn expect(&self, name: &str, array: &Array, shape: &[i32]) -> Result<()> {
        if array.shape() == shape {
            return Ok(());
        }
        Err(self.misfit(name, array.shape(), shape))
    }

    /// The tensor `name` has another shape than config.json makes.
    pub(super) fn misfit(&self, name: &str, found: &[i32], expected: &[i32]) -> Error {
        let problem =
            format!("`{name}` has the shape {found:?}, which config.json makes {expected:?}");
        self.problem("", problem)
    }
}

/// How a feed-forward block of this `size`, or each of a stack, is cut among ranks: along the dimension between its
/// matrices.
fn block_cuts(size: i32) -> [(&'static str, Cut); 3] {
    [
        ("gate_proj", Cut::Outputs(size)),
        ("up_proj", Cut::Outputs(size)),
        ("down_proj", Cut::Inputs(size)),
    ]
}

/// A number of experts as MLX counts.
fn stacked(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
