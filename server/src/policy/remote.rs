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
        self.show(&self.ask("/v1/policies", None)?, out)
    }

    /// Gives it a component, under a name.
    ///
    /// # Errors
    /// When the file cannot be read, or the server cannot be reached or refuses it.
    pub fn push(&self, name: &str, file: &Path, out: &mut impl Write) -> Result<()> {
        let bytes = std::fs::read(file).with_context(|| format!("reading {}", file.display()))?;
        self.show(&self.ask(&format!("/v1/policies/{}", in_path(name)), Some(&bytes))?, out)
    }

    /// Goes back to the version before.
    ///
    /// # Errors
    /// When the server cannot be reached, or refuses.
    pub fn rollback(&self, name: &str, out: &mut impl Write) -> Result<()> {
        let path = format!("/v1/policies/{}/rollback", in_path(name));
        self.show(&self.ask(&path, Some(&[]))?, out)
    }

    /// Prints what was decided in a request, a JSON object a line.
    ///
    /// # Errors
    /// When the server cannot be reached, or refuses.
    pub fn trace(&self, id: &str, out: &mut impl Write) -> Result<()> {
        let text = self.ask(&format!("/v1/requests/{}/trace", in_path(id)), None)?;
        Ok(out.write_all(text.as_bytes())?)
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

    fn show(&self, answer: &str, out: &mut impl Write) -> Result<()> {
        let value: Value = serde_json::from_str(answer)
            .map_err(|_| anyhow!("{} is no Steersman: it answered {answer:?}", self.url))?;
        serde_json::to_writer_pretty(&mut *out, &value)?;
        Ok(writeln!(out)?)
    }
}

/// A name as part of a path.
fn in_path(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    name.bytes()
        .map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}
