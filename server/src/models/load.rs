//! Loads the models that the server starts with, and prepares those that are loaded on demand.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use steersman_engine::EngineThread;
use steersman_engine::config::{Config, Kernels, Profile};
use steersman_engine::loading;
use steersman_engine::policy::Policies;
use steersman_engine::tools::Machine;
use steersman_files::FileName;
use steersman_models::facts::{Facts, Numbers, Unpacked};
use steersman_models::pool::{Pool, Settings};
use steersman_upstream::is_upstream_of;

use super::starter::{Recipe, Running, Starter};
use super::{Files, Models, Recipes};
use crate::config::{OnDemandConfig, ServerConfig};
use crate::hub::{self, Found, Hub};

/// The part of the memory for arrays that weights may take by default, in fifths. The rest is for running
/// requests and the prefix cache.
const WEIGHTS_FIFTHS: u64 = 4;

/// Models with running engines.
pub struct Loaded {
    /// The models and their engines.
    pub models: Models,
    /// The engines' threads. Each ends after the last handle to its engine; once joined, its state is
    /// on disk.
    pub threads: Vec<EngineThread>,
    /// Whether the first model is the bundled demonstration model.
    pub bundled: bool,
}

/// Loads the models of `[model]` and of profiles, downloading repos that are not cached, and prepares those
/// of `[models]`. State is saved in the folder `data_dir`, in one file for each model. The model of `[model]` is started by
/// `start_first`, which is [`steersman_engine::start`] unless several ranks compute it.
///
/// # Errors
/// If a model cannot be found, downloaded or loaded; names its profiles or its key. If a model of `[models]`
/// cannot fit.
pub fn load(
    mut config: Config,
    server: &ServerConfig,
    data_dir: &Path,
    policies: &Arc<Policies>,
    start_first: impl FnOnce(Config, &Path, &Path, Arc<Policies>) -> steersman_engine::Result<Running>,
) -> Result<Loaded> {
    let (machine, numbers, room) = (Machine::of(&config)?, numbers(&config)?, hub::room(&config));
    let budget = match server.models_bytes {
        0 => machine.memory_limit / 5 * WEIGHTS_FIFTHS,
        bytes => bytes,
    };
    let wait = Duration::from_secs(server.model_wait_s);
    let pool = Pool::new(Starter::default(), Vec::new(), budget, wait);

    let further = further_models(&config, server);
    let on_demand = on_demand(&config, server);
    // Each engine gets the profiles that use its model.
    let profiles = config.profiles.clone();
    // That of `[model]` may answer for an upstream.
    config.profiles.retain(|name, _| {
        server.profile_models.get(name).is_none_or(|model| is_of_upstream(server, model))
    });
    let recipes = recipes_of_cached(config.clone(), numbers, data_dir, policies);
    let start = |config: Config, found: &Found| {
        steersman_engine::start(config, &found.folder, data_dir, policies.clone())
            .with_context(|| loading_of(found))
    };
    let bytes = |found: &Found| Facts::read(&found.folder).map_or(0, |f| f.weight_bytes(numbers));
    let files = |found: &Found| -> Option<Arc<dyn Files>> {
        let folder = found.folder.clone();
        Some(Arc::new(move || Some(folder.clone())))
    };
    let load = loading::begin(&config.model.path, "finding files");
    let found = find(&mut config, data_dir)?;
    drop(load);
    let bundled = found.bundled;
    let draft = config.speculation.draft_model.clone();
    let (engine, thread) = start_first(config, &found.folder, data_dir, policies.clone())
        .with_context(|| loading_of(&found))?;
    let models = Models::new(pool, engine, bytes(&found), files(&found));
    let mut models = models.with_recipes(recipes);
    (models.numbers, models.room) = (numbers, room);
    models.draft = (!draft.is_empty()).then(|| draft.into());
    let mut threads = vec![thread];
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
        config.store.path = store_of(&config.store.file(data_dir), &config.model.name)?;
        let (engine, thread) = start(config, &found).with_context(|| of_profiles(&profiles))?;
        models.add_loaded(engine, &profiles, bytes(&found), files(&found));
        threads.push(thread);
    }
    let mut stay: u64 = models.pool.report().iter().map(|report| report.bytes).sum();
    for (name, mut config) in on_demand {
        let profiles = server.profile_models.iter().filter(|(_, model)| **model == name);
        let profiles: Vec<_> = profiles.map(|(profile, _)| profile.clone()).collect();
        config.store.path = store_of(&config.store.file(data_dir), &name)?;
        let settings = settings(&name, &server.models[&name]);
        let (path, folder) = (config.model.path.clone(), data_dir.to_path_buf());
        let key = || format!("models.{name}");
        hub::named_as(&path, room).with_context(key)?;
        let recipe = FromFiles {
            config,
            find: Box::new(move || Ok(hub::find_here(&path, room, &folder)?.folder)),
            numbers,
            data_dir: data_dir.into(),
            policies: policies.clone(),
        };
        match recipe.bytes() {
            Ok(bytes) => {
                ensure!(
                    stay + bytes <= budget,
                    "{}: the weights take about {bytes} bytes, and models that stay loaded leave \
                     {} of {budget}; choose a smaller model, or set server.models_bytes",
                    key(),
                    budget.saturating_sub(stay)
                );
                stay += if settings.pinned { bytes } else { 0 };
            }
            Err(error) => {
                tracing::warn!(model = name, error = %format!("{error:#}"), "model is not ready");
            }
        }
        models.add_on_demand(settings, Arc::new(recipe), &profiles);
    }
    models.add_upstreams(server, &profiles)?;
    models.set_aliases(server.aliases.clone());
    Ok(Loaded { models, threads, bundled })
}

