//! Writes the small files of the folder that a GGUF file stands for, and lists its tensors.
//!
//! `cargo run -p steersman-gguf --example unpack -- MODEL.gguf FOLDER`

use std::error::Error;
use std::path::PathBuf;

use steersman_gguf::{Model, files};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(file), Some(folder)) = (arguments.next(), arguments.next()) else {
        return Err("usage: unpack MODEL.gguf FOLDER".into());
    };
    std::fs::create_dir_all(&folder)?;
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    {
        std::fs::write(folder.join(name), files::read(&file, name)?)?;
    }
    for (name, tensor) in Model::open(&file)?.listing() {
        println!("{name} {} {}", tensor["dtype"], tensor["shape"]);
    }
    Ok(())
}
