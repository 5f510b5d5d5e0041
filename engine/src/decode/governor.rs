//! Decides what drafts and how deep, so that the most tokens are committed a second. Often none.
//!
//! It knows what passes cost on this machine ([`Costs`], measured at the start) and how likely
//! drafts are accepted in this text ([`Draft::chances`]). A draft of depth m, each of whose tokens
//! is accepted with chance a, commits 1 + a_1 + a_1 a_2 + ... tokens in the time of m drafts and a
//! pass of m + 1 rows; the best rate wins, plain decoding included.
//!
//! What is not used is not learned about, so while nothing pays each kind is tried again after a
//! while, ever more rarely if it does not pay then either.
//!
//! Source: the expected gain is that of arXiv:2211.17192, section 3.3.

use std::time::{Duration, Instant};

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::{async_eval, eval};

use super::adjust::Adjust;
use super::draft::{At, Chance, Draft};
use super::sample::sample;
use crate::cache::{Cache, Span};
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::{Model, Pass};
use crate::request::Sampling;

/// Speculation must promise this much more than plain decoding: what it promises is an estimate.
const GAIN: f32 = 1.1;

/// Turns until a kind that is not in use is tried again, at least and at most. One try costs about a
/// token (it may have to catch up first), so that the longest wait costs a few thousandths.
const TRY_AGAIN: [u32; 2] = [8, 512];

/// Right tries in a row that are followed by another soon.
const RIGHT: u32 = 4;

/// Time for measuring passes at the start, a tenth of it for each number of rows; a slow machine gets
/// one pass of each, or what there is time for.
const MEASURING: Duration = Duration::from_secs(4);

/// After this no further kernels are compiled only to measure them: on CUDA those of one number of
/// rows can take a quarter of a minute, once for each machine.
const COMPILING: Duration = Duration::from_secs(40);

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
    /// Drafting, by kind.
    pub draft: [Drafting; DraftKind::ALL.len()],
}

/// Seconds that drafting takes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Drafting {
    /// The first token, with what the draft has to read before it.
    pub first: f32,
    /// Each further one.
    pub more: f32,
}

impl Drafting {
    fn tokens(self, depth: usize) -> f32 {
        self.first + self.more * (depth - 1) as f32
    }
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
        let (hidden, picks) = pass(&mut cache, &tokens[..CONTEXT])?;
        eval([&picks])?;

        let mut clock = Clock { spent: Duration::ZERO, start: Instant::now() };
        let mut verify = [0.0; DEPTH + 1];
        for rows in MEASURED {
            verify[rows - 1] = clock.least_of(|| {
                cache.mark_draft();
                let begin = Instant::now();
                eval([&pass(&mut cache, &tokens[..rows])?.1])?;
                let took = begin.elapsed();
                cache.rewind_draft(CONTEXT)?;
                Ok(Some(took))
            })?;
        }
        fill(&mut verify);

        cache.mark_draft();
        let mut before = picks.clone();
        let plain = clock.least_of(|| {
            let begin = Instant::now();
            let drawn = pass(&mut cache, &tokens[..1])?.1;
            async_eval([&drawn])?;
            eval([&before])?;
            before = drawn;
            Ok(Some(begin.elapsed()))
        })?;
        eval([&before])?;
        cache.rewind_draft(CONTEXT)?;

