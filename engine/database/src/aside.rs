//! Damaged files, renamed to `NAME.damaged-N` so that they can be examined.

use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{fs, io};

use crate::file::with_suffix;

/// Most files set aside; the oldest is replaced then.
const MOST: u32 = 3;

/// Renames a file that cannot be used, so that a new one can be created and this one be examined.
/// Returns its new path.
///
/// Two processes that meet the same file at the same moment may set aside each other's new one:
/// both then begin with an empty one.
///
/// # Errors
/// When it cannot be renamed.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let free = (1..=MOST).map(|n| name(path, n)).find(|aside| !aside.exists());
    let aside = free.or_else(|| files_set_aside(path).into_iter().next());
    let aside = aside.unwrap_or_else(|| name(path, MOST));
    fs::rename(path, &aside).map(|()| aside)
}

/// The files that [`set_aside`] renamed, the oldest first.
pub fn files_set_aside(path: &Path) -> Vec<PathBuf> {
    let changed = |aside: PathBuf| -> Option<(SystemTime, PathBuf)> {
        let metadata = fs::symlink_metadata(&aside).ok()?;
        metadata.is_file().then_some((metadata.modified().ok()?, aside))
    };
    let mut found: Vec<_> = (1..=MOST).filter_map(|n| changed(name(path, n))).collect();
    found.sort();
    found.into_iter().map(|(_, aside)| aside).collect()
}

fn name(path: &Path, n: u32) -> PathBuf {
    with_suffix(path, &format!(".damaged-{n}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn at_most_three_files_are_set_aside_and_the_oldest_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.redb");
        for n in 0..5_u64 {
            fs::write(&path, n.to_string()).unwrap();
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + n);
            fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
            let aside = set_aside(&path).unwrap();
            assert_eq!(fs::read_to_string(aside).unwrap(), n.to_string());
        }
        let texts =
            files_set_aside(&path).into_iter().map(|aside| fs::read_to_string(aside).unwrap());
        assert_eq!(texts.collect::<Vec<_>>(), ["2", "3", "4"]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
        set_aside(&path).unwrap_err();
    }
}
