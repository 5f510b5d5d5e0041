//! How far a request is, for other threads.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// How far one request is. The engine thread writes it after each step, three stores a request, whether or not
/// anybody reads it; a reader may see the stage of one step with the counts of the next.
#[derive(Debug, Default)]
pub struct Live {
    stage: AtomicU8,
    prefilled: AtomicU32,
    reply: AtomicU32,
}

/// What the engine does for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// It waits, is prepared, waits for a prefix that another one computes, or is a choice whose prompt another one computes.
    #[default]
    Waiting,
    /// Its prompt runs; after it was preempted, its reply too.
    Prefill,
    /// It writes reasoning.
    Reasoning,
    /// It writes the answer.
    Answer,
    /// It writes a tool call.
    ToolCall,
    /// It waits for memory, or for a slot that another profile has taken.
    Preempted,
}

impl Stage {
    /// All stages, each at its number.
    const ALL: [Self; 6] = [
        Self::Waiting,
        Self::Prefill,
        Self::Reasoning,
        Self::Answer,
        Self::ToolCall,
        Self::Preempted,
    ];

    /// Name for display.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Prefill => "prefill",
            Self::Reasoning => "reasoning",
            Self::Answer => "answer",
            Self::ToolCall => "tool-call",
            Self::Preempted => "preempted",
        }
    }
}

impl Live {
    /// After a step: tokens of the prompt that have run, and tokens of the reply.
    pub fn set(&self, stage: Stage, prefilled: usize, reply: usize) {
        // Positions fit i32 (see `Decoder::load`).
        self.prefilled.store(prefilled as u32, Ordering::Relaxed);
        self.reply.store(reply as u32, Ordering::Relaxed);
        self.set_stage(stage);
    }

    /// The stage alone.
    pub fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Relaxed);
    }

    /// What the engine does now.
    pub fn stage(&self) -> Stage {
        Stage::ALL[usize::from(self.stage.load(Ordering::Relaxed))]
    }

    /// Tokens of the prompt that have run or were restored.
    pub fn prefilled_tokens(&self) -> u32 {
        self.prefilled.load(Ordering::Relaxed)
    }

    /// Tokens of the reply.
    pub fn reply_tokens(&self) -> u32 {
        self.reply.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_is_read_as_it_was_written() {
        let live = Live::default();
        assert_eq!(live.stage(), Stage::Waiting);
        for stage in Stage::ALL {
            live.set(stage, 7, 9);
            assert_eq!((live.stage(), live.prefilled_tokens(), live.reply_tokens()), (stage, 7, 9));
        }
    }
}
