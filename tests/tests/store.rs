//! Laws of the store: what every implementation promises, and what the one on disk promises when
//! its process is killed or its disk is full.

use std::collections::HashSet;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use steersman_engine::config::StoreConfig;
use steersman_engine::store::{Fingerprint, MemoryStore, RedbStore, Snapshot, Store, Tensor};

const ONE: Fingerprint = [1; 32];
const TWO: Fingerprint = [2; 32];
const MB: u64 = 1 << 20;

/// How a law opens the store it is tried on: path, fingerprint, budget in bytes.
type Open = fn(&Path, Fingerprint, u64) -> Box<dyn Store>;

fn memory(_: &Path, fingerprint: Fingerprint, budget_bytes: u64) -> Box<dyn Store> {
    Box::new(MemoryStore::new(fingerprint, budget_bytes))
}

fn redb(path: &Path, fingerprint: Fingerprint, budget_bytes: u64) -> Box<dyn Store> {
    let config = StoreConfig { budget_bytes, ..StoreConfig::default() };
    Box::new(RedbStore::open(path, fingerprint, &config).unwrap())
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % bound
    }
}

/// The one snapshot that these tests save under `tokens`, with so many bytes of tensors.
fn snapshot(tokens: &[u32], bytes: usize) -> Snapshot {
    let seed = tokens.iter().fold(7, |sum, token| sum * 31 % 1_000_003 + u64::from(*token));
    let mut random = Random(seed);
    let tensor = |dtype: &str, shape: &[i32], bytes: Vec<u8>| Tensor {
        dtype: dtype.into(),
        shape: shape.into(),
        bytes,
    };
    let most = (0..bytes).map(|_| random.below(256) as u8).collect();
    Snapshot {
        tokens: tokens.to_vec(),
        tensors: vec![
            tensor("BF16", &[1, 2, tokens.len() as i32, 4], most),
            tensor("F32", &[0, 7], vec![]),
            tensor("U32", &[1], vec![tokens.len() as u8, 0, 0, 1]),
        ],
    }
}

#[test]
fn every_store_obeys_the_store_laws() {
    for (name, open) in [("memory", memory as Open), ("redb", redb)] {
        eprintln!("store: {name}");
        let folder = tempfile::tempdir().unwrap();
        let path = |law: &str| folder.path().join(law);
        what_is_saved_is_found_and_loaded_whole(&*open(&path("found"), ONE, 64 * MB));
        the_longest_prefix_within_the_limit_is_found(&*open(&path("longest"), ONE, 64 * MB));
        the_least_recently_used_goes_first(|budget| open(&path("lru"), ONE, budget));
        what_exceeds_the_budget_displaces_nothing(&*open(&path("large"), ONE, MB));
    }
}

fn what_is_saved_is_found_and_loaded_whole(store: &dyn Store) {
    let tokens: Vec<u32> = (0..500).collect();
    let sizes = [(1, 0), (63, 1), (64, 5_000), (65, 1 << 20), (128, 3_000_000), (500, 70_000)];
    assert_eq!(store.longest(&tokens, 500), None);
    for (length, bytes) in sizes {
        store.save(snapshot(&tokens[..length], bytes));
        assert_eq!(store.longest(&tokens, 500), Some(length), "found before it is on disk");
        assert!(store.load(&tokens[..length]) == Some(snapshot(&tokens[..length], bytes)));
    }
    store.flush().unwrap();
    for (length, bytes) in sizes {
        assert!(store.load(&tokens[..length]) == Some(snapshot(&tokens[..length], bytes)));
    }
    assert_eq!(store.load(&tokens[..2]), None);
    assert_eq!(store.load(&[]), None);
}

fn the_longest_prefix_within_the_limit_is_found(store: &dyn Store) {
    let tokens: Vec<u32> = (0..300).map(|i| i * 3).collect();
    let mut branch = tokens.clone();
    branch[150] = 1;
    for prefix in [&tokens[..10], &tokens[..100], &tokens[..200], &branch[..180]] {
        store.save(snapshot(prefix, 10));
    }
    let check = |tokens: &[u32], limit, expected| {
        assert_eq!(store.longest(tokens, limit), expected, "limit {limit}");
    };
    for (limit, expected) in
        [(0, None), (9, None), (10, Some(10)), (99, Some(10)), (100, Some(100))]
    {
        check(&tokens, limit, expected);
        check(&branch, limit, expected);
    }
    check(&tokens, usize::MAX, Some(200));
    check(&tokens[..150], 300, Some(100));
    check(&branch, 300, Some(180));
    check(&branch, 179, Some(100));
    check(&tokens[1..], 300, None);
    check(&[], 300, None);
}

