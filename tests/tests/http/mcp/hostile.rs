//! MCP servers that mean harm: `fixtures/mcp_hostile.py`, in each of its modes. Requests of clients go on, with the
//! tools that can be had or with a note. What is held of such servers is bounded in `mcp/bounds.rs`, `filter.rs` and
//! `listing.rs`, which have tests of their own.

use tokio::task::JoinSet;

use super::*;

/// What a request gets of a server.
#[derive(Clone, Copy)]
enum Gets {
    /// So many tools.
    Tools(usize),
    /// The tools that half of the context has room for, and a note that others are left out.
    Fitting,
    /// A note that its tools are missing.
    Missing,
    /// One or the other, as the server was quicker or slower than the request.
    Either,
    /// A result of its tool `read` that begins so.
    Result(&'static str),
}

use Gets::{Either, Fitting, Missing, Result, Tools};

/// The tools of `mcp_server.py`.
const ALL: Gets = Tools(7);

/// Modes of the server, each with what a request gets.
const MODES: &[(&str, Gets)] = &[
    ("dies", Missing),
    ("endless-line", Missing),
    ("garbage", ALL),
    ("long-init", ALL),
    ("pages", Fitting),
    ("empty-pages", Tools(0)),
    ("cursor", Tools(2)),
    ("names", Tools(2)),
    ("many-tools", Fitting),
    ("long-tools", Fitting),
    ("nested", Missing),
    ("parts", Missing),
    ("stderr", ALL),
    ("ping", Either),
    ("sampling", Either),
    ("roots", Either),
    ("log", ALL),
    ("progress", ALL),
    ("changed", Result("contents of")),
    ("responses", Result("contents of")),
    ("invalid", ALL),
    ("call-parts", Result("x\nx\nx\n")),
    ("call-many-parts", Result("Error: the server `files` failed")),
    ("call-long", Result("Error: the server `files` failed")),
    ("call-dies", Result("Error: the server `files` failed")),
    ("call-hangs", Result("Error: the server `files` did not answer within 1 s")),
    ("http-session", Missing),
    ("http-head", Missing),
    ("http-redirect", Missing),
    ("http-type", Missing),
    ("http-body", Missing),
    ("http-comments", Missing),
    ("http-line", Missing),
    ("http-events", Result("contents of")),
];

/// Requests until a server that has tools must have been ready.
const TRIES: usize = 100;

/// Modes in which a request waits for its patience of 10 s; tried with STEERSMAN_HOSTILE_MCP set.
const SLOW_MODES: &[(&str, Gets)] =
    &[("never", Missing), ("http-trickle", Missing), ("http-1xx", Missing)];

fn hostile(mode: &str, file: Option<&Path>) -> (Option<OverHttp>, McpServerConfig) {
    let script = steersman_tests::fixtures().join("mcp_hostile.py");
    let mut command: Vec<String> =
        ["python3", script.to_str().unwrap(), mode].map(Into::into).into();
    command.extend(file.map(|file| file.to_str().unwrap().into()));
    let server = McpServerConfig { command, ..McpServerConfig::default() };
    if !mode.starts_with("http-") {
        return (None, server);
    }
    let server = OverHttp::of(server);
    let config = server.1.clone();
    (Some(server), config)
}

async fn try_mode(mode: &'static str, gets: Gets) {
    let (_server, server) = hostile(mode, None);
    let mut config = config(server);
    config.mcp.call_timeout_s = if mode == "call-hangs" { 1 } else { 30 };
    let calls = matches!(gets, Result(_));
    let (app, seen) = app_that(&config, move |request| match calls {
        true => reads()(request),
        false => answer(),
    });
    let waits = matches!(gets, Tools(_) | Fitting | Result(_));
    let mut tried = 0;
    let (reply, is_missing) = loop {
        let (status, reply) = chat(&app, body(json!({}))).await;
        assert_eq!(status, StatusCode::OK, "{mode}: {reply}");
        let notes = reply["steersman"]["notes"].to_string();
        let is_missing = notes.contains("the tools of `files` are missing");
        // A slow machine may take longer than the patience of a request.
        tried += 1;
        if !(is_missing && waits) || tried == TRIES {
            break (reply, is_missing);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let last = seen.last();
    match gets {
        Missing => assert!(is_missing, "{mode}: {reply}"),
        Tools(count) => assert_eq!((names(&last).len(), is_missing), (count, false), "{mode}"),
        Fitting => {
            assert!((1..256).contains(&names(&last).len()) && !is_missing, "{mode}: {reply}");
            let notes = reply["steersman"]["notes"].to_string();
            assert!(notes.contains("more left out: definitions of tools take"), "{mode}: {notes}");
        }
        Either => assert_eq!(names(&last).is_empty(), is_missing, "{mode}: {reply}"),
        Result(begin) => {
            let result = results(&last).concat();
            assert!(result.starts_with(begin), "{mode}: {result:.200}");
        }
    }
}

/// An endless list of tools took 84 to 2,686 MB in 55 s, and answers that a server did not read 86 to 2,210 MB.
#[tokio::test(flavor = "multi_thread")]
async fn requests_go_on_whatever_an_mcp_server_does() {
    let slow = std::env::var_os("STEERSMAN_HOSTILE_MCP").map_or(&[][..], |_| SLOW_MODES);
    let modes: Vec<_> = MODES.iter().chain(slow).collect();
    // A few at a time: each is a process.
    for some in modes.chunks(8) {
        let tried = some.iter().map(|(mode, gets)| try_mode(mode, *gets));
        tried.collect::<JoinSet<()>>().join_all().await;
    }
}

/// A program that ignores the end of its input and SIGTERM, and what it has started, end with the server.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_program_that_stays_is_killed_with_what_it_has_started() {
    let folder = folder();
    let file = folder.path().join("ids");
    let (_, server) = hostile("stays", Some(&file));
    let (app, seen) = app_that(&config(server), |_| answer());
    chat(&app, body(json!({}))).await;
    assert_eq!(names(&seen.last()).len(), 7);
    let ids = std::fs::read_to_string(&file).unwrap();
    drop((app, seen));
    for id in ids.split(' ') {
        wait_until("the processes end", async || {
            let state = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            // One that nobody waits for stays as a zombie.
            state.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('Z'))
        })
        .await;
    }
}
