//! What this process does while it loads a model, for `/health`: which model, which stage, and how far that is.
//!
//! There is one for the process: models are loaded one after another.

use parking_lot::Mutex;

/// The load that runs, if any.
static NOW: Mutex<Option<Loading>> = Mutex::new(None);

/// A model that is being loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct Loading {
    /// Its name.
    pub model: String,
    /// What is done: `reading weights`, `compiling kernels`, `measuring`, `warming up`.
    pub stage: &'static str,
    /// How much of that is done, 0 to 1, if it is known.
    pub fraction: Option<f64>,
}

/// What is being loaded.
pub fn now() -> Option<Loading> {
    NOW.lock().clone()
}

/// A load, until it is dropped.
#[derive(Debug)]
pub struct Load(());

/// Begins the load of `model`.
pub fn begin(model: &str, stage: &'static str) -> Load {
    *NOW.lock() = Some(Loading { model: model.into(), stage, fraction: None });
    Load(())
}

/// The next stage of the load.
pub(crate) fn stage(stage: &'static str) {
    if let Some(loading) = &mut *NOW.lock() {
        (loading.stage, loading.fraction) = (stage, None);
    }
}

/// `done` of `all` parts of the stage are done.
pub(crate) fn advance(done: usize, all: usize) {
    if let Some(loading) = &mut *NOW.lock() {
        loading.fraction = Some(done as f64 / all.max(1) as f64);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        *NOW.lock() = None;
    }
}
