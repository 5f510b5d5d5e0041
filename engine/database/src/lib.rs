//! What the files of redb have in common: the prefix store, which may be lost, and the records of
//! policies, which may not.
//!
//! ```text
//! file.rs   whose file lies at a path, without changing it; creating it for its owner only
//! fault.rs  calls of redb, whose panics and errors become faults by what follows from them
//! aside.rs  damaged files that are set aside, at most three
//! ```
//!
//! Knows no tables, threads or budgets: each host has its own, and decides what replaces a damaged
//! file.
//!
//! # Why
//! - **[`owner`] before redb.** Opening a file for writing changes its header, and creates a
//!   database in an empty one. A file of another program must stay as it is.
//! - **[`guarded`].** redb compares checksums of pages only when it repairs a file, and otherwise
//!   panics on some damaged pages. A damaged file must not end a request.

mod aside;
mod fault;
mod file;

pub use aside::{files_set_aside, set_aside};
pub use fault::{Fault, close, guarded, patiently};
pub use file::{Owner, open_private, owner, size_on_disk, tables, with_suffix};
