//! `steersman list`, `show`, `pull`, `rm` and `search`: what these commands know of the configuration and the machine.
//! The commands are in [`steersman_models::command`].

use std::path::Path;

use anyhow::Result;
use steersman_engine::tools::{Machine, model_types};
use steersman_models::command::{self, Configured, Sources};
pub use steersman_models::command::{List, Pull, Remove, Search, Show};
use steersman_models::hub::Hub;

use crate::config::FileConfig;
use crate::{bundled, hub, models};

/// A command.
#[derive(Debug)]
pub enum Task {
    /// `steersman list`
    List(List),
    /// `steersman show`
    Show(Show),
    /// `steersman pull`
    Pull(Pull),
    /// `steersman rm`
    Rm(Remove),
    /// `steersman search`
    Search(Search),
}

/// Runs a command. The bundled model is unpacked to `data_dir`.
///
/// # Errors
/// As the command.
pub fn run(
    task: &Task,
    file: FileConfig,
    data_dir: &Path,
    out: &mut impl std::io::Write,
) -> Result<()> {
    let configured = configured(&file);
    let (_, config) = file.check()?;
    let sources = Sources {
        hub: Hub::from_env(),
        bundled: (bundled::NAME.into(), bundled::unpack(data_dir)?),
        configured,
        families: model_types(),
        numbers: models::numbers(&config)?,
        memory_limit: Machine::of(&config)?.memory_limit,
        room: hub::room(&config),
    };
    match task {
        Task::List(options) => command::list(&sources, options, out),
        Task::Show(options) => command::show(&sources, options, out),
        Task::Pull(options) => command::pull(&sources, options, out),
        Task::Rm(options) => command::remove(&sources, options, out),
        Task::Search(options) => command::search(&sources, options, out),
    }
}

/// The models that a configuration names.
fn configured(file: &FileConfig) -> Vec<Configured> {
    let model = |key: String, name: &str, path: &str| {
        let name = if name.is_empty() { hub::name_of(path) } else { name.into() };
        Configured { key, name, path: path.into() }
    };
    let mut models = vec![model("model.path".into(), &file.model.name, &file.model.path)];
    if !file.speculation.draft_model.is_empty() {
        models.push(model("speculation.draft_model".into(), "", &file.speculation.draft_model));
    }
    for (name, on_demand) in &file.models {
        models.push(model(format!("models.{name}.path"), name, &on_demand.path));
    }
    for (name, profile) in &file.profiles {
        if !profile.model.is_empty() && !file.models.contains_key(&profile.model) {
            models.push(model(format!("profiles.{name}.model"), "", &profile.model));
        }
    }
    models
}
