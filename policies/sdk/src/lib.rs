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
//!     fn on_request(&mut self, request: steersman_policy::Request) -> steersman_policy::Plan {
//!         steersman_policy::Plan { thinking: request.thinking, every: 10, ..Default::default() }
//!     }
//!
//!     fn on_step(&mut self, step: Step) -> Vec<Action> {
//!         let long = step.phase == Phase::Think && step.think_tokens >= 100;
//!         if long { vec![Action::CloseThinking("In short: ".into())] } else { vec![] }
//!     }
//! }
//!
//! steersman_policy::export!(Brief);
//! # fn main() {
//! let step = Step { phase: Phase::Think, think_tokens: 100, ..Step::default() };
//! assert_eq!(Brief.on_step(step).len(), 1);
//! # }
//! ```

pub mod bindings;

use std::time::Duration;

pub use bindings::steersman::policy::types::{
    Action, Anchor, Keep, LoopReport, LoopRule, Phase, Plan, Request, Step, Summary,
};

/// A policy: one value of it lives as long as one request, made by `Default` before the first
/// hook.
///
/// A panic is a trap: the policy has failed in this request, and the profile says what follows.
pub trait Policy: Default {
    /// Plans a request, before its prompt is rendered. Called once, first. Without it, the engine
    /// decides.
    fn on_request(&mut self, request: Request) -> Plan {
        let _ = request;
        Plan::default()
    }

    /// Sees the tokens committed since the last call; the actions apply in order before the next
    /// token. Called every [`Plan::every`] tokens, for a loop, and when the thought has used its
    /// budget up.
    fn on_step(&mut self, step: Step) -> Vec<Action> {
        let _ = step;
        Vec::new()
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
                static POLICY: RefCell<$policy> = RefCell::default();
            }

            struct Shim;

            impl hooks::on_request::Guest for Shim {
                fn on_request(request: $crate::Request) -> $crate::Plan {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_request(p, request))
                }
            }

            impl hooks::on_step::Guest for Shim {
                fn on_step(step: $crate::Step) -> ::std::vec::Vec<$crate::Action> {
                    POLICY.with_borrow_mut(|p| $crate::Policy::on_step(p, step))
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

impl Request {
    /// A parameter out of `[profiles.NAME.params]`.
    pub fn param(&self, name: &str) -> Option<&str> {
        let found = self.params.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

impl Keep {
    /// What is at an anchor, as long as it is used.
    pub fn at(at: Anchor) -> Self {
        Self { at, seconds: 0 }
    }

    /// The same, not given up for so long: whole seconds, at most a day.
    ///
    /// A policy for one-off questions about one large system text keeps that alone:
    ///
    /// ```
    /// use std::time::Duration;
    /// use steersman_policy::{Anchor, Keep, Plan};
    ///
    /// let hour = Duration::from_secs(3600);
    /// let plan = Plan { keep: Some(vec![Keep::at(Anchor::System).lasting(hour)]), ..Plan::default() };
    /// assert_eq!(plan.keep.unwrap()[0].seconds, 3600);
    /// ```
    pub fn lasting(self, time: Duration) -> Self {
        Self { seconds: u32::try_from(time.as_secs()).unwrap_or(u32::MAX), ..self }
    }
}

// The generated records derive no `Default`, but tests and plans want `..Default::default()`.

impl Default for Request {
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
            can_think: true,
            thinking: None,
            think_budget: None,
            max_tokens: None,
        }
    }
}

impl Default for Plan {
    /// Leaves all to the engine.
    fn default() -> Self {
        Self {
            thinking: None,
            think_budget: None,
            answer_reserve: None,
            loops: None,
            every: 0,
            note: None,
            keep: None,
        }
    }
}

impl Default for Step {
    /// Nothing happened yet, in an answer.
    fn default() -> Self {
        Self {
            index: 0,
            phase: Phase::Answer,
            think_tokens: 0,
            answer_tokens: 0,
            think_left: 0,
            tokens: Vec::new(),
            text: String::new(),
            loop_found: None,
            budget_reached: false,
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
    fn a_policy_without_hooks_leaves_all_to_the_engine() {
        assert_eq!(Silent.on_request(Request::default()), Plan::default());
        assert_eq!(Silent.on_step(Step::default()), []);
    }

    #[test]
    fn a_parameter_is_found_by_its_name() {
        let params = vec![("a".into(), "1".into()), ("b".into(), "2".into())];
        let request = Request { params, ..Request::default() };
        assert_eq!((request.param("b"), request.param("c")), (Some("2"), None));
    }
}
