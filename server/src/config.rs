//! The configuration file: `[server]` and the engine's sections.
//!
//! Read from TOML ([`read`]), overridden by the command line, then checked once ([`problems`]). Unknown keys are
//! errors. All problems of a file are reported, each with its line.

mod entry;
pub mod mcp;
mod models;
mod problems;
mod read;
mod unit;
mod upstreams;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use secrecy::SecretString;
use serde::Deserialize;
use steersman_engine::config::{
    Config, EngineConfig, MachineCosts, ModelConfig, Profile, ProfileLimits, SpeculationConfig,
    StoreConfig,
};
use steersman_engine::policy::{
    Counted, Grant, OnFailure, Param, PolicyConfig, ProfilePolicies, deserialize_params,
};
use steersman_engine::request::Sampling;
use steersman_upstream::UpstreamConfig;
use tokio::sync::watch;

use self::mcp::McpConfig;
pub use self::models::OnDemandConfig;
pub use self::problems::{is_listened_on, out_of};
use self::problems::{problems_of_engine, problems_of_keys};
pub use self::read::{Problem, Source};
pub(crate) use self::unit::Unit;

/// Tells of new configurations while the server runs.
pub type Reloads = watch::Receiver<Option<Arc<ServerConfig>>>;

/// A whole configuration file. `configs/steersman.toml` shows every key with its default.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FileConfig {
    /// Address, keys and limits of the HTTP server.
    pub server: ServerConfig,
    /// Weights, device and numeric format. `path` is a local folder or a Hugging Face repo id
    /// (`owner/name`); empty serves the bundled demonstration model.
    pub model: ModelConfig,
    /// Limits of the engine thread.
    pub engine: EngineConfig,
    /// Drafts that the model verifies. `draft_model` is a local folder or a Hugging Face repo id.
    pub speculation: SpeculationConfig,
    /// Saved state.
    pub store: StoreConfig,
    /// Limits and locations of policies.
    pub policy: PolicyConfig,
    /// Servers whose tools profiles grant to their requests.
    pub mcp: McpConfig,
    /// Models that are loaded on demand, by name.
    pub models: BTreeMap<String, OnDemandConfig>,
    /// Servers that compute models, by name.
    pub upstreams: BTreeMap<String, UpstreamConfig>,
    /// Further names of models: `MODEL` or `MODEL@PROFILE` by alias.
    pub aliases: BTreeMap<String, String>,
    /// Profiles by name.
    pub profiles: BTreeMap<String, ProfileConfig>,
    /// The file, and lines of its keys.
    #[serde(skip)]
    pub source: Source,
}

/// `[server]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// Address to listen on. The default accepts connections from this machine only.
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// Keys that clients send as `Authorization: Bearer KEY`; an empty list requires no key.
    pub api_keys: Vec<SecretString>,
    /// Keys of operators, who may also replace policies; an empty list allows nobody to.
    pub admin_keys: Vec<SecretString>,
    /// Names of the server, besides those of this machine, that `Host` may have.
    pub hosts: Vec<String>,
    /// Origins of web pages that may use the server; `*` allows all.
    pub cors: Vec<String>,
    /// Maximum number of open connections; 0 derives it from the limit on open files.
    pub max_connections: usize,
    /// Maximum number of open connections from one address other than this machine; 0 is half of
    /// `max_connections`.
    pub max_connections_per_address: usize,
    /// Seconds within which a connection must send the head of its next request.
    pub idle_timeout_s: u64,
    /// Maximum size of a request's body in bytes.
    pub body_limit_bytes: usize,
    /// Maximum number of bytes of all larger bodies whose requests are read, wait or run.
    pub body_budget_bytes: usize,
    /// Seconds within which a request's body must arrive.
    pub body_timeout_s: u64,
    /// Seconds within which a request must end.
    pub request_timeout_s: u64,
    /// Maximum number of bytes of stored responses; 0 stores none.
    pub responses_bytes: u64,
    /// Days after which a stored response is deleted.
    pub responses_days: u64,
    /// Most bytes of the weights of all loaded models; 0 derives it from the memory.
    pub models_bytes: u64,
    /// Seconds that a request waits while there is no room for its model.
    pub model_wait_s: u64,
    /// Seconds that running requests may take to finish after Ctrl-C or SIGTERM.
    pub shutdown_s: u64,
    /// `[mcp]`
    #[serde(skip)]
    pub mcp: McpConfig,
    /// [`PolicyConfig::trace_requests`]
    #[serde(skip)]
    pub trace_requests: usize,
    /// Access to profiles by name, from their own sections.
    #[serde(skip)]
    pub profiles: BTreeMap<String, ProfileAccess>,
    /// [`ProfileConfig::model`] by profile, where it is set.
    #[serde(skip)]
    pub profile_models: BTreeMap<String, String>,
    /// [`FileConfig::models`]
    #[serde(skip)]
    pub models: BTreeMap<String, OnDemandConfig>,
    /// [`FileConfig::upstreams`]
    #[serde(skip)]
    pub upstreams: BTreeMap<String, UpstreamConfig>,
    /// [`FileConfig::aliases`]
    #[serde(skip)]
    pub aliases: BTreeMap<String, String>,
}

