//! The program that compiles: this one, and not another that has taken its place.

use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A program of which children are started.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    /// Its file when this process began to use it; `None` if there was none.
    file: Option<Identity>,
}

/// Tells one file from another at the same path.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    bytes: u64,
    modified: Option<SystemTime>,
    /// Device and inode.
    node: Option<(u64, u64)>,
}

impl Program {
    pub fn new(path: PathBuf) -> Self {
        let file = Identity::of(&path);
        Self { path, file }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Compares the program's file with the one that this process began with: after an upgrade in place a child
    /// would be another version, whose machine code wasmtime refuses here.
    ///
    /// # Errors
    /// If it is another one, and what to do.
    pub fn check(&self) -> Result<(), String> {
        // That of a file that is missing is the error of its start.
        match (&self.file, Identity::of(&self.path)) {
            (Some(file), Some(now)) if *file != now => Err(format!(
                "cannot be compiled: {} was replaced since this server started; restart the server",
                self.path.display()
            )),
            _ => Ok(()),
        }
    }
}

impl Identity {
    fn of(path: &Path) -> Option<Self> {
        let metadata = path.metadata().ok()?;
        Some(Self {
            bytes: metadata.len(),
            modified: metadata.modified().ok(),
            node: node(&metadata),
        })
    }
}

#[cfg(unix)]
fn node(metadata: &Metadata) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(not(unix))]
fn node(_: &Metadata) -> Option<(u64, u64)> {
    None
}

/// This program, for [`crate::PolicyConfig::compiler`]. On Linux it is the same after its file was replaced.
pub fn this_program() -> Option<PathBuf> {
    let own = Path::new("/proc/self/exe");
    if cfg!(target_os = "linux") && own.exists() {
        return Some(own.into());
    }
    std::env::current_exe().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where there is no /proc/self/exe, policies failed after an upgrade in place, with wasmtime's words about settings
    /// and versions.
    #[test]
    fn a_program_that_was_replaced_is_not_started_and_the_reason_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steersman");
        std::fs::write(&path, "old").unwrap();
        let program = Program::new(path.clone());
        assert_eq!(program.check(), Ok(()));
        let beside = folder.path().join("new");
        std::fs::write(&beside, "new").unwrap();
        std::fs::rename(&beside, &path).unwrap();
        let problem = program.check().unwrap_err();
        assert!(problem.contains("was replaced since this server started; restart"), "{problem}");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(program.check(), Ok(()), "the start of it fails");
    }
}
