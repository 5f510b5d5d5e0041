//! Probabilities of the tokens of a prompt, for clients that score it.

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;

use super::network::Network;
use crate::error::Result;
use crate::nn::token_ids;
use crate::request::{Event, PromptToken, TokenLogprob};
use crate::sample::logprobs::Logprobs;
use crate::sequence::Sequence;

/// Rows of a prompt whose logits are computed at once: those of a whole chunk would take gigabytes.
const PROMPT_ROWS: usize = 16;

/// Sends the probabilities of the tokens of the prompt of `sequence` that come after the rows whose
/// `hidden` states [1, R, D] are the newest of its cache, and that the client does not have yet.
pub fn report_prompt(network: &Network, sequence: &mut Sequence, hidden: &Array) -> Result<()> {
    let top = sequence.request().prompt_logprobs.unwrap_or(0);
    let one =
        |token: u32, logprob: f32| TokenLogprob { bytes: network.text().bytes(token), logprob };
    let send = |sequence: &Sequence, token| {
        sequence.reply().send_event(Event::PromptToken(token));
    };
    if sequence.reported() == 0 {
        let bytes = network.text().bytes(sequence.timeline().tokens()[0]);
        send(sequence, PromptToken { bytes, logprob: None, top: Vec::new() });
        sequence.set_reported(1);
    }
    let end = sequence.timeline().position();
    let prompt = sequence.timeline().prompt();
    let start = end - hidden.dim(1) as usize;
    // Row `r` predicts token `start + r + 1`.
    let mut next = sequence.reported().max(start + 1);
    while next < prompt.min(end + 1) {
        let until = prompt.min(end + 1).min(next + PROMPT_ROWS);
        let (first, last) = (next - 1 - start, until - 1 - start);
        let rows = hidden.try_index((.., first as i32..last as i32))?;
        let logits = network.logits(&rows)?.squeeze_axes(&[0])?;
        let tokens = &sequence.timeline().tokens()[next..until];
        let (values, likeliest) = Logprobs::of_rows(&logits, &token_ids(tokens), top)?.read()?;
        let width = values.len() / tokens.len();
        for (row, &token) in tokens.iter().enumerate() {
            let values = &values[row * width..(row + 1) * width];
            let likeliest = &likeliest[row * (width - 1)..(row + 1) * (width - 1)];
            let top = likeliest.iter().zip(&values[1..]);
            let token = PromptToken {
                bytes: network.text().bytes(token),
                logprob: Some(values[0]),
                top: top.map(|(&token, &logprob)| one(token, logprob)).collect(),
            };
            send(sequence, token);
        }
        next = until;
        sequence.set_reported(until);
    }
    Ok(())
}
