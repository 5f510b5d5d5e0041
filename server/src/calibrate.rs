//! `steersman calibrate`: measures early exits and skipped blocks of a model, for `serve` to use.

use std::io::Write;
use std::path::Path;

use anyhow::Result;
use indicatif::ProgressBar;
use steersman_engine::config::Config;
use steersman_engine::request::Request;
use steersman_engine::tools::calibrate;

use crate::hub::Found;
use crate::verify;

/// Measures on the replies to `requests`, prints the results, and writes them to the data folder.
pub fn run(
    mut config: Config,
    found: &Found,
    data_dir: &Path,
    requests: &[Request],
    tokens: usize,
) -> Result<()> {
    // `skip_kl` needs the calibration that this run produces.
    config.engine.skip_kl = 0.0;
    let speculates = !config.speculation.drafts.is_empty();
    let mut decoder = verify::load(config, found, data_dir)?;
    let bar = ProgressBar::new(0).with_message("measurements");
    let calibration = calibrate::calibrate(&mut decoder, requests, tokens, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();

    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "\nmeasured on {} tokens\n\nfirst layers  same token as the model",
        calibration.tokens
    )?;
    for (layers, agreement) in (1..).zip(&calibration.exits) {
        writeln!(out, "{layers:>12}  {:>6.1} %", 100.0 * agreement)?;
    }
    match calibration.exit_layers {
        Some(layers) => writeln!(out, "early-exit drafts use the first {layers} layers")?,
        None if !speculates => {
            writeln!(out, "the cost of early exits was not measured: speculation is off")?
        }
        None => writeln!(out, "no early exit pays on this machine; early-exit drafts stay off")?,
    }
    writeln!(out, "\nskipped feed-forward blocks  nats a token")?;
    for skip in &calibration.skips {
        let layers: Vec<String> = skip.layers.iter().map(ToString::to_string).collect();
        writeln!(out, "{:>27}  {:.4}", layers.join(" "), skip.kl)?;
    }
    writeln!(
        out,
        "no block is skipped unless engine.skip_kl allows it\n\nwritten to {}",
        calibrate::calibration_path(&decoder).display()
    )?;
    Ok(())
}
