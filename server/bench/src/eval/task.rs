//! The ten tasks: items from a seed, each with the rule that grades its answer. [`TASKS`] is the table.
//!
//! An item depends on the seed, the task and its number only, so that runs of other servers, settings
//! and lengths have equal items.

use serde_json::{Value, json};

use super::grade;
use super::sandbox::{self, Case};
use super::sql;
use crate::client::{system, user};
use crate::prose::{ANIMALS, CAPITALS, ITEMS, NAMES, PLACES, PROJECTS, Pick, sentences, text};
use crate::scenario::Verdict;

/// A task.
pub struct Task {
    /// Its name.
    pub name: &'static str,
    /// Whether it runs code, which needs the sandbox.
    pub runs_code: bool,
    item: fn(&mut Pick, usize) -> Question,
}

/// All tasks.
pub const TASKS: &[Task] = &[
    task("needle", needle),
    task("arithmetic", arithmetic),
    task("extraction", extraction),
    Task { name: "code", runs_code: true, item: code },
    task("sql", sql),
    task("translation", translation),
    task("instructions", instructions),
    task("multi-hop", multi_hop),
    task("summary", summary),
    task("impossible", impossible),
];

const fn task(name: &'static str, item: fn(&mut Pick, usize) -> Question) -> Task {
    Task { name, runs_code: false, item }
}

impl Task {
    /// The item of a number.
    pub fn item(&self, seed: u64, number: usize) -> Question {
        (self.item)(&mut Pick::new(seed, &format!("eval/{}/{number}", self.name)), number)
    }
}

/// An item.
pub struct Question {
    /// The conversation.
    pub messages: Vec<Value>,
    /// What the results say of the item besides, as its file has it.
    pub about: Option<Value>,
    /// Grades an answer.
    pub grade: Box<dyn Fn(&str) -> Verdict>,
}

fn question(text: impl Into<String>, grade: impl Fn(&str) -> Verdict + 'static) -> Question {
    Question { messages: vec![user(text)], about: None, grade: Box::new(grade) }
}

fn needle(pick: &mut Pick, _: usize) -> Question {
    let count = pick.between(20, 160);
    let mut words = sentences(pick, count);
    let projects = pick.some(PROJECTS, 3);
    let codes: Vec<String> =
        projects.iter().map(|_| pick.between(1000, 9999).to_string()).collect();
    for (project, code) in projects.iter().zip(&codes) {
        let place = pick.below(words.len() + 1);
        words.insert(place, format!("The secret code of project {project} is {code}."));
    }
    let asked = format!("What is the secret code of project {}?", projects[0]);
    let code = codes[0].clone();
    Question {
        messages: vec![system(words.join(" ")), user(asked)],
        about: None,
        grade: Box::new(move |answer| grade::last_number(answer, code.parse().expect("digits"))),
    }
}

fn arithmetic(pick: &mut Pick, _: usize) -> Question {
    let (a, b) = (pick.between(10, 999) as i64, pick.between(10, 999) as i64);
    let (term, result) = match pick.below(3) {
        0 => (format!("{a} + {b}"), a + b),
        1 => (format!("{} - {}", a.max(b), a.min(b)), (a - b).abs()),
        _ => {
            let (a, b) = (a % 90 + 10, b % 8 + 2);
            (format!("{a} * {b}"), a * b)
        }
    };
    question(format!("What is {term}?"), move |answer| grade::last_number(answer, result))
}

fn extraction(pick: &mut Pick, _: usize) -> Question {
    let count = pick.between(1, 6);
    if pick.below(3) == 0 {
        let lines: Vec<_> = pick
            .some(ITEMS, count.min(4))
            .into_iter()
            .map(|item| (item, pick.between(1, 20), pick.between(2, 50)))
            .collect();
        let text: Vec<String> =
            lines.iter().map(|(item, n, price)| format!("{n} {item} at {price} each.")).collect();
        let list: Vec<Value> = lines
            .iter()
            .map(|(item, n, price)| json!({"item": item, "count": n, "price": price}))
            .collect();
        let text = format!(
            "Extract the invoice lines as a JSON list with item, count and price.\n{}",
            text.join(" ")
        );
        return question(text, move |answer| grade::json(answer, &json!(list)));
    }
    let (text, list) = crate::scenario::people(pick, count);
    let text = format!("Extract the people as a JSON list with name, age and city.\n{text}");
    question(text, move |answer| grade::json(answer, &list))
}

/// What a function takes.
#[derive(Clone, Copy)]
enum Takes {
    List,
    Text,
    Number,
}

/// What a function returns for a list, the words of a text, or a number.
type Function = fn(&[i64], &[&str], i64) -> Value;

