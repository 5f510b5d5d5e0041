//! Reads a configuration as far as it can be read: each problem is reported with its line and left out, so that one
//! run finds all of them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use serde_path_to_error::{Path, Segment, Track};
use toml::de::{DeArray, DeTable, DeValue};

use super::FileConfig;
use super::entry::Entry;

/// A file with every key.
const EVERY_KEY: &str = include_str!("../../../configs/steersman.toml");

/// Most problems of one file that are reported.
const PROBLEMS: usize = 100;

/// A problem of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The line in the file; `None` if the problem is of no single line.
    pub line: Option<usize>,
    /// The key, and what is wrong with it.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = steersman_log::without_numbers_of_errors(&self.text);
        match self.line {
            Some(line) => write!(f, "line {line}: {text}"),
            None => f.write_str(&text),
        }
    }
}

/// Where a configuration was read, to find its keys again.
#[derive(Debug, Clone, Default)]
pub struct Source {
    /// The file; `None` without one.
    pub path: Option<PathBuf>,
    /// Lines of keys and tables by their whole names.
    lines: BTreeMap<String, usize>,
}

impl Source {
    /// `problem` with its line: that of the key it begins with, or of the table around it.
    pub fn locate(&self, problem: String) -> Problem {
        let mut key = problem.split(": ").next();
        let line = loop {
            match key {
                None => break None,
                Some(name) if self.lines.contains_key(name) => break self.lines.get(name).copied(),
                Some(name) => key = name.rsplit_once('.').map(|(table, _)| table),
            }
        };
        Problem { line, text: problem }
    }

    /// One message of all `problems`, with the name of the file.
    pub fn message(&self, problems: &[Problem]) -> String {
        let file = self.path.as_ref().map(|path| format!("the configuration {}", path.display()));
        if let [problem] = problems {
            return match file {
                Some(file) => format!("in {file}: {problem}"),
                None => problem.to_string(),
            };
        }
        let mut lines = vec![format!(
            "{} {} problems:",
            file.map_or("there are".into(), |file| format!("{file} has")),
            problems.len()
        )];
        lines.extend(problems.iter().map(|problem| format!("  {problem}")));
        lines.join("\n")
    }
}

/// The configuration in `text`, without what cannot be read, and the problems of that.
pub fn read(text: &str) -> (FileConfig, Vec<Problem>) {
    let starts: Vec<_> = text.match_indices('\n').map(|(at, _)| at).collect();
    let line = |at: usize| starts.partition_point(|start| *start < at) + 1;
    let (table, errors) = DeTable::parse_recoverable(text);
    let of_syntax = errors.into_iter().take(PROBLEMS).map(|error| {
        let at = error.span().map(|span| line(span.start));
        let written = error.span().and_then(|span| text.get(span)).unwrap_or_default();
        let text = match error.message() {
            "duplicate key" => format!("duplicate key `{}`", written.trim()),
            message => message.into(),
        };
        Problem { line: at, text }
    });
    let mut problems: Vec<_> = of_syntax.collect();
    let mut root = DeValue::Table(table.into_inner());
    let mut lines = BTreeMap::new();
    add_lines("", &root, &line, &mut lines);
    let source = Source { path: None, lines };

    // What the parser made of a line that is no TOML is not what its author wrote, nor are keys after the head of a table that
    // is none.
    let damaged: Vec<_> = problems.iter().filter_map(|problem| problem.line).collect();
    let has_lost_table = problems.iter().any(|problem| problem.text.contains("unclosed table"));
    let is_written = |problem: &Problem| {
        !has_lost_table && !problem.line.is_some_and(|line| damaged.contains(&line))
    };
    let mut removed = Vec::new();
    let file = loop {
        let mut track = Track::new();
        let entry = Entry { key: "", value: &root };
        let read =
            FileConfig::deserialize(serde_path_to_error::Deserializer::new(entry, &mut track));
        let error = match read {
            Ok(file) => break file,
            Err(error) => error.to_string(),
        };
        let path = track.path();
        let key = key_of(&path);
        let elsewhere = table_with(&key, &error);
        let problem = source.locate(format!("{key}: {error}{elsewhere}"));
        let is_removed = remove(&mut root, &mut path.iter());
        problems.extend(is_written(&problem).then_some(problem));
        // Without the key that was meant, its value is the default.
        removed.extend(meant(&key, &error).filter(|meant| !source.lines.contains_key(meant)));
        removed.push(key);
        if !is_removed || problems.len() >= PROBLEMS || removed.len() >= 4 * PROBLEMS {
            break FileConfig::default();
        }
    };
    let file = FileConfig { source, ..file };
    if !problems.is_empty() {
        // Without its wrong keys, a file may have problems that its author did not make.
        let is_made = |problem: &String| !removed.iter().any(|key| follows_from(problem, key));
        let of_values = file.problems().into_iter().filter(is_made);
        let of_values = of_values.map(|problem| file.source.locate(problem));
        problems.extend(of_values.filter(|problem| problem.line.is_some() && is_written(problem)));
        problems.sort();
    }
    (file, problems)
}

