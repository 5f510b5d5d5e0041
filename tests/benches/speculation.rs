//! Speed of speculation: `cargo bench -p steersman-tests --bench speculation`, on a quiet machine.
//!
//! Measures plain and governed decoding in turn, the median of five rounds, on texts that suit
//! speculation (long copies, long lists of people as JSON) and on texts that do not (stories at
//! temperature 1, and at 2, where words follow no rule).
//!
//! The bundled model copies none of these texts to its end. `COPYING_MODEL` names the folder of a model
//! that does, made by `tests/fixtures/real.py`. `DRAFT_MODEL` names the folder of a smaller model that
//! drafts for the bundled one.

use std::cmp::Reverse;
use std::time::Duration;

use steersman_engine::tools::Decoder;
use steersman_engine::tools::verify::{DecodePath, Outcome};
use steersman_tests::{config, load, load_from, speculation_prompts};

fn main() {
    let data = tempfile::tempdir().unwrap();
    let mut own = config();
    own.speculation.draft_model = std::env::var("DRAFT_MODEL").unwrap_or_default();
    let (mut bundled, _) = load(own, data.path()).unwrap();
    for (kind, temperature) in
        [("extraction", 0.0), ("copying", 0.0), ("story", 1.0), ("story", 2.0)]
    {
        measure(&mut bundled, kind, temperature);
    }
    if let Ok(folder) = std::env::var("COPYING_MODEL") {
        drop(bundled);
        let (mut copying, _) = load_from(config(), folder.as_ref(), data.path()).unwrap();
        print!("{folder}: ");
        measure(&mut copying, "copying", 0.0);
    }
}

fn measure(decoder: &mut Decoder, kind: &str, temperature: f32) {
    let mut requests = speculation_prompts(&[kind], 50);
    requests.sort_by_key(|request| Reverse(request.messages[0].content.len()));
    requests.truncate(5);
    for request in &mut requests {
        request.sampling.temperature = Some(temperature);
    }
    let paths = [DecodePath::Plain, DecodePath::Governed];
    let rounds: Vec<Vec<Outcome>> =
        (0..5).map(|_| decoder.verify(&requests, &paths, 256, |_| ()).unwrap()).collect();
    let time = |outcome: &Outcome| outcome.times.iter().sum::<Duration>();
    let speedup = |round: &Vec<Outcome>| time(&round[0]).div_duration_f64(time(&round[1]));
    let mut speedups: Vec<f64> = rounds.iter().map(speedup).collect();
    speedups.sort_by(f64::total_cmp);
    let [plain, governed] = &rounds[4][..] else { unreachable!("two paths") };
    let [drafted, accepted, passes] = governed.drafted;
    let tokens: usize = plain.replies.iter().map(Vec::len).sum();
    println!(
        "{kind} at temperature {temperature}: {:.2}x (of {speedups:.2?}), {tokens} tokens, {:.1} tok/s plain, \
         {passes} passes with drafts, {accepted} of {drafted} accepted",
        speedups[2],
        tokens as f64 / time(plain).as_secs_f64(),
    );
}
