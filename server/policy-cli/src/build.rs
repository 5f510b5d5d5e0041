//! `steersman policy build`: sources to a component.
//!
//! A Rust crate goes through cargo to a core module, which becomes a component here; JavaScript and
//! Python go through the tools that put their engines inside. None of the three may leave an import
//! of WASI behind, so the tools are asked for a component without.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use wit_component::ComponentEncoder;

/// The target of Rust guests.
const TARGET: &str = "wasm32-unknown-unknown";

/// The world, in the folder's `wit/`, that names the hooks of a guest in JavaScript or Python.
const WORLD: &str = "guest";

/// Which sources, and where the component goes.
#[derive(Args)]
pub struct Build {
    /// Folder with a Cargo.toml, a .js file or a .py file; or a core module, as a compiler makes it
    #[arg(value_name = "FOLDER|MODULE.wasm")]
    source: PathBuf,
    /// Where the component goes [default: NAME.wasm in the folder]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Where cargo keeps what it compiles [default: target in the folder]
    #[arg(long, value_name = "FOLDER")]
    target_dir: Option<PathBuf>,
}

/// Builds it, and says what came out.
///
/// # Errors
/// What cannot be read or written, what a compiler says, or which tool is missing and how it is
/// installed.
pub fn run(options: Build, out: &mut impl Write) -> Result<()> {
    let Build { source, out: file, target_dir } = options;
    let path = &source;
    let source = source.canonicalize().with_context(|| path.display().to_string())?;
    let file = if source.is_file() {
        let file = file.context("--out is missing: where the component of a module goes")?;
        write(&file, &componentize(&read(&source)?)?)?;
        file
    } else {
        let main = Main::find(&source)?;
        let file = file.unwrap_or_else(|| source.join(format!("{}.wasm", main.name())));
        let whole = std::path::absolute(&file)?;
        match &main {
            Main::Rust { name } => {
                let target = target_dir.unwrap_or_else(|| source.join("target"));
                let module = compile(&source, name, &std::path::absolute(target)?)?;
                write(&file, &componentize(&module)?)?;
            }
            Main::JavaScript(main) => javascript(&source, main, &whole)?,
            Main::Python(main) => python(&source, main, &whole)?,
        }
        file
    };
    let bytes = std::fs::metadata(&file).with_context(|| file.display().to_string())?.len();
    writeln!(out, "{}: {bytes} bytes", file.display())?;
    Ok(())
}

/// Makes a component of a core module that `wit-bindgen` has told of its world. What its code does
/// not import, the component does not.
///
/// # Errors
/// When the bytes are no such module.
pub fn componentize(module: &[u8]) -> Result<Vec<u8>> {
    ComponentEncoder::default()
        .module(module)
        .and_then(|encoder| encoder.validate(true).encode())
        .context("the module cannot become a component: is it built with the SDK?")
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| path.display().to_string())
}

fn write(file: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(file, bytes).with_context(|| file.display().to_string())
}

/// What a folder is built from.
#[derive(Debug, PartialEq)]
enum Main {
    /// A crate, by its name.
    Rust { name: String },
    /// A module, by its file.
    JavaScript(PathBuf),
    /// A module, by its file.
    Python(PathBuf),
}

impl Main {
    fn find(folder: &Path) -> Result<Self> {
        let manifest = folder.join("Cargo.toml");
        if manifest.is_file() {
            let text = std::fs::read_to_string(&manifest)?;
            let table: toml::Table =
                text.parse().with_context(|| manifest.display().to_string())?;
            let name = |section: &str| table.get(section)?.get("name")?.as_str();
            let name = name("lib").or(name("package"));
            let name = name.with_context(|| format!("{}: has no name", manifest.display()))?;
            return Ok(Self::Rust { name: name.into() });
        }
        for (ending, main) in
            [("js", Self::JavaScript as fn(_) -> _), ("py", Self::Python as fn(_) -> _)]
        {
            let mut files: Vec<_> =
                std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
            files.retain(|file| file.extension().is_some_and(|found| found == ending));
            if files.len() > 1 {
                let named = |file: &PathBuf| file.file_stem() == folder.file_name();
                files.retain(named);
                ensure!(
                    !files.is_empty(),
                    "{}: has several .{ending} files; that of the policy must be named as the folder",
                    folder.display()
                );
            }
            if let Some(file) = files.pop() {
                return Ok(main(file));
            }
        }
        bail!(
            "{}: has no Cargo.toml, no .js file and no .py file; `steersman policy new` makes a folder",
            folder.display()
        );
    }

