//! The tree against a plain list of prefixes, and what is evicted first.

use super::*;

/// KV that is its own tokens, so a wrong prefix shows.
#[derive(Debug, Clone, PartialEq)]
struct Tokens(Vec<u32>);

impl KvRun for Tokens {
    fn split(mut self, at: usize) -> Result<(Self, Self)> {
        let rest = self.0.split_off(at);
        Ok((self, Self(rest)))
    }

    fn first(&self, count: usize) -> Result<Self> {
        Ok(Self(self.0[..count].to_vec()))
    }
}

impl Footprint for Tokens {
    fn bytes(&self) -> u64 {
        10 * self.0.len() as u64
    }
}

/// A state that is its whole prefix.
#[derive(Debug, Clone, PartialEq)]
struct Whole(Vec<u32>);

impl Footprint for Whole {
    fn bytes(&self) -> u64 {
        300
    }
}

fn put(tree: &mut PrefixTree<Tokens, Whole>, tokens: &[u32], has_state: bool) {
    let known = tree.find(tokens, usize::MAX).kv;
    let kv = (known < tokens.len()).then(|| Tokens(tokens[known..].to_vec()));
    tree.put(tokens, kv, has_state.then(|| Whole(tokens.to_vec()))).unwrap();
}

fn get(tree: &mut PrefixTree<Tokens, Whole>, tokens: &[u32]) -> (Vec<u32>, Option<Whole>) {
    let (kv, state) = tree.get(tokens).unwrap();
    (kv.into_iter().flat_map(|run| run.0).collect(), state.cloned())
}

#[test]
fn prefixes_share_their_beginning() {
    let mut tree = PrefixTree::new(true);
    put(&mut tree, &[1, 2, 3, 4], true);
    put(&mut tree, &[1, 2, 3, 5, 6], true);
    put(&mut tree, &[1, 2], true);
    assert_eq!(tree.size(), CacheSize { nodes: 4, tokens: 6, states: 3, bytes: 6 * 10 + 3 * 300 });
    assert_eq!(tree.find(&[1, 2, 3, 5, 6, 7], 9), PrefixMatch { kv: 5, resume: 5 });
    assert_eq!(tree.find(&[1, 2, 3, 5, 6, 7], 4), PrefixMatch { kv: 5, resume: 2 });
    assert_eq!(tree.find(&[1, 2, 3, 9], 9), PrefixMatch { kv: 3, resume: 2 });
    assert_eq!(tree.find(&[2], 9), PrefixMatch::default());
    let whole = vec![1, 2, 3, 5, 6];
    assert_eq!(get(&mut tree, &whole), (whole.clone(), Some(Whole(whole))));
}

#[test]
fn without_states_a_request_resumes_wherever_there_is_kv() {
    let mut tree = PrefixTree::new(false);
    put(&mut tree, &[1, 2, 3, 4], false);
    assert_eq!(tree.find(&[1, 2, 3, 9], 9), PrefixMatch { kv: 3, resume: 3 });
    assert_eq!(tree.find(&[1, 2, 3, 4], 3), PrefixMatch { kv: 4, resume: 3 });
    assert_eq!(get(&mut tree, &[1, 2, 3]), (vec![1, 2, 3], None));
}

/// The state in the middle is the oldest and is evicted; the KV that it shares with the longer
/// prefix stays until that one is evicted.
#[test]
fn states_are_evicted_before_shared_kv() {
    let mut tree = PrefixTree::new(true);
    put(&mut tree, &[1, 2], true);
    put(&mut tree, &[1, 2, 3, 4], true);
    assert_eq!(tree.shrink(600, 0), 1);
    assert_eq!(tree.find(&[1, 2, 3, 4], 9), PrefixMatch { kv: 4, resume: 4 });
    assert_eq!(tree.find(&[1, 2, 3, 4], 3), PrefixMatch { kv: 4, resume: 0 });
    assert_eq!(tree.shrink(0, 0), 1);
    assert_eq!(tree.size(), CacheSize::default());
}

