//! Changes of logits before tokens are sampled from them: offsets, penalties, masks, in this order.
//!
//! Rows of different requests are changed together, and a row is changed as if it were alone.

use std::borrow::Cow;

use mlx_rs::ops::indexing::{put_along_axis, take_along_axis};
use mlx_rs::ops::select;
use mlx_rs::{Array, Dtype};

use super::row::Row;
use crate::error::Result;

/// `logits` [R, V] as the rows change them, in f32 if they do.
pub fn adjusted(logits: &Array, rows: &[Row]) -> Result<Array> {
    with_masks(&with_penalties(&with_offsets(logits, rows)?, rows)?, rows)
}

/// One row of logits as `row` changes them: [`adjusted`] on the host.
pub fn adjusted_on_host<'a>(logits: &'a [f32], row: &Row) -> Cow<'a, [f32]> {
    if row.offsets.is_empty() && row.penalties.is_empty() && row.mask.is_none() {
        return Cow::Borrowed(logits);
    }
    let mut own = logits.to_vec();
    // A token outside of the vocabulary cannot be sampled anyway.
    for &(token, offset) in row.offsets.iter() {
        if let Some(logit) = own.get_mut(token as usize) {
            *logit += offset;
        }
    }
    for penalty in row.penalties.iter() {
        if let Some(logit) = own.get_mut(penalty.token as usize) {
            let is_negative = *logit < 0.0;
            let scaled =
                if is_negative { *logit * penalty.factor } else { *logit / penalty.factor };
            *logit = scaled - penalty.offset;
        }
    }
    if let Some(mask) = &row.mask {
        // None beyond the end of a mask is allowed.
        let words = mask.iter().copied().chain(std::iter::repeat(0));
        for (logits, word) in own.chunks_mut(32).zip(words) {
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
    Cow::Owned(own)
}

/// `logits` [R, V] with the offsets of each row added, in f32 if there are any.
fn with_offsets(logits: &Array, rows: &[Row]) -> Result<Array> {
    let vocabulary = logits.dim(1);
    let (mut places, mut values) = (Vec::new(), Vec::new());
    for (row, start) in rows.iter().zip((0i32..).step_by(vocabulary as usize)) {
        // A token outside of the vocabulary cannot be sampled anyway.
        for &(token, value) in row.offsets.iter().filter(|(token, _)| *token < vocabulary as u32) {
            places.push(start + token as i32);
            values.push(value);
        }
    }
    let values = [&values[..]];
    changed_at(logits, &places, values, |own, [values]| Ok(own.add(values)?))
}

/// `logits` [R, V] after the penalties of each row, in f32 if there are any.
fn with_penalties(logits: &Array, rows: &[Row]) -> Result<Array> {
    let vocabulary = logits.dim(1);
    let (mut places, mut factors, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    for (row, start) in rows.iter().zip((0i32..).step_by(vocabulary as usize)) {
        for penalty in row.penalties.iter().filter(|p| p.token < vocabulary as u32) {
            places.push(start + penalty.token as i32);
            factors.push(penalty.factor);
            offsets.push(penalty.offset);
        }
    }
    changed_at(logits, &places, [&factors[..], &offsets[..]], |own, [factors, offsets]| {
        let is_negative = own.lt(Array::from_f32(0.0))?;
        let scaled = select(is_negative, own.multiply(&factors)?, own.divide(&factors)?)?;
        Ok(scaled.subtract(offsets)?)
    })
}

/// `logits` [R, V] with those at `places`, indices into all R * V of them, replaced by what `change` makes
/// of them and of the numbers in `values`, one for each place: [1, P] each. In f32 if there are places.
fn changed_at<const N: usize>(
    logits: &Array,
    places: &[i32],
    values: [&[f32]; N],
    change: impl FnOnce(Array, [Array; N]) -> Result<Array>,
) -> Result<Array> {
    if places.is_empty() {
        return Ok(logits.clone());
    }
    let shape = [1, places.len() as i32];
    let places = Array::from_slice(places, &shape);
    let values = values.map(|values| Array::from_slice(values, &shape));
    let flat = logits.as_dtype(Dtype::Float32)?.reshape(&[1, -1])?;
    let changed = change(take_along_axis(&flat, &places, -1)?, values)?;
    Ok(put_along_axis(&flat, &places, changed, -1)?.reshape(logits.shape())?)
}

/// `logits` [R, V] with minus infinity outside of the mask of each row.
fn with_masks(logits: &Array, rows: &[Row]) -> Result<Array> {
    if rows.iter().all(|row| row.mask.is_none()) {
        return Ok(logits.clone());
    }
    let vocabulary = logits.dim(1) as usize;
    let mut allowed = Vec::with_capacity(rows.len() * vocabulary);
    for row in rows {
        let end = allowed.len() + vocabulary;
        if let Some(mask) = &row.mask {
            let bits = mask.iter().flat_map(|word| (0..32).map(move |bit| word >> bit & 1 == 1));
            allowed.extend(bits.take(vocabulary));
        }
        // Without a mask all tokens are allowed, and none beyond the end of one.
        allowed.resize(end, row.mask.is_none());
    }
    let allowed = Array::from_slice(&allowed, logits.shape());
    let never = Array::from_f32(f32::NEG_INFINITY).as_dtype(logits.dtype())?;
    Ok(select(allowed, logits, never)?)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::super::penalties::Penalty;
    use super::*;
    use crate::request::Sampling;

    /// The same arithmetic, one number after the other.
    fn reference(logits: &[f32], row: &Row) -> Vec<f32> {
        let mut logits = logits.to_vec();
        row.offsets.iter().for_each(|&(token, offset)| logits[token as usize] += offset);
        for penalty in row.penalties.iter() {
            let logit = &mut logits[penalty.token as usize];
            *logit = if *logit < 0.0 { *logit * penalty.factor } else { *logit / penalty.factor };
            *logit -= penalty.offset;
        }
        if let Some(mask) = &row.mask {
            let banned = |token: &usize| mask[token / 32] >> (token % 32) & 1 == 0;
            let banned: Vec<usize> = (0..logits.len()).filter(banned).collect();
            banned.into_iter().for_each(|token| logits[token] = f32::NEG_INFINITY);
        }
        logits
    }

    #[test]
    fn each_row_is_changed_as_if_it_were_alone() {
        let vocabulary = 40;
        let value = |i: usize| ((i * 37 + 11) % 23) as f32 - 11.0;
        let logits: Vec<f32> = (0..3 * vocabulary).map(value).collect();
        let plain = Row::new(Sampling::default(), 0);
        let penalty = |token, factor, offset| Penalty { token, factor, offset };
        let rows = [
            Row { mask: Some(Rc::from([0b1010, 0b1])), ..plain.clone() },
            plain.clone(),
            Row {
                offsets: Rc::from([(3, 2.0), (39, f32::NEG_INFINITY)]),
                penalties: Rc::from([
                    penalty(3, 2.0, 0.5),
                    penalty(7, 1.0, -1.0),
                    penalty(9, 1.5, 0.0),
                ]),
                mask: Some(Rc::from([u32::MAX, u32::MAX])),
                ..plain
            },
        ];
        let array = Array::from_slice(&logits, &[3, vocabulary as i32]);
        let changed = adjusted(&array, &rows).unwrap();
        let expected: Vec<f32> = logits
            .chunks(vocabulary)
            .zip(&rows)
            .flat_map(|(logits, row)| reference(logits, row))
            .collect();
        assert_eq!(changed.as_slice::<f32>(), expected);
        let on_host = logits.chunks(vocabulary).zip(&rows);
        let on_host = on_host.flat_map(|(logits, row)| adjusted_on_host(logits, row).into_owned());
        assert_eq!(on_host.collect::<Vec<f32>>(), expected);
    }
}
