//! The processor: its name, and the instructions of our own kernels for it.

use std::fs;

use steersman_cpu_kernels::Isa;

/// The processor's name, or its architecture where the system does not tell.
pub fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    named("model name")
        .or_else(|| sysctl("machdep.cpu.brand_string"))
        .unwrap_or_else(|| std::env::consts::ARCH.into())
}

/// A value of macOS.
pub fn sysctl(name: &str) -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    output("/usr/sbin/sysctl", &["-n", name])
}

/// What macOS registers of the GPU of an Apple chip, as text.
pub fn gpu_registry() -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    output("/usr/sbin/ioreg", &["-rc", "AGXAccelerator", "-k", "gpu-core-count", "-d1"])
}

/// What a program prints, if that is not empty.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = std::process::Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

/// Name of the instructions of our own kernels.
pub fn isa_name(isa: Isa) -> &'static str {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Vnni => "AVX-512 VNNI",
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => "AVX-512",
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => "AVX2",
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => "NEON",
        Isa::Portable => "portable",
    }
}
