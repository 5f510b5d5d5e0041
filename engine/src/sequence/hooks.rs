//! Calls of a sequence's policies: quick ones on the engine thread, others on threads of their own.
//!
//! A call that is not known to be quick ([`Policy::is_quick`]) goes to a thread, and the session with it.
//! Until both are back the sequence sits out: none of its rows is in a pass, and it keeps its cache. The
//! others go on. Where a call runs changes no token: its answer applies to the same tokens, and what was
//! sampled ahead is kept or sampled again with the same noise. The rest of a draft after a call that is
//! away runs again, so a slow policy that is called after each token has no drafts.
//!
//! Deadlines and clients that disconnect end a sequence while a call is away, and it can be preempted;
//! `on-finish` follows on the same thread.
//!
//! A sequence has one call at a time, and the calls of `on-finish` count as running requests
//! ([`HookThreads::finishing`]), so that at most that many calls wait for a thread.

use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::error::{Error, Result, catch_panic};
use crate::policy::{Answer, Failure, Hook, HookInput, Labels, Session, Summary};
use crate::span::RequestSpan;

/// The stage of a request at its end, for errors.
pub const ENDING: &str = "being finished";

type Job = Box<dyn FnOnce() + Send>;

/// Threads for calls that are not known to be quick. Dropped when the calls have ended.
pub struct HookThreads {
    /// `None` if every call runs on the engine thread.
    jobs: Option<mpsc::Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    finishing: Arc<AtomicUsize>,
    /// Wakes the engine thread after each call.
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl HookThreads {
    /// Starts `count` threads; with 0 every call runs on the engine thread. `wake` is called after each call.
    pub fn start(count: usize, wake: Arc<dyn Fn() + Send + Sync>) -> std::io::Result<Rc<Self>> {
        let (jobs, receiver) = mpsc::channel::<Job>();
        let receiver = Arc::new(Mutex::new(receiver));
        let spawn = |_| {
            let receiver = receiver.clone();
            let next = move || receiver.lock().recv();
            std::thread::Builder::new().name("policy".into()).spawn(move || {
                while let Ok(job) = next() {
                    // A session may panic when it is dropped.
                    let called = catch_panic(ENDING, || {
                        job();
                        Ok(())
                    });
                    if let Err(error) = called {
                        tracing::error!(%error, "policy panicked");
                    }
                }
            })
        };
        let threads = (0..count).map(spawn).collect::<Result<_, _>>()?;
        let jobs = (count > 0).then_some(jobs);
        Ok(Rc::new(Self { jobs, threads, finishing: Arc::default(), wake }))
    }

    /// Calls of `on-finish` that have not ended, of requests that have.
    pub fn finishing(&self) -> usize {
        self.finishing.load(SeqCst)
    }

    /// Where a call that is not known to be quick runs; `None` on the engine thread.
    fn for_call(&self, session: &Session, hook: Hook) -> Option<&mpsc::Sender<Job>> {
        self.jobs.as_ref().filter(|_| !session.policy.is_quick(hook))
    }

    fn run(&self, jobs: &mpsc::Sender<Job>, job: impl FnOnce() + Send + 'static) {
        let wake = self.wake.clone();
        let job = move || {
            job();
            wake();
        };
        jobs.send(Box::new(job)).expect("the threads end after the sender");
    }
}

impl Drop for HookThreads {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A panic has been reported to its request.
            let _ = thread.join();
        }
    }
}

/// The policies of a sequence, here or on a thread.
pub struct Hooks {
    threads: Rc<HookThreads>,
    /// `None` while a call is away, and after one that panicked.
    session: Option<Session>,
    away: Option<Arc<Mutex<Away>>>,
    policies: u32,
    /// The span of the request.
    span: RequestSpan,
}

/// A call on a thread.
#[allow(clippy::large_enum_variant, reason = "there is one for each call on a thread")]
enum Away {
    /// It has not ended.
    Calling,
    /// It has ended; an error if it panicked.
    Back(Result<(Session, Result<Answer, Failure>)>),
    /// The request has ended in the meantime: `on-finish` follows on the same thread.
    Abandoned(Summary, Finishing),
}

impl Hooks {
    pub fn new(threads: Rc<HookThreads>, session: Session, span: RequestSpan) -> Self {
        let policies = session.policies;
        Self { threads, session: Some(session), away: None, policies, span }
    }

    /// [`Session::policies`]
    pub fn policies(&self) -> u32 {
        self.policies
    }

