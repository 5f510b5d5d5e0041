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
    step: Step,
}

/// How far a download is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// The file that comes.
    pub file: Option<String>,
    /// Bytes of all files that are here.
    pub completed: u64,
    /// Bytes of all files; 0 while the hub is asked.
    pub total: u64,
}

impl Pulls {
    /// Makes `repo` the download that runs; `None` if another one runs.
    pub fn begin(self: &Arc<Self>, repo: &str) -> Option<Turn> {
        let mut running = self.0.lock();
        if running.is_some() {
            return None;
        }
        let stop = Stop::default();
        *running = Some(Running { repo: repo.into(), stop: stop.clone(), step: Step::default() });
        Some(Turn { pulls: self.clone(), stop })
    }

    /// Notes how far the download is that runs.
    pub fn note(&self, step: Step) {
        if let Some(running) = &mut *self.0.lock() {
            running.step = step;
        }
    }

    /// The repo that is downloaded now, and how far that is.
    pub fn running(&self) -> Option<(String, Step)> {
        self.0.lock().as_ref().map(|running| (running.repo.clone(), running.step.clone()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_download_that_runs_is_known_until_it_ends() {
        let pulls = Arc::new(Pulls::default());
        pulls.note(Step { file: None, completed: 1, total: 2 });
        assert_eq!(pulls.running(), None);
        let turn = pulls.begin("owner/one").unwrap();
        assert_eq!(pulls.running(), Some(("owner/one".into(), Step::default())));
        let step = Step { file: Some("a".into()), completed: 1, total: 2 };
        pulls.note(step.clone());
        assert_eq!(pulls.running(), Some(("owner/one".into(), step)));
        assert!(pulls.begin("owner/two").is_none());
        drop(turn);
        assert_eq!(pulls.running(), None);
        // The next one begins anew.
        let _turn = pulls.begin("owner/two").unwrap();
        assert_eq!(pulls.running(), Some(("owner/two".into(), Step::default())));
    }
}
