//! `steersman policy new`: a folder with a small policy to begin with.
//!
//! What it writes are the examples of this repository, built and tested there, with another name,
//! and a copy of the contract: a policy stays as it is when the server is replaced by a newer one.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};

/// Of what name, in which language.
#[derive(Args)]
pub struct New {
    /// The policy's name, and its folder's: lower-case letters, digits and _
    name: String,
    /// What it is written in
    #[arg(long, value_enum)]
    lang: Language,
    /// Where its folder is made
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    into: PathBuf,
}

/// What a policy is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Language {
    /// Rust: 20 to 100 kB, under a microsecond a step
    Rust,
    /// JavaScript: 12 MB, some 100 microseconds a step
    Js,
    /// Python: 18 MB, some 100 microseconds a step
    Python,
}

const CONTRACT: &str = include_str!("../../../wit/policy.wit");
const GOLDEN: &str = include_str!("../../../policies/examples/rust/brief.jsonl");
const README: &str = include_str!("template/README.md");
const IGNORED: &str = "target\nnode_modules\n.venv\n__pycache__\n*.wasm\n";

/// The sources of the SDK, which a policy in Rust has a copy of.
const SDK: &[(&str, &str)] = &[
    ("bindings.rs", include_str!("../../../policies/sdk/src/bindings.rs")),
    ("host.rs", include_str!("../../../policies/sdk/src/host.rs")),
    ("lib.rs", include_str!("../../../policies/sdk/src/lib.rs")),
    ("prompt.rs", include_str!("../../../policies/sdk/src/prompt.rs")),
];
const SDK_MANIFEST: &str = include_str!("../../../policies/sdk/Cargo.toml");

/// Makes the folder, and says what comes next.
///
/// # Errors
/// When the name cannot be one, the folder is there already, or it cannot be written.
pub fn run(options: New, out: &mut impl Write) -> Result<()> {
    let New { name, lang, into } = options;
    check_name(&name)?;
    let folder = into.join(&name);
    ensure!(!folder.exists(), "{}: is there already", folder.display());
    for (path, text) in files(&name, lang) {
        write(&folder.join(path), &text)?;
    }
    let folder = folder.display();
    writeln!(out, "{folder}: a policy to begin with; its README.md says what comes next:")?;
    writeln!(out, "  steersman policy build {folder}")?;
    writeln!(out, "  steersman policy test {folder}/{name}.wasm {folder}/{name}.jsonl")?;
    Ok(())
}

