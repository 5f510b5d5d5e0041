//! AVX-512.

use std::arch::x86_64::*;

use super::Lanes;
use super::avx2::{quad, sum4_of_quads};

/// 16 lanes.
pub struct Avx512;

/// The floats that 4 bits count.
static COUNT: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

/// The sums of the halves of a vector.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn half(v: __m512) -> __m256 {
    // SAFETY: see above.
    unsafe {
        let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
        _mm256_add_ps(_mm512_castps512_ps256(v), high)
    }
}

// SAFETY: each method reads and writes what the trait states: 16 floats, or a block's 16 (4 bits) or 32 bytes (8 bits,
// 16 for each vector).
unsafe impl Lanes for Avx512 {
    type V = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: as for all methods: the caller's processor has AVX-512.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: the caller's pointer is valid for 16 floats.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: the caller's pointer is valid for 16 floats.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn store_past_caches(to: *mut f32, v: __m512) {
        // SAFETY: the caller's pointer is valid for 16 floats and aligned to them.
        unsafe { _mm512_stream_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: see `zero`.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sum4(v: [__m512; 4]) -> [f32; 4] {
        // SAFETY: see `zero`.
        unsafe {
            sum4_of_quads([quad(half(v[0])), quad(half(v[1])), quad(half(v[2])), quad(half(v[3]))])
        }
    }

    #[inline(always)]
    unsafe fn table<const BITS: usize>(scale: f32) -> __m512 {
        // SAFETY: see `zero`; COUNT has 16 floats.
        unsafe {
            let scale = _mm512_set1_ps(scale);
            if BITS == 4 { _mm512_mul_ps(_mm512_loadu_ps(COUNT.as_ptr()), scale) } else { scale }
        }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: see `zero`; a prefetch does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    unsafe fn weights<const BITS: usize>(block: *const u8, i: usize, table: __m512) -> __m512 {
        // SAFETY: the caller's pointer is valid for the block, of which 16 bytes are read.
        unsafe {
            if BITS == 4 {
                let words = _mm512_broadcast_i32x4(_mm_loadu_si128(block.cast()));
                // Lane 4 * h + j takes element i + 2 * h. Shifts that the compiler knows to be below 32 are one
                // instruction.
                let i = 4 * i as i32;
                let shifts = _mm512_setr_epi32(
                    i,
                    i,
                    i,
                    i,
                    i + 8,
                    i + 8,
                    i + 8,
                    i + 8,
                    i + 16,
                    i + 16,
                    i + 16,
                    i + 16,
                    i + 24,
                    i + 24,
                    i + 24,
                    i + 24,
                );
                // The look-up takes the lowest 4 bits of a lane and ignores the others.
                return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), table);
            }
            let bytes = _mm_loadu_si128(block.add(16 * i).cast());
            let floats = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
            _mm512_mul_ps(floats, table)
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        // SAFETY: the caller's pointer is valid for 16 floats.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        // SAFETY: the caller's pointer is valid for 16 floats.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn first(v: __m512, count: usize) -> __m512 {
        let mask = if count >= 16 { 0xffff } else { (1 << count) - 1 };
        // SAFETY: see `zero`.
        unsafe { _mm512_maskz_mov_ps(mask, v) }
    }
}
