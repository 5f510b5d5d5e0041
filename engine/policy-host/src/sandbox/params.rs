//! Parameters that a policy prepares once, with `on-params`, for all requests.
//!
//! Instances replace the texts when they call a hook. Traces and golden files have the parameters as they are
//! configured, so that another version of the policy can be called with them.

use std::borrow::Cow;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Component, Context, Instance, LIST_BYTES};
use crate::contract::{Answer, Call, Hook, PREPARED_BYTES, Params, ParamsView, PreparedParams};
use crate::error::{Cause, Failure};

/// Times the fuel of other calls that a call of `on-params` may use.
const FUEL: u64 = 100;

/// Parameters of which a component holds what `on-params` made of them.
const PREPARED: usize = 16;

/// What `on-params` made of parameters, newest last; at most [`PREPARED`].
pub type Prepared = Mutex<Vec<(ParamsView, Outcome)>>;

/// What it made, or why it failed.
type Outcome = Result<Arc<PreparedParams>, Failure>;

impl Component {
    /// What `on-params` makes of these parameters; nothing if the component does not export that hook. It is
    /// called once for equal parameters, in a dry run that takes up to a second or so.
    ///
    /// # Errors
    /// [`Failure`] if the policy fails.
    pub fn prepare(self: &Arc<Self>, profile: &str, params: &Params) -> Outcome {
        if !self.hooks.contains(&Hook::OnParams.name()) {
            return Ok(Arc::default());
        }
        let is_same = |of: &ParamsView| of.profile == profile && of.params == *params;
        let known = |all: &[(ParamsView, Outcome)]| {
            all.iter().find(|(of, _)| is_same(of)).map(|(_, outcome)| outcome.clone())
        };
        if let Some(outcome) = known(&self.prepared.lock()) {
            return outcome;
        }
        let view = ParamsView { profile: profile.into(), params: params.clone() };
        let mut instance = self.instantiate(&Context::dry_run())?;
        instance.fuel = self.limits.fuel.saturating_mul(FUEL);
        instance.output_bytes = PREPARED_BYTES;
        instance.store.set_hostcall_fuel(PREPARED_BYTES.saturating_add(LIST_BYTES));
        let outcome = instance.call_guest(&Call::Params(Cow::Borrowed(&view))).map(|answer| {
            let Answer::Params(prepared) = answer else { unreachable!("the hook was `on-params`") };
            Arc::new(prepared)
        });
        // A busy machine may cause a missed deadline; other failures would come again.
        if !matches!(&outcome, Err(Failure { cause: Cause::Deadline(_), .. })) {
            let mut all = self.prepared.lock();
            let surplus = (all.len() + 1).saturating_sub(PREPARED);
            all.drain(..surplus);
            all.push((view, outcome.clone()));
        }
        outcome
    }
}

impl Instance {
    /// The call with the texts that `on-params` puts in place of parameters; `None` if there are none.
    pub(super) fn with_prepared(&self, call: &Call<'_>) -> Result<Option<Call<'static>>, Failure> {
        let (profile, params) = match call {
            Call::Prompt(view) => (&view.profile, &view.params),
            Call::Request(view) => (&view.profile, &view.params),
            _ => return Ok(None),
        };
        if !self.component.hooks.contains(&Hook::OnParams.name()) {
            return Ok(None);
        }
        let prepared = self.component.prepare(profile, params)?;
        if prepared.replaced.is_empty() {
            return Ok(None);
        }
        let mut call = call.to_owned();
        match &mut call {
            Call::Prompt(view) => replace(&mut view.to_mut().params, &prepared),
            Call::Request(view) => replace(&mut view.to_mut().params, &prepared),
            _ => {}
        }
        Ok(Some(call))
    }
}

/// Replaces texts of parameters.
fn replace(params: &mut Params, prepared: &PreparedParams) {
    for (name, new) in &prepared.replaced {
        for (_, text) in params.iter_mut().filter(|(param, _)| param == name) {
            text.clone_from(new);
        }
    }
}
