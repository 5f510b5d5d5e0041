//! The table of Apple's chips: what a chip can reach, and what the engine chooses by it before anything is measured.
//!
//! Rates of memory and numbers of cores are those of Apple's specifications; row limits are those of MLX 0.32.2
//! (`mlx/backend/metal/quantized.cpp`). No row was measured: the machine profile (`decode/machine_profile.rs`) has what
//! this machine really takes.

use super::DeviceInfo;

/// A chip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chip {
    /// Its name, as `sysctl machdep.cpu.brand_string` and Metal tell it.
    pub name: &'static str,
    /// Generation of the GPU as in its architecture: `applegpu_g16s` is of generation 16.
    pub generation: u32,
    /// GPU cores of the versions of the chip, ascending, and GB/s of the memory of each.
    pub versions: &'static [(u32, u32)],
}

const fn chip(name: &'static str, generation: u32, versions: &'static [(u32, u32)]) -> Chip {
    Chip { name, generation, versions }
}

/// All chips. There is no Ultra of the M4 and M5.
pub const CHIPS: &[Chip] = &[
    chip("Apple M1", 13, &[(7, 68), (8, 68)]),
    chip("Apple M1 Pro", 13, &[(14, 200), (16, 200)]),
    chip("Apple M1 Max", 13, &[(24, 400), (32, 400)]),
    chip("Apple M1 Ultra", 13, &[(48, 800), (64, 800)]),
    chip("Apple M2", 14, &[(8, 100), (10, 100)]),
    chip("Apple M2 Pro", 14, &[(16, 200), (19, 200)]),
    chip("Apple M2 Max", 14, &[(30, 400), (38, 400)]),
    chip("Apple M2 Ultra", 14, &[(60, 800), (76, 800)]),
    chip("Apple M3", 15, &[(8, 100), (10, 100)]),
    chip("Apple M3 Pro", 15, &[(14, 150), (18, 150)]),
    chip("Apple M3 Max", 15, &[(30, 300), (40, 400)]),
    chip("Apple M3 Ultra", 15, &[(60, 819), (80, 819)]),
    chip("Apple M4", 16, &[(8, 120), (10, 120)]),
    chip("Apple M4 Pro", 16, &[(16, 273), (20, 273)]),
    chip("Apple M4 Max", 16, &[(32, 410), (40, 546)]),
    chip("Apple M5", 17, &[(8, 153), (10, 153)]),
    chip("Apple M5 Pro", 17, &[(16, 307), (20, 307)]),
    chip("Apple M5 Max", 17, &[(32, 460), (40, 614)]),
];

/// The first generation whose cores have units for products of matrices (M5).
const WITH_MATRIX_UNITS: u32 = 17;

/// The first generation for which MLX multiplies a few rows with packed weights that it reads once (M3).
const READS_ONCE: u32 = 15;

/// Requests that run at the same time on a GPU without matrix units: with 4-bit weights, products of about as many rows
/// take as long as reading the weights (14 to 16 on M1 to M4 by Apple's figures). With more, each waits longer, and all
/// together make no more tokens a second.
const RUNNING: usize = 16;

impl Chip {
    /// The chip of a device or processor with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        CHIPS.iter().find(|chip| chip.name == name.trim())
    }

    /// The chip that `info` reports.
    pub fn of(info: &DeviceInfo) -> Option<&'static Self> {
        Self::named(&info.name)
    }

    /// The chip of the GPU that MLX computes on.
    pub fn of_gpu() -> Option<&'static Self> {
        Self::of(&DeviceInfo::of_gpu()?)
    }

    /// Bytes a second of the memory of the version with `gpu_cores`; of the slowest one if their number is unknown.
    pub fn bytes_per_s(&self, gpu_cores: Option<u32>) -> f64 {
        let version = self.versions.iter().find(|(cores, _)| Some(*cores) == gpu_cores);
        let (_, rate) = version.unwrap_or(&self.versions[0]);
        f64::from(*rate) * 1e9
    }

    /// Rows from which on MLX multiplies with a packed matrix [`outputs`, `inputs`] by tiles instead of row by row.
    pub fn tile_rows(&self, outputs: usize, inputs: usize) -> usize {
        let largest = outputs.max(inputs);
        let is_ultra = self.name.ends_with("Ultra");
        let [small, medium, large] = match self.generation {
            WITH_MATRIX_UNITS.. => [33, 25, 13],
            READS_ONCE.. => [13, 15, 13],
            _ if is_ultra => [32, 18, 12],
            _ => [14, 10, 6],
        };
        match largest {
            0..=2048 => small,
            2049..=4096 => medium,
            _ => large,
        }
    }

    /// Rows that MLX multiplies with affine packed weights of which it reads each once: drafts of more tokens cost as
    /// much as so many more steps.
    pub fn rows_of_a_read(&self) -> usize {
        if self.generation >= READS_ONCE { 5 } else { 1 }
    }

    /// Requests that run at the same time if the configuration sets no number, of at most `most`.
    pub fn max_running(&self, most: usize) -> usize {
        if self.generation >= WITH_MATRIX_UNITS { most } else { RUNNING.min(most) }
    }
}

