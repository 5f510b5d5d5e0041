//! Speculation: however a reply is drafted, rejected and rewound, it is the plain one.

use steersman_engine::config::{Config, DraftKind};
use steersman_engine::decode::Decoder;
use steersman_engine::decode::verify::{DecodePath, Outcome};
use steersman_engine::request::{Message, Request};
use steersman_tests::{bundled_model, config, fixture, load, load_from};

/// The first `of_each` prompts of each of these kinds: see `tests/fixtures/speculation.py`.
fn requests(kinds: &[&str], of_each: usize) -> Vec<Request> {
    let prompts = fixture("speculation.json");
    let prompts = prompts.as_array().unwrap();
    let request = |prompt: &serde_json::Value| Request {
        id: prompt["kind"].as_str().unwrap().into(),
        profile: "default".into(),
        messages: serde_json::from_value::<Vec<Message>>(prompt["messages"].clone()).unwrap(),
        reasoning: prompt["thinking"].as_bool(),
        ..Request::default()
    };
    let of_kind = |kind: &&str| {
        let own = prompts.iter().filter(|prompt| prompt["kind"] == **kind);
        own.take(of_each).map(request).collect::<Vec<_>>()
    };
    kinds.iter().flat_map(of_kind).collect()
}

const KINDS: [&str; 4] = ["extraction", "story", "copying", "loop"];

fn decoder(config: Config) -> Decoder {
    let data = tempfile::tempdir().unwrap();
    load(config, data.path()).unwrap().0
}

/// The bundled model drafts for itself where no smaller one is at hand: every draft is right then,
/// which is the other end of what the law has to hold for.
fn with_draft_model() -> Config {
    let mut config = config();
    let other = std::env::var("DRAFT_MODEL").map(Into::into);
    let folder = other.unwrap_or_else(|_| bundled_model());
    config.speculation.draft_model = folder.to_str().unwrap().into();
    config
}

/// Greedy replies, escapes from loops included, in every path there is: prefilled in chunks, resumed,
/// rewound after a rejection at every place of a draft, with every kind of draft, and as the
/// governor likes. `steersman verify --prompts tests/fixtures/speculation.json` runs all 200.
#[test]
fn drafted_replies_equal_plain_ones() {
    let mut decoder = decoder(with_draft_model());
    let paths = decoder.paths().unwrap();
    for kind in [DraftKind::Ngram, DraftKind::Mtp, DraftKind::Model] {
        assert!(paths.contains(&DecodePath::Drafted(kind)), "{kind:?}");
    }
    let requests = requests(&KINDS, 1);
    for outcome in decoder.verify(&requests, &paths, 96, |_| ()).unwrap() {
        assert!(outcome.holds() && outcome.equal == requests.len(), "{outcome:?}");
        let [drafted, accepted, _] = outcome.drafted;
        match outcome.path {
            DecodePath::Drafted(DraftKind::Model) => {
                assert!(accepted > drafted / 2, "{outcome:?}");
            }
            DecodePath::Drafted(_) | DecodePath::Rewound => {
                assert!(accepted > 0 && drafted > accepted)
            }
            DecodePath::Resumed => assert!(outcome.cached > 0, "{outcome:?}"),
            _ => {}
        }
    }
}

/// A model of another vocabulary cannot draft, and the error says why.
#[test]
fn a_draft_model_must_have_the_same_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = std::fs::read_to_string(bundled_model().join("tokenizer.json")).unwrap();
    let tokenizer = tokenizer.replacen("<|im_start|>", "<|im_begin|>", usize::MAX);
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
    let mut config = config();
    config.speculation.draft_model = folder.path().to_str().unwrap().into();
    let data = tempfile::tempdir().unwrap();
    let Err(error) = load(config, data.path()) else { panic!("it was loaded") };
    let error = error.to_string();
    for word in ["tokenizer.json", "vocabulary", "<|im_begin|>"] {
        assert!(error.contains(word), "`{word}` is not in {error}");
    }
}

