//! Whatever bytes a policy is made of, and whatever it answers, the server neither panics nor hangs:
//! 100,000 inputs each, the same ones every time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steersman_engine::config::PolicyConfig;
use steersman_engine::policy::wasm::{Component, Host, Scene};
use steersman_engine::policy::{
    Action, Ban, Bias, Policy, PromptView, Replacement, Resample, SamplingChange, TokenBias, disk,
    prompt, validate,
};
use steersman_tests::Random;

/// Inputs of each law, over two threads.
const INPUTS: usize = 100_000;

/// Longest that one input may take: it takes a millisecond.
const PATIENCE: Duration = Duration::from_secs(20);

/// A small component that works: its `on-prompt` removes the first letter.
const COMPONENT: &str = r#"
(component
  (import "steersman:policy/types@0.2.0" (instance $types
    (type $prompt' (record (field "profile" string) (field "params" (list (tuple string string)))
      (field "system" (list string))))
    (export "prompt" (type $prompt (eq $prompt')))
    (type $replacement' (record (field "message" u32) (field "old" string) (field "new" string)))
    (export "replacement" (type $replacement (eq $replacement')))))
  (alias export $types "prompt" (type $prompt))
  (alias export $types "replacement" (type $replacement))
  (core module $m
    (memory (export "memory") 1)
    (func (export "r") (param i32 i32 i32 i32) (result i32) i32.const 4096)
    (func (export "f") (param i32 i32 i32 i32 i32 i32) (result i32)
      (i32.store (i32.const 0) (i32.const 16))
      (i32.store (i32.const 4) (i32.const 1))
      i32.const 0)
    (data (i32.const 20) "\40\00\00\00\01")
    (data (i32.const 64) "A"))
  (core instance $i (instantiate $m))
  (func $f (param "prompt" $prompt) (result (list $replacement))
    (canon lift (core func $i "f") (memory (core memory $i "memory")) (realloc (core func $i "r"))))
  (instance $h (export "on-prompt" (func $f)))
  (export "steersman:policy/on-prompt@0.2.0" (instance $h)))"#;

/// Runs `check` on inputs with numbers below [`INPUTS`], over two threads; adds up what it counts.
fn over_two_threads(check: impl Fn(&mut Random, usize) -> usize + Sync) -> usize {
    std::thread::scope(|scope| {
        let half = |odd: usize| {
            let check = &check;
            scope.spawn(move || {
                let mut random = Random(odd as u64 + 1);
                (odd..INPUTS).step_by(2).map(|number| check(&mut random, number)).sum::<usize>()
            })
        };
        let halves = [half(0), half(1)];
        halves.map(|half| half.join().expect("no input makes it panic")).into_iter().sum()
    })
}

/// Noise, noise behind a valid head, or a damaged component.
fn bytes(random: &mut Random, number: usize, valid: &[u8]) -> Vec<u8> {
    let noise = |random: &mut Random, most: usize| -> Vec<u8> {
        (0..random.below(most)).map(|_| random.below(256) as u8).collect()
    };
    match number % 8 {
        0 => noise(random, 300),
        1 => [&valid[..8], &noise(random, 300)].concat(),
        2 => [&valid[..random.below(valid.len())], &noise(random, 30)[..]].concat(),
        3 => valid[..random.below(valid.len())].to_vec(),
        _ => {
            let mut bytes = valid.to_vec();
            for _ in 0..1 + random.below(3) {
                damage(random, &mut bytes);
            }
            bytes
        }
    }
}

fn damage(random: &mut Random, bytes: &mut Vec<u8>) {
    let at = random.below(bytes.len() - 8);
    match random.below(6) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.of(&[0, 1, 0x40, 0x7f, 0x80, 0xff]),
        2 => bytes[at] = random.below(256) as u8,
        3 => bytes.insert(at, random.below(256) as u8),
        4 => drop(bytes.remove(at)),
        _ => {
            // A piece of it, elsewhere.
            let from = random.below(bytes.len() - 8);
            let piece = bytes[from..from + 1 + random.below(8)].to_vec();
            bytes.splice(at..at + piece.len(), piece);
        }
    }
}

#[test]
fn no_bytes_harm_the_loader_and_what_loads_runs_within_its_limits() {
    let limits = PolicyConfig {
        fuel: 100_000,
        deadline_ms: 10_000,
        memory_bytes: 1 << 20,
        ..PolicyConfig::default()
    };
    let host = Host::new(&limits, &disk::in_memory()).unwrap();
    let valid = wat::parse_str(COMPONENT).unwrap();
    let prompt = PromptView { system: vec!["A clock.".into()], ..PromptView::default() };
    let call = |bytes: &[u8]| {
        let component = Arc::new(Component::load(&host, "fuzz", bytes)?);
        component.instantiate(&Scene::trial())?.on_prompt(&prompt)
    };
    let removed = Replacement { message: 0, old: "A".into(), new: String::new() };
    assert_eq!(call(&valid).unwrap(), [removed]);
    let answered = over_two_threads(|random, number| {
        let bytes = bytes(random, number, &valid);
        let started = Instant::now();
        let answer = call(&bytes);
        let took = started.elapsed();
        assert!(took < PATIENCE, "input {number} took {took:?}");
        if let Err(error) = &answer {
            assert_eq!(error.to_string().lines().count(), 1, "input {number}: {error}");
        }
        usize::from(answer.is_ok())
    });
    // Damage that changes nothing, a name that nobody asks for: both ways were gone often.
    assert!((500..INPUTS / 2).contains(&answered), "{answered} answered");
}

fn number(random: &mut Random, mild: bool) -> f32 {
    if mild {
        return random.of(&[0.0, -0.0, 0.5, 1.0, f32::MIN_POSITIVE, 0.999]);
    }
    match random.below(3) {
        0 => f32::from_bits(random.below(1 << 16) as u32 | (random.below(1 << 16) as u32) << 16),
        1 => random.of(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, -0.0]),
        _ => random.of(&[1.0, 1.000_000_1, 10.0, 10.000_001, 100.0, 100.000_01, -100.0, -1e-9]),
    }
}

fn sampling(random: &mut Random, mild: bool) -> SamplingChange {
    let mut value = || (random.below(2) == 0).then(|| number(random, mild));
    let (temperature, top_p, min_p) = (value(), value(), value());
    SamplingChange { temperature, top_p, min_p, top_k: Some(random.below(1 << 20) as u32) }
}

fn text(random: &mut Random, mild: bool) -> String {
    let most = if mild { 100 } else { 20_000 };
    random.of(&["a", "ä", "\0", "𝄞"]).repeat(random.below(most) / 4)
}

fn action(random: &mut Random, vocabulary: u32, mild: bool) -> Action {
    let count = if mild { random.below(20) } else { random.of(&[0, 1, 255, 256, 257, 5000]) };
    let steps = random.below(1 << 31) as u32;
    let token = |random: &mut Random| match vocabulary {
        1.. if mild => random.below(vocabulary as usize) as u32,
        _ => random.of(&[0, vocabulary.saturating_sub(1), vocabulary, u32::MAX]),
    };
    match random.below(7) {
        0 => Action::Inject(text(random, mild)),
        1 => Action::CloseThinking(text(random, mild)),
        2 => Action::Rewind(random.of(&[0, 1, u32::MAX])),
        3 => Action::Ban(Ban { tokens: (0..count).map(|_| token(random)).collect(), steps }),
        4 => {
            let one = |random: &mut Random| TokenBias {
                token: token(random),
                bias: number(random, mild),
            };
            Action::Bias(Bias { tokens: (0..count).map(|_| one(random)).collect(), steps })
        }
        5 => Action::Sampling(Resample { sampling: sampling(random, mild), steps }),
        _ => Action::Stop(text(random, mild)),
    }
}

/// What the contract says of a list of actions, in other words than the validator's.
fn is_fine(actions: &[Action], vocabulary: u32, output_bytes: usize) -> bool {
    let finite = |value: Option<f32>, low: f64, high: f64| {
        value.is_none_or(|x| x.is_finite() && f64::from(x) >= low && f64::from(x) <= high)
    };
    let drawn = |s: &SamplingChange| {
        finite(s.temperature, 0.0, 10.0)
            && finite(s.top_p, f64::from(f32::from_bits(1)), 1.0)
            && finite(s.min_p, 0.0, 1.0)
    };
    let mut bytes = 0u64;
    for action in actions {
        let fine = match action {
            Action::Inject(text) | Action::CloseThinking(text) | Action::Stop(text) => {
                bytes += text.len() as u64;
                true
            }
            Action::Rewind(_) => true,
            Action::Ban(ban) => {
                let unknown = ban.tokens.iter().filter(|token| **token >= vocabulary).count();
                unknown == 0 && ban.tokens.len() < 257
            }
            Action::Bias(bias) => {
                let good = |one: &TokenBias| one.token < vocabulary && one.bias.abs() <= 100.0;
                bias.tokens.len() < 257 && bias.tokens.iter().all(good)
            }
            Action::Sampling(resample) => drawn(&resample.sampling),
        };
        if !fine {
            return false;
        }
    }
    actions.len() < 17 && bytes <= output_bytes as u64
}

#[test]
fn actions_are_accepted_just_when_the_contract_allows_them() {
    let accepted = over_two_threads(|random, number| {
        let mild = random.below(4) != 0;
        let vocabulary = random.of(&[0, 1, 512, 151_936, u32::MAX]);
        let count = if mild { random.below(6) } else { random.below(20) };
        let actions: Vec<_> = (0..count)
            // A wild one among mild ones is seen, too.
            .map(|_| {
                let mild = mild || random.below(8) != 0;
                action(random, vocabulary, mild)
            })
            .collect();
        let output_bytes = random.of(&[1, 200, 16 << 10]);
        let checked = validate::actions(&actions, vocabulary, output_bytes);
        let fine = is_fine(&actions, vocabulary, output_bytes);
        assert_eq!(checked.is_ok(), fine, "input {number}: {checked:?} {actions:?}");
        usize::from(fine)
    });
    assert!((INPUTS / 10..INPUTS * 9 / 10).contains(&accepted), "{accepted} accepted");
}

#[test]
fn replacements_are_made_one_after_the_other_or_refused() {
    let made = over_two_threads(|random, number| {
        let mut word = |letters: usize| -> String {
            (0..random.below(letters)).map(|_| random.of(&["a", "ä", "b"])).collect()
        };
        let system: BTreeMap<u32, String> = (0..2).map(|message| (message, word(12))).collect();
        let spans: Vec<_> = (0..3).map(|_| (word(3), word(3))).collect();
        let replacements: Vec<_> = spans
            .into_iter()
            .take(1 + random.below(3))
            .map(|(old, new)| Replacement { message: random.of(&[0, 0, 1, 1, 1, 2]), old, new })
            .collect();
        // In other words: all before the span, what is new, all behind it.
        let mut expected = Some(system.clone());
        for Replacement { message, old, new } in &replacements {
            expected = expected.and_then(|mut system| {
                let text = system.get_mut(message).filter(|_| !old.is_empty())?;
                let (before, behind) = text.split_once(old.as_str())?;
                *text = [before, new, behind].concat();
                Some(system)
            });
        }
        let texts: Vec<_> = system.into_values().collect();
        let mut replaced = texts.clone();
        let outcome = prompt::replace(&mut replaced, &replacements).map(|()| replaced);
        assert_eq!(outcome.is_ok(), expected.is_some(), "input {number}: {replacements:?}");
        let checked = validate::replacements(&texts, &replacements, 1000);
        assert_eq!(checked.is_ok(), expected.is_some(), "input {number}: {replacements:?}");
        let Some(expected) = expected else { return 0 };
        assert_eq!(outcome.unwrap(), expected.into_values().collect::<Vec<_>>(), "input {number}");
        1
    });
    assert!((INPUTS / 10..INPUTS * 9 / 10).contains(&made), "{made} made");
}
