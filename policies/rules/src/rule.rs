//! A rule, parsed and checked.

use steersman_policy::{Action, Ban, Bias, Plan, Step, TokenBias, Verdict, tokenizer};

use super::pack;
use super::replace::Replacement;
use super::when::Condition;

/// A rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// All must hold.
    pub when: Vec<Condition>,
    pub effect: Effect,
    /// How often it applies in a request; 0 is every time.
    pub times: u32,
}

/// What a rule does, in one of the hooks.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// In `on-prompt`: removes text from system text.
    Prompt {
        /// Spans, of which the first occurrence is removed.
        spans: Vec<String>,
        /// Prefixes of lines.
        lines: Vec<String>,
    },
    /// In `on-request`: the values set here go into the plan.
    Request(Box<Plan>),
    /// In `on-step`.
    Step(Vec<StepEffect>),
    /// In `on-tool-call`.
    ToolCall(Verdict),
    /// In `on-text`.
    Text(Vec<Replacement>),
    /// In `on-step`, packed: it is unpacked when the rule applies. Few rules do.
    PackedStep { packed: &'static str, rewinds: bool },
    /// In `on-tool-call`, packed.
    PackedToolCall(&'static str),
}

/// An action, or one that depends on the step.
#[derive(Debug, Clone, PartialEq)]
pub enum StepEffect {
    /// A fixed action.
    Do(Action),
    /// A rewind to the first block of the loop.
    RewindLoop,
    /// A ban, and further texts whose tokens it bans. [`StepEffect::tokenize`] replaces it.
    BanTexts(Ban, Vec<String>),
    /// Biases, and those of texts. [`StepEffect::tokenize`] replaces it.
    BiasTexts(Bias, Vec<(String, f32)>),
}

impl Rule {
    /// Whether it has applied as often as it may.
    pub fn is_exhausted(&self, applied: u32) -> bool {
        self.times > 0 && applied >= self.times
    }
}

impl Effect {
    /// Whether it may rewind.
    pub fn rewinds(&self) -> bool {
        match self {
            Self::Step(effects) => effects.iter().any(StepEffect::rewinds),
            Self::PackedStep { rewinds, .. } => *rewinds,
            _ => false,
        }
    }

    /// Unpacks an effect that was left packed. One that cannot be read does nothing: `on-params` packed it.
    pub fn unpack(&mut self) {
        match *self {
            Self::PackedStep { packed, .. } => {
                *self = pack::effect(packed).unwrap_or(Self::Step(Vec::new()))
            }
            Self::PackedToolCall(packed) => {
                *self = pack::effect(packed).unwrap_or(Self::Step(Vec::new()))
            }
            _ => {}
        }
    }
}

impl StepEffect {
    pub fn rewinds(&self) -> bool {
        matches!(self, Self::RewindLoop | Self::Do(Action::Rewind(_)))
    }

    /// Whether it changes the text from which the reply continues.
    pub fn redirects(&self) -> bool {
        self.rewinds() || matches!(self, Self::Do(Action::Inject(_) | Action::CloseReasoning(_)))
    }

    pub fn stops(&self) -> bool {
        matches!(self, Self::Do(Action::Stop(_)))
    }

    /// Whether it is a ban or a bias without tokens, as of texts that are no tokens.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Do(Action::Ban(ban)) => ban.tokens.is_empty(),
            Self::Do(Action::Bias(bias)) => bias.tokens.is_empty(),
            _ => false,
        }
    }

    /// Number of texts that the tokenizer is asked for.
    pub fn words(&self) -> usize {
        match self {
            Self::BanTexts(_, texts) => texts.len(),
            Self::BiasTexts(_, texts) => texts.len(),
            Self::Do(_) | Self::RewindLoop => 0,
        }
    }

    /// Replaces texts by their tokens. A text that is no single token, neither as it is nor behind a space, is left
    /// out, with a note: banning a part of it would ban other words.
    pub fn tokenize(&mut self, notes: &mut Vec<String>) {
        *self = Self::Do(match std::mem::replace(self, Self::RewindLoop) {
            Self::BanTexts(mut ban, texts) => {
                for text in &texts {
                    ban.tokens.extend(tokens(text, notes));
                }
                Action::Ban(ban)
            }
            Self::BiasTexts(mut bias, texts) => {
                for (text, amount) in &texts {
                    let one = |token| TokenBias { token, bias: *amount };
                    bias.tokens.extend(tokens(text, notes).into_iter().map(one));
                }
                Action::Bias(bias)
            }
            other => {
                *self = other;
                return;
            }
        });
    }

    /// Its action for a step; `None` for a rewind of a loop without a loop.
    pub fn action(&self, step: &Step) -> Option<Action> {
        match self {
            Self::Do(action) => Some(action.clone()),
            Self::BanTexts(..) | Self::BiasTexts(..) => None,
            Self::RewindLoop => step.loop_found.map(|found| {
                Action::Rewind(found.period.saturating_mul(found.repeats.saturating_sub(1)))
            }),
        }
    }
}

/// The tokens that are this text, or this text behind a space; with none, a note.
fn tokens(text: &str, notes: &mut Vec<String>) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut shortest = usize::MAX;
    let behind_space = (!text.starts_with(char::is_whitespace)).then(|| format!(" {text}"));
    for text in [Some(text), behind_space.as_deref()].into_iter().flatten() {
        match tokenizer::encode(text)[..] {
            [token] if !tokens.contains(&token) => tokens.push(token),
            [_] => {}
            ref several => shortest = shortest.min(several.len()),
        }
    }
    if tokens.is_empty() {
        notes.push(format!(
            "`{text}` is {shortest} tokens of this model, not one, so rules neither ban nor bias it"
        ));
    }
    tokens
}
