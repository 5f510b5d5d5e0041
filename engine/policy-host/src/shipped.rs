//! The policies inside the binary.

/// A policy inside the binary.
pub struct Shipped {
    pub name: &'static str,
    pub component: &'static [u8],
    pub golden: &'static str,
}

macro_rules! shipped {
    ($name:literal) => {
        Shipped {
            name: $name,
            component: include_bytes!(concat!("../../../policies/", $name, "/", $name, ".wasm")),
            golden: include_str!(concat!("../../../policies/", $name, "/", $name, ".jsonl")),
        }
    };
}

/// All policies inside the binary.
pub const SHIPPED: &[Shipped] = &[
    shipped!("agent"),
    shipped!("budget"),
    shipped!("cache-friendly"),
    shipped!("default"),
    shipped!("json-agent"),
    shipped!("language"),
    shipped!("no-repeat"),
    shipped!("passthrough"),
    shipped!("redact"),
    shipped!("router"),
    shipped!("rules"),
    shipped!("tool-guard"),
];

/// Component and golden file of a policy inside the binary.
pub fn shipped(name: &str) -> Option<(&'static [u8], &'static str)> {
    let shipped = SHIPPED.iter().find(|shipped| shipped.name == name)?;
    Some((shipped.component, shipped.golden))
}

/// Whether a component is one of those inside the binary, under whatever name.
pub fn is_shipped(component: &[u8]) -> bool {
    SHIPPED.iter().any(|shipped| shipped.component == component)
}
