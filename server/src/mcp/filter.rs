//! What a server sends besides responses: requests are answered here, and notifications that nobody uses are dropped.
//!
//! # Why
//! rmcp starts a task for each request, whose answer waits until the server reads it: `ping` after `ping` of a server
//! that reads nothing took 2 GB in a minute. It also logs each request that it refuses.

use rmcp::RoleClient;
use rmcp::model::{
    ClientJsonRpcMessage, ClientResult, ErrorCode, ErrorData, Implementation, InitializeResult,
    JsonRpcMessage, JsonRpcRequest, NumberOrString, ServerJsonRpcMessage, ServerNotification,
    ServerRequest, ServerResult,
};
use rmcp::transport::Transport;
use tokio::task::JoinSet;

use super::bounds::Reason;

/// Answers that wait at a time until the server reads them.
const ANSWERS: usize = 16;

/// Requests in a row that are not answered, since so many answers wait, before the connection is ended.
const UNANSWERED: usize = 1000;

/// Longest id of a request that is answered.
const ID_BYTES: usize = 256;

/// Longest name and version of a server, and of the protocol's version.
const NAME_BYTES: usize = 256;

/// A transport without what nobody uses.
pub struct Filter<T> {
    inner: T,
    answers: JoinSet<()>,
    unanswered: usize,
    reason: Reason,
}

