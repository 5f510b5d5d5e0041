//! Layers between products, in f32: GatedDeltaNet, SwiGLU and RMS norm; and rows and columns that are joined.

use std::borrow::Cow;
use std::ops::Range;

use mlx_rs::{Array, Dtype};
use mlx_sys::View;
use steersman_cpu_kernels::{
    self as kernels, GatedDelta, GatedDeltaResults, GatedDeltaWrites, Norm, Replay,
};

use super::{ENABLED, elements, list, run, shape, slice_mut};
use crate::cache::{Element, Writes, WritesOf};
use crate::error::Result;
use crate::kernels::{DeltaView, GatedDeltaRows, KernelKind, NormView, Outputs};

/// Whether the kernels are enabled, and all `arrays` are f32.
pub(super) fn fits<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> bool {
    ENABLED.get() && arrays.into_iter().all(|array| array.dtype() == Dtype::Float32)
}

/// `silu(gate) * up`, element by element. `None` if there is no kernel for the types.
pub fn swiglu(gate: &Array, up: &Array) -> Option<Result<Array>> {
    if !KernelKind::Gate.is_on() || !fits([gate, up]) || gate.shape() != up.shape() {
        return None;
    }
    // SAFETY: `swiglu_of` computes one output from two inputs of its shape.
    let y = unsafe { run(&[gate, up], [gate.shape()], Dtype::Float32, swiglu_of, &[]) };
    Some(y.map(|[y]| y))
}

/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays of [`swiglu`].
unsafe extern "C" fn swiglu_of(views: *const View, count: usize, _: *const i32) {
    // SAFETY: promised by the caller. The output is a new array that nothing else refers to.
    unsafe {
        let [gate, up, y] = std::slice::from_raw_parts(views, count) else {
            unreachable!("made with two inputs and one output");
        };
        let (gate, up) = (elements::<f32>(gate), elements::<f32>(up));
        kernels::swiglu(&gate, &up, slice_mut(y, gate.len()));
    }
}

/// See [`NormView::forward`]. `None` if there is no kernel for the types.
pub fn rms_norm(x: &Array, norm: NormView<'_>) -> Option<Result<Array>> {
    let NormView { weight, eps } = norm;
    if !KernelKind::Norm.is_on()
        || !fits([x, weight])
        || x.shape().last() != weight.shape().last()
        || weight.ndim() != 1
    {
        return None;
    }
    let parameters = [eps.to_bits().cast_signed()];
    // SAFETY: `norm_of` computes one output of x's shape from these inputs.
    let y = unsafe { run(&[x, weight], [x.shape()], Dtype::Float32, norm_of, &parameters) };
    Some(y.map(|[y]| y))
}

/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays and parameters of [`rms_norm`].
unsafe extern "C" fn norm_of(views: *const View, count: usize, parameters: *const i32) {
    // SAFETY: promised by the caller. The output is a new array that nothing else refers to.
    unsafe {
        let [x, weight, y] = std::slice::from_raw_parts(views, count) else {
            unreachable!("made with two inputs and one output");
        };
        let (x, weight) = (elements::<f32>(x), elements::<f32>(weight));
        let eps = f32::from_bits((*parameters).cast_unsigned());
        kernels::rms_norm(&x, Norm { weight: &weight, eps }, slice_mut(y, x.len()));
    }
}

