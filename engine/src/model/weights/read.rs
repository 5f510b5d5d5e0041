//! Parts of tensors from safetensors files: a rank reads what it has of a tensor, and no more than a block of the rest at once.
//!
//! Only tensors that a family has neither changed nor joined are read so. MLX reads the others whole, one at a time.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::rc::Rc;

use mlx_rs::{Array, Dtype};

use super::cut::Slice;
use crate::error::Result;

/// Parts that are shorter than this are read with what lies between them.
const SHORT_BYTES: u64 = 64 << 10;

/// Bytes that are read at once, parts of which are kept.
const BLOCK_BYTES: u64 = 4 << 20;

/// Where the elements of a tensor are.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub path: Rc<PathBuf>,
    /// The first byte.
    pub start: u64,
    pub dtype: Dtype,
}

impl Place {
    /// The place of a tensor with this `dtype` of safetensors; `None` for types that no layer with parts has.
    pub fn new(path: Rc<PathBuf>, start: u64, dtype: &str) -> Option<Self> {
        let dtype = match dtype {
            "F32" => Dtype::Float32,
            "F16" => Dtype::Float16,
            "BF16" => Dtype::Bfloat16,
            "U32" => Dtype::Uint32,
            "U8" => Dtype::Uint8,
            _ => return None,
        };
        Some(Self { path, start, dtype })
    }

    /// The `slice` of the tensor, whose whole has this `shape`; `None` if it is too large for one array of bytes.
    pub fn read(&self, shape: &[i32], slice: &Slice) -> Option<io::Result<Result<Array>>> {
        let axis = shape.len().checked_sub(slice.axis.unsigned_abs() as usize)?;
        let own: i32 = slice.ranges.iter().map(|range| range.end - range.start).sum();
        let mut own_shape = shape.to_vec();
        own_shape[axis] = own;
        let size = |n: &i32| u64::try_from(*n).unwrap_or(0);
        let element = self.dtype_bytes();
        let length = own_shape.iter().map(size).product::<u64>() * element;
        let length = i32::try_from(length).ok()?;
        let rows = Rows {
            count: shape[..axis].iter().map(size).product(),
            row: shape[axis..].iter().map(size).product::<u64>() * element,
            neighbour: shape[axis + 1..].iter().map(size).product::<u64>() * element,
        };
        let bytes = steersman_files::open(&self.path)
            .and_then(|file| rows.read(file, self.start, slice, length as usize));
        Some(bytes.map(|bytes| {
            let array = Array::from_slice(&bytes, &[length]);
            let array = if element == 1 { array } else { array.view_dtype(self.dtype)? };
            Ok(array.reshape(&own_shape)?)
        }))
    }

    fn dtype_bytes(&self) -> u64 {
        match self.dtype {
            Dtype::Uint8 => 1,
            Dtype::Float16 | Dtype::Bfloat16 => 2,
            _ => 4,
        }
    }
}

/// A tensor as rows of neighbours along the axis that is cut.
struct Rows {
    count: u64,
    /// Bytes of a row, and of a neighbour in it.
    row: u64,
    neighbour: u64,
}

impl Rows {
    /// The parts of all rows, one after the other.
    fn read(
        &self,
        mut file: File,
        start: u64,
        slice: &Slice,
        length: usize,
    ) -> io::Result<Vec<u8>> {
        let offset = |n: i32| u64::try_from(n).unwrap_or(0) * self.neighbour;
        let parts: Vec<_> =
            slice.ranges.iter().map(|range| offset(range.start)..offset(range.end)).collect();
        let is_short = parts.iter().any(|part| part.end - part.start < SHORT_BYTES);
        // The system zeroes pages of its own accord: growing a vector would write them once more.
        let mut bytes = vec![0; length];
        if length == 0 {
            return Ok(bytes);
        }
        let mut unread = &mut bytes[..];
        let mut next = |length: u64| {
            let (part, rest) = std::mem::take(&mut unread).split_at_mut(length as usize);
            unread = rest;
            part
        };
        let at_once = if is_short { (BLOCK_BYTES / self.row.max(1)).max(1) } else { 1 };
        let block_rows = if is_short { at_once.min(self.count) } else { 0 };
        let mut block = vec![0; usize::try_from(block_rows * self.row).unwrap_or(usize::MAX)];
        let mut row = 0;
        while row < self.count {
            let rows = at_once.min(self.count - row);
            let at = start + row * self.row;
            if is_short {
                let block = &mut block[..(rows * self.row) as usize];
                file.seek(SeekFrom::Start(at))?;
                file.read_exact(block)?;
                for whole in block.chunks_exact(self.row as usize) {
                    for part in &parts {
                        let read = &whole[part.start as usize..part.end as usize];
                        next(part.end - part.start).copy_from_slice(read);
                    }
                }
            } else {
                for part in &parts {
                    file.seek(SeekFrom::Start(at + part.start))?;
                    file.read_exact(next(part.end - part.start))?;
                }
            }
            row += rows;
        }
        Ok(bytes)
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a part may be one range")]
mod tests {
    use std::ops::Range;

    use super::*;

    /// Parts of matrices and stacks, short and long, from a file equal those of the whole.
    #[test]
    fn parts_that_are_read_equal_parts_of_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = Rc::new(folder.path().join("numbers"));
        let check = |shape: &[i32], axis: i32, ranges: &[Range<i32>]| {
            let size: i32 = shape.iter().product();
            let numbers: Vec<u32> = (0..size as u32).collect();
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            std::fs::write(&*path, [&[7u8; 9][..], &bytes[..]].concat()).unwrap();
            let whole = Array::from_slice(&numbers, shape);
            let slice = Slice { axis, ranges: ranges.to_vec() };
            let place = Place::new(path.clone(), 9, "U32").unwrap();
            let part = place.read(shape, &slice).unwrap().unwrap().unwrap();
            assert_eq!(part.dtype(), Dtype::Uint32);
            assert!(part.eq_values(slice.of(&whole).unwrap()).unwrap(), "{shape:?} {slice:?}");
        };
        check(&[6, 4], -2, &[2..4]);
        check(&[6, 4], -2, &[0..1, 2..3, 5..6]);
        check(&[6, 4], -1, &[1..2, 3..4]);
        check(&[3, 6, 4], -2, &[3..6]);
        check(&[3, 6, 4], -3, &[2..3]);
        check(&[3, 6, 4], -1, &[0..2]);
        // Parts and blocks of more than a few bytes.
        check(&[3, 64, 1024], -2, &[32..64]);
        check(&[1500, 1024], -1, &[256..512]);
    }

    /// A file that ends after the part shows that the rest is not read.
    #[test]
    fn the_parts_of_others_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = Rc::new(folder.path().join("first_half"));
        std::fs::write(&*path, vec![0; 128 * 1024]).unwrap();
        let place = Place::new(path, 0, "F16").unwrap();
        let read = |ranges: &[Range<i32>]| {
            let slice = Slice { axis: -2, ranges: ranges.to_vec() };
            place.read(&[256, 512], &slice).unwrap().map(|array| array.unwrap().shape().to_vec())
        };
        assert_eq!(read(&[0..128]).unwrap(), [128, 512]);
        assert_eq!(read(&[128..256]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
