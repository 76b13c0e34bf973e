//! Command line of `codex exec-server`, for programs that start Codex's executor by its name.
//!
//! Used if this program is called `codex`, or if its first argument is `exec-server`. Accepts every
//! option of the compatible version in addition to those of `serve` and `forward`. Options about
//! Codex's own configuration are ignored with a warning; options for something that this program
//! cannot do are refused before anything is registered.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use rustix::fs::{readlink, symlink, unlink};
use rustix::io::Errno;

use super::args::{CliCommand, ForwardArgs, ServeArgs};
use super::error::notice;
use super::print;

/// Name under which programs start Codex.
const NAME: &str = "codex";

/// The subcommand that this program provides.
const SUBCOMMAND: &str = "exec-server";

/// Version of Codex whose command line this is.
const COMPATIBLE_VERSION: &str = "0.169.0";

/// Options that Codex has for all its subcommands, and whether they take a value.
const GLOBAL_OPTIONS: [(&str, bool); 7] = [
    ("-c", true),
    ("--config", true),
    ("--enable", true),
    ("--disable", true),
    ("-p", true),
    ("--profile", true),
    ("--strict-config", false),
];

// Options of `codex exec-server` that `serve` does not have.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Accepted for compatibility with Codex")]
struct CodexArgs {
    /// Ignored: the configuration of Codex is not used
    #[arg(short = 'c', long = "config", value_name = "KEY=VALUE")]
    overrides: Vec<String>,

    /// Ignored: Codex's features are not used
    #[arg(long, value_name = "FEATURE")]
    enable: Vec<String>,

    /// Ignored: Codex's features are not used
    #[arg(long, value_name = "FEATURE")]
    disable: Vec<String>,

    /// Ignored: the configuration of Codex is not used
    #[arg(long)]
    strict_config: bool,

    /// Give commands in a sandbox their own PID namespace; `inherit` is refused
    #[arg(long, value_name = "MODE")]
    linux_sandbox_pid_namespace: Option<PidNamespace>,

    /// Ignored: permitted private addresses are connected directly
    #[arg(
        long,
        env = "CODEX_EXEC_SERVER_PROXY_PRIVATE_IPS_VIA_UPSTREAM",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    proxy_private_ips_via_upstream: bool,

    /// Connect to the registry's relay; `direct` is refused
    #[arg(long, value_name = "TRANSPORT")]
    remote_transport: Option<RemoteTransport>,

    /// Refused: an account's policy can only be loaded by Codex
    #[arg(long)]
    chatgpt_token_stdin: bool,

    /// Requires --chatgpt-token-stdin
    #[arg(long, value_name = "ID", requires = "chatgpt_token_stdin")]
    chatgpt_account_id: Option<String>,

    /// Refused: requires the direct transport
    #[arg(long)]
    aws_sigv4: bool,

    /// Requires --aws-sigv4
    #[arg(long, value_name = "PROFILE", requires = "aws_sigv4")]
    aws_profile: Option<String>,

    /// Requires --aws-sigv4
    #[arg(long, value_name = "REGION", requires = "aws_sigv4")]
    aws_region: Option<String>,

    /// Requires --aws-sigv4
    #[arg(long, value_name = "SERVICE", requires = "aws_sigv4")]
    aws_service: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PidNamespace {
    Isolate,
    Inherit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RemoteTransport {
    Noise,
    Direct,
}

/// Serve clients as `codex exec-server` does
#[derive(Debug, Parser)]
#[command(
    name = "codex exec-server",
    version,
    args_conflicts_with_subcommands = true
)]
struct CodexExecServer {
    #[command(subcommand)]
    command: Option<CodexCommand>,
    #[command(flatten)]
    codex: CodexArgs,
    #[command(flatten)]
    serve: ServeArgs,
}

#[derive(Debug, Subcommand)]
enum CodexCommand {
    /// Register an existing server as an environment of a registry
    Forward(Box<CodexForward>),
}

#[derive(Debug, clap::Args)]
struct CodexForward {
    #[command(flatten)]
    codex: CodexArgs,
    #[command(flatten)]
    forward: ForwardArgs,
}

