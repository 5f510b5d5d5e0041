//! What a shadow would have changed: its answers beside those that were applied, over the newest
//! requests.

use super::record::Record;
use crate::contract::Answer;

/// Differences that are listed; further ones are counted.
const DIFFERENCES: usize = 50;

/// The answers of one policy as a shadow, compared with those of the applied policies to the same
/// calls.
#[derive(Debug, Default)]
pub struct ShadowReport {
    /// Requests in memory that had this shadow.
    pub requests: usize,
    /// Calls of the shadow with an answer, without `on-finish`.
    pub calls: usize,
    /// Its calls that failed.
    pub failures: usize,
    /// Answers of the shadow that no applied policy gave.
    pub differing: usize,
    /// The newest of these, newest first.
    pub differences: Vec<Difference>,
}

/// A call that a shadow answered in another way.
#[derive(Debug)]
pub struct Difference {
    /// The shadow's call and answer.
    pub shadow: Record,
    /// Records of the applied policies; empty if no applied policy was called.
    pub applied: Vec<Record>,
}

impl ShadowReport {
    /// Adds the calls of `policy` as a shadow in one request, newer than those before it, whose
    /// records are given in order.
    pub(super) fn add_request(&mut self, policy: &str, records: &[&Record]) {
        let mut has_shadow = false;
        for (at, record) in records.iter().enumerate() {
            if !record.link.shadow || record.link.policy != policy {
                continue;
            }
            has_shadow = true;
            let Some(answer) = &record.answer else {
                self.failures += 1;
                continue;
            };
            if let Answer::Finish(_) = answer {
                continue;
            }
            self.calls += 1;
            self.failures += usize::from(record.failure.is_some());
            let applied = applied(&records[..at], record);
            let is_same = match &applied[..] {
                // Policies without the hook leave everything as it is.
                [] => *answer == record.call.default_answer(),
                applied => applied.iter().any(|other| other.answer.as_ref() == Some(answer)),
            };
            if is_same {
                continue;
            }
            self.differing += 1;
            self.differences.insert(
                0,
                Difference {
                    shadow: (*record).clone(),
                    applied: applied.into_iter().cloned().collect(),
                },
            );
            self.differences.truncate(DIFFERENCES);
        }
        self.requests += usize::from(has_shadow);
    }
}

/// The records of the applied policies in the call of `shadow`, which is called after them: those
/// directly `before` it whose links ascend.
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
