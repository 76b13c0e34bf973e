//! Completion in shells: the scripts, and the names that they ask this program for.
//!
//! The scripts of `clap_complete` know commands and options. For names that only a server or a file
//! knows, they call `exec-server __complete`, which is described at [`answer`].

mod names;

use std::ffi::OsString;
use std::process::ExitCode;

use clap_complete::Shell;

use super::parse::definition;
use super::print;

/// The hidden command that completion scripts call.
pub(super) const COMMAND: &str = "__complete";

/// Functions of the shells that call it.
const BASH: &str = include_str!("names.bash");
const ZSH: &str = include_str!("names.zsh");
const FISH: &str = include_str!("names.fish");

/// Prints the script for a shell.
pub(super) fn run(shell: Shell) -> anyhow::Result<ExitCode> {
    print(script(shell).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// The script of `clap_complete`, with functions for names.
fn script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut definition(), "exec-server", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    match shell {
        Shell::Bash => {
            // `clap_complete` 4.6 names the program differently where it sets `cmd` and where it
            // compares it, if there is a hyphen in the name.
            let script = script.replace("exec__subcmd__server", "exec__server");
            // What follows registers `_exec__server`, without names.
            let end = script.find("\nif [[ \"${BASH_VERSINFO[0]}\" -eq 4");
            let script = end.map_or(&*script, |end| &script[..=end]);
            format!("{script}\n{BASH}")
        }
        Shell::Zsh => {
            let script = script.replacen("_exec-server() {", "_exec-server-static() {", 1);
            let end = script.find("if [ \"$funcstack[1]\" = \"_exec-server\" ]");
            let (functions, call) = script.split_at(end.unwrap_or(script.len()));
            format!("{functions}{ZSH}\n{call}")
        }
        Shell::Fish => {
            let is_on = |line: &&str| line.contains(" -l on -d ") && line.ends_with(" -r");
            let lines = script.lines().map(|line| match is_on(&line) {
                true => format!("{line} -f -a '(__exec_server_names)'\n"),
                false => format!("{line}\n"),
            });
            format!("{}\n{FISH}", lines.collect::<String>())
        }
        _ => script,
    }
}

/// Prints the names that can stand where the cursor is, one per line.
///
/// The arguments are the beginning of the word at the cursor, and the words before it, without the
/// program. Exit codes: 0 the names are all that can stand there, 1 no names stand there, 2 names of
/// local files can stand there too.
pub(super) fn answer(arguments: &[OsString]) -> ExitCode {
    let text = |word: &OsString| word.to_string_lossy().into_owned();
    let mut words = arguments.iter().map(text);
    let Some(prefix) = words.next() else {
        return ExitCode::FAILURE;
    };
    let words: Vec<String> = words.collect();
    let Some(position) = names::Position::find(&words, &prefix) else {
        return ExitCode::FAILURE;
    };
    let lines: String = position
        .names(&prefix)
        .into_iter()
        .filter(|name| name.starts_with(&prefix) && !name.contains(char::is_control))
        .map(|name| format!("{name}\n"))
        .collect();
    let _ = print(lines.as_bytes());
    match position.takes_local_files(&prefix) {
        true => ExitCode::from(2),
        false => ExitCode::SUCCESS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bash_compares_the_names_that_it_sets() {
        let script = script(Shell::Bash);
        for line in script.lines() {
            let Some(name) = line.trim().strip_prefix("cmd=\"") else {
                continue;
            };
            let Some(name) = name.strip_suffix('"').filter(|name| !name.is_empty()) else {
                continue;
            };
            let case = format!("\n        {name})\n");
            assert!(script.contains(&case), "nothing completes {name}");
        }
        assert!(!script.contains("complete -F _exec__server "));
    }

    #[test]
    fn functions_for_names_are_in_each_script() {
        let zsh = script(Shell::Zsh);
        assert!(zsh.contains("\n_exec-server-static() {"));
        assert_eq!(zsh.matches("\n_exec-server() {").count(), 1);
        assert!(zsh.trim_end().ends_with("fi"));
        let fish = script(Shell::Fish);
        let on = fish.lines().find(|line| line.contains(" -l on -d "));
        assert!(on.unwrap().ends_with("-r -f -a '(__exec_server_names)'"));
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            assert!(script(shell).contains(COMMAND), "{shell}");
        }
    }
}