/// Parses the arguments of this program, if it was called as Codex.
///
/// If there is no command to run, prints the help, the version or the error, and returns the exit
/// code.
pub(super) fn parse(arguments: &[OsString]) -> Option<Result<CliCommand, ExitCode>> {
    let program = arguments.first().map(Path::new);
    let is_codex = program.and_then(Path::file_name) == Some(OsStr::new(NAME));
    let rest = arguments.get(1..).unwrap_or_default();
    if is_codex {
        return Some(of_codex(rest));
    }
    match rest.split_first() {
        Some((first, rest)) if first == SUBCOMMAND => Some(of_exec_server(&[], rest)),
        _ => None,
    }
}

/// Parses arguments of `codex`: `[GLOBAL OPTIONS] exec-server …`, or a question about its version.
fn of_codex(arguments: &[OsString]) -> Result<CliCommand, ExitCode> {
    let mut at = 0;
    while let Some(argument) = arguments.get(at).and_then(|argument| argument.to_str()) {
        let name = argument.split('=').next().unwrap_or_default();
        let Some((_, takes_value)) = GLOBAL_OPTIONS.iter().find(|(known, _)| *known == name) else {
            break;
        };
        at += 1 + usize::from(*takes_value && name == argument);
    }
    let (global, rest) = arguments.split_at(at.min(arguments.len()));
    match rest.split_first() {
        Some((first, rest)) if first == SUBCOMMAND => of_exec_server(global, rest),
        Some((first, _)) if first == "--version" || first == "-V" || first == "version" => {
            Err(version())
        }
        Some((first, _)) if first == "--help" || first == "-h" || first == "help" => {
            of_exec_server(&[], &["--help".into()])
        }
        _ => {
            notice(&format!(
                "only `codex exec-server` is provided under the name `codex`; this program is \
                 exec-server {}",
                env!("CARGO_PKG_VERSION")
            ));
            Err(ExitCode::from(2))
        }
    }
}

/// Prints the version as Codex does, for programs that compare it. Prints on standard error that
/// this program is exec-server.
fn version() -> ExitCode {
    notice(&format!(
        "version {}; acts as `codex exec-server` {COMPATIBLE_VERSION}",
        env!("CARGO_PKG_VERSION")
    ));
    match print(format!("codex-cli {COMPATIBLE_VERSION}\n").as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn of_exec_server(global: &[OsString], rest: &[OsString]) -> Result<CliCommand, ExitCode> {
    // The option `--config` is that of Codex, so the settings file has another name here.
    let rename = |arg: clap::Arg| arg.long("settings");
    let mut definition = CodexExecServer::command()
        .mut_arg("config", rename)
        .mut_subcommand("forward", |forward| forward.mut_arg("config", rename));
    let name = OsString::from("codex exec-server");
    let parsed = definition
        .try_get_matches_from_mut([&name].into_iter().chain(rest))
        .and_then(|mut matches| CodexExecServer::from_arg_matches_mut(&mut matches));
    let parsed = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return Err(super::parse::refuse(&error.format(&mut definition))),
    };
    let (codex, mut command) = match parsed.command {
        None => (parsed.codex, CliCommand::Serve(Box::new(parsed.serve))),
        Some(CodexCommand::Forward(forward)) => {
            let CodexForward { codex, forward } = *forward;
            (codex, CliCommand::Forward(Box::new(forward)))
        }
    };
    if let Err(error) = codex.refuse_unsupported() {
        super::error::report(&error);
        return Err(ExitCode::FAILURE);
    }
    let ignored = codex.ignored(global);
    if !ignored.is_empty() {
        notice(&format!(
            "ignored, because they have no effect here: {}",
            ignored.join(", ")
        ));
    }
    match &mut command {
        CliCommand::Serve(args) => args.remote.as_codex = true,
        CliCommand::Forward(args) => args.remote.as_codex = true,
        _ => {}
    }
    Ok(command)
}

impl CodexArgs {
    /// Rejects options that this program does not support.
    fn refuse_unsupported(&self) -> anyhow::Result<()> {
        if self.linux_sandbox_pid_namespace == Some(PidNamespace::Inherit) {
            bail!(
                "--linux-sandbox-pid-namespace inherit is not supported: commands in a sandbox \
                 always have their own PID namespace; omit it"
            );
        }
        if self.remote_transport == Some(RemoteTransport::Direct) || self.aws_sigv4 {
            bail!(
                "the direct transport with AWS signatures is not supported: use a registry with \
                 `--remote-transport noise`"
            );
        }
        if self.chatgpt_token_stdin {
            bail!(
                "--chatgpt-token-stdin is not supported: only Codex can load the policy of the \
                 account; set CODEX_API_KEY or use --registration-bearer-stdin"
            );
        }
        Ok(())
    }

    /// Names of the given options that have no effect.
    fn ignored(&self, global: &[OsString]) -> Vec<&'static str> {
        let is_global = |name: &str| {
            global
                .iter()
                .filter_map(|argument| argument.to_str())
                .any(|argument| argument.split('=').next() == Some(name))
        };
        let options = [
            (
                "-c",
                !self.overrides.is_empty() || is_global("-c") || is_global("--config"),
            ),
            ("--enable", !self.enable.is_empty() || is_global("--enable")),
            (
                "--disable",
                !self.disable.is_empty() || is_global("--disable"),
            ),
            (
                "--strict-config",
                self.strict_config || is_global("--strict-config"),
            ),
            ("--profile", is_global("-p") || is_global("--profile")),
            (
                "--proxy-private-ips-via-upstream",
                self.proxy_private_ips_via_upstream,
            ),
        ];
        let given = options.into_iter().filter(|(_, given)| *given);
        given.map(|(name, _)| name).collect()
    }
}

