//! NEON.

use std::arch::aarch64::*;

use super::{Lanes, mask};

/// 4 lanes.
pub struct Neon;

// SAFETY: each method reads and writes what the trait states: 4 floats or words.
unsafe impl Lanes for Neon {
    type V = float32x4_t;
    type Words = uint32x4_t;
    const LANES: usize = 4;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn zero() -> float32x4_t {
        vdupq_n_f32(0.0)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn splat(x: f32) -> float32x4_t {
        vdupq_n_f32(x)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(from: *const f32) -> float32x4_t {
        // SAFETY: the caller's pointer is valid for 4 floats.
        unsafe { vld1q_f32(from) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store(to: *mut f32, v: float32x4_t) {
        // SAFETY: the caller's pointer is valid for 4 floats.
        unsafe { vst1q_f32(to, v) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn sum4([a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
        let mut array = [0.0; 4];
        // SAFETY: the array has 4 floats.
        unsafe { vst1q_f32(array.as_mut_ptr(), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))) };
        array
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_words(from: *const u8) -> uint32x4_t {
        // SAFETY: the caller's pointer is valid for 4 words.
        unsafe { vreinterpretq_u32_u8(vld1q_u8(from)) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn element<const BITS: usize>(words: uint32x4_t, i: usize) -> float32x4_t {
        vcvtq_f32_u32(match (BITS, i) {
            (4, 7) => vshrq_n_u32::<28>(words),
            (8, 3) => vshrq_n_u32::<24>(words),
            _ => vandq_u32(words, vdupq_n_u32(mask::<BITS>(i) as u32)),
        })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn spread(from: *const f32, count: usize) -> float32x4_t {
        debug_assert!(count == 1, "a block has 32 columns at most, and groups as many at least");
        // SAFETY: the caller's pointer is valid for the float.
        unsafe { vld1q_dup_f32(from) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_bf16(from: *const u16) -> float32x4_t {
        // SAFETY: the caller's pointer is valid for 4 floats.
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(from)))) }
    }
}
