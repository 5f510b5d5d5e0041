//! Each external library is used in few places, so that it can be replaced there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A crate as it is written in paths, and the beginnings of the paths that may use it.
const WALLS: [(&str, &[&str]); 7] = [
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
            "engine/src/cache",
            "engine/src/decode",
            "engine/src/draft",
            "engine/src/kernels",
            "engine/src/lazy.rs",
            "engine/src/measure",
            "engine/src/model",
            "engine/src/nn",
            "engine/src/prefix",
            "engine/src/sample",
            "engine/src/schedule",
            "engine/src/sequence",
            "tests/",
        ],
    ),
    ("axum", &["server/", "tests/"]),
    ("tokenizers", &["engine/src/text"]),
    ("minijinja", &["engine/jinja/", "server/bench/src/report.rs"]),
    ("rmcp", &["server/src/mcp/"]),
];

/// Folders with the sources of the workspace.
const SOURCES: [&str; 4] = ["engine", "policies/sdk", "server", "tests"];

/// The uses of a library outside its walls: `path:line: library`.
fn offenders(path: &str, source: &str) -> Vec<String> {
    let code = without_comments_and_literals(source);
    let walled = WALLS.iter().filter(|(_, allowed)| !allowed.iter().any(|a| path.starts_with(a)));
    let mut found = Vec::new();
    for (library, _) in walled {
        let lines = (1..).zip(code.lines());
        let used = lines.filter(|(_, line)| names_crate(line, library));
        found.extend(used.map(|(number, _)| format!("{path}:{number}: {library}")));
    }
    found
}

/// Whether a line of code has a path that begins with the crate, or imports the crate as a whole.
fn names_crate(line: &str, library: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(library).any(|(at, _)| {
        let (before, after) = (line[..at].trim_end(), line[at + library.len()..].trim_start());
        let is_word =
            !line[..at].ends_with(is_name) && !line[at + library.len()..].starts_with(is_name);
        let is_inner = before.ends_with("::") && before.len() > 2 && !before.ends_with(" ::");
        let begins_path = after.starts_with("::");
        let imported = ["use", "crate"].iter().any(|word| before.ends_with(word));
        is_word && !is_inner && (begins_path || imported)
    })
}

/// The code with comments, texts and characters blanked; lines stay where they are.
fn without_comments_and_literals(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let skipped = literal_or_comment(rest, code.chars().next_back());
        if skipped == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let (literal, after) = rest.split_at(skipped);
        code.extend(literal.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = after;
    }
    code
}

/// Length in bytes of the comment, text or character at the beginning of `rest`; 0 if there is none.
fn literal_or_comment(rest: &str, before: Option<char>) -> usize {
    let through = |end: &str, from: usize| {
        rest[from..].find(end).map_or(rest.len(), |at| from + at + end.len())
    };
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        let (mut depth, mut at) = (0, 0);
        while at < rest.len() {
            match &rest.as_bytes()[at..rest.len().min(at + 2)] {
                b"/*" => (depth, at) = (depth + 1, at + 2),
                b"*/" => (depth, at) = (depth - 1, at + 2),
                _ => at += 1,
            }
            if depth == 0 {
                break;
            }
        }
        return rest.floor_char_boundary(at);
    }
    let in_name = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if let Some(raw) = rest.strip_prefix("br").or(rest.strip_prefix('r')).filter(|_| !in_name) {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            let start = rest.len() - raw.len() + hashes + 1;
            return through(&format!("\"{}", "#".repeat(hashes)), start);
        }
    }
    if rest.starts_with('"') {
        let mut escaped = false;
        let end = rest.char_indices().skip(1).find(|&(_, c)| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        return end.map_or(rest.len(), |(at, _)| at + 1);
    }
    if rest.starts_with('\'') {
        // `'x'` or `'\n'`; a lifetime has no second quote.
        let mut chars = rest.char_indices().skip(1);
        let escaped = chars.next().is_some_and(|(_, c)| c == '\\');
        return match chars.next() {
            Some(_) if escaped => through("'", 3),
            Some((at, '\'')) => at + 1,
            _ => 0,
        };
    }
    0
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
            let code = without_comments_and_literals(&source);
            assert!(code.lines().any(|line| names_crate(line, library)), "{allowed}: {library}");
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
        let source = format!("// first\n{line}\n");
        assert_eq!(offenders("server/src/main.rs", &source), ["server/src/main.rs:2: wasmtime"]);
        assert_eq!(offenders("engine/policy-host/src/sandbox.rs", &source), [""; 0], "{line}");
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

/// Otherwise `cargo run` compiles most dependencies a second time after `cargo test`. A crate that enables more
/// features as a dev-dependency becomes a plain dependency of `steersman-tests` too.
#[test]
fn dev_dependencies_enable_no_features_of_their_own() {
    let (binary, tests) = (resolved("normal,build"), resolved("normal,build,dev"));
    let differing: Vec<_> = binary.difference(&tests).collect();
    assert!(differing.is_empty(), "with other features in tests: {differing:#?}");
}