/// Access to one profile, and what it grants.
#[derive(Debug, Clone, Default)]
pub struct ProfileAccess {
    /// Keys that select this profile and open no other.
    pub api_keys: Vec<SecretString>,
    /// Maximum number of requests that wait or run; 0 for no limit.
    pub requests: usize,
    /// MCP servers (SERVER) and tools (SERVER__TOOL) that its requests may use.
    pub mcp: Vec<String>,
    /// Upstreams (UPSTREAM) and their models (UPSTREAM/MODEL) that its requests may name.
    pub upstreams: Vec<String>,
    /// [`ProfilePolicies::trace_text`]
    pub trace_text: bool,
    /// Names of HTTP headers whose values the policies see, in lower case.
    pub policy_headers: Vec<String>,
    /// The other settings, for display: the engine has its own.
    pub settings: Profile,
}

/// `[profiles.NAME]`: the policies, limits and keys of a group of requests.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProfileConfig {
    /// Model of the profile: a name in `[models]`, UPSTREAM/MODEL, or a path as `model.path`; empty for that of
    /// `[model]`.
    /// Each model is loaded once.
    pub model: String,
    /// [`ProfilePolicies::policies`]
    pub policies: Vec<String>,
    /// [`ProfilePolicies::shadow`]
    pub shadow: Vec<String>,
    /// [`ProfilePolicies::on_failure`]
    pub on_failure: OnFailure,
    /// [`ProfilePolicies::grants`]
    pub grants: Vec<Grant>,
    /// [`ProfilePolicies::params`]
    #[serde(deserialize_with = "deserialize_params")]
    pub params: BTreeMap<String, Param>,
    /// [`ProfilePolicies::trace_text`]
    pub trace_text: bool,
    /// [`ProfileAccess::api_keys`]
    pub api_keys: Vec<SecretString>,
    /// [`ProfileAccess::mcp`]
    pub mcp: Vec<String>,
    /// [`ProfileAccess::upstreams`]
    pub upstreams: Vec<String>,
    /// [`ProfileAccess::policy_headers`]
    pub policy_headers: Vec<String>,
    /// [`Profile::routes`]
    pub routes: Vec<String>,
    /// Limits of the requests of this profile.
    pub limits: LimitsConfig,
    /// [`Profile::warm`]
    pub warm: Vec<PathBuf>,
    /// [`Profile::sampling`]
    pub sampling: Option<Sampling>,
}

