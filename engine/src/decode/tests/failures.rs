//! What goes wrong for one request ends that request: a panic, a deadline, too little memory. What goes
//! wrong for the engine thread ends it, and nobody waits for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use tokio::sync::mpsc::UnboundedReceiver;

use super::scripted::*;
use crate::config::Config;
use crate::decode::Decoder;
use crate::error::{Error, RequestError};
use crate::policy::{Answer, Call, Failure, Hook, Policy};
use crate::request::Event;

/// A policy that panics in one hook.
struct Panics(Hook);

impl Policy for Panics {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        assert!(call.hook() != self.0, "on purpose");
        Script::new(|_| Vec::new()).call(call)
    }
}

/// Steps until no sequence is left; returns the last event.
fn end(decoder: &mut Decoder, mut events: UnboundedReceiver<Event>) -> Event {
    while !decoder.schedule.running().is_empty() {
        decoder.step();
    }
    let mut last = events.try_recv().unwrap();
    while let Ok(event) = events.try_recv() {
        assert!(!matches!(last, Event::Finished(_) | Event::Failed(_)), "{last:?}, {event:?}");
        last = event;
    }
    last
}

/// A panic in a policy, or anything else that is done for one sequence, ended the engine thread: the
/// server answered every later request with 503.
#[test]
fn a_panic_costs_one_request_and_no_later_one() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    let request = ask("Where?", false, 40);
    let saved = |decoder: &Decoder| decoder.saved.prefixes().reporter().report().memory.bytes;
    let script = || Script::new(|_| Vec::new());
    let expected = run_plain(decoder, &request, script());
    for (hook, stage) in [(Hook::OnStep, "being decoded"), (Hook::OnFinish, "being finished")] {
        assert!(saved(decoder) > 0);
        let events = start(decoder, request.clone(), Panics(hook));
        match end(decoder, events) {
            Event::Failed(Error::Panic { stage: at, message }) => {
                assert_eq!((at, message.as_str()), (stage, "on purpose"));
            }
            other => panic!("{other:?}"),
        }
        // What the panic may have left halfway is gone.
        assert_eq!(saved(decoder), 0);
        assert_eq!(run_plain(decoder, &request, script()).tokens, expected.tokens);
    }
}

/// A policy whose session cannot be dropped: a panic outside of what is done for a request.
struct PanicsWhenDropped;

impl Policy for PanicsWhenDropped {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        Script::new(|_| Vec::new()).call(call)
    }
}

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

/// The server ends when its engine has ended, with a status for which a supervisor restarts it.
#[test]
fn an_engine_thread_that_cannot_go_on_ends_and_refuses_requests() {
    let mut decoder = family("llama", Config::default(), false);
    let queue = decoder.schedule.queue().clone();
    let running = start(&mut decoder, ask("Where?", false, 4), PanicsWhenDropped);
    assert!(!*queue.ended().borrow());
    assert!(catch_unwind(AssertUnwindSafe(|| decoder.run())).is_err());
    assert!(*queue.ended().borrow());
    assert!(running.is_closed());
    let refused = queue.add(ask("Where?", false, 4));
    assert!(matches!(refused, Err(Error::Stopped)));
}

#[test]
fn a_request_past_its_deadline_ends_with_an_error() {
    let mut config = Config::default();
    config.engine.prefill_chunk = 16;
    let decoder = &mut family("llama", config, false);
    let request = ask("Where is the river that runs by the castle?", false, 40);
    for (steps, stage) in [(1, "in prefill"), (8, "being decoded")] {
        let events = start(decoder, request.clone(), Script::new(|_| Vec::new()));
        (0..steps).for_each(|_| decoder.step());
        let sequence = decoder.schedule.running_mut().first_mut().expect("the request runs");
        sequence.set_deadline(Instant::now());
        match end(decoder, events) {
            Event::Failed(Error::Request(RequestError::Deadline { stage: at })) => {
                assert_eq!(at, stage);
            }
            other => panic!("{other:?}"),
        }
        decoder.saved.prefixes_mut().clear_memory();
    }
}
