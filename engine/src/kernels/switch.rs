//! Which of our own kernels are used: one that differs from its reference on this device is off.
//!
//! A kernel is named by what it computes, whatever device computes it: a process uses the kernels of one device. The
//! switches belong to a thread, as [`super::cpu::enable`] does. Where a kernel is off, layers compute its reference.

use std::cell::Cell;

/// What a kernel of our own computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelKind {
    /// RMS norm.
    Norm,
    /// SwiGLU of gates and ups.
    Gate,
    /// Products with matrices, packed or not.
    Products,
    /// Attention of queries over caches.
    Attention,
    /// Norms, rotation, writes to caches and attention of a layer's heads.
    Heads,
    /// The gated delta rule with its convolution, norms and gates.
    GatedDelta,
    /// The state after the first rows of a draft.
    Rewind,
    /// The few experts of few rows.
    Experts,
}

impl KernelKind {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Norm,
        Self::Gate,
        Self::Products,
        Self::Attention,
        Self::Heads,
        Self::GatedDelta,
        Self::Rewind,
        Self::Experts,
    ];

    /// Its name in reports and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Norm => "norm",
            Self::Gate => "gate",
            Self::Products => "products",
            Self::Attention => "attention",
            Self::Heads => "heads",
            Self::GatedDelta => "gated delta rule",
            Self::Rewind => "rewind",
            Self::Experts => "experts",
        }
    }

    /// Returns true if layers on this thread may use it.
    pub fn is_on(self) -> bool {
        OFF.get() & self.bit() == 0
    }

    fn bit(self) -> u32 {
        1 << self as u32
    }
}

thread_local! {
    /// A bit for each kernel that is off.
    static OFF: Cell<u32> = const { Cell::new(0) };
}

/// Turns these kernels off on this thread, and all others on.
pub fn turn_off(kernels: impl IntoIterator<Item = KernelKind>) {
    OFF.set(kernels.into_iter().fold(0, |bits, kernel| bits | kernel.bit()));
}
