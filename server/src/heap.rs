//! Memory that the C library's allocator keeps for later allocations, which an idle server returns to the system.
//!
//! A form takes up to some hundred MiB while it is compiled, in small blocks on threads that end with it. The allocator
//! keeps the pages of these blocks for as long as the process lives, so one busy minute would decide what an idle server holds.
//! To find the free pages takes the locks of the heaps, so that a busy server would wait for it, and one that
//! runs requests all the time needs the pages again.
//!
//! The GNU library gives threads heaps of their own, and never returns the free end of one while it is idle: up to 64 MiB for
//! each of eight heaps a core. So there is one heap.

use std::time::Duration;

use tokio::time::{Instant, interval};

/// Time between two looks at what the process does.
const PERIOD: Duration = Duration::from_secs(10);

/// Processor time in a [`PERIOD`], in seconds, below which a server is idle.
const IDLE: f64 = 0.5;

/// Processor time since pages were returned last, in seconds, below which there is nothing to return.
const WORK: f64 = 1.0;

/// Gives all threads one heap. Nothing changes where the C library has no others, or the heap is mimalloc's.
///
/// Threads that have allocated already keep theirs, so this comes first in a program.
pub fn use_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[allow(unsafe_code, reason = "the allocator has a function in C only")]
    // SAFETY: `mallopt` takes any parameter and value.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Returns unused pages whenever the process has worked and is idle then. Never ends.
pub async fn return_while_idle() {
    let mut periods = interval(PERIOD);
    let mut idle = Idle::default();
    loop {
        periods.tick().await;
        if !idle.returns(processor_seconds()) {
            continue;
        }
        let start = Instant::now();
        if tokio::task::spawn_blocking(return_unused).await.is_ok() {
            tracing::debug!(elapsed = ?start.elapsed(), "returned unused memory");
            // This takes time itself.
            idle.returned = processor_seconds();
        }
    }
}

/// What the process had done at two moments, in seconds of processor time.
#[derive(Debug, Default)]
struct Idle {
    /// At the last look.
    last: f64,
    /// When pages were returned last.
    returned: f64,
}

impl Idle {
    /// Whether a process that has taken `now` seconds until this look returns pages.
    fn returns(&mut self, now: f64) -> bool {
        let elapsed = now - self.last;
        self.last = now;
        elapsed < IDLE && now - self.returned > WORK
    }
}

/// Seconds of processor time that this process has taken, 0 if the system does not tell.
fn processor_seconds() -> f64 {
    #[cfg(unix)]
    {
        use nix::sys::resource::{UsageWho, getrusage};
        use nix::sys::time::TimeValLike;
        let seconds = |time: nix::sys::time::TimeVal| time.num_microseconds() as f64 / 1e6;
        getrusage(UsageWho::RUSAGE_SELF)
            .map_or(0.0, |usage| seconds(usage.user_time()) + seconds(usage.system_time()))
    }
    #[cfg(not(unix))]
    0.0
}

/// Returns the free pages of all heaps. Nothing happens where the C library has no function for it, or the heap is
/// mimalloc's, which returns pages by itself.
#[allow(unsafe_code, reason = "the allocators have functions in C only")]
fn return_unused() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` takes any number, and may be called on any thread.
    unsafe {
        libc::malloc_trim(0);
    }
    #[cfg(target_os = "macos")]
    {
        unsafe extern "C" {
            fn malloc_zone_pressure_relief(zone: *mut std::ffi::c_void, goal: usize) -> usize;
        }
        // SAFETY: without a zone it is for all zones, and 0 stands for as many bytes as possible.
        unsafe {
            malloc_zone_pressure_relief(std::ptr::null_mut(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_returned_once_after_work() {
        let mut idle = Idle::default();
        // The start, work, and its end.
        assert!(!idle.returns(2.0));
        assert!(!idle.returns(9.0));
        assert!(idle.returns(9.1));
        idle.returned = 9.2;
        assert!(!idle.returns(9.3), "nothing has happened since");
        assert!(!idle.returns(9.6));
        assert!(!idle.returns(12.0));
        assert!(idle.returns(12.1));
    }

    #[test]
    #[cfg(unix)]
    fn processor_time_advances() {
        let start = processor_seconds();
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while processor_seconds() < start + 0.02 && std::time::Instant::now() < end {
            std::hint::black_box((0..100_000).sum::<u64>());
        }
        assert!(processor_seconds() > start);
    }
}
