//! What remains when a policy has failed: a static budget and a loop guard, never nothing.
//!
//! It closes a thought that loops or has used its budget up, and ends an answer that is surely a
//! loop. It knows no tasks and no hints but one: those are decisions, and stand in the guest.

use super::{Action, LoopRule, Phase, Plan, Policy, RequestView, Step};
use crate::error::Result;

/// Most tokens of a thought.
pub const THINK_BUDGET: u32 = 32_768;

/// Tokens of the context kept for the answer, where the context is large enough.
pub const ANSWER_RESERVE: u32 = 1024;

/// Text after a thought that was closed. A bare `</think>` does not end a loop: it goes on in the
/// answer.
pub const HINT: &str = "**Final Answer:**\n\n";

/// Tokens that exact repeats must cover in an answer before it is stopped: long tables of equal
/// rows are legitimate, endless ones are not.
pub const ANSWER_LOOP_TOKENS: u32 = 2048;

/// The thresholds of the loop guard.
pub const LOOPS: LoopRule =
    LoopRule { max_period: 1024, repeats: 3, min_tokens: 96, similarity: 0.87 };

/// The native policy. It has no state: the plan in force, its own or that of the policy which it
/// replaces, is kept by `decode`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Native;

impl Policy for Native {
    fn on_request(&mut self, request: &RequestView) -> Result<Plan> {
        let reserve = request.max_tokens.unwrap_or(ANSWER_RESERVE).min(request.context_left / 2);
        Ok(Plan {
            thinking: if request.can_think { request.thinking } else { Some(false) },
            think_budget: Some(request.think_budget.unwrap_or(THINK_BUDGET).min(THINK_BUDGET)),
            answer_reserve: Some(reserve),
            loops: Some(LOOPS),
            ..Plan::default()
        })
    }

    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>> {
        if step.phase == Phase::Think {
            let close = step.budget_reached || step.loop_found.is_some();
            return Ok(if close { vec![Action::CloseThinking(HINT.into())] } else { Vec::new() });
        }
        Ok(match step.loop_found {
            Some(found)
                if found.exact
                    && found.period.saturating_mul(found.repeats) >= ANSWER_LOOP_TOKENS =>
            {
                vec![Action::Stop("the answer is a loop".into())]
            }
            _ => Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::LoopReport;
    use super::*;

    fn act(phase: Phase, loop_found: Option<LoopReport>, budget_reached: bool) -> Vec<Action> {
        let step = Step { phase, loop_found, budget_reached, ..Step::default() };
        Native.on_step(&step).unwrap()
    }

    #[test]
    fn a_thought_ends_at_its_budget_or_in_a_loop_and_an_answer_only_in_a_sure_loop() {
        let report = |period, repeats, exact| Some(LoopReport { period, repeats, exact });
        let close = vec![Action::CloseThinking(HINT.into())];
        let stop = vec![Action::Stop("the answer is a loop".into())];
        assert_eq!(act(Phase::Think, None, true), close);
        assert_eq!(act(Phase::Think, report(23, 9, false), false), close);
        assert_eq!(act(Phase::Think, None, false), []);
        assert_eq!(act(Phase::Answer, report(11, 9, true), false), []);
        assert_eq!(act(Phase::Answer, report(11, 500, false), false), []);
        assert_eq!(act(Phase::Answer, report(11, 187, true), false), stop);
        assert_eq!(act(Phase::ToolCall, report(u32::MAX, 2, true), false), stop);
    }

    #[test]
    fn the_plan_takes_the_smaller_budget_and_leaves_half_of_a_small_context_to_the_answer() {
        let view = RequestView {
            context_left: 600,
            can_think: true,
            think_budget: Some(100),
            ..RequestView::default()
        };
        let plan = Native.on_request(&view).unwrap();
        assert_eq!((plan.think_budget, plan.answer_reserve), (Some(100), Some(300)));
        let plan = Native.on_request(&RequestView { think_budget: None, ..view }).unwrap();
        assert_eq!((plan.think_budget, plan.thinking), (Some(THINK_BUDGET), None));
        let plan = Native.on_request(&RequestView::default()).unwrap();
        assert_eq!(plan.thinking, Some(false));
    }
}
