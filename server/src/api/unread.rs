//! Bodies that are left unread: a refusal, such as that of a wrong key, is answered before its body has arrived.
//!
//! The next request on a connection follows the body. hyper closes a connection whose body was not read to its end,
//! without a word to the client, whose next request then fails. So a small rest is read and dropped before the reply is
//! sent, and a reply that leaves more of it says `Connection: close`. A client that still sends would not read that reply:
//! its connection is reset when the server closes it. So the rest is read and dropped while the reply is sent, up to a
//! limit, as the lingering close of other servers does.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::header::{CONNECTION, EXPECT};
use axum::http::{HeaderValue, Version};
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;

/// Bytes of an unread rest that are read and dropped.
const REST_BYTES: usize = 64 << 10;

/// Time that a reply waits for the unread rest of its request.
const REST_TIME: Duration = Duration::from_millis(500);

/// Bytes that are read and dropped while a reply is sent: the largest body of any route.
const LINGER_BYTES: usize = 128 << 20;

/// Time for that.
const LINGER_TIME: Duration = Duration::from_secs(10);

/// A body that its reader has dropped.
type Rest = Arc<Mutex<Option<Body>>>;

/// Reads what a handler leaves of a body, or says in the reply that the connection ends.
pub async fn drain(request: Request, next: Next) -> Response {
    // Later versions cancel a body on its own.
    if request.version() > Version::HTTP_11 || request.body().is_end_stream() {
        return next.run(request).await;
    }
    // Reading such a body tells the client to send it.
    let is_announced = request.headers().contains_key(EXPECT);
    let rest = Rest::default();
    let request =
        request.map(|body| Body::new(Watched { body, has_ended: false, rest: rest.clone() }));
    let mut response = next.run(request).await;
    let left = rest.lock().take();
    if let Some(mut body) = left
        && (is_announced || !is_drained(&mut body, REST_BYTES, REST_TIME).await)
    {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        if !is_announced {
            tokio::spawn(async move { is_drained(&mut body, LINGER_BYTES, LINGER_TIME).await });
        }
    }
    response
}

/// Whether `body` has ended within so many bytes and this time, read from here.
async fn is_drained(body: &mut Body, most: usize, time: Duration) -> bool {
    let read = async {
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            bytes += frame.ok()?.data_ref().map_or(0, Bytes::len);
            if bytes > most {
                return None;
            }
        }
        Some(())
    };
    tokio::time::timeout(time, read).await.is_ok_and(|read| read.is_some())
}

/// A body that is kept when its reader drops it before its end.
struct Watched {
    body: Body,
    has_ended: bool,
    rest: Rest,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        // A body in chunks does not know its end before.
        self.has_ended |= matches!(polled, Poll::Ready(None));
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.has_ended && !self.body.is_end_stream() {
            *self.rest.lock() = Some(std::mem::take(&mut self.body));
        }
    }
}
