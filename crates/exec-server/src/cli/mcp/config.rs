//! `exec-server mcp config`: what to paste into an MCP client so that it starts `exec-server mcp`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use exec_server_executor::fs::canonicalize;
use serde_json::json;

use super::super::args::{McpClientArg, McpConfigArgs};
use super::super::table::typed;
use super::super::{error, print as print_bytes, settings};

/// Name of the server in a client, unless the environment has one that all clients accept.
const DEFAULT_NAME: &str = "exec-server";

/// How long Codex waits for a tool, in seconds: longer than `wait_for`, whose limit is 600.
const CODEX_TOOL_TIMEOUT: u32 = 660;

/// Tools of Claude Code that use the machine on which it runs.
const CLAUDE_TOOLS: [&str; 10] = [
    "Bash",
    "Edit",
    "Glob",
    "Grep",
    "LSP",
    "Monitor",
    "NotebookEdit",
    "PowerShell",
    "Read",
    "Write",
];

/// A piece of configuration.
struct Snippet {
    /// Where it belongs.
    place: String,
    text: String,
}

pub(super) fn print(args: &McpConfigArgs) -> anyhow::Result<ExitCode> {
    let mut arguments = Vec::new();
    for argument in settings::arguments() {
        match argument.into_string() {
            Ok(argument) => arguments.push(argument),
            Err(argument) => bail!("`{}` is not UTF-8", argument.display()),
        }
    }
    let options = server_options(&arguments);
    let name = match &args.name {
        Some(name) if is_name(name) => name.clone(),
        Some(name) => bail!("--name `{name}`: use letters, digits, `-` and `_`"),
        None => default_name(&options),
    };
    let server = ClientEntry {
        name,
        program: program()?,
        options,
    };
    let mut snippets = vec![server.entry(args.client)];
    if args.remote_only {
        snippets.push(server.restriction(args.client));
    }
    for (number, Snippet { place, text }) in snippets.iter().enumerate() {
        error::notice(place);
        let gap = if number == 0 { "" } else { "\n" };
        print_bytes(format!("{gap}{text}\n").as_bytes())?;
    }
    if args.client == McpClientArg::Cursor && args.remote_only {
        error::notice(
            "these rules are of Cursor's command line; in the editor, turn its terminal and file \
             tools off in the settings of a custom mode",
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The arguments of `mcp config` without its own options: those of `mcp`.
fn server_options(arguments: &[String]) -> Vec<String> {
    let mut options = Vec::new();
    // The program, `mcp` and `config`.
    let mut rest = arguments.iter().skip(3);
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--remote-only" => {}
            "--client" | "--name" => {
                rest.next();
            }
            other if other.starts_with("--client=") || other.starts_with("--name=") => {}
            other => options.push(other.to_owned()),
        }
    }
    options
}

/// The environment's id, if it can be the name of a server in every client.
fn default_name(options: &[String]) -> String {
    let after = |at: usize| options.get(at + 1).map(String::as_str);
    let mut named = options.iter().enumerate();
    let id = named.find_map(|(at, option)| match option.strip_prefix("--on") {
        Some("") => after(at),
        Some(value) => value.strip_prefix('='),
        None => None,
    });
    id.filter(|id| is_name(id))
        .unwrap_or(DEFAULT_NAME)
        .to_owned()
}

/// Whether every client takes this name, and no configuration has to quote it.
fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    !name.is_empty() && name.chars().all(fits)
}

/// How a client starts this program: by its name if that finds it, or else by its path.
fn program() -> anyhow::Result<String> {
    const NAME: &str = "exec-server";
    let own = settings::program().context("cannot find the path of this program")?;
    let path = settings::variable("PATH").unwrap_or_default();
    let found = path
        .split(':')
        .map(PathBuf::from)
        .filter(|directory| directory.is_absolute())
        .find_map(|directory| canonicalize(&directory.join(NAME)).ok());
    if found.is_some() && found == canonicalize(&own).ok() {
        return Ok(NAME.to_owned());
    }
    match own.to_str() {
        Some(own) => Ok(own.to_owned()),
        None => bail!("the path of this program is not UTF-8: {}", own.display()),
    }
}

