//! The prefix cache: a radix tree over token ids, in which prefixes share what they have in common.
//!
//! Each node stands for a run of tokens after its parent's and holds their KV; at its end it may hold
//! a recurrent state. A model with recurrent state can resume only from a state; any other resumes
//! wherever there is KV.
//!
//! Entries are evicted in order of their last use. A state can be evicted on its own, KV only from leaf
//! nodes: KV that several prefixes share outlives the states along the way.
//!
//! A prefix may have the name of the conversation that used it last, as long as a request can resume after it.
//!
//! Knows neither models nor disks: KV and states are [`KvRun`] and [`Footprint`].
//!
//! Source: RadixAttention (arXiv:2312.07104, section 3), with states as checkpoints.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::error::Result;
use crate::request::PrefixName;
use crate::store::{Lru, Recency};

/// Something that takes memory.
pub trait Footprint {
    fn bytes(&self) -> u64;
}

impl<T: Footprint> Footprint for Option<T> {
    fn bytes(&self) -> u64 {
        self.as_ref().map_or(0, T::bytes)
    }
}

/// Keys and values of consecutive tokens.
pub trait KvRun: Footprint + Sized {
    /// The first `at` rows, and the others. Neither holds the other's memory.
    fn split(self, at: usize) -> Result<(Self, Self)>;

    /// The first `count` rows, sharing memory with these.
    fn first(&self, count: usize) -> Result<Self>;
}

type Id = u64;

/// The node without tokens, which is never removed.
const ROOT: Id = 0;

/// Entries that are looked at for each name that is asked for: a conversation has several prefixes.
const PREFIXES_OF_NAME: usize = 4;

pub struct PrefixTree<R, S> {
    nodes: HashMap<Id, Node<R, S>>,
    /// Nodes with a state, and leaves.
    lru: Lru<Id>,
    needs_state: bool,
    bytes: u64,
    newest: Id,
}

struct Node<R, S> {
    parent: Id,
    /// By their first token.
    children: BTreeMap<u32, Id>,
    tokens: Vec<u32>,
    /// Tokens from the root to its end.
    end: usize,
    /// `None` only at the root.
    kv: Option<R>,
    state: Option<S>,
    /// The conversation that used the prefix up to its end last.
    name: Option<PrefixName>,
    recency: Recency,
}

/// The saved part of a token sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Tokens with KV.
    pub kv: usize,
    /// Tokens after which a request can resume.
    pub resume: usize,
}

/// The path of a token sequence through the tree.
struct Walk {
    /// Nodes that match completely, the root first.
    whole: Vec<Id>,
    /// A node of which only the first tokens match, and their number.
    partly: Option<(Id, usize)>,
    /// Tokens that match.
    length: usize,
}

/// Content of the prefix cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheSize {
    /// Runs of tokens.
    pub nodes: usize,
    /// Tokens with KV.
    pub tokens: usize,
    /// Positions with a recurrent state.
    pub states: usize,
    /// Bytes of KV and states.
    pub bytes: u64,
}

/// A conversation from whose saved state a request can resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamedPrefix {
    /// Its name.
    pub name: PrefixName,
    /// Tokens of its longest prefix among those that were used lately.
    pub tokens: usize,
}

impl<R: KvRun, S: Footprint> PrefixTree<R, S> {
    /// An empty tree; with `needs_state`, requests resume only from states.
    pub fn new(needs_state: bool) -> Self {
        let root = Node {
            parent: ROOT,
            children: BTreeMap::new(),
            tokens: Vec::new(),
            end: 0,
            kv: None,
            state: None,
            name: None,
            recency: Recency::default(),
        };
        Self {
            nodes: HashMap::from([(ROOT, root)]),
            lru: Lru::default(),
            needs_state,
            bytes: 0,
            newest: ROOT,
        }
    }

    /// The saved part of `tokens`; a request resumes after at most `limit` of them.
    pub fn find(&self, tokens: &[u32], limit: usize) -> PrefixMatch {
        let walk = self.walk(tokens);
        if !self.needs_state {
            return PrefixMatch { kv: walk.length, resume: walk.length.min(limit) };
        }
        let (mut end, mut resume) = (0, 0);
        for id in &walk.whole {
            let node = &self.nodes[id];
            end += node.tokens.len();
            if end <= limit && node.state.is_some() {
                resume = end;
            }
        }
        PrefixMatch { kv: walk.length, resume }
    }

    /// The KV of all of `tokens`, in order, and the state at their end, if there is one. Counts as a
    /// use.
    ///
    /// # Panics
    /// If KV is missing: [`PrefixTree::find`] returns how much there is.
    pub fn get(&mut self, tokens: &[u32]) -> Result<(Vec<R>, Option<&S>)> {
        let walk = self.walk(tokens);
        assert_eq!(walk.length, tokens.len(), "not all of these tokens are saved");
        let mut kv = Vec::new();
        for id in &walk.whole[1..] {
            let node = &self.nodes[id];
            kv.push(node.kv().first(node.tokens.len())?);
        }
        if let Some((id, count)) = walk.partly {
            kv.push(self.nodes[&id].kv().first(count)?);
        }
        let last = *walk.whole.last().expect("the root is always there");
        self.touch(walk.partly.map_or(last, |(id, _)| id));
        let state = walk.partly.is_none().then(|| self.nodes[&last].state.as_ref());
        Ok((kv, state.flatten()))
    }