/// The rows `x` of a batch after the state and the tail of each sequence; see [`GatedDeltaRows`]. Rows run one after
/// another, so their bits do not depend on how many there are. `record` asks for what they write. `None` if there is no
/// kernel for the types or dimensions.
pub fn gated_delta(
    layer: &DeltaView<'_>,
    x: &Outputs<4>,
    before: [&[&Element]; 2],
    record: bool,
) -> Option<Result<GatedDeltaRows>> {
    if !ENABLED.get() {
        return None;
    }
    let [qkv, z, b, a] = match layer.parts(x) {
        Ok(parts) => parts,
        Err(error) => return Some(Err(error)),
    };
    let [batch, rows] = [qkv.dim(0), qkv.dim(1)];
    let &DeltaView { key_heads, value_heads, key_dim, value_dim, .. } = layer;
    // Read where they lie: stacking copies the states of all sequences whenever one joins or leaves.
    let [(states, state_places), (tails, tail_places)] = before.map(Element::batches);
    let mut inputs = vec![&qkv, &z, &b, &a, layer.a_log, layer.dt_bias, layer.norm.weight];
    inputs.extend(layer.conv1d);
    inputs.extend(&states);
    inputs.extend(&tails);
    let supported = GatedDelta::supports(size(key_dim), size(value_dim));
    if !supported || !fits(inputs.iter().copied()) {
        return None;
    }
    let eps = layer.norm.eps.to_bits().cast_signed();
    let number = |size: usize| i32::try_from(size).expect("a pass has fewer arrays than 2^31");
    let counts = [layer.conv1d.len(), states.len(), tails.len()].map(number);
    let mut parameters = vec![key_heads, value_heads, eps];
    parameters.extend(counts);
    let places = state_places.iter().zip(&tail_places).flat_map(|(state, tail)| [state, tail]);
    parameters.extend(places.flatten().map(|place| number(*place)));
    let [shape_k, shape_v] = [key_dim, value_dim].map(|width| [batch, value_heads, rows, width]);
    let (y, decays) = ([batch, rows, value_heads * value_dim], [batch, value_heads, rows]);
    let [mut state, mut tail] = [states[0], tails[0]].map(|batch| batch.shape().to_vec());
    (state[0], tail[0]) = (batch, batch);
    let dtype = Dtype::Float32;
    // SAFETY: `delta_of` computes three or six outputs of these shapes from these inputs.
    let results = unsafe {
        if record {
            let shapes = [&y, &*state, &tail, &shape_k, &shape_v, &decays];
            run(&inputs, shapes, dtype, delta_of, &parameters).map(
                |[y, state, tail, k, correction, log_decay]| {
                    let writes = Some(Writes { k, correction, log_decay });
                    GatedDeltaRows { y, state, tail, writes }
                },
            )
        } else {
            run(&inputs, [&y, &*state, &tail], dtype, delta_of, &parameters)
                .map(|[y, state, tail]| GatedDeltaRows { y, state, tail, writes: None })
        }
    };
    Some(results)
}

pub(super) fn size(number: i32) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays and parameters of [`gated_delta`].
unsafe extern "C" fn delta_of(views: *const View, count: usize, parameters: *const i32) {
    // SAFETY: promised by the caller. The outputs are new arrays that nothing else refers to.
    unsafe {
        let views = std::slice::from_raw_parts(views, count);
        let [qkv, z, b, a, a_log, dt_bias, norm, rest @ ..] = views else {
            unreachable!("made with seven inputs, the taps, states and tails");
        };
        let [batch, rows] = [0, 1].map(|dimension| shape(qkv)[dimension]);
        let parameters = std::slice::from_raw_parts(parameters, 6 + 4 * batch);
        let (fixed, places) = parameters.split_at(6);
        let (taps, rest) = rest.split_at(size(fixed[3]));
        let (states, rest) = rest.split_at(size(fixed[4]));
        let (tails, outputs) = rest.split_at(size(fixed[5]));
        let floats = |view| elements::<f32>(view);
        let [taps, states, tails]: [Vec<_>; 3] =
            [taps, states, tails].map(|views| views.iter().map(floats).collect());
        let taps: Vec<&[f32]> = taps.iter().map(|tap| &**tap).collect();
        let mut outputs =
            outputs.iter().map(|view| slice_mut(view, shape(view).iter().product::<usize>()));
        let mut next = || outputs.next();
        let (Some(y), Some(state), Some(tail)) = (next(), next(), next()) else {
            unreachable!("made with three or six outputs");
        };
        let writes = match (next(), next(), next()) {
            (Some(k), Some(correction), Some(log_decay)) => {
                Some(GatedDeltaWrites { k, correction, log_decay })
            }
            _ => None,
        };
        let [state_size, tail_size] = [state.len(), tail.len()].map(|length| length / batch);
        let (mut own_states, mut own_tails) = (Vec::new(), Vec::new());
        for place in places.chunks_exact(4) {
            let [state, i, tail, j] = [0, 1, 2, 3].map(|n| size(place[n]));
            own_states.push(&states[state][i * state_size..(i + 1) * state_size]);
            own_tails.push(&tails[tail][j * tail_size..(j + 1) * tail_size]);
        }
        let x = GatedDelta {
            key_heads: size(fixed[0]),
            value_heads: size(fixed[1]),
            rows,
            eps: f32::from_bits(fixed[2].cast_unsigned()),
            qkv: &floats(qkv),
            z: &floats(z),
            b: &floats(b),
            a: &floats(a),
            tails: &own_tails,
            states: &own_states,
            a_log: &floats(a_log),
            dt_bias: &floats(dt_bias),
            norm: &floats(norm),
            taps: &taps,
        };
        kernels::gated_delta(&x, &mut GatedDeltaResults { y, state, tail, writes });
    }
}

