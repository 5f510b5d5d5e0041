//! Formats with a tag for each parameter, whose values are bare texts: Qwen, GLM, MiniMax.

use super::json;
use super::reader::{BareValue, Read, Reader, Stop, head};

/// `<function=name>` with `<parameter=key>` blocks; or JSON, as [`json::objects`]. The text tells which
/// one, since a model may write either.
pub fn qwen(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    if "[{".contains(reader.peek()?) {
        return json::objects(reader);
    }
    loop {
        reader.expect("<function=")?;
        let name = reader.name_until(">")?;
        reader.begin(name);
        reader.arguments(|reader, out| {
            out.push('{');
            reader.skip_space();
            while reader.take("<parameter=")? {
                let key = reader.name_until(">")?;
                let follow = &["<parameter=", "</function>"];
                let value = BareValue { close: "</parameter>", follow, has_lines: true };
                reader.element(out, &head(key), |reader, out| {
                    reader.bare_value(out, [name, key], value)
                })?;
                reader.skip_space();
            }
            reader.expect("</function>")?;
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

/// A name, and then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each parameter.
pub fn glm(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    let end = reader.rest.find(['\n', '<']).filter(|&at| at > 0);
    let end = end.or(reader.has_ended.then_some(reader.rest.len()));
    let Some(end) = end else {
        // No tag says that a name comes here.
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
            let value = BareValue { close: "</arg_value>", follow, has_lines: false };
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
    loop {
        reader.skip_space();
        reader.expect("<invoke name=\"")?;
        let name = reader.name_until("\">")?;
        reader.begin(name);
        reader.arguments(|reader, out| {
            out.push('{');
            reader.skip_space();
            while reader.take("<parameter name=\"")? {
                let key = reader.name_until("\">")?;
                let follow = &["<parameter name=", "</invoke>"];
                let value = BareValue { close: "</parameter>", follow, has_lines: false };
                reader.element(out, &head(key), |reader, out| {
                    reader.bare_value(out, [name, key], value)
                })?;
                reader.skip_space();
            }
            reader.expect("</invoke>")?;
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
