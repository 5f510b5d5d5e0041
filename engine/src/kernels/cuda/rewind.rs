//! State and tail of a recurrent layer after the first rows of a draft, in one kernel.

use mlx_rs::{Array, Dtype};

use super::gated_delta::{LANES, WARPS};
use super::{Kernel, Launch, enabled};
use crate::cache::{Element, Writes, WritesOf};
use crate::error::Result;

const KERNEL: Kernel = Kernel {
    name: "rewind",
    inputs: &["states", "keys", "corrections", "log_decays", "tails", "x"],
    outputs: &["next_state", "next_tail"],
    numbers: &["keep", "rows", "state_index", "write_index", "tail_index", "x_index", "x_width"],
    header: "",
    source: include_str!("rewind.cu"),
};

/// Columns that a thread may hold: those that one or several vectors load.
const COLUMNS: [i32; 5] = [1, 2, 4, 8, 16];

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
    let fits = enabled().is_some()
        && key_dim % LANES == 0
        && COLUMNS.contains(&(key_dim / LANES))
        && keep <= rows
        && heads * value_dim % WARPS == 0
        && batch.rows() == rows
        && x.batch().dtype() == dtype
        && floats.iter().all(|array| array.dtype() == Dtype::Float32);
    if !fits {
        return Ok(None);
    }
    let threads = WARPS * LANES;
    let tail_blocks = (taps * channels + threads - 1) / threads;
    let mut next = KERNEL
        .run(&Launch {
            inputs: &[state.batch(), k, correction, log_decay, tail.batch(), x.batch()],
            outputs: &[(&shape, Dtype::Float32), (&tail_shape, dtype)],
            numbers: &[keep, rows, state.index(), *index, tail.index(), x.index(), x_shape[2]],
            spans: &[],
            constants: &[
                ("HEADS", heads),
                ("DV", value_dim),
                ("DK", key_dim),
                ("CHANNELS", channels),
                ("TAPS", taps),
            ],
            dtype,
            blocks: [heads * value_dim / WARPS + tail_blocks, 1, 1],
            cluster: 1,
            threads,
            shared: 0,
        })?
        .into_iter();
    Ok(next.next().zip(next.next()).map(|(state, tail)| [state, tail]))
}
