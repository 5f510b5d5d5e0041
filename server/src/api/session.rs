//! `POST /v1/session`: exchanges the token of the [one-time link](crate::link) for the key of an
//! operator.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::access::Sender;
use super::app::App;
use super::body::Limit;
use super::error::ApiError;
use super::protocol::JSON;
use super::request_id;
use crate::connections::Connection;

/// Most bytes of a body, which has a token of 43 characters.
const BODY_BYTES: usize = 1 << 10;

/// The key of a link.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Session {
    /// An operator's key, until the server ends.
    key: String,
}

/// `POST /v1/session`
pub async fn open(
    State(app): State<Arc<App>>,
    connection: Option<Extension<Arc<Connection>>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Session>, ApiError> {
    // Anyone may send it: it takes nothing of what there is for the bodies of clients.
    let limit = Limit { bytes: BODY_BYTES, set_by: "for a token", has_budget: false };
    let body = app.bodies.read(&headers, body, JSON, limit).await?;
    let token = app.bodies.parse(body.bytes, parse).await?;
    let Some(key) = app.access.exchange(&token) else {
        app.metrics.unauthorized();
        let guess = Sender {
            request_id: request_id::text(&headers).into(),
            route: Some("/v1/session".into()),
            address: connection.map(|Extension(connection)| connection.address.to_string()),
        };
        let error = ApiError::link_refused();
        app.access.pause(&guess, error.code).await;
        return Err(error);
    };
    tracing::info!("the one-time link was used: the console has an operator");
    Ok(Json(Session { key }))
}

fn parse(mut body: Map<String, Value>) -> Result<String, ApiError> {
    let Some(Value::String(token)) = body.shift_remove("token") else {
        return Err(ApiError::missing("token", "token: must be the token of the link"));
    };
    if let Some((name, _)) = body.iter().next() {
        let message = format!("`{name}` is an unknown field; leave it out");
        return Err(ApiError::invalid("unknown_parameter", name, message));
    }
    Ok(token)
}
