//! Kernels of our own, for formulas that MLX computes in many operations or with slow ones.
//!
//! A layer asks for a kernel and computes the formula in MLX's operations if there is none for its device,
//! shape or type. Those operations are the reference of the kernel's test. `model.kernels = "mlx"` turns all
//! kernels off.

pub mod cpu;
pub mod cuda;
