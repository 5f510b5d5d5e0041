//! Damaged files in the data folder change no decision and stop no start.
//!
//! Each test damages a folder again and again, as disks and killed processes do: `STEERSMAN_DAMAGED_FILES` times,
//! which CI sets, or 20 times.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use steersman_policy_host::{
    Action, Grant, Phase, Policies, PolicyConfig, ProfilePolicies, Step, Storage, no_vocabulary,
};
use steersman_test_support::Random;
use steersman_test_support::guest::{Answers, ELEMENT, case, data, importing, list, payload, text};

fn count() -> usize {
    std::env::var("STEERSMAN_DAMAGED_FILES").map_or(20, |count| count.parse().unwrap())
}

/// Ends a request with the value of `key`, if it has one, and sets it to `seen`.
fn remembering() -> Vec<u8> {
    let mut answers = Answers::default();
    let stop = answers.add("on-step", &list([case("stop", text(""))]));
    let reason = ELEMENT + payload("action");
    let body = format!(
        "(call $kv.get (i32.const 512) (i32.const 3) (i32.const 64))
         (call $kv.set (i32.const 512) (i32.const 3) (i32.const 516) (i32.const 4) (i32.const 128))
         (i64.store (i32.const {reason}) (i64.load (i32.const 68)))
         (i32.mul (i32.load8_u (i32.const 64)) (i32.const {stop}))"
    );
    let extra = format!("{} {}", data(512, b"key seen"), answers.data());
    importing(&["kv"], &[("on-step", &body)], &extra)
}

/// A server's policies: one that stores a value, and a shipped one.
struct Site {
    folder: tempfile::TempDir,
    profiles: BTreeMap<String, ProfilePolicies>,
}

impl Site {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("guest.wasm");
        fs::write(&file, remembering()).unwrap();
        let profile = ProfilePolicies {
            policies: vec!["default".into(), file.display().to_string()],
            grants: vec![Grant::Kv],
            ..ProfilePolicies::default()
        };
        Self { folder, profiles: BTreeMap::from([("agent".to_owned(), profile)]) }
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Starts a server and makes one request; the actions of both policies.
    fn run(&self) -> Vec<Action> {
        let storage = Storage::open(&self.data()).unwrap();
        let config = PolicyConfig { deadline_ms: 60_000, ..PolicyConfig::default() };
        let policies = Policies::load(&config, &self.profiles, &storage).unwrap();
        let mut session = policies.start("agent", "request", &no_vocabulary()).unwrap();
        let step = Step { phase: Phase::Reasoning, budget_reached: true, ..Step::default() };
        let actions = session.ask(&step).unwrap();
        assert_eq!(session.take_notes(), [""; 0]);
        actions
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Flips bits, cuts, or overwrites pages with noise or zeros.
fn damage(random: &mut Random, file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    if bytes.is_empty() {
        return;
    }
    match random.below(8) {
        0..3 => {
            for _ in 0..1 + random.below(4) {
                // Half of them in the head, where the damage has the widest effect.
                let bound = if random.below(2) == 0 { bytes.len().min(4096) } else { bytes.len() };
                bytes[random.below(bound)] ^= 1 << random.below(8);
            }
        }
        3 => bytes.truncate(random.below(bytes.len())),
        4 => bytes.truncate(random.below(bytes.len().min(4096))),
        _ => {
            for _ in 0..1 + random.below(3) {
                let page = random.below(bytes.len().div_ceil(4096)) * 4096;
                let end = bytes.len().min(page + 4096);
                let zeros = random.below(2) == 0;
                let noise = |byte: &mut u8| *byte = if zeros { 0 } else { random.below(256) as u8 };
                bytes[page..end].iter_mut().for_each(noise);
            }
        }
    }
    fs::write(file, bytes).unwrap();
}

/// Damages files of a data folder one after another, and starts a server each time. Returns how often
/// the stored value was kept, and the number of damages.
fn check(seed: u64, is_damaged: impl Fn(&Path) -> bool) -> [usize; 2] {
    let site = Site::new();
    let (first, second) = (site.run(), site.run());
    assert!(matches!(&first[..], [Action::CloseReasoning(_)]), "{first:?}");
    assert_eq!(second, [&first[..], &[Action::Stop("seen".into())]].concat());
    let read = |file: PathBuf| (fs::read(&file).unwrap(), file);
    let whole: Vec<_> = files(&site.data()).into_iter().map(read).collect();
    let targets: Vec<_> = whole.iter().filter(|(_, file)| is_damaged(file)).collect();
    let mut random = Random(seed);
    let mut kept = 0;
    for number in 0..count() {
        files(&site.data()).iter().for_each(|file| fs::remove_file(file).unwrap());
        for (bytes, file) in &whole {
            // Private, as they were.
            let mut new = tempfile::NamedTempFile::new_in(site.data()).unwrap();
            new.write_all(bytes).unwrap();
            new.persist(file).unwrap();
        }
        let (before, file) = targets[number % targets.len()];
        damage(&mut random, file);
        let damaged = fs::read(file).unwrap();
        let actions = site.run();
        assert!([&first, &second].contains(&&actions), "damage {number}: {actions:?}");
        kept += usize::from(actions == second);
        assert_eq!(site.run(), second, "damage {number}: nothing is stored any more");
        // A damaged key is as good as another, and its components are compiled again.
        let is_key = file.ends_with("key") && damaged.len() == before.len();
        let healed = is_key || damaged == *before || fs::read(file).unwrap() != damaged;
        assert!(healed, "damage {number}: {} remains", file.display());
    }
    [kept, count()]
}

#[test]
fn a_damaged_database_loses_values_and_changes_none() {
    let [kept, all] = check(1, |file| file.ends_with("policies.redb"));
    println!("{kept} of {all} values were kept");
    assert!(kept > all / 2, "{kept} of {all}");
}

#[test]
fn a_damaged_compiled_component_is_compiled_again() {
    let [kept, all] = check(2, |file| file.parent().unwrap().ends_with("compiled"));
    assert_eq!(kept, all);
}
