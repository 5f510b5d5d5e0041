//! The models that the server serves: their names, the profiles that use them, and their engines.
//!
//! The model of `[model]` and those of profiles are loaded when the server starts, and stay. Those of
//! `[models]` are loaded on demand, within the bytes of `server.models_bytes`: `steersman_models::pool` has
//! the rules. A request holds a [`Lease`] until its reply has ended.
//!
//! The list of models grows while the server runs, by those that an operator serves from the hub's cache (`cached`).
//! A model keeps its index for ever.

mod backend;
mod cached;
mod load;
mod starter;
mod upstream;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::RwLock;
use steersman_engine::policy::Policies;
use steersman_engine::{Engine, EngineThread};
use steersman_models::facts::{Facts, Numbers, Unpacked};
use steersman_models::pool::{self, Pool, Report};
pub use steersman_models::pool::{Refusal, Settings, State};
use steersman_upstream::Upstream;
use tokio::time::Instant;

pub use self::backend::Backend;
pub use self::cached::NamedBy;
pub use self::load::{Loaded, find, load, numbers};
use self::starter::Starter;
pub use self::starter::{Recipe, Recipes, Running};
pub use self::upstream::problems_of_continuation;

/// How long a request waits for room if nothing says so; see `server.model_wait_s`.
const WAIT: Duration = Duration::from_secs(60);

/// The right of a request to use a loaded model.
pub type Lease = pool::Lease<Starter>;

/// The models of this server. The first is that of `[model]`, which every profile without a model of its own
/// uses. Cheap to clone.
#[derive(Clone)]
pub struct Models {
    pool: Pool<Starter>,
    /// By index, as in the pool, which knows those that were withdrawn.
    served: Arc<RwLock<Vec<Served>>>,
    /// How models in the hub's cache are loaded; `None` if none may be served.
    recipes: Option<Arc<Recipes>>,
    /// Index of the model, by profile.
    of_profile: BTreeMap<String, usize>,
    /// Further names, and what they stand for.
    aliases: Arc<RwLock<BTreeMap<String, String>>>,
    policies: Arc<Policies>,
    /// How engines keep weights.
    numbers: Numbers,
    upstreams: Vec<Upstream>,
    /// The files of the model that drafts for the first one.
    draft: Option<PathBuf>,
}

#[derive(Clone)]
struct Served {
    /// The name for clients.
    name: String,
    named_by: NamedBy,
    on_demand: bool,
    /// The profiles that may use it by name, if it is a model of an upstream.
    granted: Option<BTreeSet<String>>,
    files: Option<Arc<dyn Files>>,
    facts: Arc<OnceLock<Arc<Facts>>>,
}

impl Served {
    /// A model that `recipe` loads.
    fn on_demand(name: &str, named_by: NamedBy, recipe: Arc<dyn Recipe>) -> Self {
        let files: Arc<dyn Files> = Arc::new(move || recipe.folder().ok());
        Self {
            name: name.into(),
            named_by,
            on_demand: true,
            granted: None,
            files: Some(files),
            facts: Arc::default(),
        }
    }

    /// The folder of its files, if they are on this machine. Blocks while it looks for them.
    fn folder(&self) -> Option<PathBuf> {
        self.files.as_ref()?.folder()
    }

    /// Its state for clients. Blocks while it looks for files.
    fn state(&self, report: &Report) -> &'static str {
        if self.granted.is_some() {
            return "upstream";
        }
        let is_missing = report.state == State::OnDisk && self.folder().is_none();
        if is_missing { "missing" } else { report.state.name() }
    }
}

/// Finds the folder of a model's files. Blocks.
trait Files: Send + Sync {
    /// `None` if they are not on this machine.
    fn folder(&self) -> Option<PathBuf>;
}

impl<F: Fn() -> Option<PathBuf> + Send + Sync> Files for F {
    fn folder(&self) -> Option<PathBuf> {
        self()
    }
}

/// A model at one moment.
pub struct Description {
    /// The model's own name.
    pub name: String,
    /// `loaded`, `loading`, `unloading`, `on disk`, `missing` if its files are not on this machine, or `upstream`.
    pub state: &'static str,
    /// What its files say; `None` if they are missing, or not known.
    pub facts: Option<Arc<Facts>>,
    /// What serves it, if it is loaded.
    pub engine: Option<Engine>,
    /// Bytes, requests and times.
    pub report: Report,
}

