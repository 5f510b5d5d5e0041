//! The four cost models: what passes, drafts and reads cost on this machine. The prefix cache learns those of reads.
//!
//! | model | question | learned from |
//! |---|---|---|
//! | [`PassCosts`] | how many rows of prompt a step may run | every pass |
//! | [`Costs`] | whether drafts are worth their time | steps without rows of prompt |
//! | [`PassBytes`] | how much memory a pass takes | passes with rows of prompt |
//! | [`ReadCosts`] | whether reading saved state is faster than computing it | reads from the disk |
//!
//! The first three are saved with the machine profile ([`MachineProfileFile`]), so that a later start on a CPU measures none
//! of them; on a GPU it measures the bytes of passes again, which compiles their kernels. The costs of reads depend on the disk of the prefix store, and are learned anew.

use super::machine_profile::{MachineProfile, MachineProfileFile};
use super::threads;
use crate::draft::Costs;
use crate::error::Result;
use crate::prefix::ReadCosts;
use crate::schedule::memory::{Before, Expected, PassBytes};
use crate::schedule::plan::PassCosts;

/// The costs on this machine.
pub struct CostModels {
    /// Seconds of passes with rows of prompt and without.
    passes: PassCosts,
    /// Seconds of steps and drafts; `None` without drafters.
    drafts: Option<Costs>,
    /// Bytes of a pass.
    bytes: PassBytes,
    /// Seconds of computing a prompt and of reading its state. The prefix cache learns them from reads.
    reads: ReadCosts,
    /// What was known of this machine at the start.
    profile: MachineProfileFile,
}

/// The costs in seconds, to be restored after passes that nothing is to be learned from.
#[derive(Clone, Copy)]
pub struct Times(PassCosts, Option<Costs>);

impl CostModels {
    /// The costs that `profile` knows, and those of reading with `reads`, the handle of the prefix cache.
    pub fn new(profile: MachineProfileFile, reads: ReadCosts) -> Self {
        let MachineProfile { prefill, pass_bytes, .. } = profile.profile();
        Self {
            passes: prefill.unwrap_or_default(),
            drafts: None,
            bytes: pass_bytes.unwrap_or_default(),
            reads,
            profile,
        }
    }

    /// Seconds of passes with rows of prompt and without.
    pub fn passes(&self) -> &PassCosts {
        &self.passes
    }

    /// Seconds of steps and drafts; `None` without drafters.
    pub fn drafts(&self) -> Option<&Costs> {
        self.drafts.as_ref()
    }

    /// Bytes of a pass.
    pub fn bytes(&self) -> &PassBytes {
        &self.bytes
    }

    /// What was known of this machine at the start.
    pub fn known(&self) -> MachineProfile {
        self.profile.profile()
    }

    /// Sets the seconds of steps and drafts.
    pub fn set_drafts(&mut self, costs: Costs) {
        self.drafts = Some(costs);
    }

    /// Sets the seconds of passes, as measured on a machine that does nothing else, and with them what computing a prompt
    /// costs in passes over `chunk` rows: not what it costs beside other requests.
    pub fn set_passes(&mut self, costs: PassCosts, chunk: usize) {
        self.passes = costs;
        self.reads.set_compute(costs.of_prompts(chunk));
    }

    /// Sets the bytes of a pass.
    pub fn set_bytes(&mut self, bytes: PassBytes) {
        self.bytes = bytes;
    }

    /// Saves what was measured, with the chosen `threads`.
    pub fn save_measured(&mut self, threads: Option<threads::Counts>) {
        let known = self.profile.profile();
        self.profile.measured(MachineProfile {
            threads: threads.or(known.threads),
            costs: self.drafts.or(known.costs),
            prefill: Some(self.passes),
            pass_bytes: Some(self.bytes),
        });
    }

    /// Saves what was learned of steps and drafts while requests were served.
    pub fn save_learned(&mut self) {
        self.profile.learned(self.drafts);
    }

    /// Learns from a pass that took `seconds`, of which `rows` were rows of prompt.
    pub fn learn_pass(&mut self, rows: usize, seconds: f32) {
        self.passes.learn(rows, seconds);
    }

    /// Seconds of steps and drafts, which learn from a step; `None` without drafters.
    pub fn drafts_mut(&mut self) -> Option<&mut Costs> {
        self.drafts.as_mut()
    }

    /// Learns from a step that was expected to take `expected` bytes, began with `before` and has been evaluated.
    pub fn learn_bytes(&mut self, before: &Before, expected: Expected) -> Result<()> {
        self.bytes.learn_step(before, expected)
    }

    /// The costs in seconds.
    pub fn times(&self) -> Times {
        Times(self.passes, self.drafts)
    }

    /// Restores the costs in seconds.
    pub fn set_times(&mut self, Times(passes, drafts): Times) {
        (self.passes, self.drafts) = (passes, drafts);
    }
}

#[cfg(test)]
impl CostModels {
    /// Forgets the seconds of steps and drafts, as without drafters.
    pub fn forget_drafts(&mut self) {
        self.drafts = None;
    }
}
