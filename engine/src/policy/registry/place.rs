//! Where policies and parameters come from: names, files, and what ships inside the binary.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{MAIN_SEPARATOR, Path, PathBuf};

use super::super::wasm::COMPONENT_BYTES;
use super::{in_profile, refused};
use crate::config::{Param, PolicyConfig, Profile};
use crate::error::{Error, Result};

/// Most bytes of the file of a parameter.
pub const PARAM_BYTES: usize = 256 << 10;

/// Most bytes of a file of golden traces.
pub const GOLDEN_BYTES: usize = 16 << 20;

/// Longest name of a policy.
pub const NAME_CHARS: usize = 64;

/// A policy inside the binary.
pub struct Shipped {
    pub name: &'static str,
    pub component: &'static [u8],
    /// Its golden traces.
    pub golden: &'static str,
}

macro_rules! shipped {
    ($name:literal) => {
        Shipped {
            name: $name,
            component: include_bytes!(concat!("../../../../policies/", $name, "/", $name, ".wasm")),
            golden: include_str!(concat!("../../../../policies/", $name, "/", $name, ".jsonl")),
        }
    };
}

/// All of them.
pub const SHIPPED: &[Shipped] =
    &[shipped!("agent"), shipped!("default"), shipped!("passthrough"), shipped!("rules")];

/// Where a policy is looked for: in its file, else among those that ship.
#[derive(Clone)]
pub struct Place {
    /// `NAME.wasm` in `policy.folder`, or the path that a profile names; there need not be one.
    pub file: Option<PathBuf>,
    pub shipped: Option<&'static Shipped>,
}

/// What a profile says of its policies.
pub struct Rules {
    /// Names of policies, and whether they are shadows.
    pub chain: Vec<(String, bool)>,
    pub profile: Profile,
}

/// What a policy is made of.
pub struct Source {
    pub component: Vec<u8>,
    /// Its golden traces; empty for none.
    pub golden: String,
}

impl Place {
    /// The name that a profile's `entry` gives a policy, and where it is looked for; `folder` is
    /// `policy.folder`, empty for none.
    ///
    /// # Errors
    /// [`Error::Policy`] when it is neither a name nor a path.
    pub fn of(entry: &str, folder: &Path) -> Result<(String, Self)> {
        if is_path(entry) {
            let path = PathBuf::from(entry);
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or(entry).to_owned();
            return Ok((stem, Self { file: Some(path), shipped: None }));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if entry.is_empty() || entry.len() > NAME_CHARS || !entry.chars().all(allowed) {
            let problem = format!(
                "is no name of a policy: at most {NAME_CHARS} letters, digits, `-` and `_`; a path \
                 has a `/` or ends in `.wasm`"
            );
            return Err(Error::Policy { policy: entry.into(), problem });
        }
        let file = folder.join(format!("{entry}.wasm"));
        let file = (!folder.as_os_str().is_empty()).then_some(file);
        let shipped = SHIPPED.iter().find(|shipped| shipped.name == entry);
        Ok((entry.into(), Self { file, shipped }))
    }

    /// Whether both are the same file, however it is written.
    pub fn is(&self, other: &Self) -> bool {
        let whole = |place: &Self| {
            place.file.as_ref().map(|file| {
                file.canonicalize().or_else(|_| std::path::absolute(file)).unwrap_or(file.clone())
            })
        };
        whole(self) == whole(other)
    }

    /// Reads the file, if there is one, and the golden traces beside it.
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
    pub fn read(&self) -> Result<Option<Source>, String> {
        let Some(file) = &self.file else { return Ok(None) };
        let Some(component) = read(file, COMPONENT_BYTES)? else { return Ok(None) };
        Ok(Some(Source { component, golden: self.golden()? }))
    }

    /// What ships under this name.
    pub fn shipped(&self) -> Option<Source> {
        let Shipped { component, golden, .. } = self.shipped?;
        Some(Source { component: component.to_vec(), golden: (*golden).into() })
    }

    /// The golden traces beside the file; empty for none.
    ///
    /// # Errors
    /// Why they cannot be read.
    pub fn golden(&self) -> Result<String, String> {
        let Some(file) = &self.file else { return Ok(String::new()) };
        let file = file.with_extension("jsonl");
        let Some(golden) = read(&file, GOLDEN_BYTES)? else { return Ok(String::new()) };
        String::from_utf8(golden).map_err(|error| format!("{}: {error}", file.display()))
    }

    /// What to say where there is nothing.
    pub fn nothing(&self) -> String {
        let names: Vec<_> = SHIPPED.iter().map(|shipped| format!("`{}`", shipped.name)).collect();
        let looked = match &self.file {
            Some(file) => format!("there is no file {}", file.display()),
            None => "it does not ship, and there is no policy.folder to look in".into(),
        };
        format!(
            "{looked}; name {}, NAME for NAME.wasm in policy.folder, or the path of a component, \
             which policies/README.md says how to build",
            names.join(", ")
        )
    }
}

fn is_path(entry: &str) -> bool {
    entry.contains('/') || entry.contains(MAIN_SEPARATOR) || entry.ends_with(".wasm")
}

/// What profiles name: their chains, and where each policy is looked for.
///
/// # Errors
/// [`Error::Policy`] when an entry is no name and no path, or two files have one name.
pub fn named(
    config: &PolicyConfig,
    profiles: &BTreeMap<String, Profile>,
) -> Result<(BTreeMap<String, Rules>, BTreeMap<String, Place>)> {
    let (mut rules, mut places) = (BTreeMap::new(), BTreeMap::<String, Place>::new());
    for (name, profile) in profiles {
        let decide = profile.policies.iter().map(|entry| (entry, false));
        let mut chain = Vec::new();
        for (entry, shadow) in decide.chain(profile.shadow.iter().map(|entry| (entry, true))) {
            let (policy, place) =
                Place::of(entry, &config.folder).map_err(|error| in_profile(name, error))?;
            if let Some(other) = places.get(&policy)
                && !other.is(&place)
            {
                let path = |place: &Place| match &place.file {
                    Some(file) => file.display().to_string(),
                    None => "the one that ships".into(),
                };
                let problem = format!(
                    "is the name of both {} and {}; rename one of the files",
                    path(other),
                    path(&place)
                );
                return Err(in_profile(name, refused(&policy, problem)));
            }
            places.entry(policy.clone()).or_insert(place);
            chain.push((policy, shadow));
        }
        for key in profile.params.keys().filter(|key| key.contains('.')) {
            let is_of =
                |policy: &str| key.strip_prefix(policy).is_some_and(|own| own.starts_with('.'));
            if !chain.iter().any(|(policy, _)| is_of(policy)) {
                let known: Vec<_> = chain.iter().map(|(policy, _)| policy.as_str()).collect();
                let known = known.join(", ");
                let problem = format!(
                    "params `{key}` of profile `{name}`: it has no such policy, only {known}"
                );
                return Err(Error::Invalid { field: "profiles", problem });
            }
        }
        rules.insert(name.clone(), Rules { chain, profile: profile.clone() });
    }
    Ok((rules, places))
}

/// The text of a parameter.
///
/// # Errors
/// Why its file cannot be read.
pub fn read_param(param: &Param) -> Result<String, String> {
    match param {
        Param::Text(text) => Ok(text.clone()),
        Param::File { file } => read_text(file),
    }
}

/// The text of a parameter's file.
fn read_text(file: &Path) -> Result<String, String> {
    let bytes = read(file, PARAM_BYTES)?;
    let bytes = bytes.ok_or_else(|| format!("there is no file {}", file.display()))?;
    String::from_utf8(bytes).map_err(|error| format!("{}: {error}", file.display()))
}

/// A file of at most `limit` bytes; `None` where there is none.
fn read(path: &Path, limit: usize) -> Result<Option<Vec<u8>>, String> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file,
    };
    let mut bytes = Vec::new();
    // One byte more than the limit tells that there is more, however the file grows meanwhile.
    file.and_then(|file| file.take(limit as u64 + 1).read_to_end(&mut bytes))
        .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    if bytes.len() > limit {
        return Err(format!(
            "{} has more than {limit} bytes, which are read at most",
            path.display()
        ));
    }
    Ok(Some(bytes))
}