/// A name of a model for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// `MODEL`, `MODEL@PROFILE` or an alias.
    pub name: String,
    /// Index of the model.
    pub index: usize,
    /// What an alias stands for.
    pub alias_of: Option<String>,
}

impl From<Engine> for Models {
    /// One model for all profiles.
    fn from(engine: Engine) -> Self {
        let pool = Pool::new(Starter::default(), Vec::new(), u64::MAX, WAIT);
        Self::new(pool, engine, 0, None)
    }
}

impl Models {
    /// The model of `[model]`, which takes `bytes`.
    fn new(pool: Pool<Starter>, engine: Engine, bytes: u64, files: Option<Arc<dyn Files>>) -> Self {
        let policies = engine.policies().clone();
        let profiles = engine.info().profiles.clone();
        let (served, of_profile, aliases) = (Arc::default(), BTreeMap::new(), Arc::default());
        let numbers = Numbers { float_bytes: 4, unpacked: Unpacked::WithoutKernel };
        let mut models = Self {
            pool,
            served,
            recipes: None,
            of_profile,
            aliases,
            policies,
            numbers,
            upstreams: Vec::new(),
            draft: None,
        };
        models.add_loaded(engine, &profiles, bytes, files);
        models
    }

    /// With another budget for the models that are loaded on demand, and another time for which a request
    /// waits for room. Before any is added.
    pub fn with_budget(engine: Engine, budget: u64, wait: Duration) -> Self {
        Self::new(Pool::new(Starter::default(), Vec::new(), budget, wait), engine, 0, None)
    }

    /// Adds a model for `profiles` that stays loaded.
    pub fn add(&mut self, engine: Engine, profiles: &[String]) {
        self.add_loaded(engine, profiles, 0, None);
    }

    fn add_loaded(
        &mut self,
        engine: Engine,
        profiles: &[String],
        bytes: u64,
        files: Option<Arc<dyn Files>>,
    ) {
        let name = engine.info().model.clone();
        let index = self.pool.add_loaded(&name, engine.into(), bytes);
        self.of_profile.extend(profiles.iter().map(|profile| (profile.clone(), index)));
        let (named_by, granted) = (NamedBy::Configuration, None);
        let facts = Arc::default();
        let served = Served { name, named_by, on_demand: false, granted, files, facts };
        self.served.write().push(served);
    }

    /// Adds a model that is loaded on demand: for `profiles`, and for all that use the first model.
    pub fn add_on_demand(
        &mut self,
        settings: Settings,
        recipe: Arc<dyn Recipe>,
        profiles: &[String],
    ) {
        let served = Served::on_demand(&settings.name, NamedBy::Configuration, recipe.clone());
        let index = self.pool.add(settings);
        self.pool.starter().add(index, recipe);
        self.of_profile.extend(profiles.iter().map(|profile| (profile.clone(), index)));
        self.served.write().push(served);
    }

    /// Sets the aliases, which have been checked against the names of the configured models. They take precedence over
    /// the names of models that an operator serves, which are withdrawn.
    pub fn set_aliases(&self, aliases: BTreeMap<String, String>) {
        let names: Vec<_> = aliases.keys().cloned().collect();
        // First, so that none is served under one of the names meanwhile.
        *self.aliases.write() = aliases;
        for alias in names.iter().filter(|alias| self.withdraw(alias)) {
            tracing::warn!(model = alias, "model is not served any more: an alias has its name");
        }
    }

    /// The engine of a profile, if its model is one of this process and loaded.
    pub fn of(&self, profile: &str) -> Option<Engine> {
        self.engine(*self.of_profile.get(profile)?)
    }

    /// The engine of `[model]`.
    pub fn first(&self) -> Engine {
        self.engine(0).expect("the first model stays loaded")
    }

    /// Index of the model with this name.
    pub fn named(&self, model: &str) -> Option<usize> {
        self.index_of(model).filter(|&index| !self.pool.is_withdrawn(index))
    }

    /// Index of the model with this name, also if it was withdrawn.
    fn index_of(&self, model: &str) -> Option<usize> {
        self.served.read().iter().position(|served| served.name == model)
    }

