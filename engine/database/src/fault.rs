//! Calls of redb, and what follows when they fail.

use std::any::Any;
use std::io::{self, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

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

/// Time in which a process that ends, or makes room for this one, closes its files.
const CLOSING: Duration = Duration::from_secs(3);

/// Pause before another attempt to open a file.
const PAUSE: Duration = Duration::from_millis(50);

/// Calls `open` until it returns an error other than that another process has the file open (`is_in_use`), or a value. Gives up
/// after three seconds.
///
/// # Errors
/// The errors of `open`.
pub fn patiently<T, E>(
    mut open: impl FnMut() -> Result<T, E>,
    is_in_use: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let end = Instant::now() + CLOSING;
    loop {
        match open() {
            Err(error) if is_in_use(&error) && Instant::now() < end => thread::sleep(PAUSE),
            result => return result,
        }
    }
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

    /// A server beside a command that made room for it had no file for its whole life.
    #[test]
    fn a_file_that_is_closed_soon_is_waited_for_and_other_errors_are_not() {
        let attempts = |error: fn(u32) -> Option<&'static str>| {
            let mut count = 0;
            let open = || {
                count += 1;
                error(count).map_or(Ok(count), Err)
            };
            (patiently(open, |error| *error == "in use"), count)
        };
        assert_eq!(attempts(|count| (count < 3).then_some("in use")), (Ok(3), 3));
        assert_eq!(attempts(|_| Some("damaged")), (Err("damaged"), 1));
    }
}
