//! Decides what drafts and how deep, so that the most tokens are committed a second. Often none.
//!
//! It knows what passes cost on this machine ([`Costs`], measured at the start) and how likely
//! drafts are accepted in this text ([`Draft::chances`]). A draft of depth m, each of whose tokens
//! is accepted with chance a, commits 1 + a_1 + a_1 a_2 + ... tokens in the time of m drafts and a
//! pass of m + 1 rows; the best rate wins, plain decoding included.
//!
//! What is not used is not learned about, so each kind is tried again after a while: soon after it
//! was right, ever more rarely while it is wrong.
//!
//! Source: the expected gain is that of arXiv:2211.17192, section 3.3.

use std::time::{Duration, Instant};

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::{async_eval, eval};

use super::draft::{At, Draft};
use super::sample::sample;
use crate::cache::{Cache, Span};
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::{Model, Pass};
use crate::request::Sampling;

/// Speculation must promise this much more than plain decoding: what it promises is an estimate.
const GAIN: f32 = 1.05;

/// Turns until a kind that is not in use is tried again, at least and at most. One try costs less
/// than half a token, so that the longest wait costs a thousandth.
const TRY_AGAIN: [u32; 2] = [8, 512];

/// Time for measuring passes at the start, a tenth of it for each number of rows; a slow machine gets
/// one pass of each, or what there is time for.
const MEASURING: Duration = Duration::from_secs(4);

/// Numbers of rows in the order in which they are measured, so that the others lie between.
const MEASURED: [usize; DEPTH + 1] = [1, 8, 4, 2, 6, 3, 5, 7];

/// Rows in the cache while costs are measured, and how often each is: the least counts, as other
/// work on the machine only ever adds.
const CONTEXT: usize = 64;
const REPEATS: usize = 5;

/// Seconds that passes take on this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Costs {
    /// A plain step, with the next one queued meanwhile.
    pub plain: f32,
    /// A pass over 1 to DEPTH + 1 rows whose result is waited for, by rows - 1.
    pub verify: [f32; DEPTH + 1],
    /// A drafted token, by kind.
    pub draft: [f32; DraftKind::ALL.len()],
}

impl Costs {
    /// Measures `part` of `model` on an empty `cache`, and `drafts`, which are new.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects an operation.
    pub fn measure(
        model: &dyn Model,
        part: Pass<'_>,
        mut cache: Cache,
        drafts: &mut [Box<dyn Draft>],
    ) -> Result<Self> {
        // Which tokens they are makes no difference, but in a mixture of experts, where some
        // variety is more like text than one token repeated.
        let tokens: Vec<u32> = (0..2 * CONTEXT as u32).map(|i| 3 + i % 61).collect();
        let greedy = Sampling::default();
        let pass = |cache: &mut _, tokens: &[u32]| -> Result<(Array, Array)> {
            let rows = tokens.len() as i32;
            let ids = Array::from_slice(tokens, &[rows]);
            let hidden = model.forward(&ids, &mut [Span { rows, cache }], part)?;
            let picks = sample(&model.logits(&hidden)?.squeeze_axes(&[0])?, &greedy, 0, 0)?;
            Ok((hidden, picks))
        };
        let start = Instant::now();
        let (hidden, picks) = pass(&mut cache, &tokens[..CONTEXT])?;
        eval([&picks])?;

        let mut verify = [0.0; DEPTH + 1];
        for rows in MEASURED {
            if rows > 1 && start.elapsed() > MEASURING {
                break;
            }
            verify[rows - 1] = least_of(|| {
                cache.checkpoint();
                let begin = Instant::now();
                eval([&pass(&mut cache, &tokens[..rows])?.1])?;
                let took = begin.elapsed();
                cache.rewind(CONTEXT)?;
                Ok(Some(took))
            })?;
        }
        fill(&mut verify);

        cache.checkpoint();
        let mut before = picks.clone();
        let plain = least_of(|| {
            let begin = Instant::now();
            let drawn = pass(&mut cache, &tokens[..1])?.1;
            async_eval([&drawn])?;
            eval([&before])?;
            before = drawn;
            Ok(Some(begin.elapsed()))
        })?;
        eval([&before])?;
        cache.rewind(CONTEXT)?;

        let mut costs = Self { plain: plain.min(verify[0]), verify, ..Self::default() };
        for draft in drafts {
            draft.observe(&hidden, 0)?;
            let row = hidden.try_index((.., ..1))?;
            // One more token is known each time, as in decoding.
            let mut known = CONTEXT;
            let least = least_of(|| {
                known += 1;
                let (cache, tokens) = (&mut cache, &tokens[..known]);
                let mut at = At { model, part, cache, tokens, sampling: greedy, seed: 0 };
                let begin = Instant::now();
                let Some(proposed) = draft.propose(&mut at, DEPTH)? else { return Ok(None) };
                eval([&proposed])?;
                let took = begin.elapsed();
                draft.learn(0, 0)?;
                draft.observe(&row, known - 1)?;
                Ok(Some(took))
            })?;
            if least.is_finite() {
                costs.draft[draft.kind() as usize] = least / DEPTH as f32;
            }
        }
        Ok(costs)
    }

