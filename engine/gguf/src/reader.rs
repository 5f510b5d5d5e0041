//! The header of a GGUF file, or of a model in several: metadata by key, and name, type, shape and place of each tensor.
//!
//! Reads what stands before the weights, never the weights. Counts and lengths are bounded by constants and by the
//! size of the file, and memory grows with what was read, not with what a length promises. A tensor that is listed
//! here lies within the file.
//!
//! Source: the GGUF specification, `docs/gguf.md` of ggml, versions 2 and 3.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::quants::Type;

/// Most metadata keys. Files have some dozens.
const KEYS: u64 = 1 << 16;
/// Most tensors. The largest models have some thousands.
pub(crate) const TENSORS: u64 = 1 << 17;
/// Most bytes of a text: a chat template, a token, a name.
const TEXT_BYTES: u64 = 1 << 24;
/// Most elements of an array: a vocabulary, its merges.
const ELEMENTS: u64 = 1 << 24;
/// Most dimensions of a tensor.
const DIMENSIONS: u32 = 4;
/// Where tensors begin if `general.alignment` does not tell.
const ALIGNMENT: u64 = 32;
/// Elements from which [`Header::read`] skips arrays: the vocabulary is not needed with the weights.
const LONG: u64 = 1 << 12;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An integer of any width that is not negative.
    Unsigned(u64),
    /// A negative integer.
    Signed(i64),
    /// A float of either width.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// An array of texts.
    Texts(Vec<String>),
    /// An array of numbers or truth values. f64 holds all that occur.
    Numbers(Vec<f64>),
    /// A long array that was not read.
    Skipped,
}

/// A tensor as the header describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// llama.cpp's name.
    pub name: String,
    /// How its elements are stored.
    pub kind: Type,
    /// Dimensions in the order of MLX: the last one is contiguous.
    pub shape: Vec<usize>,
    /// First byte in its file.
    pub start: u64,
    /// Number of bytes.
    pub bytes: usize,
    /// Index of its file in [`Header::files`].
    pub part: usize,
}

/// The parsed header of a file, or of all parts of a model.
#[derive(Debug)]
pub struct Header {
    /// The file, or those of all parts.
    pub files: Vec<PathBuf>,
    values: HashMap<String, Value>,
    /// Tensors in the order of the files.
    pub tensors: Vec<Entry>,
}

