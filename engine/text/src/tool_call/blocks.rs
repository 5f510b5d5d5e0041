//! Formats with a tag for each parameter, whose values are bare texts: Qwen, Seed-OSS, GLM, MiniMax, DeepSeek from V3.2.

use super::bare::{BareValue, Lines};
use super::json;
use super::reader::{Read, Reader, Stop, head};

/// `<function=name>` with `<parameter=key>` blocks, or JSON as [`json::objects`] reads it. A model may write
/// either; text that begins with a bracket is JSON.
pub fn qwen(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    if "[{`".contains(reader.peek()?) {
        return json::objects(reader);
    }
    calls(reader, QWEN)
}

/// As [`qwen`] in blocks, whose values do not stand on lines of their own.
pub fn seed(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    calls(reader, Tags { lines: Lines::Both, ..QWEN })
}

/// A name, and then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each parameter. A model
/// may write JSON.
pub fn glm(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    if reader.rest.starts_with(['[', '{', '`']) {
        return json::objects(reader);
    }
    let end = reader.rest.find(['\n', '<']).filter(|&at| at > 0);
    let end = end.or(reader.has_ended.then_some(reader.rest.len()));
    let Some(end) = end else {
        // The name has no tag of its own.
        let may_be_name = reader.schemas.has_name_with(reader.rest);
        return Err(if may_be_name { Stop::Early } else { Stop::Malformed });
    };
    let name = reader.rest[..end].trim();
    if name.is_empty() && reader.rest.is_empty() {
        return Err(Stop::Early);
    }
    if !reader.schemas.knows(name) {
        return Err(Stop::Malformed);
    }
    let name = reader.schemas.resolve(name);
    reader.rest = &reader.rest[end..];
    reader.begin(name);
    reader.arguments(|reader, out| {
        out.push('{');
        reader.skip_space();
        let mut given = Vec::new();
        while !(reader.has_ended && reader.is_at_end()) {
            reader.expect("<arg_key>")?;
            let key = reader.name_until("</arg_key>")?;
            given.push(key);
            reader.skip_space();
            reader.expect("<arg_value>")?;
            let value = BareValue {
                close: "</arg_value>",
                parameter: ["<arg_key>", "</arg_key>"],
                call: ["", ""],
                lines: Lines::Never,
                is_string: false,
                given: &given,
            };
            reader.element(out, &head(key), |reader, out| {
                reader.bare_value(out, [name, key], value)
            })?;
            reader.skip_space();
        }
        out.push('}');
        Ok(())
    })?;
    reader.complete();
    Ok(())
}

/// `<invoke name="name">` with `<parameter name="key">` blocks.
pub fn minimax(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    let tags = Tags {
        call: ["<invoke name=\"", "\">", "</invoke>"],
        parameter: ["<parameter name=\"", "\">", "</parameter>"],
        lines: Lines::Both,
        has_flags: false,
    };
    calls(reader, tags)
}

/// `<｜DSML｜invoke name="name">` with `<｜DSML｜parameter name="key" string="true">` blocks. With
/// `string="false"` the value is JSON.
pub fn deepseek(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    let tags = Tags {
        call: ["<｜DSML｜invoke name=\"", "\">", "</｜DSML｜invoke>"],
        parameter: ["<｜DSML｜parameter name=\"", "\" string=\"", "</｜DSML｜parameter>"],
        lines: Lines::Never,
        has_flags: true,
    };
    calls(reader, tags)
}

const QWEN: Tags = Tags {
    call: ["<function=", ">", "</function>"],
    parameter: ["<parameter=", ">", "</parameter>"],
    lines: Lines::Always,
    has_flags: false,
};

/// The tags of a call, and those of its parameters.
#[derive(Clone, Copy)]
struct Tags {
    /// Before and after the name, and after the parameters.
    call: [&'static str; 3],
    /// Before and after the key, and after the value.
    parameter: [&'static str; 3],
    lines: Lines,
    /// Whether `true">` or `false">` after the key tells if the value is a bare string or JSON.
    has_flags: bool,
}

/// One call after the other, up to the end.
fn calls(reader: &mut Reader<'_>, tags: Tags) -> Read {
    loop {
        reader.expect(tags.call[0])?;
        let name = reader.name_until(tags.call[1])?;
        if reader.is_bare && !reader.schemas.knows(name) {
            return Err(Stop::Malformed);
        }
        let name = reader.schemas.resolve(name);
        reader.begin(name);
        reader.arguments(|reader, out| parameters(reader, out, name, tags))?;
        reader.complete();
        reader.skip_space();
        if reader.is_at_end() {
            return Ok(());
        }
    }
}

/// The parameters of a call of `name`, and the tag after them.
fn parameters(reader: &mut Reader<'_>, out: &mut String, name: &str, tags: Tags) -> Read {
    let Tags { call: [begin, _, finish], parameter: [open, after, close], lines, has_flags } = tags;
    reader.skip_space();
    if reader.rest.starts_with('{') {
        // As Llama 3.1 writes functions of its users.
        reader.object(out, 0)?;
        reader.skip_space();
        reader.is_repaired = true;
        // The bracket is certain with the call.
        return reader.expect(finish);
    }
    out.push('{');
    let mut given = Vec::new();
    while reader.take(open)? {
        let key = reader.name_until(after)?;
        given.push(key);
        let is_json = has_flags && reader.take("false\">")?;
        if has_flags && !is_json {
            reader.expect("true\">")?;
        }
        let value = BareValue {
            close,
            parameter: [open, after],
            call: [begin, finish],
            lines,
            is_string: has_flags,
            given: &given,
        };
        reader.element(out, &head(key), |reader, out| {
            if !is_json {
                return reader.bare_value(out, [name, key], value);
            }
            reader.skip_space();
            reader.value(out, 0)?;
            reader.skip_space();
            if [open, finish].iter().any(|tag| reader.rest.starts_with(tag)) {
                reader.is_repaired = true;
                return Ok(());
            }
            reader.expect(close)
        })?;
        reader.skip_space();
    }
    if !reader.take(finish)? {
        // The next call begins without an end of this one.
        if !reader.rest.starts_with(begin) {
            return Err(if begin.starts_with(reader.rest) { Stop::Early } else { Stop::Malformed });
        }
        reader.is_repaired = true;
    }
    out.push('}');
    Ok(())
}
