//! The servers of a run: options that name them, and what they say about themselves.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::client::{Chat, Client, ThinkingField, system, user};
use crate::prose::{Pick, text, tools};
use crate::results::Server;
use crate::stream::Reply;
use crate::suite::pid_of;

/// Tokens of a sentence and of a tool where no server counts them: four characters each.
const CHARACTERS_PER_TOKEN: f64 = 4.0;
/// Sentences of the prompt that is counted.
const SENTENCES: usize = 20;
/// Tools of the prompt that is counted: few, because slow servers read them too.
const TOOLS: usize = 4;

/// Seconds after which a reply counts as failed, unless an option says otherwise.
const TIMEOUT: u64 = 600;

/// Options that name servers.
#[derive(Args)]
pub struct ServerOptions {
    /// A server and its name in the results. Can be repeated; others are compared with the first
    #[arg(long, value_name = "NAME=URL", value_parser = named, required = true)]
    pub against: Vec<Named>,
    /// The model to ask a server for [default: the first that it lists]
    #[arg(long, value_name = "NAME=MODEL", value_parser = named)]
    pub model: Vec<Named>,
    /// The environment variable with the API key of a server
    #[arg(long, value_name = "NAME=VARIABLE", value_parser = named)]
    pub key_env: Vec<Named>,
    /// Tokens of a server's context [default: what it says]
    #[arg(long, value_name = "NAME=TOKENS", value_parser = named)]
    pub context: Vec<Named>,
    /// The process of a server, for its memory [default: the one that listens on the port]
    #[arg(long, value_name = "NAME=PID", value_parser = named)]
    pub pid: Vec<Named>,
    /// How requests turn reasoning on and off
    #[arg(long, value_name = "FIELD", value_enum, default_value = "kwargs")]
    pub thinking_by: ThinkingField,
    /// Seconds after which a reply counts as failed
    #[arg(long, value_name = "SECONDS", default_value_t = TIMEOUT, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
}

/// A value for the server NAME.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    /// Name of the server.
    pub name: String,
    /// The value.
    pub value: String,
}

/// Reads NAME=VALUE.
pub fn named(text: &str) -> Result<Named, String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => {
            Ok(Named { name: name.into(), value: value.into() })
        }
        _ => Err("is not NAME=VALUE".into()),
    }
}

/// A server that has answered.
pub struct Found {
    /// Its client.
    pub client: Client,
    /// What it said.
    pub about: Server,
    /// Tokens of a tool of [`tools`].
    pub tool_tokens: f64,
}

impl ServerOptions {
    /// Servers `against` that are asked for `model`, with the defaults of the other options.
    pub fn of(against: Vec<Named>, model: Vec<Named>) -> Self {
        Self {
            against,
            model,
            key_env: Vec::new(),
            context: Vec::new(),
            pid: Vec::new(),
            thinking_by: ThinkingField::Kwargs,
            timeout: TIMEOUT,
        }
    }

    /// Connects to all servers and asks what they are.
    ///
    /// # Errors
    /// When an option names no server or has a wrong value, or a server does not answer.
    pub fn connect(&self) -> Result<Vec<Found>> {
        let options = [
            ("--model", &self.model),
            ("--key-env", &self.key_env),
            ("--context", &self.context),
            ("--pid", &self.pid),
        ];
        for (option, values) in options {
            for Named { name, .. } in values {
                self.check_name(option, name)?;
            }
        }
        for (number, one) in self.against.iter().enumerate() {
            let is_first = self.against[..number].iter().all(|other| other.name != one.name);
            ensure!(is_first, "--against: two servers are called {}", one.name);
        }
        self.against.iter().map(|one| self.connect_one(one)).collect()
    }

    /// Fails if an option names no server.
    pub fn check_name(&self, option: &str, name: &str) -> Result<()> {
        if self.against.iter().any(|one| one.name == name) {
            return Ok(());
        }
        let names: Vec<_> = self.against.iter().map(|one| one.name.as_str()).collect();
        bail!("{option} {name}=..: no server has this name, only {}", names.join(", "))
    }

