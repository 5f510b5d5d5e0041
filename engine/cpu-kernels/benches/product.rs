//! Speed of products: `cargo bench -p steersman-cpu-kernels`, on a quiet machine. Arguments are numbers of rows.

use std::ops::Range;
use std::time::Instant;

use half::{bf16, f16};
use steersman_cpu_kernels::Activations::{Exact, Int8};
use steersman_cpu_kernels::{
    Activations, Biases, Dense, Floats, FloatsMut, Isa, Matrix, Packed, max_threads, product_with,
    set_threads, use_huge_pages,
};

/// [out, in] of the bundled model's, Qwen2.5-0.5B's and an 8B model's layers.
const SHAPES: [(usize, usize); 7] =
    [(384, 384), (1536, 384), (4864, 896), (896, 4864), (4096, 4096), (4096, 384), (151_936, 896)];

/// How a matrix is stored, and how rows are multiplied with it.
const FORMATS: [(&str, Activations); 9] = [
    ("4 bits", Exact),
    ("4 bits, symmetric", Exact),
    ("4 bits", Int8),
    ("8 bits", Exact),
    ("8 bits, symmetric", Exact),
    ("8 bits", Int8),
    ("f16", Exact),
    ("bf16", Exact),
    ("f32", Exact),
];

fn main() {
    let rows: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let rows = if rows.is_empty() { vec![1, 2, 4, 8, 64, 512] } else { rows };
    for isa in Isa::available() {
        for threads in [1, max_threads()] {
            set_threads(threads);
            for (format, activations) in FORMATS {
                for (out, columns) in SHAPES {
                    print!(
                        "{isa:?}, {threads} threads, {format}, activations {activations:?}, {out} x {columns}:"
                    );
                    for rows in &rows {
                        measure(isa, activations, format, out, columns, *rows);
                    }
                    println!();
                }
            }
        }
    }
}

fn addresses<T>(slice: &[T]) -> Range<usize> {
    let pointers = slice.as_ptr_range();
    pointers.start.addr()..pointers.end.addr()
}

fn measure(
    isa: Isa,
    activations: Activations,
    format: &str,
    out: usize,
    columns: usize,
    rows: usize,
) {
    let words: Vec<u32> =
        (0..out * columns).map(|i| (i as u32).wrapping_mul(2_654_435_761)).collect();
    let scales = vec![f16::from_f32(0.01); out * columns / 32];
    let (short, floats) = (vec![f16::ONE; out * columns], vec![1.0; out * columns]);
    let brain = vec![bf16::ONE; out * columns];
    // As those of a loaded model.
    let memory = [addresses(&words), addresses(&scales), addresses(&short), addresses(&floats)];
    use_huge_pages(memory.into_iter().chain([addresses(&brain)]));
    let dense = |elements| Matrix::Dense(Dense { elements, rows: out, columns });
    let packed = |bits, biases| {
        Matrix::Packed(Packed {
            words: &words[..out * columns * bits / 32],
            scales: Floats::F16(&scales),
            biases,
            rows: out,
            columns,
            group_size: 32,
            bits,
        })
    };
    let stored = Biases::Stored(Floats::F16(&scales));
    // Bits of an element, with those of its scale and bias.
    let (matrix, bits) = match format {
        "4 bits" => (packed(4, stored), 5.0),
        "4 bits, symmetric" => (packed(4, Biases::Symmetric), 4.5),
        "8 bits" => (packed(8, stored), 9.0),
        "8 bits, symmetric" => (packed(8, Biases::Symmetric), 8.5),
        "f16" => (dense(Floats::F16(&short)), 16.0),
        "bf16" => (dense(Floats::Bf16(&brain)), 16.0),
        _ => (dense(Floats::F32(&floats)), 32.0),
    };
    let x: Vec<f32> = (0..rows * columns).map(|i| (i % 17) as f32 - 8.0).collect();
    let mut y = vec![0.0; rows * out];
    let work = (out * columns * rows) as f64;
    let repeats = (4e8 / work).clamp(3.0, 2000.0) as usize;
    let mut best = f64::MAX;
    for _ in 0..repeats {
        let start = Instant::now();
        product_with(isa, activations, Floats::F32(&x), matrix, FloatsMut::F32(&mut y)).unwrap();
        best = best.min(start.elapsed().as_secs_f64());
    }
    print!(
        " | {rows} rows {:.1} us, {:.1} GB/s, {:.0} GFLOP/s",
        best * 1e6,
        (out * columns) as f64 * bits / 8.0 / best / 1e9,
        2.0 * work / best / 1e9
    );
}
