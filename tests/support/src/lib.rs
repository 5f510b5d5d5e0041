//! What tests of several crates share and that needs neither MLX nor the policy host.

pub mod bomb;
pub mod guest;
pub mod hostile;

use std::path::PathBuf;

/// A data folder for compiled policies, beside the programs of tests. Compiling the shipped policy `default` takes half
/// a second, and most tests of the engine start one.
///
/// All runs share it: the policy host names the files after the component, its own version, and wasmtime's version and
/// settings, and removes the least recently used ones beyond 512 MiB.
///
/// # Panics
/// If the path of this program is unknown.
pub fn shared_policies() -> PathBuf {
    let program = std::env::current_exe().expect("the program has a path");
    program.with_file_name("policies-of-tests")
}

/// A deterministic generator of numbers.
pub struct Random(pub u64);

impl Random {
    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % bound
    }

    /// One of `choices`.
    ///
    /// # Panics
    /// If there is none.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// Number of inputs of a fuzz test: `STEERSMAN_FUZZ_INPUTS`, which CI sets, or enough for a quick run.
///
/// # Panics
/// If the variable is not a number.
pub fn fuzz_inputs() -> usize {
    let set = std::env::var("STEERSMAN_FUZZ_INPUTS").ok();
    set.map_or(2_000, |count| count.parse().expect("STEERSMAN_FUZZ_INPUTS is a number"))
}
