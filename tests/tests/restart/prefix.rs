//! Saved state: a resumed request equals an uninterrupted one, token for token, wherever its
//! state comes from and whatever else was lost: on a hybrid, a dense and a sliding-window family.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use mlx_rs::Array;
use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis};
use mlx_rs::transforms::eval;
use steersman_engine::config::StoreConfig;
use steersman_engine::internals::cache::{Cache, Span};
use steersman_engine::internals::model::{Model, Pass, WeightsDigest, load};
use steersman_engine::internals::prefix::{Prefixes, Retention};
use steersman_engine::internals::store::{Fingerprint, RedbStore, WallClock};
use steersman_engine::{ConfigError, Error};
use steersman_tests::{Random, bundled_model, config, damage, fixtures, scaled};

use super::child;

const MB: u64 = 1 << 20;
/// Tokens of each reply.
const REPLY: usize = 200;
/// Tokens of one pass.
const CHUNK: usize = 64;
const FAMILIES: [&str; 3] = ["tiny-hybrid-4bit", "llama", "gemma3_text"];

struct Family {
    name: &'static str,
    model: Box<dyn Model>,
    fingerprint: Fingerprint,
}

/// Prompt and reply, and the number of prompt tokens that were restored.
#[derive(Debug)]
struct CountedReply {
    tokens: Vec<u32>,
    cached: usize,
}

impl Family {
    fn load(name: &'static str) -> Self {
        let folder = match name {
            "tiny-hybrid-4bit" => bundled_model(),
            name => fixtures().join("families").join(name),
        };
        let data = tempfile::tempdir().unwrap();
        let weights = WeightsDigest::start(&folder, data.path()).unwrap();
        let loaded = load(&folder, &config().model).unwrap();
        let fingerprint = loaded.digest(weights.finish().unwrap());
        Self { name, model: loaded.model, fingerprint }
    }

    /// Without a store.
    fn in_memory(&self) -> Prefixes {
        Prefixes::new(self.model.new_cache().unwrap(), 256 * MB, None, 0).unwrap()
    }

    /// With a store of at most `budget_bytes`.
    fn on_disk(&self, path: &Path, budget_bytes: u64) -> Prefixes {
        self.on_disk_in_bits(path, budget_bytes, 0).unwrap()
    }

    fn on_disk_in_bits(
        &self,
        path: &Path,
        budget_bytes: u64,
        bits: u32,
    ) -> Result<Prefixes, Error> {
        let config = StoreConfig { budget_bytes, ..StoreConfig::default() };
        let disk = RedbStore::open(path, self.fingerprint, &config).unwrap();
        Prefixes::new(self.model.new_cache().unwrap(), 256 * MB, Some(disk), bits)
    }

    fn run(&self, tokens: &[u32], cache: &mut Cache) -> u32 {
        let rows = tokens.len() as i32;
        let ids = Array::from_slice(tokens, &[rows]);
        let hidden = self.model.forward(&ids, &mut [Span { rows, cache }], Pass::WHOLE).unwrap();
        let last = hidden.try_index((.., rows - 1.., ..)).unwrap();
        let token = argmax_axis(self.model.logits(&last).unwrap(), -1, false).unwrap();
        eval([&token]).unwrap();
        token.item_exact::<u32>()
    }

    /// The reply to `prompt`. Saves as the engine does: at a third and two thirds of the prompt, just
    /// before its end, and at the end of the reply.
    fn reply(&self, prefixes: &mut Prefixes, prompt: &[u32], length: usize) -> CountedReply {
        let (mut cache, cached) = prefixes.restore(prompt).unwrap();
        let save_points = [prompt.len() / 3, prompt.len() * 2 / 3, prompt.len() - 3];
        let mut next = 0;
        while cache.position < prompt.len() {
            let at = cache.position;
            let stop = save_points.into_iter().find(|point| *point > at).unwrap_or(prompt.len());
            let end = stop.min(at + CHUNK);
            next = self.run(&prompt[at..end], &mut cache);
            if save_points.contains(&end) {
                save(prefixes, &cache, &prompt[..end]);
            }
        }
        let mut tokens = prompt.to_vec();
        while tokens.len() < prompt.len() + length {
            tokens.push(next);
            next = self.run(&[next], &mut cache);
        }
        save(prefixes, &cache, &tokens);
        CountedReply { tokens, cached }
    }

