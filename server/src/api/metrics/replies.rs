//! Times and tokens of requests for replies, by model, profile and route.
//!
//! The labels have names of the configuration and of the router only, so that no client makes a series. A request looks
//! its series up once; what it observes then costs an uncontended lock and a search among a few buckets, on the thread
//! that sends the piece and never on the engine's.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use steersman_engine::request::Usage;

use super::register;

/// `model`, `profile` and `route`.
type Labels = [(&'static str, String); 3];

/// [`Labels`], and one more.
type MoreLabels = [(&'static str, String); 4];

/// Upper bounds of times of a request in seconds: a GPU answers within 2 ms, a CPU may take minutes.
const REQUEST_BUCKETS: [f64; 18] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
    200.0, 500.0,
];

/// Upper bounds of times between two pieces, closer where models differ: from 1,000 tokens a second to 10.
const GAP_BUCKETS: [f64; 20] = [
    0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064,
    0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0,
];

fn of_request() -> Histogram {
    Histogram::new(REQUEST_BUCKETS)
}

fn of_gap() -> Histogram {
    Histogram::new(GAP_BUCKETS)
}

/// Histograms by the labels `L`.
type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// All series of replies.
pub struct Replies {
    first_token: Histograms<Labels>,
    gap: Histograms<Labels>,
    queue: Histograms<Labels>,
    prefill: Histograms<Labels>,
    duration: Histograms<MoreLabels>,
    tokens: Family<MoreLabels, Counter>,
}

impl Default for Replies {
    fn default() -> Self {
        Self {
            first_token: Family::new_with_constructor(of_request),
            gap: Family::new_with_constructor(of_gap),
            queue: Family::new_with_constructor(of_request),
            prefill: Family::new_with_constructor(of_request),
            duration: Family::new_with_constructor(of_request),
            tokens: Family::default(),
        }
    }
}

impl Replies {
    /// The series of one model, profile and route.
    pub fn of(&self, model: &str, profile: &str, route: &str) -> ReplyMetrics {
        let labels = labels(model, profile, route);
        ReplyMetrics {
            first_token: self.first_token.get_or_create_owned(&labels),
            gap: self.gap.get_or_create_owned(&labels),
            queue: self.queue.get_or_create_owned(&labels),
            prefill: self.prefill.get_or_create_owned(&labels),
            duration: self.duration.clone(),
            tokens: self.tokens.clone(),
            labels,
        }
    }

    /// Observes a request that ended before its model and profile were known.
    pub fn ended_early(&self, route: &str, status: &'static str, total: Duration) {
        ended(&self.duration, labels("", "", route), status, total);
    }

    /// Registers all series.
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, histograms) in [
            (
                "time_to_first_token_seconds",
                "Time from the arrival of a request to the first piece of its reply",
                &self.first_token,
            ),
            (
                "token_gap_seconds",
                "Time between two pieces of a reply; a piece has one token or a few",
                &self.gap,
            ),
            (
                "queue_seconds",
                "Time from the arrival of a request to the start of its prompt: reading, waiting, preparation",
                &self.queue,
            ),
            (
                "prefill_seconds",
                "Time from the start of a prompt to the first piece of the reply, or to the embedding",
                &self.prefill,
            ),
        ] {
            register(registry, name, help, histograms.clone());
        }
        let help = "Time from the arrival of a request to its end";
        register(registry, "request_duration_seconds", help, self.duration.clone());
        let help =
            "Tokens of successful requests: prompt (cached of them restored), reasoning, answer";
        register(registry, "tokens", help, self.tokens.clone());
    }
}

/// The series of one model, profile and route.
pub struct ReplyMetrics {
    pub first_token: Histogram,
    pub gap: Histogram,
    pub queue: Histogram,
    pub prefill: Histogram,
    duration: Histograms<MoreLabels>,
    tokens: Family<MoreLabels, Counter>,
    labels: Labels,
}

impl ReplyMetrics {
    /// Observes the end of a request, with its class of status.
    pub fn ended(&self, status: &'static str, total: Duration) {
        ended(&self.duration, self.labels.clone(), status, total);
    }

    /// Counts the tokens of a successful request.
    pub fn count(&self, usage: &Usage) {
        for (kind, tokens) in [
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("reasoning", usage.reasoning_tokens),
            ("answer", usage.answer_tokens),
        ] {
            let labels = with(self.labels.clone(), "kind", kind);
            self.tokens.get_or_create(&labels).inc_by(tokens.into());
        }
    }
}

fn ended(
    durations: &Histograms<MoreLabels>,
    labels: Labels,
    status: &'static str,
    total: Duration,
) {
    durations.get_or_create(&with(labels, "status", status)).observe(total.as_secs_f64());
}

fn labels(model: &str, profile: &str, route: &str) -> Labels {
    [("model", model.into()), ("profile", profile.into()), ("route", route.into())]
}

fn with([model, profile, route]: Labels, name: &'static str, value: &str) -> MoreLabels {
    [model, profile, route, (name, value.into())]
}
