//! What the prompts of each profile have taken from the streams, which decides who waits for them (`plan.rs`).
//!
//! A profile owes time for its own prompts only: it waits until the streams have had that time back, however many
//! prompts of others arrive meanwhile. So prompts lengthen the mean time
//! between two tokens of a stream by at most [`SHARE`] of it, and no prompt waits without an end.

use std::collections::BTreeMap;

use super::plan::PassCosts;

/// Time that prompts may take from the streams, for each second that the streams need themselves.
pub const SHARE: f32 = 0.5;

/// Seconds that the prompts of each profile have taken from the streams beyond their share. Profiles that owe nothing are
/// not in it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Debt(BTreeMap<String, f32>);

impl Debt {
    /// Counts a pass that took `seconds`, with rows of prompt of these profiles, beside streams or without.
    pub fn count(
        &mut self,
        costs: &PassCosts,
        prompts: &[(String, usize)],
        seconds: f32,
        has_streams: bool,
    ) {
        if !has_streams {
            self.0.clear();
            return;
        }
        let rows: usize = prompts.iter().map(|(_, rows)| rows).sum();
        // A single slow pass has compiled a kernel or waited for a busy machine.
        let taken = (seconds - costs.decode()).clamp(0.0, 2.0 * costs.prefill_of(rows));
        for (profile, own) in prompts {
            *self.0.entry(profile.clone()).or_default() += taken * *own as f32 / rows as f32;
        }
        let paid = SHARE * costs.decode() / self.0.len().max(1) as f32;
        self.0.retain(|_, owed| {
            *owed -= paid;
            *owed > 0.0
        });
    }

    /// Whether `profile` owes the streams time.
    pub fn is_of(&self, profile: &str) -> bool {
        self.0.contains_key(profile)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use steersman_test_support::Random;

    use super::super::plan::{Budget, Pending, prefill_rows};
    use super::*;

    const BUDGET: Budget =
        Budget { stall: Duration::from_millis(100), chunk: 512, is_awaited: false };

    /// A machine on which a pass takes `decode` seconds, and `prefill` and `row` for each row of prompt longer with prompts.
    fn costs(decode: f32, prefill: f32, row: f32) -> PassCosts {
        let mut costs = PassCosts::measured([(0, prefill), (1000, prefill + 1000.0 * row)]);
        costs.learn(0, decode);
        costs
    }

    /// Runs a pass of `sequences`, whose profiles have their numbers as names; returns its seconds and the planned rows.
    fn run(debt: &mut Debt, costs: &PassCosts, sequences: &mut [Pending]) -> (f32, Vec<usize>) {
        for sequence in sequences.iter_mut() {
            sequence.owes = debt.is_of(&sequence.profile.to_string());
        }
        let planned = prefill_rows(sequences, costs, BUDGET);
        let prompts: Vec<(String, usize)> = sequences
            .iter()
            .zip(&planned)
            .filter(|&(_, &rows)| rows > 0)
            .map(|(sequence, &rows)| (sequence.profile.to_string(), rows))
            .collect();
        let seconds = costs.decode() + costs.prefill_of(planned.iter().sum());
        debt.count(costs, &prompts, seconds, true);
        (seconds, planned)
    }

    fn stream(profile: usize) -> Pending {
        Pending { decodes: true, profile, ..Pending::default() }
    }

    /// 256 short prompts of a profile beside a stream of another one, some of which are ready at a time.
    #[test]
    fn many_short_prompts_slow_a_stream_of_another_profile_by_at_most_half() {
        for (decode, row) in [(0.005, 0.000_5), (0.02, 0.000_2), (0.002, 0.002)] {
            for ready in [1, 4] {
                let (costs, mut debt) = (costs(decode, 0.001, row), Debt::default());
                let (mut left, mut time, mut passes) = (256, 0.0, 0);
                while left > 0 {
                    let text = Pending { rows: 12, profile: 1, ..Pending::default() };
                    let mut sequences = vec![text; left.min(ready)];
                    sequences.push(stream(0));
                    let (seconds, planned) = run(&mut debt, &costs, &mut sequences);
                    left -= planned.iter().filter(|&&rows| rows == 12).count();
                    (time, passes) = (time + seconds, passes + 1);
                }
                let longest = decode + costs.prefill_of(12 * ready);
                assert!(time <= 1.5 * decode * passes as f32 + longest, "{decode} {row}: {time}");
                assert!(passes >= 256 / ready);
            }
        }
    }

    /// Random machines and long prompts without an end beside a stream: its steps take at most half as long
    /// again in the mean, and the prompts of each profile continue.
    #[test]
    fn long_prompts_slow_a_stream_by_at_most_half() {
        let mut random = Random(15);
        for _ in 0..100 {
            let decode = 0.001 + random.below(100) as f32 / 1000.0;
            let (prefill, row) =
                (random.below(50) as f32 / 1000.0, random.below(1000) as f32 / 1e6);
            let (costs, mut debt) = (costs(decode, prefill, row), Debt::default());
            let profiles = 1 + random.below(3);
            let (mut time, mut with_prompts, mut rows_of) = (0.0, 0, vec![0; profiles]);
            let passes = 5000;
            for _ in 0..passes {
                let prompt = |profile| Pending { rows: 8000, profile, ..Pending::default() };
                let mut sequences: Vec<Pending> = (0..profiles).map(prompt).collect();
                sequences.push(stream(0));
                let (seconds, planned) = run(&mut debt, &costs, &mut sequences);
                time += seconds;
                with_prompts += usize::from(planned.iter().sum::<usize>() > 0);
                rows_of.iter_mut().zip(planned).for_each(|(all, rows)| *all += rows);
            }
            let longest = profiles as f32 * (decode + prefill + row * 512.0);
            assert!(time <= 1.5 * decode * passes as f32 + longest, "{costs:?} {time}");
            // They have at least half of their share, or run in every pass.
            let of_prompts = time - decode * passes as f32;
            let least = 0.49 * SHARE * decode * passes as f32;
            assert!(of_prompts > least || with_prompts == passes, "{costs:?} {of_prompts}");
            let fewest = rows_of.iter().min().expect("there is a profile");
            assert!(*fewest > 0, "{rows_of:?}");
        }
    }

    /// Short prompts of other profiles arrive without an end, and none of them takes the time of a long one.
    #[test]
    fn a_long_prompt_does_not_wait_for_what_other_profiles_owe() {
        let (costs, mut debt) = (costs(0.01, 0.0, 0.000_5), Debt::default());
        let (mut rows, mut passes) = (8000, 0);
        while rows > 0 {
            let short = |profile| Pending { rows: 60, profile, ..Pending::default() };
            let mut sequences = vec![stream(0), short(2), short(3)];
            sequences.push(Pending { rows, profile: 1, ..Pending::default() });
            rows -= run(&mut debt, &costs, &mut sequences).1[3];
            passes += 1;
            assert!(passes < 5000, "{rows} rows are left");
        }
    }
}