    /// A store with one conversation; its prompt and reply.
    fn saved(&self, path: &Path) -> (Prefixes, Vec<u32>, CountedReply) {
        let first = prompt(1, 230);
        let mut prefixes = self.on_disk(path, 64 * MB);
        let reply = self.reply(&mut prefixes, &first, REPLY);
        prefixes.flush().unwrap();
        (prefixes, first, reply)
    }

    /// The reply to `prompt` without saved state.
    fn whole(&self, prompt: &[u32]) -> CountedReply {
        let whole = self.reply(&mut self.in_memory(), prompt, REPLY);
        assert_eq!(whole.cached, 0);
        whole
    }

    /// The law: `prefixes` restores at least `least` tokens, and the reply is the `whole` one.
    fn check(
        &self,
        prefixes: &mut Prefixes,
        prompt: &[u32],
        whole: &CountedReply,
        least: usize,
        case: &str,
    ) {
        let resumed = self.reply(prefixes, prompt, REPLY);
        assert!(resumed.cached >= least, "{}, {case}: {} cached", self.name, resumed.cached);
        assert!(resumed.tokens == whole.tokens, "{}, {case}: another reply", self.name);
    }
}

fn save(prefixes: &mut Prefixes, cache: &Cache, tokens: &[u32]) {
    let plan = prefixes.plan_save(cache, tokens, Retention::default());
    prefixes.save(cache, tokens, &plan).unwrap();
}

/// The same arbitrary tokens for each seed.
fn prompt(seed: u64, length: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..length).map(|_| 3 + random.below(90) as u32).collect()
}

/// Prompts that may follow a conversation: name, tokens, and how many of them are saved at least.
fn next_prompts(first: &[u32], reply: &[u32]) -> Vec<(&'static str, Vec<u32>, usize)> {
    let third = first.len() / 3;
    let mut edited = reply.to_vec();
    edited[first.len() * 3 / 4] ^= 1;
    let extended = [reply, &prompt(7, 40)[..]].concat();
    let branch = [&first[..third * 2 + 5], &prompt(8, 60)[..]].concat();
    vec![
        ("extended", extended, reply.len() - 1),
        ("edited in the middle", edited, third * 2),
        ("shorter", first[..third + 20].to_vec(), third),
        ("branched off", branch, third * 2),
        ("asked again", first.to_vec(), first.len() - 3),
    ]
}

#[test]
fn next_prompt_resumes_from_its_conversation_in_memory_and_after_a_restart() {
    for name in FAMILIES {
        let family = Family::load(name);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        let (mut prefixes, first, reply) = family.saved(&path);
        for (case, next, least) in next_prompts(&first, &reply.tokens) {
            let copy = std::fs::read(&path).unwrap();
            let whole = family.whole(&next);
            family.check(&mut prefixes, &next, &whole, least, case);
            // A restart finds the file as it was before, in blocks of 64 tokens.
            let restarted = folder.path().join(case);
            std::fs::write(&restarted, copy).unwrap();
            let mut prefixes = family.on_disk(&restarted, 64 * MB);
            family.check(&mut prefixes, &next, &whole, least.saturating_sub(63), case);
        }
    }
}

