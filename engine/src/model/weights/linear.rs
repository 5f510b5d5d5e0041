//! Linear layers from tensors: dense or packed, whole or the part of a rank.

use std::ops::Range;

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::cut::{Cut, Slice};
use super::{Storage, Weights};
use crate::error::Result;
use crate::kernels::cpu;
use crate::kernels::cuda::Tiled;
use crate::nn::{Dense, Join, Linear, Mode, OwnKernel, Packed, Part, Quantization};

/// The shape of a layer, as far as it is known.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Form {
    /// Number of layers if it is a stack.
    pub stack: Option<i32>,
    pub rows: Option<i32>,
    pub inputs: Option<i32>,
}

impl Weights {
    /// Takes a linear layer, or what this rank has of it: `NAME.weight`, `.scales` and `.biases` if it is quantized, and
    /// `.bias` if there is one.
    ///
    /// # Errors
    /// [`crate::Error::Config`] with both shapes if it has another one than `form`, or with the reason why it
    /// cannot be cut.
    pub(super) fn linear_with(&mut self, name: &str, form: Form) -> Result<Linear> {
        let is_packed = self.has(&format!("{name}.scales"));
        let quantization =
            if is_packed { Some(self.quantization_of(name, form.inputs)?) } else { None };
        let dims = self.checked_shape(name, form, quantization)?;
        let cut = self.cuts.get(name).filter(|_| self.ranks.are_several()).cloned();
        let slice = cut.as_ref().map(|cut| self.slice(name, cut, &dims)).transpose()?;
        let is_summed = cut.as_ref().is_some_and(Cut::is_summed);
        let bias = self.bias(&format!("{name}.bias"), slice.as_ref(), is_summed)?;
        let layer = match quantization {
            None => {
                let weight = self.as_stored(&format!("{name}.weight"), slice.as_ref())?;
                self.dense(weight, bias)?
            }
            Some(quantization) => {
                let packed = self.packed(name, quantization, slice.as_ref())?;
                self.stored(packed, bias)?
            }
        };
        // Outputs of a stack are summed when they are mixed.
        if is_summed && dims.len() == 2 {
            let (layer, ranks) = (Box::new(layer), self.ranks.clone());
            return Ok(Linear::Part(Part { layer, join: Join::Sum, ranks }));
        }
        Ok(layer)
    }

    /// The output head with rows for the whole vocabulary. Each rank has some of the rows if the ranks can divide them, and
    /// all if not.
    pub(super) fn head_with(&mut self, tied: Option<&Linear>, form: Form) -> Result<Linear> {
        const NAME: &str = "lm_head";
        let rows = tied.map_or_else(|| self.outputs(NAME), |table| table.shape()[0]);
        let cut = Cut::Outputs(rows);
        let is_cut = self.ranks.are_several() && rows % self.ranks.count() == 0;
        let layer = match tied {
            Some(table) if is_cut => self.rows_of(table, &self.slice(NAME, &cut, &[rows, 1])?)?,
            Some(table) => table.clone(),
            None => {
                if is_cut {
                    self.cuts.insert(NAME.into(), cut);
                }
                self.linear_with(NAME, form)?
            }
        };
        if !is_cut {
            return Ok(layer);
        }
        let (layer, ranks) = (Box::new(layer), self.ranks.clone());
        Ok(Linear::Part(Part { layer, join: Join::Gather, ranks }))
    }

    /// Rows of the matrix `NAME.weight`, or of each of a stack; 0 if there is none.
    pub(super) fn outputs(&self, name: &str) -> i32 {
        let weight = self.get(&format!("{name}.weight")).filter(|weight| weight.ndim() > 1);
        weight.map_or(0, |weight| weight.dim(-2))
    }

    /// What this rank has of the array that was taken as `name`: along the axis of its outputs, or of the dimension that
    /// stands in their place in a vector.
    pub(super) fn own_part(&self, name: &str, array: Array, axis: i32) -> Result<Array> {
        let Some(cut) = self.cuts.get(name).filter(|_| self.ranks.are_several()) else {
            return Ok(array);
        };
        let ranges = self.ranges(name, cut, array.dim(axis))?;
        let part = Slice { axis, ranges }.of(&array)?;
        eval([&part])?;
        Ok(part)
    }

    /// How the layer `name`, which has scales, is quantized.
    fn quantization_of(&self, name: &str, inputs: Option<i32>) -> Result<Quantization> {
        let named = self.mixed.get(name).copied();
        let Some(quantization) = named.or(self.quantization) else {
            let problem = format!("`{name}` has scales, but the key `quantization` is missing");
            return Err(self.problem("config.json", problem));
        };
        if self.has(&format!("{name}.global_scale")) {
            let problem =
                format!("`{name}` has a scale for the whole tensor, which is not supported");
            return Err(self.problem("", problem));
        }
        if named.is_some() || quantization.mode != Mode::Affine {
            return Ok(quantization);
        }
        let columns = |part: &str| {
            let array = self.get(&format!("{name}.{part}")).filter(|array| array.ndim() > 0);
            array.map_or(0, |array| array.dim(-1))
        };
        Ok(inferred(quantization, inputs, columns("weight"), columns("scales")))
    }

