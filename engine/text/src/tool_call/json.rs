//! Formats whose arguments are a JSON object: Hermes and others that differ in tags only, Llama 3, Mistral, DeepSeek,
//! Kimi, Cohere, Apertus, Harmony.

use super::super::harmony::{Body, read_header};
use super::reader::{Read, Reader, Stop};

/// `{"name": .., "arguments": {..}}`, or a list of these; Cohere says `tool_name`. Several stand one after the
/// other: Llama 3 separates them with `;`, other models with white space or a comma. A model may write all of
/// it in a block of Markdown.
pub fn objects(reader: &mut Reader<'_>) -> Read {
    let is_fenced = reader.open_fence()?;
    reader.is_repaired |= is_fenced;
    loop {
        reader.skip_brackets_after_call();
        if reader.is_at_end() && reader.has_call() {
            return Ok(());
        }
        match reader.peek()? {
            '[' => list(reader)?,
            '{' => object(reader)?,
            ';' if reader.has_call() => {
                reader.rest = &reader.rest[1..];
                reader.left = reader.rest.len();
            }
            ',' if reader.has_call() => {
                let rest = reader.rest[1..].trim_start();
                if !rest.is_empty() && !rest.starts_with(['[', '{']) {
                    return Err(Stop::Malformed);
                }
                (reader.rest, reader.is_repaired) = (rest, true);
            }
            '`' if is_fenced && reader.has_call() => {
                reader.close_fence()?;
                return end(reader);
            }
            _ => return Err(Stop::Malformed),
        }
    }
}

/// A list of calls.
fn list(reader: &mut Reader<'_>) -> Read {
    reader.expect("[")?;
    loop {
        reader.skip_space();
        object(reader)?;
        reader.skip_space();
        if !reader.take(",")? {
            break;
        }
    }
    reader.expect("]")?;
    reader.left = reader.rest.len();
    Ok(())
}

/// White space and brackets too many, up to the end.
pub fn end(reader: &mut Reader<'_>) -> Read {
    reader.skip_brackets_after_call();
    if reader.is_at_end() { Ok(()) } else { Err(Stop::Malformed) }
}

fn object(reader: &mut Reader<'_>) -> Read {
    reader.expect("{")?;
    reader.begin("");
    let mut has_arguments = false;
    reader.members("}", |reader, key| member(reader, &key, &mut has_arguments))?;
    match reader.calls.last_mut() {
        Some(call) if !call.name.is_empty() => {
            if call.arguments.is_empty() {
                call.arguments = "{}".into();
            }
        }
        _ => return Err(Stop::Malformed),
    }
    reader.complete();
    Ok(())
}

/// A member of a call. A name or arguments that come twice are malformed: one of them would be dropped.
fn member(reader: &mut Reader<'_>, key: &str, has_arguments: &mut bool) -> Read {
    match key {
        "function" if reader.peek()? == '{' => {
            reader.expect("{")?;
            reader.members("}", |reader, key| member(reader, &key, has_arguments))
        }
        "name" | "tool_name" | "function" => {
            let mut json = String::new();
            let result = reader.value(&mut json, 0);
            reader.is_in_value = false;
            result?;
            let name: String = serde_json::from_str(&json).map_err(|_| Stop::Malformed)?;
            if name.is_empty() || reader.is_bare && !reader.schemas.knows(&name) {
                return Err(Stop::Malformed);
            }
            let name = reader.schemas.resolve(&name).to_string();
            match reader.calls.last_mut() {
                Some(call) if call.name.is_empty() => call.name = name,
                _ => return Err(Stop::Malformed),
            }
            Ok(())
        }
        "arguments" | "parameters" if *has_arguments => Err(Stop::Malformed),
        "arguments" | "parameters" => {
            *has_arguments = true;
            reader.arguments(object_or_text)
        }
        "type" | "id" | "tool_call_id" => reader.value(&mut String::new(), 0),
        _ if reader.is_bare => Err(Stop::Malformed),
        _ => reader.value(&mut String::new(), 0),
    }
}

/// Arguments: an object, one in a string, or null.
fn object_or_text(reader: &mut Reader<'_>, out: &mut String) -> Read {
    match reader.peek()? {
        '{' => reader.object(out, 0),
        '"' => {
            let mut json = String::new();
            let result = reader.value(&mut json, 0);
            // The arguments have nothing of it before its end.
            reader.is_pending = true;
            result?;
            let text: String = serde_json::from_str(&json).map_err(|_| Stop::Malformed)?;
            let mut inner = Reader {
                has_ended: true,
                ..Reader::new(text.trim(), reader.schemas, reader.dialect)
            };
            let result = inner.object(out, 0).and_then(|()| end(&mut inner));
            reader.is_repaired |= inner.is_repaired;
            reader.is_pending = false;
            result.map_err(|_| Stop::Malformed)
        }
        'n' => {
            reader.expect("null")?;
            reader.is_pending = false;
            out.push_str("{}");
            Ok(())
        }
        _ => Err(Stop::Malformed),
    }
}

