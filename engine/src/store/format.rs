//! Encoding of one part: a head that describes the tensors, their elements, a checksum.
//!
//! All integers are little-endian u64 unless stated.
//!
//! | at | field | |
//! |---|---|---|
//! | 0 | magic | `STEERSNP` |
//! | 8 | version | 2 |
//! | 16 | total | length of the encoded part |
//! | 24 | head | bytes before the first tensor's elements |
//! | 32 | tensors | their number |
//! | 40 | for each tensor | bytes of elements; length of dtype, dtype in UTF-8; rank, extents as i32 |
//! | head | elements | of all tensors, in order, without gaps |
//! | total - 8 | checksum | XXH3-64 of the part's key and all bytes before |
//!
//! The checksum covers the key, so a part cannot be read under another key. [`decode`] accepts any
//! bytes: it returns an error for an invalid encoding, never panics, and never allocates more than a
//! small multiple of the input length.
//!
//! # Why
//! - XXH3 detects accidents (a flipped bit, a torn page), not forgery: the file has mode 0600, so
//!   whoever can write it can also write to this process. It runs at 5 to 12 GB/s (EPYC, SSE2);
//!   SHA-256 runs at 1.2 to 1.6 GB/s with CPU support and at a quarter of that without, slower than
//!   the rest of a load. CRC-32 is faster still (13 GB/s), but 32 bits are few for millions of loads.
//! - The checksum comes last, so both directions copy and hash in one pass, in pieces that fit the
//!   processor's cache.

use std::io::{BufRead, Error, ErrorKind, Read, Result};

use xxhash_rust::xxh3::Xxh3Default;

use super::{Key, Tensor};

/// Everything of a tensor but its elements.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// Element type, as in [`Tensor`].
    pub dtype: String,
    /// Extent of each axis.
    pub shape: Vec<i32>,
    /// Bytes of the elements.
    pub bytes: usize,
}

/// The first bytes of every encoded part.
pub(super) const MAGIC: [u8; 8] = *b"STEERSNP";
const VERSION: u64 = 2;
/// Bytes of the head before the description of the tensors.
const FIXED: usize = 40;
const CHECKSUM: usize = 8;
/// Least bytes of a tensor's description: element bytes, dtype's length, rank.
const LEAST_TENSOR: usize = 24;
/// Bytes that are copied, then hashed, at once.
const PIECE: usize = 64 << 10;

/// A part being encoded: reads yield its bytes.
pub(super) struct Encoded<'a> {
    section: Section<'a>,
    offset: usize,
    tensors: std::slice::Iter<'a, Tensor>,
    checksum: Xxh3Default,
}

enum Section<'a> {
    Head(Vec<u8>),
    Elements(&'a [u8]),
    Checksum([u8; CHECKSUM]),
}

/// Encodes the part with this key without copying its tensors.
pub(super) fn encode<'a>(key: &Key, tensors: &'a [Tensor]) -> Encoded<'a> {
    let mut head = Vec::with_capacity(FIXED + tensors.len() * 2 * LEAST_TENSOR);
    head.extend(MAGIC);
    put(&mut head, VERSION as usize);
    put(&mut head, encoded_len(tensors) as usize);
    put(&mut head, head_len(tensors));
    put(&mut head, tensors.len());
    for tensor in tensors {
        put(&mut head, tensor.bytes.len());
        put(&mut head, tensor.dtype.len());
        head.extend(tensor.dtype.bytes());
        put(&mut head, tensor.shape.len());
        head.extend(tensor.shape.iter().flat_map(|extent| extent.to_le_bytes()));
    }
    let checksum = checksum_of(key);
    Encoded { section: Section::Head(head), offset: 0, tensors: tensors.iter(), checksum }
}

/// Bytes that [`encode`] yields, without encoding.
pub(super) fn encoded_len(tensors: &[Tensor]) -> u64 {
    head_len(tensors) as u64 + super::element_bytes(tensors) + CHECKSUM as u64
}

/// [`encoded_len`] of tensors of these layouts.
pub(super) fn encoded_len_of(layouts: &[Layout]) -> u64 {
    let described = layouts.iter().map(|layout| described_len(&layout.dtype, &layout.shape));
    let elements = layouts.iter().map(|layout| layout.bytes);
    (FIXED + described.chain(elements).sum::<usize>() + CHECKSUM) as u64
}

fn head_len(tensors: &[Tensor]) -> usize {
    FIXED + tensors.iter().map(|t| described_len(&t.dtype, &t.shape)).sum::<usize>()
}

