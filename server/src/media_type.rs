//! The media type of a body.

use http::{HeaderMap, header};

/// Whether a body with these headers has this media type, with any parameters.
pub fn is_type(headers: &HeaderMap, media_type: &str) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let named = value.unwrap_or_default().split(';').next().unwrap_or_default();
    named.trim().eq_ignore_ascii_case(media_type)
}
