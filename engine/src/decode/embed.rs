//! Embeddings: the hidden states of a prompt, pooled into one vector of length 1.
//!
//! A request for one is queued, admitted, prefilled and cancelled like any other, beside the others' rows. It
//! ends where its reply would begin.

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use crate::config::Pooling;
use crate::error::{Error, RequestError, Result};
use crate::request::{Embedding, Event};
use crate::sequence::Sequence;

/// Adds the newest rows of the cache of `sequence`, whose hidden states are [1, R, D], to its embedding,
/// and sends that at the end of the prompt.
///
/// # Errors
/// [`RequestError::Field`] if the client wants more dimensions than there are.
pub fn pool(
    pooling: Pooling,
    sequence: &mut Sequence,
    wish: Embedding,
    hidden: &Array,
) -> Result<()> {
    let is_end = sequence.timeline().has_run_prompt();
    let hidden = hidden.as_dtype(Dtype::Float32)?;
    let pooled = match pooling {
        Pooling::Last if is_end => hidden.take_axis(Array::from_int(hidden.dim(1) - 1), 1)?,
        Pooling::Last => return Ok(()),
        Pooling::Mean => {
            let sum = hidden.sum_axis(1, false)?;
            sequence.take_pooled().map_or(Ok(sum.clone()), |pooled| pooled.add(sum))?
        }
    };
    // The graphs of all chunks would pile up.
    eval([&pooled])?;
    if is_end {
        let embedding = normalized(pooled.try_as_slice::<f32>()?, wish)?;
        sequence.reply().send_event(Event::Embedding(embedding));
    } else {
        sequence.set_pooled(pooled);
    }
    Ok(())
}

/// The first dimensions of `pooled`, scaled to length 1: the direction of a sum is that of the mean.
fn normalized(pooled: &[f32], wish: Embedding) -> Result<Vec<f32>> {
    let count = wish.dimensions.map_or(pooled.len(), |count| count as usize);
    let Some(kept) = pooled.get(..count) else {
        let problem = format!("is {count}, the model's embeddings have {}", pooled.len());
        return Err(RequestError::Field { field: "dimensions", problem }.into());
    };
    let length = kept.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    if !(length.is_finite() && length > 0.0) {
        return Err(Error::Array(format!("an embedding has the length {length}")));
    }
    Ok(kept.iter().map(|&x| (f64::from(x) / length) as f32).collect())
}
