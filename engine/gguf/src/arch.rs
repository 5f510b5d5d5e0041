//! The architectures that can be read: one row of [`ARCHITECTURES`] each.
//!
//! A row states the family that computes it (`model_type`), what llama.cpp calls the parts of a layer, what its
//! converter did to them, and the keys of `config.json` beyond those that all share. A part that no row names is an
//! error, not a tensor that is silently left out.
//!
//! # What the converter does, and this crate undoes
//! * Llama: rows of queries and keys are reordered, because llama.cpp rotates neighbouring dimensions.
//! * Gemma: norms hold `1 + w`. The families add 1 themselves.
//! * Qwen3.5: norms hold `1 + w`, which is MLX's layout too. Where there are more heads of values than of keys, those of
//!   values are ordered by their index within a key head, not by key head. `ssm_a` is `-exp(A_log)`.
//!   The layer for multi-token prediction is numbered as one more block.
//!
//! Source: llama.cpp `conversion/llama.py`, `gemma.py`, `qwen.py`, `phi.py`; `src/models/` of these names for the values
//! that it assumes and no file states (Gemma's windows and scales).

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::model::Facts;

/// An architecture of llama.cpp.
pub(crate) struct Architecture {
    /// `general.architecture`.
    pub name: &'static str,
    /// `model_type` of `config.json`.
    pub model_type: &'static str,
    /// Parts of a layer.
    pub parts: &'static [&'static [Part]],
    /// Change of all norms, `output_norm` among them.
    pub norms: Change,
    /// Keys of `config.json` of this family, beside or instead of the shared ones.
    pub keys: fn(&Facts<'_>) -> Result<Map<String, Value>>,
}

/// A part of a layer: llama.cpp's name, MLX's, and what its converter did to it.
pub(crate) type Part = (&'static str, &'static str, Change);

/// What llama.cpp's converter did to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing.
    None,
    /// A norm, with [`Architecture::norms`].
    Norm,
    /// Added 1.
    PlusOne,
    /// Reordered the rows of query heads.
    Queries,
    /// Reordered the rows of key heads.
    Keys,
    /// Reordered value heads. Each has as many rows as a head has dimensions.
    ValueRows,
    /// As [`Change::ValueRows`], after the rows of queries and keys.
    MixedRows,
    /// Reordered value heads, with one row each.
    Values,
    /// As [`Change::Values`], of `-exp(x)`.
    Decay,
    /// As [`Change::ValueRows`], of columns.
    ValueColumns,
    /// As [`Change::MixedRows`], of the taps of a convolution, whose middle dimension of 1 was dropped.
    Taps,
    /// Dropped the dimension of 1 before the last one.
    Row,
}

/// The family (`model_type`) that computes the architecture of llama.cpp called `name`, if it can be read.
pub fn family_of(name: &str) -> Option<&'static str> {
    ARCHITECTURES.iter().find(|known| known.name == name).map(|known| known.model_type)
}

/// Every architecture that can be read.
pub(crate) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "llama",
        model_type: "llama",
        parts: &[PRE_NORM, LLAMA_ATTENTION, GATED_MLP],
        norms: Change::None,
        keys: llama,
    },
    Architecture {
        name: "qwen2",
        model_type: "qwen2",
        parts: &[PRE_NORM, ATTENTION, GATED_MLP],
        norms: Change::None,
        keys: no_more,
    },
    Architecture {
        name: "qwen3",
        model_type: "qwen3",
        parts: &[PRE_NORM, ATTENTION, HEAD_NORMS, GATED_MLP],
        norms: Change::None,
        keys: no_more,
    },
    Architecture {
        name: "qwen3moe",
        model_type: "qwen3_moe",
        parts: &[PRE_NORM, ATTENTION, HEAD_NORMS, GATED_MLP, EXPERTS],
        norms: Change::None,
        keys: experts,
    },
    Architecture {
        name: "gemma3",
        model_type: "gemma3_text",
        parts: &[AROUND_NORMS, ATTENTION, HEAD_NORMS, GATED_MLP],
        norms: Change::PlusOne,
        keys: gemma3,
    },
    Architecture {
        name: "qwen35",
        model_type: "qwen3_5_text",
        parts: &[HYBRID_NORMS, ATTENTION, HEAD_NORMS, LINEAR_ATTENTION, GATED_MLP],
        norms: Change::None,
        keys: qwen35,
    },
    Architecture {
        name: "qwen35moe",
        model_type: "qwen3_5_moe_text",
        parts: &[HYBRID_NORMS, ATTENTION, HEAD_NORMS, LINEAR_ATTENTION, GATED_MLP, EXPERTS],
        norms: Change::None,
        keys: qwen35moe,
    },
    Architecture {
        name: "gemma",
        model_type: "gemma",
        parts: &[PRE_NORM, ATTENTION, GATED_MLP],
        norms: Change::PlusOne,
        keys: no_more,
    },
    Architecture {
        name: "gemma2",
        model_type: "gemma2",
        parts: &[AROUND_NORMS, ATTENTION, GATED_MLP],
        norms: Change::PlusOne,
        keys: gemma2,
    },
    Architecture {
        name: "phi3",
        model_type: "phi3",
        parts: &[PRE_NORM, FUSED_ATTENTION, FUSED_MLP],
        norms: Change::None,
        keys: phi3,
    },
];

