//! Admission: turns a prepared request into a sequence, with saved state.

use super::Decoder;
use crate::cache::Cache;
use crate::error::Result;
use crate::policy::SavePoint;
use crate::policy::events::Watch;
use crate::policy::loops::Detector;
use crate::request::Event;
use crate::sample::sampler::Sampler;
use crate::sequence::constrain::Constraint;
use crate::sequence::hooks::Hooks;
use crate::sequence::outlet::Outlet;
use crate::sequence::prepare::Prepared;
use crate::sequence::rewind::{PhaseStart, ReplyState};
use crate::sequence::save_points::retention;
use crate::sequence::steer::Todo;
use crate::sequence::{Progress, Sequence};

impl Decoder {
    /// The sequence of a prepared request, with saved state. Does not run the model.
    pub(crate) fn admit(&mut self, prepared: Prepared) -> Result<Sequence> {
        let prompt = &prepared.prompt;
        let is_whole = prepared.request.needs_whole_prompt();
        self.make_room_for(prompt, is_whole)?;
        let (cache, cached) = match is_whole {
            true => (self.prefixes.empty(), 0),
            false => self.prefixes.restore(prompt)?,
        };
        for &(at, retention) in prepared.save_points.iter().take_while(|&&(at, _)| at <= cached) {
            if at < self.store_min_tokens {
                continue;
            }
            if let Err(error) = self.prefixes.retain(&prompt[..at], retention) {
                let request_id = &prepared.request.id;
                prepared
                    .request
                    .span
                    .log(|| tracing::warn!(request_id, %error, "retaining saved state failed"));
            }
        }
        self.sequence(prepared, cache)
    }

    /// The sequence of a prepared request whose `cache` holds the beginning of its prompt.
    pub(crate) fn sequence(&mut self, prepared: Prepared, cache: Cache) -> Result<Sequence> {
        let Prepared {
            request,
            events,
            reasoning,
            prompt,
            grammar,
            reply,
            plan,
            policy,
            seed,
            notes,
            mut save_points,
            limits,
            sampling,
            fingerprint,
            others,
            body,
        } = prepared;
        let cached = cache.position;
        let is_saved = request.embedding.is_none();
        save_points.retain(|&(at, _)| is_saved && at >= self.store_min_tokens && at > cached);
        let drafters = if self.costs.is_some() { self.new_drafters(&prompt)? } else { Vec::new() };
        // Fails if the client has disconnected; the first step checks that.
        // Casts: positions fit i32 (see `Decoder::load`).
        let _ = events.send(Event::Started {
            fingerprint,
            prompt_tokens: prompt.len() as u32,
            cached_tokens: cached as u32,
            max_tokens: limits.reply,
            max_answer_tokens: (limits.answer < limits.reply).then_some(limits.answer),
        });
        for note in &notes {
            let _ = events.send(Event::Note { tokens: 0, note: note.clone() });
        }
        let (prompt_tokens, reply_state) = (prompt.len(), ReplyState::new(reply));
        let mut sampler = Sampler::new(sampling, seed);
        if !request.biases.is_empty() {
            sampler.bias(&request.biases, 0);
        }
        if request.ignores_end {
            sampler.ban(self.text.eos(), 0);
        } else if request.min_tokens > 0 {
            sampler.ban(self.text.eos(), request.min_tokens);
        }
        self.started += 1;
        Ok(Sequence {
            number: self.started,
            reasoning,
            events,
            prompt: prompt_tokens,
            cached,
            cache,
            checkpoints: Vec::new(),
            stale_from: None,
            next_logits: None,
            runs_alone: false,
            saves_anywhere: is_saved && plan.retain.is_none(),
            save_points: save_points.into(),
            reply_retention: retention(&plan, &request.retain, SavePoint::Reply)
                .filter(|_| is_saved),
            sampled: None,
            drafters,
            governor: self.new_governor(),
            draft: None,
            plain_steps: 0,
            passed_over: 0,
            awaits_mask: None,
            preempted: 0,
            since: 0,
            body,
            skipped_layers: self.skip.len() as u32,
            sampler,
            constraint: grammar.map(|grammar| Constraint::new(grammar, self.speculation.forced)),
            logprobs: None,
            reported: 0,
            pooled: None,
            phase_start: PhaseStart { position: prompt_tokens, reply_state: reply_state.clone() },
            reply_state,
            rewind_limit: prompt_tokens,
            todo: Todo::Nothing,
            injection: None,
            detector: plan.loops.map(Detector::new),
            watch: Watch::new(&plan),
            outlet: policy.sees_text.then(Outlet::default),
            hooks: Hooks::new(self.hook_threads.clone(), policy, request.span.clone()),
            limits,
            progress: Progress::new(notes, prompt_tokens),
            tokens: prompt,
            others,
            is_decoding: false,
            phase_span: request.span.prefill(prompt_tokens, cached),
            request,
        })
    }
}
