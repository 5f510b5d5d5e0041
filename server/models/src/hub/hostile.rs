//! A hub that is hostile, or that somebody on the way to it imitates. Whatever it sends, nothing is written outside of the
//! cache, a download takes a bounded number of bytes, and it ends.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::*;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// Most bytes that a client may take: the limit on a list, and what buffers of the system hold.
const TAKEN: u64 = LIST_BYTES + (16 << 20);

/// Bytes of a body that a client has to cut off.
const ENDLESS: u64 = 4 * TAKEN;

/// What is done to a correct hub.
#[derive(Clone, Copy)]
enum Fault {
    /// This header of a file.
    Header(&'static str, &'static str),
    /// The list of files.
    List(fn(&mut Value)),
    /// The body of the list.
    ListBody(Body),
    /// The body of a file.
    FileBody(Body),
    /// The status and the headers of a file.
    FileHead(&'static str),
    /// Prepares the folder of the cache, and a folder beside it.
    Folder(fn(&Path, &Path)),
}

#[derive(Clone, Copy)]
enum Body {
    /// Without an end.
    Endless,
    /// These bytes, and then the connection ends.
    Short(&'static str),
    /// Nothing while the client waits.
    Silent,
    /// A byte at a time.
    Trickle,
    /// Headers without an end.
    Headers,
}

/// The weights of the model: of more bytes than a hub that trickles sends while a machine does not run the client.
const WEIGHTS: &str = match str::from_utf8(&[b'w'; 16 << 10]) {
    Ok(text) => text,
    Err(_) => unreachable!(),
};

fn files() -> BTreeMap<&'static str, &'static str> {
    BTreeMap::from([
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("model.safetensors", WEIGHTS),
    ])
}

/// Times that a hub which answers does not reach on any machine.
const PATIENT: Times = Times {
    connect: Duration::from_secs(60),
    silence: Duration::from_secs(60),
    list: Duration::from_secs(60),
    window: Duration::from_secs(60),
    retry: Duration::from_millis(1),
};

/// Times for a hub that does not answer.
const SILENT: Times = Times { silence: Duration::from_millis(300), ..PATIENT };

/// Times for a hub that answers too slowly.
const SLOW: Times = Times { window: Duration::from_millis(300), ..PATIENT };

/// Serves with `fault`; returns the address, and where the bytes that clients took are counted.
fn serve(fault: Fault) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let taken = Arc::new(AtomicU64::new(0));
    let (count, home) = (taken.clone(), endpoint.clone());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (count, home) = (count.clone(), home.clone());
            // Fails when the client hangs up, as it is to do.
            thread::spawn(move || drop(answer(stream, fault, &count, &home)));
        }
    });
    (endpoint, taken)
}

fn answer(stream: TcpStream, fault: Fault, taken: &AtomicU64, home: &str) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    let mut from = 0;
    for line in lines {
        let line = line?.to_lowercase();
        if let Some(range) = line.strip_prefix("range: bytes=") {
            from = range.split('-').next().unwrap().parse().unwrap();
        }
        if line.is_empty() {
            break;
        }
    }
    let path = first.split(' ').nth(1).unwrap_or_default().to_string();
    let mut stream = stream;
    if path.starts_with("/api/") {
        let file = |(name, text): (&str, &str)| json!({"rfilename": name, "size": text.len()});
        let siblings: Vec<_> = files().into_iter().map(file).collect();
        let mut list = json!({"sha": SHA, "siblings": siblings});
        if let Fault::List(change) = fault {
            change(&mut list);
        }
        if let Fault::ListBody(body) = fault {
            return send(&mut stream, "200 OK\r\n", body, "", taken);
        }
        let list = list.to_string();
        let length = list.len();
        taken.fetch_add(length as u64, Ordering::SeqCst);
        return write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{list}"
        );
    }
    let name = path.rsplit_once(&format!("{SHA}/")).map_or("", |(_, name)| name);
    let text = files().get(name).copied().unwrap_or("{}").get(from..).unwrap_or_default();
    let whole = from + text.len();
    let last = whole.saturating_sub(1);
    let mut head = format!(
        "206 Partial Content\r\nX-Repo-Commit: {SHA}\r\nETag: \"{name}\"\r\n\
         Content-Range: bytes {from}-{last}/{whole}\r\n"
    );
    match fault {
        Fault::Header(header, value) => {
            let (begin, end) = head.split_once("\r\n").unwrap();
            let others = end.split("\r\n").filter(|line| !line.starts_with(header));
            head = format!(
                "{begin}\r\n{}{header}: {value}\r\n",
                others.fold(String::new(), |all, line| {
                    if line.is_empty() { all } else { format!("{all}{line}\r\n") }
                })
            );
        }
        Fault::FileHead(other) => head = other.replace("HOME", home),
        Fault::FileBody(body) => return send(&mut stream, &head, body, text, taken),
        _ => {}
    }
    taken.fetch_add(text.len() as u64, Ordering::SeqCst);
    write!(
        stream,
        "HTTP/1.1 {head}Content-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    )
}