fn the_least_recently_used_goes_first(open: impl FnOnce(u64) -> Box<dyn Store>) {
    let of = |i: u32| snapshot(&[i, i], 10_000);
    let cost = MemoryStore::new(ONE, 0).cost(&of(0)).max(redb_cost(&of(0)));
    let store = open(3 * cost);
    let fits = 3 * cost / store.cost(&of(0));
    let count = fits as u32;
    for i in 0..count {
        store.save(of(i));
    }
    store.flush().unwrap();
    assert!(store.load(&[0, 0]).is_some(), "all fit, and 0 is used now");
    assert_eq!(store.longest(&[1, 1], 2), Some(2), "looking is not using");
    store.save(of(2)); // kept already: counts as used
    store.save(of(90));
    store.flush().unwrap();
    let kept = |i: u32| store.longest(&[i, i], 2).is_some();
    assert!(kept(0) && !kept(1) && kept(2) && kept(90));
    assert_eq!((0..100).filter(|i| kept(*i)).count(), count as usize);
}

fn redb_cost(snapshot: &Snapshot) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    redb(&folder.path().join("cost"), ONE, MB).cost(snapshot)
}

fn what_exceeds_the_budget_displaces_nothing(store: &dyn Store) {
    store.save(snapshot(&[1], 1000));
    store.save(snapshot(&[2], 2 * MB as usize));
    store.flush().unwrap();
    assert_eq!(store.longest(&[2], 1), None);
    assert!(store.load(&[1]).is_some());
}

#[test]
fn another_fingerprint_never_matches_and_shares_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let tokens: Vec<u32> = (0..100).collect();
    let store = redb(&path, ONE, 64 * MB);
    store.save(snapshot(&tokens, 20_000));
    let cost = store.cost(&snapshot(&tokens, 20_000));
    drop(store);

    let store = redb(&path, TWO, cost * 2);
    assert_eq!((store.longest(&tokens, 100), store.load(&tokens)), (None, None));
    store.save(snapshot(&tokens, 20_000));
    drop(store);
    for fingerprint in [ONE, TWO, ONE] {
        let store = redb(&path, fingerprint, cost * 2);
        assert!(store.load(&tokens) == Some(snapshot(&tokens, 20_000)), "each has its own");
    }
    let store = redb(&path, TWO, cost * 2);
    store.save(snapshot(&[5; 100], 20_000));
    assert_eq!(store.longest(&tokens, 100), None, "the least recently used of all goes first");
    drop(store);
    assert_eq!(redb(&path, ONE, cost * 2).longest(&tokens, 100), Some(100));
}

/// What a store is, in the simplest words: a list, least recently used first.
struct Model {
    budget: u64,
    entries: Vec<(Fingerprint, Vec<u32>, u64)>,
}

impl Model {
    fn touch(&mut self, fingerprint: Fingerprint, tokens: &[u32]) -> bool {
        let same =
            |entry: &(Fingerprint, Vec<u32>, u64)| entry.0 == fingerprint && entry.1 == tokens;
        let Some(position) = self.entries.iter().position(same) else { return false };
        let entry = self.entries.remove(position);
        self.entries.push(entry);
        true
    }

    fn save(&mut self, fingerprint: Fingerprint, tokens: &[u32], cost: u64) {
        if self.touch(fingerprint, tokens) || cost > self.budget {
            return;
        }
        self.entries.push((fingerprint, tokens.to_vec(), cost));
        while self.entries.iter().map(|entry| entry.2).sum::<u64>() > self.budget {
            self.entries.remove(0);
        }
    }

    fn longest(&self, fingerprint: Fingerprint, tokens: &[u32], limit: usize) -> Option<usize> {
        let prefixes = self.entries.iter().filter(|entry| {
            entry.0 == fingerprint && entry.1.len() <= limit && tokens.starts_with(&entry.1)
        });
        prefixes.map(|entry| entry.1.len()).max()
    }
}

