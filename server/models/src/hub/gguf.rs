//! GGUF files of a repo: which of them a quantization names, and whether the engine can load them, by
//! their headers.
//!
//! A repo has one file for each quantization, `NAME-Q4_K_M.gguf`, or several parts of it,
//! `NAME-Q4_K_M-00001-of-00002.gguf`. The projectors for images beside them (`mmproj`) are no models.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use steersman_files::FilePath;
use steersman_gguf::{Model, Part};

use super::client::{Client, HubError};
use super::plan::{Plan, Wanted};
use super::transfer::{self, Failure};
use crate::named::near;

/// The quantizations that are taken if none is named, the best first: 4 bits are the usual
/// compromise, and all of them can be loaded.
const DEFAULTS: [&str; 14] = [
    "Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q4_0", "Q4_1", "Q8_0", "Q6_K", "Q5_0", "Q5_1", "BF16",
    "F16", "FP16", "F32",
];

/// Bytes of a file that are asked for first. Headers with 250,000 tokens have some 10 MB.
const HEADER_BYTES: u64 = 16 << 20;

/// Most bytes of a header.
const MOST_HEADER_BYTES: u64 = 256 << 20;

/// Bytes that a file is taken to have if the hub does not tell.
const UNKNOWN_BYTES: u64 = 1 << 40;

/// Most files of a folder that are looked at.
const FILES: usize = 20_000;

/// Folders within a snapshot that files may be in: repos with large files have one for each
/// quantization.
const DEPTH: usize = 2;

/// Whether a file is a GGUF file by its name.
pub fn is_name(file: &str) -> bool {
    file.to_ascii_lowercase().ends_with(".gguf")
}

/// Whether a repo has a model in GGUF files and none in safetensors.
pub fn is_of_gguf(names: &BTreeSet<&str>) -> bool {
    let has_safetensors = names.iter().any(|name| name.ends_with(".safetensors"));
    !has_safetensors && names.iter().any(|name| is_model(name))
}

/// Whether a GGUF file is one of a language model.
fn is_model(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file).to_ascii_lowercase();
    is_name(&name) && !name.contains("mmproj") && !name.contains("imatrix")
}

/// The name of a file without folders.
fn name_in_folder(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

/// The name of a file without folders, ending and number of the part.
fn stem(file: &str) -> &str {
    let name = name_in_folder(file);
    match Part::of(name) {
        Some(part) => part.stem,
        None => name.get(..name.len().saturating_sub(".gguf".len())).unwrap_or(name),
    }
}

/// The files of each model, in the order of their parts. Some may be missing.
fn models<'a>(files: &[&'a str]) -> Vec<Vec<&'a str>> {
    let mut models: BTreeMap<(&str, u32), BTreeMap<u32, &'a str>> = BTreeMap::new();
    for file in files.iter().copied().filter(|file| is_model(file)) {
        let (model, number) = match Part::of(name_in_folder(file)) {
            // With its folder, and up to the number.
            Some(part) => {
                let folder = file.len() - name_in_folder(file).len();
                ((&file[..folder + part.stem.len()], part.count), part.number)
            }
            None => ((file, 1), 1),
        };
        models.entry(model).or_default().insert(number, file);
    }
    models.into_values().map(|parts| parts.into_values().collect()).collect()
}

/// The number of files that a model has.
fn count(files: &[&str]) -> usize {
    let part = files.first().and_then(|file| Part::of(name_in_folder(file)));
    part.map_or(1, |part| part.count as usize)
}

/// The quantization in the name of a file, or the name if it has none: `Q4_K_M`, `UD-Q4_K_XL`,
/// `BF16`.
fn tag(file: &str) -> &str {
    let stem = stem(file);
    let Some(at) = stem.rfind(['-', '.']) else { return stem };
    let (before, last) = (&stem[..at], &stem[at + 1..]);
    if !is_quantization(last) {
        return stem;
    }
    match before.ends_with("-UD") {
        true => &stem[at - "UD".len()..],
        false => last,
    }
}

