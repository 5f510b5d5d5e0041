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
    /// Running requests end with an error, as a rank has ended with which they are computed.
    RankLost,
}

/// Tells the handler of a request when it must end. An extension of each request from a connection.
#[derive(Clone)]
pub struct Shutdown(pub(crate) watch::Receiver<Stage>);

impl Shutdown {
    /// Waits until the time for running requests is over; returns why.
    pub async fn cuts_off(&mut self) -> Stage {
        self.reaches(Stage::CuttingOff).await;
        *self.0.borrow()
    }

    /// Waits until the shutdown has reached `stage`.
    pub async fn reaches(&mut self, stage: Stage) {
        // The sender outlives every connection.
        let _ = self.0.wait_for(|reached| *reached >= stage).await;
    }
}
