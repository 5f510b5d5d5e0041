//! `steersman doctor --report FILE`: what the owner of a machine can send back.
//!
//! One JSON file has versions, the machine, each own kernel against its reference on it, the replies of all decoding paths
//! (`steersman verify`) and the times of passes (`steersman bench model`). What is missing failed, and the file says why.
//!
//! The file has no key, no text of a user, and no path: only what is listed here is written, and messages of errors
//! pass [`Places::masked`].

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use steersman_engine::tools::passes::{self, Measured, Plan};
use steersman_engine::tools::verify::{Outcome, paths, verify};
use steersman_engine::tools::{Decoder, Outcomes, check_all};

use super::Report;
use crate::config::FileConfig;
use crate::hub::{self, Found};
use crate::verify;

/// How much is tried.
struct Effort {
    /// Most prompts whose replies are compared.
    prompts: usize,
    /// Tokens of these replies.
    tokens: usize,
    /// Lengths of prompts, and tokens before steps.
    lengths: &'static [usize],
    /// Rows of passes that verify drafts.
    rows: &'static [usize],
    /// Sequences that step together.
    streams: &'static [usize],
    rounds: usize,
}

/// What an owner of a machine waits for: some minutes with a small model.
const EFFORT: Effort = Effort {
    prompts: 8,
    tokens: 48,
    lengths: &[64, 512],
    rows: &[1, 2, 4, 8],
    streams: &[4, 8],
    rounds: 3,
};

/// The file.
#[derive(Serialize)]
struct Sent {
    /// What the file is for people who open it.
    about: &'static str,
    version: &'static str,
    target: String,
    machine: super::Hardware,
    mlx: super::Mlx,
    speed: super::Measured,
    chip: Option<super::ChipReach>,
    choices: Vec<super::Choice>,
    model: Option<String>,
    /// Each kernel against its reference, by name.
    kernels: Tried<Outcomes>,
    verify: Tried<Vec<PathResult>>,
    bench: Tried<Vec<Measured>>,
}

/// A part of the report, or why there is none.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Tried<T> {
    Found(T),
    Failed(String),
}

/// The replies of a decoding path.
#[derive(Serialize)]
struct PathResult {
    path: String,
    /// Replies equal to those of plain decoding.
    equal: usize,
    near_ties: usize,
    different: usize,
    /// Times as fast as plain decoding, the median of the prompts.
    speed: f64,
}

