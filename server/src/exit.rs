//! The end of the process at once, while other threads compute.

#![allow(
    unsafe_code,
    reason = "the standard library ends a process only after destructors of libraries"
)]

/// Ends the process with `status`. MLX's destructors, which `exit` would call, must not run while it computes on another
/// thread.
pub fn at_once(status: i32) -> ! {
    #[cfg(unix)]
    // SAFETY: `_exit` takes any status and does not return. What files need is written by then, or is written anew at the
    // next start: each is replaced as a whole.
    unsafe {
        nix::libc::_exit(status)
    }
    #[cfg(not(unix))]
    std::process::exit(status)
}
