//! A GatedDeltaNet layer from its projections to the gated norm, in one kernel.
//!
//! States and tails are read where they lie: the kernel has an input for each batch that holds some of them, and a table of
//! places. Sequences that decode together have theirs in one batch, the results of the last step, so that one input is the
//! rule; those that have just begun, or whose drafts were rewound, add one each. Metal has 31 buffers for a kernel, so there
//! may be 6 to 9 of states and as many of tails. A dispatch for each sequence would need no table, but the results would be
//! in as many arrays, which the next layer would have to join.

use std::fmt::Write;

use mlx_rs::{Array, Dtype};

use super::kernel::{BUFFERS, choice};
use super::{Kernel, LANES, Launch, is_enabled};
use crate::cache::{Element, Writes};
use crate::error::Result;
use crate::kernels::{DeltaView, GatedDeltaRows, Outputs};

const KERNEL: Kernel = Kernel { name: "gated_delta", source: include_str!("gated_delta.metal") };

/// Rows of a state that a simdgroup holds.
const ROWS: i32 = 8;

/// Most rows and columns of a state: a thread holds 8 x 4 elements in registers, and a threadgroup has 512 threads.
const MOST_DIM: i32 = 128;

/// Most rows of a sequence in a launch. They run one after another, while the chunked form has about 135 operations whatever
/// the number of rows: a guess, not measured on a Mac.
const MOST_ROWS: i32 = 128;

const STATES: [&str; 16] = [
    "state0", "state1", "state2", "state3", "state4", "state5", "state6", "state7", "state8",
    "state9", "state10", "state11", "state12", "state13", "state14", "state15",
];

const TAILS: [&str; 16] = [
    "tail0", "tail1", "tail2", "tail3", "tail4", "tail5", "tail6", "tail7", "tail8", "tail9",
    "tail10", "tail11", "tail12", "tail13", "tail14", "tail15",
];

