//! The log: what the first rank does with caches and passes, in this order, for the other ranks to do as well.
//!
//! The first rank decides; the others have the same objects under the numbers that it gives them, each with its own part of
//! the arrays. An object with a [`Mirror`] writes what is done with it by itself, also that it is cloned and dropped, so nobody
//! who uses one has to know of other ranks. A process that computes alone has no log, and its mirrors do nothing.
//!
//! Arrays are exchanged by passes only, and every entry that exchanges some is evaluated by all ranks, in the order of the log.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The number of an object.
pub type Id = u64;

/// An operation of the first rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the text of a variant names its operands")]
pub enum Operation {
    /// An empty cache of the model is made.
    NewCache { new: Id },
    /// An empty cache of the multi-token-prediction layer is made.
    NewMtpCache { new: Id },
    /// KV of a cache is quantized from a position on.
    Quantize { cache: Id, bits: i32, from: i32 },
    /// An object is cloned.
    Clone { of: Id, new: Id },
    /// An object is dropped.
    Drop { object: Id },
    /// The draft mark of a cache is set.
    MarkDraft { cache: Id },
    /// A cache goes back to a position of its draft.
    RewindDraft { cache: Id, position: usize },
    /// A cache drops all rows from a position on.
    Truncate { cache: Id, position: usize },
    /// A checkpoint of a cache is taken, with or without copies.
    Checkpoint { cache: Id, copied: bool, new: Id },
    /// A cache goes back to a checkpoint.
    RewindTo { cache: Id, checkpoint: Id },
    /// KV of some positions is taken from a cache.
    KeyValues { cache: Id, from: usize, to: usize, new: Id },
    /// KV of some of these positions is taken.
    Part { of: Id, from: usize, to: usize, new: Id },
    /// KV of positions one after the other is joined.
    Join { parts: Vec<Id>, new: Id },
    /// An object gets memory of its own.
    Own { object: Id },
    /// The recurrent state of a cache is taken.
    State { cache: Id, new: Id },
    /// Other caches may share the rows of a cache.
    Share { cache: Id, new: Id },
    /// A cache is restored from rows that it shares, KV and state.
    Restore {
        cache: Id,
        shared: Option<(Id, usize)>,
        kv: Vec<Id>,
        state: Option<Id>,
        position: usize,
    },
    /// A pass of the model.
    Forward(Rows, Layers),
    /// A pass of the multi-token-prediction layer, whose inputs have `width` dimensions.
    Mtp(Rows, usize),
    /// Logits of `rows` hidden states of `width` dimensions are computed.
    Logits { rows: usize, width: usize },
    /// The hidden states of the last pass are compared.
    Compare,
    /// Arrays of `rows` rows of `width` dimensions are summed, one after the other, to measure how long that takes.
    Sums { rows: i32, width: i32, times: usize },
}

/// The rows of a pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rows {
    /// Caches, the position of each, and how many rows follow it.
    pub spans: Vec<(Id, usize, usize)>,
    /// All tokens; `None` if the first rank itself does not know them yet.
    pub tokens: Option<Vec<u32>>,
}

/// The layers of a pass.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layers {
    /// Exit after this many.
    pub exit: Option<usize>,
    /// Those that skip their feed-forward block.
    pub skip: Vec<usize>,
}

/// An operation with its place in the log, from 0 on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its place.
    pub sequence: u64,
    /// What was done.
    pub operation: Operation,
}

/// The end of the log where the first rank writes.
pub struct Log {
    write: Box<dyn Fn(&Entry) -> bool>,
    sequence: Cell<u64>,
    ids: Cell<Id>,
    is_broken: Cell<bool>,
}

impl Log {
    /// A log whose entries go to `write`, which returns false if another rank does not get them.
    pub fn new(write: impl Fn(&Entry) -> bool + 'static) -> Rc<Self> {
        Rc::new(Self {
            write: Box::new(write),
            sequence: Cell::new(0),
            ids: Cell::new(0),
            is_broken: Cell::new(false),
        })
    }

    /// Writes an operation.
    pub fn note(&self, operation: Operation) {
        let sequence = self.sequence.replace(self.sequence.get() + 1);
        if !self.is_broken.get() && !(self.write)(&Entry { sequence, operation }) {
            self.is_broken.set(true);
        }
    }

    /// Checks that all ranks have got all entries. A pass begins with this: without them it would wait for ever.
    ///
    /// # Errors
    /// [`Error::Array`] if one has not.
    pub fn check(&self) -> Result<()> {
        match self.is_broken.get() {
            true => Err(Error::Array("another rank has ended".into())),
            false => Ok(()),
        }
    }

    fn new_id(&self) -> Id {
        self.ids.replace(self.ids.get() + 1)
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").field("sequence", &self.sequence.get()).finish_non_exhaustive()
    }
}

/// The number of an object on all ranks; none where one process computes alone.
#[derive(Debug, Default)]
pub struct Mirror(Option<(Id, Rc<Log>)>);

impl Mirror {
    /// That of a new object, which the operation `made` makes.
    pub fn new(log: &Rc<Log>, made: impl FnOnce(Id) -> Operation) -> Self {
        let new = log.new_id();
        log.note(made(new));
        Self(Some((new, log.clone())))
    }

    /// The number.
    pub fn id(&self) -> Option<Id> {
        self.0.as_ref().map(|(id, _)| *id)
    }

    /// Writes what is done with the object of this number.
    pub fn note(&self, done: impl FnOnce(Id) -> Operation) {
        if let Some((id, log)) = &self.0 {
            log.note(done(*id));
        }
    }

    /// That of a new object, which the operation `made` makes of this one; it gets both numbers.
    pub fn make(&self, made: impl FnOnce(Id, Id) -> Operation) -> Self {
        match &self.0 {
            Some((id, log)) => Self::new(log, |new| made(*id, new)),
            None => Self(None),
        }
    }
}

impl Clone for Mirror {
    fn clone(&self) -> Self {
        self.make(|of, new| Operation::Clone { of, new })
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.note(|object| Operation::Drop { object });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn objects_write_what_becomes_of_them() {
        let written = Rc::new(RefCell::new(Vec::new()));
        let into = written.clone();
        let log = Log::new(move |entry| {
            into.borrow_mut().push(entry.clone());
            true
        });
        let first = Mirror::new(&log, |new| Operation::NewCache { new });
        let second = first.clone();
        second.note(|cache| Operation::MarkDraft { cache });
        drop(first);
        drop(second);
        log.check().unwrap();
        let operations = [
            Operation::NewCache { new: 0 },
            Operation::Clone { of: 0, new: 1 },
            Operation::MarkDraft { cache: 1 },
            Operation::Drop { object: 0 },
            Operation::Drop { object: 1 },
        ];
        let expected =
            (0..).zip(operations).map(|(sequence, operation)| Entry { sequence, operation });
        assert_eq!(*written.borrow(), expected.collect::<Vec<_>>());
        assert_eq!(Mirror::default().clone().id(), None);
    }

    #[test]
    fn a_log_that_somebody_does_not_get_is_broken() {
        let log = Log::new(|entry| entry.sequence < 1);
        log.note(Operation::MarkDraft { cache: 0 });
        log.check().unwrap();
        log.note(Operation::MarkDraft { cache: 0 });
        assert!(log.check().unwrap_err().to_string().contains("another rank has ended"));
    }
}