/// Folders whose names must not leave this machine, with what stands for them.
struct Places(Vec<(String, &'static str)>);

impl Places {
    fn new(data_dir: &Path, found: Option<&Found>) -> Self {
        let mut places = Vec::new();
        let mut add = |path: Option<&Path>, name| {
            let text = path.map(|path| path.display().to_string()).unwrap_or_default();
            // A root would be found in every path.
            if text.len() > 1 {
                places.push((text, name));
            }
        };
        add(found.map(|found| found.folder.as_path()), "MODEL");
        add(Some(data_dir), "DATA");
        add(std::env::current_exe().ok().as_deref().and_then(Path::parent), "PROGRAM");
        add(std::env::current_dir().ok().as_deref(), "HERE");
        add(std::env::temp_dir().as_path().into(), "TEMP");
        add(dirs::home_dir().as_deref(), "HOME");
        // The longest first: one may be in another.
        places.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        Self(places)
    }

    /// `text` without these folders, and without the name of the user.
    fn masked(&self, text: &str) -> String {
        let masked =
            self.0.iter().fold(text.to_owned(), |text, (folder, name)| text.replace(folder, name));
        let home = dirs::home_dir();
        let user = home.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy());
        match user.filter(|user| user.len() > 1) {
            Some(user) => masked.replace(&*user, "USER"),
            None => masked,
        }
    }

    fn tried<T>(&self, result: Result<T>) -> Tried<T> {
        match result {
            Ok(found) => Tried::Found(found),
            Err(error) => Tried::Failed(self.masked(&format!("{error:#}"))),
        }
    }
}

/// Tries kernels, paths and passes of the configured model, or of the bundled one, and writes the new file `path`.
///
/// # Errors
/// If the configuration is wrong, its device does not exist, or the file exists or cannot be written.
pub fn write(file: FileConfig, data_dir: &Path, path: &Path, out: &mut impl Write) -> Result<()> {
    write_with(&EFFORT, file, data_dir, path, out)
}

fn write_with(
    effort: &Effort,
    file: FileConfig,
    data_dir: &Path,
    path: &Path,
    out: &mut impl Write,
) -> Result<()> {
    let (server, mut config) = file.check()?;
    // At once: the rest takes minutes.
    let mut new = OpenOptions::new();
    let new = new.write(true).create_new(true).open(path);
    let mut new = new.with_context(|| format!("creating {}", path.display()))?;
    writeln!(out, "measuring the machine")?;
    let Report { version, machine, mlx, speed, chip, choices, .. } =
        Report::new(&server, &config, data_dir)?;
    writeln!(out, "checking kernels")?;
    let kernels = check_all(&config.model).map_err(anyhow::Error::from);
    let found = hub::find(&config.model.path, hub::room(&config), data_dir);
    let places = Places::new(data_dir, found.as_ref().ok());
    config.profiles.retain(|name, _| name == "default");
    let name = found.as_ref().ok().map(|found| places.masked(&found.name));
    let mut decoder = found.and_then(|found| {
        writeln!(out, "loading {}", found.name)?;
        verify::load(config, &found, data_dir)
    });
    writeln!(out, "comparing decoding paths")?;
    let verified = with(&mut decoder, |decoder| compare_paths(decoder, effort));
    writeln!(out, "measuring passes")?;
    let measured = with(&mut decoder, |decoder| measure(decoder, effort));
    let sent = Sent {
        about: "Written by `steersman doctor --report`: read it, and attach it to an issue of the project.",
        version,
        target: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        machine,
        mlx,
        speed,
        chip,
        choices,
        model: name,
        kernels: places.tried(kernels),
        verify: places.tried(verified),
        bench: places.tried(measured),
    };
    let text = serde_json::to_vec_pretty(&sent)?;
    new.write_all(&text).with_context(|| format!("writing {}", path.display()))?;
    writeln!(out, "{} has the report: read it before you send it", path.display())?;
    Ok(())
}

/// Calls `run` with the model, if it was loaded.
fn with<T>(
    decoder: &mut Result<Decoder>,
    run: impl FnOnce(&mut Decoder) -> Result<T>,
) -> Result<T> {
    match decoder {
        Ok(decoder) => run(decoder),
        Err(error) => Err(anyhow::anyhow!("{error:#}")),
    }
}

fn compare_paths(decoder: &mut Decoder, effort: &Effort) -> Result<Vec<PathResult>> {
    let (paths, mut prompts) = (paths(decoder)?, verify::prompts(None)?);
    prompts.truncate(effort.prompts);
    let outcomes = verify(decoder, &prompts, &paths, effort.tokens, |_| {})?;
    let result = |outcome: &Outcome| PathResult {
        path: outcome.path.name(),
        equal: outcome.equal,
        near_ties: outcome.near_ties,
        different: outcome.different.len(),
        speed: outcome.speedup(&outcomes[0]),
    };
    Ok(outcomes.iter().map(result).collect())
}

fn measure(decoder: &mut Decoder, effort: &Effort) -> Result<Vec<Measured>> {
    let plan = Plan {
        prefill: effort.lengths.into(),
        contexts: effort.lengths.into(),
        rows: effort.rows.into(),
        streams: effort.streams.into(),
        sums: Vec::new(),
        rounds: effort.rounds,
    };
    Ok(passes::measure_passes(decoder, &plan, |_, _| {})?)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_report_has_what_was_tried_and_no_path() {
        let folder = tempfile::tempdir().unwrap();
        let (data, path) = (folder.path().join("data"), folder.path().join("report.json"));
        let mut file = FileConfig::default();
        file.model.device = steersman_engine::config::Device::Cpu;
        let effort = Effort {
            prompts: 1,
            tokens: 8,
            lengths: &[16],
            rows: &[1, 4],
            streams: &[2],
            rounds: 1,
        };
        write_with(&effort, file.clone(), &data, &path, &mut Vec::new()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let report: Value = serde_json::from_str(&text).unwrap();
        assert!(report["kernels"]["found"]["products"]["equal"].is_number(), "{text}");
        let paths = report["verify"]["found"].as_array().unwrap();
        assert!(paths.len() >= 6 && paths.iter().all(|path| path["different"] == 0), "{text}");
        let measured = report["bench"]["found"].as_array().unwrap();
        assert_eq!(measured.len(), 1 + 1 + 2 + 1, "{text}");
        let private = [folder.path().to_str().unwrap(), env!("CARGO_MANIFEST_DIR")];
        for private in private {
            assert!(!text.contains(private), "{private} is in {text}");
        }
        // A file that exists is left as it is.
        let error = write(file, &data, &path, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("report.json"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn errors_name_no_folder_and_no_user() {
        let data = Path::new("/srv/private/data");
        let found = Found {
            folder: "/srv/private/data/models/mine".into(),
            name: "mine".into(),
            bundled: false,
        };
        let places = Places::new(data, Some(&found));
        let home = dirs::home_dir().unwrap();
        let text = format!(
            "/srv/private/data/models/mine/config.json: no; /srv/private/data/x: no; {}/y: no",
            home.display()
        );
        let masked = places.masked(&text);
        assert_eq!(masked, "MODEL/config.json: no; DATA/x: no; HOME/y: no");
    }
}
