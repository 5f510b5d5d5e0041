//! Tools of MCP servers: rounds within one reply, limits, failures, and the client's own tools. The servers are
//! `fixtures/mcp_server.py`. [`protocols`] has what each protocol shows of the rounds,
//! [`hostile`] servers that mean harm.

mod hostile;
mod protocols;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use steersman::config::{ProfileAccess, ServerConfig};
use steersman::mcp::{McpConfig, McpServerConfig, command};
use steersman_engine::request::{CallDelta, Event, FinishReason, FunctionCall, Request, ToolCall};
use steersman_engine::{Error, RequestError};
use tempfile::TempDir;

use crate::*;

/// The fixture as a program with a log in `folder`.
fn program(folder: &Path) -> McpServerConfig {
    let script = steersman_tests::fixtures().join("mcp_server.py");
    let log = log(folder);
    let command = ["python3", script.to_str().unwrap(), "--log", log.to_str().unwrap()];
    McpServerConfig { command: command.map(Into::into).to_vec(), ..McpServerConfig::default() }
}

fn log(folder: &Path) -> std::path::PathBuf {
    folder.join("log")
}

/// The fixture over HTTP, ended on drop.
struct OverHttp(Child, McpServerConfig);

impl OverHttp {
    fn start(folder: &Path, key: &str) -> Self {
        let headers = BTreeMap::from([("Authorization".to_string(), key.into())]);
        let mut program = McpServerConfig { headers, ..program(folder) };
        program.command.push("--http".into());
        Self::of(program)
    }

    /// A program that prints its port.
    fn of(program: McpServerConfig) -> Self {
        let mut child = Command::new(&program.command[0]);
        let child = child.args(&program.command[1..]).stdout(Stdio::piped());
        let mut child = child.spawn().unwrap();
        let mut port = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let url = format!("http://127.0.0.1:{}/mcp", port.trim());
        Self(child, McpServerConfig { url, command: Vec::new(), ..program })
    }
}