    /// The shape of the whole layer [out, in], or [E, out, in], after all its tensors were compared with it and with `form`.
    fn checked_shape(
        &self,
        name: &str,
        form: Form,
        quantization: Option<Quantization>,
    ) -> Result<Vec<i32>> {
        let weight_name = format!("{name}.weight");
        let weight = self.get(&weight_name).ok_or_else(|| self.missing(&weight_name))?;
        let mut dims = weight.shape().to_vec();
        if let Some(Quantization { group_size, bits, mode }) = quantization {
            let scales_name = format!("{name}.scales");
            let scales = self.get(&scales_name).ok_or_else(|| self.missing(&scales_name))?;
            let last = |array: &Array| array.shape().last().copied().unwrap_or(0);
            let (columns, groups) = (last(weight), last(scales));
            if dims.len() < 2 || columns * 32 != groups * group_size * bits {
                let problem = format!(
                    "`{name}` has {columns} packed columns and {groups} scales a row, which are not \
                     {bits} bits in groups of {group_size}; name the layer in `quantization` of \
                     config.json"
                );
                return Err(self.problem("", problem));
            }
            let all = [&dims[..dims.len() - 1], &[groups]].concat();
            self.expect(&scales_name, scales, &all)?;
            let biases = format!("{name}.biases");
            if let Some(array) = self.get(&biases).filter(|_| mode == Mode::Affine) {
                self.expect(&biases, array, &all)?;
            }
            dims.pop();
            dims.push(groups * group_size);
        } else if dims.len() < 2 {
            let problem = format!("`{weight_name}` has the shape {dims:?}, not that of a matrix");
            return Err(self.problem("", problem));
        }
        let [rows @ .., inputs] = &dims[..] else { unreachable!("two dimensions at least") };
        let bias = format!("{name}.bias");
        if let Some(array) = self.get(&bias) {
            self.expect(&bias, array, rows)?;
        }
        let found = [rows[rows.len() - 1], *inputs];
        let known = [form.rows.unwrap_or(found[0]), form.inputs.unwrap_or(found[1])];
        let expected: Vec<i32> = form.stack.into_iter().chain(known).collect();
        if dims != expected {
            return Err(self.misfit(&weight_name, &dims, &expected));
        }
        Ok(dims)
    }

    /// The rank's part of a layer of the shape `dims`.
    fn slice(&self, name: &str, cut: &Cut, dims: &[i32]) -> Result<Slice> {
        let axis: i32 = match cut {
            Cut::Outputs(_) | Cut::Repeated(_) | Cut::Segments(_) => -2,
            Cut::Inputs(_) => -1,
            Cut::Stack(_) => -3,
        };
        let size = dims.iter().nth_back(axis.unsigned_abs() as usize - 1);
        Ok(Slice { axis, ranges: self.ranges(name, cut, size.copied().unwrap_or(0))? })
    }

    fn ranges(&self, name: &str, cut: &Cut, size: i32) -> Result<Vec<Range<i32>>> {
        cut.ranges(size, &self.ranks)
            .map_err(|why| self.problem("", format!("`{name}` cannot be cut: {why}")))
    }

    /// Takes the bias `name` of a layer, if there is one. What is added to a sum is added by the first rank.
    fn bias(
        &mut self,
        name: &str,
        slice: Option<&Slice>,
        is_summed: bool,
    ) -> Result<Option<Array>> {
        if !self.has(name) {
            return Ok(None);
        }
        let mut bias = self.take(name)?;
        if is_summed {
            return Ok(self.ranks.is_first().then_some(bias));
        }
        if let Some(Slice { axis, ranges }) = slice {
            // It lacks the axis of inputs.
            bias = Slice { axis: axis + 1, ranges: ranges.clone() }.of(&bias)?;
            eval([&bias])?;
        }
        Ok(Some(bias))
    }

    /// Takes a tensor as kernels of our own read it, which may take half of the memory, or in the model's type. It is not
    /// evaluated.
    fn as_stored(&mut self, name: &str, slice: Option<&Slice>) -> Result<Array> {
        let array = self.remove_part(name, slice)?;
        let stays = array.dtype().is_float() && matches!(self.storage, Storage::OwnKernels(_));
        let dtype = if stays { array.dtype() } else { self.dtype };
        self.cast(name, array, dtype)
    }

    /// Takes a tensor as it is stored, or a part of it.
    pub(super) fn remove_part(&mut self, name: &str, slice: Option<&Slice>) -> Result<Array> {
        let array = self.remove(name)?;
        #[cfg(test)]
        self.taken.insert(name.into(), array.clone());
        let place = self.places.remove(name);
        let Some(slice) = slice else { return Ok(array) };
        match place.and_then(|place| place.read(array.shape(), slice)) {
            Some(read) => read.map_err(|e| self.problem("", format!("`{name}`: {e}")))?,
            None => slice.of(&array),
        }
    }

