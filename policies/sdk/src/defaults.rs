//! The generated records derive no `Default`, but tests and plans want `..Default::default()`.

use crate::{Phase, Plan, PromptView, RequestView, SamplingPatch, Step, Summary, ToolCallView};

impl Default for PromptView {
    /// One without system text.
    fn default() -> Self {
        Self { profile: "default".into(), params: Vec::new(), system: Vec::new() }
    }
}

#[allow(clippy::derivable_impls, reason = "the record is generated")]
impl Default for SamplingPatch {
    /// Leaves every value as it is.
    fn default() -> Self {
        Self { temperature: None, top_p: None, top_k: None, min_p: None }
    }
}

impl Default for RequestView {
    /// A request of a model that can think, with nothing asked.
    fn default() -> Self {
        Self {
            id: String::new(),
            profile: "default".into(),
            model: String::new(),
            family: String::new(),
            params: Vec::new(),
            prompt_tokens: 0,
            context_left: 32_768,
            messages: 1,
            system_chars: 0,
            user: String::new(),
            tools: Vec::new(),
            can_reason: true,
            reasoning: None,
            reasoning_budget: None,
            max_tokens: None,
            sampling: SamplingPatch::default(),
            seed: 0,
        }
    }
}

impl Default for Plan {
    /// Leaves all to the engine.
    fn default() -> Self {
        Self {
            reasoning: None,
            reasoning_budget: None,
            answer_reserve: None,
            sampling: SamplingPatch::default(),
            loops: None,
            every: 0,
            checkpoint_every: 0,
            note: None,
            retain: None,
        }
    }
}

impl Default for Step {
    /// Nothing happened yet, in an answer.
    fn default() -> Self {
        Self {
            index: 0,
            phase: Phase::Answer,
            reasoning_tokens: 0,
            answer_tokens: 0,
            reasoning_left: 0,
            tokens: Vec::new(),
            text: String::new(),
            loop_found: None,
            budget_reached: false,
        }
    }
}

impl Default for ToolCallView {
    /// A first call, with no arguments.
    fn default() -> Self {
        Self {
            name: String::new(),
            arguments: "{}".into(),
            digest: String::new(),
            index: 0,
            earlier: Vec::new(),
        }
    }
}

impl Default for Summary {
    /// An empty answer that the model ended.
    fn default() -> Self {
        Self {
            reason: "stop".into(),
            prompt_tokens: 0,
            reasoning_tokens: 0,
            answer_tokens: 0,
            loops: 0,
            tool_calls: 0,
        }
    }
}
