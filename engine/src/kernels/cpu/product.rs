//! Products with the matrices of layers, with the norm before and the sums and gates after them. A row's result does not
//! depend on the other rows of a pass.

use std::borrow::Cow;

use half::{bf16, f16};
use mlx_rs::{Array, Dtype};
use mlx_sys::{View, mlx_dtype};
use steersman_cpu_kernels::{
    self as kernels, Activations, Biases, Finish, Floats, FloatsMut, Norm, Product,
};

use super::layers::{fits, size};
use super::{elements, run, shape, slice_mut};
use crate::error::Result;
use crate::kernels::{Input, KernelKind, Mode, NormView, PackedView};

/// Returns true if [`products`] can multiply with a matrix.
pub fn supports(matrix: PackedView<'_>) -> bool {
    let PackedView { words, scales, biases, quantization, .. } = matrix;
    let number = |number: i32| usize::try_from(number).unwrap_or(0);
    KernelKind::Products.is_on()
        && quantization.mode == Mode::Affine
        && kernels::Packed::supports(number(quantization.bits), number(quantization.group_size))
        && words.ndim() == 2
        && words.dtype() == Dtype::Uint32
        && has_type(scales)
        && biases.is_some_and(|biases| has_type(biases) && biases.shape() == scales.shape())
}

fn has_type(array: &Array) -> bool {
    matches!(array.dtype(), Dtype::Float32 | Dtype::Bfloat16 | Dtype::Float16)
}

/// Returns true if [`products`] can multiply with a matrix of floats.
pub fn supports_dense(matrix: &Array) -> bool {
    KernelKind::Products.is_on()
        && matrix.ndim() == 2
        && has_type(matrix)
        && usize::try_from(matrix.dim(1)).is_ok_and(kernels::Dense::supports)
}

