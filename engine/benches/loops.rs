//! Time of the loop detector per token: `cargo bench -p steersman-engine --bench loops`, on a quiet
//! machine.

use std::time::Instant;

use steersman_engine::policy::LoopRule;
use steersman_engine::policy::loops::Detector;

const TOKENS: u32 = 500_000;

fn main() {
    // 1 disables near-repeats.
    for similarity in [1.0, 0.87] {
        let rule = LoopRule { max_period: 1024, repeats: 3, min_tokens: 96, similarity };
        let mut detector = Detector::new(rule);
        let mut noise = 1u32;
        let start = Instant::now();
        let reports = (0..TOKENS).filter(|_| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // A vocabulary of 1,024 tokens: some pairs agree, as in text.
            detector.push(noise >> 22).is_some()
        });
        let reports = reports.count();
        println!(
            "similarity {similarity}: {:?} a token, {reports} reports",
            start.elapsed() / TOKENS
        );
    }
}
