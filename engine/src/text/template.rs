//! A model's chat template: Jinja source in, prompt text out, as transformers renders it.
//!
//! The reference is `apply_chat_template` of transformers: Jinja2 with `trim_blocks`,
//! `lstrip_blocks`, loop controls, the `generation` block, `raise_exception`, `strftime_now` and a
//! `tojson` that is Python's `json.dumps` ([`python`]). What templates call on values (`split`,
//! `strip`, `items` ...) comes from minijinja's pycompat.
//! Never reads a file and knows nothing of tokens; a template cannot load another one.
//!
//! Source: transformers 5.23 `utils/chat_template_utils.py`, `_cached_compile_jinja_template`.

use std::borrow::Cow;
use std::error::Error as _;

use jiff::Zoned;
use jiff::tz::TimeZone;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, ErrorKind, State};
use serde_json::Map;

use super::python;
use crate::error::{Error, Result};

/// Instructions that one rendering may take. Templates come with models and are not trusted; an
/// endless loop in one ends here, after some seconds. The heaviest template that we know (Gemma 4,
/// quadratic in the messages) gets through 4,000 messages with it.
const RENDER_FUEL: u64 = 100_000_000;

/// Name of the only template of an environment, as it stands in error messages.
const NAME: &str = "chat template";

/// A compiled chat template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    source: String,
}

impl Template {
    /// Compiles `source`.
    ///
    /// # Errors
    /// The compiler's message, with the line, where `source` is no Jinja that we know.
    pub fn new(source: &str) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("only white space is set, no delimiters"));
        environment.set_fuel(Some(RENDER_FUEL));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_formatter(|out, _, value| Ok(out.write_str(&python::str(value))?));
        environment.set_unknown_method_callback(method);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", |format: &str| strftime(format, &Zoned::now()));
        environment.add_filter("tojson", tojson);
        environment.add_filter("string", |value: &Value| python::str(value).into_owned());
        environment.add_filter("trim", trim);
        environment.add_test("sequence", is_sequence);
        let prepared = without_generation_blocks(&source.replace("\r\n", "\n").replace('\r', "\n"));
        environment.add_template_owned(NAME, prepared).map_err(|e| e.to_string())?;
        Ok(Self { environment, source: source.into() })
    }

    /// The text that the template was made of.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Stops the clock of `strftime_now` at `unix_seconds` (UTC), for tests.
    ///
    /// # Errors
    /// [`Error::Template`] where no calendar has such a time.
    pub fn at(mut self, unix_seconds: i64) -> Result<Self> {
        let time = jiff::Timestamp::from_second(unix_seconds);
        let time = time.map_err(|e| Error::Template(e.to_string()))?.to_zoned(TimeZone::UTC);
        self.environment.add_function("strftime_now", move |format: &str| strftime(format, &time));
        Ok(self)
    }

    /// Renders the template over `variables`.
    ///
    /// # Errors
    /// [`Error::Template`] with the template's own words where it calls `raise_exception`, else
    /// with what minijinja says and the line.
    pub fn render(&self, variables: &Map<String, serde_json::Value>) -> Result<String> {
        let template = self.environment.get_template(NAME).expect("compiled in Template::new");
        template
            .render(Value::from(Serde(variables)))
            .map_err(|error| Error::Template(explain(&error)))
    }
}

/// An error that the template raised by itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: &Value) -> Result<Value, minijinja::Error> {
    let raised = Raised(python::str(message).into_owned());
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, raised.0.clone()).with_source(raised))
}

/// What the template said where it raised the error, else minijinja's message.
fn explain(error: &minijinja::Error) -> String {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return message.clone();
        }
        cause = inner.source();
    }
    error.to_string()
}

/// `time` in `format`, as Python's `datetime.strftime`.
fn strftime(format: &str, time: &Zoned) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, time)
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))
}

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, minijinja::Error> {
    let indent = indent.or(kwargs.get("indent")?).filter(|value| !value.is_none());
    let separators: Option<Value> = kwargs.get("separators")?;
    let style = python::JsonStyle {
        ensure_ascii: ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false),
        indent: match indent {
            None => None,
            Some(text) if text.kind() == ValueKind::String => Some(text.to_string()),
            Some(width) => Some(" ".repeat(width.as_usize().unwrap_or(0))),
        },
        separators: match separators.filter(|value| !value.is_none()) {
            None => None,
            Some(pair) => Some((
                pair.get_item_by_index(0)?.to_string(),
                pair.get_item_by_index(1)?.to_string(),
            )),
        },
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    python::json(value, &style)
}

/// Python's `str.strip` with its idea of white space, or with the given characters.
fn trim(value: &Value, chars: Option<&str>) -> String {
    let text = python::str(value);
    match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).into(),
        None => text.trim_matches(python::is_space).into(),
    }
}

/// Jinja2 asks for a length and for items by index, which texts and maps have too.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
        || value.is_undefined()
}

