//! Memory: the prefix cache holds as many bytes as it counts, and a request that ended holds none.
//!
//! What was kept used to be views of the sequences' buffers: 1.2 MB counted held 1.6 GB, and 500
//! cancelled requests left 1.7 GB.

use std::time::{Duration, Instant};

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype, memory, random};
use steersman_engine::config::StoreConfig;
use steersman_engine::internals::cache::{
    Cache, Element, Full, LayerCache, Quantized, Recurrent, Sliding, Span, owned,
};
use steersman_engine::internals::model::{Pass, load};
use steersman_engine::internals::prefix::{Prefixes, Retention};
use steersman_engine::internals::store::RedbStore;
use steersman_engine::request::Request;
use steersman_tests::{
    Random, Running, ask, bundled_model, config, message, read, run, scaled, tiny_model, words,
};

use super::is_alone;

/// Bytes of all arrays, when what has been queued is computed.
fn held() -> u64 {
    eval([&Array::from_f32(1.0).add(Array::from_f32(2.0)).unwrap()]).unwrap();
    memory::active_memory().unwrap() as u64
}

fn normal(shape: &[i32], seed: usize) -> Array {
    random::normal::<f32>(shape, None, None, &random::key(seed as u64).unwrap()).unwrap()
}

/// Whether `held` is `counted` but for a tenth.
fn is_close(held: u64, counted: u64) -> bool {
    held.abs_diff(counted) * 10 <= counted
}

fn assert_close(held: u64, counted: u64, case: &str) {
    assert!(is_close(held, counted), "{case}: {held} bytes held, {counted} counted");
}

#[test]
fn owned_arrays_hold_their_bytes_and_no_more() {
    if !is_alone(module_path!(), "owned_arrays_hold_their_bytes_and_no_more") {
        return;
    }
    let before = held();
    let buffer = normal(&[1, 4, 4096, 64], 1);
    eval([&buffer]).unwrap();
    for count in [1, 2, 5] {
        let views: Vec<Array> =
            (0..count).map(|_| buffer.split_at_indices(&[100], 2).unwrap()[0].clone()).collect();
        let copies = owned(&views).unwrap();
        let bytes: u64 = copies.iter().map(|copy| copy.nbytes() as u64).sum();
        drop(views);
        assert_close(held() - before - buffer.nbytes() as u64, bytes, &format!("{count} arrays"));
        let view = &buffer.split_at_indices(&[100], 2).unwrap()[0];
        assert!(copies.iter().all(|copy| copy.eq_values(view).unwrap()));
    }
    // Of a whole array, too.
    let copies = owned(std::slice::from_ref(&buffer)).unwrap();
    assert_close(held() - before, 2 * buffer.nbytes() as u64, "a whole array");
    drop((copies, buffer));
    assert!(held() <= before);
}

/// One or several layers of each kind.
fn kinds() -> Vec<(&'static str, Vec<LayerCache>)> {
    let full = || LayerCache::Full(Full::new(2, 64));
    let sliding = || LayerCache::Sliding(Sliding::new(1, 64, 200));
    let quantized = || LayerCache::Quantized(Quantized::new(&Full::new(2, 64), 8, 40).unwrap());
    let recurrent = || {
        LayerCache::Recurrent(
            Recurrent::new(&[1, 4, 64, 64], &[1, 3, 512], Dtype::Float32).unwrap(),
        )
    };
    vec![
        ("full", vec![full(), full()]),
        ("sliding", vec![sliding(), sliding(), full()]),
        ("quantized", vec![quantized(), quantized(), quantized()]),
        ("recurrent", vec![recurrent(), recurrent(), recurrent()]),
        ("hybrid", vec![recurrent(), recurrent(), recurrent(), full()]),
    ]
}

/// Appends rows as a model does: keys and values are views of products.
fn append(cache: &mut Cache, rows: i32, seed: usize) {
    for layer in &mut cache.layers {
        let product = |heads: i32| normal(&[1, rows, heads, 64], seed).swap_axes(1, 2).unwrap();
        match layer {
            LayerCache::Full(full) => full.append(&product(4)).unwrap(),
            LayerCache::Quantized(quantized) => quantized.append(&product(4)).unwrap(),
            LayerCache::Sliding(sliding) => sliding.append(&product(1), &product(1)).unwrap(),
            LayerCache::Recurrent(recurrent) => {
                let x = normal(&[1, rows, 512], seed);
                let joined = concatenate(&[recurrent.state().1.array().unwrap(), x], 1).unwrap();
                let tail = joined.try_index((.., rows.., ..)).unwrap();
                let state = normal(&[1, 4, 64, 64], seed);
                recurrent.advance(Element::alone(state), Element::alone(tail));
            }
        }
    }
    Span { rows, cache }.advance();
    eval(&cache.arrays().unwrap()).unwrap();
}

