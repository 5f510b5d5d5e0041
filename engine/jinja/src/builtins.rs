//! Filters, tests, functions and methods that minijinja lacks or has otherwise than Jinja2 and Python.
//!
//! Filters that bound what a template makes are in [`operators`]. Not added are filters that no public
//! chat template uses: `center`, `filesizeformat`, `random`, `striptags`, `truncate`, `urlencode`,
//! `wordcount`, `wordwrap` and `xmlattr`; a template with one of them is an error that names it.
//!
//! Source: Jinja2 3.1.6 `filters.py`, `tests.py`; CPython 3.12 `Objects/unicodeobject.c`.

use minijinja::value::{Kwargs, Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback as pycompat;

use crate::raised::raised;
use crate::taint::{plain, plain_text};
use crate::{budget, operators, python};

/// Methods that change a list.
const CHANGE_LISTS: [&str; 8] =
    ["append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"];

/// Methods that change a map.
const CHANGE_MAPS: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];

/// Adds all of them to `environment`.
pub fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment
        .add_filter("string", |value: &Value| python::str(value).map(|text| text.into_owned()));
    environment.add_filter("trim", trim);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_iterable);
    environment.add_test("divisibleby", is_divisible);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("first", first);
    environment.add_filter("last", last);
    environment.add_filter("items", items);
    environment.add_test("callable", |_: &Value| false);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
}

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let indent = indent.or(kwargs.get("indent")?).filter(|value| !value.is_none());
    let separators: Option<Value> = kwargs.get("separators")?;
    let style = python::JsonStyle {
        ensure_ascii: ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false),
        indent: match indent {
            None => None,
            Some(text) if text.kind() == ValueKind::String => Some(text.to_string()),
            Some(width) => {
                Some(" ".repeat(budget::within(width.as_usize().unwrap_or(0), "tojson")?))
            }
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

/// `int(value)`, or `default` where that fails.
fn int(
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(kwargs.get("default")?).unwrap_or(Value::from(0));
    let base = base.or(kwargs.get("base")?).unwrap_or(10);
    kwargs.assert_all_used()?;
    let float = |number: f64| {
        let fits = number.is_finite() && number.abs() < 1e18;
        fits.then(|| Value::from(number as i64))
    };
    let number = match value.kind() {
        ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => Some(value.clone()),
        ValueKind::Number => f64::try_from(value.clone()).ok().and_then(float),
        ValueKind::String if (2..=36).contains(&base) => {
            let text = plain_text(value.as_str().unwrap_or_default()).into_owned();
            let digits = text.trim_matches(python::is_space);
            let parsed = i64::from_str_radix(digits, base).ok().map(Value::from);
            parsed.or_else(|| digits.parse().ok().and_then(float))
        }
        _ => None,
    };
    Ok(number.unwrap_or(default))
}

/// `float(value)`, or `default` where that fails.
fn float(value: &Value, default: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = default.or(kwargs.get("default")?).unwrap_or(Value::from(0.0));
    kwargs.assert_all_used()?;
    let number = match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        ValueKind::String => {
            let text = plain_text(value.as_str().unwrap_or_default()).into_owned();
            text.trim_matches(python::is_space).parse().ok()
        }
        _ => None,
    };
    Ok(number.map_or(default, Value::from))
}

/// The first item, undefined if there is none.
fn first(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(Value::UNDEFINED) } else { minijinja::filters::first(value) }
}

/// The last item, or the last key of a map; undefined if there is none.
fn last(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::UNDEFINED),
        ValueKind::Map => Ok(value.try_iter()?.last().unwrap_or(Value::UNDEFINED)),
        _ => minijinja::filters::last(value.clone()),
    }
}

/// Pairs of key and value; none if `value` is undefined.
fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    minijinja::filters::items(value)
}

