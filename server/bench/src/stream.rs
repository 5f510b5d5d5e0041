//! Reads the stream of a chat completion, with the time of each piece.
//!
//! The clock is the caller's, so tests read scripts in virtual time. Never sends and never judges an
//! answer.

use std::io::{BufRead, ErrorKind};
use std::time::Duration;

use serde_json::Value;

use crate::stats::{quantile, sorted};

/// Longest line of a stream.
const LINE_BYTES: usize = 16 << 20;

/// How a stream ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// With `data: [DONE]`.
    Done,
    /// The server closed the connection without `[DONE]`.
    WithoutDone,
    /// The reader hung up, as it was asked to.
    Cancelled,
    /// The connection broke, or an event is not what the protocol allows.
    Broken(String),
    /// An event reported an error.
    Error(String),
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Call {
    /// Its id.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments as JSON text.
    pub arguments: String,
}

/// What the server counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: Option<u64>,
    /// Tokens of the reply, reasoning included.
    pub completion: Option<u64>,
    /// Prompt tokens that were not computed again.
    pub cached: Option<u64>,
    /// Tokens of the reasoning.
    pub reasoning: Option<u64>,
    /// Drafted tokens that were accepted.
    pub accepted: Option<u64>,
    /// Drafted tokens that were rejected.
    pub rejected: Option<u64>,
}

/// A reply and the times of its pieces, measured from the start of the request.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// When each piece of reasoning, answer or call arrived.
    pub pieces: Vec<Duration>,
    /// Text of the answer.
    pub answer: String,
    /// Text of the reasoning.
    pub reasoning: String,
    /// Calls of tools.
    pub calls: Vec<Call>,
    /// `finish_reason`, if a chunk had one.
    pub finish: Option<String>,
    /// What the server counted, if it told.
    pub usage: Option<Usage>,
    /// `system_fingerprint`, if told.
    pub fingerprint: Option<String>,
    /// The profile that a Steersman server used.
    pub profile: Option<String>,
    /// How the stream ended.
    pub end: End,
    /// When it ended.
    pub total: Duration,
}

impl Reply {
    /// Reads a stream to its end, or up to the piece `hang_up_after`.
    pub fn read(
        mut lines: impl BufRead,
        clock: impl Fn() -> Duration,
        hang_up_after: Option<usize>,
    ) -> Self {
        let mut reply = Self {
            pieces: Vec::new(),
            answer: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            finish: None,
            usage: None,
            fingerprint: None,
            profile: None,
            end: End::WithoutDone,
            total: Duration::ZERO,
        };
        reply.end = loop {
            let line = match read_line(&mut lines) {
                Ok(Some(line)) => line,
                Ok(None) => break End::WithoutDone,
                Err(error) => break End::Broken(error),
            };
            // Comments, `event:` lines and empty lines carry nothing here.
            let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
            if data == "[DONE]" {
                break End::Done;
            }
            match serde_json::from_str(data) {
                Ok(event) => {
                    if let Some(message) = error_of(&event) {
                        break End::Error(message);
                    }
                    reply.add(&event, clock());
                }
                Err(error) => break End::Broken(format!("an event is not JSON ({error}): {data}")),
            }
            if hang_up_after.is_some_and(|pieces| reply.pieces.len() >= pieces) {
                break End::Cancelled;
            }
        };
        reply.total = clock();
        reply
    }

    fn add(&mut self, event: &Value, now: Duration) {
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            self.usage = Some(Usage::parse(usage));
        }
        if let Some(cached) = event["timings"]["cache_n"].as_u64() {
            // llama.cpp tells it here.
            self.usage.get_or_insert_default().cached.get_or_insert(cached);
        }
        let text = |value: &Value| value.as_str().map(str::to_owned);
        self.fingerprint = text(&event["system_fingerprint"]).or(self.fingerprint.take());
        self.profile = text(&event["steersman"]["profile"]).or(self.profile.take());
        let Some(choice) = event["choices"].as_array().and_then(|choices| choices.first()) else {
            return;
        };
        let delta = &choice["delta"];
        let reasoning = ["reasoning_content", "reasoning"]
            .into_iter()
            .find_map(|name| delta[name].as_str())
            .unwrap_or_default();
        let answer = delta["content"].as_str().unwrap_or_default();
        let calls = delta["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
        if !(reasoning.is_empty() && answer.is_empty() && calls.is_empty()) {
            self.pieces.push(now);
        }
        self.reasoning += reasoning;
        self.answer += answer;
        for part in calls {
            let index = part["index"].as_u64().map_or(self.calls.len(), |index| index as usize);
            if index >= self.calls.len() {
                self.calls.push(Call::default());
            }
            let at = index.min(self.calls.len() - 1);
            let call = &mut self.calls[at];
            call.id += part["id"].as_str().unwrap_or_default();
            call.name += part["function"]["name"].as_str().unwrap_or_default();
            call.arguments += part["function"]["arguments"].as_str().unwrap_or_default();
        }
        self.finish = text(&choice["finish_reason"]).or(self.finish.take());
    }

