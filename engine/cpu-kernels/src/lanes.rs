//! What a product needs of an instruction set: vectors of f32, and packed elements as such.
//!
//! A *block* is as many words of a row of the matrix as a vector has lanes. Vector `i` of a block has element `i` of each
//! word, so no lane is moved. The rows that are multiplied are stored in the same order.

#![allow(unsafe_code, reason = "vector instructions")]

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod portable;

use crate::float::{widen_bf16, widen_f16};

/// Compiles a function with features of the processor enabled, if any.
macro_rules! enabled {
    ([$($features:literal)?] $name:ident($($argument:ident: $type:ty),*) $body:block) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn $name($($argument: $type),*) {
            // SAFETY: the caller promises what the generic function asks for.
            unsafe { $body }
        }
        $name
    }};
}
pub(crate) use enabled;

/// Calls a generic function of vectors, compiled for an instruction set: `for_isa!(isa, name(argument: type, ..))`.
///
/// Unsafe: the processor must have the instruction set, and the function's own conditions hold.
macro_rules! for_isa {
    ($isa:expr, $name:ident($($argument:ident: $type:ty),*)) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::lanes::Isa::Vnni | $crate::lanes::Isa::Avx512 => $crate::lanes::enabled!(["avx512f,avx512bw,avx512vl"] compiled(
                $($argument: $type),*
            ) { $name::<$crate::lanes::avx512::Avx512>($($argument),*) })($($argument),*),
            #[cfg(target_arch = "x86_64")]
            $crate::lanes::Isa::Avx2 => $crate::lanes::enabled!(["avx2,fma,f16c"] compiled(
                $($argument: $type),*
            ) { $name::<$crate::lanes::avx2::Avx2>($($argument),*) })($($argument),*),
            #[cfg(target_arch = "aarch64")]
            $crate::lanes::Isa::Neon => $crate::lanes::enabled!(["neon"] compiled(
                $($argument: $type),*
            ) { $name::<$crate::lanes::neon::Neon>($($argument),*) })($($argument),*),
            $crate::lanes::Isa::Portable => $crate::lanes::enabled!([] compiled(
                $($argument: $type),*
            ) { $name::<$crate::lanes::portable::Portable>($($argument),*) })($($argument),*),
        }
    };
}
pub(crate) use for_isa;

/// Columns that rows of floats are a multiple of: whole vectors of any instruction set.
pub const BLOCK: usize = 32;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 as below, and VNNI, which products of integers use.
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// AVX-512 with F, BW and VL, which all processors but the first have: 16 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2, FMA and F16C, which come together: 8 lanes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON: 4 lanes.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// No particular instructions.
    Portable,
}

impl Isa {
    /// The instruction sets that this processor has, the fastest first.
    pub fn available() -> Vec<Self> {
        let mut isas = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
            {
                if is_x86_feature_detected!("avx512vnni") {
                    isas.push(Self::Vnni);
                }
                isas.push(Self::Avx512);
            }
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                isas.push(Self::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        isas.push(Self::Neon);
        isas.push(Self::Portable);
        isas
    }

    /// The fastest of this processor.
    pub fn best() -> Self {
        static BEST: std::sync::OnceLock<Isa> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| Self::available()[0])
    }
}

/// Vectors of an instruction set.
///
/// # Safety
/// Implementations read and write through pointers exactly what their methods state.
///
/// All methods are `unsafe`: the processor must have the instruction set, and pointers must be valid for what is read
/// or written. Implementations enable the instruction set, so that their instructions need no `unsafe` except for
/// pointers, and are inlined into a function that enables it as well.
pub unsafe trait Lanes {
    /// A vector.
    type V: Copy;
    /// Lanes of a vector.
    const LANES: usize;
    /// A vector of words of packed elements.
    type Words: Copy;

