//! What only this room can try: damage behind the store's back.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use ::redb::{ReadableDatabase, ReadableTable, TableDefinition};
use tempfile::TempDir;

use super::super::Tensor;
use super::database::CHUNK_BYTES;
use super::*;

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const ENTRIES: TableDefinition<&Key, &[u8]> = TableDefinition::new("entries");
const CHUNKS: TableDefinition<(&Key, u32), &[u8]> = TableDefinition::new("chunks");
const FINGERPRINT: Fingerprint = [3; 32];

fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *seed >> 33
}

/// The snapshot that is saved under `tokens` in all of these tests.
fn snapshot(tokens: &[u32], bytes: usize) -> Snapshot {
    let mut seed = u64::from(tokens.iter().sum::<u32>());
    let bytes = (0..bytes).map(|_| random(&mut seed) as u8).collect();
    Snapshot {
        tokens: tokens.to_vec(),
        tensors: vec![Tensor { dtype: "U8".into(), shape: vec![1], bytes }],
    }
}

fn open(folder: &TempDir) -> RedbStore {
    open_with(folder, 1 << 30)
}

fn open_with(folder: &TempDir, budget_bytes: u64) -> RedbStore {
    let config = StoreConfig { budget_bytes, ..StoreConfig::default() };
    RedbStore::open(&folder.path().join("state.redb"), FINGERPRINT, &config).unwrap()
}

/// A closed store with snapshots at 1, 2 .. `count` tokens.
fn folder_with(count: u32, bytes: usize) -> (TempDir, Vec<u32>) {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    let tokens: Vec<u32> = (1..=count).collect();
    for length in 1..=tokens.len() {
        store.save(snapshot(&tokens[..length], bytes));
        store.flush().unwrap();
    }
    (folder, tokens)
}

fn damaged_files(folder: &TempDir) -> usize {
    let names = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().contains(".damaged-")).count()
}

/// Every bit of a record and of both ends and the middle of each row, one at a time.
#[test]
fn a_flipped_bit_in_any_record_or_row_is_a_miss_and_the_entry_is_dropped() {
    let bytes = CHUNK_BYTES + 1000;
    let (folder, tokens) = folder_with(2, bytes);
    let path = folder.path().join("state.redb");
    let key = Keys::of(&FINGERPRINT, &tokens[..1]);
    let places = [(0, 0), (0, 20), (0, 60), (0, CHUNK_BYTES / 2), (0, CHUNK_BYTES - 1), (1, 500)];
    let rows = places.map(|(row, at)| (Some(row), at));
    for (row, at) in [(None, 0), (None, 33), (None, 45), (None, 60)].into_iter().chain(rows) {
        {
            let database = Database::create(&path).unwrap();
            let write = database.begin_write().unwrap();
            {
                let mut entries = write.open_table(ENTRIES).unwrap();
                let mut chunks = write.open_table(CHUNKS).unwrap();
                let value = match row {
                    None => entries.get(&key).unwrap().unwrap().value().to_vec(),
                    Some(row) => chunks.get((&key, row)).unwrap().unwrap().value().to_vec(),
                };
                let mut value = value;
                value[at] ^= 4;
                match row {
                    None => drop(entries.insert(&key, value.as_slice()).unwrap()),
                    Some(row) => drop(chunks.insert((&key, row), value.as_slice()).unwrap()),
                }
            }
            write.commit().unwrap();
        }
        let store = open(&folder);
        assert_eq!(store.load(&tokens[..1]), None, "{row:?} at {at}");
        assert_eq!(store.longest(&tokens, 1), None, "still listed: {row:?} at {at}");
        assert_eq!(store.load(&tokens), Some(snapshot(&tokens, bytes)), "the other one");
        drop(store);
        assert_eq!(rows_of(&path, &key), 0, "rows left: {row:?} at {at}");
        let store = open(&folder);
        store.save(snapshot(&tokens[..1], bytes));
        store.flush().unwrap();
        assert_eq!(store.load(&tokens[..1]), Some(snapshot(&tokens[..1], bytes)), "saved again");
    }
    assert_eq!(damaged_files(&folder), 0);
}

