//! What an upstream can: by the kind of server that it is, and what the configuration says instead. What it lacks is an
//! error for the client.

use serde::Deserialize;
use steersman_request::{Form, RequestError};

/// The servers whose fields are known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum Kind {
    /// OpenAI's own fields and no others: vendors, and servers that are not known.
    #[default]
    #[serde(rename = "openai")]
    OpenAi,
    /// vLLM.
    #[serde(rename = "vllm")]
    Vllm,
    /// SGLang.
    #[serde(rename = "sglang")]
    Sglang,
    /// llama.cpp's server.
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
    /// mlx_lm.server.
    #[serde(rename = "mlx-lm")]
    MlxLm,
    /// Another Steersman.
    #[serde(rename = "steersman")]
    Steersman,
    /// Anthropic's messages.
    #[serde(rename = "anthropic")]
    Anthropic,
}

/// How an upstream continues the message of the assistant that it has begun.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Continues {
    /// It does not.
    #[default]
    Never,
    /// It continues the last message if it is told to: `continue_final_message`, `add_generation_prompt`.
    Told,
    /// It continues a last message of the assistant in any case.
    Always,
}

/// How an upstream is told to reason, or not to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReasoningField {
    /// It cannot be told.
    Never,
    /// `reasoning_effort`.
    #[default]
    Effort,
    /// `chat_template_kwargs.enable_thinking`.
    Template,
    /// `thinking` with `budget_tokens`.
    Budget,
    /// `thinking` without a budget, and `output_config.effort`.
    Adaptive,
}

/// A form of answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FormKind {
    /// Any JSON object.
    JsonObject,
    /// JSON that follows a schema.
    JsonSchema,
    /// A regular expression.
    Regex,
    /// A context-free grammar.
    Grammar,
    /// One of some texts.
    Choice,
}

impl FormKind {
    /// The kind of a form.
    pub fn of(form: &Form) -> Self {
        match form {
            Form::JsonObject => Self::JsonObject,
            Form::JsonSchema(_) => Self::JsonSchema,
            Form::Regex(_) => Self::Regex,
            Form::Lark(_) => Self::Grammar,
            Form::Choice(_) => Self::Choice,
        }
    }

    /// Its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::JsonObject => "json-object",
            Self::JsonSchema => "json-schema",
            Self::Regex => "regex",
            Self::Grammar => "grammar",
            Self::Choice => "choice",
        }
    }
}

/// `[upstreams.NAME.capabilities]`: each key overrides what was found.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CapabilityConfig {
    /// The server that it is.
    pub kind: Option<Kind>,
    /// How it continues a message: `never`, `told` or `always`.
    pub continues: Option<Continues>,
    /// How it is told to reason: `never`, `effort`, `template`, `budget` or `adaptive`.
    pub reasoning: Option<ReasoningField>,
    /// Its field for the limit on reasoning tokens; empty for none.
    pub budget_field: Option<String>,
    /// The forms that it enforces.
    pub forms: Option<Vec<FormKind>>,
    /// Whether it has tools.
    pub tools: Option<bool>,
    /// Whether it calls a tool that must be called, and none where none may be.
    pub tool_choice: Option<bool>,
    /// Whether it reports probabilities of tokens.
    pub logprobs: Option<bool>,
    /// Whether it reads `seed`.
    pub seed: Option<bool>,
    /// Whether it reads `top_k`.
    pub top_k: Option<bool>,
    /// Whether it reads `min_p`, `min_tokens`, `ignore_eos` and `repetition_penalty`.
    pub sampling: Option<bool>,
    /// Whether it reads `chat_template_kwargs`.
    pub template_variables: Option<bool>,
    /// Whether it reads the reasoning of earlier messages.
    pub earlier_reasoning: Option<bool>,
    /// Whether a beginning of the answer in `<think>` and `</think>` is its reasoning.
    pub think_tags: Option<bool>,
}

/// What an upstream can.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// The server that it is.
    pub kind: Kind,
    /// How it continues a message.
    pub continues: Continues,
    /// How it is told to reason.
    pub reasoning: ReasoningField,
    /// Its field for the limit on reasoning tokens, if it has one.
    pub budget_field: Option<String>,
    /// The forms that it enforces.
    pub forms: Vec<FormKind>,
    /// Whether it has tools.
    pub tools: bool,
    /// Whether it calls a tool that must be called, and none where none may be.
    pub tool_choice: bool,
    /// Whether it reports probabilities of tokens.
    pub logprobs: bool,
    /// Whether it reads `seed`.
    pub seed: bool,
    /// Whether it reads `top_k`.
    pub top_k: bool,
    /// Whether it reads sampling fields that OpenAI does not have: `min_p`, `min_tokens`, `ignore_eos`, and
    /// `repetition_penalty`.
    pub sampling: bool,
    /// Whether it reads `chat_template_kwargs`.
    pub template_variables: bool,
    /// Whether it reads the reasoning of earlier messages.
    pub earlier_reasoning: bool,
    /// Whether a beginning of the answer in `<think>` and `</think>` is its reasoning.
    pub think_tags: bool,
}

const ALL_FORMS: [FormKind; 5] = [
    FormKind::JsonObject,
    FormKind::JsonSchema,
    FormKind::Regex,
    FormKind::Grammar,
    FormKind::Choice,
];