#[test]
fn retained_prefix_stays_until_its_time() {
    let mut tree = PrefixTree::new(true);
    put(&mut tree, &[1, 2], true);
    assert!(tree.retain(&[1, 2], 100, 0, 320).unwrap());
    put(&mut tree, &[3, 4], true);
    assert_eq!(tree.retained_bytes(99), 320);
    tree.shrink(0, 99);
    assert_eq!(tree.find(&[1, 2], 9).resume, 2);
    assert_eq!(tree.find(&[3, 4], 9).resume, 0);
    tree.shrink(0, 100);
    assert_eq!(tree.size(), CacheSize::default());
}

/// KV that retained prefixes share counts once.
#[test]
fn retention_beyond_the_bound_is_refused_and_changes_nothing() {
    let mut tree = PrefixTree::new(true);
    for prefix in [&[1, 2][..], &[1, 2, 3], &[4, 5]] {
        put(&mut tree, prefix, true);
    }
    assert!(tree.retain(&[1, 2], 100, 0, 649).unwrap());
    assert!(!tree.retain(&[4, 5], 100, 0, 639).unwrap());
    assert_eq!(tree.retained_bytes(0), 320);
    assert!(tree.retain(&[1, 2, 3], 50, 0, 630).unwrap());
    assert_eq!((tree.retained_bytes(0), tree.retained_bytes(50)), (630, 320));
    assert!(tree.retain(&[1, 2], 10, 0, 630).unwrap(), "retained for longer already");
    // Nothing to resume from.
    assert!(!tree.retain(&[1], 100, 0, 9999).unwrap());
    assert!(!tree.retain(&[4, 5, 6], 100, 0, 9999).unwrap());
    // Retention that is over does not count.
    assert!(tree.retain(&[4, 5], 200, 100, 320).unwrap());
    tree.shrink(0, 100);
    assert_eq!(tree.find(&[1, 2, 3], 9), PrefixMatch::default());
    assert_eq!(tree.find(&[4, 5], 9).resume, 2);
}

#[test]
fn retention_within_a_run_of_tokens_covers_only_its_prefix() {
    let mut tree = PrefixTree::new(false);
    put(&mut tree, &[1, 2, 3, 4, 5], false);
    assert!(!tree.retain(&[1, 2], 100, 0, 19).unwrap());
    assert!(tree.retain(&[1, 2], 100, 0, 20).unwrap());
    assert_eq!(tree.shrink(0, 99), 1);
    assert_eq!(tree.find(&[1, 2, 3, 4, 5], 9), PrefixMatch { kv: 2, resume: 2 });
    tree.shrink(0, 100);
    assert_eq!(tree.size(), CacheSize::default());
}

fn name(id: u8) -> PrefixName {
    PrefixName([id; 8])
}

/// Names and tokens, newest first.
fn names(tree: &PrefixTree<Tokens, Whole>, most: usize) -> Vec<(u8, usize)> {
    tree.names(most).iter().map(|named| (named.name.0[0], named.tokens)).collect()
}

