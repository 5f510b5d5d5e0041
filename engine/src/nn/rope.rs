//! Rotary position embedding (arXiv:2104.09864) on the first `dims` of a head: dimension `i` is paired with
//! `i + dims / 2`, or, if `rope_traditional` is set, `2 i` with `2 i + 1`.
//!
//! [`RopeConfig`] holds the keys of `config.json`, in the layout before transformers 5 (`rope_theta`
//! and `rope_scaling`) and since (`rope_parameters`). [`RopeConfig::rope`] turns them into
//! frequencies.
//!
//! Source: `llama3` from Llama 3.1's reference code, `yarn` from arXiv:2309.00071, `longrope` from
//! arXiv:2402.13753; as in `transformers` `modeling_rope_utils.py` and mlx-lm `models/rope_utils.py`.

use std::cell::OnceCell;
use std::f64::consts::TAU;

use mlx_rs::{Array, fast};
use serde::Deserialize;

use crate::cache::Span;
use crate::error::Result;
use crate::kernels::RotationView;

/// Rotates queries and keys by their position.
#[derive(Debug, Clone)]
pub struct Rope {
    dims: i32,
    theta: f32,
    /// Whether neighbouring dimensions are paired.
    pub traditional: bool,
    /// Factor of positions.
    scale: f32,
    /// f32 [dims / 2]: positions per radian, if they are not the powers of `theta`.
    wavelengths: Option<Array>,
    /// f32 [D]: factors of a head's dimensions before the rotation, if not all are 1.
    magnitudes: Option<Array>,
    /// See [`RotationView::frequencies`].
    frequencies: OnceCell<Array>,
}

impl Rope {
    /// Rotates the first `dims` dimensions of a head; frequencies are the powers of `theta`.
    pub fn new(dims: i32, theta: f32) -> Self {
        Self {
            dims,
            theta,
            traditional: false,
            scale: 1.0,
            wavelengths: None,
            magnitudes: None,
            frequencies: OnceCell::new(),
        }
    }

    /// The rotation as kernels read it.
    pub fn view(&self) -> RotationView<'_> {
        RotationView {
            dims: self.dims,
            theta: self.theta,
            scale: self.scale,
            wavelengths: self.wavelengths.as_ref(),
            has_plain_halves: !self.traditional && self.magnitudes.is_none(),
            frequencies: &self.frequencies,
        }
    }

    /// Rotates the rows `x` [1, R, H, D] of `spans`, each by its own position; same shape back.
    pub fn forward(&self, x: &Array, spans: &[Span<'_>]) -> Result<Array> {
        let theta = self.wavelengths.is_none().then_some(self.theta);
        let x = match &self.magnitudes {
            Some(magnitudes) => &x.multiply(magnitudes.as_dtype(x.dtype())?)?,
            None => x,
        };
        let wavelengths = self.wavelengths.as_ref();
        let &Self { dims, traditional, scale, .. } = self;
        if let [span] = spans {
            let x = x.swap_axes(1, 2)?;
            let offset = span.offset();
            let x = fast::rope(x, dims, traditional, theta, scale, offset, wavelengths)?;
            return Ok(x.swap_axes(1, 2)?);
        }
        // MLX takes one position for each element of a batch, so every row is one.
        let positions: Vec<i32> =
            spans.iter().flat_map(|span| span.offset()..span.offset() + span.rows).collect();
        let [rows, heads, dim] = [x.dim(1), x.dim(2), x.dim(3)];
        let positions = Array::from_slice(&positions, &[rows]);
        let x = x.reshape(&[rows, heads, 1, dim])?;
        let x = fast::rope_dynamic(x, dims, traditional, theta, scale, positions, wavelengths)?;
        Ok(x.reshape(&[1, rows, heads, dim])?)
    }
}

/// The rotary keys of `config.json`. A family's config flattens them in.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct RopeConfig {
    /// Base of the frequencies, in the older layout.
    pub rope_theta: Option<f32>,
    /// Rotated part of a head, in the older layout.
    pub partial_rotary_factor: Option<f32>,
    /// How the frequencies deviate from the powers of theta, in the older layout.
    pub rope_scaling: Option<RopeParameters>,
    /// All of these in the newer layout.
    pub rope_parameters: Option<RopeParameters>,
    /// Whether neighbouring dimensions are paired. MLX's key; `transformers` has none.
    pub rope_traditional: bool,
    /// Context of the model. Used as the trained context if the scaling does not state one.
    pub max_position_embeddings: Option<f64>,
    /// Trained context, where it is not in the table (Phi-3).
    pub original_max_position_embeddings: Option<f64>,
}

