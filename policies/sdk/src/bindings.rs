//! What `wit-bindgen` makes of `wit/`. Authors use [`crate::Policy`] and [`crate::export!`].

#![allow(unsafe_code, reason = "the canonical ABI passes pointers")]
#![allow(missing_docs, reason = "generated; the records are documented in wit/")]

// All hooks and all imports: a guest imports only what it calls, the linker drops the rest.
wit_bindgen::generate!({
    path: "wit",
    world: "policy-with-host",
    pub_export_macro: true,
    export_macro_name: "export_policy",
    additional_derives: [PartialEq],
});
