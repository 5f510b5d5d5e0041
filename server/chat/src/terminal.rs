//! `chat`: reads lines with history, prints replies, and stops them on Ctrl-C.

use std::fs::OpenOptions;
use std::io::{IsTerminal, Stdout, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::client::{Client, End, Piece};
use crate::screen::Screen;
use crate::session::{Command, HELP, Session, unfinished};

/// Lines that the history keeps.
const HISTORY: usize = 1000;

/// Most bytes of a file with a conversation.
const FILE_BYTES: u64 = 64 << 20;

const PROMPT: &str = "> ";
/// Before further lines of a text.
const CONTINUED: &str = "... ";

/// Chats until the user leaves. Lines are remembered in the file `history`, if there is one. The runtime must have a
/// thread of its own, which closes connections while the user types.
///
/// # Errors
/// If the server cannot be reached at the beginning, or the terminal fails. A request that fails is printed.
pub fn chat(
    runtime: &Runtime,
    client: Client,
    session: Session,
    history: Option<PathBuf>,
) -> Result<()> {
    let styled = std::io::stdout().is_terminal();
    let screen = Screen::new(std::io::stdout(), styled);
    let mut chat = Chat { runtime, client, session, screen };
    chat.choose_model()?;
    let opening =
        format!("{} {}; /help lists the commands", chat.session.model, chat.client.place());
    chat.screen.remark(&opening)?;
    let mut lines = Lines::new(history)?;
    while let Some(line) = lines.read(&mut chat.screen)? {
        match Command::parse(&line) {
            Ok(Command::Exit) => break,
            Ok(command) => chat.perform(command)?,
            Err(problem) => chat.screen.remark(&problem)?,
        }
    }
    Ok(())
}

/// Reads what the user enters.
struct Lines {
    editor: DefaultEditor,
    /// The file with earlier lines.
    history: Option<PathBuf>,
}

impl Lines {
    fn new(history: Option<PathBuf>) -> Result<Self> {
        let config = Config::builder().max_history_size(HISTORY)?.auto_add_history(false).build();
        let mut editor = DefaultEditor::with_config(config).context("preparing the terminal")?;
        if let Some(file) = &history {
            // Absent at the first start. One that cannot be read is no reason not to chat.
            let _ = editor.load_history(file);
        }
        Ok(Self { editor, history })
    }

    /// The next text, of one line or several; `None` at the end.
    fn read(&mut self, screen: &mut Screen<Stdout>) -> Result<Option<String>> {
        let mut text = String::new();
        loop {
            let prompt = if text.is_empty() { PROMPT } else { CONTINUED };
            match self.editor.readline(prompt) {
                Ok(line) => {
                    text += &line;
                    let Some(begun) = unfinished(&text) else {
                        self.remember(&text, screen)?;
                        return Ok(Some(text));
                    };
                    text = begun;
                }
                Err(ReadlineError::Interrupted) => {
                    text.clear();
                    screen.remark("Ctrl-D leaves")?;
                }
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(error).context("reading a line"),
            }
        }
    }

    fn remember(&mut self, text: &str, screen: &mut Screen<Stdout>) -> Result<()> {
        if !self.editor.add_history_entry(text)? {
            return Ok(());
        }
        let Some(file) = &self.history else { return Ok(()) };
        // The editor gives a file that root creates to root.
        let opened = steersman_files::open_private(file, OpenOptions::new().append(true));
        let opened = opened.map_err(ReadlineError::from);
        if let Err(error) = opened.and_then(|_| self.editor.append_history(file)) {
            screen.remark(&format!("the history {} is not saved: {error}", file.display()))?;
            self.history = None;
        }
        Ok(())
    }
}

/// A running chat.
struct Chat<'a> {
    runtime: &'a Runtime,
    client: Client,
    session: Session,
    screen: Screen<Stdout>,
}

