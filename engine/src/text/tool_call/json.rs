//! Formats whose arguments are a JSON object: Hermes and others that differ in tags only, Llama 3, Mistral, DeepSeek,
//! Kimi, Cohere, Apertus, Harmony.

use super::super::harmony::{Body, read_header};
use super::reader::{Read, Reader, Stop};

/// `{"name": .., "arguments": {..}}`, or a list of these. Cohere says `tool_name`. Calls without a list are separated by `;`, as
/// Llama 3 writes several.
pub fn objects(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    if reader.peek()? == '[' {
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
        return end(reader);
    }
    loop {
        object(reader)?;
        reader.skip_space();
        if reader.is_at_end() {
            return Ok(());
        }
        reader.expect(";")?;
        reader.skip_space();
    }
}

/// White space up to the end.
pub fn end(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    if reader.is_at_end() { Ok(()) } else { Err(Stop::Malformed) }
}

fn object(reader: &mut Reader<'_>) -> Read {
    reader.begin("");
    reader.expect("{")?;
    let mut has_arguments = false;
    reader.members("}", |reader, key| match key.as_str() {
        "name" | "tool_name" => {
            let mut json = String::new();
            let result = reader.value(&mut json, 0);
            reader.is_in_value = false;
            result?;
            let name: String = serde_json::from_str(&json).map_err(|_| Stop::Malformed)?;
            if name.is_empty() || reader.is_bare && !reader.schemas.has(&name) {
                return Err(Stop::Malformed);
            }
            if let Some(call) = reader.calls.last_mut() {
                call.name = name;
            }
            Ok(())
        }
        "arguments" | "parameters" if !has_arguments => {
            has_arguments = true;
            reader.arguments(object_or_text)
        }
        "type" | "id" => reader.value(&mut String::new(), 0),
        _ if reader.is_bare => Err(Stop::Malformed),
        _ => reader.value(&mut String::new(), 0),
    })?;
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

/// Arguments: an object, one in a string, or null.
fn object_or_text(reader: &mut Reader<'_>, out: &mut String) -> Read {
    match reader.peek()? {
        '{' => reader.object(out, 0),
        '"' => {
            let mut json = String::new();
            reader.value(&mut json, 0)?;
            let text: String = serde_json::from_str(&json).map_err(|_| Stop::Malformed)?;
            let mut inner = Reader {
                rest: text.trim(),
                has_ended: true,
                schemas: reader.schemas,
                calls: Vec::new(),
                ..*reader
            };
            inner.object(out, 0).and_then(|()| end(&mut inner)).map_err(|_| Stop::Malformed)
        }
        'n' => {
            reader.expect("null")?;
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
    end(reader)
}

/// `name[ARGS]{..}`, perhaps with `[CALL_ID]id` before `[ARGS]`; or Mistral's older list of objects.
pub fn mistral(reader: &mut Reader<'_>) -> Read {
    reader.skip_space();
    if "[{".contains(reader.peek()?) {
        return objects(reader);
    }
    let name = reader.name_until("[")?;
    reader.begin(name);
    if reader.take("CALL_ID]")? {
        reader.until("[")?;
    }
    reader.expect("ARGS]")?;
    reader.skip_space();
    reader.arguments(|reader, out| reader.object(out, 0))?;
    reader.complete();
    end(reader)
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
        reader.skip_space();
        if is_fenced {
            reader.expect("```")?;
            reader.skip_space();
        }
        reader.expect("<｜tool▁call▁end｜>")?;
        reader.skip_space();
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
        reader.skip_space();
        reader.expect("<|tool_call_end|>")?;
        reader.skip_space();
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
