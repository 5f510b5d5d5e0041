//! Speed of compiled formulas: medians of plain and compiled steps, alternating.
//!
//! ```text
//! STEPS_MODEL=/models/x STEPS_DEVICE=gpu cargo test --release --workspace --test laws -- --ignored --nocapture compiled_and_plain
//! ```
//!
//! Both variables are optional; the default is the bundled model on the CPU. `laws/reference.rs`
//! tests the numbers.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use mlx_rs::Array;
use mlx_rs::ops::indexing::argmax_axis;
use steersman_engine::config::{Device, Dtype, ModelConfig};
use steersman_engine::internals::cache::{Cache, Span};
use steersman_engine::internals::model::{Loaded, Pass, load};
use steersman_engine::internals::nn::compile_steps;
use steersman_tests::{bundled_model, config};

/// Measurements of each kind, and steps of a measurement.
const RUNS: usize = 15;
const STEPS: usize = 20;

#[test]
#[ignore = "prints measurements"]
fn speed_of_compiled_and_plain_steps() {
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
        run(&loaded, &mut cache, 256, 1);
        let mut times: [Vec<Duration>; 2] = Default::default();
        let mut host_times: [Vec<Duration>; 2] = Default::default();
        // The first run of each kind builds kernels.
        for runs in 0..=RUNS {
            for compiled in [0, 1] {
                compile_steps(compiled == 1);
                let start = Instant::now();
                let host = run(&loaded, &mut cache.clone(), rows, STEPS);
                if runs > 0 {
                    times[compiled].push(start.elapsed() / STEPS as u32);
                    host_times[compiled].push(host / STEPS as u32);
                } else if compiled == 1 {
                    println!("{rows} rows: first compiled run {:.1?}", start.elapsed());
                }
            }
        }
        compile_steps(false);
        for (what, times) in [("per step", times), ("before evaluation", host_times)] {
            let [plain, compiled] = times.map(median);
            let ratio = plain.as_secs_f64() / compiled.as_secs_f64();
            println!(
                "{rows} rows: plain {plain:.1?}, compiled {compiled:.1?} {what} ({ratio:.3}x)"
            );
        }
    }
}

/// Runs `steps` steps of `rows` rows; each waits for the previous one, as sampling does. Returns the
/// time spent on building graphs, before MLX evaluates them.
fn run(loaded: &Loaded, cache: &mut Cache, rows: i32, steps: usize) -> Duration {
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