/// `rope_parameters`, or `rope_scaling`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(try_from = "RopeTable")]
pub struct RopeParameters {
    /// Base of the frequencies.
    pub rope_theta: Option<f32>,
    /// Rotated part of a head.
    pub partial_rotary_factor: Option<f32>,
    /// Growth of queries with their position (Llama 4, Ministral 3).
    pub llama_4_scaling_beta: Option<f32>,
    /// Trained context, before it was extended.
    pub original_max_position_embeddings: Option<f64>,
    /// How the frequencies deviate from the powers of theta.
    pub scaling: Scaling,
}

/// How frequencies deviate from the powers of theta to extend the trained context.
#[derive(Debug, Clone, Default)]
pub enum Scaling {
    /// No deviation.
    #[default]
    Default,
    /// All positions are divided by `factor`.
    Linear {
        /// Extension of the context.
        factor: f64,
    },
    /// Only the first part of a head's pairs rotate (`partial_rotary_factor`), with the frequencies
    /// of a whole head; wavelengths are stretched by `factor`.
    Proportional {
        /// Extension of the context.
        factor: f64,
    },
    /// Wavelengths above the trained context divided by `low_freq_factor` are stretched by
    /// `factor`; those below the trained context divided by `high_freq_factor` are not; a ramp lies
    /// between.
    Llama3 {
        /// Extension of the context.
        factor: f64,
        /// Trained context over the wavelength where the ramp ends.
        low_freq_factor: f64,
        /// Trained context over the wavelength where the ramp starts.
        high_freq_factor: f64,
    },
    /// The base is multiplied by `alpha^(D / (D - 2))` (Hunyuan).
    Ntk {
        /// Growth of the context.
        alpha: f64,
    },
    /// The wavelength of each pair is multiplied by a factor of its own, up to the trained context by the
    /// first and beyond it by the second.
    Long {
        /// For models whose context is the trained one.
        short: Vec<f64>,
        /// For models whose context was extended.
        long: Vec<f64>,
        /// Factor of queries and keys; follows from the extension if it is not stated.
        magnitude: Option<f64>,
    },
    /// Dimensions that turn less than `beta_slow` times in the trained context are stretched by
    /// `factor`; those that turn more than `beta_fast` times are not; a ramp lies between.
    Yarn {
        /// Extension of the context.
        factor: f64,
        /// Turns where the ramp starts.
        beta_fast: f64,
        /// Turns where the ramp ends.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// Factor of queries and keys.
        magnitude: f64,
        /// Factor of queries and of keys in families with latent attention, besides `magnitude`.
        sharpening: f64,
    },
}

/// The table as stored. Some checkpoints have both `type` and `rope_type`.
#[derive(Deserialize)]
struct RopeTable {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    older_type: Option<String>,
    rope_theta: Option<f32>,
    partial_rotary_factor: Option<f32>,
    llama_4_scaling_beta: Option<f32>,
    original_max_position_embeddings: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    truncate: Option<bool>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    alpha: Option<f64>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
}

impl TryFrom<RopeTable> for RopeParameters {
    type Error = String;

