//! What `GET /v1/policies` shows to which key.

use axum::http::{Request, header};
use serde_json::{Value, json};
use steersman_engine::config::Profile;
use steersman_engine::policy::{RequestView, Step};
use steersman_test_support::guest::named;

use super::{ADMIN, Server, Site};

async fn listed(server: &Server, key: Option<&str>) -> Value {
    let mut request = Request::get("/v1/policies");
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let (status, reply) = server.send(request, Vec::new()).await;
    assert_eq!(status, 200, "{reply}");
    reply
}

/// The profiles of all uses, and the messages, of a list.
fn summary(listed: &Value) -> (Vec<&str>, Vec<&str>) {
    let policies = listed["policies"].as_array().unwrap();
    let uses = policies.iter().flat_map(|policy| policy["profiles"].as_array().unwrap());
    let profiles = uses.map(|used| used["profile"].as_str().unwrap()).collect();
    let earlier = policies.iter().flat_map(|policy| policy["earlier"].as_array().unwrap());
    let withdrawn = earlier.filter_map(|version| version["withdrawn"].as_str());
    let problems = policies.iter().filter_map(|policy| policy["problem"]["message"].as_str());
    (profiles, problems.chain(withdrawn).collect())
}

/// A key of one profile read the names, paths and failures of all others.
#[tokio::test]
async fn a_key_sees_the_policies_of_its_own_profiles_only() {
    let mut site = Site::new();
    site.profile_keys = vec![("default", "sk-default"), ("private", "sk-private")];
    site.profiles.insert("private".into(), Profile::default());
    let server = site.serve();
    let (status, reply) = server.upload(named("b", true)).await;
    assert_eq!(status, 200, "{reply}");
    for profile in ["default", "other"] {
        for _ in 0..3 {
            let mut session = steersman_tests::session(&server.policies, profile).unwrap();
            session.ask(&RequestView::default()).unwrap();
            session.ask(&Step::default()).unwrap();
        }
    }
    let all = listed(&server, Some(ADMIN)).await;
    let (profiles, reasons) = summary(&all);
    assert_eq!(profiles, ["private", "default", "other"]);
    assert_eq!(reasons.len(), 2, "{all}");
    assert!(reasons.iter().all(|reason| reason.contains("failed in 3 of its first 3")), "{all}");
    for (key, expected) in [
        (Some("sk-default"), json!(["default"])),
        (Some("sk-private"), json!(["private"])),
        (None, json!(["other"])),
    ] {
        let list = listed(&server, key).await;
        let (profiles, reasons) = summary(&list);
        assert_eq!(json!(profiles), expected, "{list}");
        assert!(!reasons.iter().any(|reason| reason.contains("failed")), "{list}");
        assert_eq!(list["policies"].as_array().unwrap().len(), 1, "{list}");
    }
}
