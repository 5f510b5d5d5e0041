//! Tests of products with every instruction set of this processor.

use half::{bf16, f16};

use super::*;
use crate::elementwise::{rms_norm, swiglu};
use crate::{numbers, pool};

/// How the elements of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Format {
    Packed { bits: usize, group_size: usize },
    F32,
    Bf16,
    F16,
}

/// A matrix that owns its numbers.
struct Owned {
    format: Format,
    words: Vec<u32>,
    scales: Vec<bf16>,
    biases: Vec<bf16>,
    /// Elements of a dense matrix, with the digits that each format has.
    floats: Vec<f32>,
    bf16: Vec<bf16>,
    f16: Vec<f16>,
    rows: usize,
    columns: usize,
}

impl Owned {
    fn new(rows: usize, columns: usize, format: Format) -> Self {
        let (bits, group_size) = match format {
            Format::Packed { bits, group_size } => (bits, group_size),
            _ => (32, columns),
        };
        let words = numbers(7, rows * columns * bits / 32);
        let groups = rows * columns / group_size;
        let short = |seed| numbers(seed, groups).into_iter().map(bf16::from_f32).collect();
        let mut floats = numbers(6, rows * columns);
        match format {
            Format::Bf16 => floats.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
            Format::F16 => floats.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            _ => {}
        }
        Self {
            format,
            words: words.iter().map(|x| x.to_bits().wrapping_mul(2_654_435_761)).collect(),
            scales: short(8),
            biases: short(9),
            bf16: floats.iter().copied().map(bf16::from_f32).collect(),
            f16: floats.iter().copied().map(f16::from_f32).collect(),
            floats,
            rows,
            columns,
        }
    }

    fn packed(rows: usize, columns: usize, group_size: usize, bits: usize) -> Self {
        Self::new(rows, columns, Format::Packed { bits, group_size })
    }

    fn matrix(&self) -> Matrix<'_> {
        let &Self { rows, columns, .. } = self;
        let elements = match self.format {
            Format::Packed { bits, group_size } => {
                return Matrix::Packed(Packed {
                    words: &self.words,
                    scales: Floats::Bf16(&self.scales),
                    biases: Biases::Stored(Floats::Bf16(&self.biases)),
                    rows,
                    columns,
                    group_size,
                    bits,
                });
            }
            Format::F32 => Floats::F32(&self.floats),
            Format::Bf16 => Floats::Bf16(&self.bf16),
            Format::F16 => Floats::F16(&self.f16),
        };
        Matrix::Dense(Dense { elements, rows, columns })
    }

    /// The element `k` of row `n`.
    fn element(&self, n: usize, k: usize) -> f64 {
        let at = n * self.columns + k;
        let Format::Packed { bits, group_size } = self.format else {
            return f64::from(self.floats[at]);
        };
        let element = (self.words[at * bits / 32] >> (at * bits % 32)) & ((1 << bits) - 1);
        let group = at / group_size;
        f64::from(element) * self.scales[group].to_f64() + self.biases[group].to_f64()
    }

    /// Outputs of a row by the definition, in f64, and the sum of magnitudes that bounds their rounding.
    fn expected(&self, x: &[f32]) -> Vec<(f64, f64)> {
        let output = |n: usize| {
            let products = x.iter().enumerate().map(|(k, x)| f64::from(*x) * self.element(n, k));
            products.fold((0.0, 0.0), |(sum, most), x| (sum + x, most + x.abs()))
        };
        (0..self.rows).map(output).collect()
    }

    fn times(&self, isa: Isa, x: &[f32]) -> Vec<f32> {
        self.times_with(isa, Activations::Exact, x)
    }

    fn times_with(&self, isa: Isa, activations: Activations, x: &[f32]) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len() / self.columns * self.rows];
        let (x, out) = (Floats::F32(x), FloatsMut::F32(&mut y));
        product_with(isa, activations, x, self.matrix(), out).unwrap();
        y
    }

    /// Format and shape, for messages of failed assertions.
    fn name(&self) -> String {
        format!("{:?}, {} x {}", self.format, self.rows, self.columns)
    }
}

