//! Runs a query that a model wrote, on a database in memory that the query can only read.

use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, Result};

use crate::scenario::Verdict;

/// Instructions of SQLite between two looks at their number.
const LOOK: i32 = 1_000;
/// Most instructions of a query, in thousands.
const LOOKS: u32 = 1_000;
/// Most rows that are compared.
const ROWS: usize = 1_000;

/// Right if `query` gives the rows of `reference`, in its order if `is_ordered`.
pub fn check(schema: &str, query: &str, reference: &str, is_ordered: bool) -> Verdict {
    let rows = |query: &str| run(schema, query).map(|rows| sorted_unless(is_ordered, rows));
    let expected = rows(reference).expect("the reference query is ours");
    let found = rows(query).map_err(|error| format!("the query fails: {error}"))?;
    if found == expected {
        Ok(())
    } else {
        Err(format!("the query gives {found:?} instead of {expected:?}"))
    }
}

fn sorted_unless(is_ordered: bool, mut rows: Vec<Vec<String>>) -> Vec<Vec<String>> {
    if !is_ordered {
        rows.sort();
    }
    rows
}

/// The rows of a query, as text.
fn run(schema: &str, query: &str) -> Result<Vec<Vec<String>>> {
    let mut database = Connection::open_in_memory()?;
    database.execute_batch(schema)?;
    // Statements that write, attach files or change settings are refused when they are prepared.
    database.authorizer(Some(|context: AuthContext<'_>| match context.action {
        AuthAction::Select
        | AuthAction::Read { .. }
        | AuthAction::Function { .. }
        | AuthAction::Recursive => Authorization::Allow,
        _ => Authorization::Deny,
    }))?;
    let mut looks = 0;
    database.progress_handler(
        LOOK,
        Some(move || {
            looks += 1;
            looks > LOOKS
        }),
    )?;
    // Fails if there is more than one statement.
    let mut statement = database.prepare(query.trim().trim_end_matches(';'))?;
    let columns = statement.column_count();
    let mut rows = statement.query([])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let cells = (0..columns).map(|column| Ok(text(row.get_ref(column)?)));
        found.push(cells.collect::<Result<_>>()?);
        if found.len() == ROWS {
            break;
        }
    }
    Ok(found)
}

fn text(value: ValueRef<'_>) -> String {
    match value {
        ValueRef::Null => "NULL".into(),
        ValueRef::Integer(number) => number.to_string(),
        // 7.0 and 7 are equal to who asked.
        ValueRef::Real(number) => number.to_string(),
        ValueRef::Text(text) | ValueRef::Blob(text) => String::from_utf8_lossy(text).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEMA: &str = "CREATE TABLE people (name TEXT, age INTEGER);
        INSERT INTO people VALUES ('Anna', 30), ('Boris', 50), ('Clara', 40);";
    const REFERENCE: &str = "SELECT name FROM people WHERE age > 35 ORDER BY name";

    #[test]
    fn other_queries_with_equal_rows_are_right() {
        let query = "select p.name from people p where age >= 40;";
        assert_eq!(check(SCHEMA, query, REFERENCE, false), Ok(()));
        assert_eq!(
            check(SCHEMA, "SELECT name FROM people WHERE age > 35 ORDER BY 1", REFERENCE, true),
            Ok(())
        );
        let backwards = "SELECT name FROM people WHERE age > 35 ORDER BY name DESC";
        assert!(check(SCHEMA, backwards, REFERENCE, true).is_err());
        assert!(
            check(SCHEMA, "SELECT name FROM people", REFERENCE, false)
                .unwrap_err()
                .contains("Anna")
        );
    }

    #[test]
    fn a_query_can_only_read() {
        for query in [
            "DROP TABLE people",
            "DELETE FROM people",
            "ATTACH 'file.db' AS other",
            "PRAGMA journal_mode = DELETE",
            "SELECT 1; DROP TABLE people",
            "not SQL",
        ] {
            assert!(
                check(SCHEMA, query, REFERENCE, false).unwrap_err().contains("fails"),
                "{query}"
            );
        }
    }

    #[test]
    fn an_endless_query_ends() {
        let query =
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";
        assert!(check(SCHEMA, query, REFERENCE, false).unwrap_err().contains("interrupted"));
    }
}
