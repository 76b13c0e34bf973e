//! Names for completion: environments, processes of a server, and paths on it.
//!
//! Asks no questions, installs nothing, and gives up after a second.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use clap::{Arg, ArgMatches, Args as _, Command, FromArgMatches as _};
use exec_server_client::environment::LOCAL;
use exec_server_protocol::process::{List, ListParams, ListedProcess};

use super::super::args::ServerArgs;
use super::super::parse::definition;
use super::super::{fs, on, required, runtime};

/// How long a shell waits for names.
const LIMIT: Duration = Duration::from_secs(1);

/// What can stand at the cursor.
#[derive(Debug, PartialEq, Eq)]
enum NameKind {
    Environment,
    Process,
    /// A path where the command works.
    Path,
    /// A path on this machine, or one on a machine that is named before it.
    CopySide,
}

/// The place of the cursor in a command line.
#[derive(Debug)]
pub(super) struct Position {
    kind: NameKind,
    /// The options of the command line that say where to work.
    server: ServerArgs,
    /// Whether the argument can also be a local file.
    or_local: bool,
}

impl Position {
    /// What stands at the cursor, after these words; `None` if no name does.
    pub(super) fn find(words: &[String], prefix: &str) -> Option<Self> {
        let line = ParsedLine::new(words)?;
        let position = |kind| {
            Some(Self {
                kind,
                server: line.server()?,
                or_local: false,
            })
        };
        match line.pending.as_deref() {
            Some("on") => return position(NameKind::Environment),
            Some("cwd") if line.path == ["run"] => return position(NameKind::Path),
            Some(_) => return None,
            None if prefix.starts_with("--on=") => return position(NameKind::Environment),
            None if prefix.starts_with('-') => return None,
            None => {}
        }
        let path: Vec<&str> = line.path.iter().map(String::as_str).collect();
        match path[..] {
            ["kill"] => position(NameKind::Process),
            ["cp"] => position(NameKind::CopySide),
            ["env", "use" | "remove" | "status"] => position(NameKind::Environment),
            ["fs", "help"] => None,
            // The first operand is a pattern.
            ["fs", "search"] if line.operands == 0 => None,
            ["fs", command] => Some(Self {
                or_local: command == "put",
                ..position(NameKind::Path)?
            }),
            _ => None,
        }
    }

    /// Whether names of local files can stand there too.
    pub(super) fn takes_local_files(&self, prefix: &str) -> bool {
        self.or_local || (self.kind == NameKind::CopySide && !prefix.contains(':'))
    }

    /// The names that begin with `prefix`, and maybe others.
    pub(super) fn names(&self, prefix: &str) -> Vec<String> {
        let found = match self.kind {
            NameKind::Environment => {
                let option = if prefix.starts_with("--on=") {
                    "--on="
                } else {
                    ""
                };
                let names = environments();
                Some(
                    names
                        .into_iter()
                        .map(|name| format!("{option}{name}"))
                        .collect(),
                )
            }
            NameKind::CopySide if !prefix.contains(':') => {
                let names = environments().into_iter().filter(|name| name != LOCAL);
                Some(names.map(|name| format!("{name}:")).collect())
            }
            NameKind::Process | NameKind::Path | NameKind::CopySide => self.asked(prefix),
        };
        found.unwrap_or_default()
    }

    /// Asks the machine. An error is no name.
    fn asked(&self, prefix: &str) -> Option<Vec<String>> {
        let runtime = runtime().ok()?;
        let asked = runtime.block_on(async {
            let asked = async {
                match self.kind {
                    NameKind::Process => processes(&self.server).await,
                    NameKind::CopySide => copied_paths(&self.server, prefix).await,
                    _ => paths(on::resolve(&self.server)?, prefix, "").await,
                }
            };
            tokio::time::timeout(LIMIT, asked).await
        });
        runtime.shutdown_background();
        asked.ok()?.ok()
    }
}

/// The words before the cursor, as far as completion needs them.
#[derive(Debug)]
struct ParsedLine {
    /// The names of the command and its subcommand.
    path: Vec<String>,
    /// Words that are neither commands nor options.
    operands: usize,
    /// The option whose value stands at the cursor.
    pending: Option<String>,
    /// Values of options, by the options' ids.
    options: BTreeMap<String, Vec<String>>,
}

impl ParsedLine {
    /// `None` after `--`, where words belong to another program.
    fn new(words: &[String]) -> Option<Self> {
        let mut root = definition();
        root.build();
        let mut command = &root;
        let mut line = Self {
            path: Vec::new(),
            operands: 0,
            pending: None,
            options: BTreeMap::new(),
        };
        for word in words {
            if let Some(id) = line.pending.take() {
                line.options.entry(id).or_default().push(word.clone());
            } else if word == "--" {
                return None;
            } else if word.starts_with('-') && word != "-" {
                line.take_option(command, word);
            } else if line.operands == 0
                && let Some(found) = command.find_subcommand(word)
            {
                line.path.push(found.get_name().to_owned());
                command = found;
            } else {
                line.operands += 1;
                // What follows belongs to the program that `run` starts.
                if line.path == ["run"] {
                    return None;
                }
            }
        }
        Some(line)
    }

