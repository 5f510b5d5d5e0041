//! One recorded call, and the line of JSON that it becomes.

use std::io;
use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::mask;
use crate::contract::{Answer, Call, Cost, Hook, ImportCall};
use crate::error::Failure;

/// One recorded call of a hook. Serializes to a JSON object that is a line of a golden file:
///
/// ```json
/// {"request":"chatcmpl-1","profile":"default","policy":"default","sha256":"9f..","link":0,
///  "shadow":false,"hook":"on-step","step":12,"input":{..},"answer":[{"CloseReasoning":"So: "}],
///  "fuel":4711,"nanoseconds":812}
/// ```
///
/// `error`, `replaced`, `masked`, `imports` and `dropped` are present only if they carry information.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The policy that was called, and the request.
    pub link: Arc<RecordedLink>,
    /// The call.
    pub call: Call<'static>,
    /// The answer; `None` if the policy failed and nothing answered in its place.
    pub answer: Option<Answer>,
    /// The failure.
    pub failure: Option<Failure>,
    /// Whether the policy has failed, in this call or an earlier one.
    pub replaced: bool,
    /// Fuel and time.
    pub cost: Cost,
    /// Uses of imports during the call.
    pub imports: Vec<ImportCall>,
    /// Calls of this request that were not recorded for lack of room; set in its last record.
    pub dropped: u64,
}

/// What all records of a policy in one request share.
#[derive(Debug, PartialEq)]
pub struct RecordedLink {
    /// Request id.
    pub request: String,
    /// Profile of the request.
    pub profile: String,
    /// Name of the policy.
    pub policy: String,
    /// SHA-256 of its component, 64 hex digits.
    pub sha256: String,
    /// Index in the chain of the request.
    pub index: usize,
    /// Whether the answer was not applied.
    pub shadow: bool,
    /// Whether texts and tokens are masked when the record is serialized.
    pub masked: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    request: &'a str,
    profile: &'a str,
    policy: &'a str,
    sha256: &'a str,
    link: usize,
    shadow: bool,
    hook: Hook,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u32>,
    input: Maybe<'a, Call<'static>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<Maybe<'a, Answer>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    replaced: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    masked: Option<Map<String, Value>>,
    fuel: u64,
    nanoseconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    imports: Option<Maybe<'a, [ImportCall]>>,
    #[serde(skip_serializing_if = "is_zero")]
    dropped: u64,
}

/// A value as it is, or masked.
#[derive(Serialize)]
#[serde(untagged)]
enum Maybe<'a, T: ?Sized> {
    Plain(&'a T),
    Masked(Value),
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Serialize for Record {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let answer = self.answer.as_ref().filter(|answer| **answer != Answer::Finish(()));
        let imports = (!self.imports.is_empty()).then_some(&self.imports[..]);
        let RecordedLink { request, profile, policy, sha256, .. } = &*self.link;
        let mut line = Line {
            request,
            profile,
            policy,
            sha256,
            link: self.link.index,
            shadow: self.link.shadow,
            hook: self.call.hook(),
            step: if let Call::Step(step) = &self.call { Some(step.index) } else { None },
            input: Maybe::Plain(&self.call),
            answer: answer.map(Maybe::Plain),
            error: self.failure.as_ref().map(ToString::to_string),
            replaced: self.replaced,
            masked: None,
            fuel: self.cost.fuel,
            nanoseconds: self.cost.nanoseconds,
            imports: imports.map(Maybe::Plain),
            dropped: self.dropped,
        };
        if self.link.masked {
            let mut lengths = Map::new();
            line.input = Maybe::Masked(mask::value("input", &self.call, &mut lengths));
            line.answer = answer.map(|a| Maybe::Masked(mask::value("answer", a, &mut lengths)));
            line.error = self.failure.as_ref().map(|failure| mask::failure(failure, &mut lengths));
            line.imports = imports.map(|calls| Maybe::Masked(mask::imports(calls, &mut lengths)));
            line.masked = Some(lengths);
        }
        line.serialize(serializer)
    }
}

impl Record {
    /// Size in memory, estimated.
    pub(super) fn bytes(&self) -> usize {
        let imports = |call: &ImportCall| {
            let texts = call.arguments.iter().chain(&call.answer);
            call.call.len() + texts.map(|text| text.len() + size_of::<String>()).sum::<usize>()
        };
        let call = match &self.call {
            Call::Step(step) => size_of_val(&step.tokens[..]) + step.text.len(),
            other => json_bytes(other),
        };
        let answer = match &self.answer {
            Some(Answer::Step(actions)) if actions.is_empty() => 0,
            answer => json_bytes(answer),
        };
        size_of::<Self>() + call + answer + self.imports.iter().map(imports).sum::<usize>()
    }
}

/// Length of a value as JSON, as an estimate of its texts and lists.
fn json_bytes(value: &impl Serialize) -> usize {
    struct Counter(usize);

    impl io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut counter = Counter(0);
    serde_json::to_writer(&mut counter, value).expect("records have string keys only");
    counter.0
}