        let plain = if plain > 0.0 { plain.min(verify[0]) } else { verify[0] };
        let mut costs = Self { plain, verify, ..Self::default() };
        for draft in drafts {
            draft.observe(&hidden, 0)?;
            let row = hidden.try_index((.., ..1))?;
            let mut adjust = Adjust::new(greedy);
            // One more token is known each time, as in decoding.
            let mut known = CONTEXT;
            let mut least = |depth| {
                clock.least_of(|| {
                    known += 1;
                    let (cache, tokens) = (&mut cache, &tokens[..known]);
                    let mut at = At {
                        model,
                        part,
                        cache,
                        tokens,
                        adjust: &mut adjust,
                        seed: 0,
                        vocabulary: i32::MAX,
                    };
                    let begin = Instant::now();
                    let Some(proposed) = draft.propose(&mut at, depth)? else { return Ok(None) };
                    eval([&proposed])?;
                    let took = begin.elapsed();
                    draft.learn(0, 0)?;
                    draft.observe(&row, known - 1)?;
                    Ok(Some(took))
                })
            };
            let (first, all) = (least(1)?, least(DEPTH)?);
            let more = (all - first).max(0.0) / (DEPTH - 1) as f32;
            costs.draft[draft.kind() as usize] = Drafting { first, more };
        }
        Ok(costs)
    }

    /// The depth at which drafts of these chances commit the most tokens a second, and how many.
    ///
    /// A row that is `sure` is taken as it is; at one that is not the pass ends, and a plain pass
    /// draws its token.
    fn best_depth(&self, kind: DraftKind, chances: &[f32], sure: f32) -> (f32, usize) {
        // `reached`: the chance that the row is looked at.
        let (mut tokens, mut doubts, mut reached) = (sure, 1.0 - sure, sure);
        let mut best = (0.0, 1);
        for (i, chance) in chances.iter().enumerate() {
            reached *= chance;
            tokens += reached * sure;
            doubts += reached * (1.0 - sure);
            reached *= sure;
            let depth = i + 1;
            let drafting = self.draft[kind as usize].tokens(depth);
            let time = drafting + self.verify[depth] + doubts * self.plain;
            let rate = (tokens + doubts) / time;
            if rate > best.0 {
                best = (rate, depth);
            }
        }
        best
    }

    /// A plain step took so long. What makes it longer (more context to look back at, a hotter chip)
    /// makes every pass longer.
    pub fn learn_plain(&mut self, took: f32) {
        let before = self.plain;
        learn(&mut self.plain, took);
        let longer = self.plain - before;
        for cost in &mut self.verify {
            *cost = (*cost + longer).max(self.plain);
        }
    }

    /// Drafting `rows - 1` tokens and verifying them took so long.
    ///
    /// Where drafting costs nothing, that is the cost of a pass. What a further row costs is
    /// learned for all numbers of rows together: those that are not in use would never be corrected
    /// if they were measured at a bad moment. Elsewhere it is a draft that costs more or less than
    /// it did: it has more to read where the last one was right, and leaves more to rewind where it
    /// was not.
    pub fn learn_verify(&mut self, kind: DraftKind, rows: usize, took: f32) {
        let mut cost = self.verify[rows - 1];
        if kind != DraftKind::Ngram {
            let drafting = &mut self.draft[kind as usize];
            let mut turn = drafting.tokens(rows - 1) + cost;
            let before = turn;
            learn(&mut turn, took);
            drafting.first = (drafting.first + turn - before).max(0.0);
            return;
        }
        let further = |cost: f32| (cost - self.plain).max(0.01 * self.plain);
        let before = further(cost);
        learn(&mut cost, took);
        let ratio = further(cost) / before;
        for (i, cost) in self.verify.iter_mut().enumerate().skip(1) {
            let share = if i == rows - 1 { ratio } else { ratio.sqrt() };
            *cost = self.plain + (*cost - self.plain).max(0.01 * self.plain) * share;
        }
    }
}

/// Moves a cost a little towards what was seen. One stall is no news.
fn learn(cost: &mut f32, took: f32) {
    *cost += 0.05 * (took.clamp(0.0, 2.0 * *cost) - *cost);
}

/// What measuring has taken so far.
struct Clock {
    spent: Duration,
    start: Instant,
}

impl Clock {
    /// The least of several runs in seconds; 0 where there is no time left, or where the run says
    /// that there is nothing to measure.
    ///
    /// The first run is not counted: it may compile kernels, for half a minute on CUDA.
    fn least_of(&mut self, mut run: impl FnMut() -> Result<Option<Duration>>) -> Result<f32> {
        let mut least = Duration::MAX;
        let own = self.spent + MEASURING / 10;
        let late = self.spent > MEASURING || self.start.elapsed() > COMPILING;
        if late || run()?.is_none() {
            return Ok(0.0);
        }
        for _ in 0..REPEATS {
            let Some(took) = run()? else { return Ok(0.0) };
            least = least.min(took);
            self.spent += took;
            if self.spent > own {
                break;
            }
        }
        Ok(least.as_secs_f32())
    }
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

/// What drafts in a turn: index into the sequence's drafts, and how many tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Which of the drafts.
    pub draft: usize,
    /// At most so many tokens.
    pub depth: usize,
    /// Whether it is only tried, as what is known of it is old.
    pub is_try: bool,
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
    /// How often a row is no near-tie.
    sure: Chance,
    waits: [Wait; DraftKind::ALL.len()],
}