#[test]
fn conversations_are_named_newest_first_as_long_as_requests_can_resume() {
    let mut tree = PrefixTree::new(true);
    for (tokens, id) in [(&[1, 2][..], 1), (&[1, 2, 3, 4], 1), (&[1, 2, 5], 2), (&[7, 8], 3)] {
        put(&mut tree, tokens, true);
        tree.set_name(tokens, name(id));
    }
    assert_eq!(names(&tree, 9), [(3, 2), (2, 3), (1, 4)]);
    assert_eq!(names(&tree, 2), [(3, 2), (2, 3)]);
    // Use makes a conversation the newest; what another one uses has its name from then on.
    get(&mut tree, &[1, 2]);
    assert_eq!(names(&tree, 9), [(1, 4), (3, 2), (2, 3)]);
    tree.set_name(&[1, 2], name(4));
    assert_eq!(names(&tree, 9), [(4, 2), (3, 2), (2, 3), (1, 4)]);
    // Neither half of a run, nor what is not saved, nor nothing has a name.
    for tokens in [&[7][..], &[7, 8, 9], &[6], &[]] {
        tree.set_name(tokens, name(5));
    }
    // A run that is split keeps the name at its end.
    put(&mut tree, &[7], true);
    assert_eq!(names(&tree, 9), [(4, 2), (3, 2), (2, 3), (1, 4)]);
    // What is evicted has no name.
    tree.shrink(tree.size().bytes - 1, 0);
    assert_eq!(names(&tree, 9), [(4, 2), (3, 2), (2, 3)]);
    tree.shrink(0, 0);
    assert!(names(&tree, 9).is_empty());
}

/// KV stays for a longer prefix when the state before it is evicted: nothing resumes there any more.
#[test]
fn a_state_that_is_evicted_takes_its_name_along() {
    let mut tree = PrefixTree::new(true);
    put(&mut tree, &[1, 2], true);
    tree.set_name(&[1, 2], name(1));
    put(&mut tree, &[1, 2, 3, 4], true);
    assert_eq!(tree.shrink(600, 0), 1);
    assert!(names(&tree, 9).is_empty());
    // Saved again, it has no name before it is used.
    put(&mut tree, &[1, 2], true);
    assert!(names(&tree, 9).is_empty());
}

#[test]
fn prefixes_that_are_retained_are_named_too() {
    let mut tree = PrefixTree::new(false);
    for (tokens, id) in [(&[1, 2][..], 1), (&[3, 4], 2), (&[5, 6], 3)] {
        put(&mut tree, tokens, false);
        tree.set_name(tokens, name(id));
    }
    assert!(tree.retain(&[1, 2], 100, 0, 1000).unwrap());
    assert_eq!(names(&tree, 9), [(3, 2), (2, 2), (1, 2)]);
    assert_eq!(names(&tree, 1), [(3, 2)]);
}

/// 10,000 random operations on sequences that share beginnings, against a plain list of the saved
/// prefixes: KV and states are those of the requested prefix, sizes add up, the budget holds, and
/// nothing is evicted while there is room.
#[test]
fn ten_thousand_random_operations_agree_with_a_simple_model() {
    for needs_state in [true, false] {
        let mut seed = 7u64;
        let mut random = |bound: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            (seed >> 33) as usize % bound
        };
        let mut tree = PrefixTree::new(needs_state);
        // Saved since the last eviction.
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
                    let kv = model.iter().map(shared).max().unwrap_or(0);
                    assert!(found.kv >= kv, "step {step}: KV is lost");
                    let whole = model
                        .iter()
                        .filter(|other| other.len() <= limit && shared(other) == other.len());
                    let resume = whole.map(Vec::len).max().unwrap_or(0);
                    assert!(found.resume >= resume && found.resume <= limit.min(found.kv));
                    if needs_state && found.resume > 0 {
                        let at = tokens[..found.resume].to_vec();
                        assert_eq!(get(&mut tree, &at), (at.clone(), Some(Whole(at))));
                    } else if found.kv > 0 {
                        let at = tokens[..1 + random(found.kv)].to_vec();
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
            let bytes = |node: &Node<Tokens, Whole>| node.kv.bytes() + node.state.bytes();
            assert_eq!(tree.nodes.values().map(bytes).sum::<u64>(), tree.bytes, "step {step}");
            let is_evictable = |node: &Node<Tokens, Whole>| {
                node.kv.is_some() && (node.children.is_empty() || node.state.is_some())
            };
            let count = tree.nodes.values().filter(|node| is_evictable(node)).count();
            assert_eq!(count, tree.lru.len(), "step {step}");
        }
    }
}
