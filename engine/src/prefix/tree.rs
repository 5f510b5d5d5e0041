//! A radix tree over token ids: prefixes that begin alike share what is kept of their beginning.
//!
//! Each node stands for a run of tokens behind its parent's and holds their rows (keys and values);
//! at its end it may hold a state, the part of a cache that exists at one position alone (recurrent
//! matrices, sliding windows). A model that has such parts can resume only where a state is; any
//! other resumes wherever rows lead.
//!
//! What was used longest ago goes first. A state goes alone, and rows only when nothing hangs on
//! them any more: so rows that several prefixes share outlive the states along the way.
//!
//! Knows neither models nor disks: rows and states are [`Rows`] and [`State`].
//!
//! Source: RadixAttention (arXiv:2312.07104, section 3), with states as checkpoints.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::error::Result;

/// Rows of neighbouring tokens.
pub trait Rows: Sized {
    /// The first `at` rows, and the others. Neither holds the other's memory.
    ///
    /// # Errors
    /// Whatever keeps them from being copied.
    fn split(self, at: usize) -> Result<(Self, Self)>;

    /// The first `count` rows, sharing memory with these.
    ///
    /// # Errors
    /// Whatever keeps them from being looked at.
    fn first(&self, count: usize) -> Result<Self>;

    /// Bytes of memory.
    fn bytes(&self) -> u64;
}

/// What exists at one position.
pub trait State {
    /// Bytes of memory.
    fn bytes(&self) -> u64;
}

type Id = u64;

/// The node that stands for no token and is never removed.
const ROOT: Id = 0;

/// Prefixes with what is kept of them.
pub struct Tree<R, S> {
    nodes: HashMap<Id, Node<R, S>>,
    /// Nodes that can give something up: states, and rows that nothing hangs on. Least recently
    /// used first.
    by_use: BTreeSet<(u64, Id)>,
    needs_state: bool,
    bytes: u64,
    newest: Id,
    clock: u64,
}

struct Node<R, S> {
    parent: Id,
    /// By their first token.
    children: BTreeMap<u32, Id>,
    tokens: Vec<u32>,
    /// None at the root alone.
    rows: Option<R>,
    state: Option<S>,
    used: u64,
    /// Not given up before this time, in seconds since 1970.
    pinned: u64,
}

/// How much there is of a prefix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Found {
    /// Tokens whose rows are there.
    pub rows: usize,
    /// Tokens behind which a request can resume.
    pub resume: usize,
}

/// What a walk along tokens has met.
struct Walk {
    /// Nodes all of whose tokens agree, the root first.
    whole: Vec<Id>,
    /// A node of which only so many tokens do.
    partly: Option<(Id, usize)>,
    /// Tokens that agree.
    length: usize,
}

/// How much is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Runs of tokens.
    pub nodes: usize,
    /// Positions with a state.
    pub states: usize,
    /// Bytes of rows and states.
    pub bytes: u64,
}

impl<R: Rows, S: State> Tree<R, S> {
    /// An empty tree; `needs_state` says that a request can resume only where a state is.
    pub fn new(needs_state: bool) -> Self {
        let root = Node {
            parent: ROOT,
            children: BTreeMap::new(),
            tokens: Vec::new(),
            rows: None,
            state: None,
            used: 0,
            pinned: 0,
        };
        Self {
            nodes: HashMap::from([(ROOT, root)]),
            by_use: BTreeSet::new(),
            needs_state,
            bytes: 0,
            newest: ROOT,
            clock: 0,
        }
    }

    /// What there is of `tokens`; a request resumes behind at most `limit` of them.
    pub fn find(&self, tokens: &[u32], limit: usize) -> Found {
        let walk = self.walk(tokens);
        if !self.needs_state {
            return Found { rows: walk.length, resume: walk.length.min(limit) };
        }
        let (mut end, mut resume) = (0, 0);
        for id in &walk.whole {
            let node = &self.nodes[id];
            end += node.tokens.len();
            if end <= limit && node.state.is_some() {
                resume = end;
            }
        }
        Found { rows: walk.length, resume }
    }

