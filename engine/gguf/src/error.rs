//! What is wrong with a file.

/// A file that cannot be read as a model: what is wrong, where in the file, and what to do. The caller adds the path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

/// Result of reading a file.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of these words.
    pub fn new(problem: impl Into<String>) -> Self {
        Self(problem.into())
    }
}
