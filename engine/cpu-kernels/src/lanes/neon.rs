//! NEON.

use std::arch::aarch64::*;

use super::Lanes;

/// 4 lanes.
pub struct Neon;

// SAFETY: each method reads and writes what the trait states: 4 floats, or of a block all 16 bytes (4 bits) or 4 for
// each vector (8 bits).
unsafe impl Lanes for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        // SAFETY: as for all methods: NEON is part of aarch64.
        unsafe { vdupq_n_f32(0.0) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        // SAFETY: see `zero`.
        unsafe { vdupq_n_f32(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> float32x4_t {
        // SAFETY: the caller's pointer is valid for 4 floats.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: float32x4_t) {
        // SAFETY: the caller's pointer is valid for 4 floats.
        unsafe { vst1q_f32(to, v) }
    }

    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: see `zero`.
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
        let mut array = [0.0; 4];
        // SAFETY: see `zero`; the array has 4 floats.
        unsafe { vst1q_f32(array.as_mut_ptr(), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))) };
        array
    }

    #[inline(always)]
    unsafe fn table<const BITS: usize>(scale: f32) -> float32x4_t {
        // SAFETY: see `zero`.
        unsafe { vdupq_n_f32(scale) }
    }

    #[inline(always)]
    unsafe fn weights<const BITS: usize>(
        block: *const u8,
        i: usize,
        scale: float32x4_t,
    ) -> float32x4_t {
        // SAFETY: the caller's pointer is valid for the block, of which 16 or 4 bytes are read.
        unsafe {
            let elements = if BITS == 4 {
                let words = vreinterpretq_u32_u8(vld1q_u8(block));
                // A negative shift goes right.
                vandq_u32(vshlq_u32(words, vdupq_n_s32(-4 * i as i32)), vdupq_n_u32(15))
            } else {
                let four = u64::from(block.add(4 * i).cast::<u32>().read_unaligned());
                vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))))
            };
            vmulq_f32(vcvtq_f32_u32(elements), scale)
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> float32x4_t {
        // SAFETY: the caller's pointer is valid for 4 floats.
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(from)))) }
    }
}