/// The state [1, H_v, D_v, D_k] after the first `rows` of `writes`: the bits that a pass of these rows leaves. `None` if there
/// is no kernel for the types or dimensions.
pub fn replay(state: &Element, writes: &WritesOf, rows: i32) -> Option<Result<Array>> {
    let WritesOf { batch, index } = writes;
    let Writes { k, correction, log_decay } = &**batch;
    let inputs = [state.batch(), k, correction, log_decay];
    let dimensions = |x: &Array| size(x.dim(-1));
    let has_kernel = state.batch().ndim() == 4
        && log_decay.ndim() == 3
        && GatedDelta::supports(dimensions(k), dimensions(correction))
        && fits(inputs);
    if !has_kernel {
        return None;
    }
    let shape = state.shape();
    let parameters = [shape[1], rows, state.index(), *index];
    // SAFETY: `replay_of` computes one output of a state's shape from these inputs.
    let after = unsafe { run(&inputs, [&*shape], Dtype::Float32, replay_of, &parameters) };
    Some(after.map(|[state]| state))
}

/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays and parameters of [`replay`].
unsafe extern "C" fn replay_of(views: *const View, count: usize, parameters: *const i32) {
    // SAFETY: promised by the caller. The output is a new array that nothing else refers to.
    unsafe {
        let [states, writes @ .., after] = std::slice::from_raw_parts(views, count) else {
            unreachable!("made with four inputs and one output");
        };
        let [heads, rows, state, index] = [0, 1, 2, 3].map(|i| size(*parameters.add(i)));
        let states = elements::<f32>(states);
        let [k, correction, log_decay] = [0, 1, 2].map(|i| elements::<f32>(&writes[i]));
        let own = |all: &'_ [f32], view: &View, index: usize| -> Range<usize> {
            let length = all.len() / shape(view)[0];
            index * length..(index + 1) * length
        };
        let length = shape(after).iter().product();
        let writes = Replay {
            heads,
            state: &states[state * length..(state + 1) * length],
            k: &k[own(&k, &writes[0], index)],
            correction: &correction[own(&correction, &writes[1], index)],
            log_decay: &log_decay[own(&log_decay, &writes[2], index)],
            rows,
        };
        kernels::replay(&writes, slice_mut(after, length));
    }
}

/// Rows `start..start + count` of the rows of all `parts` [1, T, C] one after another: [1, count, C]. `None` if there is no
/// kernel for their types.
pub fn rows_of(parts: &[&Element], start: i32, count: i32) -> Option<Result<Array>> {
    let arrays: Vec<&Array> = parts.iter().map(|part| part.batch()).collect();
    let places = (0i32..).zip(parts).flat_map(|(i, part)| {
        let rows = part.batch().dim(1);
        (0..rows).map(move |row| [i, part.index() * rows + row])
    });
    let places: Vec<[i32; 2]> = places.skip(size(start)).take(size(count)).collect();
    pick_rows(&arrays, &places)
}

/// Rows of `arrays` [.., C] one after another: [1, rows, C]. A row is given by the index of its array, and by its index among
/// the array's rows of C elements. `None` if there is no kernel for their types, or no such row.
pub fn pick_rows(arrays: &[&Array], rows: &[[i32; 2]]) -> Option<Result<Array>> {
    let width = arrays.first()?.dim(-1);
    let has = |[array, row]: &[i32; 2]| {
        let array = arrays.get(usize::try_from(*array).ok()?)?;
        (0..array.size() / size(width).max(1)).contains(&usize::try_from(*row).ok()?).then_some(())
    };
    let same_width = arrays.iter().all(|array| array.dim(-1) == width);
    if !fits(arrays.iter().copied()) || !same_width || !rows.iter().all(|row| has(row).is_some()) {
        return None;
    }
    let count = i32::try_from(rows.len()).expect("a pass has fewer rows than 2^31");
    let shape = [1, count, width];
    let parameters = rows.as_flattened();
    // SAFETY: `copy_rows` fills one output of this shape from these inputs, which have such rows.
    let rows = unsafe { run(arrays, [&shape], Dtype::Float32, copy_rows, parameters) };
    Some(rows.map(|[rows]| rows))
}

