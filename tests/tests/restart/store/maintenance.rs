//! Laws of `steersman cache`: list, verify, clear, export and import.

use std::fs;
use std::path::Path;

use steersman::cache::{self, CacheTask};
use steersman_engine::config::StoreConfig;
use steersman_engine::internals::store::{Part, PartKind, StoreError, StoreFile};

use super::{MB, ONE, TWO, keys, loads, open, part, parts, seconds};

/// Two conversations of one model that share a beginning, and one of another model.
fn conversations() -> [Vec<Part>; 3] {
    let tokens: Vec<u32> = (0..300).collect();
    let mut branch = tokens.clone();
    branch[130] = 7;
    [parts(ONE, &tokens[..300]), parts(ONE, &branch[..200]), parts(TWO, &tokens[..70])]
}

/// Saves them in this order, and closes the store.
fn fill(path: &Path) {
    let [first, second, other] = conversations();
    let store = open(path, ONE, 64 * MB);
    store.save(first);
    store.save(second);
    drop(store);
    let store = open(path, TWO, 64 * MB);
    store.save(other);
}

#[test]
fn content_is_listed_by_model_kind_and_last_use() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    fill(&path);
    let file = StoreFile::open(&path).unwrap();
    let sizes = file.sizes();
    let listed: Vec<_> = sizes.iter().map(|s| (s.fingerprint, s.kind, s.size.parts)).collect();
    let expected = [
        (TWO, PartKind::Kv, 2),
        (TWO, PartKind::State, 1),
        (ONE, PartKind::Kv, 7),
        (ONE, PartKind::State, 2),
    ];
    assert_eq!(listed, expected, "the last used model is the first");
    let prefixes = file.prefixes();
    let listed: Vec<_> = prefixes
        .iter()
        .map(|p| (p.fingerprint, p.end, p.states.clone(), p.size.parts, p.retained.is_some()))
        .collect();
    let expected = [
        (TWO, 70, vec![70], 3, false),
        (ONE, 200, vec![200], 5, false),
        // Two blocks are shared with the prefix above, and counted there.
        (ONE, 300, vec![300], 4, false),
    ];
    assert_eq!(listed, expected);
    let total: u64 = sizes.iter().map(|s| s.size.bytes).sum();
    assert_eq!(total, prefixes.iter().map(|p| p.size.bytes).sum::<u64>());
    drop(file);

    let store = open(&path, ONE, 64 * MB);
    let [first, ..] = conversations();
    assert!(store.retain(&keys(&first), seconds() + 60));
    store.touch(&keys(&first));
    drop(store);
    let prefixes = StoreFile::open(&path).unwrap().prefixes();
    assert_eq!((prefixes[0].end, prefixes[0].size.parts), (300, 6));
    assert!(prefixes[0].retained.is_some() && prefixes[1].retained.is_none());
}

#[test]
fn clear_drops_one_model_and_compact_gives_the_space_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    fill(&path);
    let store = open(&path, TWO, 64 * MB);
    store.save(vec![part(TWO, &[5], PartKind::State, 5_000_000)]);
    drop(store);
    let mut file = StoreFile::open(&path).unwrap();
    let before = file.bytes_on_disk();
    assert_eq!(file.clear(Some(&TWO)).unwrap().parts, 4);
    file.compact().unwrap();
    assert!(file.bytes_on_disk() + 4_000_000 < before, "{before}, then {}", file.bytes_on_disk());
    assert!(file.sizes().iter().all(|sizes| sizes.fingerprint == ONE));
    drop(file);
    let [first, second, other] = conversations();
    let store = open(&path, ONE, 64 * MB);
    assert!(loads(&store, &first) && loads(&store, &second));
    assert!(!store.contains(&other[0].key));
    drop(store);
    assert_eq!(StoreFile::open(&path).unwrap().clear(None).unwrap().parts, 9);
    let report = open(&path, ONE, 64 * MB).report();
    assert_eq!(report.rows.parts + report.states.parts + report.others.parts, 0);
}

#[test]
fn verify_drops_only_damaged_parts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    fill(&path);
    assert!(StoreFile::open(&path).unwrap().verify().unwrap().damaged.is_empty());
    let [first, second, _] = conversations();
    let mut bytes = fs::read(&path).unwrap();
    for part in [&first[3], &first[5]] {
        let pattern = &part.tensors[0].bytes[1000..1032];
        let mut found = 0;
        for place in 0..bytes.len() - 32 {
            if bytes[place..place + 32] == *pattern {
                bytes[place] ^= 1;
                found += 1;
            }
        }
        assert!(found > 0);
    }
    fs::write(&path, bytes).unwrap();
    let mut file = StoreFile::open(&path).unwrap();
    let found = file.verify().unwrap();
    let mut damaged = found.damaged;
    damaged.sort();
    assert_eq!(damaged, [(PartKind::Kv, 256), (PartKind::State, 300)]);
    assert_eq!((found.whole.parts, found.stray_chunks), (10, 0));
    assert!(file.verify().unwrap().damaged.is_empty(), "they were dropped");
    drop(file);
    let store = open(&path, ONE, 64 * MB);
    assert!(loads(&store, &first[..3]) && loads(&store, &second));
    assert!(!store.contains(&first[3].key) && !store.contains(&first[5].key));
}

