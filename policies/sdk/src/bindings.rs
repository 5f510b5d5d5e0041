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
