//! A server in this process, for commands that talk to a model without a running server.
//!
//! It is the same server, on a free port of this machine, and is asked over HTTP. Only its own client knows its key.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use secrecy::SecretString;
use steersman_engine::{Engine, EngineThread};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::config::FileConfig;
use crate::models::{self, Loaded, Models};
use crate::{app, serve};

/// Bytes of the key.
const KEY_BYTES: usize = 16;

/// A running server.
pub struct Local {
    runtime: Runtime,
    address: SocketAddr,
    key: String,
    stop: oneshot::Sender<()>,
    serving: tokio::task::JoinHandle<()>,
    models: Models,
    threads: Vec<EngineThread>,
}

impl Local {
    /// Loads the configured models and serves them. Addresses and keys of the configuration do not apply, and responses
    /// are not stored.
    ///
    /// # Errors
    /// If the configuration is wrong, a model cannot be loaded, or no port is free.
    pub fn start(mut file: FileConfig, data_dir: &Path) -> Result<Self> {
        let mut random = [0; KEY_BYTES];
        getrandom::fill(&mut random).map_err(|error| anyhow!("making a key: {error}"))?;
        let key = hex::encode(random);
        file.server.host = "127.0.0.1".into();
        file.server.port = 0;
        file.server.hosts.clear();
        file.server.cors.clear();
        file.server.api_keys = vec![SecretString::from(key.clone())];
        file.server.admin_keys.clear();
        let (server, config) = file.check()?;
        let policies = steersman_engine::policies(&config, data_dir)?;
        let Loaded { models, threads, .. } =
            models::load(config, &server, data_dir, &policies, steersman_engine::start)?;
        let all = models.clone();
        let runtime = Runtime::new().context("starting the runtime")?;
        let listener = runtime.block_on(serve::listen(&server))?;
        let address = listener.local_addr().context("reading the address")?;
        let (stop, stopped) = oneshot::channel();
        // The servers of `[mcp]` are started within it.
        let entered = runtime.enter();
        let app = app(models, &server);
        drop(entered);
        let serving = runtime.spawn(async move {
            let stop = async {
                // A dropped sender stops it, too.
                let _ = stopped.await;
            };
            // A signal ends the process of a command.
            serve::run(listener, app, &server, stop, std::future::pending()).await;
        });
        Ok(Self { runtime, address, key, stop, serving, models: all, threads })
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The name of its first model.
    pub fn model(&self) -> String {
        self.models.first().info().model.clone()
    }

    /// The key of its client.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Stops the server, and waits until saved state is on disk.
    ///
    /// # Errors
    /// If an engine panicked.
    pub fn stop(self) -> Result<()> {
        // Fails if the server has ended already.
        let _ = self.stop.send(());
        self.runtime.block_on(self.serving).context("serving")?;
        self.models.engines().iter().for_each(Engine::stop);
        let threads: Vec<_> = self.threads.into_iter().chain(self.models.take_threads()).collect();
        drop(self.models);
        self.runtime.shutdown_background();
        let ended: Vec<_> = threads.into_iter().map(EngineThread::join).collect();
        ensure!(ended.iter().all(Result::is_ok), "an engine panicked, as logged above");
        Ok(())
    }
}
