//! The machine profile: what passes and drafts of one model cost on this machine.
//!
//! [`Decoder::load`](super::Decoder::load) fills in what is missing by measuring, which takes about two seconds on a CPU.
//! So the result is saved in the data folder, in a file for each [`Key`], and a later start reads it. What is learned of
//! steps and drafts while requests are served is saved when the engine ends. A file that cannot be read, or has another
//! key, is measured again and replaced.
//!
//! The costs of reading saved state are not part of it: they depend on the disk of the prefix store (`prefix/cost.rs`).

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use steersman_cpu_kernels::{Isa, max_threads};

use super::threads;
use crate::config::{DEPTH, MachineCosts, SpeculationConfig};
use crate::draft::{Costs, ROWS};
use crate::processor::{isa_name, processor};
use crate::schedule::memory::PassBytes;
use crate::schedule::plan::PassCosts;
use steersman_files::replace_private;
use steersman_gguf::files;

/// Version of the file's format and of what is measured.
const VERSION: u32 = 1;

/// Most bytes of a file.
const FILE_BYTES: u64 = 64 << 10;

/// What passes and drafts of one model cost on one machine. `None` has not been measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineProfile {
    /// Threads of the matrix products.
    pub threads: Option<threads::Counts>,
    /// Seconds of steps and drafts.
    pub costs: Option<Costs>,
    /// Seconds of prefill.
    pub prefill: Option<PassCosts>,
    /// Bytes of a pass.
    pub pass_bytes: Option<PassBytes>,
}

impl MachineProfile {
    /// The profile of [`MachineCosts::Fixed`], in which drafts pay. Memory is measured all the same: it takes
    /// milliseconds, and tests of limits need its bytes.
    fn fixed() -> Self {
        let passes = std::array::from_fn(|more| 0.01 + 0.001 * more as f32);
        let mut costs = Costs::of(0.01, &passes);
        for draft in &mut costs.draft {
            (draft.first, draft.more) = (0.001, 0.0005);
        }
        let prefill = PassCosts::measured([(8, 0.012), (32, 0.018)]);
        Self {
            threads: Some([1; threads::ROWS.len()]),
            costs: Some(costs),
            prefill: Some(prefill),
            pass_bytes: None,
        }
    }

    /// The profile that was saved under `key` in the folder `data`; an empty one if there is none.
    fn read(data: &Path, key: &Key) -> Self {
        let path = key.path(data);
        let text = match read_text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Self::default(),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "machine profile unreadable, measuring again");
                return Self::default();
            }
        };
        match serde_json::from_str::<Saved>(&text) {
            Ok(saved) if saved.key == *key && saved.profile.is_sound() => saved.profile,
            _ => {
                tracing::warn!(path = %path.display(), "machine profile invalid, measuring again");
                Self::default()
            }
        }
    }

    /// Saves the profile under `key` in the folder `data`. A failure costs the time of measuring at the next start.
    fn save(&self, data: &Path, key: &Key) {
        let path = key.path(data);
        let saved = Saved { key: key.clone(), profile: self.clone() };
        let text = serde_json::to_string_pretty(&saved).expect("plain data serializes");
        if let Err(error) = replace_private(&path, text.as_bytes()) {
            tracing::warn!(path = %path.display(), %error, "machine profile not saved");
        }
    }

    /// Whether all numbers are possible: a file can be damaged, or written by hand.
    fn is_sound(&self) -> bool {
        let most = max_threads();
        self.threads.is_none_or(|counts| counts.iter().all(|count| (1..=most).contains(count)))
            && self.costs.as_ref().is_none_or(Costs::is_sound)
            && self.prefill.as_ref().is_none_or(PassCosts::is_sound)
            && self.pass_bytes.as_ref().is_none_or(PassBytes::is_sound)
    }
}

/// The machine profile of one engine, and where it is saved.
pub struct MachineProfileFile {
    profile: MachineProfile,
    /// The data folder and the key; `None` saves nothing.
    place: Option<(PathBuf, Key)>,
}