impl Drop for OverHttp {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A configuration whose profile `default` grants the server `files`.
fn config(server: McpServerConfig) -> ServerConfig {
    let servers = BTreeMap::from([("files".to_string(), server)]);
    granting(McpConfig { servers, ..McpConfig::default() }, &["files"])
}

fn granting(mcp: McpConfig, grants: &[&str]) -> ServerConfig {
    let mcp_grants = grants.iter().map(ToString::to_string).collect();
    let default = ProfileAccess { mcp: mcp_grants, ..ProfileAccess::default() };
    let profiles = BTreeMap::from([("default".to_string(), default)]);
    ServerConfig { mcp, profiles, ..ServerConfig::default() }
}

fn tool_call(id: &str, name: &str, arguments: Value) -> ToolCall {
    let arguments = arguments.as_object().unwrap().clone();
    let function = FunctionCall { name: name.into(), arguments: arguments.into() };
    ToolCall { id: id.into(), kind: "function".into(), function }
}

/// The results of tools in a request.
fn results(request: &Request) -> Vec<&str> {
    let tools = request.messages.iter().filter(|message| message.role == "tool");
    tools.map(|message| message.content.as_str()).collect()
}

/// A model that calls this tool once, and then answers with its result.
fn calls(name: &'static str, arguments: Value) -> impl Fn(&Request) -> Vec<Act> + Send + 'static {
    move |request| match results(request).last() {
        Some(result) => vec![
            Say(Event::Reasoning("It is there.".into())),
            Say(Event::Answer(format!("It returned: {result}"))),
            finished(FinishReason::Stop),
        ],
        None => vec![
            Say(Event::Reasoning("I look.".into())),
            Say(Event::Answer("Let me look.".into())),
            Say(Event::CallDelta(CallDelta {
                id: "call_1".into(),
                name: Some(name.into()),
                arguments: "{".into(),
            })),
            Say(Event::ToolCall(tool_call("call_1", name, arguments.clone()))),
            finished(FinishReason::ToolCalls),
        ],
    }
}

fn app_that(
    config: &ServerConfig,
    script: impl Fn(&Request) -> Vec<Act> + Send + 'static,
) -> (Router, Arc<Seen>) {
    enable_log();
    let (engine, seen) = engine_that("owner/tiny", 8, script);
    (steersman::app(engine, config), seen)
}

fn reads() -> impl Fn(&Request) -> Vec<Act> + Send + 'static {
    calls("files__read", json!({"path": "a.txt"}))
}

fn requests(seen: &Seen) -> Vec<Request> {
    seen.requests.lock().unwrap().clone()
}

fn names(request: &Request) -> Vec<&str> {
    request.tools.iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect()
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn logged(folder: &TempDir) -> String {
    std::fs::read_to_string(log(folder.path())).unwrap_or_default()
}

/// Waits at most 30 seconds until `is_true`.
async fn wait_until(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    for _ in 0..600 {
        if is_true().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("never: {what}");
}

/// Checks a chat of one call of `files__read`.
async fn check_round_trip(config: &ServerConfig) {
    let (app, seen) = app_that(config, reads());
    let (status, reply) = chat(&app, body(json!({}))).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let choice = &reply["choices"][0];
    let content = "Let me look.\n\nIt returned: contents of a.txt";
    assert_eq!(choice["message"]["content"], content);
    assert_eq!(choice["message"]["reasoning"], "I look.\n\nIt is there.");
    assert_eq!(choice["message"].get("tool_calls"), None);
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(reply["usage"]["prompt_tokens"], 2 * USAGE.prompt_tokens);
    assert_eq!(
        reply["usage"]["completion_tokens"],
        2 * (USAGE.reasoning_tokens + USAGE.answer_tokens)
    );
    assert_eq!(reply["steersman"]["notes"], json!(["routed: plain", "routed: plain"]));
    let mut run = reply["steersman"]["tool_runs"][0].clone();
    assert!(run["milliseconds"].take().is_u64());
    let expected = json!({
        "id": "call_1", "name": "files__read", "arguments": "{\"path\":\"a.txt\"}",
        "output_bytes": 17, "is_error": false, "round": 1, "milliseconds": null, "index": 0,
    });
    assert_eq!(run, expected);
    let [first, second] = &requests(&seen)[..] else { panic!("two rounds") };
    let offered = ["read", "long", "fail", "slow", "die", "environment", "get_weather"];
    assert_eq!(names(first), offered.map(|name| format!("files__{name}")));
    let parameters = &first.tools[0]["function"]["parameters"];
    assert_eq!(parameters["properties"], json!({"path": {"type": "string"}}));
    assert_eq!(second.id, format!("{}-round2", first.id));
    assert_eq!(names(second), names(first));
    let [_, turn, result] = &second.messages[..] else { panic!("{:?}", second.messages) };
    assert_eq!((turn.role.as_str(), turn.content.as_str()), ("assistant", "Let me look."));
    assert_eq!(turn.reasoning_content.as_deref(), Some("I look."));
    assert_eq!(turn.tool_calls, [tool_call("call_1", "files__read", json!({"path": "a.txt"}))]);
    assert_eq!(result.tool_call_id.as_deref(), Some("call_1"));
    assert_eq!(result.content, "contents of a.txt");
}

#[tokio::test]
async fn calls_are_run_between_the_rounds_of_one_reply() {
    let folder = folder();
    check_round_trip(&config(program(folder.path()))).await;
    assert_eq!(logged(&folder), "call read\n");
}

#[tokio::test]
async fn servers_over_http_get_their_headers_and_answer_with_events() {
    let folder = folder();
    let server = OverHttp::start(folder.path(), "Bearer sk-mcp");
    check_round_trip(&config(server.1.clone())).await;
    assert!(logged(&folder).starts_with("call read\n"));
}

#[tokio::test]
async fn rounds_continue_in_the_same_stream_without_calls_for_the_client() {
    let folder = folder();
    let (app, _) = app_that(&config(program(folder.path())), reads());
    let response = send(&app, post(body(json!({"stream": true})).to_string())).await;
    let chunks = data(&bytes(response).await);
    let deltas: Vec<_> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let roles = deltas.iter().filter(|delta| delta.get("role").is_some());
    assert_eq!(roles.count(), 1);
    assert!(deltas.iter().all(|delta| delta.get("tool_calls").is_none()));
    let content: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(content, "Let me look.\n\nIt returned: contents of a.txt");
    let reasons = chunks.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]);
    let reasons: Vec<_> = reasons.filter(|reason| !reason.is_null()).collect();
    assert_eq!(reasons, ["stop"]);
    let run = chunks.iter().find(|chunk| chunk["steersman"].get("tool_run").is_some()).unwrap();
    assert_eq!(run["steersman"]["tool_run"]["name"], "files__read");
    assert_eq!(run["choices"][0]["delta"], json!({}));
}

#[tokio::test]
async fn a_reply_ends_at_the_limit_of_rounds() {
    let folder = folder();
    let mut config = config(program(folder.path()));
    config.mcp.rounds = 2;
    let (app, seen) = app_that(&config, |request| {
        let id = format!("call_{}", results(request).len());
        let call = tool_call(&id, "files__read", json!({"path": "b"}));
        vec![Say(Event::ToolCall(call)), finished(FinishReason::ToolCalls)]
    });
    let (_, reply) = chat(&app, body(json!({}))).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    let notes = reply["steersman"]["notes"].as_array().unwrap();
    let note = "mcp: not run: `files__read`: the limit of 2 rounds is reached (mcp.rounds)";
    assert_eq!(notes.last().unwrap(), note);
    assert_eq!(requests(&seen).len(), 3);
    assert_eq!(logged(&folder), "call read\ncall read\n");
    assert_eq!(reply["usage"]["prompt_tokens"], 3 * USAGE.prompt_tokens);
}

#[tokio::test]
async fn rounds_share_the_limit_of_the_reply_if_the_client_sets_none() {
    let folder = folder();
    let (app, seen) = app_that(&config(program(folder.path())), reads());
    chat(&app, body(json!({}))).await;
    let [first, second] = &requests(&seen)[..] else { panic!("two rounds") };
    let used = USAGE.reasoning_tokens + USAGE.answer_tokens;
    assert_eq!((first.max_tokens, second.max_tokens), (None, Some(MAX_TOKENS - used)));
}

#[tokio::test]
async fn limits_of_the_client_hold_for_all_rounds_together() {
    let folder = folder();
    let (app, seen) = app_that(&config(program(folder.path())), reads());
    let extra = json!({"max_tokens": 50, "min_tokens": 20, "max_thinking_tokens": 9,
                       "tool_choice": "required"});
    chat(&app, body(extra)).await;
    let [first, second] = &requests(&seen)[..] else { panic!("two rounds") };
    let used = USAGE.reasoning_tokens + USAGE.answer_tokens;
    assert_eq!((first.max_tokens, second.max_tokens), (None, Some(MAX_TOKENS - used)));
    let answers = (first.max_answer_tokens, second.max_answer_tokens);
    assert_eq!(answers, (Some(50), Some(50 - USAGE.answer_tokens)));
    assert_eq!((first.min_tokens, second.min_tokens), (20, 20 - used));
    let budget = 9 - USAGE.reasoning_tokens;
    assert_eq!((first.reasoning_budget, second.reasoning_budget), (Some(9), Some(budget)));
    assert!(first.tool_choice.is_required && !second.tool_choice.is_required);
    let of_reply = json!({"max_completion_tokens": used, "reasoning_effort": "high"});
    for extra in [json!({"max_tokens": USAGE.answer_tokens}), of_reply] {
        let (_, reply) = chat(&app, body(extra)).await;
        assert_eq!(reply["choices"][0]["finish_reason"], "length");
        let notes = reply["steersman"]["notes"].to_string();
        assert!(notes.contains("the limit on tokens is reached"), "{notes}");
    }
}

/// What the model gets as the result of this call.
async fn result_of(config: &ServerConfig, name: &'static str, arguments: Value) -> String {
    let (app, seen) = app_that(config, calls(name, arguments));
    let (status, reply) = chat(&app, body(json!({}))).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let result = results(&seen.last()).concat();
    let is_error = &reply["steersman"]["tool_runs"][0]["is_error"];
    assert_eq!(*is_error, result.starts_with("Error: "), "{reply}");
    result
}

#[tokio::test]
async fn results_are_texts_within_the_limits_and_errors_are_marked() {
    let folder = folder();
    let mut config = config(program(folder.path()));
    config.mcp.result_bytes = 1001;
    config.mcp.call_timeout_s = 1;
    let long = result_of(&config, "files__long", json!({"bytes": 3000})).await;
    assert_eq!(long, format!("{}\n[cut off: 1000 of 3000 bytes]", "é".repeat(500)));
    let weather = result_of(&config, "files__get_weather", json!({"city": "Oslo"})).await;
    assert_eq!(weather, "rain in Oslo\n[image left out: image/png, 3 bytes]");
    assert_eq!(result_of(&config, "files__fail", json!({})).await, "Error: no such file");
    let slow = result_of(&config, "files__slow", json!({})).await;
    assert_eq!(slow, "Error: the server `files` did not answer within 1 s");
    let unknown = result_of(&config, "files__write", json!({})).await;
    assert_eq!(unknown, "Error: there is no tool `files__write`");
    wait_until("the server learns of the timeout", async || logged(&folder).contains("cancelled"))
        .await;
}

#[tokio::test]
async fn results_that_do_not_fit_into_the_context_end_the_reply() {
    let folder = folder();
    let (app, _) = app_that(&config(program(folder.path())), |request| {
        if results(request).is_empty() {
            return calls("files__read", json!({"path": "a"}))(request);
        }
        let error = RequestError::ContextTooLong { tokens: 9000, limit: 8000 };
        vec![Say(Event::Failed(Error::Request(error)))]
    });
    let (status, reply) = chat(&app, body(json!({}))).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["choices"][0]["message"]["content"], "Let me look.");
    let notes = reply["steersman"]["notes"].to_string();
    assert!(notes.contains("the reply ends after round 1: the prompt has 9000"), "{notes}");
}

