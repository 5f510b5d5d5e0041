//! What a rule asks for, and whether it holds.

use steersman_policy::{Phase, PromptView, RequestView, Step, ToolCallView};

/// What must hold: all of it. An empty list and `None` ask for nothing; of a list one must hold.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct When {
    /// Name of the profile.
    pub profile: Vec<String>,
    /// Name of the model.
    pub model: Vec<String>,
    /// Family of the model.
    pub family: Vec<String>,
    /// The last user message has this in it, in lower case.
    pub user_contains: Vec<String>,
    /// The last user message has this word, in lower case.
    pub user_words: Vec<String>,
    /// The last user message has fewer characters.
    pub user_under: Option<u32>,
    /// The last user message has more characters.
    pub user_over: Option<u32>,
    /// A system text has this in it.
    pub system_contains: Vec<String>,
    /// All system texts together have more characters.
    pub system_over: Option<u32>,
    /// The prompt has more tokens.
    pub prompt_over: Option<u32>,
    /// The conversation has more messages.
    pub messages_over: Option<u32>,
    /// Whether tools are offered.
    pub has_tools: Option<bool>,
    /// This tool is offered.
    pub tools: Vec<String>,
    /// The client asked for a thought, or for none.
    pub reasoning_requested: Option<bool>,
    /// The model can think.
    pub can_reason: Option<bool>,
    /// Where the reply stands.
    pub phase: Option<Phase>,
    /// A loop is reported, or none is.
    pub looping: Option<bool>,
    /// The thought has used its budget up, or has not.
    pub budget_reached: Option<bool>,
    /// The thought has more tokens.
    pub reasoning_tokens_over: Option<u32>,
    /// The answer has more tokens.
    pub answer_tokens_over: Option<u32>,
    /// This has just been written.
    pub text_contains: Vec<String>,
    /// This tool is called.
    pub tool_called: Vec<String>,
    /// The arguments have this in them.
    pub arguments_contain: Vec<String>,
    /// The same call has been made more often, and got the same result.
    pub repeats_over: Option<u32>,
    /// This reply has made more calls.
    pub calls_over: Option<u32>,
}

/// The end of what was written before, in which a searched text may have begun.
#[derive(Debug, Default)]
pub struct Tail(String);

impl Tail {
    /// Whether one of `texts` ends in `new`.
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

fn any(list: &[String], is: impl Fn(&str) -> bool) -> bool {
    list.is_empty() || list.iter().any(|text| is(text))
}

fn equals<T: PartialEq>(wanted: Option<T>, is: T) -> bool {
    wanted.is_none_or(|wanted| wanted == is)
}

fn over(least: Option<u32>, count: u32) -> bool {
    least.is_none_or(|least| count > least)
}

fn chars(text: &str) -> u32 {
    u32::try_from(text.chars().count()).unwrap_or(u32::MAX)
}

impl When {
    /// Whether what is known before the prompt is rendered holds.
    pub fn holds_of_prompt(&self, prompt: &PromptView) -> bool {
        let system_chars = prompt.system.iter().map(|text| chars(text)).sum();
        any(&self.profile, |name| name == prompt.profile)
            && self.holds_of_system(&prompt.system)
            && over(self.system_over, system_chars)
    }

    fn holds_of_system(&self, system: &[String]) -> bool {
        any(&self.system_contains, |part| system.iter().any(|text| text.contains(part)))
    }

    /// Whether what is known before anything runs holds.
    pub fn holds_of_request(&self, request: &RequestView, system: &[String]) -> bool {
        let user = &request.user;
        // Only what a rule asks for is computed: a message has up to 16 KiB.
        let contains = || {
            let lower = user.to_lowercase();
            any(&self.user_contains, |part| lower.contains(part))
        };
        let has_word = || {
            let lower = user.to_lowercase();
            let mut words = lower.split(|c: char| !c.is_alphanumeric());
            words.any(|word| self.user_words.iter().any(|wanted| wanted == word))
        };
        any(&self.profile, |name| name == request.profile)
            && any(&self.model, |name| name == request.model)
            && any(&self.family, |name| name == request.family)
            && (self.user_contains.is_empty() || contains())
            && (self.user_words.is_empty() || has_word())
            && self.user_under.is_none_or(|most| chars(user) < most)
            && over(self.user_over, chars(user))
            && self.holds_of_system(system)
            && over(self.system_over, request.system_chars)
            && over(self.prompt_over, request.prompt_tokens)
            && over(self.messages_over, request.messages)
            && equals(self.has_tools, !request.tools.is_empty())
            && any(&self.tools, |name| request.tools.iter().any(|tool| tool == name))
            && self.reasoning_requested.is_none_or(|asked| request.reasoning == Some(asked))
            && equals(self.can_reason, request.can_reason)
    }

    /// Whether what a step shows holds. Sees every step, so that text which is written in parts is
    /// found.
    pub fn holds_of_step(&self, step: &Step, tail: &mut Tail) -> bool {
        let has_text = self.text_contains.is_empty() || tail.has(&self.text_contains, &step.text);
        has_text
            && equals(self.phase, step.phase)
            && equals(self.looping, step.loop_found.is_some())
            && equals(self.budget_reached, step.budget_reached)
            && over(self.reasoning_tokens_over, step.reasoning_tokens)
            && over(self.answer_tokens_over, step.answer_tokens)
    }

    /// Whether what a call of a tool shows holds.
    pub fn holds_of_call(&self, call: &ToolCallView) -> bool {
        any(&self.tool_called, |name| name == call.name)
            && any(&self.arguments_contain, |part| call.arguments.contains(part))
            && over(self.calls_over, call.index)
            && self.repeats_over.is_none_or(|least| call.same_results() > least)
    }

    /// Tokens between the steps that this must see; 0 is events alone.
    pub fn every(&self) -> u32 {
        let counts = self.reasoning_tokens_over.is_some() || self.answer_tokens_over.is_some();
        match self {
            _ if self.looping == Some(true) || self.budget_reached == Some(true) => 0,
            _ if counts || !self.text_contains.is_empty() => 8,
            // For what shall hold from the first token on.
            _ => 1,
        }
    }

    /// Whether it asks for a loop.
    pub fn waits_for_loop(&self) -> bool {
        self.looping == Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_found_across_steps_and_once() {
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