/// Runs the rows `x` of a batch after the state and the tail of each sequence. Rows run one after another: their bits do not
/// depend on how many there are. `record` asks for what they write. `None` if there is no kernel for the layer.
pub fn gated_delta(
    layer: &DeltaView<'_>,
    x: &Outputs<4>,
    before: [&[&Element]; 2],
    record: bool,
) -> Result<Option<GatedDeltaRows>> {
    let &DeltaView { key_heads, value_heads, key_dim, value_dim, .. } = layer;
    let [tap0, tap1, tap2, tap3] = layer.conv1d else { return Ok(None) };
    let (Outputs::Joined(qkv) | Outputs::Apart([qkv, ..])) = x;
    let [batch, rows, dtype] = [qkv.dim(0), qkv.dim(1), qkv.dtype() as i32];
    let fits = is_enabled()
        && key_dim % LANES == 0
        && value_dim % ROWS == 0
        && key_dim.max(value_dim) <= MOST_DIM
        && value_heads % key_heads == 0
        && rows <= MOST_ROWS
        && before[1].iter().all(|tail| tail.batch().dtype() as i32 == dtype);
    if !fits {
        return Ok(None);
    }
    let dtype = qkv.dtype();
    let mut inputs: Vec<(&str, &Array)> = match x {
        Outputs::Joined(all) => vec![("x_qkv", all)],
        Outputs::Apart([qkv, z, b, a]) => {
            vec![("x_qkv", qkv), ("x_z", z), ("x_b", b), ("x_a", a)]
        }
    };
    let outputs_count = if record { 6 } else { 3 };
    // `numbers` and the weights.
    let others = inputs.len() + 8 + outputs_count;
    let [states, tails] = before.map(Batches::new);
    let fit = |states: &Batches, tails: &Batches| {
        let [s, t] = [states, tails].map(|batches| batches.arrays.len());
        s <= STATES.len() && t <= TAILS.len() && others + s + t <= BUFFERS
    };
    let (states, tails) = if fit(&states, &tails) {
        (states, tails)
    } else {
        (Batches::stacked(before[0])?, Batches::stacked(before[1])?)
    };
    let mut numbers = vec![rows];
    for (state, tail) in states.places.iter().zip(&tails.places) {
        numbers.extend(state.iter().chain(tail));
    }
    let count = i32::try_from(numbers.len()).expect("a pass has fewer sequences than 2^29");
    let numbers = Array::from_slice(&numbers, &[count]);
    inputs.extend([
        ("numbers", &numbers),
        ("a_log", layer.a_log),
        ("dt_bias", layer.dt_bias),
        ("norm", layer.norm.weight),
        ("tap0", tap0),
        ("tap1", tap1),
        ("tap2", tap2),
        ("tap3", tap3),
    ]);
    inputs.extend(STATES.into_iter().zip(&states.arrays));
    inputs.extend(TAILS.into_iter().zip(&tails.arrays));
    let mut header = String::new();
    let _ = writeln!(header, "#define RECORDED(x) {}", if record { "x" } else { "" });
    let _ = writeln!(header, "#define STATE(i) {}", choice(&STATES[..states.arrays.len()]));
    let _ = writeln!(header, "#define TAIL(i) {}", choice(&TAILS[..tails.arrays.len()]));
    let joined = matches!(x, Outputs::Joined(_));
    if joined {
        header += "#define x_z x_qkv\n#define x_b x_qkv\n#define x_a x_qkv\n";
    }
    let [y_shape, state_shape] =
        [vec![batch, rows, value_heads * value_dim], vec![batch, value_heads, value_dim, key_dim]];
    let tail_shape = [batch, 3, layer.channels()];
    let [shape_k, shape_v] = [key_dim, value_dim].map(|width| [batch, value_heads, rows, width]);
    let outputs: [(&str, &[i32], Dtype); 6] = [
        ("out", &y_shape, dtype),
        ("next_state", &state_shape, Dtype::Float32),
        ("next_tail", &tail_shape, dtype),
        ("written_keys", &shape_k, Dtype::Float32),
        ("corrections", &shape_v, Dtype::Float32),
        ("log_decays", &[batch, value_heads, rows], Dtype::Float32),
    ];
    let outputs = KERNEL.run(&Launch {
        header,
        inputs: &inputs,
        in_place: &[],
        outputs: &outputs[..outputs_count],
        constants: &[
            ("HK", key_heads),
            ("HV", value_heads),
            ("DK", key_dim),
            ("DV", value_dim),
            ("EPS", layer.norm.eps.to_bits().cast_signed()),
            ("JOINED", i32::from(joined)),
        ],
        dtype,
        groups: [1, value_heads, batch],
        threads: LANES * value_dim / ROWS,
    })?;
    let mut outputs = outputs.into_iter();
    let mut next = || outputs.next().expect("`run` returns as many arrays as there are outputs");
    let (y, state, tail) = (next(), next(), next());
    let writes = record.then(|| Writes { k: next(), correction: next(), log_decay: next() });
    Ok(Some(GatedDeltaRows { y, state, tail, writes }))
}

/// The batches of elements, and for each element its batch and its index there.
struct Batches {
    arrays: Vec<Array>,
    places: Vec<[i32; 2]>,
}

impl Batches {
    fn new(elements: &[&Element]) -> Self {
        let (arrays, places) = Element::batches(elements);
        let number =
            |place: usize| i32::try_from(place).expect("a pass has fewer arrays than 2^31");
        Self {
            arrays: arrays.into_iter().cloned().collect(),
            places: places.into_iter().map(|place| place.map(number)).collect(),
        }
    }

    /// The elements copied to one batch.
    fn stacked(elements: &[&Element]) -> Result<Self> {
        let places = (0i32..).zip(elements).map(|(i, _)| [0, i]).collect();
        Ok(Self { arrays: vec![Element::stack(elements.iter().copied())?], places })
    }
}
