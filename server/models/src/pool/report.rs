//! What a pool is told about models, and what it says about them.

use std::time::Duration;

/// How a model is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// For the log and for messages.
    pub name: String,
    /// Time without a request after which it is unloaded; `None` for no limit.
    pub keep_alive: Option<Duration>,
    /// Whether it stays loaded once it is.
    pub pinned: bool,
}

/// Where a model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Not in memory.
    OnDisk,
    /// On its way to memory.
    Loading,
    /// In memory.
    Loaded,
    /// On its way out of memory.
    Unloading,
}

impl State {
    /// The name for clients.
    pub fn name(self) -> &'static str {
        match self {
            Self::OnDisk => "on disk",
            Self::Loading => "loading",
            Self::Loaded => "loaded",
            Self::Unloading => "unloading",
        }
    }
}

/// A model at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Where it is.
    pub state: State,
    /// Bytes that it counts with while it is not on disk.
    pub bytes: u64,
    /// Requests that use it.
    pub requests: usize,
    /// Time until it is unloaded unless it is used.
    pub expires: Option<Duration>,
    /// How often it was loaded on demand.
    pub loads: u64,
    /// How often it was unloaded.
    pub unloads: u64,
    /// How long the last load took.
    pub load_time: Option<Duration>,
    /// Whether it is not served any more.
    pub withdrawn: bool,
}

/// Why a request gets no model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The files are not here.
    #[error("the files of `{model}` are not on this machine")]
    Absent {
        /// The model.
        model: String,
        /// Why, with details for the log.
        problem: String,
    },
    /// The model and those that stay loaded exceed the budget.
    #[error(
        "`{model}` takes about {bytes} bytes, and {free} of {budget} are not taken by models that stay loaded"
    )]
    TooLarge {
        /// The model.
        model: String,
        /// What it takes.
        bytes: u64,
        /// What it may take.
        free: u64,
        /// The budget of all models.
        budget: u64,
    },
    /// It is not served any more.
    #[error("`{model}` is not served any more")]
    Withdrawn {
        /// The model.
        model: String,
    },
    /// Others were in use for the time that a request waits for room.
    #[error("no room for `{model}`, because requests use {in_use}")]
    NoRoom {
        /// The model.
        model: String,
        /// The others.
        in_use: String,
    },
    /// Loading failed.
    #[error("loading `{model}` failed: {problem}")]
    Failed {
        /// The model.
        model: String,
        /// Why, with details for the log.
        problem: String,
    },
    /// The request's time is over.
    #[error("`{model}` was not loaded within the time of the request")]
    Deadline {
        /// The model.
        model: String,
    },
}
