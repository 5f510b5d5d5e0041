//! State and tail of a recurrent layer after the first rows of a draft, in one kernel.

use mlx_rs::{Array, Dtype};

use super::{Kernel, Launch, is_enabled};
use crate::cache::{Element, Writes, WritesOf};
use crate::error::Result;

const KERNEL: Kernel = Kernel { name: "rewind", source: include_str!("rewind.metal") };

/// Threads of a threadgroup; each computes an element.
const THREADS: i32 = 256;

/// The state f32 [1, H_v, D_v, D_k] and the tail [1, K - 1, C] after the first `keep` of the rows that wrote `writes` after
/// `state` and `tail`. After [`super::gated_delta`], these are the bits that a pass of these rows leaves. The inputs of the
/// convolution are the first C columns of `x` [1, T, >= C]. `None` if there is no kernel for the types or dimensions.
pub fn rewind(
    [state, tail]: [&Element; 2],
    writes: &WritesOf,
    x: &Element,
    keep: i32,
) -> Result<Option<[Array; 2]>> {
    let WritesOf { batch, index } = writes;
    let Writes { k, correction, log_decay } = &**batch;
    let (shape, tail_shape, x_shape) = (state.shape(), tail.shape(), x.shape());
    let (&[_, heads, value_dim, key_dim], 3) = (&shape[..], log_decay.ndim()) else {
        return Ok(None);
    };
    let [rows, taps, channels] = [x_shape[1], tail_shape[1], tail_shape[2]];
    let dtype = tail.batch().dtype();
    let floats = [state.batch(), k, correction, log_decay];
    let fits = is_enabled()
        && keep <= rows
        && batch.rows() == rows
        && x.batch().dtype() == dtype
        && floats.iter().all(|array| array.dtype() == Dtype::Float32);
    if !fits {
        return Ok(None);
    }
    let numbers = [keep, rows, state.index(), *index, tail.index(), x.index(), x_shape[2]];
    let elements = heads * value_dim * key_dim + taps * channels;
    let mut next = KERNEL
        .run(&Launch {
            header: String::new(),
            inputs: &[
                ("states", state.batch()),
                ("keys", k),
                ("corrections", correction),
                ("log_decays", log_decay),
                ("tails", tail.batch()),
                ("x", x.batch()),
                ("numbers", &Array::from_slice(&numbers, &[7])),
            ],
            in_place: &[],
            outputs: &[("next_state", &shape, Dtype::Float32), ("next_tail", &tail_shape, dtype)],
            constants: &[
                ("HEADS", heads),
                ("DV", value_dim),
                ("DK", key_dim),
                ("CHANNELS", channels),
                ("TAPS", taps),
            ],
            dtype,
            groups: [(elements + THREADS - 1) / THREADS, 1, 1],
            threads: THREADS,
        })?
        .into_iter();
    Ok(next.next().zip(next.next()).map(|(state, tail)| [state, tail]))
}
