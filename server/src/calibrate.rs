//! `steersman calibrate`: measures early exits and skipped blocks, and saves the result for `serve`.

use std::io::Write;
use std::path::Path;

use anyhow::Result;
use indicatif::ProgressBar;
use steersman_engine::config::Config;
use steersman_engine::request::Request;

use crate::hub::Found;
use crate::verify;

/// Measures on the replies to `requests`, prints the result, and saves it in the data folder.
///
/// # Errors
/// If the model cannot be run or the result cannot be saved.
pub fn run(
    mut config: Config,
    found: &Found,
    data_dir: &Path,
    requests: &[Request],
    tokens: usize,
) -> Result<()> {
    // The cost of each block is measured with all blocks in place.
    config.engine.skip_kl = 0.0;
    let speculates = !config.speculation.drafts.is_empty();
    let mut decoder = verify::load(config, found, data_dir)?;
    let bar = ProgressBar::new(0).with_message("measurements");
    let calibration = decoder.calibrate(requests, tokens, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();

    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "\nmeasured on {} tokens\n\nfirst layers  agree with the model",
        calibration.tokens
    )?;
    for (layers, agreement) in (1..).zip(&calibration.exits) {
        writeln!(out, "{layers:>12}  {:>6.1} %", 100.0 * agreement)?;
    }
    match calibration.exit_layers {
        Some(layers) => writeln!(out, "early-exit drafts leave after {layers} layers")?,
        None if !speculates => writeln!(out, "the cost of exits was not measured: drafts are off")?,
        None => writeln!(out, "no early exit pays on this machine; none is used")?,
    }
    writeln!(out, "\nskipped feed-forward blocks  nats per token")?;
    for skip in &calibration.skips {
        let layers: Vec<String> = skip.layers.iter().map(ToString::to_string).collect();
        writeln!(out, "{:>27}  {:.4}", layers.join(" "), skip.kl)?;
    }
    writeln!(
        out,
        "blocks are skipped only as engine.skip_kl allows\n\nsaved in {}",
        decoder.calibration_path().display()
    )?;
    Ok(())
}
