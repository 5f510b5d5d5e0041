//! Harmony: replies that consist of messages, as gpt-oss writes them.
//!
//! ```text
//! <|start|>assistant<|channel|>analysis<|message|>Look it up.<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 5}<|call|>
//! <|start|>assistant<|channel|>final<|message|>It is 5.<|return|>
//! ```
//!
//! Without the line breaks: a header between `<|start|>` and `<|message|>`, and a body. The header names the
//! role, the channel, the recipient and the type of the content. The template writes the first
//! `<|start|>assistant`. `analysis` is reasoning, `final` is the answer, and so is `commentary` without a
//! recipient; a message to `functions.f` is a call of `f`. The recipient may stand before the channel.
//!
//! Only describes the format: [`super::reply`] keeps the state of a reply.
//!
//! Source: OpenAI's "Harmony response format"; the chat template of gpt-oss.

/// A special token of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tag {
    /// Before a header.
    Start,
    /// In a header, before the channel.
    Channel,
    /// In a header, before the type of a content that follows a form.
    Constrain,
    /// Between header and body.
    Message,
    /// After a body that another message follows.
    End,
    /// After the last body of a reply.
    Return,
    /// After a call, which ends the reply too.
    Call,
}

impl Tag {
    /// All of them, in the order of [`TAGS`].
    pub const ALL: [Self; 7] = [
        Self::Start,
        Self::Channel,
        Self::Constrain,
        Self::Message,
        Self::End,
        Self::Return,
        Self::Call,
    ];

    /// Its spelling.
    pub fn text(self) -> &'static str {
        TAGS[self as usize]
    }
}

/// The spelling of each [`Tag`].
pub const TAGS: &[&str; 7] = &[
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
];

/// The tokens that end the model's turn.
pub const ENDS: [&str; 2] = ["<|return|>", "<|call|>"];
/// What a prompt ends with.
pub const GENERATION_PROMPT: &str = "<|start|>assistant";
/// What follows it if the model is not to reason.
pub const ANSWER: &str = "<|channel|>final<|message|>";
/// The header of reasoning.
pub const REASONING_HEADER: &str = "<|start|>assistant<|channel|>analysis<|message|>";
/// The header of the answer.
pub const ANSWER_HEADER: &str = "<|start|>assistant<|channel|>final<|message|>";
/// The header of text that the user reads before a call.
pub const PREAMBLE_HEADER: &str = "<|start|>assistant<|channel|>commentary<|message|>";
/// How the header of a call begins, up to the channel.
pub const CALL_CHANNEL: &str = "<|start|>assistant<|channel|>commentary";
/// The same up to the name.
pub const CALL_HEADER: &str = "<|start|>assistant<|channel|>commentary to=functions.";

/// Most bytes of a header.
const HEADER_BYTES: usize = 256;

/// What the body of a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body<'a> {
    /// Text that the user does not read.
    Reasoning,
    /// Text that the user reads.
    Answer,
    /// A call of the function with this name.
    Call(&'a str),
}

/// Reads a header, with or without `<|start|>`, as far as `<|message|>`. `None` if it is malformed.
pub fn read_header(header: &str) -> Option<Body<'_>> {
    let header = header.strip_prefix(Tag::Start.text()).unwrap_or(header);
    let header = header.strip_suffix(Tag::Message.text()).unwrap_or(header);
    if !may_be_header(header) {
        return None;
    }
    let (role, rest) = header.split_once(Tag::Channel.text()).unwrap_or((header, ""));
    let (channel, kind) = rest.split_once(Tag::Constrain.text()).unwrap_or((rest, ""));
    if [role, channel, kind].iter().any(|part| part.contains("<|")) {
        return None;
    }
    let recipient_of = |word: &&str| word.starts_with("to=");
    let (to_first, first): (Vec<&str>, Vec<&str>) = role.split_whitespace().partition(recipient_of);
    let (to_second, second): (Vec<&str>, Vec<&str>) =
        channel.split_whitespace().partition(recipient_of);
    let recipient = match (&to_first[..], &to_second[..]) {
        ([], []) => None,
        ([to], []) | ([], [to]) => Some(&to["to=".len()..]),
        _ => return None,
    };
    // After the channel, the type may stand without its tag.
    let channel = match second[..] {
        [] if rest.is_empty() => None,
        [channel] | [channel, _] => Some(channel),
        _ => return None,
    };
    if !matches!(first[..], [] | ["assistant"]) {
        return None;
    }
    match (channel, recipient) {
        (None | Some("analysis" | "commentary" | "final"), Some(recipient)) => {
            recipient.strip_prefix("functions.").filter(|name| !name.is_empty()).map(Body::Call)
        }
        (Some("analysis"), None) => Some(Body::Reasoning),
        (None | Some("commentary" | "final"), None) => Some(Body::Answer),
        _ => None,
    }
}

/// Whether more text may make a header of `text`. What is no header is text that the user should see.
pub fn may_be_header(text: &str) -> bool {
    let role = text.strip_prefix(Tag::Start.text()).unwrap_or(text);
    let end = role.find("<|");
    let role = &role[..end.unwrap_or(role.len())];
    let words = role.split_whitespace().enumerate();
    let is_open = end.is_none() && !role.ends_with(char::is_whitespace);
    let last = role.split_whitespace().count().checked_sub(1).filter(|_| is_open);
    let is_role = words.into_iter().all(|(i, word)| match last == Some(i) {
        true => i == 0 && "assistant".starts_with(word) || may_start(word, "to="),
        false => i == 0 && word == "assistant" || word.starts_with("to="),
    });
    is_role && text.len() <= HEADER_BYTES && !text.contains('\n')
}

/// Whether `word` begins with `start`, or may do so when it is longer.
fn may_start(word: &str, start: &str) -> bool {
    word.starts_with(start) || start.starts_with(word)
}
