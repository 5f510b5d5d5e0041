//! Signals to a real server while its model is being loaded.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

/// A server whose model never comes: the hub takes the request and is silent. Returns it when it has asked for the model.
fn loading(hub: &TcpListener, data: &std::path::Path) -> Child {
    let endpoint = format!("http://{}", hub.local_addr().unwrap());
    let server = Command::new(env!("CARGO_BIN_EXE_steersman"))
        .args(["serve", "--model", "owner/tiny", "--port", "0", "--data-dir"])
        .arg(data)
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HUB_CACHE", data.join("hub"))
        .env_remove("HF_HUB_OFFLINE")
        .env_remove("STEERSMAN_CONFIG")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Kept open until the server has ended.
    std::mem::forget(hub.accept().unwrap());
    server
}

fn signal(server: &Child, name: &str) {
    let kill = Command::new("kill").args([&format!("-{name}"), &server.id().to_string()]).status();
    assert!(kill.unwrap().success());
}

/// Fault A10: the handlers were installed after loading, and that of SIGHUP only with `--config`: a SIGHUP ended the
/// process, and SIGTERM ended it with a signal instead of a status.
#[test]
fn signals_while_the_model_is_loaded_reload_nothing_and_stop_the_server_cleanly() {
    for stop in ["TERM", "INT"] {
        let (hub, data) = (TcpListener::bind("127.0.0.1:0").unwrap(), tempfile::tempdir().unwrap());
        let mut server = loading(&hub, data.path());
        let mut log = BufReader::new(server.stderr.take().unwrap()).lines();
        for (name, words) in [("HUP", "SIGHUP ignored"), ("USR1", "SIGUSR1"), ("USR2", "SIGUSR2")] {
            signal(&server, name);
            // Ends without such a line if the process does.
            assert!(log.any(|line| line.unwrap().contains(words)), "{name} was not survived");
        }
        signal(&server, stop);
        assert!(log.any(|line| line.unwrap().contains("server stopped")), "{stop}");
        assert_eq!(server.wait().unwrap().code(), Some(0), "{stop}");
    }
}
