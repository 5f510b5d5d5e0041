//! The events of a message.

use serde_json::{Value, json};
use steersman_request::FinishReason;

use crate::fault::{Fault, Mask};
use crate::piece::{Counts, Piece, text, tokens};

/// Most blocks of one reply.
const BLOCKS: usize = 1024;

/// Reads the events of one reply.
pub struct Reader {
    /// The block that is being written, if the upstream wants it back.
    thinking: Option<Thinking>,
    blocks: usize,
    counts: Counts,
    has_ended: bool,
    mask: Mask,
}

#[derive(Default)]
struct Thinking {
    text: String,
    signature: String,
}

impl Reader {
    /// A reader.
    pub fn new(mask: Mask) -> Self {
        Self { thinking: None, blocks: 0, counts: Counts::default(), has_ended: false, mask }
    }

    /// Whether the reason of the end was read.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Reads one event, or a message that is not streamed.
    ///
    /// # Errors
    /// If it is an error, or none of a message.
    pub fn read(&mut self, event: &Value, out: &mut Vec<Piece>) -> Result<(), Fault> {
        if let Some(fault) = Fault::of_event(event, &self.mask) {
            return Err(fault);
        }
        match event["type"].as_str() {
            Some("message_start") => self.usage(&event["message"]["usage"], out),
            Some("content_block_start") => {
                self.blocks += 1;
                if self.blocks > BLOCKS {
                    return Err(Fault::protocol(format!("sent more than {BLOCKS} blocks")));
                }
                self.start(&event["content_block"], out);
            }
            Some("content_block_delta") => self.delta(&event["delta"], out),
            Some("content_block_stop") => {
                if let Some(Thinking { text, signature }) = self.thinking.take() {
                    let block =
                        json!({"type": "thinking", "thinking": text, "signature": signature});
                    out.push(Piece::Block(block));
                }
            }
            Some("message_delta") => {
                self.usage(&event["usage"], out);
                self.end(&event["delta"], out);
            }
            Some("message") => {
                for block in event["content"].as_array().into_iter().flatten().take(BLOCKS) {
                    self.whole(block, out);
                }
                self.usage(&event["usage"], out);
                self.end(event, out);
            }
            Some(_) => {}
            None => return Err(Fault::protocol("sent what is no event of a message")),
        }
        Ok(())
    }

    fn start(&mut self, block: &Value, out: &mut Vec<Piece>) {
        match block["type"].as_str() {
            Some("thinking") => {
                self.thinking = Some(Thinking::default());
                self.delta(&json!({"type": "thinking_delta", "thinking": block["thinking"]}), out);
            }
            Some("redacted_thinking") => out.push(Piece::Block(block.clone())),
            Some("text") => out.extend(text(&block["text"]).map(Piece::Answer)),
            Some("tool_use") => out.push(call(block)),
            _ => {}
        }
    }

    fn delta(&mut self, delta: &Value, out: &mut Vec<Piece>) {
        match delta["type"].as_str() {
            Some("text_delta") => out.extend(text(&delta["text"]).map(Piece::Answer)),
            Some("thinking_delta") => {
                let Some(piece) = text(&delta["thinking"]) else { return };
                if let Some(thinking) = &mut self.thinking {
                    thinking.text += &piece;
                }
                out.push(Piece::Reasoning(piece));
            }
            Some("signature_delta") => {
                if let (Some(thinking), Some(more)) =
                    (&mut self.thinking, text(&delta["signature"]))
                {
                    thinking.signature += &more;
                }
            }
            Some("input_json_delta") => {
                out.extend(text(&delta["partial_json"]).map(Piece::CallArguments));
            }
            _ => {}
        }
    }

    /// A block of a message that is not streamed.
    fn whole(&mut self, block: &Value, out: &mut Vec<Piece>) {
        match block["type"].as_str() {
            Some("text") => out.extend(text(&block["text"]).map(Piece::Answer)),
            Some("thinking") => {
                out.extend(text(&block["thinking"]).map(Piece::Reasoning));
                out.push(Piece::Block(block.clone()));
            }
            Some("redacted_thinking") => out.push(Piece::Block(block.clone())),
            Some("tool_use") => {
                out.push(call(block));
                out.push(Piece::CallArguments(block["input"].to_string()));
            }
            _ => {}
        }
    }