/// Prefixes of a few sequences that share beginnings, of sizes that make the budget hold about
/// twenty; the store on disk is closed and opened again, under one fingerprint or the other.
#[test]
fn two_thousand_random_operations_agree_with_a_simple_model() {
    for (open, persistent, seed) in [(memory as Open, false, 1), (redb, true, 2)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        let mut random = Random(seed);
        let mut model = Model { budget: 300_000, entries: Vec::new() };
        let mut fingerprint = ONE;
        let mut store = open(&path, fingerprint, model.budget);
        let (mut queued, mut hits) = (0, 0);
        for step in 0..2000 {
            let mut tokens: Vec<u32> = (0..150).collect();
            tokens[[0, 40, 64, 100][random.below(4)]] += random.below(3) as u32;
            let length = [1, 40, 41, 64, 65, 100, 128, 150][random.below(8)];
            let prefix = &tokens[..length];
            let bytes = length * 190;
            match random.below(20) {
                0 if persistent => {
                    drop(store);
                    fingerprint = [ONE, TWO][random.below(2)];
                    store = open(&path, fingerprint, model.budget);
                    queued = 0;
                }
                0..9 => {
                    let snapshot = snapshot(prefix, bytes);
                    model.save(fingerprint, prefix, store.cost(&snapshot));
                    store.save(snapshot);
                    queued += 1;
                }
                9..14 => {
                    let expected = model.touch(fingerprint, prefix);
                    let found = store.load(prefix);
                    assert_eq!(found.is_some(), expected, "step {step} of seed {seed}");
                    assert!(found.is_none_or(|found| found == snapshot(prefix, bytes)));
                    hits += usize::from(expected);
                }
                _ => {
                    let limit = random.below(200);
                    let expected = model.longest(fingerprint, &tokens, limit);
                    assert_eq!(store.longest(&tokens, limit), expected, "step {step}");
                }
            }
            // Fewer than the queue holds, or a save would be dropped.
            if queued == 10 {
                store.flush().unwrap();
                queued = 0;
            }
        }
        assert!(hits > 50, "the law is tried on {hits} hits only");
    }
}

/// Snapshots that a killed child saves: number `i` of any child, 0 to 1.5 MB.
fn numbered(i: u32) -> Snapshot {
    let bytes = [0, 900, 40_000, 300_000, 1_500_000][i as usize % 5];
    snapshot(&[i, 1, 2, 3], bytes)
}

/// Each child saves this many, then waits for its end.
const SAVES: u32 = 300;
const FILE: &str = "STEERSMAN_TEST_STORE_FILE";
const FIRST: &str = "STEERSMAN_TEST_STORE_FIRST";

fn child(name: &str, path: &Path) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]).env(FILE, path);
    command
}

#[test]
#[ignore = "a child of the next test"]
fn child_that_saves_until_it_is_killed() {
    let Ok(path) = env::var(FILE) else { return };
    let first: u32 = env::var(FIRST).unwrap().parse().unwrap();
    let store = redb(path.as_ref(), ONE, 12 * MB);
    println!("\nready");
    for i in first..first + SAVES {
        store.save(numbered(i));
        let _ = store.load(&[first, 1, 2, 3]);
        if i % 4 == 0 {
            store.flush().unwrap();
        }
    }
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_store_whose_process_is_killed_while_saving_opens_and_holds_only_whole_snapshots() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let mut random = Random(9);
    let mut seen = HashSet::new();
    for round in 0..30 {
        let mut child = child("child_that_saves_until_it_is_killed", &path)
            .env(FIRST, (round * SAVES).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        assert!(output.lines().any(|line| line.unwrap() == "ready"));
        thread::sleep(Duration::from_micros(random.below(150_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();

        let store = redb(&path, ONE, 12 * MB);
        for i in 0..(round + 1) * SAVES {
            let tokens = [i, 1, 2, 3];
            if store.longest(&tokens, 4) == Some(4) {
                assert!(store.load(&tokens) == Some(numbered(i)), "snapshot {i}");
                seen.insert(i);
            }
        }
    }
    let files = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 1, "nothing had to be moved aside");
    assert!(seen.len() > 30, "only {} snapshots survived", seen.len());
}

#[test]
#[ignore = "a child of the next test"]
fn child_whose_files_cannot_grow() {
    let Ok(path) = env::var(FILE) else { return };
    let store = redb(path.as_ref(), ONE, 64 * MB);
    for i in 0..60 {
        store.save(snapshot(&[i], 100_000));
        if store.flush().is_err() {
            break;
        }
    }
    let problem = store.flush().unwrap_err().to_string();
    assert!(problem.starts_with("state store: "), "{problem}");
    let kept: Vec<u32> = (0..60).filter(|i| store.longest(&[*i], 1).is_some()).collect();
    assert!(kept.len() > 3, "{kept:?}");
    for i in kept {
        assert!(store.load(&[i]) == Some(snapshot(&[i], 100_000)), "{i} loads all the same");
    }
    store.save(snapshot(&[99], 10));
    assert_eq!(store.longest(&[99], 1), None, "nothing more is saved");
}

/// A limit on file sizes stands in for a full disk: both end a write in the middle.
#[test]
#[cfg(unix)]
fn a_full_disk_turns_saving_off_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let limited = child("child_whose_files_cannot_grow", &path);
    let status = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 4000; exec \"$0\" \"$@\""])
        .arg(limited.get_program())
        .args(limited.get_args())
        .env(FILE, &path)
        .status()
        .unwrap();
    assert!(status.success());
    let store = redb(&path, ONE, 64 * MB);
    assert!(store.load(&[0]) == Some(snapshot(&[0], 100_000)), "the next start has it");
    store.save(snapshot(&[99], 10));
    store.flush().unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
