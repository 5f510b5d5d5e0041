//! Follows requests that a policy routes to another model or profile, and those that an upstream could not answer.
//!
//! An engine or an upstream refuses a routed request with [`RequestError::Routed`] before it has begun. Here it begins
//! again at its destination, with the policies of that profile, and its events pass through. A request is routed once.
//! A request whose upstream fails before the reply has begun begins again at the next model of the upstream's
//! `fallback`. The fallbacks of that one do not count.
//!
//! The operator grants destinations with `routes` of a profile and `fallback` of an upstream: the key of the client need
//! not open them. The limit on requests of the destination applies.

use std::sync::Arc;

use steersman_engine::request::{Event, Request};
use steersman_engine::{Error, RequestError};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use super::access::Admission;
use super::app::App;
use crate::models::{Backend, Lease, Models};

/// A request that has begun elsewhere: the event that says so, what it keeps until it has ended, and its events.
type Taken = (Event, Kept, UnboundedReceiver<Event>);

/// What a request keeps at its destination.
struct Kept {
    _permit: Option<OwnedSemaphorePermit>,
    lease: Lease,
}

/// Where the requests of a profile go if a policy routes them.
#[derive(Clone)]
pub struct Routes {
    app: Arc<App>,
    profile: String,
    deadline: Instant,
    /// Whether the profile has routes.
    any: bool,
    /// Where requests go that the upstream could not answer.
    fallback: Arc<[String]>,
}

impl Routes {
    /// The routes of an admitted request, until `deadline`.
    pub fn new(app: &Arc<App>, admission: &Admission, deadline: Instant) -> Self {
        let profile = admission.profile.clone();
        let profiles = app.profiles.read();
        let any = profiles.get(&profile).is_some_and(|p| !p.settings.routes.is_empty());
        let fallback = admission.backend.fallback().into();
        Self { app: app.clone(), profile, deadline, any, fallback }
    }

    /// Queues a request and follows it.
    ///
    /// # Errors
    /// The errors of [`Backend::submit`].
    pub fn submit(
        &self,
        backend: &Backend,
        request: Arc<Request>,
    ) -> Result<UnboundedReceiver<Event>, Error> {
        let events = backend.submit(Request::clone(&request))?;
        Ok(self.follow(request, events))
    }

    /// Whether a request may begin again elsewhere.
    pub fn are_any(&self) -> bool {
        self.any || !self.fallback.is_empty()
    }

    /// Follows a request that was queued and sends `events`.
    pub fn follow(
        &self,
        request: Arc<Request>,
        mut events: UnboundedReceiver<Event>,
    ) -> UnboundedReceiver<Event> {
        if !self.are_any() {
            return events;
        }
        let (out, receiver) = unbounded_channel();
        let routes = self.clone();
        tokio::spawn(async move {
            let first = tokio::select! {
                first = events.recv() => first,
                () = out.closed() => return,
            };
            let taken = match first {
                Some(Event::Failed(Error::Request(RequestError::Routed { route }))) => {
                    tokio::select! {
                        taken = routes.take(&route, &request) => taken,
                        () = out.closed() => return,
                    }
                }
                Some(Event::Failed(Error::Request(error)))
                    if error.is_of_upstream() && !routes.fallback.is_empty() =>
                {
                    let Routes { fallback, profile, .. } = &routes;
                    let error = error.into();
                    tokio::select! {
                        taken = routes.fall_back(fallback, profile, error, &request) => taken,
                        () = out.closed() => return,
                    }
                }
                first => {
                    first.into_iter().for_each(|event| drop(out.send(event)));
                    drop(request);
                    return pass(events, out, None::<()>).await;
                }
            };
            match taken {
                Ok((routed, kept, events)) => {
                    let _ = out.send(routed);
                    pass(events, out, Some(kept)).await;
                }
                Err(error) => drop(out.send(Event::Failed(error))),
            }
        });
        receiver
    }

    /// Begins `request` at the first fallback whose reply begins, after the upstream has failed with `error`.
    ///
    /// # Errors
    /// The newest failure of an upstream.
    async fn fall_back(
        &self,
        fallback: &[String],
        profile: &str,
        mut error: Error,
        request: &Request,
    ) -> Result<Taken, Error> {
        for name in fallback {
            let id = &request.id;
            tracing::warn!(id, fallback = name, %error, "upstream failed; asking the fallback");
            let problem: Error = match self.at_fallback(name, profile, request.clone()).await {
                Ok((routed, kept, mut events)) => match events.recv().await {
                    Some(Event::Failed(Error::Request(problem))) => problem.into(),
                    first => return Ok((routed, kept, after(first, events))),
                },
                Err(problem) => problem,
            };
            tracing::warn!(id, fallback = name, error = %problem, "fallback does not answer");
            // A refusal is about a model that the client did not ask for.
            if matches!(&problem, Error::Request(problem) if problem.is_of_upstream()) {
                error = problem;
            }
        }
        Err(error)
    }