    fn end(&mut self, delta: &Value, out: &mut Vec<Piece>) {
        let Some(reason) = delta["stop_reason"].as_str() else { return };
        self.has_ended = true;
        let reason = match reason {
            "max_tokens" | "model_context_window_exceeded" => FinishReason::Length,
            "tool_use" => FinishReason::ToolCalls,
            "stop_sequence" => match text(&delta["stop_sequence"]) {
                Some(stop) => FinishReason::StopString(stop),
                None => FinishReason::Stop,
            },
            "refusal" => {
                out.push(Piece::Note("the upstream declined to continue the reply".into()));
                FinishReason::Stop
            }
            _ => FinishReason::Stop,
        };
        out.push(Piece::End(reason));
    }

    fn usage(&mut self, usage: &Value, out: &mut Vec<Piece>) {
        let saved = tokens(&usage["cache_read_input_tokens"]);
        let written = tokens(&usage["cache_creation_input_tokens"]);
        let new = tokens(&usage["input_tokens"]);
        // Tokens of the prompt are counted in three parts.
        let prompt = new.map(|new| new + saved.unwrap_or(0) + written.unwrap_or(0));
        self.counts = self.counts.with(Counts {
            prompt,
            cached: saved,
            reply: tokens(&usage["output_tokens"]),
            reasoning: tokens(&usage["output_tokens_details"]["thinking_tokens"]),
        });
        // Those of the beginning are no counts of the reply.
        let reply = self.counts.reply.filter(|_| self.has_pieces());
        out.push(Piece::Counts(Counts { reply, ..self.counts }));
    }

    fn has_pieces(&self) -> bool {
        self.blocks > 0
    }
}

fn call(block: &Value) -> Piece {
    Piece::CallStart {
        id: block["id"].as_str().unwrap_or_default().into(),
        name: block["name"].as_str().unwrap_or_default().into(),
        extra: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(events: &[Value]) -> Result<Vec<Piece>, Fault> {
        let (mut reader, mut out) = (Reader::new(Mask::default()), Vec::new());
        for event in events {
            reader.read(event, &mut out)?;
        }
        Ok(out)
    }

    #[test]
    fn a_reply_with_thinking_text_and_a_call_is_read() {
        let block = |index: u32, block: Value| json!({"type": "content_block_start", "index": index, "content_block": block});
        let delta =
            |delta: Value| json!({"type": "content_block_delta", "index": 0, "delta": delta});
        let stop = json!({"type": "content_block_stop", "index": 0});
        let pieces = read(&[
            json!({"type": "message_start", "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 20, "output_tokens": 1}}}),
            json!({"type": "ping"}),
            block(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
            delta(json!({"type": "thinking_delta", "thinking": "hm"})),
            delta(json!({"type": "signature_delta", "signature": "sig"})),
            stop.clone(),
            block(1, json!({"type": "text", "text": ""})),
            delta(json!({"type": "text_delta", "text": "Let me look."})),
            stop.clone(),
            block(2, json!({"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}})),
            delta(json!({"type": "input_json_delta", "partial_json": ""})),
            delta(json!({"type": "input_json_delta", "partial_json": "{\"a\": 1}"})),
            stop,
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 40}}),
            json!({"type": "message_stop"}),
        ]);
        let prompt = Counts { prompt: Some(25), cached: Some(20), ..Counts::default() };
        let expected = [
            Piece::Counts(prompt),
            Piece::Reasoning("hm".into()),
            Piece::Block(json!({"type": "thinking", "thinking": "hm", "signature": "sig"})),
            Piece::Answer("Let me look.".into()),
            Piece::CallStart { id: "toolu_1".into(), name: "f".into(), extra: None },
            Piece::CallArguments("{\"a\": 1}".into()),
            Piece::Counts(Counts { reply: Some(40), ..prompt }),
            Piece::End(FinishReason::ToolCalls),
        ];
        assert_eq!(pieces.unwrap(), expected);
    }

    #[test]
    fn errors_and_other_json_are_faults_and_never_panics() {
        let overloaded = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}});
        assert!(read(&[overloaded]).unwrap_err().is_of_upstream());
        assert!(read(&[json!({})]).is_err());
        assert!(read(&[json!([1])]).is_err());
        assert!(read(&[json!({"type": "content_block_delta", "delta": 7})]).is_ok());
        assert!(read(&[json!({"type": "content_block_start", "content_block": null})]).is_ok());
    }
}