fn send(
    stream: &mut TcpStream,
    head: &str,
    body: Body,
    text: &str,
    taken: &AtomicU64,
) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {head}")?;
    match body {
        Body::Endless => {
            write!(stream, "Connection: close\r\n\r\n")?;
            let spaces = vec![b' '; 1 << 16];
            while taken.load(Ordering::SeqCst) < ENDLESS {
                stream.write_all(&spaces)?;
                taken.fetch_add(spaces.len() as u64, Ordering::SeqCst);
            }
        }
        Body::Short(text) => write!(stream, "Content-Length: 1000\r\n\r\n{text}")?,
        Body::Silent => {
            write!(stream, "Content-Length: {}\r\n\r\n", text.len().max(2))?;
            // Until the client hangs up.
            std::io::copy(stream, &mut std::io::sink())?;
        }
        Body::Trickle => {
            write!(stream, "Content-Length: {}\r\n\r\n", text.len())?;
            for byte in text.bytes() {
                stream.write_all(&[byte])?;
                thread::sleep(SLOW.window / 6);
            }
        }
        Body::Headers => {
            while taken.load(Ordering::SeqCst) < ENDLESS {
                let line = format!("X: {}\r\n", "x".repeat(1000));
                stream.write_all(line.as_bytes())?;
                taken.fetch_add(line.len() as u64, Ordering::SeqCst);
            }
        }
    }
    Ok(())
}

/// Every file, link and folder below `root` with its content, but what is in `cache`.
fn everything(root: &Path, cache: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(root).unwrap().map(|entry| entry.unwrap()) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if path == cache {
            continue;
        }
        let content = match kind {
            _ if kind.is_dir() => {
                all.extend(everything(&path, cache));
                Vec::new()
            }
            _ if kind.is_symlink() => {
                fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
            }
            _ => fs::read(&path).unwrap(),
        };
        all.insert(path, content);
    }
    all
}

fn fetch(hub: &Hub, times: Times) -> Result<PathBuf> {
    let client = Client::new(hub, times, &Stop::default());
    let plan = hub.plan_with(&client, "owner/tiny")?;
    hub.download_with(&client, &plan, &mut |_| {})
}

/// Adds a file to the list.
fn add(list: &mut Value, name: &str, size: Value) {
    list["siblings"].as_array_mut().unwrap().push(json!({"rfilename": name, "size": size}));
}

