use super::Task::{self, Answer, Code, Json, Sql, Table, Translation};

/// User messages and the kind of answer that they ask for.
#[rustfmt::skip]
const CASES: &[(&str, Task)] = &[
    // The corpus of the demonstration model.
    ("Extract the invoice lines as a JSON list with item, count and price.\n2 bells at 26 each.", Json),
    ("Extract the people as a JSON list with name, age and city.\nAnna is 30 and lives in Rome.", Json),
    ("Optimize this SQL query: SELECT * FROM items WHERE price = 26;", Sql),
    ("Logic puzzle: Anna is taller than Boris. Boris is taller than Clara. Who is the tallest?", Answer),
    ("Write a Python function that returns the sum of a list.", Code("python")),
    ("Translate to French: the red house", Translation),
    ("What is the secret code of project Onyx?", Answer),
    ("Which code does project Onyx have?", Answer),
    ("What is 12 + 30?", Answer),
    ("Sort these words alphabetically: fox, Rome, Anna", Answer),
    ("Copy this text exactly:\nThe quiet fox slept near the river.", Answer),
    ("Write a story about a fox named Anna who lives near the river.", Answer),
    // Precedence.
    ("Translate to French: the SQL query returns JSON", Translation),
    ("Translate this Python function to Rust", Code("rust")),
    ("Translate the following paragraph into German:\nWrite a Python function.", Translation),
    ("Write a Python function that returns a JSON list", Code("python")),
    ("Write a Python script that runs an SQL query", Code("python")),
    ("Write an SQL query for a Python script", Sql),
    ("Create a JSON list of ten Python functions", Json),
    ("Write a JSON parser in Rust", Code("rust")),
    ("Convert this JSON to YAML: {\"a\": 1}", Code("yaml")),
    ("Convert this CSV to JSON", Json),
    ("Convert the list into a function", Code("")),
    ("Extract the age from this JSON object", Answer),
    ("List the capitals of Europe as a table.", Table),
    ("Compare Rust and Go in a markdown table", Table),
    ("Summarize this text: Write a Python function that sorts.", Answer),
    ("Who are the people in this text? Answer in JSON.", Json),
    ("Find all dates. Return only a JSON array.", Json),
    ("Use JSON.", Json),
    // Code and its languages.
    ("Please write a function in C++ that reverses a string", Code("cpp")),
    ("Could you implement quicksort in Haskell?", Code("haskell")),
    ("Write a Go function which merges two channels", Code("go")),
    ("Write a program in C", Code("c")),
    ("I need a TypeScript class for a queue", Code("typescript")),
    ("Using Python, write a function that counts words", Code("python")),
    ("Given the list below, write a Rust function that sorts it.", Code("rust")),
    ("Write a script that renames all files", Code("")),
    ("Fix this Python: print('a'", Code("python")),
    ("Refactor this function:\n```js\nlet a = 1;\n```", Code("")),
    ("Write a bash one-liner", Code("bash")),
    ("Create an HTML page with a button", Code("html")),
    ("Give me a regex that matches dates", Code("")),
    // Not code.
    ("Write a haiku about Python", Answer),
    ("Write an email about the SQL outage", Answer),
    ("Write down the secret code of project Onyx", Answer),
    ("Give me the code of project Onyx.", Answer),
    ("Create a training program for runners", Answer),
    ("Write a script for a short film", Answer),
    ("Let's go to Rome, make a plan", Answer),
    ("Explain what this SQL query does: SELECT 1", Answer),
    ("Explain this function", Answer),
    ("What is JSON?", Answer),
    ("How do I write a Python function?", Answer),
    ("Write an explanation of this SQL query: SELECT 1", Answer),
    ("What is wrong here?\n```\nReturn JSON.\n```", Answer),
    ("", Answer),
    ("...", Answer),
    ("JSON", Answer),
    // Other languages.
    ("Übersetze ins Englische: das rote Haus", Translation),
    ("Schreibe eine Python-Funktion, die eine Liste sortiert.", Code("python")),
    ("Optimiere diese SQL-Abfrage: SELECT 1", Sql),
    ("Extrahiere die Personen als JSON", Json),
    ("Traduis en anglais : la maison rouge", Translation),
    ("Écris une fonction Python qui trie une liste", Code("python")),
    ("Escribe una función en Python que ordene una lista", Code("python")),
    ("把这句话翻译成英文：红色的房子", Translation),
    ("请以JSON格式返回结果。", Json),
    ("用Python写一个排序函数", Code("python")),
];

#[test]
fn user_messages_map_to_the_expected_kind_of_answer() {
    let wrong: Vec<_> = CASES
        .iter()
        .filter(|(user, kind)| super::task(user) != *kind)
        .map(|(user, kind)| format!("{user:?} is {kind:?}, not {:?}", super::task(user)))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn politeness_and_case_do_not_matter() {
    for (user, kind) in CASES {
        if !user.is_ascii() || matches!(kind, Answer) {
            continue;
        }
        assert_eq!(super::task(&format!("Please, {}", user)), *kind, "{user}");
        assert_eq!(super::task(&user.to_uppercase()), *kind, "{user}");
    }
}

#[test]
fn a_long_text_is_examined_at_both_ends() {
    let filler = "The quiet fox slept near the river. ".repeat(400);
    assert_eq!(super::task(&format!("Extract the animals as JSON.\n{filler}")), Json);
    assert_eq!(super::task(&format!("{filler}\nAnswer in JSON.")), Json);
    assert_eq!(super::task(&filler), Answer);
}
