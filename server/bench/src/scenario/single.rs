//! Scenarios of single requests.

use jsonschema::Validator;
use serde_json::{Value, json};

use super::{Case, Plan, Verdict, Visit, excerpt, has_word};
use crate::client::{Chat, system, user};
use crate::prose::{ANIMALS, CAPITALS, NAMES, PLACES, PROJECTS, Pick, sentences};
use crate::stream::Reply;

/// Positions of the needle, as shares of the text.
const POSITIONS: [f64; 6] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0];
/// Tokens of the text around the needle.
const LENGTHS: [usize; 4] = [500, 1_000, 2_000, 8_000];
/// People of the JSON list.
const PEOPLE: usize = 3;
/// Tokens that a template and a question may take.
const OVERHEAD: usize = 128;

pub fn short(plan: &Plan) -> Vec<Case> {
    let questions = if plan.quick { 4 } else { 8 };
    let run = move |visit: &mut Visit| {
        let mut pick = visit.pick("capitals");
        for (country, capital) in pick.some(CAPITALS, questions) {
            let mut chat = Chat::ask(format!("What is the capital of {country}?"), 48);
            chat.thinking = Some(false);
            visit.ask("capitals", &chat, |reply| has_word(reply, capital));
        }
    };
    vec![Case::new("capitals", OVERHEAD, run)]
}

/// A request for a story, and the name of its hero.
pub fn story(pick: &mut Pick, max_tokens: usize) -> (Chat, &'static str) {
    let (animal, name, place) = (pick.one(ANIMALS), pick.one(NAMES), pick.one(PLACES));
    let text = format!("Write a story about a {animal} named {name} who lives near the {place}.");
    let mut chat = Chat::ask(text, max_tokens);
    chat.thinking = Some(false);
    (chat, name)
}

pub fn long(_: &Plan) -> Vec<Case> {
    let run = |visit: &mut Visit| {
        let (chat, name) = story(&mut visit.pick("story"), 512);
        visit.ask("story", &chat, |reply| {
            has_word(reply, name)?;
            let words = reply.answer.split_whitespace().count();
            (words >= 40).then_some(()).ok_or_else(|| format!("the story has only {words} words"))
        });
    };
    vec![Case::new("story", 512 + OVERHEAD, run)]
}

pub fn thinking(plan: &Plan) -> Vec<Case> {
    let questions = if plan.quick { 1 } else { 3 };
    let case = |name: &'static str, on: bool| {
        let run = move |visit: &mut Visit| {
            // The same questions with both settings.
            let mut pick = visit.pick("questions");
            for (country, capital) in pick.some(CAPITALS, questions) {
                let mut chat = Chat::ask(format!("Name the capital of {country}."), 256);
                chat.thinking = Some(on);
                visit.ask(name, &chat, |reply| {
                    has_word(reply, capital)?;
                    match (on, reply.reasoning.trim().is_empty()) {
                        (true, true) => Err("the reply has no reasoning".into()),
                        (false, false) => Err("the reply has reasoning".into()),
                        _ => Ok(()),
                    }
                });
            }
        };
        Case { sets_thinking: true, ..Case::new(name, 256 + OVERHEAD, run) }
    };
    vec![case("on", true), case("off", false)]
}

/// A text of sentences with a code at a position (0 to 1): the messages, and the code.
pub fn planted(pick: &mut Pick, count: usize, position: f64) -> (Vec<Value>, String) {
    let mut text = sentences(pick, count);
    let (project, code) = (pick.one(PROJECTS), pick.between(1000, 9999).to_string());
    let place = (position * text.len() as f64).round() as usize;
    text.insert(place, format!("The secret code of project {project} is {code}."));
    let question = format!("What is the secret code of project {project}?");
    (vec![system(text.join(" ")), user(question)], code)
}

pub fn needle(plan: &Plan) -> Vec<Case> {
    let lengths = if plan.quick { &LENGTHS[..1] } else { &LENGTHS[..] };
    let positions = if plan.quick { &[0.2, 0.8][..] } else { &POSITIONS[..] };
    let mut cases = Vec::new();
    for &length in lengths {
        let count = plan.sentences(length);
        let name = format!("{length} tokens");
        let label = name.clone();
        let run = move |visit: &mut Visit| {
            for position in positions {
                let (messages, code) =
                    planted(&mut visit.pick(&format!("{length}/{position}")), count, *position);
                // Whether to reason about a retrieval is the server's decision.
                let chat = Chat { messages, max_tokens: 256, ..Chat::default() };
                visit.ask(&label, &chat, |reply| has_word(reply, &code));
            }
        };
        cases.push(Case::new(name, length + 256 + OVERHEAD, run));
    }
    cases
}