    fn connect_one(&self, Named { name, value: url }: &Named) -> Result<Found> {
        let mut client = Client::new(name, url, Duration::from_secs(self.timeout))?;
        client.thinking_field = self.thinking_by;
        let number = |option: &str, text: &str| {
            text.parse().with_context(|| format!("{option} {name}={text}: is not a number"))
        };
        if let Some(variable) = value_of(&self.key_env, name) {
            let key =
                std::env::var(variable).with_context(|| format!("--key-env {name}={variable}"))?;
            client.set_key(key);
        }
        client.model = value_of(&self.model, name).unwrap_or_default().into();
        let context = value_of(&self.context, name);
        client.context = context.map(|text| number("--context", text)).transpose()?;
        client.describe()?;
        let pid: Option<usize> =
            value_of(&self.pid, name).map(|text| number("--pid", text)).transpose()?;
        let pid = match pid {
            Some(pid) => Some(u32::try_from(pid).context("--pid")?),
            None => pid_of(&client),
        };
        // On a slow server this takes a while.
        eprintln!("{name}: model {}, counting tokens of short prompts", client.model);
        let counted = count(&client)?;
        let about = Server {
            name: name.clone(),
            url: client.base.clone(),
            model: client.model.clone(),
            version: client.version(),
            fingerprint: counted.fingerprint,
            context: client.context,
            pid,
            sentence_tokens: counted.sentence_tokens,
            counts_tokens: counted.by_server,
        };
        Ok(Found { client, about, tool_tokens: counted.tool_tokens })
    }
}

fn value_of<'a>(values: &'a [Named], name: &str) -> Option<&'a str> {
    values.iter().find(|one| one.name == name).map(|one| one.value.as_str())
}

struct Counted {
    sentence_tokens: f64,
    tool_tokens: f64,
    by_server: bool,
    fingerprint: Option<String>,
}

/// How many tokens sentences and tools have: what a prompt has more with them than without. The
/// requests also warm the server up.
fn count(client: &Client) -> Result<Counted> {
    let mut pick = Pick::new(0, "count");
    let plain =
        Chat { messages: vec![system("Hello."), user("Hello.")], max_tokens: 4, ..Chat::default() };
    let words = text(&mut pick, SENTENCES);
    let long = Chat { messages: vec![system(&*words), user("Hello.")], ..plain.clone() };
    let few = Chat { tools: tools(&mut pick, 1), ..plain.clone() };
    let office = tools(&mut pick, 1 + TOOLS);
    let many = Chat { tools: office.clone(), ..plain.clone() };
    let ask = |chat: &Chat| -> Result<Reply> {
        let reply = client.chat(chat).map_err(|failure| {
            anyhow::anyhow!("{}: a first short request failed: {failure}", client.name)
        })?;
        match reply.failure() {
            Some(failure) => bail!("{}: a first short request failed: {failure}", client.name),
            None => Ok(reply),
        }
    };
    let tokens = |reply: &Reply| reply.usage.and_then(|usage| usage.prompt);
    let first = ask(&plain)?;
    let base = tokens(&first);
    let more = |a: Option<u64>, b: Option<u64>, parts: usize| {
        let more = b?.checked_sub(a?)? as f64 / parts as f64;
        (more > 0.0).then_some(more)
    };
    let sentence = more(base, tokens(&ask(&long)?), SENTENCES);
    // A server may refuse tools; then the scenarios with tools say so.
    let tools_of = |chat: &Chat| client.chat(chat).ok().as_ref().and_then(tokens);
    let tool = base.and_then(|_| more(tools_of(&few), tools_of(&many), TOOLS));
    let estimate = |bytes: usize, parts: usize| bytes as f64 / CHARACTERS_PER_TOKEN / parts as f64;
    let json = serde_json::to_string(&office).expect("tools are JSON");
    Ok(Counted {
        sentence_tokens: sentence.unwrap_or(estimate(words.len(), SENTENCES)),
        tool_tokens: tool.unwrap_or(estimate(json.len(), 1 + TOOLS)),
        by_server: sentence.is_some(),
        fingerprint: first.fingerprint,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_name_a_server_and_a_value() {
        let expected = Named { name: "a".into(), value: "http://h/?x=y".into() };
        assert_eq!(named("a=http://h/?x=y"), Ok(expected));
        assert!(named("http").is_err() && named("=x").is_err() && named("a=").is_err());
    }
}
