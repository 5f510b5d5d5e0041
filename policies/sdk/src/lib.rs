//! The crate for policies written in Rust: implement [`Policy`] for a struct and export it.
//!
//! The types are generated from `wit/policy.wit`. They also exist natively, so `cargo test` tests the
//! decisions like any other code; only [`export!`] needs a Wasm target.
//!
//! ```
//! use steersman_policy::{Action, Phase, Plan, Policy, RequestView, Step};
//!
//! /// Limits reasoning to 100 tokens.
//! #[derive(Default)]
//! struct Brief;
//!
//! impl Policy for Brief {
//!     fn on_request(&mut self, request: RequestView) -> Plan {
//!         Plan { reasoning: request.reasoning, every: 10, ..Plan::default() }
//!     }
//!
//!     fn on_step(&mut self, step: Step) -> Vec<Action> {
//!         let long = step.phase == Phase::Reasoning && step.reasoning_tokens >= 100;
//!         if long { vec![Action::CloseReasoning("In short: ".into())] } else { vec![] }
//!     }
//! }
//!
//! steersman_policy::export!(Brief);
//! # fn main() {
//! let step = Step { phase: Phase::Reasoning, reasoning_tokens: 100, ..Step::default() };
//! assert_eq!(Brief.on_step(step).len(), 1);
//! # }
//! ```

pub mod bindings;
mod host;
mod params;
mod prompt;

use std::time::Duration;

pub use bindings::steersman::policy::types::{
    Action, AnswerForm, Ban, Bias, Caller, Candidate, Counted, DrawnToken, EarlierCall, LoopReport,
    LoopRule, MessageView, Observations, Outlook, ParamsView, Phase, Plan, PreparedParams,
    PromptEdit, PromptView, Refusal, Replacement, RequestView, Retention, SamplingChange,
    SamplingPatch, SavePoint, Step, Summary, TextChange, TextVerdict, TextView, TokenBias,
    ToolCallView, Verdict, Watched, WatchedToken,
};
pub use host::{counters, failure, kv, log, tokenizer};
pub use params::{note, read_params, texts};
pub use prompt::{EDITS, is_billing_header};

/// Names and values that the reply carries beside the notes.
pub type Labels = Vec<(String, String)>;

/// A policy. One value serves one request; `Default` creates it before the first hook.
///
/// A panic is a failure of the policy in this request; its message appears in notes and log
/// ([`failure::fail`]), and `on_failure` of the profile decides how the request continues.
pub trait Policy: Default {
    /// Checks parameters and does what would otherwise be done in each request. Called once for each text of
    /// the parameters, on an instance that serves no request. The default replaces none.
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let _ = params;
        PreparedParams::default()
    }

    /// Edits system text before the prompt is rendered. Called first, once. The edits apply in order.
    fn on_prompt(&mut self, prompt: PromptView) -> Vec<PromptEdit> {
        let _ = prompt;
        Vec::new()
    }

    /// Plans a request. Called once, before prefill. The default leaves all choices to the engine.
    fn on_request(&mut self, request: RequestView) -> Plan {
        let _ = request;
        Plan::default()
    }

    /// Answers the tokens committed since the last call with actions that apply before the next token.
    /// Called after each [`Plan::every`] tokens, when a loop is reported, when the reasoning budget is used
    /// up, and after the events that the plan names ([`Plan::on_phase`], [`Plan::on_newline`],
    /// [`Plan::on_texts`], [`Plan::on_tokens`]).
    fn on_step(&mut self, step: Step) -> Vec<Action> {
        let _ = step;
        Vec::new()
    }

    /// Decides what the client receives of answer text. Called for each piece of it, by policies that are exported
    /// `with on_text` ([`export!`]).
    fn on_text(&mut self, text: TextView) -> TextVerdict {
        let _ = text;
        TextVerdict::Pass
    }

    /// Decides about a tool call that the model has generated, before the client receives it.
    fn on_tool_call(&mut self, call: ToolCallView) -> Verdict {
        let _ = call;
        Verdict::Accept
    }

    /// Receives the summary of the request, and returns labels for the reply. Called last, once.
    fn on_finish(&mut self, summary: Summary) -> Labels {
        let _ = summary;
        Labels::new()
    }
}