/// Python's methods on values: those that pycompat lacks or has otherwise, then pycompat.
fn method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, minijinja::Error> {
    if let Some(text) = value.as_str() {
        let argument = args.first().and_then(Value::as_str);
        match (method, argument) {
            ("strip", None) => return Ok(text.trim_matches(python::is_space).into()),
            ("lstrip", None) => return Ok(text.trim_start_matches(python::is_space).into()),
            ("rstrip", None) => return Ok(text.trim_end_matches(python::is_space).into()),
            ("removeprefix", Some(prefix)) => {
                return Ok(text.strip_prefix(prefix).unwrap_or(text).into());
            }
            ("removesuffix", Some(suffix)) => {
                return Ok(text.strip_suffix(suffix).unwrap_or(text).into());
            }
            ("partition", Some(mark)) => {
                let (head, tail) = text.split_once(mark).unwrap_or((text, ""));
                let found = if text.contains(mark) { mark } else { "" };
                return Ok(list(&[head, found, tail]));
            }
            ("rpartition", Some(mark)) => {
                let (head, tail) = text.rsplit_once(mark).unwrap_or(("", text));
                let found = if text.contains(mark) { mark } else { "" };
                return Ok(list(&[head, found, tail]));
            }
            ("rsplit", Some(mark)) => {
                let limit = args.get(1).and_then(Value::as_i64).filter(|limit| *limit >= 0);
                let mut parts: Vec<&str> = match limit {
                    Some(limit) => text.rsplitn(limit as usize + 1, mark).collect(),
                    None => text.rsplit(mark).collect(),
                };
                parts.reverse();
                return Ok(list(&parts));
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn list(texts: &[&str]) -> Value {
    texts.iter().copied().map(Value::from).collect()
}

/// `{% generation %}` marks what a trainer learns from and renders its inside: here it becomes
/// `{% with %}`, which has a scope of its own as well.
fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[..end];
        out.push_str(&match inside.trim_matches(|c: char| c.is_whitespace() || "-+".contains(c)) {
            "generation" => Cow::Owned(inside.replacen("generation", "with", 1)),
            "endgeneration" => Cow::Owned(inside.replacen("endgeneration", "endwith", 1)),
            _ => Cow::Borrowed(inside),
        });
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `source` renders to over `variables`, or what it says why not.
    fn render(source: &str, variables: serde_json::Value) -> String {
        let variables = variables.as_object().cloned().unwrap_or_default();
        let template = Template::new(source).expect(source).at(0).expect("1970 is a year");
        template.render(&variables).unwrap_or_else(|error| error.to_string())
    }

    /// The expected texts are what transformers 5.23 with Jinja2 3.1.6 makes of the sources.
    fn check(source: &str, expected: &str) {
        let value = serde_json::json!({
            "b": [1, 2.0, "x\"\u{e9}\n", null, true], "a": {"z": 1e16, "y": {}}, "c": [],
        });
        assert_eq!(render(source, serde_json::json!({"v": value})), expected, "{source}");
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let line = r#"{"b": [1, 2.0, "x\"é\n", null, true], "a": {"z": 1e+16, "y": {}}, "c": []}"#;
        check("{{ v | tojson }}", line);
        check("{{ v | tojson(indent=none) }}", line);
        check("{{ v.a | tojson(indent=2) }}", "{\n  \"z\": 1e+16,\n  \"y\": {}\n}");
        check("{{ v.b | tojson(indent=0) }}", "[\n1,\n2.0,\n\"x\\\"é\\n\",\nnull,\ntrue\n]");
        check("{{ v.b | tojson(ensure_ascii=true) }}", r#"[1, 2.0, "x\"\u00e9\n", null, true]"#);
        check("{{ v.a | tojson(separators=(',', ':'), sort_keys=true) }}", r#"{"y":{},"z":1e+16}"#);
        check("{{ '<a href=\"&\">' | tojson }}", r#""<a href=\"&\">""#);
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        check("{{ true }} {{ none }} {{ 1e16 }} {{ v.missing }}|", "True None 1e+16 |");
        check("{{ v.b | string }}", "[1, 2.0, 'x\"é\\n', None, True]");
        check("{{ 'a' is sequence }} {{ v is sequence }} {{ 1 is sequence }}", "True True False");
    }

    #[test]
    fn python_methods_work_on_texts() {
        check(
            "{{ ' a b '.strip() }}|{{ 'xxa'.lstrip('x') }}|{{ 'a,b,c'.rsplit(',', 1) }}",
            "a b|a|['a,b', 'c']",
        );
        check("{{ 'a=b=c'.partition('=')[2] }}|{{ 'a=b=c'.rpartition('=')[0] }}", "b=c|a=b");
        check("{{ 'abc'.removeprefix('a').removesuffix('c') }}|{{ '\x1c a' | trim }}", "b|a");
        check("{{ 'a</t>b</t>c'.split('</t>')[-1] }}", "c");
    }

    #[test]
    fn generation_blocks_are_rendered_without_their_tags() {
        check("a\n{% generation %}\nb{% set x = 1 %}\n{%- endgeneration -%}\n c {{ x }}", "a\nbc ");
        check("{% if '{% generation' %}y{% endif %}", "y");
    }

    #[test]
    fn a_template_refuses_in_its_own_words() {
        let error = "the chat template refuses these messages: No system role, please.";
        check("{{ raise_exception('No system role, please.') }}", error);
    }

    #[test]
    fn the_clock_can_be_read() {
        check("{{ strftime_now('%d %B %Y') }}", "01 January 1970");
    }

    #[test]
    fn an_endless_template_ends() {
        for source in [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        ] {
            let mut template = Template::new(source).expect(source);
            template.environment.set_fuel(Some(RENDER_FUEL / 1_000));
            template.render(&Map::new()).expect_err("it never ends by itself");
        }
    }
}
