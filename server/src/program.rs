//! Commands that are programs of their own: `steersman policy` is `steersman-policy`, as `git` and `cargo` have theirs.
//!
//! They link no MLX, and the server links none of what they need. A program is looked for beside this one, then in the
//! folders of PATH.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// A program that runs commands of this one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Program {
    /// Runs `steersman policy`.
    Policy,
    /// Runs `steersman eval`, and the commands of `steersman bench` that are clients of servers.
    Bench,
}

impl Program {
    /// The name of its file.
    fn name(self) -> &'static str {
        match self {
            Self::Policy => "steersman-policy",
            Self::Bench => "steersman-bench",
        }
    }

    /// Runs the program in place of this one, so that exit status, signals and terminal are those of this process. It gets
    /// this process's arguments without the first `skipped`, which are `called`, the words that its help repeats.
    ///
    /// # Errors
    /// When the program is not found or cannot be started. Does not return otherwise.
    pub fn run(self, called: &str, skipped: usize) -> Result<()> {
        let own = std::env::current_exe().and_then(|program| program.canonicalize());
        let own = own.context("finding the folder of this program")?;
        let folder = own.parent().unwrap_or(Path::new("/"));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let name = self.name();
        let program = find(name, folder, &path).with_context(|| {
            format!(
                "`{called}` is the program {name}, which is neither in {} nor in a folder of PATH: install the whole \
                 package of steersman, or build it with `cargo build --bin {name}`",
                folder.display()
            )
        })?;
        let arguments = std::env::args_os().skip(skipped);
        let error = replace(Command::new(&program).args(arguments), called);
        Err(error).with_context(|| format!("starting {}", program.display()))
    }
}

/// The file `name` in `folder`, or else in the first folder of `path` that has it.
fn find(name: &str, folder: &Path, path: &OsStr) -> Option<PathBuf> {
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    // An empty entry of PATH is the working folder, which nobody meant.
    let listed = std::env::split_paths(path).filter(|folder| !folder.as_os_str().is_empty());
    std::iter::once(folder.to_owned())
        .chain(listed)
        .map(|folder| folder.join(&file))
        .find(|file| is_program(file))
}

#[cfg(unix)]
fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(not(unix))]
fn is_program(file: &Path) -> bool {
    file.is_file()
}

/// Replaces this process; returns only if that fails.
#[cfg(unix)]
fn replace(command: &mut Command, called: &str) -> io::Error {
    use std::os::unix::process::CommandExt;
    command.arg0(called).exec()
}

/// Waits for the program and ends with its status; returns only if it cannot be started.
#[cfg(not(unix))]
fn replace(command: &mut Command, _called: &str) -> io::Error {
    match command.status() {
        Ok(status) => std::process::exit(status.code().unwrap_or(1)),
        Err(error) => error,
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_program_is_found_beside_this_one_before_the_folders_of_path() {
        let root = tempfile::tempdir().unwrap();
        let [own, first, second] = ["own", "first", "second"].map(|name| root.path().join(name));
        let path = std::env::join_paths([&first, &second]).unwrap();
        let name = Program::Bench.name();
        let found = || find(name, &own, &path);
        for folder in [&own, &first, &second] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join(name), "").unwrap();
        }
        assert_eq!(found(), None, "files that cannot be run");
        for folder in [&second, &first, &own] {
            let file = folder.join(name);
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
            assert_eq!(found(), Some(file));
        }
    }
}
