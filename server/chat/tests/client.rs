//! The client against a server that gives written responses.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};
use steersman_chat::{Client, End, Once, Options, Piece, Presence, run};
use tokio::runtime::{Builder, Runtime};

/// How a written response ends.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    /// The connection closes.
    Close,
    /// Nothing more comes; the client has to close the connection.
    Wait,
}

/// What the server has seen.
#[derive(Debug)]
enum Seen {
    Request { head: String, body: Value },
    Closed,
}

/// A server that answers each connection with the next of `responses`.
fn server(responses: Vec<(String, Then)>) -> (String, Receiver<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (seen, sees) = channel();
    std::thread::spawn(move || {
        for (response, then) in responses {
            let (mut stream, _) = listener.accept().unwrap();
            let (head, body) = read(&stream);
            let _ = seen.send(Seen::Request { head, body });
            stream.write_all(response.as_bytes()).unwrap();
            if then == Then::Wait {
                let _ = stream.read(&mut [0]);
                let _ = seen.send(Seen::Closed);
            }
        }
    });
    (format!("http://{address}/v1/"), sees)
}

fn read(stream: &TcpStream) -> (String, Value) {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let lower = line.to_lowercase();
        if let Some(number) = lower.strip_prefix("content-length:") {
            length = number.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
        head += &lower;
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    (head, serde_json::from_slice(&body).unwrap_or_default())
}

fn response(status: &str, kind: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n{body}")
}

/// A stream of `chunks`, and `[DONE]` if it is complete.
fn stream(chunks: &[Value], complete: bool) -> String {
    let mut body = String::from(": a comment\n\n");
    chunks.iter().for_each(|chunk| body += &format!("data: {chunk}\n\n"));
    if complete {
        body += "data: [DONE]\n\n";
    }
    response("200 OK", "text/event-stream", &body)
}

fn delta(delta: Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}], "usage": null})
}

fn ends(reason: &str) -> [Value; 2] {
    let usage = json!({
        "prompt_tokens": 20, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 7},
    });
    [
        json!({
            "choices": [{"index": 0, "delta": {}, "finish_reason": reason}],
            "steersman": {"profile": "default", "notes": ["a loop was closed"]},
        }),
        json!({"choices": [], "usage": usage}),
    ]
}

