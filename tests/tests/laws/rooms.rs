//! Rooms name each other in one direction, and files do not name each other in circles.
//!
//! A room is a folder of a crate's sources, or a file beside them. An arrow leads from a file to the file that defines
//! what it names, through re-exports. What a parent module defines is for its children to name (a table and its rows,
//! a trait and its implementations), so these arrows do not count. Neither do tests, nor methods, which no path names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

use crate::walls::{root, sources};

/// The rooms of a crate.
struct House {
    sources: &'static str,
    /// A room, and the rooms that it may name.
    rooms: &'static [(&'static str, &'static str)],
}

const HOUSES: [House; 6] = [
    House {
        sources: "engine/src",
        rooms: &[
            ("activity", ""),
            ("cache", "lazy ranks"),
            ("config", ""),
            (
                "decode",
                "activity cache config device draft engine engine_thread job kernel_check kernels lazy loading model nn prefix processor ranks sample schedule sequence store",
            ),
            ("device", ""),
            ("draft", "cache config kernels lazy model nn sample"),
            ("engine", "activity prefix schedule"),
            ("engine_thread", ""),
            ("job", ""),
            ("kernel_check", "cache config kernels model nn processor ranks"),
            ("kernels", "cache lazy"),
            ("lazy", ""),
            ("loading", ""),
            (
                "measure",
                "cache config decode device draft job kernels lazy model nn processor sample schedule sequence",
            ),
            ("model", "cache config device kernels lazy loading nn ranks"),
            ("nn", "cache kernels lazy ranks"),
            ("prefix", "cache lazy store"),
            ("processor", ""),
            ("ranks", "lazy"),
            ("sample", "kernels lazy nn"),
            ("schedule", "cache config device job model prefix sequence"),
            ("sequence", "cache config draft job lazy prefix sample"),
            ("store", "config"),
        ],
    },
    House {
        sources: "engine/policy-host/src",
        rooms: &[
            ("breaker", "error"),
            ("bundle", "sandbox schema trust"),
            ("chain", "check contract error trace"),
            ("check", "contract"),
            ("config", "error trust"),
            ("contract", "error"),
            ("database", "error"),
            ("error", ""),
            ("events", "contract"),
            ("file", ""),
            ("golden", "contract error sandbox"),
            ("guard", "breaker config contract error native"),
            ("kv", "contract database"),
            ("loops", "contract"),
            ("native", "contract"),
            (
                "registry",
                "breaker bundle chain config contract database error file golden guard sandbox schema shipped tally trace trust",
            ),
            ("sandbox", "check config contract database error file kv shipped"),
            ("schema", ""),
            ("shipped", ""),
            ("tally", "contract error"),
            ("trace", "config contract error"),
            ("trust", "error"),
        ],
    },
    House {
        sources: "engine/request/src",
        rooms: &[
            ("calls", "message"),
            ("error", "store_error"),
            ("event", "error message"),
            ("live", ""),
            ("message", ""),
            ("mlx", "error"),
            ("prefix_name", ""),
            ("profile", "error"),
            ("span", ""),
            ("store_error", ""),
            ("view", "calls error message"),
        ],
    },
    House {
        sources: "engine/text/src",
        rooms: &[
            ("conversation", "tool_call"),
            ("detokenize", "tokenizer"),
            ("folder", "probe tool_call"),
            ("grammar", "harmony tool_call"),
            ("harmony", ""),
            ("probe", "conversation tool_call"),
            ("reply", "detokenize harmony stop tokenizer tool_call trim"),
            ("stop", ""),
            ("tokenizer", "harmony tool_call"),
            ("tool_call", "harmony stop"),
            ("trim", ""),
        ],
    },
    House {
        sources: "server/src",
        rooms: &[
            ("address", ""),
            (
                "api",
                "bundled config connections console keys link mcp media_type models reload shutdown system throttle wiring words",
            ),
            ("bench", "bundled hub ranks verify"),
            ("bundled", ""),
            ("cache", ""),
            ("calibrate", "hub verify"),
            ("check", "config hub keys models"),
            ("cli", ""),
            ("config", "hub words"),
            ("connections", "config throttle"),
            ("console", ""),
            ("doctor", "config connections hub system verify"),
            ("environment", ""),
            ("exit", ""),
            ("heap", ""),
            ("hub", "bundled words"),
            ("keys", "config words"),
            ("link", "config keys"),
            ("local", "api config models serve"),
            ("manage", "bundled config hub models"),
            ("mcp", "config media_type models words"),
            ("media_type", ""),
            ("models", "config hub"),
            ("program", ""),
            ("ranks", "address config exit hub models serve signals"),
            ("reload", "check config signals"),
            ("serve", "api config connections console heap shutdown throttle"),
            ("shutdown", ""),
            ("signals", ""),
            ("system", ""),
            ("talk", "address bundled config hub local words"),
            ("telemetry", "throttle"),
            ("throttle", ""),
            ("verify", "config hub ranks"),
            ("wiring", "config keys link reload"),
            ("words", ""),
        ],
    },
    House {
        sources: "server/upstream/src",
        rooms: &[
            ("anthropic", "ask capability fault memory openai piece"),
            ("ask", "capability memory"),
            ("breaker", ""),
            ("capability", ""),
            ("client", "config fault"),
            ("config", "capability"),
            ("fault", ""),
            ("gate", "config fault"),
            ("hooks", ""),
            ("memory", ""),
            ("models", "capability client config fault piece"),
            ("openai", "ask capability fault memory piece"),
            ("piece", ""),
            ("prepare", "capability config upstream"),
            ("reply", "ask"),
            (
                "run",
                "anthropic ask config fault hooks openai piece prepare reply segment steer stream tally upstream usage",
            ),
            ("segment", ""),
            ("sse", "client fault"),
            ("steer", "capability config hooks prepare reply segment"),
            ("stream", "anthropic client config fault openai piece sse"),
            ("submit", "anthropic capability config openai run upstream"),
            ("tally", "piece"),
            ("upstream", "breaker capability client config gate memory models usage"),
            ("usage", "piece"),
        ],
    },
];

