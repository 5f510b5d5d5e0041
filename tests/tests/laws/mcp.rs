//! Tools of MCP servers with the bundled model, and a policy that judges their calls.

use std::collections::BTreeMap;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use steersman::config::{ProfileAccess, ServerConfig};
use steersman::mcp::{McpConfig, McpServerConfig};
use steersman_engine::policy::Param;
use steersman_tests::{Running, config, fixtures, profile};
use tower::ServiceExt;

const TOOL: &str = "files__get_weather";

/// An app with the tool for the profiles `default` and `denies`; the policy of the latter stops at its calls.
fn app(log: &str) -> (Router, Running) {
    let mut config = config();
    config.store.ahead = false;
    for (name, tool) in [("default", "other"), ("denies", TOOL)] {
        let when = format!("when = {{ tool_called = '{tool}' }}");
        let rule = format!("[[rule]]\n{when}\ndo = {{ stop = 'not here' }}\n");
        let mut ruled = profile("rules");
        ruled.policy.params.insert("rules".into(), Param::Text(rule));
        config.profiles.insert(name.into(), ruled);
    }
    let engine = Running::without_store(config);
    let script = fixtures().join("mcp_server.py");
    let command = ["python3", script.to_str().unwrap(), "--log", log].map(Into::into).to_vec();
    let server = McpServerConfig { command, ..McpServerConfig::default() };
    let servers = BTreeMap::from([("files".to_string(), server)]);
    let access = || ProfileAccess { mcp: vec![TOOL.into()], ..ProfileAccess::default() };
    let server = ServerConfig {
        mcp: McpConfig { servers, ..McpConfig::default() },
        profiles: ["default", "denies"].map(|name| (name.to_string(), access())).into(),
        ..ServerConfig::default()
    };
    (steersman::app((*engine).clone(), &server), engine)
}

async fn send(app: &Router, request: Request<Body>) -> Value {
    let response = app.clone().oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&bytes).unwrap()
}

/// Asks about the weather. The bundled model knows one tool by heart, so the call of this one is required.
async fn ask(app: &Router, profile: &str) -> Value {
    let body = json!({
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tool_choice": {"type": "function", "function": {"name": TOOL}},
        "chat_template_kwargs": {"enable_thinking": false},
        "temperature": 0,
        "max_tokens": 200,
    });
    let request = Request::post("/v1/chat/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .header("X-Steersman-Profile", profile);
    send(app, request.body(body.to_string().into()).unwrap()).await
}

#[tokio::test]
async fn a_policy_judges_calls_before_they_are_run_and_the_trace_has_both() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let logged = || std::fs::read_to_string(&log).unwrap_or_default();
    let (app, engine) = app(log.to_str().unwrap());

    let denied = ask(&app, "denies").await;
    assert_eq!(denied["steersman"]["stop_reason"], "not here", "{denied}");
    assert_eq!(denied["steersman"].get("tool_runs"), None, "{denied}");
    assert_eq!(denied["choices"][0]["message"].get("tool_calls"), None, "{denied}");
    assert_eq!(logged(), "");

    let reply = ask(&app, "default").await;
    let runs = reply["steersman"]["tool_runs"].as_array().unwrap();
    assert_eq!(runs[0]["name"], TOOL, "{reply}");
    assert_eq!(runs[0]["arguments"], "{\"city\":\"Oslo\"}", "{reply}");
    assert_eq!(runs[0]["is_error"], false, "{reply}");
    assert_eq!(logged().matches("call get_weather").count(), runs.len());
    assert_eq!(reply["choices"][0]["message"].get("tool_calls"), None, "{reply}");

    for (reply, runs) in [(&denied, 0), (&reply, runs.len())] {
        let id = reply["id"].as_str().unwrap();
        let request = Request::get(format!("/v1/requests/{id}/trace"));
        let trace = send(&app, request.body(Body::empty()).unwrap()).await;
        let records = trace["records"].as_array().unwrap();
        let of_request: Vec<_> = records
            .iter()
            .filter(|record| record["hook"] == "on-request")
            .map(|record| record["request"].as_str().unwrap().to_string())
            .collect();
        let rounds = (2..=runs + 1).map(|round| format!("{id}-round{round}"));
        assert_eq!(of_request, [id.to_string()].into_iter().chain(rounds).collect::<Vec<_>>());
        let of_tools = trace["tool_runs"].as_array().map_or(0, Vec::len);
        assert_eq!(of_tools, runs, "{trace}");
        let judged = records.iter().filter(|record| record["hook"] == "on-tool-call");
        let judged: Vec<_> = judged.map(|record| record["policy"].as_str().unwrap()).collect();
        assert_eq!(judged, vec!["rules"; runs.max(1)], "{trace}");
    }
    drop((app, engine));
}
