//! `steersman chat` and `steersman run`: clients of a running server, over OpenAI's chat completions.
//!
//! ```text
//! client.rs    HTTP: what answers, models, and the pieces of a streamed reply
//! session.rs   the conversation, and the commands of the chat
//! screen.rs    prints replies: reasoning dimmed or folded, speed
//! terminal.rs  `chat`: reads lines, Ctrl-C stops a reply
//! once.rs      `run`: one prompt, for pipes
//! ```
//!
//! The crate links no MLX and knows no engine: `steersman` chooses the server, perhaps one in its own process, which is
//! asked over HTTP like any other.

mod client;
mod once;
mod screen;
mod session;
mod terminal;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

pub use client::{Client, End, Piece, Presence, Refused, Reply, url};
pub use once::{is_prompted, run};
pub use screen::Screen;
pub use session::{Command, Session};
pub use terminal::chat;

/// Where the server is.
#[derive(Debug, Clone, Default, Args)]
pub struct Server {
    /// Address of a running server, for instance 127.0.0.1:11436 [default: the server that runs at the
    /// configured address, if it has the model, or else one in this process]
    #[arg(long, value_name = "URL", env = "STEERSMAN_URL")]
    pub url: Option<String>,
    /// A key of that server [default: the first of server.api_keys in the configuration]
    #[arg(long, value_name = "KEY", env = "STEERSMAN_API_KEY", hide_env_values = true)]
    pub key: Option<String>,
    /// Load the model in this process, whatever server runs
    #[arg(long)]
    pub local: bool,
}

/// Options of both commands.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// System text
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Profile that steers the replies
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    /// Whether the model reasons: on, off, or auto (the policy decides)
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub think: Think,
    /// Maximum number of tokens of an answer; reasoning does not count
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub max_tokens: Option<u32>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: Option<f32>,
}

/// The number in `text`. The parser of Rust says "invalid float literal".
fn temperature(text: &str) -> Result<f32, String> {
    let number = text.parse().ok().filter(|number| (0.0..=2.0).contains(number));
    number.ok_or_else(|| "it must be a number from 0 to 2".into())
}

/// Options of `run` only.
#[derive(Debug, Clone, Default, Args)]
pub struct Once {
    /// The prompt, whose words need no quotes; text that is piped in goes before it. Without one, a chat begins on a terminal;
    /// `-` reads a prompt there
    pub prompt: Vec<String>,
    /// File with a JSON schema that the answer follows
    #[arg(long, value_name = "FILE")]
    pub json_schema: Option<PathBuf>,
    /// Print the reasoning to stderr
    #[arg(long)]
    pub reasoning: bool,
}

/// Whether the model reasons.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Think {
    /// The policy decides.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Think {
    /// The name that options and commands use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
    }
}
