//! What went wrong at an upstream, in words that have nothing of its key.

use std::fmt;
use std::time::Duration;

use http::StatusCode;
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use steersman_request::{Error, RequestError, UpstreamFault};

/// Most characters of an upstream's message that errors quote.
const QUOTED: usize = 2000;

/// Characters of a key that no message has in a row.
const KEY_CHARS: usize = 6;

/// What stands in place of a key.
const MASK: &str = "[key]";

/// Why a request to an upstream failed.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// Whose fault it is.
    pub kind: FaultKind,
    /// The problem in words that follow the name of the upstream. Has nothing of the key.
    pub problem: String,
    /// When it may be asked again.
    pub retry_after: Option<Duration>,
}

/// Whose fault it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// The client's: the upstream refuses the request with this status, and would again.
    Request(u16),
    /// The upstream's.
    Upstream(UpstreamFault),
    /// The operator's: the key.
    Setup,
    /// The operator's: the upstream refuses the key for this request, such as for its model, and maybe for no other.
    Denied,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)
    }
}

impl Fault {
    /// A fault of the upstream.
    pub fn new(kind: UpstreamFault, problem: impl Into<String>) -> Self {
        Self { kind: FaultKind::Upstream(kind), problem: problem.into(), retry_after: None }
    }

    /// A reply that cannot be read.
    pub fn protocol(problem: impl Into<String>) -> Self {
        Self::new(UpstreamFault::Failed, problem)
    }

    /// Returns true if the same request may succeed if it is sent again at once, or after the time that the upstream
    /// says.
    pub fn is_passing(&self) -> bool {
        use UpstreamFault::{Busy, Failed, Unavailable};
        matches!(self.kind, FaultKind::Upstream(Busy | Unavailable | Failed))
    }

    /// Returns true if it says something about the upstream as a whole, for the breaker.
    pub fn is_of_upstream(&self) -> bool {
        use UpstreamFault::{Failed, TimedOut, Unavailable};
        matches!(self.kind, FaultKind::Upstream(Unavailable | Failed | TimedOut) | FaultKind::Setup)
    }

    /// The error of a request to the upstream `name`.
    pub fn error(self, name: &str) -> Error {
        let (upstream, problem) = (name.to_string(), self.problem);
        match self.kind {
            FaultKind::Request(status) => {
                RequestError::UpstreamRefused { upstream, status, message: problem }.into()
            }
            FaultKind::Upstream(fault) => {
                let retry_after_s = self.retry_after.map(|time| time.as_secs().max(1));
                RequestError::Upstream { upstream, fault, problem, retry_after_s }.into()
            }
            FaultKind::Setup | FaultKind::Denied => {
                let fault = UpstreamFault::Failed;
                RequestError::Upstream { upstream, fault, problem, retry_after_s: None }.into()
            }
        }
    }

    /// The fault that a response of `status` with `body` is.
    pub fn of_response(
        status: StatusCode,
        body: &[u8],
        retry_after: Option<Duration>,
        mask: &Mask,
    ) -> Self {
        let message = message(body, mask);
        let said = if message.is_empty() { String::new() } else { format!(": {message}") };
        let code = status.as_u16();
        let fault = |kind, problem| Self { kind, problem, retry_after };
        let upstream = |kind, what: &str| {
            fault(FaultKind::Upstream(kind), format!("{what} (HTTP {code}){said}"))
        };
        match code {
            // Vendors quote parts of the key there.
            401 => fault(
                FaultKind::Setup,
                format!("refuses its key (HTTP {code}); an operator has to check it"),
            ),
            403 => fault(
                FaultKind::Denied,
                format!(
                    "refuses its key for this request (HTTP {code}); an operator has to check it"
                ),
            ),
            429 => upstream(UpstreamFault::Busy, "takes no more requests now"),
            408 | 504 => upstream(UpstreamFault::TimedOut, "took too long"),
            503 | 529 => upstream(UpstreamFault::Unavailable, "is overloaded"),
            400..=499 => {
                let status = status.canonical_reason().unwrap_or("no reason given");
                let message = if message.is_empty() { status.to_string() } else { message };
                fault(FaultKind::Request(code), message)
            }
            500..=599 => upstream(UpstreamFault::Failed, "failed"),
            _ => upstream(UpstreamFault::Failed, "sent an unexpected response"),
        }
    }

    /// The fault that an error in a stream is; `None` if `event` has none.
    pub fn of_event(event: &Value, mask: &Mask) -> Option<Self> {
        // Some servers send a list with one.
        let event = event.get(0).unwrap_or(event);
        let is_error = event["object"] == "error" || event["type"] == "error";
        let error = &event["error"];
        if error.is_null() && !is_error {
            return None;
        }
        let bytes = event.to_string();
        let said = message(bytes.as_bytes(), mask);
        let number = |value: &Value| {
            value
                .as_u64()
                .or_else(|| value.as_str()?.parse().ok())
                .filter(|n| (400..600).contains(n))
        };
        let code = number(&error["code"]).or_else(|| number(&event["code"]));
        let kind = error["type"].as_str().unwrap_or_default();
        let kind = match (code, kind) {
            (Some(429), _) | (_, "rate_limit_error") => UpstreamFault::Busy,
            (Some(503 | 529), _) | (_, "overloaded_error") => UpstreamFault::Unavailable,
            _ => UpstreamFault::Failed,
        };
        Some(Self::new(kind, format!("failed: {said}")))
    }
}

