//! Models that other servers compute: a request goes in, events come out, as from an engine, with policies in
//! between.
//!
//! ```text
//! config.rs        `[upstreams.NAME]`: address, key, models, limits, what it can
//! capability.rs    what kinds of servers can; models.rs asks a server for its kind and its models
//! client.rs        HTTP with deadlines; fault.rs says what went wrong, without the key; sse.rs reads streams
//! ask.rs           what a request asks an upstream for; memory.rs has what the upstream wants back with it
//! openai/          requests and replies of OpenAI's chat completions
//! anthropic/       those of Anthropic's messages
//! piece.rs         a part of a reply, in whichever protocol it came; stream.rs sends a request and reads its pieces
//! segment.rs       texts in pieces about as long as tokens, for loops, budgets and policies
//! prepare.rs       policies, plan and limits of a request
//! reply.rs         what the client has of a reply
//! steer.rs         what policies do to it
//! run.rs           one request, from its queue to its last event; tally.rs counts its tokens
//! gate.rs          requests at a time, tokens a day, pauses; breaker.rs: an upstream that keeps failing
//! usage.rs         tokens by model, profile and key
//! upstream.rs      Upstream, UpstreamModel: the handles; submit.rs begins requests, or refuses them
//! ```
//!
//! A reply is always streamed, whatever the client asked for: one path, with a deadline between pieces.
//! An action of a policy that changes what was written cuts the stream, and another request continues it, if the
//! upstream can continue a message of the assistant.
//!
//! The crate knows neither the server's protocols nor the engine, and links no MLX.

mod anthropic;
mod ask;
mod breaker;
mod capability;
mod client;
mod config;
mod fault;
mod gate;
mod hooks;
mod memory;
mod models;
mod openai;
mod piece;
mod prepare;
mod reply;
mod run;
mod segment;
mod sse;
mod steer;
mod stream;
mod submit;
mod tally;
#[cfg(test)]
mod tests;
mod upstream;
mod usage;

pub use breaker::State as BreakerState;
pub use capability::{Capabilities, CapabilityConfig, Continues, FormKind, Kind, ReasoningField};
pub use config::{Protocol, UpstreamConfig, WithoutContinuation, is_upstream_of};
pub use upstream::{Report, Upstream, UpstreamModel};
pub use usage::{Use, Used};
