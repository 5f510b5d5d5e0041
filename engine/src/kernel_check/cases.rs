//! What each check computes: small layers of random numbers, of every shape for which a kernel has code of its own.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, dequantize, select};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype, random};

use crate::cache::{Cache, Full, LayerCache, Span};
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, Activations};
use crate::kernels::cuda::{self, Tiled};
use crate::kernels::{self, KernelKind, Mode, Quantization};
use crate::nn::{
    Block, Dense, Experts, Gate, GatedDelta, GatedMlp, Heads, Joined, Linear, Mlp, Moe, Outputs,
    OwnKernel, Packed, RmsNorm, Rope, Scores, Shared, attention, swiglu,
};
use crate::ranks::Ranks;

/// Random numbers of a normal distribution.
fn normal(seed: u64, shape: &[i32], dtype: Dtype) -> Result<Array> {
    Ok(random::normal::<f32>(shape, None, None, &random::key(seed)?)?.as_dtype(dtype)?)
}

/// A packed matrix [outputs, inputs] or a stack of them, as loading stores it on this device.
fn packed(seed: u64, shape: &[i32], bits: i32) -> Result<Packed> {
    let quantization = Quantization { group_size: 64, bits, mode: Mode::Affine };
    let [rows @ .., inputs] = shape else { unreachable!("a matrix has inputs") };
    let with = |columns: i32| [rows, &[columns]].concat();
    let words = with(inputs * bits / 32);
    let count = words.iter().product::<i32>() as u32;
    // Numbers of all sizes, in no order that a kernel could have.
    let word = |i: u32| (i + 7 * seed as u32).wrapping_mul(0x9E37_79B9).rotate_left(i % 31);
    let numbers: Vec<u32> = (0..count).map(word).collect();
    let groups = with(inputs / 64);
    // The mean of 4 bits is 7.5 scales: the matrix has numbers of both signs, and of one size in all widths.
    let levels = f32::exp2(bits as f32);
    let scales = normal(seed, &groups, Dtype::Float32)?.multiply(Array::from_f32(0.16 / levels))?;
    let biases = scales.multiply(Array::from_f32((1.0 - levels) / 2.0))?;
    let weight = Array::from_slice(&numbers, &words);
    let [scales, biases] = [scales, biases].map(|x| x.as_dtype(Dtype::Bfloat16));
    let mut packed = Packed {
        weight,
        scales: scales?,
        biases: Some(biases?),
        quantization,
        dtype: Dtype::Bfloat16,
        own_kernel: None,
    };
    if cpu::is_enabled() && cpu::supports(packed.view()) {
        packed.own_kernel =
            Some(OwnKernel { activations: Activations::Exact, is_symmetric: false });
    }
    Ok(packed)
}

/// A packed layer as loading stores it on this device.
fn linear(seed: u64, shape: &[i32], bits: i32) -> Result<Linear> {
    let weight = packed(seed, shape, bits)?;
    Ok(match Tiled::new(weight.view())? {
        Some(weight) => Linear::Tiled { weight, bias: None },
        None => Linear::Quantized { weight, bias: None },
    })
}

/// A norm of five rows.
pub fn run_norm(dtype: Dtype) -> Result<Vec<Array>> {
    let norm = RmsNorm { weight: normal(1, &[320], dtype)?, eps: 1e-6 };
    Ok(vec![norm.forward(&normal(2, &[1, 5, 320], dtype)?)?])
}

/// A SwiGLU gate of three rows.
pub fn run_gate(dtype: Dtype) -> Result<Vec<Array>> {
    let [gate, up] = [1, 2].map(|seed| normal(seed, &[1, 3, 200], dtype));
    Ok(vec![swiglu(gate?, up?)?])
}

