//! `steersman policy build`: from sources to a component.
//!
//! cargo compiles a Rust crate to a core module, zig one in C, and `wit-component` makes the component. JavaScript
//! and Python are built by tools that add an interpreter. No component may import WASI, so the tools
//! stub it out.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use wit_bindgen_core::{Files, wit_parser::Resolve};
use wit_component::{ComponentEncoder, DecodedWasm, decode};

use super::unexported;
use crate::{PROGRESS, patiently};

/// The target of Rust guests.
const TARGET: &str = "wasm32-unknown-unknown";

/// Beginning of the names of the contract's interfaces.
const PACKAGE: &str = "steersman:policy/";

/// Beginning of the names of hooks in it.
const HOOK: &str = "on-";

/// The file with helpers that `steersman policy new` puts beside a policy, without its extension.
const HELPERS: [&str; 2] = ["steersman-policy", "steersman_policy"];

/// The world in `wit/world.wit` of a guest in JavaScript or Python.
const WORLD: &str = "guest";

/// Source and output.
#[derive(Args)]
pub struct Build {
    /// A folder with a Cargo.toml, or a .js, .py or .c file; or a core module
    #[arg(value_name = "FOLDER|MODULE.wasm")]
    source: PathBuf,
    /// The component [default: NAME.wasm in the folder]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The target folder of cargo [default: target in the folder]
    #[arg(long, value_name = "FOLDER")]
    target_dir: Option<PathBuf>,
}

/// Builds a component and prints its path and size.
///
/// # Errors
/// When a file cannot be read or written, a compiler fails, or a tool is missing; the message says how
/// to install it.
pub fn run(options: Build, out: &mut impl Write) -> Result<()> {
    let Build { source, out: file, target_dir } = options;
    if !source.is_file() {
        return folder(&source, file, target_dir, out).map(drop);
    }
    let file = file.context("--out is missing; it names the component of a module")?;
    write(&file, &componentize(&read(&source)?)?)?;
    report(&file, out)
}

/// Builds the policy in a folder; returns the file of the component.
///
/// # Errors
/// As [`run`].
pub fn folder(
    folder: &Path,
    file: Option<PathBuf>,
    target_dir: Option<PathBuf>,
    out: &mut impl Write,
) -> Result<PathBuf> {
    let source = folder.canonicalize().with_context(|| folder.display().to_string())?;
    let main = Main::find(&source)?;
    let file = file.unwrap_or_else(|| source.join(format!("{}.wasm", main.name())));
    match &main {
        Main::Rust { name } => {
            let target = target_dir.unwrap_or_else(|| source.join("target"));
            let module = compile(&source, name, &std::path::absolute(target)?)?;
            write(&file, &componentize(&module)?)?;
        }
        Main::C(_) => write(&file, &componentize(&c(&source)?)?)?,
        Main::JavaScript(main) => javascript(&source, main, &std::path::absolute(&file)?)?,
        Main::Python(main) => python(&source, main, &std::path::absolute(&file)?)?,
    }
    report(&file, out)?;
    unexported::warn(&source, &hooks(&read(&file)?)?, out)?;
    Ok(file)
}

fn report(file: &Path, out: &mut impl Write) -> Result<()> {
    let bytes = std::fs::metadata(file).with_context(|| file.display().to_string())?.len();
    writeln!(out, "{}: {bytes} bytes", file.display())?;
    Ok(())
}

/// Makes a component from a core module in which `wit-bindgen` has embedded its world. Imports that
/// the code does not use are dropped.
fn componentize(module: &[u8]) -> Result<Vec<u8>> {
    let component = ComponentEncoder::default()
        .module(module)
        .and_then(|encoder| encoder.validate(true).encode())
        .map_err(|error| {
            let problem = if format!("{error:#}").contains("wasi_snapshot_preview1") {
                "the module imports WASI, which no policy has; build it for wasm32-unknown-unknown"
            } else {
                "the module cannot become a component; is it built with the SDK?"
            };
            error.context(problem)
        })?;
    // A module without a world becomes an empty component.
    ensure!(
        !hooks(&component)?.is_empty(),
        "the module contains no world with a hook; `wit-bindgen` and the SDK embed one in a section \
         `component-type`, which a linker may have removed"
    );
    Ok(component)
}

