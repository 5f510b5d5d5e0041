//! The types of GGUF tensors, and what becomes of their blocks: floats, or MLX's affine format.
//!
//! MLX packs a matrix as codes of 4, 5 or 8 bits with a scale and a bias for each 32 inputs, `w = scale * code + bias`.
//!
//! | type | packed as | loss |
//! |---|---|---|
//! | F32, F16, BF16 | not packed | none |
//! | Q4_0, Q4_1 | 4 bits | none |
//! | Q5_0, Q5_1 | 5 bits (8 for kernels that lack 5) | none |
//! | Q8_0 | 8 bits | none |
//! | Q4_K | 4 bits | none |
//! | Q5_K | 5 bits (8 for kernels that lack 5) | none |
//! | Q6_K | 8 bits | rounded: its scales are for 16 inputs each |
//!
//! K-quants multiply a scale of the block with one of 6 bits for each 32 inputs. The product is exact in f32, not in
//! f16, so scales and biases are stored in f16 where that is exact and in f32 otherwise. A model that computes in bf16
//! or f16 rounds them to that type, as it does with MLX's own checkpoints.
//!
//! # Why 8 bits for Q6_K
//! In 16-bit floats it would take almost twice the memory, and time, of 8 bits. The 256 levels between the least and the
//! greatest of 32 numbers add an error of 0.45 % (root mean square, of normal numbers) to Q6_K's own of 1.90 %: together
//! 1.96 % (`the_loss_of_q6_k_is_small` measures it).
//!
//! Source: ggml `ggml-common.h` and `ggml-quants.c` for the blocks; MLX `ops.cpp`, `affine_quantize`, for the packing,
//! a stream of bits from the lowest on.

use std::fmt;

use half::{bf16, f16};

/// Inputs that share a scale.
pub const GROUP: usize = 32;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "ggml's names")]
#[allow(non_camel_case_types, reason = "ggml's names")]
pub enum Type {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
    BF16,
}

/// ggml's names by code, for errors. Codes without a name are not in use any more.
const NAMES: [&str; 40] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K",
    "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S",
    "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "",
    "", "", "MXFP4",
];

