//! Writes the components of `tests/bombs.py`, which are expensive to compile, into a folder.

use std::path::PathBuf;

use steersman_test_support::bomb;

fn main() -> std::io::Result<()> {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "bombs".into()));
    std::fs::create_dir_all(&folder)?;
    for (name, bytes) in bomb::bombs() {
        std::fs::write(folder.join(format!("{name}.wasm")), bytes)?;
    }
    Ok(())
}
