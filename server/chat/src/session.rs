//! The conversation, and the commands of the chat.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::{Options, Think};

/// The commands, as `/help` prints them.
pub const HELP: &str = "\
/think              show or hide the reasoning
/think on|off|auto  let the model reason always, never, or as the policy decides
/profile [NAME]     choose the profile that steers the replies; without a name, list them
/system [TEXT]      set the system text, or show it; `/system off` removes it
/reset, /clear      forget the conversation, except the system text
/save FILE          write the conversation to a new JSON file
/load FILE          continue a conversation that was saved, in place of this one
/help, /?           list the commands
/exit, /bye, /quit  leave, as Ctrl-D does
Ctrl-C stops a reply. A line that ends with \\ continues on the next. Text that begins with \"\"\" ends with the next. // at the
beginning sends a /.";

/// The names of the commands.
const COMMANDS: &[&str] = &[
    "think", "profile", "system", "reset", "clear", "save", "load", "help", "exit", "bye", "quit",
];

/// What stands around a text of several lines.
const QUOTES: &str = "\"\"\"";

/// The beginning of a text, to which the next line is to be added; `None` if `entered` is the whole text.
pub fn unfinished(entered: &str) -> Option<String> {
    match entered.trim_start().strip_prefix(QUOTES) {
        Some(quoted) => (!quoted.trim_end().ends_with(QUOTES)).then(|| format!("{entered}\n")),
        None => entered.strip_suffix('\\').map(|text| format!("{text}\n")),
    }
}

/// A line that the user has entered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Text for the model.
    Say(String),
    /// Show or hide the reasoning.
    Fold,
    /// Set whether the model reasons.
    Think(Think),
    /// Choose a profile, or list them.
    Profile(Option<String>),
    /// Set the system text or, with an empty one, remove it; `None` shows it.
    System(Option<String>),
    /// Forget the conversation.
    Reset,
    /// Write the conversation to a file.
    Save(PathBuf),
    /// Continue the conversation in a file.
    Load(PathBuf),
    /// List the commands.
    Help,
    /// Leave.
    Exit,
    /// An empty line.
    Nothing,
}

impl Command {
    /// Reads a line.
    ///
    /// # Errors
    /// If it is a command that does not exist or has a wrong argument; says what to write.
    pub fn parse(line: &str) -> Result<Self, String> {
        let line = line.trim();
        let quoted = line.strip_prefix(QUOTES).and_then(|text| text.strip_suffix(QUOTES));
        if let Some(text) = quoted.map(|text| text.trim_matches('\n')) {
            return Ok(if text.trim().is_empty() { Self::Nothing } else { Self::Say(text.into()) });
        }
        let Some(command) = line.strip_prefix('/') else {
            return Ok(if line.is_empty() { Self::Nothing } else { Self::Say(line.into()) });
        };
        if command.starts_with('/') {
            return Ok(Self::Say(command.into()));
        }
        let (name, argument) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let argument = Some(argument.trim()).filter(|argument| !argument.is_empty());
        match (name, argument) {
            ("think", None) => Ok(Self::Fold),
            ("think", Some(mode)) => [Think::On, Think::Off, Think::Auto]
                .into_iter()
                .find(|think| think.name() == mode)
                .map(Self::Think)
                .ok_or_else(|| format!("/think {mode}: write on, off or auto")),
            ("profile", name) => Ok(Self::Profile(name.map(str::to_owned))),
            ("system", Some("off")) => Ok(Self::System(Some(String::new()))),
            ("system", text) => Ok(Self::System(text.map(str::to_owned))),
            ("save", Some(file)) => Ok(Self::Save(file.into())),
            ("load", Some(file)) => Ok(Self::Load(file.into())),
            ("save" | "load", None) => Err(format!("/{name}: name a file")),
            ("reset" | "clear", None) => Ok(Self::Reset),
            ("help" | "?", None) => Ok(Self::Help),
            ("exit" | "quit" | "bye", None) => Ok(Self::Exit),
            ("reset" | "clear" | "help" | "?" | "exit" | "quit" | "bye", Some(_)) => {
                Err(format!("/{name} takes nothing"))
            }
            _ => {
                let distance = |known: &&&str| strsim::osa_distance(name, known);
                let near = COMMANDS
                    .iter()
                    .min_by_key(distance)
                    .filter(|near| distance(near) <= (name.len() / 3).clamp(1, 2));
                let near = near.map(|near| format!("; did you mean /{near}?")).unwrap_or_default();
                Err(format!("there is no command /{name}; /help lists them{near}"))
            }
        }
    }
}

