//! The build, and the process as the system describes it, under the names that all programs use.
//!
//! What a system does not give has no series.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use steersman_engine::MLX_VERSION;

use super::register;
use crate::models::Models;
use crate::system::Process;

/// The commit that the program was built from, if the build was given one.
const COMMIT: Option<&str> = option_env!("STEERSMAN_COMMIT");

/// Registers what was built, and on which device it computes.
pub fn register_build(registry: &mut Registry, models: &Models) {
    let mut labels =
        vec![("version", env!("CARGO_PKG_VERSION").to_owned()), ("mlx", MLX_VERSION.to_owned())];
    labels.extend(COMMIT.filter(|commit| !commit.is_empty()).map(|c| ("commit", c.to_owned())));
    // `CPU, bf16`: the numbers are those of a model.
    let numbers = models.engines().first().map(|engine| engine.info().numbers.clone());
    let device = numbers.and_then(|numbers| Some(numbers.split(',').next()?.to_owned()));
    labels.extend(device.map(|device| ("device", device)));
    let build = Family::<Vec<(&str, String)>, Gauge<u64, AtomicU64>>::default();
    build.get_or_create(&labels).set(1);
    register(registry, "build_info", "Version, MLX, commit and device; always 1", build);
}

/// Registers the process.
pub fn register_process(registry: &mut Registry) {
    let Process { started, processor, resident_bytes, virtual_bytes, open_files, most_files } =
        Process::now();
    let start: Gauge<f64, AtomicU64> = Gauge::default();
    start.set(started);
    register(registry, "start_time_seconds", "When the process started, since 1970", start);
    if let Some(processor) = processor {
        let time: Counter<f64, AtomicU64> = Counter::default();
        time.inc_by(processor);
        register(registry, "cpu_seconds", "Processor time in user mode and in the kernel", time);
    }
    for (name, help, value) in [
        (
            "resident_memory_bytes",
            "Resident memory; on macOS the footprint, with the arrays of a GPU",
            resident_bytes,
        ),
        ("virtual_memory_bytes", "Virtual memory", virtual_bytes),
        ("open_fds", "Open files and connections", open_files),
        ("max_fds", "Most open files and connections", most_files),
    ] {
        if let Some(value) = value {
            let gauge: Gauge<u64, AtomicU64> = Gauge::default();
            gauge.set(value);
            register(registry, name, help, gauge);
        }
    }
}
