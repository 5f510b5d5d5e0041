use steersman_test_support::Random;

use super::super::costs::DraftCost;
use super::super::trial_time::TrialTime;
use super::*;
use crate::cache::Cache;
use crate::config::DEPTH;
use crate::draft::{Start, discount_rates};
use crate::error::Result;
use crate::model::Model;

/// Drafts nothing, but learns acceptance rates as real drafters do.
struct Fake {
    kind: DraftKind,
    rates: [MovingRate; DEPTH],
}

impl Drafter for Fake {
    fn kind(&self) -> DraftKind {
        self.kind
    }

    fn acceptance_rates(&self) -> [f32; DEPTH] {
        self.rates.map(MovingRate::value)
    }

    fn learned_rates(&mut self) -> &mut [MovingRate] {
        &mut self.rates
    }

    fn start(&mut self, _: &dyn Model, _: &mut Cache, _: &[u32], _: usize) -> Result<Start> {
        unreachable!("the governor asks for rates only")
    }

    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
        for (i, rate) in self.rates.iter_mut().enumerate().take(judged) {
            rate.learn(i < accepted);
        }
        Ok(())
    }
}

type Drafters = Vec<Box<dyn Drafter>>;

fn fake(kind: DraftKind, rate: f32) -> Box<dyn Drafter> {
    Box::new(Fake { kind, rates: [MovingRate::prior(rate); DEPTH] })
}

/// As on two CPU cores: eight rows cost twice as much as one, and 64 rows sixteen times.
fn costs() -> Costs {
    let first = [1.0, 1.15, 1.3, 1.4, 1.6, 1.8, 1.9, 2.0];
    let passes = std::array::from_fn(|i| match first.get(i) {
        Some(&time) => time,
        None => 2.0 + 0.25 * (i - 7) as f32,
    });
    let draft = |token: f32| DraftCost { first: token, more: token };
    let mut costs = Costs::of(1.0, &passes);
    costs.draft = [draft(0.0), draft(0.15), draft(0.3), draft(0.5)];
    costs
}

/// As on a GPU: up to 16 rows cost what one costs, and further ones little.
fn flat_costs() -> Costs {
    let passes = std::array::from_fn(|i| if i < 16 { 1.0 } else { 2.0 + 0.01 * i as f32 });
    Costs::of(1.0, &passes)
}

fn governor() -> Governor {
    Governor::new(Mode::Auto, DEPTH)
}

/// The choice for one sequence alone.
fn alone(governor: &Governor, drafters: &Drafters, room: usize) -> Option<Choice> {
    choose(&costs(), 1, &[governor.offer(&costs(), 1, drafters, room, false)], Permit::Trials)[0]
}

/// The depths for n-gram drafts with these acceptance rates, in a pass of `streams` sequences.
fn depths(costs: &Costs, streams: usize, rates: &[f32]) -> Vec<usize> {
    let offer = |&rate: &f32| {
        let drafters: Drafters = vec![fake(DraftKind::Ngram, rate)];
        governor().offer(costs, streams, &drafters, 100, false)
    };
    let offers: Vec<Option<Offer>> = rates.iter().map(offer).collect();
    choose(costs, streams, &offers, Permit::Trials)
        .iter()
        .map(|choice| choice.map_or(0, |c| c.depth))
        .collect()
}

#[test]
fn drafts_run_only_where_and_as_deep_as_they_pay() {
    let choose = |kind, rate| alone(&governor(), &vec![fake(kind, rate)], 100);
    assert_eq!(choose(DraftKind::Ngram, 0.0), None);
    assert_eq!(choose(DraftKind::Ngram, 0.1), None);
    assert_eq!(choose(DraftKind::Model, 0.3), None);
    let shallow = choose(DraftKind::Ngram, 0.5).unwrap().depth;
    let deep = choose(DraftKind::Ngram, 0.95).unwrap().depth;
    assert!(shallow < deep && deep == DEPTH, "{shallow} {deep}");
}

#[test]
fn cheaper_drafter_wins_and_depth_fits_the_room() {
    let drafters = vec![fake(DraftKind::Model, 0.9), fake(DraftKind::Mtp, 0.9)];
    assert_eq!(alone(&governor(), &drafters, 100).unwrap().drafter, 1);
    assert_eq!(alone(&governor(), &drafters, 1).unwrap().depth, 1);
    assert_eq!(alone(&governor(), &drafters, 0), None);
}

/// A row costs a tenth of a pass here, so that only likely tokens pay.
#[test]
fn of_several_sequences_those_with_likely_tokens_draft() {
    let chosen = depths(&costs(), 4, &[0.1, 0.97, 0.3, 0.97]);
    assert!(chosen[1] >= 2 && chosen[3] >= 2 && [chosen[0], chosen[2]] == [0, 0], "{chosen:?}");
    // Among more streams, two drafts are not worth their rows.
    let chosen = depths(&costs(), 8, &[0.1, 0.97, 0.3, 0.97, 0.0, 0.1, 0.2, 0.3]);
    assert_eq!(chosen, [0; 8]);
}

/// The free rows of a kernel are filled with the likeliest tokens, and no row beyond them is used.
#[test]
fn drafts_fill_the_rows_that_cost_nothing() {
    let depths = depths(&flat_costs(), 8, &[0.5, 0.6, 0.5, 0.6, 0.5, 0.6, 0.5, 0.6]);
    assert_eq!(depths.iter().sum::<usize>(), 8, "{depths:?}");
    assert!([1, 3, 5, 7].iter().all(|&i| depths[i] >= 1), "{depths:?}");
}