impl Capabilities {
    /// The capabilities of a kind of server, and what `config` says instead.
    pub fn new(kind: Kind, config: &CapabilityConfig) -> Self {
        let of_kind = Self::of(kind);
        Self {
            kind,
            continues: config.continues.unwrap_or(of_kind.continues),
            reasoning: config.reasoning.unwrap_or(of_kind.reasoning),
            budget_field: match &config.budget_field {
                Some(field) => Some(field.clone()).filter(|field| !field.is_empty()),
                None => of_kind.budget_field,
            },
            forms: config.forms.clone().unwrap_or(of_kind.forms),
            tools: config.tools.unwrap_or(of_kind.tools),
            tool_choice: config.tool_choice.unwrap_or(of_kind.tool_choice),
            logprobs: config.logprobs.unwrap_or(of_kind.logprobs),
            seed: config.seed.unwrap_or(of_kind.seed),
            top_k: config.top_k.unwrap_or(of_kind.top_k),
            sampling: config.sampling.unwrap_or(of_kind.sampling),
            template_variables: config.template_variables.unwrap_or(of_kind.template_variables),
            earlier_reasoning: config.earlier_reasoning.unwrap_or(of_kind.earlier_reasoning),
            think_tags: config.think_tags.unwrap_or(of_kind.think_tags),
        }
    }

    fn of(kind: Kind) -> Self {
        let vendor = Self {
            kind,
            continues: Continues::Never,
            reasoning: ReasoningField::Effort,
            budget_field: None,
            forms: vec![FormKind::JsonObject, FormKind::JsonSchema],
            tools: true,
            tool_choice: true,
            logprobs: true,
            seed: true,
            top_k: false,
            sampling: false,
            template_variables: false,
            earlier_reasoning: false,
            think_tags: true,
        };
        let local = Self {
            continues: Continues::Told,
            reasoning: ReasoningField::Template,
            forms: ALL_FORMS.to_vec(),
            top_k: true,
            sampling: true,
            template_variables: true,
            earlier_reasoning: true,
            ..vendor.clone()
        };
        match kind {
            Kind::OpenAi => vendor,
            Kind::Vllm => Self { budget_field: Some("thinking_token_budget".into()), ..local },
            Kind::Sglang => Self {
                forms: vec![
                    FormKind::JsonObject,
                    FormKind::JsonSchema,
                    FormKind::Regex,
                    FormKind::Grammar,
                ],
                ..local
            },
            Kind::LlamaCpp => Self {
                continues: Continues::Always,
                budget_field: Some("thinking_budget_tokens".into()),
                forms: vec![FormKind::JsonObject, FormKind::JsonSchema, FormKind::Grammar],
                ..local
            },
            // It ignores fields that it does not know, forms and tool choices among them, and its streams have no
            // probabilities.
            Kind::MlxLm => Self {
                continues: Continues::Never,
                forms: Vec::new(),
                tool_choice: false,
                logprobs: false,
                sampling: false,
                ..local
            },
            Kind::Steersman => Self {
                budget_field: Some("max_thinking_tokens".into()),
                think_tags: false,
                ..local
            },
            Kind::Anthropic => Self {
                reasoning: ReasoningField::Budget,
                forms: vec![FormKind::JsonSchema],
                logprobs: false,
                seed: false,
                top_k: true,
                think_tags: false,
                ..vendor
            },
        }
    }

    /// Returns true if a message can be continued in its reasoning: then the reasoning can be closed.
    pub fn continues_reasoning(&self) -> bool {
        self.continues != Continues::Never && self.kind != Kind::Anthropic
    }

    /// Returns true if a message can be continued in its answer.
    pub fn continues_answer(&self) -> bool {
        self.continues != Continues::Never
    }
}

/// What an upstream lacks, as errors for the client.
pub struct Lacks {
    /// Name of the upstream.
    pub upstream: String,
}

impl Lacks {
    /// The error about a field.
    pub fn field(&self, field: &'static str) -> RequestError {
        let problem = format!(
            "is not supported by the upstream `{}`; leave it out, or use another model",
            self.upstream
        );
        RequestError::Field { field, problem }
    }

    /// The error about a form that `path` demands.
    pub fn form(&self, path: &str, kind: FormKind) -> RequestError {
        let problem = format!(
            "a form of the kind `{}` is not enforced by the upstream `{}`; leave it out, or use another model",
            kind.name(),
            self.upstream
        );
        RequestError::Structure { path: path.into(), problem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_overrides_what_a_kind_can() {
        let config: CapabilityConfig =
            toml::from_str("continues = 'told'\nforms = ['regex']\nbudget_field = 'budget'")
                .unwrap();
        let capabilities = Capabilities::new(Kind::OpenAi, &config);
        assert_eq!(capabilities.continues, Continues::Told);
        assert_eq!(capabilities.forms, [FormKind::Regex]);
        assert_eq!(capabilities.budget_field.as_deref(), Some("budget"));
        assert_eq!(capabilities.reasoning, ReasoningField::Effort);
    }

    #[test]
    fn messages_of_anthropic_are_not_continued_in_their_reasoning() {
        let config: CapabilityConfig = toml::from_str("continues = 'always'").unwrap();
        let capabilities = Capabilities::new(Kind::Anthropic, &config);
        assert!(capabilities.continues_answer() && !capabilities.continues_reasoning());
    }
}
