//! The policies inside the binary.

/// A policy inside the binary.
pub struct Shipped {
    pub name: &'static str,
    pub component: &'static [u8],
    pub golden: &'static str,
    /// Names of its parameters, as policies/REFERENCE.md lists them. They are suggested for a misspelt name; the
    /// policy itself says which names it knows.
    pub params: &'static [&'static str],
}

macro_rules! shipped {
    ($name:literal, $params:expr) => {
        Shipped {
            name: $name,
            component: include_bytes!(concat!("../../../policies/", $name, "/", $name, ".wasm")),
            golden: include_str!(concat!("../../../policies/", $name, "/", $name, ".jsonl")),
            params: $params,
        }
    };
}

/// All policies inside the binary.
pub const SHIPPED: &[Shipped] = &[
    shipped!(
        "agent",
        &[
            "reasoning",
            "reasoning_budget",
            "answer_reserve",
            "answer",
            "json_head",
            "strip",
            "loop_max_period",
            "loop_repeats",
            "loop_min_tokens",
            "loop_similarity",
            "answer_loop_tokens",
            "escapes",
            "escape_text",
            "checkpoint_every",
            "tool_repeats"
        ]
    ),
    shipped!("brake", &["margin", "min_tokens", "times", "hint"]),
    shipped!("budget", &["tokens_per_day", "count_by"]),
    shipped!("cache-friendly", &["strip"]),
    shipped!(
        "default",
        &[
            "reasoning",
            "reasoning_budget",
            "answer_reserve",
            "needle_system_chars",
            "needle_user_chars",
            "needle_reasoning_budget",
            "loop_repeats",
            "loop_min_tokens",
            "loop_max_period",
            "loop_similarity",
            "answer_loop_tokens",
            "hint_json",
            "hint_code",
            "hint_sql",
            "hint_translation",
            "hint_table",
            "hint_answer",
            "hint_tools"
        ]
    ),
    shipped!("json-agent", &["schema", "instruction", "reasoning_budget"]),
    shipped!("language", &["language", "times"]),
    shipped!("no-repeat", &["times", "temperature", "cool_down"]),
    shipped!("passthrough", &[]),
    shipped!("redact", &["patterns", "texts", "mark"]),
    shipped!("router", &["to", "over_tokens", "over_messages", "words", "tools"]),
    shipped!("rules", &["rules", "strict"]),
    shipped!("tool-guard", &["allow", "deny", "calls", "repeats", "words"]),
];

/// The names of the shipped policies.
pub fn shipped_names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|shipped| shipped.name)
}

/// Component and golden file of a policy inside the binary.
pub fn shipped(name: &str) -> Option<(&'static [u8], &'static str)> {
    let shipped = SHIPPED.iter().find(|shipped| shipped.name == name)?;
    Some((shipped.component, shipped.golden))
}

/// Whether a component is one of those inside the binary, under whatever name.
pub fn is_shipped(component: &[u8]) -> bool {
    SHIPPED.iter().any(|shipped| shipped.component == component)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names are suggested for misspelt ones, so they must be those that an operator can read about.
    #[test]
    fn the_parameters_of_shipped_policies_are_those_of_the_reference() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies/REFERENCE.md");
        let reference = std::fs::read_to_string(path).unwrap();
        for policy in SHIPPED {
            let title = format!("### `{}`\n", policy.name);
            let (_, section) = reference.split_once(&title).expect(policy.name);
            let section = section.split("\n#").next().unwrap_or_default();
            let rows = section.lines().filter(|line| line.starts_with("| `"));
            let cells = rows.filter_map(|row| row.split('|').nth(1));
            let mut documented: Vec<_> =
                cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
            let mut names = policy.params.to_vec();
            names.sort_unstable();
            documented.sort_unstable();
            assert_eq!(names, documented, "{}", policy.name);
        }
    }
}