impl MachineProfileFile {
    /// The profile as `costs` says, saved under `key` in the folder `data`.
    pub fn open(costs: MachineCosts, data: &Path, key: impl FnOnce() -> Key) -> Self {
        match costs {
            MachineCosts::Fixed => Self { profile: MachineProfile::fixed(), place: None },
            MachineCosts::Measured => {
                let key = key();
                let profile = MachineProfile::read(data, &key);
                Self { profile, place: Some((data.into(), key)) }
            }
        }
    }

    /// The profile so far.
    pub fn profile(&self) -> MachineProfile {
        self.profile.clone()
    }

    /// Replaces the profile after loading.
    pub fn measured(&mut self, profile: MachineProfile) {
        if profile != self.profile {
            self.profile = profile;
            self.save();
        }
    }

    /// Saves the costs that were learned of requests.
    pub fn learned(&mut self, costs: Option<Costs>) {
        if costs.is_some_and(|costs| costs.is_sound()) && costs != self.profile.costs {
            self.profile.costs = costs;
            self.save();
        }
    }

    fn save(&self) {
        if let Some((data, key)) = &self.place {
            self.profile.save(data, key);
        }
    }
}

/// What a machine profile depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    version: u32,
    program: String,
    /// The GPU, or the processor with the instructions of our own kernels.
    device: String,
    cores: usize,
    /// Digest of weights, number format and text, in hexadecimal.
    model: String,
    /// Kernels and drafters.
    settings: String,
}

impl Key {
    /// The key of the model with the fingerprint `model`, computed with `kernels`.
    pub fn new(
        model: &[u8; 32],
        on_cpu: bool,
        kernels: &str,
        speculation: &SpeculationConfig,
    ) -> Self {
        let device = match mlx_sys::gpu_name() {
            Some(gpu) if !on_cpu => gpu,
            _ => format!("{} {}", processor(), isa_name(Isa::best())),
        };
        Self {
            version: VERSION,
            program: env!("CARGO_PKG_VERSION").into(),
            device,
            cores: max_threads(),
            model: hex::encode(model),
            settings: format!("{kernels}, depth {DEPTH}, {ROWS} rows, {speculation:?}"),
        }
    }

    fn path(&self, data: &Path) -> PathBuf {
        let text = serde_json::to_string(self).expect("plain data serializes");
        let digest = Sha256::digest(text.as_bytes());
        data.join("machine").join(format!("{}.json", hex::encode(&digest[..8])))
    }
}

#[derive(Serialize, Deserialize)]
struct Saved {
    key: Key,
    profile: MachineProfile,
}

fn read_text(path: &Path) -> std::io::Result<String> {
    if fs::metadata(path)?.len() > FILE_BYTES {
        return Err(std::io::Error::other(format!("the file has more than {FILE_BYTES} bytes")));
    }
    String::from_utf8(files::read_at(path)?).map_err(std::io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(kernels: &str) -> Key {
        Key::new(&[7; 32], true, kernels, &SpeculationConfig::default())
    }

    #[test]
    fn a_saved_machine_profile_is_read_again() {
        let data = tempfile::tempdir().unwrap();
        let profile = MachineProfile::fixed();
        profile.save(data.path(), &key("own"));
        assert_eq!(MachineProfile::read(data.path(), &key("own")), profile);
        // Other kernels have other costs.
        assert_eq!(MachineProfile::read(data.path(), &key("mlx")), MachineProfile::default());
    }

    /// A file is never trusted: threads beyond the cores would make each product slow, and a negative time would make
    /// each draft pay.
    #[test]
    fn a_damaged_machine_profile_is_measured_again() {
        let data = tempfile::tempdir().unwrap();
        let key = key("own");
        let mut costly = MachineProfile::fixed();
        costly.threads = Some([100_000; threads::ROWS.len()]);
        let mut negative = MachineProfile::fixed();
        negative.costs.as_mut().unwrap().draft[0].first = -1.0;
        for profile in [costly, negative] {
            profile.save(data.path(), &key);
            assert_eq!(MachineProfile::read(data.path(), &key), MachineProfile::default());
        }
        MachineProfile::fixed().save(data.path(), &key);
        let path = key.path(data.path());
        let text = fs::read_to_string(&path).unwrap();
        for damaged in [&text[..text.len() / 2], "", "{}", &text.replace(":", ";")] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(MachineProfile::read(data.path(), &key), MachineProfile::default());
        }
    }
}