/// Conversations that share beginnings are resumed, extended, saved at several positions, cancelled
/// in between, and evicted.
#[test]
fn counted_bytes_are_the_bytes_held_for_each_kind_of_cache() {
    if !is_alone(module_path!(), "counted_bytes_are_the_bytes_held_for_each_kind_of_cache") {
        return;
    }
    for (kind, layers) in kinds() {
        let before = held();
        let budget = 3 << 20;
        let empty = Cache::new(layers);
        eval(empty.recurrent_state().unwrap().iter()).unwrap();
        let of_empty = held() - before;
        let mut prefixes = Prefixes::new(empty, budget, None, 0).unwrap();
        let mut random = Random(7);
        let mut checked = 0;
        for round in 0..scaled(60) {
            let (family, shared) = (random.below(4) as u32, random.below(900));
            let mut tokens: Vec<u32> = (0..shared as u32).map(|i| 10_000 * family + i).collect();
            tokens.extend((0..100 + random.below(500)).map(|_| random.below(1_000_000) as u32));
            let (mut cache, _) = prefixes.restore(&tokens).unwrap();
            while cache.position < tokens.len() {
                let rows = (1 + random.below(511)).min(tokens.len() - cache.position);
                append(&mut cache, rows as i32, round);
                match random.below(4) {
                    0 => {
                        let saved = &tokens[..cache.position];
                        let plan = prefixes.plan_save(&cache, saved, Retention::default());
                        prefixes.save(&cache, saved, &plan).unwrap();
                    }
                    1 if round % 3 == 0 => break,
                    _ => {}
                }
            }
            drop(cache);
            let counted = prefixes.reporter().report().memory.bytes;
            assert!(counted <= budget, "{kind}");
            if counted > 1 << 20 {
                assert_close(
                    held() - before - of_empty,
                    counted,
                    &format!("{kind}, round {round}"),
                );
                checked += 1;
            }
        }
        assert!(
            checked > 20 && prefixes.reporter().report().counts.evictions > 0,
            "{kind}: {checked}"
        );
        drop(prefixes);
        assert!(held() <= before, "{kind}: {} bytes held, {before} before", held());
    }
}

/// The inputs of a whole chunk and the spare rows of a window are not part of it.
#[test]
fn checkpoint_holds_its_state_and_not_the_buffers_it_was_taken_from() {
    if !is_alone(module_path!(), "checkpoint_holds_its_state_and_not_the_buffers_it_was_taken_from")
    {
        return;
    }
    for (kind, layers) in kinds() {
        let before = held();
        let mut cache = Cache::new(layers);
        append(&mut cache, 900, 1);
        let checkpoint = cache.checkpoint().unwrap();
        eval(checkpoint.arrays()).unwrap();
        drop(cache);
        let bytes: u64 = checkpoint.arrays().iter().map(|array| array.nbytes() as u64).sum();
        let most = bytes + 16 * 1024 * checkpoint.arrays().len() as u64;
        assert!(held() - before <= most, "{kind}: {} bytes held for {bytes}", held() - before);
    }
}

/// Clients that hang up while the prompt is computed or the reply is generated.
#[test]
fn cancelled_requests_leave_nothing_behind() {
    if !is_alone(module_path!(), "cancelled_requests_leave_nothing_behind") {
        return;
    }
    let mut config = config();
    config.store.memory_bytes = 24 << 20;
    let engine = Running::without_store(config);
    let long = |i: usize, words: usize| {
        let text: Vec<String> = (0..words).map(|word| format!("word {i} {word}")).collect();
        let mut request = ask(&text.join(" "));
        request.messages.insert(0, message("system", "Answer in one sentence."));
        request.max_tokens = Some(40);
        request
    };
    run(&engine, long(0, 10));
    wait_until_idle(&engine);
    let report = || engine.info().prefixes.report();
    let base = held() - report().memory.bytes;
    let mut random = Random(3);
    for i in 1..=scaled(30) {
        let mut events = engine.submit(long(i, random.below(250))).unwrap();
        for _ in 0..random.below(20) {
            if events.blocking_recv().is_none() {
                break;
            }
        }
        drop(events);
        if i % 10 == 0 {
            run(&engine, long(i, 30));
            wait_until_idle(&engine);
            // The engine's thread drops a request after its report says that none runs.
            let deadline = Instant::now() + Duration::from_secs(30);
            while !is_close(held() - base, report().memory.bytes) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_close(held() - base, report().memory.bytes, &format!("{i} cancelled"));
        }
    }
    assert!(report().counts.evictions > 0 && report().memory.bytes <= 24 << 20, "{:?}", report());
}

