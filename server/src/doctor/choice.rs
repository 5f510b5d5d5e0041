//! Settings that depend on the machine, their values here, and why.

use std::fmt;
use std::sync::Arc;

use indicatif::BinaryBytes;
use serde::Serialize;
use steersman_engine::config::{self, Config, EngineConfig, SpeculationConfig, StoreConfig};
use steersman_engine::tools::machine::Machine;

use crate::config::ServerConfig;
use crate::connections::{Connections, open_files};

/// One setting.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// The key in the configuration: `engine.max_running`.
    pub key: &'static str,
    /// What applies on this machine.
    pub value: String,
    /// Whether the configuration sets it.
    pub configured: bool,
    /// Why it has this value.
    pub reason: String,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, configured, reason } = self;
        let reason = if *configured { "set in the configuration" } else { reason };
        write!(f, "{key} = {value}: {reason}")
    }
}

/// All settings that the server chooses by the machine, or that are best checked against it.
pub fn choices(server: &ServerConfig, config: &Config, machine: &Machine) -> Vec<Choice> {
    let (model, engine, store) = (&config.model, &config.engine, &config.store);
    let choice = |key, value: String, configured, reason: &str| Choice {
        key,
        value,
        configured,
        reason: reason.into(),
    };
    let connections = Arc::new(Connections::new(server));
    let (limit, limited_by) = machine.memory_limit;
    let on_cpu = machine.on_cpu;
    vec![
        choice(
            "model.device",
            if on_cpu { "cpu" } else { "gpu" }.into(),
            model.device != config::Device::Auto,
            if on_cpu { "this MLX finds no GPU" } else { "MLX finds a GPU" },
        ),
        choice(
            "model.dtype",
            if on_cpu { "f32" } else { "that of the checkpoint" }.into(),
            model.dtype != config::Dtype::Auto,
            if on_cpu { "16-bit products are slower on CPUs" } else { "GPUs compute in it" },
        ),
        choice(
            "model.kernels",
            kernels(machine),
            model.kernels != config::Kernels::Auto,
            "Steersman's own where there are some for the device, shape and type, MLX's otherwise",
        ),
        choice(
            "model.activations",
            match model.activations {
                config::Activations::Exact => "exact",
                config::Activations::Int8 => "int8",
            }
            .into(),
            model.activations != config::Activations::Exact,
            "`int8` is faster on a CPU, and rounds inputs of products as llama.cpp does",
        ),
        choice(
            "engine.memory_limit_bytes",
            format!("{limit} ({})", BinaryBytes(limit)),
            engine.memory_limit_bytes > 0,
            &format!("the least of the limits here is that of {limited_by}"),
        ),
        choice(
            "engine.max_running",
            machine.max_running.to_string(),
            engine.max_running > 0,
            match machine.chip {
                Some(_) => "by the table of chips: more make no more tokens a second together",
                None => "a pass reads the weights once for all of them",
            },
        ),
        choice(
            "engine.wired_idle_s",
            engine.wired_idle_s.to_string(),
            engine.wired_idle_s != EngineConfig::default().wired_idle_s,
            match machine.chip {
                Some(_) => {
                    "the same on every Mac; with macOS 15 or later, a model stays in memory for so long"
                }
                None => "the same on every machine; has an effect on Macs alone",
            },
        ),
        choice(
            "engine.prefill_chunk",
            engine.prefill_chunk.to_string(),
            engine.prefill_chunk != EngineConfig::default().prefill_chunk,
            "the same on every machine; beside streams, chunks are shortened to engine.stall_ms by pass times that are \
             measured when a model is loaded",
        ),
        choice(
            "speculation.depth",
            config.speculation.depth.to_string(),
            config.speculation.depth != SpeculationConfig::default().depth,
            "the most on every machine; how deep drafts are, if there are any, follows from pass times that are measured \
             when a model is loaded",
        ),
        choice(
            "store.memory_bytes",
            format!("{} ({})", store.memory_bytes, BinaryBytes(store.memory_bytes)),
            store.memory_bytes != StoreConfig::default().memory_bytes,
            "the same on every machine; part of engine.memory_limit_bytes, and evicted when requests need it",
        ),
        choice(
            "store.budget_bytes",
            format!("{} ({})", store.budget_bytes, BinaryBytes(store.budget_bytes)),
            store.budget_bytes != StoreConfig::default().budget_bytes,
            "the same on every machine",
        ),
        choice(
            "server.max_connections",
            connections.limit().to_string(),
            server.max_connections > 0,
            &format!(
                "three quarters of the {} files that the server may open after it raised the limit, at most 4096",
                open_files()
            ),
        ),
        choice(
            "server.max_connections_per_address",
            connections.limit_per_address().to_string(),
            server.max_connections_per_address > 0,
            "half of server.max_connections",
        ),
    ]
}

fn kernels(machine: &Machine) -> String {
    match (&machine.cuda_kernels, machine.on_cpu) {
        (Some(capability), _) => format!("CUDA for compute capability {capability}"),
        (None, true) => machine.cpu_kernels.into(),
        (None, false) => "MLX's".into(),
    }
}
