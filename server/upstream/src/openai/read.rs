//! The chunks of a chat completion, and completions that are not streamed.

use serde_json::Value;
use steersman_request::{FinishReason, Logprob, TokenLogprob};

use super::tags::Tags;
use crate::capability::Capabilities;
use crate::fault::{Fault, Mask};
use crate::piece::{Counts, Piece, text, tokens};

/// Most calls of one reply.
const CALLS: usize = 256;

/// Reads the chunks of one reply.
pub struct Reader {
    tags: Tags,
    /// The number and the id of each call.
    calls: Vec<(Option<u64>, String)>,
    has_ended: bool,
    mask: Mask,
}

impl Reader {
    /// A reader of an upstream's reply, which continues reasoning or not.
    pub fn new(capabilities: &Capabilities, is_in_reasoning: bool, mask: Mask) -> Self {
        let tags = match (capabilities.think_tags, is_in_reasoning) {
            (false, _) => Tags::none(),
            (true, true) => Tags::in_reasoning(),
            (true, false) => Tags::default(),
        };
        Self { tags, calls: Vec::new(), has_ended: false, mask }
    }

    /// Whether the reason of the end was read.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Reads one chunk.
    ///
    /// # Errors
    /// If it is an error, or none of a chat completion.
    pub fn read(&mut self, chunk: &Value, out: &mut Vec<Piece>) -> Result<(), Fault> {
        if let Some(fault) = Fault::of_event(chunk, &self.mask) {
            return Err(fault);
        }
        if !chunk.is_object() {
            return Err(Fault::protocol("sent what is no chunk of a reply"));
        }
        if let Some(choice) = chunk["choices"].get(0) {
            self.choice(choice, out)?;
        }
        if let usage @ Value::Object(_) = &chunk["usage"] {
            out.push(Piece::Counts(counts(usage)));
        }
        Ok(())
    }

    fn choice(&mut self, choice: &Value, out: &mut Vec<Piece>) -> Result<(), Fault> {
        // A completion that is not streamed has the whole message.
        let delta = if choice["delta"].is_object() { &choice["delta"] } else { &choice["message"] };
        let reasoning = text(&delta["reasoning_content"]).or_else(|| text(&delta["reasoning"]));
        if let Some(reasoning) = reasoning {
            self.tags.separated();
            out.push(Piece::Reasoning(reasoning));
        }
        for logprob in choice["logprobs"]["content"].as_array().into_iter().flatten() {
            out.push(Piece::Logprob(logprob_of(logprob)));
        }
        match &delta["content"] {
            Value::String(content) => self.content(content, out),
            // Mistral's reasoning comes in parts.
            Value::Array(parts) => parts.iter().for_each(|part| self.part(part, out)),
            _ => {}
        }
        if let Some(refusal) = text(&delta["refusal"]) {
            out.push(Piece::Answer(refusal));
        }
        let calls = delta["tool_calls"].as_array();
        if calls.is_some_and(|calls| !calls.is_empty()) {
            self.tags.end(|is_reasoning, text| out.push(piece(is_reasoning, text)));
        }
        for call in calls.into_iter().flatten() {
            self.call(call, out)?;
        }
        // Some have an empty reason until the end.
        if let Some(reason) = text(&choice["finish_reason"]) {
            self.tags.end(|is_reasoning, text| out.push(piece(is_reasoning, text)));
            self.has_ended = true;
            let reason = match reason.as_str() {
                "length" => FinishReason::Length,
                "tool_calls" | "function_call" => FinishReason::ToolCalls,
                "content_filter" => {
                    out.push(Piece::Note("the upstream's filter ended the reply".into()));
                    FinishReason::Stop
                }
                // vLLM and others say here which stop string it was.
                _ => match text(&choice["stop_reason"]) {
                    Some(stop) => FinishReason::StopString(stop),
                    None => FinishReason::Stop,
                },
            };
            out.push(Piece::End(reason));
        }
        Ok(())
    }

    fn content(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.tags.push(text, |is_reasoning, text| out.push(piece(is_reasoning, text)));
    }

    /// A part of the content.
    fn part(&mut self, part: &Value, out: &mut Vec<Piece>) {
        match part["type"].as_str() {
            Some("text") => self.content(part["text"].as_str().unwrap_or_default(), out),
            Some("thinking") => {
                self.tags.separated();
                let thoughts = part["thinking"].as_array().into_iter().flatten();
                out.extend(thoughts.filter_map(|one| text(&one["text"])).map(Piece::Reasoning));
            }
            _ => {}
        }
    }

