//! Parameters that a policy prepares once, with `on-params`, for all requests.
//!
//! Instances replace the texts when they call a hook. Traces and golden files have the parameters
//! as they are configured, so that another version of the policy can be called with them.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::contract::{Call, Params, ParamsView, PreparedParams};
use crate::error::{Cause, Failure};

/// Times the fuel of other calls that a call of `on-params` may use.
pub const FUEL: u64 = 100;

/// Parameters for which a component holds an outcome.
const PREPARED: usize = 16;

/// The outcomes of `on-params` for some parameters, newest last; at most [`PREPARED`].
#[derive(Default)]
pub struct Prepared(Mutex<Vec<(ParamsView, Outcome)>>);

/// What `on-params` made of parameters, or why it failed.
pub type Outcome = Result<Arc<PreparedParams>, Failure>;

impl Prepared {
    /// The outcome for these parameters, if it is known.
    pub fn get(&self, profile: &str, params: &Params) -> Option<Outcome> {
        let all = self.0.lock();
        let known = all.iter().find(|(of, _)| of.profile == profile && of.params == *params);
        known.map(|(_, outcome)| outcome.clone())
    }

    /// Remembers an outcome, unless a busy machine may have caused it: other failures would come
    /// again.
    pub fn put(&self, view: ParamsView, outcome: &Outcome) {
        if matches!(outcome, Err(Failure { cause: Cause::Deadline(_), .. })) {
            return;
        }
        let mut all = self.0.lock();
        let surplus = (all.len() + 1).saturating_sub(PREPARED);
        all.drain(..surplus);
        all.push((view, outcome.clone()));
    }
}

/// Profile and parameters of a call that has them.
pub fn configured<'a>(call: &'a Call<'_>) -> Option<(&'a str, &'a Params)> {
    match call {
        Call::Prompt(view) => Some((&view.profile, &view.params)),
        Call::Request(view) => Some((&view.profile, &view.params)),
        _ => None,
    }
}

/// The call with the texts that `on-params` puts in place of parameters; `None` if there are none.
pub fn with_prepared(call: &Call<'_>, prepared: &PreparedParams) -> Option<Call<'static>> {
    if prepared.replaced.is_empty() {
        return None;
    }
    let mut call = call.to_owned();
    match &mut call {
        Call::Prompt(view) => replace(&mut view.to_mut().params, prepared),
        Call::Request(view) => replace(&mut view.to_mut().params, prepared),
        _ => {}
    }
    Some(call)
}

/// Replaces texts of parameters.
fn replace(params: &mut Params, prepared: &PreparedParams) {
    for (name, new) in &prepared.replaced {
        for (_, text) in params.iter_mut().filter(|(param, _)| param == name) {
            text.clone_from(new);
        }
    }
}
