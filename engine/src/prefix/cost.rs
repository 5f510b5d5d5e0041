//! Whether saved state on disk is worth its bytes: reading it takes time, and so does computing it again.
//!
//! A model with recurrent layers saves tens of megabytes for any prefix, however short. A GPU computes some
//! hundred tokens in the time in which a disk reads that.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Bytes that are read in a few milliseconds on any disk: state of this size is always saved and read.
const SMALL: u64 = 8 << 20;

/// How much longer reading may take than computing, which all running requests wait for as well.
const PATIENCE: f32 = 2.0;

/// Weight of the newest read.
const NEWEST: f32 = 0.2;

/// Seconds that computing and reading take on this machine. Copies share the numbers: the prefix cache learns from reads, and
/// the engine sets what computing costs.
#[derive(Debug, Clone)]
pub struct ReadCosts(Rc<Cell<Seconds>>);

#[derive(Debug, Clone, Copy)]
struct Seconds {
    compute: ComputeCosts,
    /// Reading a byte.
    byte: f32,
}

/// Seconds that computing a prompt takes, in passes over at most `pass_tokens` of its tokens.
#[derive(Debug, Clone, Copy)]
pub struct ComputeCosts {
    /// Each token.
    pub token: f32,
    /// Each pass, besides its tokens.
    pub pass: f32,
    /// Most tokens of a pass.
    pub pass_tokens: usize,
}

impl ComputeCosts {
    /// Not known: computing is the worst choice.
    const UNKNOWN: Self = Self { token: f32::INFINITY, pass: 0.0, pass_tokens: 1 };

    /// Seconds by which `tokens` more make a prompt take longer. Some tokens always remain to be computed,
    /// so a part of a pass costs only its tokens.
    fn of(&self, tokens: usize) -> f32 {
        self.token * tokens as f32 + self.pass * (tokens / self.pass_tokens) as f32
    }
}

/// Whether state of `bytes` bytes is always saved and read.
pub fn is_small(bytes: u64) -> bool {
    bytes <= SMALL
}

impl Default for ReadCosts {
    fn default() -> Self {
        // 1 GB/s: a common solid-state disk, with the check of what was read.
        Self(Rc::new(Cell::new(Seconds { compute: ComputeCosts::UNKNOWN, byte: 1e-9 })))
    }
}

impl ReadCosts {
    /// Sets how long computing takes.
    pub fn set_compute(&self, costs: ComputeCosts) {
        self.0.set(Seconds { compute: costs, ..self.0.get() });
    }

    /// Learns from a read.
    pub fn learn(&self, bytes: u64, elapsed: Duration) {
        if !is_small(bytes) {
            let Seconds { compute, byte } = self.0.get();
            let byte = byte + NEWEST * (elapsed.as_secs_f32() / bytes as f32 - byte);
            self.0.set(Seconds { compute, byte });
        }
    }

    /// Returns true if reading `bytes` is better than computing `tokens`, at least one.
    pub fn favours_reading(&self, bytes: u64, tokens: usize) -> bool {
        let Seconds { compute, byte } = self.0.get();
        is_small(bytes) || bytes as f32 * byte <= PATIENCE * compute.of(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prefixes_are_read_and_short_ones_computed() {
        let costs = ReadCosts::default();
        assert!(costs.favours_reading(1 << 30, 1));
        let compute = |token, pass| ComputeCosts { token, pass, pass_tokens: 512 };
        // 10,000 tokens a second, and 50 MB whatever the length.
        costs.set_compute(compute(1e-4, 0.0));
        assert!(!costs.favours_reading(50_000_000, 66));
        assert!(costs.favours_reading(50_000_000, 300));
        assert!(costs.favours_reading(SMALL, 1));
        // 500 tokens a second.
        costs.set_compute(compute(2e-3, 0.0));
        assert!(costs.favours_reading(50_000_000, 66));
        // A pass takes 0.1 s for any number of tokens.
        costs.set_compute(compute(0.0, 0.1));
        assert!(!costs.favours_reading(50_000_000, 500));
        assert!(costs.favours_reading(50_000_000, 600));
    }

    #[test]
    fn a_slow_disk_is_noticed() {
        let costs = ReadCosts::default();
        costs.set_compute(ComputeCosts { token: 1e-4, pass: 0.0, pass_tokens: 512 });
        (0..20).for_each(|_| costs.learn(50_000_000, Duration::from_secs(1)));
        assert!(!costs.favours_reading(50_000_000, 3000));
        assert!(costs.favours_reading(50_000_000, 6000));
        // Small reads are not learned from: most of their time is not spent on bytes.
        (0..20).for_each(|_| costs.learn(1000, Duration::from_secs(1)));
        assert!(costs.favours_reading(50_000_000, 6000));
    }
}