/// A path from the root of a crate, such as `["cache", "full", "Full"]`.
pub type ItemPath = Vec<String>;

/// What a file names, and what it imports under which name.
#[derive(Debug, Default)]
struct Names {
    named: BTreeSet<ItemPath>,
    imported: BTreeMap<String, ItemPath>,
}

/// The files of a crate by the paths of their modules.
type Files = BTreeMap<ItemPath, Names>;

impl Names {
    /// The names in the code of the module `module`.
    fn read(code: TokenStream, module: &[String]) -> Self {
        let mut names = Self::default();
        names.add(code, module);
        names
    }

    fn add(&mut self, code: TokenStream, module: &[String]) {
        let tokens: Vec<TokenTree> = code.into_iter().collect();
        let mut rest = tokens.as_slice();
        while let [first, after @ ..] = rest {
            rest = match (first, after) {
                (TokenTree::Punct(mark), [TokenTree::Group(attribute), item @ ..])
                    if mark.as_char() == '#' && attribute.stream().to_string() == "cfg (test)" =>
                {
                    after_item(item)
                }
                (TokenTree::Ident(word), [TokenTree::Ident(name), TokenTree::Group(body), ..])
                    if word == "mod" =>
                {
                    let module = [module, &[name.to_string()]].concat();
                    self.add(body.stream(), &module);
                    &after[2..]
                }
                (TokenTree::Ident(word), _) if word == "use" => self.add_import(after, module, &[]),
                (TokenTree::Ident(_), _) => {
                    let (path, rest) = leading_path(rest);
                    self.named.extend(absolute(&path, module));
                    rest
                }
                (TokenTree::Group(group), _) => {
                    self.add(group.stream(), module);
                    after
                }
                _ => after,
            };
        }
    }

    /// Adds one import after `prefix`; returns the tokens after it.
    fn add_import<'a>(
        &mut self,
        tokens: &'a [TokenTree],
        module: &[String],
        prefix: &[String],
    ) -> &'a [TokenTree] {
        let (path, rest) = leading_path(tokens);
        let mut path = [prefix, &path].concat();
        if let [TokenTree::Group(group), rest @ ..] = rest {
            let imports: Vec<TokenTree> = group.stream().into_iter().collect();
            let mut imports = imports.as_slice();
            while !imports.is_empty() {
                imports = self.add_import(imports, module, &path);
                imports = imports.get(1..).unwrap_or_default();
            }
            return rest;
        }
        // `a::{self}` imports `a`.
        if path.len() > 1 && path.last().is_some_and(|name| name == "self") {
            path.pop();
        }
        let (name, rest) = match rest {
            [TokenTree::Ident(word), TokenTree::Ident(name), rest @ ..] if word == "as" => {
                (Some(name.to_string()), rest)
            }
            [TokenTree::Punct(mark), rest @ ..] if mark.as_char() == '*' => (None, rest),
            rest => (path.last().cloned(), rest),
        };
        if let Some(path) = absolute(&path, module) {
            self.imported.extend(name.map(|name| (name, path.clone())));
            self.named.insert(path);
        }
        rest
    }
}

