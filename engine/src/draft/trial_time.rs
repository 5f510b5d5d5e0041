//! How much time drafts may lose: over time a small share of it, and some steps at once. Text on which no drafter pays is
//! then decoded almost as fast as without drafts.
//!
//! Each step without drafts earns a small share of its time. A step with drafts costs what it took longer than plain
//! steps for the same tokens, and so do the steps after it, in which rewound states are computed and the queue of the
//! device is empty. Drafters are tried when nothing is owed. Drafts that are expected to pay may owe some steps, as
//! expectations can be wrong.
//!
//! Source: the condition is that of conservative bandits (Wu et al., arXiv:1602.04282): explore only while the loss
//! against the known way stays under a share of it.

/// Share of the decoding time that drafts may lose.
const SHARE: f32 = 0.005;

/// Debt, in plain steps, up to which drafts that are expected to pay are permitted.
const PAYING_DEBT: f32 = 8.0;

/// Largest cost of one step, in plain steps. A stall of the machine is not the cost of drafts.
const MAX_COST: f32 = 8.0;

/// Largest debt, in plain steps. Several stalls in a row must not end drafting for long.
const MAX_DEBT: f32 = 2.0 * PAYING_DEBT;

/// Time that drafts may lose, in seconds; owed if it is negative.
#[derive(Debug, Clone, Copy, Default)]
pub struct TrialTime {
    left: f32,
}

/// Which drafts a step may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Permit {
    /// None.
    Nothing,
    /// Drafts that are expected to pay.
    Paying,
    /// Such drafts, and trials that are due.
    Trials,
}

impl TrialTime {
    /// What is permitted where a plain step takes `plain` seconds.
    pub fn permit(self, plain: f32) -> Permit {
        if self.left >= 0.0 {
            Permit::Trials
        } else if self.left >= -PAYING_DEBT * plain {
            Permit::Paying
        } else {
            Permit::Nothing
        }
    }

    /// Counts a step without drafts that took `seconds`, where a plain step takes `plain`.
    pub fn earn(&mut self, seconds: f32, plain: f32) {
        self.add(SHARE * seconds.min(MAX_COST * plain), plain);
    }

    /// Counts a step with drafts, or one after it, that took `seconds`. `streams` sequences decoded, and drafts added
    /// `gained` tokens; a plain step takes `plain` seconds.
    pub fn spend(&mut self, seconds: f32, plain: f32, streams: usize, gained: i32) {
        let saved = plain * (1.0 + gained as f32 / streams as f32);
        self.add(saved - seconds.min(MAX_COST * plain), plain);
    }

    /// Adds `seconds`. At most a plain step is kept, so that a text that fits pays for no later one.
    fn add(&mut self, seconds: f32, plain: f32) {
        self.left = (self.left + seconds).clamp(-MAX_DEBT * plain, plain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps that stall while drafts pay end drafting for a bounded time.
    #[test]
    fn several_stalls_cost_a_bounded_number_of_steps() {
        let mut time = TrialTime::default();
        (0..50).for_each(|_| time.spend(60.0, 1.0, 1, 3));
        (0..1_600).for_each(|_| time.earn(1.0, 1.0));
        assert_eq!(time.permit(1.0), Permit::Paying);
    }

    /// A trial that costs two plain steps is paid by 400 of them.
    #[test]
    fn trials_lose_a_share_of_the_time() {
        let mut time = TrialTime::default();
        let (mut total, mut trials) = (0.0, 0);
        for _ in 0..20_000 {
            if time.permit(1.0) == Permit::Trials {
                time.spend(3.0, 1.0, 4, 0);
                (total, trials) = (total + 3.0, trials + 1);
            } else {
                time.earn(1.0, 1.0);
                total += 1.0;
            }
        }
        assert!((48..=52).contains(&trials), "{trials}");
        let lost = 2.0 * trials as f32 / total;
        assert!(lost < SHARE * 1.05, "{lost}");
    }

    /// Drafts that should pay and do not end up as rare as trials, and gains make them frequent at once.
    #[test]
    fn wrong_expectations_lose_some_steps() {
        let mut time = TrialTime::default();
        let mut drafts = 0;
        for _ in 0..1_000 {
            if time.permit(1.0) >= Permit::Paying {
                time.spend(1.5, 1.0, 1, 0);
                drafts += 1;
            } else {
                time.earn(1.0, 1.0);
            }
        }
        assert!((16..=28).contains(&drafts), "{drafts}");
        while time.permit(1.0) == Permit::Nothing {
            time.earn(1.0, 1.0);
        }
        (0..20).for_each(|_| time.spend(1.5, 1.0, 1, 1));
        assert_eq!(time.permit(1.0), Permit::Trials);
    }

    /// Steps that gain are not limited, and what they gain is not spent later.
    #[test]
    fn a_gain_is_worth_one_step() {
        let mut time = TrialTime::default();
        (0..100).for_each(|_| time.spend(1.5, 1.0, 1, 3));
        time.spend(2.5, 1.0, 1, 0);
        assert_eq!(time.permit(1.0), Permit::Paying);
    }

    #[test]
    fn a_stall_costs_a_bounded_number_of_steps() {
        let mut time = TrialTime::default();
        time.spend(60.0, 1.0, 1, 0);
        assert_eq!(time.permit(1.0), Permit::Paying);
        (0..1_410).for_each(|_| time.earn(1.0, 1.0));
        assert_eq!(time.permit(1.0), Permit::Trials);
    }
}
