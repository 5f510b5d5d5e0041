//! The newest lines of the log, for operators: those on stderr, in the form of text.
//!
//! Kept in memory within [`LINES`] and [`BYTES`]. Writing a line costs a lock and a copy of the line; readers copy
//! pointers, so that a slow one keeps nobody from logging and nothing in memory but what it was given.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tracing::{Metadata, Subscriber};
use tracing_subscriber::fmt::{Layer, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use super::line::{Form, SpanFields};

/// Most lines.
const LINES: usize = 2000;

/// Most bytes of all lines.
const BYTES: usize = 1 << 20;

/// Most bytes of one line; of a longer one, the beginning is kept.
const LINE_BYTES: usize = 8 << 10;

/// The newest lines.
#[derive(Clone)]
pub struct Recent(Arc<Mutex<Ring>>);

struct Ring {
    lines: VecDeque<Line>,
    bytes: usize,
    /// Number of the next line.
    next: u64,
}

/// A line of the log.
#[derive(Debug, Clone)]
pub struct Line {
    /// Numbers follow each other in one process, and those of a later process are larger.
    pub number: u64,
    /// `ERROR`, `WARN`, `INFO`, `DEBUG` or `TRACE`.
    pub level: &'static str,
    /// The line as on stderr, without its end.
    pub text: Arc<str>,
}

impl Default for Recent {
    fn default() -> Self {
        // Microseconds: no process logs a million lines a second.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let next = u64::try_from(now.as_micros()).unwrap_or_default();
        Self(Arc::new(Mutex::new(Ring { lines: VecDeque::new(), bytes: 0, next })))
    }
}

impl fmt::Debug for Recent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recent").finish_non_exhaustive()
    }
}

impl Recent {
    /// Keeps what is logged. Filters are those that it is combined with.
    pub fn layer<S>(&self) -> Layer<S, SpanFields, Form, Self>
    where
        S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    {
        tracing_subscriber::fmt::layer()
            .with_writer(self.clone())
            .with_ansi(false)
            .event_format(Form::Text)
            .fmt_fields(SpanFields)
    }

    /// The oldest lines with larger numbers than `number`, at most so many, and of so many bytes after the first. If no
    /// line has had this number yet, the oldest of all.
    pub fn after(&self, number: u64, lines: usize, bytes: usize) -> Vec<Line> {
        let ring = self.0.lock();
        // A line that is still to come was read from an earlier process, after which the clock was set back.
        let number = if number < ring.next { number } else { 0 };
        let start = ring.lines.partition_point(|line| line.number <= number);
        let mut room = bytes;
        let fits = |line: &&Line| {
            let rest = room.checked_sub(line.text.len());
            room = rest.unwrap_or_default();
            rest.is_some()
        };
        let first = ring.lines.get(start).into_iter();
        let others = ring.lines.iter().skip(start + 1).take(lines.saturating_sub(1));
        first.chain(others.take_while(fits)).cloned().collect()
    }

    fn push(&self, level: &'static str, line: &str) {
        let line = line.trim_end_matches('\n');
        let text: Arc<str> = match line.len() > LINE_BYTES {
            true => format!("{}…", &line[..line.floor_char_boundary(LINE_BYTES)]).into(),
            false => line.into(),
        };
        let mut ring = self.0.lock();
        ring.bytes += text.len();
        let number = ring.next;
        ring.next += 1;
        ring.lines.push_back(Line { number, level, text });
        while ring.lines.len() > LINES || ring.bytes > BYTES {
            let Some(oldest) = ring.lines.pop_front() else { return };
            ring.bytes -= oldest.text.len();
        }
    }
}

impl<'writer> MakeWriter<'writer> for Recent {
    type Writer = LineWriter;

    fn make_writer(&'writer self) -> LineWriter {
        LineWriter { recent: self.clone(), level: "INFO" }
    }

    fn make_writer_for(&'writer self, metadata: &Metadata<'_>) -> LineWriter {
        LineWriter { recent: self.clone(), level: metadata.level().as_str() }
    }
}

/// Takes one line.
pub struct LineWriter {
    recent: Recent,
    level: &'static str,
}

impl Write for LineWriter {
    /// The layer writes a line at once.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.recent.push(self.level, &String::from_utf8_lossy(line));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    fn all(recent: &Recent) -> Vec<Line> {
        recent.after(0, usize::MAX, usize::MAX)
    }

    #[test]
    fn lines_have_their_level_and_the_text_of_the_log() {
        let recent = Recent::default();
        let subscriber = tracing_subscriber::registry().with(recent.layer());
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::error_span!("request", id = "chat-1");
            span.in_scope(|| tracing::info!(status = 200, "request finished"));
            tracing::warn!("two\nlines \x1b[31m");
        });
        let lines = all(&recent);
        let ends: Vec<_> = lines.iter().map(|line| (line.level, line.text.as_ref())).collect();
        assert_eq!(ends.len(), 2, "{ends:?}");
        assert_eq!((ends[0].0, ends[1].0), ("INFO", "WARN"));
        assert!(ends[0].1.ends_with("request finished status=200 id=chat-1"), "{ends:?}");
        assert!(ends[1].1.ends_with("two\\nlines \\u{1b}[31m"), "{ends:?}");
        assert_eq!(lines[1].number, lines[0].number + 1);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let recent = Recent::default();
        for _ in 0..LINES + 5 {
            recent.push("INFO", "short\n");
        }
        assert_eq!(all(&recent).len(), LINES);
        recent.push("INFO", &"é".repeat(LINE_BYTES));
        let lines = all(&recent);
        let longest = &lines.last().unwrap().text;
        assert!(longest.len() <= LINE_BYTES + '…'.len_utf8() && longest.ends_with('…'));
        for _ in 0..LINES {
            recent.push("INFO", &"x".repeat(LINE_BYTES));
        }
        let bytes: usize = all(&recent).iter().map(|line| line.text.len()).sum();
        assert!(bytes <= BYTES && bytes > BYTES - 2 * LINE_BYTES, "{bytes}");
    }

    #[test]
    fn lines_are_read_in_pages_without_gaps() {
        let recent = Recent::default();
        (0..10).for_each(|number| recent.push("INFO", &format!("line {number}")));
        let (mut read, mut after) = (Vec::new(), 0);
        loop {
            let page = recent.after(after, 4, 20);
            let Some(last) = page.last() else { break };
            after = last.number;
            assert!(page.len() <= 4);
            read.extend(page.iter().map(|line| line.text.to_string()));
        }
        let expected: Vec<_> = (0..10).map(|number| format!("line {number}")).collect();
        assert_eq!(read, expected);
        // A line that is longer than a page is one.
        assert_eq!(recent.after(0, 4, 1).len(), 1);
        // A reader of an earlier process gets all lines of this one.
        assert_eq!(recent.after(all(&recent)[0].number - 1, 100, 1000).len(), 10);
        let last = all(&recent).last().unwrap().number;
        assert!(recent.after(last, 4, 20).is_empty());
        // Of one that ran while the clock was ahead: its number would hide all lines until the clock is there again.
        for later in [last + 1, u64::MAX] {
            assert_eq!(recent.after(later, 100, 1000).len(), 10, "{later}");
        }
    }
}
