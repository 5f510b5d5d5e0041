//! Which hooks of a version are known to be quick, from how long their calls took.
//!
//! A hook is not known to be quick until calls of it have been. After a slow call it needs more quick ones
//! in a row before it is known to be quick again, four times as many each time that it was, up to [`MOST`].
//! So a policy that is slow now and then is soon rarely trusted; one that a busy machine interrupted once
//! is trusted again at once, and as before after [`MOST`] quick calls.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::contract::Hook;

/// Longest call that is quick, in nanoseconds: a small part of a pass of the model.
const QUICK: u64 = 200_000;

/// Most quick calls in a row that a hook needs.
const MOST: u32 = 4096;

/// The hooks of one version.
pub struct Pace([HookPace; Hook::ALL.len()]);

/// Threads that learn at the same time may lose a call: that costs a call or two elsewhere.
struct HookPace {
    /// Quick calls since the last slow one.
    quick: AtomicU32,
    /// Quick calls after which the hook is known to be quick.
    needed: AtomicU32,
}

impl Pace {
    /// The pace of a version that exports the hooks named. The others do nothing, and are quick.
    pub fn new(exported: &[&str]) -> Self {
        Self(Hook::ALL.map(|hook| HookPace {
            quick: AtomicU32::new(0),
            needed: AtomicU32::new(u32::from(exported.contains(&hook.name()))),
        }))
    }

    /// Whether calls of `hook` are known to be quick.
    pub fn is_quick(&self, hook: Hook) -> bool {
        let HookPace { quick, needed } = &self.0[hook as usize];
        quick.load(Relaxed) >= needed.load(Relaxed)
    }

    /// Learns from a call of `hook`.
    pub fn learn(&self, hook: Hook, nanoseconds: u64) {
        let HookPace { quick, needed } = &self.0[hook as usize];
        let (calls, least) = (quick.load(Relaxed), needed.load(Relaxed));
        if nanoseconds > QUICK {
            quick.store(0, Relaxed);
            if calls >= least {
                needed.store((4 * least).clamp(1, MOST), Relaxed);
            }
            return;
        }
        quick.store(calls.saturating_add(1), Relaxed);
        if calls >= MOST && least > 1 {
            needed.store(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls until the hook is known to be quick.
    fn calls_until_quick(pace: &Pace) -> u32 {
        let mut calls = 0;
        while !pace.is_quick(Hook::OnStep) {
            pace.learn(Hook::OnStep, QUICK);
            calls += 1;
        }
        calls
    }

    #[test]
    fn a_hook_is_not_known_to_be_quick_before_its_first_call() {
        let pace = Pace::new(&["on-step", "on-finish"]);
        assert!(!pace.is_quick(Hook::OnStep));
        assert!(pace.is_quick(Hook::OnToolCall), "it is not exported");
        pace.learn(Hook::OnStep, QUICK + 1);
        assert!(!pace.is_quick(Hook::OnStep));
        pace.learn(Hook::OnStep, 700);
        assert!(pace.is_quick(Hook::OnStep));
        assert!(!pace.is_quick(Hook::OnFinish), "hooks are judged apart");
    }

    #[test]
    fn each_slow_call_of_a_hook_known_to_be_quick_costs_it_more_quick_ones() {
        let pace = Pace::new(&["on-step"]);
        assert_eq!(calls_until_quick(&pace), 1);
        for expected in [4, 16, 64, 256, 1024, 4096, 4096] {
            pace.learn(Hook::OnStep, 10 * QUICK);
            // Nobody waited for these.
            pace.learn(Hook::OnStep, 10 * QUICK);
            assert_eq!(calls_until_quick(&pace), expected);
        }
        (0..=MOST).for_each(|_| pace.learn(Hook::OnStep, 700));
        pace.learn(Hook::OnStep, 10 * QUICK);
        assert_eq!(calls_until_quick(&pace), 4, "forgiven");
    }
}
