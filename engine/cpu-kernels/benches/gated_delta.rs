//! Speed of GatedDeltaNet: `cargo bench -p steersman-cpu-kernels --bench gated_delta`, on a quiet machine. Arguments are
//! numbers of sequences. A pass runs one row of each through the layers of the bundled model.

use std::time::Instant;

use steersman_cpu_kernels::{GatedDelta, GatedDeltaResults, gated_delta, max_threads, set_threads};

const LAYERS: usize = 6;
const KEY_HEADS: usize = 2;
const VALUE_HEADS: usize = 4;
/// Dimensions of keys and of values.
const DIM: usize = 128;
const TAPS: usize = 4;
const CHANNELS: usize = (2 * KEY_HEADS + VALUE_HEADS) * DIM;
/// Elements of a state, and of a convolution's tail.
const STATE: usize = VALUE_HEADS * DIM * DIM;
const TAIL: usize = (TAPS - 1) * CHANNELS;

/// Buffers of each state. In decoding, the old state is released after the next pass has been queued.
const BUFFERS: usize = 3;

/// Floats of a line of the caches.
const LINE: usize = 16;

const PASSES: usize = 50;

fn main() {
    let counts: Vec<usize> =
        std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let counts = if counts.is_empty() { vec![1, 2, 4, 8, 16, 32] } else { counts };
    for threads in [1, max_threads()] {
        set_threads(threads);
        print!("{threads} threads:");
        for count in &counts {
            print!(" | {count} sequences {:.3} ms", milliseconds(*count));
        }
        println!();
    }
}

/// The median pass with `count` sequences.
fn milliseconds(count: usize) -> f64 {
    let floats = |length: usize| vec![0.01f32; length];
    let (qkv, z, gates) =
        (floats(count * CHANNELS), floats(count * VALUE_HEADS * DIM), floats(count * VALUE_HEADS));
    let (heads, norm, tap) = (floats(VALUE_HEADS), floats(DIM), floats(CHANNELS));
    let taps = [tap.as_slice(); TAPS];
    let tails = floats(count * TAIL);
    let (mut y, mut tail) = (z.clone(), tails.clone());
    // Aligned as the engine's.
    let mut states = vec![vec![floats(count * STATE + LINE); BUFFERS]; LAYERS];
    let aligned = |buffer: &[f32]| {
        let start = buffer.as_ptr().align_offset(LINE * size_of::<f32>());
        start..start + count * STATE
    };
    let mut pass = || {
        let start = Instant::now();
        for buffers in &mut states {
            buffers.rotate_left(1);
            let (next, before) = buffers.split_last_mut().expect("there are several");
            let before = &before[BUFFERS - 2];
            let (before, next_floats) = (&before[aligned(before)], aligned(next));
            let x = GatedDelta {
                key_heads: KEY_HEADS,
                value_heads: VALUE_HEADS,
                rows: 1,
                eps: 1e-6,
                qkv: &qkv,
                z: &z,
                b: &gates,
                a: &gates,
                tails: &tails.chunks(TAIL).collect::<Vec<_>>(),
                states: &before.chunks(STATE).collect::<Vec<_>>(),
                a_log: &heads,
                dt_bias: &heads,
                norm: &norm,
                taps: &taps,
            };
            let state = &mut next[next_floats];
            let mut results = GatedDeltaResults { y: &mut y, state, tail: &mut tail, writes: None };
            gated_delta(&x, &mut results);
        }
        start.elapsed().as_secs_f64() * 1e3
    };
    let mut times: Vec<f64> = (0..PASSES).map(|_| pass()).collect();
    times.sort_by(f64::total_cmp);
    times[PASSES / 2]
}
