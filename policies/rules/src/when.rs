//! The conditions of a rule.

use std::cell::LazyCell;

use steersman_policy::{Phase, PromptView, RequestView, Step, ToolCallView};

/// Conditions that must all hold, named like the keys of `when` (`policies/REFERENCE.md`).
/// `None` and an empty list are no condition; a list holds if one of its elements does.
/// `user_contains` and `user_words` are in lower case.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct When {
    pub profile: Vec<String>,
    pub model: Vec<String>,
    pub family: Vec<String>,
    pub user_contains: Vec<String>,
    pub user_words: Vec<String>,
    pub user_under: Option<u32>,
    pub user_over: Option<u32>,
    pub system_contains: Vec<String>,
    pub system_over: Option<u32>,
    pub prompt_over: Option<u32>,
    pub messages_over: Option<u32>,
    /// From `tools = true` or `false`.
    pub has_tools: Option<bool>,
    pub tools: Vec<String>,
    pub reasoning_requested: Option<bool>,
    pub can_reason: Option<bool>,
    pub form_requested: Option<bool>,
    /// Digests.
    pub caller_key: Vec<String>,
    /// Digests.
    pub caller_user: Vec<String>,
    pub phase: Option<Phase>,
    /// From `loop`.
    pub looping: Option<bool>,
    pub budget_reached: Option<bool>,
    pub reasoning_tokens_over: Option<u32>,
    pub answer_tokens_over: Option<u32>,
    pub text_contains: Vec<String>,
    pub tool_called: Vec<String>,
    pub arguments_contain: Vec<String>,
    pub repeats_over: Option<u32>,
    pub calls_over: Option<u32>,
}

/// The end of the text of earlier steps, in which a searched text may begin.
#[derive(Debug, Default)]
pub struct Tail(String);

impl Tail {
    /// Appends `new`; whether one of `texts` occurs with its end in `new`.
    fn has(&mut self, texts: &[String], new: &str) -> bool {
        let before = self.0.len();
        self.0.push_str(new);
        let ends_in_new = |text: &String| {
            let from = self.0.ceil_char_boundary((before + 1).saturating_sub(text.len()));
            self.0[from.min(before)..].contains(text)
        };
        let found = texts.iter().any(ends_in_new);
        let longest = texts.iter().map(String::len).max().unwrap_or_default();
        let cut = self.0.ceil_char_boundary(self.0.len().saturating_sub(longest));
        self.0.drain(..cut);
        found
    }
}

/// A value that is computed if a rule needs it, and once for all rules.
type Lazy<'a, T> = LazyCell<T, Box<dyn FnOnce() -> T + 'a>>;

fn lazy<'a, T>(compute: impl FnOnce() -> T + 'a) -> Lazy<'a, T> {
    LazyCell::new(Box::new(compute))
}

/// What rules see in `on-prompt`.
pub struct SeenPrompt<'a> {
    prompt: &'a PromptView,
    system_chars: Lazy<'a, u32>,
}

impl<'a> SeenPrompt<'a> {
    pub fn new(prompt: &'a PromptView) -> Self {
        let system_chars = lazy(|| prompt.system.iter().map(|text| chars(text)).sum());
        Self { prompt, system_chars }
    }
}

/// What rules see in `on-request`.
pub struct SeenRequest<'a> {
    request: &'a RequestView,
    system: &'a [String],
    /// The last user message in lower case, and its length in characters.
    lower: Lazy<'a, String>,
    chars: Lazy<'a, u32>,
}

impl<'a> SeenRequest<'a> {
    pub fn new(request: &'a RequestView, system: &'a [String]) -> Self {
        let lower = lazy(|| request.user.to_lowercase());
        Self { request, system, lower, chars: lazy(|| chars(&request.user)) }
    }
}

fn any(list: &[String], is: impl Fn(&str) -> bool) -> bool {
    list.is_empty() || list.iter().any(|text| is(text))
}

fn equals<T: PartialEq>(wanted: Option<T>, is: T) -> bool {
    wanted.is_none_or(|wanted| wanted == is)
}

