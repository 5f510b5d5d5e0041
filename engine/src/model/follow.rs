//! The other ranks: they do what the log says, each with its part of the model.
//!
//! A follower has no tokens to sample, no policy and no clock. Where what it has differs from what the log expects, it stops before
//! it exchanges arrays with others.

use std::collections::HashMap;
use std::rc::Rc;

use mlx_rs::ops::zeros_dtype;
use mlx_rs::{Array, Dtype};

use super::{Model, Mtp, Pass};
use crate::cache::{Cache, Checkpoint, KeyValues, SharedPart, SharedRows, Span, State};
use crate::error::{Error, Result};
use crate::lazy::submit;
use crate::nn::token_ids;
use crate::ranks::{Entry, Id, Layers, Operation, Ranks, Rows};

/// Follows `log` until it ends, with the part of the model that this one of `ranks` has. Activations are in `dtype`.
///
/// # Errors
/// The errors of the operations; [`Error::Array`] if this rank has something else than the first one.
pub fn follow(
    part: &dyn Model,
    ranks: &Ranks,
    dtype: Dtype,
    log: impl IntoIterator<Item = Result<Entry>>,
) -> Result<()> {
    let mut follower = Follower { part, ranks, dtype, objects: HashMap::new(), hidden: None };
    for (expected, entry) in (0..).zip(log) {
        let Entry { sequence, operation } = entry?;
        if sequence != expected {
            return Err(differs(&format!("entry {sequence} follows, not {expected}")));
        }
        follower.perform(operation)?;
    }
    Ok(())
}

fn differs(problem: &str) -> Error {
    Error::Array(format!("this rank differs from the first one: {problem}"))
}

/// What the first rank has under a number.
#[derive(Clone)]
enum Object {
    Cache(Cache),
    Checkpoint(Checkpoint),
    KeyValues(KeyValues),
    State(State),
    Shared(Rc<SharedRows>),
}

struct Follower<'a> {
    part: &'a dyn Model,
    ranks: &'a Ranks,
    dtype: Dtype,
    objects: HashMap<Id, Object>,
    /// The hidden states of the last pass.
    hidden: Option<Array>,
}