/// Python's `str.strip`, of white space or of `chars`.
fn trim(value: &Value, chars: Option<&str>) -> Result<String, Error> {
    let text = python::str(value)?;
    Ok(match chars {
        Some(chars) => text.trim_matches(|c| plain_text(chars).contains(plain(c))).into(),
        None => text.trim_matches(python::is_space).into(),
    })
}

/// The number of items of `value`; 0 if it is undefined, as in Jinja2.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

/// Jinja2 tests for a length and items by index, which strings and maps have too.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
        || value.is_undefined()
}

/// Jinja2 tests for an iterator. minijinja's `none` has one.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.is_undefined() || value.try_iter().is_ok())
}

/// minijinja panics if `divisor` is 0.
fn is_divisible(value: &Value, divisor: &Value) -> Result<bool, Error> {
    if matches!(divisor.kind(), ValueKind::Number | ValueKind::Bool) && !divisor.is_true() {
        return Err(Error::new(ErrorKind::InvalidOperation, "modulo by zero"));
    }
    Ok(minijinja::tests::is_divisibleby(value, divisor))
}

/// Python's methods of values: those that pycompat lacks or implements differently, then pycompat.
fn method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        // Jinja2's message: the sandbox of transformers lets no template change its values.
        let kind = match value.kind() {
            ValueKind::Seq if CHANGE_LISTS.contains(&method) => "list",
            ValueKind::Map if CHANGE_MAPS.contains(&method) => "dict",
            ValueKind::Seq if method == "index" && args.len() == 1 => {
                let at = value.try_iter()?.position(|item| item == args[0]);
                return at.map(Value::from).ok_or_else(|| raised("not in list".into()));
            }
            ValueKind::Seq | ValueKind::Map if method == "copy" && args.is_empty() => {
                return Ok(value.clone());
            }
            _ => return pycompat(state, value, method, args),
        };
        let problem = format!("access to attribute '{method}' of '{kind}' object is unsafe.");
        return Err(raised(problem));
    };
    if let ("ljust" | "rjust" | "center", [width, fill]) = (method, args) {
        return justified(text, method, width, fill.as_str().unwrap_or(" "));
    }
    let Some(argument) = args.first().and_then(Value::as_str) else {
        return match (method, args) {
            ("strip", []) => Ok(text.trim_matches(python::is_space).into()),
            ("lstrip", []) => Ok(text.trim_start_matches(python::is_space).into()),
            ("rstrip", []) => Ok(text.trim_end_matches(python::is_space).into()),
            ("join", [items]) => operators::join(items, value),
            ("swapcase", []) => {
                let swap = |c: char| -> String {
                    if c.is_uppercase() {
                        c.to_lowercase().collect()
                    } else {
                        c.to_uppercase().collect()
                    }
                };
                Ok(text.chars().map(swap).collect::<String>().into())
            }
            ("casefold", []) => Ok(text.to_lowercase().into()),
            ("title", []) => Ok(title(text).into()),
            ("zfill", [width]) => {
                let (sign, digits) = match text.strip_prefix(['-', '+']) {
                    Some(digits) => text.split_at(text.len() - digits.len()),
                    None => ("", text),
                };
                let zeros = padding(width, text)?;
                Ok(format!("{sign}{}{digits}", "0".repeat(zeros)).into())
            }
            ("ljust" | "rjust" | "center", [width]) => justified(text, method, width, " "),
            ("startswith" | "endswith", _) => {
                pycompat(state, &Value::from(&*plain_text(text)), method, args)
            }
            ("format", _) => {
                operators::check_format(text, args)?;
                pycompat(state, value, method, args)
            }
            _ => pycompat(state, value, method, args),
        };
    };
    // What is searched is plain, and so is the text where it is found.
    let argument = &*plain_text(argument);
    let number = |at: usize| args.get(at).and_then(Value::as_i64);
    let limit =
        |at: usize| number(at).and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let exposed = |limit, from_end| operators::expose(text, argument, limit, from_end);
    let is_argument = |c| argument.contains(plain(c));
    let length = argument.chars().count();
    match method {
        "strip" => Ok(text.trim_matches(is_argument).into()),
        "lstrip" => Ok(text.trim_start_matches(is_argument).into()),
        "rstrip" => Ok(text.trim_end_matches(is_argument).into()),
        "removeprefix" => {
            let cut = if plain_text(text).starts_with(argument) { length } else { 0 };
            Ok(text.chars().skip(cut).collect::<String>().into())
        }
        "removesuffix" => {
            let cut = if plain_text(text).ends_with(argument) { length } else { 0 };
            let left = text.chars().count() - cut;
            Ok(text.chars().take(left).collect::<String>().into())
        }
        "partition" => {
            let text = exposed(1, false);
            let (head, tail) = text.split_once(argument).unwrap_or((&text, ""));
            Ok(tuple(&[head, if text.contains(argument) { argument } else { "" }, tail]))
        }
        "rpartition" => {
            let text = exposed(1, true);
            let (head, tail) = text.rsplit_once(argument).unwrap_or(("", &text));
            Ok(tuple(&[head, if text.contains(argument) { argument } else { "" }, tail]))
        }
        "rsplit" => {
            let (limit, text) = (limit(1), exposed(limit(1), true));
            let mut parts: Vec<&str> = text.rsplitn(limit.saturating_add(1), argument).collect();
            parts.reverse();
            Ok(list(&parts))
        }
        "index" => {
            let found = plain_text(text).find(argument);
            let at = found.map(|at| plain_text(text)[..at].chars().count());
            at.map(Value::from).ok_or_else(|| raised("substring not found".into()))
        }
        "split" => {
            let args = [&[Value::from(argument)], &args[1..]].concat();
            pycompat(state, &Value::from(&*exposed(limit(1), false)), method, &args)
        }
        "replace" if args.get(1).is_some_and(|new| new.as_str().is_some()) => {
            let new = args[1].as_str().unwrap_or_default();
            Ok(operators::replaced(text, argument, new, limit(2))?.into())
        }
        "join" => operators::join(&args[0], value),
        "format" => {
            operators::check_format(text, args)?;
            pycompat(state, value, method, args)
        }
        "startswith" | "endswith" | "find" | "rfind" | "count" => {
            let args = [&[Value::from(argument)], &args[1..]].concat();
            pycompat(state, &Value::from(&*plain_text(text)), method, &args)
        }
        _ => pycompat(state, value, method, args),
    }
}

