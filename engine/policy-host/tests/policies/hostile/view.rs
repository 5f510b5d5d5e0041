//! The request of tests and benchmarks.

use steersman_policy_host::RequestView;

/// A short question to a model that can reason.
pub fn view() -> RequestView {
    RequestView {
        user: "Who is the tallest?".into(),
        can_reason: true,
        context_left: 8192,
        ..RequestView::default()
    }
}
