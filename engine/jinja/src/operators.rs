//! Operators that differ from those of minijinja: slices and `%` as in Python, comparisons that see through
//! [taint](crate::taint), and results that are charged to the [budget](crate::budget).
//!
//! Operators of minijinja cannot be replaced, so [`prepare`] changes the compiled instructions: some
//! become calls of filters whose names no template can write, and what may grow is charged. Methods, and
//! filters that make nothing large, are in `builtins`.
//!
//! # Why slices
//! minijinja 3.0.5 panics when it reverses an empty list or text (`messages[1:][::-1]`, which
//! published templates of Qwen3.5 contain) and takes `[:0:-1]` for `[::-1]`.

use std::borrow::Cow;

use minijinja::filters;
use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use crate::budget::{charge, invalid, within};
use crate::python;
use crate::taint::{self, is_tainted, plain_text};

/// Memory of an item of a list.
const ITEM: usize = size_of::<Value>();

/// Names of the filters that instructions become. They are no identifiers.
const SLICE: &str = "[:]";
const CONCAT: &str = "~";
const MADE: &str = "made";
const EQUAL: &str = "==";
const UNEQUAL: &str = "!=";
const IN: &str = "in";
const REM: &str = "%";
const CHARACTERS: &str = "characters";

/// Adds the filters to `environment`.
pub fn add_to(environment: &mut Environment<'static>) {
    environment.add_filter(SLICE, slice);
    environment.add_filter(CONCAT, concat);
    environment.add_filter(MADE, made);
    environment.add_filter(EQUAL, equal);
    environment.add_filter(UNEQUAL, unequal);
    environment.add_filter(IN, is_in);
    environment.add_filter(REM, remainder);
    environment.add_filter(CHARACTERS, characters);
    environment.add_filter("indent", indent);
    environment.add_filter("batch", batch);
    environment.add_filter("slice", columns);
    environment.add_filter("format", format);
    environment.add_filter("join", join_filter);
    environment.add_filter("replace", replace);
    environment.add_filter("split", split);
    environment.add_function("range", range);
    environment.add_filter("e", escape);
    environment.add_filter("escape", escape);
}

/// `range`; minijinja's own panics where the difference of two arguments exceeds their type.
fn range(lower: isize, upper: Option<isize>, step: Option<isize>) -> Result<Value, Error> {
    const MOST: u64 = 1 << 31;
    if [Some(lower), upper, step].into_iter().flatten().any(|x| x.unsigned_abs() as u64 > MOST) {
        let problem = format!("range() has an argument beyond {MOST}");
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    minijinja::functions::range(lower, upper, step)
}

/// Changes `compiled` as the module describes; comparisons only if texts are `tainted`.
pub fn prepare<'a>(compiled: &Instructions<'a>, tainted: bool) -> Instructions<'a> {
    let count = (0..).take_while(|at| compiled.get(*at).is_some()).count() as u32;
    let filter = |name, arguments| Instruction::ApplyFilter(name, Some(arguments), !0);
    let replaced = |at: u32| -> Vec<Instruction<'a>> {
        let Some(instruction) = compiled.get(at) else { return Vec::new() };
        match instruction {
            // As any other value, raw text passes the formatter, which charges it.
            Instruction::EmitRaw(text) => {
                vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit]
            }
            Instruction::Slice => vec![filter(SLICE, 4)],
            Instruction::StringConcat => vec![filter(CONCAT, 2)],
            // `loop.length` and `loop.last` of a text, whose iterator does not know its end.
            Instruction::PushLoop(_) => vec![filter(CHARACTERS, 1), instruction.clone()],
            Instruction::Rem => vec![filter(REM, 2), filter(MADE, 1)],
            Instruction::Eq if tainted => vec![filter(EQUAL, 2)],
            Instruction::Ne if tainted => vec![filter(UNEQUAL, 2)],
            Instruction::In if tainted => vec![filter(IN, 2)],
            Instruction::Add
            | Instruction::Mul
            | Instruction::BuildList(_)
            | Instruction::BuildTuple(_)
            | Instruction::EndCapture
            | Instruction::ApplyFilter(..)
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(_) => vec![instruction.clone(), filter(MADE, 1)],
            other => vec![other.clone()],
        }
    };
    // Jumps go to places, which move.
    let mut places = Vec::with_capacity(count as usize + 1);
    let mut next = 0;
    for at in 0..count {
        places.push(next);
        next += replaced(at).len() as u32;
    }
    places.push(next);
    let moved = |to: u32| places.get(to as usize).copied().unwrap_or(next);
    let mut prepared = Instructions::new(compiled.name(), compiled.source());
    for at in 0..count {
        for mut instruction in replaced(at) {
            match &mut instruction {
                Instruction::Iterate(to)
                | Instruction::Jump(to)
                | Instruction::JumpIfFalse(to)
                | Instruction::JumpIfFalseOrPop(to)
                | Instruction::JumpIfTrueOrPop(to)
                | Instruction::BuildMacro(_, to, _) => *to = moved(*to),
                _ => {}
            }
            match (compiled.get_span(at), compiled.get_line(at)) {
                (Some(span), _) => prepared.add_with_span(instruction, span),
                (None, Some(line)) => {
                    prepared.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX))
                }
                (None, None) => prepared.add(instruction),
            };
        }
    }
    prepared
}