/// The hooks that a component exports, `on-step`.
fn hooks(component: &[u8]) -> Result<Vec<String>> {
    let DecodedWasm::Component(resolve, world) = decode(component)? else { return Ok(Vec::new()) };
    let exports = resolve.worlds[world].exports.keys().map(|key| resolve.name_world_key(key));
    let hook = |export: String| {
        let name = export.strip_prefix(PACKAGE)?.split('@').next()?;
        name.starts_with(HOOK).then(|| name.to_owned())
    };
    Ok(exports.filter_map(hook).collect())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| path.display().to_string())
}

fn write(file: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(file, bytes).with_context(|| file.display().to_string())
}

/// The source of a policy in a folder.
#[derive(Debug, PartialEq)]
enum Main {
    Rust { name: String },
    JavaScript(PathBuf),
    Python(PathBuf),
    C(PathBuf),
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
        if let Some(file) = module(folder, "js")? {
            return Ok(Self::JavaScript(file));
        }
        if let Some(file) = module(folder, "py")? {
            return Ok(Self::Python(file));
        }
        if let Some(file) = module(folder, "c")? {
            return Ok(Self::C(file));
        }
        bail!(
            "{}: has no Cargo.toml and no .js, .py or .c file; `steersman policy new` creates a folder",
            folder.display()
        );
    }

    fn name(&self) -> String {
        match self {
            Self::Rust { name } => name.clone(),
            Self::JavaScript(file) | Self::Python(file) | Self::C(file) => {
                let folder = file.parent().and_then(Path::file_name).unwrap_or_default();
                let folder = folder.to_string_lossy().into_owned();
                let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                // A module in Python cannot have the name of a policy with a `-`.
                if folder.replace('-', "_") == stem { folder } else { stem }
            }
        }
    }
}

/// The file of a folder with this extension; of several, the one with the folder's name.
fn module(folder: &Path, extension: &str) -> Result<Option<PathBuf>> {
    let mut files = files(folder, extension)?;
    let stem = |file: &PathBuf| Some(file.file_stem()?.to_str()?.to_owned());
    files.retain(|file| !stem(file).is_some_and(|stem| HELPERS.contains(&&*stem)));
    if files.len() > 1 {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let names = [name.replace('-', "_"), name];
        files.retain(|file| stem(file).is_some_and(|stem| names.contains(&stem)));
        ensure!(
            !files.is_empty(),
            "{}: has several .{extension} files; name that of the policy like the folder",
            folder.display()
        );
    }
    Ok(files.pop())
}

/// The files of a folder with this extension, sorted.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Compiles the crate in `folder` to a core module.
fn compile(folder: &Path, name: &str, target: &Path) -> Result<Vec<u8>> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(folder).args(["build", "--quiet", "--release", "--target", TARGET]);
    cargo.arg("--target-dir").arg(target);
    if folder.join("Cargo.lock").is_file() {
        cargo.arg("--locked");
    }
    // Panic messages contain paths; without remapping, the bytes would differ between machines.
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(dirs::home_dir()?.join(".cargo"))).unwrap_or_default();
    let mut flags = remap(&home, "/cargo");
    flags.push(" ");
    // One root for all policies of a repository: cargo recompiles everything if flags differ.
    let root = folder.ancestors().find(|folder| folder.join(".git").exists());
    flags.push(remap(root.unwrap_or(folder), "/source"));
    if let Toolchain::Debian { rustc, linker } = Toolchain::find()? {
        flags.push(" -Clinker=");
        flags.push(linker);
        flags.push(" -Clinker-flavor=wasm-ld");
        // Debian has only the source of the standard library for this target.
        cargo.arg("-Zbuild-std=std,panic_abort").env("RUSTC_BOOTSTRAP", "1").env("RUSTC", rustc);
    }
    cargo.env("RUSTFLAGS", flags);
    explained(cargo, "install Rust", unexported::in_cargo)?;
    let file = format!("{}.wasm", name.replace('-', "_"));
    read(&target.join(TARGET).join("release").join(file))
        .context("the crate made no module; its Cargo.toml needs [lib] crate-type = [\"cdylib\"]")
}