    /// Begins `request` at a fallback, with its own profile, to which the operator need not grant the model.
    async fn at_fallback(
        &self,
        name: &str,
        profile: &str,
        request: Request,
    ) -> Result<Taken, Error> {
        // For the log.
        let closed = |problem: String| {
            Error::Request(RequestError::RouteClosed { route: name.into(), problem })
        };
        let resolved = self.app.models.resolve(name);
        let (index, own) = resolved.ok_or_else(|| closed("there is no such model".into()))?;
        let profile = own.unwrap_or_else(|| profile.into());
        self.begin(index, profile, request).await.map_err(closed)?
    }

    /// Begins `request` at the destination `route`, to which a policy routes it.
    async fn take(&self, route: &str, request: &Request) -> Result<Taken, Error> {
        let closed = |problem: String| {
            Error::Request(RequestError::RouteClosed { route: route.into(), problem })
        };
        let (index, profile) = resolve(&self.app.models, &self.profile, route)
            .ok_or_else(|| closed("there is no such model or profile".into()))?;
        let taken = self.begin(index, profile.clone(), request.clone()).await.map_err(closed)??;
        let fallback = taken.1.lease.engine().fallback().to_vec();
        if fallback.is_empty() {
            return Ok(taken);
        }
        let (routed, kept, mut events) = taken;
        match events.recv().await {
            Some(Event::Failed(Error::Request(failed))) if failed.is_of_upstream() => {
                drop(kept);
                self.fall_back(&fallback, &profile, failed.into(), request).await
            }
            first => Ok((routed, kept, after(first, events))),
        }
    }

    /// Begins `request` at a model with a profile.
    ///
    /// # Errors
    /// Why it takes no requests; or, within, the error of the request itself.
    async fn begin(
        &self,
        index: usize,
        profile: String,
        request: Request,
    ) -> Result<Result<Taken, Error>, String> {
        let models = &self.app.models;
        // That of its own profile it has.
        let permit = match profile == self.profile {
            true => None,
            false => self.app.access.acquire(&profile).map_err(|error| error.message)?,
        };
        let lease = models.acquire(index, self.deadline).await;
        let lease = lease.map_err(|refusal| refusal.to_string())?;
        let request = Request {
            id: format!("{}-routed", request.id),
            profile: profile.clone(),
            running_limit: self.app.access.running_limit(&profile),
            is_routed: true,
            ..request
        };
        let received = match lease.engine().submit(request) {
            Ok(received) => received,
            Err(error) => return Ok(Err(error)),
        };
        let routed = Event::Routed { model: models.name(index), profile };
        Ok(Ok((routed, Kept { _permit: permit, lease }, received)))
    }
}

/// `events` with `first` before them.
fn after(first: Option<Event>, mut events: UnboundedReceiver<Event>) -> UnboundedReceiver<Event> {
    let (out, receiver) = unbounded_channel();
    first.into_iter().for_each(|event| drop(out.send(event)));
    tokio::spawn(async move {
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                () = out.closed() => return,
            };
            let Some(event) = event else { return };
            let _ = out.send(event);
        }
    });
    receiver
}

/// Forwards events until the stream ends or the receiver is dropped. Drops `kept` before the final event, so the permit
/// is free when the client sees the end.
async fn pass(
    mut events: UnboundedReceiver<Event>,
    out: UnboundedSender<Event>,
    kept: Option<impl Send>,
) {
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = out.closed() => return,
        };
        let Some(event) = event else { return };
        if matches!(event, Event::Finished(_) | Event::Failed(_)) {
            drop(kept);
            let _ = out.send(event);
            return;
        }
        let _ = out.send(event);
    }
}

/// The model and the profile of a destination for requests of `profile`: `MODEL`, `MODEL@PROFILE`, an alias of
/// these, or a profile.
fn resolve(models: &Models, profile: &str, route: &str) -> Option<(usize, String)> {
    match models.resolve(route) {
        Some((index, Some(own))) => Some((index, own)),
        Some((index, None)) => {
            models.serving(Some(index), profile).ok().map(|index| (index, profile.into()))
        }
        None => models.serving(None, route).ok().map(|index| (index, route.into())),
    }
}
