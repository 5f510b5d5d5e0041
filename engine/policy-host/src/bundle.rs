//! The bytes of a policy: a component, or a bundle. All of them come in through [`Bundle::open`].
//!
//! A bundle `NAME.steer` is a tar archive of four files, in this order: the component `NAME.wasm`, its golden
//! file `NAME.jsonl`, the schema of its parameters `NAME.params.toml`, and `README.md`. A signed bundle begins
//! with the four lines of a minisign signature; all bytes behind them are signed, and nothing is read from
//! them before the signature is verified.
//!
//! An archive is accepted only if it is, byte by byte, what [`pack`] makes of its files. So there are no
//! paths, links, extensions or bytes behind its end.

use std::io::Read;

use tar::{Archive, Builder, EntryType, Header};

use crate::sandbox::COMPONENT_BYTES;
use crate::schema::Schema;
use crate::trust::{Signer, Trust};

/// Bytes of a golden file.
pub const GOLDEN_BYTES: usize = 16 << 20;

/// Bytes of a schema.
pub const SCHEMA_BYTES: usize = 64 << 10;

/// Bytes of a README.
const README_BYTES: usize = 1 << 20;

/// Bytes of a bundle, with room for its signature and the headers of the archive.
pub const BUNDLE_BYTES: usize =
    COMPONENT_BYTES + GOLDEN_BYTES + SCHEMA_BYTES + README_BYTES + (64 << 10);

/// Lines of a signature.
const SIGNATURE_LINES: usize = 4;

/// Bytes of a signature.
const SIGNATURE_BYTES: usize = 4 << 10;

/// What a signature begins with.
const SIGNED: &[u8] = b"untrusted comment:";

/// Names of the files of a bundle, with `NAME` for that of the policy, and their limits in bytes.
const PARTS: [(&str, usize); 4] = [
    ("NAME.wasm", COMPONENT_BYTES),
    ("NAME.jsonl", GOLDEN_BYTES),
    ("NAME.params.toml", SCHEMA_BYTES),
    ("README.md", README_BYTES),
];

/// A component and what belongs to it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Bundle {
    /// The component.
    pub component: Vec<u8>,
    /// Its golden file; empty for none.
    pub golden: String,
    /// The schema of its parameters; `None` for a component without one.
    pub schema: Option<Schema>,
    /// Its README; empty for a component.
    pub readme: String,
    /// Who signed it.
    pub signer: Signer,
    /// The bytes from which it was opened.
    pub file: Vec<u8>,
    /// Whether it was opened from an archive.
    pub is_archive: bool,
}

impl Bundle {
    /// Opens the bytes of the policy `name`. A component has no golden file and no schema yet. Bytes that are
    /// neither a component nor a bundle are taken for a component, which the compiler refuses.
    ///
    /// # Errors
    /// What is wrong with which part, and what to do.
    pub fn open(name: &str, file: Vec<u8>, trust: &Trust) -> Result<Self, String> {
        let limit = BUNDLE_BYTES;
        if file.len() > limit {
            return Err(format!("has {} bytes, more than {limit}", file.len()));
        }
        let (signature, archive) = match file.starts_with(SIGNED) {
            true => {
                let (signature, archive) = split_signature(&file)?;
                (Some(signature), archive)
            }
            false => (None, &file[..]),
        };
        if signature.is_none() && !is_archive(archive) {
            let signer = trust.unsigned("the component")?;
            return Ok(Self { component: file.clone(), signer, file, ..Self::default() });
        }
        let signer = match signature {
            Some(signature) => trust.verify(signature, archive),
            None => trust.unsigned("the bundle"),
        };
        let signer = signer.map_err(|problem| format!("bundle: {problem}"))?;
        let [component, golden, schema, readme] =
            parts(name, archive).map_err(|problem| format!("bundle: {problem}"))?;
        let text = |part: usize, bytes: Vec<u8>| {
            let name = part_name(part, name);
            String::from_utf8(bytes).map_err(|error| format!("bundle: {name}: {error}"))
        };
        let schema = Schema::parse(&text(2, schema)?);
        let schema =
            schema.map_err(|problem| format!("bundle: {}: {problem}", part_name(2, name)))?;
        Ok(Self {
            component,
            golden: text(1, golden)?,
            schema: Some(schema),
            readme: text(3, readme)?,
            signer,
            is_archive: true,
            file,
        })
    }
}

/// The name of a file in the bundle of the policy `name`.
fn part_name(part: usize, name: &str) -> String {
    PARTS[part].0.replace("NAME", name)
}

fn is_archive(bytes: &[u8]) -> bool {
    bytes.get(257..262) == Some(b"ustar")
}

/// The signature that the file begins with, and what it signs.
fn split_signature(file: &[u8]) -> Result<(&str, &[u8]), String> {
    let head = &file[..file.len().min(SIGNATURE_BYTES)];
    let mut ends = head.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    let (end, _) = ends
        .nth(SIGNATURE_LINES - 1)
        .ok_or_else(|| format!("bundle: its signature does not have {SIGNATURE_LINES} lines"))?;
    let (signature, archive) = file.split_at(end + 1);
    let signature = std::str::from_utf8(signature);
    let signature = signature.map_err(|_| "bundle: its signature is not text".to_owned())?;
    Ok((signature, archive))
}

/// The files of an archive, in the order of [`PARTS`].
fn parts(name: &str, archive: &[u8]) -> Result<[Vec<u8>; 4], String> {
    let damaged = |error| format!("is not an archive: {error}");
    let mut parts: [Option<Vec<u8>>; 4] = Default::default();
    // Raw: an entry that stands for a long name or a link is refused like any other.
    for entry in Archive::new(archive).entries().map_err(damaged)?.raw(true) {
        let entry = entry.map_err(damaged)?;
        let found = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let is = |part: &usize| part_name(*part, name) == found;
        let Some(part) = (0..PARTS.len()).find(is) else {
            let names = [0, 1, 2, 3].map(|part| part_name(part, name)).join(", ");
            return Err(format!("contains `{found}`; that of policy `{name}` has just {names}"));
        };
        if entry.header().entry_type() != EntryType::Regular {
            return Err(format!("`{found}` is not a regular file"));
        }
        let (size, limit) = (entry.size(), PARTS[part].1);
        if size > limit as u64 {
            return Err(format!("`{found}` has {size} bytes, more than {limit}"));
        }
        let mut bytes = Vec::new();
        entry.take(limit as u64).read_to_end(&mut bytes).map_err(damaged)?;
        if bytes.len() as u64 != size {
            return Err(format!("`{found}` is cut off"));
        }
        if parts[part].replace(bytes).is_some() {
            return Err(format!("`{found}` is in it twice"));
        }
    }
    if let Some(missing) = parts.iter().position(Option::is_none) {
        return Err(format!("`{}` is missing", part_name(missing, name)));
    }
    let parts = parts.map(Option::unwrap_or_default);
    if pack(name, parts.each_ref().map(Vec::as_slice)) != archive {
        return Err("is not the archive that `steersman policy bundle` makes of its files".into());
    }
    Ok(parts)
}

/// The archive of the bundle of the policy `name`, without a signature: component, golden file, schema and
/// README.
pub fn pack(name: &str, parts: [&[u8]; 4]) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    for (part, bytes) in parts.into_iter().enumerate() {
        let mut header = Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_entry_type(EntryType::Regular);
        let appended = archive.append_data(&mut header, part_name(part, name), bytes);
        appended.expect("names are short, and memory can be written");
    }
    archive.into_inner().expect("memory can be written")
}
