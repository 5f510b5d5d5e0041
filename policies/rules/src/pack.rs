//! Rules as a text that is read much faster than TOML: `on-params` parses the rules once and packs them, and
//! each request unpacks them.
//!
//! A number is written in decimal and ends with a space; a text, and a list, begins with its length; a case
//! begins with its letter. Nothing else separates values, so reader and writer share one list of the fields:
//! [`packed`] and [`sparse`] write both from it.

use steersman_policy::{
    Action, AnswerForm, Ban, Bias, LoopRule, Phase, Plan, Refusal, Retention, SamplingChange,
    SamplingPatch, SavePoint, TokenBias, Verdict,
};

use super::rule::{Effect, Rule, StepEffect};
use super::when::When;

/// What packed rules begin with; TOML cannot.
const MARK: &str = "\u{1}";

/// What precedes a rule of `on-prompt`, and one of another hook.
const PROMPT: u8 = b'p';
const LATER: u8 = b'l';

/// Packs rules. Each is preceded by its hook and its length, so that a hook unpacks its own only.
pub fn pack(rules: &[Rule]) -> String {
    let mut text = MARK.to_owned();
    for rule in rules {
        let is_of_prompt = matches!(rule.effect, Effect::Prompt { .. });
        text.push(if is_of_prompt { PROMPT } else { LATER } as char);
        let mut packed = String::new();
        rule.write(&mut packed);
        packed.write(&mut text);
    }
    text
}

/// Unpacks the rules of `on-prompt`, or all others; `None` if the text is not packed.
pub fn unpack(text: &str, of_prompt: bool) -> Option<Vec<Rule>> {
    let mut text = text.strip_prefix(MARK)?;
    let wanted = if of_prompt { PROMPT } else { LATER };
    let mut rules = Vec::new();
    while !text.is_empty() {
        let hook = letter(&mut text)?;
        let length = u32::read(&mut text)? as usize;
        let (mut rule, rest) = text.split_at_checked(length)?;
        text = rest;
        if hook == wanted {
            rules.push(Rule::read(&mut rule)?);
        }
    }
    Some(rules)
}

/// A value that can be packed. `read` removes it from the beginning of the text.
trait Packed: Sized {
    fn write(&self, text: &mut String);
    fn read(text: &mut &str) -> Option<Self>;
}

impl Packed for u32 {
    fn write(&self, text: &mut String) {
        text.push_str(&self.to_string());
        text.push(' ');
    }

    fn read(text: &mut &str) -> Option<Self> {
        let mut number = 0_u32;
        for (at, byte) in text.bytes().enumerate() {
            if byte == b' ' && at > 0 {
                *text = text.get(at + 1..)?;
                return Some(number);
            }
            let digit = u32::from(byte.checked_sub(b'0').filter(|digit| *digit < 10)?);
            number = number.checked_mul(10)?.checked_add(digit)?;
        }
        None
    }
}

impl Packed for u16 {
    fn write(&self, text: &mut String) {
        u32::from(*self).write(text);
    }

    fn read(text: &mut &str) -> Option<Self> {
        u32::read(text)?.try_into().ok()
    }
}

impl Packed for bool {
    fn write(&self, text: &mut String) {
        text.push(if *self { '+' } else { '-' });
    }

    fn read(text: &mut &str) -> Option<Self> {
        Some(letter(text)? == b'+')
    }
}

impl Packed for f32 {
    fn write(&self, text: &mut String) {
        self.to_bits().write(text);
    }

    fn read(text: &mut &str) -> Option<Self> {
        u32::read(text).map(Self::from_bits)
    }
}

impl Packed for String {
    fn write(&self, text: &mut String) {
        // A parameter has at most 256 KiB.
        (self.len() as u32).write(text);
        text.push_str(self);
    }

    fn read(text: &mut &str) -> Option<Self> {
        let length = u32::read(text)? as usize;
        let (own, rest) = text.split_at_checked(length)?;
        *text = rest;
        Some(own.to_owned())
    }
}

impl<T: Packed> Packed for Vec<T> {
    fn write(&self, text: &mut String) {
        // Each element takes a byte of the parameter at least.
        (self.len() as u32).write(text);
        self.iter().for_each(|element| element.write(text));
    }

