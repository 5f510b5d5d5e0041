//! Formats with a tag for each parameter, whose values are bare texts: Qwen, Seed-OSS, GLM, MiniMax, DeepSeek from V3.2.

use super::json;
use super::reader::{BareValue, Read, Reader, Stop, head};

/// `<function=name>` with `<parameter=key>` blocks, or JSON as [`json::objects`] reads it. A model may write
/// either; text that begins with a bracket is JSON.
pub fn qwen(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    if "[{".contains(reader.peek()?) {
        return json::objects(reader);
    }
    let tags = Tags {
        call: ["<function=", ">", "</function>"],
        parameter: ["<parameter=", ">", "</parameter>"],
        follow: &["<parameter=", "</function>"],
        has_lines: true,
        has_flags: false,
    };
    calls(reader, tags)
}

/// As [`qwen`] in blocks, whose values do not stand on lines of their own.
pub fn seed(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    let tags = Tags {
        call: ["<function=", ">", "</function>"],
        parameter: ["<parameter=", ">", "</parameter>"],
        follow: &["<parameter=", "</function>"],
        has_lines: false,
        has_flags: false,
    };
    calls(reader, tags)
}

/// A name, and then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each parameter.
pub fn glm(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
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
    if !reader.schemas.has(name) {
        return Err(Stop::Malformed);
    }
    reader.rest = &reader.rest[end..];
    reader.begin(name);
    reader.arguments(|reader, out| {
        out.push('{');
        reader.skip_space();
        while !(reader.has_ended && reader.is_at_end()) {
            reader.expect("<arg_key>")?;
            let key = reader.name_until("</arg_key>")?;
            reader.skip_space();
            reader.expect("<arg_value>")?;
            let follow = &["<arg_key>", ""];
            let value = BareValue { close: "</arg_value>", follow, ..BareValue::default() };
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
        follow: &["<parameter name=", "</invoke>"],
        has_lines: false,
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
        follow: &["<｜DSML｜parameter name=", "</｜DSML｜invoke>"],
        has_lines: false,
        has_flags: true,
    };
    calls(reader, tags)
}

/// The tags of a call, and those of its parameters.
#[derive(Clone, Copy)]
struct Tags {
    /// Before and after the name, and after the parameters.
    call: [&'static str; 3],
    /// Before and after the key, and after the value.
    parameter: [&'static str; 3],
    /// What may follow a value.
    follow: &'static [&'static str],
    /// Whether a value stands on lines of its own.
    has_lines: bool,
    /// Whether `true">` or `false">` after the key tells if the value is a bare string or JSON.
    has_flags: bool,
}

/// One call after the other, up to the end.
fn calls(reader: &mut Reader<'_>, tags: Tags) -> Read {
    let Tags { call, parameter, follow, has_lines, has_flags } = tags;
    loop {
        reader.expect(call[0])?;
        let name = reader.name_until(call[1])?;
        reader.begin(name);
        reader.arguments(|reader, out| {
            out.push('{');
            reader.skip_space();
            while reader.take(parameter[0])? {
                let key = reader.name_until(parameter[1])?;
                let is_json = has_flags && reader.take("false\">")?;
                if has_flags && !is_json {
                    reader.expect("true\">")?;
                }
                let value =
                    BareValue { close: parameter[2], follow, has_lines, is_string: has_flags };
                reader.element(out, &head(key), |reader, out| {
                    if is_json {
                        reader.skip_space();
                        reader.value(out, 0)?;
                        reader.skip_space();
                        return reader.expect(parameter[2]);
                    }
                    reader.bare_value(out, [name, key], value)
                })?;
                reader.skip_space();
            }
            reader.expect(call[2])?;
            out.push('}');
            Ok(())
        })?;
        reader.complete();
        reader.skip_space();
        if reader.is_at_end() {
            return Ok(());
        }
    }
}
