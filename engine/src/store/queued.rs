//! A part that waits to be written.
//!
//! Its tensors are there already, or are read by whoever needs them first: the writer's thread, or a load.
//! So a caller whose elements lie on a device saves them without waiting for the device.

use std::fmt;
use std::sync::LazyLock;

use super::format::{self, Layout};
use super::{Key, Part, PartKind, Tensor};

type Tensors = Result<Vec<Tensor>, String>;
type Read = Box<dyn FnOnce() -> Tensors + Send>;

/// A part whose tensors may not have been read yet. Made from a [`Part`] or by [`QueuedPart::later`].
pub struct QueuedPart {
    pub(super) key: Key,
    pub(super) kind: PartKind,
    pub(super) end: usize,
    pub(super) encoded_len: u64,
    /// Bytes of all tensors' elements.
    pub(super) bytes: u64,
    tensors: LazyLock<Tensors, Read>,
}

impl QueuedPart {
    /// A part with tensors of these layouts. `read` yields the elements of all of them, one after the
    /// other; it is called at most once, on another thread or on this one. If it fails, the part is
    /// dropped with a warning.
    pub fn later(
        (key, kind, end): (Key, PartKind, usize),
        layouts: Vec<Layout>,
        read: impl FnOnce() -> Result<Vec<u8>, String> + Send + 'static,
    ) -> Self {
        let encoded_len = format::encoded_len_of(&layouts);
        let bytes = layouts.iter().map(|layout| layout.bytes as u64).sum();
        let tensors: Read = Box::new(move || split(layouts, &read()?));
        Self { key, kind, end, encoded_len, bytes, tensors: LazyLock::new(tensors) }
    }

    /// The tensors, which the first call reads.
    ///
    /// # Errors
    /// Why they could not be read.
    pub fn tensors(&self) -> Result<&[Tensor], &str> {
        self.tensors.as_ref().map(Vec::as_slice).map_err(String::as_str)
    }
}

impl From<Part> for QueuedPart {
    fn from(part: Part) -> Self {
        let Part { key, kind, end, tensors } = part;
        let (encoded_len, bytes) = (format::encoded_len(&tensors), super::element_bytes(&tensors));
        let tensors: Read = Box::new(|| Ok(tensors));
        Self { key, kind, end, encoded_len, bytes, tensors: LazyLock::new(tensors) }
    }
}

impl fmt::Debug for QueuedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, end, bytes, .. } = self;
        write!(f, "QueuedPart {{ {kind:?}, end: {end}, bytes: {bytes} }}")
    }
}

/// Cuts `elements` into the tensors of `layouts`.
fn split(layouts: Vec<Layout>, mut elements: &[u8]) -> Tensors {
    let mut tensors = Vec::with_capacity(layouts.len());
    for Layout { dtype, shape, bytes } in layouts {
        let bytes = elements.split_off(..bytes).ok_or("its elements are too few")?.to_vec();
        tensors.push(Tensor { dtype, shape, bytes });
    }
    if elements.is_empty() { Ok(tensors) } else { Err("its elements are too many".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn later(read: Result<Vec<u8>, String>) -> QueuedPart {
        let layout = |bytes| Layout { dtype: "U8".into(), shape: vec![bytes as i32], bytes };
        QueuedPart::later(([1; 32], PartKind::Kv, 9), vec![layout(2), layout(3)], || read)
    }

    #[test]
    fn part_that_is_read_later_equals_the_part() {
        let part = later(Ok(vec![1, 2, 3, 4, 5]));
        let tensors = part.tensors().unwrap().to_vec();
        assert_eq!(
            tensors.iter().map(|t| &t.bytes[..]).collect::<Vec<_>>(),
            [&[1, 2][..], &[3, 4, 5]]
        );
        let now = QueuedPart::from(Part { key: [1; 32], kind: PartKind::Kv, end: 9, tensors });
        assert_eq!((part.encoded_len, part.bytes), (now.encoded_len, now.bytes));
        assert_eq!(part.tensors(), now.tensors());
    }

    #[test]
    fn elements_of_another_length_are_an_error() {
        assert!(later(Ok(vec![0; 4])).tensors().is_err());
        assert!(later(Ok(vec![0; 6])).tensors().is_err());
        assert_eq!(later(Err("device lost".into())).tensors(), Err("device lost"));
    }
}
