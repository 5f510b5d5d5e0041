//! `steersman policy keygen` and `steersman policy bundle`: a policy with what belongs to it, as one signed file.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use minisign::{KeyPair, PublicKey, SecretKey, SecretKeyBox};
use steersman_policy_host::{Bundle, Component, Host, Trust, check_golden, pack};

/// Variable of the environment with the password of a secret key.
const PASSWORD: &str = "STEERSMAN_KEY_PASSWORD";

/// Where the keys go.
#[derive(Args)]
pub struct Keygen {
    /// File of the secret key; the public key is written beside it, with the extension .pub. If
    /// STEERSMAN_KEY_PASSWORD is set, it encrypts the secret key
    #[arg(value_name = "FILE", default_value = "steersman.key")]
    file: PathBuf,
}

/// What goes into a bundle.
#[derive(Args)]
pub struct Options {
    /// The component NAME.wasm. Beside it must be its golden file NAME.jsonl, the schema of its parameters
    /// NAME.params.toml (empty for a policy without parameters) and README.md
    #[arg(value_name = "NAME.wasm")]
    file: PathBuf,
    /// The bundle [default: NAME.steer beside the component]
    #[arg(short, long, value_name = "NAME.steer")]
    out: Option<PathBuf>,
    /// Secret key that signs it, of `steersman policy keygen` or minisign. Its password, if it has one, is read
    /// from STEERSMAN_KEY_PASSWORD. Without a key the bundle is unsigned
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

/// Writes a pair of keys and prints the line for the configuration of a server.
///
/// # Errors
/// When a file exists already or cannot be written.
pub fn keygen(Keygen { file }: Keygen, out: &mut impl Write) -> Result<()> {
    let password = std::env::var(PASSWORD).ok().filter(|password| !password.is_empty());
    let pair = match password {
        Some(password) => KeyPair::generate_encrypted_keypair(Some(password))?,
        None => KeyPair::generate_unencrypted_keypair()?,
    };
    let public_file = file.with_extension("pub");
    ensure!(!public_file.exists(), "{}: already exists", public_file.display());
    let secret = pair.sk.to_box(Some("secret key of steersman policy"))?.into_string();
    write_new(&file, secret.as_bytes())?;
    write_new(&public_file, pair.pk.to_box()?.into_string().as_bytes())?;
    writeln!(out, "{}: the secret key; keep it to yourself", file.display())?;
    writeln!(out, "{}: the public key. In the configuration of a server:", public_file.display())?;
    writeln!(out, "  [policy]\n  trusted_keys = [\"{}\"]", pair.pk.to_base64())?;
    Ok(())
}

/// Writes a file that only its owner can read and that does not exist yet.
fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path).with_context(|| path.display().to_string())?;
    file.write_all(bytes).with_context(|| path.display().to_string())
}

/// Tests a policy, writes its bundle, and prints its size and signer.
///
/// # Errors
/// When a file is missing, the policy is refused, its golden file does not hold, or the key cannot be used.
pub fn run(options: Options, host: &Host, out: &mut impl Write) -> Result<()> {
    let Options { file, out: target, key } = options;
    let stem = file.file_stem().and_then(|stem| stem.to_str());
    let name = stem.with_context(|| format!("{}: has no name", file.display()))?;
    let part = |file: PathBuf, what: &str| match fs::read(&file) {
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(anyhow!("{}: {error}; a bundle has {what}", file.display())),
    };
    let component = part(file.clone(), "a component")?;
    let golden = part(file.with_extension("jsonl"), "a golden file")?;
    let schema = part(
        file.with_extension("params.toml"),
        "a schema of its parameters, which is an empty file for a policy without any",
    )?;
    let readme = part(file.with_file_name("README.md"), "a README.md that says what it does")?;
    let archive = pack(name, [&component, &golden, &schema, &readme]);
    // What a server does with it, but for the keys.
    let opened = Bundle::open(name, archive.clone(), &Trust::default());
    let Bundle { component, golden, .. } = opened.map_err(|problem| anyhow!(problem))?;
    let cases = check_golden(&Component::load(host, name, &component)?.into(), &golden)?;
    let target = target.unwrap_or_else(|| file.with_extension("steer"));
    ensure!(
        target.file_stem() == file.file_stem(),
        "{}: the name of a bundle is that of its policy, `{name}.steer`: servers compare them",
        target.display()
    );
    let (bytes, signer) = match &key {
        None => (archive, "unsigned".to_owned()),
        Some(key) => sign(key, name, &archive)?,
    };
    fs::write(&target, &bytes).with_context(|| target.display().to_string())?;
    let target = target.display();
    writeln!(out, "{target}: {} bytes, {cases} cases pass, {signer}", bytes.len())?;
    Ok(())
}

fn sign(file: &Path, name: &str, archive: &[u8]) -> Result<(Vec<u8>, String)> {
    let key = secret_key(file).with_context(|| file.display().to_string())?;
    let public = PublicKey::from_secret_key(&key)?;
    let comment = format!("steersman policy {name}");
    let signature = minisign::sign(None, &key, archive, Some(&comment), Some(&comment))?;
    let signature = signature.into_string();
    let bytes = [signature.trim_end().as_bytes(), b"\n", archive].concat();
    Ok((bytes, format!("signed by {}", public.to_base64())))
}

fn secret_key(file: &Path) -> Result<SecretKey> {
    let text = fs::read_to_string(file)?;
    let sealed = || SecretKeyBox::from_string(&text).context("is not a secret key of minisign");
    if let Ok(key) = sealed()?.into_unencrypted_secret_key() {
        return Ok(key);
    }
    let Ok(password) = std::env::var(PASSWORD) else {
        bail!("the key has a password; set {PASSWORD}");
    };
    sealed()?
        .into_secret_key(Some(password))
        .context("the password does not fit, or the key is damaged")
}