impl Chat<'_> {
    /// Checks model and profile, or takes the server's first model.
    fn choose_model(&mut self) -> Result<()> {
        if let Some(profile) = self.session.options.profile.clone() {
            return self.choose_profile(&profile);
        }
        let models = self.models()?;
        if self.session.model.is_empty() {
            self.session.model.clone_from(&models[0]);
        }
        let model = &self.session.model;
        ensure!(
            models.contains(model),
            "{} does not serve {model}; it serves {}",
            self.client.url(),
            models.join(", ")
        );
        Ok(())
    }

    fn models(&self) -> Result<Vec<String>> {
        self.runtime.block_on(self.client.models())
    }

    /// Chooses a profile, and the model that it uses.
    fn choose_profile(&mut self, profile: &str) -> Result<()> {
        let models = self.models()?;
        let suffix = format!("@{profile}");
        let model = match profile {
            "default" => models.first().map(String::as_str),
            _ => models.iter().find_map(|name| name.strip_suffix(&suffix)),
        };
        let Some(model) = model else {
            bail!("there is no profile {profile}; there are {}", profiles(&models).join(", "));
        };
        self.session.model = model.into();
        self.session.options.profile = Some(profile.into());
        Ok(())
    }

    /// Performs a command and prints its outcome.
    ///
    /// # Errors
    /// If the terminal fails.
    fn perform(&mut self, command: Command) -> Result<()> {
        let done = match command {
            Command::Nothing | Command::Exit => return Ok(()),
            Command::Say(text) => return self.reply(text),
            Command::Fold => return Ok(self.screen.fold()?),
            Command::Help => Ok(HELP.to_owned()),
            Command::Reset => {
                self.session.reset();
                Ok("the conversation is forgotten".into())
            }
            Command::Think(think) => {
                self.session.options.think = think;
                Ok(format!("thinking is {}", think.name()))
            }
            Command::Profile(None) => self.models().map(|models| profiles(&models).join(", ")),
            Command::Profile(Some(name)) => self
                .choose_profile(&name)
                .map(|()| format!("profile {name}, model {}", self.session.model)),
            Command::System(None) => {
                let text = self.session.options.system.as_deref();
                Ok(text.unwrap_or("there is no system text").to_owned())
            }
            Command::System(Some(text)) if text.is_empty() => {
                self.session.options.system = None;
                Ok("the system text is removed".into())
            }
            Command::System(Some(text)) => {
                self.session.options.system = Some(text);
                Ok("the system text is set".into())
            }
            Command::Save(file) => {
                self.save(&file).map(|()| format!("saved in {}", file.display()))
            }
            Command::Load(file) => {
                self.load(&file).map(|turns| format!("{turns} turns from {}", file.display()))
            }
        };
        match done {
            Ok(line) => self.screen.remark(&line)?,
            Err(error) => self.screen.failed(&error)?,
        }
        Ok(())
    }

    /// Sends what the user says, and prints the reply until it ends or Ctrl-C stops it.
    fn reply(&mut self, text: String) -> Result<()> {
        self.session.say(text);
        let mut answer = String::new();
        self.screen.begin();
        let client = self.client.clone();
        let profile = self.session.options.profile.clone();
        let (request, screen) = (self.session.request(), &mut self.screen);
        let start = Instant::now();
        let mut first = None;
        let whole = async {
            let mut reply = client.chat(request, profile.as_deref()).await?;
            loop {
                let piece = reply.next().await?;
                first.get_or_insert_with(Instant::now);
                screen.piece(&piece)?;
                match piece {
                    Piece::Answer(text) => answer.push_str(&text),
                    Piece::Reasoning(_) => {}
                    Piece::End(end) => return anyhow::Ok(end),
                }
            }
        };
        let stopped = async {
            // Without a handler the signal ends the process, which stops the reply, too.
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let ended: Option<Result<End>> = self.runtime.block_on(async {
            tokio::select! {
                ended = whole => Some(ended),
                () = stopped => None,
            }
        });
        self.session.answered(answer.trim_start_matches('\n'));
        let first = first.unwrap_or(start);
        match ended {
            Some(Ok(end)) => self.screen.end(&end, first - start, first.elapsed())?,
            Some(Err(error)) => self.screen.failed(&error)?,
            None => self.screen.stopped()?,
        }
        Ok(())
    }

    /// Writes the conversation to a new file.
    fn save(&self, file: &Path) -> Result<()> {
        let conversation = json!({"messages": self.session.messages()});
        let text = serde_json::to_string_pretty(&conversation)? + "\n";
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(file)
            .and_then(|mut file| file.write_all(text.as_bytes()));
        written
            .with_context(|| format!("saving in {} (/save writes a new file only)", file.display()))
    }

    /// Continues the conversation in a file; returns its number of turns.
    fn load(&mut self, file: &Path) -> Result<usize> {
        let mut read = || {
            let text = steersman_files::read_text(file, FILE_BYTES)?;
            let conversation = serde_json::from_str(&text)
                .context("it is not JSON; name a file that /save wrote")?;
            self.session.load(&conversation).map_err(anyhow::Error::msg)
        };
        read().with_context(|| format!("loading {}", file.display()))
    }
}

/// The profiles in a list of models.
fn profiles(models: &[String]) -> Vec<&str> {
    let named = models.iter().filter_map(|name| Some(name.rsplit_once('@')?.1));
    std::iter::once("default").chain(named).collect()
}