/// Charges a value that was made.
fn made(value: Value) -> Result<Value, Error> {
    let bytes = match value.as_str() {
        Some(text) => text.len(),
        None => match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => value.len().unwrap_or(0).saturating_mul(ITEM),
            _ => 0,
        },
    };
    charge(bytes)?;
    Ok(value)
}

/// `value[start:stop:step]` as in Python.
fn slice(value: &Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let bound = |value: Value| -> Result<Option<i64>, Error> {
        if value.is_none() { Ok(None) } else { Ok(Some(i64::try_from(value)?)) }
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(invalid("slice step cannot be zero"));
    }
    if let Some(text) = value.as_str() {
        charge(text.len())?;
        if step == 1 && start.is_none_or(|at| at >= 0) && stop.is_none_or(|at| at >= 0) {
            let start = usize::try_from(start.unwrap_or(0)).unwrap_or(usize::MAX);
            let stop = stop.map_or(usize::MAX, |at| usize::try_from(at).unwrap_or(usize::MAX));
            let rest = text.chars().skip(start).take(stop.saturating_sub(start));
            return Ok(rest.collect::<String>().into());
        }
        let chars: Vec<char> = text.chars().collect();
        let places = places(start, stop, step, chars.len());
        return Ok(places.map(|at| chars[at]).collect::<String>().into());
    }
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => return Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Seq | ValueKind::Iterable => {}
        kind => return Err(invalid(&format!("value of type {kind} cannot be sliced"))),
    }
    charge(value.len().unwrap_or(0).saturating_mul(ITEM))?;
    let items: Vec<Value> = value.try_iter()?.collect();
    let chosen: Vec<Value> =
        places(start, stop, step, items.len()).map(|at| items[at].clone()).collect();
    charge(chosen.len().saturating_mul(ITEM))?;
    Ok(if value.is_tuple() { Value::from(Tuple::from(chosen)) } else { Value::from(chosen) })
}

/// The places of `length` items that a slice takes, in its order.
///
/// Source: CPython 3.12 `Objects/sliceobject.c`, `PySlice_AdjustIndices`.
fn places(
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
    length: usize,
) -> impl Iterator<Item = usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |at: Option<i64>, default| match at {
        None => default,
        Some(at) if at < 0 => at.saturating_add(length).max(lowest),
        Some(at) => at.min(highest),
    };
    let (first, last) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
    let (start, stop) = (place(start, first), place(stop, last));
    std::iter::successors(Some(start), move |at| at.checked_add(step))
        .take_while(move |at| if step > 0 { *at < stop } else { *at > stop })
        .filter_map(|at| usize::try_from(at).ok())
}

/// `a ~ b`
fn concat(a: &Value, b: &Value) -> Result<Value, Error> {
    let (a, b) = (python::str(a)?, python::str(b)?);
    charge(a.len() + b.len())?;
    Ok(Value::from(format!("{a}{b}")))
}

fn equal(a: &Value, b: &Value) -> bool {
    plain(a) == plain(b)
}

fn unequal(a: &Value, b: &Value) -> bool {
    plain(a) != plain(b)
}

/// `value in container`; `container` is the second operand.
fn is_in(state: &State, value: &Value, container: &Value) -> Result<bool, Error> {
    match (plain(value).as_str(), plain(container).as_str()) {
        (Some(part), Some(text)) => return Ok(text.contains(part)),
        (Some(_), None) if matches!(container.kind(), ValueKind::Seq | ValueKind::Iterable) => {
            let value = plain(value);
            return Ok(container.try_iter()?.any(|item| plain(&item) == value));
        }
        _ => {}
    }
    if matches!(
        container.kind(),
        ValueKind::Bool | ValueKind::Number | ValueKind::None | ValueKind::Bytes
    ) {
        return Err(invalid("cannot perform a containment check on this value"));
    }
    minijinja::tests::is_in(state, value, container)
}

/// `value` without taint, if it is a text.
fn plain(value: &Value) -> Value {
    match value.as_str() {
        Some(text) if is_tainted(text) => Value::from(plain_text(text)),
        _ => value.clone(),
    }
}

