//! `POST /v1/models/pull` and Ollama's `POST /api/pull`: downloads of models while the server runs, for
//! operators.
//!
//! One download runs at a time, on a thread. `DELETE /v1/models/pull` stops it, and so does a client of Ollama that
//! disconnects, as with Ollama; other clients may disconnect. Asking again continues it. A model that was downloaded is
//! served if `[models]` names it, or an operator asks for it (`POST /v1/models/serve`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::tools::model_types;
use steersman_models::command::Needs;
use steersman_models::hub::{Hub, Plan, Progress, Stop, is_disk_full};
use steersman_models::named::model_id;
use tokio::sync::mpsc::{OwnedPermit, Receiver, Sender, channel};

use super::access::Caller;
use super::app::App;
use super::error::{ApiError, OpenAiError};
use super::protocol::JSON;
use super::pulls::{Busy, Step, Turn};
use crate::bundled;

/// Shortest time between two reports of progress.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// Reports that wait for a client. One that reads more slowly misses some.
const REPORTS: usize = 64;

/// Stops a download when it is dropped: the client has disconnected, or has all reports.
struct StopOnDrop(Stop);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// What a client asks for.
struct Asked {
    repo: String,
    stream: bool,
}

/// How far a download is.
enum Report {
    /// What it needs.
    Planned(Needs),
    /// Bytes of all files that are here, and the file that comes.
    Progress { file: String, done: u64, total: u64 },
    /// The folder with all files.
    Done(PathBuf),
    /// It failed.
    Failed(ApiError),
}

/// `POST /v1/models/pull`
pub async fn pull(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let body = operators_body(&app, &caller, &headers, body, JSON).await?;
    let (first, reports, _) = begin(&app, body.repo, false).await?;
    let events = rest(first, reports, |report| {
        let event = SseEvent::default().data(text(&Pulled::from(&report)));
        Some(Ok::<_, std::convert::Infallible>(event))
    });
    let keep_alive = KeepAlive::new().text("still downloading");
    Ok(Sse::new(Box::pin(events)).keep_alive(keep_alive).into_response())
}

/// `POST /api/pull`
pub async fn pull_as_ollama(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let asked = operators_body(&app, &caller, &headers, body, None).await?;
    let (first, mut reports, guard) = begin(&app, asked.repo, true).await?;
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    if asked.stream {
        let lines = rest(first, reports, move |report| {
            // Dropped with the stream.
            let _ = &guard;
            Some(Ok::<_, std::convert::Infallible>(format!(
                "{}\n",
                text(&OllamaPulled::from(&report))
            )))
        });
        return Ok((kind, Body::from_stream(lines)).into_response());
    }
    let mut last = first;
    while let Some(report) = reports.recv().await {
        last = report;
    }
    match last {
        Report::Failed(error) => Err(error),
        last => Ok(axum::Json(OllamaPulled::from(&last)).into_response()),
    }
}

/// `GET /v1/models/pull`: for who has not asked for the download, or was disconnected.
pub async fn running(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<axum::Json<PullState>, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    let running = app.pulls.running().map(|(model, Step { file, completed, total })| RunningPull {
        model,
        file,
        completed,
        total,
    });
    Ok(axum::Json(PullState { running }))
}

/// `DELETE /v1/models/pull`
pub async fn stop(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<axum::Json<StoppedPull>, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    let repo = app.pulls.stop().ok_or_else(ApiError::no_pull)?;
    tracing::info!(repo, "download stopped by an operator");
    Ok(axum::Json(StoppedPull { model: repo, stopped: true }))
}

/// Reads the body of an operator.
async fn operators_body(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
    content_type: Option<&str>,
) -> Result<Asked, ApiError> {
    app.access.operator(caller).inspect_err(|_| app.metrics.unauthorized())?;
    let body = app.read_json(headers, body, content_type).await?;
    let Asked { repo, stream } = app.bodies.parse(body.bytes, parse).await?;
    // Part of the program, and no repo. Clients of Ollama may name its tag.
    if repo.strip_suffix(":latest").unwrap_or(&repo) == bundled::NAME {
        return Ok(Asked { repo: bundled::NAME.into(), stream });
    }
    let repo = model_id(&repo, app.models.room())
        .map_err(|problem| ApiError::value("model", format!("model: {problem}")))?
        .to_string();
    Ok(Asked { repo, stream })
}

