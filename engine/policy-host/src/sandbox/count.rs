//! Counts what is in a component before it is compiled.
//!
//! A component can instantiate others that instantiate others again, so that a few bytes stand for millions
//! of instances. The bound here needs no resolution of indices: a component can only instantiate what is
//! defined before it, so the instances that one stands for are at most the product, over all components, of
//! one more than the instantiations that each contains.
//!
//! What is malformed passes: the compiler names the problem.

use wasmparser::{ComponentInstance, Parser, Payload};

/// Levels of components and modules in one another; policies have 3.
const DEPTH: usize = 16;

/// Instances that all components together may stand for; interpreters stay below 100.
const INSTANCES: u64 = 4096;

/// Functions of all modules; a JavaScript interpreter has 17,000.
const FUNCTIONS: u64 = 100_000;

/// Locals of one function; the largest of the interpreters have some hundreds.
const LOCALS: u64 = 10_000;

/// Checks the counts of a component.
///
/// # Errors
/// Which one is too large.
pub fn check(bytes: &[u8]) -> Result<(), String> {
    let too_many = |what: &str, count: u64, limit: u64| {
        if count > limit { Err(format!("has {what}, the limit is {limit}")) } else { Ok(()) }
    };
    // Instantiations in each component that encloses this place.
    let mut open = vec![0_u64];
    let (mut instances, mut functions) = (1_u64, 0_u64);
    for payload in Parser::new(0).parse_all(bytes) {
        let Ok(payload) = payload else { return Ok(()) };
        match payload {
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => {
                open.push(0);
                let depth = open.len() as u64;
                too_many(&format!("{depth} levels of components"), depth, DEPTH as u64)?;
            }
            Payload::End(_) => {
                let instantiations = open.pop().unwrap_or_default();
                instances = instances.saturating_mul(instantiations.saturating_add(1));
                too_many(
                    "components that instantiate one another too often",
                    instances,
                    INSTANCES,
                )?;
            }
            Payload::ComponentInstanceSection(section) => {
                let of_component = |instance: &wasmparser::Result<ComponentInstance<'_>>| {
                    matches!(instance, Ok(ComponentInstance::Instantiate { .. }))
                };
                if let Some(here) = open.last_mut() {
                    *here += section.into_iter().filter(of_component).count() as u64;
                }
            }
            Payload::CodeSectionStart { count, .. } => {
                functions += u64::from(count);
                too_many(&format!("{functions} functions"), functions, FUNCTIONS)?;
            }
            Payload::CodeSectionEntry(body) => {
                let Ok(locals) = body.get_locals_reader() else { return Ok(()) };
                let counts = locals.into_iter().map(|local| local.map_or(0, |(count, _)| count));
                let locals = counts.fold(0, |sum: u64, count| sum.saturating_add(count.into()));
                too_many(&format!("a function with {locals} locals"), locals, LOCALS)?;
            }
            _ => {}
        }
    }
    Ok(())
}
