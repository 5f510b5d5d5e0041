//! Profiles, as what serves their models needs them.

use std::path::PathBuf;

use steersman_policy_host::{Counted, ProfilePolicies};

use crate::Sampling;
use crate::error::{ConfigError, Error};

/// The policies and limits of a group of requests.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profile {
    /// The policies of the profile, and how they run.
    pub policy: ProfilePolicies,
    /// Limits of its requests.
    pub limits: ProfileLimits,
    /// Models and profiles to which its policies may route requests, as they name them.
    pub routes: Vec<String>,
    /// Files with prefixes that are computed at the start: `{"messages": [..], "tools": [..]}` as in a
    /// chat request.
    pub warm: Vec<PathBuf>,
    /// Sampling parameters that the client does not set; overrides the model's
    /// `generation_config.json`.
    pub sampling: Option<Sampling>,
}

/// Limits of the requests of a profile; 0 is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProfileLimits {
    /// Tokens of a prompt; a longer one is refused.
    pub prompt_tokens: usize,
    /// Reasoning tokens, whatever client and policy ask for.
    pub reasoning_budget: u32,
    /// Tokens of a reply, reasoning included, whatever the client asks for.
    pub max_tokens: u32,
    /// What the client's limit on tokens counts; `None`: what its API says, or the answer alone if the client did
    /// not ask for reasoning.
    pub limit_counts: Option<Counted>,
}

impl Profile {
    /// Values that cannot be used, of the profile `name`.
    pub fn problems(&self, name: &str) -> Vec<Error> {
        let of = |key, problem| {
            Error::Config(ConfigError::Profile { profile: name.into(), key, problem })
        };
        let sampling = self.sampling.and_then(|sampling| sampling.check().err());
        let sampling = sampling.map(|problem| of(".sampling", problem));
        let policies = self.policy.check(name).err().map(|problem| of("", problem));
        sampling.into_iter().chain(policies).collect()
    }
}
