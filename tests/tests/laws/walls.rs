//! Each external library is used in few places, so that it can be replaced there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use proc_macro2::{LexError, TokenStream, TokenTree};

/// A crate as it is written in paths, and the beginnings of the paths that may use it.
const WALLS: [(&str, &[&str]); 8] = [
    ("wasmtime", &["engine/policy-host/src/"]),
    (
        "redb",
        &[
            "engine/database/",
            "engine/src/store",
            "engine/policy-host/src/database.rs",
            // Damages a store on purpose.
            "tests/tests/restart/store/",
        ],
    ),
    (
        "mlx_rs",
        &[
            "engine/mlx-sys/",
            "engine/request/src/mlx.rs",
            "engine/src/cache",
            "engine/src/decode",
            "engine/src/device",
            "engine/src/draft",
            "engine/src/kernel_check",
            "engine/src/kernels",
            "engine/src/lazy.rs",
            "engine/src/measure",
            "engine/src/model",
            "engine/src/nn",
            "engine/src/prefix",
            "engine/src/ranks",
            "engine/src/sample",
            "engine/src/schedule",
            "engine/src/sequence",
            "tests/",
        ],
    ),
    ("axum", &["server/", "tests/"]),
    ("tokenizers", &["engine/text/src/"]),
    ("llguidance", &["engine/text/src/grammar/"]),
    ("minijinja", &["engine/jinja/", "server/bench/src/report.rs"]),
    ("rmcp", &["server/src/mcp/"]),
];

/// Folders with the sources of the workspace.
const SOURCES: [&str; 4] = ["engine", "policies/sdk", "server", "tests"];

/// The libraries that a source uses outside their walls: `path: library`.
fn offenders(path: &str, source: &str) -> Vec<String> {
    let code = tokens(source).unwrap_or_else(|error| panic!("{path}: {error}"));
    let walled = WALLS.iter().filter(|(_, allowed)| !allowed.iter().any(|a| path.starts_with(a)));
    let used = walled.filter(|(library, _)| names_crate(&code, library));
    used.map(|(library, _)| format!("{path}: {library}")).collect()
}

/// Names, punctuation and brackets of a source, without comments and the contents of literals.
fn tokens(source: &str) -> Result<Vec<String>, LexError> {
    fn add(code: TokenStream, tokens: &mut Vec<String>) {
        for token in code {
            match token {
                TokenTree::Group(group) => {
                    tokens.push("(".into());
                    add(group.stream(), tokens);
                    tokens.push(")".into());
                }
                TokenTree::Literal(_) => tokens.push("0".into()),
                name => tokens.push(name.to_string()),
            }
        }
    }
    let mut all = Vec::new();
    add(source.parse()?, &mut all);
    Ok(all)
}

