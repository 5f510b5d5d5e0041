//! Laws of damaged, foreign and shared files.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use redb::{Database, TableDefinition};
use steersman_engine::config::StoreConfig;
use steersman_engine::internals::store::{Key, Part, PartKind, RedbStore, StoreError, StoreFile};
use tempfile::TempDir;

use super::{MB, ONE, Random, loads, open, part};

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const CHUNKS: TableDefinition<(&Key, u32), &[u8]> = TableDefinition::new("chunks");

/// KV of one token.
fn named(name: u32, bytes: usize) -> Part {
    part(ONE, &[name], PartKind::Kv, bytes)
}

fn key(name: u32) -> Key {
    named(name, 0).key
}

fn open_in(folder: &TempDir) -> RedbStore {
    open(&folder.path().join("state.redb"), ONE, 1 << 30)
}

fn has(store: &RedbStore, part: Part) -> bool {
    loads(store, &[part])
}

/// A closed store with the parts 1, 2 .. `count`.
fn folder_with(count: u32, bytes: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let store = open_in(&folder);
    for name in 1..=count {
        store.save(vec![named(name, bytes)]);
        store.flush().unwrap();
    }
    folder
}

fn damaged_files(folder: &TempDir) -> usize {
    let names = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().contains(".damaged-")).count()
}

#[test]
fn missing_chunk_is_a_miss() {
    let folder = folder_with(2, 2_000_000);
    let database = Database::create(folder.path().join("state.redb")).unwrap();
    let write = database.begin_write().unwrap();
    write.open_table(CHUNKS).unwrap().remove((&key(2), 1)).unwrap();
    write.commit().unwrap();
    drop(database);
    let store = open_in(&folder);
    assert!(store.contains(&key(2)));
    assert_eq!(store.load(&[key(1), key(2)]), None);
    assert!(!store.contains(&key(2)) && has(&store, named(1, 2_000_000)));
}

/// A flipped bit in the key of a chunk leaves one.
#[test]
fn verify_drops_stray_chunks() {
    let folder = folder_with(2, 3000);
    let path = folder.path().join("state.redb");
    let database = Database::create(&path).unwrap();
    let write = database.begin_write().unwrap();
    write.open_table(CHUNKS).unwrap().insert((&[7; 32], 5), [1, 2, 3].as_slice()).unwrap();
    write.commit().unwrap();
    drop(database);
    let found = StoreFile::open(&path).unwrap().verify().unwrap();
    assert_eq!((found.whole.parts, found.stray_chunks), (2, 1));
    let found = StoreFile::open(&path).unwrap().verify().unwrap();
    assert_eq!((found.whole.parts, found.stray_chunks), (2, 0));
    assert!(has(&open_in(&folder), named(1, 3000)));
}

/// Also in the pages that redb trusts: every part that loads is right, and the next start has a store
/// that works. (Of 8,000 such rounds none failed; 540 ended with the file moved aside.)
#[test]
fn flipped_bits_anywhere_never_yield_a_wrong_part() {
    let folder = folder_with(6, 3000);
    let path = folder.path().join("state.redb");
    let original = fs::read(&path).unwrap();
    let (mut random, mut loaded, mut anew) = (Random(11), 0, 0);
    for round in 0..150 {
        let mut bytes = original.clone();
        // The first pages are redb's header and roots: half of the damage goes there.
        let extent = if round % 2 == 0 { 16 * 4096 } else { bytes.len() };
        for _ in 0..1 + round % 8 {
            let at = random.below(extent.min(bytes.len()));
            bytes[at] ^= 1 << random.below(8);
        }
        fs::write(&path, &bytes).unwrap();
        let store = open_in(&folder);
        loaded += (1..=6).filter(|name| has(&store, named(*name, 3000))).count();
        let _ = store.flush();
        drop(store);
        let store = open_in(&folder);
        // The first save may meet the damage, and is lost then.
        store.save(vec![named(76, 3000)]);
        let _ = store.flush();
        store.save(vec![named(77, 3000)]);
        assert!(store.flush().is_ok(), "round {round}");
        assert!(has(&store, named(77, 3000)), "round {round}");
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
fn truncated_file_is_moved_aside_or_repaired() {
    let folder = folder_with(6, 3000);
    let path = folder.path().join("state.redb");
    let original = fs::read(&path).unwrap();
    for length in [0, 1, 100, 320, 4096, 8192, 40_000, original.len() / 2, original.len() - 1] {
        fs::write(&path, &original[..length]).unwrap();
        let store = open_in(&folder);
        (1..=6).for_each(|name| _ = has(&store, named(name, 3000)));
        store.save(vec![named(77, 3000)]);
        let _ = store.flush();
    }
    assert!((1..=3).contains(&damaged_files(&folder)), "files moved aside are bounded");
}

/// Changes the format field of a file, and returns the previous one.
fn set_format(path: &Path, format: Option<u64>) -> Option<u64> {
    let database = Database::create(path).unwrap();
    let write = database.begin_write().unwrap();
    let mut meta = write.open_table(META).unwrap();
    let previous = meta.remove("format").unwrap().map(|format| format.value());
    if let Some(format) = format {
        meta.insert("format", format).unwrap();
    }
    drop(meta);
    write.commit().unwrap();
    previous
}

/// Another version's file, or a flipped bit: maintenance refuses the file, a server moves it aside,
/// and neither changes its content.
#[test]
fn file_of_unknown_format_is_refused_or_moved_aside() {
    let folder = folder_with(2, 100);
    let path = folder.path().join("state.redb");
    let ours = set_format(&path, None).unwrap();
    set_format(&path, Some(ours));
    let flipped = (0..64).map(|bit| Some(ours ^ 1 << bit));
    for format in [None, Some(0), Some(1)].into_iter().chain(flipped) {
        assert_eq!(set_format(&path, format), Some(ours));
        let refused = StoreFile::open(&path).err().unwrap();
        let names = matches!(&refused, StoreError::UnknownFormat(_, found) if *found == format);
        assert!(names && refused.to_string().contains("delete the file"), "{refused}");
        assert!(!open_in(&folder).contains(&key(1)));
        fs::rename(folder.path().join("state.redb.damaged-1"), &path).unwrap();
        assert_eq!(set_format(&path, Some(ours)), format);
        assert!(has(&open_in(&folder), named(1, 100)), "{format:?}");
    }
}

#[test]
fn file_that_is_no_database_is_moved_aside() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("state.redb"), "not a database at all").unwrap();
    assert!(!open_in(&folder).contains(&key(1)));
    assert_eq!(damaged_files(&folder), 1);
}

#[test]
fn second_store_on_the_file_is_refused() {
    let folder = folder_with(1, 100);
    let path = folder.path().join("state.redb");
    let _first = open_in(&folder);
    let second = RedbStore::open(&path, ONE, &StoreConfig::default()).err().unwrap();
    let maintenance = StoreFile::open(&path).err().unwrap();
    for error in [second, maintenance] {
        assert!(matches!(&error, StoreError::InUse(named) if *named == path));
        assert!(error.to_string().contains("in use by another process"), "{error}");
    }
    assert_eq!(damaged_files(&folder), 0);
}

#[test]
fn file_is_private_and_its_folders_are_created() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/state.redb");
    drop(open(&path, ONE, MB));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    drop(open(&path, ONE, MB));
    assert_eq!(mode(&path), 0o600);
}
