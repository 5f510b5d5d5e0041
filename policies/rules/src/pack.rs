//! Rules as a text that is read much faster than TOML: `on-params` parses the rules once and packs them, and
//! each request unpacks them.
//!
//! A number is written in digits of six bits, the lowest first, with a seventh bit in all but the last; a text,
//! and a list, begins with its length; a case begins with its letter. Nothing else separates values, so reader and writer share one list of the fields:
//! [`packed`] and [`sparse`] write both from it.

use steersman_policy::{
    Action, AnswerForm, Ban, Bias, Counted, LoopRule, Phase, Plan, Refusal, Retention,
    SamplingChange, SamplingPatch, SavePoint, TokenBias, Verdict,
};

use super::replace::Replacement;
use super::rule::{Effect, Rule, StepEffect};
use super::when::{Condition, Texts};

/// What packed rules begin with; TOML cannot.
const MARK: &str = "\u{1}";

/// A digit of a number, and the bit of all but the last.
const DIGIT_BITS: u32 = 6;
const DIGIT: u32 = (1 << DIGIT_BITS) - 1;
const MORE: u32 = 1 << DIGIT_BITS;

/// What precedes a rule: its hook. One of `on-step` may rewind.
const PROMPT: u8 = b'p';
const REQUEST: u8 = b'r';
const STEP: u8 = b's';
const REWINDING_STEP: u8 = b'w';
const TOOL_CALL: u8 = b't';
/// One of `on-step` that has texts for the tokenizer, which are its tokens from the request on.
const STEP_WITH_TEXTS: u8 = b'e';
const TEXT: u8 = b'x';

/// Packs rules. Each is preceded by its hook and its length, so that a hook unpacks its own only.
pub fn pack(rules: &[Rule]) -> String {
    let mut text = MARK.to_owned();
    for rule in rules {
        let hook = match &rule.effect {
            Effect::Prompt { .. } => PROMPT,
            Effect::Request(_) => REQUEST,
            Effect::Step(effects) if effects.iter().any(|one| one.words() > 0) => STEP_WITH_TEXTS,
            Effect::Step(effects) if effects.iter().any(StepEffect::rewinds) => REWINDING_STEP,
            Effect::Step(_) | Effect::PackedStep { .. } => STEP,
            Effect::ToolCall(_) | Effect::PackedToolCall(_) => TOOL_CALL,
            Effect::Text(_) => TEXT,
        };
        text.push(char::from(hook));
        let mut packed = String::new();
        rule.write(&mut packed);
        packed.write(&mut text);
    }
    text
}

/// Whether a text is packed.
pub fn is_packed(text: &str) -> bool {
    text.starts_with(MARK)
}

/// Unpacks the rules of `on-prompt`, or all others, of which `holds` says no condition that it does not hold, with
/// the conditions of which it says nothing. The rest of a rule is read only then: of many rules few match. `None`
/// if the text is not packed.
pub fn unpack(
    text: &'static str,
    of_prompt: bool,
    holds: impl Fn(&Condition) -> Option<bool>,
) -> Option<Vec<Rule>> {
    let mut text = text.strip_prefix(MARK)?;
    let mut rules = Vec::new();
    while !text.is_empty() {
        let hook = letter(&mut text)?;
        let mut rule = words(&mut text)?;
        if (hook == PROMPT) != of_prompt {
            continue;
        }
        let mut when = Vec::new();
        let mut matches = true;
        for _ in 0..number(&mut rule)? {
            let condition = Condition::read(&mut rule)?;
            match holds(&condition) {
                None => when.push(condition),
                Some(true) => {}
                Some(false) => {
                    matches = false;
                    break;
                }
            }
        }
        if matches {
            let times = Packed::read(&mut rule)?;
            let effect = match hook {
                STEP => Effect::PackedStep { packed: rule, rewinds: false },
                REWINDING_STEP => Effect::PackedStep { packed: rule, rewinds: true },
                TOOL_CALL => Effect::PackedToolCall(rule),
                _ => Effect::read(&mut rule)?,
            };
            rules.push(Rule { when, times, effect });
        }
    }
    Some(rules)
}

/// The effect that [`unpack`] left packed.
pub fn effect(mut packed: &'static str) -> Option<Effect> {
    Effect::read(&mut packed)
}