fn parse(mut body: Map<String, Value>) -> Result<Asked, ApiError> {
    let repo = body.shift_remove("model").or(body.shift_remove("name")).unwrap_or_default();
    let Value::String(repo) = repo else {
        return Err(ApiError::missing("model", "model: must be the id of a repo (owner/name)"));
    };
    let stream = match body.shift_remove("stream") {
        None | Some(Value::Null) => true,
        Some(Value::Bool(stream)) => stream,
        Some(_) => {
            return Err(ApiError::invalid("invalid_type", "stream", "stream: must be a boolean"));
        }
    };
    // Ollama's clients always send it; downloads are checked in any case.
    let insecure = body.shift_remove("insecure");
    if insecure.is_some_and(|insecure| insecure == true) {
        return Err(ApiError::unsupported("insecure", "insecure: is not supported"));
    }
    if let Some((name, _)) = body.iter().find(|(_, value)| !value.is_null()) {
        return Err(ApiError::unknown_field(name, ["model", "name", "stream", "insecure"]));
    }
    Ok(Asked { repo, stream })
}

/// The refusal of what would change the cache while something else does.
pub fn busy(busy: Busy) -> ApiError {
    match busy {
        Busy::Download => ApiError::conflict(
            "pull_in_progress",
            "another download is running; wait until it has ended, or stop it (DELETE /v1/models/pull)",
        ),
        Busy::Removal => ApiError::conflict(
            "removal_in_progress",
            "a model is being removed; try again when that has ended",
        ),
    }
}

/// Starts a download; returns its first report, where the others come from, and what stops it when it is dropped if
/// `stops`.
///
/// # Errors
/// If another one or a removal runs, or this one fails before it begins.
async fn begin(
    app: &Arc<App>,
    repo: String,
    stops: bool,
) -> Result<(Report, Receiver<Report>, Option<StopOnDrop>), ApiError> {
    if repo == bundled::NAME {
        // Programs that pull a model before they use it go on.
        let (_, receiver) = channel(1);
        return Ok((Report::Done(PathBuf::new()), receiver, None));
    }
    let (turn, stop) = app.pulls.begin(&repo).map_err(busy)?;
    let guard = stops.then(|| StopOnDrop(stop.clone()));
    let (reports, mut receiver) = Reports::new();
    let download = Download { hub: app.hub(), app: app.clone(), repo, reports, stop };
    tokio::task::spawn_blocking(move || download.run(turn));
    match receiver.recv().await {
        Some(Report::Failed(error)) => Err(error),
        Some(first) => Ok((first, receiver, guard)),
        // It panicked, which the log has.
        None => {
            Err(ApiError::download_failed("the download failed; the server's log has the reason"))
        }
    }
}

/// Where the reports of a download go: to a client that may read slowly, or be gone.
struct Reports {
    sender: Sender<Report>,
    /// Room for the last one.
    last: OwnedPermit<Report>,
}

impl Reports {
    fn new() -> (Self, Receiver<Report>) {
        let (sender, receiver) = channel(REPORTS);
        let last = sender.clone().try_reserve_owned().expect("a new channel has room");
        (Self { sender, last }, receiver)
    }

    /// Sends a report, unless many wait.
    fn send(&self, report: Report) {
        let _ = self.sender.try_send(report);
    }

    /// Sends the last report.
    fn end(self, report: Report) {
        drop(self.last.send(report));
    }
}

/// A download on its thread.
struct Download {
    hub: Hub,
    app: Arc<App>,
    repo: String,
    reports: Reports,
    stop: Stop,
}

impl Download {
    fn run(self, turn: Turn) {
        let started = Instant::now();
        let last = match self.download() {
            Ok(folder) => {
                let elapsed_ms = started.elapsed().as_millis() as u64;
                tracing::info!(repo = self.repo, elapsed_ms, "model downloaded");
                Report::Done(folder)
            }
            Err(error) => {
                let problem = error.message.as_str();
                tracing::warn!(repo = self.repo, problem, "download failed");
                Report::Failed(error)
            }
        };
        // Who has read the last report may start the next download.
        drop(turn);
        self.reports.end(last);
    }

    fn download(&self) -> Result<PathBuf, ApiError> {
        if let Some(folder) = self.hub.cached(&self.repo) {
            return Ok(folder);
        }
        let failed = |error: anyhow::Error| match is_disk_full(&error) {
            true => ApiError::disk_full(format!("{error:#}")),
            false => ApiError::download_failed(format!("{error:#}")),
        };
        let plan = self.hub.plan_until(&self.repo, &self.stop).map_err(failed)?;
        plan.check_family(&model_types())
            .map_err(|problem| ApiError::value("model", format!("model: {problem:#}")))?;
        let needs = self.needs(&plan);
        needs.check_disk().map_err(|error| ApiError::disk_full(error.to_string()))?;
        tracing::info!(repo = self.repo, bytes = needs.left(), "download begins");
        let step = Step { file: None, completed: needs.here, total: needs.total };
        self.app.pulls.note(step);
        self.reports.send(Report::Planned(needs));
        let mut next = Instant::now();
        let mut report = |progress: &Progress<'_>| self.report(progress, &mut next);
        self.hub.download_until(&plan, &mut report, &self.stop).map_err(failed)
    }

    fn needs(&self, plan: &Plan) -> Needs {
        let models = &self.app.models;
        Needs::of(plan, &self.hub.cache, models.numbers(), models.budget())
    }