impl Follower<'_> {
    fn perform(&mut self, operation: Operation) -> Result<()> {
        match operation {
            Operation::NewCache { new } => self.put(new, Object::Cache(self.part.new_cache()?)),
            Operation::NewMtpCache { new } => {
                self.put(new, Object::Cache(self.mtp()?.new_cache()?));
            }
            Operation::Clone { of, new } => {
                let clone = self.object(of)?.clone();
                self.put(new, clone);
            }
            Operation::Drop { object } => {
                self.objects.remove(&object).ok_or_else(|| unknown(object))?;
            }
            Operation::Quantize { cache, bits, from } => self.cache(cache)?.quantize(bits, from)?,
            Operation::MarkDraft { cache } => self.cache(cache)?.mark_draft(),
            Operation::RewindDraft { cache, position } => {
                self.cache(cache)?.rewind_draft(position)?;
            }
            Operation::Truncate { cache, position } => self.cache(cache)?.truncate(position),
            Operation::Checkpoint { cache, copied, new } => {
                let cache = self.cache(cache)?;
                let checkpoint =
                    if copied { cache.checkpoint()? } else { cache.brief_checkpoint() };
                submit(checkpoint.arrays())?;
                self.put(new, Object::Checkpoint(checkpoint));
            }
            Operation::RewindTo { cache, checkpoint } => {
                let Object::Checkpoint(checkpoint) = self.object(checkpoint)?.clone() else {
                    return Err(unknown(checkpoint));
                };
                self.cache(cache)?.rewind_to(&checkpoint)?;
            }
            Operation::KeyValues { cache, from, to, new } => {
                let kv = self.cache(cache)?.key_values(from, to)?;
                self.put(new, Object::KeyValues(kv));
            }
            Operation::Part { of, from, to, new } => {
                let part = self.key_values(of)?.part(from, to)?;
                self.put(new, Object::KeyValues(part));
            }
            Operation::Join { parts, new } => {
                let parts = parts.into_iter().map(|part| self.key_values(part).cloned());
                let joined = KeyValues::join(&parts.collect::<Result<Vec<_>>>()?)?;
                self.put(new, Object::KeyValues(joined));
            }
            Operation::Own { object } => {
                let owned = match self.objects.remove(&object) {
                    Some(Object::KeyValues(kv)) => Object::KeyValues(kv.owned()?),
                    Some(Object::State(state)) => Object::State(state.owned()?),
                    _ => return Err(unknown(object)),
                };
                self.put(object, owned);
            }
            Operation::State { cache, new } => {
                let state = self.cache(cache)?.recurrent_state()?;
                self.put(new, Object::State(state));
            }
            Operation::Share { cache, new } => {
                let rows = self.cache(cache)?.share()?;
                self.put(new, Object::Shared(rows));
            }
            Operation::Restore { cache, shared, kv, state, position } => {
                self.restore(cache, shared, &kv, state, position)?;
            }
            Operation::Forward(rows, layers) => self.forward(&rows, &layers)?,
            Operation::Mtp(rows, width) => self.run_mtp(&rows, width)?,
            Operation::Logits { rows, width } => {
                let logits = self.part.logits(&self.hidden_of_first(rows, width)?)?;
                submit([&logits])?;
            }
            Operation::Compare => {
                let hidden = self.hidden.as_ref().ok_or_else(|| differs("it has run no pass"))?;
                self.ranks.compare(hidden)?;
            }
            Operation::Sums { rows, width, times } => {
                submit([&self.ranks.sums(&[1, rows, width], self.dtype, times)?])?;
            }
        }
        Ok(())
    }

    fn put(&mut self, new: Id, object: Object) {
        self.objects.insert(new, object);
    }

    fn object(&self, id: Id) -> Result<&Object> {
        self.objects.get(&id).ok_or_else(|| unknown(id))
    }

    fn cache(&mut self, id: Id) -> Result<&mut Cache> {
        match self.objects.get_mut(&id) {
            Some(Object::Cache(cache)) => Ok(cache),
            _ => Err(unknown(id)),
        }
    }

    fn key_values(&self, id: Id) -> Result<&KeyValues> {
        match self.object(id)? {
            Object::KeyValues(kv) => Ok(kv),
            _ => Err(unknown(id)),
        }
    }

    fn mtp(&self) -> Result<&dyn Mtp> {
        self.part.mtp().ok_or_else(|| differs("it has no multi-token-prediction layer"))
    }

    fn restore(
        &mut self,
        cache: Id,
        shared: Option<(Id, usize)>,
        kv: &[Id],
        state: Option<Id>,
        position: usize,
    ) -> Result<()> {
        let shared = match shared {
            Some((id, count)) => match self.object(id)? {
                Object::Shared(rows) => Some(SharedPart { rows: rows.clone(), count }),
                _ => return Err(unknown(id)),
            },
            None => None,
        };
        let kv = kv.iter().map(|&id| self.key_values(id).cloned()).collect::<Result<Vec<_>>>()?;
        let state = match state {
            Some(id) => match self.object(id)? {
                Object::State(state) => state.clone(),
                _ => return Err(unknown(id)),
            },
            None => State::default(),
        };
        self.cache(cache)?.restore(shared, &kv, &state, position)
    }

    /// The caches of a pass, out of the objects until they are put back.
    fn take(&mut self, rows: &Rows) -> Result<Vec<(Id, Cache, i32)>> {
        let mut taken = Vec::with_capacity(rows.spans.len());
        for &(id, position, count) in &rows.spans {
            let Some(Object::Cache(cache)) = self.objects.remove(&id) else {
                return Err(unknown(id));
            };
            if cache.position != position {
                let own = cache.position;
                return Err(differs(&format!("a cache holds {own} rows, not {position}")));
            }
            taken.push((id, cache, i32::try_from(count).unwrap_or(i32::MAX)));
        }
        Ok(taken)
    }

    /// Runs `pass` with the tokens and spans of `rows`, and returns the hidden states that it returned, submitted.
    fn run(
        &mut self,
        rows: &Rows,
        pass: impl FnOnce(&Self, &Array, &mut [Span<'_>]) -> Result<Array>,
    ) -> Result<Array> {
        let mut taken = self.take(rows)?;
        let tokens = match &rows.tokens {
            Some(tokens) => token_ids(tokens),
            None => {
                let count: i32 = taken.iter().map(|(.., rows)| rows).sum();
                self.ranks.of_first(zeros_dtype(&[count], Dtype::Uint32)?)?
            }
        };
        let spans = taken.iter_mut().map(|(_, cache, rows)| Span { rows: *rows, cache });
        let hidden = pass(self, &tokens, &mut spans.collect::<Vec<_>>())?;
        submit([&hidden])?;
        for (id, cache, _) in taken {
            self.put(id, Object::Cache(cache));
        }
        Ok(hidden)
    }

    fn forward(&mut self, rows: &Rows, layers: &Layers) -> Result<()> {
        let pass = Pass { exit: layers.exit, skip: &layers.skip };
        let hidden = self.run(rows, |own, tokens, spans| own.part.forward(tokens, spans, pass))?;
        self.hidden = Some(hidden);
        Ok(())
    }

    fn run_mtp(&mut self, rows: &Rows, width: usize) -> Result<()> {
        let count = rows.spans.iter().map(|(.., count)| count).sum();
        self.run(rows, |own, tokens, spans| {
            own.mtp()?.forward(&own.hidden_of_first(count, width)?, tokens, spans)
        })?;
        Ok(())
    }

    /// Hidden states that the first rank has.
    fn hidden_of_first(&self, rows: usize, width: usize) -> Result<Array> {
        let size = |n: usize| i32::try_from(n).map_err(|_| differs("a pass has too many rows"));
        self.ranks.of_first(zeros_dtype(&[1, size(rows)?, size(width)?], self.dtype)?)
    }
}

fn unknown(id: Id) -> Error {
    differs(&format!("it has no such object {id}"))
}