/// A value that can be packed. `read` removes it from the beginning of the text.
trait Packed: Sized {
    fn write(&self, text: &mut String);
    fn read(text: &mut &'static str) -> Option<Self>;
}

impl Packed for u32 {
    fn write(&self, text: &mut String) {
        let mut rest = *self;
        while rest > DIGIT {
            text.push(char::from((rest & DIGIT | MORE) as u8));
            rest >>= DIGIT_BITS;
        }
        text.push(char::from(rest as u8));
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        number(text)
    }
}

impl Packed for u16 {
    fn write(&self, text: &mut String) {
        u32::from(*self).write(text);
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        u32::read(text)?.try_into().ok()
    }
}

impl Packed for bool {
    fn write(&self, text: &mut String) {
        text.push(if *self { '+' } else { '-' });
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        Some(letter(text)? == b'+')
    }
}

impl Packed for f32 {
    fn write(&self, text: &mut String) {
        self.to_bits().write(text);
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        u32::read(text).map(Self::from_bits)
    }
}

impl Packed for String {
    fn write(&self, text: &mut String) {
        push_words(text, self);
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        words(text).map(str::to_owned)
    }
}

impl Packed for Texts {
    fn write(&self, text: &mut String) {
        push_words(text, self.packed());
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        words(text).map(Texts::of_packed)
    }
}

impl<T: Packed> Packed for Vec<T> {
    fn write(&self, text: &mut String) {
        // Each element takes a byte of the parameter at least.
        (self.len() as u32).write(text);
        self.iter().for_each(|element| element.write(text));
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        let length = u32::read(text)? as usize;
        let mut list = Vec::with_capacity(length.min(text.len()));
        for _ in 0..length {
            list.push(T::read(text)?);
        }
        Some(list)
    }
}

impl Packed for (String, f32) {
    fn write(&self, text: &mut String) {
        self.0.write(text);
        self.1.write(text);
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        Some((Packed::read(text)?, Packed::read(text)?))
    }
}

impl Packed for Box<Condition> {
    fn write(&self, text: &mut String) {
        (**self).write(text);
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        Condition::read(text).map(Box::new)
    }
}

impl<T: Packed> Packed for Option<T> {
    fn write(&self, text: &mut String) {
        self.is_some().write(text);
        self.iter().for_each(|value| value.write(text));
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        if bool::read(text)? { T::read(text).map(Some) } else { Some(None) }
    }
}

/// Removes the number that the text begins with.
fn number(text: &mut &str) -> Option<u32> {
    let mut number = 0;
    for shift in (0..u32::BITS).step_by(DIGIT_BITS as usize) {
        let digit = u32::from(letter(text)?);
        let bits = digit & DIGIT;
        if digit > DIGIT | MORE || bits << shift >> shift != bits {
            return None;
        }
        number |= bits << shift;
        if digit & MORE == 0 {
            return Some(number);
        }
    }
    None
}

/// Removes the text that the text begins with, behind its length.
pub fn words<'a>(text: &mut &'a str) -> Option<&'a str> {
    let length = number(text)? as usize;
    let (own, rest) = text.split_at_checked(length)?;
    *text = rest;
    Some(own)
}

/// Appends a text behind its length.
pub fn push_words(packed: &mut String, words: &str) {
    // A parameter has at most 256 KiB.
    (words.len() as u32).write(packed);
    packed.push_str(words);
}

/// Removes the letter that the text begins with.
fn letter(text: &mut &str) -> Option<u8> {
    let letter = *text.as_bytes().first()?;
    *text = text.get(1..)?;
    Some(letter)
}

/// Packs records of which most fields have their defaults: each other field behind its letter, then a `;`.
macro_rules! sparse {
    ($($record:ident { $($letter:literal $field:ident),+ $(,)? })+) => {$(
        impl Packed for $record {
            fn write(&self, text: &mut String) {
                let default = Self::default();
                $(if self.$field != default.$field {
                    text.push($letter as char);
                    self.$field.write(text);
                })+
                text.push(';');
            }

            fn read(text: &mut &'static str) -> Option<Self> {
                Box::read(text).map(|record| *record)
            }
        }

        /// Read where it stays: it is large.
        impl Packed for Box<$record> {
            fn write(&self, text: &mut String) {
                (**self).write(text);
            }

            fn read(text: &mut &'static str) -> Option<Self> {
                let mut record = Box::<$record>::default();
                loop {
                    match letter(text)? {
                        b';' => return Some(record),
                        $($letter => record.$field = Packed::read(text)?,)+
                        _ => return None,
                    }
                }
            }
        }
    )+};
}