/// `[profiles.NAME.limits]`; 0 is no limit.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// [`ProfileLimits::prompt_tokens`]
    pub prompt_tokens: usize,
    /// [`ProfileLimits::reasoning_budget`]
    #[serde(rename = "think_budget")]
    pub reasoning_budget: u32,
    /// [`ProfileLimits::max_tokens`]
    pub max_tokens: u32,
    /// [`ProfileLimits::limit_counts`]
    pub limit_counts: LimitCounts,
    /// [`ProfileAccess::requests`]
    pub requests: usize,
}

/// `limits.limit_counts`
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LimitCounts {
    /// What the client's API says, or the answer if the client did not ask for reasoning.
    #[default]
    Api,
    /// Answer and tool calls.
    Answer,
    /// The whole reply.
    Reply,
}

impl LimitCounts {
    fn counted(self) -> Option<Counted> {
        match self {
            Self::Api => None,
            Self::Answer => Some(Counted::Answer),
            Self::Reply => Some(Counted::Reply),
        }
    }
}

impl Default for ProfileConfig {
    fn default() -> Self {
        let ProfilePolicies { policies, shadow, on_failure, grants, params, trace_text } =
            ProfilePolicies::default();
        Self {
            model: String::new(),
            policies,
            shadow,
            on_failure,
            grants,
            params,
            trace_text,
            api_keys: Vec::new(),
            mcp: Vec::new(),
            upstreams: Vec::new(),
            policy_headers: Vec::new(),
            routes: Vec::new(),
            limits: LimitsConfig::default(),
            warm: Vec::new(),
            sampling: None,
        }
    }
}

impl ProfileConfig {
    /// Splits the section into the engine's and the server's part.
    fn split(self) -> (Profile, ProfileAccess) {
        let LimitsConfig { prompt_tokens, reasoning_budget, max_tokens, limit_counts, requests } =
            self.limits;
        let limit_counts = limit_counts.counted();
        let policy = ProfilePolicies {
            policies: self.policies,
            shadow: self.shadow,
            on_failure: self.on_failure,
            grants: self.grants,
            params: self.params,
            trace_text: self.trace_text,
        };
        let profile = Profile {
            policy,
            limits: ProfileLimits { prompt_tokens, reasoning_budget, max_tokens, limit_counts },
            routes: self.routes,
            warm: self.warm,
            sampling: self.sampling,
        };
        let Self { api_keys, mcp, upstreams, trace_text, policy_headers, .. } = self;
        let settings = profile.clone();
        let access = ProfileAccess {
            api_keys,
            requests,
            mcp,
            upstreams,
            trace_text,
            policy_headers,
            settings,
        };
        (profile, access)
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 11436,
            api_keys: Vec::new(),
            admin_keys: Vec::new(),
            hosts: Vec::new(),
            cors: Vec::new(),
            max_connections: 0,
            max_connections_per_address: 0,
            idle_timeout_s: 30,
            body_limit_bytes: 16 << 20,
            body_budget_bytes: 256 << 20,
            body_timeout_s: 30,
            request_timeout_s: 3600,
            responses_bytes: 256 << 20,
            responses_days: 30,
            models_bytes: 0,
            model_wait_s: 60,
            shutdown_s: 10,
            mcp: McpConfig::default(),
            trace_requests: PolicyConfig::default().trace_requests,
            profiles: BTreeMap::new(),
            profile_models: BTreeMap::new(),
            models: BTreeMap::new(),
            upstreams: BTreeMap::new(),
            aliases: BTreeMap::new(),
        }
    }
}

/// Most bytes of a configuration, and of a file that it names.
pub const FILE_BYTES: u64 = 16 << 20;

