//! The order of rows and columns: llama.cpp's converter changes that of some matrices.

/// Where rows, or columns, of a tensor stand in the file.
#[derive(Debug, Clone, Copy)]
pub enum Order {
    /// As in the checkpoint.
    Same,
    /// Heads of `size`, whose halves are interleaved.
    Halves { size: usize },
    /// After the first `skip`: heads of `size`, which are ordered by their index within one of `keys` groups of
    /// `per_key`, and are to be ordered by group.
    Heads { skip: usize, keys: usize, per_key: usize, size: usize },
}

impl Order {
    /// Where the `i`th of the checkpoint stands in the file.
    pub fn source(self, i: usize) -> usize {
        match self {
            Self::Same => i,
            Self::Halves { size } => {
                let (head, within, half) = (i / size, i % size, size / 2);
                head * size + 2 * (within % half) + within / half
            }
            Self::Heads { skip, .. } if i < skip => i,
            Self::Heads { skip, keys, per_key, size } => {
                let (head, within) = ((i - skip) / size, (i - skip) % size);
                skip + (head % per_key * keys + head / per_key) * size + within
            }
        }
    }
}
