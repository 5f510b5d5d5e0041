//! The GPU that MLX computes on: what it reports, which chip it is (`chip.rs`), and what stays in memory for it
//! (`wired.rs`).
//!
//! Every choice is a function of what MLX and the system report, so that those of a Mac are tested on any machine with
//! recorded reports.

pub mod chip;
pub mod wired;

use std::ffi::CStr;

/// Least part of the memory that is left to the system and to other programs on a machine whose GPU shares it: one of
/// so many parts, or [`SYSTEM_BYTES`] if that is less.
const SYSTEM_PART: u64 = 8;

/// The most that is left to them.
const SYSTEM_BYTES: u64 = 4 << 30;

/// What MLX reports of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name: `Apple M4 Max`.
    pub name: String,
    /// Its architecture: `applegpu_g16s`.
    pub architecture: String,
    /// Bytes of the machine's memory, if the GPU shares it.
    pub memory_bytes: Option<u64>,
    /// Bytes that Metal recommends as the most for all buffers of a process: about two thirds of a small memory and three
    /// quarters of a large one, unless the owner of the machine allows more.
    pub recommended_bytes: Option<u64>,
}

impl DeviceInfo {
    /// What MLX reports of its GPU; `None` if it has none.
    pub fn of_gpu() -> Option<Self> {
        Self::read(mlx_sys::gpu_text, mlx_sys::gpu_number)
    }

    /// A report by its keys.
    fn read(
        text: impl Fn(&CStr) -> Option<String>,
        number: impl Fn(&CStr) -> Option<u64>,
    ) -> Option<Self> {
        Some(Self {
            name: text(c"device_name")?,
            architecture: text(c"architecture").unwrap_or_default(),
            memory_bytes: number(c"memory_size"),
            recommended_bytes: number(c"max_recommended_working_set_size"),
        })
    }

    /// Most bytes that may be wired if arrays may take `limit`: MLX refuses more than Metal recommends. 0 on devices that
    /// wire nothing.
    pub fn wired_bytes(&self, limit: u64) -> u64 {
        self.recommended_bytes.map_or(0, |recommended| limit.min(recommended))
    }
}

/// Most bytes of arrays on this machine, and what sets this limit. `mlx` is MLX's own limit: a part of the memory of a
/// GPU or of the machine; on a Mac 1.5 times what Metal recommends or 95 % of the memory, with which other programs
/// would be paged out.
pub fn array_limit(mlx: u64, info: Option<&DeviceInfo>) -> (u64, &'static str) {
    let mut limits = vec![(mlx, "the machine's memory")];
    if let Some(DeviceInfo { memory_bytes, recommended_bytes, .. }) = info {
        limits.extend(recommended_bytes.map(|bytes| (bytes, "the GPU's recommended working set")));
        // A recommendation that was raised by hand may be all of the memory.
        limits.extend(memory_bytes.zip(*recommended_bytes).map(|(all, _)| {
            (all - SYSTEM_BYTES.min(all / SYSTEM_PART), "what the system and other programs need")
        }));
    }
    limits.into_iter().min().expect("there is at least one limit")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// What MLX reports on Macs: name, architecture, memory, and what Metal recommends.
    pub fn recorded(name: &str, architecture: &str, memory: u64, recommended: u64) -> DeviceInfo {
        let text = |key: &CStr| match key.to_str().unwrap() {
            "device_name" => Some(name.to_owned()),
            "architecture" => Some(architecture.to_owned()),
            _ => None,
        };
        let number = |key: &CStr| match key.to_str().unwrap() {
            "memory_size" => Some(memory),
            "max_recommended_working_set_size" => Some(recommended),
            _ => None,
        };
        DeviceInfo::read(text, number).unwrap()
    }

    /// MLX's own limit on a Mac.
    fn limit_of_mlx(memory: u64, recommended: u64) -> u64 {
        (memory / 100 * 95).min(recommended / 2 * 3)
    }

    /// Before, 16 GB of memory had 15.2 GB for arrays, and everything else was paged out.
    #[test]
    fn arrays_take_what_metal_recommends() {
        for (gib, recommended, expected, set_by) in [
            (8, 5_726_633_984, 5_726_633_984, "the GPU's recommended working set"),
            (16, 11_453_251_584, 11_453_251_584, "the GPU's recommended working set"),
            (128, 103_079_215_104, 103_079_215_104, "the GPU's recommended working set"),
            // `iogpu.wired_limit_mb` was set by the owner.
            (128, 120 * GIB, 120 * GIB, "the GPU's recommended working set"),
            (128, 127 * GIB, 128 * GIB / 100 * 95, "the machine's memory"),
            (16, 15 * GIB, 14 * GIB, "what the system and other programs need"),
        ] {
            let info = recorded("Apple M4", "applegpu_g16g", gib * GIB, recommended);
            let mlx = limit_of_mlx(gib * GIB, recommended);
            assert_eq!(array_limit(mlx, Some(&info)), (expected, set_by), "{gib} {recommended}");
            assert_eq!(info.wired_bytes(expected), expected.min(recommended));
        }
    }

    #[test]
    fn other_machines_keep_the_limit_of_mlx() {
        let cuda = DeviceInfo { name: "NVIDIA H200".into(), ..DeviceInfo::default() };
        for info in [None, Some(&cuda)] {
            assert_eq!(array_limit(99 * GIB, info), (99 * GIB, "the machine's memory"));
        }
        assert_eq!(cuda.wired_bytes(99 * GIB), 0);
    }

    #[test]
    fn the_gpu_of_this_machine_is_read_if_there_is_one() {
        let info = DeviceInfo::of_gpu();
        assert_eq!(info.is_some(), mlx_sys::gpu_name().is_some(), "{info:?}");
    }
}
