//! A decoder on several ranks replies as one process does.

use super::*;
use crate::measure::verify::verify_ranks;

fn config(kv_bits: u32) -> Config {
    let mut config = Config::default();
    config.engine.kv_bits = kv_bits;
    config
}

/// Drafts, rewinds, resumed and preempted sequences, batches, and KV in 8 bits: whatever the first rank does with a cache, the
/// others do with theirs.
#[test]
fn two_ranks_reply_as_one_process_on_all_paths() {
    for kv_bits in [0, 8] {
        let mut alone = load_on(1, &bundled_model(), config(kv_bits)).unwrap();
        let mut decoder = load_on(2, &bundled_model(), config(kv_bits)).unwrap();
        let requests = [ask("Copy this text exactly:\nThe quiet fox walked near the river.")];
        let mut paths = paths(&decoder).unwrap();
        paths.extend([
            DecodePath::Preempted(None),
            DecodePath::Preempted(Some(DraftKind::Mtp)),
            DecodePath::Drafted(DraftKind::EarlyExit),
        ]);
        let outcomes =
            verify_ranks(&mut decoder, &mut alone, &requests, &paths, 24, |_| ()).unwrap();
        for outcome in outcomes {
            assert!(outcome.holds(), "{kv_bits}: {outcome:?}");
        }
    }
}

/// Otherwise the first rank would wait for one that is not there.
#[test]
fn a_model_that_ranks_cannot_divide_is_refused() {
    let error = load_on(4, &bundled_model(), config(0)).err().expect("6 heads").to_string();
    assert!(error.contains("q_proj` cannot be cut: 4 ranks"), "{error}");
    for count in [0, 9] {
        let error = load_on(count, &bundled_model(), config(0)).err().expect("a wrong number");
        assert!(error.to_string().contains("must be from 1 to 8"), "{error}");
    }
}
