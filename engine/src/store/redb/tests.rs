//! Tests that need the store's internals: damage inside a part, and a stalled writer.

use std::fs;
use std::sync::mpsc;

use ::redb::{ReadableDatabase, ReadableTableMetadata};
use tempfile::TempDir;

use super::super::record::CHUNK_BYTES;
use super::super::{BLOCK_TOKENS, KeyChain, Layout, Part, PartKind, format, state_key};
use super::database::CHUNKS;
use super::*;

const FINGERPRINT: Fingerprint = [3; 32];

fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *seed >> 33
}

/// The part with this name: KV of one token.
fn part(name: u32, bytes: usize) -> Part {
    let mut seed = u64::from(name);
    let bytes = (0..bytes).map(|_| random(&mut seed) as u8).collect();
    let tensors = vec![Tensor { dtype: "U8".into(), shape: vec![1], bytes }];
    Part { key: key(name), kind: PartKind::Kv, end: 1, tensors }
}

fn key(name: u32) -> Key {
    KeyChain::key_of(&FINGERPRINT, &[name])
}

/// KV of three blocks, the last one short, and the state after them: `bytes` of tensors each.
fn prefix(bytes: usize) -> (Vec<u32>, Vec<Part>) {
    let tokens: Vec<u32> = (0..150).collect();
    let keys = KeyChain::block_keys(&FINGERPRINT, &tokens);
    let state = state_key(&keys[2]);
    let mut parts = Vec::new();
    for (i, key) in (0..).zip(keys.into_iter().chain([state])) {
        let end = 150.min((i as usize + 1) * BLOCK_TOKENS);
        let kind = if key == state { PartKind::State } else { PartKind::Kv };
        parts.push(Part { key, kind, end, ..part(900 + i, bytes) });
    }
    (tokens, parts)
}

fn open(folder: &TempDir) -> RedbStore {
    open_with(folder, 1 << 30)
}

fn open_with(folder: &TempDir, budget_bytes: u64) -> RedbStore {
    let config = StoreConfig { budget_bytes, ..StoreConfig::default() };
    RedbStore::open(&folder.path().join("state.redb"), FINGERPRINT, &config).unwrap()
}

fn longest(store: &RedbStore, tokens: &[u32], needs_state: bool) -> Option<usize> {
    store.longest(tokens, 150, needs_state).map(|prefix| prefix.tokens)
}

/// Whether this part loads.
fn has(store: &RedbStore, part: &Part) -> bool {
    let loaded = store.load(&[part.key]);
    assert!(loaded.is_none() || loaded == Some(vec![part.tensors.clone()]), "loads another part");
    loaded.is_some()
}

/// Flips a bit of the byte `at` of each occurrence of `pattern` in the file: redb copies what it
/// changes, so a part may occur more than once.
fn flip(path: &Path, pattern: &[u8], at: usize) {
    let mut bytes = fs::read(path).unwrap();
    let windows = bytes.windows(pattern.len()).enumerate();
    let places: Vec<usize> =
        windows.filter(|(_, window)| *window == pattern).map(|(place, _)| place).collect();
    assert!(!places.is_empty(), "not in the file");
    for place in places {
        bytes[place + at] ^= 4;
    }
    fs::write(path, bytes).unwrap();
}

/// Encoded record of a part.
fn record_bytes(store: &RedbStore, key: &Key) -> Vec<u8> {
    store.shared.state.lock().index.get(key).unwrap().record.to_bytes(key).to_vec()
}

/// In KV and state, in their records, heads, elements and checksums: the part is a miss, everything
/// else is there, and the part can be saved again.
#[test]
fn flipped_bit_costs_one_part_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let bytes = CHUNK_BYTES as usize + 9000;
    let (tokens, parts) = prefix(bytes);
    let store = open(&folder);
    store.save(parts.clone());
    store.flush().unwrap();
    drop(store);
    // A block in the middle, and the state: the prefix that remains without them.
    for (damaged, rest, states) in [(1, Some(64), None), (3, Some(150), None)] {
        let part = &parts[damaged];
        let elements = &part.tensors[0].bytes;
        let mut encoded = Vec::new();
        std::io::Read::read_to_end(&mut format::encode(&part.key, &part.tensors), &mut encoded)
            .unwrap();
        let record = record_bytes(&open(&folder), &part.key);
        let end = encoded.len();
        let mut cases = vec![
            ("magic", encoded[..80].to_vec(), 0),
            ("number of tensors", encoded[..80].to_vec(), 32),
            ("first element", elements[..40].to_vec(), 0),
            ("first chunk", elements[500_000..500_040].to_vec(), 7),
            ("last chunk", elements[bytes - 40..].to_vec(), 39),
            ("checksum", encoded[end - 40..].to_vec(), 35),
        ];
        cases.extend((0..80).step_by(7).map(|at| ("record", record.clone(), at)));
        for (place, pattern, at) in cases {
            // A record changes with each use.
            let pattern = match place {
                "record" => record_bytes(&open(&folder), &part.key),
                _ => pattern,
            };
            flip(&path, &pattern, at);
            let store = open(&folder);
            for (i, other) in parts.iter().enumerate() {
                assert_eq!(has(&store, other), i != damaged, "{place} of {damaged}: {i}");
            }
            assert_eq!(longest(&store, &tokens, false), rest, "{place}");
            assert_eq!(longest(&store, &tokens, true), states, "{place}");
            assert_eq!(store.report().counts.damaged_parts, 1, "{place}");
            store.save(vec![part.clone()]);
            store.flush().unwrap();
            assert!(has(&store, part), "saved again");
            assert_eq!(longest(&store, &tokens, true), Some(150));
        }
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no file was set aside");
    assert_eq!(chunks_in(&path), 4 * 3, "no chunks of damaged parts are left");
}

