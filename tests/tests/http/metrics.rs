//! Series of `/metrics`: times and tokens by model, profile and route, and what documents, dashboard and alerts say of
//! them. `tests/monitoring.py` compares them with a real server's.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Instant;

use steersman::reload::ReloadCounts;
use steersman_tests::samples;

use crate::*;

async fn scrape(app: &Router) -> String {
    let request = axum::http::Request::get("/metrics").body(Body::empty()).unwrap();
    String::from_utf8(bytes(send(app, request).await).await.to_vec()).unwrap()
}

fn post_to(route: &str, body: &Value) -> axum::http::Request<Body> {
    axum::http::Request::post(route)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap()
}

/// The values of series whose names begin so and which have one of these labels.
fn sum(samples: &BTreeMap<String, f64>, name: &str, label: &str) -> f64 {
    let of = |series: &&String| series.starts_with(&format!("{name}{{")) && series.contains(label);
    samples.keys().filter(of).map(|series| samples[series]).sum()
}

/// Time before the first piece of [`late`].
const LATE: Duration = Duration::from_millis(20);

fn late() -> Vec<Act> {
    let mut acts = vec![Wait(LATE)];
    acts.extend(answer());
    acts
}

#[tokio::test]
async fn times_and_tokens_are_observed_by_model_profile_and_route() {
    let (app, _) = app(late);
    let started = Instant::now();
    // The second route is that of clients that leave out `/v1`.
    for route in ["/v1/chat/completions", "/chat/completions"] {
        for stream in [false, true] {
            bytes(send(&app, post_to(route, &body(json!({"stream": stream})))).await).await;
        }
    }
    let elapsed = started.elapsed().as_secs_f64();
    let labels = "model=\"owner/tiny\",profile=\"default\",route=\"/v1/chat/completions\"";
    let metrics = samples(&scrape(&app).await);
    // Each script has four pieces, three of which follow another one. The requests were sent one after another, so that
    // all their times are within that of the test.
    let mut seconds = 0.0;
    for (name, count, least) in [
        ("time_to_first_token", 4.0, 4.0 * LATE.as_secs_f64()),
        ("token_gap", 12.0, f64::MIN_POSITIVE),
    ] {
        let series = format!("steersman_{name}_seconds_count{{{labels}}}");
        assert_eq!(metrics[&series], count, "{name}");
        let sum = metrics[&format!("steersman_{name}_seconds_sum{{{labels}}}")];
        assert!(sum >= least, "{name}: {sum}");
        seconds += sum;
    }
    assert!(seconds <= elapsed, "{seconds} s of {elapsed}");
    let duration = "steersman_request_duration_seconds_count";
    assert_eq!(metrics[&format!("{duration}{{{labels},status=\"2xx\"}}")], 4.0);
    let Usage { prompt_tokens, cached_tokens, reasoning_tokens, answer_tokens, .. } = USAGE;
    for (kind, each) in [
        ("prompt", prompt_tokens),
        ("cached", cached_tokens),
        ("reasoning", reasoning_tokens),
        ("answer", answer_tokens),
    ] {
        let series = format!("steersman_tokens_total{{{labels},kind=\"{kind}\"}}");
        assert_eq!(metrics[&series], f64::from(4 * each), "{kind}");
    }
}

/// A script that says when the prompt starts, as the engine does.
fn started() -> Vec<Act> {
    let mut acts = vec![Say(Event::Started {
        fingerprint: "0".into(),
        prompt_tokens: 20,
        cached_tokens: 16,
        max_tokens: 100,
        max_answer_tokens: None,
    })];
    acts.extend(answer());
    acts
}

#[tokio::test]
async fn the_time_in_the_queue_and_that_of_the_prompt_are_observed_once_a_request() {
    let (app, _) = app(started);
    bytes(send(&app, post(body(json!({"stream": true})).to_string())).await).await;
    let metrics = samples(&scrape(&app).await);
    for name in ["queue", "prefill", "time_to_first_token"] {
        let count = format!("steersman_{name}_seconds_count");
        assert_eq!(sum(&metrics, &count, "model=\"owner/tiny\""), 1.0, "{name}");
    }
}