/// `[{"name": {..}}, ..]`, each call an object with the arguments under the name.
pub fn named(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    reader.expect("[")?;
    loop {
        reader.skip_space();
        reader.expect("{")?;
        let mut is_first = true;
        reader.members("}", |reader, name| {
            if !std::mem::replace(&mut is_first, false) || name.is_empty() {
                return Err(Stop::Malformed);
            }
            reader.begin(&name);
            reader.arguments(object_or_text)
        })?;
        if is_first {
            return Err(Stop::Malformed);
        }
        reader.complete();
        reader.skip_space();
        if !reader.take(",")? {
            break;
        }
    }
    reader.expect("]")?;
    reader.left = reader.rest.len();
    end(reader)
}

/// `name[ARGS]{..}`, perhaps with `[CALL_ID]id` before `[ARGS]`, or without `[ARGS]`; or Mistral's older list of
/// objects. Several may stand one after the other.
pub fn mistral(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    if "[{`".contains(reader.peek()?) {
        return objects(reader);
    }
    loop {
        reader.is_pending = !reader.rest.is_empty();
        let end_of_name = reader.rest.find(['[', '{', '\n', '<']).ok_or(Stop::Early)?;
        let name = reader.rest[..end_of_name].trim();
        if name.is_empty() || reader.has_call() && !reader.schemas.knows(name) {
            return Err(Stop::Malformed);
        }
        reader.rest = &reader.rest[end_of_name..];
        if reader.take("[CALL_ID]")? {
            reader.until("[")?;
            reader.expect("ARGS]")?;
        } else if !reader.take("[ARGS]")? {
            // Without the tag, only the name tells that this is a call.
            if !reader.schemas.knows(name) || !reader.rest.starts_with('{') {
                return Err(Stop::Malformed);
            }
            reader.is_repaired = true;
        }
        reader.begin(name);
        reader.skip_space();
        reader.arguments(|reader, out| reader.object(out, 0))?;
        reader.complete();
        reader.skip_brackets_after_call();
        if reader.is_at_end() {
            return Ok(());
        }
        if let Some(rest) = reader.rest.strip_prefix([',', ';']) {
            (reader.rest, reader.is_repaired) = (rest.trim_start(), true);
        }
    }
}

/// Calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`: `name<｜tool▁sep｜>{..}`, or before
/// version 3.1 `function<｜tool▁sep｜>name` and the arguments in a block of Markdown.
pub fn deepseek(reader: &mut Reader<'_>) -> Read {
    loop {
        reader.skip_space();
        reader.expect("<｜tool▁call▁begin｜>")?;
        let name = reader.name_until("<｜tool▁sep｜>")?;
        reader.skip_space();
        let is_fenced = reader.peek()? != '{';
        if is_fenced {
            let name = reader.name_until("\n")?;
            reader.begin(name);
            reader.skip_space();
            reader.expect("```json")?;
            reader.skip_space();
        } else {
            reader.begin(name);
        }
        reader.arguments(|reader, out| reader.object(out, 0))?;
        reader.complete();
        reader.skip_brackets_after_call();
        if is_fenced {
            reader.expect("```")?;
            reader.skip_space();
        }
        reader.expect("<｜tool▁call▁end｜>")?;
        reader.skip_space();
        reader.left = reader.rest.len();
        if reader.is_at_end() {
            return Ok(());
        }
    }
}

/// Calls between `<|tool_call_begin|>` and `<|tool_call_end|>`:
/// `functions.name:0<|tool_call_argument_begin|>{..}`.
pub fn kimi(reader: &mut Reader<'_>) -> Read {
    loop {
        reader.skip_space();
        reader.expect("<|tool_call_begin|>")?;
        let id = reader.name_until("<|tool_call_argument_begin|>")?;
        let name = id.strip_prefix("functions.").unwrap_or(id);
        let name = match name.rsplit_once(':') {
            Some((name, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => name,
        };
        reader.begin(name);
        reader.skip_space();
        reader.arguments(|reader, out| reader.object(out, 0))?;
        reader.complete();
        reader.skip_brackets_after_call();
        reader.expect("<|tool_call_end|>")?;
        reader.skip_space();
        reader.left = reader.rest.len();
        if reader.is_at_end() {
            return Ok(());
        }
    }
}

/// A message of Harmony, from its header on: `.. to=functions.name ..<|message|>{..}`.
pub fn harmony(reader: &mut Reader<'_>) -> Read {
    let header = reader.until("<|message|>")?;
    let Some(Body::Call(name)) = read_header(header) else { return Err(Stop::Malformed) };
    reader.begin(name);
    reader.skip_space();
    reader.arguments(|reader, out| reader.object(out, 0))?;
    reader.complete();
    end(reader)
}
