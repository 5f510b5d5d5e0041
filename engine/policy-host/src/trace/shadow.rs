//! What a shadow would have changed: its answers beside those that were applied, over the newest requests.

use std::collections::VecDeque;

use super::{Record, Traces};
use crate::contract::Answer;

/// Differences that are listed; further ones are counted.
const DIFFERENCES: usize = 50;

/// The answers of one policy as a shadow, compared with those of the applied policies to the same calls.
#[derive(Debug, Default)]
pub struct ShadowReport {
    /// Requests in memory that had this shadow.
    pub requests: usize,
    /// Its calls with an answer, without `on-finish`.
    pub calls: usize,
    /// Its calls that failed.
    pub failures: usize,
    /// Its answers that no applied policy gave.
    pub differing: usize,
    /// The newest of these, newest first.
    pub differences: Vec<Difference>,
}

/// A call that a shadow answered in another way.
#[derive(Debug)]
pub struct Difference {
    /// The shadow's call and answer.
    pub shadow: Record,
    /// Those of the applied policies; none if no applied policy was called.
    pub applied: Vec<Record>,
}

impl Traces {
    /// Compares `policy` as a shadow with what was applied, over the requests in memory.
    pub fn compare_shadow(&self, policy: &str) -> ShadowReport {
        let newest: Vec<_> = self.newest.lock().iter().cloned().collect();
        let mut report = ShadowReport::default();
        let mut differences = VecDeque::new();
        for traced in newest {
            let calls = traced.calls.lock();
            let (chunks, open) = (calls.chunks.clone(), calls.open.clone());
            drop(calls);
            let records: Vec<&Record> =
                chunks.iter().flat_map(|chunk| chunk.iter()).chain(&open).collect();
            let mut has_shadow = false;
            for (at, record) in records.iter().enumerate() {
                if !record.link.shadow || record.link.policy != policy {
                    continue;
                }
                has_shadow = true;
                let Some(answer) = &record.answer else {
                    report.failures += 1;
                    continue;
                };
                if let Answer::Finish(_) = answer {
                    continue;
                }
                report.calls += 1;
                report.failures += usize::from(record.failure.is_some());
                let applied = applied(&records[..at], record);
                let is_same = match &applied[..] {
                    // Policies without the hook leave everything as it is.
                    [] => *answer == record.call.default_answer(),
                    applied => applied.iter().any(|other| other.answer.as_ref() == Some(answer)),
                };
                if is_same {
                    continue;
                }
                report.differing += 1;
                differences.push_front(Difference {
                    shadow: (*record).clone(),
                    applied: applied.into_iter().cloned().collect(),
                });
                differences.truncate(DIFFERENCES);
            }
            report.requests += usize::from(has_shadow);
        }
        report.differences = differences.into();
        report
    }
}

/// The records of the applied policies in the call of `shadow`, which is called after them: those directly
/// `before` it whose links ascend.
fn applied<'a>(before: &[&'a Record], shadow: &Record) -> Vec<&'a Record> {
    let mut found = Vec::new();
    let mut next = shadow.link.index;
    for record in before.iter().rev() {
        if record.link.index >= next || record.call.hook() != shadow.call.hook() {
            break;
        }
        next = record.link.index;
        if !record.link.shadow {
            found.insert(0, *record);
        }
    }
    found
}
