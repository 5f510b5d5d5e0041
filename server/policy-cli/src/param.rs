//! Parameters of the command line, `--param NAME=TEXT` or `--param NAME=@FILE`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use steersman_policy_host::{conform, refused_params};

use super::Loaded;

/// A parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct Param {
    name: String,
    text: String,
    /// Path of the file whose text it is.
    file: Option<String>,
}

/// Parses `NAME=TEXT` or `NAME=@FILE`, and reads the file.
///
/// # Errors
/// The problem, for clap.
pub fn parse(text: &str) -> Result<Param, String> {
    let (name, value) = text.split_once('=').ok_or("is not NAME=TEXT")?;
    let name = name.to_owned();
    let Some(file) = value.strip_prefix('@') else {
        if Path::new(value).is_file() {
            eprintln!("--param {text}: {value} is a file; {name}=@{value} reads it");
        }
        return Ok(Param { name, text: value.into(), file: None });
    };
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    Ok(Param { name, text, file: Some(file.into()) })
}

/// Names and texts, of several with one name the last, sorted by name.
pub fn texts(params: &[Param]) -> Vec<(String, String)> {
    let texts = params.iter().map(|param| (param.name.clone(), param.text.clone()));
    texts.collect::<BTreeMap<_, _>>().into_iter().collect()
}

/// Checks parameters with the schema of a policy, if there is one, and by its `on-params`.
///
/// # Errors
/// What is wrong, with the name of a parameter or its file: `rules.toml: rule 2, line 9: ...`.
pub fn check(loaded: &Loaded, params: &[Param]) -> Result<()> {
    if params.is_empty() {
        return Ok(());
    }
    let component = &loaded.component;
    if let (None, Some(path)) = (&loaded.bundle.schema, &loaded.path) {
        let schema = path.with_extension("params.toml");
        eprintln!("{}: does not exist, so no schema checks --param", schema.display());
    }
    let texts = texts(params);
    let schemas = vec![(component.name().to_owned(), loaded.bundle.schema.clone())];
    conform(&schemas, &texts).map_err(|problem| anyhow!("--param: {problem}"))?;
    if loaded.bundle.schema.is_none() {
        let refused = refused_params(component, &texts);
        if !refused.is_empty() {
            bail!("--param: {}", refused.join("\n"));
        }
    }
    let prepared = component.prepare("default", &texts).map_err(|failure| anyhow!("{failure}"))?;
    let problems: Vec<_> = prepared.problems.iter().map(|one| with_file(one, params)).collect();
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(())
}

/// A problem that begins with "parameter `NAME`: ", with the file of that parameter instead if it
/// has one.
fn with_file(problem: &str, params: &[Param]) -> String {
    let in_file = params.iter().find_map(|Param { name, file, .. }| {
        let rest = problem.strip_prefix(&format!("parameter `{name}`: "))?;
        Some(format!("{}: {rest}", file.as_ref()?))
    });
    in_file.unwrap_or_else(|| format!("--param: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_names_the_file_of_its_parameter() {
        let of = |file: Option<&str>| Param {
            name: "rules".into(),
            text: String::new(),
            file: file.map(str::to_owned),
        };
        let problem = "parameter `rules`: rule 2, line 9: unknown key `do.reason`";
        let in_file = with_file(problem, &[of(Some("rules.toml"))]);
        assert_eq!(in_file, "rules.toml: rule 2, line 9: unknown key `do.reason`");
        assert_eq!(with_file(problem, &[of(None)]), format!("--param: {problem}"));
        assert_eq!(with_file("is odd", &[of(Some("rules.toml"))]), "--param: is odd");
    }
}
