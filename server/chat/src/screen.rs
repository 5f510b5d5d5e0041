//! Prints replies: reasoning dimmed or folded, then the answer, then tokens and speed.

use std::borrow::Cow;
use std::io::{Result, Write};
use std::time::Duration;

use crate::client::{End, Piece};

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";
/// Returns to the beginning of the line and clears it.
const CLEAR_LINE: &str = "\r\x1b[K";

/// What is printed at the end of the current line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Line {
    /// Nothing.
    #[default]
    Empty,
    /// Text of the reasoning, dimmed.
    Reasoning,
    /// The count that stands for folded reasoning.
    Count,
    /// Text of the answer.
    Answer,
}

/// Prints the replies of a chat to `out`.
#[derive(Debug)]
pub struct Screen<W> {
    out: W,
    /// Whether `out` is a terminal: reasoning is dimmed there.
    styled: bool,
    folded: bool,
    line: Line,
    /// That of the last reply.
    reasoning: String,
}

impl<W: Write> Screen<W> {
    /// Prints to `out`; `styled` uses escape sequences of terminals.
    pub fn new(out: W, styled: bool) -> Self {
        Self { out, styled, folded: false, line: Line::Empty, reasoning: String::new() }
    }

    /// Where it prints.
    pub fn out(&mut self) -> &mut W {
        &mut self.out
    }

    /// Begins a reply.
    pub fn begin(&mut self) {
        self.reasoning.clear();
        self.line = Line::Empty;
    }

    /// Prints a piece of the reply.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn piece(&mut self, piece: &Piece) -> Result<()> {
        match piece {
            Piece::Reasoning(text) => {
                self.reasoning.push_str(text);
                if self.folded { self.count() } else { self.dim(text, Line::Reasoning) }?;
            }
            Piece::Answer(text) => {
                let text = match self.line {
                    Line::Answer => text.as_str(),
                    // Models begin the answer with empty lines after their reasoning.
                    _ => text.trim_start_matches('\n'),
                };
                if text.is_empty() {
                    return Ok(());
                }
                self.end_reasoning()?;
                self.line = Line::Answer;
                write!(self.out, "{}", printable(text))?;
            }
            Piece::End(_) => {}
        }
        self.out.flush()
    }

    /// Prints what a whole reply took: `first` to its first piece, `rest` from there to its end.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn end(&mut self, end: &End, first: Duration, rest: Duration) -> Result<()> {
        self.end_reply()?;
        let End { reason, tokens, reasoning_tokens, prompt_tokens, cached_tokens, notes } = end;
        let mut line = format!("{tokens} tokens");
        if *reasoning_tokens > 0 {
            line += &format!(" ({reasoning_tokens} of reasoning)");
        }
        if let Some(speed) = speed(*tokens, rest) {
            line += &format!(", {speed:.1} tokens/s");
        }
        line += &format!(", {:.2} s to the first", first.as_secs_f64());
        if *cached_tokens > 0 {
            line += &format!(", {cached_tokens} of {prompt_tokens} prompt tokens from saved state");
        }
        if reason == "length" {
            line += "; cut off at the limit of tokens";
        }
        self.remark(&line)?;
        notes.iter().try_for_each(|note| self.remark(note))
    }

    /// Ends a reply that was stopped.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn stopped(&mut self) -> Result<()> {
        self.end_reply()?;
        self.remark("stopped")
    }

    /// Ends a reply that failed.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn failed(&mut self, error: &anyhow::Error) -> Result<()> {
        self.end_reply()?;
        let text = steersman_log::without_numbers_of_errors(&format!("{error:#}"));
        writeln!(self.out, "error: {}", printable(&text))
    }

    /// Shows or hides the reasoning from now on; shows that of the last reply.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn fold(&mut self) -> Result<()> {
        self.folded = !self.folded;
        if self.folded {
            return self.remark("reasoning is hidden");
        }
        let last = std::mem::take(&mut self.reasoning);
        if last.is_empty() {
            self.remark("reasoning is shown")?;
        } else {
            self.remark(last.trim())?;
        }
        self.reasoning = last;
        Ok(())
    }

    /// Prints a line that is not from the model.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn remark(&mut self, text: &str) -> Result<()> {
        self.dim(text, Line::Empty)?;
        writeln!(self.out)
    }

    fn dim(&mut self, text: &str, line: Line) -> Result<()> {
        self.line = line;
        let text = printable(text);
        if self.styled {
            // A line at a time: some terminals end the style with the line.
            for (index, part) in text.split('\n').enumerate() {
                let newline = if index > 0 { "\n" } else { "" };
                write!(self.out, "{newline}{DIM}{part}{PLAIN}")?;
            }
            return Ok(());
        }
        write!(self.out, "{text}")
    }

    /// Counts folded reasoning, on terminals.
    fn count(&mut self) -> Result<()> {
        if self.styled {
            let characters = self.reasoning.chars().count();
            write!(self.out, "{CLEAR_LINE}")?;
            self.dim(&format!("reasoning: {characters} characters"), Line::Count)?;
        }
        Ok(())
    }

    fn end_reasoning(&mut self) -> Result<()> {
        match self.line {
            Line::Reasoning => writeln!(self.out, "\n"),
            Line::Count => write!(self.out, "{CLEAR_LINE}"),
            Line::Empty | Line::Answer => Ok(()),
        }
    }

    fn end_reply(&mut self) -> Result<()> {
        match std::mem::take(&mut self.line) {
            Line::Reasoning | Line::Answer => writeln!(self.out),
            Line::Count => write!(self.out, "{CLEAR_LINE}"),
            Line::Empty => Ok(()),
        }
    }
}

