//! Which web pages may use the server.
//!
//! A page of any site can send requests to this machine from its visitor's browser. Its requests name
//! the page's origin in `Origin`; a page that rebinds its own host name to this machine (DNS
//! rebinding) has an origin of its own, and names that host in `Host`. So a server that listens on
//! this machine only accepts its own names and those in `server.hosts`, and foreign origins are
//! refused unless `server.cors` allows them.

use std::net::IpAddr;
use std::time::Duration;

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::error::ApiError;
use super::prefix_names::PREFIX;
use super::request_id::REQUEST_ID;
use crate::config::ServerConfig;

/// How long a browser may remember that an origin is allowed.
const MAX_AGE: Duration = Duration::from_secs(600);

/// The accepted values of `Host` and `Origin`.
pub struct Origins {
    /// Accepted names besides those of this machine; `None` accepts every name.
    hosts: Option<Vec<String>>,
    /// Allowed origins; `*` allows all.
    cors: Vec<String>,
}

impl Origins {
    /// The names and origins of `config`.
    pub fn new(config: &ServerConfig) -> Self {
        let open = !is_local(&config.host) && config.hosts.is_empty();
        let mut hosts: Vec<_> = config.hosts.iter().map(|name| name.to_lowercase()).collect();
        hosts.push(config.host.to_lowercase());
        Self { hosts: (!open).then_some(hosts), cors: config.cors.clone() }
    }

    /// Answers preflight requests, and adds the headers by which a browser gives the reply to a page.
    pub fn cors_layer(&self) -> CorsLayer {
        let origins = if self.allows_all() {
            AllowOrigin::any()
        } else {
            let value = |origin: &String| HeaderValue::from_str(origin).ok();
            AllowOrigin::list(self.cors.iter().filter_map(value))
        };
        CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST])
            // A wildcard would not cover `Authorization`.
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([REQUEST_ID, PREFIX, header::RETRY_AFTER])
            .allow_private_network(true)
            .max_age(MAX_AGE)
    }

    /// Whether any origin is allowed.
    pub fn has_cors(&self) -> bool {
        !self.cors.is_empty()
    }

    fn allows_all(&self) -> bool {
        self.cors.iter().any(|origin| origin == "*")
    }

    pub fn check(&self, request: &Request) -> Result<(), ApiError> {
        let headers = request.headers();
        let mut named = headers.get_all(header::HOST).iter();
        let host = named.next();
        if named.next().is_some() {
            let message = "Host: must occur once";
            return Err(ApiError::invalid("invalid_host", "Host", message));
        }
        // A client that is no browser may leave the header out.
        let host = host.map(|host| host.to_str().unwrap_or("?"));
        // `GET http://name/path`, as sent to a proxy, takes precedence over `Host`.
        for name in request.uri().authority().map(Authority::as_str).into_iter().chain(host) {
            if !self.accepts_host(name) {
                return Err(ApiError::host_not_allowed(name));
            }
        }
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let Some(origin) = origins.next() else { return Ok(()) };
        if origins.next().is_some() {
            let message = "Origin: must occur once";
            return Err(ApiError::invalid("invalid_origin", "Origin", message));
        }
        let origin = origin.to_str().unwrap_or("?");
        // The server has no TLS, but a proxy before it may.
        let of_this_server = host.is_some_and(|host| {
            let of_page = origin.strip_prefix("http://").or(origin.strip_prefix("https://"));
            of_page.is_some_and(|name| name.eq_ignore_ascii_case(host))
        });
        if of_this_server || self.allows_all() || self.cors.iter().any(|known| known == origin) {
            return Ok(());
        }
        Err(ApiError::origin_not_allowed(origin))
    }

    fn accepts_host(&self, host: &str) -> bool {
        let Some(hosts) = &self.hosts else { return true };
        let Ok(authority) = host.parse::<Authority>() else { return false };
        // `evil.com@127.0.0.1`: no client sends a user's name here.
        if host.contains('@') {
            return false;
        }
        let name = authority.host().to_lowercase();
        let name = name.trim_end_matches('.');
        let bare = name.trim_start_matches('[').trim_end_matches(']');
        is_local(bare) || hosts.iter().any(|known| known == name || known == bare)
    }
}

/// Whether `host` is a name or an address of this machine only.
pub fn is_local(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepts(config: &ServerConfig, host: &str) -> bool {
        Origins::new(config).accepts_host(host)
    }

    #[test]
    fn a_server_for_this_machine_accepts_its_names_and_those_configured() {
        let config = ServerConfig { hosts: vec!["Model.lan".into()], ..ServerConfig::default() };
        for host in [
            "127.0.0.1",
            "127.0.0.1:11436",
            "127.1.2.3:1",
            "localhost",
            "LocalHost:80",
            "localhost.:80",
            "app.localhost",
            "[::1]:11436",
            "[::ffff:127.0.0.1]",
            "model.lan:8080",
        ] {
            assert!(accepts(&config, host), "{host}");
        }
        for host in [
            "evil.com",
            "localhost.evil.com",
            "notlocalhost",
            "127.0.0.1.evil.com",
            "10.0.0.1",
            "0.0.0.0",
            "[::2]",
            "model.lan.evil.com",
            "",
            "a b",
            "?",
            "evil.com@127.0.0.1",
            "evil.com@localhost:11436",
        ] {
            assert!(!accepts(&config, host), "{host}");
        }
    }

    #[test]
    fn a_server_for_the_network_accepts_every_name_unless_some_are_configured() {
        let open = ServerConfig { host: "0.0.0.0".into(), ..ServerConfig::default() };
        assert!(accepts(&open, "evil.com"));
        let named = ServerConfig { hosts: vec!["model.lan".into()], ..open };
        assert!(accepts(&named, "model.lan"));
        assert!(accepts(&named, "localhost:1"));
        assert!(!accepts(&named, "evil.com"));
    }
}