/// The tokens after an item that begins `tokens`.
pub fn after_item(tokens: &[TokenTree]) -> &[TokenTree] {
    let is_end = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(mark) => mark.as_char() == ';',
        _ => false,
    };
    let end = tokens.iter().position(is_end).map_or(tokens.len(), |at| at + 1);
    &tokens[end..]
}

/// The path that begins `tokens`, with the `::` after it if one follows; the tokens after it.
fn leading_path(mut tokens: &[TokenTree]) -> (Vec<String>, &[TokenTree]) {
    let mut path = Vec::new();
    loop {
        if let [TokenTree::Ident(name), rest @ ..] = tokens {
            path.push(name.to_string());
            tokens = rest;
        }
        match tokens {
            [TokenTree::Punct(a), TokenTree::Punct(b), rest @ ..]
                if a.as_char() == ':' && b.as_char() == ':' && a.spacing() == Spacing::Joint =>
            {
                tokens = rest;
                if !matches!(tokens, [TokenTree::Ident(_), ..]) {
                    return (path, tokens);
                }
            }
            _ => return (path, tokens),
        }
    }
}

/// A path of this crate from its root; `None` if it may be of another crate.
fn absolute(path: &[String], module: &[String]) -> Option<ItemPath> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => Some(rest.to_vec()),
        "self" => Some([module, rest].concat()),
        "super" => {
            let supers = path.iter().take_while(|name| *name == "super").count();
            let parent = &module[..module.len().checked_sub(supers)?];
            Some([parent, &path[supers..]].concat())
        }
        // Of a child module, if there is one of this name.
        _ if rest.is_empty() => None,
        _ => Some([module, path].concat()),
    }
}

/// The file that defines what `path` names, through the imports of the files on the way.
fn definition<'a>(files: &'a Files, path: &[String], steps: usize) -> Option<&'a ItemPath> {
    let known = (0..=path.len()).rev().find_map(|n| files.get_key_value(&path[..n]))?;
    let (module, names) = known;
    let imported = path.get(module.len()).and_then(|name| names.imported.get(name));
    match imported {
        Some(imported) if steps > 0 && imported != path => {
            let path = [imported, &path[module.len() + 1..]].concat();
            definition(files, &path, steps - 1)
        }
        _ => Some(module),
    }
}

/// Arrows of each file to others.
fn arrows(files: &Files) -> BTreeMap<&ItemPath, BTreeSet<&ItemPath>> {
    let of = |(module, names): (&'_ ItemPath, &'_ Names)| -> BTreeSet<&ItemPath> {
        let named = names.named.iter().filter_map(|path| definition(files, path, 8));
        named.filter(|to| !module.starts_with(to)).collect()
    };
    files.iter().map(|(module, names)| (module, of((module, names)))).collect()
}

/// Circles of files: of each the files, none of which is in two.
fn circles<'a>(arrows: &BTreeMap<&'a ItemPath, BTreeSet<&'a ItemPath>>) -> Vec<Vec<&'a ItemPath>> {
    let reachable = |from: &'a ItemPath| {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            next.extend(arrows[file].iter().copied().filter(|to| reached.insert(*to)));
        }
        reached
    };
    let reached: BTreeMap<_, _> = arrows.keys().map(|file| (*file, reachable(file))).collect();
    let mut found: Vec<Vec<&ItemPath>> = Vec::new();
    for (file, others) in &reached {
        if others.contains(file) && !found.iter().flatten().any(|known| known == file) {
            found.push(
                others.iter().copied().filter(|other| reached[other].contains(file)).collect(),
            );
        }
    }
    found
}

/// The module of a file; `None` for tests and for programs.
pub fn module_of(file: &Path) -> Option<ItemPath> {
    let mut module: ItemPath =
        file.with_extension("").iter().map(|part| part.to_str().unwrap().into()).collect();
    let is_left_out = |part: &String| ["tests", "fuzz", "bin", "main"].contains(&part.as_str());
    if module.iter().any(is_left_out) {
        return None;
    }
    if matches!(module.last()?.as_str(), "mod" | "lib") {
        module.pop();
    }
    Some(module)
}