const PRE_NORM: &[Part] = &[
    ("attn_norm", "input_layernorm", Change::Norm),
    ("ffn_norm", "post_attention_layernorm", Change::Norm),
];

const AROUND_NORMS: &[Part] = &[
    ("attn_norm", "input_layernorm", Change::Norm),
    ("post_attention_norm", "post_attention_layernorm", Change::Norm),
    ("ffn_norm", "pre_feedforward_layernorm", Change::Norm),
    ("post_ffw_norm", "post_feedforward_layernorm", Change::Norm),
];

const HYBRID_NORMS: &[Part] = &[
    ("attn_norm", "input_layernorm", Change::Norm),
    ("post_attention_norm", "post_attention_layernorm", Change::Norm),
];

const ATTENTION: &[Part] = &[
    ("attn_q", "self_attn.q_proj", Change::None),
    ("attn_k", "self_attn.k_proj", Change::None),
    ("attn_v", "self_attn.v_proj", Change::None),
    ("attn_output", "self_attn.o_proj", Change::None),
];

const LLAMA_ATTENTION: &[Part] = &[
    ("attn_q", "self_attn.q_proj", Change::Queries),
    ("attn_k", "self_attn.k_proj", Change::Keys),
    ("attn_v", "self_attn.v_proj", Change::None),
    ("attn_output", "self_attn.o_proj", Change::None),
];

const FUSED_ATTENTION: &[Part] = &[
    ("attn_qkv", "self_attn.qkv_proj", Change::None),
    ("attn_output", "self_attn.o_proj", Change::None),
];

const HEAD_NORMS: &[Part] = &[
    ("attn_q_norm", "self_attn.q_norm", Change::Norm),
    ("attn_k_norm", "self_attn.k_norm", Change::Norm),
];

const LINEAR_ATTENTION: &[Part] = &[
    ("attn_qkv", "linear_attn.in_proj_qkv", Change::MixedRows),
    ("attn_gate", "linear_attn.in_proj_z", Change::ValueRows),
    ("ssm_beta", "linear_attn.in_proj_b", Change::Values),
    ("ssm_alpha", "linear_attn.in_proj_a", Change::Values),
    ("ssm_conv1d", "linear_attn.conv1d", Change::Taps),
    ("ssm_a", "linear_attn.A_log", Change::Decay),
    ("ssm_dt", "linear_attn.dt_bias", Change::Values),
    // One head's weights, without 1 added.
    ("ssm_norm", "linear_attn.norm", Change::None),
    ("ssm_out", "linear_attn.out_proj", Change::ValueColumns),
];

const GATED_MLP: &[Part] = &[
    ("ffn_gate", "mlp.gate_proj", Change::None),
    ("ffn_up", "mlp.up_proj", Change::None),
    ("ffn_down", "mlp.down_proj", Change::None),
];

/// `ffn_up` holds gate and up.
const FUSED_MLP: &[Part] =
    &[("ffn_up", "mlp.gate_up_proj", Change::None), ("ffn_down", "mlp.down_proj", Change::None)];

const EXPERTS: &[Part] = &[
    ("ffn_gate_inp", "mlp.gate", Change::None),
    ("ffn_gate_exps", "mlp.switch_mlp.gate_proj", Change::None),
    ("ffn_up_exps", "mlp.switch_mlp.up_proj", Change::None),
    ("ffn_down_exps", "mlp.switch_mlp.down_proj", Change::None),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate", Change::Row),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj", Change::None),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj", Change::None),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj", Change::None),
];

/// Tensors outside of layers.
pub(crate) const OUTSIDE: &[Part] = &[
    ("token_embd", "model.embed_tokens", Change::None),
    ("output_norm", "model.norm", Change::Norm),
    ("output", "lm_head", Change::None),
];

/// Tensors of the block for multi-token prediction beside those of a layer.
pub(crate) const NEXT_TOKENS: &[Part] = &[
    ("nextn.eh_proj", "mtp.fc", Change::None),
    ("nextn.enorm", "mtp.pre_fc_norm_embedding", Change::Norm),
    ("nextn.hnorm", "mtp.pre_fc_norm_hidden", Change::Norm),
    ("nextn.shared_head_norm", "mtp.norm", Change::Norm),
];