/// Packed matrices with a sum after, joined ones, those of other widths, and one of floats; steps, drafts and prompts.
///
/// The reference multiplies with the dequantized weights in f32: MLX compiles its products with packed matrices for NVIDIA GPUs
/// when they are first used, half a minute for each width, type and size of rows.
pub fn run_products(dtype: Dtype) -> Result<Vec<Array>> {
    let is_ours = KernelKind::Products.is_on();
    let matrix = |seed, shape: &[i32], bits| -> Result<Linear> {
        if is_ours { linear(seed, shape, bits) } else { dequantized(&packed(seed, shape, bits)?) }
    };
    let own = matrix(1, &[512, 256], 4)?;
    let gate_up = Joined::new([matrix(2, &[256, 256], 4)?, matrix(3, &[256, 256], 4)?])?;
    // Read as bytes, as 16 bits, and as words. Kernels for CUDA read 4 bits only.
    let widths: &[(u64, i32)] = if cuda::is_enabled() { &[] } else { &[(7, 3), (8, 6), (9, 8)] };
    let others = widths.iter().map(|&(seed, bits)| matrix(seed, &[64, 256], bits));
    let others = others.collect::<Result<Vec<_>>>()?;
    let weight = normal(4, &[64, 256], dtype)?;
    let own_kernel = cpu::is_enabled() && cpu::supports_dense(&weight);
    let floats = Linear::Dense { weight: Dense { weight, dtype, own_kernel }, bias: None };
    let mut results = Vec::new();
    for rows in [1, 2, 5, 8, 33] {
        let x = normal(5, &[1, rows, 256], dtype)?;
        let sum = normal(6, &[1, rows, 512], dtype)?;
        results.push(own.apply(kernels::Input::Rows(&x), Some(&sum))?);
        results.extend(gate_up.forward(&x)?);
        for other in &others {
            results.push(other.forward(&x)?);
        }
        results.push(floats.forward(&x)?);
    }
    results.into_iter().map(|y| Ok(y.as_dtype(dtype)?)).collect()
}

/// A matrix with the values of a packed one, in f32.
fn dequantized(packed: &Packed) -> Result<Linear> {
    Ok(floats(dequantized_weight(packed)?))
}

/// The values of a packed matrix or of a stack of them, in f32, [.., outputs, inputs].
fn dequantized_weight(packed: &Packed) -> Result<Array> {
    let Packed { weight, scales, biases, quantization, .. } = packed;
    let [scales, biases] = [scales, biases.as_ref().expect("affine weights have biases")]
        .map(|x| x.as_dtype(Dtype::Float32));
    let (group, bits) = (quantization.group_size, quantization.bits);
    Ok(dequantize(weight, scales?, &biases?, group, bits)?)
}

/// A matrix of f32 numbers [outputs, inputs], which MLX multiplies with.
fn floats(weight: Array) -> Linear {
    let weight = Dense { weight, dtype: Dtype::Float32, own_kernel: false };
    Linear::Dense { weight, bias: None }
}

/// Rows of two sequences after prompts: steps and drafts.
const PASSES: [[i32; 2]; 4] = [[70, 9], [1, 1], [4, 1], [1, 8]];

/// Attention over a cache whose first rows are shared after the prompt, and over one of own rows.
pub fn run_attention(dtype: Dtype) -> Result<Vec<Array>> {
    let [heads, kv_heads, dim] = [8, 2, 64];
    let new = || Cache::new(vec![LayerCache::Full(Full::new(kv_heads, dim))]);
    let mut caches = [new(), new()];
    let scores = Scores { scale: 0.125, softcap: None, sinks: None };
    let mut results = Vec::new();
    for (seed, rows) in (0..).step_by(4).zip(PASSES) {
        let all = rows.iter().sum();
        let each = |i: u64, heads| normal(seed + i, &[1, all, heads, dim], dtype);
        let (q, k, v) = (each(1, heads)?, each(2, kv_heads)?, each(3, kv_heads)?);
        let mut spans = spans(&mut caches, rows);
        results.push(attention([&q, &k, &v], &scores, &mut spans, 0)?);
        spans.iter_mut().for_each(Span::advance);
        if rows == PASSES[0] {
            caches[0].share()?;
        }
    }
    for cache in &caches {
        results.extend(cache.arrays()?);
    }
    Ok(results)
}

fn spans(caches: &mut [Cache; 2], rows: [i32; 2]) -> Vec<Span<'_>> {
    caches.iter_mut().zip(rows).map(|(cache, rows)| Span { rows, cache }).collect()
}