    /// Time to the first piece of reasoning, answer or call.
    pub fn first(&self) -> Option<Duration> {
        self.pieces.first().copied()
    }

    /// Seconds between one piece and the next, ascending.
    pub fn gaps(&self) -> Vec<f64> {
        let gap = |pair: &[Duration]| (pair[1] - pair[0]).as_secs_f64();
        sorted(&self.pieces.windows(2).map(gap).collect::<Vec<_>>())
    }

    /// Tokens of the reply, and whether the server counted them; otherwise they are pieces.
    pub fn tokens(&self) -> (u64, bool) {
        match self.usage.and_then(|usage| usage.completion) {
            Some(tokens) => (tokens, true),
            None => (self.pieces.len() as u64, false),
        }
    }

    /// Tokens after the first, a second between the first piece and the last.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let (first, last) = (self.pieces.first()?, self.pieces.last()?);
        let seconds = (*last - *first).as_secs_f64();
        let after_first = self.tokens().0.checked_sub(1)?;
        (seconds > 0.0 && after_first > 0).then(|| after_first as f64 / seconds)
    }

    /// Why the reply is not complete; `None` if it is.
    pub fn failure(&self) -> Option<String> {
        match &self.end {
            End::Done | End::Cancelled => None,
            End::WithoutDone if self.finish.is_some() => None,
            End::WithoutDone => Some("the stream ended without finish_reason and [DONE]".into()),
            End::Broken(why) => Some(format!("the stream broke: {why}")),
            End::Error(message) => Some(format!("the stream ended with an error: {message}")),
        }
    }

    /// What a reader should know about a complete reply.
    pub fn note(&self) -> Option<String> {
        (self.end == End::WithoutDone).then(|| "the stream ended without [DONE]".into())
    }
}

/// The p50, p95 and p99 of ascending gaps, with the names of their figures.
pub fn gap_figures(gaps: &[f64]) -> impl Iterator<Item = (&'static str, f64)> {
    let at = [("gap_p50_s", 0.5), ("gap_p95_s", 0.95), ("gap_p99_s", 0.99)];
    at.map(|(name, share)| Some((name, quantile(gaps, share)?))).into_iter().flatten()
}

impl Usage {
    /// Reads OpenAI's `usage`.
    pub fn parse(usage: &Value) -> Self {
        let prompt = &usage["prompt_tokens_details"];
        let completion = &usage["completion_tokens_details"];
        Self {
            prompt: usage["prompt_tokens"].as_u64(),
            completion: usage["completion_tokens"].as_u64(),
            cached: prompt["cached_tokens"].as_u64(),
            reasoning: completion["reasoning_tokens"].as_u64(),
            accepted: completion["accepted_prediction_tokens"].as_u64(),
            rejected: completion["rejected_prediction_tokens"].as_u64(),
        }
    }
}

/// The message of an event or body that reports an error.
pub fn error_of(event: &Value) -> Option<String> {
    let error = event.get("error").filter(|error| !error.is_null())?;
    let message = error["message"].as_str().or(error.as_str());
    Some(message.map_or_else(|| error.to_string(), str::to_owned))
}

