//! What a product needs of an instruction set: vectors of f32, and packed elements as such.
//!
//! A *block* is 32 consecutive elements of a row of the matrix, 4 words of 4 bits or 8 words of 8 bits, and
//! fills [`Lanes::VECTORS`] vectors. With 4 bits, lane `4 * h + j` of vector `i` has element `i + VECTORS * h` of
//! word `j`: all words are shifted at once, and no lane is moved. The rows that are multiplied are stored in the
//! same order ([`Lanes::arrange`]).

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
            $crate::lanes::Isa::Avx512 => $crate::lanes::enabled!(["avx512f,avx512bw,avx512vl"] compiled(
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

/// Elements of a block.
pub const BLOCK: usize = 32;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
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
    /// Those that this processor has, the fastest first.
    pub fn available() -> Vec<Self> {
        let mut isas = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
            {
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
/// or written. They are inlined into a function that enables the instruction set.
pub unsafe trait Lanes {
    /// A vector.
    type V: Copy;
    /// Lanes of a vector.
    const LANES: usize;
    /// Vectors of a block.
    const VECTORS: usize = BLOCK / Self::LANES;

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
    /// What [`Self::weights`] needs of a group: its scale, or the 16 floats that 4 bits can be.
    unsafe fn table<const BITS: usize>(scale: f32) -> Self::V;
    /// Vector `i` of the block of `4 * BITS` bytes at `block`, as floats: element * scale * [`Self::unit`].
    unsafe fn weights<const BITS: usize>(block: *const u8, i: usize, table: Self::V) -> Self::V;
    /// The factor of lane `lane` of [`Self::weights`], a power of two: where an instruction set saves shifts by reading
    /// an element where it stands in its word. [`Self::arrange`] divides by it, which is exact.
    #[inline(always)]
    fn unit<const BITS: usize>(_i: usize, _lane: usize) -> f32 {
        1.0
    }
    /// Brings the cache line of an address to the first-level cache. The address may be invalid.
    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}

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

    /// Writes the 32 floats at `from` to `to` in the order of the lanes of a block, divided by [`Self::unit`].
    #[inline(always)]
    unsafe fn arrange<const BITS: usize>(from: *const f32, to: *mut f32) {
        for i in 0..Self::VECTORS {
            for lane in 0..Self::LANES {
                let element = if BITS == 4 {
                    8 * (lane % 4) + i + Self::VECTORS * (lane / 4)
                } else {
                    Self::LANES * i + lane
                };
                // SAFETY: both are below 32.
                unsafe {
                    *to.add(Self::LANES * i + lane) =
                        *from.add(element) * (1.0 / Self::unit::<BITS>(i, lane));
                }
            }
        }
    }
}
