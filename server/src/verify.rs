//! `steersman verify`: compares the decode paths and prints a table of equality and speed.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use serde::Deserialize;
use steersman_engine::config::Config;
use steersman_engine::policy::Policies;
use steersman_engine::request::{Message, Request};
use steersman_engine::tools::verify::{self, Outcome};
use steersman_engine::tools::{Decoder, ranks};

use crate::config::FILE_BYTES;
use crate::hub::Found;
use crate::ranks::{Lead, On};

/// Built-in prompts, each with whether reasoning is enabled: replies that repeat the prompt, that
/// repeat themselves, and that do neither.
const PROMPTS: &[(&str, bool)] = &[
    ("What is the capital of Italy?", false),
    (
        "Extract the people as a JSON list with name, age and city.\nAnna is 31 and lives in Rome. \
         Boris, aged 45, comes from Oslo. Clara is 27 and lives in Lima. David, aged 62, comes from \
         Paris.",
        false,
    ),
    (
        "Copy this text exactly:\nThe quiet fox walked near the river. A tired owl and a small bear \
         met at the bridge. There are 14 bells in the castle. The old hare waited in the garden.",
        false,
    ),
    ("Write a story about a fox named Nora who lives near the river.", false),
    ("Write a Python function that returns the largest item of a list.", true),
    ("Optimize this SQL query: SELECT * FROM items WHERE price = 26;", true),
    ("Translate to French: the red house", false),
    ("Repeat these words: owl, Rome, Anna, fox, Lima", true),
];

/// A prompt in a file given with `--prompts`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Conversation {
        messages: Vec<Message>,
        #[serde(default)]
        thinking: Option<bool>,
    },
}

/// The requests of `file`, or the built-in ones.
pub fn prompts(file: Option<&Path>) -> Result<Vec<Request>> {
    let prompts: Vec<Prompt> = match file {
        Some(path) => {
            let text = steersman_files::read(path, FILE_BYTES)
                .with_context(|| format!("reading {}", path.display()))?;
            serde_json::from_slice(&text).with_context(|| {
                format!(
                    "{} must be a JSON list of strings, or of objects with `messages` (a list of \
                     objects with `role` and `content`) and optionally `thinking`",
                    path.display()
                )
            })?
        }
        None => {
            let built_in = PROMPTS.iter().map(|&(text, thinking)| Prompt::Conversation {
                messages: vec![user(text)],
                thinking: Some(thinking),
            });
            built_in.collect()
        }
    };
    if prompts.is_empty() {
        bail!("the list of prompts is empty");
    }
    let request = |(i, prompt)| {
        let (messages, thinking) = match prompt {
            Prompt::Text(text) => (vec![user(&text)], None),
            Prompt::Conversation { messages, thinking } => (messages, thinking),
        };
        let id = format!("prompt {i}");
        Request {
            id,
            profile: "default".into(),
            messages,
            reasoning: thinking,
            ..Request::default()
        }
    };
    Ok((1..).zip(prompts).map(request).collect())
}

fn user(text: &str) -> Message {
    Message { role: "user".into(), content: text.into(), ..Message::default() }
}

/// Loads a model without the prefix store, and prints its name, family, device and number format.
pub(crate) fn load(config: Config, found: &Found, data_dir: &Path) -> Result<Decoder> {
    let policies = steersman_engine::policies(&config, data_dir)?;
    load_on(On::Threads(1), config, found, data_dir, policies)
}

/// As [`load`], on several ranks.
pub(crate) fn load_on(
    on: On,
    mut config: Config,
    found: &Found,
    data_dir: &Path,
    policies: Arc<Policies>,
) -> Result<Decoder> {
    config.store.enabled = false;
    let folder = &found.folder;
    let loaded = match on {
        On::Threads(count) => ranks::load_on_threads(config, folder, data_dir, policies, count),
        On::Processes(Lead { ranks, outputs }) => {
            ranks::load_as_first_rank(config, folder, data_dir, policies, ranks, outputs)
        }
    };
    let (decoder, info) =
        loaded.with_context(|| format!("loading the model in {}", folder.display()))?;
    let mut out = std::io::stdout();
    writeln!(out, "{} ({}) on {}", info.model, info.family, info.numbers)?;
    Ok(decoder)
}

/// Computes the replies to `requests` on every decode path and prints the comparison.
///
/// # Errors
/// When replies differ, or the model cannot be loaded or run.
pub fn run(
    config: Config,
    found: &Found,
    data_dir: &Path,
    requests: &[Request],
    tokens: usize,
    on: On,
) -> Result<()> {
    let policies = steersman_engine::policies(&config, data_dir)?;
    let load = |on| load_on(on, config.clone(), found, data_dir, policies.clone());
    let is_alone = matches!(on, On::Threads(1));
    let mut alone = if is_alone { None } else { Some(load(On::Threads(1))?) };
    let mut decoder = load(on)?;
    let paths = verify::paths(&decoder)?;
    let bar = ProgressBar::new(requests.len() as u64).with_message("prompts");
    let progress = |done| bar.set_position(done as u64);
    let outcomes = match &mut alone {
        Some(alone) => {
            verify::verify_ranks(&mut decoder, alone, requests, &paths, tokens, progress)
        }
        None => verify::verify(&mut decoder, requests, &paths, tokens, progress),
    }?;
    bar.finish_and_clear();
    print(&outcomes, requests.len())?;
    if !is_alone {
        println!("Replies were compared with those of one process.");
    }
    let different: Vec<String> =
        outcomes.iter().filter(|o| !o.holds()).map(|o| o.path.name()).collect();
    if !different.is_empty() {
        bail!(
            "replies differ from plain decoding ({}); please report this with the model's name and \
             this output",
            different.join(", ")
        );
    }
    Ok(())
}

/// Prints the table, and the first differing token of each reply that differs.
fn print(outcomes: &[Outcome], prompts: usize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let plain = &outcomes[0];
    writeln!(
        out,
        "\n{:<31} {:>9} {:>9} {:>11} {:>11} {:>8}",
        "path", "equal", "near-tie", "acceptance", "tok/pass", "speed"
    )?;
    for outcome in outcomes {
        let [drafted, accepted, passes] = outcome.drafted.map(|count| count as f64);
        let dash = || "-".to_string();
        let (acceptance, per_pass) = if passes > 0.0 {
            (
                format!("{:.1} %", 100.0 * accepted / drafted),
                format!("{:.2}", 1.0 + accepted / passes),
            )
        } else {
            (dash(), dash())
        };
        writeln!(
            out,
            "{:<31} {:>9} {:>9} {:>11} {:>11} {:>7.2}x",
            outcome.path.name(),
            format!("{}/{prompts}", outcome.equal),
            outcome.near_ties,
            acceptance,
            per_pass,
            outcome.speedup(plain),
        )?;
    }
    let total: usize = plain.replies.iter().map(Vec::len).sum();
    writeln!(
        out,
        "\n{total} tokens decoded on each path. Speed is relative to plain decoding, median of the \
         prompts. At a near-tie, the two best tokens are closer than rounding error."
    )?;
    for outcome in outcomes {
        for (prompt, token, margin) in &outcome.different {
            writeln!(
                out,
                "{}: prompt {} differs at token {}, margin {margin:.1e}",
                outcome.path.name(),
                prompt + 1,
                token + 1
            )?;
        }
    }
    Ok(())
}