#[test]
fn import_restores_what_was_exported() {
    let folder = tempfile::tempdir().unwrap();
    let (path, other) = (folder.path().join("a.redb"), folder.path().join("b/b.redb"));
    let export = folder.path().join("export");
    fill(&path);
    let file = StoreFile::open(&path).unwrap();
    assert_eq!(file.export(&export).unwrap().parts, 12);
    let (sizes, prefixes) = (file.sizes(), file.prefixes());
    let mut again = StoreFile::open_or_create(&other).unwrap();
    let imported = again.import(&export, 64 * MB).unwrap();
    assert_eq!((imported.added.parts, imported.present.parts), (12, 0));
    assert_eq!((again.sizes(), again.prefixes()), (sizes, prefixes), "last uses included");
    let twice = again.import(&export, 64 * MB).unwrap();
    assert_eq!((twice.added.parts, twice.present.parts), (0, 12));
    drop(again);
    let [first, second, third] = conversations();
    let store = open(&other, ONE, 64 * MB);
    assert!(loads(&store, &first) && loads(&store, &second));
    drop(store);
    assert!(loads(&open(&other, TWO, 64 * MB), &third));

    // A budget for the last used parts: those of the other model and of the later conversation.
    let mut small = StoreFile::open_or_create(&folder.path().join("c.redb")).unwrap();
    let budget = file.prefixes()[..2].iter().map(|prefix| prefix.size.bytes).sum();
    let imported = small.import(&export, budget).unwrap();
    assert_eq!((imported.added.parts, imported.beyond_budget.parts), (8, 4));
    assert_eq!(small.prefixes(), file.prefixes()[..2]);
    let files = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 4, "no temporary file is left");
}

#[test]
fn damaged_export_is_refused_and_nothing_is_imported() {
    let folder = tempfile::tempdir().unwrap();
    let (path, export) = (folder.path().join("a.redb"), folder.path().join("export"));
    let store = open(&path, ONE, 64 * MB);
    store.save(vec![part(ONE, &[1], PartKind::Kv, 50), part(ONE, &[2], PartKind::State, 60)]);
    drop(store);
    let mut file = StoreFile::open(&path).unwrap();
    file.export(&export).unwrap();
    file.clear(None).unwrap();
    let original = fs::read(&export).unwrap();
    let mut refused = |bytes: &[u8], damage: String| {
        fs::write(&export, bytes).unwrap();
        let error = file.import(&export, 64 * MB).expect_err(&damage);
        assert!(matches!(&error, StoreError::Import(path, _) if *path == export), "{error}");
        assert!(file.sizes().is_empty(), "{damage}");
        error.to_string()
    };
    for length in 0..original.len() {
        let error = refused(&original[..length], format!("cut at {length}"));
        assert!(length < 16 || error.contains("damaged at byte "), "{error}");
    }
    for at in 0..original.len() {
        let mut bytes = original.clone();
        bytes[at] ^= 1 << (at % 8);
        let error = refused(&bytes, format!("flipped at {at}"));
        assert!(at < 16 || error.contains("damaged at byte "), "{error}");
    }
    refused(&[&original[..], b"x"].concat(), "longer".into());
    fs::write(&export, &original).unwrap();
    assert_eq!(file.import(&export, 64 * MB).unwrap().added.parts, 2);
}

#[test]
fn command_line_reports_a_missing_file_and_one_that_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let config = StoreConfig::default();
    let run = |task| cache::run(task, &config, folder.path());
    let error = run(CacheTask::Stats).unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
    let store = open(&config.file(folder.path()), ONE, MB);
    for task in [CacheTask::Stats, CacheTask::Verify, CacheTask::Import { file: "x".into() }] {
        let error = run(task).unwrap_err().to_string();
        assert!(error.contains("GET /v1/cache") && error.contains("state.redb"), "{error}");
    }
    drop(store);
    for task in [CacheTask::Stats, CacheTask::List, CacheTask::Verify, CacheTask::Compact] {
        run(task).unwrap();
    }
    let clear = |f: &str| run(CacheTask::Clear { fingerprint: Some(f.into()) });
    assert!(clear("01").unwrap_err().to_string().contains("nothing is saved under"));
    fill(&config.file(folder.path()));
    assert!(clear("").is_err());
    clear("0101").unwrap();
    clear("02").unwrap();
    run(CacheTask::Clear { fingerprint: None }).unwrap();
}
