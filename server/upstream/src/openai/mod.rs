//! OpenAI's chat completions, as vendors and servers speak them.

mod body;
mod read;
mod tags;

pub use self::body::{body, check};
pub use self::read::Reader;

/// The route.
pub const PATH: &str = "/chat/completions";

/// What ends a stream.
pub const DONE: &str = "[DONE]";
