//! Where calls, reasoning and answers begin and end in the text of a reply: tags that are no tokens, and what
//! follows a tag that the model left out.

use super::super::stop::partial;
use super::super::tokenizer::Marker;
use super::Reply;
use super::call::Call;

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

/// The tags around the answer of a model that spells its reasoning: Granite 3.3.
const FRAME: [&str; 2] = ["<response>", "</response>"];

/// What a text that is searched for is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spelled {
    /// A tag.
    Marker(Marker),
    /// What follows a tag of calls.
    Untagged,
    /// The tag before an answer.
    OpenAnswer,
    /// The tag after it.
    CloseAnswer,
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

    /// The first text in `text` that begins or ends a part of the reply: where it is, itself, and what it is.
    pub(super) fn find_tag(&self, text: &str) -> Option<(usize, &'static str, Spelled)> {
        let tags = self.tags().into_iter().flatten();
        let found = tags.filter_map(|(tag, kind)| Some((text.find(tag)?, tag, kind)));
        found.filter(|(at, _, kind)| self.may_stand(*kind, &text[..*at])).min_by_key(|one| one.0)
    }

    /// Whether a tag may stand after `before`, the text that is not processed yet: one that begins reasoning or the
    /// answer stands before all of the answer, or is quoted.
    fn may_stand(&self, kind: Spelled, before: &str) -> bool {
        let begins = matches!(kind, Spelled::Marker(Marker::OpenReasoning) | Spelled::OpenAnswer);
        !begins || before.trim().is_empty()
    }

    /// Length of the end of `text` that may be the beginning of a tag.
    pub(super) fn partial_tag(&self, text: &str) -> usize {
        let tags = self.tags().into_iter().flatten();
        tags.map(|(tag, _)| partial(text, tag)).max().unwrap_or(0)
    }

    /// The texts that may come next, of those that begin or end a part of the reply.
    fn tags(&self) -> [Option<(&'static str, Spelled)>; 4] {
        let format = self.tokenizer.format();
        let spelled = match self.call.is_some() && format.close.is_some() {
            true => Marker::CloseCall,
            false => Marker::OpenCall,
        };
        let of_marker = |marker| (self.tokenizer.marker_text(marker), Spelled::Marker(marker));
        let tag = self.spells_tags.then(|| of_marker(spelled));
        let untagged = format.untagged.filter(|_| self.reads_untagged && self.call.is_none());
        let untagged = untagged.map(|text| (text, Spelled::Untagged));
        if !self.tokenizer.spells_reasoning() || self.call.is_some() {
            return [tag, untagged, None, None];
        }
        let [open, close] = FRAME;
        let (reasoning, frame) = match (self.is_reasoning, self.answer.is_blank()) {
            (true, _) => (Some(Marker::CloseReasoning), None),
            (false, true) => (Some(Marker::OpenReasoning), Some((open, Spelled::OpenAnswer))),
            (false, false) if self.answer.is_framed => (None, Some((close, Spelled::CloseAnswer))),
            (false, false) => (None, None),
        };
        [tag, untagged, reasoning.map(of_marker), frame]
    }

    /// Adds whole characters; finds the tags of calls if they are not tokens.
    pub(super) fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.add_raw(text);
        if self.message.is_some() {
            return self.message_text(text);
        }
        let Some(held) = self.spelled.as_mut().map(std::mem::take) else {
            return self.add_to_phase(text);
        };
        self.spans.push_back((self.tokens.saturating_sub(1), text.len()));
        let mut rest = held + text;
        loop {
            let Some((at, tag, kind)) = self.find_tag(&rest) else {
                let held = rest.split_off(rest.len() - self.partial_tag(&rest));
                self.consume(rest.len());
                self.add_to_phase(&rest);
                rest = std::mem::take(&mut self.leftover);
                if rest.is_empty() {
                    self.spelled = Some(held);
                    return;
                }
                rest += &held;
                continue;
            };
            self.add_to_phase(&rest[..at]);
            self.consume(at);
            rest.drain(..at);
            if !self.leftover.is_empty() {
                rest.insert_str(0, &std::mem::take(&mut self.leftover));
                continue;
            }
            self.tag = self.spans.front().map_or(self.tokens, |&(before, _)| before);
            match kind {
                Spelled::Marker(marker) => self.marker(marker),
                Spelled::OpenAnswer => {
                    self.answer.drop_blank();
                    self.answer.is_framed = true;
                }
                Spelled::CloseAnswer => self.answer.is_framed = false,
                Spelled::Untagged => {
                    // Text may be quoted, a token is not.
                    let is_token = self.tokenizer.id(tag).is_some();
                    if !self.is_reasoning && (is_token || self.answer.place.may_begin_call()) {
                        self.call = Some(Call::untagged(self.tag));
                    }
                    self.add_to_phase(tag);
                }
            }
            self.consume(tag.len());
            rest.drain(..tag.len());
        }
    }

    /// Removes `bytes` from the front of `spans`.
    fn consume(&mut self, mut bytes: usize) {
        while let Some((_, left)) = self.spans.front_mut() {
            if *left > bytes {
                *left -= bytes;
                return;
            }
            bytes -= *left;
            self.spans.pop_front();
        }
    }
}
