//! What compiling a step's formulas wins: medians of plain and compiled steps, in turns.
//!
//! ```text
//! STEPS_MODEL=/models/x STEPS_DEVICE=gpu cargo test --release --workspace --test compiled -- --ignored --nocapture
//! ```
//!
//! Both are optional: the bundled model on the CPU otherwise. Numbers are laws of
//! `tests/reference.rs`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use mlx_rs::Array;
use mlx_rs::ops::indexing::argmax_axis;
use steersman_engine::cache::{Cache, Span};
use steersman_engine::config::{Device, Dtype, ModelConfig};
use steersman_engine::model::{Loaded, Pass, load};
use steersman_engine::nn::compile_steps;
use steersman_tests::{bundled_model, config};

/// Turns of each kind, and steps of a turn.
const TURNS: usize = 15;
const STEPS: usize = 20;

#[test]
#[ignore = "measures"]
fn compiled_steps_against_plain_ones() {
    let folder = std::env::var_os("STEPS_MODEL").map_or_else(bundled_model, PathBuf::from);
    let wish = std::env::var("STEPS_DEVICE").unwrap_or_else(|_| "cpu".into());
    let model = match wish.as_str() {
        "cpu" => config().model,
        "gpu" => ModelConfig { device: Device::Gpu, dtype: Dtype::Auto, ..config().model },
        other => panic!("STEPS_DEVICE is `{other}`, must be cpu or gpu"),
    };
    let loaded = load(&folder, &model).unwrap();
    println!("{}, {}", folder.display(), loaded.numbers);
    for rows in [1, 4, 8] {
        let mut cache = loaded.model.new_cache().unwrap();
        turn(&loaded, &mut cache, 256, 1);
        let mut times: [Vec<Duration>; 2] = Default::default();
        let mut host_times: [Vec<Duration>; 2] = Default::default();
        // The first turn of each kind builds kernels.
        for turns in 0..=TURNS {
            for compiled in [0, 1] {
                compile_steps(compiled == 1);
                let start = Instant::now();
                let host = turn(&loaded, &mut cache.clone(), rows, STEPS);
                if turns > 0 {
                    times[compiled].push(start.elapsed() / STEPS as u32);
                    host_times[compiled].push(host / STEPS as u32);
                } else if compiled == 1 {
                    println!("{rows} rows: first compiled turn {:.1?}", start.elapsed());
                }
            }
        }
        compile_steps(false);
        for (what, times) in [("a step", times), ("of it before evaluation", host_times)] {
            let [plain, compiled] = times.map(median);
            let ratio = plain.as_secs_f64() / compiled.as_secs_f64();
            println!(
                "{rows} rows: plain {plain:.1?}, compiled {compiled:.1?} {what} ({ratio:.3}x)"
            );
        }
    }
}

/// Runs `steps` steps of `rows` rows; each waits for the one before, as sampling does. Returns the
/// time that went into graphs, before MLX evaluated them.
fn turn(loaded: &Loaded, cache: &mut Cache, rows: i32, steps: usize) -> Duration {
    let mut token = 1;
    let mut host = Duration::ZERO;
    for _ in 0..steps {
        let start = Instant::now();
        let ids = Array::from_slice(&vec![token; rows as usize], &[rows]);
        let spans = &mut [Span { rows, cache }];
        let hidden = loaded.model.forward(&ids, spans, Pass::WHOLE).unwrap();
        let logits = loaded.model.logits(&hidden).unwrap();
        let likeliest = argmax_axis(&logits, -1, None).unwrap();
        let largest = likeliest.max(None).unwrap();
        host += start.elapsed();
        token = largest.item_exact::<u32>();
    }
    host
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
