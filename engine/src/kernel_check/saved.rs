//! The results of the check of a device, in a file of the data folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use steersman_cpu_kernels::Isa;

use super::Outcomes;
use crate::config::ModelConfig;
use crate::processor::{isa_name, processor};
use steersman_files::replace_private;
use steersman_gguf::files;

/// Version of the file's format and of the checks.
const VERSION: u32 = 2;

/// Most bytes of a file with results.
const FILE_BYTES: u64 = 64 << 10;

/// Where the results of a device are.
pub struct File {
    pub(super) path: PathBuf,
    key: Key,
}

/// What results depend on.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Key {
    version: u32,
    /// Bytes and time of the program's file, which has the kernels: a build has other ones.
    program: [u64; 2],
    /// The GPU and its architecture, or the processor with the instructions of the kernels.
    device: String,
    settings: String,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    key: Key,
    outcomes: Outcomes,
}

impl File {
    /// The file of the device that `config` uses, in the folder `data`.
    pub fn new(config: &ModelConfig, on_cpu: bool, data: &Path) -> Self {
        let program = std::env::current_exe().and_then(fs::metadata).ok();
        let time = program.as_ref().and_then(|file| file.modified().ok());
        let time = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let device = match mlx_sys::gpu_name() {
            Some(gpu) if !on_cpu => {
                format!("{gpu} {}", mlx_sys::gpu_text(c"architecture").unwrap_or_default())
            }
            _ => format!("{} {}", processor(), isa_name(Isa::best())),
        };
        let key = Key {
            version: VERSION,
            program: [
                program.map_or(0, |file| file.len()),
                time.map_or(0, |time| time.as_nanos() as u64),
            ],
            device,
            settings: format!(
                "{:?} {:?} MLX {}",
                config.kernels,
                config.compile,
                mlx_sys::version()
            ),
        };
        let text = serde_json::to_string(&key).expect("plain data serializes");
        let digest = Sha256::digest(text.as_bytes());
        let name = format!("{}.json", hex::encode(&digest[..8]));
        Self { path: data.join("kernel-checks").join(name), key }
    }

    /// The results; none if there is no sound file.
    pub fn read(&self) -> Outcomes {
        let is_small = fs::metadata(&self.path).is_ok_and(|file| file.len() <= FILE_BYTES);
        let text =
            if is_small { files::read_at(&self.path).unwrap_or_default() } else { Vec::new() };
        match serde_json::from_slice::<Saved>(&text) {
            Ok(saved) if saved.key == self.key => saved.outcomes,
            _ => Outcomes::new(),
        }
    }

    /// Saves the results. A failure costs the time of the checks at the next start.
    pub fn write(&self, outcomes: &Outcomes) {
        #[derive(Serialize)]
        struct Saving<'a> {
            key: &'a Key,
            outcomes: &'a Outcomes,
        }
        let saving = Saving { key: &self.key, outcomes };
        let text = serde_json::to_string_pretty(&saving).expect("plain data serializes");
        if let Err(error) = replace_private(&self.path, text.as_bytes()) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "results of the kernels' check not saved");
        }
    }
}
