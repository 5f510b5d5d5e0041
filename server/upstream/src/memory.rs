//! What an upstream wants back with the calls of its earlier replies.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

/// Most bytes of what upstreams want back.
const MEMORY_BYTES: usize = 32 << 20;

/// What upstreams want back with calls of earlier replies: blocks of reasoning with signatures, and signatures of
/// calls. Clients do not have them. The newest are kept.
#[derive(Default)]
pub struct Memory(Mutex<Remembered>);

#[derive(Default)]
struct Remembered {
    calls: HashMap<String, Entry>,
    order: VecDeque<String>,
    bytes: usize,
}

struct Entry {
    extra: Option<Value>,
    blocks: Arc<[Value]>,
    bytes: usize,
}

impl Memory {
    /// Remembers the calls of a reply, each with what the upstream wants back with it, and `blocks` before the first.
    pub fn add(&self, calls: &[(String, Option<Value>)], blocks: Vec<Value>) {
        let blocks: Arc<[Value]> = blocks.into();
        let shared = blocks.iter().map(|block| block.to_string().len()).sum::<usize>();
        let known = &mut *self.0.lock();
        for (id, extra) in calls {
            if extra.is_none() && blocks.is_empty() {
                continue;
            }
            let own = extra.as_ref().map_or(0, |extra| extra.to_string().len());
            let bytes = id.len() + own + shared;
            let entry = Entry { extra: extra.clone(), blocks: blocks.clone(), bytes };
            match known.calls.insert(id.clone(), entry) {
                Some(old) => known.bytes -= old.bytes,
                None => known.order.push_back(id.clone()),
            }
            known.bytes += bytes;
        }
        while known.bytes > MEMORY_BYTES
            && let Some(oldest) = known.order.pop_front()
        {
            known.bytes -= known.calls.remove(&oldest).map_or(0, |entry| entry.bytes);
        }
    }

    /// What the upstream wants back with a call.
    pub fn of_call(&self, id: &str) -> Option<Value> {
        self.0.lock().calls.get(id)?.extra.clone()
    }

    /// The blocks before a call.
    pub fn before_call(&self, id: &str) -> Vec<Value> {
        self.0.lock().calls.get(id).map(|entry| entry.blocks.to_vec()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_upstreams_want_back_is_kept_within_its_bound() {
        let memory = Memory::default();
        let block = json!({"type": "thinking", "signature": "s"});
        memory.add(&[("a".into(), Some(json!({"x": 1}))), ("b".into(), None)], vec![block.clone()]);
        assert_eq!(memory.of_call("a"), Some(json!({"x": 1})));
        assert_eq!(memory.before_call("b"), [block]);
        memory.add(&[("c".into(), None)], Vec::new());
        assert!(memory.before_call("c").is_empty());
        let large = json!("x".repeat(MEMORY_BYTES / 2));
        memory.add(&[("d".into(), Some(large.clone()))], Vec::new());
        memory.add(&[("e".into(), Some(large))], Vec::new());
        assert!(memory.of_call("a").is_none() && memory.of_call("e").is_some());
        assert!(memory.0.lock().bytes <= MEMORY_BYTES);
    }
}