    /// The depth at which drafts of these chances commit the most tokens a second, and how many.
    fn best_depth(&self, kind: DraftKind, chances: &[f32]) -> (f32, usize) {
        let (mut tokens, mut all_right) = (1.0, 1.0);
        let mut best = (0.0, 1);
        for (i, chance) in chances.iter().enumerate() {
            all_right *= chance;
            tokens += all_right;
            let depth = i + 1;
            let drafting = self.draft[kind as usize] * depth as f32;
            let rate = tokens / (drafting + self.verify[depth]);
            if rate > best.0 {
                best = (rate, depth);
            }
        }
        best
    }

    /// A plain step took so long.
    pub fn learn_plain(&mut self, took: f32) {
        learn(&mut self.plain, took);
    }

    /// A turn took so long that drafted `rows - 1` tokens and verified them.
    pub fn learn_verify(&mut self, kind: DraftKind, rows: usize, took: f32) {
        let drafting = self.draft[kind as usize] * (rows - 1) as f32;
        learn(&mut self.verify[rows - 1], (took - drafting).max(0.0));
    }
}

/// The least of several runs in seconds, infinite where one says that there is nothing to run. The
/// first is not counted where there is time for more: it may compile kernels.
fn least_of(mut run: impl FnMut() -> Result<Option<Duration>>) -> Result<f32> {
    let start = Instant::now();
    let mut least = f32::INFINITY;
    for repeat in 0..=REPEATS {
        let Some(took) = run()? else { break };
        let took = took.as_secs_f32();
        least = if repeat == 1 { took } else { least.min(took) };
        if start.elapsed() > MEASURING / 10 {
            break;
        }
    }
    Ok(least)
}

/// Fills in the row counts that were not measured: on a line between those that were, and a whole
/// pass more for each row beyond them, which promises nothing.
fn fill(verify: &mut [f32; DEPTH + 1]) {
    let measured: Vec<usize> = (0..=DEPTH).filter(|&i| verify[i] > 0.0).collect();
    for i in 0..=DEPTH {
        let below = measured.iter().rev().find(|&&at| at <= i).copied().unwrap_or(0);
        verify[i] = match measured.iter().find(|&&at| at >= i) {
            Some(&above) if above > below => {
                let share = (i - below) as f32 / (above - below) as f32;
                verify[below] + share * (verify[above] - verify[below])
            }
            Some(&above) => verify[above],
            None => verify[below] + (i - below) as f32 * verify[0],
        };
    }
    // Other work on the machine only ever adds, and more rows never cost less than fewer.
    for i in (0..DEPTH).rev() {
        verify[i] = verify[i].min(verify[i + 1]);
    }
}

/// Moves a cost towards what was seen. That what nobody uses is not relearned matters little: all
/// costs were measured together, and what changes them (a longer context, a hotter chip) changes
/// them alike.
fn learn(cost: &mut f32, took: f32) {
    // One stall is no news.
    *cost += 0.05 * (took.min(2.0 * *cost) - *cost);
}

