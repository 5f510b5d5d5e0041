//! Attention of a layer from its projections on: norms of heads, rotation by position, caches, scores, gates.

use mlx_rs::Array;

use super::attention::kernel_span;
use super::{Joined, Outputs, RmsNorm, Rope, Scores, attention, sigmoid_gated};
use crate::cache::{LayerCache, Span};
use crate::error::Result;
use crate::kernels::cuda::{self, Destination, Gates};

/// Heads of a layer, and what happens to them between projection and attention.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// H_q
    pub heads: i32,
    /// H_kv
    pub kv_heads: i32,
    /// D
    pub head_dim: i32,
    /// Whether each query is followed by the gate of its result.
    pub gated: bool,
    /// Norm of each query, [D].
    pub q_norm: Option<&'a RmsNorm>,
    /// Norm of each key, [D].
    pub k_norm: Option<&'a RmsNorm>,
    /// `None` if the layer does not know positions.
    pub rope: Option<&'a Rope>,
}

impl Heads<'_> {
    /// Attention of the rows of all spans over their entry `layer`, which it advances: [1, R, H_q D].
    ///
    /// `projections` computed `projected`: queries [1, R, H_q D], or twice as wide with gates, keys and values
    /// [1, R, H_kv D].
    pub fn attend(
        &self,
        projected: Outputs<3>,
        projections: &Joined<3>,
        scores: &Scores,
        spans: &mut [Span<'_>],
        layer: usize,
    ) -> Result<Array> {
        if self.has_kernels(scores, spans, layer) {
            return self.attend_by_kernels(&projected, scores, spans, layer);
        }
        let &Self { heads: h, kv_heads: h_kv, head_dim: d, .. } = self;
        let [mut q, k, v] = projections.split(projected)?;
        let rows = q.dim(1);
        let mut gate = None;
        if self.gated {
            let parts = q.reshape(&[1, rows, h, 2 * d])?.split_at_indices(&[d], 3)?;
            gate = Some(parts[1].reshape(&[1, rows, h * d])?);
            q = parts[0].clone();
        }
        let mut q = q.reshape(&[1, rows, h, d])?;
        let mut k = k.reshape(&[1, rows, h_kv, d])?;
        let v = v.reshape(&[1, rows, h_kv, d])?;
        if let Some(norm) = self.q_norm {
            q = norm.forward(&q)?;
        }
        if let Some(norm) = self.k_norm {
            k = norm.forward(&k)?;
        }
        if let Some(rope) = self.rope {
            (q, k) = (rope.forward(&q, spans)?, rope.forward(&k, spans)?);
        }
        let mixed = attention([&q, &k, &v], scores, spans, layer)?;
        match gate {
            Some(gate) => sigmoid_gated(gate, mixed),
            None => Ok(mixed),
        }
    }

    /// Whether kernels compute the whole: spans of a few rows with caches of all positions.
    fn has_kernels(&self, scores: &Scores, spans: &[Span<'_>], layer: usize) -> bool {
        let fits = |span: &Span<'_>| {
            span.rows <= cuda::ROWS && matches!(span.cache.layers[layer], LayerCache::Full(_))
        };
        cuda::has_heads_kernel(self)
            && (scores.softcap.is_none(), scores.sinks.is_none()) == (true, true)
            && self.heads % self.kv_heads == 0
            && spans.len() <= cuda::SPANS
            && spans.iter().all(fits)
    }

    fn attend_by_kernels(
        &self,
        projected: &Outputs<3>,
        scores: &Scores,
        spans: &mut [Span<'_>],
        layer: usize,
    ) -> Result<Array> {
        let first = match projected {
            Outputs::Joined(all) => all,
            Outputs::Apart([q, ..]) => q,
        };
        let mut destinations = Vec::with_capacity(spans.len());
        for span in &mut *spans {
            let (rows, position) = (span.rows, span.offset());
            let LayerCache::Full(full) = &mut span.cache.layers[layer] else {
                unreachable!("checked by `has_kernels`")
            };
            let place = full.len();
            let buffer = full.reserve(rows, first.dtype())?;
            destinations.push(Destination { rows, position, place, buffer });
        }
        let q = cuda::heads(self, projected, &destinations)?;
        for span in &mut *spans {
            let rows = span.rows;
            if let LayerCache::Full(full) = &mut span.cache.layers[layer] {
                full.wrote(rows, q.clone());
            }
        }
        let spans: Vec<_> = spans.iter().map(|span| kernel_span(span, layer)).collect();
        let gates = self.gated.then_some(Gates(first));
        let mixed = cuda::attention(&q, scores.scale, &spans, gates)?;
        Ok(mixed.expect("checked by `has_kernels`"))
    }
}