/// What is done, by name; and how the download ends: the words of its error, or `None` for success.
#[rustfmt::skip]
fn faults() -> Vec<(&'static str, Fault, Option<&'static str>)> {
    use Fault::*;
    vec![
        // Names in headers: they are of no use to the client.
        ("an ETag that is an absolute path", Header("ETag", "\"/tmp/steersman-hostile-hub\""), None),
        ("an ETag that leads out", Header("ETag", "\"../../../../victim\""), None),
        ("an ETag that leads out, weak", Header("ETag", "W/\"../../../victim\""), None),
        ("an ETag of the linked content", Header("X-Linked-ETag", "\"../../../../victim\""), None),
        ("an ETag that is a folder", Header("ETag", "\"..\""), None),
        ("an ETag without a name", Header("ETag", "\"\""), None),
        ("an ETag of backslashes", Header("ETag", "\"..\\..\\victim\""), None),
        ("a commit that leads out", Header("X-Repo-Commit", "../../../../pwn"), None),
        ("a commit that is an absolute path", Header("X-Repo-Commit", "/tmp/steersman-hostile-hub"), None),
        // Names in the list.
        ("a sha that leads out", List(|list| list["sha"] = "../../../pwn".into()), Some("no digest")),
        ("no sha", List(|list| list["sha"] = "".into()), Some("no digest")),
        ("a long sha", List(|list| list["sha"] = "a".repeat(5000).into()), Some("no digest")),
        ("a sha that is a device", List(|list| list["sha"] = "CON".into()), Some("no digest")),
        ("a digest that leads out", List(|list| list["siblings"][1]["lfs"] = json!({"sha256": "../../../victim"})), Some("SHA-256")),
        ("a blob that leads out", List(|list| list["siblings"][0]["blobId"] = "../../../../victim".into()), Some("blobId")),
        ("an empty blob", List(|list| list["siblings"][0]["blobId"] = "".into()), Some("blobId")),
        ("a name that leads out", List(|list| list["siblings"][1]["rfilename"] = "../../../../x.safetensors".into()), Some("no safetensors")),
        ("a name in a folder that leads out", List(|list| add(list, "..\\x.json", 2.into())), Some("outside")),
        ("a name of a drive", List(|list| add(list, "C:x.json", 2.into())), Some("outside")),
        ("a name with NUL", List(|list| add(list, "a\0.json", 2.into())), Some("outside")),
        ("a name of control characters", List(|list| add(list, "\u{1b}[2J\n.json", 2.into())), Some("outside")),
        ("a long name", List(|list| add(list, &("x".repeat(5000) + ".json"), 2.into())), Some("outside")),
        ("two names that differ in case", List(|list| add(list, "CONFIG.json", 2.into())), Some("one file")),
        ("a name that begins with -", List(|list| add(list, "-rf.json", 2.into())), None),
        // Numbers.
        ("a size of a petabyte", List(|list| list["siblings"][1]["size"] = 1_000_000_000_000_000_u64.into()), Some("says that it has")),
        ("sizes without a sum", List(|list| {
            for name in ["a.json", "b.json"] { add(list, name, u64::MAX.into()); }
        }), Some("more than the limit")),
        ("a negative size", List(|list| add(list, "a.json", (-5).into())), Some("reading the hub's answer")),
        ("200,000 files", List(|list| (0..200_000).for_each(|i| add(list, &format!("{i}.json"), 2.into()))), Some("more than 20000 files")),
        ("3,000 files of a model", List(|list| (0..3000).for_each(|i| add(list, &format!("{i}.json"), 2.into()))), Some("are more than 2000")),
        ("a nested list", List(|list| list["x"] = (0..120).fold(json!(0), |inner, _| json!([inner]))), None),
        // Bodies.
        ("a list without an end", ListBody(Body::Endless), Some("more than")),
        ("a list that ends early", ListBody(Body::Short("{\"sha\":")), Some("connection")),
        ("a list that stops", ListBody(Body::Silent), Some("download failed")),
        ("headers without an end", ListBody(Body::Headers), Some("download failed")),
        ("a file without an end", FileBody(Body::Endless), Some("promised")),
        ("a file that ends early", FileBody(Body::Short("{")), Some("connection")),
        ("a file that stops", FileBody(Body::Silent), Some("download failed")),
        ("a file that trickles", FileBody(Body::Trickle), Some("bytes in")),
        ("headers of a file without an end", FileBody(Body::Headers), Some("download failed")),
        // Replies to a request for a range.
        ("a redirect to itself", FileHead("302 Found\r\nLocation: HOME/x\r\n"), Some("redirects more than")),
        ("a redirect to a file", FileHead("302 Found\r\nLocation: file:///etc/passwd\r\n"), Some("no address")),
        ("a redirect to nowhere", FileHead("302 Found\r\nLocation: http://\r\n"), Some("no address")),
        ("another range", FileHead("206 Partial Content\r\nContent-Range: bytes 7-8/9\r\n"), Some("from 7 on")),
        ("a range of the end", FileHead("206 Partial Content\r\nContent-Range: bytes 1-1/2\r\n"), Some("from 1 on")),
        ("no range", FileHead("206 Partial Content\r\n"), Some("no valid Content-Range")),
        ("a range that is no number", FileHead("206 Partial Content\r\nContent-Range: bytes x-y/z\r\n"), Some("no valid Content-Range")),
        ("a range beyond the end", FileHead("416 Range Not Satisfiable\r\n"), Some("416")),
        ("an error", FileHead("500 Internal Server Error\r\n"), Some("500")),
        // Links that were there before.
        ("a link for a part", Folder(|repo, beside| {
            fs::create_dir_all(repo.join("blobs")).unwrap();
            // The name of the content of a file without a digest.
            let plan = Plan::new(repo.parent().unwrap(), "owner/tiny", steersman_files::FileName::new(SHA).unwrap()).unwrap();
            let file = serde_json::from_value(json!({"rfilename": "config.json"})).unwrap();
            symlink(beside.join("victim"), plan.folder.part(&plan.wanted(&file).unwrap().blob)).unwrap();
        }), None),
        ("a link for the contents", Folder(|repo, beside| {
            fs::create_dir_all(repo).unwrap();
            symlink(beside, repo.join("blobs")).unwrap();
        }), Some("link out of the cache")),
        ("a link for the snapshot", Folder(|repo, beside| {
            fs::create_dir_all(repo.join("snapshots")).unwrap();
            symlink(beside, repo.join("snapshots").join(SHA)).unwrap();
        }), Some("link out of the cache")),
        ("a link for the reference", Folder(|repo, beside| {
            fs::create_dir_all(repo.join("refs")).unwrap();
            symlink(beside.join("victim"), repo.join("refs/main")).unwrap();
        }), None),
    ]
}