fn is_quantization(text: &str) -> bool {
    let text = text.to_ascii_uppercase();
    let is_numbered = |prefix: &str| {
        text.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    ["Q", "IQ", "TQ", "BF", "FP", "F", "MXFP"].into_iter().any(is_numbered)
}

/// Whether a user who writes `asked` means this file: by its quantization or by its name.
fn is_meant(file: &str, asked: &str) -> bool {
    let own = tag(file);
    let names = [own, own.strip_prefix("UD-").unwrap_or(own), stem(file), file];
    names.iter().any(|name| name.eq_ignore_ascii_case(asked))
}

/// The file that `asked` names, or the default one; of one in parts, all of them.
///
/// # Errors
/// If there is none, or a part of it is missing; with what there is.
pub fn choose<'a>(files: &[&'a str], asked: Option<&str>) -> Result<Vec<&'a str>, String> {
    let models = models(files);
    let (whole, cut): (Vec<_>, Vec<_>) =
        models.iter().partition(|files| files.len() == count(files));
    let tags: BTreeSet<&str> = whole.iter().map(|files| tag(files[0])).collect();
    let list = || match tags.len() {
        0 => "it has no GGUF file that is whole".to_string(),
        _ => format!("it has {}", Vec::from_iter(tags.iter().copied()).join(", ")),
    };
    // `Q4_K_M` is not `UD-Q4_K_M` if there are both: the shorter name.
    let named = |asked: &str| {
        let meant = whole.iter().filter(|files| is_meant(files[0], asked));
        meant.min_by_key(|files| (files[0].len(), files[0])).map(|files| files.to_vec())
    };
    let Some(asked) = asked else {
        let only = whole.first().filter(|_| whole.len() == 1).map(|files| files.to_vec());
        return DEFAULTS.into_iter().find_map(named).or(only).ok_or_else(|| {
            match models.is_empty() {
                true => "it has no GGUF file of a model".into(),
                false => format!("name a quantization, as owner/name:QUANTIZATION; {}", list()),
            }
        });
    };
    named(asked).ok_or_else(|| {
        if let Some(files) = cut.iter().find(|files| is_meant(files[0], asked)) {
            let (here, parts) = (files.len(), count(files));
            return format!("`{asked}` is in {parts} parts, of which there are {here}; {}", list());
        }
        let near = near(asked, &Vec::from_iter(tags.iter().copied()));
        let advice = match near.is_empty() {
            true => list(),
            false => format!("did you mean {}?", near.join(" or ")),
        };
        format!("there is no GGUF file `{asked}`; {advice}")
    })
}

/// The GGUF file in a snapshot that `asked` names, or the default one; of one in parts, the first.
pub fn in_folder(snapshot: &Path, asked: Option<&str>) -> Option<PathBuf> {
    let files = files_in(snapshot);
    let names: Vec<_> = files.iter().map(String::as_str).collect();
    let files = choose(&names, asked).ok()?;
    Some(FilePath::new(files.first()?).ok()?.within(snapshot))
}

/// The GGUF files of a snapshot that are whole models, or the first parts of such, with their quantizations.
pub fn all_in(snapshot: &Path) -> Vec<(String, PathBuf)> {
    let files = files_in(snapshot);
    let names: Vec<_> = files.iter().map(String::as_str).collect();
    let models = models(&names);
    let whole = models.iter().filter(|files| files.len() == count(files));
    let paths = whole.filter_map(|files| {
        Some((tag(files[0]).to_string(), FilePath::new(files[0]).ok()?.within(snapshot)))
    });
    paths.collect()
}

/// The GGUF files below `folder`, relative to it, in order.
fn files_in(folder: &Path) -> Vec<String> {
    fn add(folder: &Path, prefix: &str, depth: usize, files: &mut Vec<String>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten().take(FILES) {
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            let path = format!("{prefix}{name}");
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) && depth > 0 {
                add(&entry.path(), &format!("{path}/"), depth - 1, files);
            } else if is_name(name) && entry.path().is_file() {
                files.push(path);
            }
        }
    }
    let mut files = Vec::new();
    add(folder, "", DEPTH, &mut files);
    files.sort();
    files
}

/// Gets the beginnings of the files of `plan`, which the download continues, and checks that the engine can load
/// them: their architecture, that they are the parts of one model, and names and types of tensors. What arrived of
/// other files is deleted.
///
/// # Errors
/// If they cannot be loaded, with the reason; if the network fails.
pub fn check(client: &Client, plan: &Plan) -> Result<(), Failure> {
    let mut headers = Vec::new();
    for file in &plan.files {
        headers.push(header(client, plan, file)?);
    }
    let names: Vec<_> = plan.files.iter().map(|file| file.name.as_str()).collect();
    let opened = can_be_loaded(&headers)
        .with_context(|| format!("{} of {}", names.first().unwrap_or(&""), plan.repo_id));
    if opened.is_err() {
        for file in &plan.files {
            let _ = fs::remove_file(plan.folder.part(&file.blob));
        }
    }
    Ok(opened?)
}

