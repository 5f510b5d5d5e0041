//! Medians, spreads, intervals and exact tests.
//!
//! Never prints and never reads: numbers in, numbers out.
//!
//! Source: Wilson 1927 (interval of a proportion); McNemar 1947, exact form; Wilcoxon 1945 (signed
//! ranks); Mann and Whitney 1947. The exact distributions are counted, with ties as mid-ranks.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

/// Quantile of the standard normal distribution for intervals of 95 %.
const Z95: f64 = 1.959_963_984_540_054;
/// Most values that an exact rank test counts: its time grows with their cube.
const EXACT_VALUES: usize = 200;

/// Median and spread of values of one figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Number of values.
    pub n: usize,
    /// The median.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// First quartile.
    pub q1: f64,
    /// Third quartile.
    pub q3: f64,
    /// The largest value.
    pub max: f64,
}

impl Spread {
    /// The spread of some values; `None` without values.
    pub fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values);
        let at = |share| quantile(&sorted, share);
        Some(Self {
            n: sorted.len(),
            median: at(0.5)?,
            min: at(0.0)?,
            q1: at(0.25)?,
            q3: at(0.75)?,
            max: at(1.0)?,
        })
    }

    /// Whether the ranges from the smallest to the largest value have a common point.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.min <= other.max && other.min <= self.max
    }
}

/// The values in ascending order.
pub fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

/// The quantile at `share` (0 to 1) of ascending values, linear between neighbours; `None` without
/// values.
pub fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let place = share * sorted.len().checked_sub(1)? as f64;
    let below = sorted[place.floor() as usize];
    let above = sorted[place.ceil() as usize];
    Some(below + (above - below) * place.fract())
}

/// The Wilson interval of 95 % for a proportion of `right` in `n`.
pub fn wilson(right: usize, n: usize) -> (f64, f64) {
    if n == 0 {
        return (0.0, 1.0);
    }
    let (count, share) = (n as f64, right as f64 / n as f64);
    let z2 = Z95 * Z95;
    let middle = share + z2 / (2.0 * count);
    let half = Z95 * (share * (1.0 - share) / count + z2 / (4.0 * count * count)).sqrt();
    let scale = 1.0 + z2 / count;
    (((middle - half) / scale).max(0.0), ((middle + half) / scale).min(1.0))
}

/// McNemar's exact test, two-sided: `only_a` items were right in the first run alone, `only_b` in
/// the second alone.
pub fn mcnemar(only_a: usize, only_b: usize) -> f64 {
    let (n, fewer) = (only_a + only_b, only_a.min(only_b));
    let mut ln_choose = 0.0;
    let mut tail = 0.0;
    for i in 0..=fewer {
        if i > 0 {
            ln_choose += ((n - i + 1) as f64).ln() - (i as f64).ln();
        }
        tail += (ln_choose - n as f64 * std::f64::consts::LN_2).exp();
    }
    (2.0 * tail).min(1.0)
}

/// Wilcoxon's signed-rank test, exact and two-sided, of differences of pairs. Pairs without a
/// difference are left out. `None` without differences, or with more than can be counted.
pub fn signed_ranks(differences: &[f64]) -> Option<f64> {
    let differences: Vec<f64> = differences.iter().copied().filter(|d| *d != 0.0).collect();
    if differences.is_empty() || differences.len() > EXACT_VALUES {
        return None;
    }
    let sizes: Vec<f64> = differences.iter().map(|d| d.abs()).collect();
    let ranks = doubled_ranks(&sizes);
    let found = differences.iter().zip(&ranks).filter(|(d, _)| **d > 0.0).map(|(_, r)| r).sum();
    let total: usize = ranks.iter().sum();
    // ways[s]: choices of signs whose positive ranks sum to s.
    let mut ways = vec![0.0; total + 1];
    ways[0] = 1.0;
    for rank in ranks {
        for sum in (rank..=total).rev() {
            ways[sum] += ways[sum - rank];
        }
    }
    Some(two_sided(&ways, found))
}