/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays and parameters of [`pick_rows`].
unsafe extern "C" fn copy_rows(views: *const View, count: usize, parameters: *const i32) {
    // SAFETY: promised by the caller. The output is a new array that nothing else refers to.
    unsafe {
        let [arrays @ .., to] = std::slice::from_raw_parts(views, count) else {
            unreachable!("made with one output");
        };
        let (rows, width) = (shape(to)[1], shape(to)[2]);
        let arrays: Vec<Cow<'_, [f32]>> = arrays.iter().map(|array| elements(array)).collect();
        let places = list(parameters.cast::<[i32; 2]>(), rows);
        let to = slice_mut::<f32>(to, rows * width);
        for (to, [array, row]) in to.chunks_exact_mut(width.max(1)).zip(places) {
            let start = size(*row) * width;
            to.copy_from_slice(&arrays[size(*array)][start..start + width]);
        }
    }
}

/// The columns of `a` [1, R, A], and those of `b` [1, R, B] beside them: [1, R, A + B]. `None` if there is no kernel for
/// their types.
pub fn beside(a: &Array, b: &Array) -> Option<Result<Array>> {
    if !fits([a, b]) || a.ndim() != 3 || b.ndim() != 3 || a.shape()[..2] != b.shape()[..2] {
        return None;
    }
    let shape = [1, a.dim(1), a.dim(2) + b.dim(2)];
    // SAFETY: `copy_columns` fills one output of this shape from these inputs, which have as many rows.
    let y = unsafe { run(&[a, b], [&shape], Dtype::Float32, copy_columns, &[]) };
    Some(y.map(|[y]| y))
}