    /// Calls the hook of `input`. `None` if the call is away: the same call again, after
    /// [`Hooks::is_back`], returns its answer.
    ///
    /// # Errors
    /// [`Error::Policy`] if a policy failed and the profile fails closed; [`Error::Panic`] if one panicked
    /// on a thread.
    pub fn ask<T: HookInput>(&mut self, input: &T) -> Result<Option<T::Answer>> {
        if let Some(away) = self.away.take() {
            let state = std::mem::replace(&mut *away.lock(), Away::Calling);
            let Away::Back(back) = state else {
                self.away = Some(away);
                return Ok(None);
            };
            let (session, answer) = back?;
            self.session = Some(session);
            return Ok(Some(T::answer(answer?).expect("the same hook is asked again")));
        }
        let session = self.session.as_mut().expect("a request ends when its policy panics");
        let call = input.call();
        let hook = self.span.hook(call.hook().name());
        let Some(jobs) = self.threads.for_call(session, call.hook()) else {
            let answer = hook.in_scope(|| session.ask(input))?;
            return Ok(Some(answer));
        };
        let (call, away) = (call.to_owned(), Arc::new(Mutex::new(Away::Calling)));
        let mut session = self.session.take().expect("it is here");
        let called = away.clone();
        let span = self.span.clone();
        self.threads.run(jobs, move || {
            let back = catch_panic("being decoded", || {
                let answer = hook.in_scope(|| session.policy.call(&call));
                Ok((session, answer))
            });
            let mut state = called.lock();
            match std::mem::replace(&mut *state, Away::Calling) {
                Away::Abandoned(summary, finishing) => {
                    drop(state);
                    if let Ok((mut session, _)) = back {
                        let hook = span.hook(Hook::OnFinish.name());
                        hook.in_scope(|| finish(&mut session, &summary));
                    }
                    drop(finishing);
                }
                Away::Calling | Away::Back(_) => *state = Away::Back(back),
            }
        });
        self.away = Some(away);
        Ok(None)
    }

    /// Whether a call is away, or back without its answer having been taken.
    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Whether the call that was away has ended.
    pub fn is_back(&self) -> bool {
        self.away.as_ref().is_some_and(|away| matches!(*away.lock(), Away::Back(_)))
    }

    /// Notes since the last call of this function.
    pub fn take_notes(&mut self) -> Vec<String> {
        self.session.as_mut().map(Session::take_notes).unwrap_or_default()
    }

    /// Calls `on-finish`, the last call, and then `then` with notes and labels, or with the error if a policy
    /// panicked on a thread. If a call is away, `then` does not wait for it.
    pub fn finish(
        &mut self,
        summary: Summary,
        then: impl FnOnce(Result<(Vec<String>, Labels)>) + Send + 'static,
    ) {
        if let Some(away) = self.away.take() {
            let mut state = away.lock();
            match std::mem::replace(&mut *state, Away::Calling) {
                Away::Back(Ok((session, _))) => self.session = Some(session),
                Away::Back(Err(_)) => {}
                Away::Calling | Away::Abandoned(..) => {
                    let finishing = Finishing::new(self.threads.finishing.clone());
                    *state = Away::Abandoned(summary.clone(), finishing);
                }
            }
        }
        let Some(session) = &mut self.session else { return then(Ok(Default::default())) };
        let Some(jobs) = self.threads.for_call(session, Hook::OnFinish) else {
            let hook = self.span.hook(Hook::OnFinish.name());
            return then(Ok(hook.in_scope(|| finish(session, &summary))));
        };
        let mut session = self.session.take().expect("it is here");
        let finishing = Finishing::new(self.threads.finishing.clone());
        let span = self.span.clone();
        self.threads.run(jobs, move || {
            let hook = span.hook(Hook::OnFinish.name());
            then(catch_panic(ENDING, || Ok(hook.in_scope(|| finish(&mut session, &summary)))));
            drop(finishing);
        });
    }
}

/// Calls `on-finish`; returns notes and labels.
fn finish(session: &mut Session, summary: &Summary) -> (Vec<String>, Labels) {
    let (failure, labels) = match session.ask(summary) {
        Ok(labels) => (None, labels),
        Err(failure) => (Some(Error::from(failure).to_string()), Labels::new()),
    };
    (failure.into_iter().chain(session.take_notes()).collect(), labels)
}

/// A session that is being finished on a thread.
struct Finishing(Arc<AtomicUsize>);

impl Finishing {
    fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, SeqCst);
        Self(count)
    }
}

impl Drop for Finishing {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}
