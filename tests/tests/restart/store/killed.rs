//! Laws of a killed process and of a full disk.

use std::collections::HashSet;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use steersman_engine::internals::store::{Part, PartKind};

use super::{MB, ONE, Random, keys, loads, longest, open, part, scaled};

/// Save number `i` of the children: KV of two blocks and a state of 0 to 1.5 MB.
fn numbered(i: u32) -> Vec<Part> {
    let tokens: Vec<u32> = (i..i + 100).collect();
    let bytes = [0, 900, 40_000, 300_000, 1_500_000][i as usize % 5];
    vec![
        part(ONE, &tokens[..64], PartKind::Kv, bytes / 2),
        part(ONE, &tokens, PartKind::Kv, 1000),
        part(ONE, &tokens, PartKind::State, bytes),
    ]
}

/// Each child saves this many times, then waits to be killed.
const SAVES: u32 = 300;
const ROUNDS: usize = 50;
const FILE: &str = "STEERSMAN_TEST_STORE_FILE";
const FIRST: &str = "STEERSMAN_TEST_STORE_FIRST";

fn child(name: &str, path: &Path) -> Command {
    let mut command = crate::child(module_path!(), name);
    command.env(FILE, path);
    command
}

#[test]
#[ignore = "a child process of the next test"]
fn child_that_saves_until_it_is_killed() {
    let Ok(path) = env::var(FILE) else { return };
    let first: u32 = env::var(FIRST).unwrap().parse().unwrap();
    let store = open(path.as_ref(), ONE, 12 * MB);
    println!("\nready");
    for i in first..first + SAVES {
        store.save(numbered(i));
        let _ = store.load(&keys(&numbered(first)));
        if i % 4 == 0 {
            store.flush().unwrap();
        }
    }
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn store_of_a_killed_process_opens_and_holds_only_whole_parts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let mut random = Random(9);
    let mut seen = HashSet::new();
    for round in 0..scaled(ROUNDS) as u32 {
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

        let store = open(&path, ONE, 12 * MB);
        assert_eq!(store.report().counts.damaged_parts, 0);
        for i in round.saturating_sub(3) * SAVES..(round + 1) * SAVES {
            let tokens: Vec<u32> = (i..i + 100).collect();
            match longest(&store, &tokens, 100, true) {
                // The state is evicted first: if it is here, all is.
                Some(100) => {
                    assert!(loads(&store, &numbered(i)), "save {i}");
                    seen.insert(i);
                }
                found => assert_eq!(found, None, "save {i}"),
            }
        }
    }
    let files = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 1, "no file was set aside");
    assert!(seen.len() > 30, "only {} saves survived", seen.len());
}

#[test]
#[ignore = "a child process of the next test"]
fn child_whose_files_cannot_grow() {
    let Ok(path) = env::var(FILE) else { return };
    let store = open(path.as_ref(), ONE, 64 * MB);
    let of = |i: u32| vec![part(ONE, &[i], PartKind::State, 100_000)];
    for i in 0..60 {
        store.save(of(i));
        if store.flush().is_err() {
            break;
        }
    }
    let problem = store.flush().unwrap_err().to_string();
    assert!(problem.starts_with("state store: "), "{problem}");
    assert!(store.report().off.is_some());
    let saved: Vec<u32> = (0..60).filter(|i| store.contains(&of(*i)[0].key)).collect();
    assert!(saved.len() > 3, "{saved:?}");
    for i in saved {
        assert!(loads(&store, &of(i)), "{i} still loads");
    }
    let dropped = store.report().counts.dropped_saves;
    store.save(of(99));
    assert!(!store.contains(&of(99)[0].key), "saving is off");
    assert_eq!(store.report().counts.dropped_saves, dropped + 1);
}

/// A limit on file sizes stands in for a full disk: both end a write in the middle.
#[test]
#[cfg(unix)]
fn full_disk_turns_saving_off_and_nothing_else() {
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
    let store = open(&path, ONE, 64 * MB);
    assert!(loads(&store, &[part(ONE, &[0], PartKind::State, 100_000)]), "the next start has it");
    store.save(vec![part(ONE, &[99], PartKind::State, 10)]);
    store.flush().unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
