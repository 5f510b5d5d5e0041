//! Ranks that are processes, over MLX's ring.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time after which the processes are believed to wait for each other: in one of many starts, one waits for ever for the next
/// one to connect, and no deadline of MLX ends that.
const PATIENCE: Duration = Duration::from_secs(240);

/// Replies with drafts that are rejected, resumed state and batches are those of one process.
#[test]
fn ranks_that_are_processes_reply_as_one_process() {
    let data = tempfile::tempdir().unwrap();
    let prompts = data.path().join("prompts.json");
    std::fs::write(&prompts, r#"["Copy this text: owl, Rome, Anna."]"#).unwrap();
    let run = || {
        let mut child = Command::new(env!("CARGO_BIN_EXE_steersman"))
            .args(["verify", "--device", "cpu", "--ranks", "2", "--over", "ring", "--tokens", "6"])
            .arg("--data-dir")
            .arg(data.path())
            .arg("--prompts")
            .arg(&prompts)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > end {
                child.kill().unwrap();
                child.wait().unwrap();
                return None;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let mut table = String::new();
        child.stdout.take().unwrap().read_to_string(&mut table).unwrap();
        Some((status, table))
    };
    let (status, table) = run().or_else(run).expect("the ranks connect");
    assert!(status.success(), "{table}");
    assert!(table.contains("f32, 2 ranks"), "{table}");
    let rows: Vec<_> = table.lines().filter(|line| line.contains("1/1")).collect();
    assert!(rows.len() > 8, "{table}");
    // Nothing is left of them.
    let left = std::fs::read_dir(data.path()).unwrap();
    let left = left
        .filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().starts_with("ranks-"));
    assert_eq!(left.count(), 0);
}
