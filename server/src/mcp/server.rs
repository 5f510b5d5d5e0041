//! One MCP server: its connection, which is opened again when it is lost, its tools, and calls of them.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResult, ClientCapabilities, ClientConfig, ClientRequest,
    ContentBlock, Implementation, ListToolsRequest, PaginatedRequestParams, ProtocolVersion,
    ResourceContents, ServerResult,
};
use rmcp::service::{ClientInitializeError, NotificationContext, RunningService};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::{ClientHandler, Peer, RoleClient, ServiceError, ServiceExt};
use serde_json::{Map, Value};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Output;
use super::bounds::{Reason, quoted};
use super::filter::Filter;
use super::http::HttpClient;
use super::listing::{Listing, Tool};
use super::stdio::Program;
use crate::config::mcp::{McpConfig, McpServerConfig, header};

/// Time in which a server must list its tools after its start; a program may have to be downloaded.
pub const START: Duration = Duration::from_secs(60);

/// How long a request waits for a server that has just been started.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Pause before a lost server is started again; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause. A server that was ready for longer begins with [`FIRST_PAUSE`] again.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Pause between two lists of a server's tools; it doubles up to [`LONGEST_RELIST`] while they change again and again.
const RELIST: Duration = Duration::from_secs(1);

/// The longest of these pauses. Tools that did not change for longer begin with [`RELIST`] again.
const LONGEST_RELIST: Duration = Duration::from_secs(60);

/// Calls in a row that return nothing in time before the connection is opened again.
const UNANSWERED_CALLS: u32 = 4;

/// A configured server. Dropping it ends its connection.
pub struct Server {
    shared: Arc<Shared>,
    task: AbortHandle,
}

struct Shared {
    name: String,
    config: McpServerConfig,
    call_timeout: Duration,
    result_bytes: usize,
    state: watch::Sender<State>,
}

/// Whether a server can be used.
#[derive(Clone)]
enum State {
    /// It has not been ready yet, and has not failed.
    Starting,
    Ready(Ready),
    /// It failed, for this reason, and is started again after a pause.
    Lost(String),
}

/// What calls need of a connection.
#[derive(Clone)]
struct Ready {
    peer: Peer<RoleClient>,
    tools: Arc<[Tool]>,
    /// Notified when a call finds the connection broken, so that it is opened again.
    broken: Arc<Notify>,
    /// Calls in a row that returned nothing in time.
    unanswered: Arc<AtomicU32>,
}

/// An open connection.
struct Connection {
    service: RunningService<RoleClient, Client>,
    program: Option<Program>,
    changed: Arc<Notify>,
    /// Why it was ended here.
    reason: Reason,
}

/// This side of a connection: offers the server nothing, and notes when its tools change.
struct Client {
    changed: Arc<Notify>,
}

impl ClientHandler for Client {
    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.changed.notify_one();
    }

    fn get_info(&self) -> ClientConfig {
        let version = env!("CARGO_PKG_VERSION");
        let name = Implementation::new("steersman", version);
        let mut config = ClientConfig::new(ClientCapabilities::default(), name);
        // Later versions have no handshake, and no server needs them yet.
        config.protocol_version = ProtocolVersion::LATEST_WITH_INITIALIZE;
        config
    }
}

impl Server {
    /// Starts the server `name` of `config`, and starts it again whenever it is lost.
    ///
    /// # Panics
    /// If there is no such server, or outside of a runtime.
    pub fn start(config: &McpConfig, name: &str) -> Self {
        let shared = Arc::new(Shared {
            name: name.into(),
            config: config.servers[name].clone(),
            call_timeout: Duration::from_secs(config.call_timeout_s),
            result_bytes: config.result_bytes,
            state: watch::Sender::new(State::Starting),
        });
        let task = tokio::spawn(shared.clone().run()).abort_handle();
        Self { shared, task }
    }

