//! Creates files and folders for their owner only.
//!
//! What root creates in the folder of another user belongs to that user: root looks after the data folder of a
//! service, which must read and change what it finds there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Opens a file with `options`, or creates it. If it is new, only its owner can access it, and as root it gets the owner
/// of its folder; what it has stays.
///
/// # Errors
/// When it cannot be opened or created, or a link of another user would lead root there.
pub fn open_private(path: &Path, options: &OpenOptions) -> io::Result<File> {
    let mut new = options.clone();
    new.create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut new, 0o600);
    match new.open(path) {
        Ok(file) => {
            keep_owner(&file, &fs::metadata(folder_of(path))?)?;
            Ok(file)
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            check_link(path)?;
            // A link may lead to where no file is yet.
            new.create_new(false).create(true).truncate(false).open(path)
        }
        Err(error) => Err(error),
    }
}

/// Opens the file at `path` for locking, or creates it as [`open_private`] does.
///
/// # Errors
/// When it cannot be opened or created.
pub fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true);
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        // Root may open a file in the folder of another user, who must not choose by a link which one that is, nor
        // make it wait for the other end of a pipe.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        options.custom_flags(flags.bits().cast_signed());
    }
    open_private(path, &options)
}

/// Creates a folder, and those that it lies in, where they are missing. Only their owner can access them; as root each
/// gets the owner of the folder that it lies in.
///
/// # Errors
/// When one cannot be created.
pub fn create_private_folder(folder: &Path) -> io::Result<()> {
    let missing = folder.ancestors().take_while(|part| !part.as_os_str().is_empty());
    let missing: Vec<_> = missing.take_while(|part| !part.is_dir()).collect();
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    for part in missing.into_iter().rev() {
        match builder.create(part) {
            // Another process was faster, or the path leads back through `..`.
            Err(_) if part.is_dir() => {}
            created => {
                created?;
                give_to_owner_of_parent(part)?;
            }
        }
    }
    Ok(())
}

/// Gives a folder that root has just created the owner of the folder that it lies in.
///
/// # Errors
/// When it cannot be opened.
#[cfg(unix)]
pub fn give_to_owner_of_parent(folder: &Path) -> io::Result<()> {
    use rustix::fs::OFlags;
    use std::os::unix::fs::OpenOptionsExt;
    if !is_root() {
        return Ok(());
    }
    // The owner of its parent may have put a link in its place.
    let flags = OFlags::NOFOLLOW | OFlags::DIRECTORY;
    let opened =
        File::options().read(true).custom_flags(flags.bits().cast_signed()).open(folder)?;
    keep_owner(&opened, &fs::metadata(folder_of(folder))?)
}

/// Elsewhere there is no such owner.
///
/// # Errors
/// Never.
#[cfg(not(unix))]
pub fn give_to_owner_of_parent(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Gives a file that root has just created the owner of `old`: the file before it, or its folder.
#[cfg(unix)]
pub(crate) fn keep_owner(file: &File, old: &fs::Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};
    let created = file.metadata()?;
    // No other user may give files away.
    if created.uid() != 0 {
        return Ok(());
    }
    if (old.uid(), old.gid()) != (created.uid(), created.gid()) {
        // Root in a container may lack the right, or the owner be none that the container knows.
        let _ = fchown(file, Some(old.uid()), Some(old.gid()));
    }
    Ok(())
}

/// Elsewhere there is no such owner.
#[cfg(not(unix))]
pub(crate) fn keep_owner(_: &File, _: &fs::Metadata) -> io::Result<()> {
    Ok(())
}

/// Refuses a link of another user to root: whoever owns the folder would choose which file root writes.
///
/// # Errors
/// If `path` is one and this process is root's.
#[cfg(unix)]
pub(crate) fn check_link(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let is_foreign =
        fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink() && link.uid() != 0);
    if !is_foreign || !is_root() {
        return Ok(());
    }
    let problem = format!(
        "{} is a link of another user, which root does not follow; replace it by the file",
        path.display()
    );
    Err(io::Error::new(ErrorKind::PermissionDenied, problem))
}

/// Elsewhere there is no such owner.
///
/// # Errors
/// Never.
#[cfg(not(unix))]
pub(crate) fn check_link(_: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(unix)]
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The folder of a file; the working directory for a bare name.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};

    use super::*;

    /// Owner, group and mode of a file.
    fn owner(path: &Path) -> (u32, u32, u32) {
        let metadata = fs::metadata(path).unwrap();
        (metadata.uid(), metadata.gid(), metadata.permissions().mode() & 0o777)
    }

    /// Options to read and write.
    fn both() -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        options
    }

    #[test]
    fn what_is_new_is_private_and_what_exists_keeps_its_mode() {
        let data = tempfile::tempdir().unwrap();
        let folder = data.path().join("a/b");
        create_private_folder(&folder).unwrap();
        let path = folder.join("file");
        open_private(&path, &both()).unwrap();
        let modes = [&data.path().join("a"), &folder, &path].map(|path| owner(path).2);
        assert_eq!(modes, [0o700, 0o700, 0o600]);
        for (path, mode) in [(&folder, 0o750), (&path, 0o640)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            create_private_folder(&folder).unwrap();
            open_private(&folder.join("file"), &both()).unwrap();
            assert_eq!(owner(path).2, mode);
        }
        create_private_folder(&path).unwrap_err();
        create_private_folder(&data.path().join("a/c/../d")).unwrap();
        assert!(data.path().join("a/d").is_dir());
    }

    /// `sudo steersman ..` once, before the first start of a service, created databases and folders of root in its data
    /// folder: the service could not open them.
    #[test]
    fn what_root_creates_belongs_to_the_owner_of_the_folder() {
        let data = tempfile::tempdir().unwrap();
        if chown(data.path(), Some(65534), Some(65533)).is_err() {
            // Only root may give files away.
            return;
        }
        let folder = data.path().join("a/b");
        create_private_folder(&folder).unwrap();
        for folder in [folder.parent().unwrap(), &folder] {
            assert_eq!(owner(folder), (65534, 65533, 0o700), "{}", folder.display());
        }
        let (file, lock) = (folder.join("file"), folder.join("lock"));
        for _ in 0..2 {
            open_private(&file, &both()).unwrap();
            open_lock(&lock).unwrap();
            assert_eq!([owner(&file), owner(&lock)], [(65534, 65533, 0o600); 2]);
        }
        // What root has already stays root's.
        chown(&file, Some(0), Some(0)).unwrap();
        open_private(&file, &both()).unwrap();
        assert_eq!(owner(&file), (0, 0, 0o600));
    }

    /// The owner of a folder would choose by a link which file root opens.
    #[test]
    fn root_opens_no_file_through_another_users_link() {
        let data = tempfile::tempdir().unwrap();
        let (target, link) = (data.path().join("target"), data.path().join("link"));
        symlink(&target, &link).unwrap();
        open_private(&link, &both()).unwrap();
        assert!(target.is_file(), "an own link leads to a new file");
        // Only root may give links away.
        if lchown(&link, Some(65534), Some(65534)).is_ok() {
            let error = open_private(&link, &both()).unwrap_err().to_string();
            assert!(error.contains("is a link of another user"), "{error}");
        }
    }

    #[test]
    fn a_lock_is_opened_through_no_link_and_keeps_what_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("lock"), folder.path().join("link"));
        fs::write(&path, "kept").unwrap();
        open_lock(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
        symlink(&path, &link).unwrap();
        assert!(open_lock(&link).is_err());
    }
}