/// A row rounded to 8 bits in groups.
fn rounded(x: &[f32], group_size: usize) -> Vec<f32> {
    let mut x = x.to_vec();
    for group in x.chunks_mut(group_size) {
        let scale = group.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
        for x in group {
            *x = (*x / scale).round() * scale;
        }
    }
    x
}

/// Shapes with one span and several, with incomplete spans, tiles and quads of rows.
const SHAPES: [(usize, usize); 6] =
    [(1, 128), (7, 384), (64, 128), (70, 1024), (131, 1152), (33, 2944)];

/// Columns of groups of 32 that are no whole chunk of 8-bit kernels.
const HALF_CHUNKS: [(usize, usize); 2] = [(5, 96), (9, 1120)];

/// All formats; packed ones first.
fn formats() -> Vec<Format> {
    let sizes = [32, 64, 128];
    let packed = [4, 8].map(|bits| sizes.map(|group_size| Format::Packed { bits, group_size }));
    packed.into_iter().flatten().chain([Format::F32, Format::Bf16, Format::F16]).collect()
}

fn check(law: impl Fn(Isa, &Owned)) {
    for isa in Isa::available() {
        for format in formats() {
            let in_32 = !matches!(format, Format::Packed { group_size: 64 | 128, .. });
            let more: &[_] = if in_32 { &HALF_CHUNKS } else { &[] };
            for &(rows, columns) in SHAPES.iter().chain(more) {
                law(isa, &Owned::new(rows, columns, format));
            }
        }
    }
}

#[test]
fn products_are_those_of_the_definition() {
    check(|isa, matrix| {
        let x = numbers(1, matrix.columns);
        for (n, (y, (sum, magnitude))) in
            matrix.times(isa, &x).into_iter().zip(matrix.expected(&x)).enumerate()
        {
            let error = (f64::from(y) - sum).abs();
            let name = matrix.name();
            assert!(error <= 1e-6 * magnitude, "{isa:?}, {name}, output {n}: {y} for {sum}");
        }
    });
}

/// Of a row that 8 bits represent nearly exactly, products in 8 bits are those of the definition; of others, they are off
/// by the rounding only. Products with dense matrices are exact.
#[test]
fn products_in_8_bits_are_those_of_rounded_rows() {
    check(|isa, matrix| {
        let x = numbers(1, matrix.columns);
        let Format::Packed { group_size, .. } = matrix.format else {
            let y = matrix.times_with(isa, Activations::Int8, &x);
            assert!(y == matrix.times(isa, &x), "{isa:?}, {}", matrix.name());
            return;
        };
        let near = rounded(&x, group_size);
        for (x, near) in [(&near, &near), (&x, &near)] {
            let y = matrix.times_with(isa, Activations::Int8, x);
            for (n, (y, (sum, magnitude))) in y.into_iter().zip(matrix.expected(near)).enumerate() {
                let (error, name) = ((f64::from(y) - sum).abs(), matrix.name());
                assert!(error <= 2e-6 * magnitude, "{isa:?}, {name}, output {n}: {y} for {sum}");
            }
        }
    });
}

/// Rounding must not turn a number that is not finite into one that is.
#[test]
fn numbers_that_are_not_finite_stay_so_in_8_bits() {
    for isa in Isa::available() {
        let matrix = Owned::packed(5, 128, 32, 4);
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = numbers(5, 128);
            row[77] = x;
            let y = matrix.times_with(isa, Activations::Int8, &row);
            assert!(y.iter().all(|y| y.is_nan()), "{isa:?}: {y:?}");
        }
        let zeros = matrix.times_with(isa, Activations::Int8, &[0.0; 128]);
        assert!(zeros.iter().all(|y| *y == 0.0), "{isa:?}: {zeros:?}");
    }
}

/// Buffers of rows are used again: what is left in them beyond the columns must not reach sums.
#[test]
fn earlier_rows_do_not_change_products() {
    check(|isa, matrix| {
        let x = numbers(4, matrix.columns);
        let before = matrix.times(isa, &x);
        let other = Owned::new(5, 1024, matrix.format);
        for activations in [Activations::Exact, Activations::Int8] {
            other.times_with(isa, activations, &[f32::NAN; 3 * 1024]);
            let after = matrix.times(isa, &x);
            assert!(after == before, "{isa:?}, {activations:?}, {}", matrix.name());
        }
    });
}

