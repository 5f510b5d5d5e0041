//! The settings of wasmtime, for the server and for the compiler's process.

use wasmtime::Config;

/// Stack of a guest; the calling thread must have more.
const STACK_BYTES: usize = 256 << 10;

/// A Wasm page; memory limits are rounded up to it.
const PAGE_BYTES: usize = 64 << 10;

/// The settings of wasmtime. Compiled components are of use with equal ones only.
pub fn settings(memory_bytes: usize) -> Config {
    let mut config = Config::new();
    config
        .memory_reservation(memory_bytes.next_multiple_of(PAGE_BYTES) as u64)
        .memory_guard_size(PAGE_BYTES as u64)
        .max_wasm_stack(STACK_BYTES)
        .consume_fuel(true)
        .epoch_interruption(true)
        .concurrency_support(false)
        .wasm_memory64(false)
        .relaxed_simd_deterministic(true)
        .cranelift_nan_canonicalization(true);
    config
}
