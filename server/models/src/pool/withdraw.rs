//! Models that are not served any more, and may be again.

use super::{Pool, Starter};

impl<S: Starter> Pool<S> {
    /// Ends the service of model `index`, which is not pinned. Requests that have it keep it.
    pub fn withdraw(&self, index: usize) {
        self.mark(index, true);
    }

    /// Serves model `index` again.
    pub fn restore(&self, index: usize) {
        self.mark(index, false);
    }

    /// Whether model `index` is not served any more.
    pub fn is_withdrawn(&self, index: usize) -> bool {
        self.0.inner.lock().entries[index].withdrawn
    }

    fn mark(&self, index: usize, withdrawn: bool) {
        self.0.inner.lock().entries[index].withdrawn = withdrawn;
        // Those that wait for it are refused, and it is unloaded if it is idle.
        self.0.changed.send_replace(());
    }
}
