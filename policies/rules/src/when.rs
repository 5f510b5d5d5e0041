//! The conditions of a rule.

use std::borrow::Cow;
use std::cell::{LazyCell, OnceCell};

use steersman_policy::{Phase, PromptView, RequestView, Step, ToolCallView};

use super::pack;

/// Tokens of which a step has the text, half of those that a step has at most.
const SEEN_TOKENS: u32 = 512;

/// Texts of a condition, packed. Those of packed rules are borrowed from the parameter: copies would cost most of
/// what unpacking does.
#[derive(Debug, Clone, PartialEq)]
pub struct Texts(Cow<'static, str>);

impl Texts {
    pub fn of_packed(packed: &'static str) -> Self {
        Self(Cow::Borrowed(packed))
    }

    pub fn packed(&self) -> &str {
        &self.0
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        let mut rest = self.packed();
        std::iter::from_fn(move || pack::words(&mut rest))
    }
}

impl FromIterator<String> for Texts {
    fn from_iter<T: IntoIterator<Item = String>>(texts: T) -> Self {
        let mut packed = String::new();
        texts.into_iter().for_each(|text| pack::push_words(&mut packed, &text));
        Self(Cow::Owned(packed))
    }
}

/// A condition, named like its key in `when` (`policies/REFERENCE.md`). A list of texts holds if one of them
/// does; `UserContains` and `UserWords` are in lower case.
#[derive(Debug, Clone, PartialEq)]
pub enum Condition {
    Profile(Texts),
    Model(Texts),
    Family(Texts),
    UserContains(Texts),
    UserWords(Texts),
    UserUnder(u32),
    UserOver(u32),
    SystemContains(Texts),
    SystemOver(u32),
    PromptOver(u32),
    MessagesOver(u32),
    /// `tools = true` or `false`.
    HasTools(bool),
    Tools(Texts),
    ReasoningRequested(bool),
    CanReason(bool),
    FormRequested(bool),
    /// Digests.
    CallerKey(Texts),
    /// Digests.
    CallerUser(Texts),
    Phase(Phase),
    Loop(bool),
    BudgetReached(bool),
    /// The event of this many tokens, at least 1.
    ReasoningTokens(u32),
    ReasoningTokensOver(u32),
    /// The event of this many tokens, at least 1.
    AnswerTokens(u32),
    AnswerTokensOver(u32),
    TextContains(Texts),
    /// `unless.text_contains`: none of these texts is in the current phase of the reply so far.
    TextLacks(Texts),
    ToolCalled(Texts),
    ArgumentsContain(Texts),
    RepeatsOver(u32),
    CallsOver(u32),
    /// A condition of `unless`.
    Not(Box<Condition>),
}

/// What a rule remembers of the steps before, for its conditions.
#[derive(Debug, Default)]
pub struct Memory {
    tail: Tail,
    /// Of [`Condition::TextLacks`].
    lacked: Lacked,
    /// Tokens of reasoning and answer in the last step.
    tokens: (u32, u32),
}

/// Whether the current phase has one of some texts.
#[derive(Debug, Default)]
struct Lacked {
    tail: Tail,
    phase: Option<Phase>,
    is_found: bool,
}

impl Lacked {
    /// Appends the text of a step; whether the phase lacks the texts.
    fn lacks(&mut self, texts: &Texts, step: &Step) -> bool {
        if self.phase.replace(step.phase).is_some_and(|before| before != step.phase) {
            // A step follows each change of the phase: its text ends the phase before.
            *self = Self { phase: self.phase, ..Self::default() };
        } else {
            self.is_found |= self.tail.has(texts, &step.text);
        }
        !self.is_found
    }
}

/// The end of the text of earlier steps, in which a searched text may begin.
#[derive(Debug, Default)]
pub struct Tail(String);

impl Tail {
    /// Appends `new`; whether one of `texts` occurs with its end in `new`.
    fn has(&mut self, texts: &Texts, new: &str) -> bool {
        let before = self.0.len();
        self.0.push_str(new);
        let ends_in_new = |text: &str| {
            let from = self.0.ceil_char_boundary((before + 1).saturating_sub(text.len()));
            self.0[from.min(before)..].contains(text)
        };
        let found = texts.iter().any(ends_in_new);
        let longest = texts.iter().map(str::len).max().unwrap_or_default();
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

/// Texts in which many others are searched.
///
/// Preparing one search takes a thousand instructions. So the pairs of neighbouring bytes are noted once, and a
/// text is searched only if they contain all of its pairs.
struct Haystack<'a> {
    texts: Lazy<'a, Vec<Cow<'a, str>>>,
    /// A bit for each pair.
    pairs: OnceCell<Vec<u32>>,
}

impl<'a> Haystack<'a> {
    fn new(texts: impl FnOnce() -> Vec<Cow<'a, str>> + 'a) -> Self {
        Self { texts: lazy(texts), pairs: OnceCell::new() }
    }

    fn of(texts: &'a [String]) -> Self {
        Self::new(|| texts.iter().map(|text| Cow::Borrowed(&**text)).collect())
    }

    fn pairs(&self) -> Vec<u32> {
        let mut pairs = vec![0; 1 << 11];
        for pair in self.texts.iter().flat_map(|text| text.as_bytes().windows(2)) {
            let (word, bit) = place(pair);
            pairs[word] |= bit;
        }
        pairs
    }

    fn contains(&self, text: &str) -> bool {
        let pairs = self.pairs.get_or_init(|| self.pairs());
        let is_absent = |pair: &[u8]| {
            let (word, bit) = place(pair);
            pairs[word] & bit == 0
        };
        // From the end: words of a list differ there, "topic 1" and "topic 2".
        !text.as_bytes().windows(2).rev().any(is_absent)
            && self.texts.iter().any(|whole| whole.contains(text))
    }
}

/// The word and the bit of a pair.
fn place(pair: &[u8]) -> (usize, u32) {
    (usize::from(pair[0]) << 3 | usize::from(pair[1] >> 5), 1 << (pair[1] & 31))
}

/// What rules see in `on-prompt`.
pub struct SeenPrompt<'a> {
    prompt: &'a PromptView,
    system: Haystack<'a>,
    system_chars: Lazy<'a, u32>,
}

impl<'a> SeenPrompt<'a> {
    pub fn new(prompt: &'a PromptView) -> Self {
        let system_chars = lazy(|| prompt.system.iter().map(|text| chars(text)).sum());
        Self { prompt, system: Haystack::of(&prompt.system), system_chars }
    }
}

/// What rules see in `on-request`.
pub struct SeenRequest<'a> {
    request: &'a RequestView,
    system: Haystack<'a>,
    /// The last user message in lower case, and its length in characters.
    user: Haystack<'a>,
    chars: Lazy<'a, u32>,
}

