//! Starts and ends the engines of models that are loaded on demand.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use steersman_engine::{Engine, EngineThread};
use steersman_models::hub::Hub;
use steersman_models::pool;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::backend::Backend;

/// How one model is loaded.
pub trait Recipe: Send + Sync {
    /// The folder with its files.
    ///
    /// # Errors
    /// If they are not on this machine.
    fn folder(&self) -> Result<PathBuf>;

    /// Bytes that its weights will take.
    ///
    /// # Errors
    /// If its files are not on this machine, or cannot be read.
    fn bytes(&self) -> Result<u64>;

    /// Loads it.
    ///
    /// # Errors
    /// If that fails.
    fn start(&self) -> Result<Running>;
}

/// Makes the recipe of the model with this id in the cache of a hub.
pub type Recipes = dyn Fn(&Hub, &str) -> Result<Arc<dyn Recipe>> + Send + Sync;

/// An engine and its thread, which ends after the last handle to the engine.
pub type Running = (Engine, EngineThread);

/// The models that are loaded on demand, by index, and the threads of those that are loaded.
pub struct Starter {
    recipes: Mutex<BTreeMap<usize, Arc<dyn Recipe>>>,
    threads: Mutex<BTreeMap<usize, Thread>>,
    /// True when an engine has ended that was not to end.
    broken: watch::Sender<bool>,
}

struct Thread {
    handle: EngineThread,
    /// Whether the engine is to end.
    ends: Arc<AtomicBool>,
}

impl Default for Starter {
    fn default() -> Self {
        let broken = watch::Sender::new(false);
        Self { recipes: Mutex::default(), threads: Mutex::default(), broken }
    }
}

impl Starter {
    /// Adds a model.
    pub fn add(&self, index: usize, recipe: Arc<dyn Recipe>) {
        self.recipes.lock().insert(index, recipe);
    }

    fn recipe(&self, index: usize) -> Result<Arc<dyn Recipe>> {
        let recipe = self.recipes.lock().get(&index).cloned();
        recipe.context("the model is not loaded on demand")
    }

    /// Waits until an engine has ended that was not to end.
    pub async fn broken(&self) {
        // Fails if the sender is gone, and all engines with it.
        let _ = self.broken.subscribe().wait_for(|broken| *broken).await;
    }

    /// The threads of all engines.
    pub fn take_threads(&self) -> Vec<EngineThread> {
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_values().map(|thread| thread.handle).collect()
    }
}

impl pool::Starter for Starter {
    type Engine = Backend;

    fn bytes(&self, index: usize) -> Result<u64> {
        self.recipe(index)?.bytes()
    }

    fn start(&self, index: usize) -> Result<Backend> {
        let (engine, handle) = self.recipe(index)?.start()?;
        let ends = Arc::new(AtomicBool::new(false));
        let (ended, is_to_end, broken) = (engine.ended(), ends.clone(), self.broken.clone());
        Handle::current().spawn(async move {
            ended.await;
            if !is_to_end.load(Ordering::SeqCst) {
                broken.send_replace(true);
            }
        });
        self.threads.lock().insert(index, Thread { handle, ends });
        Ok(engine.into())
    }

    fn stop(&self, index: usize, backend: Backend) {
        let Backend::Engine(engine) = backend else { return };
        let thread = self.threads.lock().remove(&index);
        if let Some(thread) = &thread {
            thread.ends.store(true, Ordering::SeqCst);
        }
        // Nobody uses it; a handle that is held for a report must not keep it.
        engine.stop();
        drop(engine);
        // A panic has been logged.
        let _ = thread.map(|thread| thread.handle.join());
    }
}
