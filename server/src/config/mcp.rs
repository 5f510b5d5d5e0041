//! `[mcp]`: the servers, and limits on what requests do with them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

use http::header::{ACCEPT, CONTENT_TYPE, HOST};
use http::{HeaderName, HeaderValue, Uri};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use super::out_of;
use crate::words::suggestion;

/// What separates the name of a server from that of its tool. No server's name contains it.
pub const SEPARATOR: &str = "__";

/// Most rounds of a reply.
const ROUNDS: u64 = 1000;

/// Longest time of a call, in seconds.
const CALL_S: u64 = 3600;

/// Most bytes of a result.
const RESULT_BYTES: u64 = 8 << 20;

/// Longest name of a server.
const NAME_BYTES: usize = 32;

/// `[mcp]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpConfig {
    /// How often the model may continue a reply with results of tools. A reply that would continue once
    /// more ends.
    pub rounds: u32,
    /// Seconds within which a call must return.
    pub call_timeout_s: u64,
    /// Bytes of a result that the model gets; the rest is cut off.
    pub result_bytes: usize,
    /// Servers by name.
    pub servers: BTreeMap<String, McpServerConfig>,
}

/// `[mcp.servers.NAME]`: a program that speaks over its standard input and output, or an address.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpServerConfig {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Variables of its environment, besides a few that every program needs.
    pub env: BTreeMap<String, SecretString>,
    /// Its working directory; empty for that of this server.
    pub folder: PathBuf,
    /// Address of a server that speaks streamable HTTP.
    pub url: String,
    /// Headers of each request to it.
    pub headers: BTreeMap<String, SecretString>,
}

impl Default for McpConfig {
    fn default() -> Self {
        Self { rounds: 8, call_timeout_s: 60, result_bytes: 64 << 10, servers: BTreeMap::new() }
    }
}

impl McpConfig {
    /// Values of the section that cannot be used, by key.
    pub fn problems(&self) -> Vec<String> {
        let ranges = [
            ("mcp.rounds", u64::from(self.rounds), 1, ROUNDS),
            ("mcp.call_timeout_s", self.call_timeout_s, 1, CALL_S),
            ("mcp.result_bytes", self.result_bytes as u64, 256, RESULT_BYTES),
        ];
        let ranges = ranges
            .into_iter()
            .filter_map(|(key, value, least, most)| out_of(key, value, least, most));
        let mut problems: Vec<_> = ranges.collect();
        for (name, server) in &self.servers {
            let key = format!("mcp.servers.{name}");
            if !is_name(name) {
                problems.push(format!(
                    "{key}: the name of a server has 1 to {NAME_BYTES} letters, digits, `-` or `_`, and no \
                     `_` at an end or beside another, because its tools are named NAME{SEPARATOR}TOOL"
                ));
            }
            problems.extend(server.problems(&key));
        }
        problems
    }

    /// What is wrong with `grants`, the servers and tools that a profile grants under `key`.
    pub fn problems_of_grants(&self, key: &str, grants: &[String]) -> Vec<String> {
        let mut problems = Vec::new();
        for (index, grant) in grants.iter().enumerate() {
            let (server, tool) = split(grant);
            let known: Vec<_> = self.servers.keys().map(String::as_str).collect();
            if !self.servers.contains_key(server) {
                let near = suggestion(server, known.iter().copied());
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                problems.push(format!(
                    "{key}: there is no server `{server}` in [mcp.servers], which has {known}{near}"
                ));
            } else if tool == Some("") {
                problems.push(format!(
                    "{key}: `{grant}` names no tool; write {server} for all of its tools"
                ));
            } else if grants[..index].iter().any(|other| *other == *grant || other == server) {
                problems.push(format!("{key}: `{grant}` is granted already; drop it"));
            }
        }
        problems
    }
}

impl McpServerConfig {
    fn problems(&self, key: &str) -> Vec<String> {
        let mut problems = Vec::new();
        let is_program = !self.command.is_empty();
        let has_address = !self.url.is_empty();
        if is_program == has_address {
            let both = if is_program { "has both; drop one" } else { "has neither" };
            problems.push(format!("{key}: needs `command` or `url`, and {both}"));
            return problems;
        }
        if is_program && self.command[0].is_empty() {
            problems.push(format!("{key}.command: the first element must name the program"));
        }
        if is_program && !self.headers.is_empty() {
            problems.push(format!("{key}.headers: only a server with `url` has them"));
        }
        let is_for_programs = !self.env.is_empty() || !self.folder.as_os_str().is_empty();
        if has_address && is_for_programs {
            problems.push(format!("{key}: only a server with `command` has `env` and `folder`"));
        }
        if has_address && self.uri().is_none() {
            problems
                .push(format!("{key}.url: must begin with http:// or https:// and name a host"));
        }
        let is_variable = |name: &&String| {
            !name.is_empty() && !name.contains(['=', '\0']) && name.trim() == **name
        };
        if let Some(name) = self.env.keys().find(|name| !is_variable(name)) {
            problems.push(format!("{key}.env: `{name}` cannot be the name of a variable"));
        }
        for (name, value) in &self.headers {
            if header(name, value).is_none() {
                problems.push(format!(
                    "{key}.headers.{name}: is no header, or the server sets it, or its value has other \
                     characters than headers may have"
                ));
            }
        }
        problems
    }

    /// The address, if it is one.
    pub fn uri(&self) -> Option<Uri> {
        let uri = Uri::from_str(&self.url).ok()?;
        let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
        (is_http && uri.host().is_some_and(|host| !host.is_empty())).then_some(uri)
    }