    fn name(&self) -> String {
        match self {
            Self::Rust { name } => name.clone(),
            Self::JavaScript(file) | Self::Python(file) => {
                file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
            }
        }
    }
}

/// Compiles the crate in `folder`; the core module.
fn compile(folder: &Path, name: &str, target: &Path) -> Result<Vec<u8>> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(folder).args(["build", "--quiet", "--release", "--target", TARGET]);
    cargo.arg("--target-dir").arg(target);
    if folder.join("Cargo.lock").is_file() {
        cargo.arg("--locked");
    }
    // Paths of this machine stand in panic messages otherwise, and the bytes would differ.
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(dirs::home_dir()?.join(".cargo"))).unwrap_or_default();
    let mut flags = remap(&home, "/cargo");
    flags.push(" ");
    // One root for all policies of a repository: cargo compiles all again where flags differ.
    let root = folder.ancestors().find(|folder| folder.join(".git").exists());
    flags.push(remap(root.unwrap_or(folder), "/source"));
    if let Toolchain::Debian { rustc, linker } = Toolchain::find()? {
        flags.push(" -Clinker=");
        flags.push(linker);
        flags.push(" -Clinker-flavor=wasm-ld");
        // This compiler comes with the source of its standard library alone.
        cargo.arg("-Zbuild-std=std,panic_abort").env("RUSTC_BOOTSTRAP", "1").env("RUSTC", rustc);
    }
    cargo.env("RUSTFLAGS", flags);
    finish(cargo, "install Rust")?;
    let file = format!("{}.wasm", name.replace('-', "_"));
    let module = target.join(TARGET).join("release").join(file);
    std::fs::read(&module).with_context(|| {
        let why = "the crate made no module; its Cargo.toml needs [lib] crate-type = [\"cdylib\"]";
        format!("{}: {why}", module.display())
    })
}

fn remap(from: &Path, to: &str) -> OsString {
    let mut flag = OsString::from("--remap-path-prefix=");
    flag.push(from);
    flag.push("=");
    flag.push(to);
    flag
}

/// What compiles Rust to WebAssembly.
enum Toolchain {
    /// rustup's, with the target.
    Rustup,
    /// Debian's compiler, with the source of its standard library, and a linker.
    Debian { rustc: PathBuf, linker: PathBuf },
}

impl Toolchain {
    fn find() -> Result<Self> {
        let rustlib = |rustc: &str| {
            let sysroot = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
            let sysroot = String::from_utf8(sysroot.stdout).ok()?;
            Some(Path::new(sysroot.trim()).join("lib/rustlib"))
        };
        let ours = rustlib("rustc");
        if ours.as_ref().is_some_and(|lib| lib.join(TARGET).join("lib").is_dir()) {
            return Ok(Self::Rustup);
        }
        let rustc = "/usr/bin/rustc";
        let has_source =
            rustlib(rustc).is_some_and(|lib| lib.join("src/rust/library/Cargo.toml").is_file());
        match linker(ours.as_deref()).filter(|_| has_source) {
            Some(linker) => Ok(Self::Debian { rustc: rustc.into(), linker }),
            None => bail!(
                "no compiler for WebAssembly: run `rustup target add {TARGET}`, or on Debian \
                 `apt-get install rustc-web rust-web-src lld-22`"
            ),
        }
    }
}

fn linker(rustlib: Option<&Path>) -> Option<PathBuf> {
    let entries = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_lld = |path: &PathBuf| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.strip_prefix("lld-").is_some_and(|v| v.parse::<u32>().is_ok()))
    };
    let debian = entries(Path::new("/usr/bin")).map(|entry| entry.path()).find(is_lld);
    debian.or_else(|| {
        let rust = entries(rustlib?).map(|entry| entry.path().join("bin/rust-lld"));
        rust.into_iter().find(|path| path.is_file())
    })
}

