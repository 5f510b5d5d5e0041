//! Speed of speculation: `cargo bench -p steersman-tests --bench speculation`, on a quiet machine.
//!
//! Measures plain and governed decoding in turn, in one process, on texts that suit speculation (long copies, long
//! lists of people as JSON) and on texts that do not (stories, also at temperature 1, and at 2, where words follow no
//! rule). Each prompt is decoded plainly, twice by the governor, and plainly again, `ROUNDS` times (5). Prints the median
//! ratio of the times, and the range of its middle half.
//!
//! The bundled model copies none of these texts to its end. `MODEL` names the folder of another one, for instance of
//! one that does, made by `tests/fixtures/real.py`. `DRAFT_MODEL` names the folder of a smaller model that drafts.

use std::cmp::Reverse;

use steersman_engine::config::Config;
use steersman_engine::tools::Decoder;
use steersman_engine::tools::verify::{DecodePath, verify};
use steersman_tests::{load, load_from, speculation_prompts};

/// Longest replies, in tokens.
const TOKENS: usize = 256;

/// Shorter replies are not measured, nor those that differ.
const SHORTEST: usize = 40;

fn main() {
    let data = tempfile::tempdir().unwrap();
    // As it is served: on the GPU if there is one.
    let mut own = Config::default();
    own.speculation.draft_model = std::env::var("DRAFT_MODEL").unwrap_or_default();
    let (mut decoder, _) = match std::env::var("MODEL") {
        Ok(folder) => load_from(own, folder.as_ref(), data.path()),
        Err(_) => load(own, data.path()),
    }
    .unwrap();
    let rounds = std::env::var("ROUNDS").map_or(5, |rounds| rounds.parse().expect("a number"));
    for (kind, temperature) in
        [("extraction", 0.0), ("copying", 0.0), ("story", 0.0), ("story", 1.0), ("story", 2.0)]
    {
        measure(&mut decoder, kind, temperature, rounds);
    }
}

fn measure(decoder: &mut Decoder, kind: &str, temperature: f32, rounds: usize) {
    let mut requests = speculation_prompts(&[kind], 50);
    requests.sort_by_key(|request| Reverse(request.messages[0].content.len()));
    requests.truncate(5);
    for request in &mut requests {
        request.sampling.temperature = Some(temperature);
    }
    use DecodePath::{Governed, Plain};
    let (mut ratios, mut rates) = (Vec::new(), Vec::new());
    let [mut drafted, mut accepted, mut passes, mut tokens] = [0; 4];
    for round in 0..=rounds {
        let outcomes =
            verify(decoder, &requests, &[Plain, Governed, Governed, Plain], TOKENS, |_| ())
                .unwrap();
        if round == 0 {
            continue;
        }
        let time = |path: usize, i: usize| outcomes[path].times[i].as_secs_f64();
        for (i, reply) in outcomes[0].replies.iter().enumerate() {
            // In 16 bits a near-tie may change the reply, and with it the work.
            let differs = outcomes.iter().any(|outcome| outcome.replies[i] != *reply);
            if reply.len() < SHORTEST || differs {
                continue;
            }
            let plain = time(0, i) + time(3, i);
            ratios.push(plain / (time(1, i) + time(2, i)));
            rates.push(2.0 * (reply.len() - 1) as f64 / plain);
        }
        for governed in &outcomes[1..3] {
            let [of_draft, of_accepted, of_passes] = governed.drafted;
            (drafted, accepted, passes) =
                (drafted + of_draft, accepted + of_accepted, passes + of_passes);
            tokens += governed.replies.iter().map(Vec::len).sum::<usize>();
        }
    }
    if ratios.is_empty() {
        return println!(
            "{kind} at temperature {temperature}: no equal replies of {SHORTEST} tokens"
        );
    }
    ratios.sort_by(f64::total_cmp);
    rates.sort_by(f64::total_cmp);
    let count = ratios.len();
    println!(
        "{kind} at temperature {temperature}: {:.3}x [{:.2}-{:.2}] of {count}, {:.0} tok/s plain, {tokens} tokens governed, \
         {passes} passes with drafts, {accepted} of {drafted} accepted",
        ratios[count / 2],
        ratios[count / 4],
        ratios[3 * count / 4],
        rates[count / 2],
    );
}
