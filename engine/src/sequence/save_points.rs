//! The save points of a prompt, and the prefix that the next request will share.

use std::cmp::Reverse;

use super::prepare::Preparer;
use crate::error::Result;
use crate::policy::{self, MAX_RETENTION_SECONDS, Plan, SavePoint};
use crate::prefix::Retention;
use crate::request::{Message, Request};
use crate::text::Variables;

/// Most tokens of a generation prompt, which templates put after the last message.
const GENERATION_PROMPT: usize = 16;

impl Preparer {
    /// The save points of `prompt`, which is `request` rendered with `reasoning`, ascending, each with
    /// its retention: those that `plan` names, else all.
    ///
    /// They are the end of tools and system text, which other conversations share; the end of each
    /// message, where an edit or a branch continues (the next turn continues from the last one: it
    /// does not contain the generation prompt); and positions at regular distances in long messages.
    /// A model that can resume anywhere needs the end of the prompt only, unless the plan retains
    /// others.
    pub fn save_points(
        &self,
        request: &Request,
        reasoning: Option<bool>,
        prompt: &[u32],
        plan: &Plan,
    ) -> Result<Vec<(usize, Retention)>> {
        let every = self.save_interval;
        if request.prompt.is_some() {
            // There are no messages: a prompt may continue anywhere.
            let regular = (1..).map_while(|i| Some(i * every?)).take_while(|at| *at < prompt.len());
            let end = every.is_none().then_some(prompt.len());
            return Ok(regular.chain(end).map(|at| (at, Retention::default())).collect());
        }
        if every.is_none() && plan.retain.is_none() && request.retain.is_empty() {
            return Ok(vec![(prompt.len(), Retention::default())]);
        }
        let mut save_points = Vec::new();
        let retention = |at| retention(plan, &request.retain, at);
        if let Some(retention) = retention(SavePoint::System) {
            let system = request.messages.iter().take_while(|m| m.is_system()).count();
            // A template may refuse such a short conversation; then there is no such save point.
            let head = self.shared_prefix(request, system, reasoning, "user").unwrap_or_default();
            save_points.push((common_prefix(&head, prompt), retention));
        }
        let is_end = |token: &u32| self.text.eos().contains(token);
        let ends = prompt.iter().enumerate().filter(|(_, token)| is_end(token));
        let mut turns: Vec<usize> = ends.map(|(at, _)| at + 1).collect();
        let end = turns.pop_if(|last| *last + GENERATION_PROMPT >= prompt.len());
        if let Some(retention) = retention(SavePoint::Prompt) {
            let at = match (every, end) {
                (None, _) => prompt.len(),
                (_, Some(end)) => end,
                // The template does not end messages with the end-of-reply token.
                (_, None) => {
                    let body = self.text.prompt(&Variables {
                        add_generation_prompt: false,
                        ..Variables::of(request, reasoning)
                    })?;
                    common_prefix(&body, prompt)
                }
            };
            save_points.push((at, retention));
        }
        if let Some(retention) = retention(SavePoint::Turns) {
            if every.is_none() {
                // The last of them includes all others.
                turns.drain(..turns.len().saturating_sub(1));
            }
            // Short messages are skipped.
            let (distance, regular) = every.map_or((1, usize::MAX), |every| (every / 8, every));
            for at in turns.into_iter().rev().chain((regular..prompt.len()).step_by(regular)) {
                if !save_points.iter().any(|(point, _)| point.abs_diff(at) < distance) {
                    save_points.push((at, retention));
                }
            }
        }
        save_points.retain(|&(at, _)| at > 0 && (at < prompt.len() || every.is_none()));
        // If two save points share a position, the one with the longer retention stays.
        save_points.sort_unstable_by_key(|&(at, retention)| (at, Reverse(retention.seconds)));
        save_points.dedup_by_key(|&mut (at, _)| at);
        Ok(save_points)
    }

    /// The prefix of every prompt that continues the first `count` messages of `request` with a message
    /// of `role`: the common prefix of two prompts that differ in the first word of that message. This
    /// holds for any template.
    pub fn shared_prefix(
        &self,
        request: &Request,
        count: usize,
        reasoning: Option<bool>,
        role: &str,
    ) -> Result<Vec<u32>> {
        let mut messages = request.messages[..count].to_vec();
        messages.push(Message { role: role.into(), ..Message::default() });
        let mut render = |word: &str| -> Result<Vec<u32>> {
            messages[count].content = word.into();
            let variables = Variables::of(request, reasoning);
            self.text.prompt(&Variables { messages: &messages, ..variables })
        };
        let (mut a, b) = (render("a")?, render("b")?);
        a.truncate(common_prefix(&a, &b));
        Ok(a)
    }
}

/// Retention of these save points under `plan`; `None` if they are not saved. The `wish` of the client
/// extends it.
pub fn retention(plan: &Plan, wish: &[policy::Retention], at: SavePoint) -> Option<Retention> {
    let longest = |list: &[policy::Retention]| {
        list.iter().filter(|entry| entry.at == at).map(|entry| entry.seconds).max()
    };
    let planned = plan.retain.as_ref().map_or(Some(0), |list| longest(list))?;
    let seconds = planned.max(longest(wish).unwrap_or(0));
    Some(Retention { seconds: seconds.min(MAX_RETENTION_SECONDS) })
}

/// Length of the common prefix.
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retention_takes_the_longest_time_of_a_save_point_and_at_most_a_day() {
        let entry = |at, seconds| policy::Retention { at, seconds };
        let retain = vec![
            entry(SavePoint::System, 7),
            entry(SavePoint::System, 9),
            entry(SavePoint::Reply, u32::MAX),
        ];
        let plan = Plan { retain: Some(retain), ..Plan::default() };
        let seconds = |at| retention(&plan, &[], at).map(|retention| retention.seconds);
        assert_eq!(seconds(SavePoint::System), Some(9));
        assert_eq!(seconds(SavePoint::Reply), Some(86_400));
        assert_eq!(seconds(SavePoint::Prompt), None);
        let all = retention(&Plan::default(), &[], SavePoint::Prompt).map(|r| r.seconds);
        assert_eq!(all, Some(0), "without a list everything is saved");
        // A client extends retention, and saves nothing that the plan does not.
        let wish = [entry(SavePoint::System, 300), entry(SavePoint::Prompt, u32::MAX)];
        let wished = |plan: &Plan| {
            [SavePoint::System, SavePoint::Prompt, SavePoint::Reply]
                .map(|at| retention(plan, &wish, at).map(|retention| retention.seconds))
        };
        assert_eq!(wished(&plan), [Some(300), None, Some(86_400)]);
        assert_eq!(wished(&Plan::default()), [Some(300), Some(86_400), Some(0)]);
    }
}
