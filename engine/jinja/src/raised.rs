//! Errors that a template raises, and the message of an error.

use std::error::Error as _;

use minijinja::ErrorKind;
use minijinja::value::Value;

use crate::python;

/// An error raised by the template.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// The function `raise_exception` of templates.
pub fn raise_exception(message: &Value) -> Result<Value, minijinja::Error> {
    Err(raised(python::str(message)?.into_owned()))
}

/// An error with this message, as `raise_exception` raises it.
pub fn raised(message: String) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message))
}

/// The message of `raise_exception`, or else minijinja's.
pub fn explain(error: &minijinja::Error) -> String {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return message.clone();
        }
        cause = inner.source();
    }
    error.to_string()
}