    /// Saves `kv`, which continues the saved KV of `tokens` to their end, and `state` at that end.
    /// Counts as a use; [`PrefixTree::shrink`] makes room afterwards. Saves nothing on an error.
    pub fn put(&mut self, tokens: &[u32], kv: Option<R>, state: Option<S>) -> Result<()> {
        let walk = self.walk(tokens);
        let mut at = *walk.whole.last().expect("the root is always there");
        if let Some((id, count)) = walk.partly {
            at = self.split(id, count)?;
        }
        if let Some(kv) = kv {
            debug_assert!(walk.length < tokens.len());
            self.newest += 1;
            let id = self.newest;
            let (end, tokens) = (tokens.len(), tokens[walk.length..].to_vec());
            self.bytes += kv.bytes();
            let parent = self.nodes.get_mut(&at).expect("walked over");
            parent.children.insert(tokens[0], id);
            let node = Node {
                parent: at,
                children: BTreeMap::new(),
                tokens,
                end,
                kv: Some(kv),
                state: None,
                name: None,
                recency: Recency::default(),
            };
            self.nodes.insert(id, node);
            self.enlist(at);
            at = id;
        }
        if state.is_some() && at != ROOT {
            self.bytes += state.bytes();
            let node = self.nodes.get_mut(&at).expect("just put");
            self.bytes -= std::mem::replace(&mut node.state, state).bytes();
        }
        self.touch(at);
        Ok(())
    }

    /// Retains `tokens` until `until` (seconds since 1970), or until the later time of an earlier
    /// call. Changes nothing and returns false if a request cannot resume after them, or if all that
    /// is retained at `now` would take more than `most` bytes.
    pub fn retain(&mut self, tokens: &[u32], until: u64, now: u64, most: u64) -> Result<bool> {
        if self.find(tokens, tokens.len()).resume < tokens.len() {
            return Ok(false);
        }
        let walk = self.walk(tokens);
        let id = match walk.partly {
            // The rest of the run belongs to another prefix, which is not retained with this one.
            Some((id, count)) => self.split(id, count)?,
            None => *walk.whole.last().expect("the root is always there"),
        };
        let before = self.nodes[&id].recency;
        self.set_recency(
            id,
            Recency { retained_until: until.max(before.retained_until), ..before },
        );
        let fits = self.retained_bytes(now) <= most;
        if !fits {
            self.set_recency(id, before);
        }
        Ok(fits)
    }

    /// Gives the saved prefix `tokens` the name of the conversation that uses it. One that ends within a run of tokens gets
    /// none: the run belongs to a longer prefix.
    pub fn set_name(&mut self, tokens: &[u32], name: PrefixName) {
        let walk = self.walk(tokens);
        let is_whole = walk.length == tokens.len() && walk.partly.is_none();
        let last = walk.whole.last().filter(|id| is_whole && **id != ROOT);
        if let Some(node) = last.and_then(|id| self.nodes.get_mut(id)) {
            node.name = Some(name);
        }
    }

    /// The conversations that used saved state last, newest first: at most `most`. If prefixes are retained, or a
    /// conversation has many, there are fewer: the work has a bound.
    pub fn names(&self, most: usize) -> Vec<NamedPrefix> {
        let newest = self.lru.newest(most * PREFIXES_OF_NAME).filter_map(|id| {
            let Node { name, end, recency, .. } = &self.nodes[&id];
            Some((recency.used, NamedPrefix { name: (*name)?, tokens: *end }))
        });
        let mut newest: Vec<_> = newest.collect();
        newest.sort_unstable_by_key(|(used, _)| Reverse(*used));
        let (mut names, mut places) = (Vec::<NamedPrefix>::new(), HashMap::new());
        for (_, named) in newest {
            let place = *places.entry(named.name).or_insert(names.len());
            match names.get_mut(place) {
                Some(known) => known.tokens = known.tokens.max(named.tokens),
                None => names.push(named),
            }
        }
        names.truncate(most);
        names
    }

    /// Evicts the least recently used until at most `budget` bytes are left, except what is retained
    /// at `now`. Returns the number of evicted states and runs of KV.
    pub fn shrink(&mut self, budget: u64, now: u64) -> usize {
        let mut evicted = 0;
        while self.bytes > budget
            && let Some(id) = self.lru.pop_oldest(now)
        {
            evicted += 1;
            let node = self.nodes.get_mut(&id).expect("the order names nodes only");
            let state = node.state.take();
            node.name = None;
            self.bytes -= state.bytes();
            let useless = self.needs_state || state.is_none();
            if node.children.is_empty() && useless {
                self.remove(id);
            } else {
                self.enlist(id);
            }
        }
        evicted
    }

