//! The log as bytes: one line of JSON for each entry.

use std::cell::RefCell;
use std::io::{BufRead, Write};
use std::rc::Rc;

use super::log::{Entry, Log};
use crate::error::{Error, Result};

/// A log whose entries are written to all of `outputs`, each of which another rank reads with [`read`].
pub fn write_to(outputs: Vec<Box<dyn Write + Send>>) -> Rc<Log> {
    let outputs = RefCell::new(outputs);
    Log::new(move |entry| {
        let mut line = serde_json::to_vec(entry).expect("an entry has string keys only");
        line.push(b'\n');
        let mut outputs = outputs.borrow_mut();
        outputs
            .iter_mut()
            .all(|output| output.write_all(&line).and_then(|()| output.flush()).is_ok())
    })
}

/// The entries in `input`, until it ends.
///
/// # Errors
/// Each [`Error::Array`] is one of a line that cannot be read, after which there are no more.
pub fn read(input: impl BufRead) -> impl Iterator<Item = Result<Entry>> {
    let mut has_failed = false;
    input.lines().map_while(move |line| {
        if has_failed {
            return None;
        }
        let entry = line
            .map_err(|error| error.to_string())
            .and_then(|line| serde_json::from_str(&line).map_err(|error| error.to_string()));
        has_failed = entry.is_err();
        Some(
            entry
                .map_err(|problem| Error::Array(format!("the log of ranks is damaged: {problem}"))),
        )
    })
}

#[cfg(test)]
mod tests {
    use std::io::{BufReader, pipe};

    use super::*;
    use crate::ranks::{Layers, Mirror, Operation, Rows};

    #[test]
    fn entries_are_read_as_they_were_written() {
        let (reader, writer) = pipe().unwrap();
        let log = write_to(vec![Box::new(writer)]);
        let cache = Mirror::new(&log, |new| Operation::NewCache { new });
        let rows = Rows { spans: vec![(0, 17, 2)], tokens: Some(vec![1, u32::MAX]) };
        let skip = vec![3];
        cache.note(|_| Operation::Forward(rows.clone(), Layers { exit: None, skip: skip.clone() }));
        drop(cache);
        log.check().unwrap();
        drop(log);
        let entries: Vec<Entry> = read(BufReader::new(reader)).map(Result::unwrap).collect();
        let operations: Vec<Operation> = entries.into_iter().map(|entry| entry.operation).collect();
        let pass = Operation::Forward(rows, Layers { exit: None, skip });
        assert_eq!(
            operations,
            [Operation::NewCache { new: 0 }, pass, Operation::Drop { object: 0 }]
        );
    }

    #[test]
    fn what_nobody_reads_breaks_the_log_and_what_is_no_entry_ends_it() {
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let log = write_to(vec![Box::new(writer)]);
        log.note(Operation::MarkDraft { cache: 0 });
        assert!(log.check().unwrap_err().to_string().contains("another rank has ended"));
        let entries: Vec<_> = read(&b"{\"sequence\": 0}\n{}\n"[..]).collect();
        assert_eq!(entries.len(), 1);
        let error = entries[0].as_ref().unwrap_err().to_string();
        assert!(error.contains("the log of ranks is damaged"), "{error}");
    }
}
