//! The engine of Steersman: messages in, events out; no HTTP.
//!
//! A [`Request`](request::Request) enters through the [`Engine`](engine::Engine) handle and meets
//! these rooms, in this order:
//!
//! - [`text`] renders the chat template, tokenises, and turns tokens back into thoughts, answer
//!   and tool calls;
//! - [`policy`] is asked for a plan, and on events for actions;
//! - [`store`] is asked for the longest saved prefix;
//! - [`model`] computes, with the arithmetic in [`nn`], what [`cache`] remembers;
//! - [`decode`] is the loop that does all this, the one room that knows the others.
//!
//! Arrays, models, caches and Wasm instances live on the engine thread alone.

pub mod cache;
pub mod config;
pub mod decode;
pub mod engine;
pub mod error;
pub mod model;
pub mod nn;
pub mod policy;
pub mod prefix;
pub mod request;
pub mod store;
pub mod text;

pub use decode::{policies, start};
pub use engine::Engine;
pub use error::{Error, Result};
