//! Calls of redb, and what follows when they fail.

use std::any::Any;
use std::io::{self, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Why a call of redb failed, by what follows.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Fault {
    /// Another process has the file open: continue without it.
    #[error("in use by another process")]
    InUse,
    /// The file is damaged: replace it.
    #[error("{0}")]
    Damaged(String),
    /// The disk is full, not writable or failing: try again later.
    #[error("{0}")]
    Io(Arc<io::Error>),
}

impl From<redb::Error> for Fault {
    fn from(error: redb::Error) -> Self {
        use redb::Error as E;
        match error {
            E::DatabaseAlreadyOpen => Self::InUse,
            E::Io(io) => match io.kind() {
                // The file is shorter than redb expects.
                ErrorKind::UnexpectedEof | ErrorKind::InvalidData => Self::Damaged(io.to_string()),
                _ => Self::Io(Arc::new(io)),
            },
            E::PreviousIo | E::DatabaseClosed => Self::Io(Arc::new(io::Error::other(error))),
            _ => Self::Damaged(error.to_string()),
        }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

/// Runs `f`. A panic means a damaged file: redb trusts its pages between repairs.
///
/// # Errors
/// [`Fault`] if `f` fails or panics.
pub fn guarded<T>(f: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, Fault> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(Fault::from),
        Err(panic) => Err(Fault::Damaged(format!("redb panicked: {}", message(&*panic)))),
    }
}

/// Closes a database, which may itself fail on a damaged file.
pub fn close(database: Option<redb::Database>) {
    let _ = guarded(|| {
        drop(database);
        Ok(())
    });
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_and_a_short_file_mean_damage_and_a_full_disk_does_not() {
        let panicked = guarded::<()>(|| panic!("page {}", 7)).unwrap_err();
        assert_eq!(panicked.to_string(), "redb panicked: page 7");
        let failed = |kind: ErrorKind| Fault::from(redb::Error::Io(kind.into()));
        assert!(matches!(failed(ErrorKind::UnexpectedEof), Fault::Damaged(_)));
        assert!(matches!(failed(ErrorKind::StorageFull), Fault::Io(_)));
        assert!(matches!(Fault::from(redb::Error::DatabaseAlreadyOpen), Fault::InUse));
    }
}
