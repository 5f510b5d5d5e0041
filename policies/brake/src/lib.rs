//! The policy `brake`: reasoning ends where the model is about to end it anyway.
//!
//! At the end of each sentence of the reasoning, the probability of the marker that ends it (`</think>`) is compared
//! with that of the likeliest token. A small margin means that the model has its answer and goes on by chance: then the
//! reasoning is closed. The method is ThinkBrake's (arXiv:2510.00546). The model computes nothing for it.

use steersman_policy::{
    Action, Labels, ParamsView, Phase, Plan, Policy, PreparedParams, RequestView, Step, Summary,
    WatchedToken, note, read_params,
};

/// Margin in nats at which the reasoning is closed, without the parameter `margin`.
const MARGIN: f32 = 0.25;

/// Largest margin: the marker is then less likely by a factor of 10^8.
const MOST_MARGIN: f32 = 20.0;

/// Tokens of reasoning before the first comparison, without the parameter `min_tokens`.
const MIN_TOKENS: u32 = 32;

/// Sentences in a row with such a margin, without the parameter `times`.
const TIMES: u32 = 1;

/// Texts that end a sentence or a line.
const ENDS: [&str; 8] = [".", "!", "?", "\n", "。", "！", "？", "।"];

/// The policy `brake`, with the state of one request.
#[derive(Default)]
pub struct Brake {
    settings: Settings,
    /// Sentences in a row whose margin was small.
    narrow: u32,
    /// Tokens of reasoning when it was closed.
    closed: Option<u32>,
}

/// The parameters.
struct Settings {
    margin: f32,
    min_tokens: u32,
    times: u32,
    hint: String,
    problems: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            margin: MARGIN,
            min_tokens: MIN_TOKENS,
            times: TIMES,
            hint: String::new(),
            problems: Vec::new(),
        }
    }
}

impl Settings {
    fn parse(params: &[(String, String)]) -> Self {
        let mut settings = Self::default();
        settings.problems = read_params(params, |name, text| match name {
            "margin" => {
                let parsed = text.parse().ok().filter(|value| (0.0..=MOST_MARGIN).contains(value));
                settings.margin = parsed.unwrap_or(MARGIN);
                Some(parsed.is_some())
            }
            "min_tokens" => Some(text.parse().map(|tokens| settings.min_tokens = tokens).is_ok()),
            "times" => {
                let parsed = text.parse().ok().filter(|times| *times > 0);
                settings.times = parsed.unwrap_or(TIMES);
                Some(parsed.is_some())
            }
            "hint" => {
                text.clone_into(&mut settings.hint);
                Some(true)
            }
            _ => None,
        });
        settings
    }
}

impl Policy for Brake {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let problems = Settings::parse(&params.params).problems;
        PreparedParams { problems, ..PreparedParams::default() }
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        self.settings = Settings::parse(&request.params);
        let note = note(&self.settings.problems);
        // Whether the model reasons is decided by others.
        let (reasoning, reasoning_budget) = (request.reasoning, request.reasoning_budget);
        let plan = Plan { reasoning, reasoning_budget, note, ..Plan::default() };
        if !request.can_reason || request.reasoning == Some(false) {
            return plan;
        }
        Plan {
            on_texts: ENDS.map(str::to_owned).to_vec(),
            watch: vec![WatchedToken::ReasoningEnd],
            ..plan
        }
    }

    fn on_step(&mut self, step: Step) -> Vec<Action> {
        let is_end = step.observed.as_ref().is_some_and(|seen| !seen.texts_found.is_empty());
        if step.phase != Phase::Reasoning || !is_end || self.closed.is_some() {
            return Vec::new();
        }
        if step.reasoning_tokens < self.settings.min_tokens {
            return Vec::new();
        }
        let Some(margin) = step.margin_of(&WatchedToken::ReasoningEnd) else { return Vec::new() };
        self.narrow = if margin <= self.settings.margin { self.narrow + 1 } else { 0 };
        if self.narrow < self.settings.times {
            return Vec::new();
        }
        self.closed = Some(step.reasoning_tokens);
        vec![Action::CloseReasoning(self.settings.hint.clone())]
    }

    fn on_finish(&mut self, _: Summary) -> Labels {
        let label = |tokens: u32| ("braked_at".to_owned(), tokens.to_string());
        self.closed.map(label).into_iter().collect()
    }
}