fn rows_of(path: &Path, key: &Key) -> usize {
    let database = Database::create(path).unwrap();
    let chunks = database.begin_read().unwrap().open_table(CHUNKS).unwrap();
    chunks.range((key, 0)..=(key, u32::MAX)).unwrap().count()
}

#[test]
fn a_missing_row_is_a_miss() {
    let (folder, tokens) = folder_with(2, 2 * CHUNK_BYTES);
    let key = Keys::of(&FINGERPRINT, &tokens);
    let database = Database::create(folder.path().join("state.redb")).unwrap();
    let write = database.begin_write().unwrap();
    write.open_table(CHUNKS).unwrap().remove((&key, 1)).unwrap();
    write.commit().unwrap();
    drop(database);
    let store = open(&folder);
    assert_eq!(store.longest(&tokens, 9), Some(2));
    assert_eq!(store.load(&tokens), None);
    assert_eq!(store.longest(&tokens, 9), Some(1));
}

/// The file's own pages, which redb trusts: whatever happens, what loads is right, and the next
/// start has a store that works. (Of 8,000 such rounds none failed; 540 ended with the file moved
/// aside.)
#[test]
fn flipped_bits_anywhere_in_the_file_never_yield_a_wrong_snapshot() {
    let (folder, tokens) = folder_with(6, 3000);
    let path = folder.path().join("state.redb");
    let original = fs::read(&path).unwrap();
    let (mut seed, mut loaded, mut anew) = (11, 0, 0);
    for round in 0..150 {
        let mut bytes = original.clone();
        // The first pages are redb's header and roots: half of the damage goes there.
        let extent = if round % 2 == 0 { 16 * 4096 } else { bytes.len() };
        for _ in 0..1 + round % 8 {
            let at = random(&mut seed) as usize % extent.min(bytes.len());
            bytes[at] ^= 1 << (random(&mut seed) % 8);
        }
        fs::write(&path, &bytes).unwrap();
        let store = open(&folder);
        for length in 1..=tokens.len() {
            if let Some(found) = store.load(&tokens[..length]) {
                assert!(found == snapshot(&tokens[..length], 3000), "round {round}");
                loaded += 1;
            }
        }
        let _ = store.flush();
        drop(store);
        let store = open(&folder);
        // The first save may be what meets the damage, and is lost then.
        store.save(snapshot(&[76; 9], 3000));
        let _ = store.flush();
        store.save(snapshot(&[77; 9], 3000));
        assert!(store.flush().is_ok(), "round {round}");
        assert!(store.load(&[77; 9]) == Some(snapshot(&[77; 9], 3000)), "round {round}");
        drop(store);
        anew += damaged_files(&folder);
        for n in 1..=3 {
            let _ = fs::remove_file(folder.path().join(format!("state.redb.damaged-{n}")));
        }
    }
    eprintln!("{loaded} of 900 loaded, {anew} files moved aside");
    assert!(loaded > 450 && anew > 0);
}

#[test]
fn a_truncated_file_is_moved_aside_or_repaired_but_never_an_error() {
    let (folder, tokens) = folder_with(6, 3000);
    let path = folder.path().join("state.redb");
    let original = fs::read(&path).unwrap();
    for length in [0, 1, 100, 320, 4096, 8192, 40_000, original.len() / 2, original.len() - 1] {
        fs::write(&path, &original[..length]).unwrap();
        let store = open(&folder);
        for length in 1..=tokens.len() {
            let found = store.load(&tokens[..length]);
            assert!(found.is_none_or(|found| found == snapshot(&tokens[..length], 3000)));
        }
        store.save(snapshot(&[77; 9], 3000));
        let _ = store.flush();
    }
    assert!((1..=3).contains(&damaged_files(&folder)), "bounded, however often it happens");
}

#[test]
fn a_file_of_another_format_is_moved_aside() {
    let (folder, tokens) = folder_with(2, 100);
    let path = folder.path().join("state.redb");
    let database = Database::create(&path).unwrap();
    let write = database.begin_write().unwrap();
    write.open_table(META).unwrap().insert("format", 99).unwrap();
    write.commit().unwrap();
    drop(database);
    let store = open(&folder);
    assert_eq!(store.longest(&tokens, 9), None);
    assert_eq!(damaged_files(&folder), 1);
    drop(store);
    fs::write(&path, "not a database at all").unwrap();
    assert_eq!(open(&folder).longest(&tokens, 9), None);
    assert_eq!(damaged_files(&folder), 2);
}

