//! The tools of a server, listed page by page within limits.

use std::collections::BTreeSet;

use rmcp::model::{ListToolsResult, Tool as Listed};
use serde_json::{Map, Value, json};

use super::bounds::quoted;
use super::full_name;

/// Most tools of a server.
const TOOLS: usize = 256;

/// Most pages of a list.
const PAGES: usize = 64;

/// Most bytes of the definition of a tool.
const TOOL_BYTES: usize = 64 << 10;

/// Most bytes of all definitions. What prompts have room for is counted for each request.
const LIST_BYTES: usize = 2 << 20;

/// Longest name of a tool.
const TOOL_NAME_BYTES: usize = 128;

/// Longest cursor.
const CURSOR_BYTES: usize = 4096;

/// Tools left out that are named.
const NAMED: usize = 8;

/// A tool of a server.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name on the server.
    pub name: String,
    /// What it does, for people.
    pub description: String,
    /// In the form that chat templates read, with the name SERVER__TOOL.
    pub definition: Value,
    /// Bytes of the definition as JSON.
    pub bytes: usize,
}

/// The tools of a server that can be offered to a model, and what was left out.
#[derive(Debug, Default, PartialEq)]
pub struct Listing {
    server: String,
    pub tools: Vec<Tool>,
    /// Names of the first tools that were left out, and why.
    pub left_out: Vec<(String, &'static str)>,
    /// Further tools that were left out.
    pub more: usize,
    /// Why pages were left unread; `None` if none were.
    pub unread: Option<&'static str>,
    bytes: usize,
    pages: usize,
    cursors: BTreeSet<String>,
}

impl Listing {
    /// The beginning of a list.
    pub fn of(server: &str) -> Self {
        Self { server: server.into(), ..Self::default() }
    }

    /// Adds a page. Returns the cursor of the next one; `None` if there is none, or if it is left unread.
    pub fn add(&mut self, page: ListToolsResult) -> Option<String> {
        self.pages += 1;
        for tool in page.tools {
            if let Err(problem) = self.add_tool(&tool) {
                if self.left_out.len() < NAMED {
                    self.left_out.push((quoted(&tool.name), problem));
                } else {
                    self.more += 1;
                }
            }
        }
        let cursor = page.next_cursor?;
        self.unread = match () {
            () if self.tools.len() >= TOOLS => Some("there are enough tools"),
            () if self.bytes >= LIST_BYTES => Some("the definitions have enough bytes"),
            () if self.pages >= PAGES => Some("there are too many pages"),
            () if cursor.len() > CURSOR_BYTES => Some("a cursor is too long"),
            () if !self.cursors.insert(cursor.clone()) => Some("a cursor occurs twice"),
            () => None,
        };
        self.unread.is_none().then_some(cursor)
    }

    fn add_tool(&mut self, tool: &Listed) -> Result<(), &'static str> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !(1..=TOOL_NAME_BYTES).contains(&tool.name.len()) || !tool.name.chars().all(is_name) {
            return Err("its name is not supported");
        }
        if self.tools.len() >= TOOLS {
            return Err("there are too many");
        }
        if self.tools.iter().any(|other| other.name == tool.name) {
            return Err("its name occurs twice");
        }
        let tool = self.tool(tool);
        if tool.bytes > TOOL_BYTES {
            return Err("its definition is too long");
        }
        if self.bytes + tool.bytes > LIST_BYTES {
            return Err("all definitions together are too long");
        }
        self.bytes += tool.bytes;
        self.tools.push(tool);
        Ok(())
    }

    fn tool(&self, tool: &Listed) -> Tool {
        let description = tool.description.as_deref().or(tool.title.as_deref()).unwrap_or_default();
        let mut parameters = Map::clone(&tool.input_schema);
        parameters.shift_remove("$schema");
        let full_name = full_name(&self.server, &tool.name);
        let function =
            json!({"name": full_name, "description": description, "parameters": parameters});
        let definition = json!({"type": "function", "function": function});
        Tool {
            name: tool.name.to_string(),
            description: description.to_string(),
            bytes: definition.to_string().len(),
            definition,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(tools: impl IntoIterator<Item = Value>, next: Option<&str>) -> ListToolsResult {
        let tools: Vec<Value> = tools.into_iter().collect();
        serde_json::from_value(json!({"tools": tools, "nextCursor": next})).unwrap()
    }

    fn tool(name: &str, description: &str) -> Value {
        json!({"name": name, "description": description, "inputSchema": {"type": "object"}})
    }

    /// A list without end, 20 small tools a page, took 84 to 2,686 MB in 55 s: the limit on tools was applied after all
    /// pages.
    #[test]
    fn a_list_ends_at_each_of_its_limits() {
        type Page = fn(usize) -> ListToolsResult;
        let cases: [(&str, Page, usize, usize); 7] = [
            (
                "there are enough tools",
                |n| page((0..20).map(|i| tool(&format!("t{n}-{i}"), "")), Some(&n.to_string())),
                13,
                256,
            ),
            (
                "there are too many pages",
                |n| page([tool(&format!("t{n}"), "")], Some(&n.to_string())),
                64,
                64,
            ),
            ("there are too many pages", |n| page([], Some(&n.to_string())), 64, 0),
            ("a cursor occurs twice", |n| page([tool(&format!("t{n}"), "")], Some("again")), 2, 2),
            ("a cursor is too long", |_| page([], Some(&"c".repeat(5000))), 1, 0),
            (
                "there are too many pages",
                |n| page([tool(&format!("t{n}"), &"x".repeat(100_000))], Some(&n.to_string())),
                64,
                0,
            ),
            (
                "there are too many pages",
                |n| page([tool(&format!("t{n}"), &"x".repeat(60_000))], Some(&n.to_string())),
                64,
                LIST_BYTES / 60_000,
            ),
        ];
        for (unread, page, pages, tools) in cases {
            let mut listing = Listing::of("s");
            let read = 1 + (0..).take_while(|n| listing.add(page(*n)).is_some()).count();
            assert_eq!((listing.unread, read), (Some(unread), pages));
            assert_eq!(listing.tools.len(), tools, "{unread}");
            assert!(listing.bytes <= LIST_BYTES && listing.left_out.len() <= NAMED, "{unread}");
        }
    }

    #[test]
    fn tools_that_cannot_be_offered_are_left_out_and_the_first_are_named() {
        let names = ["ok", "ok", "", "no\u{1b}[2J", "also ok?", &"n".repeat(129), "a/b", "a\nb"];
        let odd = names.iter().map(|name| tool(name, ""));
        let many = (0..5000).map(|n| tool(&format!("not a name {n}"), ""));
        let mut listing = Listing::of("s");
        assert_eq!(listing.add(page(odd.chain(many), None)), None);
        assert_eq!(listing.tools.len(), 1);
        assert_eq!((listing.left_out.len(), listing.more), (NAMED, 5000 + 7 - NAMED));
        assert_eq!(listing.left_out[0], ("ok".into(), "its name occurs twice"));
        assert_eq!(listing.left_out[2].0, "no\\u{1b}[2J");
    }
}
