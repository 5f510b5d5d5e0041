//! The bindings that `wit-bindgen` generates from `wit/`. Authors use [`crate::Policy`] and
//! [`crate::export!`].

#![allow(unsafe_code, reason = "the canonical ABI passes pointers")]
#![allow(missing_docs, reason = "generated; the records are documented in wit/")]

// All hooks and all imports: the linker drops the imports that a guest does not call.
wit_bindgen::generate!({
    path: "wit",
    world: "policy-with-host",
    pub_export_macro: true,
    export_macro_name: "export_policy",
    additional_derives: [PartialEq],
});

/// The bindings of policies without `on-tool-call`.
pub mod without_verdicts {
    wit_bindgen::generate!({
        inline: "
            package steersman:sdk;

            world without-verdicts {
                export steersman:policy/on-prompt@0.3.0;
                export steersman:policy/on-request@0.3.0;
                export steersman:policy/on-step@0.3.0;
                export steersman:policy/on-finish@0.3.0;
            }
        ",
        path: "wit",
        pub_export_macro: true,
        export_macro_name: "export_without_verdicts",
        with: {"steersman:policy/types@0.3.0": crate::bindings::steersman::policy::types},
    });
}
