//! Reads JSON bodies: within a limit on values, typed, with errors that name the field by its path.
//!
//! Tolerates what many clients send and nobody means: a field that is not known but null, and
//! `3.0` for an integer.

use serde::de::DeserializeOwned;
use serde_ignored::Path;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::typed::{Known, Typed};

/// Maximum number of JSON values in a body. A value takes up to a hundred bytes of memory, but only
/// two of the body; a long conversation has some thousands.
const VALUES: usize = 1 << 18;

/// Whole numbers up to here have one float each.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Parses the body of a request.
///
/// # Errors
/// 400 if it is no JSON object, or has too many values.
pub fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if values(body) > VALUES {
        let message = format!("the body has more than {VALUES} JSON values");
        return Err(ApiError::value("", message));
    }
    let body = serde_json::from_slice(body).map_err(|error| {
        ApiError::invalid("invalid_json", "", format!("the body is not valid JSON: {error}"))
    })?;
    let Value::Object(mut fields) = body else {
        return Err(ApiError::invalid("invalid_json", "", "the body must be a JSON object"));
    };
    whole_numbers(&mut fields);
    Ok(fields)
}

/// Makes integers of the floats among `fields` that are whole. Nested objects stay as they are.
pub fn whole_numbers(fields: &mut Map<String, Value>) {
    for value in fields.values_mut() {
        if let Some(number) = value.as_f64()
            && value.is_f64()
            && number.fract() == 0.0
            && number.abs() < EXACT
        {
            // Cast: whole and in range.
            *value = (number as i64).into();
        }
    }
}

/// The number of values of a JSON text, or more: each but the first follows one of `[`, `{`, `,`, `:`.
fn values(json: &[u8]) -> usize {
    let (mut values, mut in_string, mut escaped) = (1, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' | b',' | b':' if !in_string => values += 1,
            _ => {}
        }
    }
    values
}

/// Deserializes `value`, which stands at `path` in the body. An unknown field is an error unless it is
/// null.
///
/// # Errors
/// 400 naming the field by its path.
pub fn typed<T: DeserializeOwned>(path: &str, value: &Value) -> Result<T, ApiError> {
    check_unknown(path, value, |_| true)
}

/// [`typed`], for the body itself: its own fields are checked by [`super::fields::check`].
///
/// # Errors
/// As [`typed`].
pub fn typed_body<T: DeserializeOwned>(body: Map<String, Value>) -> Result<T, ApiError> {
    check_unknown("", &Value::Object(body), |path| {
        !matches!(path, Path::Map { parent: Path::Root, .. })
    })
}

/// Deserializes `value`; `is_error` says of which unknown fields are errors unless they are null.
fn check_unknown<T: DeserializeOwned>(
    at: &str,
    value: &Value,
    is_error: impl Fn(&Path<'_>) -> bool,
) -> Result<T, ApiError> {
    let mut track = serde_path_to_error::Track::new();
    let (known, mut unknown) = (Known::default(), None);
    let typed = Typed { value, known: &known };
    let body = serde_ignored::deserialize(
        serde_path_to_error::Deserializer::new(typed, &mut track),
        |path| {
            if is_error(&path) && find(value, &path).is_some_and(|value| !value.is_null()) {
                unknown.get_or_insert_with(|| {
                    let fields = known.borrow().last().copied().unwrap_or_default();
                    ApiError::unknown_field(join(at, &written(&path)), fields.iter().copied())
                });
            }
        },
    );
    match (body, unknown) {
        (Err(error), _) => {
            let path = join(at, track.path().to_string().trim_start_matches('.'));
            let message = format!("{path}: {error}");
            Err(ApiError::invalid("invalid_type", path, message))
        }
        (Ok(_), Some(error)) => Err(error),
        (Ok(body), None) => Ok(body),
    }
}

/// As [`typed`], for what must be an object: a type with variants would accept a list.
///
/// # Errors
/// As [`typed`].
pub fn typed_object<T: DeserializeOwned>(path: &str, value: &Value) -> Result<T, ApiError> {
    if !value.is_object() {
        let message = format!("{path}: must be an object");
        return Err(ApiError::invalid("invalid_type", path, message));
    }
    typed(path, value)
}

/// Checks that the fields `names` of the object at `path` are texts, if it has them: serde's errors of an enum with
/// tags name none of its fields.
///
/// # Errors
/// 400 naming the field.
pub fn check_texts(path: &str, object: &Value, names: &[&str]) -> Result<(), ApiError> {
    let problem = |name: &&str| typed::<String>(&join(path, name), object.get(*name)?).err();
    names.iter().find_map(problem).map_or(Ok(()), Err)
}

/// The path of `field` of what stands at `at`.
pub fn join(at: &str, field: &str) -> String {
    match (at, field) {
        ("", field) => field.into(),
        (at, "") => at.into(),
        (at, field) if field.starts_with('[') => format!("{at}{field}"),
        (at, field) => format!("{at}.{field}"),
    }
}

/// `path` as `messages[1].content`.
fn written(path: &Path<'_>) -> String {
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", written(parent)),
        Path::Map { parent, key } => join(&written(parent), key),
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => written(parent),
    }
}

/// The value at `path`.
fn find<'a>(value: &'a Value, path: &Path<'_>) -> Option<&'a Value> {
    match path {
        Path::Root => Some(value),
        Path::Seq { parent, index } => find(value, parent)?.get(index),
        Path::Map { parent, key } => find(value, parent)?.get(key),
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => find(value, parent),
    }
}