fn over(limit: Option<u32>, count: u32) -> bool {
    limit.is_none_or(|limit| count > limit)
}

fn chars(text: &str) -> u32 {
    u32::try_from(text.chars().count()).unwrap_or(u32::MAX)
}

impl When {
    /// Whether the conditions known in `on-prompt` hold.
    pub fn matches_prompt(&self, seen: &SeenPrompt) -> bool {
        any(&self.profile, |name| name == seen.prompt.profile)
            && self.matches_system(&seen.prompt.system)
            && self.system_over.is_none_or(|limit| *seen.system_chars > limit)
    }

    fn matches_system(&self, system: &[String]) -> bool {
        any(&self.system_contains, |part| system.iter().any(|text| text.contains(part)))
    }

    /// Whether the conditions known in `on-request` hold.
    pub fn matches_request(&self, seen: &SeenRequest) -> bool {
        let request = seen.request;
        let has_word = || {
            let mut words = seen.lower.split(|c: char| !c.is_alphanumeric());
            words.any(|word| self.user_words.iter().any(|wanted| wanted == word))
        };
        any(&self.profile, |name| name == request.profile)
            && any(&self.model, |name| name == request.model)
            && any(&self.family, |name| name == request.family)
            && any(&self.user_contains, |part| seen.lower.contains(part))
            && (self.user_words.is_empty() || has_word())
            && self.user_under.is_none_or(|limit| *seen.chars < limit)
            && self.user_over.is_none_or(|limit| *seen.chars > limit)
            && self.matches_system(seen.system)
            && over(self.system_over, request.system_chars)
            && over(self.prompt_over, request.prompt_tokens)
            && over(self.messages_over, request.messages)
            && equals(self.has_tools, !request.tools.is_empty())
            && any(&self.tools, |name| request.tools.iter().any(|tool| tool == name))
            && self.reasoning_requested.is_none_or(|it| request.reasoning == Some(it))
            && equals(self.can_reason, request.can_reason)
            && equals(self.form_requested, request.form.is_some())
            && any(&self.caller_key, |digest| digest == request.caller.key)
            && any(&self.caller_user, |digest| digest == request.caller.user)
    }

    /// Whether the conditions on a step hold. Must see every step, to find text that arrives in parts.
    pub fn matches_step(&self, step: &Step, tail: &mut Tail) -> bool {
        let has_text = self.text_contains.is_empty() || tail.has(&self.text_contains, &step.text);
        has_text
            && equals(self.phase, step.phase)
            && equals(self.looping, step.loop_found.is_some())
            && equals(self.budget_reached, step.budget_reached)
            && over(self.reasoning_tokens_over, step.reasoning_tokens)
            && over(self.answer_tokens_over, step.answer_tokens)
    }

    /// Whether the conditions on a tool call hold.
    pub fn matches_call(&self, call: &ToolCallView) -> bool {
        any(&self.tool_called, |name| name == call.name)
            && any(&self.arguments_contain, |part| call.arguments.contains(part))
            && over(self.calls_over, call.index)
            && self.repeats_over.is_none_or(|limit| call.same_results() > limit)
    }

    /// The largest `plan.every` with which the conditions can be checked; 0 is events only.
    pub fn every(&self) -> u32 {
        let counts = self.reasoning_tokens_over.is_some() || self.answer_tokens_over.is_some();
        match self {
            _ if self.looping == Some(true) || self.budget_reached == Some(true) => 0,
            _ if counts || !self.text_contains.is_empty() => 8,
            // Applies from the first token on.
            _ => 1,
        }
    }

    pub fn waits_for_loop(&self) -> bool {
        self.looping == Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_found_across_steps_and_reported_once() {
        let texts = ["über Bord".to_owned(), "x".to_owned()];
        let mut tail = Tail::default();
        let found: Vec<_> = ["Er ging ü", "ber ", "Bo", "rd", " und", "", "x", "y", "yx"]
            .iter()
            .map(|new| tail.has(&texts, new))
            .collect();
        assert_eq!(found, [false, false, false, true, false, false, true, false, true]);
        assert!(tail.0.len() <= "über Bord".len());
    }
}
