//! Where calls begin and end in the text of a reply: tags that are no tokens, and what follows a tag that the
//! model left out.

use super::super::stop::partial;
use super::super::tokenizer::Marker;
use super::Reply;

/// Where in its lines an answer ends.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// Whether the last line has text.
    has_text: bool,
    /// Number of backticks with which the last line begins.
    ticks: usize,
    is_in_code: bool,
}

impl Place {
    /// Whether a line begins here, outside of a block of code.
    pub fn may_begin_call(&self) -> bool {
        !self.has_text && self.ticks == 0 && !self.is_in_code
    }

    /// Adds text.
    pub fn push(&mut self, text: &str) {
        for c in text.chars() {
            match c {
                '\n' => (self.has_text, self.ticks) = (false, 0),
                '`' if !self.has_text => {
                    self.ticks += 1;
                    if self.ticks == 3 {
                        (self.is_in_code, self.has_text) = (!self.is_in_code, true);
                    }
                }
                c => self.has_text |= !c.is_whitespace() || self.ticks > 0,
            }
        }
    }
}

impl Reply {
    /// Reads calls whose tag the model left out. No grammar begins with them, so they are text in replies that
    /// have one.
    pub fn read_untagged_calls(&mut self) {
        self.reads_untagged = !self.schemas.is_empty();
        if self.reads_untagged && self.tokenizer.format().untagged.is_some() {
            self.spelled.get_or_insert_default();
        }
    }

    /// The first text in `text` that begins or ends a call: where it is, itself, and its marker, which what
    /// follows a tag has none of.
    pub(super) fn find_tag(&self, text: &str) -> Option<(usize, &'static str, Option<Marker>)> {
        let tags = self.tags().into_iter().flatten();
        tags.filter_map(|(tag, marker)| Some((text.find(tag)?, tag, marker)))
            .min_by_key(|one| one.0)
    }

    /// Length of the end of `text` that may be the beginning of a tag.
    pub(super) fn partial_tag(&self, text: &str) -> usize {
        let tags = self.tags().into_iter().flatten();
        tags.map(|(tag, _)| partial(text, tag)).max().unwrap_or(0)
    }

    /// The texts that begin a call, or end the one that is open.
    fn tags(&self) -> [Option<(&'static str, Option<Marker>)>; 2] {
        let format = self.tokenizer.format();
        let spelled = match self.call.is_some() && format.close.is_some() {
            true => Marker::CloseCall,
            false => Marker::OpenCall,
        };
        let tag = self.spells_tags.then(|| (self.tokenizer.marker_text(spelled), Some(spelled)));
        let untagged = format.untagged.filter(|_| self.reads_untagged && self.call.is_none());
        [tag, untagged.map(|text| (text, None))]
    }
}
