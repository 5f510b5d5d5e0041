//! Limits on what a server sends, before it is parsed: the size and shape of a message, and how fast it is read.
//!
//! rmcp parses a message into values that take up to a hundred times its bytes, and starts a task for each request of
//! a server. So [`Shape`] looks at the bytes first. [`Pace`] makes the reader wait: a server that sends more than it is
//! read writes into a full pipe, which costs its own processor time.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

/// Longest message.
pub const MESSAGE_BYTES: usize = 16 << 20;

/// Most parts of a message: what `,`, `:`, `[` and `{` begin outside of strings.
const PARTS: usize = 200_000;

/// Deepest nesting of a message; the JSON parser refuses 128 levels, and says nothing.
const DEPTH: usize = 100;

/// Time over which lines and bytes are counted.
const WINDOW: Duration = Duration::from_secs(1);

/// Lines that are read in a [`WINDOW`]; a message over standard output is one, an event has two or three.
const LINES: usize = 2000;

/// Bytes that are read in a [`WINDOW`].
const BYTES: usize = 32 << 20;

/// Characters of a reason.
const REASON_CHARS: usize = 1000;

/// The shape of a message, so far.
#[derive(Debug, Default)]
pub struct Shape {
    bytes: usize,
    parts: usize,
    depth: usize,
    is_string: bool,
    is_escaped: bool,
}

impl Shape {
    /// Adds a piece of the message.
    ///
    /// # Errors
    /// Which limit it exceeds.
    pub fn add(&mut self, piece: &[u8]) -> Result<(), &'static str> {
        self.bytes += piece.len();
        if self.bytes > MESSAGE_BYTES {
            return Err("a message is too long");
        }
        for byte in piece {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.is_string => self.is_escaped = true,
                b'"' => self.is_string = !self.is_string,
                _ if self.is_string => {}
                b'[' | b'{' => {
                    self.depth += 1;
                    self.parts += 1;
                }
                b']' | b'}' => self.depth = self.depth.saturating_sub(1),
                b',' | b':' => self.parts += 1,
                _ => {}
            }
            if self.depth > DEPTH {
                return Err("a message is nested too deeply");
            }
        }
        if self.parts > PARTS {
            return Err("a message has too many parts");
        }
        Ok(())
    }

    /// Checks a whole message.
    ///
    /// # Errors
    /// Which limit it exceeds.
    pub fn check(message: &[u8]) -> Result<(), &'static str> {
        Self::default().add(message)
    }

    /// Adds a piece of lines, each of which is a message.
    ///
    /// # Errors
    /// Which limit one of them exceeds.
    pub fn add_lines(&mut self, piece: &[u8]) -> Result<(), &'static str> {
        for line in piece.split_inclusive(|byte| *byte == b'\n') {
            self.add(line)?;
            if line.ends_with(b"\n") {
                *self = Self::default();
            }
        }
        Ok(())
    }
}

/// How fast a stream is read.
#[derive(Debug)]
pub struct Pace {
    begin: Instant,
    lines: usize,
    bytes: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self { begin: Instant::now(), lines: 0, bytes: 0 }
    }
}

impl Pace {
    /// Counts what was read. Returns until when the next piece waits, if it does.
    pub fn count(&mut self, piece: &[u8]) -> Option<Instant> {
        self.count_at(piece, Instant::now())
    }

    fn count_at(&mut self, piece: &[u8], now: Instant) -> Option<Instant> {
        if now.duration_since(self.begin) >= WINDOW {
            *self = Self { begin: now, lines: 0, bytes: 0 };
        }
        self.lines += piece.iter().filter(|byte| **byte == b'\n').count();
        self.bytes += piece.len();
        (self.lines > LINES || self.bytes > BYTES).then(|| self.begin + WINDOW)
    }
}

/// Why a connection was ended here; the first reason counts.
#[derive(Debug, Clone, Default)]
pub struct Reason(Arc<OnceLock<&'static str>>);

impl Reason {
    pub fn set(&self, reason: &'static str) {
        let _ = self.0.set(reason);
    }

    pub fn get(&self) -> Option<&'static str> {
        self.0.get().copied()
    }
}

/// What a server wrote, in a length and form for a log line or an error.
pub fn quoted(text: &str) -> String {
    let mut chars = text.chars();
    let mut shown = String::new();
    for c in chars.by_ref().take(REASON_CHARS) {
        if c.is_control() {
            shown.extend(c.escape_debug());
        } else {
            shown.push(c);
        }
    }
    if chars.next().is_some() {
        shown += "...";
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_refused_by_its_size_and_shape_before_it_is_parsed() {
        let too = |message: &str| Shape::check(message.as_bytes()).err();
        let text = |inner: &str| format!("{{\"text\": \"{inner}\"}}");
        let parts = Some("a message has too many parts");
        let nested = Some("a message is nested too deeply");
        for (message, expected) in [
            (text("a"), None),
            // What a string has are no parts.
            (text(&",[{:".repeat(100_000)), None),
            (text(&"\\\"[\\\\".repeat(100_000)), None),
            (format!("[{}0]", "0,".repeat(300_000)), parts),
            (format!("[{}0]", "[],".repeat(150_000)), parts),
            (format!("{{{}}}", "\"a\":0,".repeat(150_000)), parts),
            ("[".repeat(101), nested),
            (format!("{}{}", "[".repeat(100), "]".repeat(100)), None),
            ("{\"a\":".repeat(5000), nested),
            (" ".repeat(MESSAGE_BYTES + 1), Some("a message is too long")),
        ] {
            assert_eq!(too(&message), expected, "{:.40}", message);
        }
    }

    #[test]
    fn lines_are_messages_however_they_are_cut() {
        let lines = format!("{}\n{}\n", "[".repeat(60), "[".repeat(60));
        for size in [1, 7, 1000] {
            let mut shape = Shape::default();
            lines.as_bytes().chunks(size).for_each(|piece| shape.add_lines(piece).unwrap());
        }
        let mut shape = Shape::default();
        let endless = vec![b'x'; 1 << 20];
        let read = (0..).take_while(|_| shape.add_lines(&endless).is_ok()).count();
        assert_eq!(read, 16, "an endless line");
    }

    #[test]
    fn a_stream_is_read_no_faster_than_its_pace() {
        let piece = b"x\n".repeat(500);
        let mut pace = Pace::default();
        let begin = pace.begin;
        let mut now = begin;
        for _ in 0..40 {
            now = pace.count_at(&piece, now).unwrap_or(now);
        }
        assert_eq!(now - begin, 8 * WINDOW);
        // A server that sends little is not slowed down.
        for second in 1..40 {
            assert_eq!(pace.count_at(&piece, now + second * WINDOW), None);
        }
    }

    #[test]
    fn what_a_server_wrote_is_cut_and_escaped() {
        assert_eq!(quoted("no \"handshake\"\u{1b}[2J\n"), "no \"handshake\"\\u{1b}[2J\\n");
        let long = quoted(&"x".repeat(1 << 20));
        assert_eq!(long, "x".repeat(REASON_CHARS) + "...");
    }
}
