//! What this machine has: memory and free disk space.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Bytes of the machine's memory; `None` if the system does not tell.
pub fn memory_bytes() -> Option<u64> {
    if cfg!(target_os = "macos") {
        let output = Command::new("sysctl").args(["-n", "hw.memsize"]).output().ok()?;
        return String::from_utf8(output.stdout).ok()?.trim().parse().ok();
    }
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Bytes that this user may still write to the disk of `path`, or of its first parent that exists.
pub fn disk_free(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|path| path.exists())?;
    let disk = rustix::fs::statvfs(existing).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_disk_of_this_machine_are_known() {
        assert!(memory_bytes().unwrap() > 1 << 28);
        let absent = std::env::temp_dir().join("absent/absent");
        assert_eq!(disk_free(&absent).map(|_| ()), disk_free(&std::env::temp_dir()).map(|_| ()));
        assert!(disk_free(&absent).unwrap() > 0);
    }
}