#[test]
fn eviction_changes_no_reply() {
    for name in FAMILIES {
        let family = Family::load(name);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        let prompts: Vec<Vec<u32>> = (0..4).map(|seed| prompt(seed, 230)).collect();
        let mut prefixes = family.on_disk(&path, 256 * MB);
        for prompt in &prompts {
            family.reply(&mut prefixes, prompt, 20);
        }
        prefixes.flush().unwrap();
        let report = prefixes.reporter().report();
        let disk = report.disk.unwrap();
        let (bytes, parts) =
            (disk.rows.bytes + disk.states.bytes, disk.rows.parts + disk.states.parts);
        drop(prefixes);

        let mut prefixes = family.on_disk(&path, bytes / 2);
        let left = prefixes.reporter().report().disk.unwrap();
        assert!((left.rows.parts + left.states.parts) * 10 < parts * 7, "{name}: {left:?}");
        // The newest is saved, the oldest is not, and both get the same reply.
        let [newest, oldest] = [3, 0].map(|i| family.whole(&prompts[i]));
        family.check(&mut prefixes, &prompts[3], &newest, 1, "the newest of them");
        family.check(&mut prefixes, &prompts[0], &oldest, 0, "the oldest of them");

        let mut small =
            Prefixes::new(family.model.new_cache().unwrap(), report.memory.bytes / 2, None, 0)
                .unwrap();
        for prompt in &prompts {
            family.reply(&mut small, prompt, 20);
        }
        let report = small.reporter().report();
        let within = report.memory.bytes <= report.memory_budget;
        assert!(within && report.counts.evictions > 0, "{report:?}");
        family.check(&mut small, &prompts[3], &newest, 1, "the newest in little memory");
        family.check(&mut small, &prompts[0], &oldest, 0, "the oldest in little memory");
    }
}

#[test]
fn retained_prefix_outlives_others_until_its_time() {
    let family = Family::load("llama");
    let first = prompt(1, 230);
    let mut alone = family.in_memory();
    family.reply(&mut alone, &first, 1);
    let one = alone.reporter().report().memory.bytes;

    let seconds = Arc::new(AtomicU64::new(1_800_000_000));
    let time = seconds.clone();
    let now = move || UNIX_EPOCH + Duration::from_secs(time.load(Ordering::Relaxed));
    let mut prefixes = Prefixes::new(family.model.new_cache().unwrap(), 2 * one, None, 0)
        .unwrap()
        .with_clock(WallClock::new(now));
    family.reply(&mut prefixes, &first, 1);
    prefixes.retain(&first[..100], Retention { seconds: 60 }).unwrap();
    for (passed, least, most) in [(0, 100, 229), (59, 100, 229), (1, 0, 99)] {
        seconds.fetch_add(passed, Ordering::Relaxed);
        for seed in 2..6 {
            family.reply(&mut prefixes, &prompt(seed, 230), 1);
        }
        let cached = prefixes.resume(&first).unwrap().1;
        assert!((least..=most).contains(&cached), "{cached} tokens after {passed} more seconds");
    }
}

/// Rounded to 8 bits, KV takes less than half of the space in f32, and the next token is the same.
/// If heads do not divide into groups, the error names the key.
#[test]
fn kv_in_eight_bits_takes_less_space_for_the_same_next_token() {
    let family = Family::load("tiny-hybrid-4bit");
    let folder = tempfile::tempdir().unwrap();
    let first = prompt(1, 230);
    let whole = family.reply(&mut family.in_memory(), &first, 1);
    let sizes = [0, 8].map(|bits| {
        let path = folder.path().join(format!("{bits} bits"));
        let mut prefixes = family.on_disk_in_bits(&path, 64 * MB, bits).unwrap();
        family.reply(&mut prefixes, &first, 1);
        prefixes.flush().unwrap();
        let saved = prefixes.reporter().report().disk.unwrap().counts.saved_bytes;
        drop(prefixes);
        let mut prefixes = family.on_disk_in_bits(&path, 64 * MB, bits).unwrap();
        let resumed = family.reply(&mut prefixes, &first, 1);
        assert_eq!((resumed.cached, &resumed.tokens), (first.len() - 3, &whole.tokens));
        saved
    });
    // Two layers of two heads of 64, keys and values; states take the same in both.
    let kv = 2 * 2 * 2 * 64 * 4 * first.len() as u64;
    assert!(sizes[1] + kv / 2 < sizes[0], "{sizes:?}, KV of {kv}");

    for name in FAMILIES {
        let family = Family::load(name);
        let divides = family.model.new_cache().unwrap().head_dim_is_multiple_of(32);
        match family.on_disk_in_bits(&folder.path().join(name), MB, 8) {
            Err(Error::Config(ConfigError::Key { field, .. })) => {
                assert!(field == "store.kv_bits" && !divides)
            }
            Err(error) => panic!("{error}"),
            Ok(_) => assert!(divides, "KV of {name} does not divide into groups"),
        }
    }
}