    fn take_option(&mut self, command: &Command, word: &str) {
        let takes_value = |arg: &&Arg| arg.get_action().takes_values();
        let mut args = command.get_arguments().filter(takes_value);
        if let Some(long) = word.strip_prefix("--") {
            let (name, value) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (long, None),
            };
            let Some(arg) = args.find(|arg| arg.get_long() == Some(name)) else {
                return;
            };
            let id = arg.get_id().to_string();
            match value {
                Some(value) => self.options.entry(id).or_default().push(value.to_owned()),
                None => self.pending = Some(id),
            }
        } else if let Some(short) = word.chars().last()
            && let Some(arg) = args.find(|arg| arg.get_short() == Some(short))
        {
            self.pending = Some(arg.get_id().to_string());
        }
    }

    /// The options that say where to work. Nothing is asked there or installed for a completion.
    fn server(&self) -> Option<ServerArgs> {
        let command = ServerArgs::augment_args(Command::new("exec-server"));
        let mut arguments = vec!["exec-server".to_owned()];
        for arg in command.get_arguments() {
            let values = self.options.get(arg.get_id().as_str());
            for value in values.into_iter().flatten() {
                arguments.push(format!("--{}={value}", arg.get_long()?));
            }
        }
        let matches: ArgMatches = command.try_get_matches_from(arguments).ok()?;
        let mut server = ServerArgs::from_arg_matches(&matches).ok()?;
        server.ssh.no_install = true;
        Some(server)
    }
}

fn environments() -> Vec<String> {
    let list = on::configured().load();
    let configured = list.map(|list| list.ids().map(str::to_owned).collect());
    let mut names: Vec<String> = configured.unwrap_or_default();
    for name in [LOCAL, on::OWN_SERVER] {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    names
}

async fn processes(server: &ServerArgs) -> anyhow::Result<Vec<String>> {
    let client = required(server)?.connect().await?;
    let listed = client.call::<List>(&ListParams { all: true }).await?;
    Ok(process_names(&listed.processes))
}

/// The ids of processes, with their sessions where several have the same, and their pids.
fn process_names(listed: &[ListedProcess]) -> Vec<String> {
    let mut names = Vec::new();
    for process in listed.iter().filter(|process| process.running) {
        let id = &process.process_id;
        let same = listed
            .iter()
            .filter(|other| other.running && other.process_id == *id);
        match &process.session_id {
            Some(session) if same.count() > 1 => {
                let session: String = session.chars().take(8).collect();
                names.push(format!("{session}/{id}"));
            }
            _ => names.push(id.clone()),
        }
        names.push(process.pid.to_string());
    }
    names
}

/// Paths on the machine that is named before the colon.
async fn copied_paths(server: &ServerArgs, side: &str) -> anyhow::Result<Vec<String>> {
    let Some((name, path)) = fs::split_side(side) else {
        return Ok(Vec::new());
    };
    let before = &side[..side.len() - path.len()];
    let place = match name {
        Some(name) => on::named(name, server)?,
        None => on::CommandLocation::There(required(server)?),
    };
    paths(place, path, before).await
}

/// What is in the directory of a path, each with `before` in front.
async fn paths(
    place: on::CommandLocation,
    path: &str,
    before: &str,
) -> anyhow::Result<Vec<String>> {
    let directory = &path[..path.rfind('/').map_or(0, |slash| slash + 1)];
    let shows_hidden = path[directory.len()..].starts_with('.');
    let entries = fs::names_in(place, Path::new(directory)).await?;
    let shown = entries
        .into_iter()
        .filter(|name| shows_hidden || !name.starts_with('.'));
    let mut names: Vec<String> = shown
        .map(|name| format!("{before}{directory}{name}"))
        .collect();
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str, prefix: &str) -> Option<Position> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Position::find(&words, prefix)
    }

    #[test]
    fn kind_of_a_name_follows_from_the_words_before_it() {
        for (line, prefix, expected) in [
            ("run --on", "", Some(NameKind::Environment)),
            ("run -v", "--on=b", Some(NameKind::Environment)),
            ("fs --on box ls", "", Some(NameKind::Path)),
            ("fs --on", "b", Some(NameKind::Environment)),
            ("kill --grace 5s", "run", Some(NameKind::Process)),
            ("kill --grace", "5", None),
            ("kill -s", "I", None),
            ("kill run-1", "", Some(NameKind::Process)),
            ("kill", "-", None),
            ("cp -r src", "box:/", Some(NameKind::CopySide)),
            ("env use", "", Some(NameKind::Environment)),
            ("env", "u", None),
            ("fs search", "TODO", None),
            ("fs search TODO", "/s", Some(NameKind::Path)),
            ("run --on box --cwd", "/", Some(NameKind::Path)),
            ("run --on box --", "--on", None),
            ("run make --on", "", None),
            ("", "ru", None),
        ] {
            let kind = found(line, prefix).map(|position| position.kind);
            assert_eq!(kind, expected, "{line} {prefix}");
        }
    }

    #[test]
    fn position_has_the_options_of_the_line() {
        let position = found("kill --on box --ssh-option A=b --ssh-option=C=d", "").unwrap();
        assert_eq!(position.server.on.as_deref(), Some("box"));
        assert_eq!(position.server.ssh.ssh_option, ["A=b", "C=d"]);
        assert!(position.server.ssh.no_install);
        let position = found("fs --url ws://127.0.0.1:1 put a", "").unwrap();
        assert_eq!(position.server.url.as_deref(), Some("ws://127.0.0.1:1"));
        assert!(position.takes_local_files(""));
    }
}
