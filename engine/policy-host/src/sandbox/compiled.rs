//! Compiled components on disk, so that a start need not compile them again.
//!
//! Compiled components are machine code: a flipped bit crashes the process or changes decisions. So each
//! file begins with a keyed digest (HMAC-SHA256) over its name and content, which is checked before
//! wasmtime sees the content. The name is a digest over everything that the content depends on. The key
//! is generated once, in the same folder. The digest detects damage, and files from elsewhere; whoever
//! can read the key can already replace the server's own files.
//!
//! A damaged file is removed with a warning, and its component is compiled again. Files together take at
//! most [`MOST_BYTES`]; least recently used ones are removed.
//!
//! # Why
//! wasmtime's own cache loads what it finds: of 400 files with one flipped bit 78 crashed the server, and
//! 7 changed decisions without notice.

#![allow(
    unsafe_code,
    reason = "machine code is loaded, from the compiler or after its digest was checked"
)]

use std::fs::{self, File, Metadata};
use std::hash::{Hash, Hasher};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

use super::compile::Failed;
use crate::file;

/// Bytes of all files; a component with a JavaScript engine takes 30 MB.
const MOST_BYTES: u64 = 512 << 20;

/// Name of the file with the key.
const KEY: &str = "key";

/// A folder of compiled components.
pub struct Compiled {
    folder: PathBuf,
    key: [u8; 32],
}

impl Compiled {
    /// Opens or creates the folder and its key, both accessible to their owner only.
    ///
    /// # Errors
    /// If they cannot be created or read, or others have access to them.
    pub fn open(folder: &Path) -> io::Result<Self> {
        if let Some(parent) = folder.parent() {
            file::create_private_folder(parent)?;
        }
        // As root, `create_private_folder` would give the folder away, and with it the code that root runs.
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        match builder.create(folder) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => created?,
        }
        check_private(folder, &fs::metadata(folder)?)?;
        let path = folder.join(KEY);
        let mut key = [0; 32];
        let read = steersman_files::open(&path).and_then(|mut file| {
            check_private(&path, &file.metadata()?)?;
            file.read_exact(&mut key)
        });
        match read {
            Ok(()) => {}
            // The key is missing or truncated, so existing compiled files cannot be verified.
            Err(error)
                if [ErrorKind::NotFound, ErrorKind::UnexpectedEof].contains(&error.kind()) =>
            {
                getrandom::fill(&mut key).map_err(io::Error::other)?;
                file::replace_private(&path, &key)?;
            }
            Err(error) => return Err(error),
        }
        Ok(Self { folder: folder.into(), key })
    }

    /// The component with this digest, from its file or else from `compile`, which returns machine code.
    ///
    /// # Errors
    /// The errors of `compile`. Errors of the disk are logged.
    pub fn component(
        &self,
        engine: &Engine,
        sha256: &[u8; 32],
        compile: impl FnOnce() -> Result<Vec<u8>, Failed>,
    ) -> Result<Component, Failed> {
        let path = self.folder.join(name(engine, sha256));
        if let Some(component) = self.load(engine, &path) {
            return Ok(component);
        }
        let code = compile()?;
        let component = from_compiler(engine, &code)?;
        if let Err(error) = self.save(&path, &code).and_then(|()| self.evict()) {
            let path = path.display();
            tracing::warn!(%path, %error, "compiled component not saved");
        }
        Ok(component)
    }

    /// Returns true if there is a file for the component with this digest.
    pub fn has(&self, engine: &Engine, sha256: &[u8; 32]) -> bool {
        self.folder.join(name(engine, sha256)).is_file()
    }

    fn load(&self, engine: &Engine, path: &Path) -> Option<Component> {
        let loaded = file::read(path, MOST_BYTES as usize).and_then(|file| {
            let Some(file) = file else { return Ok(None) };
            let intact = |(digest, content): &(&[u8], &[u8])| {
                self.mac(path, content).verify_slice(digest).is_ok()
            };
            let content = file.split_at_checked(32).filter(intact).map(|(_, content)| content);
            let content = content.ok_or_else(|| format!("{} is damaged", path.display()))?;
            // SAFETY: the digest shows that `content` is what `serialize` returned to a holder of the
            // key, for an engine with the version and the settings that the name stands for.
            let component = unsafe { Component::deserialize(engine, content) };
            component.map(Some).map_err(|error| format!("{}: {error}", path.display()))
        });
        match loaded {
            Ok(component) => {
                // The time of modification is that of the last use.
                let file = File::options().append(true).open(path);
                let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
                component
            }
            Err(error) => {
                tracing::warn!(error, "compiled component dropped; compiling again");
                let _ = fs::remove_file(path);
                None
            }
        }
    }

    fn save(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let digest = self.mac(path, content).finalize().into_bytes();
        file::replace_private(path, &[&digest, content].concat())
    }

    /// Removes the least recently used files beyond the limit, temporary ones of a killed process too.
    fn evict(&self) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_file() && entry.file_name() != KEY {
                files.push((metadata.modified()?, metadata.len(), entry.path()));
            }
        }
        files.sort();
        let mut bytes: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, size, path) in files {
            if bytes <= MOST_BYTES {
                break;
            }
            fs::remove_file(path)?;
            bytes -= size;
        }
        Ok(())
    }

    fn mac(&self, path: &Path, content: &[u8]) -> Hmac<Sha256> {
        let name = path.file_name().expect("it was joined").as_encoded_bytes();
        // The name has a fixed length, so the two cannot be confused.
        Hmac::new_from_slice(&self.key)
            .expect("a key may have any length")
            .chain_update(name)
            .chain_update(content)
    }
}

