//! `steersman mcp`: lists and calls the tools of the configured servers.

use std::io::Write;

use anyhow::{Context, Result, bail, ensure};
use clap::Subcommand;
use serde_json::{Map, Value};

use super::bounds::quoted;
use super::server::START;
use super::{McpConfig, SEPARATOR, Server, Tool, full_name};
use crate::words::suggestion;

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Task {
    /// List the tools of all configured servers, or of one
    #[command(after_help = "Example:\n  steersman mcp list files --config steersman.toml")]
    List {
        /// Its name in [mcp.servers]
        server: Option<String>,
    },
    /// Call a tool, and print what a model would get
    #[command(after_help = "Example:\n  steersman mcp call clock__now --config steersman.toml")]
    Call {
        /// The tool, as SERVER__TOOL
        tool: String,
        /// Its arguments, a JSON object
        #[arg(default_value = "{}")]
        arguments: String,
    },
}

/// Starts the servers that `task` needs, and does it.
///
/// # Errors
/// If a server or tool is not known, cannot be used, or the call fails.
pub fn run(task: Task, config: &McpConfig, out: &mut impl Write) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("starting the runtime")?;
    runtime.block_on(async {
        match task {
            Task::List { server } => list(server.as_deref(), config, out).await,
            Task::Call { tool, arguments } => call(&tool, &arguments, config, out).await,
        }
    })
}

async fn list(server: Option<&str>, config: &McpConfig, out: &mut impl Write) -> Result<()> {
    let names: Vec<&str> = match server {
        Some(name) => vec![name],
        None => config.servers.keys().map(String::as_str).collect(),
    };
    ensure!(!names.is_empty(), "no servers: add [mcp.servers.NAME] to the configuration");
    let servers: Vec<_> = names.iter().map(|name| start(name, config)).collect::<Result<_>>()?;
    let mut unusable = 0;
    for server in &servers {
        match server.tools(START).await {
            Ok(tools) => tools.iter().try_for_each(|tool| describe(server, tool, out))?,
            Err(reason) => {
                unusable += 1;
                writeln!(out, "{}: not available: {reason}", server.name())?;
            }
        }
    }
    ensure!(unusable == 0, "servers that are not available: {unusable}");
    Ok(())
}

/// Name, parameters (`?` marks those that may be left out), and the first line of the description.
fn describe(server: &Server, tool: &Tool, out: &mut impl Write) -> std::io::Result<()> {
    let parameters = &tool.definition["function"]["parameters"];
    let required = parameters["required"].as_array().map(Vec::as_slice).unwrap_or_default();
    let properties = parameters["properties"].as_object().into_iter().flatten();
    let named = properties.map(|(name, _)| {
        let is_required = required.iter().any(|one| one.as_str() == Some(name));
        format!("{name}{}", if is_required { "" } else { "?" })
    });
    let named: Vec<_> = named.collect();
    let first = tool.description.lines().next().unwrap_or_default();
    // It is shown in a terminal.
    let first = quoted(first);
    let name = full_name(server.name(), &tool.name);
    writeln!(out, "{name}({})  {first}", named.join(", "))
}

async fn call(tool: &str, arguments: &str, config: &McpConfig, out: &mut impl Write) -> Result<()> {
    let arguments: Map<String, Value> =
        serde_json::from_str(arguments).context("ARGUMENTS must be a JSON object")?;
    let Some((name, tool)) = tool.split_once(SEPARATOR) else {
        bail!("`{tool}` is no tool: write SERVER{SEPARATOR}TOOL, as `steersman mcp list` does");
    };
    let server = start(name, config)?;
    let tools = server.tools(START).await;
    let tools = tools.map_err(|reason| anyhow::anyhow!("{name}: not available: {reason}"))?;
    ensure!(
        tools.iter().any(|known| known.name == tool),
        "the server `{name}` has no tool `{tool}`; see `steersman mcp list {name}`"
    );
    let output = server.call(tool, arguments).await;
    ensure!(!output.is_error, "{}", output.text);
    Ok(writeln!(out, "{}", output.text)?)
}

fn start(name: &str, config: &McpConfig) -> Result<Server> {
    ensure!(
        config.servers.contains_key(name),
        "there is no server `{name}` in [mcp.servers]{}",
        suggestion(name, config.servers.keys().map(String::as_str))
    );
    Ok(Server::start(config, name))
}