fn rome() -> Vec<Value> {
    let mut chunks = vec![
        delta(json!({"role": "assistant"})),
        delta(json!({"reasoning_content": "Hm.", "reasoning": "Hm."})),
        delta(json!({"content": "Ro"})),
        delta(json!({"content": "me."})),
    ];
    chunks.extend(ends("stop"));
    chunks
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn next_request(sees: &Receiver<Seen>) -> (String, Value) {
    match sees.recv_timeout(Duration::from_secs(30)).unwrap() {
        Seen::Request { head, body } => (head, body),
        Seen::Closed => panic!("the connection is closed"),
    }
}

#[test]
fn a_reply_is_reasoning_then_answer_then_its_end() {
    let (url, sees) = server(vec![(stream(&rome(), true), Then::Close)]);
    let client = Client::new(&url, Some("secret")).unwrap();
    let pieces = runtime().block_on(async {
        let body = json!({"model": "m", "messages": []});
        let mut reply = client.chat(body, Some("agent")).await.unwrap();
        let mut pieces = Vec::new();
        loop {
            pieces.push(reply.next().await.unwrap());
            if matches!(pieces.last(), Some(Piece::End(_))) {
                return pieces;
            }
        }
    });
    let end = End {
        reason: "stop".into(),
        tokens: 12,
        reasoning_tokens: 7,
        prompt_tokens: 20,
        cached_tokens: 16,
        notes: vec!["a loop was closed".into()],
    };
    assert_eq!(
        pieces,
        [
            Piece::Reasoning("Hm.".into()),
            Piece::Answer("Ro".into()),
            Piece::Answer("me.".into()),
            Piece::End(end)
        ]
    );
    let (head, body) = next_request(&sees);
    assert!(head.starts_with("post /v1/chat/completions "), "{head}");
    assert!(head.contains("authorization: bearer secret"), "{head}");
    assert!(head.contains("x-steersman-profile: agent"), "{head}");
    assert_eq!(
        (&body["stream"], &body["stream_options"]["include_usage"]),
        (&true.into(), &true.into())
    );
}

#[test]
fn a_dropped_reply_closes_its_connection() {
    let (url, sees) = server(vec![(stream(&rome()[..3], false), Then::Wait)]);
    let client = Client::new(&url, None).unwrap();
    let runtime = runtime();
    runtime.block_on(async {
        let mut reply = client.chat(json!({}), None).await.unwrap();
        assert_eq!(reply.next().await.unwrap(), Piece::Reasoning("Hm.".into()));
    });
    next_request(&sees);
    let seen = sees.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(matches!(seen, Seen::Closed), "{seen:?}");
}

#[test]
fn errors_have_the_servers_words() {
    let refusal = json!({"error": {"message": "there is no model `x`", "code": "model_not_found"}});
    let refusal = response("404 Not Found", "application/json", &refusal.to_string());
    let late =
        [delta(json!({"content": "a"})), json!({"error": {"message": "the engine stopped"}})];
    let foreign = response("502 Bad Gateway", "text/html", "<html>proxy</html>");
    let (url, _sees) = server(vec![
        (refusal, Then::Close),
        (stream(&late, false), Then::Close),
        (stream(&rome()[..3], false), Then::Close),
        (foreign, Then::Close),
    ]);
    let client = Client::new(&url, None).unwrap();
    let runtime = runtime();
    let error = |_: usize| {
        let mut reply = runtime.block_on(client.chat(json!({}), None))?;
        runtime.block_on(async {
            while !matches!(reply.next().await?, Piece::End(_)) {}
            anyhow::Ok(())
        })
    };
    for (index, words) in ["no model `x`", "the engine stopped", "ended before the reply", "502"]
        .into_iter()
        .enumerate()
    {
        let error = format!("{:#}", error(index).unwrap_err());
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn a_missing_server_and_a_wrong_address_are_named() {
    // Its port is free once the listener is dropped.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let client = Client::new(&format!("http://{address}"), None).unwrap();
    let error = format!("{:#}", runtime().block_on(client.models()).unwrap_err());
    assert!(
        error.contains(&address.to_string()) && error.contains("no server answers there"),
        "{error}"
    );
    for wrong in
        ["ftp://host", "not an address", "http://", "", "http//host:1", "http:/host", "99999"]
    {
        let error = Client::new(wrong, None).err().map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains("is not an address")), "{wrong}");
    }
    for (written, url) in [
        ("localhost", "http://localhost:11436"),
        ("192.0.2.1:21401", "http://192.0.2.1:21401"),
        ("21401", "http://127.0.0.1:21401"),
        (" http://host/v1/ ", "http://host"),
        ("https://host/models", "https://host/models"),
    ] {
        assert_eq!(Client::new(written, None).unwrap().url(), url, "{written}");
    }
}

#[test]
fn an_address_needs_no_scheme() {
    let list = json!({"data": [{"id": "m"}]}).to_string();
    let (url, _sees) = server(vec![(response("200 OK", "application/json", &list), Then::Close)]);
    let client = Client::new(url.trim_start_matches("http://"), None).unwrap();
    assert_eq!(runtime().block_on(client.models()).unwrap(), ["m"]);
}

#[test]
fn a_server_that_listens_everywhere_is_found_on_this_machine() {
    for (host, expected) in [
        ("127.0.0.1", "http://127.0.0.1:7"),
        ("0.0.0.0", "http://127.0.0.1:7"),
        ("::", "http://[::1]:7"),
        ("::1", "http://[::1]:7"),
        ("box.lan", "http://box.lan:7"),
    ] {
        assert_eq!(steersman_chat::url(host, 7), expected);
    }
}

/// Another program may listen at the address, and is no server to talk to. None is told the key.
#[test]
fn only_a_steersman_server_is_present() {
    let ready = json!({"status": "ok", "engines": []});
    let loading = json!({"status": "loading", "model": "m"});
    let foreign = json!({"status": "ok"});
    let (ok, busy) = ("200 OK", "503 Service Unavailable");
    let (url, sees) = server(vec![
        (response(ok, "application/json", &ready.to_string()), Then::Close),
        (response(busy, "application/json", &loading.to_string()), Then::Close),
        (response(busy, "application/json", r#"{"status": "draining"}"#), Then::Close),
        (response(ok, "application/json", &foreign.to_string()), Then::Close),
        (response(ok, "text/html", "<html>"), Then::Close),
    ]);
    let client = Client::new(&url, Some("secret")).unwrap();
    for expected in [
        Presence::Ready,
        Presence::Loading(Some("m".into())),
        Presence::Absent,
        Presence::Absent,
        Presence::Absent,
    ] {
        assert_eq!(runtime().block_on(client.presence()), expected);
        let (head, _) = next_request(&sees);
        assert!(head.starts_with("get /health ") && !head.contains("secret"), "{head}");
    }
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let client = Client::new(&address.to_string(), None).unwrap();
    assert_eq!(runtime().block_on(client.presence()), Presence::Absent);
}

#[test]
fn models_are_listed() {
    let list = json!({"data": [{"id": "m"}, {"id": "m@agent"}]}).to_string();
    let (url, sees) = server(vec![(response("200 OK", "application/json", &list), Then::Close)]);
    let client = Client::new(&url, None).unwrap();
    assert_eq!(runtime().block_on(client.models()).unwrap(), ["m", "m@agent"]);
    assert!(next_request(&sees).0.starts_with("get /v1/models "));
}

/// The outcome of `run`, what it printed, and the request.
fn once(chunks: &[Value], once: Once) -> (anyhow::Result<()>, String, String, Value) {
    let (url, sees) = server(vec![(stream(chunks, true), Then::Close)]);
    let client = Client::new(&url, None).unwrap();
    let (mut out, mut messages) = (Vec::new(), Vec::new());
    let options = Options { system: Some("Be brief.".into()), ..Options::default() };
    let done = runtime().block_on(run(&client, "m", &options, &once, &mut out, &mut messages));
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done, text(out), text(messages), next_request(&sees).1)
}

#[test]
fn run_prints_the_answer_and_on_demand_the_reasoning() {
    let prompt = Once { prompt: vec!["Hi".into()], ..Once::default() };
    let (done, out, messages, request) = once(&rome(), prompt.clone());
    done.unwrap();
    assert_eq!((out.as_str(), messages.as_str()), ("Rome.\n", ""));
    assert_eq!(request["model"], "m");
    let texts: Vec<_> = [0, 1].map(|i| request["messages"][i]["content"].clone()).into();
    assert_eq!(texts, ["Be brief.", "Hi"]);
    let (done, out, messages, _) = once(&rome(), Once { reasoning: true, ..prompt });
    done.unwrap();
    assert_eq!((out.as_str(), messages.as_str()), ("Rome.\n", "Hm.\na loop was closed\n"));
}

#[test]
fn run_fails_without_a_whole_answer() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("schema.json");
    std::fs::write(&file, r#"{"type": "object"}"#).unwrap();
    let prompt = Once { prompt: vec!["Hi".into()], ..Once::default() };
    let with_schema = Once { json_schema: Some(file.clone()), ..prompt.clone() };
    let (done, _, _, request) = once(&rome(), with_schema.clone());
    done.unwrap();
    assert_eq!(request["response_format"]["json_schema"]["schema"], json!({"type": "object"}));

    let mut cut = rome()[..3].to_vec();
    cut.extend(ends("length"));
    let (done, out, messages, _) = once(&cut, prompt.clone());
    done.unwrap();
    assert_eq!(out, "Ro\n");
    assert!(messages.contains("cut off"), "{messages}");
    let error = once(&cut, with_schema).0.unwrap_err().to_string();
    assert!(error.contains("--max-tokens"), "{error}");

    let mut empty = rome()[..2].to_vec();
    empty.extend(ends("length"));
    let error = once(&empty, prompt.clone()).0.unwrap_err().to_string();
    assert!(error.contains("no answer") && error.contains("`length`"), "{error}");

    std::fs::write(&file, "{").unwrap();
    let client = Client::new("http://127.0.0.1:9", None).unwrap();
    let options = Options::default();
    let once = Once { json_schema: Some(file), ..prompt };
    let done =
        runtime().block_on(run(&client, "m", &options, &once, &mut Vec::new(), &mut Vec::new()));
    let error = format!("{:#}", done.unwrap_err());
    assert!(error.contains("schema.json"), "{error}");
}