impl<T> Filter<T> {
    /// Why the filter ends the connection is in `reason`.
    pub fn new(inner: T, reason: Reason) -> Self {
        Self { inner, answers: JoinSet::new(), unanswered: 0, reason }
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for Filter<T> {
    type Error = T::Error;

    fn send(
        &mut self,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        self.inner.send(message)
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        loop {
            match self.inner.receive().await? {
                JsonRpcMessage::Request(request) => self.answer(&request)?,
                JsonRpcMessage::Notification(notification) => {
                    if let ServerNotification::ToolListChangedNotification(_) =
                        notification.notification
                    {
                        return Some(JsonRpcMessage::Notification(notification));
                    }
                }
                JsonRpcMessage::Response(mut response) => {
                    if let ServerResult::InitializeResult(result) = &mut response.result {
                        self.shorten(result)?;
                    }
                    return Some(JsonRpcMessage::Response(response));
                }
                error @ JsonRpcMessage::Error(_) => return Some(error),
            }
        }
    }

    async fn close(&mut self) -> Result<(), Self::Error> {
        self.answers.abort_all();
        self.inner.close().await
    }
}

impl<T: Transport<RoleClient>> Filter<T> {
    /// Answers a request; `None` ends the connection.
    fn answer(&mut self, request: &JsonRpcRequest<ServerRequest>) -> Option<()> {
        while self.answers.try_join_next().is_some() {}
        let is_long = matches!(&request.id, NumberOrString::String(id) if id.len() > ID_BYTES);
        if is_long || self.answers.len() >= ANSWERS {
            self.unanswered += 1;
            if self.unanswered > UNANSWERED {
                self.reason.set("it sends requests and does not read their answers");
                return None;
            }
            return Some(());
        }
        self.unanswered = 0;
        let send = self.inner.send(answer(request));
        self.answers.spawn(async move {
            // A connection that is broken is noticed by its reader.
            let _ = send.await;
        });
        Some(())
    }

    /// Removes what nobody uses of the description of a server, which lasts as long as the connection; `None` ends it.
    fn shorten(&self, result: &mut InitializeResult) -> Option<()> {
        if result.protocol_version.as_str().len() > NAME_BYTES {
            self.reason.set("the version of its protocol is too long");
            return None;
        }
        let cut = |text: &str| text[..text.floor_char_boundary(NAME_BYTES)].to_string();
        let Implementation { name, version, .. } = &result.server_info;
        result.server_info = Implementation::new(cut(name), cut(version));
        result.instructions = None;
        result.meta = None;
        result.capabilities.experimental = None;
        result.capabilities.extensions = None;
        result.capabilities.logging = None;
        result.capabilities.completions = None;
        Some(())
    }
}

/// The answer to a request: there are no roots, and nothing else is offered.
fn answer(request: &JsonRpcRequest<ServerRequest>) -> ClientJsonRpcMessage {
    let id = request.id.clone();
    match &request.request {
        ServerRequest::PingRequest(_) => JsonRpcMessage::response(ClientResult::empty(()), id),
        #[allow(deprecated, reason = "servers of all versions are served")]
        ServerRequest::ListRootsRequest(_) => {
            let roots = rmcp::model::ListRootsResult::default();
            JsonRpcMessage::response(ClientResult::ListRootsResult(roots), id)
        }
        _ => {
            let message = "this client offers no such method";
            let error = ErrorData::new(ErrorCode::METHOD_NOT_FOUND, message, None);
            JsonRpcMessage::error(error, Some(id))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::{Value, json};

    use super::*;

    /// A server that sends one message again and again, and reads only the first `reads` answers.
    struct Flood {
        message: Value,
        left: usize,
        reads: usize,
        sent: Arc<AtomicUsize>,
        last: Arc<parking_lot::Mutex<Value>>,
    }

    impl Transport<RoleClient> for Flood {
        type Error = Infallible;

        fn send(
            &mut self,
            message: ClientJsonRpcMessage,
        ) -> impl Future<Output = Result<(), Infallible>> + Send + 'static {
            let is_read = self.sent.fetch_add(1, Ordering::Relaxed) < self.reads;
            *self.last.lock() = serde_json::to_value(message).unwrap();
            async move {
                if !is_read {
                    std::future::pending::<()>().await;
                }
                Ok(())
            }
        }

        async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
            self.left = self.left.checked_sub(1)?;
            tokio::task::yield_now().await;
            Some(serde_json::from_value(self.message.clone()).unwrap())
        }

        async fn close(&mut self) -> Result<(), Infallible> {
            Ok(())
        }
    }

    /// What passes of 5,000 equal messages, how many answers are sent, the last one, and why the connection ended.
    async fn flood(message: Value, reads: usize) -> (usize, usize, Value, Option<&'static str>) {
        let (sent, last, reason) = (Arc::default(), Arc::default(), Reason::default());
        let flood =
            Flood { message, left: 5000, reads, sent: Arc::clone(&sent), last: Arc::clone(&last) };
        let mut filter = Filter::new(flood, reason.clone());
        let mut passed = 0;
        while filter.receive().await.is_some() {
            passed += 1;
            assert!(filter.answers.len() <= ANSWERS);
        }
        assert!(filter.answers.len() <= ANSWERS);
        let last = last.lock().clone();
        (passed, sent.load(Ordering::Relaxed), last, reason.get())
    }

    fn request(method: &str, params: Value) -> Value {
        json!({"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
    }

    /// A server's `ping`s, whose answers it did not read, took 2,210 MB in 55 s; its `sampling/createMessage`s wrote
    /// 21,635 lines to the log in 14 s.
    #[tokio::test]
    async fn requests_of_a_server_are_answered_while_it_reads_and_never_pile_up() {
        let sample = json!({"messages": [], "maxTokens": 1});
        for (method, params, answer) in [
            ("ping", json!({}), "/result"),
            ("roots/list", json!({}), "/result/roots"),
            ("sampling/createMessage", sample, "/error/message"),
            ("elicitation/create", json!({"message": "?"}), "/error/message"),
            ("vendor/whatever", json!({}), "/error/message"),
        ] {
            let (passed, sent, last, reason) = flood(request(method, params.clone()), 5000).await;
            assert_eq!((passed, sent, reason), (0, 5000, None), "{method}");
            assert!(last.pointer(answer).is_some() && last["id"] == 7, "{method}: {last}");
            let (passed, sent, _, reason) = flood(request(method, params), 0).await;
            assert_eq!((passed, sent), (0, ANSWERS), "{method}");
            let expected = "it sends requests and does not read their answers";
            assert_eq!(reason, Some(expected), "{method}");
        }
        let long = json!({"jsonrpc": "2.0", "id": "x".repeat(ID_BYTES + 1), "method": "ping"});
        let (_, sent, _, reason) = flood(long, 5000).await;
        assert_eq!((sent, reason.is_some()), (0, true));
    }

    #[tokio::test]
    async fn only_notifications_that_are_used_pass() {
        let notification = |method: &str, params: Value| json!({"jsonrpc": "2.0", "method": method, "params": params});
        for (method, params, expected) in [
            ("notifications/message", json!({"level": "info", "data": "x"}), 0),
            ("notifications/progress", json!({"progressToken": 1, "progress": 1}), 0),
            ("notifications/cancelled", json!({"requestId": 1}), 0),
            ("notifications/resources/list_changed", json!({}), 0),
            ("notifications/whatever", json!({}), 0),
            ("notifications/tools/list_changed", json!({}), 5000),
        ] {
            let (passed, ..) = flood(notification(method, params), 0).await;
            assert_eq!(passed, expected, "{method}");
        }
    }

    /// It lasts as long as the connection, and was logged.
    #[tokio::test]
    async fn of_a_servers_description_little_is_kept() {
        let described = |version: &str| {
            let huge = "é".repeat(1 << 20);
            let info = json!({"name": huge, "version": huge, "title": huge});
            let capabilities = json!({"tools": {}, "experimental": {"a": {"b": huge}}});
            json!({"jsonrpc": "2.0", "id": 0, "result": {"protocolVersion": version,
                "capabilities": capabilities, "serverInfo": info, "instructions": huge}})
        };
        let (sent, last) = (Arc::default(), Arc::default());
        let server = Flood { message: described("2025-06-18"), left: 1, reads: 0, sent, last };
        let message = Filter::new(server, Reason::default()).receive().await.unwrap();
        let text = serde_json::to_string(&message).unwrap();
        assert!(text.len() < 1000, "{} bytes", text.len());
        assert!(text.contains("\"tools\":{}"), "{text}");
        let (passed, _, _, reason) = flood(described(&"9".repeat(1000)), 0).await;
        assert_eq!((passed, reason), (0, Some("the version of its protocol is too long")));
    }
}
