//! Memory of weights in huge pages.
//!
//! A step reads each weight once. With pages of 4 KiB, address translation takes up to a fifth of that time in a virtual
//! machine.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a huge page, on x86-64 and mostly on aarch64.
const PAGE: usize = 2 << 20;

/// Backs each 2 MiB of memory with a huge page if `ranges` of addresses cover at least half of it. Contents do not change.
/// Returns the bytes of these pages: 0 where the operating system does not support this, as before Linux 6.1.
pub fn use_huge_pages(ranges: impl IntoIterator<Item = Range<usize>>) -> usize {
    let mut covered = BTreeMap::<usize, usize>::new();
    for range in ranges {
        for page in range.start / PAGE..range.end.div_ceil(PAGE) {
            let bytes = range.end.min((page + 1) * PAGE) - range.start.max(page * PAGE);
            *covered.entry(page).or_default() += bytes;
        }
    }
    let pages = covered.into_iter().filter(|(_, bytes)| *bytes >= PAGE / 2);
    pages.filter(|(page, _)| collapse(page * PAGE)).count() * PAGE
}

/// Backs the memory at an address with a huge page; false if that failed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code, reason = "a system call")]
fn collapse(address: usize) -> bool {
    let address = std::ptr::without_provenance_mut(address);
    // SAFETY: the advice does not change what the memory contains; it fails where there is none.
    unsafe { libc::madvise(address, PAGE, libc::MADV_COLLAPSE) == 0 }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn collapse(_address: usize) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    #[test]
    fn contents_stay_the_same() {
        let numbers: Vec<usize> = (0..3 * PAGE).collect();
        let address = numbers.as_ptr().addr();
        let bytes = size_of_val(numbers.as_slice());
        let moved = use_huge_pages(iter::once(address..address + bytes));
        assert!(moved.is_multiple_of(PAGE) && moved <= bytes + PAGE);
        assert!(numbers.iter().enumerate().all(|(i, number)| i == *number));
        assert_eq!(use_huge_pages(iter::once(address..address + PAGE / 4)), 0);
    }
}
