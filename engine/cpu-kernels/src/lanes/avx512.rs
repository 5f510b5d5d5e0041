//! AVX-512.

use std::arch::x86_64::*;

use super::avx2::{quad, sum4_of_quads};
use super::{Lanes, mask};

/// 16 lanes.
pub struct Avx512;

/// A mask of the first `count` lanes.
#[inline(always)]
pub fn first_lanes(count: usize) -> __mmask16 {
    if count >= 16 { 0xffff } else { (1 << count) - 1 }
}

/// The sums of the halves of a vector.
#[inline]
#[target_feature(enable = "avx512f")]
fn half(v: __m512) -> __m256 {
    let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
    _mm256_add_ps(_mm512_castps512_ps256(v), high)
}

// SAFETY: each method reads and writes what the trait states: 16 floats or words.
unsafe impl Lanes for Avx512 {
    type V = __m512;
    type Words = __m512i;
    const LANES: usize = 16;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn zero() -> __m512 {
        _mm512_setzero_ps()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: the caller's pointer is valid for 16 floats.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: the caller's pointer is valid for 16 floats.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store_past_caches(to: *mut f32, v: __m512) {
        // SAFETY: the caller's pointer is valid for 16 floats and aligned to them.
        unsafe { _mm512_stream_ps(to, v) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn fence() {
        _mm_sfence()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn sum4(v: [__m512; 4]) -> [f32; 4] {
        sum4_of_quads([quad(half(v[0])), quad(half(v[1])), quad(half(v[2])), quad(half(v[3]))])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load_words(from: *const u8) -> __m512i {
        // SAFETY: the caller's pointer is valid for 16 words.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load_first_words(from: *const u8, count: usize) -> __m512i {
        // SAFETY: the caller's pointer is valid for the words that the mask names.
        unsafe { _mm512_maskz_loadu_epi32(first_lanes(count), from.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn element<const BITS: usize>(words: __m512i, i: usize) -> __m512 {
        _mm512_cvtepi32_ps(match (BITS, i) {
            (4, 7) => _mm512_srli_epi32::<28>(words),
            (8, 3) => _mm512_srli_epi32::<24>(words),
            _ => _mm512_and_si512(words, _mm512_set1_epi32(mask::<BITS>(i))),
        })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn spread(from: *const f32, count: usize) -> __m512 {
        // SAFETY: the caller's pointer is valid for the floats.
        unsafe {
            let (floats, lanes) = match count {
                1 => return _mm512_set1_ps(*from),
                2 => (
                    _mm_castsi128_ps(_mm_loadl_epi64(from.cast())),
                    _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                ),
                _ => (
                    _mm_loadu_ps(from),
                    _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                ),
            };
            _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(floats))
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        // SAFETY: the caller's pointer is valid for 16 floats.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        // SAFETY: the caller's pointer is valid for 16 floats.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn first(v: __m512, count: usize) -> __m512 {
        _mm512_maskz_mov_ps(first_lanes(count), v)
    }
}
