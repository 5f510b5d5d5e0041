//! The policy `budget`: a number of tokens a day for each user, or each API key.
//!
//! A request whose sender has used up the budget, or whose prompt alone exceeds what is left, is refused with 429 before
//! anything is computed. Others may have as many tokens as are left after their prompt. Tokens count when a request ends, those of the prompt included, in `kv`;
//! a day is one of UTC. Requests that run at the same time do not know of each other, so that together they
//! may exceed the budget by what they use. The reply has the label `tokens_left`.

use steersman_policy::{
    Labels, ParamsView, Plan, Policy, PreparedParams, Refusal, RequestView, Summary, kv,
};

/// Tokens a day without the parameter `tokens_per_day`.
const TOKENS_PER_DAY: i64 = 1_000_000;

/// Seconds of a day.
const DAY: u64 = 86_400;

/// Seconds after which the tokens of a day are forgotten.
const FORGET: u32 = 2 * 86_400;

/// Who shares the budget of requests without user and key.
const NOBODY: &str = "anonymous";

/// The policy `budget`, with the state of one request.
#[derive(Default)]
pub struct Budget {
    /// Where its tokens count; empty before the request.
    key: String,
    tokens_per_day: i64,
}

/// The parameters.
struct Settings {
    tokens_per_day: i64,
    by_key: bool,
    problems: Vec<String>,
}

impl Settings {
    fn parse(params: &[(String, String)]) -> Self {
        let mut settings =
            Self { tokens_per_day: TOKENS_PER_DAY, by_key: false, problems: Vec::new() };
        for (name, text) in params {
            let is_known = match (name.as_str(), text.as_str()) {
                ("tokens_per_day", text) => match text.parse() {
                    Ok(tokens) if tokens > 0 => {
                        settings.tokens_per_day = tokens;
                        true
                    }
                    _ => false,
                },
                ("count_by", "key") => {
                    settings.by_key = true;
                    true
                }
                ("count_by", text) => text == "user",
                _ => {
                    settings.problems.push(format!("unknown parameter `{name}`"));
                    true
                }
            };
            if !is_known {
                settings.problems.push(format!("parameter `{name}` cannot be `{text}`"));
            }
        }
        settings
    }
}

impl Policy for Budget {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let problems = Settings::parse(&params.params).problems;
        PreparedParams { problems, ..PreparedParams::default() }
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        let settings = Settings::parse(&request.params);
        let note = (!settings.problems.is_empty()).then(|| settings.problems.join("; "));
        let caller = &request.caller;
        let names = if settings.by_key { [&caller.key, ""] } else { [&*caller.user, &caller.key] };
        let who = names.into_iter().find(|name| !name.is_empty()).unwrap_or(NOBODY);
        let (day, left) = (request.time / DAY, DAY - request.time % DAY);
        let key = format!("{day} {who}");
        let used = kv::get(&key).and_then(|used| used.parse::<i64>().ok()).unwrap_or_default();
        let (budget, prompt) = (settings.tokens_per_day, i64::from(request.prompt_tokens));
        let tokens_left = budget - used;
        if tokens_left <= prompt {
            let problem = match tokens_left {
                ..=0 => format!("the budget of {budget} tokens a day is used up"),
                _ => format!(
                    "the prompt has {prompt} tokens, and of the budget of {budget} tokens a day {tokens_left} are left"
                ),
            };
            // A prompt that exceeds a whole day's budget is refused tomorrow, too.
            let (advice, retry_after) = match prompt < budget {
                true => {
                    let minutes = left.div_ceil(60);
                    let wait = match minutes / 60 {
                        0 => format!("{minutes} min"),
                        hours => format!("{hours} h {} min", minutes % 60),
                    };
                    (format!("it begins anew in {wait}"), u32::try_from(left).ok())
                }
                false => ("send a shorter prompt".to_owned(), None),
            };
            let message = format!("{problem}; {advice}");
            let refuse = Some(Refusal { status: 429, message, retry_after });
            return Plan { note, refuse, ..Plan::default() };
        }
        (self.key, self.tokens_per_day) = (key, budget);
        let left = u32::try_from(tokens_left - prompt).unwrap_or(u32::MAX);
        let reasoning = request.reasoning;
        let reasoning_budget = request.reasoning_budget;
        Plan { reasoning, reasoning_budget, max_tokens: Some(left), note, ..Plan::default() }
    }

    fn on_finish(&mut self, summary: Summary) -> Labels {
        if self.key.is_empty() {
            return Labels::new();
        }
        let Summary { prompt_tokens, reasoning_tokens, answer_tokens, .. } = summary;
        let tokens = [prompt_tokens, reasoning_tokens, answer_tokens].map(i64::from).iter().sum();
        // A full map cannot be helped here; it is the operator's `policy.kv_bytes`.
        let used = match kv::add(&self.key, tokens) {
            Ok(used) => used,
            Err(refusal) => {
                steersman_policy::failure::fail(&format!("tokens not counted: {refusal:?}"))
            }
        };
        kv::expire(&self.key, FORGET);
        vec![("tokens_left".into(), (self.tokens_per_day - used).max(0).to_string())]
    }
}