    fn call(&mut self, call: &Value, out: &mut Vec<Piece>) -> Result<(), Fault> {
        let (index, id) = (call["index"].as_u64(), text(&call["id"]));
        let name = text(&call["function"]["name"]);
        let newest = self.calls.last();
        // Some repeat id and name in each piece, some have no numbers, some give all calls one number, and some give
        // each piece an id of its own.
        let is_newest = newest.is_some_and(|(known, known_id)| {
            let is_unnamed = name.is_none() && (index.is_none() || index == *known);
            id.as_ref().is_some_and(|id| id == known_id) || is_unnamed
        });
        if !is_newest {
            let Some(name) = name else {
                return Err(Fault::protocol(
                    "sent a piece of a tool call that has ended or never begun",
                ));
            };
            if self.calls.len() == CALLS {
                return Err(Fault::protocol(format!("sent more than {CALLS} tool calls")));
            }
            let id = id.unwrap_or_default();
            self.calls.push((index, id.clone()));
            let extra = Some(&call["extra_content"]).filter(|extra| extra.is_object()).cloned();
            out.push(Piece::CallStart { id, name, extra });
        }
        match &call["function"]["arguments"] {
            Value::String(arguments) if arguments.is_empty() => {}
            Value::String(arguments) => out.push(Piece::CallArguments(arguments.clone())),
            // Some send the object itself.
            arguments @ Value::Object(_) => {
                out.push(Piece::CallArguments(arguments.to_string()));
            }
            _ => {}
        }
        Ok(())
    }
}

fn piece(is_reasoning: bool, text: String) -> Piece {
    if is_reasoning { Piece::Reasoning(text) } else { Piece::Answer(text) }
}

fn logprob_of(value: &Value) -> Logprob {
    let one = |value: &Value| {
        let bytes = value["bytes"].as_array().map(|bytes| {
            // Casts: numbers of bytes.
            bytes.iter().filter_map(Value::as_u64).map(|byte| byte as u8).collect()
        });
        let token = || value["token"].as_str().unwrap_or_default().as_bytes().to_vec();
        let logprob = value["logprob"].as_f64().unwrap_or(0.0) as f32;
        TokenLogprob { bytes: bytes.unwrap_or_else(token), logprob }
    };
    let top = value["top_logprobs"].as_array().into_iter().flatten().map(one).collect();
    Logprob { token: one(value), top }
}