/// A server as a client's configuration describes it.
struct ClientEntry {
    name: String,
    program: String,
    options: Vec<String>,
}

impl ClientEntry {
    fn arguments(&self) -> Vec<&str> {
        let options = self.options.iter().map(String::as_str);
        std::iter::once("mcp").chain(options).collect()
    }

    /// Configuration that adds the server.
    fn entry(&self, client: McpClientArg) -> Snippet {
        let Self { name, program, .. } = self;
        let (place, text) = match client {
            McpClientArg::Claude => {
                let mut text = format!("claude mcp add {name} --");
                for word in std::iter::once(program.as_str()).chain(self.arguments()) {
                    // Writing to a string cannot fail.
                    let _ = write!(text, " {}", typed(word));
                }
                ("type", text)
            }
            McpClientArg::Codex => {
                // Strings of TOML are written as those of JSON.
                let text = format!(
                    "[mcp_servers.{name}]\ncommand = {}\nargs = {}\ntool_timeout_sec = \
                     {CODEX_TOOL_TIMEOUT}",
                    json!(program),
                    json!(self.arguments())
                );
                ("add to ~/.codex/config.toml", text)
            }
            McpClientArg::Cursor => {
                let entry = json!({"command": program, "args": self.arguments()});
                let text = format!("{:#}", json!({ "mcpServers": { name: entry } }));
                ("put into .cursor/mcp.json, or ~/.cursor/mcp.json", text)
            }
            McpClientArg::VsCode => {
                let arguments = self.arguments();
                let entry = json!({"type": "stdio", "command": program, "args": arguments});
                let text = format!("{:#}", json!({ "servers": { name: entry } }));
                ("put into .vscode/mcp.json", text)
            }
        };
        Snippet {
            place: format!("{place}:"),
            text,
        }
    }

    /// Configuration that forbids the client's own tools for commands and files.
    fn restriction(&self, client: McpClientArg) -> Snippet {
        let name = &self.name;
        let (place, text) = match client {
            McpClientArg::Claude => (
                "put into .claude/settings.json, so that Claude Code does not offer its own tools:"
                    .to_owned(),
                format!("{:#}", json!({"permissions": {"deny": CLAUDE_TOOLS}})),
            ),
            McpClientArg::Codex => (
                "start Codex so that it has no own tools for commands and files (without \
                 ~/.codex/environments.toml, which would have precedence):"
                    .to_owned(),
                "CODEX_EXEC_SERVER_URL=none codex".to_owned(),
            ),
            McpClientArg::Cursor => {
                let deny = [
                    "Shell(*)",
                    "Read(**)",
                    "Read(/**)",
                    "Write(**)",
                    "Write(/**)",
                ];
                let allow = [format!("Mcp({name}:*)")];
                (
                    "put into .cursor/cli.json, so that its own tools are denied:".to_owned(),
                    format!(
                        "{:#}",
                        json!({"permissions": {"allow": allow, "deny": deny}})
                    ),
                )
            }
            McpClientArg::VsCode => (
                format!(
                    "put into .github/agents/{name}.agent.md, and choose the agent `{name}` in the \
                     chat: it has no other tools:"
                ),
                format!(
                    "---\ndescription: Works on another machine only, with the tools of {name}\n\
                     tools: ['{name}/*']\n---\nCommands and files are on another machine. Use only \
                     the tools of the MCP server {name}."
                ),
            ),
        };
        Snippet { place, text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn options_of_the_server_are_all_but_those_of_config() {
        let line = "exec-server mcp config --on a --client=claude --deny x --name b --remote-only \
                    --client codex";
        assert_eq!(server_options(&words(line)), words("--on a --deny x"));
        assert_eq!(default_name(&words("--deny x --on a")), "a");
        assert_eq!(default_name(&words("--on=b-1")), "b-1");
        assert_eq!(default_name(&words("--on ws://h:1")), DEFAULT_NAME);
        assert_eq!(default_name(&[]), DEFAULT_NAME);
    }
}
