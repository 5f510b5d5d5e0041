//! What operators are told of policies: plain data, without a component.

use std::path::PathBuf;

use super::super::breaker::Health;
use super::versions::{Kept, Origin};

/// What is in force, and what kept something else from being.
#[derive(Debug, Clone)]
pub struct Report {
    /// By name.
    pub policies: Vec<PolicyReport>,
    /// Parameters that come from files.
    pub params: Vec<ParamReport>,
}

/// One policy.
#[derive(Debug, Clone)]
pub struct PolicyReport {
    /// Its name.
    pub name: String,
    /// SHA-256 of the component that runs, in hex.
    pub sha256: String,
    /// Version of the contract that it speaks.
    pub contract: String,
    /// How it came.
    pub origin: Origin,
    /// Where the next one is looked for; `None` where there is no such place.
    pub file: Option<PathBuf>,
    /// When it came into force, in seconds since 1970.
    pub since: u64,
    /// Size of the component.
    pub bytes: usize,
    /// The hooks that it exports.
    pub hooks: Vec<String>,
    /// The interfaces that it imports functions of.
    pub imports: Vec<String>,
    /// The profiles that name it.
    pub profiles: Vec<Use>,
    /// How its requests end.
    pub health: Health,
    /// What last kept another version from running.
    pub problem: Option<Problem>,
    /// Versions that are kept, newest first, without the one that runs.
    pub earlier: Vec<Kept>,
}

/// That a profile names a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// The profile.
    pub profile: String,
    /// Where in its chain, from 0; shadows come behind those that decide.
    pub position: usize,
    /// Whether it decides nothing there.
    pub shadow: bool,
}

/// Something that went wrong and changed nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// When, in seconds since 1970.
    pub at: u64,
    /// What.
    pub what: String,
}

/// A parameter that comes from a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamReport {
    /// The profile.
    pub profile: String,
    /// The parameter.
    pub param: String,
    /// The file.
    pub file: PathBuf,
    /// Why what is in force is not what the file holds now.
    pub problem: Option<Problem>,
}

/// What came of an installation or a rollback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The policy.
    pub policy: String,
    /// SHA-256 of what runs now, in hex.
    pub sha256: String,
    /// That of what ran before; `None` where it is the same.
    pub replaced: Option<String>,
}