fn chunks_in(path: &Path) -> u64 {
    let database = Database::create(path).unwrap();
    let chunks = database.begin_read().unwrap().open_table(CHUNKS).unwrap();
    chunks.len().unwrap()
}

#[test]
fn full_queue_drops_the_newest_save_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    let stalled = store.shared.database.write();
    let saves = QUEUE_SAVES as u32 + 24;
    for name in 0..saves {
        store.save(vec![part(2 * name, 100), part(2 * name + 1, 100)]);
    }
    let last = 2 * saves - 1;
    let count = |store: &RedbStore| (0..=last).filter(|name| store.contains(&key(*name))).count();
    assert_eq!(count(&store), 2 * QUEUE_SAVES);
    assert_eq!(store.report().queued_bytes, 200 * QUEUE_SAVES as u64);
    drop(stalled);
    store.flush().unwrap();
    let counts = store.report().counts;
    assert_eq!((counts.saves, counts.dropped_saves), (QUEUE_SAVES as u64, 24));
    assert_eq!(store.report().queued_bytes, 0);
    store.save(vec![part(last, 100)]);
    assert_eq!(count(&store), 2 * QUEUE_SAVES + 1);
}

/// `part`, whose elements are what `read` returns.
fn later(
    part: &Part,
    read: impl FnOnce() -> Result<Vec<u8>, String> + Send + 'static,
) -> QueuedPart {
    let Tensor { dtype, shape, bytes } = part.tensors[0].clone();
    let layouts = vec![Layout { dtype, shape, bytes: bytes.len() }];
    QueuedPart::later((part.key, part.kind, part.end), layouts, read)
}

/// A save that waited for the device stopped all running requests.
#[test]
fn saving_does_not_wait_until_the_elements_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    let part = part(1, 3000);
    let (device, elements) = mpsc::channel();
    store.save(vec![later(&part, move || Ok(elements.recv().unwrap()))]);
    assert!(store.contains(&part.key));
    device.send(part.tensors[0].bytes.clone()).unwrap();
    assert!(has(&store, &part), "a load reads or waits for the writer");
    store.flush().unwrap();
    drop(store);
    assert!(has(&open(&folder), &part), "the file has it");
}

#[test]
fn part_that_cannot_be_read_is_dropped_and_the_store_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    let (tokens, parts) = prefix(500);
    let failing = |i: usize| later(&parts[i], || Err("device lost".into()));
    // The state cannot be read by the writer, the second block not by a load.
    store.save(vec![parts[0].clone().into(), parts[1].clone().into(), failing(3)]);
    store.flush().unwrap();
    assert_eq!(longest(&store, &tokens, false), Some(128));
    assert!(!store.contains(&parts[3].key));
    let stalled = store.shared.database.write();
    store.save(vec![failing(2)]);
    let loaded = std::thread::scope(|scope| {
        let load = scope.spawn(|| store.load(&[parts[2].key]));
        drop(stalled);
        load.join().unwrap()
    });
    assert_eq!(loaded, None);
    store.flush().unwrap();
    assert_eq!(longest(&store, &tokens, false), Some(128), "a lost part is found no more");
    assert_eq!(store.report().counts.damaged_parts, 2);
    store.save(parts.clone());
    store.flush().unwrap();
    assert_eq!(longest(&store, &tokens, true), Some(150));
    drop(store);
    assert_eq!(longest(&open(&folder), &tokens, true), Some(150));
}

/// A part can be evicted while it is queued, and saved again: it is in the file in the end.
#[test]
fn part_evicted_from_the_queue_and_saved_again_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_with(&folder, 5 * cost(format::encoded_len(&part(0, 3000).tensors)));
    let stalled = store.shared.database.write();
    for name in [1, 2, 3, 4, 5, 6, 7, 1, 8, 2] {
        store.save(vec![part(name, 3000)]);
    }
    drop(stalled);
    drop(store);
    let store = open(&folder);
    let found: Vec<u32> = (0..10).filter(|name| has(&store, &part(*name, 3000))).collect();
    assert_eq!(found, [1, 2, 6, 7, 8]);
    drop(store);
    assert_eq!(chunks_in(&folder.path().join("state.redb")), 5);
}

/// Sizes from 1 kB to 3 MB, three times the budget in all: redb reuses freed pages.
#[test]
fn file_stays_within_its_budget_and_shrinks_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let budget = 24 << 20;
    let store = open_with(&folder, budget);
    let (mut seed, mut largest) = (5, 0);
    for i in 0..120 {
        let bytes = 1000 << (random(&mut seed) % 12);
        store.save(vec![part(i, bytes as usize + random(&mut seed) as usize % 1_000_000)]);
        store.flush().unwrap();
        largest = largest.max(store.report().file_bytes);
        assert!(store.shared.state.lock().index.bytes() <= budget);
    }
    drop(store);
    eprintln!("{:.2} times the budget", largest as f64 / budget as f64);
    // A transaction writes new pages before the old ones are free.
    assert!(largest <= budget + budget / 100, "{largest} bytes for a budget of {budget}");
    let small = 2 << 20;
    drop(open_with(&folder, small));
    let after = size_on_disk(&path);
    assert!(after <= small, "{after} bytes for a budget of {small}");
}
