//! The models that the server loads, and the profiles that use each of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use steersman_engine::Engine;
use steersman_engine::config::{Config, Profile};
use steersman_engine::policy::Policies;

use crate::hub::{self, Found};

/// The engines of this server, one for each model. The first serves `[model]` and every profile
/// without a model of its own.
#[derive(Clone)]
pub struct Models {
    engines: Vec<Engine>,
    /// Index into `engines`, by profile.
    of_profile: BTreeMap<String, usize>,
}

impl From<Engine> for Models {
    /// One model for all profiles.
    fn from(engine: Engine) -> Self {
        let of_profile =
            engine.info().profiles.iter().map(|profile| (profile.clone(), 0)).collect();
        Self { engines: vec![engine], of_profile }
    }
}

impl Models {
    /// Adds a model for `profiles`.
    pub fn add(&mut self, engine: Engine, profiles: &[String]) {
        let index = self.engines.len();
        self.of_profile.extend(profiles.iter().map(|profile| (profile.clone(), index)));
        self.engines.push(engine);
    }

    /// The engine of a profile.
    pub fn of(&self, profile: &str) -> Option<&Engine> {
        Some(&self.engines[*self.of_profile.get(profile)?])
    }

    /// The engine of `[model]`.
    pub fn first(&self) -> &Engine {
        &self.engines[0]
    }

    /// The engine of a model.
    pub fn named(&self, model: &str) -> Option<&Engine> {
        self.engines.iter().find(|engine| engine.info().model == model)
    }

    /// All engines, that of `[model]` first.
    pub fn engines(&self) -> &[Engine] {
        &self.engines
    }

    /// The policies, which all models share.
    pub fn policies(&self) -> &Arc<Policies> {
        self.first().policies()
    }

    /// Names for clients, with their engines: the first model's, and `model@profile` for each profile
    /// but `default`.
    pub fn names(&self) -> Vec<(String, &Engine)> {
        let first = self.first();
        let mut names = vec![(first.info().model.clone(), first)];
        for (profile, &index) in self.of_profile.iter().filter(|(name, _)| *name != "default") {
            let engine = &self.engines[index];
            names.push((format!("{}@{profile}", engine.info().model), engine));
        }
        names
    }

    /// The engine and the profile, if any, of a name that a client sends: `model` or
    /// `model@profile`, also with Ollama's tag `:latest`. `None` if that is not served.
    pub fn resolve<'a>(&self, name: &'a str) -> Option<(&Engine, Option<&'a str>)> {
        self.resolve_exactly(name).or_else(|| self.resolve_exactly(name.strip_suffix(":latest")?))
    }

    fn resolve_exactly<'a>(&self, name: &'a str) -> Option<(&Engine, Option<&'a str>)> {
        if let Some(engine) = self.named(name) {
            return Some((engine, None));
        }
        // A model's name may itself contain an `@`.
        self.of_profile.iter().find_map(|(profile, &index)| {
            let model = name.strip_suffix(profile.as_str())?.strip_suffix('@')?;
            let (engine, profile) = (&self.engines[index], &name[model.len() + 1..]);
            (engine.info().model == model).then_some((engine, Some(profile)))
        })
    }
}

/// Models with running engines.
pub struct Loaded {
    /// The models and their engines.
    pub models: Models,
    /// The engines' threads. Each ends after the last handle to its engine; once joined, its state is
    /// on disk.
    pub threads: Vec<JoinHandle<()>>,
    /// Whether the first model is the bundled demonstration model.
    pub bundled: bool,
}

/// Loads the model of `[model]` and `profile_models`, which maps profiles to models, downloading repos
/// that are not cached. State is saved in the folder `data_dir`, in one file for each model.
///
/// # Errors
/// If a model cannot be found, downloaded or loaded; names its profiles.
pub fn load(
    mut config: Config,
    profile_models: &BTreeMap<String, String>,
    data_dir: &Path,
    policies: &Arc<Policies>,
) -> Result<Loaded> {
    let further = further_models(&config, profile_models);
    // Each engine gets the profiles that use its model.
    config.profiles.retain(|name, _| !profile_models.contains_key(name));
    let start = |config: Config, found: &Found| {
        steersman_engine::start(config, &found.folder, data_dir, policies.clone())
            .with_context(|| format!("loading the model in {}", found.folder.display()))
    };
    let found = find(&mut config, data_dir)?;
    let bundled = found.bundled;
    let (engine, thread) = start(config, &found)?;
    let (mut models, mut threads) = (Models::from(engine), vec![thread]);
    for mut config in further {
        let profiles: Vec<_> = config.profiles.keys().cloned().collect();
        let found = find(&mut config, data_dir).with_context(|| of_profiles(&profiles))?;
        if models.named(&config.model.name).is_some() {
            bail!(
                "{}: another model has the name {} already",
                of_profiles(&profiles),
                config.model.name
            );
        }
        config.store.path = store_of(&config.store.file(data_dir), &config.model.name);
        let (engine, thread) = start(config, &found).with_context(|| of_profiles(&profiles))?;
        models.add(engine, &profiles);
        threads.push(thread);
    }
    Ok(Loaded { models, threads, bundled })
}

/// Locates the files of the model and the draft model, downloading repos that are not cached, and
/// writes their names into `config`.
///
/// # Errors
/// If a model cannot be found or downloaded.
pub fn find(config: &mut Config, data_dir: &Path) -> Result<Found> {
    let found = hub::find(&config.model.path, data_dir)?;
    if config.model.name.is_empty() {
        config.model.name.clone_from(&found.name);
    }
    if !config.speculation.draft_model.is_empty() {
        let draft = hub::find(&config.speculation.draft_model, data_dir)
            .context("speculation.draft_model")?;
        config.speculation.draft_model = draft.folder.to_string_lossy().into_owned();
    }
    Ok(found)
}

/// The configuration of each model that profiles name, with these profiles.
fn further_models(config: &Config, profile_models: &BTreeMap<String, String>) -> Vec<Config> {
    let mut models: BTreeMap<&str, BTreeMap<String, Profile>> = BTreeMap::new();
    for (name, model) in profile_models {
        if let Some(profile) = config.profiles.get(name) {
            models.entry(model).or_default().insert(name.clone(), profile.clone());
        }
    }
    let of = |(path, profiles): (&str, _)| {
        let mut config = Config { profiles, ..config.clone() };
        config.model.path = path.into();
        config.model.name.clear();
        // The draft model has another vocabulary.
        config.speculation.draft_model.clear();
        config
    };
    models.into_iter().map(of).collect()
}

fn of_profiles(profiles: &[String]) -> String {
    format!("the model of profile {}", profiles.join(", "))
}

/// The state file of a further model: engines do not share one.
fn store_of(first: &Path, model: &str) -> PathBuf {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = model.chars().map(|c| if is_plain(c) { c } else { '-' }).collect();
    first.with_file_name(format!("{}-{name}.redb", first.file_stem().unwrap_or_default().display()))
}
