//! Speed of the prefix store: `cargo bench -p steersman-engine --bench store`, on a quiet machine.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use steersman_engine::config::StoreConfig;
use steersman_engine::internals::store::{
    BLOCK_TOKENS, Fingerprint, Key, KeyChain, Part, PartKind, RedbStore, Tensor,
};

const FINGERPRINT: Fingerprint = [3; 32];

fn main() {
    saving_and_loading();
    full_store();
}

fn open(path: &Path, budget_bytes: u64) -> RedbStore {
    let config = StoreConfig { budget_bytes, ..StoreConfig::default() };
    RedbStore::open(path, FINGERPRINT, &config).unwrap()
}

/// KV of one token with pseudo-random bytes.
fn part(name: u32, bytes: usize) -> Part {
    let mut seed = u64::from(name);
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as u8
    };
    let bytes = (0..bytes).map(|_| random()).collect();
    let tensors = vec![Tensor { dtype: "U8".into(), shape: vec![1], bytes }];
    Part { key: KeyChain::key_of(&FINGERPRINT, &[name]), kind: PartKind::Kv, end: 1, tensors }
}

/// The shapes: one long state; 12,000 tokens of a hybrid 9B model (8 layers of attention, 2 MiB a
/// block, and a state of 50 MB); 3,000 of a dense 4B model (9 MiB a block); small blocks of a small
/// model.
fn saving_and_loading() {
    let blocks = |count: usize, bytes: usize| vec![bytes; count];
    let shapes = [
        ("100 MB of state", vec![100_000_000]),
        ("hybrid 9B", [blocks(188, 2 << 20), vec![50_000_000]].concat()),
        ("dense 4B", blocks(47, 9 << 20)),
        ("small", blocks(1000, 64 << 10)),
    ];
    for (name, sizes) in shapes {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        let store = open(&path, 1 << 30);
        let total = sizes.iter().sum::<usize>() as f64 / 1e6;
        let parts: Vec<Part> = (0..).zip(&sizes).map(|(i, bytes)| part(i, *bytes)).collect();
        let keys: Vec<Key> = parts.iter().map(|part| part.key).collect();
        let saved = parts.clone();
        let started = Instant::now();
        store.save(saved);
        let queued = started.elapsed();
        store.flush().unwrap();
        let saving = total / started.elapsed().as_secs_f64();
        drop(store);
        // Makes the operating system forget the file.
        let forget = format!("of={}", path.display());
        let dd = ["oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none", &forget];
        assert!(Command::new("dd").args(dd).status().unwrap().success());
        let started = Instant::now();
        let store = open(&path, 1 << 30);
        let opening = started.elapsed();
        let mut loading = Vec::new();
        for _ in 0..4 {
            let started = Instant::now();
            let loaded = store.load(&keys).unwrap();
            loading.push(total / started.elapsed().as_secs_f64());
            assert!(loaded.iter().zip(&parts).all(|(tensors, part)| *tensors == part.tensors));
        }
        let report = store.report();
        println!(
            "{name}: {} parts, {total:.0} MB: queued in {queued:.1?}, saved at {saving:.0} MB/s, \
             opened in {opening:.1?}, loaded at {:.0} MB/s from disk and {:.0?} from memory, {:.3} \
             bytes on disk and {:.3} of the budget for each",
            parts.len(),
            loading[0],
            &loading[1..],
            report.file_bytes as f64 / total / 1e6,
            report.rows.bytes as f64 / total / 1e6,
        );
    }
}

/// Saving 32 MB at a time into a store that is full, and finding 12,000 tokens.
fn full_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("state.redb"), 256 << 20);
    for round in 0..16 {
        let parts: Vec<Part> = (0..16).map(|i| part(round * 16 + i, 2 << 20)).collect();
        let started = Instant::now();
        store.save(parts);
        store.flush().unwrap();
        let speed = 33.6 / started.elapsed().as_secs_f64();
        println!("full store, save {round}: {speed:.0} MB/s");
    }
    println!("evicted {} parts", store.report().counts.evicted_parts);
    let tokens: Vec<u32> = (0..12_000).collect();
    let keys = KeyChain::block_keys(&FINGERPRINT, &tokens).into_iter().enumerate();
    let parts =
        keys.map(|(i, key)| Part { key, end: 12_000.min((i + 1) * BLOCK_TOKENS), ..part(0, 10) });
    store.save(parts.collect());
    let started = Instant::now();
    let found = store.longest(&tokens, 12_000, false).map(|prefix| prefix.tokens);
    println!("found {found:?} of 12,000 tokens in {:?}", started.elapsed());
}
