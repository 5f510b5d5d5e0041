//! Whose file lies at a path, how it is created, and what it takes on disk.
//!
//! Never changes mode, name or content of a file that exists.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use redb::{MultimapTableHandle, ReadableDatabase, TableHandle};

/// First bytes of every file of redb.
const MAGIC: &[u8] = b"redb\x1a\x0a\xa9\x0d\x0a";

/// Bytes of redb's header.
const HEADER_BYTES: u64 = 4096;

/// Bytes of a file that are searched for marks.
const SEARCHED_BYTES: u64 = 64 << 20;

/// Whose file lies at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// Nobody's: there is no file, or an empty one.
    Nobody,
    /// Ours: a file of redb with a mark.
    Ours,
    /// A file of redb without a mark: its [`tables`] tell.
    Unknown,
    /// Ours, with a damaged header: a file with a mark that is not one of redb.
    Damaged,
    /// A file of zeros behind the header, and where redb's header has its first bytes, which redb
    /// writes last: one of ours whose creation was cut short, if it is small.
    Unwritten,
    /// Another program's.
    Foreign,
}

/// Whose file lies at `path`. `marks` are byte strings that every file of ours has.
///
/// # Errors
/// When it cannot be read, or is not a regular file.
pub fn owner(path: &Path, marks: &[&[u8]]) -> io::Result<Owner> {
    let mut file = match steersman_files::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Owner::Nobody),
        file => file?,
    };
    let mut head = Vec::new();
    (&mut file).take(HEADER_BYTES).read_to_end(&mut head)?;
    if head.is_empty() {
        return Ok(Owner::Nobody);
    }
    let is_database = head.starts_with(&MAGIC[..MAGIC.len().min(head.len())]);
    let is_blank = head.iter().take(MAGIC.len()).all(|byte| *byte == 0);
    let contents = Contents::read(file, marks)?;
    Ok(match (is_database, contents.has_mark) {
        (true, true) => Owner::Ours,
        (true, false) => Owner::Unknown,
        (false, true) => Owner::Damaged,
        (false, false) if is_blank && contents.is_zero => Owner::Unwritten,
        (false, false) => Owner::Foreign,
    })
}

/// What lies behind the header.
struct Contents {
    has_mark: bool,
    is_zero: bool,
}

impl Contents {
    /// Reads `rest` as far as it is searched.
    fn read(rest: File, marks: &[&[u8]]) -> io::Result<Self> {
        let mut rest = rest.take(SEARCHED_BYTES);
        let mut contents = Self { has_mark: false, is_zero: true };
        let overlap = marks.iter().map(|mark| mark.len()).max().unwrap_or(0);
        let mut window = Vec::new();
        while !contents.has_mark && (&mut rest).take(1 << 20).read_to_end(&mut window)? > 0 {
            contents.is_zero &= window.iter().all(|byte| *byte == 0);
            contents.has_mark =
                marks.iter().any(|mark| window.windows(mark.len()).any(|bytes| bytes == *mark));
            window.drain(..window.len().saturating_sub(overlap));
        }
        Ok(contents)
    }
}

/// Names of all tables.
///
/// # Errors
/// The errors of redb.
pub fn tables(database: &impl ReadableDatabase) -> Result<Vec<String>, redb::Error> {
    let read = database.begin_read()?;
    let mut names: Vec<String> = read.list_tables()?.map(|table| table.name().to_owned()).collect();
    names.extend(read.list_multimap_tables()?.map(|table| table.name().to_owned()));
    Ok(names)
}

/// Opens the file, or creates it and its folders for their owner only: the files of the server hold
/// parts of conversations. What exists keeps its mode.
///
/// # Errors
/// When it cannot be opened or created.
pub fn open_private(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        steersman_files::create_private_folder(folder)?;
    }
    steersman_files::open_private(path, OpenOptions::new().read(true).write(true))
}

/// Bytes that the file takes. redb extends it ahead of need and leaves holes, so its length may be
/// twice as much.
pub fn size_on_disk(path: &Path) -> u64 {
    let Ok(metadata) = fs::metadata(path) else { return 0 };
    #[cfg(unix)]
    return std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
    #[cfg(not(unix))]
    return metadata.len();
}

/// The path with `suffix` behind its last component.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use redb::{Builder, TableDefinition};

    use super::*;

    const MARK: &[u8] = b"a table of ours";

    fn database(path: &Path, table: &str) -> Vec<u8> {
        let database = Builder::new().create(path).unwrap();
        let write = database.begin_write().unwrap();
        let table = TableDefinition::<u8, u8>::new(table);
        write.open_table(table).unwrap().insert(1, 2).unwrap();
        write.commit().unwrap();
        drop(database);
        fs::read(path).unwrap()
    }

    #[test]
    fn the_owner_of_a_file_shows_in_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert_eq!(owner(&path, &[MARK]).unwrap(), Owner::Nobody);
        let ours = database(&folder.path().join("ours"), "a table of ours");
        let other = database(&folder.path().join("other"), "someone's");
        let headless = [&[b'x'; 64], &ours[64..]].concat();
        let cases = [
            (&b""[..], Owner::Nobody),
            (&ours, Owner::Ours),
            (&ours[..5], Owner::Unknown),
            (&other, Owner::Unknown),
            (&headless, Owner::Damaged),
            (&[0; 5000], Owner::Unwritten),
            (b"SQLite format 3", Owner::Foreign),
            (b"\0\0\0\0\0\0\0\0\0 text", Owner::Unwritten),
        ];
        for (n, (bytes, expected)) in cases.into_iter().enumerate() {
            fs::write(&path, bytes).unwrap();
            assert_eq!(owner(&path, &[MARK]).unwrap(), expected, "case {n}");
            assert_eq!(fs::read(&path).unwrap(), bytes, "case {n}");
        }
        owner(folder.path(), &[MARK]).unwrap_err();
    }

    #[test]
    fn tables_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        database(&path, "someone's");
        let opened = Builder::new().open_read_only(&path).unwrap();
        assert_eq!(tables(&opened).unwrap(), ["someone's"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_new_file_and_its_folder_are_private_and_what_exists_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data").join("file");
        open_private(&path).unwrap();
        assert_eq!((mode(path.parent().unwrap()), mode(&path)), (0o700, 0o600));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        open_private(&path).unwrap();
        assert_eq!(mode(&path), 0o640);
    }
}
