//! Write a Steersman policy in Rust: a plain struct that implements [`Policy`], and one line that
//! exports it.
//!
//! The types are those of `wit/`, generated from it. They work natively too, so that decisions are
//! tested with `cargo test` like any other code; only [`export!`] needs a Wasm target.
//!
//! ```
//! use steersman_policy::{Action, Phase, Policy, Step};
//!
//! /// Ends every thought after 100 tokens.
//! #[derive(Default)]
//! struct Brief;
//!
//! impl Policy for Brief {
//!     fn on_request(&mut self, request: steersman_policy::RequestView) -> steersman_policy::Plan {
//!         steersman_policy::Plan { reasoning: request.reasoning, every: 10, ..Default::default() }
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
mod defaults;
mod host;
mod prompt;

use std::time::Duration;

pub use bindings::steersman::policy::types::{
    Action, Ban, Bias, EarlierCall, LoopReport, LoopRule, Phase, Plan, PromptView, Replacement,
    RequestView, Retention, SamplingChange, SamplingPatch, SavePoint, Step, Summary, TokenBias,
    ToolCallView, Verdict,
};
pub use host::{counters, failure, kv, log, tokenizer};
pub use prompt::REPLACEMENTS;

/// A policy: one value of it lives as long as one request, made by `Default` before the first
/// hook.
///
/// A panic is a failure of the policy in this request, and the profile says what follows. Notes and log
/// have its words ([`failure::fail`]).
pub trait Policy: Default {
    /// Replaces spans of system text before the prompt is rendered. Called once, first of all, where
    /// there is system text. The replacements apply in order.
    fn on_prompt(&mut self, prompt: PromptView) -> Vec<Replacement> {
        let _ = prompt;
        Vec::new()
    }

    /// Plans a request. Called once, before anything runs. Without it, the engine decides.
    fn on_request(&mut self, request: RequestView) -> Plan {
        let _ = request;
        Plan::default()
    }

    /// Sees the tokens committed since the last call; the actions apply before the next token.
    /// Called every [`Plan::every`] tokens, for a loop, and when the thought has used its budget up.
    fn on_step(&mut self, step: Step) -> Vec<Action> {
        let _ = step;
        Vec::new()
    }

    /// Judges a call of a tool that the model has just written, before the client gets it.
    fn on_tool_call(&mut self, call: ToolCallView) -> Verdict {
        let _ = call;
        Verdict::Accept
    }

    /// Sees how the request ended. Called once, last.
    fn on_finish(&mut self, summary: Summary) {
        let _ = summary;
    }
}

/// Exports a [`Policy`] as the component's hooks. Does nothing on targets other than Wasm, so that
/// the same crate is tested natively.
#[macro_export]
macro_rules! export {
    ($policy:ty) => {
        #[cfg(target_family = "wasm")]
        const _: () = {
            use ::std::cell::RefCell;
            use $crate::bindings::exports::steersman::policy as hooks;

            ::std::thread_local! {
                static POLICY: RefCell<$policy> = {
                    $crate::failure::tell_panics();
                    RefCell::default()
                };
            }

            struct Shim;

            impl hooks::on_prompt::Guest for Shim {
                fn on_prompt(prompt: $crate::PromptView) -> ::std::vec::Vec<$crate::Replacement> {
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

            impl hooks::on_tool_call::Guest for Shim {
                fn on_tool_call(call: $crate::ToolCallView) -> $crate::Verdict {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_tool_call(p, call))
                }
            }

            impl hooks::on_finish::Guest for Shim {
                fn on_finish(summary: $crate::Summary) {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_finish(p, summary))
                }
            }

    $crate::bindings::export_policy!(Shim with_types_in $crate::bindings);
        };
    };
}

impl RequestView {
    /// A parameter out of `[profiles.NAME.params]`.
    pub fn param(&self, name: &str) -> Option<&str> {
        let found = self.params.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

impl PromptView {
    /// A parameter out of `[profiles.NAME.params]`.
    pub fn param(&self, name: &str) -> Option<&str> {
        let found = self.params.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

impl ToolCallView {
    /// How many calls of this tool with these arguments got the same result, counted back from the
    /// newest that is answered. Calls of other tools, or with other arguments, do not count.
    pub fn same_results(&self) -> u32 {
        let mut results = self
            .earlier
            .iter()
            .rev()
            .filter(|earlier| earlier.name == self.name && earlier.arguments == self.digest)
            .filter_map(|earlier| earlier.answered.as_ref());
        let Some(newest) = results.next() else { return 0 };
        let before = results.take_while(|result| *result == newest).count();
        u32::try_from(before + 1).expect("the host shows at most 64 calls")
    }
}

impl Retention {
    /// What is at an anchor, as long as it is used.
    pub fn at(at: SavePoint) -> Self {
        Self { at, seconds: 0 }
    }

    /// The same, not given up for so long: whole seconds, at most a day.
    ///
    /// A policy for one-off questions about one large system text keeps that alone:
    ///
    /// ```
    /// use std::time::Duration;
    /// use steersman_policy::{SavePoint, Retention, Plan};
    ///
    /// let hour = Duration::from_secs(3600);
    /// let plan = Plan { retain: Some(vec![Retention::at(SavePoint::System).lasting(hour)]), ..Plan::default() };
    /// assert_eq!(plan.retain.unwrap()[0].seconds, 3600);
    /// ```
    pub fn lasting(self, time: Duration) -> Self {
        Self { seconds: u32::try_from(time.as_secs()).unwrap_or(u32::MAX), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Silent;

    impl Policy for Silent {}

    #[test]
    fn a_policy_without_hooks_leaves_all_to_the_engine() {
        assert_eq!(Silent.on_request(RequestView::default()), Plan::default());
        assert_eq!(Silent.on_prompt(PromptView::default()), []);
        assert_eq!(Silent.on_step(Step::default()), []);
        assert_eq!(Silent.on_tool_call(ToolCallView::default()), Verdict::Accept);
    }

    /// A call of `search` with the digest `a`, after calls of (tool, arguments, result).
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
    fn only_the_same_result_again_and_again_is_a_tool_loop() {
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
    fn a_parameter_is_found_by_its_name() {
        let params = vec![("a".into(), "1".into()), ("b".into(), "2".into())];
        let request = RequestView { params, ..RequestView::default() };
        assert_eq!((request.param("b"), request.param("c")), (Some("2"), None));
    }
}
