//! Between caches and the store: arrays to bytes and back, and where in a prompt to save.

use mlx_rs::{Array, Dtype};

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::request::{Message, Request};
use crate::store::{Snapshot, Tensor};
use crate::text::Text;

/// Changes when the meaning of a snapshot's tensors does; part of the fingerprint.
pub const FORMAT: &str = "steersman snapshot 1";

/// The state of `cache`, which has seen exactly `tokens`.
///
/// # Errors
/// [`Error::Array`] when MLX cannot compute or copy it.
pub fn take(cache: &Cache, tokens: &[u32]) -> Result<Snapshot> {
    debug_assert_eq!(cache.position, tokens.len());
    let tensors = cache.state()?.iter().map(to_tensor).collect::<Result<_>>()?;
    Ok(Snapshot { tokens: tokens.to_vec(), tensors })
}

/// Puts a snapshot's state into an empty `cache`.
///
/// # Errors
/// [`Error::Store`] when the snapshot is not of this model; `cache` is then unchanged.
pub fn restore(cache: &mut Cache, snapshot: &Snapshot) -> Result<()> {
    let arrays = snapshot.tensors.iter().map(to_array).collect::<Result<_>>()?;
    cache.restore(arrays, snapshot.tokens.len())
}

/// Element types that snapshots hold, by safetensors' names, with their size in bytes.
const DTYPES: &[(&str, Dtype, usize)] = &[
    ("F32", Dtype::Float32, 4),
    ("F16", Dtype::Float16, 2),
    ("BF16", Dtype::Bfloat16, 2),
    ("U32", Dtype::Uint32, 4),
];

fn to_tensor(array: &Array) -> Result<Tensor> {
    let Some((name, ..)) = DTYPES.iter().find(|(_, dtype, _)| *dtype == array.dtype()) else {
        return Err(Error::Array(format!("a cache holds {:?}", array.dtype())));
    };
    let bytes = array.contiguous()?.view::<u8>()?;
    let bytes = bytes.try_as_slice::<u8>().map_err(|e| Error::Array(e.to_string()))?.to_vec();
    Ok(Tensor { dtype: (*name).into(), shape: array.shape().to_vec(), bytes })
}

fn to_array(tensor: &Tensor) -> Result<Array> {
    let damaged = || Error::Store(format!("a tensor of {} {:?}", tensor.dtype, tensor.shape));
    let (_, dtype, size) =
        DTYPES.iter().find(|(name, ..)| *name == tensor.dtype).ok_or_else(damaged)?;
    let elements: usize = tensor.shape.iter().map(|&n| usize::try_from(n).unwrap_or(0)).product();
    if elements == 0 || elements * size != tensor.bytes.len() {
        return Err(damaged());
    }
    let length = i32::try_from(tensor.bytes.len()).map_err(|_| damaged())?;
    let bytes = Array::from_slice(&tensor.bytes, &[length]);
    Ok(bytes.view_dtype(*dtype)?.reshape(&tensor.shape)?)
}

/// Positions of `prompt` at which its state is worth saving, ascending: the end of tools and
/// system text, which other conversations share, and the end of the last message, which the next
/// turn of this one shares (the generation prompt behind it differs from what the client will
/// send back).
///
/// # Errors
/// [`Error::Template`] as rendering the request itself.
pub fn anchors(
    text: &Text,
    request: &Request,
    thinking: Option<bool>,
    prompt: &[u32],
) -> Result<Vec<usize>> {
    let render = |messages: &[Message], open: bool| {
        let variables = &request.template_variables;
        let rendered = text.render(messages, &request.tools, variables, thinking, open)?;
        text.encode(&rendered)
    };
    // What two conversations that differ only in their first word have in common is what the
    // template makes of tools and system text, whatever the template is.
    let system = request.messages.iter().take_while(|m| is_system(m));
    let beginning = |word: &str| -> Option<Vec<u32>> {
        let mut messages: Vec<Message> = system.clone().cloned().collect();
        messages.push(Message { role: "user".into(), content: word.into(), ..Message::default() });
        // Templates may refuse a conversation as short as this; then there is no such anchor.
        render(&messages, true).ok()
    };
    let head = match (beginning("a"), beginning("b")) {
        (Some(a), Some(b)) => shared(&a, &b).min(shared(&a, prompt)),
        _ => 0,
    };
    let body = shared(&render(&request.messages, false)?, prompt);
    let mut anchors = vec![head, body];
    anchors.retain(|&at| at > 0 && at < prompt.len());
    anchors.sort_unstable();
    anchors.dedup();
    Ok(anchors)
}

fn is_system(message: &Message) -> bool {
    matches!(message.role.as_str(), "system" | "developer")
}

/// Length of the common prefix.
fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