    fn report(&self, progress: &Progress<'_>, next: &mut Instant) {
        let Progress { file, done, total } = *progress;
        if Instant::now() < *next && done < total {
            return;
        }
        *next = Instant::now() + REPORT_EVERY;
        self.app.pulls.note(Step { file: Some(file.into()), completed: done, total });
        self.reports.send(Report::Progress { file: file.into(), done, total });
    }
}

/// `first` and what follows, rendered.
fn rest<T>(
    first: Report,
    reports: Receiver<Report>,
    render: impl Fn(Report) -> Option<T>,
) -> impl Stream<Item = T> {
    stream::unfold((Some(first), reports, render), |(first, mut reports, render)| async move {
        let report = match first {
            Some(first) => first,
            None => reports.recv().await?,
        };
        Some((render(report)?, (None, reports, render)))
    })
}

/// The JSON of a report.
fn text(report: &impl Serialize) -> String {
    serde_json::to_string(report).expect("a report has string keys only")
}

/// The download that runs, if any.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct PullState {
    running: Option<RunningPull>,
}

/// A download that runs.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct RunningPull {
    model: String,
    /// The file that comes.
    file: Option<String>,
    /// Bytes of all files that are here.
    completed: u64,
    /// Bytes of all files; 0 while the hub is asked.
    total: u64,
}

/// The download that was stopped.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct StoppedPull {
    model: String,
    stopped: bool,
}

/// How far a download is.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Pulled {
    /// What it needs.
    Planned {
        #[schemars(extend("const" = "downloading"))]
        status: &'static str,
        total: u64,
        completed: u64,
        left: u64,
        disk_free: Option<u64>,
        memory: MemoryNeeds,
    },
    /// Bytes of all files that are here, and the file that comes.
    Progress {
        #[schemars(extend("const" = "downloading"))]
        status: &'static str,
        file: String,
        total: u64,
        completed: u64,
        left: u64,
    },
    /// The folder with all files.
    Done {
        #[schemars(extend("const" = "success"))]
        status: &'static str,
        folder: PathBuf,
    },
    /// Why it failed.
    Failed {
        #[serde(flatten)]
        error: OpenAiError,
        #[schemars(extend("const" = "failed"))]
        status: &'static str,
    },
}

/// Bytes of memory that a model needs.
#[derive(Serialize, JsonSchema)]
pub struct MemoryNeeds {
    weights: u64,
    limit: u64,
    fits: bool,
}

impl From<&Report> for Pulled {
    fn from(report: &Report) -> Self {
        let status = "downloading";
        match report {
            Report::Planned(needs) => Self::Planned {
                status,
                total: needs.total,
                completed: needs.here,
                left: needs.left(),
                disk_free: needs.disk_free,
                memory: MemoryNeeds {
                    weights: needs.memory,
                    limit: needs.memory_limit,
                    fits: needs.memory <= needs.memory_limit,
                },
            },
            Report::Progress { file, done, total } => Self::Progress {
                status,
                file: file.clone(),
                total: *total,
                completed: *done,
                left: total.saturating_sub(*done),
            },
            Report::Done(folder) => Self::Done { status: "success", folder: folder.clone() },
            Report::Failed(error) => Self::Failed { error: error.openai(), status: "failed" },
        }
    }
}

/// How far a download is, for clients of Ollama.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub enum OllamaPulled {
    /// State of the pull, and bytes of the file that comes.
    Running {
        status: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        total: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        completed: Option<u64>,
    },
    /// Why it failed.
    Failed { error: String },
}

impl From<&Report> for OllamaPulled {
    fn from(report: &Report) -> Self {
        let state =
            |status: &str| Self::Running { status: status.into(), total: None, completed: None };
        match report {
            Report::Planned(_) => state("pulling manifest"),
            Report::Progress { file, done, total } => Self::Running {
                status: format!("pulling {file}"),
                total: Some(*total),
                completed: Some(*done),
            },
            Report::Done(_) => state("success"),
            Report::Failed(error) => Self::Failed { error: error.message.clone() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client that did not read got five reports a second into the server's memory, until the download ended.
    #[test]
    fn reports_wait_within_a_limit_and_the_last_one_arrives() {
        let (reports, mut receiver) = Reports::new();
        for done in 0..10 * REPORTS as u64 {
            reports.send(Report::Progress { file: "a".into(), done, total: 1 << 20 });
        }
        reports.end(Report::Done("folder".into()));
        let mut received = 0;
        let last = loop {
            match receiver.try_recv() {
                Ok(Report::Done(folder)) => break folder,
                Ok(_) => received += 1,
                Err(error) => panic!("{received} reports, and then {error}"),
            }
        };
        assert_eq!((received, last), (REPORTS - 1, PathBuf::from("folder")));
        assert!(receiver.try_recv().is_err(), "nothing follows it");
    }
}
