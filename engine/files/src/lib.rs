//! Files whose names or contents others chose: the only way from such a name to a path, reads that
//! neither block nor grow without a limit, and writes that replace a file as a whole.
//!
//! ```text
//! name.rs     FileName, FilePath: text of a hub, a request or a file, checked before it becomes part of a path
//! read.rs     regular files only, within a limit, without waiting
//! create.rs   new files and folders: for whom they are, and whose
//! replace.rs  atomic replacement of a file, and which writes are durable
//! json.rs     JSON as Python writes it
//! ```
//!
//! Knows nothing of models, requests and hubs.

mod create;
mod json;
mod name;
mod read;
mod replace;

pub use self::create::{create_private_folder, give_to_owner_of_parent, open_lock, open_private};
pub use self::json::json;
pub use self::name::{FileName, FilePath, NameError};
pub use self::read::{open, read, read_text};
pub use self::replace::{Replacement, remove, replace, replace_losable, replace_private};