    /// The name of a model.
    pub fn name(&self, index: usize) -> String {
        self.served.read()[index].name.clone()
    }

    /// The models that are served, with their indices and reports.
    fn current(&self) -> Vec<(usize, Served, Report)> {
        // The list may be longer, and never is shorter.
        let reports = self.pool.report().into_iter().enumerate();
        let served = self.served.read();
        let current = reports.filter(|(_, report)| !report.withdrawn);
        current.map(|(index, report)| (index, served[index].clone(), report)).collect()
    }

    /// The engine of a model, if it has one and is loaded: for reports, not for requests.
    pub fn engine(&self, index: usize) -> Option<Engine> {
        self.pool.loaded(index)?.into_engine()
    }

    /// The upstreams.
    pub fn upstreams(&self) -> &[Upstream] {
        &self.upstreams
    }

    /// Whether an upstream computes a model.
    pub fn is_of_upstream(&self, index: usize) -> bool {
        self.served.read()[index].granted.is_some()
    }

    /// The engines of all loaded models, that of `[model]` first.
    pub fn engines(&self) -> Vec<Engine> {
        let count = self.served.read().len();
        (0..count).filter_map(|index| self.engine(index)).collect()
    }

    /// The policies, which all models share.
    pub fn policies(&self) -> &Arc<Policies> {
        &self.policies
    }

    /// The names of all models, without profiles and aliases.
    pub fn own_names(&self) -> Vec<String> {
        self.current().into_iter().map(|(_, served, _)| served.name).collect()
    }

    /// Names of the profiles.
    pub fn profiles(&self) -> impl Iterator<Item = &str> {
        self.of_profile.keys().map(String::as_str)
    }

    /// Names for clients: the first model's, those of models that are loaded on demand or that upstreams compute,
    /// `model@profile` for each profile but `default`, and the aliases.
    pub fn names(&self) -> Vec<Name> {
        let name = |name: String, index| Name { name, index, alias_of: None };
        let own = self.current().into_iter();
        let own = own.filter(|(index, served, _)| {
            let is_granted = served.granted.as_ref().is_some_and(|granted| !granted.is_empty());
            *index == 0 || served.on_demand || is_granted
        });
        let mut names: Vec<_> = own.map(|(index, served, _)| name(served.name, index)).collect();
        for (profile, &index) in self.of_profile.iter().filter(|(name, _)| *name != "default") {
            names.push(name(format!("{}@{profile}", self.name(index)), index));
        }
        let aliases = self.aliases.read().clone().into_iter().filter_map(|(alias, target)| {
            let (index, _) = self.resolve_model(&target)?;
            Some(Name { name: alias, index, alias_of: Some(target) })
        });
        names.extend(aliases);
        names
    }

    /// The model and the profile, if any, of a name that a client sends: `model`, `model@profile` or an alias
    /// of these, also with Ollama's tag `:latest`. `None` if that is not served.
    pub fn resolve(&self, name: &str) -> Option<(usize, Option<String>)> {
        let resolve = |name: &str| self.resolve_model(name).or_else(|| self.resolve_alias(name));
        resolve(name).or_else(|| resolve(name.strip_suffix(":latest")?))
    }

    fn resolve_alias(&self, name: &str) -> Option<(usize, Option<String>)> {
        let aliases = self.aliases.read();
        if let Some(target) = aliases.get(name) {
            return self.resolve_model(target);
        }
        let (alias, profile) = name.rsplit_once('@')?;
        let (index, None) = self.resolve_model(aliases.get(alias)?)? else { return None };
        self.serves(index, profile).then(|| (index, Some(profile.to_string())))
    }

    fn resolve_model(&self, name: &str) -> Option<(usize, Option<String>)> {
        if let Some(index) = self.named(name) {
            return Some((index, None));
        }
        // A model's name may itself contain an `@`.
        self.of_profile.keys().find_map(|profile| {
            let model = name.strip_suffix(profile.as_str())?.strip_suffix('@')?;
            let index = self.named(model)?;
            self.serves(index, profile).then(|| (index, Some(profile.clone())))
        })
    }

    /// Whether requests of `profile` may use a model.
    fn serves(&self, index: usize, profile: &str) -> bool {
        let Some(&own) = self.of_profile.get(profile) else { return false };
        let served = &self.served.read()[index];
        let is_granted = served.granted.as_ref().is_some_and(|granted| granted.contains(profile));
        own == index || own == 0 && served.on_demand || is_granted
    }

