//! What changes the cache of models on this machine: one download or one removal at a time.

use std::sync::Arc;

use parking_lot::Mutex;
use steersman_models::hub::Stop;

/// The download or the removal that runs.
#[derive(Default)]
pub struct Pulls(Mutex<Option<Work>>);

enum Work {
    Download(Running),
    Removal,
}

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

/// What runs already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    /// A download, which can be stopped.
    Download,
    /// A removal, which cannot.
    Removal,
}

impl Pulls {
    /// Makes `repo` the download that runs. Returns the right to it, and what stops it.
    ///
    /// # Errors
    /// If something else runs.
    pub fn begin(self: &Arc<Self>, repo: &str) -> Result<(Turn, Stop), Busy> {
        let stop = Stop::default();
        let running = Running { repo: repo.into(), stop: stop.clone(), step: Step::default() };
        Ok((self.take(Work::Download(running))?, stop))
    }

    /// Keeps everyone from downloading and removing. A removal is no download: it is not shown, and not stopped.
    ///
    /// # Errors
    /// If something else runs.
    pub fn begin_removal(self: &Arc<Self>) -> Result<Turn, Busy> {
        self.take(Work::Removal)
    }

    fn take(self: &Arc<Self>, work: Work) -> Result<Turn, Busy> {
        let mut runs = self.0.lock();
        match &*runs {
            Some(Work::Download(_)) => Err(Busy::Download),
            Some(Work::Removal) => Err(Busy::Removal),
            None => {
                *runs = Some(work);
                Ok(Turn { pulls: self.clone() })
            }
        }
    }

    /// Notes how far the download is that runs.
    pub fn note(&self, step: Step) {
        if let Some(Work::Download(running)) = &mut *self.0.lock() {
            running.step = step;
        }
    }

    /// The repo that is downloaded now, and how far that is.
    pub fn running(&self) -> Option<(String, Step)> {
        match &*self.0.lock() {
            Some(Work::Download(Running { repo, step, .. })) => Some((repo.clone(), step.clone())),
            _ => None,
        }
    }

    /// Stops the download that runs; returns its repo.
    pub fn stop(&self) -> Option<String> {
        match &*self.0.lock() {
            Some(Work::Download(running)) => {
                running.stop.stop();
                Some(running.repo.clone())
            }
            _ => None,
        }
    }
}

/// The right to download or to remove, until it is dropped.
pub struct Turn {
    pulls: Arc<Pulls>,
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
        let (turn, _) = pulls.begin("owner/one").unwrap();
        assert_eq!(pulls.running(), Some(("owner/one".into(), Step::default())));
        let step = Step { file: Some("a".into()), completed: 1, total: 2 };
        pulls.note(step.clone());
        assert_eq!(pulls.running(), Some(("owner/one".into(), step)));
        assert_eq!(pulls.begin("owner/two").err(), Some(Busy::Download));
        assert_eq!(pulls.begin_removal().err(), Some(Busy::Download));
        drop(turn);
        assert_eq!(pulls.running(), None);
        // The next one begins anew.
        let (_turn, stop) = pulls.begin("owner/two").unwrap();
        assert_eq!(pulls.running(), Some(("owner/two".into(), Step::default())));
        assert_eq!(pulls.stop(), Some("owner/two".into()));
        assert!(stop.is_stopped());
    }

    /// A removal was listed as a download that asked the hub, and an operator who stopped it was told that it had stopped.
    #[test]
    fn a_removal_is_no_download() {
        let pulls = Arc::new(Pulls::default());
        let turn = pulls.begin_removal().unwrap();
        pulls.note(Step { file: None, completed: 1, total: 2 });
        assert_eq!((pulls.running(), pulls.stop()), (None, None));
        assert_eq!(pulls.begin("owner/one").err(), Some(Busy::Removal));
        assert_eq!(pulls.begin_removal().err(), Some(Busy::Removal));
        drop(turn);
        assert!(pulls.begin("owner/one").is_ok());
    }
}
