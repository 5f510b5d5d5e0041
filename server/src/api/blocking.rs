//! Work on threads where it delays no other request.

use std::fmt::Display;

use axum::http::StatusCode;

use super::error::ApiError;

/// Runs work that compiles, parses or reads the disk on a thread where it delays no other request.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    // The error has the message of the panic.
    tokio::task::spawn_blocking(work).await.map_err(internal)
}

/// A failure of the server. The log has the details.
pub fn internal(error: impl Display) -> ApiError {
    let code = "internal_error";
    tracing::error!(code, details = %error, "server failed");
    ApiError {
        status: StatusCode::INTERNAL_SERVER_ERROR,
        kind: "server_error",
        code,
        param: None,
        message: "the server failed; its log has the details".into(),
        request_id: String::new(),
        is_about_prompt: false,
        retry_after_s: None,
        is_final: false,
    }
}
