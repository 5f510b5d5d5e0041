//! What is wrong with the values of a configuration: ranges, names, keys.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

use axum::http::HeaderName;
use secrecy::{ExposeSecret, SecretString};
use steersman_engine::config::Config;

use super::{ProfileConfig, ServerConfig};

/// Most requests of a profile that wait or run.
const REQUESTS: u64 = 1 << 16;

/// Most connections.
const CONNECTIONS: u64 = 1 << 20;

/// An hour in seconds.
const HOUR_S: u64 = 3600;

/// A week in seconds.
const WEEK_S: u64 = 7 * 24 * HOUR_S;

impl ServerConfig {
    pub(super) fn problems(&self) -> Vec<String> {
        let body_limit = self.body_limit_bytes as u64;
        let ranges = [
            ("server.max_connections", self.max_connections as u64, 0, CONNECTIONS),
            (
                "server.max_connections_per_address",
                self.max_connections_per_address as u64,
                0,
                CONNECTIONS,
            ),
            ("server.idle_timeout_s", self.idle_timeout_s, 1, HOUR_S),
            ("server.body_limit_bytes", body_limit, 1024, 1 << 30),
            ("server.body_budget_bytes", self.body_budget_bytes as u64, body_limit, 1 << 40),
            ("server.body_timeout_s", self.body_timeout_s, 1, HOUR_S),
            ("server.request_timeout_s", self.request_timeout_s, 1, WEEK_S),
            ("server.model_wait_s", self.model_wait_s, 1, HOUR_S),
            ("server.shutdown_s", self.shutdown_s, 0, HOUR_S),
            ("server.responses_bytes", self.responses_bytes, 0, 1 << 40),
            ("server.responses_days", self.responses_days, 1, 3650),
        ];
        let ranges = ranges
            .into_iter()
            .filter_map(|(key, value, least, most)| out_of(key, value, least, most));
        let mut problems: Vec<_> = ranges.collect();
        if self.host.is_empty() {
            problems.push("server.host: is empty; use 127.0.0.1 for this machine only".into());
        } else if !is_listened_on(&self.host) {
            problems.push(format!(
                "server.host: `{}` is neither an address nor a name; leave out scheme, port and brackets, as in \
                 127.0.0.1",
                self.host
            ));
        }
        for host in self.hosts.iter().filter(|host| !is_host(host)) {
            problems.push(format!(
                "server.hosts: `{host}` is not a name or an address; leave out scheme and port"
            ));
        }
        for origin in self.cors.iter().filter(|origin| !is_origin(origin)) {
            problems.push(format!(
                "server.cors: `{origin}` is not an origin; write it as `https://name` or \
                 `http://name:port`, or \"*\" for all"
            ));
        }
        problems
    }
}

/// Headers that hold keys.
const SECRET_HEADERS: [&str; 4] = ["authorization", "cookie", "proxy-authorization", "x-api-key"];

impl ProfileConfig {
    pub(super) fn problems(&self, name: &str) -> Vec<String> {
        let mut problems = Vec::new();
        if name == "default" && !self.model.is_empty() {
            problems.push(
                "profiles.default.model: this profile uses [model]; set model.path instead".into(),
            );
        }
        let requests = self.limits.requests as u64;
        problems.extend(out_of(&format!("profiles.{name}.limits.requests"), requests, 0, REQUESTS));
        let is_secret = |header: &&String| SECRET_HEADERS.contains(&header.as_str());
        if let Some(header) = self.policy_headers.iter().find(is_secret) {
            problems.push(format!(
                "profiles.{name}.policy_headers: `{header}` has keys, which policies must not see; they see \
                 the digest of the request's key"
            ));
        }
        let is_invalid = |header: &&String| {
            HeaderName::from_bytes(header.as_bytes())
                .map_or(true, |known| known.as_str() != *header)
        };
        if let Some(header) = self.policy_headers.iter().find(is_invalid) {
            problems.push(format!(
                "profiles.{name}.policy_headers: `{header}` is not the name of a header in lower case"
            ));
        }
        problems
    }
}

/// The problems of the engine's configuration.
pub(super) fn problems_of_engine(config: &Config) -> Vec<String> {
    config.problems().iter().map(ToString::to_string).collect()
}

/// The problem of `value` if it is not from `least` to `most`.
pub fn out_of(key: &str, value: u64, least: u64, most: u64) -> Option<String> {
    let range = least..=most;
    (!range.contains(&value)).then(|| format!("{key}: is {value}, must be from {least} to {most}"))
}

/// Keys that cannot be sent, or that occur twice.
pub(super) fn problems_of_keys<'a>(
    owners: impl Iterator<Item = (String, &'a [SecretString])>,
) -> Vec<String> {
    let (mut problems, mut known) = (Vec::new(), BTreeMap::new());
    for (owner, keys) in owners {
        if !keys.iter().all(is_valid) {
            problems.push(format!("{owner}: a key is empty, or starts or ends with white space"));
        }
        for key in keys {
            if let Some(other) = known.insert(key.expose_secret(), owner.clone()) {
                problems.push(format!("{owner}: a key is also in {other}; use each key once"));
            }
        }
    }
    problems
}

/// Whether `host` is a name or an address without a port.
fn is_host(host: &str) -> bool {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    host.parse::<IpAddr>().is_ok() || (!host.is_empty() && host.chars().all(is_name))
}

/// Whether a server may listen on `host`, if it is an address of this machine. That of a link (`fe80::1%eth0`) names its
/// interface.
pub fn is_listened_on(host: &str) -> bool {
    let of_link = host.split_once('%');
    is_host(host) || of_link.is_some_and(|(address, _)| address.parse::<Ipv6Addr>().is_ok())
}

/// Whether `origin` is what a browser sends as `Origin`, or `*`.
fn is_origin(origin: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "-_.+:[]".contains(c);
    let (scheme, name) = origin.split_once("://").unwrap_or_default();
    let parts = [scheme, name].map(|part| !part.is_empty() && part.chars().all(is_part));
    parts == [true, true] || ["*", "null"].contains(&origin)
}

fn is_valid(key: &SecretString) -> bool {
    let key = key.expose_secret();
    !key.trim().is_empty() && key.trim() == key
}
