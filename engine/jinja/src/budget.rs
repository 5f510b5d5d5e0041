//! The budget of a rendering: how much text and how many lists it may make.
//!
//! # Why
//! Fuel bounds the number of instructions, and one instruction can double a text. Live memory
//! cannot be measured from here; what a rendering makes bounds it from above.

use std::cell::Cell;
use std::fmt::Write;

use minijinja::{Error, ErrorKind};

/// Bytes that one rendering may make in texts and lists, released ones included. The heaviest
/// known template makes a hundredth of it for 4,000 messages.
const BUDGET: usize = if cfg!(test) { 64 << 20 } else { 2 << 30 };

/// Most columns of an indent, a field of `format`, or a batch.
const WIDTH: usize = 10_000;

thread_local! {
    /// What is left of the budget of the rendering on this thread.
    static LEFT: Cell<usize> = const { Cell::new(BUDGET) };
}

/// Starts the budget of a rendering on this thread.
pub fn start() {
    LEFT.set(BUDGET);
}

/// Charges `bytes` to the budget.
pub fn charge(bytes: usize) -> Result<(), Error> {
    match LEFT.get().checked_sub(bytes) {
        Some(left) => {
            LEFT.set(left);
            Ok(())
        }
        None => Err(too_large()),
    }
}

/// What is left of the budget.
pub fn left() -> usize {
    LEFT.get()
}

/// The error of a rendering beyond its budget.
pub fn too_large() -> Error {
    let message = format!("the template makes more than {} MiB of text and lists", BUDGET >> 20);
    Error::new(ErrorKind::InvalidOperation, message)
}

/// `width`, if `filter` accepts it.
pub fn within(width: usize, filter: &str) -> Result<usize, Error> {
    if width <= WIDTH {
        return Ok(width);
    }
    Err(invalid(&format!("{filter}: {width} is more than {WIDTH}")))
}

/// A text that ends where the budget does.
pub struct Bounded {
    pub text: String,
    left: usize,
}

impl Bounded {
    pub fn new() -> Self {
        Self { text: String::new(), left: left() }
    }
}

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.left = self.left.checked_sub(text.len()).ok_or(std::fmt::Error)?;
        self.text.push_str(text);
        Ok(())
    }
}

/// An operation that fails with this message.
pub fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.to_string())
}