    fn try_from(table: RopeTable) -> std::result::Result<Self, String> {
        let kind = table.rope_type.or(table.older_type);
        let kind = kind.as_deref().unwrap_or("default");
        let needs = |key: &str| {
            format!("rope_scaling (or rope_parameters): rope_type `{kind}` needs `{key}`")
        };
        let factor = table.factor.ok_or_else(|| needs("factor"));
        let scaling = match kind {
            // The three multimodal positions of text are equal.
            "default" | "mrope" => Scaling::Default,
            "linear" => Scaling::Linear { factor: factor? },
            "proportional" => Scaling::Proportional { factor: table.factor.unwrap_or(1.0) },
            "llama3" => Scaling::Llama3 {
                factor: factor?,
                low_freq_factor: table.low_freq_factor.unwrap_or(1.0),
                high_freq_factor: table.high_freq_factor.unwrap_or(4.0),
            },
            "yarn" => {
                let factor = factor?;
                let grown = |mscale: f64| 0.1 * mscale * factor.max(1.0).ln() + 1.0;
                let [over, under] =
                    [table.mscale.unwrap_or(1.0), table.mscale_all_dim.unwrap_or(0.0)];
                Scaling::Yarn {
                    factor,
                    beta_fast: table.beta_fast.unwrap_or(32.0),
                    beta_slow: table.beta_slow.unwrap_or(1.0),
                    truncate: table.truncate.unwrap_or(true),
                    magnitude: table.attention_factor.unwrap_or(grown(over) / grown(under)),
                    sharpening: grown(under),
                }
            }
            // With `alpha` the frequencies do not depend on the length of the prompt.
            "dynamic" if table.alpha.is_some() => {
                Scaling::Ntk { alpha: table.alpha.unwrap_or(1.0) }
            }
            "longrope" | "su" => Scaling::Long {
                short: table.short_factor.ok_or_else(|| needs("short_factor"))?,
                long: table.long_factor.ok_or_else(|| needs("long_factor"))?,
                magnitude: table.attention_factor,
            },
            other => {
                return Err(format!(
                    "rope_scaling (or rope_parameters): rope_type `{other}` is not supported; \
                     supported are: default, linear, proportional, llama3, yarn, longrope"
                ));
            }
        };
        Ok(Self {
            rope_theta: table.rope_theta,
            partial_rotary_factor: table.partial_rotary_factor,
            llama_4_scaling_beta: table.llama_4_scaling_beta,
            original_max_position_embeddings: table.original_max_position_embeddings,
            scaling,
        })
    }
}

impl RopeConfig {
    /// The rotation of heads of `head_dim`. `theta` is the default base.
    pub fn rope(&self, head_dim: i32, theta: f32) -> Rope {
        let table = self.parameters();
        let theta = table.and_then(|p| p.rope_theta).or(self.rope_theta).unwrap_or(theta);
        let part = table.and_then(|p| p.partial_rotary_factor).or(self.partial_rotary_factor);
        let dims = part.map_or(head_dim, |part| (head_dim as f32 * part) as i32);
        let rope = Rope { traditional: self.rope_traditional, ..Rope::new(dims, theta) };
        let Some(table) = table else { return rope };
        let trained = self.trained();
        // Queries and keys grow where they rotate.
        let grown = |magnitude: f64| {
            let magnitudes = (0..head_dim).map(|i| if i < dims { magnitude } else { 1.0 });
            (magnitude != 1.0).then(|| array(magnitudes))
        };
        match table.scaling {
            Scaling::Default => rope,
            Scaling::Ntk { alpha } => {
                let grown = alpha.powf(f64::from(dims) / f64::from(dims - 2));
                Rope { theta: (f64::from(theta) * grown) as f32, ..rope }
            }
            Scaling::Long { ref short, ref long, magnitude } => {
                let extension = self.max_position_embeddings.unwrap_or(trained) / trained;
                let factors = if extension > 1.0 { long } else { short };
                let stretched = wavelengths(dims, theta).zip(factors);
                let magnitude = magnitude
                    .unwrap_or_else(|| (1.0 + extension.max(1.0).ln() / trained.ln()).sqrt());
                Rope {
                    wavelengths: Some(array(
                        stretched.map(|(wavelength, factor)| wavelength * factor),
                    )),
                    magnitudes: grown(magnitude),
                    ..rope
                }
            }
            Scaling::Linear { factor } => Rope { scale: factor.recip() as f32, ..rope },
            Scaling::Proportional { factor } => {
                let stretched = (0i32..).zip(wavelengths(head_dim, theta));
                let stretched = stretched.map(|(pair, wavelength)| {
                    if pair < dims / 2 { factor * wavelength } else { f64::INFINITY }
                });
                Rope { dims: head_dim, wavelengths: Some(array(stretched)), ..rope }
            }
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor } => {
                let stretched = wavelengths(dims, theta).map(|wavelength| {
                    let turns = trained / (TAU * wavelength);
                    let keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    mixed(wavelength, factor, keep.clamp(0.0, 1.0))
                });
                Rope { wavelengths: Some(array(stretched)), ..rope }
            }
            Scaling::Yarn { factor, beta_fast, beta_slow, truncate, magnitude, .. } => {
                // The dimension that turns this often in the trained context.
                let dimension = |turns: f64| {
                    f64::from(dims) * (trained / (turns * TAU)).ln() / (2.0 * f64::from(theta).ln())
                };
                let [mut low, mut high] = [dimension(beta_fast), dimension(beta_slow)];
                if truncate {
                    [low, high] = [low.floor(), high.ceil()];
                }
                [low, high] = [low.max(0.0), high.min(f64::from(dims - 1))];
                // Equal ends make a step; avoid a division by zero.
                let width = if low == high { 1e-3 } else { high - low };
                let stretched = (0u32..).zip(wavelengths(dims, theta)).map(|(i, wavelength)| {
                    let stretch = ((f64::from(i) - low) / width).clamp(0.0, 1.0);
                    mixed(wavelength, factor, 1.0 - stretch)
                });
                Rope { wavelengths: Some(array(stretched)), magnitudes: grown(magnitude), ..rope }
            }
        }
    }

    /// The table of either layout; the newer one takes precedence.
    pub fn parameters(&self) -> Option<&RopeParameters> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// Trained context, before it was extended.
    pub fn trained(&self) -> f64 {
        let original = self.parameters().and_then(|p| p.original_max_position_embeddings);
        let original = original.or(self.original_max_position_embeddings);
        // 4096: Llama 2's context, which mlx-lm assumes.
        original.or(self.max_position_embeddings).unwrap_or(4096.0)
    }
}

