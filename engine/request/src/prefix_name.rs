//! Names of the beginnings of conversations.

use std::fmt;

/// The name of the beginning of a conversation: a digest that the server makes, and that says nothing of the text. All
/// turns of a conversation have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefixName(pub [u8; 8]);

impl fmt::Display for PrefixName {
    /// Sixteen hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}