/// Whether code has a path that begins with the crate, or imports the crate as a whole.
fn names_crate(code: &[String], library: &str) -> bool {
    let is_path = |tokens: &[String]| tokens.iter().filter(|token| *token == ":").count() == 2;
    let names = code.iter().enumerate().filter(|(_, token)| *token == library);
    names.map(|(at, _)| (&code[..at], &code[at + 1..])).any(|(before, after)| {
        let (outer, colons) = before.split_at(before.len().saturating_sub(2));
        let is_name = |token: &String| {
            token.starts_with(char::is_alphabetic)
                && !["use", "as", "return"].contains(&token.as_str())
        };
        let is_inner = is_path(colons) && outer.last().is_some_and(is_name);
        let begins_path = is_path(&after[..after.len().min(2)]);
        let is_imported =
            before.last().is_some_and(|word| ["use", "crate"].contains(&word.as_str()));
        !is_inner && (begins_path || is_imported)
    })
}

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All Rust sources below a folder.
pub fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files = Vec::new();
    for path in entries {
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

#[test]
fn libraries_are_used_within_their_walls() {
    let root = root();
    let files: Vec<_> = SOURCES.iter().flat_map(|folder| sources(&root.join(folder))).collect();
    assert!(files.len() > 100, "{} files", files.len());
    let mut found = Vec::new();
    for file in &files {
        let path = file.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
        found.extend(offenders(&path, &fs::read_to_string(file).unwrap()));
    }
    assert!(found.is_empty(), "used outside their walls:\n{}", found.join("\n"));
}

#[test]
fn every_wall_encloses_a_use() {
    for (library, allowed) in WALLS {
        for allowed in allowed.iter().filter(|allowed| allowed.ends_with(".rs")) {
            let source = fs::read_to_string(root().join(allowed)).expect(allowed);
            let code = tokens(&source).expect(allowed);
            assert!(names_crate(&code, library), "{allowed}: {library}");
        }
    }
}

#[test]
fn the_check_finds_uses_and_ignores_comments_and_texts() {
    let offending = [
        "use wasmtime::Store;",
        "    let engine = wasmtime::Engine::default();",
        "pub use wasmtime;",
        "use wasmtime as w;",
        "extern crate wasmtime;",
        "use ::wasmtime::Store;",
        "let url = \"http://x\"; wasmtime::f()",
        "let quote = '\"'; wasmtime::f(); let other = '\"';",
        "fn f<'a>(x: &'a str) { wasmtime::f() }",
        "let text = r#\"a \" b\"#; wasmtime::f()",
        "/* a /* b */ c */ wasmtime::f()",
        "#[doc = \"x\"] impl wasmtime::ResourceLimiter for State {}",
    ];
    for line in offending {
        assert_eq!(offenders("server/src/main.rs", line), ["server/src/main.rs: wasmtime"]);
        assert_eq!(offenders("engine/policy-host/src/sandbox.rs", line), [""; 0], "{line}");
    }
    let allowed = [
        "// use wasmtime::Store;",
        "//! [`wasmtime::Store`]",
        "/* use wasmtime::Store; */",
        "/* a /* b */ use wasmtime::Store; */",
        "let text = \"wasmtime::Store\";",
        "let text = \"\\\" wasmtime::Store\";",
        "let text = r#\"\" wasmtime::Store\"#;",
        "let wasmtime = 1;",
        "use my_wasmtime::Store;",
        "use wasmtimes::Store;",
        "use crate::wasmtime::Store;",
        "mod wasmtime; use self::wasmtime::Store;",
    ];
    for line in allowed {
        assert_eq!(offenders("server/src/main.rs", line), [""; 0], "{line}");
    }
}

/// `name version features` of each package in the build of the given kinds of dependencies.
fn resolved(kinds: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--workspace", "--locked", "--offline", "--prefix=none"])
        .args(["--edges", kinds, "--format", "{p} {f}"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| line.trim_end_matches(" (*)").trim_end().to_owned()).collect()
}

/// An example in a comment that no command compiles would rot. `doctest = false` spares each crate a start of rustdoc.
#[test]
fn no_comment_has_an_example_that_is_not_compiled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let is_off = |folder: &Path| {
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
        manifest.contains("doctest = false")
    };
    let mut offenders = Vec::new();
    for path in ["engine", "server", "tests"].iter().flat_map(|folder| sources(&root.join(folder)))
    {
        let is_of_crate = path.ancestors().find(|folder| folder.join("Cargo.toml").exists());
        if !is_of_crate.is_some_and(is_off) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let mut is_inside = false;
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            let comment = line.strip_prefix("///").or(line.strip_prefix("//!"));
            let Some(language) = comment.and_then(|text| text.trim().strip_prefix("```")) else {
                continue;
            };
            is_inside = !is_inside;
            if is_inside && (language.is_empty() || language.starts_with("rust")) {
                offenders.push(format!("{}:{number}", path.display()));
            }
        }
    }
    assert!(offenders.is_empty(), "examples in crates with `doctest = false`: {offenders:#?}");
}

/// Otherwise `cargo run` compiles most dependencies a second time after `cargo test`. A crate that enables more
/// features as a dev-dependency becomes a plain dependency of `steersman-tests` too.
#[test]
fn dev_dependencies_enable_no_features_of_their_own() {
    let (binary, tests) = (resolved("normal,build"), resolved("normal,build,dev"));
    let differing: Vec<_> = binary.difference(&tests).collect();
    assert!(differing.is_empty(), "with other features in tests: {differing:#?}");
}
