//! Commands that are programs of their own. The shell stands for these programs, and reads a file with the name of the
//! command.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// A folder with the server's program, its libraries, and `others`.
fn installed(others: &[&str]) -> TempDir {
    let built = Path::new(env!("CARGO_BIN_EXE_steersman"));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::hard_link(built, at("steersman")).unwrap();
    symlink(built.with_file_name("lib"), at("lib")).unwrap();
    for name in others {
        symlink("/bin/sh", at(name)).unwrap();
    }
    folder
}

fn run(folder: &TempDir, arguments: &[&str], path: &str) -> Output {
    let mut command = Command::new(folder.path().join("steersman"));
    command.args(arguments).env("PATH", path).current_dir(folder).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

#[test]
fn arguments_exit_status_and_signals_pass_through() {
    let folder = installed(&["steersman-policy", "steersman-bench"]);
    for command in ["test", "eval", "suite"] {
        let file = folder.path().join(command);
        fs::write(file, "for word in \"$@\"; do echo \"$word\"; done\nexit 7\n").unwrap();
    }
    fs::write(folder.path().join("watch"), "kill -TERM $$\n").unwrap();
    let cases: [(&[&str], &[&str]); 3] = [
        (&["policy", "test"], &["--help", "--", "a b", "--config=x", ""]),
        (&["bench", "suite"], &["-h", "--against", "x=y"]),
        (&["eval"], &["--items", "2", "--version"]),
    ];
    for (command, arguments) in cases {
        let output = run(&folder, &[command, arguments].concat(), "");
        assert_eq!(output.status.code(), Some(7), "{command:?}: {output:?}");
        assert_eq!(text(&output.stdout), format!("{}\n", arguments.join("\n")), "{command:?}");
    }
    let output = run(&folder, &["policy", "watch"], "");
    assert_eq!(output.status.signal(), Some(15), "{output:?}");
}

#[test]
fn a_missing_program_is_named_and_one_on_the_path_is_found() {
    let folder = installed(&[]);
    for (command, name) in [
        (&["policy", "list"][..], "steersman-policy"),
        (&["bench", "suite"], "steersman-bench"),
        (&["eval"], "steersman-bench"),
    ] {
        let output = run(&folder, command, "");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let error = text(&output.stderr);
        assert!(error.contains(&format!("the program {name}, which is neither in /")), "{error}");
        assert!(error.contains(&format!("cargo build --bin {name}")), "{error}");
    }
    let other = installed(&["steersman-bench"]);
    fs::write(folder.path().join("eval"), "exit 3\n").unwrap();
    let output = run(&folder, &["eval"], other.path().to_str().unwrap());
    assert_eq!(output.status.code(), Some(3), "{output:?}");
}

#[test]
fn help_lists_the_commands_of_all_programs() {
    let folder = installed(&[]);
    for (command, names) in [
        (&["--help"][..], &["policy", "bench", "eval", "serve"][..]),
        (&["bench", "--help"], &["suite", "peers", "diff", "report", "model", "shape"]),
    ] {
        let output = run(&folder, command, "");
        let listed: Vec<_> = text(&output.stdout)
            .lines()
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        assert!(names.iter().all(|name| listed.contains(name)), "{names:?}: {listed:?}");
    }
}