fn javascript(folder: &Path, file: &Path, out: &Path) -> Result<()> {
    let mut tool = tool("componentize-js", folder);
    tool.current_dir(folder).arg(file).arg("--wit").arg(wit(folder)?);
    tool.args(["--world-name", WORLD]);
    // Whatever would be an import of WASI; a policy does without.
    tool.args(["--disable", "random", "stdio", "clocks", "http", "fetch-event"]);
    tool.arg("--out").arg(out);
    finish(tool, "run `npm install @bytecodealliance/componentize-js`")
}

fn python(folder: &Path, file: &Path, out: &Path) -> Result<()> {
    let mut tool = tool("componentize-py", folder);
    tool.current_dir(folder).arg("--quiet").arg("-d").arg(wit(folder)?).args(["-w", WORLD]);
    tool.arg("componentize").arg(file.file_stem().unwrap_or_default());
    // Imports of WASI become traps inside the component.
    tool.arg("--stub-wasi").arg("--output").arg(out);
    finish(tool, "run `pip install componentize-py`")
}

fn wit(folder: &Path) -> Result<PathBuf> {
    let wit = folder.join("wit");
    ensure!(
        wit.join("world.wit").is_file() && wit.join("policy.wit").is_file(),
        "{}: must hold the contract, policy.wit, and world.wit with `world {WORLD}`, which exports the \
         policy's hooks; `steersman policy new` makes both",
        wit.display()
    );
    Ok(wit)
}

/// A tool: of the folder or of one above it, where npm and venv install it, or else of PATH.
fn tool(name: &str, folder: &Path) -> Command {
    let folders = folder
        .ancestors()
        .flat_map(|folder| [folder.join("node_modules/.bin"), folder.join(".venv/bin")]);
    let found = folders.map(|folder| folder.join(name)).find(|path| path.is_file());
    Command::new(found.unwrap_or_else(|| name.into()))
}

/// Runs a tool to its end. What it says goes where ours goes, but for its remarks on success.
fn finish(mut command: Command, install: &str) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) => {
            ensure!(status.success(), "`{name}` has failed ({status}): its words stand above");
            Ok(())
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("`{name}` is missing: {install}")
        }
        Err(error) => Err(error).with_context(|| name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).expect("a file");
        }
        folder
    }

    #[test]
    fn a_folder_is_built_from_what_lies_in_it() {
        let find = |files: &[(&str, &str)]| {
            let folder = folder(files);
            Main::find(folder.path()).map(|main| main.name()).map_err(|e| e.to_string())
        };
        assert_eq!(find(&[("Cargo.toml", "[package]\nname = \"a\"")]), Ok("a".into()));
        let lib = "[package]\nname = \"a\"\n[lib]\nname = \"b\"";
        assert_eq!(find(&[("Cargo.toml", lib), ("x.js", "")]), Ok("b".into()));
        assert_eq!(find(&[("x.js", ""), ("y.wasm", "")]), Ok("x".into()));
        assert_eq!(find(&[("y.py", "")]), Ok("y".into()));
        let several = find(&[("x.js", ""), ("y.js", "")]).unwrap_err();
        assert!(several.contains("has several .js files"), "{several}");
        let none = find(&[("x.c", "")]).unwrap_err();
        assert!(none.contains("has no Cargo.toml, no .js file and no .py file"), "{none}");
        let nameless = find(&[("Cargo.toml", "[package]")]).unwrap_err();
        assert!(nameless.contains("has no name"), "{nameless}");
    }

    #[test]
    fn of_several_modules_the_one_named_as_the_folder_is_the_policy() {
        let outer = folder(&[]);
        let inner = outer.path().join("brief");
        std::fs::create_dir(&inner).expect("a folder");
        for name in ["brief.py", "words.py"] {
            std::fs::write(inner.join(name), "").expect("a file");
        }
        assert_eq!(Main::find(&inner).expect("a policy"), Main::Python(inner.join("brief.py")));
    }

    #[test]
    fn a_missing_tool_is_named_with_what_installs_it() {
        let missing = finish(Command::new("no-such-tool"), "run `pip install it`").unwrap_err();
        assert_eq!(missing.to_string(), "`no-such-tool` is missing: run `pip install it`");
    }

    #[test]
    fn what_is_no_module_becomes_no_component() {
        let error = componentize(b"\0asm\x01\0\0").unwrap_err();
        assert!(error.to_string().contains("is it built with the SDK?"), "{error:#}");
    }
}
