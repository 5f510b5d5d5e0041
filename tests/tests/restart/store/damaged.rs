//! Laws of damaged, foreign and shared files.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use redb::{Database, MultimapTableDefinition, TableDefinition};
use steersman_engine::config::StoreConfig;
use steersman_engine::internals::store::{Key, Part, PartKind, RedbStore, StoreError, StoreFile};
use tempfile::TempDir;

use super::{MB, ONE, Random, damage, loads, open, part, scaled};

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
/// that works.
#[test]
fn damage_anywhere_never_yields_a_wrong_part() {
    let folder = folder_with(6, 3000);
    let path = folder.path().join("state.redb");
    let original = fs::read(&path).unwrap();
    let (mut random, mut loaded, mut anew) = (Random(11), 0, 0);
    let rounds = scaled(180);
    for round in 0..rounds {
        let mut bytes = original.clone();
        damage(&mut bytes, round, &mut random);
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
    eprintln!("{loaded} of {} loaded, {anew} files set aside", 6 * rounds);
    assert!(loaded > 2 * rounds && anew > 0);
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
    assert!((1..=3).contains(&damaged_files(&folder)), "files set aside are bounded");
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

/// Another version's file, or a flipped bit: maintenance refuses the file, a server sets it aside,
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

/// It used to be renamed, and its mode changed.
#[test]
fn file_of_another_program_is_an_error_and_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let database = |write: &dyn Fn(&redb::WriteTransaction)| {
        let database = Database::create(&path).unwrap();
        let transaction = database.begin_write().unwrap();
        write(&transaction);
        transaction.commit().unwrap();
    };
    let table = |write: &redb::WriteTransaction| {
        let table = TableDefinition::<&str, &str>::new("kv");
        write.open_table(table).unwrap().insert("a", "b").unwrap();
    };
    let multimap = |write: &redb::WriteTransaction| {
        let table = MultimapTableDefinition::<&str, &str>::new("names");
        write.open_multimap_table(table).unwrap().insert("a", "b").unwrap();
    };
    let export = || {
        let from = folder.path().join("from.redb");
        drop(open(&from, ONE, MB));
        StoreFile::open(&from).unwrap().export(&path).unwrap();
    };
    let cases: [(&str, &dyn Fn()); 6] = [
        ("is not a state store", &|| fs::write(&path, "not a database at all").unwrap()),
        ("is not a state store", &|| fs::write(&path, vec![0; 9 << 20]).unwrap()),
        ("another program", &|| database(&table)),
        ("another program", &|| database(&multimap)),
        ("is an export", &export),
        ("is not a file", &|| fs::create_dir(&path).unwrap()),
    ];
    for (expected, create) in cases {
        create();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        let seen = || {
            let metadata = fs::metadata(&path).unwrap();
            (metadata.permissions().mode(), metadata.ino(), fs::read(&path).ok())
        };
        let before = seen();
        let server = RedbStore::open(&path, ONE, &StoreConfig::default()).err().unwrap();
        let maintenance = StoreFile::open(&path).err().unwrap();
        for error in [server, maintenance] {
            assert!(matches!(&error, StoreError::Foreign(named, _) if *named == path), "{error}");
            let text = error.to_string();
            assert!(text.contains(expected) && text.contains("state.redb"), "{text}");
        }
        assert!(seen() == before && damaged_files(&folder) == 0, "{expected}");
        if path.is_dir() { fs::remove_dir(&path).unwrap() } else { fs::remove_file(&path).unwrap() }
    }
}

/// The process was killed while redb created it: its magic number is written last.
#[test]
fn file_whose_creation_was_cut_short_is_replaced() {
    for length in [0, 4096, 1 << 20] {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = vec![0; length];
        bytes.iter_mut().skip(20).take(100).for_each(|byte| *byte = 3);
        fs::write(folder.path().join("state.redb"), bytes).unwrap();
        let store = open_in(&folder);
        store.save(vec![named(1, 100)]);
        store.flush().unwrap();
        assert!(has(&store, named(1, 100)));
    }
}

/// Of files set aside, the oldest are deleted beyond half of the budget; the rest is not available to
/// parts. `clear` deletes them all.
#[test]
fn files_set_aside_share_the_budget_and_can_be_cleared() {
    let folder = folder_with(1, 100);
    let path = folder.path().join("state.redb");
    let aside = |n: u32| folder.path().join(format!("state.redb.damaged-{n}"));
    for n in 1..=3 {
        fs::write(aside(n), vec![n as u8; 1_000_000]).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 * u64::from(n % 3));
        File::options().write(true).open(aside(n)).unwrap().set_modified(time).unwrap();
    }
    let store = open(&path, ONE, 5_000_000);
    let report = store.report();
    assert_eq!(report.set_aside.parts, 2);
    assert!(!aside(3).exists(), "the oldest");
    let left = 5_000_000 - report.set_aside.bytes;
    store.save((2..20).map(|name| named(name, 400_000)).collect());
    assert!(!store.contains(&key(2)), "more than is left");
    for name in 2..20 {
        store.save(vec![named(name, 400_000)]);
        store.flush().unwrap();
    }
    let report = store.report();
    assert!(report.rows.bytes <= left && report.rows.bytes > left / 2, "{report:?}");
    drop(store);
    let file = StoreFile::open(&path).unwrap();
    assert_eq!((file.set_aside().parts, file.clear_set_aside().unwrap().parts), (2, 2));
    assert_eq!((file.set_aside().parts, damaged_files(&folder)), (0, 0));
}

/// Nothing told of it: state went to a deleted file until the next start.
#[test]
fn deleted_file_is_noticed_and_created_again() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let store = open(&data.join("state.redb"), ONE, MB);
    for name in [1, 2] {
        store.save(vec![named(name, 1000)]);
        store.flush().unwrap();
        fs::remove_dir_all(&data).unwrap();
        // A report or a save notices it.
        if name == 2 {
            let off = store.report().off.expect("the report tells");
            assert!(off.contains("deleted"), "{off}");
        }
        store.save(vec![named(10 + name, 1000)]);
        store.flush().unwrap();
        assert!(!store.contains(&key(name)) && has(&store, named(10 + name, 1000)));
        assert_eq!(store.report().off, None);
    }
    drop(store);
    assert!(has(&open(&data.join("state.redb"), ONE, MB), named(12, 1000)));
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
    for path in [&path, path.parent().unwrap()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    drop(open(&path, ONE, MB));
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o755, 0o755), "an operator's choice");
}