#[tokio::test]
async fn a_lost_server_is_missing_with_a_note_and_is_started_again() {
    let folder = folder();
    let (app, seen) = app_that(&config(program(folder.path())), calls("files__die", json!({})));
    let (_, reply) = chat(&app, body(json!({}))).await;
    let result = results(&seen.last()).concat();
    assert!(result.starts_with("Error: the server `files` failed: "), "{result}");
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    let note = "mcp: the tools of `files` are missing: it is not available";
    // The reply is a call of the client's then, because the scripted model calls it in any case.
    wait_until("the server is missing", async || {
        let (status, reply) = chat(&app, body(json!({}))).await;
        assert_eq!(status, StatusCode::OK);
        reply["steersman"]["notes"].to_string().contains(note)
    })
    .await;
    wait_until("the server is back", async || {
        let request = json!({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]});
        let (_, reply) = chat(&app, body(request)).await;
        !reply["steersman"]["notes"].to_string().contains(note)
    })
    .await;
    assert_eq!(names(&seen.last()).len(), 7);
}

#[tokio::test]
async fn servers_that_never_start_are_missing_with_a_note() {
    let folder = folder();
    let wrong_key = OverHttp::start(folder.path(), "Bearer sk-wrong");
    let no_program = ["/no/such/program".to_string()].to_vec();
    let no_program = McpServerConfig { command: no_program, ..McpServerConfig::default() };
    let ends = McpServerConfig { command: vec!["false".into()], ..McpServerConfig::default() };
    for server in [no_program, ends, wrong_key.1.clone()] {
        let (app, seen) = app_that(&config(server), |_| answer());
        let (status, reply) = chat(&app, body(json!({}))).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(reply["choices"][0]["message"]["content"], "Rome\n.");
        let notes = &reply["steersman"]["notes"];
        assert_eq!(notes[0], "mcp: the tools of `files` are missing: it is not available");
        assert!(seen.last().tools.is_empty());
    }
}