/// The table that has the unknown `key`, which belongs to another one, for the end of its `error`.
fn table_with(key: &str, error: &str) -> String {
    let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
    if !error.starts_with("unknown key") || error.contains("did you mean") {
        return String::new();
    }
    let mut of = "";
    // Keys of tables with names of the user's are comments.
    for line in EVERY_KEY.lines().map(|line| line.trim_start_matches("# ")) {
        if let Some(head) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            of = head;
        } else if line.strip_prefix(name).is_some_and(|rest| rest.starts_with(" = ")) && of != table
        {
            return format!("; `{name}` is a key of [{of}]");
        }
    }
    String::new()
}

/// The key that the author of the unknown `key` probably meant, as `error` suggests it.
fn meant(key: &str, error: &str) -> Option<String> {
    let (_, near) = error.rsplit_once("did you mean `")?;
    let (table, _) = key.rsplit_once('.').unwrap_or_default();
    Some(join(table, near.strip_suffix("`?")?))
}

/// Whether `problem` may be one because `removed` was left out: it is about that key, about a table around it, about
/// what is in it, or names it.
fn follows_from(problem: &str, removed: &str) -> bool {
    let key = problem.split(": ").next().unwrap_or_default();
    let is_in = |key: &str, table: &str| {
        key.strip_prefix(table).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    is_in(key, removed) || is_in(removed, key) || problem.contains(&format!("`{removed}`"))
}

/// Adds the lines of all keys in `value`, which is under `key`.
fn add_lines(
    key: &str,
    value: &DeValue<'_>,
    line: &impl Fn(usize) -> usize,
    lines: &mut BTreeMap<String, usize>,
) {
    let DeValue::Table(entries) = value else { return };
    for (name, value) in entries {
        let at = line(name.span().start);
        let key = join(key, name.get_ref());
        add_lines(&key, value.get_ref(), line, lines);
        lines.insert(key, at);
    }
}

fn join(table: &str, name: &str) -> String {
    if table.is_empty() { name.into() } else { format!("{table}.{name}") }
}

/// The name of what is at `path`: a key, or the list that it is in.
fn key_of(path: &Path) -> String {
    path.iter().fold(String::new(), |table, segment| match segment {
        Segment::Map { key } => join(&table, key),
        _ => table,
    })
}

/// Removes what is at `path`, or as much around it as can be found. Returns whether something was removed.
fn remove<'p>(value: &mut DeValue<'_>, path: &mut impl Iterator<Item = &'p Segment>) -> bool {
    match (value, path.next()) {
        (DeValue::Table(entries), Some(Segment::Map { key })) => {
            let Some(inner) = entries.get_mut(key.as_str()) else { return false };
            if !remove(inner.get_mut(), path) {
                entries.remove(key.as_str());
            }
            true
        }
        (DeValue::Array(values), Some(Segment::Seq { index })) => {
            let Some(inner) = values.get_mut(*index) else { return false };
            if !remove(inner.get_mut(), path) {
                let others = values.iter().enumerate().filter(|(other, _)| other != index);
                let mut rest = DeArray::new();
                others.for_each(|(_, value)| rest.push(value.clone()));
                *values = rest;
            }
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        read(text).1.iter().map(ToString::to_string).collect()
    }

    /// `steersman check` ended at the first problem of this kind: a file with three had "1 problem".
    #[test]
    fn all_problems_of_a_file_are_found_with_their_lines() {
        let text = "[sever]\nport = 1\n\
                    [server]\nport = \"x\"\nbody_timeout_s = 0\napi_key = ['a']\nhosts = 'h'\n\
                    [engine]\nstall_ms = -4\nmax_tokens = 0\n\
                    [speculation]\ndrafts = ['ngrm', 'mtp', 'exit']\n\
                    [policy]\nmemory_bytes = \"1 GB of it\"\nwatch = 'yes'\n\
                    [profiles.a]\npolcies = []\nsampling.temperature = 9.0\n";
        let expected = [
            "line 1: sever: unknown key `sever`; did you mean `server`?",
            "line 4: server.port: is \"x\", expected a whole number from 0 to 65535",
            "line 5: server.body_timeout_s: is 0, must be from 1 to 3600",
            "line 6: server.api_key: unknown key `api_key`; did you mean `api_keys`?",
            "line 7: server.hosts: is \"h\", expected a list",
            "line 9: engine.stall_ms: is -4, expected milliseconds as a whole number, not below 0, or a duration \
             with its unit as \"250ms\" or \"2s\"",
            "line 10: engine.max_tokens: is 0, must be at least 1",
            "line 12: speculation.drafts: is \"exit\", expected \"ngram\", \"mtp\", \"model\" or \
             \"early-exit\"",
            "line 12: speculation.drafts: is \"ngrm\", expected \"ngram\", \"mtp\", \"model\" or \
             \"early-exit\"; did you mean \"ngram\"?",
            "line 14: policy.memory_bytes: is \"1 GB of it\", expected bytes as a whole number, not below 0, or \
             a size with its unit as \"512MiB\" or \"1GiB\"",
            "line 15: policy.watch: is \"yes\", expected a boolean",
            "line 17: profiles.a.polcies: unknown key `polcies`; did you mean `policies`?",
            "line 18: profiles.a.sampling: temperature is 9, must be from 0 to 2",
        ];
        assert_eq!(problems(text), expected);
    }

    #[test]
    fn problems_of_the_syntax_are_told_once_and_with_their_keys() {
        assert_eq!(problems("[server\nport = 1\n"), ["line 1: unclosed table, expected `]`"]);
        let twice = problems("[server]\nport = 1\nport = 2\n");
        assert_eq!(twice, ["line 3: duplicate key `port`"]);
    }

    #[test]
    fn the_table_of_a_misplaced_key_is_named() {
        for (text, table) in [
            ("port = 1", "; `port` is a key of [server]"),
            ("[model]\nkeep_alive_s = 5", "; `keep_alive_s` is a key of [models.small]"),
            ("[server]\nmax_running = 5", "; `max_running` is a key of [engine]"),
        ] {
            let problems = problems(text);
            assert!(problems[0].ends_with(table), "{problems:?}");
        }
        assert!(!problems("nothing_like_it = 1")[0].contains("is a key of"));
    }

    #[test]
    fn keys_of_every_table_are_suggested() {
        for (text, key, near) in [
            ("[server]\nprot = 1", "server.prot", "port"),
            ("[model]\ndevise = 'cpu'", "model.devise", "device"),
            ("[engine]\nprefil_chunk = 1", "engine.prefil_chunk", "prefill_chunk"),
            ("[speculation]\ndraft = []", "speculation.draft", "drafts"),
            ("[store]\nmemory_byte = 1", "store.memory_byte", "memory_bytes"),
            ("[policy]\nful = 1", "policy.ful", "fuel"),
            ("[mcp]\nround = 1", "mcp.round", "rounds"),
            ("[mcp.servers.x]\ncomand = []", "mcp.servers.x.comand", "command"),
            ("[models.x]\npth = 'a'", "models.x.pth", "path"),
            ("[profiles.x.limits]\nmax_token = 1", "profiles.x.limits.max_token", "max_tokens"),
            (
                "[profiles.x.sampling]\ntemprature = 1",
                "profiles.x.sampling.temprature",
                "temperature",
            ),
        ] {
            let problems = problems(text);
            let expected = format!("line 2: {key}: unknown key");
            assert!(problems[0].starts_with(&expected), "{problems:?}");
            assert!(problems[0].ends_with(&format!("did you mean `{near}`?")), "{problems:?}");
            assert_eq!(problems.len(), 1, "{problems:?}");
        }
        let far = problems("[mcp]\ncolour = 1");
        assert!(
            far[0]
                .ends_with("expected one of `rounds`, `call_timeout_s`, `result_bytes`, `servers`"),
            "{far:?}"
        );
    }

    /// Lines that are no TOML do not hide the problems of the others.
    #[test]
    fn problems_of_syntax_come_with_the_others() {
        let found =
            problems("[server]\nport = \nhost = \"a\nport_ = 1\n[engine]\nqueue = 0\nqueu = 1\n");
        let has = |begin: &str| found.iter().any(|problem| problem.starts_with(begin));
        for begin in ["line 2: ", "line 3: ", "line 6: engine.queue: is 0", "line 7: engine.queu: "]
        {
            assert!(has(begin), "{begin}: {found:#?}");
        }
    }

    #[test]
    fn a_problem_that_follows_from_another_is_not_reported() {
        for text in [
            "[mcp.servers.x]\ncommand = 'npx'",
            "[models.x]\npath = 5",
            "[speculation]\ndraft_model = 'a/b'\ndrafts = ['modle']",
        ] {
            assert_eq!(problems(text).len(), 1, "{:?}", problems(text));
        }
    }

    #[test]
    fn no_error_quotes_a_secret() {
        let text = "[server]\napi_keys = 'sk-1'\nadmin_keys = 'sk-2'\n[profiles.a]\napi_keys = 'sk-3'\n\
                    [mcp.servers.x]\nenv = 'sk-4'\nheaders = 'sk-5'\n[server]\nport = 'sk";
        let found = problems(text).join("\n");
        assert!(found.contains("api_keys: is a text, expected a list"), "{found}");
        assert!(!found.contains("sk-"), "{found}");
    }

    #[test]
    fn the_number_of_problems_is_limited() {
        let keys: String = (0..10 * PROBLEMS).map(|n| format!("key_{n} = {n}\n")).collect();
        assert_eq!(problems(&format!("[server]\n{keys}")).len(), PROBLEMS);
    }

    #[test]
    fn sizes_and_durations_of_the_configuration_have_units() {
        let (file, problems) = read(
            "[server]\nbody_limit_bytes = '32MiB'\nidle_timeout_s = '2m'\nresponses_bytes = 5\n\
             [engine]\nstall_ms = '1s'\nmemory_limit_bytes = '16GiB'\n[store]\nmemory_bytes = '2GiB'\n\
             [policy]\ndeadline_ms = '80ms'\n[models.x]\npath = 'a/b'\nkeep_alive_s = '10m'\n\
             [mcp]\ncall_timeout_s = '1m'\n\
             [mcp.servers.x]\ncommand = ['x']\nenv = { idle_s = '10s' }\n\
             [profiles.a.params]\nwait_s = '10s'\n",
        );
        assert_eq!(problems, []);
        let FileConfig { server, engine, store, policy, models, mcp, profiles, .. } = file;
        assert_eq!((server.body_limit_bytes, server.idle_timeout_s), (32 << 20, 120));
        assert_eq!((server.responses_bytes, engine.stall_ms), (5, 1000));
        assert_eq!((engine.memory_limit_bytes, store.memory_bytes), (16 << 30, 2 << 30));
        assert_eq!((policy.deadline_ms, mcp.call_timeout_s), (80, 60));
        assert_eq!(models["x"].keep_alive_s, 600);
        // Texts of other programs stay texts.
        assert_eq!(profiles["a"].params["wait_s"], "10s".into());
    }
}
