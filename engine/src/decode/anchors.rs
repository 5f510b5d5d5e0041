//! Where in a conversation its state is worth saving, and what its next request will begin with.

use super::Decoder;
use crate::error::Result;
use crate::request::{Message, Request};

/// Tokens of the longest generation prompt: what templates put behind the last message.
const GENERATION_PROMPT: usize = 16;

impl Decoder {
    /// Positions of `prompt`, which is `request` rendered with `thinking`, at which others may join
    /// it, ascending.
    ///
    /// Where a model can resume anywhere, that is its end. Otherwise: the end of tools and system
    /// text, which other conversations share; the end of each message, where an edit or a branch
    /// leaves the conversation, and the last of which the next turn shares (the generation prompt
    /// behind it differs from what the client will send back); and, in long messages, every so many
    /// tokens.
    ///
    /// # Errors
    /// [`crate::Error::Template`] as rendering the request itself.
    pub(super) fn anchors(
        &self,
        request: &Request,
        thinking: Option<bool>,
        prompt: &[u32],
    ) -> Result<Vec<usize>> {
        let Some(every) = self.prefixes.every() else { return Ok(vec![prompt.len()]) };
        let system = request.messages.iter().take_while(|m| is_system(m)).count();
        let beginning = Request { messages: request.messages[..system].into(), ..request.clone() };
        // Templates may refuse so short a conversation; then there is no such anchor.
        let head = self.beginning(&beginning, thinking, "user").unwrap_or_default();
        let mut anchors = vec![shared(&head, prompt)];

        let is_end = |token: &u32| self.text.eos().contains(token);
        let ends = prompt.iter().enumerate().filter(|(_, token)| is_end(token));
        let turns: Vec<usize> = ends.map(|(at, _)| at + 1).collect();
        match turns.last() {
            Some(&last) if last + GENERATION_PROMPT >= prompt.len() => anchors.push(last),
            // A template whose messages do not end with the token that ends replies.
            _ => {
                let (tools, variables) = (&request.tools, &request.template_variables);
                let body =
                    self.text.render(&request.messages, tools, variables, thinking, false)?;
                anchors.push(shared(&self.text.encode(&body)?, prompt));
            }
        }
        // Of short messages not every one is worth a state.
        let near = |anchors: &[usize], at: usize| {
            anchors.iter().any(|anchor| anchor.abs_diff(at) < every / 8)
        };
        for at in turns.into_iter().rev().chain((every..prompt.len()).step_by(every)) {
            if !near(&anchors, at) {
                anchors.push(at);
            }
        }
        anchors.retain(|&at| at > 0 && at < prompt.len());
        anchors.sort_unstable();
        anchors.dedup();
        Ok(anchors)
    }

    /// What every prompt begins with whose conversation goes on from `request`'s with a message of
    /// `role`: what those that differ only in their next word have in common, whatever the template
    /// makes of all before.
    ///
    /// # Errors
    /// [`crate::Error::Template`] when the template refuses such a conversation.
    pub(super) fn beginning(
        &self,
        request: &Request,
        thinking: Option<bool>,
        role: &str,
    ) -> Result<Vec<u32>> {
        let render = |word: &str| -> Result<Vec<u32>> {
            let mut messages = request.messages.clone();
            let last = Message { role: role.into(), content: word.into(), ..Message::default() };
            messages.push(last);
            let variables = &request.template_variables;
            let text = self.text.render(&messages, &request.tools, variables, thinking, true)?;
            self.text.encode(&text)
        };
        let (mut a, b) = (render("a")?, render("b")?);
        a.truncate(shared(&a, &b));
        Ok(a)
    }
}

fn is_system(message: &Message) -> bool {
    matches!(message.role.as_str(), "system" | "developer")
}

/// Length of the common prefix.
fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
