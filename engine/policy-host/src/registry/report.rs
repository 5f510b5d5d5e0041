//! Reports for operators: plain data, without components.

use std::path::PathBuf;

use super::history::{HistoryEntry, Origin};
use crate::breaker::Health;

/// All policies and parameters from files.
#[derive(Debug, Clone)]
pub struct Report {
    /// Sorted by name.
    pub policies: Vec<PolicyReport>,
    /// Parameters from files, and others that have a problem.
    pub params: Vec<ParamReport>,
}

/// One policy.
#[derive(Debug, Clone)]
pub struct PolicyReport {
    /// Its name.
    pub name: String,
    /// SHA-256 of the active version, in hex; empty if no version compiled at the start.
    pub sha256: String,
    /// Version of the contract for which it was built; that of this server if no version compiled.
    pub contract: &'static str,
    /// Origin of the active version.
    pub origin: Origin,
    /// File from which it is loaded; `None` if it has none.
    pub file: Option<PathBuf>,
    /// The trusted key that signed the active version.
    pub signed_by: Option<String>,
    /// Time of activation, in seconds since 1970.
    pub since: u64,
    /// Size of the component.
    pub bytes: usize,
    /// Exported hooks.
    pub hooks: Vec<&'static str>,
    /// Imported interfaces, by full name.
    pub imports: Vec<String>,
    /// Profiles that name it.
    pub profiles: Vec<Use>,
    /// Why the last update was rejected, or why no version compiled at the start.
    pub problem: Option<Problem>,
    /// Whether its file, or the component in the binary, is compiled again without a change: something other than
    /// the component ended the compiler.
    pub is_pending: bool,
    /// Other versions in the history, newest first.
    pub earlier: Vec<HistoryEntry>,
}

impl PolicyReport {
    /// Whether a version is active. Without one the policy fails in every request of its profiles.
    pub fn is_active(&self) -> bool {
        !self.sha256.is_empty()
    }
}

/// The use of a policy in a profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// The profile.
    pub profile: String,
    /// Index in its chain; shadows come last.
    pub position: usize,
    /// Whether it is a shadow.
    pub shadow: bool,
    /// SHA-256 of the version that requests of the profile get, in hex: not the active one where that was rolled back. Empty if
    /// no version compiled.
    pub sha256: String,
    /// Health of the version that requests of the profile get.
    pub health: Health,
}

/// A rejected update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Time, in seconds since 1970.
    pub at: u64,
    /// What went wrong.
    pub message: String,
}

/// A parameter from a file, or one that has a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamReport {
    /// The profile.
    pub profile: String,
    /// The parameter; empty for a problem that a policy has with none of them.
    pub param: String,
    /// The file; `None` if its text is in the configuration.
    pub file: Option<PathBuf>,
    /// Why the current contents of the file are not used, or what a policy cannot use of the parameter since the start.
    pub problem: Option<Problem>,
}

/// Result of an upload or rollback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Activation {
    /// The policy.
    pub policy: String,
    /// SHA-256 of the active version, in hex.
    pub sha256: String,
    /// SHA-256 of the version that it replaced; `None` if it was active already.
    pub replaced: Option<String>,
    /// What the operator should know about the files of the policy.
    pub notes: Vec<String>,
}
