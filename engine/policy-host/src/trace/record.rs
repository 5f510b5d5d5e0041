//! One recorded call, and the line of JSON that it becomes.

use std::io;
use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::ser::{CharEscape, Formatter};
use serde_json::{Map, Value};

use super::mask;
use crate::contract::{
    Action, Answer, Call, Cost, DrawnToken, Hook, ImportCall, Outlook, TextVerdict, Watched,
    WatchedToken,
};
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
        let is_none =
            |answer: &Answer| matches!(answer, Answer::Finish(labels) if labels.is_empty());
        let answer = self.answer.as_ref().filter(|answer| !is_none(answer));
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
    /// Size in memory; at least what its texts and lists take.
    pub(super) fn bytes(&self) -> usize {
        let imports = |call: &ImportCall| {
            let texts = call.arguments.iter().chain(&call.answer);
            let texts = texts.map(|text| TEXT_BYTES + text.len()).sum::<usize>();
            size_of::<ImportCall>() + LIST_BYTES + call.call.len() + texts
        };
        let call = match &self.call {
            // Without the time that a serializer takes.
            Call::Step(step) => {
                let drawn = |drawn: &DrawnToken| {
                    size_of::<DrawnToken>() + LIST_BYTES + size_of_val(&drawn.candidates[..])
                };
                let found = |text: &String| TEXT_BYTES + text.len();
                let watched = |outlook: &Outlook| {
                    let one = |watched: &Watched| match &watched.watched {
                        WatchedToken::Text(text) => size_of::<Watched>() + TEXT_BYTES + text.len(),
                        WatchedToken::Token(_) | WatchedToken::ReasoningEnd => size_of::<Watched>(),
                    };
                    LIST_BYTES + outlook.watched.iter().map(one).sum::<usize>()
                };
                let lists = step.observed.as_ref().map_or(0, |observed| {
                    observed.drawn.iter().map(drawn).sum::<usize>()
                        + observed.texts_found.iter().map(found).sum::<usize>()
                        + observed.outlook.as_ref().map_or(0, watched)
                });
                size_of_val(&step.tokens[..]) + LIST_BYTES + step.text.len() + TEXT_BYTES + lists
            }
            Call::Text(view) => view.text.len() + TEXT_BYTES,
            other => heap_bytes(other),
        };
        let answer = match &self.answer {
            Some(Answer::Step(actions)) if actions.is_empty() => 0,
            Some(Answer::Text(TextVerdict::Pass | TextVerdict::Hold(_))) => 0,
            answer => heap_bytes(answer),
        };
        size_of::<Self>() + call + answer + self.imports.iter().map(imports).sum::<usize>()
    }
}

/// Bytes of a text beside its characters: where it is, its length and capacity, and what the allocator adds.
const TEXT_BYTES: usize = size_of::<String>() + ALLOCATION;

/// Bytes of a list beside its elements.
const LIST_BYTES: usize = size_of::<Vec<()>>() + ALLOCATION;

/// What an allocator adds to an allocation, with rounding.
const ALLOCATION: usize = 16;

/// Bytes of a number, or of another value without text.
const VALUE_BYTES: usize = size_of::<u64>();

/// Bytes that a record takes with all texts and lists.
fn heap_bytes(value: &impl Serialize) -> usize {
    let mut sizes = Sizes { bytes: 0, is_key: false };
    let mut serializer = serde_json::Serializer::with_formatter(io::sink(), &mut sizes);
    value.serialize(&mut serializer).expect("records have string keys only");
    sizes.bytes
}

/// Adds up sizes in place of writing JSON. Names of fields take no memory.
struct Sizes {
    bytes: usize,
    is_key: bool,
}

impl Formatter for &mut Sizes {
    fn begin_object_key<W: ?Sized + io::Write>(&mut self, _: &mut W, _: bool) -> io::Result<()> {
        self.is_key = true;
        Ok(())
    }

    fn end_object_key<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_key = false;
        Ok(())
    }

    fn begin_string<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.bytes += if self.is_key { 0 } else { TEXT_BYTES };
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        _: &mut W,
        text: &str,
    ) -> io::Result<()> {
        self.bytes += if self.is_key { 0 } else { text.len() };
        Ok(())
    }

    fn write_char_escape<W: ?Sized + io::Write>(
        &mut self,
        _: &mut W,
        _: CharEscape,
    ) -> io::Result<()> {
        self.bytes += 1;
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.bytes += LIST_BYTES;
        Ok(())
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W, _: bool) -> io::Result<()> {
        self.bytes += VALUE_BYTES;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.bytes += size_of::<Action>();
        Ok(())
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.bytes += VALUE_BYTES;
        Ok(())
    }
}