/// `x` [.., in] times each of `matrices`, [.., out] in its dtype, plus `residual` of the same shape if there is one. `None` if
/// a matrix is, matrices have different formats, or `x` does not fit.
pub fn products<const N: usize>(
    matrices: [Option<Matrix<'_>>; N],
    x: Input<'_>,
    residual: Option<&Array>,
) -> Result<Option<[Array; N]>> {
    let Some(operation) = Operation::new(matrices, x)? else { return Ok(None) };
    let shapes = operation.shapes();
    let added = operation.matrices.each_ref().map(|matrix| [matrix.bias, residual]);
    // MLX adds numbers of 16 bits to products that are rounded first.
    let is_f32 = |array: &Array| array.dtype() == Dtype::Float32;
    let adds = is_f32(&operation.x)
        && added.iter().flatten().flatten().all(|added| is_f32(added))
        && residual.is_none_or(|residual| shapes.iter().all(|shape| shape == residual.shape()));
    if adds {
        return operation.run(added, shapes, false).map(Some);
    }
    let mut outputs = operation.run([[None; 2]; N], shapes, false)?;
    for (y, added) in outputs.iter_mut().zip(added) {
        for added in added.into_iter().flatten() {
            *y = y.add(added)?;
        }
    }
    Ok(Some(outputs))
}

/// `silu(gate x) * (up x)` of the matrices gate and up. `None` where [`products`] returns `None`, and if there are biases.
pub fn swiglu_product(matrices: [Option<Matrix<'_>>; 2], x: Input<'_>) -> Result<Option<Array>> {
    let Some(operation) = Operation::new(matrices, x)? else { return Ok(None) };
    let [gate, up] = operation.shapes();
    let has_bias = operation.matrices.iter().any(|matrix| matrix.bias.is_some());
    if !fits([&operation.x]) || has_bias || gate != up {
        return Ok(None);
    }
    let [y] = operation.run([[None; 2]; 2], [gate], true)?;
    Ok(Some(y))
}

/// The rows `ids` [R] (u32) of a matrix, f32 [1, R, in]. `None` if there is no kernel for it.
pub fn embed(matrix: &Matrix<'_>, ids: &Array) -> Result<Option<Array>> {
    let is_f32 = matrix.row_dtype == Dtype::Float32;
    if !is_f32 || ids.dtype() != Dtype::Uint32 || ids.ndim() != 1 || !fits([]) {
        return Ok(None);
    }
    let Format { packed: [bits, group_size], columns, .. } = matrix.format;
    let inputs = [&[ids], &matrix.arrays[..]].concat();
    let parameters = [bits, group_size, i32::from(matrix.arrays.len() > 2), matrix.rows];
    let shape = [1, ids.dim(0), columns];
    // SAFETY: `rows_of_matrix` computes one output of this shape from these inputs.
    let [y] = unsafe { run(&inputs, [&shape], Dtype::Float32, rows_of_matrix, &parameters) }?;
    Ok(Some(y))
}

/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays and parameters of [`embed`].
unsafe extern "C" fn rows_of_matrix(views: *const View, count: usize, parameters: *const i32) {
    // SAFETY: promised by the caller. The output is a new array that nothing else refers to.
    unsafe {
        let [ids, arrays @ .., y] = std::slice::from_raw_parts(views, count) else {
            unreachable!("made with ids and one output");
        };
        let [bits, group_size, given, rows] = [0, 1, 2, 3].map(|i| size(*parameters.add(i)));
        let mut arrays = arrays.iter();
        let layer =
            OwnedLayer::read(|| arrays.next().expect("made with as many"), bits, [given, 0, 0]);
        let columns = shape(y).last().copied().unwrap_or(1);
        let matrix = layer.matrix(bits, group_size, [rows, columns]);
        let ids = elements::<u32>(ids);
        let y = slice_mut::<f32>(y, ids.len() * columns);
        for (id, row) in ids.iter().zip(y.chunks_mut(columns)) {
            matrix.read_row(*id as usize, row);
        }
    }
}

/// How a matrix is stored and read.
#[derive(Clone, Copy, PartialEq)]
struct Format {
    /// Bits and group size; zeros of a matrix of floats.
    packed: [i32; 2],
    /// Type of the elements.
    dtype: Dtype,
    columns: i32,
    activations: Activations,
}

/// The matrix of a layer that [`products`] can multiply with.
pub struct Matrix<'a> {
    format: Format,
    rows: i32,
    /// Words, scales and stored biases, or floats.
    arrays: Vec<&'a Array>,
    /// The bias of the layer, [out].
    bias: Option<&'a Array>,
    /// Type of the rows of an embedding.
    row_dtype: Dtype,
}

impl<'a> Matrix<'a> {
    /// A packed matrix. `is_symmetric` lets the kernel compute stored biases from scales. `None` if there is no kernel for it.
    pub fn packed(
        matrix: PackedView<'a>,
        bias: Option<&'a Array>,
        activations: Activations,
        is_symmetric: bool,
    ) -> Option<Self> {
        if !supports(matrix) {
            return None;
        }
        let PackedView { words, scales, biases, quantization, dtype } = matrix;
        let packed = [quantization.bits, quantization.group_size];
        let mut arrays = vec![words, scales];
        if !is_symmetric {
            arrays.push(biases?);
        }
        let columns = scales.dim(-1) * quantization.group_size;
        let format = Format { packed, dtype: words.dtype(), columns, activations };
        Some(Self { format, rows: words.dim(-2), arrays, bias, row_dtype: dtype })
    }

    /// A matrix of floats [out, in], whose rows are read as `row_dtype`. `None` if there is no kernel for it.
    pub fn dense(elements: &'a Array, bias: Option<&'a Array>, row_dtype: Dtype) -> Option<Self> {
        if !supports_dense(elements) {
            return None;
        }
        let [rows, columns] = [elements.dim(-2), elements.dim(-1)];
        let (dtype, activations) = (elements.dtype(), Activations::Exact);
        let format = Format { packed: [0, 0], dtype, columns, activations };
        Some(Self { format, rows, arrays: vec![elements], bias, row_dtype })
    }
}

/// Products of one input with matrices of one format.
struct Operation<'a, const N: usize> {
    matrices: [Matrix<'a>; N],
    x: Array,
    /// The norm of `x`, if the kernel computes it.
    norm: Option<NormView<'a>>,
}

/// Parameters of [`multiply`] before those of the matrices: whether each has stored biases, a bias and a residual.
const FIXED: usize = 7;

impl<'a, const N: usize> Operation<'a, N> {
    fn new(matrices: [Option<Matrix<'a>>; N], x: Input<'a>) -> Result<Option<Self>> {
        let matrices: Option<Vec<_>> = matrices.into_iter().collect();
        let Some(matrices) = matrices.and_then(|matrices| <[_; N]>::try_from(matrices).ok()) else {
            return Ok(None);
        };
        let format = matrices[0].format;
        if matrices.iter().any(|matrix| matrix.format != format) {
            return Ok(None);
        }
        let norms = |x: &Array, norm: NormView<'_>| {
            fits([x, norm.weight]) && norm.weight.shape() == [format.columns]
        };
        let (x, norm) = match x {
            Input::Normed(x, norm) if norms(x, norm) => (x.clone(), Some(norm)),
            _ => (x.rows()?, None),
        };
        let has_rows = has_type(&x) && x.shape().last() == Some(&format.columns);
        Ok(has_rows.then_some(Self { matrices, x, norm }))
    }

    /// [.., out] of each matrix.
    fn shapes(&self) -> [Vec<i32>; N] {
        let leading = &self.x.shape()[..self.x.ndim() - 1];
        self.matrices.each_ref().map(|matrix| [leading, &[matrix.rows]].concat())
    }

    /// The outputs of these shapes; `added` are bias and residual of each matrix.
    fn run<const M: usize>(
        &self,
        added: [[Option<&Array>; 2]; N],
        shapes: [Vec<i32>; M],
        is_swiglu: bool,
    ) -> Result<[Array; M]> {
        let Format { packed: [bits, group_size], activations, .. } = self.matrices[0].format;
        let eps = self.norm.map_or(0.0, |norm| norm.eps).to_bits().cast_signed();
        let is_int8 = activations == Activations::Int8;
        let flags = [is_int8, self.norm.is_some(), is_swiglu].map(i32::from);
        let count = i32::try_from(N).expect("a layer has a few matrices");
        let mut parameters = [&[bits, group_size, eps][..], &flags, &[count]].concat();
        debug_assert_eq!(parameters.len(), FIXED);
        let mut inputs = vec![&self.x];
        inputs.extend(self.norm.map(|norm| norm.weight));
        for (matrix, added) in self.matrices.iter().zip(added) {
            inputs.extend(&matrix.arrays);
            inputs.extend(added.into_iter().flatten());
            let has_biases = matrix.arrays.len() > 2;
            let given = [has_biases, added[0].is_some(), added[1].is_some()];
            parameters.extend(given.map(i32::from));
        }
        let shapes = shapes.each_ref().map(|shape| &shape[..]);
        // SAFETY: `multiply` computes outputs of these shapes from these inputs.
        unsafe { run(&inputs, shapes, self.x.dtype(), multiply, &parameters) }
    }
}

/// Runs on the thread of MLX's stream.
///
/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays and parameters of [`Operation::run`]: the rows and the weight of their norm;
/// for each matrix its arrays, bias and residual; the outputs.
unsafe extern "C" fn multiply(views: *const View, count: usize, parameters: *const i32) {
    // SAFETY: MLX passes as many views as there are inputs and outputs, which are valid during this call. Types and shapes
    // were checked when the operation was made. The outputs are new arrays that nothing else refers to.
    unsafe {
        let mut views = std::slice::from_raw_parts(views, count).iter();
        let mut next = || views.next().expect("made with as many arrays");
        let matrices = size(*parameters.add(FIXED - 1));
        let parameters = std::slice::from_raw_parts(parameters, FIXED + 3 * matrices);
        let (fixed, given) = parameters.split_at(FIXED);
        let [bits, group_size] = [fixed[0], fixed[1]].map(size);
        let [is_int8, is_normed, is_swiglu] = [fixed[3], fixed[4], fixed[5]].map(|flag| flag != 0);
        let x = next();
        let columns = shape(x).last().copied().unwrap_or(1);
        let x = OwnedFloats::read(x);
        let norm = is_normed.then(|| elements::<f32>(next()));
        let layers: Vec<OwnedLayer<'_>> = given
            .chunks_exact(3)
            .map(|given| {
                OwnedLayer::read(&mut next, bits, [given[0], given[1], given[2]].map(size))
            })
            .collect();
        let matrix = |layer, y| OwnedLayer::matrix(layer, bits, group_size, [rows_of(y), columns]);
        let mut products = Vec::with_capacity(layers.len());
        for (layer, y) in layers.iter().zip(views) {
            let finish = match &layers[..] {
                [_, ups] if is_swiglu => Finish::SwiGlu(matrix(ups, y)),
                _ => {
                    Finish::Add { bias: layer.bias.as_deref(), residual: layer.residual.as_deref() }
                }
            };
            products.push(Product { matrix: matrix(layer, y), finish, y: floats_mut(y) });
        }
        let activations = if is_int8 { Activations::Int8 } else { Activations::Exact };
        let norm = norm
            .as_deref()
            .map(|weight| Norm { weight, eps: f32::from_bits(fixed[2].cast_unsigned()) });
        let input = kernels::Input { x: x.floats(), norm, activations };
        kernels::products(&input, &mut products)
            .expect("shapes were checked when the operation was made");
    }
}

/// Outputs of each row.
///
/// # Safety
/// The view is valid.
unsafe fn rows_of(y: &View) -> usize {
    // SAFETY: promised by the caller.
    unsafe { shape(y) }.last().copied().unwrap_or(1)
}

/// An output's floats.
///
/// # Safety
/// The view is valid, contiguous, and nothing else refers to it.
unsafe fn floats_mut(y: &View) -> FloatsMut<'_> {
    // SAFETY: promised by the caller.
    unsafe {
        let length = shape(y).iter().product();
        match y.dtype {
            BF16 => FloatsMut::Bf16(slice_mut(y, length)),
            F16 => FloatsMut::F16(slice_mut(y, length)),
            _ => FloatsMut::F32(slice_mut(y, length)),
        }
    }
}

