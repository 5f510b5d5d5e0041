//! Sources of policies and parameters: names, files, and policies inside the binary.

use std::collections::BTreeMap;
use std::path::{MAIN_SEPARATOR, Path, PathBuf};

use crate::bundle::{BUNDLE_BYTES, Bundle, GOLDEN_BYTES, SCHEMA_BYTES, Signer, Trust};
use crate::config::{Param, PolicyConfig, ProfilePolicies};
use crate::error::Error;
use crate::file::read;
use crate::schema::Schema;

/// Bytes of the file of a parameter.
pub const PARAM_BYTES: usize = 256 << 10;

/// Extension of a bundle.
const BUNDLE: &str = "steer";

/// Extensions of the golden file and the schema of a component.
const GOLDEN: &str = "jsonl";
const SCHEMA: &str = "params.toml";

/// Characters in the name of a policy.
const NAME_CHARS: usize = 64;

/// A policy inside the binary.
pub struct Shipped {
    pub name: &'static str,
    pub component: &'static [u8],
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

/// All policies inside the binary.
pub const SHIPPED: &[Shipped] = &[
    shipped!("agent"),
    shipped!("budget"),
    shipped!("cache-friendly"),
    shipped!("default"),
    shipped!("json-agent"),
    shipped!("language"),
    shipped!("no-repeat"),
    shipped!("passthrough"),
    shipped!("redact"),
    shipped!("router"),
    shipped!("rules"),
    shipped!("tool-guard"),
];

/// Where a policy is loaded from: its file, or else the binary.
#[derive(Clone)]
pub struct Source {
    /// `NAME.wasm` in `policy.folder`, or the path that a profile names. It need not exist. The bundle
    /// `NAME.steer` beside it takes precedence.
    pub file: Option<PathBuf>,
    pub shipped: Option<&'static Shipped>,
}

/// The chain of a profile.
pub struct ProfileChain {
    /// Names of policies, and whether they are shadows.
    pub links: Vec<(String, bool)>,
    pub settings: ProfilePolicies,
}

/// Chains by profile.
pub type Chains = BTreeMap<String, ProfileChain>;

/// Sources by policy.
pub type Sources = BTreeMap<String, Source>;

impl Source {
    /// Name and source of the policy that a profile names as `entry`; `folder` is `policy.folder`,
    /// empty for none.
    ///
    /// # Errors
    /// [`Error::Refused`] if `entry` is neither a name nor a path.
    pub fn of(entry: &str, folder: &Path) -> Result<(String, Self), Error> {
        if is_path(entry) {
            let path = PathBuf::from(entry);
            let is_bundle = path.extension().is_some_and(|extension| extension == BUNDLE);
            let path = if is_bundle { path.with_extension("wasm") } else { path };
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or(entry).to_owned();
            return Ok((stem, Self { file: Some(path), shipped: None }));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if entry.is_empty() || entry.len() > NAME_CHARS || !entry.chars().all(allowed) {
            let problem = format!(
                "is not the name of a policy: use at most {NAME_CHARS} letters, digits, `-` and `_`; \
                 a path contains a `/` or ends in `.wasm` or `.steer`"
            );
            return Err(Error::refused(entry, problem));
        }
        let file = folder.join(format!("{entry}.wasm"));
        let file = (!folder.as_os_str().is_empty()).then_some(file);
        let shipped = SHIPPED.iter().find(|shipped| shipped.name == entry);
        Ok((entry.into(), Self { file, shipped }))
    }

    /// Whether both are the same file, however their paths are written.
    fn is_same(&self, other: &Self) -> bool {
        let path = |source: &Self| {
            source.file.as_ref().map(|file| {
                file.canonicalize().or_else(|_| std::path::absolute(file)).unwrap_or(file.clone())
            })
        };
        path(self) == path(other)
    }

    /// Reads the bundle, or else the component and what lies beside it, if one exists.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn read(&self, policy: &str, trust: &Trust) -> Result<Option<Bundle>, String> {
        let files = self.bundle().into_iter().chain(self.file.clone());
        for file in files {
            let Some(bytes) = read(&file, BUNDLE_BYTES)? else { continue };
            let bundle =
                Bundle::open(policy, bytes, trust).and_then(|bundle| self.complete(bundle));
            return bundle.map(Some).map_err(|problem| format!("{}: {problem}", file.display()));
        }
        Ok(None)
    }

    /// The file of the bundle.
    pub fn bundle(&self) -> Option<PathBuf> {
        self.file.as_ref().map(|file| file.with_extension(BUNDLE))
    }

    /// All files from which the policy is read.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        let extensions = [BUNDLE, "wasm", GOLDEN, SCHEMA].into_iter();
        self.file.iter().flat_map(move |file| {
            extensions.clone().map(|extension| match extension {
                "wasm" => file.clone(),
                extension => file.with_extension(extension),
            })
        })
    }

