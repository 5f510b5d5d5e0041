//! What a running server is asked about its policies.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde_json::Value;

/// Most bytes of an answer: traces of long requests have some megabytes.
const ANSWER_BYTES: u64 = 256 << 20;

/// A running server.
#[derive(Args)]
pub struct Server {
    /// Its address
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:11436")]
    url: String,
    /// One of its `server.admin_keys`
    #[arg(long, value_name = "KEY", env = "STEERSMAN_ADMIN_KEY", hide_env_values = true)]
    key: Option<String>,
}

impl Server {
    /// Prints the policies that it has.
    ///
    /// # Errors
    /// When it cannot be reached, or refuses.
    pub fn list(&self, out: &mut impl Write) -> Result<()> {
        let answer = self.json(&self.ask("/v1/policies", None)?)?;
        let known = |list: &Value| list.as_array().cloned().unwrap_or_default();
        for policy in known(&answer["policies"]) {
            let profiles: Vec<_> = known(&policy["profiles"])
                .iter()
                .map(|one| {
                    let shadow = if one["shadow"] == true { " (shadow)" } else { "" };
                    format!("{}{shadow}", text(&one["profile"]))
                })
                .collect();
            let state = match text(&policy["breaker"]["state"]).as_str() {
                "open" => format!(", rests for {} s", text(&policy["breaker"]["rests_s"])),
                "probation" => ", on probation".into(),
                _ => String::new(),
            };
            writeln!(
                out,
                "{}  {}  contract {}, {}, {} bytes, in {}{state}",
                text(&policy["name"]),
                short(&policy["sha256"]),
                text(&policy["contract"]),
                text(&policy["origin"]),
                text(&policy["bytes"]),
                profiles.join(", "),
            )?;
            if let Some(problem) = policy["problem"]["message"].as_str() {
                writeln!(out, "  not replaced: {problem}")?;
            }
            for earlier in known(&policy["earlier"]) {
                let withdrawn = match earlier["withdrawn"].as_str() {
                    Some(why) => format!(", withdrawn: {why}"),
                    None => String::new(),
                };
                let (sha256, origin) = (short(&earlier["sha256"]), text(&earlier["origin"]));
                writeln!(out, "  before: {sha256}  {origin}{withdrawn}")?;
            }
        }
        for param in known(&answer["params"]) {
            if let Some(problem) = param["problem"]["message"].as_str() {
                let (profile, name) = (text(&param["profile"]), text(&param["param"]));
                writeln!(out, "profiles.{profile}.params.{name}: {problem}")?;
            }
        }
        Ok(())
    }

    /// Gives it a component, under a name.
    ///
    /// # Errors
    /// When the file cannot be read, or the server cannot be reached or refuses it.
    pub fn push(&self, name: &str, file: &Path, out: &mut impl Write) -> Result<()> {
        let bytes = std::fs::read(file).with_context(|| format!("reading {}", file.display()))?;
        self.change(&format!("/v1/policies/{}", in_path(name)), &bytes, out)
    }

    /// Goes back to the version before.
    ///
    /// # Errors
    /// When the server cannot be reached, or refuses.
    pub fn rollback(&self, name: &str, out: &mut impl Write) -> Result<()> {
        self.change(&format!("/v1/policies/{}/rollback", in_path(name)), &[], out)
    }

    /// Prints what was decided in a request, a JSON object a line.
    ///
    /// # Errors
    /// When the server cannot be reached, or refuses.
    pub fn trace(&self, id: &str, out: &mut impl Write) -> Result<()> {
        let path = format!("/v1/requests/{}/trace", in_path(id));
        let answer = self.json(&self.ask(&path, None)?)?;
        for record in answer["records"].as_array().into_iter().flatten() {
            serde_json::to_writer(&mut *out, record)?;
            writeln!(out)?;
        }
        Ok(())
    }

    /// Has another version take the place of one, and says which.
    fn change(&self, path: &str, body: &[u8], out: &mut impl Write) -> Result<()> {
        let answer = self.json(&self.ask(path, Some(body))?)?;
        let (name, sha256) = (text(&answer["name"]), short(&answer["sha256"]));
        match answer["replaced"].as_str() {
            Some(_) => {
                let before = short(&answer["replaced"]);
                writeln!(out, "{name}: {sha256} runs, in place of {before}")?;
            }
            None => writeln!(out, "{name}: {sha256} runs, as before")?,
        }
        Ok(())
    }

    /// The answer to GET, or to POST where there is a body.
    fn ask(&self, path: &str, body: Option<&[u8]>) -> Result<String> {
        let url = format!("{}{path}", self.url.trim_end_matches('/'));
        let config = ureq::Agent::config_builder().http_status_as_error(false).build();
        let agent = ureq::Agent::new_with_config(config);
        let key = self.key.as_ref().map(|key| format!("Bearer {key}"));
        let response = match body {
            None => {
                let mut request = agent.get(&url);
                if let Some(key) = key {
                    request = request.header("Authorization", key);
                }
                request.call()
            }
            Some(body) => {
                let mut request = agent.post(&url).content_type("application/wasm");
                if let Some(key) = key {
                    request = request.header("Authorization", key);
                }
                request.send(body)
            }
        };
        let mut response = response.with_context(|| format!("asking {url}"))?;
        let status = response.status();
        let text = response
            .body_mut()
            .with_config()
            .limit(ANSWER_BYTES)
            .read_to_string()
            .with_context(|| format!("reading the answer of {url}"))?;
        if !status.is_success() {
            let told: Option<Value> = serde_json::from_str(&text).ok();
            let why = told.as_ref().and_then(|told| told["error"]["message"].as_str());
            bail!("{url}: {status}: {}", why.unwrap_or(&text));
        }
        Ok(text)
    }

    fn json(&self, answer: &str) -> Result<Value> {
        serde_json::from_str(answer)
            .map_err(|_| anyhow!("{} is no Steersman: it answered {answer:?}", self.url))
    }
}

/// A value as people read it.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The beginning of a digest, which is enough to tell it from others.
fn short(sha256: &Value) -> String {
    text(sha256).chars().take(12).collect()
}

/// A name as part of a path.
fn in_path(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    name.bytes()
        .map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}
