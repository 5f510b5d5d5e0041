//! Families with recurrent layers, or with a latent cache: replies are equal on every path.

use super::scripted::{ask, family};
use crate::config::{Config, DraftKind};
use crate::measure::verify::{DecodePath, verify};

/// Chunks, restored state, rejected and accepted drafts, batches and preemption: each reply is the plain one.
#[test]
fn hybrids_reply_equally_on_every_path() {
    let paths = [
        DecodePath::Plain,
        DecodePath::Chunked(7),
        DecodePath::Resumed,
        DecodePath::Rewound,
        DecodePath::Drafted(DraftKind::Ngram),
        DecodePath::Batched(5, None),
        DecodePath::Batched(4, Some(DraftKind::Ngram)),
        DecodePath::Preempted(Some(DraftKind::Ngram)),
    ];
    let hybrids = [
        "mamba2",
        "granitemoehybrid",
        "nemotron_h",
        "falcon_h1",
        "lfm2",
        "kimi_linear",
        "deepseek_v3",
    ];
    // Gemma 3n has no recurrent layers, but windows and shared keys.
    for name in hybrids.into_iter().chain(["gemma3n"]) {
        let mut config = Config::default();
        config.engine.prefill_chunk = 16;
        let decoder = &mut family(name, config, false);
        let request = ask("Where does the fox live, and where does the owl?", false, 40);
        for outcome in verify(decoder, &[request], &paths, 40, |_| ()).unwrap() {
            assert!(outcome.holds(), "{name}: {outcome:?}");
        }
    }
}
