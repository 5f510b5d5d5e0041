//! Warns of hooks that a source defines and its component does not export: the host never calls
//! them, and nothing else says so.
//!
//! The source is searched for the beginning of a definition, not parsed.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A hook, and how the languages begin its definition.
struct Definition {
    hook: &'static str,
    rust: &'static str,
    javascript: &'static str,
    python: &'static str,
    c: &'static str,
}

macro_rules! definition {
    ($hook:literal, $snake:literal, $camel:literal, $class:literal) => {
        Definition {
            hook: $hook,
            rust: concat!("fn ", $snake, "(&mut self"),
            javascript: concat!("export const ", $camel, " "),
            python: concat!("class ", $class, "("),
            c: concat!("exports_steersman_policy_", $snake, "_", $snake, "("),
        }
    };
}

const DEFINITIONS: &[Definition] = &[
    definition!("on-params", "on_params", "onParams", "OnParams"),
    definition!("on-prompt", "on_prompt", "onPrompt", "OnPrompt"),
    definition!("on-request", "on_request", "onRequest", "OnRequest"),
    definition!("on-step", "on_step", "onStep", "OnStep"),
    definition!("on-text", "on_text", "onText", "OnText"),
    definition!("on-tool-call", "on_tool_call", "onToolCall", "OnToolCall"),
    definition!("on-finish", "on_finish", "onFinish", "OnFinish"),
];

/// The interfaces that a policy may import.
const IMPORTS: [&str; 5] = ["log", "kv", "tokenizer", "counters", "failure"];

/// Bytes of a source that are searched; longer ones are generated.
const SOURCE_BYTES: u64 = 1 << 20;

/// Writes a line for each definition of a hook in `folder` that `exported` does not have.
///
/// # Errors
/// When a source cannot be read.
pub fn warn(folder: &Path, exported: &[impl AsRef<str>], out: &mut impl Write) -> Result<()> {
    let is_missing = |one: &&Definition| !exported.iter().any(|hook| hook.as_ref() == one.hook);
    let missing: Vec<_> = DEFINITIONS.iter().filter(is_missing).collect();
    for path in sources(folder) {
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        for Definition { hook, rust, javascript, python, c } in &missing {
            let (begin, remedy) = match path.extension().and_then(|ending| ending.to_str()) {
                Some("rs") => (rust, in_rust(hook, &text)),
                Some("js") => (javascript, in_world(hook)),
                Some("py") => (python, in_world(hook)),
                _ => (c, in_world(hook)),
            };
            let defines = |line: &str| line.contains(begin) && !is_comment(line);
            if let Some(line) = text.lines().position(defines) {
                let (path, line) = (path.display(), line + 1);
                writeln!(
                    out,
                    "warning: {path}:{line}: `{hook}` is defined and not exported, so it is never \
                     called: {remedy}"
                )?;
            }
        }
    }
    Ok(())
}

/// What rustc's error means, if it is about the form of `export!`: it names the token that does not fit, and no form
/// that would.
pub fn in_cargo(messages: &str) -> Option<String> {
    let (_, rest) = messages.split_once("error: no rules expected ")?;
    let error = rest.split("\n\n").next()?;
    let place = error.lines().find_map(|line| line.trim_start().strip_prefix("--> "))?;
    error.contains("export!(").then(|| {
        format!(
            "{place}: `export!` has one of these forms: export!(TYPE), export!(TYPE, without on_tool_call), \
             export!(TYPE, with on_text), and in this order export!(TYPE, without on_tool_call, with on_text)"
        )
    })
}

