//! The prefix store: saved parts are found whole, and evicted in the right order.

mod damaged;
mod killed;
mod maintenance;
mod power_loss;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use steersman_engine::config::StoreConfig;
use steersman_engine::internals::store::{
    BLOCK_TOKENS, Fingerprint, Key, KeyChain, Part, PartKind, RedbStore, StoreEnv, Tensor,
    WallClock, state_key,
};
use steersman_tests::{Random, damage, scaled};

const ONE: Fingerprint = [1; 32];
const TWO: Fingerprint = [2; 32];
const MB: u64 = 1 << 20;

fn open(path: &Path, fingerprint: Fingerprint, budget_bytes: u64) -> RedbStore {
    let config = StoreConfig { budget_bytes, ..StoreConfig::default() };
    RedbStore::open(path, fingerprint, &config).unwrap()
}

/// The tensors of the part with this key, the first of `bytes` bytes.
fn tensors(key: &Key, bytes: usize) -> Vec<Tensor> {
    let mut random = Random(u64::from_le_bytes(key[..8].try_into().unwrap()));
    let tensor = |dtype: &str, shape: &[i32], bytes: Vec<u8>| Tensor {
        dtype: dtype.into(),
        shape: shape.into(),
        bytes,
    };
    let elements = (0..bytes).map(|_| random.below(256) as u8).collect();
    vec![
        tensor("BF16", &[1, 2, bytes as i32, 4], elements),
        tensor("F32", &[0, 7], vec![]),
        tensor("U32", &[1], key[..4].to_vec()),
    ]
}

/// The part of this kind at the end of `tokens`: KV of one block, or a state.
fn part(fingerprint: Fingerprint, tokens: &[u32], kind: PartKind, bytes: usize) -> Part {
    let kv = KeyChain::key_of(&fingerprint, tokens);
    let key = if kind == PartKind::Kv { kv } else { state_key(&kv) };
    Part { key, kind, end: tokens.len(), tensors: tensors(&key, bytes) }
}

/// Bytes of KV for one token; a state takes as many as three blocks.
const TOKEN_BYTES: usize = 100;

/// All KV of `tokens`, and the state at their end.
fn parts(fingerprint: Fingerprint, tokens: &[u32]) -> Vec<Part> {
    let mut parts = Vec::new();
    for start in (0..tokens.len()).step_by(BLOCK_TOKENS) {
        let end = tokens.len().min(start + BLOCK_TOKENS);
        parts.push(part(fingerprint, &tokens[..end], PartKind::Kv, TOKEN_BYTES * (end - start)));
    }
    parts.push(part(fingerprint, tokens, PartKind::State, TOKEN_BYTES * 3 * BLOCK_TOKENS));
    parts
}

fn longest(store: &RedbStore, tokens: &[u32], limit: usize, needs_state: bool) -> Option<usize> {
    store.longest(tokens, limit, needs_state).map(|prefix| prefix.tokens)
}

fn keys(parts: &[Part]) -> Vec<Key> {
    parts.iter().map(|part| part.key).collect()
}

/// Whether all of `parts` load, unchanged.
fn loads(store: &RedbStore, parts: &[Part]) -> bool {
    let Some(loaded) = store.load(&keys(parts)) else { return false };
    assert!(loaded.iter().zip(parts).all(|(tensors, part)| *tensors == part.tensors));
    loaded.len() == parts.len()
}

/// What a part takes of the budget.
fn cost(part: &Part) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("cost"), ONE, 64 * MB);
    store.save(vec![part.clone()]);
    let report = store.report();
    report.rows.bytes + report.states.bytes
}

fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

#[test]
fn saved_parts_are_found_and_load_before_and_after_they_are_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("state.redb"), ONE, 64 * MB);
    let tokens: Vec<u32> = (0..500).collect();
    let sizes = [(1, 0), (63, 1), (64, 5_000), (65, 1 << 20), (128, 3_000_000), (500, 700_000)];
    let saved: Vec<Part> = sizes
        .iter()
        .flat_map(|&(length, bytes)| {
            [PartKind::Kv, PartKind::State].map(|kind| part(ONE, &tokens[..length], kind, bytes))
        })
        .collect();
    for part in &saved {
        assert!(!store.contains(&part.key));
        store.save(vec![part.clone()]);
        assert!(store.contains(&part.key) && loads(&store, std::slice::from_ref(part)));
    }
    store.flush().unwrap();
    assert!(loads(&store, &saved), "all at once, in the requested order");
    let missing = part(ONE, &tokens[..2], PartKind::Kv, 3);
    assert_eq!(store.load(&[saved[0].key, missing.key]), None);
    assert_eq!(store.load(&[]), Some(vec![]));
}