/// A conversation with its settings.
#[derive(Debug, Clone, Default)]
pub struct Session {
    /// Name of the model.
    pub model: String,
    /// Profile, system text and sampling.
    pub options: Options,
    /// Turns, the first first: the user's and the model's text in turn.
    turns: Vec<(Role, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    User,
    Assistant,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

impl Session {
    /// An empty conversation with `model`.
    pub fn new(model: String, options: Options) -> Self {
        Self { model, options, turns: Vec::new() }
    }

    /// Adds what the user says.
    pub fn say(&mut self, text: String) {
        self.turns.push((Role::User, text));
    }

    /// Adds the model's answer, whole or stopped. Without one, what the user said last is forgotten: two turns of the
    /// user in a row are an error for many chat templates.
    pub fn answered(&mut self, answer: &str) {
        if answer.is_empty() {
            self.turns.pop();
        } else {
            self.turns.push((Role::Assistant, answer.into()));
        }
    }

    /// Forgets all turns.
    pub fn reset(&mut self) {
        self.turns.clear();
    }

    /// Replaces the turns, and the system text if the conversation has one, by those of a saved conversation: an object
    /// with `messages`, whose users and assistants speak in turn. Returns the number of turns.
    ///
    /// # Errors
    /// If `conversation` has another form; the message names the place, and nothing changes.
    pub fn load(&mut self, conversation: &Value) -> Result<usize, String> {
        let messages = conversation["messages"].as_array();
        let messages = messages.ok_or("it has no list `messages`; /save writes one")?;
        let (mut system, mut turns) = (None, Vec::new());
        for (i, message) in messages.iter().enumerate() {
            let content = message["content"].as_str();
            let content = content.ok_or(format!("messages[{i}].content: must be a text"))?;
            let next = if turns.len() % 2 == 0 { Role::User } else { Role::Assistant };
            match message["role"].as_str() {
                Some("system") if i == 0 => system = Some(content.to_owned()),
                Some(role) if role == next.name() => turns.push((next, content.to_owned())),
                _ => return Err(format!("messages[{i}].role: must be {}", next.name())),
            }
        }
        if turns.len() % 2 == 1 {
            return Err("the last message must be the assistant's".into());
        }
        self.options.system = system.or(self.options.system.take());
        self.turns = turns;
        Ok(self.turns.len())
    }

    /// The request for the next reply. Reasoning is not repeated: chat templates drop that of earlier turns.
    pub fn request(&self) -> Value {
        let Options { think, max_tokens, temperature, .. } = &self.options;
        let mut body = json!({"model": self.model, "messages": self.messages()});
        match think {
            Think::Auto => {}
            Think::On => body["chat_template_kwargs"] = json!({"enable_thinking": true}),
            Think::Off => body["chat_template_kwargs"] = json!({"enable_thinking": false}),
        }
        if let Some(tokens) = max_tokens {
            body["max_tokens"] = (*tokens).into();
        }
        if let Some(temperature) = temperature {
            // As the user wrote it: 0.7 in f32 is 0.699999988.
            body["temperature"] = temperature.to_string().parse::<f64>().unwrap_or(0.0).into();
        }
        body
    }

    /// The messages, with the system text first.
    pub fn messages(&self) -> Vec<Value> {
        let system = self.options.system.iter().map(|text| ("system", text));
        let turns = self.turns.iter().map(|(role, text)| (role.name(), text));
        system
            .chain(turns)
            .map(|(role, content)| json!({"role": role, "content": content}))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_text_or_commands() {
        let parse = |line| Command::parse(line).unwrap();
        assert_eq!(parse("  hello / there "), Command::Say("hello / there".into()));
        assert_eq!(parse("//etc is a folder"), Command::Say("/etc is a folder".into()));
        assert_eq!(parse(" "), Command::Nothing);
        assert_eq!(parse("/think"), Command::Fold);
        assert_eq!(parse("/think off"), Command::Think(Think::Off));
        assert_eq!(parse("/profile agent"), Command::Profile(Some("agent".into())));
        assert_eq!(parse("/system Be  brief."), Command::System(Some("Be  brief.".into())));
        assert_eq!(parse("/system off"), Command::System(Some(String::new())));
        assert_eq!(parse("/system"), Command::System(None));
        assert_eq!(parse("/save my chat.json"), Command::Save("my chat.json".into()));
        // As in Ollama's chat.
        assert_eq!((parse("/clear"), parse("/bye")), (Command::Reset, Command::Exit));
        assert_eq!((parse("/?"), parse("/quit")), (Command::Help, Command::Exit));
    }

    /// A user of Ollama's chat quotes texts of several lines, whose first one was sent alone.
    #[test]
    fn a_text_between_quotes_has_several_lines() {
        assert_eq!(unfinished("one line"), None);
        assert_eq!(unfinished("one \\"), Some("one \n".into()));
        let begun = unfinished("\"\"\"").unwrap();
        let begun = unfinished(&(begun + "  /not a command \\")).unwrap();
        let whole = begun + "the end\"\"\" ";
        assert_eq!(unfinished(&whole), None);
        let text = "  /not a command \\\nthe end".to_string();
        assert_eq!(Command::parse(&whole), Ok(Command::Say(text)));
        for (whole, command) in [
            ("\"\"\"a\"\"\"", Command::Say("a".into())),
            ("\"\"\"\n\"\"\"", Command::Nothing),
            ("say \"\"\"", Command::Say("say \"\"\"".into())),
        ] {
            assert_eq!((unfinished(whole), Command::parse(whole)), (None, Ok(command)));
        }
    }

    #[test]
    fn wrong_commands_say_what_to_write() {
        for (line, words) in [
            ("/think maybe", "on, off or auto"),
            ("/save", "name a file"),
            ("/load", "name a file"),
            ("/reset all", "takes nothing"),
            ("/thnik", "/help lists them; did you mean /think?"),
            ("/regenerate", "there is no command /regenerate; /help lists them"),
            ("/", "/help lists them"),
        ] {
            let error = Command::parse(line).unwrap_err();
            assert!(error.contains(words), "{line}: {error}");
        }
    }

    #[test]
    fn requests_have_the_conversation_and_the_settings() {
        let mut session = Session::new("m".into(), Options::default());
        session.say("a".into());
        assert_eq!(
            session.request(),
            json!({"model": "m", "messages": [{"role": "user", "content": "a"}]})
        );
        session.answered("b");
        session.say("c".into());
        session.options.system = Some("s".into());
        session.options.think = Think::Off;
        session.options.temperature = Some(0.7);
        session.options.max_tokens = Some(9);
        let roles: Vec<_> = session.messages().iter().map(|m| m["role"].clone()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        let request = session.request();
        assert_eq!(request["chat_template_kwargs"]["enable_thinking"], false);
        assert_eq!(request["temperature"].to_string(), "0.7");
        assert_eq!(request["max_tokens"], 9);
    }

    #[test]
    fn a_saved_conversation_is_continued_and_anything_else_changes_nothing() {
        let mut session = Session::new("m".into(), Options::default());
        session.options.system = Some("s".into());
        session.say("a".into());
        session.answered("b");
        let saved = json!({"messages": session.messages()});
        let mut other = Session::new("m".into(), Options::default());
        assert_eq!(other.load(&saved), Ok(2));
        assert_eq!(other.messages(), session.messages());
        let user = json!({"role": "user", "content": "a"});
        for (messages, words) in [
            (json!(null), "`messages`"),
            (json!([user, user]), "messages[1].role: must be assistant"),
            (json!([user]), "the assistant's"),
            (json!([{"role": "user", "content": 1}]), "messages[0].content"),
            (json!([user, {"role": "system", "content": "x"}]), "messages[1].role"),
        ] {
            let error = other.load(&json!({"messages": messages})).unwrap_err();
            assert!(error.contains(words), "`{words}` is not in {error}");
            assert_eq!(other.messages(), session.messages());
        }
    }

    /// A reply that is stopped in its reasoning would leave two turns of the user in a row.
    #[test]
    fn a_reply_without_an_answer_leaves_no_turn() {
        let mut session = Session::new("m".into(), Options::default());
        session.say("a".into());
        session.answered("");
        assert!(session.messages().is_empty());
        session.say("b".into());
        session.answered("partly");
        session.reset();
        assert!(session.messages().is_empty());
    }
}