    /// The rows of all of `tokens`, in order, and the state behind them, where there is one. Counts
    /// as a use.
    ///
    /// # Errors
    /// What [`Rows::first`] meets.
    ///
    /// # Panics
    /// When rows are missing: [`Tree::find`] says how many there are.
    pub fn get(&mut self, tokens: &[u32]) -> Result<(Vec<R>, Option<&S>)> {
        let walk = self.walk(tokens);
        assert_eq!(walk.length, tokens.len(), "asked for more than there is");
        let mut rows = Vec::new();
        for id in &walk.whole[1..] {
            let node = &self.nodes[id];
            rows.push(node.rows().first(node.tokens.len())?);
        }
        if let Some((id, count)) = walk.partly {
            rows.push(self.nodes[&id].rows().first(count)?);
        }
        let last = *walk.whole.last().expect("the root is always there");
        self.touch(walk.partly.map_or(last, |(id, _)| id));
        let state = walk.partly.is_none().then(|| self.nodes[&last].state.as_ref());
        Ok((rows, state.flatten()))
    }

    /// Keeps `rows`, which begin behind those that there are of `tokens` and reach to their end, and
    /// `state` at it. Counts as a use; [`Tree::shrink`] makes room afterwards.
    ///
    /// # Errors
    /// What [`Rows::split`] meets; nothing is kept then.
    pub fn put(&mut self, tokens: &[u32], rows: Option<R>, state: Option<S>) -> Result<()> {
        let walk = self.walk(tokens);
        let mut at = *walk.whole.last().expect("the root is always there");
        if let Some((id, count)) = walk.partly {
            at = self.split(id, count)?;
        }
        if let Some(rows) = rows {
            debug_assert!(walk.length < tokens.len());
            self.newest += 1;
            let id = self.newest;
            let tokens = tokens[walk.length..].to_vec();
            self.bytes += rows.bytes();
            let parent = self.nodes.get_mut(&at).expect("walked over");
            parent.children.insert(tokens[0], id);
            let node = Node {
                parent: at,
                children: BTreeMap::new(),
                tokens,
                rows: Some(rows),
                state: None,
                used: 0,
                pinned: 0,
            };
            self.nodes.insert(id, node);
            self.file(at);
            at = id;
        }
        if let Some(state) = state
            && at != ROOT
        {
            self.bytes += state.bytes();
            let old = self.nodes.get_mut(&at).expect("just put").state.replace(state);
            self.bytes -= old.map_or(0, |old| old.bytes());
        }
        self.touch(at);
        Ok(())
    }

    /// Keeps `tokens` until `until`, or until a later time that was said before, in seconds since
    /// 1970. False, and nothing is pinned, where a request cannot resume behind them, or all that is
    /// pinned at the time `now` would take more than `most` bytes.
    ///
    /// # Errors
    /// What [`Rows::split`] meets.
    pub fn pin(&mut self, tokens: &[u32], until: u64, now: u64, most: u64) -> Result<bool> {
        if self.find(tokens, tokens.len()).resume < tokens.len() {
            return Ok(false);
        }
        let walk = self.walk(tokens);
        let id = match walk.partly {
            // What follows is another prefix, and not to be pinned with this one.
            Some((id, count)) => self.split(id, count)?,
            None => *walk.whole.last().expect("the root is always there"),
        };
        let node = self.nodes.get_mut(&id).expect("walked over");
        let before = node.pinned;
        node.pinned = until.max(before);
        let fits = self.pinned(now) <= most;
        if !fits {
            self.nodes.get_mut(&id).expect("just seen").pinned = before;
        }
        Ok(fits)
    }

    /// Gives up what was used longest ago until at most `budget` bytes are left, but nothing that is
    /// pinned at the time `now`. Returns how many states and runs of rows went.
    pub fn shrink(&mut self, budget: u64, now: u64) -> usize {
        let mut gone = 0;
        let mut pinned = Vec::new();
        while self.bytes > budget
            && let Some((used, id)) = self.by_use.pop_first()
        {
            if self.nodes[&id].pinned > now {
                pinned.push((used, id));
                continue;
            }
            gone += 1;
            let node = self.nodes.get_mut(&id).expect("by_use names nodes only");
            let state = node.state.take();
            self.bytes -= state.as_ref().map_or(0, State::bytes);
            let useless = self.needs_state || state.is_none();
            if node.children.is_empty() && useless {
                self.remove(id);
            } else {
                self.file(id);
            }
        }
        self.by_use.extend(pinned);
        gone
    }