/// Three digits have at least the precision of f32, whatever the magnitudes in a group.
#[test]
fn sums_of_digits_are_as_exact_as_those_of_floats() {
    for isa in Isa::available() {
        for (bits, largest) in [(4, 1.0), (4, 1e5), (8, 1.0), (8, 1e5)] {
            let matrix = Owned::packed(64, 1152, 32, bits);
            let mut x = numbers(1, 1152);
            x.iter_mut().step_by(100).for_each(|x| *x *= largest);
            let (mut error, mut square) = (0.0, 0.0);
            for (y, (sum, _)) in matrix.times(isa, &x).into_iter().zip(matrix.expected(&x)) {
                error += (f64::from(y) - sum).powi(2);
                square += sum.powi(2);
            }
            let relative = (error / square).sqrt();
            assert!(relative < 5e-7, "{isa:?}, {bits} bits, {largest}: {relative}");
        }
    }
}

#[test]
fn rows_are_read_as_defined() {
    for format in formats() {
        let matrix = Owned::new(5, 384, format);
        for n in 0..5 {
            let mut row = vec![f32::NAN; 384];
            matrix.matrix().read_row(n, &mut row);
            for (k, found) in row.into_iter().enumerate() {
                let expected = matrix.element(n, k);
                let error = (f64::from(found) - expected).abs();
                assert!(error <= 1e-6, "{}, {n}, {k}: {found} for {expected}", matrix.name());
            }
        }
    }
}

/// Whether biases are read or computed.
#[test]
fn symmetric_products_equal_those_with_stored_biases() {
    for isa in Isa::available() {
        for (bits, group_size) in [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)] {
            for (rows, columns) in SHAPES {
                let mut stored = Owned::packed(rows, columns, group_size, bits);
                let bias =
                    |scale: &bf16| bf16::from_f32(scale.to_f32() * -f32::exp2(bits as f32 - 1.0));
                stored.biases = stored.scales.iter().map(bias).collect();
                let Matrix::Packed(packed) = stored.matrix() else {
                    unreachable!("made packed above")
                };
                let symmetric = Packed { biases: Biases::Symmetric, ..packed };
                for activations in [Activations::Exact, Activations::Int8] {
                    for count in [1, 3] {
                        let x = numbers(1, count * columns);
                        let mut y = vec![f32::NAN; count * rows];
                        let out = FloatsMut::F32(&mut y);
                        product_with(isa, activations, Floats::F32(&x), symmetric, out).unwrap();
                        let expected = stored.times_with(isa, activations, &x);
                        assert!(y == expected, "{isa:?}, {}, {activations:?}", stored.name());
                    }
                }
            }
        }
    }
}

/// Speculation verifies drafts in passes over several rows, and sequences decode together.
#[test]
fn rows_do_not_depend_on_other_rows() {
    check(|isa, matrix| {
        let x = numbers(2, 131 * matrix.columns);
        for activations in [Activations::Exact, Activations::Int8] {
            let all = matrix.times_with(isa, activations, &x);
            for rows in [1, 2, 3, 4, 5, 8, 64] {
                for first in [0, 1, 67] {
                    let part = &x[first * matrix.columns..][..rows * matrix.columns];
                    let part = matrix.times_with(isa, activations, part);
                    let same = part
                        .iter()
                        .zip(&all[first * matrix.rows..])
                        .all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(
                        same,
                        "{isa:?}, {activations:?}, {}: rows {first} to {}",
                        matrix.name(),
                        first + rows
                    );
                }
            }
        }
    });
}

#[test]
fn rows_do_not_depend_on_threads() {
    let x = numbers(3, 5 * 1152);
    for format in formats() {
        let matrix = Owned::new(2050, 1152, format);
        pool::set_threads(1);
        let alone = matrix.times(Isa::best(), &x);
        pool::set_threads(usize::MAX);
        assert!(alone == matrix.times(Isa::best(), &x), "{format:?}");
    }
}

