//! The log on stderr of `steersman` and `steersman-policy`: `RUST_LOG` filters it, `STEERSMAN_LOG=json` writes objects.

mod line;
mod recent;

use std::error::Error;
use std::io::{self, IsTerminal};

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Identity, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

pub use self::line::without_numbers_of_errors;
use self::line::{Form, SpanFields};
pub use self::recent::{Line, Recent};

/// The default filter. The lines of rmcp repeat what servers send, as often as they send it: the server logs why a
/// connection was lost.
const LOG: &str = "info,wasmtime=warn,cranelift=warn,rmcp=off,ureq=warn";

/// The default filter of commands whose output is for people. Beside a running server they have no database of policies,
/// which none of them needs.
const WARNINGS: &str = "warn,rmcp=off,steersman_policy_host::database=error";

/// What the targets of the server's own lines begin with.
const TARGETS: [&str; 2] = ["steersman", "policy"];

/// Logs to stderr.
pub fn to_stderr() {
    init(LOG, None::<Identity>, None);
}

/// Logs warnings to stderr.
pub fn warnings_to_stderr() {
    init(WARNINGS, None::<Identity>, None);
}

/// Logs to stderr, and passes all spans and events to `layer`. Returns the newest lines.
pub fn of_server(layer: Option<impl Layer<Registry> + Send + Sync>) -> Recent {
    let recent = Recent::default();
    init(LOG, layer, Some(&recent));
    recent
}

/// Returns true if `error`, or what caused it, is that the reader of the output has gone, as `head` does when it has seen
/// enough. For the programs that end with an error.
pub fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    let causes = std::iter::successors(Some(error), |cause| (*cause).source());
    let is_it = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).any(is_it)
}

/// Logs with RUST_LOG or, without it, the given filter.
fn init(default: &str, layer: Option<impl Layer<Registry> + Send + Sync>, recent: Option<&Recent>) {
    let written = std::env::var_os("RUST_LOG").unwrap_or_default().to_string_lossy().into_owned();
    let (filter, problem) = choose(&written, default);
    let filter = EnvFilter::new(filter);
    let wanted = std::env::var("STEERSMAN_LOG").unwrap_or_default();
    let form = if wanted == "json" { Form::Json } else { Form::Text };
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(form == Form::Text && std::io::stderr().is_terminal())
        .event_format(form)
        .fmt_fields(SpanFields);
    // One filter for both: what is kept is what stderr has.
    let log = log.and_then(recent.map(Recent::layer)).with_filter(filter);
    tracing_subscriber::registry().with(layer).with(log).init();
    if !["", "text", "json"].contains(&wanted.as_str()) {
        tracing::warn!(form = wanted, "STEERSMAN_LOG must be text or json; the log is text");
    }
    if let Some(problem) = problem {
        tracing::warn!(filter = written, "{problem}");
    }
}

/// The filter to use, and what is wrong with the one that was `written`, which is empty without RUST_LOG.
///
/// A bare word that is no level is a target, of which the parser accepts every name: `infoo` silenced the server.
fn choose(written: &str, default: &str) -> (String, Option<String>) {
    // The parser takes a blank for a part of the target's name.
    let parts: Vec<_> = written.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    if parts.is_empty() {
        return (default.into(), None);
    }
    let filter = parts.join(",");
    if let Err(error) = EnvFilter::builder().parse(&filter) {
        let problem = format!("RUST_LOG cannot be used: {error}; the log has its default filter");
        return (default.into(), Some(problem));
    }
    if parts.iter().any(|part| concerns_server(part)) {
        return (filter, None);
    }
    let is_word = |part: &&&str| !part.contains(['=', '[']);
    if let Some(word) = parts.iter().find(is_word) {
        let problem = format!(
            "RUST_LOG names no level: `{word}` is none of off, error, warn, info, debug and trace; the log has its \
             default filter"
        );
        return (default.into(), Some(problem));
    }
    let problem = "RUST_LOG leaves out the server's own lines; add a level for them, as in `info,hyper=debug`";
    // The warning itself is one of these lines.
    (format!("{filter},{}=warn", module_path!()), Some(problem.into()))
}

/// Whether a part of a filter has a level for lines of the server or its policies.
fn concerns_server(part: &str) -> bool {
    let target = part.split(['=', '[']).next().unwrap_or_default();
    // What has no target is for all of them.
    part.parse::<LevelFilter>().is_ok()
        || TARGETS.iter().any(|own| own.starts_with(target) || target.starts_with(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_with_a_typo_does_not_silence_the_log() {
        let check = |written, filter: &str, words: Option<&str>| {
            let (chosen, problem) = choose(written, LOG);
            assert_eq!(chosen, filter, "{written}");
            match (&problem, words) {
                (None, None) => {}
                (Some(problem), Some(words)) => assert!(problem.contains(words), "{problem}"),
                _ => panic!("{written}: {problem:?}"),
            }
        };
        for good in [
            "debug",
            "OFF",
            "warn,policy=info",
            "info,hyper",
            "steersman_engine=trace",
            "[request]=debug",
            "off,hyper=debug",
        ] {
            check(good, good, None);
        }
        check("", LOG, None);
        check(" , ", LOG, None);
        check("info, hyper=debug ", "info,hyper=debug", None);
        check("foo=bar=baz", LOG, Some("cannot be used"));
        check("info,foo=verbose", LOG, Some("cannot be used"));
        check("infoo", LOG, Some("`infoo` is none of"));
        check("hyper=debug,debgu", LOG, Some("`debgu` is none of"));
        check("hyper=debug", "hyper=debug,steersman_log=warn", Some("leaves out"));
    }
}
