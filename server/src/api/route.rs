//! Follows requests that a policy routes to another model or profile.
//!
//! The engine refuses such a request with [`RequestError::Routed`] before it has begun. Here it begins again at its
//! destination, with the policies of that profile, and its events pass through. A request is routed once.
//!
//! The operator grants destinations with `routes` of a profile: the key of the client need not open them. The
//! limit on requests of the destination applies.

use std::sync::Arc;

use steersman_engine::request::{Event, Request};
use steersman_engine::{Engine, Error, RequestError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use super::app::App;
use crate::models::Models;

/// Where the requests of a profile go if a policy routes them.
#[derive(Clone)]
pub struct Routes {
    app: Arc<App>,
    profile: String,
    deadline: Instant,
    /// Whether the profile has routes.
    any: bool,
}

impl Routes {
    /// The route of a profile, until `deadline`.
    pub fn new(app: &Arc<App>, profile: &str, deadline: Instant) -> Self {
        let profiles = app.profiles.read();
        let any = profiles.get(profile).is_some_and(|p| !p.settings.routes.is_empty());
        Self { app: app.clone(), profile: profile.into(), deadline, any }
    }

    /// Queues a request and follows it.
    ///
    /// # Errors
    /// The errors of [`Engine::submit`].
    pub fn submit(
        &self,
        engine: &Engine,
        request: Arc<Request>,
    ) -> Result<UnboundedReceiver<Event>, Error> {
        let events = engine.submit(Request::clone(&request))?;
        Ok(self.follow(request, events))
    }

    /// Whether the profile has routes.
    pub fn are_any(&self) -> bool {
        self.any
    }

    /// Follows a request that was queued and sends `events`.
    pub fn follow(
        &self,
        request: Arc<Request>,
        mut events: UnboundedReceiver<Event>,
    ) -> UnboundedReceiver<Event> {
        if !self.any {
            return events;
        }
        let (out, receiver) = unbounded_channel();
        let routes = self.clone();
        tokio::spawn(async move {
            let first = tokio::select! {
                first = events.recv() => first,
                () = out.closed() => return,
            };
            let Some(Event::Failed(Error::Request(RequestError::Routed { route }))) = first else {
                first.into_iter().for_each(|event| drop(out.send(event)));
                drop(request);
                return pass(events, out, None::<()>).await;
            };
            let taken = tokio::select! {
                taken = routes.take(&route, Arc::unwrap_or_clone(request)) => taken,
                () = out.closed() => return,
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

    /// Begins `request` at the destination `route`. Returns the event that says so, what the request keeps until
    /// it has ended, and its events.
    async fn take(
        &self,
        route: &str,
        request: Request,
    ) -> Result<(Event, impl Send + use<>, UnboundedReceiver<Event>), Error> {
        let closed = |problem: String| {
            Error::Request(RequestError::RouteClosed { route: route.into(), problem })
        };
        let models = &self.app.models;
        let (index, profile) = resolve(models, &self.profile, route)
            .ok_or_else(|| closed("there is no such model or profile".into()))?;
        let permit = self.app.access.acquire(&profile);
        let permit = permit.map_err(|error| closed(error.message.to_string()))?;
        let lease = models.acquire(index, self.deadline).await;
        let lease = lease.map_err(|refusal| closed(refusal.to_string()))?;
        let request = Request {
            id: format!("{}-routed", request.id),
            profile: profile.clone(),
            running_limit: self.app.access.running_limit(&profile),
            is_routed: true,
            ..request
        };
        let received = lease.engine().submit(request)?;
        let routed = Event::Routed { model: models.name(index), profile };
        Ok((routed, (permit, lease), received))
    }
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
