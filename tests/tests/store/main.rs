//! Laws of the store on disk: what is saved is found, whole, and forgotten in the right order.

mod killed;
mod maintenance;

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use steersman_engine::config::StoreConfig;
use steersman_engine::store::{
    BLOCK_TOKENS, Fingerprint, Key, Keys, Kind, Part, RedbStore, Tensor, state_key,
};
use steersman_tests::Random;

const ONE: Fingerprint = [1; 32];
const TWO: Fingerprint = [2; 32];
const MB: u64 = 1 << 20;

fn open(path: &Path, fingerprint: Fingerprint, budget_bytes: u64) -> RedbStore {
    let config = StoreConfig { budget_bytes, ..StoreConfig::default() };
    RedbStore::open(path, fingerprint, &config).unwrap()
}

/// The tensors of the one part that these tests save under `key`, with so many bytes.
fn tensors(key: &Key, bytes: usize) -> Vec<Tensor> {
    let mut random = Random(u64::from_le_bytes(key[..8].try_into().unwrap()));
    let tensor = |dtype: &str, shape: &[i32], bytes: Vec<u8>| Tensor {
        dtype: dtype.into(),
        shape: shape.into(),
        bytes,
    };
    let most = (0..bytes).map(|_| random.below(256) as u8).collect();
    vec![
        tensor("BF16", &[1, 2, bytes as i32, 4], most),
        tensor("F32", &[0, 7], vec![]),
        tensor("U32", &[1], key[..4].to_vec()),
    ]
}

/// The part of that kind at the end of `tokens`: rows of one block, or a state.
fn part(fingerprint: Fingerprint, tokens: &[u32], kind: Kind, bytes: usize) -> Part {
    let rows = Keys::of(&fingerprint, tokens);
    let key = if kind == Kind::Rows { rows } else { state_key(&rows) };
    Part { key, kind, end: tokens.len(), tensors: tensors(&key, bytes) }
}

/// Rows take so many bytes a token, a state as many as three blocks.
const ROW: usize = 100;

/// All rows of `tokens`, and behind them its state.
fn parts(fingerprint: Fingerprint, tokens: &[u32]) -> Vec<Part> {
    let mut parts = Vec::new();
    for start in (0..tokens.len()).step_by(BLOCK_TOKENS) {
        let end = tokens.len().min(start + BLOCK_TOKENS);
        parts.push(part(fingerprint, &tokens[..end], Kind::Rows, ROW * (end - start)));
    }
    parts.push(part(fingerprint, tokens, Kind::State, ROW * 3 * BLOCK_TOKENS));
    parts
}

fn keys(parts: &[Part]) -> Vec<Key> {
    parts.iter().map(|part| part.key).collect()
}

/// Whether the store has all of `parts` and gives them back as they were.
fn loads(store: &RedbStore, parts: &[Part]) -> bool {
    let Some(loaded) = store.load(&keys(parts)) else { return false };
    assert!(loaded.iter().zip(parts).all(|(tensors, part)| *tensors == part.tensors));
    loaded.len() == parts.len()
}

/// What a part of so many bytes takes of the budget.
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
fn what_is_saved_is_found_and_loaded_whole_before_and_after_it_is_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("state.redb"), ONE, 64 * MB);
    let tokens: Vec<u32> = (0..500).collect();
    let sizes = [(1, 0), (63, 1), (64, 5_000), (65, 1 << 20), (128, 3_000_000), (500, 700_000)];
    let saved: Vec<Part> = sizes
        .iter()
        .flat_map(|&(length, bytes)| {
            [Kind::Rows, Kind::State].map(|kind| part(ONE, &tokens[..length], kind, bytes))
        })
        .collect();
    for part in &saved {
        assert!(!store.contains(&part.key));
        store.save(vec![part.clone()]);
        assert!(store.contains(&part.key) && loads(&store, std::slice::from_ref(part)));
    }
    store.flush().unwrap();
    assert!(loads(&store, &saved), "all at once, and in the order asked for");
    let missing = part(ONE, &tokens[..2], Kind::Rows, 3);
    assert_eq!(store.load(&[saved[0].key, missing.key]), None);
    assert_eq!(store.load(&[]), Some(vec![]));
}