/// Positions per radian for each pair of dimensions: `theta^(2 i / dims)`.
fn wavelengths(dims: i32, theta: f32) -> impl Iterator<Item = f64> {
    (0..dims / 2).map(move |i| f64::from(theta).powf(f64::from(2 * i) / f64::from(dims)))
}

/// Interpolates frequencies, not wavelengths: `keep` is the share of the unstretched one.
fn mixed(wavelength: f64, factor: f64, keep: f64) -> f64 {
    wavelength / (keep + (1.0 - keep) / factor)
}

fn array(values: impl Iterator<Item = f64>) -> Array {
    let values: Vec<f32> = values.map(|x| x as f32).collect();
    let len = i32::try_from(values.len()).expect("a head has few dimensions");
    Array::from_slice(&values, &[len])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use serde_json::json;

    /// A model with an unsupported rotation would generate nonsense, so it is not loaded.
    #[test]
    fn unknown_rope_type_is_rejected_by_name() {
        let check = |table, expected: &[&str]| {
            let config = json!({"rope_theta": 10000.0, "rope_scaling": table});
            let error = serde_json::from_value::<RopeConfig>(config).unwrap_err().to_string();
            for part in expected {
                assert!(error.contains(part), "`{error}` does not contain `{part}`");
            }
        };
        check(json!({"type": "dynamic", "factor": 4}), &["rope_scaling", "dynamic", "yarn"]);
        check(json!({"type": "longrope", "factor": 4}), &["rope_scaling", "short_factor"]);
        check(json!({"rope_type": "llama3"}), &["rope_scaling", "llama3", "factor"]);
    }

    #[test]
    fn rows_of_several_spans_rotate_as_those_of_one() {
        let config = json!({"rope_scaling": {"type": "yarn", "factor": 4.0}});
        let scaled = serde_json::from_value::<RopeConfig>(config).unwrap().rope(16, 1e4);
        let x = mlx_rs::random::normal::<f32>(&[1, 9, 2, 16], None, None, None).unwrap();
        for rope in [Rope::new(8, 1e4), scaled] {
            let mut caches = [0, 7, 300].map(|position| {
                let mut cache = Cache::new(Vec::new());
                cache.position = position;
                cache
            });
            let parts = x.split_at_indices(&[1, 6], 1).unwrap();
            let mut alone = Vec::new();
            for (cache, part) in caches.iter_mut().zip(&parts) {
                alone.push(rope.forward(part, &[Span { rows: part.dim(1), cache }]).unwrap());
            }
            let spans: Vec<_> = caches
                .iter_mut()
                .zip(&parts)
                .map(|(cache, part)| Span { rows: part.dim(1), cache })
                .collect();
            let together = rope.forward(&x, &spans).unwrap();
            let alone = mlx_rs::ops::concatenate(&alone, 1).unwrap();
            assert!(together.eq_values(&alone).unwrap());
        }
    }

    /// If there are two tables, the newer one takes precedence.
    #[test]
    fn both_layouts_give_the_same_rope() {
        let scaling = json!({"type": "linear", "factor": 4});
        let older =
            json!({"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": scaling});
        let newer = json!({"rope_scaling": null, "rope_parameters": {
            "rope_theta": 500000, "partial_rotary_factor": 0.5, "rope_type": "linear", "factor": 4,
        }});
        for config in [older, newer] {
            let rope = serde_json::from_value::<RopeConfig>(config).unwrap().rope(32, 1e4);
            assert_eq!((rope.dims, rope.theta, rope.scale), (16, 5e5, 0.25));
        }
    }
}
