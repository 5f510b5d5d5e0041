//! Why a call failed, and texts for one line of a log: of errors, and of guests.

use std::fmt::Write as _;

use wasmtime::Trap;

use crate::error::Cause;

/// The limits of a call that has failed.
pub struct CallLimits {
    /// Fuel of the call.
    pub fuel: u64,
    /// Deadline of the call, in milliseconds.
    pub deadline_ms: u64,
    /// Bytes of text in an answer.
    pub output_bytes: usize,
}

/// The cause of the failure of `hook`: the limit that was recorded when it ended the guest, or
/// `error`.
pub fn cause(
    recorded: Option<Cause>,
    error: &wasmtime::Error,
    hook: &str,
    limits: &CallLimits,
) -> Cause {
    match (recorded, error.downcast_ref::<Trap>()) {
        (Some(cause), _) => cause,
        (_, Some(Trap::OutOfFuel)) => Cause::Fuel(limits.fuel),
        (_, Some(Trap::Interrupt)) => Cause::Deadline(limits.deadline_ms),
        (_, Some(trap)) => Cause::Trap(trap.to_string()),
        _ if hook == "start" => Cause::Limit(format!("cannot be started: {}", one_line(error))),
        // wasmtime has no type for an answer that cannot be lifted, so the limit is always named.
        _ => Cause::Answer(format!(
            "the answer or an import's argument cannot be read: {} (an answer may have {} bytes)",
            one_line(error),
            limits.output_bytes
        )),
    }
}

/// The problem of a component that exports a hook with another type.
pub fn wrong_type(error: &wasmtime::Error) -> String {
    format!("exports a hook with another type than the contract: {}", one_line(error))
}

/// An error and its causes in one line.
pub fn one_line(error: &wasmtime::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        let separator = if line.is_empty() { "" } else { ": " };
        let _ =
            write!(line, "{separator}{}", text.split_whitespace().collect::<Vec<_>>().join(" "));
    }
    line
}

/// The message of a guest's failure in one line: line breaks become spaces, other control characters are escaped.
pub fn message_line(message: &str) -> String {
    let lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    escaped(&lines.collect::<Vec<_>>().join(" "))
}

/// The text of a guest with control characters escaped.
pub fn escaped(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line break of a panic in Rust stood as `\n` in notes and log.
    #[test]
    fn a_message_is_one_line_without_escaped_line_breaks() {
        for (message, line) in [
            ("panicked at src/lib.rs:24:24:\nI broke", "panicked at src/lib.rs:24:24: I broke"),
            ("  one\r\n\n  two\t2 \n", "one two\\t2"),
            ("a\u{1b}[31m", "a\\u{1b}[31m"),
            ("", ""),
        ] {
            assert_eq!(message_line(message), line);
        }
    }
}