impl FileConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, is not TOML, or contains an unknown key or value; the message names the
    /// file, and all problems with their lines, also those of [`Self::problems`].
    pub fn read(path: &Path) -> Result<Self> {
        let (file, problems) = Self::recover(path)?;
        ensure!(problems.is_empty(), file.source.message(&problems));
        Ok(file)
    }

    /// Reads a file as far as it can be read. Returns it without what cannot be read, and the problems of that; if there
    /// are any, also those of [`Self::problems`].
    ///
    /// # Errors
    /// If there is no text to read; the message names the file.
    pub fn recover(path: &Path) -> Result<(Self, Vec<Problem>)> {
        let text = steersman_files::read_text(path, FILE_BYTES)
            .with_context(|| format!("reading the configuration {}", path.display()))?;
        let (mut file, problems) = read::read(&text);
        file.source.path = Some(path.into());
        Ok((file, problems))
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// If it is not TOML, or contains an unknown key or value; the message has all problems with their lines, also those of
    /// [`Self::problems`].
    pub fn parse(text: &str) -> Result<Self> {
        let (file, problems) = read::read(text);
        ensure!(problems.is_empty(), file.source.message(&problems));
        Ok(file)
    }

    /// Checks all values, and splits them into the server's and the engine's.
    ///
    /// # Errors
    /// Names all keys that are out of range.
    pub fn check(self) -> Result<(ServerConfig, Config)> {
        let problems = self.problems().into_iter().map(|problem| self.source.locate(problem));
        let problems: Vec<_> = problems.collect();
        ensure!(problems.is_empty(), self.source.message(&problems));
        let (server, engine) = self.split();
        Ok((server, engine.check()?))
    }

    /// Values that are out of range, by key.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = self.server.problems();
        let keys = self.profiles.iter().map(|(name, profile)| {
            (format!("profiles.{name}.api_keys"), profile.api_keys.as_slice())
        });
        let of_server = [
            ("server.api_keys".to_string(), self.server.api_keys.as_slice()),
            ("server.admin_keys".to_string(), self.server.admin_keys.as_slice()),
        ];
        problems.extend(problems_of_keys(of_server.into_iter().chain(keys)));
        problems.extend(self.mcp.problems());
        problems.extend(self.problems_of_models());
        problems.extend(self.problems_of_upstreams());
        for (name, profile) in &self.profiles {
            problems.extend(profile.problems(name));
            let key = format!("profiles.{name}.mcp");
            problems.extend(self.mcp.problems_of_grants(&key, &profile.mcp));
        }
        problems.extend(problems_of_engine(&self.clone().split().1));
        problems
    }

    /// The server's part and the engine's.
    pub fn split(self) -> (ServerConfig, Config) {
        let Self { mut server, model, engine, speculation, store, policy, mcp, models, .. } = self;
        let (aliases, sections) = (self.aliases, self.profiles);
        (server.models, server.aliases) = (models, aliases);
        server.upstreams = self.upstreams;
        (server.mcp, server.trace_requests) = (mcp, policy.trace_requests);
        let mut profiles = BTreeMap::new();
        for (name, mut section) in sections {
            let model = std::mem::take(&mut section.model);
            if !model.is_empty() {
                server.profile_models.insert(name.clone(), model);
            }
            let (profile, access) = section.split();
            profiles.insert(name.clone(), profile);
            server.profiles.insert(name, access);
        }
        server.profiles.entry("default".into()).or_default();
        let machine = MachineCosts::Measured;
        (server, Config { model, engine, speculation, store, policy, machine, profiles })
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;

    /// All files in `configs/`, by path.
    fn files() -> Vec<std::path::PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect()
    }

    #[test]
    fn policies_get_no_headers_that_hold_keys() {
        let problems = |headers: &str| {
            let text = format!("[profiles.a]\npolicy_headers = {headers}");
            FileConfig::parse(&text).unwrap().problems()
        };
        assert_eq!(problems("['x-team', 'user-agent']"), [""; 0]);
        for secret in ["authorization", "x-api-key", "cookie"] {
            let problems = problems(&format!("['{secret}']"));
            assert!(problems[0].starts_with("profiles.a.policy_headers: "), "{problems:?}");
            assert!(problems[0].contains("has keys"), "{problems:?}");
        }
        for wrong in ["X-Team", "x team", ""] {
            let problems = problems(&format!("['{wrong}']"));
            assert!(problems[0].contains("is not the name of a header in lower case"), "{wrong}");
        }
    }

    #[test]
    fn params_are_texts_or_files_for_all_policies_or_one() {
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
        let wrong = read("budget = [1]").unwrap_err();
        assert!(wrong.contains("budget") && wrong.contains("{ file = \"PATH\" }"), "{wrong}");
        // Policies get texts.
        let params =
            read("budget = 100\nagent = { strict = true, share = 0.5, sum = -7 }").unwrap();
        let expected: [(&str, Param); 4] = [
            ("agent.share", "0.5".into()),
            ("agent.strict", "true".into()),
            ("agent.sum", "-7".into()),
            ("budget", "100".into()),
        ];
        assert_eq!(params, expected.map(|(key, param)| (key.to_owned(), param)).into());
    }

    #[test]
    fn every_file_in_configs_is_valid() {
        assert!(!files().is_empty());
        for path in files() {
            FileConfig::read(&path).unwrap().check().unwrap();
        }
    }

    #[test]
    fn shown_configuration_equals_the_default() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/steersman.toml");
        let (server, engine) = FileConfig::read(&path).unwrap().check().unwrap();
        let (default_server, default_engine) = FileConfig::default().check().unwrap();
        assert_eq!(engine, default_engine);
        // Secrets cannot be compared; by default there are none.
        assert_eq!(format!("{server:?}"), format!("{default_server:?}"));
    }

    /// Catches keys that are in the code but not in the file: the error for an unknown key lists all
    /// known keys.
    #[test]
    fn shown_configuration_has_every_key() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/steersman.toml");
        let text = std::fs::read_to_string(path).unwrap();
        for section in [
            "server",
            "model",
            "engine",
            "speculation",
            "store",
            "policy",
            "mcp",
            "mcp.servers.x",
            "models.x",
            "upstreams.x",
            "upstreams.x.capabilities",
            "profiles.x",
            "profiles.x.sampling",
            "profiles.x.limits",
        ] {
            let error = toml::from_str::<FileConfig>(&format!("[{section}]\nno_such_key = 1"));
            let error = error.unwrap_err().to_string();
            let (_, known) = error.split_once("expected one of").expect("the keys are listed");
            for key in known.split('`').skip(1).step_by(2) {
                let is_section = |line: &str| {
                    line.contains(&format!(".{key}]")) || line.contains(&format!(".{key}."))
                };
                let shown = |line: &str| line.starts_with(key) || is_section(line);
                // A key without a default is in a comment.
                let lines = text.lines().map(|line| line.trim_start_matches("# "));
                assert!(lines.into_iter().any(shown), "{section}.{key} is not in steersman.toml");
            }
        }
    }

    #[test]
    fn errors_name_the_file_the_line_and_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        for (text, expected) in [
            ("[server]\nprot = 1\n", &["mine.toml", "line 2", "`prot`", "`port`"][..]),
            ("[sever]\n", &["line 1", "`sever`", "`server`"]),
            ("\n\n[server]\nport = \"x\"\n", &["line 4", "port: is \"x\"", "from 0 to 65535"]),
            ("[server]\nport = 70000\n", &["line 2", "port: is 70000", "from 0 to 65535"]),
            ("[model]\ndevice = \"tpu\"\n", &["line 2", "\"tpu\"", "\"gpu\""]),
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
    fn values_out_of_range_are_rejected_by_key() {
        for (text, key) in [
            ("[server]\nhost = \"\"", "server.host"),
            ("[server]\napi_keys = [\"a\", \"\"]", "server.api_keys"),
            ("[server]\nadmin_keys = [\" a\"]", "server.admin_keys"),
            ("[server]\nbody_limit_bytes = 0", "server.body_limit_bytes"),
            ("[server]\nbody_timeout_s = 0", "server.body_timeout_s"),
            ("[server]\nbody_budget_bytes = 2048", "server.body_budget_bytes"),
            ("[server]\nidle_timeout_s = 0", "server.idle_timeout_s"),
            ("[server]\nrequest_timeout_s = 0", "server.request_timeout_s"),
            ("[server]\nresponses_days = 0", "server.responses_days"),
            ("[server]\nshutdown_s = 9223372036854775807", "server.shutdown_s"),
            ("[server]\nmax_connections = 2305843009213693952", "server.max_connections"),
            ("[server]\nhosts = [\"model.lan:80\"]", "server.hosts"),
            ("[server]\nhosts = [\"\"]", "server.hosts"),
            ("[server]\ncors = [\"model.lan\"]", "server.cors"),
            ("[server]\ncors = [\"http://model.lan/\"]", "server.cors"),
            ("[engine]\nqueue = 0", "engine.queue"),
            ("[engine]\nqueue = 2305843009213693952", "engine.queue"),
            ("[engine]\ncontext = 1", "engine.context"),
            ("[profiles.\"a@b\"]", "profiles.a@b: has a name"),
            ("[profiles.\"\"]", "profiles.: has a name"),
            ("[profiles.\"a\\nb\"]", "profiles.a\\nb: has a name"),
            ("[profiles.a]\nlimits.requests = 99999999", "profiles.a.limits.requests"),
            ("[profiles.a.sampling]\ntemperature = nan", "temperature is NaN"),
            ("[profiles.a.sampling]\ntemperature = -1.0", "temperature is -1"),
            ("[profiles.a.sampling]\ntemperature = 9.0", "temperature is 9"),
            ("[profiles.a.sampling]\ntop_p = 0.0", "top_p is 0"),
            ("[profiles.a.sampling]\ntop_p = 5.0", "top_p is 5"),
            ("[profiles.a.sampling]\nmin_p = 2.0", "min_p is 2"),
        ] {
            let error = toml::from_str::<FileConfig>(text).unwrap().check().unwrap_err();
            assert!(error.to_string().contains(key), "`{key}` is not in {error}");
        }
    }

    #[test]
    fn problems_of_all_sections_and_profiles_are_found() {
        let text = "[server]\nbody_timeout_s = 0\ncors = ['x']\n[engine]\nqueue = 0\ncontext = 1\n\
                    [store]\nmin_tokens = 0\n[profiles.a.sampling]\ntop_p = 5.0\n\
                    [profiles.b]\npolicies = []";
        let problems = FileConfig::parse(text).unwrap().problems();
        let expected = [
            "server.body_timeout_s: is 0",
            "server.cors: `x`",
            "engine.queue: is 0",
            "engine.context: is 1",
            "store.min_tokens: is 0",
            "profiles.a.sampling: top_p is 5",
            "profiles.b: names no policy",
        ];
        assert_eq!(problems.len(), expected.len(), "{problems:?}");
        for (problem, words) in problems.iter().zip(expected) {
            assert!(problem.contains(words), "`{words}` is not in {problem}");
        }
    }

    #[test]
    fn api_keys_are_unique_and_never_printed() {
        let check = |text: &str| toml::from_str::<FileConfig>(text).unwrap().check();
        let twice = "[server]\napi_keys = [\"a\"]\n[profiles.x]\napi_keys = [\"a\"]";
        let error = check(twice).unwrap_err().to_string();
        assert!(error.contains("profiles.x.api_keys"), "{error}");
        assert!(error.contains("server.api_keys"), "{error}");
        let text = "[server]\napi_keys = [\"sk-a\"]\n[profiles.x]\napi_keys = [\"sk-b\"]\nlimits.requests = 3";
        let (server, _) = check(text).unwrap();
        let profile = &server.profiles["x"];
        let keys: Vec<_> = profile.api_keys.iter().map(ExposeSecret::expose_secret).collect();
        assert_eq!((keys, profile.requests), (vec!["sk-b"], 3));
        let printed = format!("{server:?}");
        assert!(!printed.contains("sk-"), "{printed}");
    }
}
