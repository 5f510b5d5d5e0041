//! How the server stops: what tells running requests that they must end.

use tokio::sync::watch;

/// How far the shutdown has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Requests are served.
    Serving,
    /// Running requests may finish.
    Finishing,
    /// Running requests end with an error.
    CuttingOff,
}

/// Tells the handler of a request when it must end. An extension of each request from a connection.
#[derive(Clone)]
pub struct Shutdown(pub(crate) watch::Receiver<Stage>);

impl Shutdown {
    /// Waits until the time for running requests is over.
    pub async fn cuts_off(&mut self) {
        self.reaches(Stage::CuttingOff).await;
    }

    /// Waits until the shutdown has reached `stage`.
    pub async fn reaches(&mut self, stage: Stage) {
        // The sender outlives every connection.
        let _ = self.0.wait_for(|reached| *reached >= stage).await;
    }
}
