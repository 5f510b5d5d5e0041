//! How tensors are cut among ranks.
//!
//! A tensor is cut into units that stay whole: heads, groups of heads, or single columns of a feed-forward block. Each rank has
//! as many neighbouring units as the others. What no table of a layer names is whole on every rank.

use std::ops::Range;

use mlx_rs::Array;
use mlx_rs::ops::concatenate;

use crate::error::Result;
use crate::ranks::Ranks;

/// How a layer or a vector is cut among ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// The outputs are this many units, which the ranks divide.
    Outputs(i32),
    /// As [`Cut::Outputs`]; if there are more ranks than units, neighbouring ranks have the same one.
    Repeated(i32),
    /// The inputs are this many units, which the ranks divide. The outputs of all ranks are summed.
    Inputs(i32),
    /// The outputs are these, one after the other: how many, and how they are cut.
    Segments(Vec<(i32, Cut)>),
    /// The layers of a stack are the units.
    Stack(i32),
}

impl Cut {
    /// Returns true if the outputs of all ranks are summed.
    pub fn is_summed(&self) -> bool {
        matches!(self, Self::Inputs(_))
    }

    /// What this rank has of `size` outputs, inputs or layers, ascending.
    ///
    /// # Errors
    /// Why the ranks cannot divide them.
    pub fn ranges(&self, size: i32, ranks: &Ranks) -> std::result::Result<Vec<Range<i32>>, String> {
        let (index, count) = (ranks.index(), ranks.count());
        let (what, units) = match *self {
            Self::Segments(ref segments) => {
                let (mut start, mut all) = (0, Vec::with_capacity(segments.len()));
                for (size, cut) in segments {
                    let own = cut.ranges(*size, ranks)?;
                    all.extend(own.iter().map(|own| start + own.start..start + own.end));
                    start += size;
                }
                return Ok(all);
            }
            Self::Outputs(units) | Self::Repeated(units) => ("outputs", units.max(1)),
            Self::Inputs(units) => ("inputs", units.max(1)),
            Self::Stack(units) => ("layers", units.max(1)),
        };
        let (of_unit, is_repeated) = (size / units, matches!(self, Self::Repeated(_)));
        if is_repeated && count % units == 0 {
            let own = index / (count / units);
            let own = own * of_unit..(own + 1) * of_unit;
            return Ok(vec![own]);
        }
        if units % count != 0 {
            let parts = match of_unit {
                1 => format!("{size} {what}"),
                _ => format!("{size} {what} in {units} parts that stay whole"),
            };
            let other = if is_repeated { ", nor have each as often" } else { "" };
            return Err(format!("{count} ranks cannot divide {parts}{other}"));
        }
        let size = units / count * of_unit;
        let own = index * size..(index + 1) * size;
        Ok(vec![own])
    }
}

/// Parts of an array along one axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// Counted from the last axis, which is -1.
    pub axis: i32,
    /// Ascending, without overlaps.
    pub ranges: Vec<Range<i32>>,
}

impl Slice {
    /// The parts of `array`, one after the other, in memory of their own.
    pub fn of(&self, array: &Array) -> Result<Array> {
        let ends: Vec<i32> =
            self.ranges.iter().flat_map(|range| [range.start, range.end]).collect();
        let parts = array.split_at_indices(&ends, self.axis)?;
        // Before and after each of them lies what other ranks have, if anything.
        let own: Vec<Array> = parts.into_iter().skip(1).step_by(2).collect();
        match &own[..] {
            [part] => Ok(part.contiguous()?),
            parts => Ok(concatenate(parts, self.axis)?),
        }
    }

    /// The slice of an array that has `elements` where this one is counted in `neighbours`.
    pub fn packed(&self, neighbours: i32, elements: i32) -> Self {
        let packed = |n: i32| n / neighbours * elements;
        let ranges = self.ranges.iter().map(|range| packed(range.start)..packed(range.end));
        Self { axis: self.axis, ranges: ranges.collect() }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a part may be one range")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ranks::Exchange;

    /// Ranks that never meet.
    #[derive(Debug)]
    struct Nobody;

    impl Exchange for Nobody {
        fn sum(&self, x: &Array) -> Result<Array> {
            Ok(x.clone())
        }

        fn gather(&self, x: &Array) -> Result<Array> {
            Ok(x.clone())
        }
    }

    /// The ranges of all ranks.
    fn all(cut: &Cut, size: i32, count: i32) -> std::result::Result<Vec<Vec<Range<i32>>>, String> {
        let own = |index| cut.ranges(size, &Ranks::new(index, count, Arc::new(Nobody)));
        (0..count).map(own).collect()
    }

    #[test]
    fn every_unit_has_a_rank_and_stays_whole() {
        assert_eq!(all(&Cut::Outputs(4), 64, 2).unwrap(), [[0..32], [32..64]]);
        assert_eq!(all(&Cut::Inputs(3), 48, 3).unwrap(), [[0..16], [16..32], [32..48]]);
        // As `Outputs` where they can be divided, and neighbours share one where not.
        assert_eq!(all(&Cut::Repeated(4), 64, 2).unwrap(), [[0..32], [32..64]]);
        assert_eq!(all(&Cut::Repeated(2), 32, 4).unwrap(), [[0..16], [0..16], [16..32], [16..32]]);
        assert_eq!(all(&Cut::Repeated(1), 16, 3).unwrap(), [[0..16], [0..16], [0..16]]);
        let qkv = Cut::Segments(vec![
            (32, Cut::Repeated(2)),
            (32, Cut::Repeated(2)),
            (96, Cut::Outputs(6)),
        ]);
        let parts = all(&qkv, 160, 2).unwrap();
        assert_eq!(parts, [[0..16, 32..48, 64..112], [16..32, 48..64, 112..160]]);
    }

    #[test]
    fn what_ranks_cannot_divide_is_an_error_with_the_numbers() {
        let error = |cut: Cut, size, count| all(&cut, size, count).unwrap_err();
        assert_eq!(
            error(Cut::Outputs(4), 64, 3),
            "3 ranks cannot divide 64 outputs in 4 parts that stay whole"
        );
        assert_eq!(error(Cut::Inputs(96), 96, 5), "5 ranks cannot divide 96 inputs");
        let repeated = error(Cut::Repeated(2), 32, 3);
        assert!(repeated.ends_with("nor have each as often"), "{repeated}");
        let nested = Cut::Segments(vec![(8, Cut::Outputs(8)), (6, Cut::Outputs(3))]);
        assert!(error(nested, 14, 2).contains("6 outputs in 3 parts"));
    }

    #[test]
    fn slices_are_the_parts_one_after_the_other() {
        let numbers: Vec<f32> = (0u8..12).map(f32::from).collect();
        let matrix = Array::from_slice(&numbers, &[3, 4]);
        let slice = |axis, ranges: &[Range<i32>]| {
            let part = Slice { axis, ranges: ranges.to_vec() }.of(&matrix).unwrap();
            (part.shape().to_vec(), part.contiguous().unwrap().as_slice::<f32>().to_vec())
        };
        assert_eq!(slice(-2, &[1..2]), (vec![1, 4], vec![4.0, 5.0, 6.0, 7.0]));
        assert_eq!(slice(-1, &[0..1, 2..4]).1, [0.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 10.0, 11.0]);
        assert_eq!(slice(-2, &[0..1, 1..3]).1, numbers);
        let words = Slice { axis: -1, ranges: vec![64..128] }.packed(32, 4);
        assert_eq!(words.ranges, [8..16]);
    }
}
