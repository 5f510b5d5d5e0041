//! Merges the notes of plans.
//!
//! Each policy gets all parameters of its profile and notes those that it does not know, which are another one's as a
//! rule: `redact` behind `rules` noted in each reply that `rules` is unknown. Such a part of a note is left out if
//! another policy that got the parameter does not say the same.

use crate::contract::Params;

/// What a policy got and noted.
pub struct Planned {
    /// Names of its parameters; none if it cannot receive them.
    names: Vec<String>,
    note: Option<String>,
}

impl Planned {
    /// Returns what a policy has planned that has the parameters `params`, if it `receives` them.
    pub fn new(params: &Params, receives: bool, note: Option<String>) -> Self {
        let names = params.iter().filter(|_| receives).map(|(name, _)| name.clone());
        Self { names: names.collect(), note }
    }

    /// Whether it got the parameter and does not call it unknown.
    fn knows(&self, name: &str) -> bool {
        let is_unknown = |note: &String| parts(note).any(|part| unknown(part) == Some(name));
        self.names.iter().any(|own| own == name) && !self.note.as_ref().is_some_and(is_unknown)
    }
}

/// The note of a chain.
pub fn merged(planned: &[Planned]) -> Option<String> {
    let is_unknown = |part: &&str| {
        unknown(part).is_none_or(|name| planned.iter().all(|policy| !policy.knows(name)))
    };
    let notes = planned.iter().filter_map(|policy| policy.note.as_deref());
    let parts: Vec<_> = notes.flat_map(parts).filter(is_unknown).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn parts(note: &str) -> impl Iterator<Item = &str> {
    note.split("; ")
}

/// The parameter that a part of a note calls unknown.
pub fn unknown(part: &str) -> Option<&str> {
    part.strip_prefix("unknown parameter `")?.strip_suffix('`')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_is_unknown_if_no_policy_that_got_it_knows_it() {
        let planned = |names: &[&str], note: &str| {
            let params = names.iter().map(|name| (name.to_string(), String::new())).collect();
            Planned::new(&params, true, (!note.is_empty()).then(|| note.into()))
        };
        let both = "unknown parameter `rules`; unknown parameter `typo`";
        for (chain, expected) in [
            (vec![planned(&["rules", "typo"], both)], Some(both)),
            (vec![planned(&["rules"], "unknown parameter `rules`"), planned(&["rules"], "")], None),
            (
                vec![
                    planned(&["rules", "typo"], both),
                    planned(&["rules", "typo"], "found; unknown parameter `typo`"),
                ],
                Some("unknown parameter `typo`; found; unknown parameter `typo`"),
            ),
            // The second one did not get it.
            (
                vec![planned(&["own"], "unknown parameter `own`"), planned(&[], "")],
                Some("unknown parameter `own`"),
            ),
            (vec![planned(&[], "one; two"), planned(&[], "three")], Some("one; two; three")),
        ] {
            assert_eq!(merged(&chain).as_deref(), expected);
        }
    }
}
