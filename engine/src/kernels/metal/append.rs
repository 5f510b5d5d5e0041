//! The newest keys and values of several spans, written to their buffers in one launch.
//!
//! MLX writes to one buffer in an operation, so a pass of N streams would have N of them. It orders the kernels of a Mac by
//! the buffers that they declare as outputs, and a kernel cannot declare one that exists. Here the buffers are inputs, and an
//! output of eight numbers stands for the writes: the next kernels that read or write the buffers have it among their inputs
//! ([`Buffers::after`](crate::cache::Buffers)), and for MLX's operations the cache waits ([`Writer`]).

use std::rc::Rc;

use mlx_rs::Array;

use super::kernel::{BUFFERS, NAMES, choice};
use super::{Kernel, Launch};
use crate::cache::Writer;
use crate::error::Result;
use crate::kernels::LaunchSpan;

pub(super) const KERNEL: Kernel = Kernel { name: "append", source: include_str!("append.metal") };

/// Most buffers that are written and outputs that are waited for: those of the kernel without rows, numbers, and the output.
const MOST_BUFFERS: usize = BUFFERS - 3;

/// Buffers in a variant of the kernel. Other numbers of buffers are rounded up, so that few variants are compiled.
const VARIANTS: [usize; 3] = [3, 9, MOST_BUFFERS];

/// Elements of the output: as many as MLX passes in the address space of buffers.
const WRITTEN: i32 = 8;

/// Whether one launch takes these spans.
pub fn appends(spans: &[(i32, LaunchSpan<'_>)]) -> bool {
    spans.len() + earlier(spans.iter().map(|(_, span)| span)).len() <= MOST_BUFFERS
}

/// Outputs of the kernels that the buffers of `spans` are read or written after, each once.
pub fn earlier<'s, 'a: 's>(
    spans: impl IntoIterator<Item = &'s LaunchSpan<'a>>,
) -> Vec<&'a Rc<Array>> {
    let mut outputs: Vec<&Rc<Array>> = Vec::new();
    for output in spans.into_iter().filter_map(|span| span.buffers.after) {
        if !outputs.iter().any(|known| Rc::ptr_eq(known, output)) {
            outputs.push(output);
        }
    }
    outputs
}

/// Appends rows of `kv` [1, 2 H_kv, R, D] to the buffers of `spans`, each with the first of its rows in `kv`. [`appends`] must
/// be true.
pub fn append(kv: &Array, spans: &[(i32, LaunchSpan<'_>)]) -> Result<Writer> {
    append_by(KERNEL, kv, spans)
}

/// [`append`] by this kernel.
pub(super) fn append_by(
    kernel: Kernel,
    kv: &Array,
    spans: &[(i32, LaunchSpan<'_>)],
) -> Result<Writer> {
    let [heads, all, dim] = [kv.dim(1), kv.dim(2), kv.dim(3)];
    let mut numbers = vec![i32::try_from(spans.len()).expect("a launch has few buffers"), all];
    let mut rows = 0;
    for (first, span) in spans {
        numbers.extend([rows, *first, span.buffers.own.dim(2), span.buffers.len]);
        rows += span.rows;
    }
    let count = i32::try_from(numbers.len()).expect("a launch has few buffers");
    let numbers = Array::from_slice(&numbers, &[count]);
    let earlier = earlier(spans.iter().map(|(_, span)| span));
    let (own, used) = (spans.len(), spans.len() + earlier.len());
    let variant = VARIANTS.into_iter().find(|most| *most >= used).unwrap_or(used);
    let names = &NAMES[..variant];
    let in_place: Vec<(&str, &Array)> =
        names.iter().copied().zip(spans.iter().map(|(_, span)| span.buffers.own)).collect();
    // Names without a buffer are not read.
    let others = earlier.into_iter().map(|output| &**output).chain(std::iter::repeat(kv));
    let mut inputs: Vec<(&str, &Array)> = names[own..].iter().copied().zip(others).collect();
    inputs.extend([("kv", kv), ("numbers", &numbers)]);
    let outputs = kernel.run(&Launch {
        header: format!("#define BUFFER(i) {}\n", choice(names)),
        inputs: &inputs,
        in_place: &in_place,
        outputs: &[("written", &[WRITTEN], kv.dtype())],
        constants: &[("D", dim)],
        dtype: kv.dtype(),
        groups: [1, heads, rows],
        threads: dim,
    })?;
    let output = outputs.into_iter().next().expect("`run` returns as many arrays as outputs");
    Ok(Writer { output: Rc::new(output), is_ordered: false })
}