    /// Takes the packed matrix of the layer `name`, or a part of it. It is not evaluated.
    fn packed(
        &mut self,
        name: &str,
        quantization: Quantization,
        slice: Option<&Slice>,
    ) -> Result<Packed> {
        let Quantization { group_size, bits, mode } = quantization;
        let (mut words, mut groups) = (slice.cloned(), slice.cloned());
        if let Some(slice) = slice.filter(|slice| slice.axis == -1) {
            if slice
                .ranges
                .iter()
                .any(|own| own.start % group_size != 0 || own.end % group_size != 0)
            {
                let problem = format!(
                    "`{name}` cannot be cut: {} ranks would divide groups of {group_size} inputs, which share a scale",
                    self.ranks.count()
                );
                return Err(self.problem("", problem));
            }
            words = Some(slice.packed(group_size, group_size * bits / 32));
            groups = Some(slice.packed(group_size, 1));
        }
        let [scales, biases] = ["scales", "biases"].map(|part| format!("{name}.{part}"));
        let affine = mode == Mode::Affine;
        Ok(Packed {
            weight: self.remove_part(&format!("{name}.weight"), words.as_ref())?,
            // Other modes encode scales in bytes, which must not be cast.
            scales: match affine {
                true => self.as_stored(&scales, groups.as_ref())?,
                false => self.remove_part(&scales, groups.as_ref())?,
            },
            biases: if affine { Some(self.as_stored(&biases, groups.as_ref())?) } else { None },
            quantization,
            dtype: self.dtype,
            own_kernel: None,
        })
    }

    /// Rows of a layer without bias that was taken.
    fn rows_of(&mut self, layer: &Linear, rows: &Slice) -> Result<Linear> {
        let packed = match layer {
            Linear::Dense { weight, .. } => return self.dense(rows.of(&weight.weight)?, None),
            Linear::Quantized { weight, .. } => weight.clone(),
            Linear::Tiled { weight, .. } => Packed::from_tiled(weight)?,
            Linear::Part(_) => unreachable!("it was taken whole"),
        };
        let part = Packed {
            weight: rows.of(&packed.weight)?,
            scales: rows.of(&packed.scales)?,
            biases: packed.biases.as_ref().map(|biases| rows.of(biases)).transpose()?,
            ..packed
        };
        self.stored(part, None)
    }

    /// A layer in the form that [`Storage`] asks for.
    fn stored(&mut self, mut packed: Packed, bias: Option<Array>) -> Result<Linear> {
        packed.own_kernel = match self.storage {
            Storage::OwnKernels(activations) if cpu::supports(packed.view()) => {
                Some(OwnKernel { activations, is_symmetric: packed.is_symmetric()? })
            }
            _ => None,
        };
        if self.storage != Storage::Packed && packed.own_kernel.is_none() {
            return self.dense(packed.dequantize()?, bias);
        }
        if packed.own_kernel.is_some() {
            self.own_kernels += 1;
            self.own_packed += 1;
            // A view of a larger array would be copied in each product.
            packed.weight = packed.weight.contiguous()?;
            packed.scales = packed.scales.contiguous()?;
            packed.biases = packed.biases.map(|biases| biases.contiguous()).transpose()?;
        }
        if let Some(weight) = Tiled::new(packed.view())? {
            return Ok(Linear::Tiled { weight, bias });
        }
        let arrays = || [&packed.weight, &packed.scales].into_iter().chain(&packed.biases);
        eval(arrays())?;
        if packed.own_kernel.is_some() {
            self.own_memory.extend(arrays().map(cpu::addresses));
        }
        Ok(Linear::Quantized { weight: packed, bias })
    }

    /// A layer of floats. Those of 16 bits stay so if kernels of our own multiply with them; others get the model's dtype.
    fn dense(&mut self, mut weight: Array, bias: Option<Array>) -> Result<Linear> {
        let dtype = self.dtype;
        let own_kernel =
            matches!(self.storage, Storage::OwnKernels(_)) && cpu::supports_dense(&weight);
        if own_kernel {
            self.own_kernels += 1;
            // A view of a larger array would be copied in each product.
            weight = weight.contiguous()?;
        }
        if !own_kernel || weight.dtype() == Dtype::Float32 {
            weight = weight.as_dtype(dtype)?;
        }
        eval([&weight])?;
        if own_kernel {
            self.own_memory.push(cpu::addresses(&weight));
        }
        Ok(Linear::Dense { weight: Dense { weight, dtype, own_kernel }, bias })
    }
}

/// The quantization of a layer that `config.json` does not name, from its shape: recipes of mixed bits leave
/// names out. `columns` are its 32-bit words and `groups` its scales in a row; without `inputs` the group
/// size is that of the other layers.
///
/// Source: mlx-lm `utils.py`, `infer_quant_config`.
fn inferred(all: Quantization, inputs: Option<i32>, columns: i32, groups: i32) -> Quantization {
    let groups = groups.max(1);
    let inputs = inputs.unwrap_or(groups * all.group_size).max(1);
    let found = Quantization { group_size: inputs / groups, bits: columns * 32 / inputs, ..all };
    let is_known =
        [32, 64, 128].contains(&found.group_size) && [2, 3, 4, 5, 6, 8].contains(&found.bits);
    if is_known { found } else { all }
}
