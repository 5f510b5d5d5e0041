//! Servers of the Model Context Protocol: their tools are offered to the requests of the profiles that grant
//! them, and this server runs the calls.
//!
//! A request takes this way: [`Mcp::offer`] adds tools to it before it goes to the engine, and
//! `api/rounds.rs` stands between the engine's events and the protocol. It runs the calls of a reply, and
//! asks the engine to continue with their results, so that protocols see one reply. Policies judge calls in
//! the engine, before their events come here.
//!
//! ```text
//! server.rs    one server: its connection, calls
//! listing.rs   its tools
//! lengths.rs   how many tokens their definitions have
//! stdio.rs     a server that is a program
//! http.rs      the HTTP client for servers with an address
//! bounds.rs    limits on what a server sends, before it is parsed
//! filter.rs    its requests and notifications
//! journal.rs   the calls of recent requests, for traces
//! command.rs   `steersman mcp`
//! ```

mod bounds;
pub mod command;
mod filter;
mod http;
mod journal;
mod lengths;
mod listing;
mod server;
mod stdio;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::future::join_all;
use serde_json::{Map, Value};
use steersman_engine::request::Request;

pub use crate::config::mcp::{McpConfig, McpServerConfig};
pub use journal::{Entry, Journal, Ran};
pub use listing::Tool;
pub use server::Server;

use self::lengths::{Definition, Lengths};
use self::server::PATIENCE;
use crate::config::ServerConfig;
use crate::config::mcp::{SEPARATOR, split};
use crate::models::Backend;

/// The servers, and what profiles may do with them.
pub struct Mcp {
    servers: BTreeMap<String, Server>,
    /// Servers and tools by profile.
    grants: BTreeMap<String, Vec<String>>,
    /// Profiles whose traces have texts.
    traced: BTreeSet<String>,
    rounds: u32,
    lengths: Arc<Lengths>,
    /// The calls of recent requests.
    pub journal: Journal,
}

/// The tools of one request.
pub struct Toolbox {
    mcp: Arc<Mcp>,
    profile: String,
    /// Servers and names on the server, by the names that the model uses.
    tools: BTreeMap<String, (String, String)>,
    /// Names of the client's own tools.
    client: BTreeSet<String>,
}

/// What a call returned, as text for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// The text.
    pub text: String,
    /// Whether the tool failed, or could not be called.
    pub is_error: bool,
}

impl Output {
    fn error(text: String) -> Self {
        Self { text, is_error: true }
    }

    /// Cuts the text after `bytes`, with a note.
    fn cut(mut self, bytes: usize) -> Self {
        let whole = self.text.len();
        if whole > bytes {
            self.text.truncate(self.text.floor_char_boundary(bytes));
            self.text += &format!("\n[cut off: {} of {whole} bytes]", self.text.len());
        }
        self
    }
}

/// The name that the model uses for a tool.
pub fn full_name(server: &str, tool: &str) -> String {
    format!("{server}{SEPARATOR}{tool}")
}

/// The result of a call that failed, as the model gets it.
pub fn error_result(text: &str) -> String {
    format!("Error: {text}")
}

impl Mcp {
    /// Starts the servers that profiles grant.
    ///
    /// # Panics
    /// Outside of a runtime, if there are any.
    pub fn start(config: &ServerConfig) -> Arc<Self> {
        let grants: BTreeMap<_, _> =
            config.profiles.iter().map(|(n, p)| (n.clone(), p.mcp.clone())).collect();
        let granted: BTreeSet<&str> =
            grants.values().flatten().map(|grant| split(grant).0).collect();
        for name in config.mcp.servers.keys().filter(|name| !granted.contains(name.as_str())) {
            tracing::warn!(server = name, "mcp server not started: no profile grants it");
        }
        let servers =
            granted.into_iter().map(|name| (name.to_string(), Server::start(&config.mcp, name)));
        let traced = config.profiles.iter().filter(|(_, profile)| profile.trace_text);
        Arc::new(Self {
            servers: servers.collect(),
            traced: traced.map(|(name, _)| name.clone()).collect(),
            grants,
            rounds: config.mcp.rounds,
            lengths: Arc::default(),
            journal: Journal::new(config.trace_requests),
        })
    }