#[test]
fn longest_prefix_lacks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("state.redb"), ONE, 64 * MB);
    let tokens: Vec<u32> = (0..400).map(|i| i * 3).collect();
    let mut branch = tokens.clone();
    branch[150] = 1;
    let check = |tokens: &[u32], limit, kv: usize, state: usize| {
        let found = [false, true].map(|needs_state| longest(&store, tokens, limit, needs_state));
        assert_eq!(found.map(Option::unwrap_or_default), [kv, state], "limit {limit}");
    };
    check(&tokens, 400, 0, 0);
    for end in [10, 100, 200] {
        store.save(parts(ONE, &tokens[..end]));
    }
    store.save(parts(ONE, &branch[..180]));
    // KV without a state, a state without KV, and KV after a gap.
    store.save(parts(ONE, &tokens[..256])[..4].to_vec());
    store.save(vec![part(ONE, &tokens[..300], PartKind::State, 10)]);
    store.save(vec![part(ONE, &tokens[..384], PartKind::Kv, 10)]);

    for (limit, kv, state) in [
        (0, 0, 0),
        (9, 0, 0),
        (10, 10, 10),
        (63, 10, 10),
        (64, 64, 10),
        (99, 64, 10),
        (100, 100, 100),
        (127, 100, 100),
        (128, 128, 100),
        (199, 192, 100),
        (200, 200, 200),
        (255, 200, 200),
        (usize::MAX, 256, 200),
    ] {
        check(&tokens, limit, kv, state);
    }
    check(&tokens[..150], 300, 128, 100);
    check(&branch, 300, 180, 180);
    check(&branch, 179, 128, 100);
    check(&tokens[1..], 300, 0, 0);
    check(&[], 300, 0, 0);
}

#[test]
fn least_recently_used_part_is_evicted_first() {
    let folder = tempfile::tempdir().unwrap();
    let of = |i: u32| vec![part(ONE, &[i], PartKind::State, 10_000)];
    let store = open(&folder.path().join("state.redb"), ONE, 4 * cost(&of(0)[0]));
    for i in 0..4 {
        store.save(of(i));
    }
    store.flush().unwrap();
    assert!(loads(&store, &of(0)));
    assert!(store.contains(&of(1)[0].key));
    store.touch(&keys(&of(2)));
    store.save(of(90));
    store.save(of(3)); // present: a use, not written again
    store.save(of(91));
    store.flush().unwrap();
    let found: Vec<u32> = (0..100).filter(|i| store.contains(&of(*i)[0].key)).collect();
    assert_eq!(found, [2, 3, 90, 91]);
    assert_eq!(store.report().counts.saved_parts, 6);
}

/// A state is evicted before the KV that it needs, late blocks before early ones.
#[test]
fn eviction_leaves_prefixes_that_can_be_resumed_from() {
    let folder = tempfile::tempdir().unwrap();
    let long: Vec<u32> = (0..1600).collect();
    let saved = parts(ONE, &long);
    let full = folder.path().join("full.redb");
    let store = open(&full, ONE, 64 * MB);
    store.save(saved.clone());
    store.save(parts(ONE, &long[..640]));
    let report = store.report();
    drop(store);
    let all = report.rows.bytes + report.states.bytes;
    for budget in [all - 1, all * 3 / 4, all / 2, all / 4, all / 10] {
        let path = folder.path().join("state.redb");
        std::fs::copy(&full, &path).unwrap();
        let store = open(&path, ONE, budget);
        let kv = longest(&store, &long, 1600, false).unwrap_or(0);
        let state = longest(&store, &long, 1600, true);
        let count = kv.div_ceil(BLOCK_TOKENS);
        assert!(loads(&store, &saved[..count]), "the longest prefix loads, at {budget}");
        assert_eq!(store.report().rows.parts, count as u64, "no KV out of reach is left");
        let share = budget as f64 / all as f64;
        assert!(share < 0.2 || kv as f64 > 1600.0 * 0.7 * share, "{kv} tokens at {budget}");
        let expected = (budget >= all / 2).then_some(640);
        assert_eq!(state, expected, "the longer one's state is evicted first, then KV after 640");
    }
}