/// Products of one normed input, with sums that are added and gates, have the bits of one operation after the other.
#[test]
fn products_of_one_input_equal_separate_operations() {
    for isa in Isa::available() {
        for format in formats() {
            for (count, columns) in [(1, 384), (3, 1152), (131, 256)] {
                for activations in [Activations::Exact, Activations::Int8] {
                    check_joined(isa, format, [count, columns], activations);
                }
            }
        }
    }
}

fn check_joined(isa: Isa, format: Format, [count, columns]: [usize; 2], activations: Activations) {
    // Of each size, so that pieces of one matrix are followed by those of the next.
    let [first, second, third] = [70, 4, 2050].map(|rows| Owned::new(rows, columns, format));
    let (x, weight) = (numbers(1, count * columns), numbers(2, columns));
    let (bias, residual) = (numbers(3, 70), numbers(4, count * 2050));
    let norm = Norm { weight: &weight, eps: 1e-5 };
    let mut normed = vec![0.0; x.len()];
    rms_norm(&x, norm, &mut normed);
    let alone = |matrix: &Owned| matrix.times_with(isa, activations, &normed);
    let mut expected = [&first, &second, &third].map(alone);
    for row in expected[0].chunks_mut(70) {
        row.iter_mut().zip(&bias).for_each(|(y, bias)| *y += bias);
    }
    expected[2].iter_mut().zip(&residual).for_each(|(y, residual)| *y += residual);
    // Ups that are not the gates: the same matrix in another order of rows.
    let [gates, ups] = [(1, 70), (2, 70)].map(|(seed, rows)| {
        let mut matrix = Owned::new(rows, columns, format);
        matrix.words.rotate_left(seed * columns / 32);
        matrix.floats.rotate_left(seed);
        matrix.bf16.rotate_left(seed);
        matrix.f16.rotate_left(seed);
        matrix
    });
    let [gate, up] = [&gates, &ups].map(alone);
    let mut gated = vec![0.0; gate.len()];
    swiglu(&gate, &up, &mut gated);

    let mut y = expected.each_ref().map(|expected| vec![f32::NAN; expected.len()]);
    let mut z = vec![f32::NAN; gated.len()];
    let [y0, y1, y2] = y.each_mut().map(|y| FloatsMut::F32(y));
    let input = Input { x: Floats::F32(&x), norm: Some(norm), activations };
    let mut products = [
        Product {
            matrix: first.matrix(),
            finish: Finish::Add { bias: Some(&bias), residual: None },
            y: y0,
        },
        Product { matrix: second.matrix(), finish: Finish::NONE, y: y1 },
        Product {
            matrix: gates.matrix(),
            finish: Finish::SwiGlu(ups.matrix()),
            y: FloatsMut::F32(&mut z),
        },
        Product {
            matrix: third.matrix(),
            finish: Finish::Add { bias: None, residual: Some(&residual) },
            y: y2,
        },
    ];
    products_with(isa, &input, &mut products).unwrap();
    let case = format!("{isa:?}, {format:?}, {count} x {columns}, {activations:?}");
    assert!(y == expected, "{case}");
    assert!(z == gated, "{case}");
}