fn remap(from: &Path, to: &str) -> OsString {
    let mut flag = OsString::from("--remap-path-prefix=");
    flag.push(from);
    flag.push("=");
    flag.push(to);
    flag
}

/// A compiler from Rust to WebAssembly.
enum Toolchain {
    /// rustup's, with the target installed.
    Rustup,
    /// Debian's compiler, with the source of the standard library, and a linker.
    Debian { rustc: PathBuf, linker: PathBuf },
}

impl Toolchain {
    fn find() -> Result<Self> {
        let rustlib = |rustc: &str| {
            let sysroot = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
            let sysroot = String::from_utf8(sysroot.stdout).ok()?;
            Some(Path::new(sysroot.trim()).join("lib/rustlib"))
        };
        let on_path = rustlib("rustc");
        if on_path.as_ref().is_some_and(|lib| lib.join(TARGET).join("lib").is_dir()) {
            return Ok(Self::Rustup);
        }
        let rustc = "/usr/bin/rustc";
        let has_source =
            rustlib(rustc).is_some_and(|lib| lib.join("src/rust/library/Cargo.toml").is_file());
        match linker(on_path.as_deref()).filter(|_| has_source) {
            Some(linker) => Ok(Self::Debian { rustc: rustc.into(), linker }),
            None => bail!(
                "no compiler for WebAssembly: run `rustup target add {TARGET}`, or on Debian \
                 `apt-get install rustc-web rust-web-src lld-22`"
            ),
        }
    }
}

/// Debian's `lld-NN`, or else `rust-lld` of the toolchain on PATH.
fn linker(rustlib: Option<&Path>) -> Option<PathBuf> {
    let entries = |folder: &Path| {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
    };
    let is_lld = |path: &PathBuf| {
        let version = path.file_name().and_then(|name| name.to_str()?.strip_prefix("lld-"));
        version.is_some_and(|version| version.parse::<u32>().is_ok())
    };
    entries(Path::new("/usr/bin")).find(is_lld).or_else(|| {
        entries(rustlib?).map(|path| path.join("bin/rust-lld")).find(|path| path.is_file())
    })
}

fn javascript(folder: &Path, file: &Path, out: &Path) -> Result<()> {
    let mut tool = tool("componentize-js", folder);
    tool.current_dir(folder).arg(file).arg("--wit").arg(wit(folder)?);
    tool.args(["--world-name", WORLD]);
    // Each of these features imports WASI.
    tool.args(["--disable", "random", "stdio", "clocks", "http", "fetch-event"]);
    tool.arg("--out").arg(out);
    finish(tool, &install(folder, "package.json"))
}

fn python(folder: &Path, file: &Path, out: &Path) -> Result<()> {
    let mut tool = tool("componentize-py", folder);
    tool.current_dir(folder).arg("--quiet").arg("-d").arg(wit(folder)?).args(["-w", WORLD]);
    tool.arg("componentize").arg(file.file_stem().unwrap_or_default());
    // Imports of WASI become traps inside the component.
    tool.arg("--stub-wasi").arg("--output").arg(out);
    explained(tool, &install(folder, "requirements.txt"), unexported::in_python)
}

