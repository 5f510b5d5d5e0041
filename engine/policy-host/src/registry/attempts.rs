//! The first attempt to load a policy, when the server starts, and further ones.
//!
//! A component that does not compile says what is wrong with it, and is not tried again. But its compiler may also
//! be ended by something else: a machine that is busy or has no memory left, a program that cannot be started. Then
//! a thread tries it again, with a pause that doubles, and with time that nobody waits for.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::active::digest_of;
use super::history::History;
use super::source::Source;
use super::{Origin, Policies, PolicyEntry, Problem, Version};
use crate::breaker::Breakers;
use crate::bundle::Bundle;
use crate::error::Error;
use crate::sandbox::Urgency;

/// Pause before the second attempt; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

impl Policies {
    /// The version that is active after the start.
    pub(super) fn load_first(
        &self,
        policy: &str,
        source: &Source,
        mut history: History,
    ) -> Result<PolicyEntry, Error> {
        let user = self.users(policy).next().map_or("", |(name, _)| name);
        let (bundle, origin) = match self.read(policy, source) {
            Ok(Some((bundle, origin))) => (Ok(bundle), origin),
            Ok(None) => return Err(Error::refused(policy, source.missing(policy)).in_profile(user)),
            Err(error) => (Err(error), Origin::File),
        };
        let seen = bundle.as_ref().ok().map(digest_of);
        let first = bundle.and_then(|bundle| {
            let component = self.validate(policy, &bundle, Urgency::Awaited)?;
            Ok((Version::new(component, &bundle, origin, Breakers::default()), bundle))
        });
        let is_pending = first.as_ref().is_err_and(Error::is_transient);
        let problem = match &first {
            Err(error) => Some(error.to_string()),
            Ok((version, _)) => history.failure_of(&version.sha256()),
        };
        if let Some(problem) = problem
            && let Some(version) = self.last_valid(policy, &history)
        {
            let sha256 = version.sha256();
            tracing::error!(policy, problem, sha256, "policy broken; loaded an earlier version");
            let problem = Some(Problem::now(problem));
            let entry = PolicyEntry::new(Some(version), history);
            return Ok(PolicyEntry { seen, problem, is_pending, ..entry });
        }
        let (version, bundle) = match first {
            Ok(first) => first,
            Err(error @ Error::NotCompiled { .. }) => {
                let problem = error.to_string();
                let retries = is_pending;
                tracing::error!(
                    policy,
                    problem,
                    retries,
                    "policy not compiled; it fails in every request"
                );
                let problem = Some(Problem::now(problem));
                let entry = PolicyEntry::new(None, history);
                return Ok(PolicyEntry { seen, problem, is_pending, ..entry });
            }
            Err(error) => return Err(error.in_profile(user)),
        };
        let sha256 = version.sha256();
        tracing::info!(policy, sha256, origin = origin.name(), "policy loaded");
        if origin == Origin::File {
            history.add(version.entry(), &bundle.file);
        }
        Ok(PolicyEntry { seen, ..PolicyEntry::new(Some(version), history) })
    }

    /// The file of a policy, or else the component in the binary; `None` if there is neither.
    pub(super) fn read(
        &self,
        policy: &str,
        source: &Source,
    ) -> Result<Option<(Bundle, Origin)>, Error> {
        let file = source.read(policy, &self.trust);
        let file = file.map_err(|problem| Error::refused(policy, problem))?;
        let file = file.map(|bundle| (bundle, Origin::File));
        Ok(file.or_else(|| Some((source.shipped()?, Origin::Shipped))))
    }

    /// The newest valid version of the history.
    fn last_valid(&self, policy: &str, history: &History) -> Option<Version> {
        history.usable().find_map(|entry| {
            let file = history.file(&entry.sha256)?;
            let bundle = Bundle::open(policy, file, &self.trust).ok()?;
            let component = self.validate(policy, &bundle, Urgency::Awaited).ok()?;
            Some(Version::new(component, &bundle, Origin::History, Breakers::default()))
        })
    }

    /// Tries pending policies again on a thread of its own, which ends when none is left, or with the last handle.
    pub(super) fn try_again_later(self: &Arc<Self>) {
        let mut attempts = self.attempts.lock();
        if attempts.is_some() || !self.has_pending() {
            return;
        }
        let (handle, ended) = sync_channel(0);
        let policies = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("policy attempts".into());
        match thread.spawn(move || attempt_while_pending(&policies, &ended)) {
            Ok(_) => *attempts = Some(handle),
            Err(error) => {
                tracing::warn!(%error, "no thread: policies that did not compile are not tried again");
            }
        }
    }

    /// Notes whether a policy is tried again after `error`.
    pub(super) fn note_pending(&self, policy: &str, error: &Error) {
        self.active().policy(policy).is_pending = error.is_transient();
    }

    fn has_pending(&self) -> bool {
        self.active().policies.values().any(|entry| entry.is_pending)
    }

    /// Tries all pending policies again.
    fn try_again(&self) {
        for (policy, source) in &self.sources {
            if !self.active().policy(policy).is_pending {
                continue;
            }
            if let Err(error) = self.attempt(policy, source) {
                self.note_pending(policy, &error);
                self.reject(policy, error.to_string());
            }
        }
    }

    /// Loads what a pending policy is loaded from, and activates it.
    fn attempt(&self, policy: &str, source: &Source) -> Result<(), Error> {
        let Some((bundle, origin)) = self.read(policy, source)? else {
            return Err(Error::refused(policy, source.missing(policy)));
        };
        if origin == Origin::File {
            self.active().policy(policy).seen = Some(digest_of(&bundle));
            return self.replace(policy, source, &bundle, origin, Urgency::Background).map(drop);
        }
        let component = self.validate(policy, &bundle, Urgency::Background)?;
        let version = Version::new(component, &bundle, origin, Breakers::default());
        let _change = self.change.lock();
        let mut active = self.active();
        let entry = active.policy(policy);
        // An upload or a file may have come meanwhile.
        if !std::mem::take(&mut entry.is_pending) {
            return Ok(());
        }
        if entry.current.is_none() {
            let sha256 = version.sha256();
            entry.current = Some(Arc::new(version));
            entry.problem = None;
            active.resolve(&self.chains, &self.limits);
            tracing::info!(policy, sha256, origin = origin.name(), "policy activated");
        }
        Ok(())
    }
}

/// Tries pending policies until none is left. `ended` is disconnected when the last handle is dropped.
fn attempt_while_pending(policies: &Weak<Policies>, ended: &Receiver<()>) {
    let mut pause = FIRST_PAUSE;
    while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        let Some(policies) = policies.upgrade() else { return };
        policies.try_again();
        let mut attempts = policies.attempts.lock();
        if !policies.has_pending() {
            *attempts = None;
            return;
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