/// The number of GPU cores in the output of `ioreg -rc AGXAccelerator -k gpu-core-count -d1`.
pub fn gpu_cores(ioreg: &str) -> Option<u32> {
    let line = ioreg.lines().find(|line| line.contains("\"gpu-core-count\""))?;
    line.split_once('=')?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::tests::recorded;
    use super::*;

    /// The table against what a Mac reports: the generation stands in the architecture as well.
    #[test]
    fn chips_are_found_by_what_macs_report() {
        for (name, architecture, cores, rate) in [
            ("Apple M1", "applegpu_g13g", Some(8), 68e9),
            ("Apple M1 Max", "applegpu_g13s", Some(32), 400e9),
            ("Apple M2 Ultra", "applegpu_g14d", Some(76), 800e9),
            ("Apple M3 Max", "applegpu_g15s", Some(40), 400e9),
            ("Apple M3 Max", "applegpu_g15s", Some(30), 300e9),
            ("Apple M4 Max", "applegpu_g16s", None, 410e9),
            ("Apple M5", "applegpu_g17g", Some(10), 153e9),
        ] {
            let info = recorded(name, architecture, 32 << 30, 22 << 30);
            let chip = Chip::of(&info).unwrap();
            let generation: String =
                info.architecture.chars().filter(char::is_ascii_digit).collect();
            assert_eq!(chip.generation.to_string(), generation, "{name}");
            assert_eq!(chip.bytes_per_s(cores), rate, "{name} {cores:?}");
        }
        for unknown in ["Apple M9 Max", "Apple", "NVIDIA H200", "Apple M1 Maximum", ""] {
            assert_eq!(Chip::named(unknown), None, "{unknown}");
        }
        assert_eq!(Chip::named("Apple M1\n").map(|chip| chip.name), Some("Apple M1"));
    }

    #[test]
    fn rows_of_the_table_are_in_order() {
        for chip in CHIPS {
            assert!((13..=17).contains(&chip.generation), "{chip:?}");
            let [(few, slow), (many, fast)] = chip.versions[..] else { panic!("{chip:?}") };
            assert!(few < many && slow <= fast, "{chip:?}");
            // Each generation has the number of its chip.
            let number = chip.generation - 12;
            assert!(chip.name.starts_with(&format!("Apple M{number}")), "{chip:?}");
        }
        let names: std::collections::BTreeSet<_> = CHIPS.iter().map(|chip| chip.name).collect();
        assert_eq!(names.len(), CHIPS.len());
    }

    #[test]
    fn row_limits_are_those_of_mlx() {
        let limits = |name| {
            let chip = Chip::named(name).unwrap();
            [(2048, 1024), (4096, 4096), (1024, 12_288)].map(|(o, i)| chip.tile_rows(o, i))
        };
        assert_eq!(limits("Apple M1 Pro"), [14, 10, 6]);
        assert_eq!(limits("Apple M2 Ultra"), [32, 18, 12]);
        assert_eq!(limits("Apple M3 Ultra"), [13, 15, 13]);
        assert_eq!(limits("Apple M5 Max"), [33, 25, 13]);
        let rows = |name| Chip::named(name).unwrap().rows_of_a_read();
        assert_eq!(["Apple M1", "Apple M2 Max", "Apple M3", "Apple M5"].map(rows), [1, 1, 5, 5]);
        let running = |name| Chip::named(name).unwrap().max_running(32);
        assert_eq!(["Apple M1", "Apple M4 Max", "Apple M5"].map(running), [16, 16, 32]);
    }

    #[test]
    fn gpu_cores_are_read_from_the_registry() {
        let text = "+-o AGXAcceleratorG16X  <class AGXAcceleratorG16X, id 0x1000003b1, registered>\n    {\n      \
                    \"gpu-core-count\" = 40\n      \"model\" = \"Apple M4 Max\"\n    }\n";
        assert_eq!(gpu_cores(text), Some(40));
        assert_eq!(gpu_cores("\"gpu-core-count\" = many"), None);
        assert_eq!(gpu_cores(""), None);
    }
}