steersman_policy::export!(Budget, without on_tool_call);

#[cfg(test)]
mod tests {
    use steersman_policy::Caller;

    use super::*;

    /// The plan for a request with a prompt of so many tokens, of a sender who used none today.
    fn planned(prompt_tokens: u32, time: u64) -> Plan {
        let params = vec![("tokens_per_day".into(), "100".into())];
        let caller = Caller { user: format!("planned {time}"), ..Caller::default() };
        Budget::default().on_request(RequestView {
            params,
            caller,
            time,
            prompt_tokens,
            ..RequestView::default()
        })
    }

    /// A prompt larger than what is left was computed.
    #[test]
    fn a_prompt_counts_before_it_is_computed() {
        assert_eq!(planned(40, 5).max_tokens, Some(60));
        assert_eq!(planned(99, 5).max_tokens, Some(1));
        let refusal = planned(100, 5).refuse.unwrap();
        assert_eq!((refusal.status, refusal.retry_after), (429, None));
        let expected = "the prompt has 100 tokens, and of the budget of 100 tokens a day 100 are left; send a shorter \
                        prompt";
        assert_eq!(refusal.message, expected);
    }

    /// `Retry-After` was two seconds.
    #[test]
    fn a_refusal_says_when_the_budget_begins_anew() {
        let (mut policy, time) = (Budget::default(), 9 * DAY + DAY - 90);
        let request = || {
            let params = vec![("tokens_per_day".into(), "100".into())];
            RequestView { params, time, prompt_tokens: 20, ..RequestView::default() }
        };
        assert_eq!(policy.on_request(request()).refuse, None);
        policy.on_finish(Summary { prompt_tokens: 20, answer_tokens: 65, ..Summary::default() });
        let refusal = Budget::default().on_request(request()).refuse.unwrap();
        assert_eq!(refusal.retry_after, Some(90));
        let expected = "the prompt has 20 tokens, and of the budget of 100 tokens a day 15 are left; it begins anew in 2 min";
        assert_eq!(refusal.message, expected);
    }

    /// Whether a request of `user` with the key `key` on a day is refused, and how many tokens it may have.
    fn request(user: &str, key: &str, day: u64, count_by: &str) -> (bool, Option<u32>) {
        let mut policy = Budget::default();
        let params = [("tokens_per_day", "100"), ("count_by", count_by)];
        let params = params.map(|(name, text)| (name.to_owned(), text.to_owned())).to_vec();
        let caller = Caller { user: user.into(), key: key.into(), ..Caller::default() };
        let time = day * DAY + 5;
        let plan =
            policy.on_request(RequestView { params, caller, time, ..RequestView::default() });
        assert_eq!(plan.note, None);
        let usage = if plan.refuse.is_some() { 0 } else { 20 };
        let labels = policy.on_finish(Summary {
            prompt_tokens: usage,
            reasoning_tokens: usage,
            answer_tokens: usage,
            ..Summary::default()
        });
        assert_eq!(labels.is_empty(), plan.refuse.is_some());
        (plan.refuse.is_some(), plan.max_tokens)
    }

    #[test]
    fn each_user_has_a_budget_for_each_day() {
        assert_eq!(request("a", "k", 1, "user"), (false, Some(100)));
        assert_eq!(request("a", "k", 1, "user"), (false, Some(40)));
        assert_eq!(request("a", "k", 1, "user"), (true, None));
        assert_eq!(request("b", "k", 1, "user"), (false, Some(100)));
        assert_eq!(request("a", "k", 2, "user"), (false, Some(100)));
        assert_eq!(request("", "k", 1, "user"), (false, Some(100)));
        assert_eq!(request("x", "k", 1, "key"), (false, Some(40)));
        assert_eq!(request("", "", 1, "user"), (false, Some(100)));
        assert_eq!(request("", "", 1, "key"), (false, Some(40)));
    }

    #[test]
    fn mistakes_in_parameters_are_reported() {
        let params = [("tokens_per_day", "many"), ("count_by", "name"), ("other", "x")];
        let params = params.map(|(name, text)| (name.to_owned(), text.to_owned())).to_vec();
        let view = ParamsView { params, ..ParamsView::default() };
        let problems = Budget::default().on_params(view).problems;
        assert_eq!(
            problems,
            [
                "parameter `tokens_per_day` cannot be `many`",
                "parameter `count_by` cannot be `name`",
                "unknown parameter `other`"
            ]
        );
        assert_eq!(Budget::default().on_params(ParamsView::default()), PreparedParams::default());
    }
}
