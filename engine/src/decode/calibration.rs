//! The calibration file of a model: which early exits and which skipped feed-forward blocks it tolerates.
//!
//! `steersman calibrate` measures and writes it (`measure/calibrate.rs`); loading reads it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{ConfigError, Error, Result};
use steersman_files::replace_private;

/// Measurements of one model in one numeric format.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Tokens measured on.
    pub tokens: usize,
    /// How often the first 1, 2, ... layers predict the same token as the whole model.
    pub exits: Vec<f32>,
    /// The best number of layers for early-exit drafts, if any pays.
    pub exit_layers: Option<usize>,
    /// Sets of feed-forward blocks to skip, each larger by one than the previous set.
    pub skips: Vec<Skip>,
}

/// Feed-forward blocks that are skipped together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Skip {
    /// Layers of the blocks, ascending.
    pub layers: Vec<usize>,
    /// Divergence from the whole model, in nats a token.
    pub kl: f32,
}

impl Calibration {
    /// Path of the calibration file of the model with this digest.
    pub fn path(data: &Path, digest: &[u8; 32]) -> PathBuf {
        data.join("calibration").join(format!("{}.json", hex::encode(&digest[..8])))
    }

    /// Reads the file of an earlier run; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Model`] when the file exists but cannot be read.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let problem =
            |problem: String| Error::Config(ConfigError::Model { path: path.into(), problem });
        let bytes = match steersman_gguf::files::read_at(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(problem(error.to_string())),
        };
        let parsed = serde_json::from_slice(&bytes);
        Ok(Some(parsed.map_err(|e| problem(format!("{e}; run `steersman calibrate` again")))?))
    }

    /// Writes the file, for later starts.
    pub fn write(&self, path: &Path) -> Result<()> {
        let problem = |e: std::io::Error| {
            Error::Config(ConfigError::Model { path: path.into(), problem: e.to_string() })
        };
        let text = serde_json::to_string_pretty(self).expect("plain data serializes");
        replace_private(path, (text + "\n").as_bytes()).map_err(problem)
    }

    /// The largest set of blocks that costs at most `kl` nats a token.
    pub fn skip_within(&self, kl: f32) -> Option<&Skip> {
        self.skips.iter().rev().find(|skip| skip.kl <= kl)
    }
}