    /// The model of a request of `profile` that names model `named`, or none.
    ///
    /// # Errors
    /// If there is no such profile (`None`), or it uses another model (its index).
    pub fn serving(&self, named: Option<usize>, profile: &str) -> Result<usize, Option<usize>> {
        let own = *self.of_profile.get(profile).ok_or(None)?;
        match named {
            None => Ok(own),
            Some(named) if self.serves(named, profile) => Ok(named),
            Some(_) => Err(Some(own)),
        }
    }

    /// Waits until a model is loaded, and keeps it so until the lease is dropped.
    ///
    /// # Errors
    /// If it cannot be loaded or was withdrawn, there is no room for it, or `deadline` is over.
    pub async fn acquire(&self, index: usize, deadline: Instant) -> Result<Lease, Refusal> {
        self.pool.acquire(index, deadline).await
    }

    /// How long a model stays loaded after the requests so far; `None` for no limit. Returns whether the
    /// configuration does not keep it in any case.
    pub fn keep(&self, index: usize, keep_alive: Option<Duration>) -> bool {
        self.pool.keep(index, keep_alive)
    }

    /// All models by index, also those that were withdrawn. Blocks: reads files.
    pub fn describe(&self) -> Vec<Description> {
        // The list may be longer, and never is shorter.
        let reports = self.pool.report();
        let served = self.served.read().clone();
        let all = served.into_iter().zip(reports).enumerate();
        all.map(|(index, (served, report))| self.description(index, &served, report)).collect()
    }

    fn description(&self, index: usize, served: &Served, report: Report) -> Description {
        let state = served.state(&report);
        let is_missing = state == "missing";
        let read = || {
            let facts = Facts::read(&served.folder()?).ok()?;
            Some(served.facts.get_or_init(|| Arc::new(facts)).clone())
        };
        Description {
            name: served.name.clone(),
            state,
            facts: served.facts.get().cloned().filter(|_| !is_missing).or_else(read),
            engine: self.engine(index),
            report,
        }
    }

    /// States and counts of all models, by name.
    pub fn reports(&self) -> Vec<(String, Report)> {
        self.current().into_iter().map(|(_, served, report)| (served.name, report)).collect()
    }

    /// Names, states and reports of all models. Blocks while it looks for files.
    pub fn states(&self) -> Vec<(String, &'static str, Report)> {
        let one = |(_, served, report): (usize, Served, Report)| {
            let state = served.state(&report);
            (served.name, state, report)
        };
        self.current().into_iter().map(one).collect()
    }

    /// Folders of the files of all models that are on this machine, the draft model's too, with who has named the model.
    /// Blocks while it looks for them.
    pub fn folders(&self) -> Vec<(PathBuf, NamedBy)> {
        let folder =
            |(_, served, _): (usize, Served, Report)| Some((served.folder()?, served.named_by));
        let draft = self.draft.clone().map(|draft| (draft, NamedBy::Configuration));
        self.current().into_iter().filter_map(folder).chain(draft).collect()
    }

    /// Folders of the files of the models that were withdrawn and are in memory, or on their way there or out. Blocks
    /// while it looks for them.
    pub fn leaving(&self) -> Vec<PathBuf> {
        // The list may be longer, and never is shorter.
        let reports = self.pool.report();
        let served = self.served.read().clone();
        let all = served.into_iter().zip(reports);
        let leaving = all.filter(|(_, report)| report.withdrawn && report.state != State::OnDisk);
        leaving.filter_map(|(served, _)| served.folder()).collect()
    }

    /// Most bytes of the weights of all loaded models.
    pub fn budget(&self) -> u64 {
        self.pool.budget()
    }

    /// How engines keep weights.
    pub fn numbers(&self) -> Numbers {
        self.numbers
    }

    /// Waits until an engine that was loaded on demand cannot go on; then the process should end.
    pub async fn broken(&self) {
        self.pool.starter().broken().await;
    }

    /// The threads of engines that were loaded on demand and are still loaded.
    pub fn take_threads(&self) -> Vec<EngineThread> {
        self.pool.starter().take_threads()
    }
}
