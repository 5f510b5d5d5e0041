//! Removes white space next to markers: `<think>\nHm.\n</think>\n\nYes.` becomes `Hm.` and `Yes.`
//!
//! [`Lead`] drops blank lines after a marker and keeps the indent of the first line with text;
//! [`Tail`] holds white space back until other text follows.
//! White space inside a text is never changed.

/// The start of a text that follows a marker.
#[derive(Debug, Clone, Default)]
pub(super) struct Lead {
    active: bool,
    held: String,
}

impl Lead {
    pub fn new(active: bool) -> Self {
        Self { active, held: String::new() }
    }

    /// Adds text; returns the text to emit.
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

/// The end of a text that may precede a marker.
#[derive(Debug, Clone, Default)]
pub(super) struct Tail {
    held: String,
}

impl Tail {
    /// Adds text; returns the text to emit.
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

    /// Whether no white space is held back.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Takes the white space held back; the caller emits or drops it.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
