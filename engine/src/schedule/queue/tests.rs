//! Tests of the queue.

use super::*;
use crate::request::{Embedding, Form, ResponseFormat};

fn failure(events: &mut mpsc::UnboundedReceiver<Event>) -> Error {
    match events.try_recv() {
        Ok(Event::Failed(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// Before, clients that had hung up kept their places until the running request ended: with all 32
/// gone, a new client got 429.
#[test]
fn clients_that_disconnect_free_their_places_at_once() {
    let queue = Queue::new(3);
    let _first = queue.add(Request::default()).unwrap();
    let preparing = queue.add(Request::default()).unwrap();
    let waiting = queue.add(Request::default()).unwrap();
    let _taken = [queue.try_take().unwrap(), queue.try_take().unwrap()];
    assert!(matches!(
        queue.add(Request::default()),
        Err(Error::Request(RequestError::QueueFull { limit: 3 }))
    ));
    drop(preparing);
    drop(waiting);
    assert_eq!(queue.waiting(), 1);
    let _fourth = queue.add(Request::default()).unwrap();
    assert_eq!(queue.waiting(), 2);
}

#[test]
fn a_request_past_its_deadline_is_told_so_and_frees_its_place() {
    let queue = Queue::new(2);
    let soon = || Request { deadline: Some(Instant::now()), ..Request::default() };
    let later = Some(Instant::now() + Duration::from_secs(3600));
    let mut expired = queue.add(soon()).unwrap();
    let _other = queue.add(Request { deadline: later, ..Request::default() }).unwrap();
    assert_eq!(queue.waiting(), 1);
    let error = failure(&mut expired);
    let expected = RequestError::Deadline { stage: "waiting" };
    assert_eq!(error.to_string(), expected.to_string());
    // The engine thread wakes up for deadlines when it waits for requests.
    let mut expired = queue.add(soon()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(matches!(queue.wait_for_next(), Next::End)));
        assert!(matches!(expired.blocking_recv(), Some(Event::Failed(_))));
        queue.stop();
    });
}

/// A2: two forms that took long to compile kept both threads that prepare requests, so that no other request
/// was answered, and `/health` said "ok" all the while, also after their clients had hung up.
#[test]
fn requests_without_a_form_pass_those_that_are_compiled() {
    let queue = Queue::new(100);
    let form = ResponseFormat { field: "format", form: Form::JsonObject };
    let formed = || Request { response_format: Some(form.clone()), ..Request::default() };
    let mut events: Vec<_> = (0..10).map(|_| queue.add(formed()).unwrap()).collect();
    events.push(queue.add(Request::default()).unwrap());
    assert_eq!(queue.preparing_for(), None);
    let taken: Vec<_> = std::iter::from_fn(|| queue.try_take()).collect();
    assert_eq!(taken.len(), AHEAD);
    let plain = queue.lock().take(Lane::WithoutForm).unwrap();
    assert!(plain.job.request.response_format.is_none());
    assert!(queue.lock().take(Lane::WithoutForm).is_none());
    events.clear();
    drop(plain.job);
    assert_eq!(queue.waiting(), 0);
    assert!(queue.preparing_for().is_some());
    for taken in taken.iter().map(|taken| taken.number).chain([plain.number]) {
        queue.leave(taken);
    }
    assert_eq!(queue.preparing_for(), None);
}

/// Before, 30 requests of one profile ran before the first of another.
#[test]
fn requests_of_profiles_take_turns() {
    let queue = Queue::new(100);
    let add = |profile: &str| {
        queue.add(Request { profile: profile.into(), ..Request::default() }).unwrap()
    };
    let mut events: Vec<_> = (0..30).map(|_| add("a")).collect();
    // Prepared, and not started.
    let taken: Vec<_> = std::iter::from_fn(|| queue.try_take()).collect();
    assert_eq!(taken.len(), AHEAD);
    events.extend(["b", "b", "c"].map(add));
    // Those of others are prepared at once, though enough are ready.
    let others: Vec<_> = std::iter::from_fn(|| queue.try_take()).collect();
    let profiles = others.iter().map(|taken| taken.job.request.profile.as_str());
    assert_eq!(profiles.collect::<String>(), "bc");
    let order = || -> String {
        let state = queue.lock();
        state.order(&[], |_| 0).into_iter().map(|i| state.entries[i].profile.as_str()).collect()
    };
    assert!(order().starts_with("abcabaaa"), "{}", order());
    // Whose turn was last comes last in its round.
    queue.lock().turns = BTreeMap::from([("a".into(), 2), ("b".into(), 1), ("c".into(), 3)]);
    assert!(order().starts_with("bacbaaaa"), "{}", order());
    // Clients that disconnect give up no turn of their profile.
    events.drain(..29);
    assert_eq!(order(), "bacb");
}

/// A3: the texts of a body, and the choices of a request, came before all other requests.
#[test]
fn the_requests_of_a_body_take_turns_with_others() {
    let queue = Queue::new(3);
    let of = |profile: &str| Request { profile: profile.into(), ..Request::default() };
    let embedding = Some(Embedding { dimensions: None, truncates: false });
    let text = || Choices::from(Request { embedding, ..of("a") });
    let mut texts = queue.add_all((0..100).map(|_| text()).collect()).unwrap();
    let _events = [queue.add(of("b")).unwrap(), queue.add(of("a")).unwrap()];
    assert_eq!((queue.waiting(), texts.len()), (3, 100), "a body has one place");
    // The first of each body, then as many texts as run in a step.
    let taken: Vec<_> = std::iter::from_fn(|| queue.try_take()).collect();
    let bodies: Vec<_> = taken.iter().map(|taken| taken.body).collect();
    assert_eq!((bodies.len(), &bodies[..4]), (TEXTS_AHEAD + 2, &[1, 2, 3, 1][..]));
    // A client that disconnects from some texts keeps the place for the others.
    texts.drain(..TEXTS_AHEAD);
    assert_eq!(queue.waiting(), 3);
    assert_eq!(queue.try_take().map(|taken| taken.body), Some(1));
    drop(texts);
    assert_eq!(queue.waiting(), 2);
    // What runs counts as earlier rounds, and what waits for room has a place in its line.
    let order = |running: [usize; 2], since| {
        let claim = Claim { profile: "b", since };
        let running = |profile: &str| running[usize::from(profile == "b")];
        queue.lock().order(&[claim], running)
    };
    assert_eq!(order([0, 0], 0), [2, 1, 0]);
    assert_eq!(order([0, 0], 9), [0, 1, 2]);
    assert_eq!(order([2, 0], 9), [0, 2, 1]);
}

#[test]
fn a_stopped_engine_ends_waiting_requests_with_an_error() {
    let queue = Queue::new(2);
    let mut waiting = queue.add(Request::default()).unwrap();
    let mut preparing = queue.add(Request::default()).unwrap();
    let taken = queue.try_take().unwrap();
    queue.stop();
    for events in [&mut waiting, &mut preparing] {
        assert!(matches!(failure(events), Error::Stopped));
    }
    assert!(!queue.leave(taken.number));
    assert!(matches!(queue.add(Request::default()), Err(Error::Stopped)));
    assert!(matches!(queue.first(), Next::End));
    assert!(!*queue.ended().borrow());
    queue.end();
    assert!(*queue.ended().borrow());
}