/// A line without its end; `None` at the end of the stream.
fn read_line(lines: &mut impl BufRead) -> Result<Option<String>, String> {
    let mut line = Vec::new();
    loop {
        let buffer = match lines.fill_buf() {
            Ok(buffer) => buffer,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.to_string()),
        };
        if buffer.is_empty() && line.is_empty() {
            return Ok(None);
        }
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let take = end.unwrap_or(buffer.len());
        line.extend_from_slice(&buffer[..take]);
        let done = end.is_some() || buffer.is_empty();
        lines.consume(take + usize::from(end.is_some()));
        if line.len() > LINE_BYTES {
            return Err(format!("a line has more than {LINE_BYTES} bytes"));
        }
        if done {
            let line = String::from_utf8(line).map_err(|_| "a line is not UTF-8".to_owned())?;
            return Ok(Some(line.trim_end_matches('\r').to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::{BufReader, Read, Result};
    use std::rc::Rc;

    use super::*;

    /// Gives one part of a stream per call, after advancing the virtual clock.
    struct Script {
        parts: Vec<(u64, String)>,
        now: Rc<Cell<Duration>>,
    }

    impl Read for Script {
        fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
            if self.parts.is_empty() {
                return Ok(0);
            }
            let (wait, text) = self.parts.remove(0);
            self.now.set(self.now.get() + Duration::from_millis(wait));
            buffer[..text.len()].copy_from_slice(text.as_bytes());
            Ok(text.len())
        }
    }

    /// Reads a stream whose parts arrive after so many milliseconds each.
    fn read(parts: &[(u64, &str)], hang_up_after: Option<usize>) -> Reply {
        let now = Rc::new(Cell::new(Duration::ZERO));
        let parts = parts.iter().map(|(wait, text)| (*wait, (*text).to_owned())).collect();
        let script = Script { parts, now: now.clone() };
        Reply::read(BufReader::new(script), move || now.get(), hang_up_after)
    }

    const ROLE: &str =
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    #[test]
    fn the_first_token_is_the_first_text_and_not_the_role() {
        let reply = read(
            &[
                (10, ROLE),
                (5, ": still reading\n\n"),
                (85, "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"Hm\"}}]}\n\n"),
                (20, "data: {\"choices\":[{\"delta\":{\"content\":\"Ro\"}}]}\n\n"),
                (40, "data: {\"choices\":[{\"delta\":{\"content\":\"me\"}}]}\n\n"),
                (1, "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"),
                (
                    1,
                    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":7,\
                     \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
                ),
                (3, DONE),
            ],
            None,
        );
        assert_eq!(reply.first(), Some(Duration::from_millis(100)));
        assert_eq!(reply.gaps(), [0.02, 0.04]);
        assert_eq!(reply.total, Duration::from_millis(165));
        assert_eq!((&*reply.reasoning, &*reply.answer), ("Hm", "Rome"));
        assert_eq!(reply.tokens(), (7, true));
        assert_eq!(reply.tokens_per_second(), Some(100.0));
        assert_eq!(reply.usage.unwrap().cached, Some(4));
        assert_eq!((reply.failure(), reply.note()), (None, None));
    }

    #[test]
    fn an_event_may_arrive_in_parts() {
        let event = "data: {\"choices\":[{\"delta\":{\"content\":\"é\"}}]}\r\n\r\n";
        let (head, tail) = event.split_at(20);
        let reply = read(&[(1, head), (1, tail), (1, DONE)], None);
        assert_eq!((&*reply.answer, reply.first()), ("é", Some(Duration::from_millis(2))));
    }

    #[test]
    fn tokens_without_usage_are_counted_from_pieces() {
        let piece = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let reply = read(&[(1, piece), (10, piece), (10, piece), (1, DONE)], None);
        assert_eq!(reply.tokens(), (3, false));
        assert_eq!(reply.tokens_per_second(), Some(100.0));
    }

    #[test]
    fn parts_of_calls_are_joined() {
        let part = |json: &str| {
            format!("data: {{\"choices\":[{{\"delta\":{{\"tool_calls\":[{json}]}}}}]}}\n\n")
        };
        let first = part(r#"{"index":0,"id":"a","function":{"name":"f","arguments":"{\"x\":"}}"#);
        let reply = read(
            &[
                (1, &first),
                (1, &part(r#"{"index":0,"function":{"arguments":"1}"}}"#)),
                (1, &part(r#"{"index":1,"id":"b","function":{"name":"g","arguments":"{}"}}"#)),
                (1, DONE),
            ],
            None,
        );
        let call = |id: &str, name: &str, arguments: &str| Call {
            id: id.into(),
            name: name.into(),
            arguments: arguments.into(),
        };
        assert_eq!(reply.calls, [call("a", "f", "{\"x\":1}"), call("b", "g", "{}")]);
        assert_eq!(reply.pieces.len(), 3);
    }

    #[test]
    fn every_end_of_a_stream_is_told_apart() {
        let piece = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let finish = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
        let cut_off = read(&[(1, piece)], None);
        assert!(cut_off.failure().unwrap().contains("without finish_reason"), "{cut_off:?}");
        let no_done = read(&[(1, piece), (1, finish)], None);
        assert_eq!(no_done.failure(), None);
        assert!(no_done.note().unwrap().contains("[DONE]"));
        let error =
            read(&[(1, piece), (1, "data: {\"error\":{\"message\":\"no room\"}}\n\n")], None);
        assert_eq!(error.end, End::Error("no room".into()));
        let garbage = read(&[(1, "data: {\n\n")], None);
        assert!(matches!(garbage.end, End::Broken(_)));
        let cancelled = read(&[(1, piece), (1, piece), (1, piece)], Some(2));
        assert_eq!((cancelled.end, cancelled.pieces.len()), (End::Cancelled, 2));
    }
}
