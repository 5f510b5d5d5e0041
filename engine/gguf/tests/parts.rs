//! Models in parts are what they are in one file, or refused with what is wrong.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use steersman_gguf::reader::Header;
use steersman_gguf::{Data, Form, Model, files};

/// Bytes that tensors are aligned to.
const ALIGNMENT: usize = 32;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/fixtures/gguf/{name}.gguf"))
}

/// A place in the bytes of a file.
struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Walk<'_> {
    fn u32(&mut self) -> u32 {
        self.at += 4;
        u32::from_le_bytes(self.bytes[self.at - 4..self.at].try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        self.at += 8;
        u64::from_le_bytes(self.bytes[self.at - 8..self.at].try_into().unwrap())
    }

    fn skip_text(&mut self) {
        let length = self.u64() as usize;
        self.at += length;
    }

    fn skip_value(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => self.at += 1,
            2 | 3 => self.at += 2,
            4..=6 => self.at += 4,
            8 => self.skip_text(),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).for_each(|_| self.skip_value(kind));
            }
            _ => self.at += 8,
        }
    }
}

/// The file at `path` in parts with these numbers of tensors, as `llama-gguf-split` writes them. All parts say that the
/// model has `total` tensors.
fn split(path: &Path, counts: &[usize], total: usize) -> Vec<Vec<u8>> {
    let (bytes, header) = (fs::read(path).unwrap(), Header::read(path).unwrap());
    let mut walk = Walk { bytes: &bytes, at: 8 };
    let (tensors, keys) = (walk.u64(), walk.u64());
    for _ in 0..keys {
        walk.skip_text();
        let kind = walk.u32();
        walk.skip_value(kind);
    }
    let metadata = &bytes[24..walk.at];
    let mut infos = Vec::new();
    for _ in 0..tensors {
        let from = walk.at;
        walk.skip_text();
        walk.at += 8 * walk.u32() as usize + 4;
        infos.push(&bytes[from..walk.at]);
        walk.at += 8;
    }
    assert_eq!(counts.iter().sum::<usize>(), infos.len());
    let mut from = 0;
    let parts = counts.iter().enumerate().map(|(no, count)| {
        let own = from..from + count;
        from += count;
        let mut part = b"GGUF".to_vec();
        part.extend(3_u32.to_le_bytes());
        part.extend((*count as u64).to_le_bytes());
        part.extend((3 + if no == 0 { keys } else { 0 }).to_le_bytes());
        if no == 0 {
            part.extend(metadata);
        }
        let mut add = |key: &str, kind: u32, value: &[u8]| {
            part.extend((key.len() as u64).to_le_bytes());
            part.extend(key.as_bytes());
            part.extend(kind.to_le_bytes());
            part.extend(value);
        };
        add("split.no", 2, &(no as u16).to_le_bytes());
        add("split.count", 2, &(counts.len() as u16).to_le_bytes());
        add("split.tensors.count", 5, &(total as i32).to_le_bytes());
        let mut data: Vec<u8> = Vec::new();
        for i in own {
            part.extend(infos[i]);
            part.extend((data.len() as u64).to_le_bytes());
            let start = header.tensors[i].start as usize;
            data.extend(&bytes[start..start + header.tensors[i].bytes]);
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        }
        part.resize(part.len().next_multiple_of(ALIGNMENT), 0);
        part.extend(data);
        part
    });
    parts.collect()
}

/// Writes parts; returns the path of the first.
fn write(folder: &Path, parts: &[Vec<u8>]) -> PathBuf {
    let path = |i: usize| folder.join(format!("tiny-{i:05}-of-{:05}.gguf", parts.len()));
    for (i, part) in parts.iter().enumerate() {
        fs::write(path(i + 1), part).unwrap();
    }
    path(1)
}

fn tensors_of(name: &str) -> usize {
    Header::read(&fixture(name)).unwrap().tensors.len()
}

