//! The data of an instance's store, and the limits on what a guest allocates.

use wasmtime::ResourceLimiter;

use super::imports::Imports;
use crate::error::Cause;

/// Core instances of one component: a Python interpreter has 38.
const MAX_CORE_INSTANCES: usize = 64;

/// Memories, and tables, of one component.
const MAX_MEMORIES: usize = 8;

/// Elements of one table.
const MAX_TABLE_ELEMENTS: usize = 20_000;

/// Data of a store: its limits, its imports, and the limit that ended it.
pub struct State {
    /// Bytes of all memories.
    memory_bytes: usize,
    memory_limit: usize,
    /// Why the guest was ended.
    failed: Option<Cause>,
    /// `None` for a component without imports.
    pub imports: Option<Box<Imports>>,
}

impl State {
    /// The state of a new instance, whose memories may have `memory_limit` bytes.
    pub fn new(memory_limit: usize, imports: Option<Box<Imports>>) -> Self {
        Self { memory_bytes: 0, memory_limit, failed: None, imports }
    }

    /// The cause that ended the guest, if one was recorded.
    pub fn take_cause(&mut self) -> Option<Cause> {
        self.failed.take()
    }

    /// Records the cause of a failure; the error ends the guest.
    pub fn fail(&mut self, cause: Cause) -> wasmtime::Error {
        let error = wasmtime::Error::msg(cause.to_string());
        self.failed = Some(cause);
        error
    }

    /// Serves the use of an import. An error ends the guest.
    pub fn serve<T>(
        &mut self,
        call: &str,
        serve: impl FnOnce(&mut Imports) -> Result<T, String>,
    ) -> wasmtime::Result<T> {
        let imports = self.imports.as_mut().expect("components with imports have them");
        imports
            .begin_call()
            .and_then(|()| serve(imports))
            .map_err(|problem| self.fail(Cause::Limit(format!("{call}: {problem}"))))
    }
}

impl ResourceLimiter for State {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let limit = self.memory_limit;
        let wanted = self.memory_bytes.saturating_add(desired.saturating_sub(current));
        if wanted <= limit {
            self.memory_bytes = wanted;
            return Ok(true);
        }
        // `Ok(false)` would let the guest continue and fail for another reason.
        Err(self.fail(Cause::Limit(format!(
            "wanted {wanted} bytes of memory, the limit is {limit} (`policy.memory_bytes`)"
        ))))
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        if desired <= MAX_TABLE_ELEMENTS {
            return Ok(true);
        }
        Err(self.fail(Cause::Limit(format!(
            "wanted {desired} table elements, the limit is {MAX_TABLE_ELEMENTS}"
        ))))
    }

    fn instances(&self) -> usize {
        MAX_CORE_INSTANCES
    }

    fn tables(&self) -> usize {
        MAX_MEMORIES
    }

    fn memories(&self) -> usize {
        MAX_MEMORIES
    }
}
