//! The product: y[r][n] = sum over k of x[r][k] * w[n][k].
//!
//! Columns are cut into spans of [`SPAN`](crate::kernel::SPAN). An output is the sum of its spans, first to last. In a span, a
//! lane of a vector adds up the products of a packed word's elements, multiplies the sum with the group's scale, and adds it to
//! those of its words before; of floats, each product is added at once. Lanes are added in the end. Nothing else decides the
//! order of sums.
//!
//! Biases of a packed matrix are apart from its elements: they are multiplied with the sums of the groups of x. So the bound of
//! an error is relative to `|element * scale| + |bias|`, not to the magnitude of their sum.
//!
//! Several matrices with one format share the rows they read, which may be normed before, and what happens to a sum next
//! ([`Finish`]) happens while it is in the first-level cache. Bits are those of one operation after the other.
//!
//! Rows are taken 128 at a time, so that their span stays in the second-level cache. Elements of the matrix are unpacked to
//! registers for each few of them ([`kernel`](crate::kernel)).

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use thiserror::Error as ThisError;

mod task;

use crate::elementwise::Norm;
use crate::float::{Floats, FloatsMut};
use crate::kernel::{Format, Kernels, Scales, Strip};
use crate::lanes::{BLOCK, Isa};
use task::{Out, Part};

/// A packed matrix: MLX's affine quantization.
#[derive(Debug, Clone, Copy)]
pub struct Packed<'a> {
    /// [rows, columns * bits / 32], elements from the lowest bits on.
    pub words: &'a [u32],
    /// [rows, columns / group_size]
    pub scales: Floats<'a>,
    /// Biases of the same groups.
    pub biases: Biases<'a>,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
    /// 32, 64 or 128.
    pub group_size: usize,
    /// 4 or 8.
    pub bits: usize,
}

/// What an element is worth beside `element * scale`.
#[derive(Debug, Clone, Copy)]
pub enum Biases<'a> {
    /// `+ bias`; [rows, columns / group_size].
    Stored(Floats<'a>),
    /// `- 2^(bits - 1) * scale`. The kernels compute it from the scale, as reading it takes a tenth of the time of a product in
    /// 4 bits.
    Symmetric,
}

/// A matrix of floats.
#[derive(Debug, Clone, Copy)]
pub struct Dense<'a> {
    /// [rows, columns]
    pub elements: Floats<'a>,
    /// Outputs.
    pub rows: usize,
    /// Inputs, in blocks of 32.
    pub columns: usize,
}

/// A matrix that rows are multiplied with.
#[derive(Debug, Clone, Copy)]
pub enum Matrix<'a> {
    /// Integers with scales.
    Packed(Packed<'a>),
    /// Floats.
    Dense(Dense<'a>),
}

impl<'a> From<Packed<'a>> for Matrix<'a> {
    fn from(matrix: Packed<'a>) -> Self {
        Self::Packed(matrix)
    }
}

impl<'a> From<Dense<'a>> for Matrix<'a> {
    fn from(matrix: Dense<'a>) -> Self {
        Self::Dense(matrix)
    }
}

/// How rows of x are multiplied with a packed matrix. Products with a dense one are always exact.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Activations {
    /// As f32, which all types of floats fit. With AVX-512 VNNI, as integers of 24 bits in groups of the matrix's size: an
    /// element is off by up to 2^-24 of its group's largest.
    #[default]
    Exact,
    /// Rounded to 8 bits in groups of the matrix's size: an element is off by up to 1/254 of its group's largest.
    Int8,
}

/// Rows that are multiplied.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// [R, columns]
    pub x: Floats<'a>,
    /// Norm of each row of `x`, which is then f32.
    pub norm: Option<Norm<'a>>,
    /// How the rows are read.
    pub activations: Activations,
}

impl<'a> From<Floats<'a>> for Input<'a> {
    /// Rows as they are.
    fn from(x: Floats<'a>) -> Self {
        Self { x, norm: None, activations: Activations::Exact }
    }
}

/// What becomes of sums, in f32, before they are rounded to the outputs' type.
#[derive(Debug, Clone, Copy)]
pub enum Finish<'a> {
    /// Numbers are added, in this order.
    Add {
        /// [rows]
        bias: Option<&'a [f32]>,
        /// [R, rows]
        residual: Option<&'a [f32]>,
    },
    /// `silu(y) * (x times this matrix)`, element by element.
    SwiGlu(Matrix<'a>),
}

impl Finish<'_> {
    /// Sums are the outputs.
    pub const NONE: Self = Self::Add { bias: None, residual: None };
}

/// One product of the input.
#[derive(Debug)]
pub struct Product<'a> {
    /// [rows, columns]
    pub matrix: Matrix<'a>,
    /// What becomes of sums.
    pub finish: Finish<'a>,
    /// [R, rows]
    pub y: FloatsMut<'a>,
}