#[test]
fn inputs_that_do_not_fit_are_errors() {
    let [narrow, wide] = [128, 256].map(|columns| Owned::packed(8, columns, 64, 4));
    let bytes = Owned::packed(8, 128, 64, 8);
    let (x, short) = (numbers(1, 128), vec![bf16::ONE; 128]);
    let run = |input: &Input<'_>, matrix: Matrix<'_>, finish: Finish<'_>| {
        let (mut y, mut z) = (vec![0.0; 8], vec![0.0; 8]);
        let [y, z] = [&mut y, &mut z].map(|y| FloatsMut::F32(y));
        let first = Product { matrix: narrow.matrix(), finish: Finish::NONE, y };
        products(input, &mut [first, Product { matrix, finish, y: z }])
    };
    let rows = Input::from(Floats::F32(&x));
    assert!(run(&rows, narrow.matrix(), Finish::NONE).is_ok());
    for other in [wide.matrix(), bytes.matrix()] {
        assert!(matches!(run(&rows, other, Finish::NONE), Err(Error::Formats)));
        let ups = Finish::SwiGlu(other);
        assert!(matches!(run(&rows, narrow.matrix(), ups), Err(Error::Formats)));
    }
    for length in [7, 9] {
        let numbers = &x[..length];
        let bias = Finish::Add { bias: Some(numbers), residual: None };
        let residual = Finish::Add { bias: None, residual: Some(numbers) };
        for finish in [bias, residual] {
            let error = run(&rows, narrow.matrix(), finish);
            assert!(matches!(error, Err(Error::Length { .. })), "{error:?}");
        }
    }
    let norm = |weight| Some(Norm { weight, eps: 1e-6 });
    let narrow_norm = run(&Input { norm: norm(&x[1..]), ..rows }, narrow.matrix(), Finish::NONE);
    assert!(matches!(narrow_norm, Err(Error::Length { what: "norm", .. })));
    let input = Input { norm: norm(&x), ..Input::from(Floats::Bf16(&short)) };
    assert!(matches!(run(&input, narrow.matrix(), Finish::NONE), Err(Error::Norm)));
}

/// Short floats are exact in f32, so only the output is rounded.
#[test]
fn short_floats_are_multiplied_in_f32() {
    let matrix = Owned::packed(20, 384, 64, 4);
    let x: Vec<f32> = numbers(4, 3 * 384).iter().map(|x| (x * 64.0).round() / 64.0).collect();
    let exact = matrix.times(Isa::best(), &x);
    let short: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    let mut y = vec![bf16::ZERO; 60];
    product(Activations::Exact, Floats::Bf16(&short), matrix.matrix(), FloatsMut::Bf16(&mut y))
        .unwrap();
    assert!(y.iter().zip(&exact).all(|(y, exact)| *y == bf16::from_f32(*exact)));
    let short: Vec<f16> = x.iter().map(|x| f16::from_f32(*x)).collect();
    let mut y = vec![f16::ZERO; 60];
    product(Activations::Exact, Floats::F16(&short), matrix.matrix(), FloatsMut::F16(&mut y))
        .unwrap();
    assert!(y.iter().zip(&exact).all(|(y, exact)| *y == f16::from_f32(*exact)));
}

#[test]
fn wrong_lengths_are_errors() {
    let x = vec![0.0; 128];
    fn wrong<'a>(matrix: impl Into<Matrix<'a>>, x: &[f32], outputs: usize) -> bool {
        let mut y = vec![0.0; outputs];
        product(Activations::Exact, Floats::F32(x), matrix, FloatsMut::F32(&mut y)).is_err()
    }
    let owned = Owned::packed(8, 128, 64, 4);
    let Matrix::Packed(packed) = owned.matrix() else { unreachable!("made packed above") };
    assert!(!wrong(packed, &x, 8));
    assert!(wrong(packed, &x, 7));
    assert!(wrong(packed, &x[1..], 8));
    assert!(wrong(Packed { words: &owned.words[1..], ..packed }, &x, 8));
    assert!(wrong(Packed { scales: Floats::Bf16(&owned.scales[1..]), ..packed }, &x, 8));
    let biases = Biases::Stored(Floats::Bf16(&owned.biases[1..]));
    assert!(wrong(Packed { biases, ..packed }, &x, 8));
    assert!(wrong(Packed { bits: 3, ..packed }, &x, 8));
    assert!(wrong(Packed { columns: 0, ..packed }, &x, 8));
    assert!(!wrong(packed, &[], 0));
    let dense = Dense { elements: Floats::F32(&owned.floats), rows: 8, columns: 128 };
    assert!(!wrong(dense, &x, 8));
    assert!(wrong(dense, &x[1..], 8));
    assert!(wrong(Dense { elements: Floats::F32(&owned.floats[1..]), ..dense }, &x, 8));
    // Rows of 16 elements are no whole blocks.
    assert!(wrong(Dense { rows: 64, columns: 16, ..dense }, &x, 512));
}
