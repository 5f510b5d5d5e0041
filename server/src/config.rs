//! The configuration file: `[server]`, which is ours, and the engine's sections.
//!
//! Read from TOML to what the user wrote, overridden by the command line, checked once. Unknown
//! keys are errors, and an error shows the line.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use steersman_engine::config::{
    Config, EngineConfig, ModelConfig, PolicyConfig, Profile, SpeculationConfig, StoreConfig,
};

/// A whole configuration file. `configs/steersman.toml` holds every key with its default.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FileConfig {
    /// Address, keys and limits of the HTTP side.
    pub server: ServerConfig,
    /// Which weights, on which device, in which numbers.
    pub model: ModelConfig,
    /// Bounds of the engine thread.
    pub engine: EngineConfig,
    /// Guessing tokens ahead.
    pub speculation: SpeculationConfig,
    /// Saved state.
    pub store: StoreConfig,
    /// Limits on guests, for all policies.
    pub policy: PolicyConfig,
    /// Profiles by name.
    pub profiles: BTreeMap<String, Profile>,
}

/// `[server]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// Address to listen on. The default is reachable from this machine only.
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// Keys that clients may send as `Authorization: Bearer KEY`; none lets everyone in.
    pub api_keys: Vec<String>,
    /// Keys of operators, who may also replace policies; none lets nobody do that.
    pub admin_keys: Vec<String>,
    /// Most bytes of a request's body.
    pub body_limit_bytes: usize,
    /// Seconds within which a request's body must have arrived.
    pub body_timeout_s: u64,
    /// Seconds that running requests get to end after Ctrl-C or SIGTERM.
    pub shutdown_s: u64,
    /// How profiles are entered, by name: taken from their own sections.
    #[serde(skip)]
    pub profiles: BTreeMap<String, ProfileAccess>,
}

/// What of a profile is the server's to see to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProfileAccess {
    /// Keys that choose this profile, and allow no other.
    pub api_keys: Vec<String>,
    /// Most requests that wait or run; 0 for any number.
    pub requests: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 11436,
            api_keys: Vec::new(),
            admin_keys: Vec::new(),
            body_limit_bytes: 16 << 20,
            body_timeout_s: 30,
            shutdown_s: 10,
            profiles: BTreeMap::new(),
        }
    }
}

impl FileConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read, is not TOML, or has a key or value that we do not know; the message
    /// names the file and shows the line.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("reading the configuration {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("in the configuration {}", path.display()))
    }

    /// Checks all values, and parts what is the server's from what is the engine's.
    ///
    /// # Errors
    /// Names the first key that is out of range.
    pub fn check(self) -> Result<(ServerConfig, Config)> {
        let Self { mut server, model, engine, speculation, store, policy, profiles } = self;
        let engine = Config { model, engine, speculation, store, policy, profiles }.check()?;
        let access = |profile: &Profile| ProfileAccess {
            api_keys: profile.api_keys.clone(),
            requests: profile.limits.requests,
        };
        server.profiles = engine.profiles.iter().map(|(n, p)| (n.clone(), access(p))).collect();
        server.check()?;
        Ok((server, engine))
    }
}

impl ServerConfig {
    fn check(&self) -> Result<()> {
        ensure!(!self.host.is_empty(), "server.host: is empty; 127.0.0.1 is this machine only");
        for (name, keys) in [("api_keys", &self.api_keys), ("admin_keys", &self.admin_keys)] {
            ensure!(
                keys.iter().all(|key| !key.trim().is_empty() && key.trim() == key),
                "server.{name}: a key is empty, or begins or ends with a space"
            );
        }
        let mut owners = BTreeMap::new();
        let of_profiles = self.profiles.iter().flat_map(|(name, profile)| {
            profile.api_keys.iter().map(move |key| (key, format!("profiles.{name}.api_keys")))
        });
        let of_server =
            [("server.api_keys", &self.api_keys), ("server.admin_keys", &self.admin_keys)];
        let of_server = of_server
            .iter()
            .flat_map(|(name, keys)| keys.iter().map(|key| (key, (*name).to_string())));
        for (key, owner) in of_server.chain(of_profiles) {
            if let Some(other) = owners.insert(key, owner.clone()) {
                bail!("{owner}: has a key that {other} has as well; a key opens one of them");
            }
        }
        ensure!(self.body_limit_bytes >= 1024, "server.body_limit_bytes: must be at least 1024");
        ensure!(self.body_timeout_s >= 1, "server.body_timeout_s: must be at least 1");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use steersman_engine::config::Param;

    use super::*;

    /// All files in `configs/`, by path.
    fn files() -> Vec<std::path::PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect()
    }

