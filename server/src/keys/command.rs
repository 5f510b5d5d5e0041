//! `steersman keys`.

use std::io::Write;
use std::path::Path;

use anyhow::Result;
use clap::{Args, Subcommand};
use jiff::Timestamp;

use super::{Configured, Editing, Key, LastOperator, NewKey, Opens, State, lifetime_s};

/// A task on the keys.
#[derive(Subcommand)]
pub enum Task {
    /// Create a key and print it, this one time.
    #[command(after_help = "Example:\n  steersman keys create laptop --expires 30d")]
    Create(Create),
    /// List the keys: name, beginning, what each opens, when it was created, expires and was revoked.
    #[command(after_help = "Example:\n  steersman keys list")]
    List,
    /// Revoke a key: a running server refuses it from now on.
    #[command(after_help = "Example:\n  steersman keys revoke laptop")]
    Revoke {
        /// Name of the key
        name: String,
    },
}

/// Options of `create`.
#[derive(Args)]
pub struct Create {
    /// Name of the key, which lists show
    pub(super) name: String,
    /// The key opens this profile only, which its requests use without naming it
    #[arg(long, conflicts_with = "operator")]
    pub(super) profile: Option<String>,
    /// The key opens everything, as server.admin_keys do
    #[arg(long)]
    pub(super) operator: bool,
    /// Time after which the key is refused, such as 12h or 30d [default: never]
    #[arg(long, value_name = "DURATION", value_parser = lifetime_s)]
    pub(super) expires: Option<u64>,
}

/// Runs a task on the keys in `data_dir`. What its user has to know besides the result goes to `messages`.
///
/// # Errors
/// If the name is taken or unknown, the profile does not exist, or the file cannot be read or written.
pub fn run(
    task: &Task,
    configured: &Configured,
    data_dir: &Path,
    out: &mut impl Write,
    messages: &mut impl Write,
) -> Result<()> {
    let mut keys = Editing::begin(data_dir, configured)?;
    let mut warn = |notes: &[String]| {
        // A closed stderr is no error.
        notes.iter().for_each(|note| drop(writeln!(messages, "warning: {note}")));
    };
    match task {
        Task::Create(options) => {
            let created = keys.create(&options.new_key())?;
            warn(&created.notes);
            writeln!(out, "{}", created.key)?;
        }
        Task::List => list(keys.keys(), out)?,
        Task::Revoke { name } => {
            // Who is at this machine can create another.
            let (key, notes) = keys.revoke(name, LastOperator::MayGo)?;
            warn(&notes);
            writeln!(out, "revoked {name} ({}..)", key.prefix)?;
        }
    }
    Ok(())
}

impl Create {
    fn new_key(&self) -> NewKey {
        let opens = match &self.profile {
            Some(profile) => Opens::Profile(profile.clone()),
            None if self.operator => Opens::Operator,
            None => Opens::AllProfiles,
        };
        NewKey { name: self.name.clone(), opens, lifetime_s: self.expires }
    }
}

fn list(keys: &[Key], out: &mut impl Write) -> Result<()> {
    if keys.is_empty() {
        writeln!(out, "no keys; create one with `steersman keys create NAME`")?;
        return Ok(());
    }
    let width = keys.iter().map(|key| key.name.len()).max().unwrap_or_default().max(4);
    let opens = |key: &Key| match &key.opens {
        Opens::AllProfiles => "all profiles".to_string(),
        Opens::Operator => "everything".into(),
        Opens::Profile(name) => format!("profile {name}"),
    };
    let second = |time: Timestamp| time.strftime("%Y-%m-%d %H:%M:%SZ").to_string();
    let opened = keys.iter().map(|key| opens(key).len()).max().unwrap_or_default().max(5);
    writeln!(
        out,
        "{:width$}  {:13}  {:opened$}  {:20}  {:20}  state",
        "name", "key", "opens", "created", "expires"
    )?;
    let now = Timestamp::now();
    for key in keys {
        let (opens, created) = (opens(key), second(key.created));
        let expires = key.expires.map_or("never".into(), second);
        let state = match (key.state_at(now), key.revoked) {
            (State::Active, _) => "active".into(),
            (State::Expired, _) => "expired".into(),
            (State::NotYet, _) => "not yet: the clock is before its creation".into(),
            (State::Revoked, revoked) => {
                format!("revoked {}", revoked.map(second).unwrap_or_default())
            }
        };
        writeln!(
            out,
            "{:width$}  {}..  {opens:opened$}  {created}  {expires:20}  {state}",
            key.name, key.prefix
        )?;
    }
    Ok(())
}