    /// Bytes that are pinned at the time `now`: of pinned nodes and the rows before them.
    pub fn pinned(&self, now: u64) -> u64 {
        let mut seen = BTreeSet::new();
        let mut bytes = 0;
        for (id, node) in self.nodes.iter().filter(|(_, node)| node.pinned > now) {
            bytes += node.state.as_ref().map_or(0, State::bytes);
            let mut at = *id;
            while at != ROOT && seen.insert(at) {
                bytes += self.nodes[&at].rows().bytes();
                at = self.nodes[&at].parent;
            }
        }
        bytes
    }

    /// How much is kept.
    pub fn size(&self) -> Size {
        let states = self.nodes.values().filter(|node| node.state.is_some()).count();
        Size { nodes: self.nodes.len() - 1, states, bytes: self.bytes }
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

    /// Makes two nodes of one; returns the first, which ends after `count` of its tokens.
    fn split(&mut self, id: Id, count: usize) -> Result<Id> {
        let node = self.nodes.get_mut(&id).expect("walked over");
        let before = node.rows().bytes();
        // Rows that cannot be split are lost, and so is the node: its tokens are known elsewhere.
        let (first, second) = match node.rows.take().expect("not the root").split(count) {
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
        node.rows = Some(second);
        self.newest += 1;
        let upper = self.newest;
        let parent = std::mem::replace(&mut node.parent, upper);
        let (lead, used) = (node.tokens[0], node.used);
        let above = self.nodes.get_mut(&parent).expect("every parent is there");
        above.children.insert(tokens[0], upper);
        let children = BTreeMap::from([(lead, id)]);
        let node =
            Node { parent, children, tokens, rows: Some(first), state: None, used, pinned: 0 };
        self.nodes.insert(upper, node);
        Ok(upper)
    }

    /// Takes a node and all that hangs on it out; its own rows are gone already.
    fn cut(&mut self, id: Id) {
        let mut left = vec![id];
        while let Some(id) = left.pop() {
            let node = self.nodes.remove(&id).expect("every child is there");
            self.by_use.remove(&(node.used, id));
            let bytes = |node: &Node<R, S>| {
                node.rows.as_ref().map_or(0, Rows::bytes)
                    + node.state.as_ref().map_or(0, State::bytes)
            };
            self.bytes -= bytes(&node);
            left.extend(node.children.values());
            if let Some(parent) = self.nodes.get_mut(&node.parent) {
                parent.children.remove(&node.tokens[0]);
            }
        }
    }

    /// Removes a leaf, and with it those before it that are of no use without it.
    fn remove(&mut self, mut id: Id) {
        loop {
            let node = self.nodes.remove(&id).expect("only nodes are removed");
            self.by_use.remove(&(node.used, id));
            self.bytes -= node.rows().bytes();
            let parent = self.nodes.get_mut(&node.parent).expect("every parent is there");
            parent.children.remove(&node.tokens[0]);
            id = node.parent;
            let of_use = !self.needs_state || parent.state.is_some();
            if id == ROOT || of_use || !parent.children.is_empty() {
                break;
            }
        }
        self.file(id);
    }

    /// Makes a node the most recently used one.
    fn touch(&mut self, id: Id) {
        self.clock += 1;
        let node = self.nodes.get_mut(&id).expect("only nodes are used");
        self.by_use.remove(&(node.used, id));
        node.used = self.clock;
        self.file(id);
    }

    /// Puts a node among those that can give something up, or takes it out.
    fn file(&mut self, id: Id) {
        let node = &self.nodes[&id];
        let entry = (node.used, id);
        if id != ROOT && (node.state.is_some() || node.children.is_empty()) {
            self.by_use.insert(entry);
        } else {
            self.by_use.remove(&entry);
        }
    }
}

impl<R, S> Node<R, S> {
    fn rows(&self) -> &R {
        self.rows.as_ref().expect("every node but the root has rows")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that are their own tokens, so that a prefix shows whether it is the one asked for.
    #[derive(Debug, Clone, PartialEq)]
    struct Tokens(Vec<u32>);

    impl Rows for Tokens {
        fn split(mut self, at: usize) -> Result<(Self, Self)> {
            let rest = self.0.split_off(at);
            Ok((self, Self(rest)))
        }

        fn first(&self, count: usize) -> Result<Self> {
            Ok(Self(self.0[..count].to_vec()))
        }

        fn bytes(&self) -> u64 {
            10 * self.0.len() as u64
        }
    }

    /// A state that is its whole prefix.
    #[derive(Debug, Clone, PartialEq)]
    struct Whole(Vec<u32>);

    impl State for Whole {
        fn bytes(&self) -> u64 {
            300
        }
    }

    fn put(tree: &mut Tree<Tokens, Whole>, tokens: &[u32], has_state: bool) {
        let known = tree.find(tokens, usize::MAX).rows;
        let rows = (known < tokens.len()).then(|| Tokens(tokens[known..].to_vec()));
        tree.put(tokens, rows, has_state.then(|| Whole(tokens.to_vec()))).unwrap();
    }

    fn get(tree: &mut Tree<Tokens, Whole>, tokens: &[u32]) -> (Vec<u32>, Option<Whole>) {
        let (rows, state) = tree.get(tokens).unwrap();
        (rows.into_iter().flat_map(|rows| rows.0).collect(), state.cloned())
    }

    #[test]
    fn prefixes_share_their_beginning() {
        let mut tree = Tree::new(true);
        put(&mut tree, &[1, 2, 3, 4], true);
        put(&mut tree, &[1, 2, 3, 5, 6], true);
        put(&mut tree, &[1, 2], true);
        assert_eq!(tree.size(), Size { nodes: 4, states: 3, bytes: 6 * 10 + 3 * 300 });
        assert_eq!(tree.find(&[1, 2, 3, 5, 6, 7], 9), Found { rows: 5, resume: 5 });
        assert_eq!(tree.find(&[1, 2, 3, 5, 6, 7], 4), Found { rows: 5, resume: 2 });
        assert_eq!(tree.find(&[1, 2, 3, 9], 9), Found { rows: 3, resume: 2 });
        assert_eq!(tree.find(&[2], 9), Found::default());
        let whole = vec![1, 2, 3, 5, 6];
        assert_eq!(get(&mut tree, &whole), (whole.clone(), Some(Whole(whole))));
    }

    #[test]
    fn without_states_a_request_resumes_wherever_rows_lead() {
        let mut tree = Tree::new(false);
        put(&mut tree, &[1, 2, 3, 4], false);
        assert_eq!(tree.find(&[1, 2, 3, 9], 9), Found { rows: 3, resume: 3 });
        assert_eq!(tree.find(&[1, 2, 3, 4], 3), Found { rows: 4, resume: 3 });
        assert_eq!(get(&mut tree, &[1, 2, 3]), (vec![1, 2, 3], None));
    }

    /// The state in the middle goes when it is the oldest; the rows that it shares with the later
    /// prefix stay until that one goes.
    #[test]
    fn states_go_before_the_rows_that_others_share() {
        let mut tree = Tree::new(true);
        put(&mut tree, &[1, 2], true);
        put(&mut tree, &[1, 2, 3, 4], true);
        assert_eq!(tree.shrink(600, 0), 1);
        assert_eq!(tree.find(&[1, 2, 3, 4], 9), Found { rows: 4, resume: 4 });
        assert_eq!(tree.find(&[1, 2, 3, 4], 3), Found { rows: 4, resume: 0 });
        assert_eq!(tree.shrink(0, 0), 1);
        assert_eq!(tree.size(), Size::default());
    }

    #[test]
    fn what_is_pinned_stays_until_its_time() {
        let mut tree = Tree::new(true);
        put(&mut tree, &[1, 2], true);
        assert!(tree.pin(&[1, 2], 100, 0, 320).unwrap());
        put(&mut tree, &[3, 4], true);
        assert_eq!(tree.pinned(99), 320);
        tree.shrink(0, 99);
        assert_eq!(tree.find(&[1, 2], 9).resume, 2);
        assert_eq!(tree.find(&[3, 4], 9).resume, 0);
        tree.shrink(0, 100);
        assert_eq!(tree.size(), Size::default());
    }

    /// Rows that pins share count once; what is over the bound is not pinned, and goes.
    #[test]
    fn pins_beyond_their_bound_are_refused_and_change_nothing() {
        let mut tree = Tree::new(true);
        for prefix in [&[1, 2][..], &[1, 2, 3], &[4, 5]] {
            put(&mut tree, prefix, true);
        }
        assert!(tree.pin(&[1, 2], 100, 0, 649).unwrap());
        assert!(!tree.pin(&[4, 5], 100, 0, 639).unwrap());
        assert_eq!(tree.pinned(0), 320);
        assert!(tree.pin(&[1, 2, 3], 50, 0, 630).unwrap());
        assert_eq!((tree.pinned(0), tree.pinned(50)), (630, 320));
        assert!(tree.pin(&[1, 2], 10, 0, 630).unwrap(), "it is, for longer");
        // Nothing to resume from.
        assert!(!tree.pin(&[1], 100, 0, 9999).unwrap());
        assert!(!tree.pin(&[4, 5, 6], 100, 0, 9999).unwrap());
        // What was pinned before counts no longer.
        assert!(tree.pin(&[4, 5], 200, 100, 320).unwrap());
        tree.shrink(0, 100);
        assert_eq!(tree.find(&[1, 2, 3], 9), Found::default());
        assert_eq!(tree.find(&[4, 5], 9).resume, 2);
    }

    #[test]
    fn a_pin_within_a_run_of_tokens_holds_no_more_than_it_names() {
        let mut tree = Tree::new(false);
        put(&mut tree, &[1, 2, 3, 4, 5], false);
        assert!(!tree.pin(&[1, 2], 100, 0, 19).unwrap());
        assert!(tree.pin(&[1, 2], 100, 0, 20).unwrap());
        assert_eq!(tree.shrink(0, 99), 1);
        assert_eq!(tree.find(&[1, 2, 3, 4, 5], 9), Found { rows: 2, resume: 2 });
        tree.shrink(0, 100);
        assert_eq!(tree.size(), Size::default());
    }

    /// 10,000 random operations on sequences that share beginnings, against a plain list of what was
    /// put: rows and states are those of the prefix asked for, sizes add up, the budget holds, and
    /// nothing is gone while there is room.
    #[test]
    fn ten_thousand_random_operations_agree_with_a_simple_model() {
        for needs_state in [true, false] {
            let mut seed = 7u64;
            let mut random = |bound: usize| {
                seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963);
                (seed >> 33) as usize % bound
            };
            let mut tree = Tree::new(needs_state);
            // What was put since the tree was last short of room.
            let mut model: Vec<Vec<u32>> = Vec::new();
            for step in 0..10_000 {
                let mut tokens: Vec<u32> = (0..60).collect();
                tokens[[0, 10, 25, 40][random(4)]] += 100 * random(3) as u32;
                let length = [1, 9, 10, 11, 25, 30, 41, 60][random(8)];
                let prefix = &tokens[..length];
                let shared =
                    |other: &Vec<u32>| tokens.iter().zip(other).take_while(|(a, b)| a == b).count();
                match random(10) {
                    0..4 => {
                        put(&mut tree, prefix, needs_state);
                        model.push(prefix.to_vec());
                    }
                    4..8 => {
                        let limit = random(70);
                        let found = tree.find(&tokens, limit);
                        let rows = model.iter().map(shared).max().unwrap_or(0);
                        assert!(found.rows >= rows, "step {step}: rows are lost");
                        let whole = model
                            .iter()
                            .filter(|other| other.len() <= limit && shared(other) == other.len());
                        let resume = whole.map(Vec::len).max().unwrap_or(0);
                        assert!(found.resume >= resume && found.resume <= limit.min(found.rows));
                        if needs_state && found.resume > 0 {
                            let at = tokens[..found.resume].to_vec();
                            assert_eq!(get(&mut tree, &at), (at.clone(), Some(Whole(at))));
                        } else if found.rows > 0 {
                            let at = tokens[..1 + random(found.rows)].to_vec();
                            assert_eq!(get(&mut tree, &at).0, at);
                        }
                    }
                    _ => {
                        let budget = [400, 1500, 5000][random(3)];
                        if tree.shrink(budget, 0) > 0 {
                            model.clear();
                        }
                        assert!(tree.size().bytes <= budget, "step {step}");
                    }
                }
                let bytes = |node: &Node<Tokens, Whole>| {
                    let rows = node.rows.as_ref().map_or(0, Rows::bytes);
                    rows + node.state.as_ref().map_or(0, State::bytes)
                };
                assert_eq!(tree.nodes.values().map(bytes).sum::<u64>(), tree.bytes, "step {step}");
                let can_give = |node: &Node<Tokens, Whole>| {
                    node.rows.is_some() && (node.children.is_empty() || node.state.is_some())
                };
                let count = tree.nodes.values().filter(|node| can_give(node)).count();
                assert_eq!(count, tree.by_use.len(), "step {step}");
            }
        }
    }
}
