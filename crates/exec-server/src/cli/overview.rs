//! Texts about the program as a whole: the list of commands, the introduction, and advice for
//! commands that do not exist.

use std::fmt::Write as _;
use std::process::ExitCode;

use super::table::visible;
use super::{print, settings, terminal};

/// The commands in the order in which `-h` shows them.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Use", &["run", "ps", "kill", "cp", "fs", "env"]),
    (
        "Serve",
        &[
            "serve", "daemon", "init", "token", "config", "status", "doctor",
        ],
    ),
    ("Reach", &["rendezvous", "fleet", "forward"]),
    ("Agents", &["mcp", "mcp-proxy"]),
];

/// The other commands, which `-h` only names.
const OTHERS: [&str; 4] = ["completions", "man", "install-as-codex", "help"];

/// The help page of the program: its commands in groups, then its options.
pub(super) fn template(command: &clap::Command) -> String {
    let (header, literal) = {
        let styles = command.get_styles();
        (styles.get_header(), styles.get_literal())
    };
    let mut text = "{about}\n\n{usage-heading} {usage}\n".to_owned();
    for (group, names) in GROUPS {
        let _ = write!(text, "\n{header}{group}:{header:#}\n");
        for name in names {
            // A command may be missing in a build without its feature.
            let Some(found) = command.find_subcommand(name) else {
                continue;
            };
            let about = found.get_about().map(ToString::to_string);
            let about = about.unwrap_or_default();
            let _ = writeln!(text, "  {literal}{name:11}{literal:#}  {about}");
        }
    }
    let others = OTHERS.join(", ");
    let _ = writeln!(text, "\n{header}Other:{header:#} {others}");
    text.push_str("\n{options}{after-help}");
    text
}

/// Printed by `exec-server` without arguments on a terminal.
const INTRODUCTION: &str = concat!(
    "exec-server ",
    env!("CARGO_PKG_VERSION"),
    " runs commands and uses files on any machine, as if they were here.

To begin with:
  exec-server run -- make test                     run a command on this machine
  exec-server run --on ssh://HOST -- bash          open a shell on a machine with an sshd
  exec-server cp -r src ssh://HOST:/tmp            copy a directory there
  exec-server serve                                serve this machine, to yourself
  exec-server run --on serve -- make test          run a command on that server

`exec-server -h` lists all commands.
"
);

/// Settings that start a server even without options on the command line.
const SERVER_VARIABLES: [&str; 4] = [
    settings::FILE_VARIABLE,
    "EXEC_SERVER_LISTEN",
    "EXEC_SERVER_REMOTE_URL",
    "LISTEN_FDS",
];

/// Prints advice if there is no command to run: if a user typed no arguments, or a command that does
/// not exist. Returns the exit code in this case.
///
/// Without arguments and without a terminal, the program serves: other programs start it so.
pub(super) fn answer() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let Some(first) = arguments.next() else {
        let is_set = |name: &&str| settings::variable(name).is_some();
        if !terminal::is_interactive() || SERVER_VARIABLES.iter().any(is_set) {
            return None;
        }
        return Some(match print(INTRODUCTION.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        });
    };
    let first = first.to_str()?;
    if first == "version" {
        let version = concat!("exec-server ", env!("CARGO_PKG_VERSION"), "\n");
        return Some(match print(version.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        });
    }
    let next = arguments.next();
    let operand = next
        .as_deref()
        .and_then(|next| next.to_str())
        .filter(|next| !next.is_empty() && !next.starts_with('-'));
    let advice = advice(first, operand)?;
    eprintln!("exec-server: there is no command `{first}`; {advice}");
    Some(ExitCode::from(2))
}

/// The command to type instead of one that is known from another program.
fn advice(command: &str, operand: Option<&str>) -> Option<String> {
    let operand = operand.map(visible);
    let or = |default: &str| operand.clone().unwrap_or_else(|| default.to_owned());
    Some(match command {
        "ssh" | "login" => {
            let host = or("HOST");
            let host = host.strip_prefix("ssh://").unwrap_or(&host);
            format!("for a shell on a machine: exec-server run --on ssh://{host} -- bash")
        }
        "shell" | "sh" | "bash" | "console" => {
            "for a shell here: exec-server run -- bash; elsewhere: exec-server run --on ENV -- bash"
                .to_owned()
        }
        "attach" | "logs" | "resume" | "reconnect" => {
            "`run` stays attached to its command and reconnects by itself; to see what runs: \
             exec-server ps"
                .to_owned()
        }
        "connect" => format!(
            "for a shell on a server: exec-server run --url {} -- bash",
            or("URL")
        ),
        "scp" | "sftp" | "rsync" | "copy" | "upload" | "download" | "push" | "pull" => {
            "to copy files: exec-server cp -r src ssh://HOST:/tmp".to_owned()
        }
        "ls" | "cat" | "put" | "get" | "stat" | "rm" | "mv" | "walk" | "search" | "watch" => {
            format!("for files: exec-server fs {command} {}", or("PATH"))
        }
        "find" | "grep" => format!("to search files: exec-server fs search {}", or("PATTERN")),
        "list" => "for processes: exec-server ps; for machines: exec-server env list".to_owned(),
        "top" => "for processes: exec-server ps; for servers: exec-server status".to_owned(),
        "info" | "ping" => "for a server's state: exec-server status".to_owned(),
        "start" | "server" | "listen" => {
            "to serve this machine: exec-server serve; in the background: exec-server daemon"
                .to_owned()
        }
        "stop" => "to end a process: exec-server kill; the background server: exec-server daemon \
                   --stop"
            .to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::parse::definition;
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let definition = definition();
        let groups = GROUPS.iter().flat_map(|(_, names)| *names);
        let mut shown: Vec<&str> = groups.chain(&OTHERS).copied().collect();
        let mut defined: Vec<&str> = definition
            .get_subcommands()
            .map(clap::Command::get_name)
            .collect();
        // clap adds this command when it parses.
        defined.push("help");
        shown.retain(|name| cfg!(feature = "mcp") || !name.starts_with("mcp"));
        shown.sort_unstable();
        defined.sort_unstable();
        assert_eq!(shown, defined);
    }

    #[test]
    fn advice_is_given_only_for_unknown_commands() {
        let definition = definition();
        for word in ["ssh", "shell", "attach", "ls", "start", "stop", "scp"] {
            assert!(advice(word, None).is_some(), "{word}");
            assert!(definition.find_subcommand(word).is_none(), "{word}");
        }
        let ssh = advice("ssh", Some("me@box\x1b")).unwrap();
        assert!(ssh.ends_with("ssh://me@box\\u{1b} -- bash"), "{ssh}");
        assert_eq!(advice("run", None), None);
    }
}
