//! The query parameters of all routes: each is honored, or rejected by name, as the fields of bodies are.

use axum::extract::{MatchedPath, Request};
use axum::http::Uri;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use steersman_engine::policy::nearest;

use super::error::ApiError;
use super::fields::{
    Field,
    Rule::{Ignored, Only, Read},
    neutral_values,
};

/// A method, a path, and the parameters of its query.
type Row = (&'static str, &'static str, &'static [Field]);

/// The version of the interface that a client speaks, as clients of hosted OpenAI-compatible services send it.
const VERSION: Field = ("api-version", Ignored);

/// Asks for the beta types of a route, which are its only ones here.
const BETA: Field = ("beta", Ignored);

/// The parameters of each route. A route without a row has none. A name that ends in `[]` may occur several times.
const QUERIES: &[Row] = &[
    ("POST", "/v1/chat/completions", &[VERSION]),
    ("POST", "/v1/completions", &[VERSION]),
    ("POST", "/v1/embeddings", &[VERSION]),
    ("POST", "/v1/responses", &[VERSION]),
    (
        "GET",
        "/v1/responses/{id}",
        &[
            VERSION,
            ("include", Read),
            ("include[]", Read),
            ("stream", Only(r#"["false"]"#, "read the whole response")),
            ("starting_after", Only("[]", "read the whole response")),
            // Padding of a stream.
            ("include_obfuscation", Ignored),
        ],
    ),
    ("DELETE", "/v1/responses/{id}", &[VERSION]),
    (
        "GET",
        "/v1/responses/{id}/input_items",
        &[
            VERSION,
            ("after", Read),
            ("before", Read),
            ("include", Read),
            ("include[]", Read),
            ("limit", Read),
            ("order", Read),
        ],
    ),
    ("POST", "/v1/messages", &[BETA]),
    ("POST", "/v1/messages/count_tokens", &[BETA]),
    (
        "GET",
        "/v1/models",
        &[
            VERSION,
            BETA,
            // Of Codex.
            ("client_version", Ignored),
            ("limit", Only("[]", "all models are listed at once")),
            ("after_id", Only("[]", "all models are listed at once")),
            ("before_id", Only("[]", "all models are listed at once")),
        ],
    ),
    ("GET", "/v1/models/{*name}", &[VERSION, BETA]),
    ("GET", "/v1/cache", &[("model", Read)]),
    ("GET", "/v1/history", &[("after", Read)]),
    ("GET", "/v1/log", &[("after", Read)]),
    ("GET", "/v1/requests", &[("search", Read)]),
    ("GET", "/v1/search", &[("words", Read)]),
];

/// The parameters of the route `path`, which may lack `/v1`.
pub fn parameters(method: &str, path: &str) -> &'static [Field] {
    // Every route that answers GET answers HEAD.
    let method = if method == "HEAD" { "GET" } else { method };
    let is_named = |known: &str| {
        known.replace("{*", "{") == path.replace("{*", "{")
            || known.strip_prefix("/v1") == Some(path)
    };
    let row = QUERIES.iter().find(|(known, of, _)| *known == method && is_named(of));
    row.map_or(&[], |(_, _, fields)| fields)
}

/// The parameters of one request, checked.
#[derive(Debug, Clone, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Parses and checks the query of `uri`.
    ///
    /// # Errors
    /// 400 naming the first parameter that is unknown, not supported, or given twice.
    fn parse(uri: &Uri, fields: &[Field]) -> Result<Self, ApiError> {
        let pairs = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(uri);
        let pairs = pairs.map_err(|error| {
            ApiError::invalid("invalid_request", "", format!("the query cannot be read: {error}"))
        })?;
        let mut known: Vec<(String, String)> = Vec::new();
        for (name, value) in pairs.0 {
            let Some((_, rule)) = fields.iter().find(|(known, _)| *known == name) else {
                let near = nearest(&name, fields.iter().map(|(known, _)| *known));
                let advice = match near {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => "leave it out".into(),
                };
                let message = format!("`{name}` is an unknown parameter of the query; {advice}");
                return Err(ApiError::invalid("unknown_parameter", name, message));
            };
            if let Only(neutral, advice) = rule
                && !neutral_values(neutral).iter().any(|neutral| *neutral == value)
            {
                let message = format!("`{name}` is not supported in the query: {advice}");
                return Err(ApiError::unsupported(name, message));
            }
            let repeats = name.ends_with("[]") || name == "include";
            if !repeats && known.iter().any(|(other, _)| *other == name) {
                let message = format!("`{name}` occurs twice in the query; send it once");
                return Err(ApiError::value(name, message));
            }
            known.push((name, value));
        }
        Ok(Self(known))
    }

    /// The value of the parameter `name`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(given, _)| given == name).map(|(_, value)| value.as_str())
    }

    /// The value of the parameter `name` as a whole number.
    ///
    /// # Errors
    /// 400 if it is none.
    pub fn number(&self, name: &str) -> Result<Option<u64>, ApiError> {
        let parse = |text: &str| {
            text.parse::<u64>().map_err(|_| {
                let message = format!("`{name}` of the query must be a whole number, not below 0");
                ApiError::value(name, message)
            })
        };
        self.get(name).map(parse).transpose()
    }

    /// The values of a parameter that may occur several times, also under `NAME[]`.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let is_named = move |given: &str| given.strip_suffix("[]").unwrap_or(given) == name;
        let values = self.0.iter().filter(move |(given, _)| is_named(given));
        values.map(|(_, value)| value.as_str())
    }
}

/// Checks the query of each request, and gives it to the handler as an extension.
pub async fn check(mut request: Request, next: Next) -> Response {
    // Without a route there is nothing that could honor it.
    let Some(path) = request.extensions().get::<MatchedPath>() else {
        return next.run(request).await;
    };
    let fields = parameters(request.method().as_str(), path.as_str());
    match Query::parse(request.uri(), fields) {
        Ok(query) => {
            request.extensions_mut().insert(query);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}
