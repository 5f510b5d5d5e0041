//! Formats whose arguments are written as in a program: pythonic calls (Llama 4, LFM2) and Gemma's.

use super::json::end;
use super::reader::{Read, Reader, Stop, head};

/// `[name(key=value, ..), ..]`
pub fn pythonic(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    reader.expect("[")?;
    loop {
        reader.skip_space();
        if reader.is_bare
            && !reader.rest.contains('(')
            && !reader.schemas.has_name_with(reader.rest)
        {
            return Err(Stop::Malformed);
        }
        let name = reader.name_until("(")?;
        if reader.is_bare && !reader.schemas.has(name) {
            return Err(Stop::Malformed);
        }
        reader.begin(name);
        reader.arguments(keywords)?;
        reader.complete();
        reader.skip_space();
        if !reader.take(",")? {
            break;
        }
    }
    reader.expect("]")?;
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
        let at = reader.rest.find(['{', '<', '\n']).ok_or(Stop::Early)?;
        let name = reader.rest[..at].trim();
        if name.is_empty() {
            return Err(Stop::Malformed);
        }
        reader.rest = &reader.rest[at..];
        reader.begin(name);
        reader.arguments(|reader, out| reader.object(out, 0))?;
        reader.complete();
        reader.skip_space();
        if reader.is_at_end() {
            return Ok(());
        }
    }
}