/// Puts `bytes` into the place of the file at `path`, whole or not at all.
///
/// # Errors
/// When it cannot be written; what was there is still there.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A link stays one: what it points to is replaced.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().ok_or(ErrorKind::InvalidInput)?);
    name.push(format!(".{}", std::process::id()));
    let beside = path.with_file_name(name);
    let written = (|| {
        let mut file = File::create(&beside)?;
        file.write_all(bytes)?;
        // Else a crash could leave the new name with nothing behind it.
        file.sync_all()?;
        fs::rename(&beside, &path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_names_a_policy_by_name_or_by_path() {
        let folder = Path::new("/policies");
        for (entry, name, file, shipped) in [
            ("default", "default", "/policies/default.wasm", true),
            ("mine", "mine", "/policies/mine.wasm", false),
            ("mine.wasm", "mine", "mine.wasm", false),
            ("./mine", "mine", "./mine", false),
            ("/etc/default.wasm", "default", "/etc/default.wasm", false),
        ] {
            let (named, place) = Place::of(entry, folder).unwrap();
            assert_eq!(named, name);
            assert_eq!(place.file.as_deref(), Some(Path::new(file)), "{entry}");
            assert_eq!(place.shipped.is_some(), shipped, "{entry}");
        }
        assert!(Place::of("default", Path::new("")).unwrap().1.file.is_none());
        for entry in ["", "a b", "..", "ä", &"x".repeat(65)] {
            let error = Place::of(entry, folder).err().expect(entry).to_string();
            assert!(error.contains("is no name of a policy"), "{error}");
        }
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wasm");
        for text in ["one", "two"] {
            write(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        // A folder cannot be replaced by a file.
        fs::create_dir(folder.path().join("b")).unwrap();
        write(&folder.path().join("b"), b"three").unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_beyond_its_limit_is_refused_and_one_that_is_not_there_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("param");
        assert_eq!(read(&path, 3), Ok(None));
        fs::write(&path, "four").unwrap();
        assert!(read(&path, 3).unwrap_err().contains("has more than 3 bytes"));
        assert_eq!(read(&path, 4), Ok(Some(b"four".to_vec())));
        fs::write(&path, [0xff]).unwrap();
        assert!(read_text(&path).unwrap_err().contains("utf-8"));
    }
}
