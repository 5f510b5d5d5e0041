//! AVX2, FMA and F16C.

use std::arch::x86_64::*;

use super::{Lanes, mask};

/// 8 lanes.
pub struct Avx2;

/// The sums of the halves of a vector.
#[inline]
#[target_feature(enable = "avx")]
pub fn quad(v: __m256) -> __m128 {
    _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v))
}

/// The sums of the lanes of four vectors: (0 + 2) + (1 + 3).
#[inline]
#[target_feature(enable = "avx")]
pub fn sum4_of_quads([a, b, c, d]: [__m128; 4]) -> [f32; 4] {
    let ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    let cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    let sums = _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
    let mut array = [0.0; 4];
    // SAFETY: the array has 4 floats.
    unsafe { _mm_storeu_ps(array.as_mut_ptr(), sums) };
    array
}

/// Ones in the first `count` lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn first_lanes(count: usize) -> __m256i {
    let count = _mm256_set1_epi32(count.min(8) as i32);
    _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

// SAFETY: each method reads and writes what the trait states: 8 floats or words.
unsafe impl Lanes for Avx2 {
    type V = __m256;
    type Words = __m256i;
    const LANES: usize = 8;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn zero() -> __m256 {
        _mm256_setzero_ps()
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: the caller's pointer is valid for 8 floats.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn store(to: *mut f32, v: __m256) {
        // SAFETY: the caller's pointer is valid for 8 floats.
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn store_past_caches(to: *mut f32, v: __m256) {
        // SAFETY: the caller's pointer is valid for 8 floats and aligned to them.
        unsafe { _mm256_stream_ps(to, v) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn fence() {
        _mm_sfence()
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sum4(v: [__m256; 4]) -> [f32; 4] {
        sum4_of_quads([quad(v[0]), quad(v[1]), quad(v[2]), quad(v[3])])
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_words(from: *const u8) -> __m256i {
        // SAFETY: the caller's pointer is valid for 8 words.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_first_words(from: *const u8, count: usize) -> __m256i {
        // SAFETY: the caller's pointer is valid for the words that the mask names.
        unsafe { _mm256_maskload_epi32(from.cast(), first_lanes(count)) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn element<const BITS: usize>(words: __m256i, i: usize) -> __m256 {
        _mm256_cvtepi32_ps(match (BITS, i) {
            (4, 7) => _mm256_srli_epi32::<28>(words),
            (8, 3) => _mm256_srli_epi32::<24>(words),
            _ => _mm256_and_si256(words, _mm256_set1_epi32(mask::<BITS>(i))),
        })
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn spread(from: *const f32, count: usize) -> __m256 {
        // SAFETY: the caller's pointer is valid for the floats.
        unsafe {
            if count == 1 {
                return _mm256_set1_ps(*from);
            }
            debug_assert!(count == 2, "a block has 64 columns and groups of 32 at least");
            _mm256_set_m128(_mm_set1_ps(*from.add(1)), _mm_set1_ps(*from))
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_bf16(from: *const u16) -> __m256 {
        // SAFETY: the caller's pointer is valid for 8 floats.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_f16(from: *const u16) -> __m256 {
        // SAFETY: the caller's pointer is valid for 8 floats.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn first(v: __m256, count: usize) -> __m256 {
        _mm256_and_ps(v, _mm256_castsi256_ps(first_lanes(count)))
    }
}
