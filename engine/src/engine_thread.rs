//! The threads that engines run on, one engine after the other.
//!
//! # Why
//! MLX gives each thread that computes on a CPU a stream with a worker thread of its own, and ends neither when the thread
//! ends (`clear_streams` of MLX 0.32.2 drops those of GPUs only). A server that loads models on demand thus kept a thread
//! and 8.5 MB of addresses of each load. So a thread whose engine has ended waits for the next one, with its stream.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SendError, Sender, SyncSender, channel, sync_channel};
use std::thread;

use parking_lot::Mutex;

/// Threads that wait for an engine: as many as engines have run at the same time.
static IDLE: Mutex<Vec<Sender<Work>>> = Mutex::new(Vec::new());

/// How an engine ended: with a panic, or not.
type Ended = Result<(), Box<dyn Any + Send>>;

struct Work {
    run: Box<dyn FnOnce() + Send>,
    ended: SyncSender<Ended>,
}

/// A thread while an engine runs on it.
#[derive(Debug)]
pub struct EngineThread(Receiver<Ended>);

impl EngineThread {
    /// Calls `run` on a thread that waits, or on a new one.
    ///
    /// # Errors
    /// If the system has no room for another thread.
    pub fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (ended, receiver) = sync_channel(1);
        let mut work = Work { run: Box::new(run), ended };
        loop {
            let Some(idle) = IDLE.lock().pop() else { break };
            match idle.send(work) {
                Ok(()) => return Ok(Self(receiver)),
                Err(SendError(unsent)) => work = unsent,
            }
        }
        let (sender, works) = channel();
        // Cannot fail: the receiver is here.
        let _ = sender.send(work);
        thread::Builder::new().name("engine".into()).spawn(move || serve(&sender, &works))?;
        Ok(Self(receiver))
    }

    /// Waits until the engine has ended.
    ///
    /// # Errors
    /// The payload of its panic.
    pub fn join(self) -> Ended {
        self.0.recv().unwrap_or_else(|gone| Err(Box::new(gone)))
    }
}

/// Runs one work after the other, until one panics: nothing is known of such a thread's state.
fn serve(own: &Sender<Work>, works: &Receiver<Work>) {
    while let Ok(Work { run, ended }) = works.recv() {
        let done = catch_unwind(AssertUnwindSafe(run));
        let panicked = done.is_err();
        if !panicked {
            // Before anybody learns of the end, and begins the next engine.
            IDLE.lock().push(own.clone());
        }
        // Fails if nobody waits for it.
        let _ = ended.send(done);
        if panicked {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault A9: each load of a model left a thread of MLX behind, one of 107 after 101 loads.
    #[test]
    fn an_engine_runs_on_the_thread_of_one_that_has_ended() {
        let run = || {
            let (sender, id) = sync_channel(1);
            let thread = EngineThread::spawn(move || {
                sender.send(thread::current().id()).unwrap();
            });
            thread.unwrap().join().unwrap();
            id.recv().unwrap()
        };
        let first = run();
        // Another test may have taken it meanwhile.
        assert!((0..100).any(|_| run() == first));
        let (sender, id) = sync_channel(1);
        let panics = EngineThread::spawn(move || {
            sender.send(thread::current().id()).unwrap();
            panic!("on purpose");
        });
        let panic = panics.unwrap().join().unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"on purpose"));
        let panicked = id.recv().unwrap();
        assert!((0..10).all(|_| run() != panicked), "its thread is not used again");
    }
}