/// When a kind is tried again.
#[derive(Debug, Clone, Copy)]
struct Wait {
    turns: u32,
    since: u32,
    /// Tries in a row that were right, so that the next one came soon.
    right: u32,
}

impl Governor {
    /// Knows nothing of the text. Drafts are at most `depth` deep.
    pub fn new(mode: Mode, depth: usize) -> Self {
        let wait = Wait { turns: TRY_AGAIN[0], since: 0, right: 0 };
        let waits = [wait; DraftKind::ALL.len()];
        Self { mode, depth, sure: Chance::prior(1.0), waits }
    }

    /// What drafts next; `None` for a plain step. At most `room` tokens may be drafted.
    ///
    /// `unread` says that the token drafts would go on from is still being computed: waiting for it
    /// costs what a plain step saves by not waiting, so an n-gram must expect to be right about
    /// that token, too.
    pub fn choose(
        &self,
        costs: &Costs,
        drafts: &[Box<dyn Draft>],
        room: usize,
        unread: bool,
    ) -> Option<Choice> {
        let room = room.min(self.depth);
        if room == 0 {
            return None;
        }
        if let Mode::Always(depth) = self.mode {
            let draft = drafts.iter().position(|draft| draft.chances()[0] > 0.0)?;
            return Some(Choice { draft, depth: depth.min(room), is_try: false });
        }
        let mut best: Option<(f32, Choice)> = None;
        let mut overdue: Option<(u32, Choice)> = None;
        for (draft, source) in drafts.iter().enumerate() {
            let (kind, chances) = (source.kind(), source.chances());
            if chances[0] == 0.0 {
                continue;
            }
            let (mut rate, depth) = costs.best_depth(kind, &chances[..room], self.sure.value());
            let choice = Choice { draft, depth, is_try: false };
            if unread && kind == DraftKind::Ngram {
                // Right: that rate. Wrong: a step that was waited for.
                let right = chances[0];
                rate = right * rate + (1.0 - right) / costs.verify[0];
            }
            if best.is_none_or(|(most, _)| rate > most) {
                best = Some((rate, choice));
            }
            let wait = self.waits[kind as usize];
            let turns = if wait.right > 0 { TRY_AGAIN[0] } else { wait.turns };
            let late = wait.since.saturating_sub(turns);
            if late > 0 {
                let choice = Choice { draft, depth: depth.min(2), is_try: true };
                if overdue.is_none_or(|(most, _)| late > most) {
                    overdue = Some((late, choice));
                }
            }
        }
        match best {
            Some((rate, choice)) if rate * costs.plain > GAIN => Some(choice),
            // While nothing pays, what has not been tried for long is.
            _ => overdue.map(|(_, choice)| choice),
        }
    }

    /// A plain step was taken.
    pub fn stepped(&mut self) {
        for wait in &mut self.waits {
            wait.since += 1;
        }
    }

