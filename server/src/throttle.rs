//! A limit on equal log lines: an attacker must not fill the log.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Lets one of many equal log lines through in each [`INTERVAL`].
#[derive(Debug, Default)]
pub struct Throttle(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    suppressed: u64,
}

impl Throttle {
    /// `Some` if a line may be logged now, with the number of lines suppressed since the last one.
    pub fn pass(&self) -> Option<u64> {
        let mut state = self.0.lock();
        if state.last.is_some_and(|last| last.elapsed() < INTERVAL) {
            state.suppressed += 1;
            return None;
        }
        state.last = Some(Instant::now());
        Some(std::mem::take(&mut state.suppressed))
    }
}