/// Bytes of the description of a tensor in the head.
fn described_len(dtype: &str, shape: &[i32]) -> usize {
    LEAST_TENSOR + dtype.len() + 4 * shape.len()
}

impl Read for Encoded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        loop {
            let (section, hashed): (&[u8], bool) = match &self.section {
                Section::Head(head) => (head, true),
                Section::Elements(elements) => (elements, true),
                Section::Checksum(checksum) => (checksum, false),
            };
            let rest = &section[self.offset..];
            let count = buffer.len().min(rest.len()).min(PIECE);
            if count > 0 || buffer.is_empty() || !hashed {
                buffer[..count].copy_from_slice(&rest[..count]);
                if hashed {
                    self.checksum.update(&buffer[..count]);
                }
                self.offset += count;
                return Ok(count);
            }
            self.offset = 0;
            self.section = match self.tensors.next() {
                Some(tensor) => Section::Elements(&tensor.bytes),
                None => Section::Checksum(self.checksum.digest().to_le_bytes()),
            };
        }
    }
}

/// Decodes the part with this key from the `len` bytes that `input` yields.
///
/// # Errors
/// [`ErrorKind::InvalidData`] for invalid bytes, [`ErrorKind::UnexpectedEof`] if they end early;
/// errors of `input` are passed on.
pub(super) fn decode(key: &Key, mut input: impl BufRead, len: u64) -> Result<Vec<Tensor>> {
    let mut head = vec![0; FIXED];
    input.read_exact(&mut head)?;
    let field = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
    check(head[..8] == MAGIC, "not a part")?;
    check(field(8) == VERSION, "unknown version")?;
    check(field(16) == len, "length differs from the record")?;
    let (head_len, count) = (field(24), field(32));
    let most = len.saturating_sub(CHECKSUM as u64);
    check((FIXED as u64..=most).contains(&head_len), "head is longer than the part")?;
    let least = count.saturating_mul(LEAST_TENSOR as u64);
    check(least <= head_len - FIXED as u64, "head is too short for its tensors")?;

    head.resize(usize::try_from(head_len).map_err(|_| invalid("too long for memory"))?, 0);
    input.read_exact(&mut head[FIXED..])?;
    let mut checksum = checksum_of(key);
    checksum.update(&head);
    let mut rest = &head[FIXED..];
    let mut elements = most - head_len;
    let mut tensors = Vec::with_capacity(count as usize);
    let mut lens = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let len = get(&mut rest)?;
        check(len as u64 <= elements, "tensors are longer than the part")?;
        elements -= len as u64;
        let dtype_len = get(&mut rest)?;
        let dtype = str::from_utf8(take(&mut rest, dtype_len)?)
            .map_err(|_| invalid("dtype is not UTF-8"))?
            .to_owned();
        let rank = get(&mut rest)?;
        let rank_bytes = rank.checked_mul(4).ok_or_else(|| invalid("rank is out of range"))?;
        let shape = i32s(take(&mut rest, rank_bytes)?).collect();
        tensors.push(Tensor { dtype, shape, bytes: Vec::new() });
        lens.push(len);
    }
    check(rest.is_empty() && elements == 0, "lengths do not add up")?;

    for (tensor, len) in tensors.iter_mut().zip(lens) {
        tensor.bytes = read_hashed(&mut input, len, &mut checksum)?;
    }
    let mut expected = [0; CHECKSUM];
    input.read_exact(&mut expected)?;
    check(checksum.digest().to_le_bytes() == expected, "checksum differs")?;
    Ok(tensors)
}

/// Copies and hashes the next `len` bytes of `input`.
fn read_hashed(
    input: &mut impl BufRead,
    len: usize,
    checksum: &mut Xxh3Default,
) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let piece = input.fill_buf()?;
        let piece = &piece[..piece.len().min(len - bytes.len()).min(PIECE)];
        if piece.is_empty() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(piece);
        checksum.update(piece);
        let count = piece.len();
        input.consume(count);
    }
    Ok(bytes)
}

/// A checksum that covers the key so far.
fn checksum_of(key: &Key) -> Xxh3Default {
    let mut checksum = Xxh3Default::new();
    checksum.update(key);
    checksum
}

fn put(head: &mut Vec<u8>, number: usize) {
    head.extend((number as u64).to_le_bytes());
}

/// Cuts `count` bytes off the front of `rest`.
fn take<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [u8]> {
    rest.split_off(..count).ok_or_else(|| invalid("head ends early"))
}

