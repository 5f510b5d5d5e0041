//! Formats whose arguments are written as in a program: pythonic calls (Llama 4, LFM2, OLMo 3) and Gemma's.

use super::json::end;
use super::reader::{Read, Reader, Stop, head};

/// `[name(key=value, ..), ..]`. With tags around them, calls may stand without the brackets, on lines of their
/// own, and in a block of Markdown.
pub fn pythonic(reader: &mut Reader<'_>) -> Read {
    let is_fenced = !reader.is_bare && reader.open_fence()?;
    reader.skip_space();
    let has_brackets = reader.is_bare || reader.peek()? == '[';
    if has_brackets {
        reader.expect("[")?;
    }
    loop {
        reader.skip_space();
        if reader.is_bare
            && !reader.rest.contains('(')
            && !reader.schemas.has_name_with(reader.rest)
        {
            return Err(Stop::Malformed);
        }
        let name = reader.name_until("(")?;
        if reader.is_bare && !reader.schemas.knows(name) {
            return Err(Stop::Malformed);
        }
        reader.begin(name);
        reader.arguments(keywords)?;
        reader.complete();
        reader.skip_space();
        let has_separator = match reader.rest.strip_prefix([',', ';']) {
            Some(rest) => {
                reader.rest = rest.trim_start();
                true
            }
            None => false,
        };
        // Text after the calls is no call without a comma; a list ends with its bracket.
        let is_at_end = reader.is_at_end() || reader.rest.starts_with('`');
        if has_brackets && !has_separator || !has_brackets && is_at_end {
            break;
        }
    }
    if has_brackets {
        reader.expect("]")?;
    }
    reader.left = reader.rest.len();
    if is_fenced {
        reader.close_fence()?;
    }
    end(reader)
}

/// `key=value, ..)`
fn keywords(reader: &mut Reader<'_>, out: &mut String) -> Read {
    out.push('{');
    let mut is_first = true;
    loop {
        reader.skip_space();
        if reader.take(")")? {
            break;
        }
        if !std::mem::replace(&mut is_first, false) {
            reader.expect(",")?;
            reader.skip_space();
            if reader.take(")")? {
                break;
            }
        }
        let key = reader.name_until("=")?;
        reader.skip_space();
        reader.element(out, &head(key), |reader, out| reader.value(out, 0))?;
    }
    out.push('}');
    Ok(())
}

/// `call:name{key:value, ..}`
pub fn gemma(reader: &mut Reader<'_>) -> Read {
    loop {
        reader.skip_space();
        reader.expect("call:")?;
        reader.is_pending = true;
        let at = match reader.rest.find(['{', '<', '\n']) {
            Some(at) => at,
            // A call without parameters.
            None if reader.has_ended && reader.schemas.knows(reader.rest.trim()) => {
                reader.begin(reader.rest.trim());
                reader.arguments(|_, out| {
                    out.push_str("{}");
                    Ok(())
                })?;
                (reader.rest, reader.is_repaired) = ("", true);
                reader.complete();
                return Ok(());
            }
            None => return Err(Stop::Early),
        };
        let name = reader.rest[..at].trim();
        if name.is_empty() || reader.is_bare && !reader.schemas.knows(name) {
            return Err(Stop::Malformed);
        }
        reader.rest = &reader.rest[at..];
        reader.begin(name);
        reader.arguments(|reader, out| reader.object(out, 0))?;
        reader.complete();
        reader.skip_brackets_after_call();
        if reader.is_at_end() {
            return Ok(());
        }
    }
}
