//! Calls of a request's policies: quick ones at once, others on a thread where they delay nobody.

use std::sync::Arc;

use parking_lot::Mutex;
use steersman_policy_host::{Hook, HookInput, Labels, Session, Summary};
use steersman_request::{Error, RequestSpan};

/// The policies of one request.
pub struct Hooks {
    /// Locked during a call only: a call on a thread goes on if its request ends meanwhile.
    session: Arc<Mutex<Session>>,
    span: RequestSpan,
    /// [`Session::sees_text`]
    pub sees_text: bool,
    /// [`Session::judges_calls`]
    pub judges_calls: bool,
    /// [`Session::policies`]
    pub policies: u32,
}

impl Hooks {
    pub fn new(session: Session, span: RequestSpan) -> Self {
        let Session { sees_text, judges_calls, policies, .. } = session;
        Self { session: Arc::new(Mutex::new(session)), span, sees_text, judges_calls, policies }
    }

    /// Calls the hook of `input`.
    ///
    /// # Errors
    /// [`Error::Policy`] if a policy failed and the profile fails closed; [`Error::Panic`] if one panicked.
    pub async fn ask<T>(&self, input: T) -> Result<T::Answer, Error>
    where
        T: HookInput + Send + 'static,
        T::Answer: Send + 'static,
    {
        let hook = input.call().hook();
        if self.is_quick(hook) {
            return Ok(self.span.ask(&mut self.session.lock(), &input)?);
        }
        let (session, span) = (self.session.clone(), self.span.clone());
        let call = move || span.ask(&mut session.lock(), &input);
        let answer = tokio::task::spawn_blocking(call).await;
        Ok(answer.map_err(|panic| panicked(hook, &panic))??)
    }

    fn is_quick(&self, hook: Hook) -> bool {
        // A call that is away holds the lock.
        self.session.try_lock().is_some_and(|session| session.policy.is_quick(hook))
    }

    /// Notes since the last call of this function.
    pub fn take_notes(&self) -> Vec<String> {
        self.session.lock().take_notes()
    }

    /// Calls `on-finish`, the last call; returns notes and labels. Waits for a call that is away.
    pub async fn finish(&self, summary: Summary) -> (Vec<String>, Labels) {
        let (session, span) = (self.session.clone(), self.span.clone());
        let finish = move || {
            let session = &mut *session.lock();
            let (failure, labels) = match span.ask(session, &summary) {
                Ok(labels) => (None, labels),
                Err(failure) => (Some(Error::from(failure).to_string()), Labels::new()),
            };
            (failure.into_iter().chain(session.take_notes()).collect(), labels)
        };
        if self.is_quick(Hook::OnFinish) {
            return finish();
        }
        tokio::task::spawn_blocking(finish).await.unwrap_or_default()
    }
}

fn panicked(hook: Hook, panic: &tokio::task::JoinError) -> Error {
    Error::Panic { stage: hook.name(), message: panic.to_string() }
}