/// Functions to write: what they return, what they take, and the result.
const FUNCTIONS: &[(&str, Takes, Function)] = &[
    ("sum of a list", Takes::List, |xs, _, _| json!(xs.iter().sum::<i64>())),
    ("largest item of a list", Takes::List, |xs, _, _| json!(xs.iter().max())),
    ("smallest item of a list", Takes::List, |xs, _, _| json!(xs.iter().min())),
    ("product of a list", Takes::List, |xs, _, _| json!(xs.iter().product::<i64>())),
    ("average of a list", Takes::List, |xs, _, _| {
        json!(xs.iter().sum::<i64>() as f64 / xs.len() as f64)
    }),
    ("even numbers of a list", Takes::List, |xs, _, _| {
        json!(xs.iter().filter(|x| *x % 2 == 0).collect::<Vec<_>>())
    }),
    ("reverse of a string", Takes::Text, |_, words, _| {
        json!(words.join(" ").chars().rev().collect::<String>())
    }),
    ("number of vowels in a string", Takes::Text, |_, words, _| {
        json!(words.join(" ").chars().filter(|c| "aeiou".contains(*c)).count())
    }),
    ("number of words in a string", Takes::Text, |_, words, _| json!(words.len())),
    ("length of the longest word in a string", Takes::Text, |_, words, _| {
        json!(words.iter().map(|word| word.len()).max())
    }),
    ("factorial of a number", Takes::Number, |_, _, n| json!((1..=n).product::<i64>())),
    ("sum of the digits of a number", Takes::Number, |_, _, n| {
        json!(n.to_string().bytes().map(|digit| i64::from(digit - b'0')).sum::<i64>())
    }),
];

fn code(pick: &mut Pick, number: usize) -> Question {
    // In turn, so that no function comes twice before all have come.
    let (what, takes, result) = FUNCTIONS[number % FUNCTIONS.len()];
    let cases: Vec<Case> = (0..4)
        .map(|_| {
            let list: Vec<i64> =
                (0..pick.between(2, 7)).map(|_| pick.between(1, 40) as i64).collect();
            let count = pick.between(1, 5);
            let words = pick.some(ANIMALS, count);
            let integer = pick.between(2, 13) as i64;
            let argument = match takes {
                Takes::List => json!(list),
                Takes::Text => json!(words.join(" ")),
                Takes::Number => json!(integer),
            };
            Case { arguments: vec![argument], expected: result(&list, &words, integer) }
        })
        .collect();
    let text = format!("Write a Python function that returns the {what}.");
    question(text, move |answer| sandbox::run(grade::block(answer), &cases))
}

fn sql(pick: &mut Pick, _: usize) -> Question {
    let count = pick.between(6, 12);
    let rows: Vec<String> = pick
        .some(NAMES, count)
        .into_iter()
        .map(|name| format!("('{name}', {}, '{}')", pick.between(18, 80), pick.one(CAPITALS).1))
        .collect();
    let table = "CREATE TABLE people (name TEXT, age INTEGER, city TEXT);";
    let schema = format!("{table} INSERT INTO people VALUES {};", rows.join(", "));
    let (age, city) = (pick.between(25, 65), pick.one(CAPITALS).1);
    let (wish, reference, is_ordered) = match pick.below(6) {
        0 => (
            format!("the names of all people older than {age}"),
            format!("SELECT name FROM people WHERE age > {age}"),
            false,
        ),
        1 => (
            format!("the number of people who live in {city}"),
            format!("SELECT count(*) FROM people WHERE city = '{city}'"),
            false,
        ),
        2 => (
            "the names of all people, from the youngest to the oldest and by name within an age"
                .into(),
            "SELECT name FROM people ORDER BY age, name".into(),
            true,
        ),
        3 => ("the average age of all people".into(), "SELECT avg(age) FROM people".into(), false),
        4 => (
            "each city and the number of people who live there".into(),
            "SELECT city, count(*) FROM people GROUP BY city".into(),
            false,
        ),
        _ => ("the highest age of all people".into(), "SELECT max(age) FROM people".into(), false),
    };
    let text = format!("Write one SQLite query that returns {wish}.\n{table}");
    question(text, move |answer| sql::check(&schema, grade::block(answer), &reference, is_ordered))
}

