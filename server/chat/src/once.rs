//! `run`: one prompt and its answer, for pipes.

use std::fs::File;
use std::io::{IsTerminal, Read, Stdin, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::client::{Client, End, Piece};
use crate::screen::printable;
use crate::session::Session;
use crate::{Once, Options};

/// Time after which `run` says that it reads standard input.
const PATIENCE: Duration = Duration::from_secs(2);

/// Largest prompt on standard input.
const PROMPT_BYTES: u64 = 256 << 20;

/// Asks for one reply. Its answer goes to `out`, its reasoning, if that is asked for, and notes to `messages`.
///
/// # Errors
/// If there is no prompt, the server refuses or fails, or the reply has no whole answer: none at all, or one that is cut
/// off before it follows the schema.
pub async fn run(
    client: &Client,
    model: &str,
    options: &Options,
    once: &Once,
    out: &mut impl Write,
    messages: &mut impl Write,
) -> Result<()> {
    let mut session = Session::new(model.into(), options.clone());
    session.say(prompt(&once.prompt)?);
    let mut body = session.request();
    if let Some(file) = &once.json_schema {
        body["response_format"] = form(file)?;
    }
    // A file or a program gets the text as it is.
    let to_terminal = std::io::stdout().is_terminal();
    let mut reply = client.chat(body, options.profile.as_deref()).await?;
    let mut answered = false;
    let End { reason, notes, .. } = loop {
        match reply.next().await? {
            Piece::Answer(text) if to_terminal => write!(out, "{}", printable(&text))?,
            Piece::Answer(text) => write!(out, "{text}")?,
            Piece::Reasoning(text) => {
                if once.reasoning {
                    write!(messages, "{}", printable(&text))?;
                    messages.flush()?;
                }
                continue;
            }
            Piece::End(end) => break end,
        }
        answered = true;
        out.flush()?;
    };
    if answered {
        writeln!(out)?;
        out.flush()?;
    }
    if once.reasoning {
        writeln!(messages)?;
        notes.iter().try_for_each(|note| writeln!(messages, "{}", printable(note)))?;
    }
    let cut_off = reason == "length";
    ensure!(answered, "the reply has no answer (it ended with the reason `{reason}`)");
    if cut_off && once.json_schema.is_some() {
        bail!("the answer was cut off before it was complete: allow more with --max-tokens");
    }
    if cut_off {
        writeln!(messages, "the answer was cut off at the limit of tokens")?;
    }
    Ok(())
}

/// Whether `run` has a prompt, and otherwise opens a chat: none is given, and both ends are a terminal.
pub fn is_prompted(once: &Once) -> bool {
    let on_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    !once.prompt.is_empty() || once.json_schema.is_some() || !on_terminal
}

/// The prompt of the command line, in one or several words, behind the text that a pipe or a file has on standard input.
fn prompt(words: &[String]) -> Result<String> {
    let stdin = std::io::stdin();
    let is_asked = words.is_empty() || words == ["-"];
    let text = match is_asked {
        true => {
            ensure!(
                !words.is_empty() || !stdin.is_terminal(),
                "there is no prompt: write it after the model, or pipe it in"
            );
            read(stdin)?
        }
        false if is_piped(&stdin) => read(stdin)?,
        false => String::new(),
    };
    let words = if is_asked { String::new() } else { words.join(" ") };
    let prompt = if text.is_empty() || words.is_empty() {
        text + &words
    } else {
        format!("{text}\n\n{words}")
    };
    ensure!(!prompt.trim().is_empty(), "the prompt is empty");
    Ok(prompt)
}

/// Returns true if standard input is a pipe or a file: what a shell makes of `|` and `<`. Nobody types there, and a socket or
/// `/dev/null` is what a service or a program without a use for it gives.
fn is_piped(stdin: &Stdin) -> bool {
    let kind = stdin.as_fd().try_clone_to_owned().and_then(|file| File::from(file).metadata());
    kind.is_ok_and(|kind| kind.file_type().is_fifo() || kind.is_file())
}

/// The text of standard input. Says what it waits for if that takes long: a program may have left a pipe open.
fn read(stdin: Stdin) -> Result<String> {
    let (done, is_done) = mpsc::channel::<()>();
    let waiting = std::thread::spawn(move || {
        if is_done.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            let hint = "reading the prompt from standard input, until it ends; `< /dev/null` leaves it out";
            // A closed stderr is no error.
            let _ = writeln!(std::io::stderr(), "{hint}");
        }
    });
    let mut text = String::new();
    let read = stdin.take(PROMPT_BYTES).read_to_string(&mut text);
    drop(done);
    // It has written a line at most.
    let _ = waiting.join();
    read.context("reading the prompt from standard input")?;
    // The last end of line is that of `echo` and of most files: a model would see it as part of the question.
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// The form of a reply that follows the schema in `file`.
fn form(file: &Path) -> Result<Value> {
    let read = || -> Result<Value> { Ok(serde_json::from_str(&std::fs::read_to_string(file)?)?) };
    let schema = read().with_context(|| format!("reading the schema {}", file.display()))?;
    let form = json!({"name": "answer", "strict": true, "schema": schema});
    Ok(json!({"type": "json_schema", "json_schema": form}))
}