pub fn run_heads(dtype: Dtype) -> Result<Vec<Array>> {
    let [heads, kv_heads, head_dim] = [8, 2, 64];
    let norm =
        |seed| Ok::<_, Error>(RmsNorm { weight: normal(seed, &[head_dim], dtype)?, eps: 1e-6 });
    let (q_norm, k_norm, rope) = (norm(1)?, norm(2)?, Rope::new(32, 10_000.0));
    let own = Heads {
        heads,
        kv_heads,
        head_dim,
        gated: true,
        q_norm: Some(&q_norm),
        k_norm: Some(&k_norm),
        rope: Some(&rope),
    };
    let widths = [2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim];
    let [q, k, v] = widths.map(|width| normal(9, &[width, 8], dtype));
    let dense = |weight: Array| Linear::Dense { weight: weight.into(), bias: None };
    let projections = Joined::new([dense(q?), dense(k?), dense(v?)])?;
    let scores = Scores { scale: 0.125, softcap: None, sinks: None };
    let new = || Cache::new(vec![LayerCache::Full(Full::new(kv_heads, head_dim))]);
    let mut caches = [new(), new()];
    let mut results = Vec::new();
    for (seed, rows) in (0..).step_by(4).zip(PASSES) {
        let all = rows.iter().sum();
        let [q, k, v] = widths.map(|width| normal(seed + width as u64, &[1, all, width], dtype));
        let mut spans = spans(&mut caches, rows);
        let projected = Outputs::Apart([q?, k?, v?]);
        let y = own.attend(projected, &projections, &scores, &mut spans, 0)?;
        spans.iter_mut().for_each(Span::advance);
        // Kernels write caches in place: the next pass is made when this one is queued, as in decoding.
        eval([&y])?;
        results.push(y);
    }
    for cache in &caches {
        results.extend(cache.arrays()?);
    }
    Ok(results)
}

/// A layer with the dimensions of heads that published models have.
fn gated_delta(dtype: Dtype) -> Result<GatedDelta> {
    let [key_heads, value_heads, dim] = [2, 4, 128];
    let channels = (2 * key_heads + value_heads) * dim;
    let conv1d: Result<Vec<_>> = (0..4).map(|tap| normal(tap, &[channels], dtype)).collect();
    Ok(GatedDelta {
        conv1d: conv1d?,
        a_log: normal(10, &[value_heads], Dtype::Float32)?,
        dt_bias: normal(11, &[value_heads], dtype)?,
        norm: RmsNorm { weight: normal(12, &[dim], dtype)?, eps: 1e-6 },
        key_heads,
        value_heads,
        key_dim: dim,
        value_dim: dim,
    })
}

/// Runs passes of a layer over two sequences. `draft` keeps only one row of the last pass.
fn run_delta(dtype: Dtype, draft: bool) -> Result<Vec<Array>> {
    let layer = gated_delta(dtype)?;
    let (heads, values) = (layer.value_heads, layer.value_heads * layer.value_dim);
    let channels = 2 * layer.key_heads * layer.key_dim + values;
    let new = || -> Result<Cache> {
        Ok(Cache::new(vec![LayerCache::Recurrent(layer.new_cache(dtype)?)]))
    };
    let mut caches = [new()?, new()?];
    let mut results = Vec::new();
    let passes = [3, 70, 1, 1, 6];
    for (pass, rows) in (0..).zip(passes) {
        let is_draft = draft && pass + 1 == passes.len() as u64;
        if is_draft {
            caches.iter_mut().for_each(Cache::mark_draft);
        }
        let [qkv, z, b, a] = [channels, values, heads, heads]
            .map(|width| normal(20 + pass, &[1, 2 * rows, width], dtype));
        let x = Outputs::Apart([qkv?, z?, b?, a?]);
        let mut spans = spans(&mut caches, [rows, rows]);
        results.push(layer.forward(&x, &mut spans, 0)?);
        spans.iter_mut().for_each(Span::advance);
        if is_draft {
            let kept = usize::try_from(passes.iter().sum::<i32>() - rows + 1).unwrap_or(0);
            caches.iter_mut().try_for_each(|cache| cache.rewind_draft(kept))?;
        }
    }
    for cache in &caches {
        results.extend(cache.arrays()?);
    }
    Ok(results)
}

pub fn run_gated_delta(dtype: Dtype) -> Result<Vec<Array>> {
    run_delta(dtype, false)
}

pub fn run_rewind(dtype: Dtype) -> Result<Vec<Array>> {
    run_delta(dtype, true)
}

