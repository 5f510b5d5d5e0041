//! `X-Steersman-Prefix` of replies: a name for the beginning of a conversation, by which a router before several
//! servers finds the one that has its saved state.
//!
//! All turns of a conversation have the same name: it is a digest of who asks, of the model, and of the messages up to
//! the first of the user. `GET /health` lists the names of which there is state in memory.
//!
//! # Why a name tells nothing of the text
//! Prompts can be guessed, and so could a plain digest of them. This one has a key that is random and that no one but
//! this process has: outside, no name can be computed for a guess. The key of the client is part of it: who sends the
//! words of another client gets another name, and does not learn whether the other one is listed.

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use sha2::{Digest, Sha256};
use steersman_engine::request::{Message, PrefixName};

/// Names the beginning of the conversation that a reply belongs to.
pub const PREFIX: HeaderName = HeaderName::from_static("x-steersman-prefix");

/// Bytes of text of a beginning that are read: conversations that differ only after these have one name.
const BYTES: usize = 64 << 10;

/// Makes names.
pub struct PrefixNames {
    secret: [u8; 32],
}

impl Default for PrefixNames {
    fn default() -> Self {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).expect("the system has a source of randomness");
        Self { secret }
    }
}

impl PrefixNames {
    /// The name of the beginning of `messages`, which a client with `key` sends to `model`; `None` for no messages.
    pub fn of(&self, key: &str, model: &str, messages: &[Message]) -> Option<PrefixName> {
        if messages.is_empty() {
            return None;
        }
        let first = messages.iter().position(|message| message.role == "user");
        let beginning = &messages[..first.map_or(messages.len(), |at| at + 1)];
        let texts = beginning.iter().flat_map(|message| [&message.role, &message.content]);
        let mut digest = Sha256::new_with_prefix(self.secret);
        let mut left = BYTES;
        for text in [key, model].into_iter().chain(texts.map(String::as_str)) {
            let read = text.len().min(left);
            left -= read;
            // With lengths, no two lists of texts have the same bytes.
            digest.update((text.len() as u64).to_le_bytes());
            digest.update(&text.as_bytes()[..read]);
        }
        let digest = digest.finalize();
        Some(PrefixName(std::array::from_fn(|at| digest[at])))
    }
}

/// The reply with its header, if its conversation has a name.
pub fn with_name(mut response: Response, name: Option<PrefixName>) -> Response {
    let value = name.map(|name| HeaderValue::from_str(&name.to_string()));
    if let Some(Ok(value)) = value {
        response.headers_mut().insert(PREFIX, value);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(messages: &[(&str, &str)]) -> Vec<Message> {
        let message = |(role, content): &(&str, &str)| Message {
            role: (*role).into(),
            content: (*content).into(),
            ..Message::default()
        };
        messages.iter().map(message).collect()
    }

    #[test]
    fn all_turns_of_a_conversation_have_one_name() {
        let names = PrefixNames::default();
        let of = |messages: &[(&str, &str)]| names.of("key", "m", &conversation(messages)).unwrap();
        let first = of(&[("system", "Be brief."), ("user", "Hi")]);
        let later =
            [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "?")];
        assert_eq!(first, of(&later));
        // A border between texts that lies elsewhere makes another conversation.
        for other in [
            &[("system", "Be brief."), ("user", "Ho")][..],
            &[("system", "Be brief"), ("user", ".Hi")],
            &[("user", "Hi")],
            &[("user", "Be brief."), ("user", "Hi")],
        ] {
            assert_ne!(first, of(other), "{other:?}");
        }
        assert_eq!(names.of("key", "m", &[]), None);
    }

    #[test]
    fn names_differ_by_key_model_and_process() {
        let (names, messages) = (PrefixNames::default(), conversation(&[("user", "Hi")]));
        let name = names.of("key", "m", &messages);
        assert_eq!(name, names.of("key", "m", &messages));
        assert_ne!(name, names.of("other", "m", &messages));
        assert_ne!(name, names.of("key", "n", &messages));
        assert_ne!(name, PrefixNames::default().of("key", "m", &messages));
    }

    /// A body may have megabytes of text, and a name is made before a request waits for anything.
    #[test]
    fn a_name_reads_a_bounded_part_of_the_text() {
        let names = PrefixNames::default();
        let long = |end: &str| {
            let text = "x".repeat(BYTES) + end;
            names.of("", "m", &conversation(&[("user", &text)]))
        };
        assert_eq!(long("a"), long("b"));
        assert_ne!(long("a"), long("ab"));
    }
}
