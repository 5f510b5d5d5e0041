//! Calls of the system that no crate of ours wraps.

#![allow(unsafe_code, reason = "the C library answers through pointers")]

/// The load average of the last minute.
#[cfg(unix)]
pub fn load_average() -> Option<f64> {
    let mut loads = [0.0; 1];
    // SAFETY: the function writes at most one number, which the array has room for.
    let count = unsafe { libc::getloadavg(loads.as_mut_ptr(), 1) };
    (count == 1).then_some(loads[0])
}

#[cfg(not(unix))]
pub fn load_average() -> Option<f64> {
    None
}

/// The level of thermal pressure that macOS tells all programs; `None` on other systems.
#[cfg(target_os = "macos")]
pub fn thermal_pressure() -> Option<u64> {
    use std::ffi::{c_char, c_int};
    use std::sync::OnceLock;

    // `notify.h`, part of the C library of macOS.
    unsafe extern "C" {
        fn notify_register_check(name: *const c_char, token: *mut c_int) -> u32;
        fn notify_get_state(token: c_int, state: *mut u64) -> u32;
    }
    // Registered once: a registration lasts until the process ends.
    static TOKEN: OnceLock<Option<c_int>> = OnceLock::new();
    let token = *TOKEN.get_or_init(|| {
        let mut token = 0;
        // `kOSThermalNotificationPressureLevelName` of `libkern/OSThermalNotification.h`.
        let name = c"com.apple.system.thermalpressurelevel";
        // SAFETY: the name ends with a zero byte, and the function writes one number.
        let status = unsafe { notify_register_check(name.as_ptr(), &raw mut token) };
        (status == 0).then_some(token)
    });
    let (token, mut state) = (token?, 0);
    // SAFETY: the token is registered, and the function writes one number.
    let status = unsafe { notify_get_state(token, &raw mut state) };
    (status == 0).then_some(state)
}

#[cfg(not(target_os = "macos"))]
pub fn thermal_pressure() -> Option<u64> {
    None
}
