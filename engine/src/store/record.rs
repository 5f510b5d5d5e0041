//! What the store knows of a part without reading it, and what the part costs.
//!
//! Pure: bytes in, bytes out.

use xxhash_rust::xxh3::xxh3_64;

use super::{Fingerprint, Key, Recency};

/// The two kinds of parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PartKind {
    /// Keys and values of attention for the tokens of one block.
    Kv,
    /// Recurrent state, convolution tails and sliding windows at one position.
    State,
}

impl PartKind {
    /// Its name in the output of `steersman cache`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kv => "rows",
            Self::State => "state",
        }
    }
}

/// The record of one part in the file.
///
/// Its bytes: fingerprint; kind, end, bytes, last use, end of retention as u64; XXH3-64 of domain,
/// key and all of these. Little-endian.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PartRecord {
    pub fingerprint: Fingerprint,
    pub kind: PartKind,
    /// Length in tokens of the prefix that ends with the part.
    pub end: usize,
    /// Length of the encoded part.
    pub bytes: u64,
    /// The last use is in microseconds since 1970, made unique by counting on.
    pub recency: Recency,
}

/// Changes with the layout of a record, so that a record of another layout fails the checksum.
const DOMAIN: &[u8] = b"steersman record 2";

impl PartRecord {
    /// Length of an encoded record.
    pub const BYTES: usize = 80;

    pub fn to_bytes(&self, key: &Key) -> [u8; Self::BYTES] {
        let kind = match self.kind {
            PartKind::Kv => 0,
            PartKind::State => 1,
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..32].copy_from_slice(&self.fingerprint);
        let Recency { used, retained_until } = self.recency;
        let fields = [kind, self.end as u64, self.bytes, used, retained_until];
        for (place, field) in bytes[32..72].chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        let checksum = Self::checksum(key, &bytes);
        bytes[72..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// `None` if the checksum differs.
    pub fn from_bytes(key: &Key, bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let field = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if field(72) != Self::checksum(key, bytes) {
            return None;
        }
        Some(Self {
            fingerprint: bytes[..32].try_into().expect("32 bytes"),
            kind: match field(32) {
                0 => PartKind::Kv,
                1 => PartKind::State,
                _ => return None,
            },
            end: usize::try_from(field(40)).ok()?,
            bytes: field(48),
            recency: Recency { used: field(56), retained_until: field(64) },
        })
    }

    /// Share of the budget that the part takes.
    pub fn cost(&self) -> u64 {
        cost(self.bytes)
    }

    /// Number of chunks that hold the encoded part.
    pub fn chunks(&self) -> u64 {
        chunk_lens(self.bytes).count() as u64
    }

    fn checksum(key: &Key, bytes: &[u8; Self::BYTES]) -> u64 {
        xxh3_64(&[DOMAIN, key, &bytes[..72]].concat())
    }
}

/// Most bytes of one chunk: with redb's own bytes it fills a page of 1 MiB.
pub(super) const CHUNK_BYTES: u64 = (1 << 20) - CHUNK_OVERHEAD;
/// Bound on redb's bytes in a page that holds one chunk: header, offsets, key.
const CHUNK_OVERHEAD: u64 = 512;
const PAGE_BYTES: u64 = 4096;
/// Budget charged for the record and the inner pages above its chunks.
const RECORD_COST: u64 = 512;

/// Bytes of redb's page that holds a chunk.
fn page(chunk: u64) -> u64 {
    (chunk + CHUNK_OVERHEAD).next_power_of_two().max(PAGE_BYTES)
}

/// Length of the next chunk when `rest` bytes are left to store.
///
/// redb's pages are powers of two. A rest that would leave more than an eighth of its page empty is
/// cut: 64 KiB and a head of a few bytes take 64 + 4 KiB, not 128.
fn chunk_len(rest: u64) -> u64 {
    if rest >= CHUNK_BYTES {
        return CHUNK_BYTES;
    }
    let page = page(rest);
    if page == PAGE_BYTES || rest + CHUNK_OVERHEAD > page - page / 8 {
        return rest;
    }
    page / 2 - CHUNK_OVERHEAD
}

/// Share of the budget that a part of `bytes` encoded bytes takes: the bytes of its pages and a third
/// more.
///
/// The third is for pages that are free but cannot be used by the transaction that freed them, so that
/// the file stays within its budget: with a seventh, a file under steady churn took 1.02 to 1.13 times
/// the budget.
pub(super) fn cost(bytes: u64) -> u64 {
    (RECORD_COST + chunk_lens(bytes).map(page).sum::<u64>()) * 4 / 3
}

/// Lengths of the chunks of `bytes` encoded bytes. Every part has a head, so at least one.
pub(super) fn chunk_lens(bytes: u64) -> impl Iterator<Item = u64> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let chunk = chunk_len(rest);
        rest -= chunk;
        (chunk > 0).then_some(chunk)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_round_trips_and_every_flipped_bit_is_detected() {
        let key = [5; 32];
        for kind in [PartKind::Kv, PartKind::State] {
            let record = PartRecord {
                fingerprint: [7; 32],
                kind,
                end: 640,
                bytes: 2_097_700,
                recency: Recency { used: 1_790_000_000_000_000, retained_until: 3 },
            };
            let bytes = record.to_bytes(&key);
            assert_eq!(PartRecord::from_bytes(&key, &bytes), Some(record));
            assert_eq!(PartRecord::from_bytes(&[6; 32], &bytes), None, "the key of another part");
            assert_eq!(PartRecord::from_bytes(&key, &bytes[1..]), None);
            for bit in 0..8 * bytes.len() {
                let mut damaged = bytes;
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(PartRecord::from_bytes(&key, &damaged), None, "bit {bit}");
            }
        }
    }

    #[test]
    fn chunks_fill_their_pages() {
        for bytes in [1, 500, 4096, 5000, 65_536 + 700, 100_000, 600_000, 2_097_152 + 900] {
            let lens: Vec<u64> = chunk_lens(bytes).collect();
            assert_eq!(lens.iter().sum::<u64>(), bytes);
            assert!(lens.iter().all(|len| (1..=CHUNK_BYTES).contains(len)));
            assert!(lens.len() <= 2 + 8, "{bytes} bytes in {lens:?}");
            // Each chunk has its overhead, and the last page may be partly filled.
            let pages: u64 = lens.iter().map(|len| page(*len)).sum();
            assert!(pages <= bytes * 8 / 7 + 2 * PAGE_BYTES, "{bytes} bytes take {pages}");
        }
    }
}