/// `text` with the taint removed from the first `limit` places where it spells `needle`, which is
/// plain; from the last ones if `from_end`. A search for `needle` then finds just these.
pub fn expose<'a>(text: &'a str, needle: &str, limit: usize, from_end: bool) -> Cow<'a, str> {
    if !is_tainted(text) {
        return Cow::Borrowed(text);
    }
    let restored = plain_text(text);
    let mut found: Vec<usize> = restored.match_indices(needle).map(|(at, _)| at).collect();
    let most = found.len().min(limit);
    found = if from_end { found.split_off(found.len() - most) } else { found[..most].to_vec() };
    let mut found = found.into_iter().peekable();
    let mut exposed = String::with_capacity(text.len());
    let (mut at, mut plain_until) = (0, 0);
    for (tainted, restored) in text.chars().zip(restored.chars()) {
        if found.next_if_eq(&at).is_some() {
            plain_until = at + needle.len();
        }
        exposed.push(if at < plain_until { restored } else { tainted });
        at += restored.len_utf8();
    }
    Cow::Owned(exposed)
}

/// All arguments of a filter, named ones included.
type Arguments = Rest<ValueOrKwargs>;

fn values(arguments: Arguments) -> Vec<Value> {
    arguments.0.into_iter().map(ValueOrKwargs::into_value).collect()
}

/// Jinja2's `indent(width=4, first=False, blank=False)`; `width` may be a text.
fn indent(value: &Value, arguments: Arguments) -> Result<String, Error> {
    let arguments = values(arguments);
    let (named, positional): (Vec<_>, Vec<_>) = arguments.iter().partition(|a| a.is_kwargs());
    let argument = |at: usize, name: &str| {
        let by_name = named.first().and_then(|kwargs| kwargs.get_attr(name).ok());
        positional.get(at).map(|value| (*value).clone()).or(by_name).filter(|v| !v.is_undefined())
    };
    let margin = match argument(0, "width") {
        Some(text) if text.as_str().is_some() => text.to_string(),
        width => {
            let width = width.map_or(Some(4), |width| width.as_i64()).unwrap_or(0);
            " ".repeat(within(usize::try_from(width).unwrap_or(0), "indent")?)
        }
    };
    let is_set = |at, name| argument(at, name).is_some_and(|value| value.is_true());
    let (first, blank) = (is_set(1, "first"), is_set(2, "blank"));
    let text = python::str(value)?;
    charge(text.len() + (text.matches('\n').count() + 1).saturating_mul(margin.len()))?;
    let mut out = String::new();
    for (number, line) in text.split('\n').enumerate() {
        if number > 0 {
            out.push('\n');
        }
        let is_indented = if number == 0 { first } else { blank || !line.is_empty() };
        if is_indented {
            out.push_str(&margin);
        }
        out.push_str(line);
    }
    Ok(out)
}

fn batch(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let arguments = values(arguments);
    widest("batch", &arguments)?;
    call(state, Value::from_function(filters::batch), value, &arguments)
}

/// The filter `slice`, which has nothing to do with slices.
fn columns(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let arguments = values(arguments);
    widest("slice", &arguments)?;
    call(state, Value::from_function(filters::slice), value, &arguments)
}

fn format(state: &mut State, value: &Value, arguments: Arguments) -> Result<Value, Error> {
    let arguments = values(arguments);
    check_format(value.as_str().unwrap_or_default(), &arguments)?;
    call(state, Value::from_function(filters::format), value, &arguments)
}

/// The characters of a text; any other value unchanged.
fn characters(value: Value) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return Ok(value) };
    charge(text.chars().count().saturating_mul(ITEM))?;
    Ok(text.chars().map(Value::from).collect())
}

/// `a % b` as in Python: the format `a` with the arguments `b`, or the remainder with the sign of `b`.
fn remainder(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some(text) = a.as_str() {
        let arguments: Vec<Value> = match b.kind() {
            ValueKind::Map => {
                let names: Vec<Value> = b.try_iter()?.collect();
                let pairs = names.iter().map(|name| {
                    Ok((name.as_str().unwrap_or_default().to_string(), b.get_item(name)?))
                });
                vec![pairs.collect::<Result<Kwargs, Error>>()?.into()]
            }
            _ if b.is_tuple() => b.try_iter()?.collect(),
            _ => vec![b.clone()],
        };
        check_format(text, &arguments)?;
        return call(state, Value::from_function(filters::format), a, &arguments);
    }
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !is_number(a) || !is_number(b) {
        let problem = format!("% is not defined for {} and {}", a.kind(), b.kind());
        return Err(invalid(&problem));
    }
    if !b.is_true() {
        return Err(invalid("modulo by zero"));
    }
    let whole = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(i64::from(value.is_true())),
        _ => value.is_integer().then(|| value.as_i64()).flatten(),
    };
    if let (Some(a), Some(b)) = (whole(a), whole(b)) {
        let rest = a.wrapping_rem(b);
        return Ok(Value::from(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }));
    }
    let float = |value: &Value| match value.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(value.is_true()))),
        _ => f64::try_from(value.clone()),
    };
    let (a, b) = (float(a)?, float(b)?);
    let rest = a % b;
    Ok(Value::from(if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }))
}