/// The files of a crate.
fn read(folder: &Path) -> Files {
    let module = |path: &Path| {
        let module = module_of(path.strip_prefix(folder).unwrap())?;
        let code: TokenStream = fs::read_to_string(path).unwrap().parse().unwrap();
        let names = Names::read(code, &module);
        Some((module, names))
    };
    sources(folder).iter().filter_map(|path| module(path)).collect()
}

/// What contradicts the table of a house, and the circles between its files.
fn faults(files: &Files, rooms: &[(&str, &str)]) -> Vec<String> {
    let arrows = arrows(files);
    let mut named: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in &arrows {
        let Some(room) = from.first() else { continue };
        let others = to.iter().filter_map(|to| to.first()).filter(|to| *to != room);
        named.entry(room).or_default().extend(others.map(String::as_str));
    }
    let table: BTreeMap<&str, BTreeSet<&str>> =
        rooms.iter().map(|(room, others)| (*room, others.split_whitespace().collect())).collect();
    let mut faults = Vec::new();
    for room in named.keys().chain(table.keys()).collect::<BTreeSet<_>>() {
        match (named.get(room), table.get(room)) {
            (Some(named), Some(allowed)) => {
                let more = named.difference(allowed);
                faults.extend(more.map(|other| format!("{room} names {other}")));
                let less = allowed.difference(named);
                faults.extend(less.map(|other| format!("{room} may name {other}, and does not")));
            }
            (Some(_), None) => faults.push(format!("{room} is not in the table")),
            _ => faults.push(format!("there is no room {room}")),
        }
    }
    let path = |file: &&ItemPath| file.join("::");
    let circles = circles(&arrows);
    faults.extend(circles.iter().map(|c| {
        format!("a circle of files: {}", c.iter().map(path).collect::<Vec<_>>().join(", "))
    }));
    faults
}

#[test]
fn rooms_name_each_other_as_the_table_allows() {
    let mut found = Vec::new();
    for House { sources, rooms } in HOUSES {
        let files = read(&root().join(sources));
        assert!(files.len() > 5, "{sources}: {} files", files.len());
        found.extend(faults(&files, rooms).iter().map(|fault| format!("{sources}: {fault}")));
    }
    assert!(found.is_empty(), "rooms and files:\n{}", found.join("\n"));
}

/// Files with these texts, by the paths of their modules.
fn files_of(texts: &[(&str, &str)]) -> Files {
    let file = |(path, text): &(&str, &str)| {
        let module: ItemPath = path.split("::").filter(|p| !p.is_empty()).map(Into::into).collect();
        let names = Names::read(text.parse().unwrap(), &module);
        (module, names)
    };
    texts.iter().map(file).collect()
}

#[test]
fn the_check_finds_reversed_arrows_and_circles() {
    const TABLE: &[(&str, &str)] = &[("high", "low"), ("low", "")];
    let faults = |texts: &[(&str, &str)]| faults(&files_of(texts), TABLE);
    let house = |low: &'static str, a: &'static str, b: &'static str| {
        [
            ("", "pub use low::Low;"),
            ("high", "use crate::low::Low; pub use self::a::A; pub trait T {} mod a; mod b;"),
            ("high::a", a),
            ("high::b", b),
            ("low", low),
        ]
    };
    assert_eq!(faults(&house("struct Low;", "use super::T;", "use super::T;")), [""; 0]);
    let reversed = [
        "use crate::high::a;",
        "use crate::{high::{self, a::A}};",
        "fn f() { crate::high::f() }",
        "mod inner { use super::super::high::f; }",
        "fn f() { warn!(x = crate::high::f()) }",
    ];
    for low in reversed {
        let found = faults(&house(low, "", ""));
        assert!(found.contains(&"low names high".into()), "{low}: {found:?}");
    }
    let unseen = ["// use crate::high::a;", "#[cfg(test)] mod tests { use crate::high::f; }"];
    for low in unseen {
        assert_eq!(faults(&house(low, "", "")), [""; 0], "{low}");
    }
    // Through a re-export of the parent, too.
    for b in ["use super::a::A;", "use super::A;", "fn f() { super::a::f() }"] {
        let found = faults(&house("", "use super::b::B;", b));
        assert_eq!(found, ["a circle of files: high::a, high::b"], "{b}");
    }
    assert_eq!(faults(&[("low", "")]), ["there is no room high"]);
    let unused = faults(&[("low", ""), ("high", "")]);
    assert_eq!(unused, ["high may name low, and does not"]);
}