impl Type {
    /// All that can be read.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// The type with this code.
    ///
    /// # Errors
    /// The name of a type that cannot be read.
    pub fn of(code: u32) -> Result<Self, String> {
        let name = usize::try_from(code).ok().and_then(|code| NAMES.get(code));
        let name = name.copied().filter(|name| !name.is_empty());
        let known = name.and_then(|name| Self::ALL.into_iter().find(|kind| kind.name() == name));
        known.ok_or_else(|| name.map_or_else(|| format!("number {code}"), str::to_string))
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// Elements of a block.
    pub fn block(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => GROUP,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 8 * GROUP,
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Bits of a packed code; `None` for floats.
    pub fn bits(self) -> Option<usize> {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => None,
            Self::Q4_0 | Self::Q4_1 | Self::Q4_K => Some(4),
            Self::Q5_0 | Self::Q5_1 | Self::Q5_K => Some(5),
            Self::Q8_0 | Self::Q6_K => Some(8),
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// 32 numbers with one scale: `scale * code + bias`.
#[derive(Debug, Clone, Copy)]
struct Group {
    codes: [u8; GROUP],
    scale: f32,
    bias: f32,
}

/// The numbers of whole blocks, in f32.
pub fn floats(kind: Type, bytes: &[u8]) -> Vec<f32> {
    let mut numbers = Vec::with_capacity(bytes.len() / kind.bytes() * kind.block());
    match kind {
        Type::F32 => numbers.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
        Type::F16 => {
            numbers.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()))
        }
        Type::BF16 => {
            numbers.extend(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()));
        }
        Type::Q6_K => {
            for block in bytes.as_chunks().0 {
                numbers.extend_from_slice(&q6_k(block));
            }
        }
        _ => groups(kind, bytes, |group| {
            numbers.extend(group.codes.map(|code| group.scale * f32::from(code) + group.bias));
        }),
    }
    numbers
}

/// Packed rows.
#[derive(Debug, Default, PartialEq)]
pub struct Codes {
    /// The codes as a stream of bits from the lowest on.
    pub words: Vec<u32>,
    /// One for each group.
    pub scales: Vec<f32>,
    /// One for each group.
    pub biases: Vec<f32>,
}

/// Packs whole blocks into codes of `bits`, at least those of the type. Floats have none.
pub fn pack(kind: Type, bytes: &[u8], bits: usize) -> Codes {
    let count = bytes.len() / kind.bytes() * (kind.block() / GROUP);
    let mut codes = Codes {
        words: Vec::with_capacity(count * bits),
        scales: Vec::with_capacity(count),
        biases: Vec::with_capacity(count),
    };
    groups(kind, bytes, |group| {
        codes.scales.push(group.scale);
        codes.biases.push(group.bias);
        let (mut word, mut used) = (0u64, 0);
        for code in group.codes {
            word |= u64::from(code) << used;
            used += bits;
            if used >= 32 {
                codes.words.push(word as u32);
                (word, used) = (word >> 32, used - 32);
            }
        }
    });
    codes
}

/// Calls `each` with the groups of whole blocks, in order.
fn groups(kind: Type, bytes: &[u8], mut each: impl FnMut(Group)) {
    match kind {
        Type::F32 | Type::F16 | Type::BF16 => {}
        Type::Q4_0 => bytes.as_chunks::<18>().0.iter().for_each(|block| {
            let scale = half_at(block, 0);
            each(Group { codes: nibbles(&block[2..]), scale, bias: -8.0 * scale });
        }),
        Type::Q4_1 => bytes.as_chunks::<20>().0.iter().for_each(|block| {
            let (scale, bias) = (half_at(block, 0), half_at(block, 2));
            each(Group { codes: nibbles(&block[4..]), scale, bias });
        }),
        Type::Q5_0 => bytes.as_chunks::<22>().0.iter().for_each(|block| {
            let scale = half_at(block, 0);
            let codes = fifth_bits(nibbles(&block[6..]), &block[2..6]);
            each(Group { codes, scale, bias: -16.0 * scale });
        }),
        Type::Q5_1 => bytes.as_chunks::<24>().0.iter().for_each(|block| {
            let (scale, bias) = (half_at(block, 0), half_at(block, 2));
            each(Group { codes: fifth_bits(nibbles(&block[8..]), &block[4..8]), scale, bias });
        }),
        Type::Q8_0 => bytes.as_chunks::<34>().0.iter().for_each(|block| {
            let scale = half_at(block, 0);
            // From -128..128 to 0..256.
            let codes = std::array::from_fn(|i| block[2 + i] ^ 0x80);
            each(Group { codes, scale, bias: -128.0 * scale });
        }),
        Type::Q4_K => bytes.as_chunks::<144>().0.iter().for_each(|block| {
            for i in 0..8 {
                let (scale, bias) = scale_and_bias(block, i);
                each(Group { codes: half_bytes(&block[16..], i), scale, bias });
            }
        }),
        Type::Q5_K => bytes.as_chunks::<176>().0.iter().for_each(|block| {
            for i in 0..8 {
                let (scale, bias) = scale_and_bias(block, i);
                let (low, high) = (half_bytes(&block[48..], i), &block[16..48]);
                let codes = std::array::from_fn(|l| low[l] | (high[l] >> i & 1) << 4);
                each(Group { codes, scale, bias });
            }
        }),
        Type::Q6_K => bytes.as_chunks().0.iter().for_each(|block| {
            let numbers = q6_k(block);
            numbers.as_chunks().0.iter().for_each(|numbers| each(rounded(numbers)));
        }),
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The low halves of 16 bytes, then the high ones.
fn nibbles(bytes: &[u8]) -> [u8; GROUP] {
    std::array::from_fn(|i| if i < 16 { bytes[i] & 0xf } else { bytes[i - 16] >> 4 })
}

/// `codes` with a fifth bit each, from the lowest on.
fn fifth_bits(codes: [u8; GROUP], bits: &[u8]) -> [u8; GROUP] {
    std::array::from_fn(|i| codes[i] | (bits[i / 8] >> (i % 8) & 1) << 4)
}

/// The halves of 32 bytes of the `i`th group: low ones of even groups, high ones of odd groups.
fn half_bytes(bytes: &[u8], i: usize) -> [u8; GROUP] {
    let bytes = &bytes[i / 2 * GROUP..];
    std::array::from_fn(|l| if i.is_multiple_of(2) { bytes[l] & 0xf } else { bytes[l] >> 4 })
}

/// Scale and bias of the `i`th group of a Q4_K or Q5_K block: factors of 6 bits, of which the upper bits of the last
/// four stand in the first eight bytes.
fn scale_and_bias(block: &[u8], i: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, least) = if i < 4 {
        (packed[i] & 63, packed[i + 4] & 63)
    } else {
        let both = packed[i + 4];
        (both & 0xf | packed[i - 4] >> 6 << 4, both >> 4 | packed[i] >> 6 << 4)
    };
    (half_at(block, 0) * f32::from(scale), -(half_at(block, 2) * f32::from(least)))
}

/// The numbers of a Q6_K block.
fn q6_k(block: &[u8; 210]) -> [f32; 8 * GROUP] {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let scale = half_at(rest, 16);
    std::array::from_fn(|i| {
        // Halves of 128 numbers in rows of 32.
        let (half, row, l) = (i / 128, i % 128 / 32, i % 32);
        let four = low[64 * half + 32 * (row % 2) + l] >> (4 * (row / 2)) & 0xf;
        let two = high[32 * half + l] >> (2 * row) & 3;
        let code = i16::from(four | two << 4) - 32;
        scale * f32::from(rest[i / 16] as i8) * f32::from(code)
    })
}

/// Numbers rounded to 256 levels between their extremes.
fn rounded(numbers: &[f32; GROUP]) -> Group {
    let least = numbers.iter().copied().fold(f32::INFINITY, f32::min);
    let most = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (most - least) / 255.0;
    let code = |x: f32| if scale > 0.0 { ((x - least) / scale).round() as u8 } else { 0 };
    Group { codes: numbers.map(code), scale, bias: least }
}

/// `numbers` in f16, if that is exact.
pub fn exact_f16(numbers: &[f32]) -> Option<Vec<f16>> {
    numbers.iter().map(|x| Some(f16::from_f32(*x)).filter(|short| short.to_f32() == *x)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Unpacks as MLX does: a stream of bits from the lowest on.
    fn unpack(codes: &Codes, bits: usize) -> Vec<f32> {
        let bit = |i: usize| codes.words[i / 32] >> (i % 32) & 1;
        let code = |i: usize| (0..bits).fold(0, |code, b| code | bit(i * bits + b) << b);
        let count = codes.scales.len() * GROUP;
        (0..count)
            .map(|i| codes.scales[i / GROUP] * code(i) as f32 + codes.biases[i / GROUP])
            .collect()
    }

    /// Blocks of random bytes with scales of a usual size.
    fn blocks(kind: Type, count: usize) -> Vec<u8> {
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let mut byte = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        let mut bytes: Vec<u8> = (0..count * kind.bytes()).map(|_| byte()).collect();
        let scales: &[usize] = match kind {
            Type::Q4_0 | Type::Q5_0 | Type::Q8_0 => &[0],
            Type::Q6_K => &[208],
            _ => &[0, 2],
        };
        for (i, block) in bytes.chunks_mut(kind.bytes()).enumerate() {
            for at in scales {
                let scale = f16::from_f32(0.01 * (1.0 + (i % 7) as f32)).to_le_bytes();
                block[*at..at + 2].copy_from_slice(&scale);
            }
        }
        bytes
    }

    #[test]
    fn packed_numbers_equal_the_floats() {
        for kind in Type::ALL.into_iter().filter(|kind| kind.bits().is_some()) {
            let bytes = blocks(kind, 3);
            let expected = floats(kind, &bytes);
            for bits in [kind.bits().unwrap(), 8] {
                let found = unpack(&pack(kind, &bytes, bits), bits);
                assert_eq!(found.len(), expected.len());
                if kind != Type::Q6_K {
                    assert_eq!(found, expected, "{kind} in {bits} bits");
                }
            }
        }
    }

    /// The documentation of this module states these figures.
    #[test]
    fn the_loss_of_q6_k_is_small() {
        // Sums of uniform numbers are almost normal.
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 24) as f32
        };
        let normal: Vec<f32> =
            (0..64 * 256).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect();
        let bytes: Vec<u8> = normal.as_chunks().0.iter().flat_map(quantized_q6_k).collect();
        let exact = floats(Type::Q6_K, &bytes);
        let packed = unpack(&pack(Type::Q6_K, &bytes, 8), 8);
        let error = |a: &[f32], b: &[f32]| {
            let sum: f32 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
            let size: f32 = normal.iter().map(|x| x.powi(2)).sum();
            (sum / size).sqrt()
        };
        let (own, added, whole) =
            (error(&normal, &exact), error(&exact, &packed), error(&normal, &packed));
        println!("Q6_K {own}, added {added}, together {whole}");
        assert!((0.015..0.025).contains(&own), "{own}");
        assert!(added < 0.005, "{added}");
        assert!(whole < 1.04 * own, "{whole} of {own}");
    }

    /// Q6_K by its definition: scales of 16 numbers in 8 bits of the largest.
    fn quantized_q6_k(numbers: &[f32; 256]) -> [u8; 210] {
        let scales: Vec<f32> = numbers
            .as_chunks::<16>()
            .0
            .iter()
            .map(|part| part.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 31.0)
            .collect();
        let whole = f16::from_f32(scales.iter().copied().fold(0.0, f32::max) / 127.0);
        let mut block = [0; 210];
        block[208..].copy_from_slice(&whole.to_le_bytes());
        for (i, x) in numbers.iter().enumerate() {
            let factor = (scales[i / 16] / whole.to_f32()).round();
            block[192 + i / 16] = factor as u8;
            let code = (x / (factor * whole.to_f32())).round().clamp(-32.0, 31.0) as i16 + 32;
            let (half, row, l) = (i / 128, i % 128 / 32, i % 32);
            block[64 * half + 32 * (row % 2) + l] |= (code as u8 & 0xf) << (4 * (row / 2));
            block[128 + 32 * half + l] |= (code as u8 >> 4) << (2 * row);
        }
        block
    }

    #[test]
    fn scales_are_short_where_that_is_exact() {
        assert!(exact_f16(&[0.5, -128.0]).is_some());
        assert!(exact_f16(&[0.1]).is_none());
        assert!(exact_f16(&[1e6]).is_none());
    }
}
