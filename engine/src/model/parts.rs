//! The law of parts: a model whose layers are cut among ranks computes what one process computes.
//!
//! Ranks are threads, and processes that MLX's ring connects. The fixtures are cut as they are, and once more with many times their heads and other units, so that 3
//! and 8 ranks can divide them as well.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis};
use mlx_rs::{Array, Device, Dtype};
use serde_json::{Value, json};

use super::storage::Storage;
use super::{Cut, FAMILIES, Lead, Loaded, Model, Pass, Weights, follow, load_part};
use crate::cache::{Cache, KeyValues, Span};
use crate::config::{self, ModelConfig};
use crate::error::Result;
use crate::ranks::{Backend, Entry, Log, Ranks, in_threads, join};

/// Bound of the difference of two logits, over the largest of them or 1.
const BOUND: f32 = 1e-4;

/// Heads and other units of widened fixtures, over those of the fixtures: 3 and 8 ranks can divide them, and their packed
/// matrices in whole groups of 32.
const FACTOR: i32 = 24;

fn families() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families");
    let mut all: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

fn name_of(folder: &Path) -> &str {
    folder.file_name().unwrap().to_str().unwrap()
}

fn config_of(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

fn load(folder: &Path, ranks: &Ranks) -> std::result::Result<Loaded, String> {
    Device::set_default(&Device::cpu());
    let config = ModelConfig {
        device: config::Device::Cpu,
        dtype: config::Dtype::F32,
        ..ModelConfig::default()
    };
    load_part(folder, &config, ranks).map_err(|error| error.to_string())
}

/// What a model computed: the logits of all rows that ran, and the tokens that it chose.
#[derive(Debug, Default, PartialEq)]
struct Computed {
    logits: Vec<Vec<f32>>,
    greedy: Vec<u32>,
}

impl Computed {
    /// Runs `tokens`; returns their hidden states and the token that follows.
    fn run(
        &mut self,
        model: &dyn Model,
        tokens: &[u32],
        cache: &mut Cache,
    ) -> Result<(Array, u32)> {
        let rows = tokens.len() as i32;
        let ids = Array::from_slice(tokens, &[rows]);
        let hidden = model.forward(&ids, &mut [Span { rows, cache }], Pass::WHOLE)?;
        let next = self.note(&model.logits(&hidden)?)?;
        Ok((hidden, next))
    }

    /// Notes `logits` [1, R, V]; returns the likeliest token after the last row.
    fn note(&mut self, logits: &Array) -> Result<u32> {
        self.logits.push(logits.contiguous()?.as_slice::<f32>().to_vec());
        let last = logits.try_index((0, logits.dim(1) - 1))?;
        let next = argmax_axis(&last, -1, None)?.item_exact::<u32>();
        self.greedy.push(next);
        Ok(next)
    }

    /// A prompt in two chunks, steps, a draft of which one token is kept, and a draft of the model's own layer if it has one.
    fn of(model: &dyn Model) -> Result<Self> {
        let mut computed = Self::default();
        let prompt: Vec<u32> = (0..24).map(|i| (i * 29 + 7) % 100).collect();
        let mut cache = model.new_cache()?;
        computed.run(model, &prompt[..17], &mut cache)?;
        let (hidden, mut next) = computed.run(model, &prompt[17..], &mut cache)?;
        for _ in 0..4 {
            (_, next) = computed.run(model, &[next], &mut cache)?;
        }
        let position = cache.position;
        cache.mark_draft();
        computed.run(model, &[next, 5, 6, 7], &mut cache)?;
        cache.rewind_draft(position + 2)?;
        computed.run(model, &[8], &mut cache)?;
        if let Some(mtp) = model.mtp() {
            let (mut cache, rows) = (mtp.new_cache()?, hidden.dim(1));
            let ids = Array::from_slice(&prompt[..rows as usize], &[rows]);
            let drafted = mtp.forward(&hidden, &ids, &mut [Span { rows, cache: &mut cache }])?;
            computed.note(&model.logits(&drafted)?)?;
        }
        Ok(computed)
    }

    /// Passes over caches that were cloned, rewound and restored, and over a token that is not known yet.
    fn run_objects(&mut self, model: &dyn Model) -> Result<()> {
        let prompt: Vec<u32> = (0..17).map(|i| (i * 31 + 3) % 100).collect();
        let mut cache = model.new_cache()?;
        self.run(model, &prompt, &mut cache)?;
        let checkpoint = cache.checkpoint()?;
        let mut copy = cache.clone();
        self.run(model, &[1, 2, 3], &mut copy)?;
        copy.rewind_to(&checkpoint)?;
        self.run(model, &[4], &mut copy)?;
        if copy.is_truncatable() {
            copy.truncate(9);
            self.run(model, &[5], &mut copy)?;
        }
        drop(copy);
        let kv = cache.key_values(0, 17)?;
        let kv = KeyValues::join(&[kv.part(0, 8)?, kv.part(8, 17)?])?.owned()?;
        let state = cache.recurrent_state()?.owned()?;
        let mut restored = model.new_cache()?;
        restored.restore(None, &[kv], &state, 17)?;
        let token = Array::from_slice(&[4u32], &[1]);
        let spans = &mut [Span { rows: 1, cache: &mut restored }];
        let hidden = model.forward(&token, spans, Pass::WHOLE)?;
        let logits = model.logits(&hidden)?;
        let next = argmax_axis(&logits, -1, None)?.reshape(&[1])?;
        self.note(&logits)?;
        let spans =
            &mut [Span { rows: 1, cache: &mut restored }, Span { rows: 1, cache: &mut cache }];
        let both = concatenate(&[&next, &token], 0)?;
        let hidden = model.forward(&both, spans, Pass::WHOLE)?;
        self.note(&model.logits(&hidden)?)?;
        Ok(())
    }

    fn assert_close(&self, expected: &Self, what: &str) {
        assert_eq!(self.logits.len(), expected.logits.len(), "{what}");
        for (pass, (ours, expected)) in self.logits.iter().zip(&expected.logits).enumerate() {
            assert_eq!(ours.len(), expected.len(), "{what}");
            let largest = expected.iter().fold(1f32, |largest, x| largest.max(x.abs()));
            let differences = ours.iter().zip(expected).map(|(a, b)| (a - b).abs());
            let worst = differences.fold(0f32, f32::max);
            assert!(ours.iter().chain(expected).all(|x| x.is_finite()), "{what}");
            assert!(worst < BOUND * largest, "{what}, pass {pass}: {worst:e} of {largest}");
        }
        assert_eq!(self.greedy, expected.greedy, "{what}");
    }
}

/// What one process computes.
fn alone(folder: &Path) -> Computed {
    let loaded = load(folder, &Ranks::alone()).unwrap();
    Computed::of(&*loaded.model).unwrap()
}

/// What each of `count` ranks computes, or why it cannot.
fn on_ranks(folder: &Path, count: usize) -> Vec<std::result::Result<Computed, String>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = in_threads(count)
            .into_iter()
            .map(|ranks| {
                scope.spawn(move || {
                    let loaded = load(folder, &ranks)?;
                    Computed::of(&*loaded.model).map_err(|error| error.to_string())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Ranks compute `expected`, all of them the same bits; or why they cannot.
fn check(
    folder: &Path,
    count: usize,
    expected: &Computed,
    what: &str,
) -> std::result::Result<(), String> {
    let what = format!("{what} on {count} ranks");
    let all: std::result::Result<Vec<_>, _> = on_ranks(folder, count).into_iter().collect();
    let all = all?;
    all[0].assert_close(expected, &what);
    for other in &all[1..] {
        assert!(all[0] == *other, "{what}: ranks differ");
    }
    Ok(())
}

/// Fixtures that 2 ranks cannot divide: they have 3 heads, or packed matrices with one group of inputs.
const NOT_BY_2: [&str; 6] = [
    "gemma4_moe_4bit",
    "gpt_oss",
    "gpt_oss_8bit",
    "kimi_linear",
    "qwen3_moe_mixed",
    "qwen3_next_4bit",
];

/// Fixtures that 4 ranks cannot divide either: they have 6 heads.
const NOT_BY_4: [&str; 5] =
    ["qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"];

#[test]
fn every_family_computes_in_parts_what_it_computes_alone() {
    for folder in families() {
        let name = name_of(&folder);
        println!("{name}");
        let expected = alone(&folder);
        for count in [2, 4] {
            let divides = !NOT_BY_2.contains(&name) && (count == 2 || !NOT_BY_4.contains(&name));
            match check(&folder, count, &expected, name) {
                Ok(()) => assert!(divides, "{name} on {count} ranks"),
                Err(error) => {
                    assert!(!divides, "{name} on {count} ranks: {error}");
                    assert!(error.contains("` cannot be cut: "), "{name}: {error}");
                }
            }
        }
    }
}

#[test]
fn every_family_is_divided_by_3_and_8_ranks() {
    for source in families() {
        let name = name_of(&source);
        println!("{name}");
        let folder = widened(&source);
        let expected = alone(folder.path());
        for count in [3, 8] {
            match check(folder.path(), count, &expected, name) {
                Ok(()) => {}
                // Its convolutions are cut by channels, which are the 64 dimensions of its hidden states.
                Err(error) if count == 3 && name.starts_with("lfm2") => {
                    assert!(error.contains("3 ranks cannot divide 64 outputs"), "{error}");
                }
                Err(error) => panic!("{name} on {count} ranks: {error}"),
            }
        }
    }
}

/// What the first of `count` ranks computes while the others follow it.
fn led(folder: &Path, count: usize) -> std::result::Result<Computed, String> {
    std::thread::scope(|scope| {
        let mut ranks = in_threads(count).into_iter();
        let first = ranks.next().unwrap();
        let mut senders = Vec::new();
        let followers: Vec<_> = ranks
            .map(|ranks| {
                let (sender, log) = sync_channel::<Entry>(16);
                senders.push(sender);
                scope.spawn(move || -> std::result::Result<(), String> {
                    let loaded = load(folder, &ranks)?;
                    let followed =
                        follow(&*loaded.model, &ranks, loaded.dtype, log.into_iter().map(Ok));
                    followed.map_err(|error| error.to_string())
                })
            })
            .collect();
        let lead = scope.spawn(move || -> std::result::Result<Computed, String> {
            let part = load(folder, &first)?.model;
            let log = Log::new(move |entry| {
                senders.iter().all(|sender| sender.send(entry.clone()).is_ok())
            });
            let lead = Lead::new(part, first, log, 1);
            let mut computed = Computed::of(&lead).map_err(|error| error.to_string())?;
            computed.run_objects(&lead).map_err(|error| error.to_string())?;
            Ok(computed)
        });
        let computed = lead.join().unwrap();
        for follower in followers {
            follower.join().unwrap()?;
        }
        computed
    })
}

#[test]
fn ranks_that_follow_the_first_one_compute_what_it_computes_alone() {
    for folder in families() {
        let name = name_of(&folder);
        if NOT_BY_2.contains(&name) {
            continue;
        }
        println!("{name}");
        let loaded = load(&folder, &Ranks::alone()).unwrap();
        let mut expected = Computed::of(&*loaded.model).unwrap();
        expected.run_objects(&*loaded.model).unwrap();
        led(&folder, 2).expect(name).assert_close(&expected, name);
    }
}

#[test]
fn what_ranks_cannot_divide_is_refused_by_name() {
    let check = |family: &str, count: usize, parts: &[&str]| {
        let folder = families().into_iter().find(|folder| name_of(folder) == family).unwrap();
        for result in on_ranks(&folder, count) {
            let error = result.expect_err("it cannot be cut");
            assert_eq!(error.lines().count(), 1, "{error}");
            for part in parts {
                assert!(error.contains(part), "`{error}` does not contain `{part}`");
            }
        }
    };
    let heads = "`model.layers.0.self_attn.q_proj` cannot be cut: 3 ranks cannot divide 64 outputs \
                 in 4 parts that stay whole";
    check("llama", 3, &[heads]);
    check("llama", 8, &["q_proj` cannot be cut", "8 ranks"]);
    check("kimi_linear", 2, &["self_attn.q_proj` cannot be cut", "48 outputs in 3 parts"]);
    check(
        "qwen3_next_4bit",
        2,
        &["linear_attn.out_proj` cannot be cut", "groups of 32 inputs, which share a scale"],
    );
}

/// Variables of a process that [`processes_compute_over_a_ring`] starts, and those that MLX's ring reads.
const FIXTURES: &str = "STEERSMAN_RING_FIXTURES";
const RANK: &str = "MLX_RANK";
const HOSTS: &str = "MLX_HOSTFILE";

/// A rank of [`processes_compute_over_a_ring`].
#[test]
#[ignore = "a child process of the next test"]
fn one_of_several_processes() {
    let Ok(names) = std::env::var(FIXTURES) else { return };
    Device::set_default(&Device::cpu());
    let ranks = join(Backend::Ring).unwrap();
    assert_eq!(std::env::var(RANK).unwrap(), ranks.index().to_string());
    for folder in families().iter().filter(|folder| names.split(' ').any(|n| n == name_of(folder)))
    {
        let loaded = load(folder, &ranks).unwrap();
        let what = format!("{} on rank {}", name_of(folder), ranks.index());
        Computed::of(&*loaded.model).unwrap().assert_close(&alone(folder), &what);
    }
}

/// Layers one after the other and side by side, norms over ranks, and a head with and without rows of its own.
#[test]
fn processes_compute_over_a_ring() {
    let names = "falcon_h1 granitemoehybrid llama olmo2 qwen3_5";
    for count in [2, 4] {
        let names = if count == 2 { names } else { "falcon_h1 llama" };
        // In one of many starts, a process waits for ever for the next one to connect; no deadline of MLX ends that.
        let ended = (0..3).find_map(|_| run_processes(count, names));
        for (rank, output) in ended.expect("the processes connect").into_iter().enumerate() {
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "rank {rank} of {count}:\n{text}\n{errors}");
            assert!(text.contains("1 passed"), "{text}");
        }
    }
}

/// What `count` processes wrote; `None` if they did not end.
fn run_processes(count: usize, names: &str) -> Option<Vec<Output>> {
    let folder = tempfile::tempdir().unwrap();
    let sockets: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let address = |socket: &TcpListener| [socket.local_addr().unwrap().to_string()];
    let addresses: Vec<_> = sockets.iter().map(address).collect();
    drop(sockets);
    let hosts = folder.path().join("hosts.json");
    std::fs::write(&hosts, serde_json::to_string(&addresses).unwrap()).unwrap();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["model::parts::one_of_several_processes", "--exact", "--ignored"])
            .env(FIXTURES, names)
            .env(RANK, rank.to_string())
            .env(HOSTS, &hosts)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..count).map(start).collect();
    let end = Instant::now() + Duration::from_secs(120);
    while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
        if Instant::now() > end {
            for mut child in children {
                child.kill().unwrap();
                child.wait().unwrap();
            }
            return None;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(children.into_iter().map(|child| child.wait_with_output().unwrap()).collect())
}

/// State of one part is no state of another.
#[test]
fn each_part_has_a_digest_of_its_own() {
    let folder = families().into_iter().find(|folder| name_of(folder) == "llama").unwrap();
    let mut digests: Vec<_> = [1, 2, 4]
        .into_iter()
        .flat_map(in_threads)
        .map(|ranks| load(&folder, &ranks).unwrap().digest([0; 32]))
        .collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 7);
}

/// The fixture with [`FACTOR`] times its heads and other units: copies of them, each times another factor.
fn widened(source: &Path) -> tempfile::TempDir {
    let mut config = config_of(source);
    let model_type = config["model_type"].as_str().unwrap();
    let family = FAMILIES.iter().find(|family| family.model_type == model_type).unwrap();
    let mut weights = Weights::open(source, &config, Dtype::Float32, Storage::Packed).unwrap();
    (family.load)(&config, &mut weights).unwrap();
    let tensors: Vec<(&str, Array)> = weights
        .taken()
        .map(|(name, array, cut)| {
            // LFM2's convolutions have as many channels as hidden states have dimensions.
            let cut = cut.filter(|_| !name.contains(".conv."));
            let wide = cut.map_or(Ok(array.clone()), |cut| widen(name, array, cut));
            (name, wide.unwrap().contiguous().unwrap())
        })
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    Array::save_safetensors(tensors.iter().map(|(name, array)| (*name, array)), None, path)
        .unwrap();
    widen_config(&mut config);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn widen(name: &str, array: &Array, cut: &Cut) -> Result<Array> {
    let part = name.rsplit('.').next().unwrap_or_default();
    let is_vector = ["A_log", "dt_bias"].contains(&part);
    let array = if is_vector { array.reshape(&[-1])? } else { array.clone() };
    let dims = array.ndim() as i32;
    let outputs = match part {
        _ if name.contains("conv") || dims == 1 => 0,
        "bias" => dims - 1,
        _ => dims - 2,
    };
    match cut {
        Cut::Outputs(_) | Cut::Repeated(_) => copies(&array, outputs, 1.0),
        Cut::Inputs(_) if part == "bias" => Ok(array),
        // The sum over as many more inputs stays as large.
        Cut::Inputs(_) => copies(&array, dims - 1, 1.0 / FACTOR as f32),
        Cut::Stack(_) => copies(&array, 0, 1.0),
        Cut::Segments(segments) => {
            let ends = segments.iter().scan(0, |end, (size, _)| {
                *end += size;
                Some(*end)
            });
            let ends: Vec<i32> = ends.take(segments.len() - 1).collect();
            let parts = array.split_at_indices(&ends, outputs)?;
            let parts = parts.iter().map(|part| copies(part, outputs, 1.0));
            Ok(concatenate(&parts.collect::<Result<Vec<_>>>()?, outputs)?)
        }
    }
}

/// [`FACTOR`] copies of `array` along `axis`. Those of floats differ, by factors around `scale`.
fn copies(array: &Array, axis: i32, scale: f32) -> Result<Array> {
    let copy = |i: i32| -> Result<Array> {
        if !array.dtype().is_float() {
            return Ok(array.clone());
        }
        let factor = scale * (0.8 + 0.4 * (i * 7 % FACTOR) as f32 / FACTOR as f32);
        Ok(array.multiply(Array::from_f32(factor).as_dtype(array.dtype())?)?)
    };
    Ok(concatenate(&(0..FACTOR).map(copy).collect::<Result<Vec<_>>>()?, axis)?)
}

/// Multiplies the numbers of heads and of groups in an object of `config.json` and in those within it. The size of a head
/// stays, also where it is that of the hidden states over the number of heads.
fn widen_config(config: &mut Value) {
    const COUNTS: [&str; 11] = [
        "linear_num_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "mamba_n_groups",
        "mamba_n_heads",
        "mamba_num_heads",
        "n_groups",
        "num_attention_heads",
        "num_global_key_value_heads",
        "num_heads",
        "num_key_value_heads",
    ];
    let Some(keys) = config.as_object_mut() else { return };
    let number = |value: Option<&Value>| value.and_then(Value::as_i64);
    let is_gemma3 = keys.get("model_type") == Some(&json!("gemma3_text"));
    let sizes = (number(keys.get("hidden_size")), number(keys.get("num_attention_heads")));
    if let (Some(hidden), Some(heads)) = sizes {
        let head_dim = keys.entry("head_dim").or_insert(Value::Null);
        if head_dim.is_null() {
            *head_dim = json!(hidden / heads);
        }
        // Without the key there are as many of them.
        keys.entry("num_key_value_heads").or_insert(json!(heads));
    } else if is_gemma3 {
        // The defaults of the family.
        keys.insert("num_attention_heads".into(), json!(8));
        keys.insert("num_key_value_heads".into(), json!(4));
    }
    for key in COUNTS {
        if let Some(count) = number(keys.get(key)) {
            keys.insert(key.into(), json!(count * i64::from(FACTOR)));
        }
    }
    keys.values_mut().for_each(widen_config);
}
