//! `steersman policy new`: creates a folder with a small policy.
//!
//! It is the policy of `template/`, with the tools and helpers of `policies/examples`, and a copy of the
//! contract, so that the policy does not change when the server is updated.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};

/// Name and language.
#[derive(Args)]
pub struct New {
    /// Name of the policy and its folder: lower-case letters, digits, - and _
    name: String,
    /// Programming language
    #[arg(long, value_enum)]
    lang: Language,
    /// Folder in which its folder is created
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    into: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Language {
    /// 30 to 150 kB, about 1 us a step
    Rust,
    /// JavaScript: 12 MB, about 30 us a step
    Js,
    /// 18 MB, about 15 us a step
    Python,
    /// 10 to 20 kB, about 1 us a step
    C,
}

impl Language {
    /// The command that installs the tools which a folder pins; `None` if it pins none. In a virtual environment of
    /// the folder `steersman policy build` finds them.
    fn install(self) -> Option<&'static str> {
        match self {
            Self::Rust => None,
            Self::Js => Some("npm install"),
            Self::Python | Self::C => {
                Some("python3 -m venv .venv && .venv/bin/pip install -r requirements.txt")
            }
        }
    }
}

const CONTRACT: &str = include_str!("../../../wit/policy.wit");
const GOLDEN: &str = include_str!("template/policy.jsonl");
const WORLD: &str = include_str!("template/world.wit");
const README: &str = include_str!("template/README.md");
const SCHEMA: &str = include_str!("template/params.toml");
const IGNORED: &str = "target\nnode_modules\n.venv\n__pycache__\nbindings\n*.wasm\n*.steer\n";

/// The sources of the SDK. A policy in Rust has a copy of it.
const SDK: &[(&str, &str)] = &[
    ("bindings.rs", include_str!("../../../policies/sdk/src/bindings.rs")),
    ("host.rs", include_str!("../../../policies/sdk/src/host.rs")),
    ("lib.rs", include_str!("../../../policies/sdk/src/lib.rs")),
    ("params.rs", include_str!("../../../policies/sdk/src/params.rs")),
    ("prompt.rs", include_str!("../../../policies/sdk/src/prompt.rs")),
];
const SDK_MANIFEST: &str = include_str!("../../../policies/sdk/Cargo.toml");

/// Creates the folder and prints the next commands.
///
/// # Errors
/// When the name is invalid, or the folder exists or cannot be written.
pub fn run(options: New, out: &mut impl Write) -> Result<()> {
    let New { name, lang, into } = options;
    check_name(&name)?;
    ensure!(
        lang != Language::Python || !is_python_module(&module_name(&name)),
        "`{name}` is the name of a Python module, which {name}.py would hide; choose another name"
    );
    let folder = into.join(&name);
    ensure!(!folder.exists(), "{}: already exists", folder.display());
    for (path, text) in files(&name, lang) {
        write(&folder.join(path), &text)?;
    }
    let folder = folder.display();
    writeln!(out, "{folder}: created; its README.md explains the files. Next:")?;
    if let Some(install) = lang.install() {
        writeln!(out, "  (cd {folder} && {install})")?;
    }
    writeln!(out, "  steersman policy build {folder}")?;
    writeln!(out, "  steersman policy test {folder}/{name}.wasm {folder}/{name}.jsonl")?;
    Ok(())
}

fn check_name(name: &str) -> Result<()> {
    let starts = name.starts_with(|c: char| c.is_ascii_lowercase());
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
    ensure!(
        starts && name.chars().all(fits) && name.len() <= 64,
        "`{name}` is not a valid name: use at most 64 lower-case letters, digits, - and _, beginning with a \
         letter"
    );
    // Names of the world, of Python's bindings, of helpers and of crates that cargo already knows.
    let reserved = ["guest", "wit_world", "core", "std", "alloc", "test", "steersman_policy"];
    let is_reserved = reserved.contains(&&*module_name(name));
    ensure!(!is_reserved, "`{name}` is reserved by the tools; choose another name");
    Ok(())
}

/// The name of a module: Python and Rust have no `-` in theirs.
fn module_name(name: &str) -> String {
    name.replace('-', "_")
}

/// Whether Python's standard library has a module of this name; `false` without Python.
fn is_python_module(name: &str) -> bool {
    let asked = "import sys; sys.exit(0 if sys.argv[1] in sys.stdlib_module_names else 1)";
    let python = Command::new("python3").args(["-c", asked, name]).output();
    python.is_ok_and(|output| output.status.success())
}

