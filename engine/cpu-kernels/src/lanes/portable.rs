//! Any processor. Compilers make vector instructions of the loops where there are some.

use super::Lanes;

/// 4 lanes.
pub struct Portable;

// SAFETY: each method reads and writes what the trait states: 4 floats, or of a block all 16 bytes (4 bits) or 4 for
// each vector (8 bits).
unsafe impl Lanes for Portable {
    type V = [f32; 4];
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> [f32; 4] {
        [0.0; 4]
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 4] {
        [x; 4]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 4] {
        // SAFETY: the caller's pointer is valid for 4 floats.
        unsafe { from.cast::<[f32; 4]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: [f32; 4]) {
        // SAFETY: the caller's pointer is valid for 4 floats.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(v) }
    }

    /// Rounds twice: without an instruction for it, a fused product is a call of the C library.
    #[inline(always)]
    unsafe fn fma(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    unsafe fn sum4(v: [[f32; 4]; 4]) -> [f32; 4] {
        v.map(|v| (v[0] + v[2]) + (v[1] + v[3]))
    }

    #[inline(always)]
    unsafe fn table<const BITS: usize>(scale: f32) -> [f32; 4] {
        [scale; 4]
    }

    #[inline(always)]
    unsafe fn weights<const BITS: usize>(block: *const u8, i: usize, scale: [f32; 4]) -> [f32; 4] {
        let elements = if BITS == 4 {
            // SAFETY: the caller's pointer is valid for the block of 16 bytes.
            let words = unsafe { block.cast::<[u32; 4]>().read_unaligned() };
            words.map(|word| (u32::from_le(word) >> (4 * i)) & 15)
        } else {
            // SAFETY: the caller's pointer is valid for the block of 32 bytes; `i` is at most 7.
            unsafe { block.add(4 * i).cast::<[u8; 4]>().read_unaligned() }.map(u32::from)
        };
        std::array::from_fn(|lane| elements[lane] as f32 * scale[lane])
    }
}
