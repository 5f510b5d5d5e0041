//! The models that are served, and which profile asks which of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use steersman_engine::Engine;
use steersman_engine::config::{Config, Profile};
use steersman_engine::policy::Policies;

use crate::hub::{self, Found};

/// All engines of this server, each with a model of its own. The first is that of `[model]`, and of
/// every profile that names none.
#[derive(Clone)]
pub struct Models {
    engines: Vec<Engine>,
    /// Index of the engine, for each profile.
    of_profile: BTreeMap<String, usize>,
}

impl From<Engine> for Models {
    /// One model, for all profiles.
    fn from(engine: Engine) -> Self {
        let of_profile =
            engine.info().profiles.iter().map(|profile| (profile.clone(), 0)).collect();
        Self { engines: vec![engine], of_profile }
    }
}

impl Models {
    /// One more model, for these profiles.
    pub fn add(&mut self, engine: Engine, profiles: &[String]) {
        let index = self.engines.len();
        self.of_profile.extend(profiles.iter().map(|profile| (profile.clone(), index)));
        self.engines.push(engine);
    }

    /// The engine that a profile asks; none where there is no such profile.
    pub fn of(&self, profile: &str) -> Option<&Engine> {
        Some(&self.engines[*self.of_profile.get(profile)?])
    }

    /// The engine of `[model]`.
    pub fn first(&self) -> &Engine {
        &self.engines[0]
    }

    /// The engine whose model has this name.
    pub fn named(&self, model: &str) -> Option<&Engine> {
        self.engines.iter().find(|engine| engine.info().model == model)
    }

    /// All of them.
    pub fn engines(&self) -> &[Engine] {
        &self.engines
    }

    /// The policies in force: one set for all models.
    pub fn policies(&self) -> &Arc<Policies> {
        self.first().policies()
    }

    /// Every name under which a client may ask, with its engine: the first model's, and
    /// `model@profile` for each further profile.
    pub fn names(&self) -> Vec<(String, &Engine)> {
        let first = self.first();
        let mut names = vec![(first.info().model.clone(), first)];
        for (profile, &index) in self.of_profile.iter().filter(|(name, _)| *name != "default") {
            let engine = &self.engines[index];
            names.push((format!("{}@{profile}", engine.info().model), engine));
        }
        names
    }

    /// What a model's name says: `Some(None)` for a model alone, `Some(Some(profile))` for
    /// `model@profile`, and none where that is not served.
    pub fn profile_in<'a>(&self, name: &'a str) -> Option<Option<&'a str>> {
        if self.named(name).is_some() {
            return Some(None);
        }
        // A model's name may have an `@` of its own.
        self.of_profile.iter().find_map(|(profile, &index)| {
            let model = name.strip_suffix(profile.as_str())?.strip_suffix('@')?;
            let asked = &name[model.len() + 1..];
            (self.engines[index].info().model == model).then_some(Some(asked))
        })
    }
}

/// Models with their engines at work.
pub struct Loaded {
    /// The models.
    pub models: Models,
    /// The engines' threads, which end with the last handle of each engine: join them, and what was
    /// saved is on disk.
    pub threads: Vec<JoinHandle<()>>,
    /// Whether the first is the bundled demonstration model.
    pub bundled: bool,
}

/// Loads the model of `[model]` and those that profiles name beside it, downloading what has to be.
/// State is kept in the folder `data_dir`, of each further model in a file of its own.
///
/// # Errors
/// What keeps one from being loaded, with the profiles that name it.
pub fn load(mut config: Config, data_dir: &Path, policies: &Arc<Policies>) -> Result<Loaded> {
    let further = further_models(&config);
    // Each model's engine sees the profiles that ask it.
    config.profiles.retain(|_, profile| profile.model.is_empty());
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
                "{}: there are two models of the name {}",
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

/// Where the model's files are, downloading them where they have to be; names them in `config`.
///
/// # Errors
/// When they cannot be found or downloaded.
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

/// A configuration for each model that profiles name beside that of `[model]`, with the profiles that
/// ask it.
fn further_models(config: &Config) -> Vec<Config> {
    let mut models: BTreeMap<&str, BTreeMap<String, Profile>> = BTreeMap::new();
    for (name, profile) in config.profiles.iter().filter(|(_, p)| !p.model.is_empty()) {
        models.entry(&profile.model).or_default().insert(name.clone(), profile.clone());
    }
    let of = |(path, profiles): (&str, _)| {
        let mut config = Config { profiles, ..config.clone() };
        config.model.path = path.into();
        config.model.name.clear();
        // It guesses for another vocabulary.
        config.speculation.draft_model.clear();
        config
    };
    models.into_iter().map(of).collect()
}

fn of_profiles(profiles: &[String]) -> String {
    format!("the model of profile {}", profiles.join(", "))
}

/// The file of saved state of a further model: one file is one engine's.
fn store_of(first: &Path, model: &str) -> PathBuf {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = model.chars().map(|c| if is_plain(c) { c } else { '-' }).collect();
    first.with_file_name(format!("{}-{name}.redb", first.file_stem().unwrap_or_default().display()))
}