steersman_policy::export!(Brake, without on_tool_call);

#[cfg(test)]
mod tests {
    use steersman_policy::{Candidate, Observations, Outlook, Watched};

    use super::*;

    /// A sentence of the reasoning that ends after `tokens` tokens, where the marker has this margin.
    fn sentence(tokens: u32, margin: Option<f32>) -> Step {
        let watched =
            |margin: f32| Watched { watched: WatchedToken::ReasoningEnd, logprob: -0.5 - margin };
        let outlook = Outlook {
            best: Candidate { token: 3, logprob: -0.5 },
            watched: margin.map(watched).into_iter().collect(),
        };
        let (texts_found, drawn) = (vec![".".to_owned()], Vec::new());
        let observed =
            Observations { texts_found, token_found: false, drawn, outlook: Some(outlook) };
        Step {
            phase: Phase::Reasoning,
            reasoning_tokens: tokens,
            observed: Some(observed),
            ..Step::default()
        }
    }

    fn begun(params: &[(&str, &str)]) -> Brake {
        let params = params.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect();
        let mut policy = Brake::default();
        let request = RequestView { params, can_reason: true, ..RequestView::default() };
        let plan = policy.on_request(request);
        assert_eq!((plan.watch, plan.note), (vec![WatchedToken::ReasoningEnd], None));
        assert_eq!(plan.on_texts.len(), ENDS.len());
        policy
    }

    #[test]
    fn a_small_margin_at_the_end_of_a_sentence_closes_the_reasoning() {
        let mut policy = begun(&[]);
        assert_eq!(policy.on_step(sentence(31, Some(0.0))), [], "too early");
        assert_eq!(policy.on_step(sentence(40, Some(0.26))), []);
        assert_eq!(policy.on_step(sentence(41, None)), []);
        let closed = policy.on_step(sentence(50, Some(0.25)));
        assert_eq!(closed, [Action::CloseReasoning(String::new())]);
        assert_eq!(policy.on_step(sentence(60, Some(0.0))), []);
        let labels = policy.on_finish(Summary::default());
        assert_eq!(labels, [("braked_at".to_owned(), "50".to_owned())]);
    }

    #[test]
    fn several_sentences_in_a_row_may_be_asked_for() {
        let mut policy = begun(&[("times", "2"), ("margin", "1.5"), ("hint", "So: ")]);
        assert_eq!(policy.on_step(sentence(40, Some(1.0))), []);
        assert_eq!(policy.on_step(sentence(50, Some(2.0))), [], "not in a row");
        assert_eq!(policy.on_step(sentence(60, Some(1.0))), []);
        let answer = Step { phase: Phase::Answer, ..sentence(65, Some(0.0)) };
        assert_eq!(policy.on_step(answer), []);
        let closed = policy.on_step(sentence(70, Some(1.5)));
        assert_eq!(closed, [Action::CloseReasoning("So: ".into())]);
    }

    #[test]
    fn without_reasoning_nothing_is_watched() {
        for (can_reason, reasoning) in [(false, None), (true, Some(false))] {
            let request = RequestView { can_reason, reasoning, ..RequestView::default() };
            let plan = Brake::default().on_request(request);
            assert_eq!((plan.watch, plan.on_texts), (Vec::new(), Vec::new()));
        }
    }

    #[test]
    fn mistakes_in_parameters_are_reported() {
        let params = [("margin", "-1"), ("times", "0"), ("min_tokens", "x"), ("othr", "1")];
        let params = params.map(|(name, text)| (name.to_owned(), text.to_owned())).to_vec();
        let view = ParamsView { params, ..ParamsView::default() };
        let problems = Brake::default().on_params(view).problems;
        let expected = [
            "parameter `margin` cannot be `-1`",
            "parameter `times` cannot be `0`",
            "parameter `min_tokens` cannot be `x`",
            "unknown parameter `othr`",
        ];
        assert_eq!(problems, expected);
    }
}
