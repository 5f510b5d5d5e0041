//! The download of a model that runs: one at a time.

use std::sync::Arc;

use parking_lot::Mutex;
use steersman_models::hub::Stop;

/// The download that runs.
#[derive(Default)]
pub struct Pulls(Mutex<Option<Running>>);

struct Running {
    repo: String,
    stop: Stop,
}

impl Pulls {
    /// Makes `repo` the download that runs; `None` if another one runs.
    pub fn begin(self: &Arc<Self>, repo: &str) -> Option<Turn> {
        let mut running = self.0.lock();
        if running.is_some() {
            return None;
        }
        let stop = Stop::default();
        *running = Some(Running { repo: repo.into(), stop: stop.clone() });
        Some(Turn { pulls: self.clone(), stop })
    }

    /// Stops the download that runs; returns its repo.
    pub fn stop(&self) -> Option<String> {
        self.0.lock().as_ref().map(|running| {
            running.stop.stop();
            running.repo.clone()
        })
    }
}

/// The right to download, until it is dropped.
pub struct Turn {
    pulls: Arc<Pulls>,
    /// Stops the download.
    pub stop: Stop,
}

impl Drop for Turn {
    fn drop(&mut self) {
        *self.pulls.0.lock() = None;
    }
}