/// Exports a [`Policy`] as the hooks of the component. Expands to nothing on targets other than Wasm,
/// so that the same crate can be tested natively.
///
/// `export!(MyPolicy, without on_tool_call)` leaves that hook out. Where no policy of a request has it,
/// tool calls are sent to the client while they are written; otherwise they wait for their verdicts.
///
/// `export!(MyPolicy, with on_text)` adds that hook, which is called for each piece of an answer;
/// `export!(MyPolicy, without on_tool_call, with on_text)` does both.
#[macro_export]
macro_rules! export {
    (on_text) => {
        use $crate::bindings::texts;

        impl texts::exports::steersman::policy::on_text::Guest for Shim {
            fn on_text(text: $crate::TextView) -> $crate::TextVerdict {
                POLICY.with_borrow_mut(|p| $crate::Policy::on_text(p, text))
            }
        }

        texts::export_texts!(Shim with_types_in texts);
    };
    ($policy:ty) => {
        $crate::export!($policy, verdicts {});
    };
    ($policy:ty, without on_tool_call) => {
        $crate::export!($policy, {});
    };
    ($policy:ty, with on_text) => {
        $crate::export!($policy, verdicts { $crate::export!(on_text); });
    };
    ($policy:ty, without on_tool_call, with on_text) => {
        $crate::export!($policy, { $crate::export!(on_text); });
    };
    ($policy:ty, verdicts { $($texts:tt)* }) => {
        $crate::export!($policy, {
            use $crate::bindings::verdicts;

            impl verdicts::exports::steersman::policy::on_tool_call::Guest for Shim {
                fn on_tool_call(call: $crate::ToolCallView) -> $crate::Verdict {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_tool_call(p, call))
                }
            }

            verdicts::export_verdicts!(Shim with_types_in verdicts);

            $($texts)*
        });
    };
    ($policy:ty, { $($others:tt)* }) => {
        #[cfg(target_family = "wasm")]
        const _: () = {
            use ::std::cell::RefCell;
            use $crate::bindings::exports::steersman::policy as hooks;

            ::std::thread_local! {
                static POLICY: RefCell<$policy> = {
                    $crate::failure::report_panics();
                    RefCell::default()
                };
            }

            struct Shim;

            impl hooks::on_params::Guest for Shim {
                fn on_params(params: $crate::ParamsView) -> $crate::PreparedParams {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_params(p, params))
                }
            }

            impl hooks::on_prompt::Guest for Shim {
                fn on_prompt(prompt: $crate::PromptView) -> ::std::vec::Vec<$crate::PromptEdit> {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_prompt(p, prompt))
                }
            }

            impl hooks::on_request::Guest for Shim {
                fn on_request(request: $crate::RequestView) -> $crate::Plan {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_request(p, request))
                }
            }

            impl hooks::on_step::Guest for Shim {
                fn on_step(step: $crate::Step) -> ::std::vec::Vec<$crate::Action> {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_step(p, step))
                }
            }

            impl hooks::on_finish::Guest for Shim {
                fn on_finish(summary: $crate::Summary) -> $crate::Labels {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_finish(p, summary))
                }
            }

            $crate::bindings::export_hooks!(Shim with_types_in $crate::bindings);

            $($others)*
        };
    };
}

impl ParamsView {
    /// The value of a parameter (`[profiles.NAME.params]`).
    pub fn param(&self, name: &str) -> Option<&str> {
        param(&self.params, name)
    }
}

impl PromptView {
    /// The value of a parameter (`[profiles.NAME.params]`).
    pub fn param(&self, name: &str) -> Option<&str> {
        param(&self.params, name)
    }
}

