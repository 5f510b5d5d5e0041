//! Types that own much state change it in few files, and nobody else writes their fields.

use std::collections::BTreeMap;
use std::fs;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::rooms::{after_item, module_of};
use crate::walls::{root, sources};

/// A type of the engine, and the most files that may have methods of it.
const OWNERS: [(&str, usize); 2] = [("Decoder", 4), ("Sequence", 3)];

/// What the sources say about a type.
#[derive(Debug, Default, PartialEq, Eq)]
struct Owner {
    /// Number of definitions.
    structs: usize,
    /// Names of the fields that are not private.
    open_fields: Vec<String>,
    /// Files with methods.
    files: Vec<String>,
}

impl Owner {
    /// Adds what the code of `file` says about the type `name`.
    fn read(&mut self, file: &str, code: TokenStream, name: &str) {
        let tokens: Vec<TokenTree> = code.into_iter().collect();
        let mut rest = tokens.as_slice();
        while let [first, after @ ..] = rest {
            rest = after;
            match (first, after) {
                (TokenTree::Punct(mark), [TokenTree::Group(attribute), item @ ..])
                    if mark.as_char() == '#' && attribute.stream().to_string() == "cfg (test)" =>
                {
                    rest = after_item(item);
                }
                (TokenTree::Ident(word), [TokenTree::Ident(item), ..])
                    if word == "struct" && item == name =>
                {
                    self.structs += 1;
                    self.open_fields.extend(body(after).map(open_fields).unwrap_or_default());
                }
                (TokenTree::Ident(word), _) if word == "impl" => {
                    if implemented(after).is_some_and(|own| own == name)
                        && !self.files.iter().any(|known| known == file)
                    {
                        self.files.push(file.into());
                    }
                    rest = after_item(after);
                }
                (TokenTree::Group(group), _) => self.read(file, group.stream(), name),
                _ => {}
            }
        }
    }
}

/// The body of the item that begins `tokens`.
fn body(tokens: &[TokenTree]) -> Option<TokenStream> {
    tokens.iter().find_map(|token| match token {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(group.stream()),
        _ => None,
    })
}

/// The type whose methods follow; `tokens` come after `impl`.
fn implemented(tokens: &[TokenTree]) -> Option<String> {
    let mut depth = 0;
    let mut last = None;
    for token in tokens {
        match token {
            TokenTree::Punct(mark) if mark.as_char() == '<' => depth += 1,
            TokenTree::Punct(mark) if mark.as_char() == '>' => depth -= 1,
            TokenTree::Ident(word) if word == "where" => break,
            TokenTree::Ident(word) if depth == 0 => last = Some(word.to_string()),
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => break,
            _ => {}
        }
    }
    last
}

/// The fields in the body of a structure that are not private.
fn open_fields(body: TokenStream) -> Vec<String> {
    let tokens: Vec<TokenTree> = body.into_iter().collect();
    let is_open = |token: &TokenTree| matches!(token, TokenTree::Ident(word) if word == "pub");
    let name = |at: usize| {
        let is_name = |token: &&TokenTree| matches!(token, TokenTree::Ident(_));
        tokens[at + 1..].iter().find(is_name).map(ToString::to_string)
    };
    let open = tokens.iter().enumerate().filter(|(_, token)| is_open(token));
    open.filter_map(|(at, _)| name(at)).collect()
}

#[test]
fn the_state_of_decoder_and_sequence_has_few_owners() {
    let folder = root().join("engine/src");
    let mut owners: BTreeMap<&str, Owner> = BTreeMap::new();
    for path in sources(&folder) {
        let file = path.strip_prefix(&folder).unwrap();
        if module_of(file).is_none() {
            continue;
        }
        let code: TokenStream = fs::read_to_string(&path).unwrap().parse().unwrap();
        for (name, _) in OWNERS {
            let owner = owners.entry(name).or_default();
            owner.read(&file.display().to_string(), code.clone(), name);
        }
    }
    for (name, most) in OWNERS {
        let Owner { structs, open_fields, files } = &owners[name];
        assert_eq!(*structs, 1, "definitions of {name}");
        assert_eq!(open_fields, &[""; 0], "fields of {name} that others may write");
        assert!(
            (1..=most).contains(&files.len()),
            "at most {most} files have methods of {name}: {files:?}"
        );
    }
}

#[test]
fn open_fields_and_files_with_methods_are_found() {
    let read = |texts: &[&str]| {
        let mut owner = Owner::default();
        for (at, text) in texts.iter().enumerate() {
            owner.read(&at.to_string(), text.parse().unwrap(), "A");
        }
        owner
    };
    let found = read(&[
        "pub struct A<T> { own: u32, pub open: Vec<u32>, pub(crate) half: T } impl<T: B<T>> A<T> {}",
        "mod inner { impl B<u32> for super::A<u32> where u32: B { fn f() {} } impl A<u32> {} }",
        "impl A2 {} fn f(a: A) {} impl Into<A> for B {} struct B { pub open: A }",
        "#[cfg(test)] impl A<u8> {} // impl A",
    ]);
    let open_fields = ["open", "half"].map(String::from).to_vec();
    let files = ["0", "1"].map(String::from).to_vec();
    assert_eq!(found, Owner { structs: 1, open_fields, files });
}