/// Tensors that are read for `config.json`, not as weights.
pub(crate) const FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(keys) => keys,
        _ => Map::new(),
    }
}

fn no_more(_: &Facts<'_>) -> Result<Map<String, Value>> {
    Ok(Map::new())
}

fn llama(facts: &Facts<'_>) -> Result<Map<String, Value>> {
    match facts.optional("expert_count")? {
        None | Some(0) => Ok(Map::new()),
        Some(count) => Err(Error::new(format!(
            "`llama.expert_count` is {count}: Llama with experts (Mixtral) cannot be read from GGUF; \
             use the model's safetensors"
        ))),
    }
}

fn experts(facts: &Facts<'_>) -> Result<Map<String, Value>> {
    Ok(object(json!({
        "num_experts": facts.number("expert_count")?,
        "num_experts_per_tok": facts.number("expert_used_count")?,
        "moe_intermediate_size": facts.optional("expert_feed_forward_length")?,
        "norm_topk_prob": true,
    })))
}

fn gemma2(facts: &Facts<'_>) -> Result<Map<String, Value>> {
    // llama.cpp recognizes the 27B model, which has another scale, by its number of layers.
    let scalar = if facts.layers == 46 { facts.hidden / facts.heads } else { facts.head_dim };
    Ok(object(json!({
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": facts.float("attn_logit_softcapping")?.unwrap_or(50.0),
        "final_logit_softcapping": facts.float("final_logit_softcapping")?.unwrap_or(30.0),
        "sliding_window": facts.optional("attention.sliding_window")?.unwrap_or(4096),
    })))
}

fn gemma3(facts: &Facts<'_>) -> Result<Map<String, Value>> {
    // As in Gemma 2.
    let scalar = if facts.layers == 62 { facts.hidden / facts.heads } else { facts.head_dim };
    let mut keys = object(json!({
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": facts.float("rope.freq_base_swa")?.unwrap_or(10_000.0),
    }));
    let window = facts.optional("attention.sliding_window")?.filter(|window| *window > 0);
    let Some(window) = window else {
        keys.insert("layer_types".into(), facts.kinds(|_| "full_attention"));
        return Ok(keys);
    };
    keys.insert("sliding_window".into(), window.into());
    if let Some(slides) = facts.by_layer("attention.sliding_window_pattern") {
        let slides = |layer: u64| slides.get(layer as usize).is_none_or(|slides| *slides != 0.0);
        let kind = |layer| if slides(layer) { "sliding_attention" } else { "full_attention" };
        keys.insert("layer_types".into(), facts.kinds(kind));
        return Ok(keys);
    }
    let pattern = facts.optional("attention.sliding_window_pattern")?.unwrap_or(6);
    keys.insert("sliding_window_pattern".into(), pattern.into());
    Ok(keys)
}

fn qwen35(facts: &Facts<'_>) -> Result<Map<String, Value>> {
    let heads = facts.number("ssm.time_step_rank")?;
    let values = facts.number("ssm.inner_size")?;
    if heads == 0 || values % heads != 0 {
        return Err(Error::new(format!(
            "`{0}.ssm.inner_size` {values} is not a multiple of `{0}.ssm.time_step_rank` {heads}",
            facts.architecture
        )));
    }
    let every = facts.optional("full_attention_interval")?.unwrap_or(4).max(1);
    let kind = |layer: u64| {
        let is_full = (layer + 1).is_multiple_of(every);
        if is_full { "full_attention" } else { "linear_attention" }
    };
    Ok(object(json!({
        "linear_conv_kernel_dim": facts.number("ssm.conv_kernel")?,
        "linear_key_head_dim": facts.number("ssm.state_size")?,
        "linear_value_head_dim": values / heads,
        "linear_num_key_heads": facts.number("ssm.group_count")?,
        "linear_num_value_heads": heads,
        "full_attention_interval": every,
        "layer_types": facts.kinds(kind),
    })))
}

fn qwen35moe(facts: &Facts<'_>) -> Result<Map<String, Value>> {
    let mut keys = qwen35(facts)?;
    keys.extend(experts(facts)?);
    let shared = facts.optional("expert_shared_feed_forward_length")?;
    keys.insert("shared_expert_intermediate_size".into(), shared.into());
    Ok(keys)
}

fn phi3(facts: &Facts<'_>) -> Result<Map<String, Value>> {
    // 0 means that there is none.
    let window = facts.optional("attention.sliding_window")?.filter(|window| *window > 0);
    Ok(object(json!({"sliding_window": window})))
}