#[test]
fn a_second_store_on_the_file_is_refused_in_plain_words() {
    let (folder, _) = folder_with(1, 100);
    let path = folder.path().join("state.redb");
    let _first = open(&folder);
    let second = RedbStore::open(&path, FINGERPRINT, &StoreConfig::default());
    let message = second.err().unwrap().to_string();
    assert!(message.contains("in use by another process"), "{message}");
    assert_eq!(damaged_files(&folder), 0);
}

#[test]
fn the_file_is_for_its_owner_alone_and_its_folders_are_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/state.redb");
    drop(RedbStore::open(&path, FINGERPRINT, &StoreConfig::default()).unwrap());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    drop(RedbStore::open(&path, FINGERPRINT, &StoreConfig::default()).unwrap());
    assert_eq!(mode(&path), 0o600);
}

#[test]
fn a_full_queue_drops_the_newest_snapshot_and_save_never_waits() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder);
    let tokens: Vec<u32> = (0..40).collect();
    let stalled = store.shared.database.write().unwrap();
    for length in 1..=40 {
        store.save(snapshot(&tokens[..length], 100));
    }
    assert_eq!(store.longest(&tokens, 40), Some(QUEUE_SNAPSHOTS));
    drop(stalled);
    store.flush().unwrap();
    store.save(snapshot(&tokens, 100));
    assert_eq!(store.longest(&tokens, 40), Some(40));
}

/// Sizes from 1 kB to 3 MB, three times the budget in all: redb reuses what evictions free.
#[test]
fn the_file_stays_near_its_budget_and_shrinks_when_the_budget_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let budget = 24 << 20;
    let store = open_with(&folder, budget);
    let (mut seed, mut largest) = (5, 0);
    for i in 0..120 {
        let bytes = 1000 << (random(&mut seed) % 12);
        store.save(snapshot(&[i], bytes as usize + random(&mut seed) as usize % 1_000_000));
        store.flush().unwrap();
        largest = largest.max(database::size_on_disk(&path));
        assert!(store.shared.state().index.bytes() <= budget);
    }
    drop(store);
    eprintln!("{:.2} times the budget", largest as f64 / budget as f64);
    assert!(largest < budget * 5 / 4, "{largest} bytes for a budget of {budget}");
    let small = 2 << 20;
    drop(open_with(&folder, small));
    let after = database::size_on_disk(&path);
    assert!(after <= small, "{after} bytes for a budget of {small}");
}

/// 1, 10 and 100 MB; run with `--ignored --nocapture` on a quiet machine.
#[test]
#[ignore = "measures"]
fn speed_of_saving_and_loading() {
    for (megabytes, count) in [(1, 100), (10, 30), (100, 6)] {
        let folder = tempfile::tempdir().unwrap();
        let store = open(&folder);
        let originals: Vec<_> = (0..count).map(|i| snapshot(&[i], megabytes * 1_000_000)).collect();
        let total = (megabytes * originals.len()) as f64;
        let copies = originals.clone();
        let started = Instant::now();
        for copy in copies {
            store.save(copy);
            store.flush().unwrap();
        }
        let saving = total / started.elapsed().as_secs_f64();
        drop(store);
        let started = Instant::now();
        let store = open(&folder);
        let opening = started.elapsed();
        let started = Instant::now();
        for original in &originals {
            drop(store.load(&original.tokens).unwrap());
        }
        let loading = total / started.elapsed().as_secs_f64();
        assert_eq!(store.load(&[1]).as_ref(), Some(&originals[1]));
        let size = database::size_on_disk(&folder.path().join("state.redb"));
        eprintln!(
            "{count} x {megabytes} MB: saved at {saving:.0} MB/s, loaded at {loading:.0} MB/s, \
             opened in {opening:?}, {:.2} bytes on disk for each",
            size as f64 / total / 1e6
        );
    }
}
