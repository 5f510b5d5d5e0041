//! Parses the sampling parameters, which have the same names in all protocols.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use steersman_engine::policy::SamplingPatch;

use super::error::ApiError;
use super::{fields, json};

/// The fields that this module reads.
const FIELDS: [&str; 4] = ["temperature", "top_p", "top_k", "min_p"];

/// The fields of a body that this module reads.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct Sampling {
    /// 0 is greedy.
    #[schemars(range(min = 0.0, max = 2.0))]
    temperature: Option<f32>,
    /// Above 0.
    #[schemars(range(min = 0.0, max = 1.0))]
    top_p: Option<f32>,
    /// 0 and -1 keep all tokens.
    #[schemars(range(min = -1))]
    top_k: Option<i64>,
    #[schemars(range(min = 0.0, max = 1.0))]
    min_p: Option<f32>,
}

impl Sampling {
    /// Takes the parameters out of an object, which is the field `at` of the body, or the body itself
    /// if that is empty.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn take(at: &str, fields: &mut Map<String, Value>) -> Result<Self, ApiError> {
        json::typed(at, &Value::Object(fields::take(fields, &FIELDS)))
    }

    /// The parameters, checked. -1 and 0 for `top_k` keep all tokens.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn check(self) -> Result<SamplingPatch, ApiError> {
        let Self { temperature, top_p, top_k, min_p } = self;
        let top_k = top_k.map(|top_k| match top_k {
            -1 => Ok(0),
            top_k => u32::try_from(top_k).map_err(|_| {
                let message = format!("top_k: is {top_k}, must be at least 1, or 0 or -1 for all");
                ApiError::value("top_k", message)
            }),
        });
        Ok(SamplingPatch {
            temperature: within("temperature", temperature, "from 0 to 2", |t| {
                (0.0..=2.0).contains(&t)
            })?,
            top_p: within("top_p", top_p, "above 0, at most 1", |p| p > 0.0 && p <= 1.0)?,
            top_k: top_k.transpose()?,
            min_p: within("min_p", min_p, "from 0 to 1", |p| (0.0..=1.0).contains(&p))?,
        })
    }
}

/// Checks that `value` is in `range`.
fn within(
    name: &str,
    value: Option<f32>,
    range: &str,
    contains: impl Fn(f32) -> bool,
) -> Result<Option<f32>, ApiError> {
    match value {
        Some(value) if !contains(value) => {
            Err(ApiError::value(name, format!("{name}: is {value}, must be {range}")))
        }
        value => Ok(value),
    }
}
