//! Records what policies decide.

use std::sync::Arc;

use crate::config::PolicyConfig;
use crate::error::Result;

/// The decisions of the newest requests.
pub struct Traces {}

impl Traces {
    /// Remembers as the configuration says.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when the trace file cannot be opened.
    pub fn new(_config: &PolicyConfig) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {}))
    }

    /// Records the decisions of one request; with texts and tokens where `text` says so.
    pub fn recorder(self: &Arc<Self>, _request: &str, _profile: &str, _text: bool) -> Recorder {
        Recorder {}
    }
}

/// Records the decisions of one request.
pub struct Recorder {}