fn loading_of(found: &Found) -> String {
    format!("loading the model in {}", found.folder.display())
}

/// Whether an upstream computes `model`.
fn is_of_upstream(server: &ServerConfig, model: &str) -> bool {
    is_upstream_of(model, |name| server.upstreams.contains_key(name)).is_some()
}

/// How the configured device keeps weights.
///
/// # Errors
/// If the device does not exist.
pub fn numbers(config: &Config) -> Result<Numbers> {
    let machine = Machine::of(config)?;
    let unpacked = match config.model.kernels {
        _ if machine.on_cpu && config.model.cpu_dequantize => Unpacked::All,
        Kernels::Auto if machine.on_cpu => Unpacked::WithoutKernel,
        _ => Unpacked::Nothing,
    };
    Ok(Numbers { float_bytes: machine.float_bytes, unpacked })
}

/// How `[models.NAME]` keeps a model.
pub fn settings(name: &str, config: &OnDemandConfig) -> Settings {
    let OnDemandConfig { keep_alive_s, pinned, .. } = *config;
    let keep_alive = (keep_alive_s > 0).then(|| Duration::from_secs(keep_alive_s));
    Settings { name: name.into(), keep_alive, pinned }
}

/// The recipes of models in the cache of a hub, for the profiles of `config`.
fn recipes_of_cached(
    config: Config,
    numbers: Numbers,
    data_dir: &Path,
    policies: &Arc<Policies>,
) -> Arc<Recipes> {
    let (data_dir, policies) = (data_dir.to_path_buf(), policies.clone());
    Arc::new(move |cache: &Hub, id: &str| -> Result<Arc<dyn Recipe>> {
        let mut config = of_path(&config, id, config.profiles.clone());
        config.model.name = id.into();
        config.store.path = store_of(&config.store.file(&data_dir), id)?;
        let (cache, id) = (cache.clone(), id.to_string());
        Ok(Arc::new(FromFiles {
            config,
            find: Box::new(move || cache.cached_or_error(&id)),
            numbers,
            data_dir: data_dir.clone(),
            policies: policies.clone(),
        }))
    })
}