/// What drafts in a turn: index into the sequence's drafts, and how many tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Which of the drafts.
    pub draft: usize,
    /// At most so many tokens.
    pub depth: usize,
}

/// How the governor decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By cost and chance.
    Auto,
    /// The first draft that has a guess, always so deep: for tests and measurements.
    Always(usize),
}

/// Decides for one sequence.
#[derive(Debug, Clone)]
pub struct Governor {
    mode: Mode,
    depth: usize,
    waits: [Wait; DraftKind::ALL.len()],
}

/// When a kind is tried again.
#[derive(Debug, Clone, Copy)]
struct Wait {
    turns: u32,
    since: u32,
}

impl Governor {
    /// Knows nothing of the text. Drafts are at most `depth` deep.
    pub fn new(mode: Mode, depth: usize) -> Self {
        let wait = Wait { turns: TRY_AGAIN[0], since: 0 };
        Self { mode, depth, waits: [wait; DraftKind::ALL.len()] }
    }

    /// What drafts next; `None` for a plain step. At most `room` tokens may be drafted.
    pub fn choose(&self, costs: &Costs, drafts: &[Box<dyn Draft>], room: usize) -> Option<Choice> {
        let room = room.min(self.depth);
        if room == 0 {
            return None;
        }
        if let Mode::Always(depth) = self.mode {
            let draft = drafts.iter().position(|draft| draft.chances()[0] > 0.0)?;
            return Some(Choice { draft, depth: depth.min(room) });
        }
        let mut best: Option<(f32, Choice)> = None;
        let mut overdue: Option<(u32, Choice)> = None;
        for (draft, source) in drafts.iter().enumerate() {
            let chances = source.chances();
            if chances[0] == 0.0 {
                continue;
            }
            let (rate, depth) = costs.best_depth(source.kind(), &chances[..room]);
            let choice = Choice { draft, depth };
            if best.is_none_or(|(most, _)| rate > most) {
                best = Some((rate, choice));
            }
            let wait = self.waits[source.kind() as usize];
            let late = wait.since.saturating_sub(wait.turns);
            // N-grams learn from every token and need no try.
            if late > 0 && source.kind() != DraftKind::Ngram {
                let choice = Choice { draft, depth: depth.min(2) };
                if overdue.is_none_or(|(most, _)| late > most) {
                    overdue = Some((late, choice));
                }
            }
        }
        if let Some((_, choice)) = overdue {
            return Some(choice);
        }
        best.filter(|(rate, _)| rate * costs.plain > GAIN).map(|(_, choice)| choice)
    }

    /// A plain step was taken.
    pub fn stepped(&mut self) {
        for wait in &mut self.waits {
            wait.since += 1;
        }
    }