#[tokio::test]
async fn a_round_without_text_leaves_no_empty_line() {
    let folder = folder();
    let (app, _) = app_that(&config(program(folder.path())), calls_all(&["files__fail"]));
    let (_, reply) = chat(&app, body(json!({}))).await;
    assert_eq!(reply["choices"][0]["message"]["content"], "Rome\n.");
}

fn client_tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {}});
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

/// Replies with these calls, each in pieces and whole, until there are results.
fn calls_all(names: &'static [&'static str]) -> impl Fn(&Request) -> Vec<Act> + Send + 'static {
    move |request| {
        if !results(request).is_empty() {
            return answer();
        }
        let mut acts = Vec::new();
        for name in names {
            let id = format!("call_{name}");
            let arguments = "{}".to_string();
            let delta = CallDelta { id: id.clone(), name: Some((*name).into()), arguments };
            acts.push(Say(Event::CallDelta(delta)));
            acts.push(Say(Event::ToolCall(tool_call(&id, name, json!({})))));
        }
        acts.push(finished(FinishReason::ToolCalls));
        acts
    }
}

/// The client has a tool `weather`. A reply that calls it goes to the client, whatever else it calls.
#[tokio::test]
async fn clients_keep_their_own_tools() {
    for (called, of_client, note) in [
        (&["weather"][..], &["weather"][..], None),
        (&["files__fail", "weather"], &["weather"], Some("mcp: not run: `files__fail`: ")),
        (&["weather", "files__fail"], &["weather"], Some("mcp: not run: `files__fail`: ")),
        (&["files__fail", "files__environment"], &[], None),
    ] {
        for stream in [false, true] {
            let folder = folder();
            let (app, seen) = app_that(&config(program(folder.path())), calls_all(called));
            let extra = json!({"tools": [client_tool("weather")], "stream": stream});
            let response = bytes(send(&app, post(body(extra).to_string())).await).await;
            let (mut got, mut last) = (Vec::new(), Value::Null);
            let objects = match stream {
                true => data(&response),
                false => vec![serde_json::from_slice(&response).unwrap()],
            };
            for object in objects.iter().filter(|object| object.is_object()) {
                let choice = &object["choices"][0];
                let message = choice.get("delta").or(choice.get("message")).unwrap();
                for call in message["tool_calls"].as_array().into_iter().flatten() {
                    got.extend(call["function"]["name"].as_str().map(str::to_string));
                }
                if !choice["finish_reason"].is_null() {
                    last = object.clone();
                }
            }
            assert_eq!(got, of_client, "{called:?} {stream}");
            let reason = if of_client.is_empty() { "stop" } else { "tool_calls" };
            assert_eq!(last["choices"][0]["finish_reason"], reason, "{called:?}");
            let notes = last["steersman"]["notes"].to_string();
            assert_eq!(notes.contains("mcp: "), note.is_some(), "{notes}");
            assert!(notes.contains(note.unwrap_or_default()), "{notes}");
            let ran = if of_client.is_empty() { "call fail\ncall environment\n" } else { "" };
            assert_eq!(logged(&folder), ran, "{called:?}");
            assert_eq!(names(&requests(&seen)[0])[..2], ["weather", "files__read"]);
        }
    }
}

