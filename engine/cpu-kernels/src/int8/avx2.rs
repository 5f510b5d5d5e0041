//! AVX2.

use std::arch::x86_64::*;

use super::Bytes;
use crate::lanes::avx2::Avx2;

/// The elements of a chunk as unsigned bytes.
///
/// # Safety
/// The processor has AVX2; the pointer is valid for the 32 (4 bits) or 64 bytes (8 bits) of the chunk.
#[inline(always)]
pub unsafe fn unsigned<const BITS: usize>(words: *const u8) -> [__m256i; 2] {
    // SAFETY: see above.
    unsafe {
        if BITS == 4 {
            let (words, mask) = (_mm256_loadu_si256(words.cast()), _mm256_set1_epi8(15));
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(words), mask);
            return [_mm256_and_si256(words, mask), high];
        }
        let [a, b, c, d] = [0, 16, 32, 48].map(|at| words.wrapping_add(at).cast());
        [_mm256_loadu2_m128i(c, a), _mm256_loadu2_m128i(d, b)]
    }
}

/// Two floats, each in half of the lanes.
///
/// # Safety
/// The pointer is valid for two floats.
#[inline]
#[target_feature(enable = "avx")]
pub unsafe fn halves(floats: *const f32) -> __m256 {
    // SAFETY: promised by the caller.
    let both = _mm256_castpd_ps(_mm256_broadcast_sd(unsafe { &*floats.cast() }));
    _mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))
}

// SAFETY: each method reads what the trait states.
unsafe impl Bytes for Avx2 {
    type Floats = Self;
    type V = __m256i;

    /// A product of unsigned bytes in 8 bits with signed ones overflows 16 bits; that of signed ones does not.
    fn offset(bits: usize) -> f32 {
        if bits == 4 { 0.0 } else { 128.0 }
    }

    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(words: *const u8) -> [__m256i; 2] {
        // SAFETY: as for all methods: the caller's processor has AVX2 and its pointers are valid.
        unsafe {
            let bytes = unsigned::<BITS>(words);
            if BITS == 4 {
                return bytes;
            }
            let sign = _mm256_set1_epi8(-128);
            [_mm256_xor_si256(bytes[0], sign), _mm256_xor_si256(bytes[1], sign)]
        }
    }

    #[inline(always)]
    unsafe fn dot<const BITS: usize>([a, b]: [__m256i; 2], x: *const i8) -> __m256 {
        // SAFETY: see `unpack`.
        unsafe {
            let (x_a, x_b) = (_mm256_loadu_si256(x.cast()), _mm256_loadu_si256(x.add(32).cast()));
            let ones = _mm256_set1_epi16(1);
            let sums = if BITS == 4 {
                // Four products of at most 15 * 127 fit 16 bits.
                let pairs =
                    _mm256_add_epi16(_mm256_maddubs_epi16(a, x_a), _mm256_maddubs_epi16(b, x_b));
                _mm256_madd_epi16(pairs, ones)
            } else {
                // Two of at most 128 * 127 do.
                let pairs_a = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(x_a, a));
                let pairs_b = _mm256_maddubs_epi16(_mm256_abs_epi8(b), _mm256_sign_epi8(x_b, b));
                _mm256_add_epi32(_mm256_madd_epi16(pairs_a, ones), _mm256_madd_epi16(pairs_b, ones))
            };
            _mm256_cvtepi32_ps(sums)
        }
    }

    #[inline(always)]
    unsafe fn halves(floats: *const f32) -> __m256 {
        // SAFETY: see `unpack`.
        unsafe { halves(floats) }
    }
}