impl Header {
    /// Reads the header of the file at `path`, without the elements of long arrays.
    ///
    /// # Errors
    /// Names the problem of the file and its place.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_with(path, LONG)
    }

    /// [`Header::read`], with all elements. The first part of a model has all of its metadata.
    ///
    /// # Errors
    /// As [`Header::read`].
    pub fn read_all(path: &Path) -> Result<Self> {
        Self::read_with(path, u64::MAX)
    }

    fn read_with(path: &Path, long: u64) -> Result<Self> {
        let file = steersman_files::open(path).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        let file = BufReader::with_capacity(1 << 16, file);
        let mut source = Source { file, at: 0, size };
        if source.array()? != *b"GGUF" {
            return Err(Error::new("it is not a GGUF file: it does not begin with `GGUF`"));
        }
        match source.u32()? {
            2 | 3 => {}
            version if version.swap_bytes() <= 3 => {
                return Err(Error::new("it is stored in big-endian order, which is not supported"));
            }
            version => {
                let problem = format!("its version of GGUF is {version}; supported are 2 and 3");
                return Err(Error::new(problem));
            }
        }
        let tensors = source.count("tensors", TENSORS)?;
        let keys = source.count("metadata keys", KEYS)?;
        let mut values = HashMap::new();
        for _ in 0..keys {
            let key = source.text("a metadata key")?;
            let kind = source.u32()?;
            let value = source.value(&key, kind, long)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(Error::new(format!("the metadata key `{key}` occurs twice")));
            }
        }
        let mut entries = Vec::new();
        for _ in 0..tensors {
            entries.push(source.entry()?);
        }
        let mut header = Self { files: vec![path.into()], values, tensors: entries };
        let alignment = match header.number("general.alignment")? {
            None => ALIGNMENT,
            Some(n) if n.is_power_of_two() && n <= 1 << 20 => n,
            Some(n) => {
                return Err(Error::new(format!("`general.alignment` is {n}, not a power of two")));
            }
        };
        let data = source.at.next_multiple_of(alignment);
        header.place(data, alignment, size)?;
        Ok(header)
    }

    /// Turns offsets into places in the file, and checks them.
    fn place(&mut self, data: u64, alignment: u64, size: u64) -> Result<()> {
        let mut names = HashSet::new();
        for tensor in &mut self.tensors {
            let Entry { name, kind, shape, start, bytes, .. } = tensor;
            let of = |problem: String| Error::new(format!("tensor `{name}`: {problem}"));
            if !names.insert(name.clone()) {
                return Err(of("it occurs twice".into()));
            }
            let columns = shape.last().copied().unwrap_or(1);
            if columns % kind.block() != 0 {
                let block = kind.block();
                return Err(of(format!(
                    "rows of {columns} are not whole blocks of {block} ({kind})"
                )));
            }
            let elements = shape.iter().try_fold(1usize, |all, n| all.checked_mul(*n));
            let size_of = |n: usize| (n / kind.block()).checked_mul(kind.bytes());
            let fits = |n: &usize| i32::try_from(*n).is_ok();
            let Some(length) = elements.and_then(size_of).filter(|_| shape.iter().all(fits)) else {
                return Err(of(format!("its shape {shape:?} is too large")));
            };
            if *start % alignment != 0 {
                return Err(of(format!("its offset {start} is not a multiple of {alignment}")));
            }
            let begin = start.checked_add(data);
            let end = begin.and_then(|begin| begin.checked_add(length as u64));
            let (Some(begin), Some(_)) = (begin, end.filter(|end| *end <= size)) else {
                return Err(of(format!(
                    "its {length} bytes at offset {start} are not within the {size} bytes of the \
                     file; download it again"
                )));
            };
            (*start, *bytes) = (begin, length);
        }
        let mut spans: Vec<_> = self.tensors.iter().map(|t| (t.start, t.bytes, &t.name)).collect();
        spans.sort_unstable();
        let overlap = |pair: &&[(u64, usize, &String)]| pair[1].0 < pair[0].0 + pair[0].1 as u64;
        match spans.windows(2).find(overlap) {
            Some([(.., one), (.., other)]) => {
                Err(Error::new(format!("tensors `{one}` and `{other}` overlap")))
            }
            _ => Ok(()),
        }
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Keys and values, in no order.
    pub fn values(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The tensor `name`.
    pub fn tensor(&self, name: &str) -> Option<&Entry> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// An integer that is not negative.
    ///
    /// # Errors
    /// If `key` has another value.
    pub fn number(&self, key: &str) -> Result<Option<u64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(n)) => Ok(Some(*n)),
            // By layer; 0 where a layer has none.
            Some(Value::Numbers(all)) => {
                let mut some = all.iter().copied().filter(|n| *n != 0.0);
                let first = some.next().unwrap_or(0.0);
                if some.any(|n| n != first) {
                    let problem = format!("`{key}` differs between layers, which is not supported");
                    return Err(Error::new(problem));
                }
                let is_count = !all.is_empty() && first >= 0.0 && first.fract() == 0.0;
                if is_count { Ok(Some(first as u64)) } else { Err(self.wrong(key, "a number")) }
            }
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }

    /// A number with a fraction.
    ///
    /// # Errors
    /// If `key` has another value.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(x)) if x.is_finite() => Ok(Some(*x)),
            Some(Value::Unsigned(n)) => Ok(Some(*n as f64)),
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }

    /// A text.
    ///
    /// # Errors
    /// If `key` has another value.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    /// A truth value.
    ///
    /// # Errors
    /// If `key` has another value.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(key, "a truth value")),
        }
    }

    /// An array of texts.
    ///
    /// # Errors
    /// If `key` has another value.
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Texts(all)) => Ok(Some(all)),
            Some(_) => Err(self.wrong(key, "an array of texts")),
        }
    }

    /// An array of numbers.
    ///
    /// # Errors
    /// If `key` has another value.
    pub fn numbers(&self, key: &str) -> Result<Option<&[f64]>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Numbers(all)) => Ok(Some(all)),
            Some(_) => Err(self.wrong(key, "an array of numbers")),
        }
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        Error::new(format!("`{key}` is not {expected}"))
    }
}

/// The bytes of the header, in order.
struct Source {
    file: BufReader<File>,
    at: u64,
    size: u64,
}