/// What componentize-py's traceback means, if it is about a hook or an import that `wit/world.wit` does not name.
pub fn in_python(messages: &str) -> Option<String> {
    let name = |begin: &str| {
        let (_, rest) = messages.split_once(begin)?;
        Some(rest.split_once('\'')?.0)
    };
    if let Some(class) = name("module 'wit_world.exports' has no attribute '") {
        let begin = format!("class {class}(");
        let Some(one) = DEFINITIONS.iter().find(|one| one.python == begin) else {
            let hooks: Vec<_> = DEFINITIONS.iter().map(|one| one.hook).collect();
            return Some(format!(
                "the source uses `exports.{class}`, and the contract has no such hook; it has {}",
                hooks.join(", ")
            ));
        };
        return Some(format!(
            "the source uses `exports.{class}`, and wit/world.wit does not export `{hook}`: {remedy}, then build again",
            hook = one.hook,
            remedy = in_world(one.hook),
        ));
    }
    // `from wit_world.imports import log`, and `import wit_world.imports.log`.
    let import = name("No module named 'wit_world.imports.").or_else(|| {
        let name = name("cannot import name '")?;
        messages.contains(&format!("'{name}' from 'wit_world.imports'")).then_some(name)
    })?;
    IMPORTS.contains(&import).then(|| {
        format!(
            "the source uses `wit_world.imports.{import}`, and wit/world.wit does not import it: add \
             `import {import};` to wit/world.wit, then build again"
        )
    })
}

fn is_comment(line: &str) -> bool {
    ["//", "#", "*"].iter().any(|mark| line.trim_start().starts_with(mark))
}

/// The remedy in the source `text`, whose macro may leave out another hook already.
fn in_rust(hook: &str, text: &str) -> String {
    match hook {
        "on-text" if text.contains("without on_tool_call") => {
            "write `export!(TYPE, without on_tool_call, with on_text)`".into()
        }
        "on-text" => "write `export!(TYPE, with on_text)`".into(),
        "on-tool-call" => "remove `without on_tool_call` from `export!`".into(),
        _ => "export the policy with `steersman_policy::export!`".into(),
    }
}

fn in_world(hook: &str) -> String {
    format!("add `export {hook};` to wit/world.wit")
}