#[tokio::test]
async fn a_clients_tool_takes_precedence_over_one_of_the_same_name() {
    let folder = folder();
    let (app, seen) = app_that(&config(program(folder.path())), calls_all(&["files__fail"]));
    let (_, reply) = chat(&app, body(json!({"tools": [client_tool("files__fail")]}))).await;
    let calls = &reply["choices"][0]["message"]["tool_calls"];
    assert_eq!(calls[0]["function"]["name"], "files__fail");
    let note = "mcp: `files__fail` is left out: the client has a tool of this name";
    assert_eq!(reply["steersman"]["notes"][0], note);
    let request = seen.last();
    let of_name = names(&request).into_iter().filter(|name| *name == "files__fail");
    assert_eq!(of_name.count(), 1);
    assert_eq!(logged(&folder), "");
}

/// A limit, or a policy, ended the reply after the call was complete.
#[tokio::test]
async fn calls_of_a_reply_that_ended_are_not_run() {
    for reason in [FinishReason::Length, FinishReason::Policy("forbidden".into())] {
        let folder = folder();
        let ends = reason.clone();
        let (app, seen) = app_that(&config(program(folder.path())), move |_| {
            let call = tool_call("call_1", "files__read", json!({"path": "a"}));
            vec![Say(Event::ToolCall(call)), finished(ends.clone())]
        });
        let (_, reply) = chat(&app, body(json!({}))).await;
        let notes = reply["steersman"]["notes"].to_string();
        assert!(notes.contains("mcp: not run: `files__read`: the reply ended before"), "{notes}");
        assert_eq!((logged(&folder).as_str(), requests(&seen).len()), ("", 1));
        let message = &reply["choices"][0]["message"];
        assert_eq!(message.get("tool_calls"), None, "{reason:?}");
    }
}

