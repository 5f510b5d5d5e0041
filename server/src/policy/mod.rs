//! `steersman policy`: what an author does with a policy.

pub mod build;
pub mod new;

use anyhow::Result;
use clap::Subcommand;

/// What to do.
#[derive(Subcommand)]
pub enum Task {
    /// Make a folder with a small policy to begin with: source, contract, golden file
    New(new::New),
    /// Build a policy to a component
    Build(build::Build),
}

/// Does it.
///
/// # Errors
/// What cannot be written or built.
pub fn run(task: Task) -> Result<()> {
    match task {
        Task::New(options) => new::run(options),
        Task::Build(options) => build::run(options),
    }
}