/// A text about people, and what the JSON list of them says.
pub fn people(pick: &mut Pick, count: usize) -> (String, Value) {
    let people: Vec<_> = pick
        .some(NAMES, count)
        .into_iter()
        .map(|name| (name, pick.between(18, 90), pick.one(CAPITALS).1))
        .collect();
    let lines: Vec<String> = people
        .iter()
        .map(|(name, age, city)| match pick.below(2) {
            0 => format!("{name} is {age} and lives in {city}."),
            _ => format!("{name}, aged {age}, comes from {city}."),
        })
        .collect();
    let list: Vec<Value> = people
        .iter()
        .map(|(name, age, city)| json!({"name": name, "age": age, "city": city}))
        .collect();
    (lines.join(" "), json!(list))
}

fn people_schema() -> Value {
    let cities: Vec<&str> = CAPITALS.iter().map(|(_, city)| *city).collect();
    json!({"type": "array", "minItems": PEOPLE, "maxItems": PEOPLE, "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "city": {"enum": cities},
        },
        "required": ["name", "age", "city"],
        "additionalProperties": false,
    }})
}

/// Right if the whole answer is JSON that the schema accepts, with the expected values.
pub fn follows_schema(reply: &Reply, schema: &Validator, expected: &Value) -> Verdict {
    let answer = reply.answer.trim();
    let json: Value = serde_json::from_str(answer)
        .map_err(|error| format!("the answer is not JSON ({error}): {}", excerpt(answer)))?;
    if let Some(error) = schema.iter_errors(&json).next() {
        let path = error.instance_path().to_string();
        return Err(format!("the schema rejects the answer at {path:?}: {error}"));
    }
    if json == *expected {
        Ok(())
    } else {
        Err(format!("valid, but with other values: {} instead of {expected}", excerpt(answer)))
    }
}

pub fn json(plan: &Plan) -> Vec<Case> {
    let lists = if plan.quick { 1 } else { 3 };
    let run = move |visit: &mut Visit| {
        let schema = people_schema();
        let validator = jsonschema::validator_for(&schema).expect("the schema is a constant");
        let mut pick = visit.pick("people");
        for _ in 0..lists {
            let (text, expected) = people(&mut pick, PEOPLE);
            let text =
                format!("Extract the people as a JSON list with name, age and city.\n{text}");
            let mut chat = Chat::ask(text, 192);
            chat.thinking = Some(false);
            chat.format = Some(json!({"type": "json_schema", "json_schema": {
                "name": "people", "strict": true, "schema": schema,
            }}));
            visit.ask("schema", &chat, |reply| follows_schema(reply, &validator, &expected));
        }
    };
    vec![Case::new("schema", 192 + 2 * OVERHEAD, run)]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stream::End;

    fn answer(text: &str) -> Reply {
        Reply {
            pieces: vec![Duration::ZERO],
            answer: text.into(),
            reasoning: String::new(),
            calls: vec![],
            finish: Some("stop".into()),
            usage: None,
            fingerprint: None,
            profile: None,
            end: End::Done,
            total: Duration::ZERO,
        }
    }

    #[test]
    fn a_word_is_found_whole() {
        assert!(has_word(&answer("It is ROME."), "Rome").is_ok());
        assert!(has_word(&answer("It is Jerome."), "Rome").unwrap_err().contains("lacks Rome"));
    }

    #[test]
    fn answers_must_follow_the_schema_and_have_the_values() {
        let validator = jsonschema::validator_for(&people_schema()).unwrap();
        let list = |age: &str| {
            let one = format!(r#"{{"name": "Anna", "age": {age}, "city": "Rome"}}"#);
            format!("[{one}, {one}, {one}]")
        };
        let expected = serde_json::from_str(&list("30")).unwrap();
        let check = |text: &str| follows_schema(&answer(text), &validator, &expected);
        assert_eq!(check(&format!(" {}", list("30"))), Ok(()));
        let wrong = [
            (&*list("\"30\""), "rejects"),
            (&*list("31"), "other values"),
            (&*list("30").replace("Rome", "Roma"), "rejects"),
            ("```json\n[]\n```", "not JSON"),
            ("[]", "rejects"),
        ];
        for (text, problem) in wrong {
            assert!(check(text).unwrap_err().contains(problem), "{text}: {:?}", check(text));
        }
    }

    #[test]
    fn a_code_is_planted_at_its_position() {
        for position in POSITIONS {
            let (messages, code) = planted(&mut Pick::new(1, "test"), 50, position);
            let text = messages[0]["content"].as_str().unwrap();
            let share = text.find(&code).unwrap() as f64 / text.len() as f64;
            assert!((share - position).abs() < 0.1, "{share} for {position}");
            assert_eq!(text.matches("secret code").count(), 1);
        }
    }
}