#[tokio::test]
async fn grants_and_tool_choice_decide_what_is_offered() {
    let folder = folder();
    let offered = async |grants: &[&str], extra: Value| {
        let mcp = config(program(folder.path())).mcp;
        let (app, seen) = app_that(&granting(mcp, grants), |_| answer());
        let (status, reply) = chat(&app, body(extra)).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        names(&seen.last()).join(" ")
    };
    assert_eq!(offered(&[], json!({})).await, "");
    assert_eq!(
        offered(&["files__long", "files__read"], json!({})).await,
        "files__read files__long"
    );
    assert_eq!(offered(&["files"], json!({"tool_choice": "none"})).await, "");
    let function = json!({"type": "function", "function": {"name": "files__long"}});
    assert_eq!(offered(&["files"], json!({"tool_choice": function})).await, "files__long");
    let function = json!({"type": "function", "function": {"name": "weather"}});
    let own = json!({"tool_choice": function, "tools": [client_tool("weather")]});
    assert_eq!(offered(&["files"], own).await, "weather");
}

#[tokio::test]
async fn a_client_that_disconnects_cancels_the_call() {
    let folder = folder();
    let (app, _) = app_that(&config(program(folder.path())), calls("files__slow", json!({})));
    let request = post(body(json!({"stream": true})).to_string());
    let response = send(&app, request).await;
    wait_until("the call runs", async || logged(&folder).contains("call slow")).await;
    drop(response);
    wait_until("the call is cancelled", async || logged(&folder).contains("cancelled")).await;
}

#[tokio::test]
async fn traces_have_the_calls_with_texts_if_the_profile_allows() {
    for trace_text in [false, true] {
        let folder = folder();
        let mut config = config(program(folder.path()));
        config.profiles.get_mut("default").unwrap().trace_text = trace_text;
        let (app, _) = app_that(&config, reads());
        let response = send(&app, post(body(json!({})).to_string())).await;
        let id = json_of(response).await["id"].as_str().unwrap().to_string();
        let request = axum::http::Request::get(format!("/v1/requests/{id}/trace"));
        let trace = json_of(send(&app, request.body(Body::empty()).unwrap()).await).await;
        let run = &trace["tool_runs"][0];
        assert_eq!((&run["name"], &run["output_bytes"]), (&json!("files__read"), &json!(17)));
        let texts = ["arguments", "output"].map(|key| run.get(key).cloned());
        let expected = [json!("{\"path\":\"a.txt\"}"), json!("contents of a.txt")];
        assert_eq!(texts, expected.map(|text| Some(text).filter(|_| trace_text)), "{trace}");
    }
}

#[tokio::test]
async fn programs_get_their_variables_and_no_secrets_of_this_server() {
    let folder = folder();
    let mut server = program(folder.path());
    server.env.insert("MCP_TOKEN".into(), "sk-mcp".into());
    let variables = result_of(&config(server), "files__environment", json!({})).await;
    let variables: Vec<_> = variables.split(' ').collect();
    assert!(variables.contains(&"MCP_TOKEN") && variables.contains(&"PATH"), "{variables:?}");
    // Cargo sets it for this test.
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    assert!(!variables.contains(&"CARGO_MANIFEST_DIR"), "{variables:?}");
}

/// `steersman mcp`, which has a runtime of its own.
#[test]
fn the_command_lists_and_calls_tools() {
    let folder = folder();
    let config = config(program(folder.path())).mcp;
    let run = |task| {
        let mut out = Vec::new();
        let done = command::run(task, &config, &mut out).map_err(|error| format!("{error:#}"));
        (String::from_utf8(out).unwrap(), done)
    };
    let call = |tool: &str, arguments: Value| {
        run(command::Task::Call { tool: tool.into(), arguments: arguments.to_string() })
    };
    let (listed, done) = run(command::Task::List { server: None });
    assert_eq!(done, Ok(()));
    assert_eq!(listed.lines().next(), Some("files__read(path)  Reads a file."));
    assert_eq!(listed.lines().count(), 7);
    let (text, done) = call("files__read", json!({"path": "b"}));
    assert_eq!((text.as_str(), done), ("contents of b\n", Ok(())));
    for (tool, arguments, words) in [
        ("files__fail", json!({}), "no such file"),
        ("files__write", json!({}), "has no tool `write`"),
        ("web__read", json!({}), "no server `web`"),
        ("read", json!({}), "SERVER__TOOL"),
        ("files__read", json!([]), "must be a JSON object"),
    ] {
        let error = call(tool, arguments).1.unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    let none = McpConfig { servers: BTreeMap::new(), ..config };
    let error = command::run(command::Task::List { server: None }, &none, &mut Vec::new());
    assert!(error.unwrap_err().to_string().contains("[mcp.servers.NAME]"));
}
