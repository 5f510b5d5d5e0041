//! Kernels for CPUs, exact in f32: products of rows with packed matrices (MLX's affine quantization in 4 and 8 bits) and with
//! dense ones, the gated delta rule and the attention of a few rows, SwiGLU and RMS norm, which are dozens of operations with a
//! pass over memory each otherwise; and what sampling computes over a vocabulary.
//!
//! A matrix stays as it is stored: it is read once a product, and its elements are unpacked in registers only. AVX-512 with and
//! without VNNI, AVX2 and NEON are chosen when the program runs; other processors take portable code.
//!
//! With VNNI, products with packed matrices are sums of integers, as exact as those in f32 (`digits.rs`).
//!
//! Products with packed matrices can also round their rows to 8 bits ([`Activations::Int8`]), which is not exact and takes about
//! half the time.
//!
//! Knows nothing of MLX: slices in, slices out. `engine/src/kernels/cpu.rs` makes an operation of MLX of it.
//!
//! # Equal rows
//! Each output is one chain of sums whose order depends on the number of columns and the instruction set only, never
//! on the other rows, the other outputs or the threads. So one row alone and the same row among 64 get the same bits,
//! which speculation and batching rely on.
//!
//! # Why
//! MLX's own product is scalar on x86-64. The alternative was to dequantize at load and let OpenBLAS multiply, which
//! takes 8 times the memory and reads 8 times the bytes a token. Two Zen 4 cores, 4 bits, 4864 x 896, microseconds on one
//! thread and on two, best of all, in one run; OpenBLAS with f32 weights from another one:
//!
//! | rows | VNNI | VNNI, int8 | AVX-512 | OpenBLAS |
//! |---|---|---|---|---|
//! | 1 | 110, 57 | 77, 40 | 178, 90 | 1,170, 565 |
//! | 8 | 694, 354 | 410, 209 | 779, 396 | 1,821, 826 |
//! | 64 | 5,553, 2,824 | 3,206, 1,636 | 6,013, 3,039 | 6,757, 3,230 |
//! | 512 | 45,091, 22,846 | 26,349, 13,326 | 48,630, 24,717 | 44,062, 22,636 |
//!
//! On two Zen 3 cores with AVX2, two threads, 4096 x 4096; OpenBLAS 0.3.21 through MLX in the same run:
//!
//! | rows | packed | bf16 | f32 | OpenBLAS, f32 |
//! |---|---|---|---|---|
//! | 1 | 1,087 | 2,664 | 2,923 | 7,718 |
//! | 4 | 2,366 | 3,537 | 4,878 | 12,182 |
//! | 8 | 3,132 | 4,725 | 5,666 | 12,065 |
//! | 64 | 18,081 | 17,580 | 19,326 | 24,550 |
//! | 256 | 64,515 | 71,151 | 73,393 | 78,685 |
//!
//! A matrix of f32 that fits the second-level cache (384 x 384) is faster in OpenBLAS, but a model's do not stay there.

mod attention;
#[cfg(target_arch = "x86_64")]
mod digits;
mod elementwise;
mod float;
mod gated_delta;
mod int8;
mod kernel;
mod lanes;
mod pages;
mod pool;
mod product;
mod sampling;

pub use attention::{Attention, Rotation, Sequence, attention};
pub use elementwise::{Norm, rms_norm, swiglu};
pub use float::{Floats, FloatsMut};
pub use gated_delta::{
    GatedDelta, GatedDeltaResults, GatedDeltaWrites, Replay, gated_delta, replay,
};
pub use lanes::Isa;
pub use pages::use_huge_pages;
pub use pool::{max_threads, set_threads, threads};
pub use product::{
    Activations, Biases, Dense, Error, Finish, Input, Matrix, Packed, Product, product,
    product_with, products, products_with,
};
pub use sampling::{random_bits, random_bits_at, sum_exp};

/// Numbers from -1 to 1, the same for the same seed.
#[cfg(test)]
fn numbers(seed: u32, length: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        (x >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..length).map(|_| next()).collect()
}