    #[test]
    fn parameters_are_text_or_files_of_all_policies_or_of_one() {
        let read = |params: &str| {
            let text = format!("[profiles.a.params]\n{params}");
            let file = toml::from_str::<FileConfig>(&text);
            file.map(|file| file.profiles["a"].params.clone()).map_err(|e| e.to_string())
        };
        let file = |path: &str| Param::File { file: path.into() };
        let params = read(
            "budget = '1'\nown = { file = 'x' }\nhouse.rules = { file = 'y' }\n[profiles.a.params.agent]\nbudget = '2'",
        );
        let expected: [(&str, Param); 4] = [
            ("agent.budget", "2".into()),
            ("budget", "1".into()),
            ("house.rules", file("y")),
            ("own", file("x")),
        ];
        assert_eq!(params.unwrap(), expected.map(|(key, param)| (key.to_owned(), param)).into());
        let wrong = read("budget = 1").unwrap_err();
        assert!(wrong.contains("budget") && wrong.contains("{ file = \"PATH\" }"), "{wrong}");
    }

    #[test]
    fn every_file_in_configs_can_be_served_from() {
        assert!(!files().is_empty());
        for path in files() {
            FileConfig::read(&path).unwrap().check().unwrap();
        }
    }

    #[test]
    fn the_shown_configuration_is_the_default_one() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/steersman.toml");
        let shown = FileConfig::read(&path).unwrap().check().unwrap();
        assert_eq!(shown, FileConfig::default().check().unwrap());
    }

    /// A key that is added to the code and forgotten in the file fails here: the error for an
    /// unknown key lists the known ones.
    #[test]
    fn the_shown_configuration_has_every_key() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/steersman.toml");
        let text = std::fs::read_to_string(path).unwrap();
        for section in [
            "server",
            "model",
            "engine",
            "speculation",
            "store",
            "policy",
            "profiles.x",
            "profiles.x.sampling",
            "profiles.x.limits",
        ] {
            let error = toml::from_str::<FileConfig>(&format!("[{section}]\nno_such_key = 1"));
            let error = error.unwrap_err().to_string();
            let (_, known) = error.split_once("expected one of").expect("the keys are listed");
            for key in known.split('`').skip(1).step_by(2) {
                let shown =
                    |line: &str| line.starts_with(key) || line.contains(&format!(".{key}]"));
                // A key with no default is shown in a comment.
                let lines = text.lines().map(|line| line.trim_start_matches("# "));
                assert!(lines.into_iter().any(shown), "{section}.{key} is not in steersman.toml");
            }
        }
    }

    #[test]
    fn an_error_names_the_file_the_line_and_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        for (text, expected) in [
            ("[server]\nprot = 1\n", &["mine.toml", "line 2", "`prot`", "`port`"][..]),
            ("[sever]\n", &["line 1", "`sever`", "`server`"]),
            ("\n\n[server]\nport = \"x\"\n", &["line 4", "u16", "string"]),
            ("[server]\nport = 70000\n", &["line 2", "u16"]),
            ("[model]\ndevice = \"tpu\"\n", &["line 2", "`tpu`", "`gpu`"]),
            ("[profiles.x]\npolcies = []\n", &["line 2", "`polcies`", "`policies`"]),
            ("[server\n", &["line 1"]),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", FileConfig::read(&path).unwrap_err());
            for word in expected {
                assert!(error.contains(word), "`{word}` is not in {error}");
            }
        }
        let error = FileConfig::read(Path::new("/no/such.toml")).unwrap_err();
        assert!(format!("{error:#}").contains("/no/such.toml"));
    }

    #[test]
    fn a_value_out_of_range_is_refused_by_its_key() {
        for (text, key) in [
            ("[server]\nhost = \"\"", "server.host"),
            ("[server]\napi_keys = [\"a\", \"\"]", "server.api_keys"),
            ("[server]\nadmin_keys = [\" a\"]", "server.admin_keys"),
            ("[server]\nbody_limit_bytes = 0", "server.body_limit_bytes"),
            ("[server]\nbody_timeout_s = 0", "server.body_timeout_s"),
            ("[engine]\nqueue = 0", "engine.queue"),
            ("[speculation]\ndepth = 9", "speculation.depth"),
        ] {
            let error = toml::from_str::<FileConfig>(text).unwrap().check().unwrap_err();
            assert!(error.to_string().contains(key), "`{key}` is not in {error}");
        }
    }

    #[test]
    fn a_key_opens_one_thing_and_goes_to_the_server_with_its_profile() {
        let check = |text: &str| toml::from_str::<FileConfig>(text).unwrap().check();
        let twice = "[server]\napi_keys = [\"a\"]\n[profiles.x]\napi_keys = [\"a\"]";
        let error = check(twice).unwrap_err().to_string();
        assert!(error.contains("profiles.x.api_keys"), "{error}");
        assert!(error.contains("server.api_keys"), "{error}");
        let (server, _) = check("[profiles.x]\napi_keys = [\"a\"]\nlimits.requests = 3").unwrap();
        let expected = ProfileAccess { api_keys: vec!["a".into()], requests: 3 };
        assert_eq!(server.profiles["x"], expected);
    }
}
