//! What the chip and the configured model can reach: bounds by the rate at which weights are read.
//!
//! A token of one request reads all weights that it needs once, so that no server decodes faster. What a model really
//! does on this machine, `steersman bench model` measures.

use std::fmt;
use std::path::Path;

use serde::Serialize;
use steersman_engine::config::Config;
use steersman_engine::tools::machine::Chip;
use steersman_models::facts::Facts;

use crate::hub;

/// A row of the table of chips, and how this machine compares with it.
#[derive(Debug, Clone, Serialize)]
pub struct ChipReach {
    name: &'static str,
    generation: u32,
    gpu_cores: Option<u32>,
    /// Bytes a second of its memory, by its specification: of the slowest version if the number of cores is unknown.
    bytes_per_s: f64,
    /// Part of that which was measured.
    measured_part: f64,
    /// Rows of a draft that MLX multiplies with affine weights of which it reads each once.
    rows_of_a_read: usize,
}

impl ChipReach {
    /// The reach of `chip`, whose memory was measured at `read` bytes a second.
    pub fn new(chip: &Chip, gpu_cores: Option<u32>, read: f64) -> Self {
        let bytes_per_s = chip.bytes_per_s(gpu_cores);
        Self {
            name: chip.name,
            generation: chip.generation,
            gpu_cores,
            bytes_per_s,
            measured_part: read / bytes_per_s,
            rows_of_a_read: chip.rows_of_a_read(),
        }
    }
}

impl fmt::Display for ChipReach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, GPU generation {}", self.name, self.generation)?;
        if let Some(cores) = self.gpu_cores {
            write!(f, " with {cores} cores")?;
        }
        let (rate, part) = (self.bytes_per_s / 1e9, self.measured_part * 100.0);
        write!(f, ": {rate:.0} GB/s by its specification, of which {part:.0} % were measured")?;
        match self.rows_of_a_read {
            1 => write!(f, "; MLX reads all weights again for each row of a draft"),
            rows => write!(f, "; MLX reads weights once for {rows} rows of a draft"),
        }
    }
}

/// What one request of a model can reach.
#[derive(Debug, Clone, Serialize)]
pub struct ModelReach {
    name: String,
    /// Bytes of the weights that a token reads.
    token_bytes: u64,
    /// Tokens a second at the rate that was measured.
    tokens_per_s: f64,
    /// Tokens a second at the rate of the chip's specification.
    tokens_per_s_by_specification: Option<f64>,
}

impl ModelReach {
    /// The reach of the model that `config` names; `None` if it names none, or one that is not on this machine.
    pub fn of_configured(
        config: &Config,
        data_dir: &Path,
        read: f64,
        chip: Option<&ChipReach>,
    ) -> Option<Self> {
        let path = Some(&config.model.path).filter(|path| !path.is_empty())?;
        let found = hub::find_here(path, hub::room(config), data_dir).ok()?;
        let token_bytes = Facts::read(&found.folder).ok()?.token_bytes;
        Some(Self::new(found.name, token_bytes, read, chip))
    }

    fn new(name: String, token_bytes: u64, read: f64, chip: Option<&ChipReach>) -> Self {
        let tokens = |rate: f64| rate / token_bytes.max(1) as f64;
        Self {
            name,
            token_bytes,
            tokens_per_s: tokens(read),
            tokens_per_s_by_specification: chip.map(|chip| tokens(chip.bytes_per_s)),
        }
    }
}

impl fmt::Display for ModelReach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, token_bytes, tokens_per_s, tokens_per_s_by_specification } = self;
        let gb = *token_bytes as f64 / 1e9;
        write!(f, "{name}: a token reads {gb:.2} GB, at most {tokens_per_s:.1} tokens/s")?;
        match tokens_per_s_by_specification {
            Some(tokens) => write!(f, " for one request, {tokens:.1} by the chip's specification"),
            None => write!(f, " for one request"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reach_of_a_chip_follows_from_its_row() {
        let chip = Chip::named("Apple M4 Max").unwrap();
        let chip = ChipReach::new(chip, Some(40), 491.4e9);
        assert_eq!(
            chip.to_string(),
            "Apple M4 Max, GPU generation 16 with 40 cores: 546 GB/s by its specification, of which 90 % were \
             measured; MLX reads weights once for 5 rows of a draft"
        );
        let model = ModelReach::new("mine".into(), 5_000_000_000, 491.4e9, Some(&chip));
        assert_eq!(
            model.to_string(),
            "mine: a token reads 5.00 GB, at most 98.3 tokens/s for one request, 109.2 by the chip's specification"
        );
        let model = ModelReach::new("mine".into(), 5_000_000_000, 10e9, None);
        assert!(model.to_string().ends_with("at most 2.0 tokens/s for one request"), "{model}");
    }

    #[test]
    fn a_model_that_is_not_here_has_no_reach() {
        let data = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        let reach = |config: &Config| ModelReach::of_configured(config, data.path(), 1e9, None);
        assert!(reach(&config).is_none());
        config.model.path = "nobody/nothing".into();
        assert!(reach(&config).is_none());
        let folder = hub::find("", 0, data.path()).unwrap().folder;
        config.model.path = folder.display().to_string();
        let model = reach(&config).unwrap();
        assert!(model.token_bytes > 1 << 20 && model.tokens_per_s > 1.0, "{model:?}");
    }
}