/// Packs records field by field, and cases by their letters.
macro_rules! packed {
    ($($record:ident { $($field:ident),+ $(,)? })+) => {$(
        impl Packed for $record {
            fn write(&self, text: &mut String) {
                $(self.$field.write(text);)+
            }

            fn read(text: &mut &'static str) -> Option<Self> {
                Some(Self { $($field: Packed::read(text)?),+ })
            }
        }
    )+};
    ($($variant:ident [ $($letter:literal $case:ident $(($($value:ident),+))?
        $({ $($field:ident),+ })?),+ $(,)? ])+) => {$(
        impl Packed for $variant {
            fn write(&self, text: &mut String) {
                match self {
                    $(Self::$case $(($($value),+))? $({ $($field),+ })? => {
                        text.push($letter as char);
                        $($($value.write(text);)+)?
                        $($($field.write(text);)+)?
                    })+
                }
            }

            fn read(text: &mut &'static str) -> Option<Self> {
                Some(match letter(text)? {
                    $($letter => {
                        $($(let $value = Packed::read(text)?;)+)?
                        $($(let $field = Packed::read(text)?;)+)?
                        Self::$case $(($($value),+))? $({ $($field),+ })?
                    })+
                    _ => return None,
                })
            }
        }
    )+};
}

packed! {
    Rule { when, times, effect }
    LoopRule { max_period, repeats, min_tokens, similarity }
    SamplingPatch { temperature, top_p, top_k, min_p }
    Retention { at, seconds }
    Ban { tokens, steps }
    Bias { tokens, steps }
    TokenBias { token, bias }
    SamplingChange { sampling, steps }
    Refusal { status, message, retry_after }
    Replacement { old, new, is_word }
}

sparse! {
    Plan {
        b'a' reasoning, b'b' reasoning_budget, b'c' answer_reserve, b'd' sampling, b'e' loops,
        b'f' every, b'g' checkpoint_every, b'h' note, b'i' retain, b'j' form, b'k' refuse,
        b'l' max_tokens, b'm' stop, b'n' tools, b'o' on_phase, b'p' on_newline,
        b'q' on_texts, b'r' on_tokens, b's' candidates, b't' route, b'u' limit_counts,
    }
}

packed! {
    Condition [
        b'a' Profile(names), b'b' Model(names), b'c' Family(names), b'd' UserContains(parts),
        b'e' UserWords(words), b'f' UserUnder(limit), b'g' UserOver(limit), b'h' SystemContains(parts),
        b'i' SystemOver(limit), b'j' PromptOver(limit), b'k' MessagesOver(limit), b'l' HasTools(has),
        b'm' Tools(names), b'n' ReasoningRequested(is), b'o' CanReason(can), b'p' FormRequested(is),
        b'q' CallerKey(digests), b'r' CallerUser(digests), b's' Phase(phase), b't' Loop(is),
        b'u' BudgetReached(is), b'v' ReasoningTokensOver(limit), b'w' AnswerTokensOver(limit),
        b'x' TextContains(texts), b'y' ToolCalled(names), b'z' ArgumentsContain(parts),
        b'A' RepeatsOver(limit), b'B' CallsOver(limit), b'C' Not(condition), b'D' TextLacks(texts),
        b'E' ReasoningTokens(limit), b'F' AnswerTokens(limit),
    ]
    Phase [b'r' Reasoning, b'a' Answer, b't' ToolCall]
    Counted [b'a' Answer, b'r' Reply]
    SavePoint [b's' System, b't' Turns, b'p' Prompt, b'r' Reply]
    AnswerForm [
        b'j' JsonObject, b's' JsonSchema(schema), b'r' Regex(regex), b'g' Grammar(grammar),
        b'c' Choice(choice),
    ]
    StepEffect [
        b'd' Do(action), b'l' RewindLoop, b'n' BanTexts(ban, texts), b'b' BiasTexts(bias, texts),
    ]
    Action [
        b'i' Inject(words), b'c' CloseReasoning(words), b'r' Rewind(tokens), b'n' Ban(ban),
        b'b' Bias(bias), b'm' Sampling(change), b's' Stop(words),
    ]
    Verdict [b'a' Accept, b'r' Repair(words), b's' Stop(words)]
}