    /// A draft of this kind was verified; `right` says whether any of it was accepted.
    pub fn verified(&mut self, kind: DraftKind, right: bool) {
        self.stepped();
        let [least, most] = TRY_AGAIN;
        let wait = &mut self.waits[kind as usize];
        wait.since = 0;
        wait.turns = if right { least } else { (wait.turns * 2).min(most) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::draft::Chance;

    /// Says what it is told to; its chances are learned as those of real drafts are.
    struct Fake {
        kind: DraftKind,
        chances: [Chance; DEPTH],
    }

    impl Draft for Fake {
        fn kind(&self) -> DraftKind {
            self.kind
        }

        fn chances(&self) -> [f32; DEPTH] {
            self.chances.map(Chance::value)
        }

        fn propose(&mut self, _: &mut At<'_>, _: usize) -> Result<Option<Array>> {
            unreachable!("the governor only asks for chances")
        }

        fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
            for (i, chance) in self.chances.iter_mut().enumerate().take(judged) {
                chance.learn(i < accepted);
            }
            Ok(())
        }
    }

    fn fake(kind: DraftKind, chance: f32) -> Box<dyn Draft> {
        Box::new(Fake { kind, chances: [Chance::prior(chance); DEPTH] })
    }

    /// As on two CPU cores: eight rows cost twice as much as one.
    const COSTS: Costs = Costs {
        plain: 1.0,
        verify: [1.0, 1.15, 1.3, 1.4, 1.6, 1.8, 1.9, 2.0],
        draft: [0.0, 0.15, 0.3, 0.5],
    };

    fn governor() -> Governor {
        Governor::new(Mode::Auto, DEPTH)
    }

    #[test]
    fn drafts_are_used_where_they_pay_and_as_deep_as_they_pay() {
        let choose = |kind, chance| governor().choose(&COSTS, &[fake(kind, chance)], 100);
        assert_eq!(choose(DraftKind::Ngram, 0.0), None);
        assert_eq!(choose(DraftKind::Ngram, 0.1), None);
        assert_eq!(choose(DraftKind::Model, 0.3), None);
        let shallow = choose(DraftKind::Ngram, 0.5).unwrap().depth;
        let deep = choose(DraftKind::Ngram, 0.95).unwrap().depth;
        assert!(shallow < deep && deep == DEPTH, "{shallow} {deep}");
    }

    #[test]
    fn what_was_not_measured_lies_between_or_promises_nothing() {
        let mut verify = [1.0, 0.0, 0.0, 1.6, 0.0, 0.0, 0.0, 2.0];
        fill(&mut verify);
        let expected = [1.0, 1.2, 1.4, 1.6, 1.7, 1.8, 1.9, 2.0];
        assert!(verify.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{verify:?}");
        let mut verify = [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        fill(&mut verify);
        assert_eq!(verify, [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]);
        // Noise: four rows are not dearer than eight.
        let mut verify = [1.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 2.0];
        fill(&mut verify);
        assert!(verify.is_sorted() && verify[3] == 2.0, "{verify:?}");
    }

    #[test]
    fn the_better_draft_wins_and_room_is_kept() {
        let drafts = [fake(DraftKind::Model, 0.9), fake(DraftKind::Mtp, 0.9)];
        assert_eq!(governor().choose(&COSTS, &drafts, 100).unwrap().draft, 1);
        assert_eq!(governor().choose(&COSTS, &drafts, 1).unwrap().depth, 1);
        assert_eq!(governor().choose(&COSTS, &drafts, 0), None);
    }

    /// Runs 2,000 turns in which each drafted token is right or none is; returns the time that
    /// was taken, in plain steps, and the tokens committed.
    fn simulate(governor: &mut Governor, drafts: &mut [Box<dyn Draft>], right: bool) -> [f32; 2] {
        let (mut time, mut tokens) = (0.0, 0.0);
        for _ in 0..2000 {
            tokens += 1.0;
            let Some(Choice { draft, depth }) = governor.choose(&COSTS, drafts, 100) else {
                time += 1.0;
                governor.stepped();
                continue;
            };
            let kind = drafts[draft].kind();
            time += COSTS.verify[depth] + COSTS.draft[kind as usize] * depth as f32;
            let accepted = if right { depth } else { 0 };
            tokens += accepted as f32;
            drafts[draft].learn(depth.min(accepted + 1), accepted).unwrap();
            governor.verified(kind, accepted > 0);
        }
        [time, tokens]
    }

    #[test]
    fn useless_drafts_cost_next_to_nothing_and_come_back_when_the_text_changes() {
        let mut governor = governor();
        let mut drafts = [fake(DraftKind::Mtp, 0.7), fake(DraftKind::Model, 0.6)];
        let [time, tokens] = simulate(&mut governor, &mut drafts, false);
        assert!(time / tokens < 1.02, "{time} steps for {tokens} tokens");
        let [time, tokens] = simulate(&mut governor, &mut drafts, true);
        assert!(tokens / time > 1.8, "{time} steps for {tokens} tokens");
        let [time, tokens] = simulate(&mut governor, &mut drafts, false);
        assert!(time / tokens < 1.03, "{time} steps for {tokens} tokens");
    }
}