impl RequestView {
    /// Divides the tokens that context and limits leave for the reply: those for reasoning, and those
    /// reserved for the answer. The latter are `max_answer_tokens`, or else `reserve`, or half of all if that is
    /// less. Further `closing` tokens are left for the text that closes the reasoning.
    ///
    /// ```
    /// use steersman_policy::RequestView;
    ///
    /// let request = RequestView { max_tokens: Some(4096), ..RequestView::default() };
    /// assert_eq!(request.divide_tokens(1024, 32), (3040, 1024));
    /// // A limit that counts the answer alone costs the reasoning nothing.
    /// let request = RequestView { max_answer_tokens: Some(16), ..RequestView::default() };
    /// assert_eq!(request.divide_tokens(1024, 32), (32_720, 16));
    /// ```
    pub fn divide_tokens(&self, reserve: u32, closing: u32) -> (u32, u32) {
        let all = self.context_left.min(self.max_tokens.unwrap_or(u32::MAX));
        let reserve = self.max_answer_tokens.unwrap_or(reserve).min(all / 2);
        (all.saturating_sub(reserve).saturating_sub(closing), reserve)
    }

    /// The value of a parameter (`[profiles.NAME.params]`).
    pub fn param(&self, name: &str) -> Option<&str> {
        param(&self.params, name)
    }
}

fn param<'a>(params: &'a [(String, String)], name: &str) -> Option<&'a str> {
    params.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

impl ToolCallView {
    /// Number of the newest answered calls of this tool with these arguments that have the same
    /// result. Calls of other tools or with other arguments in between are ignored.
    pub fn same_results(&self) -> u32 {
        let mut results = self
            .earlier
            .iter()
            .rev()
            .filter(|earlier| earlier.name == self.name && earlier.arguments == self.digest)
            .filter_map(|earlier| earlier.answered.as_ref());
        let Some(newest) = results.next() else { return 0 };
        let before = results.take_while(|result| *result == newest).count();
        u32::try_from(before + 1).expect("the host passes at most 64 earlier calls")
    }
}

impl Retention {
    /// Saves the state at a save point until it is evicted.
    pub fn at(at: SavePoint) -> Self {
        Self { at, seconds: 0 }
    }

    /// Protects the state from eviction for this time: whole seconds, at most a day.
    ///
    /// A policy for one-off questions about one large system text retains only that text:
    ///
    /// ```
    /// use std::time::Duration;
    /// use steersman_policy::{Plan, Retention, SavePoint};
    ///
    /// let hour = Duration::from_secs(3600);
    /// let system = Retention::at(SavePoint::System).lasting(hour);
    /// let plan = Plan { retain: Some(vec![system]), ..Plan::default() };
    /// assert_eq!(plan.retain.unwrap()[0].seconds, 3600);
    /// ```
    pub fn lasting(self, time: Duration) -> Self {
        Self { seconds: u32::try_from(time.as_secs()).unwrap_or(u32::MAX), ..self }
    }
}

// The generated records do not derive `Default`, but plans and tests want `..Default::default()`.

impl Default for ParamsView {
    /// No parameters.
    fn default() -> Self {
        Self { profile: "default".into(), params: Vec::new() }
    }
}

#[allow(clippy::derivable_impls, reason = "the record is generated")]
impl Default for PreparedParams {
    /// Replaces nothing and has no problems.
    fn default() -> Self {
        Self { replaced: Vec::new(), problems: Vec::new() }
    }
}

#[allow(clippy::derivable_impls, reason = "the record is generated")]
impl Default for Caller {
    /// Nobody in particular.
    fn default() -> Self {
        let (metadata, headers) = (Vec::new(), Vec::new());
        Self { key: String::new(), user: String::new(), metadata, headers }
    }
}

impl Default for MessageView {
    /// An empty message of the user.
    fn default() -> Self {
        let (calls, digest) = (Vec::new(), None);
        Self { role: "user".into(), bytes: 0, text: String::new(), calls, digest }
    }
}

impl Default for PromptView {
    /// No system text.
    fn default() -> Self {
        Self { profile: "default".into(), params: Vec::new(), system: Vec::new() }
    }
}

impl SamplingPatch {
    /// These values, and those of `other` for values that are not set.
    pub fn or(self, other: Self) -> Self {
        Self {
            temperature: self.temperature.or(other.temperature),
            top_p: self.top_p.or(other.top_p),
            top_k: self.top_k.or(other.top_k),
            min_p: self.min_p.or(other.min_p),
        }
    }
}