/// The arrays of a matrix, and what is added to its products.
struct OwnedLayer<'a> {
    /// Elements of a packed matrix.
    words: Cow<'a, [u32]>,
    /// Scales, or all elements.
    floats: OwnedFloats<'a>,
    /// Stored biases of a packed matrix.
    biases: Option<OwnedFloats<'a>>,
    bias: Option<Cow<'a, [f32]>>,
    residual: Option<Cow<'a, [f32]>>,
}

impl<'a> OwnedLayer<'a> {
    /// Reads the arrays one after another. `given`: whether there are stored biases, a bias and a residual.
    ///
    /// # Safety
    /// As [`elements`], with the types of such arrays.
    unsafe fn read(mut next: impl FnMut() -> &'a View, bits: usize, given: [usize; 3]) -> Self {
        // SAFETY: promised by the caller.
        unsafe {
            Self {
                words: if bits > 0 { elements(next()) } else { Cow::default() },
                floats: OwnedFloats::read(next()),
                biases: (given[0] != 0).then(|| OwnedFloats::read(next())),
                bias: (given[1] != 0).then(|| elements(next())),
                residual: (given[2] != 0).then(|| elements(next())),
            }
        }
    }

    fn matrix(
        &self,
        bits: usize,
        group_size: usize,
        [rows, columns]: [usize; 2],
    ) -> kernels::Matrix<'_> {
        let floats = self.floats.floats();
        if bits == 0 {
            return kernels::Matrix::Dense(kernels::Dense { elements: floats, rows, columns });
        }
        let stored = self.biases.as_ref().map(|biases| Biases::Stored(biases.floats()));
        kernels::Matrix::Packed(kernels::Packed {
            words: &self.words,
            scales: floats,
            biases: stored.unwrap_or(Biases::Symmetric),
            rows,
            columns,
            group_size,
            bits,
        })
    }
}

