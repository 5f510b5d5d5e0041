//! Lengths of definitions in tokens, so that a server which lists long tools does not fill the prompts of its profiles.
//!
//! Definitions of many bytes take up to a second to count, so they are counted on a thread where that delays no other
//! request, and once for a model: counts are remembered by digest.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::models::Backend;

/// Counts that are remembered; beyond so many they are counted anew.
const COUNTS: usize = 4096;

/// A tool that a request may be given.
pub struct Definition {
    /// The name that the model uses.
    pub name: String,
    pub definition: Value,
    /// Bytes of the definition as JSON.
    pub bytes: usize,
}

/// The counts that are remembered, by digest over model and definition.
#[derive(Default)]
pub struct Lengths(Mutex<HashMap<[u8; 32], usize>>);

impl Lengths {
    /// Takes out of `definitions` those for which half of the context has no room, and returns their names.
    pub async fn take_too_long(
        self: &Arc<Self>,
        definitions: &mut Vec<Definition>,
        backend: &Backend,
    ) -> Vec<String> {
        // An upstream counts tokens itself.
        let Some(engine) = backend.engine() else { return Vec::new() };
        let room = engine.info().context / 2;
        // A token has at least a byte, so that the tokens of a few short definitions need not be counted.
        if definitions.iter().map(|one| one.bytes).sum::<usize>() <= room {
            return Vec::new();
        }
        let (lengths, engine) = (self.clone(), engine.clone());
        let mut all = std::mem::take(definitions);
        let count = move || {
            let info = engine.info();
            let tokens =
                |text: &str| info.text.encode_plain(text).map_or(usize::MAX, |all| all.len());
            let too_long = lengths.take(&mut all, room, &info.fingerprint, tokens);
            (all, too_long)
        };
        match tokio::task::spawn_blocking(count).await {
            Ok((kept, too_long)) => {
                *definitions = kept;
                too_long
            }
            Err(error) => {
                tracing::error!(%error, "definitions of tools were not counted, and are left out");
                Vec::new()
            }
        }
    }

    /// The same with `room` for so many tokens, which `count` counts for `model`. The lock is held meanwhile: requests
    /// that come at once count the same definitions.
    fn take(
        &self,
        definitions: &mut Vec<Definition>,
        mut room: usize,
        model: &str,
        count: impl Fn(&str) -> usize,
    ) -> Vec<String> {
        let mut counts = self.0.lock();
        let is_too_long = |one: &mut Definition| {
            let text = one.definition.to_string();
            let digest = Sha256::new().chain_update(model).chain_update([0]).chain_update(&text);
            let digest: [u8; 32] = digest.finalize().into();
            if counts.len() >= COUNTS && !counts.contains_key(&digest) {
                counts.clear();
            }
            let tokens = *counts.entry(digest).or_insert_with(|| count(&text));
            let left = room.checked_sub(tokens);
            room = left.unwrap_or(room);
            left.is_none()
        };
        definitions.extract_if(.., is_too_long).map(|one| one.name).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn definitions_are_counted_once_for_a_model() {
        let (lengths, counted) = (Lengths::default(), Cell::new(0));
        let count = |text: &str| {
            counted.set(counted.get() + 1);
            text.len()
        };
        let take = |model: &str, texts: &[&str]| {
            let definition = |text: &&str| Definition {
                name: format!("tool {text}"),
                definition: Value::from(*text),
                bytes: text.len() + 2,
            };
            let mut all: Vec<_> = texts.iter().map(definition).collect();
            let too_long = lengths.take(&mut all, 12, model, count);
            (all.len(), too_long)
        };
        let two = (2, vec!["tool 12345678901".to_string()]);
        assert_eq!(take("m", &["1", "12345678901", "22"]), two);
        assert_eq!(counted.get(), 3);
        assert_eq!(take("m", &["1", "12345678901", "22"]), two);
        assert_eq!(counted.get(), 3);
        assert_eq!(take("other", &["1"]), (1, vec![]));
        assert_eq!(counted.get(), 4);
        let many: Vec<String> = (0..COUNTS + 2).map(|n| format!("many {n}")).collect();
        take("m", &many.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(lengths.0.lock().len() <= COUNTS);
    }
}