/// The message of an error body, without the key; the whole of a short text in another form.
fn message(body: &[u8], mask: &Mask) -> String {
    let text = String::from_utf8_lossy(body);
    let json: Value = serde_json::from_str(&text).unwrap_or_default();
    let json = json.get(0).unwrap_or(&json);
    let of = |value: &Value| value.as_str().map(str::to_string);
    let found = of(&json["error"]["message"])
        .or_else(|| of(&json["message"]))
        .or_else(|| of(&json["error"]))
        .or_else(|| of(&json["detail"]));
    let is_page = text.trim_start().starts_with('<');
    let whole = || if is_page { String::new() } else { text.trim().to_string() };
    let message: String = found.unwrap_or_else(whole).chars().take(QUOTED).collect();
    let message: String = message.chars().filter(|c| !c.is_control() || *c == '\n').collect();
    mask.apply(&message)
}

/// Removes a key from texts.
#[derive(Clone, Default)]
pub struct Mask(Option<SecretString>);

impl Mask {
    /// The mask of a key.
    pub fn new(key: Option<SecretString>) -> Self {
        Self(key)
    }

    /// `text` without the key, and without parts of it that say something about it.
    pub fn apply(&self, text: &str) -> String {
        let Some(key) = &self.0 else { return text.to_string() };
        let key = key.expose_secret();
        let whole = text.replace(key, MASK);
        // A key is ASCII, so a part that begins within a character is none.
        let parts: Vec<&str> =
            (0..key.len()).filter_map(|at| key.get(at..at + KEY_CHARS)).collect();
        let mut out = String::new();
        let mut rest = whole.as_str();
        while let Some(c) = rest.chars().next() {
            match parts.iter().find(|part| rest.starts_with(**part)) {
                Some(_) => {
                    // The rest of what it shares with the key.
                    let mut length = KEY_CHARS;
                    while rest.get(..length + 1).is_some_and(|longer| key.contains(longer)) {
                        length += 1;
                    }
                    out.push_str(MASK);
                    rest = &rest[length..];
                }
                None => {
                    out.push(c);
                    rest = &rest[c.len_utf8()..];
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn mask() -> Mask {
        Mask::new(Some("sk-proj-abcdefgh1234".to_string().into()))
    }

    #[test]
    fn no_part_of_a_key_that_says_something_is_quoted() {
        let mask = mask();
        assert_eq!(mask.apply("the key sk-proj-abcdefgh1234 is wrong"), "the key [key] is wrong");
        assert_eq!(mask.apply("sk-proj-********h1234é"), "[key]********h1234é");
        assert_eq!(mask.apply("ends with efgh1234."), "ends with [key].");
        assert_eq!(mask.apply("a proj"), "a proj");
        assert_eq!(Mask::default().apply("sk-proj"), "sk-proj");
    }

    #[test]
    fn faults_say_who_can_act_and_have_no_key() {
        let body = |text: &str| json!({"error": {"message": text}}).to_string();
        let check = |status: u16, text: &str| {
            let status = StatusCode::from_u16(status).unwrap();
            let fault = Fault::of_response(status, text.as_bytes(), None, &mask());
            assert!(!fault.problem.contains("abcdefgh"), "{fault}");
            fault
        };
        let wrong = check(401, &body("Incorrect API key provided: sk-proj-abcdefgh1234."));
        assert_eq!(wrong.kind, FaultKind::Setup);
        // A model that the key does not open says nothing of the others.
        let denied = check(403, &body("sk-proj-abcdefgh1234 has no access to the model"));
        assert!(wrong.is_of_upstream() && !denied.is_of_upstream(), "{denied:?}");
        let refused = check(400, &body("max_tokens is too large, sk-proj-abcdefgh1234"));
        assert_eq!(refused.kind, FaultKind::Request(400));
        assert_eq!(refused.problem, "max_tokens is too large, [key]");
        // Gemini sends a list.
        let listed = check(429, &format!("[{}]", body("quota")));
        assert_eq!(listed.kind, FaultKind::Upstream(UpstreamFault::Busy));
        assert!(listed.problem.ends_with("(HTTP 429): quota"), "{listed}");
        assert_eq!(check(404, "{\"detail\":\"Not Found\"}").problem, "Not Found");
        assert_eq!(check(502, "<html>nginx</html>").problem, "failed (HTTP 502)");
        assert_eq!(check(529, "").kind, FaultKind::Upstream(UpstreamFault::Unavailable));
    }

    #[test]
    fn an_error_in_a_stream_is_found_in_every_form() {
        let check = |event: Value| Fault::of_event(&event, &mask()).map(|fault| fault.problem);
        assert_eq!(check(json!({"choices": []})), None);
        assert_eq!(check(json!({"error": null})), None);
        let said = Some("failed: x".to_string());
        assert_eq!(check(json!({"error": {"message": "x", "code": 500}})), said);
        assert_eq!(check(json!([{"error": {"message": "x"}}])), said);
        assert_eq!(check(json!({"object": "error", "message": "x"})), said);
        assert_eq!(check(json!({"type": "error", "error": {"message": "x"}})), said);
        assert_eq!(check(json!({"error": "x"})), said);
    }
}