    /// Adds to a request for `backend` the tools that its profile grants. `None` if there are none. What is missing is noted.
    ///
    /// A client's tool takes precedence over one of the same name. A client that names the tools that may be
    /// called gets no others.
    pub async fn offer(
        self: &Arc<Self>,
        profile: &str,
        backend: &Backend,
        request: &mut Request,
        notes: &mut Vec<String>,
    ) -> Option<Toolbox> {
        let grants = self.grants.get(profile).filter(|grants| !grants.is_empty())?;
        let has_turns = request.prompt.is_none() && request.embedding.is_none();
        let allowed = request.tool_choice.allowed.clone();
        if !has_turns || allowed.as_ref().is_some_and(Vec::is_empty) {
            return None;
        }
        if !backend.supports_tools() {
            notes.push("mcp: the tools are left out: the model's chat template has none".into());
            return None;
        }
        let name_of = |tool: &Value| Some(tool["function"]["name"].as_str()?.to_string());
        let client: BTreeSet<_> = request.tools.iter().filter_map(name_of).collect();
        let (mut tools, mut definitions) = (BTreeMap::new(), Vec::new());
        let granted: BTreeSet<_> = grants.iter().map(|grant| split(grant).0).collect();
        let listed = join_all(granted.iter().map(|name| self.servers[*name].tools(PATIENCE))).await;
        for (server, listed) in granted.into_iter().zip(listed) {
            let listed = match listed {
                Ok(listed) => listed,
                Err(_) => {
                    notes.push(format!(
                        "mcp: the tools of `{server}` are missing: it is not available"
                    ));
                    continue;
                }
            };
            for tool in listed.iter() {
                let name = full_name(server, &tool.name);
                let is_granted = grants.iter().any(|grant| grant == server || *grant == name);
                if !is_granted || allowed.as_ref().is_some_and(|allowed| !allowed.contains(&name)) {
                    continue;
                }
                if client.contains(&name) {
                    notes.push(format!(
                        "mcp: `{name}` is left out: the client has a tool of this name"
                    ));
                    continue;
                }
                // The servers `a` and `a_` may both have one that is `a___b` here.
                if tools.contains_key(&name) {
                    notes.push(format!(
                        "mcp: `{name}` of `{server}` is left out: another server has a tool of this name"
                    ));
                    continue;
                }
                let (definition, bytes) = (tool.definition.clone(), tool.bytes);
                definitions.push(Definition { name: name.clone(), definition, bytes });
                tools.insert(name, (server.to_string(), tool.name.clone()));
            }
        }
        let too_long = self.lengths.take_too_long(&mut definitions, backend).await;
        request.tools.extend(definitions.into_iter().map(|one| one.definition));
        for name in &too_long {
            tools.remove(name);
        }
        if let [first, others @ ..] = &*too_long {
            let more = if others.is_empty() {
                String::new()
            } else {
                format!(" and {} more", others.len())
            };
            notes.push(format!(
                "mcp: `{first}`{more} left out: definitions of tools take at most half of the model's context"
            ));
        }
        let (mcp, profile) = (self.clone(), profile.to_string());
        (!tools.is_empty()).then_some(Toolbox { mcp, profile, tools, client })
    }
}

impl Toolbox {
    /// Whether the client runs calls of `name`. Others are this server's, also those of tools that do not exist.
    pub fn is_clients(&self, name: &str) -> bool {
        self.client.contains(name)
    }

    /// Most rounds of a reply.
    pub fn rounds(&self) -> u32 {
        self.mcp.rounds
    }

    /// Enters a call of the request `id` into the journal, without texts unless its profile traces them.
    pub fn record(&self, id: &str, ran: &Ran) {
        let is_traced = self.mcp.traced.contains(&self.profile);
        let call = if is_traced { ran.clone() } else { ran.masked() };
        self.mcp.journal.add(id, &self.profile, call);
    }

    /// Enters the request `next` into the journal, with which the reply to the request `id` continues.
    pub fn continues(&self, id: &str, next: &str) {
        self.mcp.journal.continues(id, &self.profile, next);
    }

    /// Calls a tool.
    pub async fn call(&self, name: &str, arguments: Map<String, Value>) -> Output {
        match self.tools.get(name) {
            Some((server, tool)) => self.mcp.servers[server].call(tool, arguments).await,
            None => Output::error(format!("there is no tool `{name}`")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_results_are_cut_at_a_character_with_a_note() {
        let output = |text: &str| Output { text: text.into(), is_error: false };
        assert_eq!(output("Zürich").cut(7), output("Zürich"));
        assert_eq!(output("Zürich").cut(2), output("Z\n[cut off: 1 of 7 bytes]"));
    }
}
