//! Linear layers of the same input, as one product or operation where that is faster.

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use mlx_rs::transforms::eval;

use super::{Linear, Packed};
use crate::error::Result;
use crate::kernels::cpu;
use crate::kernels::cuda::{self, Tiled};
use crate::kernels::metal;
use crate::kernels::{Input, Outputs};

/// N linear layers of the same input. On GPUs, quantized ones of one format are one matrix: a step is short, and
/// each product costs a launch. On CPUs, products of one format are one operation.
#[derive(Debug, Clone)]
pub struct Joined<const N: usize> {
    /// The N layers, or the one that they were joined to.
    layers: Vec<Linear>,
    /// The first output of each layer but the first.
    starts: Vec<i32>,
}

impl<const N: usize> Joined<N> {
    /// Joins `layers` where kernels read their outputs side by side.
    pub fn new(layers: [Linear; N]) -> Result<Self> {
        let mut starts: Vec<i32> = Vec::with_capacity(N);
        for layer in &layers[..N - 1] {
            starts.push(starts.last().unwrap_or(&0) + layer.shape()[0]);
        }
        let joins = cuda::is_enabled() || metal::is_enabled();
        let joined = if joins { joined(&layers)? } else { None };
        let layers = joined.map_or_else(|| layers.into(), |joined| vec![joined]);
        Ok(Self { layers, starts })
    }

    /// Each layer of `x` [.., in], [.., out].
    pub fn forward(&self, x: &Array) -> Result<[Array; N]> {
        self.split(self.outputs(Input::Rows(x))?)
    }

    /// [`Joined::forward`], in one array if the layers are joined.
    pub fn outputs(&self, x: Input<'_>) -> Result<Outputs<N>> {
        let layers = match &self.layers[..] {
            [joined] if N > 1 => return Ok(Outputs::Joined(joined.apply(x, None)?)),
            layers => std::array::from_fn(|i| &layers[i]),
        };
        match cpu::products::<N>(layers.map(Linear::matrix), x, None)? {
            Some(outputs) => Ok(Outputs::Apart(outputs)),
            None => {
                let x = x.rows()?;
                Ok(Outputs::Apart(self.each(|layer| layer.forward(&x))?))
            }
        }
    }

    /// [`swiglu`](super::swiglu) of the outputs of two layers, gates and ups; `None` if there is no kernel for it.
    pub fn swiglu(&self, x: Input<'_>) -> Result<Option<Array>> {
        match &self.layers[..] {
            [Linear::Tiled { weight, bias: None }] if N == 2 => weight.swiglu(x),
            [gate, up] => cpu::swiglu_product([gate.matrix(), up.matrix()], x),
            _ => Ok(None),
        }
    }

    /// The layers, if they are not joined.
    pub fn apart(&self) -> Option<[&Linear; N]> {
        (self.layers.len() == N).then(|| std::array::from_fn(|i| &self.layers[i]))
    }

    /// [`Linear::gather`] of each layer, which is a stack.
    pub fn gather(&self, x: &Array, which: &Array, sorted: bool) -> Result<[Array; N]> {
        self.each(|layer| layer.gather(x, which, sorted))
    }

    /// The outputs one by one, each contiguous.
    pub fn split(&self, outputs: Outputs<N>) -> Result<[Array; N]> {
        match outputs {
            Outputs::Apart(outputs) => Ok(outputs),
            Outputs::Joined(all) => {
                // Copied: on an H200, heads rotated by MLX 0.32.2 from parts of wider rows differed from those of
                // rows of their own (`kernels/cuda/tests.rs`).
                let outputs = all.split_at_indices(&self.starts, -1)?;
                let outputs: Vec<Array> =
                    outputs.iter().map(Array::contiguous).collect::<std::result::Result<_, _>>()?;
                Ok(outputs.try_into().expect("one output for each layer"))
            }
        }
    }

    /// The outputs one by one, for operations on single elements: on Metal these read parts of wider rows.
    pub fn views(&self, outputs: Outputs<N>) -> Result<[Array; N]> {
        match outputs {
            Outputs::Joined(all) if metal::is_enabled() => {
                let outputs = all.split_at_indices(&self.starts, -1)?;
                Ok(outputs.try_into().expect("one output for each layer"))
            }
            outputs => self.split(outputs),
        }
    }

    fn each(&self, run: impl Fn(&Linear) -> Result<Array>) -> Result<[Array; N]> {
        let outputs = match &self.layers[..] {
            [joined] if N > 1 => return self.split(Outputs::Joined(run(joined)?)),
            layers => layers.iter().map(run).collect::<Result<Vec<_>>>()?,
        };
        Ok(outputs.try_into().expect("one output for each layer"))
    }
}

/// One layer with the outputs of all, if they are quantized alike and have no biases. Their inputs are the same.
fn joined(layers: &[Linear]) -> Result<Option<Linear>> {
    let tiled = |layer| match layer {
        &Linear::Tiled { ref weight, bias: None } => Some(weight),
        _ => None,
    };
    let tiles: Option<Vec<&Tiled>> = layers.iter().map(tiled).collect();
    if let Some(weight) = tiles.map(|parts| Tiled::joined(&parts)).transpose()?.flatten() {
        return Ok(Some(Linear::Tiled { weight, bias: None }));
    }
    let mut packed = Vec::with_capacity(layers.len());
    for layer in layers {
        packed.push(match layer {
            Linear::Quantized { weight, bias: None } => weight.clone(),
            Linear::Tiled { weight, bias: None } => Packed::from_tiled(weight)?,
            _ => return Ok(None),
        });
    }
    let first = &packed[0];
    let alike = |part: &Packed| {
        part.quantization == first.quantization
            && (part.weight.ndim(), part.biases.is_some()) == (2, first.biases.is_some())
            && (part.scales.dtype(), part.dtype) == (first.scales.dtype(), first.dtype)
    };
    if !packed.iter().all(alike) {
        return Ok(None);
    }
    let all = |parts: Option<Vec<&Array>>| -> Result<Option<Array>> {
        let joined = parts.map(|parts| concatenate(&parts, 0)).transpose()?;
        // The parts are freed at once, layer by layer.
        eval(&joined)?;
        Ok(joined)
    };
    let weight = all(Some(packed.iter().map(|part| &part.weight).collect()))?;
    let scales = all(Some(packed.iter().map(|part| &part.scales).collect()))?;
    let biases = all(packed.iter().map(|part| part.biases.as_ref()).collect())?;
    let (Some(weight), Some(scales)) = (weight, scales) else { return Ok(None) };
    let weight = Packed { weight, scales, biases, ..*first };
    Ok(Some(match Tiled::new(weight.view())? {
        Some(weight) => Linear::Tiled { weight, bias: None },
        None => Linear::Quantized { weight, bias: None },
    }))
}