/// Why a product cannot be computed.
#[derive(Debug, ThisError)]
pub enum Error {
    /// Matrices of one input are stored in different ways.
    #[error("the matrices have different formats or numbers of columns")]
    Formats,
    /// A norm of rows that are not f32.
    #[error("rows that are normed must be f32")]
    Norm,
    /// Other group sizes or bits.
    #[error("no kernel for {bits} bits in groups of {group_size}")]
    Format {
        /// Bits of an element.
        bits: usize,
        /// Elements of a group.
        group_size: usize,
    },
    /// A slice does not have the length that the shape asks for.
    #[error("{what} has {found} elements, not {expected}")]
    Length {
        /// The argument.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length by the shape.
        expected: usize,
    },
}

impl Packed<'_> {
    /// Whether there is a kernel for a format.
    pub fn supports(bits: usize, group_size: usize) -> bool {
        matches!(bits, 4 | 8) && matches!(group_size, 32 | 64 | 128)
    }

    fn groups(&self) -> usize {
        self.columns / self.group_size
    }

    /// The index of the group of column `k` of a row.
    fn group(&self, row: usize, k: usize) -> usize {
        row * self.groups() + k / self.group_size
    }

    /// See [`Matrix::read_row`].
    fn read_row(&self, row: usize, to: &mut [f32]) {
        let Self { columns, group_size, bits, .. } = *self;
        let (elements, largest) = (32 / bits, (1u32 << bits) - 1);
        let words = &self.words[row * columns / elements..][..columns / elements];
        let zero = -f32::exp2(bits as f32 - 1.0);
        let words_of_group = words.chunks(group_size / elements);
        for (g, (words, to)) in words_of_group.zip(to.chunks_mut(group_size)).enumerate() {
            let at = self.group(row, g * group_size);
            let scale = self.scales.get(at);
            let bias = match &self.biases {
                Biases::Stored(biases) => biases.get(at),
                Biases::Symmetric => zero * scale,
            };
            for (word, to) in words.iter().zip(to.chunks_mut(elements)) {
                for (i, to) in to.iter_mut().enumerate() {
                    *to = (word >> (bits * i) & largest) as f32 * scale + bias;
                }
            }
        }
    }

    /// Checks the lengths that the shape asks for.
    fn check(&self) -> Result<(), Error> {
        let Self { rows, columns, group_size, bits, .. } = *self;
        if !Self::supports(bits, group_size) {
            return Err(Error::Format { bits, group_size });
        }
        length("words", self.words.len(), rows * (columns * bits / 32))?;
        length("scales", self.scales.len(), rows * self.groups())?;
        match self.biases {
            Biases::Stored(biases) => length("biases", biases.len(), rows * self.groups()),
            Biases::Symmetric => Ok(()),
        }
    }
}

impl Dense<'_> {
    /// Whether there is a kernel for rows of a length.
    pub fn supports(columns: usize) -> bool {
        columns.is_multiple_of(BLOCK)
    }
}

impl Matrix<'_> {
    /// Whether the kernels of `other` read this matrix, too.
    fn is_like(&self, other: &Self) -> bool {
        let format = |matrix: &Self| match matrix {
            Self::Packed(matrix) => (Some((matrix.bits, matrix.group_size)), None),
            Self::Dense(matrix) => (None, Some(std::mem::discriminant(&matrix.elements))),
        };
        self.columns() == other.columns() && format(self) == format(other)
    }

    /// Writes row `row` to `to`, in f32.
    ///
    /// # Panics
    /// If there is no such row, or `to` does not have the length of one.
    pub fn read_row(&self, row: usize, to: &mut [f32]) {
        let columns = self.columns();
        assert_eq!(to.len(), columns);
        match self {
            Self::Packed(matrix) => matrix.read_row(row, to),
            Self::Dense(matrix) => matrix.elements.widen(row * columns, to),
        }
    }

    fn rows(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.rows,
            Self::Dense(matrix) => matrix.rows,
        }
    }

    fn columns(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.columns,
            Self::Dense(matrix) => matrix.columns,
        }
    }

    /// Columns of a group.
    fn group_size(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.group_size,
            Self::Dense(_) => BLOCK,
        }
    }

    /// Bytes that elements of a row take. `columns` is a multiple of [`BLOCK`].
    fn bytes(&self, columns: usize) -> usize {
        match self {
            Self::Packed(matrix) => columns * matrix.bits / 8,
            Self::Dense(matrix) => columns * matrix.elements.size(),
        }
    }

    /// `outputs` rows from `first` on, in the span of `columns` columns from `k` on.
    fn strip(&self, first: usize, outputs: usize, k: usize, columns: usize) -> Strip<'_> {
        let (start, scales) = match self {
            Self::Packed(matrix) => {
                let &Packed { scales, biases, group_size, .. } = matrix;
                let (first, count) = (matrix.group(first, k), columns / group_size);
                let scales = Scales { scales, biases, first, of_row: matrix.groups(), count };
                (matrix.words.as_ptr().cast(), Some(scales))
            }
            Self::Dense(matrix) => (matrix.elements.start(), None),
        };
        let line_bytes = self.bytes(self.columns());
        let line = start.wrapping_add(first * line_bytes + self.bytes(k));
        Strip { columns, outputs, line, line_bytes, scales }
    }

    /// The kernels that multiply rows with it. Of a dense one, products are always exact.
    fn kernels(&self, isa: Isa, activations: Activations) -> Kernels {
        match self {
            Self::Packed(Packed { bits, group_size, .. }) => {
                let format = Format { bits: *bits, group_size: *group_size, activations };
                Kernels::of_packed(isa, format)
            }
            Self::Dense(matrix) => Kernels::of_floats(isa, &matrix.elements),
        }
    }

    /// Checks the lengths that the shape asks for.
    fn check(&self) -> Result<(), Error> {
        let (rows, columns) = (self.rows(), self.columns());
        match self {
            Self::Packed(matrix) => matrix.check()?,
            Self::Dense(matrix) => length("elements", matrix.elements.len(), rows * columns)?,
        }
        length("columns", columns, columns / self.group_size() * self.group_size())
    }

    /// The number of rows of `x`.
    fn count(&self, x: &Floats<'_>) -> Result<usize, Error> {
        let count = x.len().checked_div(self.columns()).unwrap_or(0);
        length("x", x.len(), count * self.columns())?;
        Ok(count)
    }
}

