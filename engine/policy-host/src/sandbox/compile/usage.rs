//! What a process uses: its memory and its processor time.

#![allow(unsafe_code, reason = "macOS answers through a pointer")]

use std::time::Duration;

/// What a process uses now; zero where the system does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Memory that is resident, or, on macOS, that counts for the process.
    pub bytes: u64,
    /// Processor time of all its threads so far.
    pub processor: Duration,
}

impl Usage {
    /// The usage of the process with this id, which may have ended.
    pub fn of(process: u32) -> Self {
        usage(process).unwrap_or_default()
    }
}

#[cfg(target_os = "linux")]
fn usage(process: u32) -> Option<Usage> {
    use rustix::param::{clock_ticks_per_second, page_size};
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{process}/{name}")).ok();
    let pages: u64 = read("statm")?.split(' ').nth(1)?.parse().ok()?;
    // The name before them is in parentheses and may contain blanks.
    let stat = read("stat")?;
    let fields = stat.rsplit_once(") ")?.1.split(' ');
    // Ticks in user mode and in the kernel: fields 14 and 15 of the manual, which has the state as the third.
    let ticks: u64 = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    let processor = Duration::from_secs_f64(ticks as f64 / clock_ticks_per_second() as f64);
    Some(Usage { bytes: pages * page_size() as u64, processor })
}

#[cfg(target_os = "macos")]
#[allow(deprecated, reason = "libc names another crate for one function of it")]
fn usage(process: u32) -> Option<Usage> {
    use std::mem::MaybeUninit;
    let mut info = MaybeUninit::<libc::rusage_info_v0>::zeroed();
    // SAFETY: the flavor V0 writes a `rusage_info_v0` at the pointer, which has its size and alignment.
    let result = unsafe {
        libc::proc_pid_rusage(
            process as libc::c_int,
            libc::RUSAGE_INFO_V0,
            info.as_mut_ptr().cast(),
        )
    };
    if result != 0 {
        return None;
    }
    // SAFETY: it was zeroed, which is valid for integers, and written.
    let info = unsafe { info.assume_init() };
    let mut timebase = libc::mach_timebase_info { numer: 0, denom: 0 };
    // SAFETY: the function writes the struct.
    let result = unsafe { libc::mach_timebase_info(&raw mut timebase) };
    // Times are in ticks of the clock, which are nanoseconds on Intel only.
    let per_tick = match result {
        0 if timebase.denom > 0 => f64::from(timebase.numer) / f64::from(timebase.denom),
        _ => 1.0,
    };
    let ticks = info.ri_user_time.saturating_add(info.ri_system_time);
    let processor = Duration::from_secs_f64(ticks as f64 * per_tick / 1e9);
    Some(Usage { bytes: info.ri_phys_footprint, processor })
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn usage(_: u32) -> Option<Usage> {
    None
}

#[cfg(all(test, any(target_os = "linux", target_os = "macos")))]
mod tests {
    use super::*;

    #[test]
    fn memory_and_processor_time_of_a_process_are_seen() {
        let (before, mut memory) = (Usage::of(std::process::id()), vec![1_u8; 32 << 20]);
        let mut sum = 0_u64;
        let mut now = before;
        while now.processor < before.processor + Duration::from_millis(20) {
            memory.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
            sum += u64::from(std::hint::black_box(&memory)[0]);
            now = Usage::of(std::process::id());
        }
        assert!(now.bytes >= 32 << 20, "{now:?} {sum}");
        // Of no process.
        assert_eq!(Usage::of(i32::MAX as u32), Usage::default());
    }
}