#[test]
fn save_beyond_the_budget_is_dropped_whole_and_evicts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("state.redb"), ONE, MB);
    let small = part(ONE, &[1], PartKind::Kv, 1000);
    let half = |i: u32| part(ONE, &[i], PartKind::Kv, 500_000);
    store.save(vec![small.clone()]);
    store.save(vec![half(2), half(3)]);
    store.flush().unwrap();
    assert!(!store.contains(&half(2).key) && !store.contains(&half(3).key));
    assert!(loads(&store, &[small]));
    assert_eq!(store.report().counts.dropped_saves, 1);
}

#[test]
fn retained_parts_stay_until_their_time_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let of = |i: u32| part(ONE, &[i], PartKind::Kv, 10_000);
    let (a, b, c) = (of(1), of(2), of(3));
    let budget = 4 * cost(&a);
    // The time of day, in seconds.
    let now = Arc::new(AtomicU64::new(1_800_000_000));
    let open = |path: &Path, fingerprint, budget_bytes| {
        let config = StoreConfig { budget_bytes, ..StoreConfig::default() };
        let now = now.clone();
        let time = move || UNIX_EPOCH + Duration::from_secs(now.load(Ordering::Relaxed));
        let env = StoreEnv { clock: WallClock::new(time), ..StoreEnv::default() };
        RedbStore::open_in(env, path, fingerprint, &config).unwrap()
    };
    let seconds = || now.load(Ordering::Relaxed);
    let store = open(&path, ONE, budget);
    store.save(vec![a.clone(), b.clone(), c.clone()]);
    let hour = seconds() + 3600;
    assert!(!store.retain(&[a.key, of(4).key], hour), "one of them is missing");
    assert!(!store.retain(&[a.key], seconds() - 1), "that is past");
    assert!(!store.retain(&[a.key, b.key, c.key], hour), "more than half of the budget");
    assert_eq!(store.report().retained.parts, 0, "all or nothing");
    assert!(store.retain(&[a.key, b.key, a.key], hour));
    assert!(store.retain(&[a.key], seconds() + 1), "does not end the longer time");
    assert!(!store.retain(&[c.key], hour));
    let churn = |store: &RedbStore| {
        for i in 10..40 {
            store.save(vec![of(i)]);
            store.flush().unwrap();
        }
    };
    churn(&store);
    assert!(loads(&store, &[a.clone(), b.clone()]) && !store.contains(&c.key));
    drop(store);
    let store = open(&path, TWO, budget);
    assert_eq!(store.report().retained.parts, 2);
    churn(&store);
    drop(store);
    let store = open(&path, ONE, budget);
    assert!(loads(&store, &[a.clone(), b.clone()]));
    drop(store);

    // Half of a smaller budget holds one of them; the other is not retained any more.
    let store = open(&path, ONE, budget / 2);
    assert_eq!(store.report().retained.parts, 1);
    drop(store);

    let other = folder.path().join("other.redb");
    let store = open(&other, ONE, budget);
    store.save(vec![a.clone()]);
    assert!(store.retain(&[a.key], seconds() + 10));
    now.fetch_add(9, Ordering::Relaxed);
    churn(&store);
    assert!(store.contains(&a.key));
    now.fetch_add(1, Ordering::Relaxed);
    assert_eq!(store.report().retained.parts, 0);
    churn(&store);
    assert!(!store.contains(&a.key), "its retention is over");
}

