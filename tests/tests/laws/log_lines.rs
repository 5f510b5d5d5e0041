//! Lines of the log that operators read have no text of Rust's `Debug`: neither `Some(Stop)` nor `PassBytes { .. }`.
//! What is for authors is logged at `debug`.

use std::fs;

use proc_macro2::{TokenStream, TokenTree};

use crate::walls::{root, sources};

/// Folders with the sources of programs that log.
const LOGGING: [&str; 2] = ["engine", "server"];

/// The macros whose lines operators read, also as `tracing::info`.
const MACROS: [&str; 3] = ["info", "warn", "error"];

/// The fields and texts of a source that are logged for operators with `Debug`.
fn debug_fields(code: TokenStream) -> Vec<String> {
    let tokens: Vec<TokenTree> = code.into_iter().collect();
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let TokenTree::Group(group) = token else { continue };
        found.extend(debug_fields(group.stream()));
        if let [.., TokenTree::Ident(name), TokenTree::Punct(mark)] = &tokens[..at]
            && mark.as_char() == '!'
            && MACROS.contains(&name.to_string().as_str())
        {
            found.extend(debug_arguments(group.stream()));
        }
    }
    found
}

/// The arguments of one call: `?field`, `field = ?value`, and texts with `{value:?}`.
fn debug_arguments(code: TokenStream) -> Vec<String> {
    let tokens: Vec<TokenTree> = code.into_iter().collect();
    let is_mark = |token: &TokenTree, marks: &str| match token {
        TokenTree::Punct(mark) => marks.contains(mark.as_char()),
        _ => false,
    };
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let begins_value = at == 0 || is_mark(&tokens[at - 1], "=,");
        if is_mark(token, "?") && begins_value {
            found.push(tokens[at..].iter().take(4).map(ToString::to_string).collect());
        }
        if let TokenTree::Literal(text) = token
            && text.to_string().contains(":?}")
        {
            found.push(text.to_string());
        }
    }
    found
}

#[test]
fn lines_for_operators_have_no_debug_formatting() {
    let root = root();
    let files: Vec<_> = LOGGING.iter().flat_map(|folder| sources(&root.join(folder))).collect();
    assert!(files.len() > 100, "{} files", files.len());
    let mut found = Vec::new();
    for file in &files {
        let code = fs::read_to_string(file).unwrap().parse().unwrap();
        let path = file.strip_prefix(&root).unwrap().display().to_string();
        found.extend(debug_fields(code).iter().map(|field| format!("{path}: {field}")));
    }
    assert!(found.is_empty(), "logged with Debug at info or above:\n{}", found.join("\n"));
}

#[test]
fn the_check_finds_debug_formatting_and_nothing_else() {
    let found = |source: &str| debug_fields(source.parse().unwrap()).len();
    for source in [
        "tracing::info!(?elapsed, \"done\");",
        "fn f() { match x { Ok(()) => warn!(path, reason = ?reason, \"late\") } }",
        "error!(\"it is {error:?}\")",
    ] {
        assert_eq!(found(source), 1, "{source}");
    }
    for source in [
        "tracing::debug!(?elapsed, \"done\");",
        "tracing::info!(%path, bytes = file.len()?, \"read\");",
        "println!(\"{x:?}\"); // info!(?x)",
    ] {
        assert_eq!(found(source), 0, "{source}");
    }
}
