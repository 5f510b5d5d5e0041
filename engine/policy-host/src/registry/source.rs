//! Sources of policies and parameters: names, files, and policies inside the binary.

use std::collections::BTreeMap;
use std::fs;
use std::path::{MAIN_SEPARATOR, Path, PathBuf};

use crate::bundle::{BUNDLE_BYTES, Bundle, GOLDEN_BYTES, SCHEMA_BYTES};
use crate::config::{Param, PolicyConfig, ProfilePolicies};
use crate::error::Error;
use crate::file::read;
use crate::schema::{Schema, nearest};
use crate::shipped::{SHIPPED, Shipped};
use crate::trust::{Signer, Trust};

/// Bytes of the file of a parameter.
pub const PARAM_BYTES: usize = 256 << 10;

/// Extensions of a bundle and of a component.
const BUNDLE: &str = "steer";
const COMPONENT: &str = "wasm";

/// Extensions of the golden file and the schema of a component.
const GOLDEN: &str = "jsonl";
const SCHEMA: &str = "params.toml";

/// Most files of `policy.folder` whose names are suggested for a misspelt one.
const SUGGESTED_FILES: usize = 256;

/// Characters in the name of a policy.
const NAME_CHARS: usize = 64;

/// Where a policy is loaded from: its bundle, or else its component, or else the binary. The files need not
/// exist. `NAME` in a profile is `NAME.steer` or `NAME.wasm` in `policy.folder`; a path is one of the two.
#[derive(Clone)]
pub struct Source {
    pub component: Option<PathBuf>,
    pub bundle: Option<PathBuf>,
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
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or(entry).to_owned();
            let is_bundle = path.extension().is_some_and(|extension| extension == BUNDLE);
            let (component, bundle) =
                if is_bundle { (None, Some(path)) } else { (Some(path), None) };
            return Ok((stem, Self { component, bundle, shipped: None }));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if entry.is_empty() || entry.len() > NAME_CHARS || !entry.chars().all(allowed) {
            let problem = format!(
                "is not the name of a policy: use at most {NAME_CHARS} letters, digits, `-` and `_`; \
                 a path contains a `/` or ends in `.wasm` or `.steer`"
            );
            return Err(Error::refused(entry, problem));
        }
        let file = |extension: &str| {
            (!folder.as_os_str().is_empty()).then(|| folder.join(format!("{entry}.{extension}")))
        };
        let shipped = SHIPPED.iter().find(|shipped| shipped.name == entry);
        Ok((entry.into(), Self { component: file(COMPONENT), bundle: file(BUNDLE), shipped }))
    }

    /// Its first file; `None` if it is in the binary only.
    pub fn file(&self) -> Option<&PathBuf> {
        self.component.as_ref().or(self.bundle.as_ref())
    }

    /// Whether both have a file in common, however their paths are written, or both are in the binary only.
    fn is_same(&self, other: &Self) -> bool {
        let files = |source: &Self| {
            let files = source.component.iter().chain(&source.bundle);
            files.map(|file| file.canonicalize().unwrap_or_else(|_| absolute(file))).collect()
        };
        let (own, others): (Vec<PathBuf>, Vec<PathBuf>) = (files(self), files(other));
        own == others || own.iter().any(|file| others.contains(file))
    }

    /// Key of its version history. It contains the path: projects that share a data folder may have policies with
    /// the same name.
    pub fn identity(&self, policy: &str) -> String {
        let file = self.file().map(|file| absolute(&file.with_extension("")));
        file.map_or_else(|| policy.to_owned(), |file| file.display().to_string())
    }

    /// The file that a component, or a bundle, is written to.
    ///
    /// # Errors
    /// [`Error::NoFile`] if the policy is in the binary only; [`Error::Refused`] if its profiles name a file of the
    /// other kind.
    pub fn target(&self, policy: &str, is_bundle: bool) -> Result<&Path, Error> {
        let (target, kind) = match is_bundle {
            true => (&self.bundle, "a bundle"),
            false => (&self.component, "a component"),
        };
        match (target, self.file()) {
            (Some(target), _) => Ok(target),
            (None, None) => Err(Error::NoFile { policy: policy.into() }),
            (None, Some(named)) => {
                let problem = format!(
                    "is {kind}, and the profiles name {}; name {policy} there, for both kinds in policy.folder, \
                     or a file of this kind",
                    named.display()
                );
                Err(Error::refused(policy, problem))
            }
        }
    }

    /// Reads the bundle, or else the component and what lies beside it, if one exists.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn read(&self, policy: &str, trust: &Trust) -> Result<Option<Bundle>, String> {
        for file in self.bundle.iter().chain(&self.component) {
            let Some(bytes) = read(file, BUNDLE_BYTES)? else { continue };
            let bundle =
                Bundle::open(policy, bytes, trust).and_then(|bundle| self.complete(bundle));
            return bundle.map(Some).map_err(|problem| format!("{}: {problem}", file.display()));
        }
        Ok(None)
    }

    /// All files from which the policy is read.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        let beside = self
            .component
            .iter()
            .flat_map(|file| [GOLDEN, SCHEMA].map(|extension| file.with_extension(extension)));
        self.bundle.iter().chain(&self.component).cloned().chain(beside)
    }

    /// Adds to a component the golden file and the schema beside its file.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn complete(&self, bundle: Bundle) -> Result<Bundle, String> {
        if bundle.is_archive {
            return Ok(bundle);
        }
        let Some(component) = &self.component else { return Ok(bundle) };
        let golden = beside(component, GOLDEN, GOLDEN_BYTES)?.map(|(_, golden)| golden);
        let schema = schema_beside(component)?;
        Ok(Bundle { golden: golden.unwrap_or_default(), schema, ..bundle })
    }

    /// The policy inside the binary. Nobody signs it: it comes with the server.
    pub fn shipped(&self) -> Option<Bundle> {
        let Shipped { component, golden, .. } = self.shipped?;
        let (component, golden) = (component.to_vec(), (*golden).to_owned());
        let file = component.clone();
        Some(Bundle { component, golden, file, signer: Signer::Nobody, ..Bundle::default() })
    }

    /// The problem to report if the policy `name` does not exist.
    pub fn missing(&self, name: &str) -> String {
        let names: Vec<_> = SHIPPED.iter().map(|shipped| format!("`{}`", shipped.name)).collect();
        let own =
            self.component.as_deref().and_then(Path::parent).map(names_in).unwrap_or_default();
        let known =
            SHIPPED.iter().map(|shipped| shipped.name).chain(own.iter().map(String::as_str));
        let near = nearest(name, known).map(|near| format!("; did you mean `{near}`?"));
        let looked = match self.file() {
            Some(file) => format!("{} does not exist", file.display()),
            None => "is not a shipped policy, and policy.folder is not set".into(),
        };
        if let Some(near) = near {
            return format!("{looked}{near}");
        }
        format!(
            "{looked}; name {}, NAME for NAME.wasm in policy.folder, or the path of a component \
             (`steersman policy new` begins one)",
            names.join(", ")
        )
    }
}