    fn read(text: &mut &str) -> Option<Self> {
        let length = u32::read(text)? as usize;
        let mut list = Vec::with_capacity(length.min(text.len()));
        for _ in 0..length {
            list.push(T::read(text)?);
        }
        Some(list)
    }
}

impl<T: Packed> Packed for Option<T> {
    fn write(&self, text: &mut String) {
        self.is_some().write(text);
        self.iter().for_each(|value| value.write(text));
    }

    fn read(text: &mut &str) -> Option<Self> {
        if bool::read(text)? { T::read(text).map(Some) } else { Some(None) }
    }
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

            fn read(text: &mut &str) -> Option<Self> {
                Box::read(text).map(|record| *record)
            }
        }

        /// Read where it stays: it is large.
        impl Packed for Box<$record> {
            fn write(&self, text: &mut String) {
                (**self).write(text);
            }

            fn read(text: &mut &str) -> Option<Self> {
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

            fn read(text: &mut &str) -> Option<Self> {
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

            fn read(text: &mut &str) -> Option<Self> {
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
    Rule { when, effect, times }
    LoopRule { max_period, repeats, min_tokens, similarity }
    SamplingPatch { temperature, top_p, top_k, min_p }
    Retention { at, seconds }
    Ban { tokens, steps }
    Bias { tokens, steps }
    TokenBias { token, bias }
    SamplingChange { sampling, steps }
    Refusal { status, message }
}

sparse! {
    When {
        b'a' profile, b'b' model, b'c' family, b'd' user_contains, b'e' user_words, b'f' user_under,
        b'g' user_over, b'h' system_contains, b'i' system_over, b'j' prompt_over, b'k' messages_over,
        b'l' has_tools, b'm' tools, b'n' reasoning_requested, b'o' can_reason, b'p' form_requested,
        b'q' caller_key, b'r' caller_user, b's' phase, b't' looping, b'u' budget_reached,
        b'v' reasoning_tokens_over, b'w' answer_tokens_over, b'x' text_contains, b'y' tool_called,
        b'z' arguments_contain, b'A' repeats_over, b'B' calls_over,
    }
    Plan {
        b'a' reasoning, b'b' reasoning_budget, b'c' answer_reserve, b'd' sampling, b'e' loops,
        b'f' every, b'g' checkpoint_every, b'h' note, b'i' retain, b'j' form, b'k' refuse,
        b'l' max_tokens, b'm' stop, b'n' tools, b'o' on_phase, b'p' on_newline,
        b'q' on_texts, b'r' on_tokens, b's' candidates, b't' route,
    }
}

packed! {
    Phase [b'r' Reasoning, b'a' Answer, b't' ToolCall]
    SavePoint [b's' System, b't' Turns, b'p' Prompt, b'r' Reply]
    AnswerForm [
        b'j' JsonObject, b's' JsonSchema(schema), b'r' Regex(regex), b'g' Grammar(grammar),
        b'c' Choice(choice),
    ]
    Effect [
        b'p' Prompt { spans, lines }, b'r' Request(plan), b's' Step(effects), b't' ToolCall(verdict),
    ]
    StepEffect [b'd' Do(action), b'l' RewindLoop]
    Action [
        b'i' Inject(words), b'c' CloseReasoning(words), b'r' Rewind(tokens), b'n' Ban(ban),
        b'b' Bias(bias), b'm' Sampling(change), b's' Stop(words),
    ]
    Verdict [b'a' Accept, b'r' Repair(words), b's' Stop(words)]
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
        assert_eq!(unpack(&packed, true), Some(of_prompt));
        assert_eq!(unpack(&packed, false), Some(later));
        for rule in &rules {
            let mut packed = String::new();
            rule.write(&mut packed);
            for end in (0..packed.len()).filter(|end| packed.is_char_boundary(*end)) {
                assert_eq!(Rule::read(&mut &packed[..end]), None, "cut at {end}: {packed}");
            }
        }
        for text in ["", "[[rule]]", "\u{1}9 ", "\u{1}l4294967296 ", "\u{1}l5 ab", "\u{1}l2 ;;"] {
            assert_eq!(unpack(text, false), None, "{text:?}");
        }
    }
}