/// Shortest time over which a rate says something: a client may get a short reply at once.
const MEASURABLE: Duration = Duration::from_millis(20);

/// Tokens a second after the first one; `None` if that is too short to measure.
fn speed(tokens: u64, rest: Duration) -> Option<f64> {
    let measured = tokens >= 2 && rest >= MEASURABLE;
    measured.then(|| (tokens - 1) as f64 / rest.as_secs_f64())
}

/// Text without control characters besides line breaks and tabs: a model must not be able to control the terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    let controls = |c: char| c.is_control() && c != '\n' && c != '\t';
    if text.contains(controls) { text.replace(controls, "\u{fffd}").into() } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(screen: &mut Screen<Vec<u8>>) {
        screen.begin();
        for text in ["Let me", " think.\n"] {
            screen.piece(&Piece::Reasoning(text.into())).unwrap();
        }
        for text in ["\n\n", "Rome", "."] {
            screen.piece(&Piece::Answer(text.into())).unwrap();
        }
        let end = End { reason: "stop".into(), tokens: 11, reasoning_tokens: 5, ..End::default() };
        screen.end(&end, Duration::from_millis(250), Duration::from_secs(2)).unwrap();
    }

    fn printed(screen: &mut Screen<Vec<u8>>) -> String {
        String::from_utf8(std::mem::take(screen.out())).unwrap()
    }

    #[test]
    fn reasoning_is_dimmed_and_the_answer_is_not() {
        let mut screen = Screen::new(Vec::new(), true);
        reply(&mut screen);
        let text = printed(&mut screen);
        assert!(text.starts_with("\x1b[2mLet me\x1b[0m\x1b[2m think.\x1b[0m"), "{text:?}");
        assert!(text.contains("\nRome.\n"), "{text:?}");
    }

    #[test]
    fn the_speed_counts_tokens_after_the_first() {
        let mut screen = Screen::new(Vec::new(), false);
        reply(&mut screen);
        let text = printed(&mut screen);
        let line = "\n11 tokens (5 of reasoning), 5.0 tokens/s, 0.25 s to the first\n";
        assert!(text.ends_with(line), "{text:?}");
        assert!(!text.contains('\x1b'), "{text:?}");
        assert_eq!(speed(1, Duration::from_secs(1)), None);
    }

    #[test]
    fn folded_reasoning_is_counted_and_shown_on_demand() {
        let mut screen = Screen::new(Vec::new(), true);
        screen.fold().unwrap();
        reply(&mut screen);
        let text = printed(&mut screen);
        assert!(!text.contains("Let me"), "{text:?}");
        assert!(text.contains("reasoning: 14 characters\x1b[0m\r\x1b[KRome."), "{text:?}");
        screen.fold().unwrap();
        assert!(printed(&mut screen).contains("Let me think."));
    }

    #[test]
    fn a_model_cannot_control_the_terminal() {
        assert_eq!(
            printable("a\x1b]0;title\x07\tb\nc\u{9b}"),
            "a\u{fffd}]0;title\u{fffd}\tb\nc\u{fffd}"
        );
    }
}
