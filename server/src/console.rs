//! The console: a page at `/` for people, which shows what the other routes answer.
//!
//! Static files, part of the binary, that hold nothing secret: each value that the page shows comes from a
//! route that checks the key. The page is plain HTML, CSS and modules of JavaScript, and loads nothing from
//! elsewhere, which [`POLICY`] enforces.

use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};

/// What the page may load and do: only what this server serves, and no script or style within the page, so that
/// text of a model can never become code.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

macro_rules! files {
    ($($name:literal),+ $(,)?) => {
        /// The files by name.
        const FILES: &[(&str, &[u8])] =
            &[$(($name, include_bytes!(concat!("../console/", $name)))),+];
    };
}

files!(
    "index.html",
    "style.css",
    "icon.svg",
    "main.js",
    "dom.js",
    "api.js",
    "requests.js",
    "life.js",
    "policies.js",
    "profiles.js",
    "models.js",
    "charts.js",
    "chat.js",
    "connect.js",
    "conversation.js",
    "conversations.js",
    "history.js",
    "inline.js",
    "keys.js",
    "log.js",
    "markdown.js",
    "message.js",
    "reply.js",
    "search.js",
    "settings.js",
    "storage.js",
    "transfer.js",
    "upstreams.js",
);

/// The page at `/`, if the client is a browser: API clients ask for `/` to find out whether a server is there.
pub fn page(headers: &HeaderMap) -> Option<Response> {
    let accept = headers.get(header::ACCEPT)?.to_str().ok()?;
    file("index.html").filter(|_| accept.contains("text/html"))
}

/// `GET /console/{name}`
pub fn file(name: &str) -> Option<Response> {
    let (name, bytes) = FILES.iter().find(|(known, _)| *known == name)?;
    let kind = match name.rsplit_once('.') {
        Some((_, "html")) => "text/html; charset=utf-8",
        Some((_, "css")) => "text/css; charset=utf-8",
        Some((_, "svg")) => "image/svg+xml",
        _ => "text/javascript; charset=utf-8",
    };
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "same-origin"),
        // A newer server has newer files.
        (header::CACHE_CONTROL, "no-cache"),
        (header::VARY, "accept"),
    ];
    Some((headers, *bytes).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relative addresses and fragments only: nothing in the files names another host.
    #[test]
    fn no_file_names_another_host() {
        for (name, bytes) in FILES {
            let text = std::str::from_utf8(bytes).unwrap();
            // The namespace of SVG is a name, not an address that is loaded.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for scheme in ["http://", "https://", "//cdn", "@import"] {
                assert!(!text.contains(scheme), "{name} has {scheme}");
            }
            assert!(!text.contains("innerHTML"), "{name}: text of a model could become markup");
        }
    }

    #[test]
    fn every_file_of_the_folder_is_served() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/console");
        let mut there: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut served: Vec<_> = FILES.iter().map(|(name, _)| name.to_string()).collect();
        there.sort();
        served.sort();
        assert_eq!(there, served);
    }
}
