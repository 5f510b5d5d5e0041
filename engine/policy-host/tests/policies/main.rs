//! Laws of policies: compiled, called, chained, replaced, replayed, stored and damaged.
//!
//! Tests of parameters, bundles and traces take compiled components from [`storage`]; the others compile.

mod bundle;
mod chain;
mod compile;
mod damage;
mod fuzz;
mod hostile;
mod params;
mod reload;
mod replay;

use steersman_policy_host::Storage;

/// Storage in memory, with the compiled components that all tests share.
fn storage() -> Storage {
    Storage::compile_cache(&steersman_test_support::shared_policies())
}
