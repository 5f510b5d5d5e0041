//! Drafts from the model's multi-token-prediction layer, fed with the model's hidden states.
//!
//! After its first token it is fed with its own output, for which it was not trained: acceptance
//! falls with depth, which the governor sees from the rates by depth.
//!
//! Its cache covers a suffix of the text. Positions count from the first row it read, as rotary
//! attention depends on distances alone.
//!
//! Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2).

use std::collections::VecDeque;

use mlx_rs::Array;

use super::{CATCH_UP, Drafter, FirstRows, HiddenRows, MovingRate, RateByDepth, Start};
use crate::cache::Cache;
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::kernels::cpu;
use crate::model::{Model, Mtp};
use crate::nn::joined_rows;

/// [`CATCH_UP`] in the type of array dimensions.
const CATCH_UP_ROWS: i32 = CATCH_UP as i32;

/// The layer's cache for one request.
pub struct MtpDrafter {
    cache: Cache,
    /// Position of `cache` before the draft.
    position: usize,
    /// Hidden states of rows it has not read yet, in order and without gaps.
    hidden: VecDeque<HiddenRows>,
    /// Position after the last of them.
    end: usize,
    /// Whether rows between those read and those in `hidden` are missing.
    gap: bool,
    rates: RateByDepth,
}

impl MtpDrafter {
    pub fn new(mtp: &dyn Mtp) -> Result<Self> {
        let (cache, hidden) = (mtp.new_cache()?, VecDeque::new());
        Ok(Self { cache, position: 0, hidden, end: 0, gap: false, rates: RateByDepth::prior(0.7) })
    }

    fn unread(&self) -> i32 {
        self.hidden.iter().map(HiddenRows::count).sum()
    }

    /// The last `rows` of the hidden states, at least one: [1, rows, D].
    fn last_unread(&self, mut rows: i32) -> Result<Array> {
        let mut taken = Vec::new();
        for part in self.hidden.iter().rev() {
            let own = part.last(rows.min(part.count()));
            rows -= own.count();
            taken.push((&part.pass, own.rows));
            if rows == 0 {
                break;
            }
        }
        taken.reverse();
        let _at_once = cpu::run_at_once_after(taken[0].0)?;
        joined_rows(&taken)
    }
}

impl Drafter for MtpDrafter {
    fn kind(&self) -> DraftKind {
        DraftKind::Mtp
    }

    fn acceptance_rates(&self) -> [f32; DEPTH] {
        self.rates.values()
    }

    fn learned_rates(&mut self) -> &mut [MovingRate] {
        &mut self.rates.0
    }

    fn start(
        &mut self,
        model: &dyn Model,
        _cache: &mut Cache,
        tokens: &[u32],
        _depth: usize,
    ) -> Result<Start> {
        let Some(mtp) = model.mtp() else { return Ok(Start::Nothing) };
        // Every row but that of the last token has run; those that ran in this request were observed.
        let rows = self.unread();
        if rows == 0 || self.end + 1 != tokens.len() {
            return Ok(Start::Nothing);
        }
        if std::mem::take(&mut self.gap) || rows > CATCH_UP_ROWS {
            self.cache = mtp.new_cache()?;
        }
        let rows = rows.min(CATCH_UP_ROWS);
        let hidden = self.last_unread(rows)?;
        self.hidden.clear();
        let tokens = tokens[tokens.len() - rows as usize..].to_vec();
        Ok(Start::Network(FirstRows { tokens, hidden: Some(hidden) }))
    }

    fn cache<'a>(&'a mut self, _of_model: &'a mut Cache) -> &'a mut Cache {
        &mut self.cache
    }

    fn begin(&mut self, _of_model: &mut Cache) {
        self.position = self.cache.position;
        self.cache.mark_draft();
    }

    /// Drafted rows are replaced by rows made from the model's own hidden states.
    fn end(&mut self, _of_model: &mut Cache) -> Result<()> {
        self.cache.rewind_draft(self.position)
    }

    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
        self.rates.learn(judged, accepted);
        Ok(())
    }

    fn rewind(&mut self, _tokens: &[u32]) -> Result<()> {
        self.hidden.clear();
        (self.end, self.gap) = (0, true);
        Ok(())
    }

    fn observe(&mut self, hidden: &HiddenRows, position: usize) {
        let rows = hidden.count();
        if position != self.end {
            self.hidden.clear();
            self.gap = true;
        }
        self.end = position + rows as usize;
        // A catch-up reads no more than this, so a long plain stretch keeps the hidden states of as many passes.
        if rows > CATCH_UP_ROWS {
            self.hidden.clear();
            self.hidden.push_back(hidden.last(CATCH_UP_ROWS + 1));
            return;
        }
        self.hidden.push_back(hidden.clone());
        while self.unread() - self.hidden[0].count() > CATCH_UP_ROWS {
            self.hidden.pop_front();
        }
    }
}
