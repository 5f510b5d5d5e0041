//! Speculation: replies equal those of plain decoding, with any drafts, rejections and rewinds.

use steersman_engine::config::{Activations, Config, DraftKind};
use steersman_engine::tools::calibrate::calibrate;
use steersman_engine::tools::verify::{DecodePath, paths, verify};
use steersman_tests::{bundled_model, config, load, speculation_prompts};

const KINDS: [&str; 4] = ["extraction", "story", "copying", "loop"];

/// Without `DRAFT_MODEL`, the bundled model drafts for itself, and every draft is accepted: the opposite
/// extreme to the rewound path.
fn with_draft_model() -> Config {
    let mut config = config();
    let other = std::env::var("DRAFT_MODEL").map(Into::into);
    let folder = other.unwrap_or_else(|_| bundled_model());
    config.speculation.draft_model = folder.to_str().unwrap().into();
    config
}

/// Greedy replies, including closed reasoning loops, on every path: prefilled in chunks, resumed,
/// rewound after a rejection at every place of a draft, with every drafter, and governed; with exact products and rounded
/// ones, whose rows do not depend on one another either.
/// `steersman verify --prompts tests/fixtures/speculation.json` runs all 200 prompts.
#[test]
fn greedy_speculation_equals_greedy_decoding() {
    check_speculation(Activations::Exact, 96);
}

#[test]
fn greedy_speculation_equals_greedy_decoding_with_rounded_products() {
    check_speculation(Activations::Int8, 48);
}

fn check_speculation(activations: Activations, tokens: usize) {
    let mut config = with_draft_model();
    config.model.activations = activations;
    let data = tempfile::tempdir().unwrap();
    let (mut decoder, _) = load(config, data.path()).unwrap();
    let paths = paths(&decoder).unwrap();
    for kind in [DraftKind::Ngram, DraftKind::Mtp, DraftKind::Model] {
        assert!(paths.contains(&DecodePath::Drafted(kind)), "{kind:?}");
    }
    let requests = speculation_prompts(&KINDS, 1);
    for outcome in verify(&mut decoder, &requests, &paths, tokens, |_| ()).unwrap() {
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
            DecodePath::Governed => assert!(drafted > 0, "{outcome:?}"),
            _ => {}
        }
    }
}

/// Saved state of exact products is not continued with rounded ones.
#[test]
fn rounded_products_have_another_fingerprint() {
    let fingerprint = |activations| {
        let data = tempfile::tempdir().unwrap();
        let mut config = config();
        config.model.activations = activations;
        load(config, data.path()).unwrap().1.fingerprint
    };
    assert_ne!(fingerprint(Activations::Exact), fingerprint(Activations::Int8));
}

/// The error names the first difference.
#[test]
fn draft_model_with_another_vocabulary_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = std::fs::read_to_string(bundled_model().join("tokenizer.json")).unwrap();
    let tokenizer = tokenizer.replacen("<|im_start|>", "<|im_begin|>", usize::MAX);
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
    let mut config = config();
    config.speculation.draft_model = folder.path().to_str().unwrap().into();
    let data = tempfile::tempdir().unwrap();
    let Err(error) = load(config, data.path()) else { panic!("the model loaded") };
    let error = error.to_string();
    for word in ["tokenizer.json", "vocabulary", "<|im_begin|>"] {
        assert!(error.contains(word), "`{word}` is not in {error}");
    }
}

/// Skipping blocks requires a calibration, and changes the fingerprint.
#[test]
fn calibration_enables_skipping() {
    let data = tempfile::tempdir().unwrap();
    let load = |skip_kl| {
        let mut config = config();
        config.engine.skip_kl = skip_kl;
        steersman_tests::load(config, data.path())
    };
    let Err(error) = load(0.05) else { panic!("loaded without a calibration") };
    assert!(error.to_string().contains("steersman calibrate"), "{error}");

    let requests = speculation_prompts(&KINDS, 1);
    let mut whole = load(0.0).unwrap().0;
    let found = calibrate(&mut whole, &requests, 48, |_, _| ()).unwrap();
    assert_eq!(found.exits.len(), 7);
    assert!(found.exits.is_sorted() && found.exits[6] > 0.6, "{:?}", found.exits);
    assert!(found.skips.iter().map(|skip| skip.kl).is_sorted(), "{:?}", found.skips);
    drop(whole);

    let least = found.skips[0].kl;
    let (_, whole) = load(0.0).unwrap();
    let (mut lossy, info) = load(least * 1.01).unwrap();
    assert_ne!(whole.fingerprint, info.fingerprint, "saved state must not be shared");
    let paths = paths(&lossy).unwrap();
    for outcome in verify(&mut lossy, &requests[..1], &paths, 24, |_| ()).unwrap() {
        assert!(outcome.holds(), "{outcome:?}");
    }
}
