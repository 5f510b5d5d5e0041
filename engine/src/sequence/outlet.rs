//! The outlet of a reply: answer text passes the policies before the client has it.
//!
//! Every piece that is to be sent waits here in order. A piece of the answer becomes what `on-text`
//! makes of it; the others follow after what the policies held back. A sequence whose policies do
//! not see text has no outlet, and its pieces are sent at once.
//!
//! The policies hold text back, not the outlet: it knows how much of the answer the client has
//! after each piece, so that a rewind drops what was held, and the client drops the rest if it
//! can.

use std::collections::VecDeque;

use crate::text::Piece;

/// Most bytes by which policies may make an answer longer: one that adds text to every piece would
/// otherwise send without end.
pub const ADDED_BYTES: usize = 64 << 10;

/// Pieces on their way to the client.
#[derive(Debug, Default)]
pub struct Outlet {
    pieces: VecDeque<Piece>,
    /// Bytes of the answer that the policies have seen.
    seen: usize,
    /// After each call: the bytes that the policies had seen, and those that the client had.
    marks: Vec<(usize, usize)>,
    /// Whether the policies may hold text.
    is_open: bool,
    /// The policies have added too much: no further text is sent.
    is_closed: bool,
}

impl Outlet {
    /// Adds pieces that are to be sent.
    pub fn add(&mut self, pieces: Vec<Piece>) {
        self.pieces.extend(pieces);
    }

    /// The piece that is to be sent next.
    pub fn first(&self) -> Option<&Piece> {
        self.pieces.front()
    }

    /// Takes the piece that is to be sent next.
    pub fn take_first(&mut self) -> Option<Piece> {
        self.pieces.pop_front()
    }

    /// Bytes of the answer that the policies have seen.
    pub fn seen(&self) -> usize {
        self.seen
    }

    /// Returns true if the policies may hold text.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// The policies have seen `bytes` more bytes, and hold nothing back if this is the `end`.
    /// Returns whether what they made of them is sent.
    pub fn count_seen(&mut self, bytes: usize, end: bool) -> bool {
        self.seen += bytes;
        self.is_open = !end;
        !self.is_closed
    }

    /// The client has `sent` bytes of the answer after the last call. Returns true if this is the
    /// first time that the policies have added too much: no further text is sent then.
    pub fn mark(&mut self, sent: usize) -> bool {
        self.marks.push((self.seen, sent));
        let closes = !self.is_closed && sent > self.seen + ADDED_BYTES;
        self.is_closed |= closes;
        closes
    }

    /// Bytes of the answer that the client had when the policies had seen `seen` bytes.
    pub fn sent_at(&self, seen: usize) -> usize {
        self.marks.iter().rev().find(|(before, _)| *before <= seen).map_or(0, |(_, sent)| *sent)
    }

    /// Takes back the answer after `seen` bytes.
    pub fn rewind(&mut self, seen: usize) {
        self.marks.retain(|(before, _)| *before <= seen);
        self.seen = self.seen.min(seen);
        self.is_open |= seen > 0;
    }
}
