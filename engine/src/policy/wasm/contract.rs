//! The versions of the contract that this server speaks: a file and a row of [`VERSIONS`] each.
//!
//! A version's file holds its typed bindings, how its records become those of [`crate::policy`], and
//! its [`Hooks`]. Nothing else knows versions apart. A component is of one version.

mod v0_1;
mod v0_2;

use wasmtime::Store;
use wasmtime::component::{Instance, InstancePre, Linker};

use super::State;
use crate::config::Grant;
use crate::policy::{
    Action, Plan, PromptView, Replacement, RequestView, Step, Summary, ToolCallView, Verdict,
};

/// All versions, the newest first.
pub const VERSIONS: [&Version; 2] = [&v0_2::VERSION, &v0_1::VERSION];

/// Most bytes that the lists of one answer take in the host, whatever its version: what is longer
/// is refused before it is copied, what is shorter by its own bounds.
pub const LIST_BYTES: usize = v0_2::LIST_BYTES;

/// Prefix of the names of all interfaces of the contract.
pub const PACKAGE: &str = "steersman:policy/";

/// A version of the contract.
pub struct Version {
    /// As it stands in the names of its interfaces.
    pub number: &'static str,
    /// The hooks that it has.
    pub hooks: &'static [&'static str],
    /// The interfaces that a policy may import where they are granted.
    pub imports: &'static [Grant],
    /// Those that need no grant.
    pub free: &'static [&'static str],
    /// Defines their functions.
    pub link: fn(&mut Linker<State>) -> wasmtime::Result<()>,
    /// Looks the hooks of a component up; an error where one has another shape.
    pub find: fn(&InstancePre<State>) -> wasmtime::Result<Found>,
}

/// The hooks of a component, ready to be taken from each instance of it.
pub type Found =
    Box<dyn Fn(&mut Store<State>, &Instance) -> wasmtime::Result<Box<dyn Hooks>> + Send + Sync>;

/// The hooks of an instance. One that it does not export answers as if there were no policy.
pub trait Hooks {
    /// Calls `on-prompt`.
    fn on_prompt(
        &self,
        _store: &mut Store<State>,
        _prompt: &PromptView,
    ) -> wasmtime::Result<Vec<Replacement>> {
        Ok(Vec::new())
    }

    /// Calls `on-request`.
    fn on_request(&self, store: &mut Store<State>, request: &RequestView)
    -> wasmtime::Result<Plan>;

    /// Calls `on-step`.
    fn on_step(&self, store: &mut Store<State>, step: &Step) -> wasmtime::Result<Vec<Action>>;

    /// Calls `on-tool-call`.
    fn on_tool_call(
        &self,
        _store: &mut Store<State>,
        _call: &ToolCallView,
    ) -> wasmtime::Result<Verdict> {
        Ok(Verdict::Accept)
    }

    /// Calls `on-finish`.
    fn on_finish(&self, store: &mut Store<State>, summary: &Summary) -> wasmtime::Result<()>;
}

/// The full name of an interface.
pub fn full_name(interface: &str, version: &str) -> String {
    format!("{PACKAGE}{interface}@{version}")
}

/// What `indices` says of a hook, where the component exports it.
fn optional<T>(
    pre: &InstancePre<State>,
    hook: &str,
    version: &Version,
    indices: impl FnOnce(&InstancePre<State>) -> wasmtime::Result<T>,
) -> wasmtime::Result<Option<T>> {
    let exported =
        pre.component().get_export_index(None, full_name(hook, version.number)).is_some();
    exported.then(|| indices(pre)).transpose()
}