/// The sources of a policy: those in its folder, and in `src` for Rust.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let is_rust = folder.join("Cargo.toml").is_file();
    let (folder, endings) = if is_rust {
        (folder.join("src"), &["rs"][..])
    } else {
        (folder.into(), &["js", "py", "c"][..])
    };
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_source = |path: &PathBuf| {
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let is_short = std::fs::metadata(path).is_ok_and(|file| file.len() <= SOURCE_BYTES);
        endings.contains(&ending) && is_short
    };
    let mut paths: Vec<_> = files.map(|file| file.path()).filter(is_source).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The warnings for a file in a folder.
    fn warnings(file: &str, text: &str, exported: &[&str]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        if file.ends_with(".rs") {
            std::fs::write(folder.path().join("Cargo.toml"), "").unwrap();
        }
        let mut out = Vec::new();
        warn(folder.path(), exported, &mut out).unwrap();
        let out = String::from_utf8(out).unwrap();
        let out = out.replace(&format!("{}/", folder.path().display()), "");
        out.lines().map(str::to_owned).collect()
    }

    /// `on_text` of an author never ran, and nothing said so.
    #[test]
    fn a_hook_that_is_defined_and_not_exported_is_reported_with_its_line_and_the_remedy() {
        let why = "is defined and not exported, so it is never called";
        let world = |hook: &str| format!("`{hook}` {why}: add `export {hook};` to wit/world.wit");
        let rust = "impl Policy for A {\n    fn on_text(&mut self, view: TextView) {}\n}\n";
        assert_eq!(
            warnings("src/lib.rs", rust, &["on-step"]),
            [format!(
                "warning: src/lib.rs:2: `on-text` {why}: write `export!(TYPE, with on_text)`"
            )]
        );
        for (file, text, hook) in [
            ("a.js", "\nexport const onToolCall = {\n", "on-tool-call"),
            ("a.py", "\nclass OnText(exports.OnText):\n", "on-text"),
            ("a.c", "\nvoid exports_steersman_policy_on_finish_on_finish(x *y) {\n", "on-finish"),
        ] {
            assert_eq!(
                warnings(file, text, &["on-step"]),
                [format!("warning: {file}:2: {}", world(hook))]
            );
            assert_eq!(warnings(file, text, &[hook]), [""; 0]);
        }
        let call = "fn on_tool_call(&mut self, call: ToolCallView) -> Verdict {";
        let warned = warnings("src/lib.rs", call, &["on-step"]);
        assert!(warned[0].ends_with("remove `without on_tool_call` from `export!`"), "{warned:?}");
        assert_eq!(warnings("src/lib.rs", &format!("// {call}"), &["on-step"]), [""; 0]);
    }

    /// `no rules expected` told an author who wrote both in the other order neither what fits nor what to do.
    #[test]
    fn the_forms_of_export_are_told_where_another_one_is_written() {
        let error = "warning: unused variable\n\nerror: no rules expected `,`\n  --> src/lib.rs:9:42\n   |\n\
                     9 | steersman_policy::export!(Calm, with on_text, without on_tool_call);\n   |  ^ no rules\n\n\
                     error: could not compile `calm`";
        let problem = in_cargo(error).unwrap();
        assert!(
            problem.starts_with("src/lib.rs:9:42: `export!` has one of these forms: "),
            "{problem}"
        );
        assert!(
            problem.ends_with("export!(TYPE, without on_tool_call, with on_text)"),
            "{problem}"
        );
        assert_eq!(in_cargo("error[E0308]: mismatched types\n --> src/lib.rs:1:1"), None);
        assert_eq!(
            in_cargo("error: no rules expected `x`\n --> src/lib.rs:1:1\n1 | vec!(x y)"),
            None
        );
        let source =
            "fn on_text(&mut self, view: TextView) {}\nexport!(A, without on_tool_call);\n";
        let warned = warnings("src/lib.rs", source, &["on-step"]);
        let both = "write `export!(TYPE, without on_tool_call, with on_text)`";
        assert!(warned[0].ends_with(both), "{warned:?}");
    }

    #[test]
    fn errors_of_python_about_the_world_name_the_line_that_it_lacks() {
        for (error, expected) in [
            (
                "AttributeError: module 'wit_world.exports' has no attribute 'OnToolCall'. Did you mean: 'OnStep'?",
                "the source uses `exports.OnToolCall`, and wit/world.wit does not export `on-tool-call`: \
                 add `export on-tool-call;` to wit/world.wit, then build again",
            ),
            (
                "AttributeError: module 'wit_world.exports' has no attribute 'OnTxt'",
                "the source uses `exports.OnTxt`, and the contract has no such hook; it has on-params, \
                 on-prompt, on-request, on-step, on-text, on-tool-call, on-finish",
            ),
            (
                "ImportError: cannot import name 'log' from 'wit_world.imports' (/world/wit_world/__init__.py)",
                "the source uses `wit_world.imports.log`, and wit/world.wit does not import it: add \
                 `import log;` to wit/world.wit, then build again",
            ),
        ] {
            let messages =
                format!("Traceback (most recent call last):\n  File \"brief.py\"\n{error}\n");
            assert_eq!(in_python(&messages).as_deref(), Some(expected));
        }
        for other in [
            "SyntaxError: invalid syntax",
            "ImportError: cannot import name 'log' from 'words' (/words.py)",
            "AttributeError: module 'words' has no attribute 'OnText'",
        ] {
            assert_eq!(in_python(other), None);
        }
    }

    #[test]
    fn every_import_of_the_contract_is_known() {
        let contract = include_str!("../../../wit/policy.wit");
        let (_, world) = contract.split_once("world hooks {").unwrap();
        let imports = world.lines().filter_map(|line| line.trim().strip_prefix("import "));
        let mut imports: Vec<_> = imports.map(|name| name.trim_end_matches(';')).collect();
        imports.sort_unstable();
        let mut known = IMPORTS;
        known.sort_unstable();
        assert_eq!(imports, known);
    }

    #[test]
    fn every_hook_of_the_contract_is_known() {
        let contract = include_str!("../../../wit/policy.wit");
        let (_, world) = contract.split_once("world policy-with-host {").unwrap();
        assert!(world.contains("on-text"));
        let hooks = contract.lines().filter_map(|line| line.strip_prefix("interface on-"));
        let hooks: Vec<_> =
            hooks.map(|rest| format!("on-{}", rest.trim_end_matches(" {"))).collect();
        assert_eq!(hooks, DEFINITIONS.iter().map(|one| one.hook).collect::<Vec<_>>());
    }
}
