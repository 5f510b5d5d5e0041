//! Scenarios of conversations that grow or change.

use serde_json::Value;

use super::{Case, Plan, Visit, has_word};
use crate::client::{Chat, assistant, system, user};
use crate::prose::{CAPITALS, Pick, text};

/// Tokens of the text before a session.
const TEXT: usize = 400;
/// Turns of the conversation that is edited.
const TURNS: usize = 8;
/// Tokens of one of these turns.
const TURN: usize = 60;
const REPLY: usize = 64;

pub fn session(plan: &Plan) -> Vec<Case> {
    let (turns, count) = (if plan.quick { 3 } else { 5 }, plan.sentences(TEXT));
    let run = move |visit: &mut Visit| {
        let mut pick = visit.pick("turns");
        let mut messages = vec![system(text(&mut pick, count))];
        for (turn, (country, capital)) in pick.some(CAPITALS, turns).into_iter().enumerate() {
            messages.push(user(format!("What is the capital of {country}?")));
            let chat = Chat {
                messages: messages.clone(),
                max_tokens: REPLY,
                thinking: Some(false),
                ..Chat::default()
            };
            let case = format!("turn {}", turn + 1);
            let reply = visit.ask(&case, &chat, |reply| has_word(reply, capital));
            // As a client does: the server's own answer, so that its cache can match. Without one,
            // the right answer, so that later turns are measured all the same.
            let answer = reply.map(|reply| reply.answer).filter(|answer| !answer.is_empty());
            messages.push(assistant(
                answer.unwrap_or_else(|| format!("The capital of {country} is {capital}.")),
            ));
        }
    };
    vec![Case::new("turns", TEXT + turns * (REPLY + 40), run)]
}

/// A turn of a conversation: what the user and the assistant said.
fn turn(pick: &mut Pick, sentences: usize) -> [Value; 2] {
    let story = text(pick, sentences);
    [user(format!("Copy this text exactly:\n{story}")), assistant(story)]
}

pub fn edit(plan: &Plan) -> Vec<Case> {
    let turns = if plan.quick { 4 } else { TURNS };
    let sentences = plan.sentences(TURN / 2);
    let run = move |visit: &mut Visit| {
        let mut pick = visit.pick("turns");
        let mut messages: Vec<Value> =
            (0..turns).flat_map(|_| turn(&mut pick, sentences)).collect();
        let asked = pick.some(CAPITALS, 2);
        for (case, (country, capital)) in ["before", "after"].into_iter().zip(asked) {
            if case == "after" {
                let middle = turns / 2 * 2;
                messages.splice(middle..middle + 2, turn(&mut pick, sentences));
            }
            let mut chat = Chat {
                messages: messages.clone(),
                max_tokens: REPLY,
                thinking: Some(false),
                ..Chat::default()
            };
            chat.messages.push(user(format!("What is the capital of {country}?")));
            visit.ask(case, &chat, |reply| has_word(reply, capital));
        }
    };
    vec![Case::new("turns", turns * (TURN + 20) + REPLY + 128, run)]
}
