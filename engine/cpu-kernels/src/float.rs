//! Slices of floats of the three types that checkpoints have.

use half::{bf16, f16};

/// Floats to read.
#[derive(Debug, Clone, Copy)]
pub enum Floats<'a> {
    /// 32 bits.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// IEEE half precision.
    F16(&'a [f16]),
}

impl Floats<'_> {
    /// Number of floats.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(floats) => floats.len(),
            Self::Bf16(floats) => floats.len(),
            Self::F16(floats) => floats.len(),
        }
    }

    /// Bytes of a float.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::F32(_) => 4,
            Self::Bf16(_) | Self::F16(_) => 2,
        }
    }

    /// The first float's bytes.
    pub(crate) fn start(&self) -> *const u8 {
        match self {
            Self::F32(floats) => floats.as_ptr().cast(),
            Self::Bf16(floats) => floats.as_ptr().cast(),
            Self::F16(floats) => floats.as_ptr().cast(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Float `i` as f32.
    pub(crate) fn get(&self, i: usize) -> f32 {
        let mut float = [0.0];
        self.widen(i, &mut float);
        float[0]
    }

    /// Writes the floats from `start` on to `out`, as f32, which is exact.
    ///
    /// Inlined, so that it is compiled for the caller's instruction set.
    #[inline(always)]
    pub(crate) fn widen(&self, start: usize, out: &mut [f32]) {
        let end = start + out.len();
        match self {
            Self::F32(floats) => out.copy_from_slice(&floats[start..end]),
            Self::Bf16(floats) => {
                for (out, float) in out.iter_mut().zip(&floats[start..end]) {
                    *out = widen_bf16(float.to_bits());
                }
            }
            Self::F16(floats) => {
                for (out, float) in out.iter_mut().zip(&floats[start..end]) {
                    *out = widen_f16(float.to_bits());
                }
            }
        }
    }
}

/// bfloat16 to f32.
#[inline(always)]
pub(crate) fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// IEEE half precision to f32 without a branch, so that loops over it are vectorized: `half` asks for the
/// processor's features at each number.
#[inline(always)]
pub(crate) fn widen_f16(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let magnitude = (bits & 0x7fff) << 13;
    // Moves the exponent from a bias of 15 to 127; the product also makes subnormal numbers normal.
    let scaled = f32::from_bits(magnitude) * f32::from_bits((254 - 15) << 23);
    // Infinities and NaN keep an exponent of ones.
    let special = if magnitude >= 0x7c00 << 13 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | (bits & 0x8000) << 16)
}

/// Floats to write.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// 32 bits.
    F32(&'a mut [f32]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
    /// IEEE half precision.
    F16(&'a mut [f16]),
}

impl FloatsMut<'_> {
    /// Number of floats.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(floats) => floats.len(),
            Self::Bf16(floats) => floats.len(),
            Self::F16(floats) => floats.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_float_widens_to_its_value() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let halves: Vec<f16> = bits.iter().map(|bits| f16::from_bits(*bits)).collect();
        let mut wide = vec![0.0; halves.len()];
        Floats::F16(&halves).widen(0, &mut wide);
        for (half, wide) in halves.iter().zip(wide) {
            let expected = half.to_f32();
            assert!(wide.to_bits() == expected.to_bits() || wide.is_nan() && expected.is_nan());
        }
    }
}
