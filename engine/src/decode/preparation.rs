//! The threads that prepare requests and tokenize prefixes: they take them from the queue, and return them to it.

use std::rc::Rc;
use std::sync::Arc;

use crate::error::catch_panic;
use crate::job::fail_all;
use crate::schedule::queue::{Lane, Queue, Taken, Work};
use crate::sequence::hooks::HookThreads;
use crate::sequence::prepare::{Preparer, STAGE, log_refused};

/// Threads that prepare requests. The last takes none with a form, which may take seconds to compile.
pub const THREADS: [Lane; 3] = [Lane::All, Lane::All, Lane::WithoutForm];

/// What policies need: the preparation of requests, and the threads that hooks are called on.
pub struct PolicyThreads {
    preparer: Arc<Preparer>,
    hooks: Rc<HookThreads>,
}

impl PolicyThreads {
    /// Requests are prepared by `preparer`, and hooks are called on `hooks`.
    pub fn new(preparer: Preparer, hooks: Rc<HookThreads>) -> Self {
        Self { preparer: Arc::new(preparer), hooks }
    }

    /// What prepares requests.
    pub fn preparer(&self) -> &Arc<Preparer> {
        &self.preparer
    }

    /// The threads that hooks are called on.
    pub fn hooks(&self) -> &Rc<HookThreads> {
        &self.hooks
    }

    /// Calls of `on-finish` that have not ended, of requests that have.
    pub fn finishing(&self) -> usize {
        self.hooks.finishing()
    }
}

#[cfg(test)]
impl PolicyThreads {
    /// What prepares requests, to be changed while no thread does.
    pub fn preparer_mut(&mut self) -> &mut Arc<Preparer> {
        &mut self.preparer
    }
}

/// Prepares the requests of `queue`, and the prefixes, until the engine has ended.
pub fn serve(preparer: &Preparer, queue: &Queue, lane: Lane) {
    while let Some(work) = queue.take(lane) {
        match work {
            Work::Request(taken) => serve_request(preparer, queue, taken),
            Work::Prefix(expected) => match catch_panic(STAGE, || preparer.prefix(&expected)) {
                Ok(prefix) => queue.add_prefix(prefix),
                // Most likely the template refuses such a conversation.
                Err(error) => log_refused("prefix prefetch", &error),
            },
        }
    }
}

fn serve_request(preparer: &Preparer, queue: &Queue, Taken { number, body, job, others }: Taken) {
    let (id, span) = (job.request.id.clone(), job.request.span.clone());
    let channels = others.iter().map(|other| other.events.clone());
    let channels = std::iter::once(job.events.clone()).chain(channels).collect();
    match catch_panic(STAGE, || preparer.prepare_choices(body, job, others)) {
        Ok(prepared) => queue.ready(number, Box::new(prepared)),
        Err(error) => {
            span.log(|| log_refused(&id, &error));
            // Otherwise it has ended already.
            if queue.leave(number) {
                fail_all(channels, error);
            }
        }
    }
}