/// Flipped bits, cuts and junk anywhere in the file: in KV, states, records, pages of the database.
#[test]
fn damaged_file_changes_no_reply() {
    for name in FAMILIES {
        let family = Family::load(name);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        let (prefixes, first, whole) = family.saved(&path);
        drop(prefixes);
        let bytes = std::fs::read(&path).unwrap();
        let mut random = Random(3);
        let (mut missed, mut used) = (0, 0);
        // The hybrid is the slowest.
        let rounds = scaled(if name == FAMILIES[0] { 8 } else { 24 });
        for round in 0..rounds {
            let damaged = folder.path().join(format!("damaged {round}"));
            let mut content = bytes.clone();
            // Most of a young file is empty, and damage there changes nothing.
            while content == bytes {
                damage(&mut content, round, &mut random);
            }
            std::fs::write(&damaged, content).unwrap();
            let mut prefixes = family.on_disk(&damaged, 64 * MB);
            let resumed = family.reply(&mut prefixes, &first, REPLY);
            assert!(resumed.tokens == whole.tokens, "{name}: round {round} changed the reply");
            drop(prefixes);
            std::fs::remove_file(&damaged).unwrap();
            missed += usize::from(resumed.cached < first.len() - 3);
            used += usize::from(resumed.cached > 0);
        }
        println!("{name}: {missed} of {rounds} rounds restored less, {used} something");
        assert!(missed > 0 && used > 0, "{name}: {missed} restored less, {used} something");
    }
}

/// Environment of the child that is killed: the file it saves to, and the family.
const FILE: &str = "STEERSMAN_TEST_PREFIX_FILE";
const FAMILY: &str = "STEERSMAN_TEST_PREFIX_FAMILY";

#[test]
#[ignore = "a child process of the next test"]
fn child_that_saves_prefixes_until_it_is_killed() {
    let (Ok(path), Ok(name)) = (std::env::var(FILE), std::env::var(FAMILY)) else { return };
    let name = FAMILIES.into_iter().find(|family| *family == name).unwrap();
    let family = Family::load(name);
    let mut prefixes = family.on_disk(path.as_ref(), 64 * MB);
    println!("\nready");
    for seed in 1.. {
        family.reply(&mut prefixes, &prompt(seed, 230), 20);
    }
}

/// Each kill hits the file that the one before left.
#[test]
fn killed_process_leaves_state_that_can_be_resumed_from() {
    let folder = tempfile::tempdir().unwrap();
    let first = prompt(1, 230);
    let mut random = Random(5);
    let families = FAMILIES.map(Family::load);
    let whole: Vec<CountedReply> =
        families.iter().map(|f| f.reply(&mut f.in_memory(), &first, REPLY)).collect();
    let mut reused = [0; 3];
    for round in 0..scaled(30) {
        // The hybrid is the slowest.
        let which = [1, 2, 0, 1, 2][round % 5];
        let family = &families[which];
        let path = folder.path().join(family.name);
        let mut child = child(module_path!(), "child_that_saves_prefixes_until_it_is_killed")
            .env(FILE, &path)
            .env(FAMILY, family.name)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        assert!(output.by_ref().lines().any(|line| line.unwrap() == "ready"));
        std::thread::sleep(Duration::from_micros(random.below(450_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();

        let mut prefixes = family.on_disk(&path, 64 * MB);
        let resumed = family.reply(&mut prefixes, &first, REPLY);
        assert!(resumed.tokens == whole[which].tokens, "{}: round {round}", family.name);
        reused[which] += usize::from(resumed.cached > 0);
    }
    println!("resumed: {reused:?} times");
    assert!(reused.iter().all(|&count| count > 2), "{reused:?}");
    let files = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 3, "no file was set aside");
}