/// # Safety
/// As [`mlx_sys::CpuFunction`], with the arrays of [`beside`].
unsafe extern "C" fn copy_columns(views: *const View, count: usize, _: *const i32) {
    // SAFETY: promised by the caller. The output is a new array that nothing else refers to.
    unsafe {
        let [a, b, to] = std::slice::from_raw_parts(views, count) else {
            unreachable!("made with two inputs and one output");
        };
        let [left, right] = [a, b].map(|part| shape(part)[2]);
        let rows = shape(to)[1];
        let (a, b) = (elements::<f32>(a), elements::<f32>(b));
        let to = slice_mut::<f32>(to, rows * (left + right));
        for (row, to) in to.chunks_exact_mut((left + right).max(1)).enumerate() {
            to[..left].copy_from_slice(&a[row * left..(row + 1) * left]);
            to[left..].copy_from_slice(&b[row * right..(row + 1) * right]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Cache, LayerCache, Span};
    use crate::nn::{self, RmsNorm};
    use mlx_rs::ops::concatenate;
    use mlx_rs::ops::indexing::TryIndexOp;
    use mlx_rs::transforms::eval;
    use mlx_rs::{Device, random};

    fn normal(seed: u64, shape: &[i32]) -> Array {
        random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
    }

    /// The results of `compute` with the kernels and without.
    fn both(compute: impl Fn() -> Vec<Array>) -> [Vec<Array>; 2] {
        Device::set_default(&Device::cpu());
        [true, false].map(|on| {
            super::super::enable(on);
            let results = compute();
            eval(&results).unwrap();
            super::super::enable(false);
            results
        })
    }

    /// Largest difference over the largest value.
    fn assert_near([ours, operations]: [Vec<Array>; 2], bound: f32, case: &str) {
        let largest = |a: &Array| a.abs().unwrap().max(None).unwrap().item_exact::<f32>();
        for (i, (a, b)) in ours.iter().zip(&operations).enumerate() {
            assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()), "{case} {i}");
            let error = largest(&a.subtract(b).unwrap()) / largest(b);
            assert!(error < bound, "{case} {i}: {error:e}");
        }
    }

    /// Two sequences with as many rows in each of `passes`, the last a draft of which one row is kept.
    fn run_delta(layer: &nn::GatedDelta, passes: &[i32]) -> Vec<Array> {
        let channels = layer.conv1d[0].dim(0);
        let (heads, values) = (layer.value_heads, layer.value_heads * layer.value_dim);
        let new =
            || Cache::new(vec![LayerCache::Recurrent(layer.new_cache(Dtype::Float32).unwrap())]);
        let (mut first, mut second) = (new(), new());
        let mut ys = Vec::new();
        for (seed, &rows) in (1u64..).zip(passes) {
            let part = |i: u64, width| normal(100 * seed + i, &[1, 2 * rows, width]);
            let x = Outputs::Apart([
                part(1, channels),
                part(2, values),
                part(3, heads),
                part(4, heads),
            ]);
            let is_last = seed as usize == passes.len();
            if is_last {
                [&mut first, &mut second].into_iter().for_each(Cache::mark_draft);
            }
            let mut spans = [&mut first, &mut second].map(|cache| Span { rows, cache });
            ys.push(layer.forward(&x, &mut spans, 0).unwrap());
            spans.iter_mut().for_each(Span::advance);
            if is_last {
                for cache in [&mut first, &mut second] {
                    cache.rewind_draft(cache.position - rows as usize + 1).unwrap();
                }
            }
        }
        let mut results = vec![concatenate(&ys, 1).unwrap()];
        [first, second].iter().for_each(|cache| results.extend(cache.arrays().unwrap()));
        results
    }

    #[test]
    fn layers_equal_their_operations() {
        for ([key_heads, value_heads], [key_dim, value_dim], taps) in
            [([2, 4], [32, 16], 4), ([1, 3], [64, 32], 2), ([2, 2], [128, 128], 4)]
        {
            let channels = 2 * key_heads * key_dim + value_heads * value_dim;
            let layer = nn::GatedDelta {
                // As loaded: columns of one matrix, which are not contiguous.
                conv1d: (0..taps)
                    .map(|tap| normal(1, &[channels, taps]).try_index((.., tap)).unwrap())
                    .collect(),
                a_log: normal(10, &[value_heads]),
                dt_bias: normal(11, &[value_heads]),
                norm: RmsNorm { weight: normal(12, &[value_dim]), eps: 1e-6 },
                key_heads,
                value_heads,
                key_dim,
                value_dim,
            };
            for passes in [&[1, 2][..], &[3, 1, 8, 2], &[20, 1, 5], &[130, 3]] {
                let case = format!("{key_heads} {key_dim} {taps} {passes:?}");
                assert_near(both(|| run_delta(&layer, passes)), 1e-5, &case);
            }
        }
        for width in [8, 100, 4096] {
            let [gate, up] = [1, 2].map(|seed| normal(seed, &[1, 5, width]));
            let norm = RmsNorm { weight: normal(3, &[width]), eps: 1e-6 };
            let compute =
                || vec![nn::swiglu(gate.clone(), up.clone()).unwrap(), norm.forward(&up).unwrap()];
            assert_near(both(compute), 1e-5, &width.to_string());
        }
    }

    /// Other types have no kernel, and strided inputs are copied.
    #[test]
    fn types_and_strides_are_checked() {
        Device::set_default(&Device::cpu());
        let x = normal(1, &[3, 64]);
        let short = x.as_dtype(Dtype::Bfloat16).unwrap();
        super::super::enable(true);
        assert!(swiglu(&short, &short).is_none());
        let wide = normal(2, &[64, 3]).swap_axes(0, 1).unwrap();
        let strided = swiglu(&wide, &x).unwrap().unwrap();
        super::super::enable(false);
        let copy = nn::swiglu(wide, x).unwrap();
        let difference = strided.subtract(&copy).unwrap().abs().unwrap();
        assert!(difference.max(None).unwrap().item_exact::<f32>() < 1e-5);
    }

    #[test]
    fn rows_and_columns_equal_their_operations() {
        let (a, b) = (normal(1, &[1, 5, 6]), normal(2, &[1, 3, 6]));
        let picked = both(|| vec![nn::pick_rows(&a, &[4, 0, 0]).unwrap()]);
        assert_near(picked, 1e-9, "rows");
        let wide = normal(3, &[1, 5, 4]);
        assert_near(both(|| vec![nn::beside(&a, &wide).unwrap()]), 1e-9, "columns");
        let joined = both(|| {
            let parts = [(&a, 3..5), (&b, 0..2)];
            vec![nn::joined_rows(&parts).unwrap(), nn::joined_rows(&parts[..1]).unwrap()]
        });
        assert_near(joined, 1e-9, "joined rows");
    }
}