/// 100 clients hang up while their requests run, or wait.
#[test]
fn requests_of_clients_that_hang_up_leave_no_bytes_behind() {
    if !is_alone(module_path!(), "requests_of_clients_that_hang_up_leave_no_bytes_behind") {
        return;
    }
    let mut config = config();
    (config.engine.max_running, config.engine.queue) = (64, 128);
    (config.store.memory_bytes, config.store.ahead) = (0, false);
    let engine = Running::without_store(config);
    let report = || engine.info().activity.report();
    run(&engine, ask("Hello"));
    let before = held();
    let mut random = Random(5);
    for round in 1..=scaled(3) {
        let text = |i| format!("{i} {}", "fox river castle owl ".repeat(10 + i));
        let ask = |i: usize| Request { seed: Some(i as u64), ..ask(&text(i)) };
        let events: Vec<_> = (0..100).map(|i| engine.submit(ask(i)).unwrap()).collect();
        let least = 1 + random.below(30);
        while report().running < least {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(events);
        while report().running > 0 || engine.waiting() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // A request that was just taken from the queue is neither waiting nor reported as running.
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let left = held().saturating_sub(before);
            if left < 64 << 10 {
                break;
            }
            assert!(deadline > Instant::now(), "round {round}: {left} bytes are left");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// 32 requests that arrive together behind one prefix of 12,000 tokens have it once beside the prefix cache, and reply as
/// each alone. With caches of their own they would take eleven times the bytes allowed here.
#[test]
fn requests_behind_a_long_prefix_share_its_rows() {
    const STREAMS: usize = 32;
    if !is_alone(module_path!(), "requests_behind_a_long_prefix_share_its_rows") {
        return;
    }
    let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(model.path());
    let path = model.path().join("config.json");
    let json = std::fs::read_to_string(&path).unwrap();
    let longer =
        json.replace("\"max_position_embeddings\": 4096", "\"max_position_embeddings\": 16384");
    assert_ne!(longer, json);
    std::fs::write(&path, longer).unwrap();
    let mut config = config();
    config.engine.max_running = STREAMS;
    (config.store.enabled, config.store.ahead) = (false, false);
    let engine = Running::try_start(config, model.path(), data.path()).unwrap();
    let report = || engine.info().activity.report();
    let mut random = Random(7);
    let system = words(&mut random, 12_000);
    let questions: Vec<String> = (0..STREAMS).map(|_| words(&mut random, 20)).collect();
    let about = |i: usize| {
        let mut request = ask(&questions[i]);
        request.messages.insert(0, message("system", &system));
        Request { reasoning: None, ignores_end: true, max_tokens: Some(32), ..request }
    };
    let kv = load(&model.path().canonicalize().unwrap(), &steersman_tests::config().model).unwrap();
    let prefix = kv.model.new_cache().unwrap().shareable_bytes(12_000, 4);
    drop(kv);
    let before = held();
    let events: Vec<_> = (0..STREAMS).map(|i| engine.submit(about(i)).unwrap()).collect();
    let (mut most, mut samples) = ([0; 2], 0);
    while report().running > 0 || engine.waiting() > 0 {
        let now = report();
        if now.running == STREAMS {
            let counted = now.bytes.running + now.bytes.prefix_cache;
            let held = memory::active_memory().unwrap() as u64 - before;
            (most, samples) = ([most[0].max(held), most[1].max(counted)], samples + 1);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(samples > 0, "they did not run at the same time");
    assert!(most.into_iter().max() < Some(3 * prefix), "{most:?} of {prefix}");
    for (i, events) in events.into_iter().enumerate() {
        let together = read(events);
        let alone = run(&engine, about(i));
        let usage = &alone.finished().usage;
        assert!(usage.prompt_tokens == 12_020 && usage.cached_tokens >= 12_000, "{usage:?}");
        assert_eq!(together.answer, alone.answer, "{i}");
    }
}

/// Waits until the engine has no prefix left to prefetch.
fn wait_until_idle(engine: &Running) {
    let done = || engine.info().prefixes.report().counts;
    let mut before = Default::default();
    while before != done() {
        before = done();
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// Prints the processor time of prefill and decode with each limit of MLX's cache of freed buffers: the
/// figures behind `CPU_BUFFER_CACHE_BYTES`.
#[test]
#[cfg(target_os = "linux")]
#[ignore = "a measurement"]
fn processor_time_with_each_limit_of_the_buffer_cache() {
    if !is_alone(module_path!(), "processor_time_with_each_limit_of_the_buffer_cache") {
        return;
    }
    let model = load(&bundled_model(), &config().model).unwrap().model;
    let tokens: Vec<u32> = (0..1024).map(|i| 3 + i % 4000).collect();
    let pass = |tokens: &[u32], cache: &mut Cache| {
        let rows = tokens.len() as i32;
        let ids = Array::from_slice(tokens, &[rows]);
        let hidden = model.forward(&ids, &mut [Span { rows, cache }], Pass::WHOLE).unwrap();
        let last = hidden.split_at_indices(&[rows - 1], 1).unwrap().pop().unwrap();
        eval([&model.logits(&last).unwrap()]).unwrap();
    };
    // User and system time of this process, in hundredths of a second.
    let time = || -> u64 {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        stat.split(' ').skip(13).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
    };
    let limits = [0, 8, 32, 128, 512];
    let mut totals = [[0; 2]; 5];
    for _ in 0..3 {
        for (total, limit) in totals.iter_mut().zip(limits) {
            memory::set_cache_limit(limit << 20).unwrap();
            let mut cache = model.new_cache().unwrap();
            let start = time();
            tokens.chunks(512).for_each(|chunk| pass(chunk, &mut cache));
            let prefilled = time();
            (0..128).for_each(|token| pass(&[token], &mut cache));
            total[0] += prefilled - start;
            total[1] += time() - prefilled;
        }
    }
    for (limit, [prefill, decode]) in limits.into_iter().zip(totals) {
        println!("{limit:4} MiB: prefill {prefill}, decode {decode}");
    }
}

/// Prints how long saving state takes, in memory and with a store, for the bundled model's cache and for one
/// of the shape of Qwen3.5-9B in 16 bits.
#[test]
#[ignore = "a measurement"]
fn time_of_saving_state() {
    if !is_alone(module_path!(), "time_of_saving_state") {
        return;
    }
    let bundled = load(&bundled_model(), &config().model).unwrap().model;
    let hybrid = |_| -> Vec<LayerCache> {
        let recurrent = || {
            let state = Recurrent::new(&[1, 32, 128, 128], &[1, 3, 8192], Dtype::Bfloat16);
            LayerCache::Recurrent(state.unwrap())
        };
        vec![recurrent(), recurrent(), recurrent(), LayerCache::Full(Full::new(4, 256))]
    };
    let large = Cache::new((0..8).flat_map(hybrid).collect());
    for (name, tokens) in [("bundled", 1024), ("bundled", 4096), ("9B", 1024), ("9B", 4096)] {
        let ids: Vec<u32> = (0..tokens).map(|i| 3 + i % 4000).collect();
        let mut cache = large.clone();
        if name == "bundled" {
            cache = bundled.new_cache().unwrap();
            for ids in ids.chunks(512) {
                let rows = ids.len() as i32;
                let span = Span { rows, cache: &mut cache };
                let ids = Array::from_slice(ids, &[rows]);
                bundled.forward(&ids, &mut [span], Pass::WHOLE).unwrap();
            }
        } else {
            for layer in &mut cache.layers {
                if let LayerCache::Full(full) = layer {
                    let kv = normal(&[1, 8, tokens as i32, 256], 1);
                    let kv = kv.as_dtype(Dtype::Bfloat16).unwrap();
                    full.append(&kv).unwrap();
                }
            }
            cache.position = tokens as usize;
        }
        eval(&cache.arrays().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let store = StoreConfig::default();
        let path = folder.path().join("state.redb");
        let disk = RedbStore::open(&path, [0; 32], &store).unwrap();
        for (tiers, disk) in [("memory", None), ("memory and store", Some(disk))] {
            let empty = if name == "9B" { large.clone() } else { bundled.new_cache().unwrap() };
            let mut prefixes = Prefixes::new(empty, 4 << 30, disk, 0).unwrap();
            let start = Instant::now();
            let plan = prefixes.plan_save(&cache, &ids, Retention::default());
            prefixes.save(&cache, &ids, &plan).unwrap();
            println!("{name}, {tokens} tokens, {tiers}: {:?}", start.elapsed());
        }
    }
}
