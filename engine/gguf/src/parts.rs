//! Models in parts: `NAME-00001-of-00003.gguf` and the files beside it, as `llama-gguf-split` writes them.
//!
//! The first part has the metadata of the model. Each has its number, the number of parts, that of all tensors, and its
//! tensors. A model is opened by its first part; parts are found by their names, and checked by what they contain.
//!
//! Source: llama.cpp, `llama_split_path` and the loading of splits in `llama-model-loader.cpp`.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::reader::{Header, TENSORS};

/// Most parts of a model. The largest have some dozens.
const PARTS: u64 = 1000;

/// The ending of a file's name.
const ENDING: &str = ".gguf";

/// A part of a model, as the name of its file describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part<'a> {
    /// The name without number and ending: that of the model.
    pub stem: &'a str,
    /// The number of the part; the first is 1.
    pub number: u32,
    /// The number of parts.
    pub count: u32,
    ending: &'a str,
}

impl<'a> Part<'a> {
    /// The part by the name of its file, `STEM-00001-of-00003.gguf`; `None` if it is a name of another form.
    pub fn of(name: &'a str) -> Option<Self> {
        let (name, ending) = name.split_at_checked(name.len().checked_sub(ENDING.len())?)?;
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let is_number = |text: &&str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        let number_in = |text: &'a str| Some(text).filter(is_number)?.parse().ok();
        let part = Self { stem, number: number_in(number)?, count: number_in(count)?, ending };
        let is_part = ending.eq_ignore_ascii_case(ENDING) && !stem.is_empty();
        (is_part && (1..=part.count).contains(&part.number)).then_some(part)
    }

    /// The name of another part of the model.
    pub fn name_of(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}{}", self.stem, self.count, self.ending)
    }
}

/// The header of the whole model of which `first` is the file that was named.
///
/// # Errors
/// If that is not the first part, or another part is missing, is one of another model, or has the tensors of another.
pub(crate) fn joined(first: Header) -> Result<Header> {
    let count = first.number("split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok(first);
    }
    if count > PARTS {
        return Err(Error::new(format!("`split.count` is {count}; at most {PARTS} parts can be")));
    }
    let path = first.files[0].clone();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some(part) = Part::of(&name).filter(|part| u64::from(part.count) == count) else {
        return Err(Error::new(format!(
            "it is one of {count} parts (`split.count`), which its name does not tell; a part is named \
             NAME-00001-of-{count:05}.gguf, and the others lie beside it"
        )));
    };
    if part.number != 1 {
        return Err(Error::new(format!(
            "it is part {} of {count}; name the first one, {}",
            part.number,
            part.name_of(1)
        )));
    }
    let (total, mut whole) = (first.number("split.tensors.count")?, first);
    check_part(&whole, 1, count, total)?;
    let mut names: HashSet<String> = whole.tensors.iter().map(|t| t.name.clone()).collect();
    for number in 2..=part.count {
        let name = part.name_of(number);
        let of =
            |problem: String| Error::new(format!("part {number} of {count}, {name}: {problem}"));
        let path = path.with_file_name(&name);
        if !path.exists() {
            return Err(of("it is missing; download it to the folder of the first".into()));
        }
        let mut next = Header::read(&path).map_err(|error| of(error.to_string()))?;
        check_part(&next, number, count, total).map_err(|error| of(error.to_string()))?;
        for tensor in &mut next.tensors {
            if !names.insert(tensor.name.clone()) {
                let tensor = &tensor.name;
                return Err(of(format!("tensor `{tensor}` is in an earlier part, too")));
            }
            tensor.part = whole.files.len();
        }
        whole.files.push(path);
        whole.tensors.append(&mut next.tensors);
        if whole.tensors.len() as u64 > TENSORS {
            return Err(of(format!("the parts up to it have more than {TENSORS} tensors")));
        }
    }
    match total {
        Some(total) if total != whole.tensors.len() as u64 => Err(Error::new(format!(
            "its {count} parts have {} tensors, `split.tensors.count` is {total}; download them again",
            whole.tensors.len()
        ))),
        _ => Ok(whole),
    }
}

/// Checks that a file is the part of the model that its name says.
fn check_part(header: &Header, number: u32, count: u64, total: Option<u64>) -> Result<()> {
    let found = |key: &str| header.number(key);
    let own = found("split.no")?.and_then(|no| no.checked_add(1));
    if own != Some(number.into()) || found("split.count")? != Some(count) {
        let shown = |number: Option<u64>| number.map_or("?".into(), |n| n.to_string());
        return Err(Error::new(format!(
            "by `split.no` and `split.count` it is part {} of {}; download it again under its own name",
            shown(own),
            shown(found("split.count")?)
        )));
    }
    if found("split.tensors.count")? != total {
        return Err(Error::new(
            "it is a part of another model: its `split.tensors.count` is not that of the first part; \
             download it again",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_known_by_their_names() {
        let part = Part::of("a-of-b-Q4_K_M-00002-of-00010.gguf").unwrap();
        assert_eq!((part.stem, part.number, part.count), ("a-of-b-Q4_K_M", 2, 10));
        assert_eq!(part.name_of(1), "a-of-b-Q4_K_M-00001-of-00010.gguf");
        assert_eq!(Part::of("a-00001-of-00002.GGUF").unwrap().name_of(2), "a-00002-of-00002.GGUF");
        for name in [
            "",
            "gguf",
            "a.gguf",
            "a-00000-of-00002.gguf",
            "a-00003-of-00002.gguf",
            "a-1-of-2.gguf",
            "a-0000x-of-00002.gguf",
            "-00001-of-00002.gguf",
            "a-00001-of-00002.safetensors",
            "a-00001-of-00002ä.guf",
        ] {
            assert_eq!(Part::of(name), None, "{name}");
        }
    }
}