/// The tokens of `usage`. Some count reasoning among `completion_tokens`, and some beside it.
fn counts(usage: &Value) -> Counts {
    let prompt = tokens(&usage["prompt_tokens"]);
    let completion = tokens(&usage["completion_tokens"]);
    let reasoning = tokens(&usage["completion_tokens_details"]["reasoning_tokens"]);
    let cached = tokens(&usage["prompt_tokens_details"]["cached_tokens"])
        .or_else(|| tokens(&usage["prompt_cache_hit_tokens"]));
    let is_beside = match (prompt, completion, reasoning, tokens(&usage["total_tokens"])) {
        (Some(prompt), Some(completion), Some(reasoning), Some(total)) => {
            reasoning > 0 && total == prompt + completion + reasoning
        }
        _ => false,
    };
    let beside = if is_beside { reasoning.unwrap_or(0) } else { 0 };
    Counts { prompt, cached, reply: completion.map(|tokens| tokens + beside), reasoning }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::capability::{CapabilityConfig, Kind};

    fn read(chunks: &[Value]) -> Result<Vec<Piece>, Fault> {
        let capabilities = Capabilities::new(Kind::OpenAi, &CapabilityConfig::default());
        let mut reader = Reader::new(&capabilities, false, Mask::default());
        let mut out = Vec::new();
        for chunk in chunks {
            reader.read(chunk, &mut out)?;
        }
        Ok(out)
    }

    fn delta(delta: Value) -> Value {
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}], "usage": null})
    }

    fn start(id: &str, name: &str) -> Piece {
        Piece::CallStart { id: id.into(), name: name.into(), extra: None }
    }

    #[test]
    fn calls_are_read_in_the_pieces_of_every_server() {
        let call = |call: Value| delta(json!({"tool_calls": [call]}));
        let arguments = |text: &str| Piece::CallArguments(text.into());
        let expected = vec![
            start("a", "f"),
            arguments("{\"x\":"),
            arguments("1}"),
            start("b", "g"),
            arguments("{}"),
        ];
        // OpenAI and vLLM.
        let numbered = read(&[
            call(
                json!({"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}),
            ),
            call(json!({"index": 0, "function": {"arguments": "{\"x\":"}})),
            call(json!({"index": 0, "function": {"arguments": "1}"}})),
            call(json!({"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}})),
        ]);
        assert_eq!(numbered.unwrap(), expected);
        // Id and name in each piece, one number for all.
        let repeated = read(&[
            call(json!({"index": 0, "id": "a", "function": {"name": "f", "arguments": "{\"x\":"}})),
            call(json!({"index": 0, "id": "a", "function": {"name": "f", "arguments": "1}"}})),
            call(json!({"index": 0, "id": "b", "function": {"name": "g", "arguments": {}}})),
        ]);
        assert_eq!(repeated.unwrap(), expected);
        // An id of its own in each piece.
        let renamed = read(&[
            call(json!({"index": 0, "id": "a", "function": {"name": "f", "arguments": "{\"x\":"}})),
            call(json!({"index": 0, "id": "a2", "function": {"name": null, "arguments": "1}"}})),
            call(json!({"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}})),
        ]);
        assert_eq!(renamed.unwrap(), expected);
        let lost = read(&[call(json!({"index": 3, "function": {"arguments": "1}"}}))]);
        assert!(lost.unwrap_err().problem.contains("a piece of a tool call"));
    }

    #[test]
    fn what_a_vendor_wants_back_with_a_call_is_kept() {
        let extra = json!({"google": {"thought_signature": "abc"}});
        let call = json!({"id": "a", "function": {"name": "f", "arguments": "{}"}, "extra_content": extra});
        let pieces = read(&[delta(json!({"tool_calls": [call]}))]).unwrap();
        assert_eq!(
            pieces[0],
            Piece::CallStart { id: "a".into(), name: "f".into(), extra: Some(extra) }
        );
    }

    #[test]
    fn reasoning_is_read_under_both_names_and_in_tags() {
        let expected = vec![Piece::Reasoning("r".into()), Piece::Answer("a".into())];
        for name in ["reasoning_content", "reasoning"] {
            let pieces = read(&[delta(json!({name: "r"})), delta(json!({"content": "a"}))]);
            assert_eq!(pieces.unwrap(), expected, "{name}");
        }
        let tagged = read(&[delta(json!({"content": "<think>r</think>a"}))]);
        assert_eq!(tagged.unwrap(), expected);
        let thought = json!({"type": "thinking", "thinking": [{"type": "text", "text": "r"}]});
        let parts = read(&[
            delta(json!({"content": [thought]})),
            delta(json!({"content": [{"type": "text", "text": "a"}]})),
        ]);
        assert_eq!(parts.unwrap(), expected);
    }

    #[test]
    fn tokens_are_counted_alike_whether_reasoning_is_among_them_or_beside_them() {
        let usage = |completion: u32, total: u32| {
            let details = json!({"reasoning_tokens": 30});
            json!({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": completion,
                "total_tokens": total, "completion_tokens_details": details,
                "prompt_tokens_details": {"cached_tokens": 4}}})
        };
        let expected =
            Counts { prompt: Some(10), cached: Some(4), reply: Some(50), reasoning: Some(30) };
        assert_eq!(read(&[usage(50, 60)]).unwrap(), [Piece::Counts(expected)]);
        assert_eq!(read(&[usage(20, 60)]).unwrap(), [Piece::Counts(expected)]);
    }

    /// Everything after the first piece was dropped.
    #[test]
    fn an_empty_reason_is_no_end() {
        let chunk = |text: &str, reason: &str| json!({"choices": [{"delta": {"content": text}, "finish_reason": reason}]});
        let expected = [
            Piece::Answer("a".into()),
            Piece::Answer("b".into()),
            Piece::End(FinishReason::Length),
        ];
        assert_eq!(read(&[chunk("a", ""), chunk("b", "length")]).unwrap(), expected);
    }

    #[test]
    fn a_reply_that_is_not_streamed_is_read_as_one_piece() {
        let message = json!({"role": "assistant", "content": "hello"});
        let whole = json!({"choices": [{"message": message, "finish_reason": "stop", "stop_reason": "END"}]});
        let expected =
            [Piece::Answer("hello".into()), Piece::End(FinishReason::StopString("END".into()))];
        assert_eq!(read(&[whole]).unwrap(), expected);
    }

    #[test]
    fn wrong_json_is_a_fault_and_never_a_panic() {
        for chunk in [json!(1), json!([]), json!("x"), json!(null)] {
            assert!(read(std::slice::from_ref(&chunk)).is_err(), "{chunk}");
        }
        let odd = [
            json!({}),
            json!({"choices": {}}),
            json!({"choices": [null]}),
            json!({"choices": [{"delta": {"content": 7, "tool_calls": "x"}}]}),
            json!({"choices": [{"delta": {"content": [{"type": "text"}]}, "finish_reason": 3}]}),
            json!({"usage": {"prompt_tokens": -1, "completion_tokens": 1e30}}),
        ];
        for chunk in odd {
            assert!(read(std::slice::from_ref(&chunk)).is_ok(), "{chunk}");
        }
        assert!(read(&[json!({"error": {"message": "out of memory"}})]).is_err());
    }
}