impl Product<'_> {
    /// Checks everything that the kernels of `first` rely on, for `count` rows of x.
    fn check(&self, first: &Matrix<'_>, count: usize) -> Result<(), Error> {
        let Self { matrix, finish, y } = self;
        let check = |matrix: &Matrix<'_>| {
            matrix.check()?;
            if matrix.is_like(first) { Ok(()) } else { Err(Error::Formats) }
        };
        check(matrix)?;
        let rows = matrix.rows();
        length("y", y.len(), count * rows)?;
        match finish {
            Finish::Add { bias, residual } => {
                length("bias", bias.map_or(rows, <[f32]>::len), rows)?;
                length("residual", residual.map_or(y.len(), <[f32]>::len), y.len())
            }
            Finish::SwiGlu(ups) => {
                check(ups)?;
                length("ups", ups.rows(), rows)
            }
        }
    }
}

fn length(what: &'static str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected { Ok(()) } else { Err(Error::Length { what, found, expected }) }
}

/// `y` [R, rows] = `x` [R, columns] times the transposed matrix, with the best instructions of the processor.
///
/// # Errors
/// [`Error`] if lengths do not fit or the format has no kernel; `y` is then unchanged.
pub fn product<'a>(
    activations: Activations,
    x: Floats<'_>,
    matrix: impl Into<Matrix<'a>>,
    y: FloatsMut<'_>,
) -> Result<(), Error> {
    product_with(Isa::best(), activations, x, matrix, y)
}

/// As [`product`], with the instructions of `isa`, which must be one of [`Isa::available`].
///
/// # Errors
/// As [`product`].
///
/// # Panics
/// If the processor does not have `isa`.
pub fn product_with<'a>(
    isa: Isa,
    activations: Activations,
    x: Floats<'_>,
    matrix: impl Into<Matrix<'a>>,
    y: FloatsMut<'_>,
) -> Result<(), Error> {
    let product = Product { matrix: matrix.into(), finish: Finish::NONE, y };
    products_with(isa, &Input { x, norm: None, activations }, &mut [product])
}

/// Computes the products of an input, with the best instructions of the processor.
///
/// # Errors
/// [`Error`] if lengths do not fit, the format has no kernel or differs between matrices, or there is a norm of rows that are
/// not f32; outputs are then unchanged.
pub fn products(input: &Input<'_>, products: &mut [Product<'_>]) -> Result<(), Error> {
    products_with(Isa::best(), input, products)
}

/// As [`products`], with the instructions of `isa`, which must be one of [`Isa::available`].
///
/// # Errors
/// As [`products`].
///
/// # Panics
/// If the processor does not have `isa`.
pub fn products_with(
    isa: Isa,
    input: &Input<'_>,
    products: &mut [Product<'_>],
) -> Result<(), Error> {
    let Some(Product { matrix: first, .. }) = products.first() else { return Ok(()) };
    if isa != Isa::best() {
        assert!(Isa::available().contains(&isa), "the processor does not have {isa:?}");
    }
    let (first, count) = (*first, first.count(&input.x)?);
    if let Some(norm) = input.norm {
        length("norm", norm.weight.len(), first.columns())?;
        if !matches!(input.x, Floats::F32(_)) {
            return Err(Error::Norm);
        }
    }
    for product in &*products {
        product.check(&first, count)?;
    }
    let parts: Vec<Part<'_>> = products
        .iter_mut()
        .map(|Product { matrix, finish, y }| {
            let y = match y {
                FloatsMut::F32(y) => Out::F32(y.as_mut_ptr()),
                FloatsMut::Bf16(y) => Out::Bf16(y.as_mut_ptr()),
                FloatsMut::F16(y) => Out::F16(y.as_mut_ptr()),
            };
            Part { matrix: *matrix, finish: *finish, y }
        })
        .collect();
    // SAFETY: all lengths were compared, and the processor has the instructions.
    unsafe { task::run(isa, input, &parts, count) };
    Ok(())
}

#[cfg(test)]
mod tests;