fn write(path: &Path, text: &str) -> Result<()> {
    let parent = path.parent().expect("the path is inside the folder of the policy");
    std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// The files of a new policy: paths in its folder, and contents.
fn files(name: &str, lang: Language) -> Vec<(String, String)> {
    macro_rules! example {
        ($path:literal) => {
            include_str!(concat!("../../../policies/examples/", $path))
        };
    }
    let (source, install, contract) = match lang {
        Language::Rust => (
            "src/lib.rs".to_owned(),
            "Install a compiler for WebAssembly: `rustup target add wasm32-unknown-unknown`, or on Debian\n\
             `apt-get install rustc-web rust-web-src lld-22`. `cargo test` runs the native tests.",
            "sdk/wit/policy.wit",
        ),
        Language::Js => (
            format!("{name}.js"),
            "Install componentize-js: run `npm install` in this folder. wit/world.wit lists the exported hooks;\n\
             steersman-policy.js has plans with defaults.",
            "wit/policy.wit",
        ),
        Language::Python => (
            format!("{}.py", module_name(name)),
            "Install componentize-py in a virtual environment of this folder:\n\
             `python3 -m venv .venv && .venv/bin/pip install -r requirements.txt`. wit/world.wit lists the exported\n\
             hooks; steersman_policy.py has plans with defaults.",
            "wit/policy.wit",
        ),
        Language::C => (
            format!("{name}.c"),
            "Install a compiler for C, zig, in a virtual environment of this folder:\n\
             `python3 -m venv .venv && .venv/bin/pip install -r requirements.txt`. wit/world.wit lists the exported\n\
             hooks; `build` writes their header, bindings/guest.h.",
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
        (format!("{name}.params.toml"), SCHEMA.into()),
        (contract.into(), CONTRACT.into()),
    ];
    let mut add = |path: &str, text: &str| files.push((path.into(), text.into()));
    match lang {
        Language::Rust => {
            let manifest = example!("rust/Cargo.toml");
            let named = format!("name = \"{name}\"");
            let manifest = manifest.replace("name = \"brief\"", &named).replace("../../sdk", "sdk");
            add("Cargo.toml", &manifest);
            add(&source, &include_str!("template/lib.rs").replace("MyPolicy", &type_name(name)));
            add("sdk/Cargo.toml", &sdk_manifest());
            for (file, text) in SDK {
                add(&format!("sdk/src/{file}"), text);
            }
        }
        Language::Js => {
            add(&source, include_str!("template/policy.js"));
            add("steersman-policy.js", example!("javascript/steersman-policy.js"));
            add("package.json", example!("javascript/package.json"));
            add("wit/world.wit", WORLD);
        }
        Language::Python => {
            add(&source, include_str!("template/policy.py"));
            add("steersman_policy.py", example!("python/steersman_policy.py"));
            add("requirements.txt", example!("python/requirements.txt"));
            add("wit/world.wit", WORLD);
        }
        Language::C => {
            add(&source, include_str!("template/policy.c"));
            add("requirements.txt", example!("c/requirements.txt"));
            add("wit/world.wit", WORLD);
        }
    }
    files
}

/// The name of a type: `ToolGuard` for `tool-guard`.
fn type_name(name: &str) -> String {
    name.split(['-', '_'])
        .map(|word| {
            let first = word.get(..1).unwrap_or_default().to_ascii_uppercase();
            first + word.get(1..).unwrap_or_default()
        })
        .collect()
}

/// The manifest of the copy of the SDK: without the workspace and the dependencies of its tests.
fn sdk_manifest() -> String {
    let bindgen = SDK_MANIFEST.lines().find(|line| line.starts_with("wit-bindgen"));
    format!(
        "[package]\nname = \"steersman-policy\"\nversion = \"{}\"\nedition = \"2024\"\nlicense = \"{}\"\n\
         publish = false\n\n[dependencies]\n{}\n",
        env!("CARGO_PKG_VERSION"),
        env!("CARGO_PKG_LICENSE"),
        bindgen.expect("the SDK depends on wit-bindgen: checked by a test"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result, and what was printed.
    fn create(name: &str, lang: Language) -> (tempfile::TempDir, Result<String>) {
        let into = tempfile::tempdir().unwrap();
        let mut out = Vec::new();
        let created = run(New { name: name.into(), lang, into: into.path().into() }, &mut out);
        (into, created.map(|()| String::from_utf8(out).unwrap()))
    }

    #[test]
    fn a_new_policy_has_source_golden_file_contract_and_readme_with_its_name() {
        let cases = [
            (Language::Rust, "src/lib.rs", "sdk/wit/policy.wit"),
            (Language::Js, "calm-dash.js", "wit/policy.wit"),
            (Language::Python, "calm_dash.py", "wit/policy.wit"),
            (Language::C, "calm-dash.c", "wit/policy.wit"),
        ];
        for (lang, source, contract) in cases {
            let (into, created) = create("calm-dash", lang);
            created.unwrap();
            let folder = into.path().join("calm-dash");
            let read = |path: &str| std::fs::read_to_string(folder.join(path));
            assert_eq!(read(contract).unwrap(), CONTRACT);
            assert_eq!(read("calm-dash.jsonl").unwrap(), GOLDEN);
            let is_named =
                lang != Language::Rust || read(source).unwrap().contains("struct CalmDash;");
            assert!(is_named, "{lang:?}");
            let readme = read("README.md").unwrap();
            assert!(readme.contains("calm-dash.wasm") && readme.contains(source), "{readme}");
            assert!(!["NAME", "SOURCE", "CONTRACT", "INSTALL"].iter().any(|w| readme.contains(w)));
        }
    }

    /// `policy check` of an author's own policy listed `ban`, `budget` and `phrase`, the parameters of the example.
    #[test]
    fn nothing_of_the_example_is_left_in_a_new_policy() {
        for lang in [Language::Rust, Language::Js, Language::Python, Language::C] {
            let own = files("calm", lang).into_iter();
            let own = own.filter(|(path, _)| !path.starts_with("sdk/") && !path.ends_with(".wit"));
            for (path, text) in own {
                for word in ["brief", "Brief", "ban", "budget", "phrase"] {
                    let mut words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
                    assert!(!words.any(|one| one == word), "{lang:?}: {path}: {word}");
                }
            }
        }
        let schema = steersman_policy_host::Schema::parse(SCHEMA).unwrap();
        assert_eq!(schema.names().count(), 0);
    }

    #[test]
    fn the_next_steps_begin_with_the_tools_of_the_language() {
        for (lang, first) in [
            (Language::Rust, "steersman policy build "),
            (Language::Js, "(cd FOLDER && npm install)"),
            (Language::Python, "(cd FOLDER && python3 -m venv .venv && "),
            (Language::C, "(cd FOLDER && python3 -m venv .venv && "),
        ] {
            let (into, printed) = create("calm", lang);
            let folder = into.path().join("calm").display().to_string();
            let printed = printed.unwrap().replace(&folder, "FOLDER");
            let next = printed.lines().nth(1).unwrap();
            assert!(next.trim_start().starts_with(first), "{lang:?}: {printed}");
            assert!(printed.contains("\n  steersman policy build FOLDER\n"), "{printed}");
        }
    }

    #[test]
    fn the_copy_of_the_sdk_is_complete() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies/sdk/src");
        let mut files: Vec<_> = std::fs::read_dir(sources)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(files, SDK.iter().map(|(file, _)| *file).collect::<Vec<_>>());
        let manifest: toml::Table = sdk_manifest().parse().unwrap();
        assert!(manifest["dependencies"].get("wit-bindgen").is_some());
    }

    #[test]
    fn an_invalid_name_and_an_existing_folder_are_refused() {
        for name in
            ["", "1a", "-a", "Brief", "a b", "a/b", "..", "guest", "std", "steersman-policy"]
        {
            let (into, created) = create(name, Language::Js);
            assert!(created.is_err(), "{name}");
            assert_eq!(std::fs::read_dir(into.path()).unwrap().count(), 0, "{name}");
        }
        let (into, created) = create("brief", Language::Js);
        created.unwrap();
        let again = New { name: "brief".into(), lang: Language::Js, into: into.path().into() };
        assert!(
            run(again, &mut Vec::new()).unwrap_err().to_string().ends_with("brief: already exists")
        );
    }

    #[test]
    fn type_names_are_in_camel_case() {
        assert_eq!(type_name("tool_guard2"), "ToolGuard2");
        assert_eq!(type_name("calm-dash"), "CalmDash");
        assert_eq!(type_name("a__b_"), "AB");
    }
}