impl<'a> SeenRequest<'a> {
    pub fn new(request: &'a RequestView, system: &'a [String]) -> Self {
        Self {
            request,
            system: Haystack::of(system),
            user: Haystack::new(|| vec![request.user.to_lowercase().into()]),
            chars: lazy(|| chars(&request.user)),
        }
    }
}

fn chars(text: &str) -> u32 {
    u32::try_from(text.chars().count()).unwrap_or(u32::MAX)
}

fn any(texts: &Texts, is: impl Fn(&str) -> bool) -> bool {
    texts.iter().any(is)
}

impl Condition {
    /// Whether it holds in `on-prompt`; `None` if it is known later.
    pub fn in_prompt(&self, seen: &SeenPrompt) -> Option<bool> {
        Some(match self {
            Self::Profile(names) => any(names, |name| name == seen.prompt.profile),
            Self::SystemContains(parts) => any(parts, |part| seen.system.contains(part)),
            Self::SystemOver(limit) => *seen.system_chars > *limit,
            Self::Not(condition) => !condition.in_prompt(seen)?,
            _ => return None,
        })
    }

    /// Whether it holds in `on-request`; `None` if it is known later.
    pub fn in_request(&self, seen: &SeenRequest) -> Option<bool> {
        let request = seen.request;
        Some(match self {
            Self::Profile(names) => any(names, |name| name == request.profile),
            Self::Model(names) => any(names, |name| name == request.model),
            Self::Family(names) => any(names, |name| name == request.family),
            Self::UserContains(parts) => any(parts, |part| seen.user.contains(part)),
            Self::UserWords(words) => {
                let mut said = seen.user.texts[0].split(|c: char| !c.is_alphanumeric());
                said.any(|word| any(words, |wanted| wanted == word))
            }
            Self::UserUnder(limit) => *seen.chars < *limit,
            Self::UserOver(limit) => *seen.chars > *limit,
            Self::SystemContains(parts) => any(parts, |part| seen.system.contains(part)),
            Self::SystemOver(limit) => request.system_chars > *limit,
            Self::PromptOver(limit) => request.prompt_tokens > *limit,
            Self::MessagesOver(limit) => request.messages > *limit,
            Self::HasTools(has) => request.tools.is_empty() != *has,
            Self::Tools(names) => any(names, |name| request.tools.iter().any(|tool| tool == name)),
            Self::ReasoningRequested(is) => request.reasoning == Some(*is),
            Self::CanReason(can) => request.can_reason == *can,
            Self::FormRequested(is) => request.form.is_some() == *is,
            Self::CallerKey(digests) => any(digests, |digest| digest == request.caller.key),
            Self::CallerUser(digests) => any(digests, |digest| digest == request.caller.user),
            Self::Not(condition) => !condition.in_request(seen)?,
            _ => return None,
        })
    }

    /// The condition of `unless` in place of this one of `when`.
    pub fn negated(self) -> Self {
        match self {
            // It is the event of a text. What it lacks is no event.
            Self::TextContains(texts) => Self::TextLacks(texts),
            other => Self::Not(Box::new(other)),
        }
    }

