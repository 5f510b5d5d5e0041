//! The host neither panics nor hangs on damaged components and arbitrary answers. `STEERSMAN_FUZZ_INPUTS` sets the
//! number of inputs of each test, which are the same in every run and run on two threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use steersman_policy_host::{
    Action, Ban, Bias, Component, Context, Failure, HookInput, Host, Instance, Policy,
    PolicyConfig, PromptEdit, PromptView, Replacement, SamplingChange, SamplingPatch, Step,
    Storage, TokenBias, Vocabulary, apply_edits,
};
use steersman_test_support::guest::{
    Answers, HOST, Value, answering, case, float, importing, list, record, some, text, word,
};
use steersman_test_support::{Random, fuzz_inputs};

/// Limit on the time of one input, which takes about a millisecond.
const PATIENCE: Duration = Duration::from_secs(20);

/// A small valid component: its `on-prompt` removes the first letter.
fn valid() -> Vec<u8> {
    answering("on-prompt", &list([case("replace", record([("old", text("A"))]))]))
}

/// Runs `check` on [`fuzz_inputs`] inputs, on two threads with a state of `start` each; returns the sum of
/// its results.
fn on_two_threads<S>(
    start: impl Fn() -> S + Sync,
    check: impl Fn(&mut S, &mut Random, usize) -> usize + Sync,
) -> usize {
    std::thread::scope(|scope| {
        let half = |odd: usize| {
            let (start, check) = (&start, &check);
            scope.spawn(move || {
                let (mut state, mut random) = (start(), Random(odd as u64 + 1));
                let numbers = (odd..fuzz_inputs()).step_by(2);
                numbers.map(|number| check(&mut state, &mut random, number)).sum::<usize>()
            })
        };
        let halves = [half(0), half(1)];
        halves.map(|half| half.join().expect("no input causes a panic")).into_iter().sum()
    })
}

/// Noise, noise after a valid header, or a damaged component.
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
            // Copies a piece to another place.
            let from = random.below(bytes.len() - 8);
            let piece = bytes[from..from + 1 + random.below(8)].to_vec();
            bytes.splice(at..at + piece.len(), piece);
        }
    }
}

#[test]
fn damaged_components_are_refused_or_run_within_their_limits() {
    let limits = PolicyConfig {
        fuel: 100_000,
        deadline_ms: 10_000,
        memory_bytes: 1 << 20,
        ..PolicyConfig::default()
    };
    let host = Host::new(&limits, &Storage::in_memory()).unwrap();
    let valid = valid();
    let prompt = PromptView { system: vec!["A clock.".into()], ..PromptView::default() };
    let call = |bytes: &[u8]| {
        let component = Arc::new(Component::load(&host, "fuzz", bytes).map_err(|e| e.to_string())?);
        let instance = component.instantiate(&Context::dry_run());
        let policy: &mut dyn Policy = &mut instance.map_err(|failure| failure.to_string())?;
        policy.ask(&prompt).map_err(|failure| failure.to_string())
    };
    let removed = Replacement { message: 0, old: "A".into(), new: String::new() };
    assert_eq!(call(&valid).unwrap(), [PromptEdit::Replace(removed)]);
    let answered = on_two_threads(
        || (),
        |(), random, number| {
            let bytes = bytes(random, number, &valid);
            let started = Instant::now();
            let answer = call(&bytes);
            let took = started.elapsed();
            assert!(took < PATIENCE, "input {number} took {took:?}");
            if let Err(error) = &answer {
                assert_eq!(error.lines().count(), 1, "input {number}: {error}");
            }
            usize::from(answer.is_ok())
        },
    );
    // Some damage has no effect, in names for example: both outcomes are frequent.
    assert!((fuzz_inputs() / 200..fuzz_inputs() / 2).contains(&answered), "{answered} answered");
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

fn sampling(random: &mut Random, mild: bool) -> SamplingPatch {
    let mut value = || (random.below(2) == 0).then(|| number(random, mild));
    let (temperature, top_p, min_p) = (value(), value(), value());
    SamplingPatch { temperature, top_p, min_p, top_k: Some(random.below(1 << 20) as u32) }
}

fn some_text(random: &mut Random, mild: bool) -> String {
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
        0 => Action::Inject(some_text(random, mild)),
        1 => Action::CloseReasoning(some_text(random, mild)),
        2 => Action::Rewind(random.of(&[0, 1, u32::MAX])),
        3 => Action::Ban(Ban { tokens: (0..count).map(|_| token(random)).collect(), steps }),
        4 => {
            let one = |random: &mut Random| TokenBias {
                token: token(random),
                bias: number(random, mild),
            };
            Action::Bias(Bias { tokens: (0..count).map(|_| one(random)).collect(), steps })
        }
        5 => Action::Sampling(SamplingChange { sampling: sampling(random, mild), steps }),
        _ => Action::Stop(some_text(random, mild)),
    }
}