#[test]
fn the_longest_prefix_is_the_one_that_lacks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("state.redb"), ONE, 64 * MB);
    let tokens: Vec<u32> = (0..400).map(|i| i * 3).collect();
    let mut branch = tokens.clone();
    branch[150] = 1;
    let check = |tokens: &[u32], limit, rows: usize, state: usize| {
        let found = [store.longest(tokens, limit, false), store.longest(tokens, limit, true)];
        assert_eq!(found.map(Option::unwrap_or_default), [rows, state], "limit {limit}");
    };
    check(&tokens, 400, 0, 0);
    for end in [10, 100, 200] {
        store.save(parts(ONE, &tokens[..end]));
    }
    store.save(parts(ONE, &branch[..180]));
    // Rows without a state, a state without rows, and rows behind a gap.
    store.save(parts(ONE, &tokens[..256])[..4].to_vec());
    store.save(vec![part(ONE, &tokens[..300], Kind::State, 10)]);
    store.save(vec![part(ONE, &tokens[..384], Kind::Rows, 10)]);

    for (limit, rows, state) in [
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
        check(&tokens, limit, rows, state);
    }
    check(&tokens[..150], 300, 128, 100);
    check(&branch, 300, 180, 180);
    check(&branch, 179, 128, 100);
    check(&tokens[1..], 300, 0, 0);
    check(&[], 300, 0, 0);
}

#[test]
fn the_least_recently_used_goes_first_and_looking_is_not_using() {
    let folder = tempfile::tempdir().unwrap();
    let of = |i: u32| vec![part(ONE, &[i], Kind::State, 10_000)];
    let store = open(&folder.path().join("state.redb"), ONE, 4 * cost(&of(0)[0]));
    for i in 0..4 {
        store.save(of(i));
    }
    store.flush().unwrap();
    assert!(loads(&store, &of(0)));
    assert!(store.contains(&of(1)[0].key));
    store.touch(&keys(&of(2)));
    store.save(of(90));
    store.save(of(3)); // here already: counts as used, and is not written again
    store.save(of(91));
    store.flush().unwrap();
    let kept: Vec<u32> = (0..100).filter(|i| store.contains(&of(*i)[0].key)).collect();
    assert_eq!(kept, [2, 3, 90, 91]);
    assert_eq!(store.report().counts.saved_parts, 6);
}

/// Whatever is left of a prefix can be resumed from: state goes before the rows that it needs, late
/// blocks before early ones.
#[test]
fn eviction_of_half_of_the_parts_leaves_shorter_prefixes() {
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
        let rows = store.longest(&long, 1600, false).unwrap_or(0);
        let state = store.longest(&long, 1600, true);
        let count = rows.div_ceil(BLOCK_TOKENS);
        assert!(loads(&store, &saved[..count]), "what is named loads, at {budget}");
        assert_eq!(store.report().rows.parts, count as u64, "rows are left that nobody can reach");
        let share = budget as f64 / all as f64;
        assert!(share < 0.2 || rows as f64 > 1600.0 * 0.7 * share, "{rows} rows at {budget}");
        let expected = (budget >= all / 2).then_some(640);
        assert_eq!(state, expected, "the longer one's state goes first, then rows behind 640");
    }
}

#[test]
fn what_exceeds_the_budget_is_dropped_whole_and_displaces_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("state.redb"), ONE, MB);
    let small = part(ONE, &[1], Kind::Rows, 1000);
    let half = |i: u32| part(ONE, &[i], Kind::Rows, 500_000);
    store.save(vec![small.clone()]);
    store.save(vec![half(2), half(3)]);
    store.flush().unwrap();
    assert!(!store.contains(&half(2).key) && !store.contains(&half(3).key));
    assert!(loads(&store, &[small]));
    assert_eq!(store.report().counts.dropped_saves, 1);
}