    /// Zeros.
    unsafe fn zero() -> Self::V;
    /// A float in each lane.
    unsafe fn splat(x: f32) -> Self::V;
    /// Reads [`Self::LANES`] floats.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Writes [`Self::LANES`] floats.
    unsafe fn store(to: *mut f32, v: Self::V);
    /// As [`Self::store`], past the caches: for results that are not read again before the caches have lost them. `to` is
    /// aligned to the vector. Other threads see the floats after [`Self::fence`].
    #[inline(always)]
    unsafe fn store_past_caches(to: *mut f32, v: Self::V) {
        // SAFETY: promised by the caller.
        unsafe { Self::store(to, v) }
    }
    /// Orders [`Self::store_past_caches`] before all later writes of this thread.
    #[inline(always)]
    unsafe fn fence() {}
    /// a * b + c
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The sum of the lanes of each vector.
    unsafe fn sum4(v: [Self::V; 4]) -> [f32; 4];
    /// Reads [`Self::LANES`] words.
    unsafe fn load_words(from: *const u8) -> Self::Words;
    /// Reads the first `count` of [`Self::LANES`] words, zeros for the others.
    #[inline(always)]
    unsafe fn load_first_words(from: *const u8, count: usize) -> Self::Words {
        let mut words = [0u32; BLOCK];
        // SAFETY: the caller's pointer is valid for the words. A vector has at most as many lanes as the array.
        unsafe {
            from.copy_to_nonoverlapping(words.as_mut_ptr().cast(), 4 * count);
            Self::load_words(words.as_ptr().cast())
        }
    }
    /// Element `i` of each word, times [`unit`].
    unsafe fn element<const BITS: usize>(words: Self::Words, i: usize) -> Self::V;
    /// The first 1, 2 or 4 floats, each in as many lanes as the others.
    unsafe fn spread(from: *const f32, count: usize) -> Self::V;
    /// Reads [`Self::LANES`] floats of bfloat16.
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::V {
        let mut wide = [0.0; BLOCK];
        for (i, wide) in wide[..Self::LANES].iter_mut().enumerate() {
            // SAFETY: the caller's pointer is valid for the lanes.
            *wide = widen_bf16(unsafe { *from.add(i) });
        }
        // SAFETY: a vector has at most a block's lanes.
        unsafe { Self::load(wide.as_ptr()) }
    }

    /// Reads [`Self::LANES`] floats of half precision.
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::V {
        let mut wide = [0.0; BLOCK];
        for (i, wide) in wide[..Self::LANES].iter_mut().enumerate() {
            // SAFETY: the caller's pointer is valid for the lanes.
            *wide = widen_f16(unsafe { *from.add(i) });
        }
        // SAFETY: as above.
        unsafe { Self::load(wide.as_ptr()) }
    }

    /// The first `count` lanes, zeros in the others.
    #[inline(always)]
    unsafe fn first(v: Self::V, count: usize) -> Self::V {
        if count >= Self::LANES {
            return v;
        }
        let mut floats = [0.0; BLOCK];
        // SAFETY: a vector has at most a block's lanes.
        unsafe {
            Self::store(floats.as_mut_ptr(), v);
            floats[count..].fill(0.0);
            Self::load(floats.as_ptr())
        }
    }
}

/// Brings the cache line of an address, which may be invalid, to the second-level cache. The first-level one waits for fewer
/// lines at a time than the memory needs for its full speed: on a Zen 4 core, products read 10 GB/s with lines brought there
/// and 23 GB/s with these.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: all processors have the instruction, and it does not fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// What element `i` of a word is multiplied with in [`Lanes::element`]: elements are read where they stand in their word,
/// without a shift. A power of two, so rows of x are divided by it without an error.
pub const fn unit<const BITS: usize>(i: usize) -> f32 {
    // The highest bit would be a sign.
    if i + 1 == 32 / BITS { 1.0 } else { (1u32 << (BITS * i)) as f32 }
}

/// The bits of element `i` of a word.
const fn mask<const BITS: usize>(i: usize) -> i32 {
    ((1 << BITS) - 1) << (BITS * i)
}
