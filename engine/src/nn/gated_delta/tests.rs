//! Every form of the delta rule, and spans together and alone.

use super::*;
use crate::cache::{Cache, LayerCache};
use mlx_rs::random;

/// Random inputs of `rows` tokens for 4 heads of dimension 16; `same_key` makes all keys equal.
fn inputs(rows: i32, same_key: bool) -> DeltaInputs {
    let normal = |seed, dim| {
        let key = random::key(seed).unwrap();
        random::normal::<f32>(&[1, 4, rows, dim], None, None, &key).unwrap()
    };
    let unit =
        |a: Array| fast::rms_norm(&a, None, 0.0).unwrap().multiply(Array::from_f32(0.25)).unwrap();
    let k = normal(2, 16);
    let k = if same_key {
        broadcast_to(k.try_index((.., .., ..1, ..)).unwrap(), &[1, 4, rows, 16]).unwrap()
    } else {
        k
    };
    let gates = |seed| normal(seed, 1).squeeze_axes(&[3]).unwrap();
    DeltaInputs {
        q: unit(normal(1, 16)),
        k: unit(k),
        v: normal(3, 16),
        log_decay: exp(gates(4)).unwrap().multiply(Array::from_f32(-0.05)).unwrap(),
        beta: sigmoid(gates(5).add(Array::from_f32(2.0)).unwrap()).unwrap(),
    }
}

fn state() -> Array {
    random::normal::<f32>(&[1, 4, 16, 16], None, None, &random::key(6).unwrap()).unwrap()
}

fn largest_difference(a: &Array, b: &Array) -> f32 {
    a.subtract(b).unwrap().abs().unwrap().max(None).unwrap().item_exact::<f32>()
}

/// With equal keys the entries of the triangle are equal, and a power series would lose every
/// digit.
#[test]
fn every_form_equals_the_recurrent_one() {
    for same_key in [false, true] {
        for rows in [1, 2, 3, 5, 7, 8, 9, 63, 64, 65, 128, 200] {
            let x = inputs(rows, same_key);
            let (reference_y, reference_s) = delta_rule_recurrent(&x, &state()).unwrap();
            let check = |(y, s, writes): (Array, Array, Writes)| {
                assert_eq!(y.shape(), reference_y.shape());
                let rewritten = delta_write(&state(), &writes).unwrap();
                let pairs = [(&y, &reference_y), (&s, &reference_s), (&rewritten, &reference_s)];
                for (ours, reference) in pairs {
                    let difference = largest_difference(ours, reference);
                    assert!(difference < 2e-5, "{rows} rows, same key {same_key}: {difference}");
                }
            };
            check(delta_rule_chunked(&x, &state()).unwrap());
            if rows <= 64 {
                check(delta_rule_short(&x, &state()).unwrap());
            }
        }
    }
}

/// Steps, drafts and a chunk of several sequences in one pass.
#[test]
fn spans_of_one_pass_equal_spans_alone() {
    const ROWS: [i32; 6] = [1, 3, 1, 70, 1, 3];
    let normal = |seed, shape: &[i32]| {
        random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
    };
    let layer = GatedDelta {
        conv1d: (0..4).map(|tap| normal(tap, &[192])).collect(),
        a_log: normal(10, &[4]),
        dt_bias: normal(11, &[4]),
        norm: RmsNorm { weight: normal(12, &[16]), eps: 1e-6 },
        key_heads: 2,
        value_heads: 4,
        key_dim: 32,
        value_dim: 16,
    };
    let new_cache = |_| {
        let recurrent = layer.new_cache(Dtype::Float32).unwrap();
        Cache::new(vec![LayerCache::Recurrent(recurrent)])
    };
    let mut alone: Vec<Cache> = ROWS.iter().map(new_cache).collect();
    let mut together = alone.clone();
    for step in 0..3 {
        let rows: i32 = ROWS.iter().sum();
        let parts = [(20, 192), (30, 64), (40, 4), (50, 4)]
            .map(|(seed, width)| normal(seed + step, &[1, rows, width]));
        alone.iter_mut().chain(&mut together).for_each(Cache::mark_draft);
        let mut start = 0;
        let mut expected = Vec::new();
        for (cache, rows) in alone.iter_mut().zip(ROWS) {
            let own = |a: &Array| a.try_index((.., start..start + rows)).unwrap();
            let own = Outputs::Apart(parts.each_ref().map(own));
            expected.push(layer.forward(&own, &mut [Span { rows, cache }], 0).unwrap());
            start += rows;
        }
        let mut spans: Vec<_> =
            together.iter_mut().zip(ROWS).map(|(cache, rows)| Span { rows, cache }).collect();
        // Joined projections are the same in one array.
        let x = match step {
            0 => Outputs::Joined(concatenate(&parts, 2).unwrap()),
            _ => Outputs::Apart(parts),
        };
        let y = layer.forward(&x, &mut spans, 0).unwrap();
        assert_eq!(largest_difference(&y, &concatenate(&expected, 1).unwrap()), 0.0);
        // Some rows are rejected, the next pass continues from what is left.
        for cache in alone.iter_mut().chain(&mut together) {
            let LayerCache::Recurrent(recurrent) = &mut cache.layers[0] else { panic!() };
            recurrent.rewind_draft(1).unwrap();
        }
        for (alone, together) in alone.iter().zip(&together) {
            for (a, b) in alone.arrays().unwrap().iter().zip(together.arrays().unwrap()) {
                assert_eq!(largest_difference(a, &b), 0.0);
            }
        }
    }
}

#[test]
fn two_spans_equal_one_span() {
    let x = inputs(150, false);
    let (y, s, _) = delta_rule_chunked(&x, &state()).unwrap();
    let cut = |from: i32, to: i32| DeltaInputs {
        q: x.q.try_index((.., .., from..to)).unwrap(),
        k: x.k.try_index((.., .., from..to)).unwrap(),
        v: x.v.try_index((.., .., from..to)).unwrap(),
        log_decay: x.log_decay.try_index((.., .., from..to)).unwrap(),
        beta: x.beta.try_index((.., .., from..to)).unwrap(),
    };
    let (y1, s1, _) = delta_rule_chunked(&cut(0, 70), &state()).unwrap();
    let (y2, s2, _) = delta_rule_chunked(&cut(70, 150), &s1).unwrap();
    let joined = concatenate(&[y1, y2], 2).unwrap();
    assert!(largest_difference(&joined, &y) < 2e-5);
    assert!(largest_difference(&s2, &s) < 2e-5);
}

#[test]
fn inverse_times_matrix_is_identity() {
    let key = random::key(7).unwrap();
    let a = random::normal::<f32>(&[1, 1, 2, CHUNK, CHUNK], None, 0.2, &key).unwrap();
    let a = a.multiply(tri::<f32>(CHUNK, None, Some(-1)).unwrap()).unwrap();
    let inverse = invert_unit_lower(&a).unwrap();
    let identity = eye::<f32>(CHUNK, None, None).unwrap();
    let product = matmul(a.add(&identity).unwrap(), inverse).unwrap();

    assert!(largest_difference(&product, &identity) < 1e-3);
}