    /// Its name in the configuration.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its tools. Waits for `patience` until a server that has just been started is ready or has failed.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub async fn tools(&self, patience: Duration) -> Result<Arc<[Tool]>, String> {
        self.ready(patience).await.map(|ready| ready.tools)
    }

    async fn ready(&self, patience: Duration) -> Result<Ready, String> {
        let mut state = self.shared.state.subscribe();
        let has_started = state.wait_for(|state| !matches!(state, State::Starting));
        match timeout(patience, has_started).await {
            Ok(Ok(state)) => match &*state {
                State::Ready(ready) => Ok(ready.clone()),
                State::Lost(reason) => Err(reason.clone()),
                State::Starting => Err("is starting".into()),
            },
            Ok(Err(_)) | Err(_) => Err("is starting".into()),
        }
    }

    /// Calls a tool. Whatever fails is the result, marked as an error. Dropping the future cancels the call.
    pub async fn call(&self, tool: &str, arguments: Map<String, Value>) -> Output {
        let Shared { name, call_timeout, result_bytes, .. } = &*self.shared;
        let failed = |problem: String| Output::error(format!("the server `{name}` {problem}"));
        let ready = match self.ready(PATIENCE).await {
            Ok(ready) => ready,
            // The reason is for the operator: it may quote what the server wrote.
            Err(_) => return failed("is not available".into()),
        };
        let mut params = CallToolRequestParams::new(tool.to_string());
        params.arguments = Some(arguments);
        let output = match timeout(*call_timeout, ready.peer.call_tool(params)).await {
            Ok(Ok(result)) => {
                ready.unanswered.store(0, Ordering::Relaxed);
                output(result)
            }
            Ok(Err(ServiceError::McpError(error))) => {
                ready.unanswered.store(0, Ordering::Relaxed);
                Output::error(error.message.into_owned())
            }
            Ok(Err(error)) => {
                if matches!(error, ServiceError::TransportSend(_) | ServiceError::TransportClosed) {
                    ready.broken.notify_one();
                }
                failed(format!("failed: {}", quoted(&error.to_string())))
            }
            Err(_) => {
                // Else what is written to a server that reads nothing would pile up.
                if ready.unanswered.fetch_add(1, Ordering::Relaxed) + 1 >= UNANSWERED_CALLS {
                    ready.broken.notify_one();
                }
                failed(format!("did not answer within {} s", call_timeout.as_secs()))
            }
        };
        output.cut(*result_bytes)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    /// Keeps a connection open: opens it, and opens it again whenever it is lost.
    async fn run(self: Arc<Self>) {
        let (server, place) = (&self.name, self.config.place());
        let mut pause = FIRST_PAUSE;
        loop {
            let start = Instant::now();
            let reason = match timeout(START, self.connect()).await {
                Ok(Ok(connection)) => self.watch(connection).await,
                Ok(Err(problem)) => problem,
                Err(_) => format!("no connection within {} s", START.as_secs()),
            };
            if start.elapsed() > LONGEST_PAUSE {
                pause = FIRST_PAUSE;
            }
            // It may repeat what the server wrote.
            let reason = quoted(&reason);
            let retry_s = pause.as_secs();
            tracing::warn!(
                server,
                place,
                reason,
                retry_s,
                "mcp server lost; its tools are missing"
            );
            self.state.send_replace(State::Lost(reason));
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Opens a connection.
    async fn connect(&self) -> Result<Connection, String> {
        let (changed, reason) = (Arc::<Notify>::default(), Reason::default());
        let client = Client { changed: changed.clone() };
        if self.config.url.is_empty() {
            let started = Program::start(&self.name, &self.config, reason.clone());
            let (program, output, input) = started.map_err(|error| format!("no start: {error}"))?;
            let transport = AsyncRwTransport::new_client(output, input);
            match client.serve(Filter::new(transport, reason.clone())).await {
                Ok(service) => Ok(Connection { service, program: Some(program), changed, reason }),
                Err(error) => {
                    let problem = no_handshake(&error, &reason);
                    Err(format!("{problem}; {}", program.end().await))
                }
            }
        } else {
            let headers = self.config.headers.iter();
            let headers = headers.filter_map(|(name, value)| header(name, value)).collect();
            let config = StreamableHttpClientTransportConfig::with_uri(self.config.url.as_str());
            let transport =
                StreamableHttpClientTransport::with_client(HttpClient::new(headers), config);
            let service = client.serve(Filter::new(transport, reason.clone())).await;
            let service = service.map_err(|error| no_handshake(&error, &reason))?;
            Ok(Connection { service, program: None, changed, reason })
        }
    }

    /// Lists the tools whenever they change, until the connection is lost. Returns why.
    async fn watch(&self, connection: Connection) -> String {
        let Connection { service, program, changed, reason: cause } = connection;
        let ended = || cause.get().unwrap_or("the connection was closed").to_string();
        let (peer, broken) = (service.peer().clone(), Arc::<Notify>::default());
        let unanswered = Arc::<AtomicU32>::default();
        let (mut last, mut pause) = (Listing::default(), RELIST);
        let reason = {
            let mut closed = pin!(service.waiting());
            loop {
                let listed = tokio::select! {
                    listed = timeout(START, self.list(&peer)) => listed,
                    _ = &mut closed => break ended(),
                };
                let listing = match listed {
                    Ok(Ok(listing)) => listing,
                    Ok(Err(_)) if cause.get().is_some() => break ended(),
                    Ok(Err(error)) => break format!("the tools cannot be listed: {error}"),
                    Err(_) => break format!("no list of tools within {} s", START.as_secs()),
                };
                // A server may say again and again that its tools have changed.
                if listing != last {
                    self.log(&listing);
                    self.state.send_replace(State::Ready(Ready {
                        peer: peer.clone(),
                        tools: listing.tools.clone().into(),
                        broken: broken.clone(),
                        unanswered: unanswered.clone(),
                    }));
                    last = listing;
                }
                let listed = Instant::now();
                let next = async {
                    changed.notified().await;
                    if listed.elapsed() > LONGEST_RELIST {
                        pause = RELIST;
                    }
                    sleep_until(listed + pause).await;
                };
                tokio::select! {
                    _ = &mut closed => break ended(),
                    () = broken.notified() => {
                        let calls = unanswered.load(Ordering::Relaxed);
                        break match calls {
                            UNANSWERED_CALLS.. => format!("{calls} calls in a row were not answered"),
                            _ => "a call could not be sent".into(),
                        };
                    }
                    () = next => pause = (pause * 2).min(LONGEST_RELIST),
                }
            }
        };
        match program {
            Some(program) => format!("{reason}; {}", program.end().await),
            None => reason,
        }
    }

    /// Reads the pages of the list of tools.
    async fn list(&self, peer: &Peer<RoleClient>) -> Result<Listing, ServiceError> {
        let mut listing = Listing::of(&self.name);
        let mut cursor = None;
        loop {
            let params = PaginatedRequestParams::default().with_cursor(cursor);
            // Not `list_tools`, which keeps the pages.
            let request = ClientRequest::ListToolsRequest(ListToolsRequest::with_param(params));
            let ServerResult::ListToolsResult(page) = peer.send_request(request).await? else {
                return Err(ServiceError::UnexpectedResponse);
            };
            cursor = listing.add(page);
            if cursor.is_none() {
                return Ok(listing);
            }
        }
    }

    fn log(&self, listing: &Listing) {
        let (server, place) = (&self.name, self.config.place());
        let Listing { tools, left_out, more, unread, .. } = listing;
        for (tool, problem) in left_out {
            tracing::warn!(server, tool, problem, "mcp tool left out");
        }
        if *more > 0 {
            tracing::warn!(server, tools = more, "further mcp tools left out");
        }
        if let Some(problem) = unread {
            tracing::warn!(server, problem, "further pages of mcp tools not read");
        }
        tracing::info!(server, place, tools = tools.len(), "mcp server ready");
    }
}

/// Why a server cannot be connected to, without the name of rmcp's type that the error begins with.
fn no_handshake(error: &ClientInitializeError, ended: &Reason) -> String {
    if let Some(reason) = ended.get() {
        return format!("no handshake: {reason}");
    }
    match error {
        ClientInitializeError::TransportError { error, .. } => {
            format!("no handshake: {}", error.error)
        }
        error => format!("no handshake: {error}"),
    }
}

/// The result as text: a model reads nothing else.
fn output(result: CallToolResult) -> Output {
    let left_out = |kind: &str, mime: &str, base64: &str| {
        format!("[{kind} left out: {mime}, {} bytes]", base64.len() / 4 * 3)
    };
    let text = |block: &ContentBlock| match block {
        ContentBlock::Text(text) => text.text.clone(),
        ContentBlock::Image(image) => left_out("image", &image.mime_type, &image.data),
        ContentBlock::Audio(audio) => left_out("audio", &audio.mime_type, &audio.data),
        ContentBlock::Resource(resource) => match &resource.resource {
            ResourceContents::TextResourceContents { text, .. } => text.clone(),
            ResourceContents::BlobResourceContents { mime_type, blob, .. } => {
                left_out("resource", mime_type.as_deref().unwrap_or_default(), blob)
            }
            _ => "[resource left out]".into(),
        },
        ContentBlock::ResourceLink(link) => format!("[resource: {}]", link.uri),
        _ => "[content left out]".into(),
    };
    let mut texts: Vec<String> = result.content.iter().map(text).collect();
    if texts.is_empty() {
        texts.extend(result.structured_content.map(|content| content.to_string()));
    }
    Output { text: texts.join("\n"), is_error: result.is_error == Some(true) }
}
