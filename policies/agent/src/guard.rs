//! Verdicts on tool calls.

use steersman_policy::{ToolCallView, Verdict};

use super::json;
use super::settings::Settings;

/// The host truncates arguments to this many bytes; truncated arguments are not valid JSON.
const MAX_BYTES: usize = 16_384;

/// Calls repaired in this request as tool loops: tool and digest of the arguments.
#[derive(Default)]
pub struct Guard {
    repaired: Vec<(String, String)>,
}

impl Guard {
    pub fn judge(&mut self, call: &ToolCallView, settings: &Settings) -> Verdict {
        if call.name.trim().is_empty() {
            return repair("That call named no tool. I name the tool and its arguments: ");
        }
        // The host truncates at a character boundary, up to three bytes below the limit.
        let is_truncated = call.arguments.len() > MAX_BYTES - 4;
        if !is_truncated && !json::is_object(&call.arguments) {
            let name = &call.name;
            return repair(&format!(
                "The arguments of `{name}` must be one JSON object. The call again: "
            ));
        }
        let same = call.same_results();
        if settings.tool_repeats == 0 || same < settings.tool_repeats {
            return Verdict::Accept;
        }
        let key = (call.name.clone(), call.digest.clone());
        if self.repaired.contains(&key) {
            return Verdict::Stop(format!(
                "tool loop: `{}` got the same result {same} times for the same arguments",
                call.name
            ));
        }
        self.repaired.push(key);
        repair(&format!(
            "I have called `{}` with these arguments {same} times, and the result stays the same. \
             Another way: ",
            call.name
        ))
    }
}

fn repair(text: &str) -> Verdict {
    Verdict::Repair(text.into())
}

#[cfg(test)]
mod tests {
    use steersman_policy::EarlierCall;

    use super::*;

    #[test]
    fn a_tool_loop_is_repaired_once_and_then_ends_the_request() {
        let settings = Settings::default();
        let earlier = EarlierCall {
            name: "search".into(),
            arguments: "a".into(),
            answered: Some("1".into()),
        };
        let again = ToolCallView {
            name: "search".into(),
            digest: "a".into(),
            earlier: vec![earlier; 2],
            ..ToolCallView::default()
        };
        let mut guard = Guard::default();
        assert!(matches!(guard.judge(&again, &settings), Verdict::Repair(_)));
        let other = ToolCallView { digest: "b".into(), ..again.clone() };
        assert_eq!(guard.judge(&other, &settings), Verdict::Accept);
        let stop = "tool loop: `search` got the same result 2 times for the same arguments";
        assert_eq!(guard.judge(&again, &settings), Verdict::Stop(stop.into()));
        let off = Settings { tool_repeats: 0, ..Settings::default() };
        assert_eq!(Guard::default().judge(&again, &off), Verdict::Accept);
    }

    #[test]
    fn a_malformed_call_is_repaired() {
        let mut guard = Guard::default();
        let mut judge = |name: &str, arguments: &str| {
            let call = ToolCallView {
                name: name.into(),
                arguments: arguments.into(),
                ..ToolCallView::default()
            };
            guard.judge(&call, &Settings::default())
        };
        assert!(matches!(judge("", "{}"), Verdict::Repair(_)));
        assert!(matches!(judge("search", "[1]"), Verdict::Repair(_)));
        assert!(matches!(judge("search", "{\"q\": "), Verdict::Repair(_)));
        assert_eq!(judge("search", " {\"q\": \"x\"} "), Verdict::Accept);
        // Truncated arguments cannot be checked.
        assert_eq!(judge("search", &format!("{{\"q\": \"{}", "x".repeat(16_377))), Verdict::Accept);
    }
}
