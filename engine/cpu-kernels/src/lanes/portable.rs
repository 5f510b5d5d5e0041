//! Any processor. Compilers make vector instructions of the loops where there are some.

use super::{Lanes, mask};

/// 4 lanes.
pub struct Portable;

// SAFETY: each method reads and writes what the trait states: 4 floats or words.
unsafe impl Lanes for Portable {
    type V = [f32; 4];
    type Words = [u32; 4];
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
    unsafe fn load_words(from: *const u8) -> [u32; 4] {
        // SAFETY: the caller's pointer is valid for 4 words.
        unsafe { from.cast::<[u32; 4]>().read_unaligned() }.map(u32::from_le)
    }

    #[inline(always)]
    unsafe fn element<const BITS: usize>(words: [u32; 4], i: usize) -> [f32; 4] {
        let is_last = i + 1 == 32 / BITS;
        // Below 2^31: processors convert signed integers faster.
        let read = |word: u32| {
            if is_last { (word >> (32 - BITS)) as i32 } else { word as i32 & mask::<BITS>(i) }
        };
        words.map(|word| read(word) as f32)
    }

    #[inline(always)]
    unsafe fn spread(from: *const f32, count: usize) -> [f32; 4] {
        debug_assert!(count == 1, "a block has 32 columns at most, and groups as many at least");
        // SAFETY: the caller's pointer is valid for the float.
        [unsafe { *from }; 4]
    }
}