/// Names of the policies in `folder`, for a suggestion: at most [`SUGGESTED_FILES`] of its files are looked at.
fn names_in(folder: &Path) -> Vec<String> {
    let files = fs::read_dir(folder).into_iter().flatten().take(SUGGESTED_FILES);
    let paths = files.filter_map(|file| Some(file.ok()?.path()));
    let is_policy = |path: &PathBuf| {
        path.extension().is_some_and(|extension| extension == COMPONENT || extension == BUNDLE)
    };
    let stems =
        paths.filter(is_policy).filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()));
    stems.collect()
}

/// The schema beside the component `component`, if it exists.
///
/// # Errors
/// The file and the problem.
pub fn schema_beside(component: &Path) -> Result<Option<Schema>, String> {
    let Some((file, text)) = beside(component, SCHEMA, SCHEMA_BYTES)? else { return Ok(None) };
    let schema = Schema::parse(&text);
    schema.map(Some).map_err(|problem| format!("{}: {problem}", file.display()))
}

/// A text beside a component, if it exists.
fn beside(
    component: &Path,
    extension: &str,
    limit: usize,
) -> Result<Option<(PathBuf, String)>, String> {
    let file = component.with_extension(extension);
    let Some(bytes) = read(&file, limit)? else { return Ok(None) };
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some((file, text))),
        Err(error) => Err(format!("{}: {error}", file.display())),
    }
}

/// A path that does not depend on the working directory.
fn absolute(file: &Path) -> PathBuf {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new(".")).canonicalize();
    match (folder, file.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => std::path::absolute(file).unwrap_or_else(|_| file.to_path_buf()),
    }
}

fn is_path(entry: &str) -> bool {
    entry.contains('/')
        || entry.contains(MAIN_SEPARATOR)
        || entry.ends_with(".wasm")
        || entry.ends_with(".steer")
}

/// The chains of all profiles, without what is no policy, the source of each policy that they name, and the problems:
/// [`Error::Refused`] if an entry is neither a name nor a path, or two files have one name.
pub fn resolve_profiles(
    config: &PolicyConfig,
    profiles: &BTreeMap<String, ProfilePolicies>,
) -> (Chains, Sources, Vec<Error>) {
    let (mut chains, mut sources, mut problems) = (Chains::new(), Sources::new(), Vec::new());
    for (name, settings) in profiles {
        let applied = settings.policies.iter().map(|entry| (entry, false));
        let mut links = Vec::new();
        for (entry, shadow) in applied.chain(settings.shadow.iter().map(|entry| (entry, true))) {
            let (policy, source) = match Source::of(entry, &config.folder) {
                Ok(found) => found,
                Err(error) => {
                    problems.push(error.in_profile(name));
                    continue;
                }
            };
            if let Some(other) = sources.get(&policy)
                && !other.is_same(&source)
            {
                let path = |source: &Source| match source.file() {
                    Some(file) => file.display().to_string(),
                    None => "the shipped policy".into(),
                };
                let problem = format!(
                    "is the name of both {} and {}; rename one of the files",
                    path(other),
                    path(&source)
                );
                problems.push(Error::refused(&policy, problem).in_profile(name));
                continue;
            }
            // A name has both files, a path one of them.
            let has_both = source.component.is_some() && source.bundle.is_some();
            if has_both || !sources.contains_key(&policy) {
                sources.insert(policy.clone(), source);
            }
            links.push((policy, shadow));
        }
        chains.insert(name.clone(), ProfileChain { links, settings: settings.clone() });
    }
    (chains, sources, problems)
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
            assert_eq!(source.component.as_deref(), Some(Path::new(file)), "{entry}");
            assert_eq!(source.shipped.is_some(), shipped, "{entry}");
        }
        assert!(Source::of("default", Path::new("")).unwrap().1.file().is_none());
        let (named, source) = Source::of("a/mine.steer", folder).unwrap();
        assert_eq!((&*named, source.component), ("mine", None));
        assert_eq!(source.bundle.as_deref(), Some(Path::new("a/mine.steer")));
        for entry in ["", "a b", "..", "ä", &"x".repeat(65)] {
            let error = Source::of(entry, folder).err().expect(entry).to_string();
            assert!(error.contains("is not the name of a policy"), "{error}");
        }
    }
}