impl Packed for Effect {
    fn write(&self, text: &mut String) {
        match self {
            Self::Prompt { spans, lines } => {
                text.push('p');
                spans.write(text);
                lines.write(text);
            }
            Self::Request(plan) => {
                text.push('r');
                plan.write(text);
            }
            Self::Step(effects) => {
                text.push('s');
                effects.write(text);
            }
            Self::ToolCall(verdict) => {
                text.push('t');
                verdict.write(text);
            }
            Self::Text(replaced) => {
                text.push('x');
                replaced.write(text);
            }
            Self::PackedStep { packed, .. } | Self::PackedToolCall(packed) => text.push_str(packed),
        }
    }

    fn read(text: &mut &'static str) -> Option<Self> {
        Some(match letter(text)? {
            b'p' => Self::Prompt { spans: Packed::read(text)?, lines: Packed::read(text)? },
            b'r' => Self::Request(Packed::read(text)?),
            b's' => Self::Step(Packed::read(text)?),
            b't' => Self::ToolCall(Packed::read(text)?),
            b'x' => Self::Text(Packed::read(text)?),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    /// Every key, so that a field that is left out is missed.
    const EVERYTHING: &str = include_str!("everything.toml");

    #[test]
    fn unpacked_rules_are_those_that_were_packed() {
        let rules = parse::rules(EVERYTHING).unwrap();
        for (key, _) in parse::WHEN.iter().chain(parse::DO) {
            assert!(EVERYTHING.contains(key), "{key} is missing in everything.toml");
        }
        let packed = pack(&rules);
        let is_of_prompt = |rule: &Rule| matches!(rule.effect, Effect::Prompt { .. });
        let (of_prompt, later): (Vec<_>, Vec<_>) = rules.iter().cloned().partition(is_of_prompt);
        assert!(!of_prompt.is_empty());
        let packed: &'static str = packed.leak();
        let unpack = |text, of_prompt, holds: &dyn Fn(&Condition) -> Option<bool>| {
            let mut rules = super::unpack(text, of_prompt, holds)?;
            rules.iter_mut().for_each(|rule| rule.effect.unpack());
            Some(rules)
        };
        assert_eq!(unpack(packed, true, &|_| None), Some(of_prompt));
        assert_eq!(unpack(packed, false, &|_| None), Some(later.clone()));
        let is_phase = |one: &Condition| matches!(one, Condition::Phase(_));
        let holds = |one: &Condition| is_phase(one).then_some(false);
        let others = later.iter().filter(|rule| !rule.when.iter().any(is_phase)).cloned();
        assert_eq!(unpack(packed, false, &holds), Some(others.collect()));
        let mut known = later;
        known.iter_mut().for_each(|rule| rule.when.retain(|one| !is_phase(one)));
        assert_eq!(unpack(packed, false, &|one| is_phase(one).then_some(true)), Some(known));
        for rule in &rules {
            let mut packed = String::new();
            rule.write(&mut packed);
            let packed: &'static str = packed.leak();
            for end in (0..packed.len()).filter(|end| packed.is_char_boundary(*end)) {
                assert_eq!(Rule::read(&mut &packed[..end]), None, "cut at {end}: {packed}");
            }
        }
        let long = "\u{1}r\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}\u{7f}";
        for text in ["", "[[rule]]", "\u{1}9!", long, "\u{1}r5 ab", "\u{1}r\u{2};;"] {
            assert_eq!(unpack(text, false, &|_| None), None, "{text:?}");
        }
        for number in [0, 1, 63, 64, 4095, 4096, u32::MAX] {
            let mut packed = String::new();
            number.write(&mut packed);
            assert_eq!(super::number(&mut packed.as_str()), Some(number));
        }
    }
}