#[test]
fn what_is_pinned_stays_until_its_time_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let of = |i: u32| part(ONE, &[i], Kind::Rows, 10_000);
    let (a, b, c) = (of(1), of(2), of(3));
    let budget = 4 * cost(&a);
    let store = open(&path, ONE, budget);
    store.save(vec![a.clone(), b.clone(), c.clone()]);
    let hour = seconds() + 3600;
    assert!(!store.pin(&[a.key, of(4).key], hour), "one of them is not here");
    assert!(!store.pin(&[a.key], seconds() - 1), "that is past");
    assert!(!store.pin(&[a.key, b.key, c.key], hour), "more than half of the budget");
    assert_eq!(store.report().pinned.parts, 0, "all or nothing");
    assert!(store.pin(&[a.key, b.key, a.key], hour));
    assert!(store.pin(&[a.key], seconds() + 1), "does not end the longer time");
    assert!(!store.pin(&[c.key], hour));
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
    assert_eq!(store.report().pinned.parts, 2);
    churn(&store);
    drop(store);
    let store = open(&path, ONE, budget);
    assert!(loads(&store, &[a.clone(), b.clone()]));
    drop(store);

    // Half of a smaller budget holds one of them, and one is not pinned any more.
    let store = open(&path, ONE, budget / 2);
    assert_eq!(store.report().pinned.parts, 1);
    drop(store);

    let other = folder.path().join("other.redb");
    let store = open(&other, ONE, budget);
    store.save(vec![a.clone()]);
    assert!(store.pin(&[a.key], seconds() + 1));
    std::thread::sleep(std::time::Duration::from_millis(2100));
    churn(&store);
    assert!(!store.contains(&a.key), "its time has come");
}

#[test]
fn another_fingerprint_never_matches_and_shares_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let tokens: Vec<u32> = (0..64).collect();
    let of = |fingerprint| vec![part(fingerprint, &tokens, Kind::Rows, 20_000)];
    let budget = 2 * cost(&of(ONE)[0]);
    let store = open(&path, ONE, budget);
    store.save(of(ONE));
    drop(store);
    let store = open(&path, TWO, budget);
    assert_eq!(store.longest(&tokens, 100, false), None);
    assert_eq!((store.report().rows.parts, store.report().others.parts), (0, 1));
    store.save(of(TWO));
    drop(store);
    for fingerprint in [ONE, TWO, ONE] {
        let store = open(&path, fingerprint, budget);
        assert_eq!(store.longest(&tokens, 100, false), Some(64));
        assert!(loads(&store, &of(fingerprint)), "each has its own");
    }
    let store = open(&path, TWO, budget);
    store.save(vec![part(TWO, &[5; 64], Kind::Rows, 20_000)]);
    assert_eq!(store.longest(&tokens, 100, false), None, "the least recently used goes first");
    drop(store);
    assert_eq!(open(&path, ONE, budget).longest(&tokens, 100, false), Some(64));
}

#[test]
fn the_report_counts_what_was_done_and_can_be_asked_for_from_elsewhere() {
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
    store.save(vec![part(ONE, &[9], Kind::State, MB as usize)]);
    store.save(vec![part(ONE, &[9], Kind::Rows, 10)]);
    store.flush().unwrap();
    let report = std::thread::spawn(move || reporter.report()).join().unwrap();
    assert_eq!(report, store.report());
    let counts = report.counts;
    assert_eq!((counts.saves, counts.saved_parts), (2, 4));
    assert_eq!(counts.saved_bytes, bytes + 14);
    assert_eq!(counts.dropped_saves, 1, "what exceeds the budget");
    assert_eq!(counts.evicted_parts, 1, "the least recently used of the first three");
    assert_eq!((counts.loads, counts.loaded_parts), (1, 2));
    assert_eq!(counts.loaded_bytes, saved[1].bytes() + saved[2].bytes());
    assert_eq!(counts.damaged_parts, 0);
    assert_eq!((report.rows.parts, report.states.parts, report.others.parts), (2, 1, 0));
    assert_eq!((report.path.as_path(), report.budget_bytes), (path.as_path(), total + 10));
    assert!(report.rows.bytes + report.states.bytes <= total);
    assert!(report.file_bytes > 0 && report.queued_bytes == 0 && report.off.is_none());
}

