//! Turns a core Wasm module, as cargo builds it from a policy, into a component:
//! `componentize MODULE.wasm COMPONENT.wasm`.
//!
//! `wasm-tools component new MODULE.wasm -o COMPONENT.wasm` does the same.

use std::error::Error;

use wit_component::ComponentEncoder;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [module, component] = arguments.as_slice() else {
        return Err("usage: componentize MODULE.wasm COMPONENT.wasm".into());
    };
    let module = std::fs::read(module).map_err(|e| format!("{module}: {e}"))?;
    let bytes = ComponentEncoder::default().module(&module)?.validate(true).encode()?;
    std::fs::write(component, &bytes).map_err(|e| format!("{component}: {e}"))?;
    println!("{component}: {} bytes", bytes.len());
    Ok(())
}