    /// `draft` was verified, and its first token `right`, in a pass of which `sure` rows were no
    /// near-ties and, with `doubt`, one more was. Returns whether it had nothing to catch up with, as it was in use
    /// before.
    pub fn verified(
        &mut self,
        costs: &Costs,
        draft: &dyn Draft,
        right: bool,
        sure: usize,
        doubt: bool,
    ) -> bool {
        for _ in 0..sure {
            self.sure.learn(true);
        }
        if doubt {
            self.sure.learn(false);
        }
        self.stepped();
        let (kind, chances) = (draft.kind(), draft.chances());
        let (rate, _) = costs.best_depth(kind, &chances[..self.depth], self.sure.value());
        let [least, most] = TRY_AGAIN;
        let wait = &mut self.waits[kind as usize];
        let in_use = wait.since == 1;
        wait.since = 0;
        let pays = rate * costs.plain > GAIN;
        // A few right tries in a row show that the text has changed; more of them that still do not
        // pay, that being right is not enough here.
        if pays {
            (wait.turns, wait.right) = (least, 0);
        } else if right && wait.right < RIGHT {
            wait.right += 1;
        } else {
            (wait.turns, wait.right) = ((wait.turns * 2).min(most), 0);
        }
        in_use || kind == DraftKind::Ngram
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::draft::forget;

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

        fn learned(&mut self) -> &mut [Chance] {
            &mut self.chances
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

    const fn cost(token: f32) -> Drafting {
        Drafting { first: token, more: token }
    }

    /// As on two CPU cores: eight rows cost twice as much as one.
    const COSTS: Costs = Costs {
        plain: 1.0,
        verify: [1.0, 1.15, 1.3, 1.4, 1.6, 1.8, 1.9, 2.0],
        draft: [cost(0.0), cost(0.15), cost(0.3), cost(0.5)],
    };

    fn governor() -> Governor {
        Governor::new(Mode::Auto, DEPTH)
    }

    #[test]
    fn drafts_are_used_where_they_pay_and_as_deep_as_they_pay() {
        let choose = |kind, chance| governor().choose(&COSTS, &[fake(kind, chance)], 100, false);
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
        assert_eq!(governor().choose(&COSTS, &drafts, 100, false).unwrap().draft, 1);
        assert_eq!(governor().choose(&COSTS, &drafts, 1, false).unwrap().depth, 1);
        assert_eq!(governor().choose(&COSTS, &drafts, 0, false), None);
    }

    /// Runs 2,000 turns in which a drafted token is right `percent` of the time, and a row a
    /// near-tie `doubtful` percent of it. Returns plain steps that the time would have held, and
    /// tokens committed.
    fn simulate(
        governor: &mut Governor,
        drafts: &mut [Box<dyn Draft>],
        percent: u32,
        doubtful: u32,
    ) -> [f32; 2] {
        let (mut time, mut tokens) = (0.0, 0.0);
        let mut noise = 1u32;
        let mut happens = |percent: u32| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (noise >> 8) % 100 < percent
        };
        for _ in 0..2000 {
            let choice = governor.choose(&COSTS, drafts, 100, false);
            let Some(Choice { draft, depth, is_try }) = choice else {
                time += 1.0;
                tokens += 1.0;
                governor.stepped();
                continue;
            };
            if is_try {
                forget(&mut *drafts[draft]);
            }
            let kind = drafts[draft].kind();
            time += COSTS.verify[depth] + COSTS.draft[kind as usize].tokens(depth);
            let mut accepted = 0;
            let mut doubt = happens(doubtful);
            while !doubt && accepted < depth && happens(percent) {
                accepted += 1;
                doubt = happens(doubtful);
            }
            tokens += accepted as f32 + 1.0;
            time += f32::from(u8::from(doubt));
            let rejected = !doubt && accepted < depth;
            drafts[draft].learn(accepted + usize::from(rejected), accepted).unwrap();
            let sure = accepted + usize::from(!doubt);
            governor.verified(&COSTS, &*drafts[draft], accepted > 0, sure, doubt);
        }
        [time, tokens]
    }

    #[test]
    fn useless_drafts_cost_next_to_nothing_and_come_back_when_the_text_changes() {
        let mut governor = governor();
        let mut drafts = [fake(DraftKind::Mtp, 0.7), fake(DraftKind::Model, 0.6)];
        for percent in [0, 5, 15] {
            let [time, tokens] = simulate(&mut governor, &mut drafts, percent, 0);
            assert!(time / tokens < 1.02, "{percent} %: {time} steps for {tokens} tokens");
        }
        let [time, tokens] = simulate(&mut governor, &mut drafts, 100, 0);
        assert!(tokens / time > 1.8, "{time} steps for {tokens} tokens");
        let [time, tokens] = simulate(&mut governor, &mut drafts, 0, 0);
        assert!(time / tokens < 1.03, "{time} steps for {tokens} tokens");
    }

    /// Between useless and useful, and with rows that have to be run again: never much slower.
    #[test]
    fn drafts_that_hardly_pay_cost_next_to_nothing() {
        for percent in [20, 30, 40, 50, 60, 70] {
            for doubtful in [0, 10, 30, 60] {
                let mut governor = governor();
                let mut drafts = [fake(DraftKind::Mtp, 0.7), fake(DraftKind::Model, 0.6)];
                let [time, tokens] = simulate(&mut governor, &mut drafts, percent, doubtful);
                assert!(
                    time / tokens < 1.03,
                    "{percent} %, {doubtful} % doubtful: {time} steps for {tokens} tokens"
                );
            }
        }
    }
}
