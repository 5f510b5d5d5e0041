//! Swaps under load.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::served::{Connection, Served};
use super::{broken, replace, version};

const CONNECTIONS: usize = 8;
/// Least number of requests.
const REQUESTS: usize = 2000;
const SWAP: Duration = Duration::from_millis(50);

/// A changed file is read when it has been still for a while, so files are replaced less often.
const FILE_SWAP: Duration = Duration::from_secs(1);

/// Replacements of the file under load, so that requests see both of its versions.
const FILE_SWAPS: usize = 6;

/// The component of this swap: `a` and `b` in turns; `None`, a broken one, for every tenth.
fn swap(number: usize) -> Option<Vec<u8>> {
    (number % 10 != 9).then(|| version(if number.is_multiple_of(2) { "b" } else { "a" }))
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
            let bytes = swap(swaps);
            let valid = bytes.is_some();
            let bytes = bytes.unwrap_or_else(broken);
            let path = "/v1/policies/uploaded";
            let (status, reply) = connection.post(path, "application/wasm", &bytes).await;
            assert_eq!(status, if valid { 200 } else { 422 }, "{reply}");
            swaps += 1;
        }
        swaps
    });
    let (stop, filed, replaced) =
        (done.clone(), served.file("filed"), Arc::new(AtomicUsize::new(0)));
    let replacements = replaced.clone();
    let files = tokio::spawn(async move {
        let mut ticks = tokio::time::interval(FILE_SWAP);
        while !stop.load(Ordering::Relaxed) {
            ticks.tick().await;
            let number = replacements.load(Ordering::Relaxed);
            // The fourth is broken.
            replace(&filed, &swap(number + 6).unwrap_or_else(broken));
            replacements.store(number + 1, Ordering::Relaxed);
        }
        replacements.load(Ordering::Relaxed)
    });

    let clients = (0..CONNECTIONS).map(|client| {
        let profile = ["uploaded", "filed"][client % 2];
        let body = json!({
            "model": format!("tiny@{profile}"),
            "messages": [{"role": "user", "content": "w1 w2 w3"}],
            "temperature": 0, "max_tokens": 4
        });
        let replaced = replaced.clone();
        tokio::spawn(async move {
            let mut connection = Connection::open(address).await;
            let mut seen = Vec::new();
            while seen.len() < REQUESTS / CONNECTIONS
                || replaced.load(Ordering::Relaxed) < FILE_SWAPS
            {
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
                seen.push((profile, planned, text(&reply["system_fingerprint"])));
            }
            seen
        })
    });
    let clients: Vec<_> = clients.collect();
    let started = Instant::now();
    let mut ended = Vec::new();
    for client in clients {
        ended.push(client.await);
    }
    done.store(true, Ordering::Relaxed);
    let (uploads, files) = (uploads.await, files.await);
    served.end().await;

    let mut seen: BTreeMap<_, usize> = BTreeMap::new();
    for request in ended.into_iter().flat_map(Result::unwrap) {
        *seen.entry(request).or_default() += 1;
    }
    let (uploads, files) = (uploads.unwrap(), files.unwrap());
    println!("{:?}: {uploads} uploads, {files} files, {seen:?}", started.elapsed());
    assert!(seen.values().sum::<usize>() >= REQUESTS);
    // One fingerprint for each version in each profile, and each version was active.
    let versions: BTreeSet<_> =
        seen.keys().map(|(profile, version, _)| (profile, version)).collect();
    assert_eq!(versions.len(), 4, "{seen:?}");
    let fingerprints: BTreeSet<_> = seen.keys().map(|(.., fingerprint)| fingerprint).collect();
    assert_eq!((seen.len(), fingerprints.len()), (4, 4), "{seen:?}");
}
