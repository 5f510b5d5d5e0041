//! Layers from tensors. Their shapes are checked against `config.json`, and the error has both.

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;

use super::Weights;
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
        let name = format!("{name}.weight");
        let weight = self.take(&name)?;
        if weight.ndim() != 1 || !sizes.contains(&weight.dim(0)) {
            return Err(self.misfit(&name, weight.shape(), &sizes[..1]));
        }
        Ok(RmsNorm { weight, eps })
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
        if tied || !self.has("lm_head.weight") {
            return Ok(embed_tokens.0.clone());
        }
        self.table("lm_head", [self.vocabulary, self.hidden])
    }

    /// Takes a matrix of this shape, as far as it is known.
    fn table(&mut self, name: &str, [rows, inputs]: [Option<i32>; 2]) -> Result<Linear> {
        let table = self.linear_with(name, inputs)?;
        let [found, columns] = table.shape();
        let expected = [rows.unwrap_or(found), inputs.unwrap_or(columns)];
        self.expect_layer(name, &table, None, expected)?;
        Ok(table)
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
        let gate_proj = self.linear_with(&name, self.hidden)?;
        let [size, inputs] = gate_proj.shape();
        let hidden = self.hidden.unwrap_or(inputs);
        self.expect_layer(&name, &gate_proj, stack, [size, hidden])?;
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
        let up_proj = self.linear_with(&name, inputs)?;
        let [size, found] = up_proj.shape();
        let inputs = inputs.unwrap_or(found);
        self.expect_layer(&name, &up_proj, stack, [size, inputs])?;
        let down_proj = self.layer(&format!("{at}.down_proj"), stack, [inputs, size])?;
        Ok(PlainMlp { activation, up_proj, down_proj })
    }

    /// Takes the taps of a depthwise convolution, [C] each, oldest first, from `NAME.weight`: published as
    /// [C, 1, K], and by MLX's converter as [C, K, 1].
    pub fn taps(&mut self, name: &str, channels: i32) -> Result<Vec<Array>> {
        let name = format!("{name}.weight");
        let weight = self.take(&name)?;
        let longest = weight.shape().iter().skip(1).copied().max();
        let taps = self.taps.or(longest).unwrap_or(0).max(1);
        let layouts: [&[i32]; 3] = [&[channels, 1, taps], &[channels, taps, 1], &[channels, taps]];
        if !layouts.contains(&weight.shape()) {
            return Err(self.misfit(&name, weight.shape(), layouts[0]));
        }
        let weight = weight.reshape(&[channels, taps])?;
        let taps = (0..taps).map(|tap| weight.try_index((.., tap))?.contiguous());
        Ok(taps.collect::<std::result::Result<_, _>>()?)
    }

    /// Takes the tensor `name` of `len` elements.
    pub fn vector(&mut self, name: &str, len: i32) -> Result<Array> {
        let vector = self.take(name)?;
        self.expect(name, &vector, &[len])?;
        Ok(vector)
    }

    /// Takes the tensor `name` of `len` elements as f32.
    pub fn vector_f32(&mut self, name: &str, len: i32) -> Result<Array> {
        let vector = self.take_f32(name)?;
        self.expect(name, &vector, &[len])?;
        Ok(vector)
    }

    /// Takes the tensor `name` of `len` elements in any shape as f32 [len].
    pub fn flat_f32(&mut self, name: &str, len: i32) -> Result<Array> {
        let array = self.take_f32(name)?;
        if Ok(array.size()) != usize::try_from(len) {
            return Err(self.misfit(name, array.shape(), &[len]));
        }
        Ok(array.reshape(&[len])?)
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

    fn layer(&mut self, name: &str, stack: Option<i32>, shape: [i32; 2]) -> Result<Linear> {
        let layer = self.linear_with(name, Some(shape[1]))?;
        self.expect_layer(name, &layer, stack, shape)?;
        Ok(layer)
    }

    /// Checks the shape of the layer `name`: a `stack` of `shape` [out, in], or one of it.
    fn expect_layer(
        &self,
        name: &str,
        layer: &Linear,
        stack: Option<i32>,
        shape: [i32; 2],
    ) -> Result<()> {
        let expected: Vec<i32> = stack.into_iter().chain(shape).collect();
        let found = layer.dims();
        if found == expected {
            return Ok(());
        }
        Err(self.misfit(&format!("{name}.weight"), &found, &expected))
    }

    /// Checks the shape of the tensor `name`.
    pub fn expect(&self, name: &str, array: &Array, shape: &[i32]) -> Result<()> {
        if array.shape() == shape {
            return Ok(());
        }
        Err(self.misfit(name, array.shape(), shape))
    }

    /// The tensor `name` has another shape than config.json makes.
    fn misfit(&self, name: &str, found: &[i32], expected: &[i32]) -> Error {
        let problem =
            format!("`{name}` has the shape {found:?}, which config.json makes {expected:?}");
        self.problem("", problem)
    }
}

/// A number of experts as MLX counts.
fn stacked(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
