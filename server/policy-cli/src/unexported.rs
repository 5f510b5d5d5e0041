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
                Some("rs") => (rust, in_rust(hook)),
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

fn is_comment(line: &str) -> bool {
    ["//", "#", "*"].iter().any(|mark| line.trim_start().starts_with(mark))
}

fn in_rust(hook: &str) -> String {
    match hook {
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