/// Random costs, rates and numbers of sequences: a chosen pass fits in its rows, pays, and is not worse
/// than the same with a token more or less.
#[test]
fn random_passes_are_the_best_of_their_neighbours() {
    let mut random = Random(5);
    let mut chosen = 0;
    for _ in 0..500 {
        let streams = 1 + random.below(ROWS);
        let mut time = 1.0;
        let passes = std::array::from_fn(|_| {
            time += random.below(100) as f32 / [1000.0, 300.0][random.below(2)];
            time
        });
        let costs = Costs::of(1.0, &passes);
        let rates: Vec<f32> = (0..streams).map(|_| random.below(100) as f32 / 100.0).collect();
        let depths = depths(&costs, streams, &rates);
        let rows = streams + depths.iter().sum::<usize>();
        assert!(rows <= ROWS);
        let speed = |depths: &[usize]| {
            let gain = |(&depth, rate): (&usize, &f32)| -> f32 {
                (1..=depth as i32).map(|i| rate.powi(i)).sum()
            };
            let tokens = streams as f32 + depths.iter().zip(&rates).map(gain).sum::<f32>();
            tokens / costs.pass(streams, streams + depths.iter().sum::<usize>())
        };
        if rows == streams {
            continue;
        }
        chosen += 1;
        assert!(speed(&depths) * costs.plain(streams) > GAIN * streams as f32 * 0.999);
        for i in 0..streams {
            let mut other = depths.clone();
            if other[i] > 0 {
                other[i] -= 1;
                assert!(speed(&other) <= speed(&depths) * 1.000_1, "{depths:?} {rates:?}");
            }
        }
    }
    assert!(chosen > 50, "{chosen}");
}

/// Runs 2,000 steps of one sequence in which a drafted token is right with `acceptance` percent and a row is
/// a near-tie with `near_ties` percent. Returns the time, in plain steps, and the tokens committed.
fn simulate(
    governor: &mut Governor,
    drafters: &mut Drafters,
    acceptance: u32,
    near_ties: u32,
) -> [f32; 2] {
    let (mut time, mut tokens) = (0.0, 0.0);
    let mut trial_time = TrialTime::default();
    let mut random = Random(1);
    let mut happens = |percent: u32| random.below(100) < percent as usize;
    for _ in 0..2000 {
        let offer = governor.offer(&costs(), 1, drafters, 100, false);
        let choice = choose(&costs(), 1, &[offer], trial_time.permit(1.0))[0];
        let Some(Choice { drafter, depth, is_trial }) = choice else {
            time += 1.0;
            tokens += 1.0;
            trial_time.earn(1.0, 1.0);
            governor.count_step();
            continue;
        };
        let drafter = &mut *drafters[drafter];
        if is_trial {
            discount_rates(drafter);
        }
        let drafting = costs().draft[drafter.kind() as usize].tokens(depth);
        let step = costs().pass(1, depth + 1) + drafting;
        time += step;
        let mut accepted = 0;
        let mut near_tie = happens(near_ties);
        while !near_tie && accepted < depth && happens(acceptance) {
            accepted += 1;
            near_tie = happens(near_ties);
        }
        tokens += accepted as f32 + 1.0;
        time += f32::from(u8::from(near_tie));
        trial_time.spend(step, 1.0, 1, accepted as i32 - i32::from(near_tie));
        let rejected = !near_tie && accepted < depth;
        drafter.learn(accepted + usize::from(rejected), accepted).unwrap();
        let confident = accepted + usize::from(!near_tie);
        governor.learn(drafter.kind(), confident, near_tie);
    }
    [time, tokens]
}

#[test]
fn useless_drafters_cost_little_and_return_when_the_text_changes() {
    let mut governor = governor();
    let mut drafters = vec![fake(DraftKind::Mtp, 0.7), fake(DraftKind::Model, 0.6)];
    for acceptance in [0, 5, 15] {
        let [time, tokens] = simulate(&mut governor, &mut drafters, acceptance, 0);
        assert!(time / tokens < 1.02, "{acceptance} %: {time} steps for {tokens} tokens");
    }
    let [time, tokens] = simulate(&mut governor, &mut drafters, 100, 0);
    assert!(tokens / time > 1.8, "{time} steps for {tokens} tokens");
    let [time, tokens] = simulate(&mut governor, &mut drafters, 0, 0);
    assert!(time / tokens < 1.015, "{time} steps for {tokens} tokens");
}

/// Between useless and useful, and with rows that run again: never much slower.
#[test]
fn drafters_near_break_even_cost_little() {
    for acceptance in [20, 30, 40, 50, 60, 70] {
        for near_ties in [0, 10, 30, 60] {
            let mut governor = governor();
            let mut drafters = vec![fake(DraftKind::Mtp, 0.7), fake(DraftKind::Model, 0.6)];
            let [time, tokens] = simulate(&mut governor, &mut drafters, acceptance, near_ties);
            assert!(
                time / tokens < 1.015,
                "{acceptance} %, {near_ties} % near-ties: {time} steps for {tokens} tokens"
            );
        }
    }
}
