//! The policy `no-repeat`: a loop is rewound to its first block, and sampling is warmer for a while.
//!
//! The token with which the repeats began is banned once, so that greedy decoding takes another way too. After that
//! the temperature returns to what it was. A loop that comes back too often closes the reasoning, or ends the answer. A
//! client that streams has the repeats already: they stay, and only the sampling changes.

use steersman_policy::{
    Action, Ban, Labels, LoopRule, ParamsView, Phase, Plan, Policy, PreparedParams, RequestView,
    SamplingChange, SamplingPatch, Step, Summary, note, read_params,
};

/// Loops that are rewound without the parameter `times`.
const TIMES: u32 = 2;

/// Temperature after a rewind without the parameter `temperature`.
const TEMPERATURE: f32 = 0.9;

/// Tokens for which it holds without the parameter `cool_down`.
const COOL_DOWN: u32 = 64;

/// Tokens between checkpoints of the reply.
const CHECKPOINT_EVERY: u32 = 128;

/// Thresholds of the detector.
const LOOPS: LoopRule = LoopRule { max_period: 512, repeats: 3, min_tokens: 48, similarity: 0.9 };

/// Text after reasoning that is closed.
const HINT: &str = "**Final Answer:**\n\n";

/// The policy `no-repeat`, with the state of one request.
#[derive(Default)]
pub struct NoRepeat {
    settings: Settings,
    loops: u32,
}

/// The parameters.
struct Settings {
    times: u32,
    temperature: f32,
    cool_down: u32,
    problems: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        let (times, temperature, cool_down) = (TIMES, TEMPERATURE, COOL_DOWN);
        Self { times, temperature, cool_down, problems: Vec::new() }
    }
}

impl Settings {
    fn parse(params: &[(String, String)]) -> Self {
        let mut settings = Self::default();
        settings.problems = read_params(params, |name, text| match name {
            "times" => Some(text.parse().map(|times| settings.times = times).is_ok()),
            "temperature" => {
                let parsed = text.parse().ok().filter(|value| (0.0..=2.0).contains(value));
                settings.temperature = parsed.unwrap_or(TEMPERATURE);
                Some(parsed.is_some())
            }
            "cool_down" => {
                let parsed = text.parse().ok().filter(|tokens| *tokens > 0);
                settings.cool_down = parsed.unwrap_or(COOL_DOWN);
                Some(parsed.is_some())
            }
            _ => None,
        });
        settings
    }
}

impl Policy for NoRepeat {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let problems = Settings::parse(&params.params).problems;
        PreparedParams { problems, ..PreparedParams::default() }
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        self.settings = Settings::parse(&request.params);
        Plan {
            loops: Some(LOOPS),
            // Events come before the text that they are about is long gone.
            every: 16,
            checkpoint_every: CHECKPOINT_EVERY,
            note: note(&self.settings.problems),
            ..Plan::default()
        }
    }

    fn on_step(&mut self, step: Step) -> Vec<Action> {
        let Some(found) = step.loop_found else { return Vec::new() };
        self.loops += 1;
        if self.loops > self.settings.times {
            return match step.phase {
                Phase::Reasoning => vec![Action::CloseReasoning(HINT.into())],
                Phase::Answer | Phase::ToolCall => {
                    vec![Action::Stop("the answer repeats itself".into())]
                }
            };
        }
        let Settings { temperature, cool_down, .. } = self.settings;
        let rewound = found.period * found.repeats.saturating_sub(1);
        let sampling = SamplingPatch { temperature: Some(temperature), ..SamplingPatch::default() };
        let mut actions = vec![
            Action::Rewind(rewound),
            Action::Sampling(SamplingChange { sampling, steps: cool_down }),
        ];
        // Each block begins with the same token, if the repeats are equal.
        let first = step.tokens.len().checked_sub(found.period as usize).map(|at| step.tokens[at]);
        if let Some(first) = first.filter(|_| found.exact) {
            actions.push(Action::Ban(Ban { tokens: vec![first], steps: 1 }));
        }
        actions
    }

    fn on_finish(&mut self, _: Summary) -> Labels {
        match self.loops {
            0 => Labels::new(),
            loops => vec![("loops".into(), loops.to_string())],
        }
    }
}

steersman_policy::export!(NoRepeat, without on_tool_call);

#[cfg(test)]
mod tests {
    use steersman_policy::LoopReport;

    use super::*;

    #[test]
    fn a_loop_is_rewound_to_its_first_block_and_ends_the_answer_when_it_returns() {
        let mut policy = NoRepeat::default();
        let params = vec![("times".to_owned(), "1".to_owned())];
        policy.on_request(RequestView { params, ..RequestView::default() });
        let found = LoopReport { period: 3, repeats: 4, exact: true };
        let step = Step { tokens: vec![9, 1, 2, 3], loop_found: Some(found), ..Step::default() };
        assert_eq!(policy.on_step(Step::default()), []);
        let actions = policy.on_step(step.clone());
        assert_eq!(actions[0], Action::Rewind(9));
        assert_eq!(actions[2], Action::Ban(Ban { tokens: vec![1], steps: 1 }));
        let again = policy.on_step(step.clone());
        assert_eq!(again, [Action::Stop("the answer repeats itself".into())]);
        let reasons = Step { phase: Phase::Reasoning, ..step };
        assert_eq!(policy.on_step(reasons), [Action::CloseReasoning(HINT.into())]);
    }
}