/// What a store is, in the simplest words: a list, least recently used first.
#[derive(Default)]
struct Model {
    budget: u64,
    /// Key, cost, pinned.
    entries: Vec<(Key, u64, bool)>,
}

impl Model {
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
        let pinned: u64 = self.entries.iter().filter(|entry| entry.2).map(|entry| entry.1).sum();
        let new = parts.iter().filter(|part| !self.has(&part.0));
        if pinned + new.map(|part| part.1).sum::<u64>() <= self.budget {
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

    fn pin(&mut self, keys: &[Key]) -> bool {
        let pinned = |entry: &&(Key, u64, bool)| entry.2 || keys.contains(&entry.0);
        let bytes: u64 = self.entries.iter().filter(pinned).map(|entry| entry.1).sum();
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
            let keys = Keys::of_blocks(&fingerprint, &tokens[..end]);
            let state = state_key(keys.last().unwrap());
            keys.iter().all(|key| self.has(key)) && (!needs_state || self.has(&state))
        })
    }
}

/// Prefixes of a few sequences that share beginnings, saved whole or in part, of sizes that make
/// the budget hold about twenty parts; the store is closed and opened again, under one fingerprint
/// or the other.
#[test]
fn ten_thousand_random_operations_agree_with_a_simple_model() {
    let costs: Vec<u64> = (0..=64)
        .map(|tokens| cost(&part(ONE, &[1], Kind::Rows, ROW * tokens)))
        .chain([cost(&part(ONE, &[1], Kind::State, ROW * 3 * BLOCK_TOKENS))])
        .collect();
    let cost_of = |part: &Part| match part.kind {
        Kind::Rows => costs[part.tensors[0].bytes.len() / ROW],
        Kind::State => costs[65],
    };
    let hour = seconds() + 3600;
    let mut counts = [0; 8];
    for seed in 0..10 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        let mut random = Random(seed);
        let mut model = Model { budget: 20 * costs[64], ..Model::default() };
        let mut fingerprint = ONE;
        let mut store = open(&path, fingerprint, model.budget);
        let mut queued = 0;
        for step in 0..1000 {
            let at = format!("step {step} of seed {seed}");
            let mut tokens: Vec<u32> = (0..300).collect();
            tokens[random.of(&[0, 40, 64, 100, 200])] += random.below(2) as u32;
            let length = random.of(&[1, 40, 41, 64, 65, 100, 128, 150, 192, 200, 256, 300]);
            let mut parts = parts(fingerprint, &tokens[..length]);
            // All of it, without the state, or what is behind some block.
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
                    let pinned = store.pin(&keys, hour);
                    assert_eq!(pinned, model.pin(&keys), "{at}");
                    counts[0] += usize::from(pinned);
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
                        let found = store.longest(&tokens, limit, needs_state);
                        let tokens = &tokens[..limit.min(tokens.len())];
                        assert_eq!(found, model.longest(tokens, fingerprint, needs_state), "{at}");
                        counts[2 + usize::from(needs_state)] += usize::from(found.is_some());
                    }
                }
            }
            // Fewer than the queue holds, or a save would be dropped.
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
    eprintln!("pinned, loaded, found, with state, evicted: {counts:?}");
    assert!(counts[0] > 10 && counts[1..4].iter().all(|count| *count > 300), "{counts:?}");
}
