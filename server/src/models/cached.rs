//! Models in the hub's cache that an operator serves while the server runs.
//!
//! They are loaded on demand, as those of `[models]` with default settings, for the profiles that use the first model.
//! The server forgets them when it ends: what it starts with stands in the configuration only.

use std::sync::Arc;

use anyhow::{Context, Result};
use steersman_models::hub::Hub;

use super::load::settings;
use super::{Models, Recipe, Recipes, Served};
use crate::config::OnDemandConfig;

/// Who has named a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedBy {
    /// The configuration: `[model]`, a profile, `[models]` or an alias.
    Configuration,
    /// An operator, while the server runs.
    Operator,
}

impl Models {
    /// Lets operators serve models, which `recipes` loads.
    pub fn with_recipes(mut self, recipes: Arc<Recipes>) -> Self {
        self.recipes = Some(recipes);
        self
    }

    /// How the model `id` in the cache of `hub` is loaded.
    ///
    /// # Errors
    /// If it cannot be served, whatever its files are.
    pub fn recipe(&self, hub: &Hub, id: &str) -> Result<Arc<dyn Recipe>> {
        let recipes = self.recipes.as_ref().context("this server serves configured models only")?;
        recipes(hub, id)
    }

    /// Serves a model on demand under the name `id`, until it is withdrawn. Returns false if the configuration gives the
    /// name to another one; then nothing changes.
    pub fn serve(&self, id: &str, recipe: Arc<dyn Recipe>) -> bool {
        // Held until the model is in the list: new aliases withdraw those that they find there. Others take the two locks
        // in this order, too.
        let aliases = self.aliases.read();
        if aliases.contains_key(id) {
            return false;
        }
        let new = Served::on_demand(id, NamedBy::Operator, recipe.clone());
        let mut served = self.served.write();
        let known = served.iter().position(|known| known.name == id);
        match known {
            Some(index) if served[index].named_by == NamedBy::Configuration => return false,
            // It is served already.
            Some(index) if !self.pool.is_withdrawn(index) => {}
            Some(index) => {
                self.pool.starter().add(index, recipe);
                // With the facts of its files as they are now.
                served[index] = new;
                self.pool.restore(index);
            }
            None => {
                let index = self.pool.add(settings(id, &OnDemandConfig::default()));
                self.pool.starter().add(index, recipe);
                served.push(new);
            }
        }
        true
    }

    /// Ends the service of a model that an operator serves. Requests that have it keep it, then it is unloaded. Returns
    /// false if there is none of this name.
    pub fn withdraw(&self, id: &str) -> bool {
        let is_served = self.named_by(id) == Some(NamedBy::Operator);
        if let Some(index) = self.named(id).filter(|_| is_served) {
            self.pool.withdraw(index);
        }
        is_served
    }

    /// Who has named `id`, a model or an alias; `None` if it is neither.
    pub fn named_by(&self, id: &str) -> Option<NamedBy> {
        if let Some(index) = self.named(id) {
            return Some(self.served.read()[index].named_by);
        }
        self.aliases.read().contains_key(id).then_some(NamedBy::Configuration)
    }
}