/// A client that made up names could fill the memory of server and Prometheus.
#[tokio::test]
async fn names_that_clients_make_up_become_no_labels() {
    let (app, _) = app(answer);
    for number in 0..20 {
        let body = body(json!({"model": format!("made-up-{number}@none-{number}")}));
        send(&app, post(body.to_string())).await;
        send(&app, post_to(&format!("/v1/made-up-{number}"), &body)).await;
        send(&app, post("{")).await;
    }
    let text = scrape(&app).await;
    assert!(!text.contains("made-up") && !text.contains("none-1"), "{text}");
    let metrics = samples(&text);
    let early = "model=\"\",profile=\"\",route=\"/v1/chat/completions\",status=\"4xx\"";
    let duration = "steersman_request_duration_seconds_count";
    assert_eq!(metrics[&format!("{duration}{{{early}}}")], 40.0);
    assert_eq!(sum(&metrics, duration, "route="), 40.0);
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The series in the tables of HTTP.md, without the endings of counters and histograms; `{a,b}` stands for several.
fn documented() -> BTreeSet<String> {
    let text = read("server/HTTP.md");
    let (_, section) = text.split_once("\n## Metrics\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|row| row.split('|').nth(1).unwrap());
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    names
        .flat_map(|name| match name.split_once('{') {
            None => vec![name.to_owned()],
            Some((begin, rest)) => {
                let (several, end) = rest.split_once('}').unwrap();
                several.split(',').map(|one| format!("{begin}{one}{end}")).collect()
            }
        })
        .map(|name| family(&name).to_owned())
        .collect()
}

/// The family of a series.
fn family(series: &str) -> &str {
    let name = series.split('{').next().unwrap();
    ["_total", "_bucket", "_sum", "_count"]
        .iter()
        .find_map(|ending| name.strip_suffix(ending))
        .unwrap_or(name)
}

#[tokio::test]
async fn every_series_is_documented() {
    let (app, _) = app(started);
    bytes(send(&app, post(body(json!({})).to_string())).await).await;
    let documented = documented();
    assert!(documented.len() > 60, "{documented:?}");
    let text = scrape(&app).await;
    let metrics = samples(&text);
    let missing: BTreeSet<_> =
        metrics.keys().map(|series| family(series)).filter(|f| !documented.contains(*f)).collect();
    assert!(missing.is_empty(), "not in HTTP.md: {missing:?}");
    for name in ["steersman_build_info", "process_start_time_seconds", "steersman_policy_active"] {
        assert!(metrics.keys().any(|series| family(series) == name), "{name}");
    }
    assert!(text.contains("# UNIT steersman_token_gap_seconds seconds\n"), "{text}");
}

/// A reload that failed was only in the log.
#[tokio::test]
async fn the_result_of_the_last_reload_is_a_gauge() {
    let counts = Arc::new(ReloadCounts::default());
    let wiring = Wiring { reload_counts: counts.clone(), ..Wiring::default() };
    let (app, _) = app_wired(&ServerConfig::default(), wiring, answer);
    let last = "steersman_config_last_reload_successful";
    assert_eq!(samples(&scrape(&app).await)[last], 1.0, "there was none");
    for (success, value) in [(false, 0.0), (true, 1.0)] {
        counts.count(success);
        assert_eq!(samples(&scrape(&app).await)[last], value);
    }
    let metrics = samples(&scrape(&app).await);
    for result in ["success", "failure"] {
        assert_eq!(metrics[&format!("steersman_config_reloads_total{{result=\"{result}\"}}")], 1.0);
    }
}

/// Collectors that know no OpenMetrics, and `promtool check metrics`.
#[tokio::test]
async fn clients_that_accept_plain_text_get_the_format_before_open_metrics() {
    let (app, _) = app(answer);
    let request = axum::http::Request::get("/metrics").header(header::ACCEPT, "text/plain;q=0.9");
    let response = send(&app, request.body(Body::empty()).unwrap()).await;
    let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap();
    assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
    let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
    assert!(text.contains("# HELP steersman_requests_total Requests"), "{text}");
    assert!(text.contains("# TYPE steersman_requests_total counter\n"), "{text}");
    assert!(text.contains("# TYPE process_start_time_seconds gauge\n"), "{text}");
    assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
    let both = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
    let request = axum::http::Request::get("/metrics").header(header::ACCEPT, both);
    let response = send(&app, request.body(Body::empty()).unwrap()).await;
    samples(std::str::from_utf8(&bytes(response).await).unwrap());
}

/// The names of series in an expression.
fn names(expression: &str) -> impl Iterator<Item = &str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    expression
        .split(move |c| !is_name(c))
        .filter(|word| ["steersman_", "process_"].iter().any(|prefix| word.starts_with(prefix)))
}

/// The expressions of the dashboard, with those of its variables.
fn dashboard() -> Vec<String> {
    fn add(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value.as_str() {
                        Some(text) if ["expr", "definition"].contains(&name.as_str()) => {
                            found.push(text.into());
                        }
                        _ => add(value, found),
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|value| add(value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    add(&serde_json::from_str(&read("configs/grafana.json")).unwrap(), &mut found);
    found
}

#[test]
fn dashboard_and_alerts_use_documented_series_only() {
    let documented = documented();
    let rules = read("configs/alerts.yml");
    let rules = rules.lines().filter_map(|line| line.trim_start().strip_prefix("expr: "));
    let expressions: Vec<_> = rules.map(str::to_owned).chain(dashboard()).collect();
    assert!(expressions.len() > 40, "{expressions:#?}");
    let (mut used, mut unknown) = (BTreeSet::new(), Vec::new());
    for expression in &expressions {
        for name in names(expression) {
            used.insert(family(name));
            if !documented.contains(family(name)) {
                unknown.push(name);
            }
        }
        let count = |c| expression.matches(c).count();
        assert_eq!((count('('), count('{')), (count(')'), count('}')), "{expression}");
    }
    assert!(unknown.is_empty(), "not in HTTP.md: {unknown:?}");
    assert!(used.len() > 30, "{used:?}");
}
