//! Errors, by who can act on them: the guest's author ([`Failure`]), the operator ([`Error`]).

use std::path::PathBuf;

/// A policy failed in a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("policy `{policy}`: {hook}: {cause}")]
pub struct Failure {
    /// Name of the policy.
    pub policy: String,
    /// The hook, `on-step`, or `start`.
    pub hook: &'static str,
    /// What happened.
    pub cause: Cause,
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// The call used all its fuel.
    #[error("used up its fuel of {0}")]
    Fuel(u64),
    /// The call exceeded its deadline. Fuel limits what a guest computes, so a busy machine is as
    /// likely a cause as the guest.
    #[error("exceeded its deadline of {0} ms")]
    Deadline(u64),
    /// WebAssembly trapped.
    #[error("trapped: {0}")]
    Trap(String),
    /// The guest exceeded another limit, or used an import in a way that is documented as a failure.
    #[error("{0}")]
    Limit(String),
    /// The guest reported the failure itself. Traces mask the message.
    #[error("failed: {0}")]
    Message(String),
    /// The answer violates the contract.
    #[error("{0}")]
    Answer(String),
    /// The policy failed in too many requests in a row and is not called.
    #[error("failed too often and is paused for {0} s")]
    Paused(u64),
}

/// A policy cannot be loaded, activated or rolled back.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A key of the configuration: change it.
    #[error("{field}: {problem}")]
    Config {
        /// The key.
        field: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// Parameters of a profile that its policies cannot use: change them.
    #[error("{}", lines_of_params(profile, problems).join("; "))]
    Params {
        /// The profile.
        profile: String,
        /// Parameters, each with its problem; the name is empty for a problem of none of them.
        problems: Vec<(String, String)>,
    },
    /// The component cannot be used: change it, or the profile that names it.
    #[error("policy `{policy}`: {problem}{}", profile.as_ref().map(|name| format!(" (profile `{name}`)")).unwrap_or_default())]
    Refused {
        /// Name of the policy.
        policy: String,
        /// The profile that names the policy, if the problem concerns one.
        profile: Option<String>,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The component cannot be compiled, or not within the limits of a compilation.
    #[error("policy `{policy}`: {problem}")]
    NotCompiled {
        /// Name of the policy.
        policy: String,
        /// What is wrong with the component, the limit, or what ended the compiler.
        problem: String,
        /// Whether another attempt may succeed, since something other than the component ended the compiler.
        is_transient: bool,
    },
    /// Several problems of one configuration, none of which is [`Error::Several`].
    #[error("{}", problems.iter().map(Error::to_string).collect::<Vec<_>>().join("; "))]
    Several {
        /// The problems.
        problems: Vec<Error>,
    },
    /// A policy has no version that works, or an earlier one than its file: a server starts with it.
    #[error("{0}")]
    Inactive(String),
    /// The policy failed when it was started, and its profile fails closed.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// No profile names the policy.
    #[error("policy `{policy}`: no profile names it, only {known}")]
    UnknownPolicy {
        /// The name.
        policy: String,
        /// Names of all policies.
        known: String,
    },
    /// There is no such profile.
    #[error("profile: `{profile}` does not exist, only {known}")]
    UnknownProfile {
        /// The name.
        profile: String,
        /// Names of all profiles.
        known: String,
    },
    /// An upload has no file from which a restart would load it: set `policy.folder`.
    #[error(
        "policy.folder: is not set, so policy `{policy}` has no file that a restart would read"
    )]
    NoFile {
        /// Name of the policy.
        policy: String,
    },
    /// An upload cannot be written to its file.
    #[error("policy `{policy}`: {path} cannot be written: {source}")]
    NotWritten {
        /// Name of the policy.
        policy: String,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is no version to go back to.
    #[error("policy `{policy}`: {problem}")]
    CannotRollBack {
        /// Name of the policy.
        policy: String,
        /// Why.
        problem: String,
    },
    /// A file in the data folder is of another kind than its name: move it, or choose another folder.
    #[error("{}: is not a policy database; move it, or choose another data folder", path.display())]
    NotOurs {
        /// The file.
        path: PathBuf,
    },
}

/// The key and the problem of each parameter, a line each.
pub(crate) fn lines_of_params(profile: &str, problems: &[(String, String)]) -> Vec<String> {
    let line = |(param, problem): &(String, String)| match param.as_str() {
        "" => format!("profiles.{profile}.params: {problem}"),
        param => format!("profiles.{profile}.params.{param}: {problem}"),
    };
    problems.iter().map(line).collect()
}

impl Error {
    pub(crate) fn refused(policy: &str, problem: impl Into<String>) -> Self {
        Self::Refused { policy: policy.into(), profile: None, problem: problem.into() }
    }

    /// Fails with all of `problems`, those within [`Error::Several`] one by one.
    ///
    /// # Errors
    /// `problems`, if there are any.
    pub(crate) fn all(problems: Vec<Self>) -> Result<(), Self> {
        let each = problems.into_iter().flat_map(|problem| match problem {
            Self::Several { problems } => problems,
            one => vec![one],
        });
        let mut problems: Vec<_> = each.collect();
        match problems.len() {
            0 => Ok(()),
            1 => Err(problems.remove(0)),
            _ => Err(Self::Several { problems }),
        }
    }

    /// Whether another attempt may succeed though neither the policy nor the configuration is changed.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::NotCompiled { is_transient: true, .. })
    }

    /// Adds the profile in which a policy is refused.
    pub(crate) fn in_profile(self, name: &str) -> Self {
        match self {
            Self::Refused { policy, profile: None, problem } => {
                Self::Refused { policy, profile: Some(name.into()), problem }
            }
            Self::Failed(failure) => Self::Refused {
                profile: Some(name.into()),
                problem: format!("{}: {}", failure.hook, failure.cause),
                policy: failure.policy,
            },
            other => other,
        }
    }
}