impl Source {
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes).map_err(|error| self.ended(error))?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn ended(&self, error: io::Error) -> Error {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return Error::new(format!(
                "its header goes on after its {} bytes: the file is not complete; download it again",
                self.size
            ));
        }
        unreadable(error)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn count(&mut self, what: &str, most: u64) -> Result<u64> {
        match self.u64()? {
            count if count > most => Err(Error::new(format!(
                "its header promises {count} {what}; at most {most} can be"
            ))),
            count => Ok(count),
        }
    }

    fn length(&mut self, what: &str) -> Result<u64> {
        let length = self.u64()?;
        if length > TEXT_BYTES.min(self.size.saturating_sub(self.at)) {
            return Err(Error::new(format!(
                "{what} at byte {} would have {length} bytes: the file is damaged",
                self.at
            )));
        }
        Ok(length)
    }

    fn text(&mut self, what: &str) -> Result<String> {
        let length = self.length(what)?;
        let mut bytes = Vec::new();
        let read = (&mut self.file).take(length).read_to_end(&mut bytes).map_err(unreadable)?;
        self.at += read as u64;
        if read as u64 != length {
            return Err(self.ended(io::ErrorKind::UnexpectedEof.into()));
        }
        String::from_utf8(bytes)
            .map_err(|_| Error::new(format!("{what} before byte {} is not UTF-8", self.at)))
    }

    fn skip(&mut self, bytes: u64) -> Result<()> {
        if bytes > self.size.saturating_sub(self.at) {
            return Err(self.ended(io::ErrorKind::UnexpectedEof.into()));
        }
        let offset = i64::try_from(bytes).map_err(|_| Error::new("the file is damaged"))?;
        self.file.seek_relative(offset).map_err(unreadable)?;
        self.at += bytes;
        Ok(())
    }

    fn value(&mut self, key: &str, kind: u32, long: u64) -> Result<Value> {
        const TEXT: u32 = 8;
        const ARRAY: u32 = 9;
        match kind {
            TEXT => Ok(Value::Text(self.text(key)?)),
            ARRAY => {
                let kind = self.u32()?;
                let count = self.count(&format!("elements of `{key}`"), ELEMENTS)?;
                match kind {
                    TEXT if count > long => {
                        for _ in 0..count {
                            let length = self.length(key)?;
                            self.skip(length)?;
                        }
                        Ok(Value::Skipped)
                    }
                    TEXT => {
                        let texts = (0..count).map(|_| self.text(key)).collect::<Result<_>>()?;
                        Ok(Value::Texts(texts))
                    }
                    ARRAY => Err(Error::new(format!("`{key}` is an array of arrays"))),
                    _ if count > long => {
                        self.skip(count * width(key, kind)?)?;
                        Ok(Value::Skipped)
                    }
                    _ => {
                        let number = |_| {
                            Ok(match self.scalar(key, kind)? {
                                Value::Unsigned(n) => n as f64,
                                Value::Signed(n) => n as f64,
                                Value::Bool(flag) => f64::from(u8::from(flag)),
                                Value::Float(x) => x,
                                _ => return Err(Error::new(format!("`{key}` has no numbers"))),
                            })
                        };
                        Ok(Value::Numbers((0..count).map(number).collect::<Result<_>>()?))
                    }
                }
            }
            _ => self.scalar(key, kind),
        }
    }

    fn scalar(&mut self, key: &str, kind: u32) -> Result<Value> {
        let signed = |n: i64| u64::try_from(n).map_or(Value::Signed(n), Value::Unsigned);
        Ok(match kind {
            0 => Value::Unsigned(u8::from_le_bytes(self.array()?).into()),
            1 => signed(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => signed(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => signed(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.array::<1>()? != [0]),
            10 => Value::Unsigned(self.u64()?),
            11 => signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(unknown(key, kind)),
        })
    }

    fn entry(&mut self) -> Result<Entry> {
        let name = self.text("the name of a tensor")?;
        let dimensions = self.u32()?;
        if dimensions > DIMENSIONS {
            return Err(Error::new(format!("tensor `{name}` has {dimensions} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = self.u64()?;
            match usize::try_from(size) {
                Ok(size) if size > 0 => shape.push(size),
                _ => return Err(Error::new(format!("tensor `{name}` has a dimension of {size}"))),
            }
        }
        shape.reverse();
        let code = self.u32()?;
        let kind = Type::of(code).map_err(|kind| {
            let known = Type::ALL.map(|kind| kind.to_string()).join(", ");
            let problem = format!(
                "tensor `{name}` has the type {kind}, which is not supported; supported are {known}"
            );
            Error::new(problem)
        })?;
        let start = self.u64()?;
        Ok(Entry { name, kind, shape, start, bytes: 0, part: 0 })
    }
}

/// Bytes of a number in an array.
fn width(key: &str, kind: u32) -> Result<u64> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        _ => Err(unknown(key, kind)),
    }
}

fn unknown(key: &str, kind: u32) -> Error {
    Error::new(format!("`{key}` has a value of the unknown type {kind}: the file is damaged"))
}

fn unreadable(error: io::Error) -> Error {
    Error::new(format!("it cannot be read: {error}"))
}