    /// Bytes of retained nodes and of the KV before them.
    fn retained_bytes(&self, now: u64) -> u64 {
        let mut seen = BTreeSet::new();
        let mut bytes = 0;
        for (id, node) in self.nodes.iter().filter(|(_, node)| node.recency.retained_until > now) {
            bytes += node.state.bytes();
            let mut at = *id;
            while at != ROOT && seen.insert(at) {
                bytes += self.nodes[&at].kv.bytes();
                at = self.nodes[&at].parent;
            }
        }
        bytes
    }

    pub fn size(&self) -> CacheSize {
        let states = self.nodes.values().filter(|node| node.state.is_some()).count();
        let tokens = self.nodes.values().map(|node| node.tokens.len()).sum();
        CacheSize { nodes: self.nodes.len() - 1, tokens, states, bytes: self.bytes }
    }

    fn walk(&self, tokens: &[u32]) -> Walk {
        let mut walk = Walk { whole: vec![ROOT], partly: None, length: 0 };
        let mut node = &self.nodes[&ROOT];
        while let Some(next) = tokens.get(walk.length)
            && let Some(&id) = node.children.get(next)
        {
            node = &self.nodes[&id];
            let pairs = node.tokens.iter().zip(&tokens[walk.length..]);
            let alike = pairs.take_while(|(a, b)| a == b).count();
            walk.length += alike;
            if alike < node.tokens.len() {
                walk.partly = Some((id, alike));
                break;
            }
            walk.whole.push(id);
        }
        walk
    }

    /// Splits a node after `count` of its tokens, and returns the new upper node.
    fn split(&mut self, id: Id, count: usize) -> Result<Id> {
        let node = self.nodes.get_mut(&id).expect("walked over");
        let before = node.kv.bytes();
        // KV that cannot be split is lost, and with it the node.
        let (first, second) = match node.kv.take().expect("not the root").split(count) {
            Ok(halves) => halves,
            Err(error) => {
                self.bytes -= before;
                self.cut(id);
                return Err(error);
            }
        };
        self.bytes = self.bytes - before + first.bytes() + second.bytes();
        let rest = node.tokens.split_off(count);
        let tokens = std::mem::replace(&mut node.tokens, rest);
        node.kv = Some(second);
        self.newest += 1;
        let upper = self.newest;
        let parent = std::mem::replace(&mut node.parent, upper);
        let children = BTreeMap::from([(node.tokens[0], id)]);
        let recency = Recency { retained_until: 0, ..node.recency };
        let end = node.end - node.tokens.len();
        let above = self.nodes.get_mut(&parent).expect("every parent is there");
        above.children.insert(tokens[0], upper);
        let node = Node {
            parent,
            children,
            tokens,
            end,
            kv: Some(first),
            state: None,
            name: None,
            recency,
        };
        self.nodes.insert(upper, node);
        Ok(upper)
    }

    /// Removes a node whose KV is gone, and everything below it.
    fn cut(&mut self, id: Id) {
        let mut left = vec![id];
        while let Some(id) = left.pop() {
            let node = self.nodes.remove(&id).expect("every child is there");
            self.lru.remove(id, node.recency);
            self.bytes -= node.kv.bytes() + node.state.bytes();
            left.extend(node.children.values());
            if let Some(parent) = self.nodes.get_mut(&node.parent) {
                parent.children.remove(&node.tokens[0]);
            }
        }
    }

    /// Removes a leaf, and the nodes before it that are useless without it.
    fn remove(&mut self, mut id: Id) {
        loop {
            let node = self.nodes.remove(&id).expect("only nodes are removed");
            self.lru.remove(id, node.recency);
            self.bytes -= node.kv.bytes();
            let parent = self.nodes.get_mut(&node.parent).expect("every parent is there");
            parent.children.remove(&node.tokens[0]);
            id = node.parent;
            let useful = !self.needs_state || parent.state.is_some();
            if id == ROOT || useful || !parent.children.is_empty() {
                break;
            }
        }
        self.enlist(id);
    }

    /// Makes a node the most recently used one.
    fn touch(&mut self, id: Id) {
        let used = self.lru.tick(1, 0);
        self.set_recency(id, Recency { used, ..self.nodes[&id].recency });
        self.enlist(id);
    }

    fn set_recency(&mut self, id: Id, recency: Recency) {
        let node = self.nodes.get_mut(&id).expect("only nodes are used");
        self.lru.update(id, &mut node.recency, recency);
    }

    /// Adds a node to the eviction order, or removes it, by whether it has something to evict.
    fn enlist(&mut self, id: Id) {
        let node = &self.nodes[&id];
        self.lru.remove(id, node.recency);
        if id != ROOT && (node.state.is_some() || node.children.is_empty()) {
            self.lru.insert(id, node.recency);
        }
    }
}

impl<R, S> Node<R, S> {
    fn kv(&self) -> &R {
        self.kv.as_ref().expect("every node but the root has KV")
    }
}

#[cfg(test)]
mod tests;