/// Compiles the .c files of a folder to a core module, with the header that its world gives.
fn c(folder: &Path) -> Result<Vec<u8>> {
    let bindings = folder.join("bindings");
    std::fs::create_dir_all(&bindings).with_context(|| bindings.display().to_string())?;
    let mut resolve = Resolve::default();
    let wit = wit(folder)?;
    let (package, _) = resolve.push_dir(&wit).with_context(|| wit.display().to_string())?;
    let world = resolve.select_world(&[package], Some(WORLD))?;
    let mut generated = Files::default();
    wit_bindgen_c::Opts::default().build().generate(&mut resolve, world, &mut generated)?;
    for (name, bytes) in generated.iter() {
        write(&bindings.join(name), bytes)?;
    }
    let module = bindings.join("module.wasm");
    // The wheel `ziglang` installs it as `python-zig`.
    let zig = ["python-zig", "zig"].map(|name| installed(name, folder));
    let zig = zig.into_iter().flatten().next().unwrap_or_else(|| "zig".into());
    let mut tool = Command::new(zig);
    tool.current_dir(folder).args(["cc", "-target", "wasm32-wasi", "-mexec-model=reactor", "-O2"]);
    tool.args(["-Wall", "-Wl,--strip-debug", "-I"]).arg(&bindings);
    tool.args(files(folder, "c")?).args(files(&bindings, "c")?).args(files(&bindings, "o")?);
    tool.arg("-o").arg(&module);
    finish(tool, &install(folder, "requirements.txt"))?;
    read(&module)
}

fn wit(folder: &Path) -> Result<PathBuf> {
    let wit = folder.join("wit");
    ensure!(
        wit.join("world.wit").is_file() && wit.join("policy.wit").is_file(),
        "{}: must contain the contract, policy.wit, and world.wit with `world {WORLD}`, which exports \
         the hooks of the policy; `steersman policy new` creates both",
        wit.display()
    );
    Ok(wit)
}

/// A tool that npm or venv installed in the folder or one above it, or else from PATH.
fn tool(name: &str, folder: &Path) -> Command {
    Command::new(installed(name, folder).unwrap_or_else(|| name.into()))
}

