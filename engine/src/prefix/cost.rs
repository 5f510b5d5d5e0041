//! Whether saved state on disk is worth its bytes: reading it takes time, and so does computing it again.
//!
//! A model with recurrent layers saves tens of megabytes for any prefix, however short. A GPU computes some
//! hundred tokens in the time in which a disk reads that.

use std::time::Duration;

/// Bytes that are read in a few milliseconds on any disk: state of this size is always saved and read.
const SMALL: u64 = 8 << 20;

/// How much longer reading may take than computing, which all running requests wait for as well.
const PATIENCE: f32 = 2.0;

/// Weight of the newest read.
const NEWEST: f32 = 0.2;

/// Seconds that computing and reading take on this machine.
#[derive(Debug, Clone, Copy)]
pub struct ReadCosts {
    /// Computing a token; infinite until it is known.
    token: f32,
    /// Reading a byte.
    byte: f32,
}

impl Default for ReadCosts {
    fn default() -> Self {
        // 1 GB/s: a common solid-state disk, with the check of what was read.
        Self { token: f32::INFINITY, byte: 1e-9 }
    }
}

impl ReadCosts {
    /// Sets how long computing a token takes.
    pub fn set_token(&mut self, seconds: f32) {
        self.token = seconds;
    }

    /// Learns from a read.
    pub fn learn(&mut self, bytes: u64, elapsed: Duration) {
        if bytes > SMALL {
            self.byte += NEWEST * (elapsed.as_secs_f32() / bytes as f32 - self.byte);
        }
    }

    /// Whether reading `bytes` is better than computing `tokens`, at least one.
    pub fn favours_reading(&self, bytes: u64, tokens: usize) -> bool {
        bytes <= SMALL || bytes as f32 * self.byte <= PATIENCE * self.token * tokens as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prefixes_are_read_and_short_ones_computed() {
        let mut costs = ReadCosts::default();
        assert!(costs.favours_reading(1 << 30, 1));
        // 10,000 tokens a second, and 50 MB whatever the length.
        costs.set_token(1e-4);
        assert!(!costs.favours_reading(50_000_000, 66));
        assert!(costs.favours_reading(50_000_000, 300));
        assert!(costs.favours_reading(SMALL, 1));
        // 500 tokens a second.
        costs.set_token(2e-3);
        assert!(costs.favours_reading(50_000_000, 66));
    }

    #[test]
    fn a_slow_disk_is_noticed() {
        let mut costs = ReadCosts::default();
        costs.set_token(1e-4);
        (0..20).for_each(|_| costs.learn(50_000_000, Duration::from_secs(1)));
        assert!(!costs.favours_reading(50_000_000, 3000));
        assert!(costs.favours_reading(50_000_000, 6000));
        // A small read says nothing about the rate.
        (0..20).for_each(|_| costs.learn(1000, Duration::from_secs(1)));
        assert!(costs.favours_reading(50_000_000, 6000));
    }
}
