//! Where in a conversation its state is worth saving, and what its next request will begin with.

use std::cmp::Reverse;

use super::Decoder;
use crate::error::Result;
use crate::policy::{Anchor, Plan};
use crate::prefix::Retention;
use crate::request::{Message, Request};

/// Tokens of the longest generation prompt: what templates put behind the last message.
const GENERATION_PROMPT: usize = 16;

impl Decoder {
    /// Positions of `prompt`, which is `request` rendered with `thinking`, at which others may join
    /// it, ascending, and how long each is kept: those that `plan` names, else all.
    ///
    /// The end of tools and system text, which other conversations share; the end of each message,
    /// where an edit or a branch leaves the conversation, and the last of which the next turn shares
    /// (the generation prompt behind it differs from what the client will send back); and, in long
    /// messages, every so many tokens. Where a model can resume anywhere, the end of the prompt has
    /// all of these in it, and a plan alone has reason to keep another.
    ///
    /// # Errors
    /// [`crate::Error::Template`] as rendering the request itself.
    pub(super) fn anchors(
        &self,
        request: &Request,
        thinking: Option<bool>,
        prompt: &[u32],
        plan: &Plan,
    ) -> Result<Vec<(usize, Retention)>> {
        let every = self.prefixes.every();
        if every.is_none() && plan.keep.is_none() {
            return Ok(vec![(prompt.len(), Retention::default())]);
        }
        let mut anchors = Vec::new();
        if let Some(keep) = kept(plan, Anchor::System) {
            let system = request.messages.iter().take_while(|m| is_system(m)).count();
            // Templates may refuse so short a conversation; then there is no such anchor.
            let head = self.beginning(request, system, thinking, "user").unwrap_or_default();
            anchors.push((shared(&head, prompt), keep));
        }
        let is_end = |token: &u32| self.text.eos().contains(token);
        let ends = prompt.iter().enumerate().filter(|(_, token)| is_end(token));
        let mut turns: Vec<usize> = ends.map(|(at, _)| at + 1).collect();
        let end = turns.pop_if(|last| *last + GENERATION_PROMPT >= prompt.len());
        if let Some(keep) = kept(plan, Anchor::Prompt) {
            let at = match (every, end) {
                (None, _) => prompt.len(),
                (_, Some(end)) => end,
                // A template whose messages do not end with the token that ends replies.
                (_, None) => {
                    let (tools, variables) = (&request.tools, &request.template_variables);
                    let body =
                        self.text.render(&request.messages, tools, variables, thinking, false)?;
                    shared(&self.text.encode(&body)?, prompt)
                }
            };
            anchors.push((at, keep));
        }
        if let Some(keep) = kept(plan, Anchor::Turns) {
            if every.is_none() {
                // The last of them has all others in it.
                turns.drain(..turns.len().saturating_sub(1));
            }
            // Of short messages not every one is worth a state.
            let (apart, regular) = every.map_or((1, usize::MAX), |every| (every / 8, every));
            for at in turns.into_iter().rev().chain((regular..prompt.len()).step_by(regular)) {
                if !anchors.iter().any(|(anchor, _)| anchor.abs_diff(at) < apart) {
                    anchors.push((at, keep));
                }
            }
        }
        anchors.retain(|&(at, _)| at > 0 && (at < prompt.len() || every.is_none()));
        // Of two in one place the longer.
        anchors.sort_unstable_by_key(|&(at, keep)| (at, Reverse(keep.seconds)));
        anchors.dedup_by_key(|&mut (at, _)| at);
        Ok(anchors)
    }

    /// What every prompt begins with whose conversation goes on from the first `count` messages of
    /// `request` with one of `role`: what those that differ only in their next word have in common, whatever the template
    /// makes of all before.
    ///
    /// # Errors
    /// [`crate::Error::Template`] when the template refuses such a conversation.
    pub(super) fn beginning(
        &self,
        request: &Request,
        count: usize,
        thinking: Option<bool>,
        role: &str,
    ) -> Result<Vec<u32>> {
        let mut messages = request.messages[..count].to_vec();
        messages.push(Message { role: role.into(), ..Message::default() });
        let mut render = |word: &str| -> Result<Vec<u32>> {
            messages[count].content = word.into();
            let variables = &request.template_variables;
            let text = self.text.render(&messages, &request.tools, variables, thinking, true)?;
            self.text.encode(&text)
        };
        let (mut a, b) = (render("a")?, render("b")?);
        a.truncate(shared(&a, &b));
        Ok(a)
    }
}

/// For how long `plan` keeps the state at these anchors; none where it does not.
pub(super) fn kept(plan: &Plan, at: Anchor) -> Option<Retention> {
    let Some(keeps) = &plan.keep else { return Some(Retention::default()) };
    let seconds = keeps.iter().filter(|keep| keep.at == at).map(|keep| keep.seconds).max();
    seconds.map(|seconds| Retention { seconds })
}

pub(super) fn is_system(message: &Message) -> bool {
    matches!(message.role.as_str(), "system" | "developer")
}

/// Length of the common prefix.
fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