/// The file of such a tool, if there is one.
fn installed(name: &str, folder: &Path) -> Option<PathBuf> {
    let own = folder
        .ancestors()
        .flat_map(|folder| [folder.join("node_modules/.bin"), folder.join(".venv/bin")]);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = own.chain(std::env::split_paths(&path).collect::<Vec<_>>());
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// How to install the version of a tool that policies are tested with, which `file` pins.
fn install(folder: &Path, file: &str) -> String {
    let place = folder.display();
    let command = match file {
        "package.json" => "npm install".to_owned(),
        _ => format!("pip install -r {file}"),
    };
    if folder.join(file).is_file() {
        return format!("run `{command}` in {place}");
    }
    format!(
        "copy {file} from a folder that `steersman policy new` made to {place} and run `{command}` there"
    )
}

/// Says on stderr that a tool is about to run, which may take minutes and says nothing itself. Returns its name.
fn announced(command: &Command) -> String {
    let name = command.get_program().to_string_lossy().into_owned();
    let file = Path::new(&name).file_name().unwrap_or_default().display();
    eprintln!("building with {file}");
    name
}

/// Runs a tool with our stdout and stderr.
fn finish(mut command: Command, install: &str) -> Result<()> {
    let name = announced(&command);
    match command.status() {
        Ok(status) => ended(status, &name),
        Err(error) => Err(not_started(error, &name, install)),
    }
}

/// Runs a tool with our stdout. If it fails and `explain` knows why, the error is that explanation; otherwise what the
/// tool wrote to its stderr goes to ours.
fn explained(
    mut command: Command,
    install: &str,
    explain: fn(&str) -> Option<String>,
) -> Result<()> {
    let name = announced(&command);
    command.stdout(Stdio::inherit()).stderr(Stdio::piped());
    // A first build compiles the dependencies, and on Debian the standard library.
    let say = |seconds: u64| eprintln!("building with {name}: {seconds} s");
    let output = match patiently(PROGRESS, say, || command.output()) {
        Ok(output) => output,
        Err(error) => return Err(not_started(error, &name, install)),
    };
    let messages = String::from_utf8_lossy(&output.stderr);
    if !output.status.success()
        && let Some(problem) = explain(&messages)
    {
        bail!("{problem}");
    }
    eprint!("{messages}");
    ended(output.status, &name)
}

fn ended(status: ExitStatus, name: &str) -> Result<()> {
    ensure!(status.success(), "`{name}` failed ({status}); its messages are above");
    Ok(())
}

fn not_started(error: std::io::Error, name: &str, install: &str) -> anyhow::Error {
    match error.kind() {
        ErrorKind::NotFound => anyhow!("`{name}` is missing: {install}"),
        _ => anyhow::Error::new(error).context(name.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn the_language_of_a_folder_is_found_from_its_files() {
        let find = |files: &[(&str, &str)]| {
            let folder = folder(files);
            Main::find(folder.path()).map(|main| main.name()).map_err(|e| e.to_string())
        };
        assert_eq!(find(&[("Cargo.toml", "[package]\nname = \"a\"")]), Ok("a".into()));
        let lib = "[package]\nname = \"a\"\n[lib]\nname = \"b\"";
        assert_eq!(find(&[("Cargo.toml", lib), ("x.js", "")]), Ok("b".into()));
        assert_eq!(find(&[("x.js", ""), ("y.wasm", "")]), Ok("x".into()));
        assert_eq!(find(&[("y.py", "")]), Ok("y".into()));
        assert_eq!(find(&[("y.py", ""), ("steersman_policy.py", "")]), Ok("y".into()));
        assert_eq!(find(&[("y.js", ""), ("steersman-policy.js", "")]), Ok("y".into()));
        let several = find(&[("x.js", ""), ("y.js", "")]).unwrap_err();
        assert!(several.contains("has several .js files"), "{several}");
        assert_eq!(find(&[("z.c", ""), ("z.wasm", "")]), Ok("z".into()));
        let none = find(&[("x.txt", "")]).unwrap_err();
        assert!(none.contains("has no Cargo.toml and no .js, .py or .c file"), "{none}");
        let nameless = find(&[("Cargo.toml", "[package]")]).unwrap_err();
        assert!(nameless.contains("has no name"), "{nameless}");
    }

    #[test]
    fn of_several_modules_the_one_with_the_name_of_the_folder_is_the_policy() {
        let outer = folder(&[]);
        let inner = outer.path().join("brief");
        std::fs::create_dir(&inner).unwrap();
        for name in ["brief.py", "words.py"] {
            std::fs::write(inner.join(name), "").unwrap();
        }
        assert_eq!(Main::find(&inner).unwrap(), Main::Python(inner.join("brief.py")));
        let hyphen = outer.path().join("calm-dash");
        std::fs::create_dir(&hyphen).unwrap();
        for name in ["calm_dash.py", "words.py"] {
            std::fs::write(hyphen.join(name), "").unwrap();
        }
        assert_eq!(Main::find(&hyphen).unwrap().name(), "calm-dash");
    }

    #[test]
    fn an_error_about_a_missing_tool_says_how_to_install_it() {
        let missing = finish(Command::new("no-such-tool"), "run `pip install it`").unwrap_err();
        assert_eq!(missing.to_string(), "`no-such-tool` is missing: run `pip install it`");
        let of = |files| {
            let folder = folder(files);
            let text = install(folder.path(), "package.json");
            text.replace(&folder.path().display().to_string(), "FOLDER")
        };
        assert_eq!(of(&[("package.json", "{}")]), "run `npm install` in FOLDER");
        assert!(of(&[]).starts_with("copy package.json from"), "{}", of(&[]));
    }

    #[test]
    fn a_module_that_imports_wasi_is_refused_by_that_name() {
        let module = wat::parse_str(
            r#"(module (import "wasi_snapshot_preview1" "random_get" (func (param i32 i32) (result i32)))
                 (func (export "f") (drop (call 0 (i32.const 0) (i32.const 0)))))"#,
        );
        let error = componentize(&module.unwrap()).unwrap_err().to_string();
        assert!(error.contains("imports WASI"), "{error}");
    }

    /// It said success and wrote an empty component.
    #[test]
    fn a_module_without_a_world_is_refused() {
        let error = componentize(b"\0asm\x01\0\0\0").unwrap_err().to_string();
        assert!(error.contains("no world with a hook"), "{error}");
    }

    #[test]
    fn bytes_that_are_not_a_module_are_refused() {
        let error = componentize(b"\0asm\x01\0\0").unwrap_err();
        assert!(error.to_string().contains("is it built with the SDK?"), "{error:#}");
    }
}
