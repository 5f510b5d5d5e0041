//! Parses the sampling parameters, which have the same names in all protocols.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use steersman_engine::policy::SamplingPatch;

use super::error::ApiError;
use super::{fields, json};
use crate::words::number;

/// The fields that this module reads.
const FIELDS: [&str; 4] = ["temperature", "top_p", "top_k", "min_p"];

/// The fields of a body that this module reads.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct Sampling {
    /// 0 is greedy.
    #[schemars(range(min = 0.0, max = 2.0))]
    temperature: Option<f64>,
    /// 0 keeps the likeliest token.
    #[schemars(range(min = 0.0, max = 1.0))]
    top_p: Option<f64>,
    /// 0 and -1 keep all tokens.
    #[schemars(range(min = -1))]
    top_k: Option<i64>,
    #[schemars(range(min = 0.0, max = 1.0))]
    min_p: Option<f64>,
    /// The field of the body that has these; empty if that is the body itself.
    #[serde(skip)]
    at: String,
}

impl Sampling {
    /// Takes the parameters out of an object, which is the field `at` of the body, or the body itself
    /// if that is empty.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn take(at: &str, fields: &mut Map<String, Value>) -> Result<Self, ApiError> {
        let sampling = json::typed(at, &Value::Object(fields::take(fields, &FIELDS)))?;
        Ok(Self { at: at.into(), ..sampling })
    }

    /// The parameters, checked. -1 and 0 for `top_k` keep all tokens.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn check(self) -> Result<SamplingPatch, ApiError> {
        let Self { temperature, top_p, top_k, min_p, at } = self;
        let named = |name: &str| json::join(&at, name);
        let top_k = top_k.map(|top_k| match top_k {
            -1 => Ok(0),
            top_k => u32::try_from(top_k).map_err(|_| {
                let name = named("top_k");
                let message = format!("{name}: is {top_k}, must be at least 1, or 0 or -1 for all");
                ApiError::value(name, message)
            }),
        });
        Ok(SamplingPatch {
            temperature: within(named("temperature"), temperature, 2.0, "from 0 to 2")?,
            // The smallest set of at least no probability: one token.
            top_p: within(named("top_p"), top_p, 1.0, "0 or above, at most 1")?
                .map(|p| p.max(f32::MIN_POSITIVE)),
            top_k: top_k.transpose()?,
            min_p: within(named("min_p"), min_p, 1.0, "from 0 to 1")?,
        })
    }
}

/// Checks that `value` is from 0 to `most`, the range in words. The message has the number as it was sent.
fn within(
    name: String,
    value: Option<f64>,
    most: f64,
    range: &str,
) -> Result<Option<f32>, ApiError> {
    match value {
        Some(value) if !(0.0..=most).contains(&value) => {
            let value = number(value);
            let message = format!("{name}: is {value}, must be {range}");
            Err(ApiError::value(name, message))
        }
        value => Ok(value.map(|value| value as f32)),
    }
}