/// The numbers of all tensors, by name.
fn numbers(model: &Model) -> BTreeMap<String, Data> {
    let read = |tensor| model.read(tensor, Form::Packed).unwrap();
    model.tensors().iter().map(|tensor| (tensor.name.clone(), read(tensor))).collect()
}

/// Peers load all parts when the first is named; here they had to be joined by hand.
#[test]
fn a_model_in_parts_equals_the_model_in_one_file() {
    for name in ["llama", "qwen35moe"] {
        let all = tensors_of(name);
        let whole = Model::open(&fixture(name)).unwrap();
        // The first may have the metadata only.
        for counts in [vec![0, all], vec![all - 5, 2, 3], vec![3, 0, all - 3]] {
            let folder = tempfile::tempdir().unwrap();
            let first = write(folder.path(), &split(&fixture(name), &counts, all));
            let parts = Model::open(&first).unwrap();
            assert_eq!(parts.files().len(), counts.len());
            assert_eq!(parts.config().unwrap(), whole.config().unwrap());
            assert_eq!(numbers(&parts), numbers(&whole), "{name}: {counts:?}");
            for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
                let read = |path: &Path| files::read(path, file).unwrap();
                assert_eq!(read(&first), read(&fixture(name)), "{name}: {file}");
            }
            assert_eq!(files::name_of(&first), "tiny");
            fs::write(folder.path().join("tiny.jinja"), "x").unwrap();
            assert_eq!(files::read(&first, "chat_template.jinja").unwrap(), b"x");
        }
    }
}

#[test]
fn parts_that_do_not_fit_are_named() {
    let all = tensors_of("llama");
    let (counts, other) = ([2, 3, all - 5], [2, 2, all - 4]);
    let parts = split(&fixture("llama"), &counts, all);
    let fewer = split(&fixture("llama"), &counts, all + 1);
    let shifted = split(&fixture("llama"), &other, all);
    let check = |change: &dyn Fn(&Path) -> PathBuf, words: &str| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &parts);
        let error = Model::open(&change(folder.path())).err().expect(words).to_string();
        assert!(error.contains(words), "`{words}` is not in {error}");
    };
    let name = |number: usize| format!("tiny-{number:05}-of-00003.gguf");
    let first = |folder: &Path| folder.join(name(1));
    let replace = |folder: &Path, number: usize, part: &[u8]| {
        fs::write(folder.join(name(number)), part).unwrap();
        first(folder)
    };
    check(
        &|folder| {
            fs::remove_file(folder.join(name(2))).unwrap();
            first(folder)
        },
        "part 2 of 3, tiny-00002-of-00003.gguf: it is missing",
    );
    check(&|folder| folder.join(name(2)), "it is part 2 of 3; name the first one, tiny-00001-of");
    // A copy under the name of another.
    check(
        &|folder| replace(folder, 3, &parts[1]),
        "tiny-00003-of-00003.gguf: by `split.no` and `split.count` it is part 2 of 3",
    );
    check(&|folder| replace(folder, 1, &parts[1]), "it is part 2 of 3; download it again");
    check(&|folder| replace(folder, 3, &fewer[2]), "it is a part of another model");
    check(&|folder| replace(folder, 2, &shifted[1]), "its 3 parts have");
    check(&|folder| replace(folder, 3, &shifted[2]), "is in an earlier part, too");
    check(&|folder| replace(folder, 2, &parts[1][..200]), "part 2 of 3, tiny-00002-of-00003.gguf:");
    check(&|folder| replace(folder, 2, b"<html>"), "it is not a GGUF file");
    for other in ["tiny.gguf", "tiny-00001-of-00002.gguf"] {
        check(
            &|folder| {
                fs::rename(first(folder), folder.join(other)).unwrap();
                folder.join(other)
            },
            "it is one of 3 parts (`split.count`), which its name does not tell",
        );
    }
}
