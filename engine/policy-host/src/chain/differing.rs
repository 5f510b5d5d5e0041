//! The part in which two texts differ.

use std::ops::Range;

/// The bytes of `text` without the beginning and the end that it shares with `other`, in whole
/// characters.
pub fn differing(text: &str, other: &str) -> Range<usize> {
    let equal = |(a, b): &(u8, u8)| a == b;
    let start = text.bytes().zip(other.bytes()).take_while(equal).count();
    let rest = text.len().min(other.len()) - start;
    let end = text.bytes().rev().zip(other.bytes().rev()).take(rest).take_while(equal).count();
    let start = text.floor_char_boundary(start);
    start..text.ceil_char_boundary(text.len() - end)
}