fn translation(pick: &mut Pick, _: usize) -> Question {
    // All of them are feminine, so every pair has one right translation.
    const NOUNS: &[(&str, &str)] = &[
        ("house", "maison"),
        ("door", "porte"),
        ("car", "voiture"),
        ("flower", "fleur"),
        ("table", "table"),
        ("chair", "chaise"),
        ("street", "rue"),
        ("shirt", "chemise"),
    ];
    const COLOURS: &[(&str, &str)] = &[
        ("red", "rouge"),
        ("blue", "bleue"),
        ("white", "blanche"),
        ("green", "verte"),
        ("black", "noire"),
        ("yellow", "jaune"),
    ];
    let (noun, colour) = (pick.one(NOUNS), pick.one(COLOURS));
    let expected = format!("la {} {}", noun.1, colour.1);
    let text = format!("Translate to French: the {} {}", colour.0, noun.0);
    question(text, move |answer| grade::phrase(answer, &expected))
}

fn instructions(pick: &mut Pick, _: usize) -> Question {
    let exactly = |text: String, expected: String, is_loose: bool| {
        question(text, move |answer| grade::exactly(answer, &expected, is_loose))
    };
    let count = pick.between(3, 7);
    let words = pick.some(&[NAMES, ANIMALS].concat(), count);
    match pick.below(6) {
        0 => exactly(format!("Repeat these words: {}", words.join(", ")), words.join(", "), true),
        1 => {
            let mut sorted = words.clone();
            sorted.sort_by_key(|word| word.to_lowercase());
            let text = format!("Sort these words alphabetically: {}", words.join(", "));
            exactly(text, sorted.join(", "), true)
        }
        2 => {
            let story = text(pick, 3);
            exactly(format!("Copy this text exactly:\n{story}"), story, false)
        }
        3 => {
            let (country, capital) = pick.one(CAPITALS);
            let text =
                format!("Write the capital of {country} in capital letters and nothing else.");
            exactly(text, capital.to_uppercase(), false)
        }
        4 => {
            let (low, more) = (pick.between(2, 20), pick.between(3, 7));
            let list: Vec<String> = (low..=low + more).map(|n| n.to_string()).collect();
            let text = format!(
                "List the numbers from {low} to {}, separated by commas, and nothing else.",
                low + more
            );
            exactly(text, list.join(" "), true)
        }
        _ => {
            let (word, times) = (pick.one(PLACES), pick.between(3, 7));
            let text = format!(
                "Write the word {word} {times} times, separated by spaces, and nothing else."
            );
            exactly(text, vec![word; times].join(" "), false)
        }
    }
}

fn multi_hop(pick: &mut Pick, _: usize) -> Question {
    let people = pick.some(NAMES, 6);
    if pick.below(2) == 0 {
        let text = format!(
            "Logic puzzle: {0} is taller than {1}. {1} is taller than {2}. Who is the tallest?",
            people[0], people[1], people[2]
        );
        let candidates = people[..3].to_vec();
        return question(text, move |answer| grade::last_of(answer, &candidates, candidates[0]));
    }
    let homes = pick.some(CAPITALS, 3);
    let mut facts: Vec<String> = (0..3)
        .flat_map(|pair| {
            let (one, other) = (people[pair], people[pair + 3]);
            [format!("{one} works with {other}."), format!("{other} lives in {}.", homes[pair].1)]
        })
        .collect();
    let count = facts.len();
    facts = pick
        .some(&facts.iter().map(String::as_str).collect::<Vec<_>>(), count)
        .into_iter()
        .map(str::to_owned)
        .collect();
    let text = format!(
        "{}\nIn which country does the colleague of {} live? Name the country.",
        facts.join(" "),
        people[0]
    );
    let countries: Vec<&str> = CAPITALS.iter().map(|(country, _)| *country).collect();
    question(text, move |answer| grade::last_of(answer, &countries, homes[0].0))
}

fn summary(pick: &mut Pick, _: usize) -> Question {
    const WORDS: usize = 30;
    let (name, city, item) = (pick.one(NAMES), pick.one(CAPITALS).1, pick.one(ITEMS));
    let (year, count) = (pick.between(1950, 2020), pick.between(100, 990));
    let story = format!(
        "In {year}, {name} opened a shop in {city}. It was a small house with two windows, and the \
         neighbours often came by to talk. In the first month the shop sold {count} {item}, more \
         than anybody had expected. People still tell this story in the evening."
    );
    let facts = [name.into(), city.into(), year.to_string(), format!("{count} {item}")];
    let text = format!(
        "Summarize this text in at most {WORDS} words. Keep the name, the city, the year, and what \
         was sold and how many.\n{story}"
    );
    question(text, move |answer| grade::summary(answer, &story, &facts, WORDS))
}