/// Sparse blocks without and with a shared expert. The router prefers the same experts for all rows by a wide margin: a
/// near-tie would be another choice, and no fault.
pub fn run_experts(dtype: Dtype) -> Result<Vec<Array>> {
    let is_ours = KernelKind::Experts.is_on();
    let matrix = |seed, shape: &[i32], bits| {
        if is_ours { linear(seed, shape, bits) } else { dequantized(&packed(seed, shape, bits)?) }
    };
    let [count, d, f] = [16, 256, 128];
    let norm = RmsNorm { weight: normal(4, &[d], dtype)?.abs()?, eps: 1e-6 };
    // Kernels for CUDA take 4 bits and bfloat16 only: MLX would compute the others on both sides, and compile them before.
    let cases: &[(i32, bool)] = match cuda::is_enabled() {
        true if dtype != Dtype::Bfloat16 => &[],
        true => &[(4, false), (4, true)],
        false => &[(4, false), (4, true), (8, true)],
    };
    let mut results = Vec::new();
    for &(bits, has_shared) in cases {
        let stack = |seed, outputs, inputs| packed(seed, &[count, outputs, inputs], bits);
        let stacks = [stack(1, f, d)?, stack(2, f, d)?, stack(3, d, f)?];
        let [gate, up, down] = stacks.clone().map(|weight| Linear::Quantized {
            weight: Packed { own_kernel: None, ..weight },
            bias: None,
        });
        // Expert `i` has the score `i` times the sum of a row.
        let ranks: Vec<f32> = (0..count).map(|rank| rank as f32 / 64.0).collect();
        let ranks = Array::from_slice(&ranks, &[count, 1]).as_dtype(dtype)?;
        let router = concatenate(&vec![ranks; d as usize], 1)?;
        let shared = || -> Result<Shared> {
            let own = packed(9, &[1, d], 8)?;
            let gate = match is_ours {
                true => {
                    let weight = Packed { own_kernel: None, ..own };
                    Linear::Quantized { weight, bias: None }
                }
                false => dequantized(&own)?,
            };
            Ok(Shared {
                expert: block(
                    [matrix(6, &[f, d], 4)?, matrix(7, &[f, d], 4)?],
                    matrix(8, &[d, f], 4)?,
                )?,
                gate: Some(gate),
            })
        };
        let moe = Moe {
            gate: Linear::Dense { weight: router.into(), bias: None },
            experts: Experts(block([gate, up], down)?),
            top_k: 4,
            norm_topk_prob: true,
            scale: 1.0,
            groups: None,
            shared: has_shared.then(shared).transpose()?,
            ranks: Ranks::alone(),
        };
        for rows in [1, 3, 8] {
            let x = normal(5, &[1, rows, d], dtype)?.abs()?;
            results.push(match is_ours {
                true => Mlp::Sparse(Box::new(moe.clone())).residual(&x, &norm)?,
                false => one_expert_after_the_other(&moe, &stacks, &x, &norm)?.as_dtype(dtype)?,
            });
        }
    }
    Ok(results)
}

fn block(sides: [Linear; 2], down_proj: Linear) -> Result<Block> {
    Ok(GatedMlp { gate: Gate::Silu, gate_up: Joined::new(sides)?, down_proj }.into())
}

/// `x + moe(norm x)` in f32, with the dequantized matrices of one expert after the other, of all experts: MLX compiles its
/// products with packed experts for NVIDIA GPUs when they are first used, in two minutes for those of this check.
///
/// `stacks` has the gate, up and down projections of all experts, [E, outputs, inputs]; `x` [1, R, D], same shape back.
fn one_expert_after_the_other(
    moe: &Moe,
    stacks: &[Packed; 3],
    x: &Array,
    norm: &RmsNorm,
) -> Result<Array> {
    let normed = norm.forward(x)?;
    let (chosen, shares) = moe.choose(&normed)?;
    let [gates, ups, downs] = stacks.each_ref().map(dequantized_weight);
    let (gates, ups, downs) = (gates?, ups?, downs?);
    let mut y = x.as_dtype(Dtype::Float32)?;
    for expert in 0..gates.dim(0) {
        let [gate, up, down] = [&gates, &ups, &downs].map(|stack| stack.try_index(expert));
        let expert_block = block([floats(gate?), floats(up?)], floats(down?))?;
        let is_chosen = chosen.eq(Array::from_slice(&[expert as u32], &[1]))?;
        let share = select(is_chosen, &shares, Array::from_f32(0.0))?.sum_axis(-1, true)?;
        y = y.add(expert_block.forward(&normed)?.multiply(share)?)?;
    }
    match &moe.shared {
        Some(shared) => Ok(y.add(shared.forward(&normed)?)?),
        None => Ok(y),
    }
}
