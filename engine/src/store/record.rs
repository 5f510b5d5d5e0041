//! What is known of a part without reading it, and what keeping it costs.
//!
//! Pure: bytes in, bytes out.

use xxhash_rust::xxh3::xxh3_64;

use super::{Fingerprint, Key};

/// The two kinds of parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// What the tokens of one block leave for good: keys and values of attention.
    Rows,
    /// What every token changes: recurrent state, convolution tails, sliding windows.
    State,
}

impl Kind {
    /// Its word for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::State => "state",
        }
    }
}

/// What the file says of one part.
///
/// Its bytes: fingerprint; kind, end, bytes, used, pinned as u64; XXH3-64 of domain, key and all
/// that. Little-endian.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Record {
    pub fingerprint: Fingerprint,
    pub kind: Kind,
    /// Tokens of the prefix at whose end it stands.
    pub end: usize,
    /// Length of its formatted bytes.
    pub bytes: u64,
    /// When it was last used: microseconds since 1970, made unique by counting on.
    pub used: u64,
    /// Until when it must not be evicted: seconds since 1970.
    pub pinned: u64,
}

/// Changes with the layout of a record, so that none of another layout passes for one.
const DOMAIN: &[u8] = b"steersman record 2";

impl Record {
    /// Length of the bytes.
    pub const BYTES: usize = 80;

    pub fn to_bytes(&self, key: &Key) -> [u8; Self::BYTES] {
        let kind = match self.kind {
            Kind::Rows => 0,
            Kind::State => 1,
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..32].copy_from_slice(&self.fingerprint);
        let fields = [kind, self.end as u64, self.bytes, self.used, self.pinned];
        for (place, field) in bytes[32..72].chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        let checksum = Self::checksum(key, &bytes);
        bytes[72..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// `None` where the checksum differs.
    pub fn from_bytes(key: &Key, bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let field = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if field(72) != Self::checksum(key, bytes) {
            return None;
        }
        Some(Self {
            fingerprint: bytes[..32].try_into().expect("32 bytes"),
            kind: match field(32) {
                0 => Kind::Rows,
                1 => Kind::State,
                _ => return None,
            },
            end: usize::try_from(field(40)).ok()?,
            bytes: field(48),
            used: field(56),
            pinned: field(64),
        })
    }

    /// Share of the budget that the part takes.
    pub fn cost(&self) -> u64 {
        cost(self.bytes)
    }

    /// How many rows its formatted bytes are in.
    pub fn rows(&self) -> u64 {
        rows(self.bytes).count() as u64
    }

    fn checksum(key: &Key, bytes: &[u8; Self::BYTES]) -> u64 {
        xxh3_64(&[DOMAIN, key, &bytes[..72]].concat())
    }
}

/// Most bytes of one row: with redb's own it fills a page of 1 MiB.
pub(super) const ROW_BYTES: u64 = (1 << 20) - ROW_OVERHEAD;
/// Bound on redb's bytes in a page that holds one row: header, offsets, key.
const ROW_OVERHEAD: u64 = 512;
const PAGE_BYTES: u64 = 4096;
/// Budget charged for the record and the inner pages above its rows.
const RECORD_COST: u64 = 512;

/// Bytes of redb's page that holds a row.
fn page(row: u64) -> u64 {
    (row + ROW_OVERHEAD).next_power_of_two().max(PAGE_BYTES)
}

/// Length of the next row, where `rest` bytes are left to store.
///
/// redb's pages are powers of two. A rest that would leave more than an eighth of its page empty is
/// cut: 64 KiB and a head of a few bytes take 64 + 4 KiB, not 128.
fn row_len(rest: u64) -> u64 {
    if rest >= ROW_BYTES {
        return ROW_BYTES;
    }
    let page = page(rest);
    if page == PAGE_BYTES || rest + ROW_OVERHEAD > page - page / 8 {
        return rest;
    }
    page / 2 - ROW_OVERHEAD
}

/// Share of the budget that a part of so many formatted bytes takes: the bytes of its pages and a
/// seventh more.
///
/// The seventh is for pages that are free but cannot be used by the transaction that freed them:
/// without it a file under steady churn settled at 1.02 to 1.12 times the budget.
pub(super) fn cost(bytes: u64) -> u64 {
    (RECORD_COST + rows(bytes).map(page).sum::<u64>()) * 8 / 7
}

/// Lengths of the rows of so many formatted bytes. A part has some, as it has a head.
pub(super) fn rows(bytes: u64) -> impl Iterator<Item = u64> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let row = row_len(rest);
        rest -= row;
        (row > 0).then_some(row)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_and_every_flipped_bit_of_it_is_noticed() {
        let key = [5; 32];
        for kind in [Kind::Rows, Kind::State] {
            let record = Record {
                fingerprint: [7; 32],
                kind,
                end: 640,
                bytes: 2_097_700,
                used: 1_790_000_000_000_000,
                pinned: 3,
            };
            let bytes = record.to_bytes(&key);
            assert_eq!(Record::from_bytes(&key, &bytes), Some(record));
            assert_eq!(Record::from_bytes(&[6; 32], &bytes), None, "another key's");
            assert_eq!(Record::from_bytes(&key, &bytes[1..]), None);
            for bit in 0..8 * bytes.len() {
                let mut damaged = bytes;
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Record::from_bytes(&key, &damaged), None, "bit {bit}");
            }
        }
    }

    #[test]
    fn rows_fill_their_pages() {
        for bytes in [1, 500, 4096, 5000, 65_536 + 700, 100_000, 600_000, 2_097_152 + 900] {
            let lens: Vec<u64> = rows(bytes).collect();
            assert_eq!(lens.iter().sum::<u64>(), bytes);
            assert!(lens.iter().all(|row| (1..=ROW_BYTES).contains(row)));
            assert!(lens.len() <= 2 + 8, "{bytes} bytes in {lens:?}");
            // Each row has its overhead, and the last page may be partly filled.
            let pages: u64 = lens.iter().map(|row| page(*row)).sum();
            assert!(pages <= bytes * 8 / 7 + 2 * PAGE_BYTES, "{bytes} bytes take {pages}");
        }
    }
}
