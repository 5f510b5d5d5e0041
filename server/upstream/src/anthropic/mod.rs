//! Anthropic's messages.

mod body;
mod read;

pub use self::body::{body, check};
pub use self::read::Reader;

/// The route.
pub const PATH: &str = "/v1/messages";