/// The header of a file and the size of the file.
fn header(client: &Client, plan: &Plan, file: &Wanted) -> Result<(Vec<u8>, u64), Failure> {
    let mut wanted = HEADER_BYTES;
    loop {
        let mut begin = match plan.has(file) {
            true => File::open(file.path.within(&plan.snapshot)).map_err(HubError::Cache)?,
            false => transfer::get_beginning(client, plan, file, wanted)?,
        };
        let mut bytes = Vec::new();
        begin.rewind().map_err(HubError::Cache)?;
        begin.take(wanted).read_to_end(&mut bytes).map_err(HubError::Cache)?;
        let end = header_end(&bytes);
        let is_whole = file.size.is_some_and(|size| bytes.len() as u64 >= size);
        if end.is_some() || is_whole || wanted >= MOST_HEADER_BYTES {
            bytes.truncate(end.unwrap_or(bytes.len()));
            let size = file.size.unwrap_or(UNKNOWN_BYTES).max(bytes.len() as u64);
            return Ok((bytes, size));
        }
        wanted *= 2;
    }
}

/// Checks the headers of the parts of a model, each with the size of its file.
fn can_be_loaded(headers: &[(Vec<u8>, u64)]) -> anyhow::Result<()> {
    let write = || -> std::io::Result<tempfile::TempDir> {
        let folder = tempfile::tempdir()?;
        for (i, (header, size)) in headers.iter().enumerate() {
            let mut file = File::create(folder.path().join(part_name(i, headers.len())))?;
            file.write_all(header)?;
            // The weights are a hole: they are not read.
            file.set_len(*size)?;
        }
        Ok(folder)
    };
    let folder = write().context("writing the header to a temporary file")?;
    let model = Model::open(&folder.path().join(part_name(0, headers.len())));
    let model = model.map_err(|problem| anyhow!("{problem}"))?;
    model.config().map_err(|problem| anyhow!("{problem}"))?;
    Ok(())
}

/// A name of the part `i` of `count`.
fn part_name(i: usize, count: usize) -> String {
    match count {
        1 => "model.gguf".into(),
        _ => format!("model-{:05}-of-{count:05}.gguf", i + 1),
    }
}

/// The end of the header of a file; `None` if it continues after `bytes`. A damaged one ends here,
/// too: reading it says what is wrong.
fn header_end(bytes: &[u8]) -> Option<usize> {
    const TEXT: u32 = 8;
    const ARRAY: u32 = 9;
    /// Bytes of a value that is neither a text nor an array.
    fn width(kind: u32) -> Option<u64> {
        match kind {
            0 | 1 | 7 => Some(1),
            2 | 3 => Some(2),
            4..=6 => Some(4),
            10..=12 => Some(8),
            _ => None,
        }
    }
    let mut walk = Walk { bytes, at: 0 };
    if walk.u32()?.to_le_bytes() != *b"GGUF" {
        return Some(bytes.len());
    }
    walk.u32()?;
    let (tensors, keys) = (walk.u64()?, walk.u64()?);
    for _ in 0..keys {
        walk.text()?;
        let mut kind = walk.u32()?;
        let mut count = 1;
        if kind == ARRAY {
            (kind, count) = (walk.u32()?, walk.u64()?);
        }
        match width(kind) {
            Some(width) => walk.skip(width.checked_mul(count)?)?,
            None if kind == TEXT => (0..count).try_for_each(|_| walk.text())?,
            None => return Some(bytes.len()),
        }
    }
    for _ in 0..tensors {
        walk.text()?;
        let dimensions = walk.u32()?;
        // Sizes, the type, the offset.
        walk.skip(u64::from(dimensions) * 8 + 4 + 8)?;
    }
    Some(walk.at)
}

