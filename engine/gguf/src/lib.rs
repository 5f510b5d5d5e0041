//! llama.cpp's GGUF files, read as the folder that they were converted from.
//!
//! A GGUF file holds the keys of `config.json`, the tokenizer, the chat template and the weights under names of its own.
//! [`files`] gives the small files of a model folder, [`Model`] the weights under MLX's names, packed as MLX packs them.
//! Families, text and fingerprints of the engine work from these and know of no second format. Never links MLX, never
//! runs a tokenizer or a template.
//!
//! | file | contents |
//! |---|---|
//! | `reader.rs` | the header: metadata and the places of tensors, checked |
//! | `parts.rs` | models in several files |
//! | `quants.rs` | types of tensors: to floats, or to MLX's affine format; which are exact |
//! | `arch.rs` | the table of architectures: names of tensors, keys of `config.json`, what converters changed |
//! | `model.rs`, `order.rs` | `config.json` and tensors of a file; the order of their rows |
//! | `tokenizer.rs`, `pre.rs` | `tokenizer.json`; how words are split |
//! | `files.rs` | the files of the folder |
//!
//! Files may be damaged or malicious: counts and lengths are bounded, every place is checked against the
//! size of the file, and what is not supported is an error that names it.
//!
//! # Why a reader of our own
//! MLX reads GGUF too (`mlx_load_gguf`, which mlx-rs exposes as `GgufFile`). It packs Q4_0, Q4_1 and Q8_0 as this crate
//! does, and rounds all other types to f16, which quadruples the memory of Q4_K. Its checks of a header are not those that
//! a file from elsewhere needs. Crates for GGUF read the header, which is the smaller part of the work: names,
//! reorderings, packing and tokenizers would remain.

mod arch;
mod error;
pub mod files;
mod model;
mod order;
mod parts;
mod pre;
pub mod quants;
pub mod reader;
mod tokenizer;

pub use arch::family_of;
pub use error::{Error, Result};
pub use model::{Data, Floats, Form, Model, Tensor};
pub use parts::Part;
