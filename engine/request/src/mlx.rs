//! Errors of MLX as errors of requests.

use mlx_rs::error::{AsSliceError, ConversionError, Exception};

use crate::error::Error;

impl From<Exception> for Error {
    fn from(exception: Exception) -> Self {
        Self::Array(message(&exception))
    }
}

impl From<AsSliceError> for Error {
    fn from(error: AsSliceError) -> Self {
        match error {
            AsSliceError::Exception(exception) => exception.into(),
            other => Self::Array(other.to_string()),
        }
    }
}

impl From<ConversionError> for Error {
    fn from(error: ConversionError) -> Self {
        match error {
            ConversionError::Exception(exception) => exception.into(),
            ConversionError::ArraySlice(error) => error.into(),
            other => Self::Array(other.to_string()),
        }
    }
}

/// The message of MLX without the places in source files that it was raised and caught at.
pub fn message(exception: &Exception) -> String {
    let what = exception.what();
    match what.rsplit_once(" at ") {
        Some((message, place)) if place.contains(".cpp:") => message.into(),
        _ => what.into(),
    }
}