    /// Whether it holds in a step; `None` if it is known earlier. Must see every step, to find text that
    /// arrives in parts.
    fn in_step(&self, step: &Step, memory: &mut Memory) -> Option<bool> {
        let (reasoning, answer) = memory.tokens;
        Some(match self {
            Self::TextContains(texts) => memory.tail.has(texts, &step.text),
            Self::TextLacks(texts) => memory.lacked.lacks(texts, step),
            Self::Phase(phase) => step.phase == *phase,
            Self::Loop(is) => step.loop_found.is_some() == *is,
            Self::BudgetReached(is) => step.budget_reached == *is,
            // Injected text may pass the number.
            Self::ReasoningTokens(n) => (reasoning + 1..=step.reasoning_tokens).contains(n),
            Self::AnswerTokens(n) => (answer + 1..=step.answer_tokens).contains(n),
            Self::ReasoningTokensOver(limit) => step.reasoning_tokens > *limit,
            Self::AnswerTokensOver(limit) => step.answer_tokens > *limit,
            Self::Not(condition) => !condition.in_step(step, memory)?,
            _ => return None,
        })
    }

    /// Whether it holds for a tool call; `None` if it is known earlier.
    fn in_call(&self, call: &ToolCallView) -> Option<bool> {
        Some(match self {
            Self::ToolCalled(names) => any(names, |name| name == call.name),
            Self::ArgumentsContain(parts) => any(parts, |part| call.arguments.contains(part)),
            Self::CallsOver(limit) => call.index > *limit,
            Self::RepeatsOver(limit) => call.same_results() > *limit,
            Self::Not(condition) => !condition.in_call(call)?,
            _ => return None,
        })
    }
}

/// Whether all conditions on a step hold.
pub fn matches_step(when: &[Condition], step: &Step, memory: &mut Memory) -> bool {
    // No short circuit: the memory must have every step.
    let mut matches = true;
    for condition in when {
        matches &= condition.in_step(step, memory) != Some(false);
    }
    memory.tokens = (step.reasoning_tokens, step.answer_tokens);
    matches
}

/// Whether all conditions on a tool call hold.
pub fn matches_call(when: &[Condition], call: &ToolCallView) -> bool {
    when.iter().all(|condition| condition.in_call(call) != Some(false))
}

/// The texts that conditions on a step search.
pub fn texts(when: &[Condition]) -> impl Iterator<Item = &str> {
    let texts = when.iter().filter_map(|condition| match condition {
        Condition::TextContains(texts) | Condition::TextLacks(texts) => Some(texts.iter()),
        _ => None,
    });
    texts.flatten()
}

/// Whether the conditions on a step need the text of each phase by itself.
pub fn needs_phases(when: &[Condition]) -> bool {
    when.iter().any(|condition| matches!(condition, Condition::TextLacks(_)))
}

/// The largest `plan.every` with which conditions on a step can be checked; 0 is events only. `on_texts`: whether
/// the texts that they search are events.
pub fn every(when: &[Condition], on_texts: bool) -> u32 {
    use Condition::{
        AnswerTokens, AnswerTokensOver, ReasoningTokens, ReasoningTokensOver, TextContains,
    };
    let is_exact = |one: &Condition| matches!(one, ReasoningTokens(_) | AnswerTokens(_));
    let is_event = |one: &Condition| match one {
        Condition::Loop(true) | Condition::BudgetReached(true) => true,
        TextContains(_) => on_texts,
        _ => false,
    };
    let is_counted = |one: &Condition| {
        matches!(one, ReasoningTokensOver(_) | AnswerTokensOver(_) | TextContains(_))
    };
    match when {
        // Other events of the plan begin the count of `every` anew, so it cannot be as large as the number.
        _ if when.iter().any(is_exact) => 1,
        _ if when.iter().any(is_event) && needs_phases(when) && !on_texts => SEEN_TOKENS,
        _ if when.iter().any(is_event) => 0,
        _ if when.iter().any(is_counted) => 8,
        // Applies from the first token on.
        _ => 1,
    }
}

/// Whether the conditions wait for an event that may come again.
pub fn waits_for_event(when: &[Condition]) -> bool {
    when.iter().any(|one| matches!(one, Condition::Loop(true) | Condition::BudgetReached(true)))
}

/// Whether the conditions wait for a loop.
pub fn waits_for_loop(when: &[Condition]) -> bool {
    when.contains(&Condition::Loop(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_among_others_wherever_it_is() {
        let texts = ["Straße nach Rom".to_owned(), String::new(), "x".to_owned()];
        let haystack = Haystack::of(&texts);
        for part in ["Straße", "ße", "ß", "R", "Rom", "x", "nach Rom", "Straße nach Rom"] {
            assert!(haystack.contains(part), "{part}");
        }
        for part in ["Romx", "Rome", "y", "mo", "Straße nach Rom ", "naße"] {
            assert!(!haystack.contains(part), "{part}");
        }
    }

    #[test]
    fn text_is_found_across_steps_and_reported_once() {
        let texts = ["über Bord", "x"].map(str::to_owned).into_iter().collect();
        let mut tail = Tail::default();
        let found: Vec<_> = ["Er ging ü", "ber ", "Bo", "rd", " und", "", "x", "y", "yx"]
            .iter()
            .map(|new| tail.has(&texts, new))
            .collect();
        assert_eq!(found, [false, false, false, true, false, false, true, false, true]);
        assert!(tail.0.len() <= "über Bord".len());
    }
}