/// Whether the contract allows the actions: a second implementation of the host's check.
fn is_allowed(actions: &[Action], vocabulary: u32, output_bytes: usize) -> bool {
    let finite = |value: Option<f32>, low: f64, high: f64| {
        value.is_none_or(|x| x.is_finite() && f64::from(x) >= low && f64::from(x) <= high)
    };
    let sampled = |s: &SamplingPatch| {
        finite(s.temperature, 0.0, 10.0)
            && finite(s.top_p, f64::from(f32::from_bits(1)), 1.0)
            && finite(s.min_p, 0.0, 1.0)
    };
    let mut bytes = 0u64;
    for action in actions {
        let allowed = match action {
            Action::Inject(text) | Action::CloseReasoning(text) | Action::Stop(text) => {
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
            Action::Sampling(change) => sampled(&change.sampling),
        };
        if !allowed {
            return false;
        }
    }
    actions.len() < 17 && bytes <= output_bytes as u64
}

/// A guest whose answer is the bytes that `tokenizer.encode` returns: the host writes them to [`HOST`].
fn echo(hook: &str) -> Vec<u8> {
    let body = format!(
        "(if (i32.eq (memory.size) (i32.const 1)) (then (drop (memory.grow (i32.const 63)))))
         (call $tokenizer.encode (i32.const 0) (i32.const 0) (i32.const 0))
         i32.const {HOST}"
    );
    importing(&["tokenizer"], &[(hook, &body)], "")
}

/// A vocabulary of any size, whose `encode` returns an answer.
#[derive(Default)]
struct Script {
    size: AtomicU32,
    answer: Mutex<Vec<u32>>,
}

impl Script {
    fn set(&self, hook: &str, answer: &Value) {
        let mut answers = Answers::at(HOST);
        answers.add(hook, answer);
        let mut bytes = answers.bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        *self.answer.lock().unwrap() = words.collect();
    }
}

impl Vocabulary for Script {
    fn encode(&self, _: &str) -> Option<Vec<u32>> {
        Some(self.answer.lock().unwrap().clone())
    }

    fn decode(&self, _: &[u32]) -> String {
        String::new()
    }

    fn size(&self) -> u32 {
        self.size.load(Ordering::Relaxed)
    }
}

/// An instance of [`echo`] on each thread; a new one after each failure.
struct Echo {
    component: Arc<Component>,
    script: Arc<Script>,
    instance: Option<Instance>,
}

impl Echo {
    fn new(hook: &str, output_bytes: usize) -> Self {
        let limits = PolicyConfig {
            deadline_ms: 10_000,
            memory_bytes: 4 << 20,
            output_bytes,
            ..PolicyConfig::default()
        };
        let host = Host::new(&limits, &Storage::in_memory()).unwrap();
        let component = Component::load(&host, "echo", &echo(hook)).unwrap();
        Self { component: Arc::new(component), script: Arc::default(), instance: None }
    }

    fn ask<T: HookInput>(&mut self, input: &T) -> Result<T::Answer, Failure> {
        let instance = self.instance.get_or_insert_with(|| {
            let vocabulary = self.script.clone();
            self.component.instantiate(&Context { vocabulary, ..Context::dry_run() }).unwrap()
        });
        let policy: &mut dyn Policy = instance;
        let answer = policy.ask(input);
        if answer.is_err() {
            self.instance = None;
        }
        answer
    }
}

fn tokens(tokens: &[u32]) -> Value {
    list(tokens.iter().map(|&token| word(token)))
}

fn lowered(action: &Action) -> Value {
    let maybe = |value: Option<Value>| value.map_or(word(0), some);
    match action {
        Action::Inject(words) => case("inject", text(words)),
        Action::CloseReasoning(words) => case("close-reasoning", text(words)),
        Action::Rewind(count) => case("rewind", word(*count)),
        Action::Ban(ban) => {
            let fields = [("tokens", tokens(&ban.tokens)), ("steps", word(ban.steps))];
            case("ban", record(fields))
        }
        Action::Bias(bias) => {
            let one =
                |one: &TokenBias| record([("token", word(one.token)), ("bias", float(one.bias))]);
            let biases = list(bias.tokens.iter().map(one));
            case("bias", record([("tokens", biases), ("steps", word(bias.steps))]))
        }
        Action::Sampling(SamplingChange { sampling, steps }) => {
            let patch = record([
                ("temperature", maybe(sampling.temperature.map(float))),
                ("top-p", maybe(sampling.top_p.map(float))),
                ("top-k", maybe(sampling.top_k.map(word))),
                ("min-p", maybe(sampling.min_p.map(float))),
            ]);
            case("sampling", record([("sampling", patch), ("steps", word(*steps))]))
        }
        Action::Stop(reason) => case("stop", text(reason)),
    }
}

#[test]
fn actions_are_accepted_if_and_only_if_the_contract_allows_them() {
    const OUTPUT_BYTES: [usize; 3] = [1, 200, 16 << 10];
    let accepted = on_two_threads(
        || OUTPUT_BYTES.map(|bytes| Echo::new("on-step", bytes)),
        |echoes, random, number| {
            let mild = random.below(4) != 0;
            let vocabulary = random.of(&[0, 1, 512, 151_936, u32::MAX]);
            let count = if mild { random.below(6) } else { random.below(20) };
            let actions: Vec<_> = (0..count)
                // One that is not mild among mild ones.
                .map(|_| {
                    let mild = mild || random.below(8) != 0;
                    action(random, vocabulary, mild)
                })
                .collect();
            let limit = random.below(OUTPUT_BYTES.len());
            let echo = &mut echoes[limit];
            echo.script.size.store(vocabulary, Ordering::Relaxed);
            echo.script.set("on-step", &list(actions.iter().map(lowered)));
            let answer = echo.ask(&Step::default());
            let allowed = is_allowed(&actions, vocabulary, OUTPUT_BYTES[limit]);
            assert_eq!(answer.is_ok(), allowed, "input {number}: {answer:?} {actions:?}");
            if let Ok(answer) = answer {
                assert_eq!(answer, actions, "input {number}");
            }
            usize::from(allowed)
        },
    );
    assert!(
        (fuzz_inputs() / 10..fuzz_inputs() * 9 / 10).contains(&accepted),
        "{accepted} accepted"
    );
}

#[test]
fn replacements_apply_in_order_or_are_refused() {
    let applied = on_two_threads(
        || Echo::new("on-prompt", 1000),
        |echo, random, number| {
            let mut letters = |count: usize| -> String {
                (0..random.below(count)).map(|_| random.of(&["a", "ä", "b"])).collect()
            };
            let system: BTreeMap<u32, String> =
                (0..2).map(|message| (message, letters(12))).collect();
            let spans: Vec<_> = (0..3).map(|_| (letters(3), letters(3))).collect();
            let replacements: Vec<_> = spans
                .into_iter()
                .take(1 + random.below(3))
                .map(|(old, new)| Replacement { message: random.of(&[0, 0, 1, 1, 1, 2]), old, new })
                .collect();
            // A second implementation of the host's.
            let mut expected = Some(system.clone());
            for Replacement { message, old, new } in &replacements {
                expected = expected.and_then(|mut system| {
                    let text = system.get_mut(message).filter(|_| !old.is_empty())?;
                    let (before, after) = text.split_once(old.as_str())?;
                    *text = [before, new, after].concat();
                    Some(system)
                });
            }
            let view =
                PromptView { system: system.into_values().collect(), ..PromptView::default() };
            let mut texts = view.system.clone();
            let edits: Vec<_> = replacements.iter().cloned().map(PromptEdit::Replace).collect();
            let texts = apply_edits(&mut texts, &edits).is_ok().then_some(texts);
            let expected = expected.map(|system| system.into_values().collect());
            assert_eq!(texts, expected, "input {number}: {replacements:?}");
            let one = |one: &Replacement| {
                let one = record([
                    ("message", word(one.message)),
                    ("old", text(&one.old)),
                    ("new", text(&one.new)),
                ]);
                case("replace", one)
            };
            echo.script.set("on-prompt", &list(replacements.iter().map(one)));
            let answer = echo.ask(&view).ok();
            assert_eq!(answer, expected.is_some().then_some(edits), "input {number}");
            usize::from(expected.is_some())
        },
    );
    assert!((fuzz_inputs() / 10..fuzz_inputs() * 9 / 10).contains(&applied), "{applied} applied");
}