/// A place in the header of a file.
struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Walk<'_> {
    fn skip(&mut self, bytes: u64) -> Option<()> {
        let at = self.at.checked_add(usize::try_from(bytes).ok()?)?;
        self.at = Some(at).filter(|at| *at <= self.bytes.len())?;
        Some(())
    }

    fn text(&mut self) -> Option<()> {
        let length = self.u64()?;
        self.skip(length)
    }

    fn u32(&mut self) -> Option<u32> {
        let from = self.at;
        self.skip(4)?;
        Some(u32::from_le_bytes(self.bytes[from..self.at].try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        let from = self.at;
        self.skip(8)?;
        Some(u64::from_le_bytes(self.bytes[from..self.at].try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 7] = [
        "Tiny-1B-UD-Q4_K_M.gguf",
        "Tiny-1B-Q4_K_M.gguf",
        "Tiny-1B-Q8_0.gguf",
        "Tiny-1B-IQ2_XS.gguf",
        "BF16/Tiny-1B-BF16-00001-of-00002.gguf",
        "BF16/Tiny-1B-BF16-00002-of-00002.gguf",
        "mmproj-F16.gguf",
    ];

    #[test]
    fn the_quantization_chooses_the_file() {
        for (asked, expected) in [
            (None, "Tiny-1B-Q4_K_M.gguf"),
            (Some("Q4_K_M"), "Tiny-1B-Q4_K_M.gguf"),
            (Some("q8_0"), "Tiny-1B-Q8_0.gguf"),
            (Some("UD-Q4_K_M"), "Tiny-1B-UD-Q4_K_M.gguf"),
            (Some("Tiny-1B-IQ2_XS"), "Tiny-1B-IQ2_XS.gguf"),
            (Some("Tiny-1B-IQ2_XS.gguf"), "Tiny-1B-IQ2_XS.gguf"),
        ] {
            assert_eq!(choose(&FILES, asked), Ok(vec![expected]), "{asked:?}");
        }
        assert_eq!(choose(&["some.gguf"], None), Ok(vec!["some.gguf"]));
        assert_eq!(choose(&["a.q5_k_m.gguf", "a.f16.gguf"], None), Ok(vec!["a.q5_k_m.gguf"]));
        // All parts of one, in their order.
        for asked in ["BF16", "Tiny-1B-BF16", FILES[4]] {
            let files = [FILES[5], FILES[0], FILES[4]];
            assert_eq!(choose(&files, Some(asked)), Ok(FILES[4..6].to_vec()), "{asked}");
        }
        assert_eq!(choose(&FILES[4..], None), Ok(FILES[4..6].to_vec()));
    }

    #[test]
    fn what_cannot_be_chosen_is_named_with_what_there_is() {
        for (files, asked, words) in [
            (&FILES[..5], Some("BF16"), "`BF16` is in 2 parts, of which there are 1"),
            (&FILES[..5], Some("BF16"), "it has IQ2_XS, Q4_K_M, Q8_0, UD-Q4_K_M"),
            (&FILES, Some("Q4_K_L"), "did you mean Q4_K_M"),
            (&FILES, Some("F16"), "there is no GGUF file `F16`"),
            (&FILES[5..], None, "it has no GGUF file that is whole"),
            (&FILES[6..], None, "it has no GGUF file of a model"),
            (&["a-IQ2_S.gguf", "a-IQ1_S.gguf"], None, "name a quantization"),
        ] {
            let error = choose(files, asked).unwrap_err();
            assert!(error.contains(words), "`{words}` is not in {error}");
        }
    }

    #[test]
    fn repos_with_safetensors_are_not_of_gguf() {
        let names = |names: &[&'static str]| BTreeSet::from_iter(names.iter().copied());
        assert!(is_of_gguf(&names(&["config.json", "a-Q8_0.gguf"])));
        assert!(!is_of_gguf(&names(&["model.safetensors", "a-Q8_0.gguf"])));
        assert!(!is_of_gguf(&names(&["mmproj-F16.gguf"])));
    }

    /// Whatever the bytes are, the walk ends within them.
    #[test]
    fn the_header_ends_where_its_last_tensor_does() {
        let header = super::super::tests::gguf("llama", 4096);
        let end = header_end(&header).unwrap();
        assert!(end < header.len(), "the weights do not belong to it");
        for cut in 0..end {
            assert_eq!(header_end(&header[..cut]), None, "{cut}");
        }
        assert_eq!(header_end(&header[..end]), Some(end));
        assert_eq!(header_end(b"<html>"), Some(6));
        let mut damaged = header;
        for at in 4..end {
            let byte = std::mem::replace(&mut damaged[at], 0xff);
            assert!(header_end(&damaged).is_none_or(|end| end <= damaged.len()));
            damaged[at] = byte;
        }
    }
}
