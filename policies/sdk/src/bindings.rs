//! The bindings that `wit-bindgen` generates from `wit/`. Authors use [`crate::Policy`] and
//! [`crate::export!`].

#![allow(unsafe_code, reason = "the canonical ABI passes pointers")]
#![allow(missing_docs, reason = "generated; the records are documented in wit/")]

// All imports: the linker drops those that a guest does not call. A guest exports all hooks of the worlds
// whose export macros it calls; so `on-tool-call`, which some leave out, and `on-text`, which few have, have
// worlds of their own.
wit_bindgen::generate!({
    path: "wit",
    inline: "
        package steersman:sdk;

        world hooks {
            import steersman:policy/failure@0.6.0;
            import steersman:policy/log@0.6.0;
            import steersman:policy/kv@0.6.0;
            import steersman:policy/tokenizer@0.6.0;
            import steersman:policy/counters@0.6.0;

            include steersman:policy/hooks@0.6.0;
        }
    ",
    pub_export_macro: true,
    export_macro_name: "export_hooks",
    additional_derives: [PartialEq],
    generate_all,
});

/// The hook `on-text`.
pub mod texts {
    wit_bindgen::generate!({
        path: "wit",
        inline: "
            package steersman:sdk;

            world texts {
                export steersman:policy/on-text@0.6.0;
            }
        ",
        pub_export_macro: true,
        export_macro_name: "export_texts",
        with: {"steersman:policy/types@0.6.0": crate::bindings::steersman::policy::types},
        generate_all,
    });
}

/// The hook `on-tool-call`.
pub mod verdicts {
    wit_bindgen::generate!({
        path: "wit",
        inline: "
            package steersman:sdk;

            world verdicts {
                export steersman:policy/on-tool-call@0.6.0;
            }
        ",
        pub_export_macro: true,
        export_macro_name: "export_verdicts",
        with: {"steersman:policy/types@0.6.0": crate::bindings::steersman::policy::types},
        generate_all,
    });
}
