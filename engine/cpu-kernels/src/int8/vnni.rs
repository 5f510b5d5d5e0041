//! AVX-512 VNNI, on vectors of 256 bits.

use std::arch::x86_64::*;

use super::Bytes;
use super::avx2::{halves, unsigned};
use crate::lanes::avx2::Avx2;

/// Sums of four products of bytes in one instruction.
pub struct Vnni;

// SAFETY: each method reads what the trait states.
unsafe impl Bytes for Vnni {
    type Floats = Avx2;
    type V = __m256i;

    fn offset(_bits: usize) -> f32 {
        0.0
    }

    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(words: *const u8) -> [__m256i; 2] {
        // SAFETY: as for all methods: the caller's processor has the instructions and its pointers are valid.
        unsafe { unsigned::<BITS>(words) }
    }

    #[inline(always)]
    unsafe fn dot<const BITS: usize>([a, b]: [__m256i; 2], x: *const i8) -> __m256 {
        // SAFETY: see `unpack`.
        unsafe {
            let (x_a, x_b) = (_mm256_loadu_si256(x.cast()), _mm256_loadu_si256(x.add(32).cast()));
            let sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), a, x_a);
            _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(sums, b, x_b))
        }
    }

    #[inline(always)]
    unsafe fn halves(floats: *const f32) -> __m256 {
        // SAFETY: see `unpack`.
        unsafe { halves(floats) }
    }
}