const BF16: mlx_dtype = Dtype::Bfloat16 as mlx_dtype;
const F16: mlx_dtype = Dtype::Float16 as mlx_dtype;

/// The floats of an input, copied if they are not contiguous.
enum OwnedFloats<'a> {
    F32(Cow<'a, [f32]>),
    Bf16(Cow<'a, [bf16]>),
    F16(Cow<'a, [f16]>),
}

impl<'a> OwnedFloats<'a> {
    /// # Safety
    /// As [`elements`], with the type that `view.dtype` names.
    unsafe fn read(view: &'a View) -> Self {
        // SAFETY: promised by the caller.
        unsafe {
            match view.dtype {
                BF16 => Self::Bf16(elements(view)),
                F16 => Self::F16(elements(view)),
                _ => Self::F32(elements(view)),
            }
        }
    }

    fn floats(&self) -> Floats<'_> {
        match self {
            Self::F32(floats) => Floats::F32(floats),
            Self::Bf16(floats) => Floats::Bf16(floats),
            Self::F16(floats) => Floats::F16(floats),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Dense, Linear, OwnKernel, Packed, Quantization, RmsNorm};
    use mlx_rs::transforms::eval;
    use mlx_rs::{Device, DeviceType, random};

    fn product(activations: Activations, x: &Array, matrix: &Packed) -> Option<Array> {
        let own_kernel =
            Some(OwnKernel { activations, is_symmetric: matrix.is_symmetric().unwrap() });
        let weight = Packed { own_kernel, ..matrix.clone() };
        let layer = Linear::Quantized { weight, bias: None };
        products([layer.matrix()], Input::Rows(x), None).unwrap().map(|[y]| y)
    }

    fn exact(x: &Array, matrix: &Packed) -> Option<Array> {
        product(Activations::Exact, x, matrix)
    }

    fn dense_product(x: &Array, matrix: &Array) -> Option<Array> {
        let weight = Dense { own_kernel: true, ..Dense::from(matrix.clone()) };
        products([Linear::Dense { weight, bias: None }.matrix()], Input::Rows(x), None)
            .unwrap()
            .map(|[y]| y)
    }

    fn normal(seed: u64, shape: &[i32]) -> Array {
        random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
    }

    fn packed(rows: i32, columns: i32, bits: i32, group_size: i32) -> Packed {
        let quantization = Quantization { group_size, bits, mode: Mode::Affine };
        Packed::quantize(&normal(1, &[rows, columns]), quantization)
    }

    const EXACT: Option<OwnKernel> =
        Some(OwnKernel { activations: Activations::Exact, is_symmetric: false });

    /// The kernels run on the CPU only.
    fn on_gpu() -> bool {
        matches!(Device::try_default().unwrap().get_type().unwrap(), DeviceType::Gpu)
    }

    fn largest(array: &Array) -> f32 {
        array.abs().unwrap().max(None).unwrap().as_dtype(Dtype::Float32).unwrap().item_exact()
    }

    #[test]
    fn products_equal_those_of_mlx() {
        if on_gpu() {
            return;
        }
        for (bits, group_size) in [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)] {
            let mut matrix = packed(70, 1152, bits, group_size);
            for (dtype, tolerance) in
                [(Dtype::Float32, 1e-5), (Dtype::Bfloat16, 1e-2), (Dtype::Float16, 2e-3)]
            {
                let x = normal(2, &[2, 3, 1152]).as_dtype(dtype).unwrap();
                let expected = matrix.matmul(&x.as_dtype(Dtype::Float32).unwrap()).unwrap();
                let y = exact(&x, &matrix).unwrap();
                assert_eq!((y.shape(), y.dtype()), (expected.shape(), dtype));
                let error = largest(&y.subtract(&expected).unwrap()) / largest(&expected);
                assert!(
                    error < tolerance,
                    "{bits} bits, groups of {group_size}, {dtype:?}: {error}"
                );
            }
            // Scales of 16 bits are widened without a loss.
            let short = |array: &Array| array.as_dtype(Dtype::Bfloat16).unwrap();
            matrix.biases = matrix.biases.as_ref().map(short);
            matrix.scales = short(&matrix.scales);
            let mut wide = matrix.clone();
            wide.scales = wide.scales.as_dtype(Dtype::Float32).unwrap();
            wide.biases = wide.biases.map(|biases| biases.as_dtype(Dtype::Float32).unwrap());
            let x = normal(3, &[1, 1152]);
            let difference = exact(&x, &matrix).unwrap();
            let difference = difference.subtract(exact(&x, &wide).unwrap()).unwrap();
            assert!(largest(&difference) == 0.0);
        }
    }

    /// A norm before, a bias, a residual and gates after the product, in one operation.
    #[test]
    fn products_of_a_layer_equal_operations_of_mlx() {
        if on_gpu() {
            return;
        }
        super::super::enable(true);
        let norm = RmsNorm { weight: normal(3, &[384]), eps: 1e-5 };
        let (x, residual) = (normal(4, &[1, 3, 384]), normal(5, &[1, 3, 70]));
        let layer = |seed, rows, bias: Option<Array>| {
            let quantization = Quantization { group_size: 64, bits: 4, mode: Mode::Affine };
            let packed = Packed::quantize(&normal(seed, &[rows, 384]), quantization);
            Linear::Quantized { weight: Packed { own_kernel: EXACT, ..packed }, bias }
        };
        let of_mlx = |layer: &Linear, x: &Array| {
            let y = x.matmul(layer.dense().unwrap().t()).unwrap();
            match layer {
                Linear::Quantized { bias: Some(bias), .. } => y.add(bias).unwrap(),
                _ => y,
            }
        };
        let (plain, biased) = (layer(7, 70, None), layer(8, 70, Some(normal(6, &[70]))));
        let (gate, up) = (layer(9, 96, None), layer(10, 96, None));
        let input = Input::Normed(&x, norm.view());
        let [y, z] =
            products([plain.matrix(), biased.matrix()], input, Some(&residual)).unwrap().unwrap();
        let gated = swiglu_product([gate.matrix(), up.matrix()], input).unwrap().unwrap();
        super::super::enable(false);
        let normed = mlx_rs::fast::rms_norm(&x, Some(&norm.weight), norm.eps).unwrap();
        let silu = |x: Array| x.multiply(mlx_rs::ops::sigmoid(&x).unwrap()).unwrap();
        let expected = [
            of_mlx(&plain, &normed).add(&residual).unwrap(),
            of_mlx(&biased, &normed).add(&residual).unwrap(),
            silu(of_mlx(&gate, &normed)).multiply(of_mlx(&up, &normed)).unwrap(),
        ];
        for (y, expected) in [y, z, gated].iter().zip(&expected) {
            assert_eq!((y.shape(), y.dtype()), (expected.shape(), Dtype::Float32));
            let error = largest(&y.subtract(expected).unwrap()) / largest(expected);
            assert!(error < 1e-5, "{error}");
        }
    }

    #[test]
    fn embeddings_equal_those_of_mlx() {
        if on_gpu() {
            return;
        }
        let ids = Array::from_slice(&[3u32, 0, 69, 3], &[4]);
        for (bits, group_size) in [(4, 32), (4, 64), (8, 128)] {
            let matrix = packed(70, 1152, bits, group_size);
            let weight = Packed { own_kernel: EXACT, ..matrix.clone() };
            let layer = Linear::Quantized { weight, bias: None };
            assert!(
                embed(&layer.matrix().unwrap(), &ids).unwrap().is_none(),
                "the kernels are not enabled"
            );
            super::super::enable(true);
            let rows = embed(&layer.matrix().unwrap(), &ids).unwrap().unwrap();
            super::super::enable(false);
            let expected = matrix.rows(&ids).unwrap().dequantize().unwrap().expand_dims(0).unwrap();
            assert_eq!((rows.shape(), rows.dtype()), (expected.shape(), expected.dtype()));
            let error = largest(&rows.subtract(&expected).unwrap());
            assert!(error < 1e-6, "{bits} bits: {error}");
        }
    }

    /// Rounding to 8 bits moves a number by up to 1/254 of its group's largest, evenly spread.
    #[test]
    fn products_in_8_bits_are_near_exact_ones() {
        if on_gpu() {
            return;
        }
        for (bits, group_size) in [(4, 32), (4, 64), (8, 128)] {
            let matrix = packed(70, 1152, bits, group_size);
            let x = normal(2, &[2, 3, 1152]);
            let y = product(Activations::Int8, &x, &matrix).unwrap();
            let expected = exact(&x, &matrix).unwrap();
            let error = largest(&y.subtract(&expected).unwrap()) / largest(&expected);
            assert!((1e-5..1e-2).contains(&error), "{bits} bits, groups of {group_size}: {error}");
        }
    }

    /// Rows of a view that is transposed or broadcast are copied first.
    #[test]
    fn inputs_may_have_any_strides() {
        if on_gpu() {
            return;
        }
        let matrix = packed(40, 128, 4, 64);
        let x = normal(4, &[128, 3, 2]);
        let strided = x.transpose_axes(&[2, 1, 0]).unwrap();
        let straight = strided.add(Array::from_f32(0.0)).unwrap();
        eval([&straight]).unwrap();
        let row = mlx_rs::ops::broadcast_to(normal(5, &[128]), &[5, 128]).unwrap();
        let repeated = row.add(Array::from_f32(0.0)).unwrap();
        for (view, copy) in [(strided, straight), (row, repeated)] {
            let [view, copy] = [view, copy].map(|x| exact(&x, &matrix).unwrap());
            assert!(largest(&view.subtract(copy).unwrap()) == 0.0);
        }
    }

    #[test]
    fn dense_products_equal_those_of_mlx() {
        if on_gpu() {
            return;
        }
        for stored in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16] {
            let matrix = normal(1, &[70, 1152]).as_dtype(stored).unwrap();
            let wide = matrix.as_dtype(Dtype::Float32).unwrap();
            for (dtype, tolerance) in
                [(Dtype::Float32, 1e-5), (Dtype::Bfloat16, 1e-2), (Dtype::Float16, 2e-3)]
            {
                let x = normal(2, &[2, 3, 1152]).as_dtype(dtype).unwrap();
                let expected = x.as_dtype(Dtype::Float32).unwrap().matmul(wide.t()).unwrap();
                let y = dense_product(&x, &matrix).unwrap();
                assert_eq!((y.shape(), y.dtype()), (expected.shape(), dtype));
                let error = largest(&y.subtract(&expected).unwrap()) / largest(&expected);
                assert!(error < tolerance, "{stored:?}, {dtype:?}: {error}");
            }
        }
        let x = normal(3, &[1, 1152]);
        assert!(dense_product(&x, &normal(4, &[8, 1150])).is_none());
        assert!(dense_product(&x, &normal(4, &[8, 1120])).is_none());
        assert!(!supports_dense(&normal(4, &[2, 8, 1152])));
    }

    #[test]
    fn other_formats_have_no_kernel() {
        assert!(supports(packed(32, 128, 4, 64).view()));
        assert!(!supports(packed(32, 128, 6, 64).view()));
        let mxfp4 = Quantization { group_size: 32, bits: 4, mode: Mode::Mxfp4 };
        assert!(!supports(Packed::quantize(&normal(6, &[32, 128]), mxfp4).view()));
        let wrong = exact(&normal(7, &[1, 64]), &packed(32, 128, 4, 64));
        assert!(wrong.is_none());
    }
}
