//! Products of rows with packed matrices on CPUs: MLX's affine quantization in 4 and 8 bits, exact in f32.
//!
//! The matrix stays packed: it is read once a product, and its elements exist as f32 in registers, or in a
//! panel that fits the first-level cache. AVX-512, AVX2 and NEON are chosen when the program runs; other
//! processors take portable code.
//!
//! Knows nothing of MLX: slices in, slices out. `engine/src/kernels/cpu.rs` makes an operation of MLX of it.
//!
//! # Equal rows
//! Each output is one chain of sums whose order depends on the number of columns and the instruction set only, never
//! on the other rows, the other outputs or the threads. So one row alone and the same row among 64 get the same bits,
//! which speculation and batching rely on.
//!
//! # Why
//! MLX's own product is scalar on x86-64: 0.6 GB/s of packed weights a thread, where AVX-512 reads more than 20.
//! The alternative was to dequantize at load and let OpenBLAS multiply, which reads 8 times the bytes a token.

mod float;
mod kernel;
mod lanes;
mod pool;
mod product;

pub use float::{Floats, FloatsMut};
pub use lanes::Isa;
pub use pool::{max_threads, set_threads, threads};
pub use product::{Error, Packed, product, product_with};
