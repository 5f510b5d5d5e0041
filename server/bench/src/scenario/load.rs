//! Scenarios with many clients at once.

use std::sync::Barrier;
use std::time::Instant;

use super::single::{planted, story};
use super::{Case, Plan, Verdict, Visit, excerpt, has_word, tokens_from};
use crate::client::{Chat, Failure};
use crate::prose::{CAPITALS, NAMES, Pick};
use crate::stats::{quantile, sorted};
use crate::stream::{Reply, gap_figures};
use crate::watch::Watch;

/// Clients that hang up.
const CANCELLED: usize = 16;
/// Longest prompt and reply of a stream.
const STREAM: usize = 1_000;

/// What the answer to a request must have.
enum Expected {
    Word(String),
    Text(String),
}

impl Expected {
    fn check(&self, reply: &Reply) -> Verdict {
        match self {
            Self::Word(word) => has_word(reply, word),
            Self::Text(text) if reply.answer.trim() == text => Ok(()),
            Self::Text(text) => {
                Err(format!("{} instead of {}", excerpt(reply.answer.trim()), excerpt(text)))
            }
        }
    }
}

/// The request of the stream `number`: four kinds of different length take turns.
fn request(pick: &mut Pick, number: usize, long_prompt: usize) -> (Chat, Expected) {
    match number % 4 {
        0 => {
            let (chat, name) = story(pick, 256);
            (chat, Expected::Word(name.into()))
        }
        1 => {
            let (country, capital) = pick.one(CAPITALS);
            let chat = Chat::ask(format!("What is the capital of {country}?"), 48);
            (Chat { thinking: Some(false), ..chat }, Expected::Word(capital.into()))
        }
        2 => {
            let words = pick.some(NAMES, 6).join(", ");
            let chat = Chat::ask(format!("Repeat these words: {words}"), 96);
            (Chat { thinking: Some(false), ..chat }, Expected::Text(words))
        }
        _ => {
            let (messages, code) = planted(pick, long_prompt, 0.5);
            (Chat { messages, max_tokens: 128, ..Chat::default() }, Expected::Word(code))
        }
    }
}

/// Sends all requests at once.
fn send(visit: &Visit, requests: &[Chat]) -> Vec<Result<Reply, Failure>> {
    let barrier = Barrier::new(requests.len());
    let one = |chat: &Chat| {
        barrier.wait();
        visit.client.chat(chat)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = requests.iter().map(|chat| scope.spawn(|| one(chat))).collect();
        let joined = |thread: std::thread::ScopedJoinHandle<_>| {
            thread.join().expect("a request does not panic")
        };
        threads.into_iter().map(joined).collect()
    })
}

/// Why a request failed, also if its stream did.
fn failure(reply: &Result<Reply, Failure>) -> Option<String> {
    match reply {
        Ok(reply) => reply.failure(),
        Err(failure) => Some(failure.to_string()),
    }
}

pub fn streams(plan: &Plan) -> Vec<Case> {
    let counts: &[usize] = if plan.quick { &[4] } else { &[1, 8, 32] };
    let long_prompt = plan.sentences(if plan.quick { 200 } else { 500 });
    let case = |&count: &usize| {
        let name = format!("{count}");
        let label = name.clone();
        let run = move |visit: &mut Visit| together(visit, &label, count, long_prompt);
        Case::new(name, STREAM, run)
    };
    counts.iter().map(case).collect()
}

/// Measures `count` streams as one.
fn together(visit: &mut Visit, case: &str, count: usize, long_prompt: usize) {
    let mut pick = visit.pick(case);
    let (requests, expected): (Vec<_>, Vec<_>) =
        (0..count).map(|number| request(&mut pick, number, long_prompt)).unzip();
    let watch = Watch::start(visit.pid);
    let start = Instant::now();
    let replies = send(visit, &requests);
    let total = start.elapsed().as_secs_f64();
    let used = watch.stop();
    let mut sample = visit.sample(case);
    let failures: Vec<String> = replies.iter().filter_map(failure).collect();
    if let Some(first) = failures.first() {
        let failed = failures.len();
        visit.fail(sample, format!("{failed} of {count} requests failed, the first with {first}"));
        return;
    }
    let replies: Vec<Reply> = replies.into_iter().flatten().collect();
    let firsts: Vec<f64> =
        replies.iter().filter_map(|reply| Some(reply.first()?.as_secs_f64())).collect();
    let firsts = sorted(&firsts);
    let gaps = sorted(&replies.iter().flat_map(Reply::gaps).collect::<Vec<_>>());
    let tokens: u64 = replies.iter().map(|reply| reply.tokens().0).sum();
    let told = |count: fn(&Reply) -> Option<u64>| {
        replies.iter().map(count).sum::<Option<u64>>().map(|sum| sum as f64)
    };
    let values = [
        ("ttft_s", quantile(&firsts, 0.5)),
        ("ttft_max_s", quantile(&firsts, 1.0)),
        ("tokens_per_second", Some(tokens as f64 / total)),
        ("total_s", Some(total)),
        ("tokens", Some(tokens as f64)),
        ("prompt_tokens", told(|reply| reply.usage?.prompt)),
        ("cached_tokens", told(|reply| reply.usage?.cached)),
    ];
    let values = values.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let values = values.chain(gap_figures(&gaps)).map(|(name, value)| (name.to_owned(), value));
    sample.figures = values.chain(used).collect();
    sample.tokens_from = Some(tokens_from(replies.iter().all(|reply| reply.tokens().1)));
    sample.notes.extend(replies.iter().filter_map(Reply::note).take(1));
    let wrong: Vec<String> = expected
        .iter()
        .zip(&replies)
        .filter_map(|(expected, reply)| expected.check(reply).err())
        .collect();
    let verdict = match wrong.first() {
        None => Ok(()),
        Some(first) => Err(format!("{} of {count} answers are wrong: {first}", wrong.len())),
    };
    visit.judge(sample, verdict);
}

pub fn cancel(_: &Plan) -> Vec<Case> {
    let run = |visit: &mut Visit| {
        let mut pick = visit.pick("storm");
        let requests: Vec<Chat> = (0..CANCELLED)
            .map(|number| {
                let (chat, _) = story(&mut pick, 512);
                Chat { hang_up_after: Some(1 + number % 5), ..chat }
            })
            .collect();
        let failures: Vec<String> = send(visit, &requests).iter().filter_map(failure).collect();
        let case = "after the storm";
        if let Some(first) = failures.first() {
            let (failed, sample) = (failures.len(), visit.sample(case));
            let error = format!(
                "{failed} of {CANCELLED} requests failed before the client hung up: {first}"
            );
            visit.fail(sample, error);
            return;
        }
        let health = visit.client.healthy();
        let (country, capital) = pick.one(CAPITALS);
        let mut chat = Chat::ask(format!("What is the capital of {country}?"), 48);
        chat.thinking = Some(false);
        visit.ask(case, &chat, |reply| {
            has_word(reply, capital)?;
            if health == Some(false) { Err("/health did not answer 200".into()) } else { Ok(()) }
        });
    };
    vec![Case::new("storm", 640, run)]
}
