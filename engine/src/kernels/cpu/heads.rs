//! Attention of the rows of spans, from the projections on, in f32. Writes keys and values to the caches in place.

use mlx_rs::{Array, Dtype};
use mlx_sys::View;
use steersman_cpu_kernels::{self as kernels, Attention, Norm, Rotation, Sequence};

use super::layers::{fits, size};
use super::{elements, run, shape, slice_mut};
use crate::error::Result;
use crate::kernels::{HeadsView, LaunchSpan, NormView, Outputs, RotationView};

/// Parameters before those of the spans.
const FIXED: usize = 9;

/// Returns true if there is a kernel for these heads.
pub fn has_heads(heads: &HeadsView<'_>, projected: &Outputs<3>) -> bool {
    let Outputs::Apart(parts) = projected else { return false };
    let norms = [heads.q_norm, heads.k_norm].into_iter().flatten();
    let per_head = |norm: NormView<'_>| norm.weight.shape() == [heads.head_dim];
    fits(parts.iter().chain(norms.clone().map(|norm| norm.weight)))
        && Attention::supports(size(heads.head_dim))
        && norms.into_iter().all(per_head)
        && heads.rotation.is_none_or(|rotation| rotation.has_plain_halves)
}

/// Appends the keys and values of all rows to the buffers of `spans`, and returns the attention of their queries, gated:
/// [1, R, H_q D]. The writes happen when it is evaluated.
pub fn heads(
    heads: &HeadsView<'_>,
    [q, k, v]: &[Array; 3],
    scale: f32,
    spans: &[LaunchSpan<'_>],
) -> Result<Array> {
    let &HeadsView { heads: h, kv_heads, head_dim, gated, q_norm, k_norm, rotation } = heads;
    let frequencies = rotation.map(RotationView::frequencies).transpose()?;
    let bits = |number: f32| number.to_bits().cast_signed();
    let eps = |norm: Option<NormView<'_>>| norm.map_or(0.0, |norm| norm.eps);
    let given = [q_norm.is_some(), k_norm.is_some(), rotation.is_some()];
    let given = given.iter().rev().fold(0, |bits, given| 2 * bits + i32::from(*given));
    let mut parameters = vec![
        h,
        kv_heads,
        given,
        i32::from(gated),
        bits(scale),
        bits(eps(q_norm)),
        bits(eps(k_norm)),
        bits(rotation.map_or(1.0, |rotation| rotation.scale)),
        i32::try_from(spans.len()).expect("a pass has fewer spans than 2^31"),
    ];
    debug_assert_eq!(parameters.len(), FIXED);
    for &LaunchSpan { rows, position, buffers } in spans {
        let shared = buffers.shared.map_or(0, |shared| shared.rows);
        parameters.extend([rows, position, buffers.len, shared]);
    }
    // What is not given is not read.
    let [q_weight, k_weight] = [q_norm, k_norm].map(|norm| norm.map_or(q, |norm| norm.weight));
    let mut inputs = vec![q, k, v, q_weight, k_weight, frequencies.unwrap_or(q)];
    let buffers = || spans.iter().map(|span| span.buffers);
    inputs.extend(buffers().map(|buffers| buffers.own));
    inputs.extend(buffers().map(|buffers| buffers.shared.map_or(q, |kv| &*kv.buffer)));
    // Not read: MLX runs them first, which it would not do for the writes of an earlier pass that nothing has evaluated.
    inputs.extend(buffers().filter_map(|buffers| buffers.after.map(|after| &**after)));
    let shape = [1, q.dim(1), h * head_dim];
    // SAFETY: `heads_of` computes one output of this shape from these inputs. Nothing but the caches of the
    // spans holds the buffers, so it may write to them.
    let y = unsafe { run(&inputs, [&shape], Dtype::Float32, heads_of, &parameters) };
    Ok(y?.into_iter().next().expect("one output"))
}

/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays and parameters of [`heads`].
unsafe extern "C" fn heads_of(views: *const View, count: usize, parameters: *const i32) {
    // SAFETY: promised by the caller. The output is a new array, and nothing else reads or writes the buffers meanwhile:
    // the stream runs one operation after the other.
    unsafe {
        let views = std::slice::from_raw_parts(views, count);
        let [q, k, v, q_norm, k_norm, frequencies, rest @ .., y] = views else {
            unreachable!("made with six inputs and the buffers, and one output");
        };
        let (buffers, rest) = rest.split_at(size(*parameters.add(FIXED - 1)));
        let shared = &rest[..buffers.len()];
        let parameters = std::slice::from_raw_parts(parameters, FIXED + 4 * buffers.len());
        let (fixed, spans) = parameters.split_at(FIXED);
        let float = |i: usize| f32::from_bits(fixed[i].cast_unsigned());
        let has = |bit: i32| fixed[2] & (1 << bit) != 0;
        let [q, k, v, q_norm, k_norm, frequencies] =
            [q, k, v, q_norm, k_norm, frequencies].map(|view| elements::<f32>(view));
        let norm = |bit, weight, eps| has(bit).then_some(Norm { weight, eps: float(eps) });
        let y_shape = shape(y);
        let heads = size(fixed[0]);
        let x = Attention {
            heads,
            kv_heads: size(fixed[1]),
            head_dim: y_shape[2] / heads,
            gated: fixed[3] != 0,
            scale: float(4),
            q: &q,
            k: &k,
            v: &v,
            q_norm: norm(0, &*q_norm, 5),
            k_norm: norm(1, &*k_norm, 6),
            rotation: has(2).then_some(Rotation { frequencies: &frequencies, scale: float(7) }),
        };
        let length = |view: &View| shape(view).iter().product::<usize>();
        let shared: Vec<_> = shared.iter().map(|view| elements::<f32>(view)).collect();
        let sequence = |((view, shared), span): ((&View, _), &[i32])| Sequence {
            rows: size(span[0]),
            position: size(span[1]),
            cached: size(span[2]),
            kv: slice_mut(view, length(view)),
            shared_rows: size(span[3]),
            shared,
        };
        let views = buffers.iter().zip(shared.iter().map(|shared| &shared[..]));
        let mut sequences: Vec<_> = views.zip(spans.chunks_exact(4)).map(sequence).collect();
        kernels::attention(&x, &mut sequences, slice_mut(y, y_shape.iter().product()));
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Device;

    use super::*;
    use crate::kernels::cpu::enable;
    use crate::kernels::tests::{Backend, check_copies, check_heads};

    const BACKEND: Backend = Backend { enable, joins: false, attends: true, queues: false };

    #[test]
    fn heads_equal_their_operations() {
        Device::set_default(&Device::cpu());
        check_heads(&BACKEND, Dtype::Float32, 1e-5);
    }

    #[test]
    fn copies_of_a_cache_do_not_see_rows_written_in_place() {
        Device::set_default(&Device::cpu());
        check_copies(&BACKEND, Dtype::Float32);
    }
}