    /// Where the server is, without what may be secret: the program, or scheme, host and port.
    pub fn place(&self) -> String {
        match (self.command.first(), self.uri()) {
            (Some(program), _) => program.clone(),
            (None, Some(uri)) => {
                let authority = uri.authority().map_or("", |authority| authority.as_str());
                // Before an `@` stand a name and a password.
                let host = authority.rsplit('@').next().unwrap_or_default();
                format!("{}://{host}", uri.scheme_str().unwrap_or_default())
            }
            (None, None) => String::new(),
        }
    }
}

/// A header with a value that is not printed; `None` if it is none, or one that the protocol sets.
pub fn header(name: &str, value: &SecretString) -> Option<(HeaderName, HeaderValue)> {
    let name = HeaderName::from_str(name).ok()?;
    let is_set = [ACCEPT, CONTENT_TYPE, HOST].contains(&name)
        || name.as_str().starts_with("mcp-")
        || ["content-length", "last-event-id", "transfer-encoding"].contains(&name.as_str());
    let mut value = HeaderValue::from_str(value.expose_secret()).ok().filter(|_| !is_set)?;
    value.set_sensitive(true);
    Some((name, value))
}

/// The server of a grant, and the tool if it grants one only.
pub fn split(grant: &str) -> (&str, Option<&str>) {
    match grant.split_once(SEPARATOR) {
        Some((server, tool)) => (server, Some(tool)),
        None => (grant, None),
    }
}

/// Whether the names of this server's tools can be those of no other's.
fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    (1..=NAME_BYTES).contains(&name.len())
        && name.chars().all(is_part)
        && !(name.starts_with('_') || name.ends_with('_') || name.contains(SEPARATOR))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> McpConfig {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn unusable_servers_are_named_by_key() {
        for (text, key, words) in [
            ("rounds = 0", "mcp.rounds:", "from 1"),
            ("call_timeout_s = 0", "mcp.call_timeout_s:", "from 1"),
            ("result_bytes = 1", "mcp.result_bytes:", "from 256"),
            ("[servers.a__b]\ncommand = ['x']", "mcp.servers.a__b:", "NAME__TOOL"),
            ("[servers.a_]\ncommand = ['x']", "mcp.servers.a_:", "NAME__TOOL"),
            ("[servers.'a b']\ncommand = ['x']", "mcp.servers.a b:", "letters"),
            ("[servers.a]", "mcp.servers.a:", "has neither"),
            ("[servers.a]\ncommand = ['x']\nurl = 'http://h'", "mcp.servers.a:", "has both"),
            ("[servers.a]\ncommand = ['']", "mcp.servers.a.command:", "the program"),
            ("[servers.a]\ncommand = ['x']\nheaders.B = 'c'", "mcp.servers.a.headers:", "`url`"),
            ("[servers.a]\nurl = 'http://h'\nenv.B = 'c'", "mcp.servers.a:", "`env`"),
            ("[servers.a]\nurl = 'http://h'\nfolder = 'c'", "mcp.servers.a:", "`folder`"),
            ("[servers.a]\nurl = 'ftp://h'", "mcp.servers.a.url:", "http://"),
            ("[servers.a]\nurl = 'h/mcp'", "mcp.servers.a.url:", "http://"),
            ("[servers.a]\ncommand = ['x']\nenv.'B=' = 'c'", "mcp.servers.a.env:", "`B=`"),
            ("[servers.a]\nurl = 'http://h'\nheaders.'B C' = 'd'", "headers.B C:", "no header"),
            ("[servers.a]\nurl = 'http://h'\nheaders.B = \"d\\n\"", "headers.B:", "its value"),
            (
                "[servers.a]\nurl = 'http://h'\nheaders.Mcp-Session-Id = 'd'",
                "Session-Id:",
                "sets it",
            ),
        ] {
            let problems = parse(text).problems();
            assert_eq!(problems.len(), 1, "{text}: {problems:?}");
            assert!(
                problems[0].contains(key) && problems[0].contains(words),
                "{text}: {problems:?}"
            );
        }
        let text = "[servers.web-1]\nurl = 'https://h:1/mcp'\nheaders.Authorization = 'Bearer t'\n\
                    [servers.my_files]\ncommand = ['x', '']\nenv.A = ''\nfolder = '/'";
        assert_eq!(parse(text).problems(), [""; 0]);
    }

    #[test]
    fn grants_name_servers_or_tools_once() {
        let config = parse("[servers.a]\ncommand = ['x']\n[servers.b]\ncommand = ['x']");
        let check = |grants: &[&str]| {
            let grants: Vec<_> = grants.iter().map(ToString::to_string).collect();
            config.problems_of_grants("profiles.p.mcp", &grants).join("; ")
        };
        assert_eq!(check(&["a", "b__read", "b__write"]), "");
        assert!(check(&["c"]).contains("no server `c` in [mcp.servers], which has a, b"));
        assert!(check(&["c__read"]).contains("no server `c`"));
        assert!(check(&["a__"]).contains("names no tool"));
        for twice in [["a", "a"], ["a", "a__read"], ["a__read", "a__read"]] {
            assert!(check(&twice).contains("is granted already"), "{twice:?}");
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let config = parse(
            "[servers.a]\nurl = 'https://user:sk-1@h:8/mcp?key=sk-2'\nheaders.B = 'sk-3'\n\
             [servers.b]\ncommand = ['x', '--key=sk-4']\nenv.B = 'sk-5'",
        );
        let places: Vec<_> = config.servers.values().map(McpServerConfig::place).collect();
        assert_eq!(places, ["https://h:8", "x"]);
        let printed = format!("{config:?}");
        assert!(!printed.contains("sk-3") && !printed.contains("sk-5"), "{printed}");
        let (_, value) = header("b", &"sk-3".into()).unwrap();
        assert!(!format!("{value:?}").contains("sk-3"));
    }
}