fn impossible(pick: &mut Pick, _: usize) -> Question {
    let people = pick.some(NAMES, 4);
    let facts: Vec<(usize, &str)> =
        (0..3).map(|_| (pick.between(18, 90), pick.one(CAPITALS).1)).collect();
    let lines: Vec<String> = people
        .iter()
        .zip(&facts)
        .map(|(name, (age, city))| format!("{name} is {age} and lives in {city}."))
        .collect();
    // Half of the questions have an answer: refusing always is wrong as often as right.
    let asked = if pick.below(2) == 0 { 3 } else { pick.below(3) };
    let wants_age = pick.below(2) == 0;
    let ask = if wants_age { "How old is" } else { "In which city is the home of" };
    let fact = |(age, city): &(usize, &str)| match wants_age {
        true => age.to_string(),
        false => (*city).to_owned(),
    };
    let expected = facts.get(asked).map(fact);
    let candidates: Vec<String> = facts.iter().map(fact).collect();
    let text = format!(
        "{}\n{ask} {}? Use only this text. If it does not say it, answer with the word unknown.",
        lines.join(" "),
        people[asked]
    );
    question(text, move |answer| grade::known_or_not(answer, expected.as_deref(), &candidates))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(question: &Question) -> String {
        question.messages.iter().map(|message| message["content"].as_str().unwrap()).collect()
    }

    #[test]
    fn a_seed_gives_the_same_items_and_numbers_other_ones() {
        for task in TASKS {
            let texts: Vec<_> = (0..20).map(|number| text_of(&task.item(1, number))).collect();
            assert_eq!(texts[7], text_of(&task.item(1, 7)), "{}", task.name);
            let mut different = texts.clone();
            different.sort();
            different.dedup();
            // There are few functions to write.
            assert!(different.len() > 5, "{}: {} different items", task.name, different.len());
            if task.runs_code {
                continue; // The functions are the same; their arguments are not part of the text.
            }
            assert_ne!(
                texts,
                (0..20).map(|number| text_of(&task.item(2, number))).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn no_item_accepts_an_empty_answer_or_another_items_text() {
        for task in TASKS {
            for number in 0..20 {
                let item = task.item(3, number);
                assert!((item.grade)("").is_err(), "{} {number}", task.name);
                assert!((item.grade)("Once there was a fox.").is_err(), "{} {number}", task.name);
            }
        }
    }

    /// For each task an answer to item 0 of seed 1 is derived from the text by other means.
    #[test]
    fn right_answers_are_accepted() {
        let after = |text: &str, mark: &str, end: char| {
            text.split_once(mark).unwrap().1.split(end).next().unwrap().trim().to_owned()
        };
        let item = |name: &str, has: &str| {
            let task = TASKS.iter().find(|task| task.name == name).unwrap();
            let found = (0..100).map(|number| task.item(1, number));
            found.into_iter().find(|item| text_of(item).contains(has)).unwrap()
        };
        let check = |item: &Question, answer: &str| {
            assert_eq!((item.grade)(answer), Ok(()), "{}", text_of(item));
        };
        let one = item("needle", "code of");
        let project = after(&text_of(&one), "What is the secret code of project ", '?');
        let code = after(&text_of(&one), &format!("code of project {project} is "), '.');
        check(&one, &format!("The secret code of project {project} is {code}."));

        let one = item("arithmetic", "+");
        let term = after(&text_of(&one), "What is ", '?');
        let sum: i64 = term.split('+').map(|part| part.trim().parse::<i64>().unwrap()).sum();
        check(&one, &format!("{term} = {sum}"));

        check(
            &item("code", "sum of a list"),
            "```python\ndef total(xs):\n    result = 0\n    for x in xs:\n        result += x\n    return result\n```",
        );
        check(&item("code", "number of words"), "def words(s): return len(s.split())");
        check(&item("code", "average"), "def average(xs):\n    return sum(xs) / len(xs)");
        check(&item("sql", "highest age"), "```sql\nSELECT max(age) FROM people;\n```");
        check(&item("translation", "red house"), "La maison rouge.");
        let one = item("instructions", "Repeat these words");
        check(&one, &after(&text_of(&one), "words: ", '\n'));
        let one = item("multi-hop", "Logic puzzle");
        check(&one, &format!("The tallest is {}.", after(&text_of(&one), "puzzle: ", ' ')));
        let one = item("summary", "opened a shop");
        let text = text_of(&one);
        let (year, name) = (after(&text, "\nIn ", ','), after(&text, ", ", ' '));
        let name = if text.contains(&format!(", {name} opened")) {
            name
        } else {
            after(&text, &format!("In {year}, "), ' ')
        };
        let (city, sold) = (after(&text, "shop in ", '.'), after(&text, "shop sold ", ','));
        check(&one, &format!("In {year}, {name} opened a shop in {city} and sold {sold}."));
        let unknown = TASKS.last().unwrap();
        let refused = (0..40).filter(|n| (unknown.item(1, *n).grade)("unknown").is_ok()).count();
        assert!((8..=32).contains(&refused), "{refused} of 40 are impossible");
    }
}
