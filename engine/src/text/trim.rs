//! White space next to markers is not shown: `<think>\nHm.\n</think>\n\nYes.` reads `Hm.`, `Yes.`
//!
//! [`Lead`] drops blank lines behind a marker and keeps the indent of the first line that has
//! something on it; [`Tail`] holds white space back until something follows that is not.
//! Never touches white space inside of a text.

/// The beginning of a text behind a marker.
#[derive(Debug, Clone, Default)]
pub(super) struct Lead {
    active: bool,
    held: String,
}

impl Lead {
    /// Trims what comes next if `active`.
    pub fn new(active: bool) -> Self {
        Self { active, held: String::new() }
    }

    /// Adds text; returns what can be given out.
    pub fn push(&mut self, text: &str) -> String {
        if !self.active {
            return text.into();
        }
        self.held.push_str(text);
        let visible = self.held.find(|c: char| !c.is_whitespace());
        let blank = &self.held[..visible.unwrap_or(self.held.len())];
        let line = blank.rfind('\n').map_or(0, |at| at + 1);
        self.held.drain(..line);
        if visible.is_none() {
            return String::new();
        }
        self.active = false;
        std::mem::take(&mut self.held)
    }
}

/// The end of a text that a marker may follow.
#[derive(Debug, Clone, Default)]
pub(super) struct Tail {
    held: String,
}

impl Tail {
    /// Adds text; returns what can be given out.
    pub fn push(&mut self, text: &str) -> String {
        let end = text.trim_end().len();
        if end == 0 {
            self.held.push_str(text);
            return String::new();
        }
        let shown = std::mem::take(&mut self.held) + &text[..end];
        self.held.push_str(&text[end..]);
        shown
    }

    /// The white space held back; whoever takes it gives it out or drops it.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