#[allow(clippy::derivable_impls, reason = "the record is generated")]
impl Default for SamplingPatch {
    /// Changes nothing.
    fn default() -> Self {
        Self { temperature: None, top_p: None, top_k: None, min_p: None }
    }
}

impl Default for RequestView {
    /// A request without wishes to a model that can reason.
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
            max_answer_tokens: None,
            form: None,
            sampling: SamplingPatch::default(),
            seed: 0,
            time: 0,
            caller: Caller::default(),
            conversation: Vec::new(),
            tool_descriptions: Vec::new(),
        }
    }
}

impl Default for Plan {
    /// Leaves all choices to the engine.
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
            form: None,
            refuse: None,
            max_tokens: None,
            stop: Vec::new(),
            tools: None,
            on_phase: false,
            on_newline: false,
            on_texts: Vec::new(),
            on_tokens: Vec::new(),
            candidates: 0,
            route: None,
            limit_counts: None,
            watch: Vec::new(),
        }
    }
}

impl Step {
    /// By how much the logarithmic probability of the likeliest next token exceeds that of `watched`, a token of
    /// [`Plan::watch`]: 0 if it is the likeliest. `None` if it is not known.
    pub fn margin_of(&self, watched: &WatchedToken) -> Option<f32> {
        let outlook = self.observed.as_ref()?.outlook.as_ref()?;
        let found = outlook.watched.iter().find(|one| one.watched == *watched)?;
        Some(outlook.best.logprob - found.logprob)
    }
}

impl Default for Step {
    /// An answer before its first token.
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
            phase_changed: false,
            newline: false,
            observed: None,
        }
    }
}

#[allow(clippy::derivable_impls, reason = "the record is generated")]
impl Default for TextView {
    /// The beginning of an answer.
    fn default() -> Self {
        Self { position: 0, text: String::new(), end: false }
    }
}

impl Default for ToolCallView {
    /// A first call, without arguments.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Silent;

    impl Policy for Silent {}

    #[test]
    fn a_policy_without_hooks_leaves_all_choices_to_the_engine() {
        assert_eq!(Silent.on_request(RequestView::default()), Plan::default());
        assert_eq!(Silent.on_params(ParamsView::default()), PreparedParams::default());
        assert_eq!(Silent.on_prompt(PromptView::default()), []);
        assert_eq!(Silent.on_step(Step::default()), []);
        assert_eq!(Silent.on_text(TextView::default()), TextVerdict::Pass);
        assert_eq!(Silent.on_finish(Summary::default()), []);
        assert_eq!(Silent.on_tool_call(ToolCallView::default()), Verdict::Accept);
    }

    /// A call of `search` with digest `a` after earlier calls (tool, arguments, result).
    fn call(earlier: &[(&str, &str, Option<&str>)]) -> ToolCallView {
        let earlier = earlier.iter().map(|(name, arguments, answered)| EarlierCall {
            name: (*name).into(),
            arguments: (*arguments).into(),
            answered: answered.map(Into::into),
        });
        ToolCallView {
            name: "search".into(),
            digest: "a".into(),
            earlier: earlier.collect(),
            ..ToolCallView::default()
        }
    }

    #[test]
    fn only_consecutive_equal_results_count_as_a_tool_loop() {
        let same = ("search", "a", Some("1"));
        let cases: [(&[_], u32); 7] = [
            (&[], 0),
            (&[same], 1),
            (&[same, same], 2),
            (&[same, ("search", "b", Some("1")), same, ("read", "a", Some("1"))], 2),
            (&[same, same, ("search", "a", Some("2"))], 1),
            (&[same, ("search", "a", Some("2")), same], 1),
            (&[same, ("search", "a", None)], 1),
        ];
        for (earlier, expected) in cases {
            assert_eq!(call(earlier).same_results(), expected, "{earlier:?}");
        }
    }

    #[test]
    fn parameters_are_found_by_name() {
        let params = vec![("a".into(), "1".into()), ("b".into(), "2".into())];
        let request = RequestView { params, ..RequestView::default() };
        assert_eq!((request.param("b"), request.param("c")), (Some("2"), None));
    }
}
