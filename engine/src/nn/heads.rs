//! Attention of a layer from its projections on: norms of heads, rotation by position, caches, scores, gates.

use mlx_rs::Array;

use super::attention::{count_written, reserve};
use super::{Joined, Outputs, RmsNorm, Rope, Scores, append_and_attend, attention, sigmoid_gated};
use crate::cache::{LayerCache, Span};
use crate::error::Result;
use crate::kernels::metal::{self, RotatedHeads};
use crate::kernels::{self, HeadsRows, HeadsView};

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
        if self.has_kernel(&projected, scores, spans, layer) {
            return self.attend_by_kernel(&projected, scores.scale, spans, layer);
        }
        let positions = spans.iter().flat_map(|span| span.offset()..span.offset() + span.rows);
        if let Some(heads) = metal::rotated_heads(&self.view(), &projected, positions)? {
            let RotatedHeads { q, kv, gates } = heads;
            return append_and_attend(&q, &kv, gates.as_ref(), scores, spans, layer);
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

    /// The heads as kernels read them.
    pub fn view(&self) -> HeadsView<'_> {
        let &Self { heads, kv_heads, head_dim, gated, q_norm, k_norm, rope } = self;
        HeadsView {
            heads,
            kv_heads,
            head_dim,
            gated,
            q_norm: q_norm.map(RmsNorm::view),
            k_norm: k_norm.map(RmsNorm::view),
            rotation: rope.map(Rope::view),
        }
    }

    /// Returns true if a kernel computes the whole: all spans have caches of all positions.
    fn has_kernel(
        &self,
        projected: &Outputs<3>,
        scores: &Scores,
        spans: &[Span<'_>],
        layer: usize,
    ) -> bool {
        let is_full = |span: &Span<'_>| matches!(span.cache.layers[layer], LayerCache::Full(_));
        scores.softcap.is_none()
            && scores.sinks.is_none()
            && self.heads % self.kv_heads == 0
            && spans.iter().all(is_full)
            && kernels::has_heads(&self.view(), projected, spans)
    }

    fn attend_by_kernel(
        &self,
        projected: &Outputs<3>,
        scale: f32,
        spans: &mut [Span<'_>],
        layer: usize,
    ) -> Result<Array> {
        let dtype = match projected {
            Outputs::Joined(first) | Outputs::Apart([first, ..]) => first.dtype(),
        };
        let reserve = |span| reserve(span, layer, dtype);
        let reserved = spans.iter_mut().map(reserve).collect::<Result<Vec<_>>>()?;
        let HeadsRows { mixed, writer } =
            kernels::heads(&self.view(), projected, scale, &reserved)?;
        count_written(spans, layer, &writer);
        Ok(mixed)
    }
}