#[test]
fn other_fingerprints_never_match_and_share_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let tokens: Vec<u32> = (0..64).collect();
    let of = |fingerprint| vec![part(fingerprint, &tokens, PartKind::Kv, 20_000)];
    let budget = 2 * cost(&of(ONE)[0]);
    let store = open(&path, ONE, budget);
    store.save(of(ONE));
    drop(store);
    let store = open(&path, TWO, budget);
    assert_eq!(longest(&store, &tokens, 100, false), None);
    assert_eq!((store.report().rows.parts, store.report().others.parts), (0, 1));
    store.save(of(TWO));
    drop(store);
    for fingerprint in [ONE, TWO, ONE] {
        let store = open(&path, fingerprint, budget);
        assert_eq!(longest(&store, &tokens, 100, false), Some(64));
        assert!(loads(&store, &of(fingerprint)), "each has its own");
    }
    let store = open(&path, TWO, budget);
    store.save(vec![part(TWO, &[5; 64], PartKind::Kv, 20_000)]);
    assert_eq!(
        longest(&store, &tokens, 100, false),
        None,
        "the least recently used is evicted first"
    );
    drop(store);
    assert_eq!(longest(&open(&path, ONE, budget), &tokens, 100, false), Some(64));
}

#[test]
fn report_counts_operations_and_is_available_to_other_threads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let tokens: Vec<u32> = (0..100).collect();
    let saved = parts(ONE, &tokens);
    let bytes: u64 = saved.iter().map(Part::bytes).sum();
    let total: u64 = saved.iter().map(cost).sum();
    let store = open(&path, ONE, total + 10);
    let reporter = store.reporter();
    assert_eq!(store.report().counts, Default::default());
    store.save(saved.clone());
    store.save(saved.clone());
    store.flush().unwrap();
    assert!(loads(&store, &saved[1..]));
    store.save(vec![part(ONE, &[9], PartKind::State, MB as usize)]);
    store.save(vec![part(ONE, &[9], PartKind::Kv, 10)]);
    store.flush().unwrap();
    let report = std::thread::spawn(move || reporter.report()).join().unwrap();
    assert_eq!(report, store.report());
    let counts = report.counts;
    assert_eq!((counts.saves, counts.saved_parts), (2, 4));
    assert_eq!(counts.saved_bytes, bytes + 14);
    assert_eq!(counts.dropped_saves, 1, "the one that exceeds the budget");
    assert_eq!(counts.evicted_parts, 1, "the least recently used of the first three");
    assert_eq!((counts.loads, counts.loaded_parts), (1, 2));
    assert_eq!(counts.loaded_bytes, saved[1].bytes() + saved[2].bytes());
    assert_eq!(counts.damaged_parts, 0);
    assert_eq!((report.rows.parts, report.states.parts, report.others.parts), (2, 1, 0));
    assert_eq!((report.path.as_path(), report.budget_bytes), (path.as_path(), total + 10));
    assert!(report.rows.bytes + report.states.bytes <= total);
    assert!(report.file_bytes > 0 && report.queued_bytes == 0 && report.off.is_none());
}

/// A store as a plain list, least recently used first.
#[derive(Default)]
struct ListStore {
    budget: u64,
    /// Key, cost, retained.
    entries: Vec<(Key, u64, bool)>,
}

impl ListStore {
    fn has(&self, key: &Key) -> bool {
        self.entries.iter().any(|entry| entry.0 == *key)
    }

    fn touch(&mut self, keys: &[Key]) {
        for key in keys.iter().rev() {
            if let Some(place) = self.entries.iter().position(|entry| entry.0 == *key) {
                let entry = self.entries.remove(place);
                self.entries.push(entry);
            }
        }
    }

    fn save(&mut self, parts: &[(Key, u64)]) {
        let retained: u64 = self.entries.iter().filter(|entry| entry.2).map(|entry| entry.1).sum();
        let new = parts.iter().filter(|part| !self.has(&part.0));
        if retained + new.map(|part| part.1).sum::<u64>() <= self.budget {
            for &(key, cost) in parts {
                if !self.has(&key) {
                    self.entries.push((key, cost, false));
                }
            }
        }
        self.touch(&parts.iter().map(|part| part.0).collect::<Vec<_>>());
        while self.entries.iter().map(|entry| entry.1).sum::<u64>() > self.budget {
            let first = self.entries.iter().position(|entry| !entry.2).unwrap();
            self.entries.remove(first);
        }
    }

    fn retain(&mut self, keys: &[Key]) -> bool {
        let retained = |entry: &&(Key, u64, bool)| entry.2 || keys.contains(&entry.0);
        let bytes: u64 = self.entries.iter().filter(retained).map(|entry| entry.1).sum();
        if bytes > self.budget / 2 || !keys.iter().all(|key| self.has(key)) {
            return false;
        }
        self.entries.iter_mut().for_each(|entry| entry.2 |= keys.contains(&entry.0));
        true
    }

