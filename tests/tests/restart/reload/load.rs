//! Swaps under load.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use super::served::{Connection, Served};
use super::{PATIENCE, broken, replace, version};

const CONNECTIONS: usize = 8;
/// Least number of requests.
const REQUESTS: usize = 2000;
const SWAP: Duration = Duration::from_millis(50);

/// Time for the server to read a broken file, of which no reply tells. A changed file is read when it
/// has been still for a while.
const BROKEN_FILE: Duration = Duration::from_secs(1);

/// Replacements of the file under load. The fourth is broken.
const FILE_SWAPS: std::ops::Range<usize> = 6..12;

/// The version of this swap: `a` and `b` in turns; `None`, a broken one, for every tenth.
fn swap(number: usize) -> Option<&'static str> {
    (number % 10 != 9).then_some(if number.is_multiple_of(2) { "b" } else { "a" })
}

/// Half of the requests use a policy that is uploaded, half one whose file is replaced. Each version
/// has its name in the plan's note and in the reason of its stop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_load_no_request_fails_and_none_sees_two_versions() {
    let served = Served::start(&["uploaded", "filed"]).await;
    let address = served.address;

    let done = Arc::new(AtomicBool::new(false));
    let stop = done.clone();
    let uploads = tokio::spawn(async move {
        let mut connection = Connection::open(address).await;
        let mut ticks = tokio::time::interval(SWAP);
        let mut swaps = 0;
        while !stop.load(Ordering::Relaxed) {
            ticks.tick().await;
            let name = swap(swaps);
            let bytes = name.map_or_else(broken, version);
            let path = "/v1/policies/uploaded";
            let (status, reply) = connection.post(path, "application/wasm", &bytes).await;
            assert_eq!(status, if name.is_some() { 200 } else { 422 }, "{reply}");
            swaps += 1;
        }
        swaps
    });
    // A busy machine compiles a file late: each version is replaced when a reply had it.
    let (answered, mut answers) = watch::channel(String::new());
    let (answered, all_replaced) = (Arc::new(answered), Arc::new(AtomicBool::new(false)));
    let (filed, last_replaced) = (served.file("filed"), all_replaced.clone());
    let files = tokio::spawn(async move {
        for number in FILE_SWAPS {
            let name = swap(number);
            replace(&filed, &name.map_or_else(broken, version));
            if let Some(name) = name {
                let answer = timeout(PATIENCE, answers.wait_for(|answer| answer == name)).await;
                answer.unwrap_or_else(|_| panic!("no reply had version {name}")).unwrap();
            } else {
                tokio::time::sleep(BROKEN_FILE).await;
            }
        }
        last_replaced.store(true, Ordering::Relaxed);
    });

    let clients = (0..CONNECTIONS).map(|client| {
        let profile = ["uploaded", "filed"][client % 2];
        let body = json!({
            "model": format!("tiny@{profile}"),
            "messages": [{"role": "user", "content": "w1 w2 w3"}],
            "temperature": 0, "max_tokens": 4
        });
        let (answered, all_replaced) = (answered.clone(), all_replaced.clone());
        tokio::spawn(async move {
            let mut connection = Connection::open(address).await;
            let mut seen = Vec::new();
            while seen.len() < REQUESTS / CONNECTIONS || !all_replaced.load(Ordering::Relaxed) {
                let body = body.to_string();
                let path = "/v1/chat/completions";
                let (status, reply) =
                    connection.post(path, "application/json", body.as_bytes()).await;
                assert_eq!(status, 200, "{reply}");
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let steersman = &reply["steersman"];
                let (planned, stopped) = (text(&steersman["notes"][0]), &steersman["stop_reason"]);
                assert_eq!(text(stopped), planned, "saw two versions: {reply}");
                assert!(!steersman["notes"].to_string().contains("took over"), "{reply}");
                if profile == "filed" {
                    answered.send_replace(planned.clone());
                }
                seen.push((profile, planned, text(&reply["system_fingerprint"])));
            }
            seen
        })
    });
    let clients: Vec<_> = clients.collect();
    let started = Instant::now();
    // Before the clients, which wait for it.
    let replaced = files.await;
    if replaced.is_err() {
        all_replaced.store(true, Ordering::Relaxed);
    }
    let mut ended = Vec::new();
    for client in clients {
        ended.push(client.await);
    }
    done.store(true, Ordering::Relaxed);
    let uploads = uploads.await;
    served.end().await;

    let mut seen: BTreeMap<_, usize> = BTreeMap::new();
    for request in ended.into_iter().flat_map(Result::unwrap) {
        *seen.entry(request).or_default() += 1;
    }
    replaced.unwrap();
    let uploads = uploads.unwrap();
    println!("{:?}: {uploads} uploads, {seen:?}", started.elapsed());
    assert!(seen.values().sum::<usize>() >= REQUESTS);
    // One fingerprint for each version in each profile, and each version was active.
    let versions: BTreeSet<_> =
        seen.keys().map(|(profile, version, _)| (profile, version)).collect();
    assert_eq!(versions.len(), 4, "{seen:?}");
    let fingerprints: BTreeSet<_> = seen.keys().map(|(.., fingerprint)| fingerprint).collect();
    assert_eq!((seen.len(), fingerprints.len()), (4, 4), "{seen:?}");
}
