//! Requests to a running server about its policies.

use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

/// Largest response: traces of long requests have some megabytes.
const RESPONSE_BYTES: u64 = 256 << 20;

/// The address at which commands on this machine find the server that listens on `host` and `port`.
pub fn url(host: &str, port: u16) -> String {
    match host.parse::<IpAddr>() {
        Ok(address) if address.is_unspecified() => format!("http://127.0.0.1:{port}"),
        Ok(IpAddr::V6(address)) => format!("http://[{address}]:{port}"),
        _ => format!("http://{host}:{port}"),
    }
}

/// A running server.
#[derive(Args)]
pub struct Server {
    /// Its address [default: that of the configuration, http://127.0.0.1:11436 without one]
    #[arg(long, value_name = "URL", env = "STEERSMAN_URL")]
    url: Option<String>,
    /// A key of an operator: one of its `server.admin_keys`, or of `steersman keys create NAME --operator`
    #[arg(long, value_name = "KEY", env = "STEERSMAN_ADMIN_KEY", hide_env_values = true)]
    key: Option<String>,
}

impl Server {
    /// A client of the server: at `url`, unless the command names another address.
    pub fn at(&self, url: &str) -> Client {
        let url = self.url.as_deref().unwrap_or(url);
        let scheme = if url.contains("://") { "" } else { "http://" };
        Client { url: format!("{scheme}{url}"), key: self.key.clone() }
    }
}

/// Makes requests to a running server.
pub struct Client {
    url: String,
    key: Option<String>,
}

impl Client {
    /// Prints the policies.
    pub fn list(&self, out: &mut impl Write) -> Result<()> {
        let response = self.request("/v1/policies", None)?;
        for policy in items(&response["policies"]) {
            let profiles: Vec<_> = items(&policy["profiles"])
                .map(|used| {
                    let shadow = if used["shadow"] == true { " (shadow)" } else { "" };
                    let state = match used["breaker"]["state"].as_str() {
                        Some("open") => format!(" (paused for {} s)", used["breaker"]["rests_s"]),
                        Some("probation") => " (on probation)".into(),
                        _ => String::new(),
                    };
                    // A server of before does not say it.
                    let is_other = used["sha256"].is_string() && used["sha256"] != policy["sha256"];
                    let version = match is_other {
                        true => format!(" (rolled back, runs {})", short(&used["sha256"])),
                        false => String::new(),
                    };
                    format!("{}{shadow}{version}{state}", text(&used["profile"]))
                })
                .collect();
            writeln!(
                out,
                "{}  {}  contract {}, {}, {} bytes, in {}",
                text(&policy["name"]),
                short(&policy["sha256"]),
                text(&policy["contract"]),
                text(&policy["origin"]),
                policy["bytes"],
                profiles.join(", "),
            )?;
            if let Some(key) = policy["signed_by"].as_str() {
                writeln!(out, "  signed by {key}")?;
            }
            if let Some(problem) = policy["problem"]["message"].as_str() {
                writeln!(out, "  update rejected: {problem}")?;
            }
            for earlier in items(&policy["earlier"]) {
                let withdrawn = match earlier["withdrawn"].as_str() {
                    Some(reason) => format!(", withdrawn: {reason}"),
                    None => String::new(),
                };
                let (sha256, origin) = (short(&earlier["sha256"]), text(&earlier["origin"]));
                writeln!(out, "  earlier: {sha256}  {origin}{withdrawn}")?;
            }
        }
        for param in items(&response["params"]) {
            if let Some(problem) = param["problem"]["message"].as_str() {
                let (profile, name) = (text(&param["profile"]), text(&param["param"]));
                writeln!(out, "profiles.{profile}.params.{name}: {problem}")?;
            }
        }
        Ok(())
    }

    /// Uploads a component as the policy `name`.
    pub fn push(&self, name: &str, file: &Path, out: &mut impl Write) -> Result<()> {
        let component = std::fs::read(file).with_context(|| file.display().to_string())?;
        self.activate(&format!("/v1/policies/{}", escape(name)), &component, out)
    }

    /// Returns to the previous version of the policy `name`.
    pub fn roll_back(&self, name: &str, out: &mut impl Write) -> Result<()> {
        self.activate(&format!("/v1/policies/{}/rollback", escape(name)), &[], out)
    }

    /// Prints the trace of a request, one JSON object a line.
    pub fn trace(&self, id: &str, out: &mut impl Write) -> Result<()> {
        let response = self.request(&format!("/v1/requests/{}/trace", escape(id)), None)?;
        for record in items(&response["records"]) {
            serde_json::to_writer(&mut *out, record)?;
            writeln!(out)?;
        }
        Ok(())
    }

    /// Makes a request that activates a version, and prints the version.
    fn activate(&self, path: &str, body: &[u8], out: &mut impl Write) -> Result<()> {
        let say = |seconds: u64| eprintln!("the server compiles and tests it: {seconds} s");
        let ask = || self.request(path, Some(body));
        let response = super::patiently(super::PROGRESS, say, ask)?;
        let (name, sha256) = (text(&response["name"]), short(&response["sha256"]));
        match &response["replaced"] {
            Value::Null => writeln!(out, "{name}: {sha256} is already active")?,
            replaced => writeln!(out, "{name}: {sha256} is active, replacing {}", short(replaced))?,
        }
        for note in items(&response["notes"]) {
            writeln!(out, "  {}", text(note))?;
        }
        Ok(())
    }

    /// The response to GET, or with a body to POST.
    fn request(&self, path: &str, body: Option<&[u8]>) -> Result<Value> {
        let server = &self.url;
        let url = format!("{}{path}", server.trim_end_matches('/'));
        let config = ureq::Agent::config_builder().http_status_as_error(false).build();
        let agent = ureq::Agent::new_with_config(config);
        let key = self.key.iter().map(|key| ("Authorization", format!("Bearer {key}")));
        let response = match body {
            None => {
                key.fold(agent.get(&url), |request, (name, key)| request.header(name, key)).call()
            }
            Some(body) => key
                .fold(agent.post(&url), |request, (name, key)| request.header(name, key))
                .content_type("application/wasm")
                .send(body),
        };
        let mut response = response.map_err(|error| match &error {
            ureq::Error::Io(io) if io.kind() == ErrorKind::ConnectionRefused => anyhow!(
                "{server}: no server answers there; start one with `steersman serve`, or name its address with \
                 --url or STEERSMAN_URL"
            ),
            _ => anyhow::Error::from(error).context(url.clone()),
        })?;
        let status = response.status();
        let body = response.body_mut().with_config().limit(RESPONSE_BYTES).read_to_string();
        let body = body.with_context(|| url.clone())?;
        let json: Option<Value> = serde_json::from_str(&body).ok();
        if !status.is_success() {
            let message = json.as_ref().and_then(|json| json["error"]["message"].as_str());
            bail!("{url}: {status}: {}", message.unwrap_or(&body));
        }
        json.ok_or_else(|| anyhow!("{url}: is not a Steersman server; it returned {body:?}"))
    }
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// A string without quotes; other values as JSON.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The first digits of a SHA-256.
fn short(sha256: &Value) -> String {
    text(sha256).chars().take(12).collect()
}

/// Characters that a segment of a path escapes: all but the unreserved ones (RFC 3986, section 2.3).
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Percent-encodes a segment of a path.
fn escape(segment: &str) -> String {
    utf8_percent_encode(segment, ESCAPED).to_string()
}