/// Calibrates, and lets the model do without what that allows: the replies say so, and exits draft.
#[test]
fn what_calibration_finds_is_used() {
    let data = tempfile::tempdir().unwrap();
    let load = |skip_kl| {
        let mut config = config();
        config.engine.skip_kl = skip_kl;
        steersman_tests::load(config, data.path())
    };
    let Err(error) = load(0.05) else { panic!("nothing is known yet") };
    assert!(error.to_string().contains("steersman calibrate"), "{error}");

    let requests = requests(&KINDS, 1);
    let mut whole = load(0.0).unwrap().0;
    let found = whole.calibrate(&requests, 48, |_, _| ()).unwrap();
    assert_eq!(found.exits.len(), 7);
    assert!(found.exits.is_sorted() && found.exits[6] > 0.6, "{:?}", found.exits);
    assert!(found.skips.iter().map(|skip| skip.kl).is_sorted(), "{:?}", found.skips);
    drop(whole);

    let least = found.skips[0].kl;
    let (_, whole) = load(0.0).unwrap();
    let (mut lossy, info) = load(least * 1.01).unwrap();
    assert_ne!(whole.fingerprint, info.fingerprint, "its state must not be mixed up");
    let paths = lossy.paths().unwrap();
    for outcome in lossy.verify(&requests[..1], &paths, 24, |_| ()).unwrap() {
        assert!(outcome.holds(), "{outcome:?}");
    }
}

/// Prints what speculation wins where the text suits it (long copies, long lists of people as JSON),
/// and loses where it does not (stories drawn at temperature 1, and at 2 where words follow no rule):
/// plain and governed in turn, the median of five rounds.
///
/// The bundled model copies none of these texts to its end. `COPYING_MODEL` names the folder of one
/// that does, as `tests/fixtures/real.py` makes.
#[test]
#[ignore = "prints a measurement"]
fn speed_of_drafts() {
    let mut config = config();
    config.speculation.draft_model = std::env::var("DRAFT_MODEL").unwrap_or_default();
    let mut bundled = decoder(config);
    for (kind, temperature) in
        [("extraction", 0.0), ("copying", 0.0), ("story", 1.0), ("story", 2.0)]
    {
        print_speed(&mut bundled, kind, temperature);
    }
    if let Ok(folder) = std::env::var("COPYING_MODEL") {
        drop(bundled);
        let data = tempfile::tempdir().unwrap();
        let (mut real, _) = load_from(self::config(), folder.as_ref(), data.path()).unwrap();
        print!("{folder}: ");
        print_speed(&mut real, "copying", 0.0);
    }
}

fn print_speed(decoder: &mut Decoder, kind: &str, temperature: f32) {
    let mut requests = requests(&[kind], 50);
    requests.sort_by_key(|request| std::cmp::Reverse(request.messages[0].content.len()));
    requests.truncate(5);
    for request in &mut requests {
        request.sampling.temperature = Some(temperature);
    }
    let rounds: Vec<Vec<Outcome>> = (0..5)
        .map(|_| {
            decoder
                .verify(&requests, &[DecodePath::Plain, DecodePath::Governed], 256, |_| ())
                .unwrap()
        })
        .collect();
    let seconds = |outcome: &Outcome| outcome.times.iter().sum::<std::time::Duration>();
    let ratio = |round: &Vec<Outcome>| seconds(&round[0]).div_duration_f64(seconds(&round[1]));
    let mut ratios: Vec<f64> = rounds.iter().map(ratio).collect();
    ratios.sort_by(f64::total_cmp);
    let [plain, governed] = &rounds[4][..] else { unreachable!("two paths") };
    let [drafted, accepted, passes] = governed.drafted;
    let tokens: usize = plain.tokens.iter().sum();
    println!(
        "{kind} at {temperature}: {:.2}x (of {ratios:.2?}), {tokens} tokens, {:.1} tok/s plain, {passes} passes \
         with drafts, {accepted} of {drafted} accepted",
        ratios[2],
        tokens as f64 / seconds(plain).as_secs_f64(),
    );
}
