//! The native policy, which takes over when a policy has failed: a static budget and a loop guard.
//!
//! It closes reasoning that loops or has used its budget, and ends an answer that is certainly a
//! loop. Tasks and hints are decisions and belong to guests.

use crate::contract::{Action, Answer, Call, LoopRule, Phase, Plan, RequestView, Step};

/// Limit on reasoning tokens.
const REASONING_BUDGET: u32 = 32_768;

/// Tokens reserved for the answer, at most half of those that the reply can have.
const ANSWER_RESERVE: u32 = 1024;

/// Text after reasoning that was closed. `</think>` alone does not end a loop: it continues in the
/// answer.
pub const HINT: &str = "**Final Answer:**\n\n";

/// Tokens that exact repeats must cover in an answer before it is stopped: long tables of equal rows
/// are legitimate.
pub const ANSWER_LOOP_TOKENS: u32 = 2048;

/// Thresholds of the loop guard.
const LOOPS: LoopRule =
    LoopRule { max_period: 1024, repeats: 2, min_tokens: 128, similarity: 0.87 };

/// Answers a call. The native policy has no state: `decode` holds the plan that applies, this one or
/// that of the failed policy.
pub fn answer(call: &Call<'_>) -> Answer {
    match call {
        Call::Request(request) => Answer::Request(plan(request)),
        Call::Step(step) => Answer::Step(act(step)),
        call => call.default_answer(),
    }
}

fn plan(request: &RequestView) -> Plan {
    let room = request.max_tokens.unwrap_or(u32::MAX).min(request.context_left);
    let reserve = ANSWER_RESERVE.min(room / 2);
    let budget = request.reasoning_budget.unwrap_or(REASONING_BUDGET).min(REASONING_BUDGET);
    Plan {
        reasoning: if request.can_reason { request.reasoning } else { Some(false) },
        reasoning_budget: Some(budget),
        answer_reserve: Some(reserve),
        loops: Some(LOOPS),
        ..Plan::default()
    }
}

fn act(step: &Step) -> Vec<Action> {
    if step.phase == Phase::Reasoning {
        let close = step.budget_reached || step.loop_found.is_some();
        return if close { vec![Action::CloseReasoning(HINT.into())] } else { Vec::new() };
    }
    match step.loop_found {
        Some(found)
            if found.exact && found.period.saturating_mul(found.repeats) >= ANSWER_LOOP_TOKENS =>
        {
            vec![Action::Stop("the answer is a loop".into())]
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::LoopReport;

    #[test]
    fn closes_reasoning_at_its_budget_or_in_a_loop_and_stops_an_answer_only_in_a_long_exact_loop() {
        let check = |phase, loop_found, budget_reached, expected: &[Action]| {
            let step = Step { phase, loop_found, budget_reached, ..Step::default() };
            assert_eq!(act(&step), expected, "{step:?}");
        };
        let report = |period, repeats, exact| Some(LoopReport { period, repeats, exact });
        let close = [Action::CloseReasoning(HINT.into())];
        let stop = [Action::Stop("the answer is a loop".into())];
        check(Phase::Reasoning, None, true, &close);
        check(Phase::Reasoning, report(23, 9, false), false, &close);
        check(Phase::Reasoning, None, false, &[]);
        check(Phase::Answer, report(11, 9, true), false, &[]);
        check(Phase::Answer, report(11, 500, false), false, &[]);
        check(Phase::Answer, report(11, 187, true), false, &stop);
        check(Phase::ToolCall, report(u32::MAX, 2, true), false, &stop);
    }

    #[test]
    fn plans_the_smaller_budget_and_reserves_half_of_a_short_reply_for_the_answer() {
        let view = RequestView {
            context_left: 600,
            can_reason: true,
            reasoning_budget: Some(100),
            ..RequestView::default()
        };
        let made = plan(&view);
        assert_eq!((made.reasoning_budget, made.answer_reserve), (Some(100), Some(300)));
        let short = RequestView { max_tokens: Some(80), ..view.clone() };
        assert_eq!(plan(&short).answer_reserve, Some(40));
        let made = plan(&RequestView { reasoning_budget: None, ..view });
        assert_eq!((made.reasoning_budget, made.reasoning), (Some(REASONING_BUDGET), None));
        assert_eq!(plan(&RequestView::default()).reasoning, Some(false));
    }
}
