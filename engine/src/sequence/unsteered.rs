//! The policies of requests that no policy steers: embeddings, warm-up.

use crate::policy::{Answer, Call, Failure, Policy, Session};

/// Steers nothing.
struct Unsteered;

impl Policy for Unsteered {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        Ok(call.default_answer())
    }
}

/// The policies of a request without a reply.
pub fn unsteered() -> Session {
    let policy = Box::new(Unsteered);
    Session {
        policy,
        params: Default::default(),
        digest: [0; 32],
        judges_calls: false,
        shapes_text: false,
        sees_text: false,
        policies: 1,
    }
}