/// Creates the link `codex` to this program in a directory, and prints its path.
pub(super) fn install(directory: &Path, force: bool) -> anyhow::Result<ExitCode> {
    let program = readlink("/proc/self/exe", Vec::new()).context("cannot find this program")?;
    let program = PathBuf::from(OsString::from(
        program
            .to_str()
            .context("the path of this program is not UTF-8")?,
    ));
    let link = directory.join(NAME);
    if force {
        match unlink(&link) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot replace {}", link.display()));
            }
        }
    }
    match symlink(&program, &link) {
        Ok(()) => {}
        Err(Errno::EXIST) => {
            let same = readlink(&link, Vec::new())
                .is_ok_and(|target| target.as_bytes() == program.as_os_str().as_encoded_bytes());
            if !same {
                bail!("{} exists; --force replaces it", link.display());
            }
        }
        Err(error) => {
            return Err(error).with_context(|| format!("cannot create {}", link.display()));
        }
    }
    print(format!("{}\n", link.display()).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Option<Result<CliCommand, ExitCode>> {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        parse(&arguments)
    }

    #[test]
    fn program_acts_as_codex_by_its_name_or_first_argument() {
        for arguments in [
            &["codex", "exec-server"][..],
            &["/usr/bin/codex", "exec-server", "--listen", "stdio"],
            &["codex", "-c", "a=1", "--enable=x", "exec-server"],
            &["exec-server", "exec-server"],
        ] {
            let Some(Ok(CliCommand::Serve(args))) = parsed(arguments) else {
                panic!("{arguments:?}");
            };
            assert!(args.remote.as_codex);
        }
        let forward = [
            "codex",
            "exec-server",
            "forward",
            "--connect",
            "ws://127.0.0.1:1",
        ];
        let remote = ["--remote", "http://127.0.0.1:2", "--environment-id", "e"];
        let arguments = [&forward[..], &remote].concat();
        let Some(Ok(CliCommand::Forward(args))) = parsed(&arguments) else {
            panic!("{arguments:?}");
        };
        assert!(args.remote.as_codex);
        for arguments in [
            &["exec-server", "serve"][..],
            &["exec-server"],
            &["codex-x"],
        ] {
            assert!(parsed(arguments).is_none(), "{arguments:?}");
        }
    }

    #[test]
    fn settings_file_has_another_name_than_the_configuration_of_codex() {
        let arguments = [
            "codex",
            "exec-server",
            "--config",
            "k=v",
            "--settings",
            "file",
        ];
        let Some(Ok(CliCommand::Serve(args))) = parsed(&arguments) else {
            panic!("not parsed");
        };
        assert_eq!(args.config, Some("file".into()));
    }

    #[test]
    fn unsupported_and_unknown_options_are_refused() {
        for arguments in [
            &["codex"][..],
            &["codex", "exec", "prompt"],
            &["codex", "exec-server", "--aws-sigv4"],
            &["codex", "exec-server", "--remote-transport", "direct"],
            &["codex", "exec-server", "--chatgpt-token-stdin"],
            &["codex", "exec-server", "--chatgpt-account-id", "a"],
            &[
                "codex",
                "exec-server",
                "--linux-sandbox-pid-namespace",
                "inherit",
            ],
            &["codex", "exec-server", "--no-such-option"],
        ] {
            assert!(matches!(parsed(arguments), Some(Err(_))), "{arguments:?}");
        }
    }
}