/// Mann and Whitney's test, exact and two-sided, of two samples without pairs. `None` if one is
/// empty, or with more values than can be counted.
pub fn rank_sums(a: &[f64], b: &[f64]) -> Option<f64> {
    if a.is_empty() || b.is_empty() || a.len() + b.len() > EXACT_VALUES / 2 {
        return None;
    }
    let ranks = doubled_ranks(&[a, b].concat());
    let found = ranks[..a.len()].iter().sum();
    let total: usize = ranks.iter().sum();
    // ways[k][s]: choices of k values whose ranks sum to s.
    let mut ways = vec![vec![0.0; total + 1]; a.len() + 1];
    ways[0][0] = 1.0;
    for rank in ranks {
        for k in (1..=a.len()).rev() {
            for sum in (rank..=total).rev() {
                ways[k][sum] += ways[k - 1][sum - rank];
            }
        }
    }
    Some(two_sided(&ways[a.len()], found))
}

/// Twice the smaller tail of a distribution at `found`, at most 1.
fn two_sided(ways: &[f64], found: usize) -> f64 {
    let all: f64 = ways.iter().sum();
    let (below, above): (f64, f64) = (ways[..=found].iter().sum(), ways[found..].iter().sum());
    (2.0 * below.min(above) / all).min(1.0)
}

/// Twice the rank of each value, so that the mean rank of ties is an integer.
fn doubled_ranks(values: &[f64]) -> Vec<usize> {
    let rank = |value: &f64| {
        let count = |order| values.iter().filter(|other| other.total_cmp(value) == order).count();
        2 * count(Ordering::Less) + count(Ordering::Equal) + 1
    };
    values.iter().map(rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 5e-5, "{found} is not {expected}");
    }

    #[test]
    fn quantiles_are_linear_between_neighbours() {
        let spread = Spread::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        let expected = Spread { n: 4, median: 2.5, min: 1.0, q1: 1.75, q3: 3.25, max: 4.0 };
        assert_eq!(spread, expected);
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
    }

    #[test]
    fn ranges_that_touch_overlap() {
        let [a, b, c] = [[1.0, 2.0], [2.0, 3.0], [2.5, 4.0]].map(|v| Spread::of(&v).unwrap());
        assert!(a.overlaps(&b) && b.overlaps(&a) && b.overlaps(&c));
        assert!(!a.overlaps(&c) && !c.overlaps(&a));
    }

    /// Published values: 8 of 10 and 0 of 10.
    #[test]
    fn wilson_intervals_have_published_values() {
        let (low, high) = wilson(8, 10);
        close(low, 0.49016);
        close(high, 0.94332);
        let (low, high) = wilson(0, 10);
        close(low, 0.0);
        close(high, 0.27753);
        assert_eq!(wilson(0, 0), (0.0, 1.0));
    }

    #[test]
    fn mcnemar_is_the_binomial_tail() {
        close(mcnemar(1, 7), 18.0 / 256.0);
        close(mcnemar(15, 5), 0.04139);
        assert_eq!(mcnemar(0, 0), 1.0);
        assert_eq!(mcnemar(4, 4), 1.0);
        assert!(mcnemar(3000, 2000) < 1e-40);
    }

    /// Darwin's pairs of plants (Fisher 1935): V = 96, p = 0.04126 in R's `wilcox.test`.
    #[test]
    fn signed_ranks_give_the_published_value_of_darwins_plants() {
        let pairs = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48];
        close(signed_ranks(&pairs.map(f64::from)).unwrap(), 0.04126);
        close(signed_ranks(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap(), 2.0 / 64.0);
        assert_eq!(signed_ranks(&[0.0, 0.0]), None);
    }

    /// Hollander and Wolfe's permeability of membranes: W = 35, one-sided p = 0.1272 in R.
    #[test]
    fn rank_sums_give_the_published_value_of_permeability() {
        let at_term = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46];
        let early = [1.15, 0.88, 0.90, 0.74, 1.21];
        close(rank_sums(&at_term, &early).unwrap(), 0.25441);
        close(rank_sums(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]).unwrap(), 0.1);
        assert_eq!(rank_sums(&[], &[1.0]), None);
    }

    #[test]
    fn ties_share_their_mean_rank() {
        assert_eq!(doubled_ranks(&[5.0, 1.0, 5.0, 9.0]), [5, 2, 5, 8]);
    }
}