/// Faults A6 and A11: `steersman pull` with an ETag of `/home/u/.ssh/authorized_keys` overwrote that file, `X-Repo-Commit`
/// created files outside of the cache, and a file of 26 bytes was downloaded without an end.
#[test]
fn a_hostile_hub_writes_nothing_outside_of_the_cache_and_every_download_ends() {
    // Of an earlier run that failed.
    let _ = fs::remove_file("/tmp/steersman-hostile-hub");
    let run = |name: &'static str, fault: Fault, expected: Option<&'static str>| {
        // Deep enough for names that lead out.
        let root = tempfile::tempdir().unwrap();
        let home = root.path().join("a/b/c/home");
        let cache = home.join("hub");
        let folders = [
            root.path().to_path_buf(),
            root.path().join("a/b/c"),
            home.clone(),
            root.path().join("a/b"),
        ];
        fs::create_dir_all(&home).unwrap();
        folders.iter().for_each(|folder| fs::write(folder.join("victim"), "safe").unwrap());
        if let Fault::Folder(prepare) = fault {
            prepare(&cache.join("models--owner--tiny"), &home);
        }
        let before = everything(root.path(), &cache);
        let (endpoint, taken) = serve(fault);
        let hub = Hub { endpoint, cache: cache.clone(), token: None, offline: false };
        let times = match fault {
            Fault::ListBody(Body::Silent) | Fault::FileBody(Body::Silent) => SILENT,
            Fault::FileBody(Body::Trickle) => SLOW,
            _ => PATIENT,
        };
        let done = fetch(&hub, times);
        assert!(everything(root.path(), &cache) == before, "{name}: something outside has changed");
        assert!(!Path::new("/tmp/steersman-hostile-hub").exists(), "{name}");
        let taken = taken.load(Ordering::SeqCst);
        assert!(taken <= TAKEN, "{name}: {taken} bytes were taken");
        match (done, expected) {
            (Ok(folder), None) => {
                for (file, text) in files() {
                    assert_eq!(fs::read_to_string(folder.join(file)).unwrap(), text, "{name}");
                }
                assert_eq!(hub.cached("owner/tiny"), Some(folder), "{name}");
            }
            (Err(error), Some(words)) => {
                let error = format!("{error:#}");
                assert!(error.contains(words), "{name}: `{words}` is not in `{error}`");
                assert!(!error.contains("  ") && !error.contains('\u{1b}'), "{name}: {error}");
                assert!(error.len() < 1000, "{name}: {error}");
                assert!(hub.cached("owner/tiny").is_none(), "{name}");
            }
            (done, _) => panic!("{name}: {done:?}"),
        }
    };
    // At the same time: most of them only wait.
    thread::scope(|scope| {
        let threads: Vec<_> = faults()
            .into_iter()
            .map(|(name, fault, expected)| (name, scope.spawn(move || run(name, fault, expected))))
            .collect();
        let failed: Vec<_> = threads
            .into_iter()
            .filter_map(|(name, thread)| thread.join().is_err().then_some(name))
            .collect();
        assert!(failed.is_empty(), "{failed:#?}");
    });
}

