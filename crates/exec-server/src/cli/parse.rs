//! Parsing of the command line: which definition applies, and what is printed where nothing runs.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser};

use super::args::{CliArgs, CliCommand, RunArgs};
use super::{codex, completions, overview};

/// The commands alone, without the options of `serve` at the top level.
///
/// Defining all commands takes longer than most commands take to run. Parsing with this type
/// suffices when a command is named first and its options are valid; [`CliArgs`] handles the rest,
/// errors and help included.
#[derive(Debug, Parser)]
#[command(name = "exec-server", version)]
struct CommandsOnly {
    #[command(subcommand)]
    command: CliCommand,
}

/// `run` alone: its definition delays the command that it starts.
#[derive(Debug, Parser)]
#[command(name = "exec-server run")]
struct RunOnly {
    #[command(flatten)]
    run: RunArgs,
}

/// The whole definition, with the commands in groups; the options of `serve` are on its own page.
pub(super) fn definition() -> clap::Command {
    let command = CliArgs::command();
    let template = overview::template(&command);
    command
        .mut_args(|arg| arg.hide(true))
        .override_usage("exec-server <COMMAND> [OPTIONS]")
        .help_template(template)
}

impl CliCommand {
    /// The same command. The flag records that `serve` was typed and is not only the default.
    fn named(mut self) -> Self {
        if let Self::Serve(args) = &mut self {
            args.is_own = true;
        }
        self
    }

    /// Parses this program's arguments.
    ///
    /// If there is no command to run, prints the help, the version or the error, and returns the exit
    /// code.
    pub(super) fn parse() -> Result<Self, ExitCode> {
        let arguments: Vec<OsString> = std::env::args_os().collect();
        if let Some(parsed) = codex::parse(&arguments) {
            return parsed;
        }
        let first = arguments.get(1).cloned().unwrap_or_default();
        if first == completions::COMMAND {
            return Err(completions::answer(&arguments[2..]));
        }
        if (first == "run" || first == "exec")
            && let Ok(only) = RunOnly::try_parse_from(&arguments[1..])
        {
            return Ok(Self::Run(only.run));
        }
        let is_named = !first.is_empty() && !first.as_encoded_bytes().starts_with(b"-");
        if is_named && let Ok(named) = CommandsOnly::try_parse_from(&arguments) {
            return Ok(named.command.named());
        }
        if let Some(code) = overview::answer() {
            return Err(code);
        }
        let mut definition = definition();
        let parsed = definition
            .try_get_matches_from_mut(arguments)
            .and_then(|mut matches| CliArgs::from_arg_matches_mut(&mut matches));
        match parsed {
            Ok(args) => Ok(match args.command {
                Some(command) => command.named(),
                None => Self::Serve(Box::new(args.serve)),
            }),
            Err(error) => Err(refuse(&error.format(&mut definition))),
        }
    }
}

/// Prints the requested help or version, or the error in the arguments.
pub(super) fn refuse(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    match text.strip_prefix("error: ") {
        Some(text) if error.use_stderr() => eprint!("exec-server: {text}"),
        _ => {
            let _ = error.print();
        }
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_definitions_pass_the_checks_of_clap() {
        CliArgs::command().debug_assert();
        definition().debug_assert();
    }
}
