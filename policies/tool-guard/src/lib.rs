//! The policy `tool-guard`: which tools a model may use, and with which arguments.
//!
//! Tools that are not allowed are not offered. A call that is not allowed, whose arguments contain a denied text, or
//! that got the same result too often is replaced by words; the second one ends the reply.

use steersman_policy::{
    Labels, ParamsView, Plan, Policy, PreparedParams, RequestView, Summary, ToolCallView, Verdict,
    note, read_params, texts,
};

/// Calls of one reply without the parameter `calls`.
const CALLS: u32 = 32;

/// Equal results of the same call without the parameter `repeats`.
const REPEATS: u32 = 3;

/// What takes the place of a call that is not allowed.
const WORDS: &str = "That call is not allowed here. Instead: ";

/// The policy `tool-guard`, with the state of one request.
#[derive(Default)]
pub struct ToolGuard {
    settings: Settings,
    /// Calls that were not accepted.
    refused: u32,
}

/// The parameters.
struct Settings {
    /// `None` allows all.
    allow: Option<Vec<String>>,
    /// In lower case.
    deny: Vec<String>,
    calls: u32,
    repeats: u32,
    words: String,
    problems: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            allow: None,
            deny: Vec::new(),
            calls: CALLS,
            repeats: REPEATS,
            words: WORDS.into(),
            problems: Vec::new(),
        }
    }
}

impl Settings {
    fn parse(params: &[(String, String)]) -> Self {
        let mut settings = Self::default();
        settings.problems = read_params(params, |name, text| match name {
            "allow" => {
                settings.allow = texts(text);
                Some(settings.allow.is_some())
            }
            "deny" => {
                let denied = texts(&text.to_lowercase());
                let is_usable = denied.is_some();
                settings.deny = denied.unwrap_or_default();
                Some(is_usable)
            }
            "calls" => Some(text.parse().map(|calls| settings.calls = calls).is_ok()),
            "repeats" => Some(text.parse().map(|repeats| settings.repeats = repeats).is_ok()),
            "words" => {
                settings.words = text.into();
                Some(true)
            }
            _ => None,
        });
        settings
    }

    fn allows(&self, tool: &str) -> bool {
        self.allow.as_ref().is_none_or(|allow| allow.iter().any(|name| name == tool))
    }

    /// Why a call is not accepted.
    fn objection(&self, call: &ToolCallView) -> Option<String> {
        let name = &call.name;
        if !self.allows(name) {
            return Some(format!("the tool `{name}` is not allowed"));
        }
        let arguments = call.arguments.to_lowercase();
        if let Some(denied) = self.deny.iter().find(|text| arguments.contains(*text)) {
            return Some(format!("the arguments of `{name}` contain `{denied}`"));
        }
        if call.index >= self.calls {
            return Some(format!("the reply has {} calls already", self.calls));
        }
        let is_loop = self.repeats > 0 && call.same_results() >= self.repeats;
        is_loop.then(|| format!("`{name}` got the same result {} times", self.repeats))
    }
}

impl Policy for ToolGuard {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let problems = Settings::parse(&params.params).problems;
        PreparedParams { problems, ..PreparedParams::default() }
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        self.settings = Settings::parse(&request.params);
        let allowed = request.tools.into_iter().filter(|tool| self.settings.allows(tool));
        let tools = self.settings.allow.is_some().then(|| allowed.collect());
        Plan { tools, note: note(&self.settings.problems), ..Plan::default() }
    }

    fn on_tool_call(&mut self, call: ToolCallView) -> Verdict {
        let Some(why) = self.settings.objection(&call) else { return Verdict::Accept };
        self.refused += 1;
        match self.refused {
            1 => Verdict::Repair(self.settings.words.clone()),
            _ => Verdict::Stop(why),
        }
    }

    fn on_finish(&mut self, _: Summary) -> Labels {
        match self.refused {
            0 => Labels::new(),
            refused => vec![("calls_refused".into(), refused.to_string())],
        }
    }
}

steersman_policy::export!(ToolGuard);

#[cfg(test)]
mod tests {
    use steersman_policy::EarlierCall;

    use super::*;

    fn guard(params: &[(&str, &str)]) -> (ToolGuard, Plan) {
        let mut guard = ToolGuard::default();
        let params = params.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect();
        let tools = vec!["read".into(), "shell".into()];
        let plan = guard.on_request(RequestView { params, tools, ..RequestView::default() });
        (guard, plan)
    }

    fn call(name: &str, arguments: &str) -> ToolCallView {
        ToolCallView { name: name.into(), arguments: arguments.into(), ..ToolCallView::default() }
    }

    #[test]
    fn only_allowed_tools_are_offered_and_called() {
        let (mut policy, plan) = guard(&[("allow", "read | search")]);
        assert_eq!(plan.tools, Some(vec!["read".to_owned()]));
        assert_eq!(policy.on_tool_call(call("read", "{}")), Verdict::Accept);
        assert_eq!(policy.on_tool_call(call("shell", "{}")), Verdict::Repair(WORDS.into()));
        let second = policy.on_tool_call(call("shell", "{}"));
        assert_eq!(second, Verdict::Stop("the tool `shell` is not allowed".into()));
        let labels = policy.on_finish(Summary::default());
        assert_eq!(labels, [("calls_refused".to_owned(), "2".to_owned())]);
        assert_eq!(guard(&[]).1, Plan::default());
    }

    #[test]
    fn denied_arguments_and_repeated_results_are_not_accepted() {
        let (mut policy, _) = guard(&[("deny", "rm -rf|drop table"), ("words", "No. ")]);
        let denied = call("shell", r#"{"command": "RM -rf /"}"#);
        assert_eq!(policy.on_tool_call(denied), Verdict::Repair("No. ".into()));
        let (mut policy, _) = guard(&[("repeats", "2")]);
        let earlier =
            EarlierCall { name: "read".into(), arguments: "a".into(), answered: Some("1".into()) };
        let again = |count: usize| ToolCallView {
            digest: "a".into(),
            earlier: vec![earlier.clone(); count],
            ..call("read", "{}")
        };
        assert_eq!(policy.on_tool_call(again(1)), Verdict::Accept);
        assert_eq!(policy.on_tool_call(again(2)), Verdict::Repair(WORDS.into()));
        let (mut policy, _) = guard(&[("calls", "1")]);
        let third = ToolCallView { index: 1, ..call("read", "{}") };
        assert_eq!(policy.on_tool_call(third), Verdict::Repair(WORDS.into()));
    }
}