fn get(rest: &mut &[u8]) -> Result<usize> {
    let number = u64::from_le_bytes(take(rest, 8)?.try_into().expect("8 bytes"));
    usize::try_from(number).map_err(|_| invalid("number is out of range"))
}

fn i32s(bytes: &[u8]) -> impl Iterator<Item = i32> {
    bytes.chunks_exact(4).map(|four| i32::from_le_bytes(four.try_into().expect("4 bytes")))
}

fn check(holds: bool, problem: &'static str) -> Result<()> {
    if holds { Ok(()) } else { Err(invalid(problem)) }
}

fn invalid(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = [4; 32];

    fn bytes_of(tensors: &[Tensor]) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode(&KEY, tensors).read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, encoded_len(tensors));
        bytes
    }

    fn decoded(bytes: &[u8]) -> Result<Vec<Tensor>> {
        decode(&KEY, bytes, bytes.len() as u64)
    }

    fn cases() -> Vec<Vec<Tensor>> {
        let tensor = |dtype: &str, shape: &[i32], bytes: usize| Tensor {
            dtype: dtype.into(),
            shape: shape.into(),
            bytes: (0..bytes).map(|i| (i * 31) as u8).collect(),
        };
        vec![
            vec![],
            vec![tensor("", &[], 0), tensor("U8", &[3], 3)],
            vec![
                tensor("BF16", &[1, 8, 300, 4], 19_200),
                tensor("F32", &[0, -1, i32::MIN], 0),
                tensor("F32", &[1, 3, 5], 60),
            ],
        ]
    }

    #[test]
    fn decoding_inverts_encoding() {
        let bytes = (0..3 * PIECE + 5).map(|i| (i % 251) as u8).collect();
        let long = Tensor { dtype: "U8".into(), shape: vec![3], bytes };
        for tensors in cases().into_iter().chain([vec![long]]) {
            assert_eq!(decoded(&bytes_of(&tensors)).unwrap(), tensors);
        }
    }

    #[test]
    fn every_truncation_and_every_flipped_bit_is_detected() {
        let bytes = bytes_of(&cases()[1]);
        for length in 0..bytes.len() {
            assert!(decoded(&bytes[..length]).is_err(), "cut at {length}");
            let ends = decode(&KEY, &bytes[..length], bytes.len() as u64);
            assert!(ends.is_err(), "ends at {length}");
        }
        for bit in 0..8 * bytes.len() {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(decoded(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn part_cannot_be_decoded_under_another_key() {
        let bytes = bytes_of(&cases()[1]);
        assert!(decode(&[5; 32], bytes.as_slice(), bytes.len() as u64).is_err());
    }

    /// Half of the inputs get a correct checksum, or they would never reach the parser; many numbers
    /// are set to limits.
    #[test]
    fn decoding_mutated_inputs_never_panics() {
        let originals: Vec<Vec<u8>> = cases().iter().map(|tensors| bytes_of(tensors)).collect();
        let mut seed = 0x5eed_u64;
        let mut random = move |bound: usize| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % bound
        };
        for round in 0..crate::fuzz_inputs() {
            let mut bytes = originals[random(originals.len())].clone();
            for _ in 0..1 + random(4) {
                let at =
                    if random(2) == 0 { random(bytes.len()) } else { 8 * random(bytes.len() / 8) };
                match random(5) {
                    0 => bytes[at] ^= 1 << random(8),
                    1 => bytes[at] = random(256) as u8,
                    2 => bytes.truncate(at.max(FIXED)),
                    3 => bytes.extend(vec![0; random(64)]),
                    _ => {
                        let limits = [0, 1, 1 << 31, 1 << 62, u64::MAX / 4 + 1, u64::MAX];
                        let number = limits[random(limits.len())].to_le_bytes();
                        let end = bytes.len().min(at + 8);
                        bytes[at..end].copy_from_slice(&number[..end - at]);
                    }
                }
            }
            if let (0, Some(end)) = (round % 2, bytes.len().checked_sub(CHECKSUM))
                && end >= FIXED
            {
                let len = bytes.len() as u64;
                bytes[16..24].copy_from_slice(&len.to_le_bytes());
                let mut checksum = checksum_of(&KEY);
                checksum.update(&bytes[..end]);
                bytes[end..].copy_from_slice(&checksum.digest().to_le_bytes());
            }
            let _ = decoded(&bytes);
        }
    }
}
