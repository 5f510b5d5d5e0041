//! Reads files of models. A GGUF file is read as a folder: `model.gguf/config.json`.

use std::io;
use std::path::Path;

use steersman_gguf::files;

pub use steersman_files::{json, replace_private};

/// Most bytes of a file that is read as a whole. The largest tokenizers have 40 MB.
const FILE_BYTES: u64 = 256 << 20;

/// The bytes of a regular file, or of one that a GGUF file stands for. Never waits.
///
/// # Errors
/// The errors of [`steersman_files::read`] and [`files::read`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    match files::within(path) {
        Some((gguf, name)) => files::read(gguf, name),
        None => steersman_files::read(path, FILE_BYTES),
    }
}