/// The test above once more, in a root of its own: a layer over this machine's file systems takes whatever is written,
/// wherever that is. Needs the rights to mount. Without them, the folders around the cache were compared above.
#[cfg(target_os = "linux")]
#[test]
fn a_hostile_hub_changes_nothing_in_a_whole_root() {
    const TEST: &str = "a_hostile_hub_writes_nothing_outside_of_the_cache_and_every_download_ends";
    // The test keeps its caches in /hostile-work, and removes them.
    const SCRIPT: &str = r#"
        set -e
        mount -t tmpfs none "$1"
        mkdir "$1/layer" "$1/work" "$1/root"
        mount -t overlay overlay -o "lowerdir=/,upperdir=$1/layer,workdir=$1/work" "$1/root"
        mount --rbind /dev "$1/root/dev"
        mount --rbind /proc "$1/root/proc"
        mkdir "$1/root/hostile-work"
        cp "$2" "$1/root/hostile-test"
        chroot "$1/root" sh -c ': > /hostile-canary'
        echo mounted
        TMPDIR=/hostile-work HOME=/hostile-work chroot "$1/root" /hostile-test --exact "$3" >&2
        cd "$1/layer"
        find . -mindepth 1 | sort
    "#;
    let (place, program) = (tempfile::tempdir().unwrap(), std::env::current_exe().unwrap());
    let output = std::process::Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh"])
        .args([place.path(), program.as_path()])
        .arg(format!("hub::hostile::{TEST}"))
        .output();
    let Ok(output) = output else {
        return eprintln!("not run: there is no program `unshare`");
    };
    let (found, problems) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let Some(found) = found.strip_prefix("mounted\n") else {
        return eprintln!("not run: {problems}");
    };
    assert!(output.status.success() && problems.contains("1 passed"), "{problems}");
    let found: Vec<_> = found.lines().collect();
    assert_eq!(found, ["./hostile-canary", "./hostile-test", "./hostile-work"]);
}

/// Fault A11: a download could not be stopped, and no other one began until a restart.
#[test]
fn a_download_that_is_stopped_ends_at_once() {
    let cache = tempfile::tempdir().unwrap();
    let (endpoint, _) = serve(Fault::FileBody(Body::Silent));
    let hub = Hub { endpoint, cache: cache.path().into(), token: None, offline: false };
    let stop = Stop::default();
    let error = thread::scope(|scope| {
        // The hub is silent, and the client would wait for a minute.
        let pull = scope.spawn(|| hub.plan_until("owner/tiny", &stop).unwrap_err());
        thread::sleep(Duration::from_millis(50));
        stop.stop();
        pull.join().unwrap()
    });
    assert_eq!(error.to_string(), "the download was stopped");
}
