//! The policy `router`: a small model answers first, and a large one what a rule sends there.
//!
//! A request is routed if one of the rules of its parameters holds: a long prompt, a long conversation, words of the
//! last user message, or tools. The profile must grant the destination with `routes`.

use steersman_policy::{
    ParamsView, Plan, Policy, PreparedParams, RequestView, note, read_params, texts,
};

/// The policy `router`.
#[derive(Default)]
pub struct Router;

/// The parameters.
#[derive(Default)]
struct Settings {
    to: Option<String>,
    over_tokens: Option<u32>,
    over_messages: Option<u32>,
    /// In lower case.
    words: Vec<String>,
    tools: bool,
    problems: Vec<String>,
}

impl Settings {
    fn parse(params: &[(String, String)]) -> Self {
        let mut settings = Self::default();
        settings.problems = read_params(params, |name, text| match name {
            "to" => {
                settings.to = (!text.is_empty()).then(|| text.into());
                Some(settings.to.is_some())
            }
            "over_tokens" => {
                settings.over_tokens = text.parse().ok();
                Some(settings.over_tokens.is_some())
            }
            "over_messages" => {
                settings.over_messages = text.parse().ok();
                Some(settings.over_messages.is_some())
            }
            "words" => {
                let words = texts(&text.to_lowercase());
                let is_usable = words.is_some();
                settings.words = words.unwrap_or_default();
                Some(is_usable)
            }
            "tools" => Some(text.parse().map(|tools| settings.tools = tools).is_ok()),
            _ => None,
        });
        settings
    }

    /// Why a request is routed.
    fn reason(&self, request: &RequestView) -> Option<String> {
        let over = |value: u32, limit: Option<u32>| limit.is_some_and(|limit| value > limit);
        if over(request.prompt_tokens, self.over_tokens) {
            return Some(format!("the prompt has {} tokens", request.prompt_tokens));
        }
        if over(request.messages, self.over_messages) {
            return Some(format!("the conversation has {} messages", request.messages));
        }
        if self.tools && !request.tools.is_empty() {
            return Some("the request has tools".into());
        }
        let user = request.user.to_lowercase();
        let mut words = user.split(|c: char| !c.is_alphanumeric());
        let word = words.find(|word| self.words.iter().any(|wanted| wanted == word));
        word.map(|word| format!("the question has the word `{word}`"))
    }
}

impl Policy for Router {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let problems = Settings::parse(&params.params).problems;
        PreparedParams { problems, ..PreparedParams::default() }
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        let settings = Settings::parse(&request.params);
        let route = settings.to.clone().filter(|_| settings.reason(&request).is_some());
        let mut problems = settings.problems;
        if settings.to.is_none() {
            problems.push("parameter `to` is missing".into());
        }
        Plan { route, note: note(&problems), ..Plan::default() }
    }
}

steersman_policy::export!(Router, without on_tool_call);

#[cfg(test)]
mod tests {
    use super::*;

    fn route(rule: (&str, &str), request: RequestView) -> Option<String> {
        let params = [("to", "large"), rule];
        let params = params.map(|(name, text)| (name.to_owned(), text.to_owned())).to_vec();
        let plan = Router.on_request(RequestView { params, ..request });
        assert_eq!(plan.note, None);
        plan.route
    }

    #[test]
    fn a_request_is_routed_if_a_rule_holds() {
        let large = Some("large".to_owned());
        let long = RequestView { prompt_tokens: 501, messages: 9, ..RequestView::default() };
        assert_eq!(route(("over_tokens", "500"), long.clone()), large);
        assert_eq!(route(("over_tokens", "501"), long.clone()), None);
        assert_eq!(route(("over_messages", "8"), long.clone()), large);
        assert_eq!(route(("tools", "true"), long), None);
        let tools = vec!["look".to_owned()];
        let with_tools = RequestView { tools, ..RequestView::default() };
        assert_eq!(route(("tools", "true"), with_tools), large);
        let ask = |user: &str| RequestView { user: user.into(), ..RequestView::default() };
        assert_eq!(route(("words", "prove|theorem"), ask("Prove it.")), large);
        assert_eq!(route(("words", "prove|theorem"), ask("Improve it.")), None);
    }

    #[test]
    fn a_destination_is_needed() {
        let plan = Router.on_request(RequestView::default());
        assert_eq!(plan.note.as_deref(), Some("parameter `to` is missing"));
    }
}
