//! The beginning of a message that the reply continues: another server wrote it and was cut off there.
//!
//! The conversation before it is rendered up to the beginning of a reply, and its texts follow as if the model had
//! written them. They are tokenized without special tokens; the tag that ends its reasoning is written here.

use crate::error::{RequestError, Result};
use crate::request::{Continued, Message, Request};
use crate::text::{Phase, Text};

/// The message that the reply to `request` continues, and where.
pub fn continued(request: &Request) -> Option<(&Message, Continued)> {
    Some((request.messages.last()?, request.continues?))
}

/// The tokens of `message` after `prompt`, which ends at the beginning of a reply.
///
/// # Errors
/// [`RequestError::Field`] if the message has reasoning and the model does not reason.
pub fn continued_tokens(
    text: &Text,
    prompt: &[u32],
    message: &Message,
    part: Continued,
) -> Result<Vec<u32>> {
    let mut reply = text.reply(prompt, &[], &[]);
    let reasoning = message.reasoning_content.as_deref();
    if reply.phase() != Phase::Reasoning {
        if reasoning.is_some() {
            let problem =
                "the message to continue has reasoning, and this model does not reason".into();
            return Err(RequestError::Field { field: "messages", problem }.into());
        }
        return text.encode_plain(&message.content);
    }
    let mut tokens = text.encode_plain(reasoning.unwrap_or_default())?;
    if part == Continued::Answer {
        tokens.iter().for_each(|token| drop(reply.push(*token)));
        tokens.extend(reply.close_reasoning_tokens(text, &message.content)?);
    }
    Ok(tokens)
}