    /// Adds to a component the golden file and the schema beside its file.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn complete(&self, bundle: Bundle) -> Result<Bundle, String> {
        if bundle.is_archive {
            return Ok(bundle);
        }
        let schema = self.beside(SCHEMA, SCHEMA_BYTES)?;
        let schema = schema.map(|(file, text)| {
            Schema::parse(&text).map_err(|problem| format!("{}: {problem}", file.display()))
        });
        let golden = self.beside(GOLDEN, GOLDEN_BYTES)?.map(|(_, golden)| golden);
        Ok(Bundle { golden: golden.unwrap_or_default(), schema: schema.transpose()?, ..bundle })
    }

    /// A text beside the file, if it exists.
    fn beside(&self, extension: &str, limit: usize) -> Result<Option<(PathBuf, String)>, String> {
        let Some(file) = &self.file else { return Ok(None) };
        let file = file.with_extension(extension);
        let Some(bytes) = read(&file, limit)? else { return Ok(None) };
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Some((file, text))),
            Err(error) => Err(format!("{}: {error}", file.display())),
        }
    }

    /// The policy inside the binary. Nobody signs it: it comes with the server.
    pub fn shipped(&self) -> Option<Bundle> {
        let Shipped { component, golden, .. } = self.shipped?;
        let (component, golden) = (component.to_vec(), (*golden).to_owned());
        let file = component.clone();
        Some(Bundle { component, golden, file, signer: Signer::Nobody, ..Bundle::default() })
    }

    /// The problem to report if the policy does not exist.
    pub fn missing(&self) -> String {
        let names: Vec<_> = SHIPPED.iter().map(|shipped| format!("`{}`", shipped.name)).collect();
        let looked = match &self.file {
            Some(file) => format!("{} does not exist", file.display()),
            None => "is not a shipped policy, and policy.folder is not set".into(),
        };
        format!(
            "{looked}; name {}, NAME for NAME.wasm in policy.folder, or the path of a component \
             (policies/README.md explains how to build one)",
            names.join(", ")
        )
    }
}

fn is_path(entry: &str) -> bool {
    entry.contains('/')
        || entry.contains(MAIN_SEPARATOR)
        || entry.ends_with(".wasm")
        || entry.ends_with(".steer")
}

/// The chains of all profiles, and the source of each policy that they name.
///
/// # Errors
/// [`Error::Refused`] if an entry is neither a name nor a path, or two files have one name;
/// [`Error::Config`] if a parameter belongs to a policy that its profile does not name.
pub fn resolve_profiles(
    config: &PolicyConfig,
    profiles: &BTreeMap<String, ProfilePolicies>,
) -> Result<(Chains, Sources), Error> {
    let (mut chains, mut sources) = (Chains::new(), Sources::new());
    for (name, settings) in profiles {
        let applied = settings.policies.iter().map(|entry| (entry, false));
        let mut links = Vec::new();
        for (entry, shadow) in applied.chain(settings.shadow.iter().map(|entry| (entry, true))) {
            let (policy, source) =
                Source::of(entry, &config.folder).map_err(|error| error.in_profile(name))?;
            if let Some(other) = sources.get(&policy)
                && !other.is_same(&source)
            {
                let path = |source: &Source| match &source.file {
                    Some(file) => file.display().to_string(),
                    None => "the shipped policy".into(),
                };
                let problem = format!(
                    "is the name of both {} and {}; rename one of the files",
                    path(other),
                    path(&source)
                );
                return Err(Error::refused(&policy, problem).in_profile(name));
            }
            sources.entry(policy.clone()).or_insert(source);
            links.push((policy, shadow));
        }
        for param in settings.params.keys().filter(|param| param.contains('.')) {
            let is_of =
                |policy: &str| param.strip_prefix(policy).is_some_and(|own| own.starts_with('.'));
            if !links.iter().any(|(policy, _)| is_of(policy)) {
                let known: Vec<_> = links.iter().map(|(policy, _)| policy.as_str()).collect();
                let known = known.join(", ");
                let problem = format!(
                    "params `{param}` of profile `{name}`: the profile does not name that policy, \
                     only {known}"
                );
                return Err(Error::Config { field: "profiles", problem });
            }
        }
        chains.insert(name.clone(), ProfileChain { links, settings: settings.clone() });
    }
    Ok((chains, sources))
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

fn read_text(file: &Path) -> Result<String, String> {
    let bytes = read(file, PARAM_BYTES)?;
    let bytes = bytes.ok_or_else(|| format!("{} does not exist", file.display()))?;
    String::from_utf8(bytes).map_err(|error| format!("{}: {error}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_name_or_a_path() {
        let folder = Path::new("/policies");
        for (entry, name, file, shipped) in [
            ("default", "default", "/policies/default.wasm", true),
            ("mine", "mine", "/policies/mine.wasm", false),
            ("mine.wasm", "mine", "mine.wasm", false),
            ("./mine", "mine", "./mine", false),
            ("/etc/default.wasm", "default", "/etc/default.wasm", false),
        ] {
            let (named, source) = Source::of(entry, folder).unwrap();
            assert_eq!(named, name);
            assert_eq!(source.file.as_deref(), Some(Path::new(file)), "{entry}");
            assert_eq!(source.shipped.is_some(), shipped, "{entry}");
        }
        assert!(Source::of("default", Path::new("")).unwrap().1.file.is_none());
        for entry in ["", "a b", "..", "ä", &"x".repeat(65)] {
            let error = Source::of(entry, folder).err().expect(entry).to_string();
            assert!(error.contains("is not the name of a policy"), "{error}");
        }
    }
}