fn list(texts: &[&str]) -> Value {
    texts.iter().copied().map(Value::from).collect()
}

fn tuple(texts: &[&str]) -> Value {
    Tuple::from(texts.iter().copied().map(Value::from).collect::<Vec<_>>()).into()
}

/// Python's `str.title`: a letter is large unless a letter precedes it.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut follows_letter = false;
    for c in text.chars() {
        if follows_letter {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        follows_letter = plain(c).is_alphabetic();
    }
    out
}

/// The characters that `text` lacks to `width`.
fn padding(width: &Value, text: &str) -> Result<usize, Error> {
    let width = width.as_i64().and_then(|width| usize::try_from(width).ok()).unwrap_or(0);
    Ok(budget::within(width, "padding")?.saturating_sub(text.chars().count()))
}

/// `str.ljust`, `str.rjust` and `str.center`.
fn justified(text: &str, method: &str, width: &Value, fill: &str) -> Result<Value, Error> {
    let count = padding(width, text)?;
    let wide = width.as_usize().unwrap_or(0);
    let left = match method {
        "ljust" => 0,
        "rjust" => count,
        // As in CPython, where an odd rest goes to the left if the width is odd.
        _ => count / 2 + (count & wide & 1),
    };
    Ok(format!("{}{text}{}", fill.repeat(left), fill.repeat(count - left)).into())
}