/// A model whose files are a folder or a cached repo.
struct FromFiles {
    config: Config,
    /// Finds its folder or GGUF file.
    find: Box<dyn Fn() -> Result<PathBuf> + Send + Sync>,
    numbers: Numbers,
    data_dir: PathBuf,
    policies: Arc<Policies>,
}

impl Recipe for FromFiles {
    fn folder(&self) -> Result<PathBuf> {
        (self.find)()
    }

    fn bytes(&self) -> Result<u64> {
        Ok(Facts::read(&self.folder()?)?.weight_bytes(self.numbers))
    }

    fn start(&self) -> Result<Running> {
        let (config, folder) = (self.config.clone(), self.folder()?);
        steersman_engine::start(config, &folder, &self.data_dir, self.policies.clone())
            .with_context(|| format!("loading the model in {}", folder.display()))
    }
}

/// Locates the files of the model and the draft model, downloading repos that are not cached, and
/// writes their names into `config`.
///
/// # Errors
/// If a model cannot be found or downloaded.
pub fn find(config: &mut Config, data_dir: &Path) -> Result<Found> {
    let room = hub::room(config);
    let found = hub::find(&config.model.path, room, data_dir)?;
    if config.model.name.is_empty() {
        config.model.name.clone_from(&found.name);
    }
    if !config.speculation.draft_model.is_empty() {
        let draft = hub::find(&config.speculation.draft_model, room, data_dir)
            .context("speculation.draft_model")?;
        config.speculation.draft_model = draft.folder.to_string_lossy().into_owned();
    }
    Ok(found)
}

/// The configuration of each model that profiles name by its path, with these profiles.
fn further_models(config: &Config, server: &ServerConfig) -> Vec<Config> {
    let mut models: BTreeMap<&str, BTreeMap<String, Profile>> = BTreeMap::new();
    for (name, model) in &server.profile_models {
        if let Some(profile) = config.profiles.get(name)
            && !server.models.contains_key(model)
            && !is_of_upstream(server, model)
        {
            models.entry(model).or_default().insert(name.clone(), profile.clone());
        }
    }
    models.into_iter().map(|(path, profiles)| of_path(config, path, profiles)).collect()
}

/// The configuration of each model of `[models]` by name, with the profiles that may use it: those that name
/// it, and those without a model of their own.
fn on_demand(config: &Config, server: &ServerConfig) -> Vec<(String, Config)> {
    let of = |(name, model): (&String, &OnDemandConfig)| {
        let may_use =
            |profile: &String| server.profile_models.get(profile).is_none_or(|own| own == name);
        let profiles = config.profiles.iter().filter(|(profile, _)| may_use(profile));
        let profiles = profiles.map(|(name, profile)| (name.clone(), profile.clone())).collect();
        let mut config = of_path(config, &model.path, profiles);
        config.model.name.clone_from(name);
        (name.clone(), config)
    };
    server.models.iter().map(of).collect()
}

/// `config` for another model than that of `[model]`.
fn of_path(config: &Config, path: &str, profiles: BTreeMap<String, Profile>) -> Config {
    let mut config = Config { profiles, ..config.clone() };
    config.model.path = path.into();
    config.model.name.clear();
    // The draft model has another vocabulary.
    config.speculation.draft_model.clear();
    config
}

fn of_profiles(profiles: &[String]) -> String {
    format!("the model of profile {}", profiles.join(", "))
}

/// The state file of a further model: engines do not share one.
///
/// # Errors
/// If the name is too long for a file.
fn store_of(first: &Path, model: &str) -> Result<PathBuf> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = model.chars().map(|c| if is_plain(c) { c } else { '-' }).collect();
    let stem = first.file_stem().unwrap_or_default().display();
    let name = FileName::new(&format!("{stem}-{name}.redb"))?;
    Ok(name.within(first.parent().unwrap_or(Path::new(""))))
}
