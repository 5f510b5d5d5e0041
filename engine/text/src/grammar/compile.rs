//! Compiles forms: on a thread with the stack that a form needs, under a deadline, and once.
//!
//! A form that was compiled is remembered by its digest, in a bounded number and size: the choices of a request,
//! the check of a policy's plan and the request that follows it, and the next requests of the same client
//! share it. What is handed out is a copy with a lexer of its own, so that the states which one reply explores
//! neither grow what is remembered nor end another reply.
//!
//! # Why a deadline, too
//! [`super::bounds`] and the fuel of llguidance end every compilation within seconds. The deadline is for a slow or
//! busy machine: the request is refused in time, its thread ends by itself, and at most
//! [`COMPILATIONS`] run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::Grammar;

/// Elapsed time of a compilation, with its wait for others. A busy machine takes ten times as long as an idle one.
const DEADLINE: Duration = Duration::from_secs(20);

/// How often a wait looks whether the engine ends.
const TICK: Duration = Duration::from_millis(100);

/// Compilations that run at once, with those that are late.
pub(super) const COMPILATIONS: usize = 4;

/// Most forms that are remembered.
pub(super) const FORMS: usize = 32;

/// Most bytes of the forms that are remembered.
const FORMS_BYTES: usize = 64 << 20;

/// Identifies a form with its calls.
pub type FormDigest = [u8; 32];

/// Runs compilations, and remembers the newest.
#[derive(Default)]
pub struct Compiler {
    running: Arc<(Mutex<usize>, Condvar)>,
    forms: Mutex<Remembered>,
    /// Whether the engine ends.
    ends: AtomicBool,
}

/// The newest forms, in the order of their last use.
#[derive(Default)]
struct Remembered {
    forms: VecDeque<(FormDigest, Grammar)>,
    bytes: usize,
    /// Compilations so far.
    #[cfg(test)]
    compiled: usize,
}

impl Compiler {
    /// The remembered grammar of a form.
    pub fn recall(&self, digest: &FormDigest) -> Option<Grammar> {
        let mut remembered = self.forms.lock();
        let at = remembered.forms.iter().position(|(known, _)| known == digest)?;
        let form = remembered.forms.remove(at)?;
        let copy = form.1.with_own_lexer();
        remembered.forms.push_back(form);
        Some(copy)
    }

    /// Remembers the grammar of a form.
    pub fn remember(&self, digest: FormDigest, grammar: &Grammar) {
        let remembered = &mut *self.forms.lock();
        #[cfg(test)]
        {
            remembered.compiled += 1;
        }
        if grammar.bytes > FORMS_BYTES || remembered.forms.iter().any(|(known, _)| *known == digest)
        {
            return;
        }
        remembered.forms.push_back((digest, grammar.with_own_lexer()));
        remembered.bytes += grammar.bytes;
        while remembered.forms.len() > FORMS || remembered.bytes > FORMS_BYTES {
            let Some((_, oldest)) = remembered.forms.pop_front() else { break };
            remembered.bytes -= oldest.bytes;
        }
    }

    #[cfg(test)]
    pub fn compiled(&self) -> usize {
        self.forms.lock().compiled
    }

    /// Compilations that run.
    #[cfg(test)]
    pub fn running(&self) -> usize {
        *self.running.0.lock()
    }

    #[cfg(test)]
    pub fn remembered(&self) -> usize {
        self.forms.lock().forms.len()
    }

    /// Runs `work` on a thread with `stack` bytes of stack.
    ///
    /// # Errors
    /// Why it has no result, in words that follow the name of a field.
    pub fn run<T: Send + 'static>(
        &self,
        stack: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let end = Instant::now() + DEADLINE;
        let place = self.place(end)?;
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new().name("form".into()).stack_size(stack);
        let spawned = thread.spawn(move || {
            let _place = place;
            // Nobody waits any more if it is late.
            let _ = sender.send(work());
        });
        spawned.map_err(|error| format!("cannot be compiled: no thread for it: {error}"))?;
        loop {
            match receiver.recv_timeout(TICK) {
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) => self.check(end)?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err("cannot be compiled: the compiler failed".into());
                }
            }
        }
    }

    /// Waits for one of the [`COMPILATIONS`].
    fn place(&self, end: Instant) -> Result<Place, String> {
        let (count, changed) = &*self.running;
        let mut count = count.lock();
        while *count >= COMPILATIONS {
            changed.wait_for(&mut count, TICK);
            self.check(end)?;
        }
        *count += 1;
        Ok(Place(self.running.clone()))
    }

    /// Checks that the result of a compilation may still be waited for.
    fn check(&self, end: Instant) -> Result<(), String> {
        match Instant::now() < end {
            _ if self.ends.load(Relaxed) => Err("is not compiled: the server stops".into()),
            true => Ok(()),
            false => Err(late()),
        }
    }

    /// Ends every wait for a compilation: the engine ends, and those that run end by themselves.
    pub fn end(&self) {
        self.ends.store(true, Relaxed);
    }
}

fn late() -> String {
    let seconds = DEADLINE.as_secs();
    format!(
        "takes more than {seconds} s to compile beside what else the machine does; write a simpler form"
    )
}

/// One of the [`COMPILATIONS`]; free again when it is dropped.
struct Place(Arc<(Mutex<usize>, Condvar)>);

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.0.lock() -= 1;
        self.0.1.notify_one();
    }
}
