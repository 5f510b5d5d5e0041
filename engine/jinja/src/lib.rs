//! Chat templates as Python's Jinja renders them.
//!
//! ```text
//! template.rs    Template: compiles and renders, within limits on instructions and on what a rendering makes
//! operators.rs   slices, `%`, comparisons and filters in place of minijinja's: patches compiled instructions
//! builtins.rs    filters, tests and methods that minijinja lacks
//! python.rs      `str` and `json.dumps` of values
//! taint.rs       which characters of a rendered prompt came with the request
//! budget.rs      how much text a rendering may make; raised.rs, its errors
//! ```
//!
//! Knows no requests, tokenizers or files: text and variables go in, text comes out.
//!
//! # Why a crate of its own
//! Models come with templates that are written for, and tested with, Jinja2 in Python; a prompt
//! that differs by one blank is another prompt. minijinja is the only Jinja for Rust that runs
//! untrusted templates within limits, and it differs from Jinja2 where published templates notice:
//! it panics when it reverses an empty list, takes `[:0:-1]` for `[::-1]`, and `%` of a text does
//! not format. Operators cannot be replaced by its interface, so [`Template`] compiles with
//! `unstable_machinery` and changes the instructions. That feature promises nothing between
//! releases: the version is exact, `minijinja = "=3.0.5"`, and this crate is the only place that a
//! new release can break. Its tests compare with what transformers rendered.
//!
//! Alternatives: rewriting the source of templates loses where no type is known (`a % b`); a fork
//! of minijinja is more code than these four files; an interpreter of our own is ten times as much.

mod budget;
mod builtins;
#[cfg(test)]
mod fuzz;
mod operators;
mod python;
mod raised;
pub mod taint;
mod template;

pub use template::{Render, RenderError, Template};
