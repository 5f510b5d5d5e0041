//! The interfaces of a component: the hooks that it exports, and the imports that need a grant.

use wasmtime::Engine;
use wasmtime::component::types::ComponentItem;

use crate::config::Grant;
use crate::contract::{CONTRACT, Hook};

/// Prefix of the names of all interfaces of the contract.
const PACKAGE: &str = "steersman:policy/";

/// The import that needs no grant.
const FAILURE: &str = "failure";

/// Full name of an interface of the contract.
pub fn full_name(interface: &str) -> String {
    format!("{PACKAGE}{interface}@{CONTRACT}")
}

/// The hooks among the exports of a component.
pub fn exported_hooks<'a>(
    exports: impl Iterator<Item = &'a str>,
) -> Result<Vec<&'static str>, String> {
    let mut hooks = Vec::new();
    for export in exports {
        let Some(hook) = export.strip_prefix(PACKAGE) else { continue };
        let (hook, version) = hook.split_once('@').unwrap_or((hook, "without a version"));
        if version != CONTRACT {
            return Err(format!(
                "exports `{hook}` of contract {version}; this server has contract {CONTRACT}: build it \
                 again for {CONTRACT}"
            ));
        }
        let Some(hook) = Hook::ALL.into_iter().find(|known| known.name() == hook) else {
            return Err(format!("exports `{hook}`, which contract {CONTRACT} does not have"));
        };
        hooks.push(hook.name());
    }
    if hooks.is_empty() {
        let known = Hook::ALL.map(Hook::name).join("`, `");
        let example = full_name(Hook::OnStep.name());
        return Err(format!("exports none of the hooks `{known}` (as `{example}`)"));
    }
    Ok(hooks)
}

/// The grants that imports of a component need.
///
/// # Errors
/// The problem, if an import is not one of the contract.
pub fn imported_grants<'a>(
    imports: impl Iterator<Item = (&'a str, ComponentItem)>,
    engine: &Engine,
) -> Result<Vec<Grant>, String> {
    let mut grants = Vec::new();
    for (import, item) in imports {
        if is_types_only(import, &item, engine) || import == full_name(FAILURE) {
            continue;
        }
        let known = Grant::ALL.into_iter().find(|known| import == full_name(known.name()));
        grants.push(known.ok_or_else(|| {
            let known = Grant::ALL.map(Grant::name).join(", ");
            format!(
                "imports `{import}`; contract {CONTRACT} has only {known}, {FAILURE} and its types"
            )
        })?);
    }
    Ok(grants)
}

/// Whether an import contains types only, which need nothing from the host. `wit-bindgen` generates
/// one for the interface `types`.
fn is_types_only(name: &str, item: &ComponentItem, engine: &Engine) -> bool {
    let ComponentItem::ComponentInstance(instance) = item else { return false };
    let ours = name.strip_prefix(PACKAGE).is_some_and(|rest| rest.starts_with("types@"));
    ours && instance.exports(engine).all(|(_, item)| matches!(item.ty, ComponentItem::Type(_)))
}
