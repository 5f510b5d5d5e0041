//! Another Steersman as an upstream: its model loops, and the policy of this one breaks the loop.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use steersman::config::ServerConfig;
use steersman_engine::config::Profile;
use steersman_engine::policy::PolicyConfig;
use steersman_engine::request::{Event, FinishReason, Request};
use steersman_tests::{Running, ask, config, policies, profile};
use steersman_upstream::{Continues, Kind, Upstream, UpstreamConfig};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// An engine whose policies do nothing, its server, and the address of that.
async fn other() -> (Running, JoinHandle<std::io::Result<()>>, String) {
    let mut config = config();
    config.profiles.insert("default".into(), profile("passthrough"));
    let engine = Running::without_store(config);
    let app = steersman::app((*engine).clone(), &ServerConfig::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    (engine, server, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loop_at_another_steersman_is_broken_here_and_the_answer_has_its_form() {
    let (engine, server, url) = other().await;
    let name = engine.info().model.clone();
    // A busy machine may stop a thread for longer than the default of 50 ms.
    let limits = PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() };
    let policies = policies(&limits, [("default".into(), Profile::default())]).unwrap();
    let settings = UpstreamConfig { url, ..UpstreamConfig::default() };
    let upstream = Upstream::new("other", settings, Arc::new(policies), BTreeMap::new()).unwrap();
    assert!(upstream.ask().await.unwrap().contains(&name));
    let capabilities = upstream.capabilities();
    assert_eq!((capabilities.kind, capabilities.continues), (Kind::Steersman, Continues::Told));

    let question = "Optimize this SQL query: SELECT * FROM items WHERE price = 26;";
    let request = Request { reasoning: Some(true), max_answer_tokens: Some(100), ..ask(question) };
    let mut events = upstream.model(&name).submit(request).unwrap();
    let (mut reasoning, mut answer) = (String::new(), String::new());
    let finished = loop {
        let event = tokio::time::timeout(Duration::from_secs(600), events.recv()).await.unwrap();
        match event.expect("a request ends with its last event") {
            Event::Reasoning(text) => reasoning += &text,
            Event::Answer(text) => answer += &text,
            Event::Finished(finished) => break finished,
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    };
    // The engine ends after its server, and that after the connections to it.
    drop((events, upstream));
    server.abort();
    drop(engine);
    let notes = finished.notes.join("; ");
    assert!(
        notes.contains("closed the reasoning") && notes.contains("loop of"),
        "{notes}: {reasoning}"
    );
    assert!(answer.starts_with("**Final SQL:**\n\n```sql\n"), "{answer}");
    // The model writes the rest.
    assert!(answer.len() > "**Final SQL:**\n\n```sql\n".len(), "{answer}");
    assert!(matches!(finished.reason, FinishReason::Stop | FinishReason::Length), "{finished:?}");
}