/// A component of machine code that [`super::compile::Compiler`] has just returned.
///
/// # Errors
/// If it was compiled by another version or with other settings.
pub fn from_compiler(engine: &Engine, code: &[u8]) -> Result<Component, Failed> {
    // SAFETY: `code` is what `precompile_component` returned, in this process or in a child of it that runs
    // the same program. wasmtime compares version and settings.
    let component = unsafe { Component::deserialize(engine, code) };
    component.map_err(|error| {
        Failed::for_now(format!("cannot be loaded after it was compiled: {error}"))
    })
}

/// Name of the file of a component: a digest over its own digest, this crate's version, and wasmtime's
/// version and settings.
fn name(engine: &Engine, sha256: &[u8; 32]) -> String {
    struct Hashed(Sha256);

    impl Hasher for Hashed {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }

        fn finish(&self) -> u64 {
            unreachable!("only the SHA-256 is used")
        }
    }

    let mut hashed = Hashed(Sha256::new());
    (sha256, env!("CARGO_PKG_VERSION")).hash(&mut hashed);
    engine.precompile_compatibility_hash().hash(&mut hashed);
    hex::encode(hashed.0.finalize())
}

/// Refuses what others can read or write, or own: they could put their own machine code there.
fn check_private(path: &Path, metadata: &Metadata) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
        let problem = match metadata.permissions().mode() & 0o077 {
            0 if is_own => return Ok(()),
            0 => "belongs to another user; remove it, or run this as that user",
            _ => "is accessible to others; remove it, or change its mode",
        };
        let problem = format!("{} {problem}", path.display());
        Err(io::Error::new(ErrorKind::PermissionDenied, problem))
    }
    #[cfg(not(unix))]
    {
        let _ = (path, metadata);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A component without content.
    const EMPTY: &[u8] = b"\0asm\x0d\0\x01\0";

    fn compile(compiled: &Compiled, sha256: u8) -> PathBuf {
        let engine = Engine::default();
        let compile = || Ok(engine.precompile_component(EMPTY).unwrap());
        compiled.component(&engine, &[sha256; 32], compile).unwrap();
        compiled.folder.join(name(&engine, &[sha256; 32]))
    }

    #[cfg(unix)]
    #[test]
    fn folder_and_files_are_private_and_others_are_refused() {
        use std::os::unix::fs::PermissionsExt;
        let data = tempfile::tempdir().unwrap();
        let folder = data.path().join("compiled");
        let file = compile(&Compiled::open(&folder).unwrap(), 1);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let modes = [&folder, &folder.join(KEY), &file].map(|path| mode(path));
        assert_eq!(modes, [0o700, 0o600, 0o600]);
        for (path, own) in [(&folder, 0o700), (&folder.join(KEY), 0o600)] {
            fs::set_permissions(path, fs::Permissions::from_mode(own | 0o040)).unwrap();
            let error = Compiled::open(&folder).err().unwrap().to_string();
            assert!(error.starts_with(&path.display().to_string()), "{error}");
            assert_eq!(mode(path), own | 0o040);
            fs::set_permissions(path, fs::Permissions::from_mode(own)).unwrap();
        }
    }

    /// Root ran the machine code that the user of a service had compiled, or put there.
    #[cfg(unix)]
    #[test]
    fn root_runs_no_code_of_another_users_folder_and_gives_its_own_away_to_nobody() {
        use std::os::unix::fs::{MetadataExt, chown};
        let data = tempfile::tempdir().unwrap();
        let folder = data.path().join("compiled");
        if chown(data.path(), Some(65534), Some(65533)).is_err() {
            // Only root may give files away.
            return;
        }
        let file = compile(&Compiled::open(&folder).unwrap(), 1);
        for path in [&folder, &folder.join(KEY), &file] {
            assert_eq!(fs::metadata(path).unwrap().uid(), 0, "{}", path.display());
        }
        chown(&folder, Some(65534), Some(65533)).unwrap();
        let error = Compiled::open(&folder).err().unwrap().to_string();
        assert!(error.contains("compiled belongs to another user"), "{error}");
    }

    #[test]
    fn a_file_is_used_only_under_its_name_and_with_its_key() {
        let data = tempfile::tempdir().unwrap();
        let open = || Compiled::open(&data.path().join("compiled")).unwrap();
        let (one, two) = (compile(&open(), 1), compile(&open(), 2));
        let engine = Engine::default();
        assert!(open().load(&engine, &one).is_some());
        fs::copy(&one, &two).unwrap();
        assert!(open().load(&engine, &two).is_none());
        assert!(!two.exists(), "it is removed");
        fs::write(data.path().join("compiled").join(KEY), [7; 32]).unwrap();
        assert!(open().load(&engine, &one).is_none());
        compile(&open(), 1);
        assert!(open().load(&engine, &one).is_some());
        let other = Engine::new(wasmtime::Config::new().consume_fuel(true)).unwrap();
        assert_ne!(name(&other, &[1; 32]), name(&engine, &[1; 32]));
    }

    #[test]
    fn the_least_recently_used_files_are_removed() {
        let data = tempfile::tempdir().unwrap();
        let compiled = Compiled::open(&data.path().join("compiled")).unwrap();
        let file = compile(&compiled, 1);
        for (name, days) in [("old", 3), ("new", 1)] {
            let file = File::create(compiled.folder.join(name)).unwrap();
            file.set_len(MOST_BYTES / 2).unwrap();
            let days = std::time::Duration::from_secs(days * 86_400);
            file.set_modified(SystemTime::now() - days).unwrap();
        }
        compiled.evict().unwrap();
        let exists = |name: &str| compiled.folder.join(name).exists();
        assert_eq!((exists("old"), exists("new"), exists(KEY)), (false, true, true));
        assert!(file.exists());
    }
}
