//! The models that are served, and which profile asks which of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use steersman_engine::Engine;
use steersman_engine::policy::Policies;

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