/// Calls minijinja's own filter.
fn call(
    state: &mut State,
    filter: Value,
    value: &Value,
    arguments: &[Value],
) -> Result<Value, Error> {
    filter.call(state, &[std::slice::from_ref(value), arguments].concat())
}

/// The largest number among `arguments` of `filter`, named ones included.
fn widest(filter: &str, arguments: &[Value]) -> Result<usize, Error> {
    let mut widest = 0;
    for argument in arguments {
        let named = argument.is_kwargs().then(|| argument.try_iter()).transpose()?;
        let named = named.into_iter().flatten().filter_map(|name| argument.get_item(&name).ok());
        for number in named.chain([argument.clone()]).filter_map(|value| value.as_i64()) {
            widest = widest.max(within(usize::try_from(number).unwrap_or(0), filter)?);
        }
    }
    Ok(widest)
}

/// Refuses a format that pads its fields without limit.
pub fn check_format(format: &str, arguments: &[Value]) -> Result<(), Error> {
    let percent = format.split('%').skip(1).map(|rest| {
        let rest =
            rest.strip_prefix('(').and_then(|named| named.split_once(')')).map_or(rest, |s| s.1);
        rest.split(|c: char| !"-+ #0123456789.*".contains(c)).next().unwrap_or_default()
    });
    let braces = format.split('{').skip(1).map(|rest| rest.split('}').next().unwrap_or_default());
    for field in percent.chain(braces) {
        let numbers = field.split(|c: char| !c.is_ascii_digit());
        for number in numbers.filter(|digits| !digits.is_empty()) {
            within(number.parse().unwrap_or(usize::MAX), "format")?;
        }
        // `%*d` and `{:{}}` take the width from the arguments.
        if field.contains('*') || field.ends_with(':') {
            widest("format", arguments)?;
        }
    }
    for argument in arguments {
        python::str(argument)?;
    }
    Ok(())
}

fn join_filter(
    value: &Value,
    separator: Option<&Value>,
    attribute: Option<&str>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let named: Option<Value> = kwargs.get("d")?;
    let attribute = attribute.or(kwargs.get("attribute")?);
    kwargs.assert_all_used()?;
    let empty = Value::from("");
    let separator = separator.or(named.as_ref()).unwrap_or(&empty);
    let Some(path) = attribute else { return join(value, separator) };
    let item = |item: Value| path.split('.').try_fold(item, |item, name| item.get_attr(name));
    let items: Vec<Value> = value.try_iter()?.map(item).collect::<Result<_, _>>()?;
    join(&Value::from(items), separator)
}

/// The items of `value` with `separator` between them.
pub fn join(value: &Value, separator: &Value) -> Result<Value, Error> {
    let separator = python::str(separator)?;
    let mut out = String::new();
    for (number, item) in value.try_iter()?.enumerate() {
        let text = python::str(&item)?;
        let between = if number > 0 { &*separator } else { "" };
        charge(between.len() + text.len())?;
        out.push_str(between);
        out.push_str(&text);
    }
    Ok(out.into())
}

fn replace(value: &Value, old: &Value, new: &Value) -> Result<String, Error> {
    let old = python::str(old)?;
    replaced(&python::str(value)?, &plain_text(&old), &python::str(new)?, usize::MAX)
}

/// Python's `str.replace` of `old`, which is plain, at the first `count` places.
pub fn replaced(text: &str, old: &str, new: &str, count: usize) -> Result<String, Error> {
    let text = expose(text, old, count, false);
    let places = text.matches(old).take(count).count();
    charge(text.len().saturating_add(places.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, count))
}

fn split(value: &Value, separator: Option<&str>, limit: Option<i64>) -> Result<Value, Error> {
    let Some(separator) = separator else { return filters::split(value, None, limit) };
    let text = python::str(value)?;
    let separator = plain_text(separator);
    let most = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let text = expose(&text, &separator, most, false);
    filters::split(&Value::from(&*text), Some(separator.into()), limit)
}

/// Jinja2's `escape`.
fn escape(value: &Value) -> Result<String, Error> {
    let text = python::str(value)?;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match taint::plain(c) {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            _ => out.push(c),
        }
    }
    charge(out.len())?;
    Ok(out)
}