fn check_name(name: &str) -> Result<()> {
    let starts = name.starts_with(|c: char| c.is_ascii_lowercase());
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    ensure!(
        starts && name.chars().all(fits) && name.len() <= 64,
        "`{name}` cannot be a policy's name: lower-case letters, digits and _, at most 64, a letter first"
    );
    // The bindings of the Python tool, the world, and crates that cargo knows already.
    let taken = ["guest", "wit_world", "core", "std", "alloc", "test", "steersman_policy"];
    ensure!(!taken.contains(&name), "`{name}` is taken by the tools: choose another name");
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    let parent = path.parent().expect("a file of the folder");
    std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// All files of a new policy, by their paths in its folder.
fn files(name: &str, lang: Language) -> Vec<(String, String)> {
    macro_rules! example {
        ($path:literal) => {
            include_str!(concat!("../../../policies/examples/", $path))
        };
    }
    let (source, install, contract) = match lang {
        Language::Rust => (
            "src/lib.rs".to_owned(),
            "It needs a compiler for WebAssembly, once: `rustup target add wasm32-unknown-unknown`, or on \
             Debian\n`apt-get install rustc-web rust-web-src lld-22`. `cargo test` runs its native tests.",
            "sdk/wit/policy.wit",
        ),
        Language::Js => (
            format!("{name}.js"),
            "It needs componentize-js, once: `npm install` in this folder. wit/world.wit names the hooks \
             that it exports.",
            "wit/policy.wit",
        ),
        Language::Python => (
            format!("{name}.py"),
            "It needs componentize-py, once: `pip install -r requirements.txt`. wit/world.wit names the \
             hooks that it exports.",
            "wit/policy.wit",
        ),
    };
    let readme = README
        .replace("NAME", name)
        .replace("SOURCE", &source)
        .replace("CONTRACT", contract)
        .replace("INSTALL", install);
    let mut files = vec![
        ("README.md".to_owned(), readme),
        (".gitignore".into(), IGNORED.into()),
        (format!("{name}.jsonl"), GOLDEN.into()),
        (contract.into(), CONTRACT.into()),
    ];
    let mut add = |path: &str, text: &str| files.push((path.into(), text.into()));
    match lang {
        Language::Rust => {
            let manifest = example!("rust/Cargo.toml");
            let named = format!("name = \"{name}\"");
            let manifest = manifest.replace("name = \"brief\"", &named).replace("../../sdk", "sdk");
            add("Cargo.toml", &manifest);
            add(&source, &example!("rust/src/lib.rs").replace("Brief", &type_name(name)));
            add("sdk/Cargo.toml", &sdk_manifest());
            for (file, text) in SDK {
                add(&format!("sdk/src/{file}"), text);
            }
        }
        Language::Js => {
            add(&source, example!("javascript/brief.js"));
            add("package.json", example!("javascript/package.json"));
            add("wit/world.wit", example!("javascript/wit/world.wit"));
        }
        Language::Python => {
            add(&source, example!("python/brief.py"));
            add("requirements.txt", example!("python/requirements.txt"));
            add("wit/world.wit", example!("python/wit/world.wit"));
        }
    }
    files
}

/// `tool_guard` as a type: `ToolGuard`.
fn type_name(name: &str) -> String {
    name.split('_')
        .map(|word| {
            let first = word.get(..1).unwrap_or_default().to_ascii_uppercase();
            first + word.get(1..).unwrap_or_default()
        })
        .collect()
}

/// The manifest of a copy of the SDK: without the workspace, and what its own tests need.
fn sdk_manifest() -> String {
    let bindgen = SDK_MANIFEST.lines().find(|line| line.starts_with("wit-bindgen"));
    format!(
        "[package]\nname = \"steersman-policy\"\nversion = \"{}\"\nedition = \"2024\"\nlicense = \"{}\"\n\
         publish = false\n\n[dependencies]\n{}\n",
        env!("CARGO_PKG_VERSION"),
        env!("CARGO_PKG_LICENSE"),
        bindgen.expect("the SDK is made with wit-bindgen: a law holds it so"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(name: &str, lang: Language) -> (tempfile::TempDir, Result<()>) {
        let into = tempfile::tempdir().expect("a folder");
        let made = run(New { name: name.into(), lang, into: into.path().into() }, &mut Vec::new());
        (into, made)
    }

    #[test]
    fn a_new_policy_has_source_golden_contract_and_readme_of_its_name() {
        let cases = [
            (Language::Rust, "src/lib.rs", "sdk/wit/policy.wit"),
            (Language::Js, "calm_1.js", "wit/policy.wit"),
            (Language::Python, "calm_1.py", "wit/policy.wit"),
        ];
        for (lang, source, contract) in cases {
            let (into, made) = make("calm_1", lang);
            made.expect("a folder");
            let read = |path: &str| std::fs::read_to_string(into.path().join("calm_1").join(path));
            assert_eq!(read(contract).expect(contract), CONTRACT);
            assert_eq!(read("calm_1.jsonl").expect("a golden file"), GOLDEN);
            assert!(!read(source).expect(source).contains("Brief"), "{lang:?}");
            let readme = read("README.md").expect("a readme");
            assert!(readme.contains("calm_1.wasm") && readme.contains(source), "{readme}");
            assert!(!["NAME", "SOURCE", "CONTRACT", "INSTALL"].iter().any(|w| readme.contains(w)));
        }
    }

    #[test]
    fn the_copy_of_the_sdk_is_whole() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies/sdk/src");
        let mut there: Vec<_> = std::fs::read_dir(sources)
            .expect("the SDK")
            .map(|entry| entry.expect("a file").file_name().into_string().expect("a name"))
            .collect();
        there.sort();
        assert_eq!(there, SDK.iter().map(|(file, _)| *file).collect::<Vec<_>>());
        let manifest: toml::Table = sdk_manifest().parse().expect("a manifest");
        assert!(manifest["dependencies"].get("wit-bindgen").is_some());
    }

    #[test]
    fn a_name_that_no_tool_takes_is_refused_and_so_is_a_folder_that_is_there() {
        for name in ["", "1a", "Brief", "a-b", "a/b", "..", "guest", "std"] {
            let (into, made) = make(name, Language::Js);
            assert!(made.is_err(), "{name}");
            assert_eq!(std::fs::read_dir(into.path()).expect("a folder").count(), 0, "{name}");
        }
        let (into, made) = make("brief", Language::Js);
        made.expect("a folder");
        let again = New { name: "brief".into(), lang: Language::Js, into: into.path().into() };
        assert!(
            run(again, &mut Vec::new())
                .unwrap_err()
                .to_string()
                .ends_with("brief: is there already")
        );
    }

    #[test]
    fn types_are_named_as_types_are() {
        assert_eq!(type_name("tool_guard2"), "ToolGuard2");
        assert_eq!(type_name("a__b_"), "AB");
    }
}