    fn longest(
        &self,
        tokens: &[u32],
        fingerprint: Fingerprint,
        needs_state: bool,
    ) -> Option<usize> {
        (1..=tokens.len()).rev().find(|&end| {
            let keys = KeyChain::block_keys(&fingerprint, &tokens[..end]);
            let state = state_key(keys.last().unwrap());
            keys.iter().all(|key| self.has(key)) && (!needs_state || self.has(&state))
        })
    }
}

/// Prefixes of a few sequences that share beginnings, saved whole or in part, under a budget of about
/// twenty parts; the store is closed and reopened under either fingerprint.
#[test]
fn ten_thousand_random_operations_agree_with_a_simple_model() {
    let costs: Vec<u64> = (0..=64)
        .map(|tokens| cost(&part(ONE, &[1], PartKind::Kv, TOKEN_BYTES * tokens)))
        .chain([cost(&part(ONE, &[1], PartKind::State, TOKEN_BYTES * 3 * BLOCK_TOKENS))])
        .collect();
    let cost_of = |part: &Part| match part.kind {
        PartKind::Kv => costs[part.tensors[0].bytes.len() / TOKEN_BYTES],
        PartKind::State => costs[65],
    };
    let hour = seconds() + 3600;
    let mut counts = [0; 8];
    for seed in 0..10 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        let mut random = Random(seed);
        let mut model = ListStore { budget: 20 * costs[64], ..ListStore::default() };
        let mut fingerprint = ONE;
        let mut store = open(&path, fingerprint, model.budget);
        let mut queued = 0;
        for step in 0..1000 {
            let at = format!("step {step} of seed {seed}");
            let mut tokens: Vec<u32> = (0..300).collect();
            tokens[random.of(&[0, 40, 64, 100, 200])] += random.below(2) as u32;
            let length = random.of(&[1, 40, 41, 64, 65, 100, 128, 150, 192, 200, 256, 300]);
            let mut parts = parts(fingerprint, &tokens[..length]);
            // All of it, without the state, or without the first blocks.
            match random.below(4) {
                0 => drop(parts.pop()),
                1 => drop(parts.drain(..random.below(parts.len()))),
                _ => {}
            }
            let keys = keys(&parts);
            match random.below(40) {
                0 => {
                    drop(store);
                    fingerprint = random.of(&[ONE, TWO]);
                    store = open(&path, fingerprint, model.budget);
                    queued = 0;
                }
                1 => {
                    let retained = store.retain(&keys, hour);
                    assert_eq!(retained, model.retain(&keys), "{at}");
                    counts[0] += usize::from(retained);
                }
                2..5 => {
                    store.touch(&keys);
                    model.touch(&keys);
                }
                5..16 => {
                    let known: Vec<_> =
                        parts.iter().map(|part| (part.key, cost_of(part))).collect();
                    model.save(&known);
                    store.save(parts);
                    queued += 1;
                }
                16..26 => {
                    let expected = keys.iter().all(|key| model.has(key));
                    assert_eq!(loads(&store, &parts), expected, "{at}");
                    if expected {
                        model.touch(&keys);
                    }
                    counts[1] += usize::from(expected);
                }
                _ => {
                    let limit = random.below(320);
                    for needs_state in [false, true] {
                        let found = longest(&store, &tokens, limit, needs_state);
                        let tokens = &tokens[..limit.min(tokens.len())];
                        assert_eq!(found, model.longest(tokens, fingerprint, needs_state), "{at}");
                        counts[2 + usize::from(needs_state)] += usize::from(found.is_some());
                    }
                }
            }
            // The queue holds 16; a save beyond that would be dropped.
            if queued == 10 {
                store.flush().unwrap();
                queued = 0;
            }
        }
        let report = store.report();
        let here = report.rows.parts + report.states.parts + report.others.parts;
        assert_eq!(here, model.entries.len() as u64);
        counts[4] += report.counts.evicted_parts as usize;
    }
    eprintln!("retained, loaded, found, with state, evicted: {counts:?}");
    assert!(counts[0] > 10 && counts[1..4].iter().all(|count| *count > 300), "{counts:?}");
}
