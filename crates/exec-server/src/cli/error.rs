//! Errors and notices on standard error.
//!
//! Every line begins with the program's name. Text of other machines cannot control the terminal.

use std::fmt;
use std::io::{self, Write as _};

use exec_server_client::ExecServerError;
use exec_server_client::registry::RegistryConnectError;
use exec_server_client::without_numbers;
use exec_server_registry::RegistryError;
use exec_server_transport::ConnectError;

use super::registry;
use super::table::visible;
use super::terminal;

/// Prints an error and, if there is one, advice.
pub(super) fn report(error: &anyhow::Error) {
    notice(&message(error));
    if let Some(hint) = hint(error) {
        let _ = writeln!(io::stderr(), "\nhint: {}", visible_lines(&hint));
    }
}

/// Prints one or several lines for the user at the terminal.
pub(super) fn notice(text: &str) {
    // Errors are ignored: standard error may be closed.
    let _ = io::stderr().write_all(notice_text(text).as_bytes());
}

/// Formats a notice; in raw mode of the terminal with carriage returns.
pub(super) fn notice_text(text: &str) -> String {
    let text = format!("exec-server: {}\n", visible_lines(text));
    match terminal::is_raw() {
        true => text.replace('\n', "\r\n"),
        false => text,
    }
}

/// The whole message of an error, in place of those of its causes.
#[derive(Debug)]
struct Explanation(String);

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Formats an error and its causes on one line, without wire codes and without repeated text.
pub(super) fn message(error: &anyhow::Error) -> String {
    if let Some(Explanation(text)) = error.downcast_ref() {
        return text.clone();
    }
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        let text = without_numbers(&cause.to_string());
        let text = without_path(&text, &parts);
        if !parts.iter().any(|part| part.contains(text)) {
            parts.push(text.to_owned());
        }
    }
    parts.join(": ")
}

/// Removes a path at the end of a message if an earlier message already named it.
fn without_path<'a>(text: &'a str, before: &[String]) -> &'a str {
    let Some((rest, path)) = text
        .strip_suffix('`')
        .and_then(|text| text.rsplit_once(": `"))
    else {
        return text;
    };
    let mut named = before
        .iter()
        .flat_map(|part| part.split('`').skip(1).step_by(2));
    let is_named = named.any(|name| {
        let name = name.trim_start_matches("./");
        name == path || (!name.is_empty() && path.ends_with(&format!("/{name}")))
    });
    if is_named { rest } else { text }
}

/// Applies [`visible`] to each line: some messages show lines of a file.
fn visible_lines(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(visible).collect();
    lines.join("\n")
}

/// Advice for an error, if one action helps.
fn hint(error: &anyhow::Error) -> Option<String> {
    if error.is::<Explanation>() {
        return None;
    }
    match error.downcast_ref()? {
        ExecServerError::Connect(ConnectError::Tls { .. }) => Some(
            "--tls-pin trusts one key, --tls-ca a certificate authority; see `exec-server run --help`"
                .to_owned(),
        ),
        ExecServerError::Connect(ConnectError::Io { url, .. }) => Some(match url.as_str() {
            url if url.starts_with("unix://") => {
                format!("`exec-server serve --listen {url}` starts a server there")
            }
            _ => "`exec-server serve --listen ws://127.0.0.1:4600` starts a server on this machine"
                .to_owned(),
        }),
        ExecServerError::Registry(error) => registry::hint(error),
        _ => None,
    }
}

/// Names the input that caused a failure to connect: the token, or the scheme of the URL.
///
/// `name` is the environment or the URL. `token` describes the source of the token, if there was
/// one.
pub(super) fn of_connecting(
    error: ExecServerError,
    name: &str,
    token: Option<&str>,
) -> anyhow::Error {
    // The error itself already names a URL.
    let (environment, advice) = match name.contains("://") {
        true => (String::new(), TOKEN_ADVICE.to_owned()),
        false => (
            format!("environment `{name}`: "),
            format!("type `exec-server env add --force {name} URL --token-file FILE`"),
        ),
    };
    let explanation = match &error {
        ExecServerError::Connect(ConnectError::Refused {
            url,
            status: 401,
            reason,
        }) => Some(token_refused(&format!("`{url}`"), reason, token, &advice)),
        ExecServerError::Connect(ConnectError::Refused {
            url,
            status: 400,
            reason,
        }) if reason.starts_with("this port speaks TLS") => Some(format!(
            "cannot connect to `{url}`: this port speaks TLS; try {}",
            url.replacen("ws://", "wss://", 1)
        )),
        ExecServerError::Connect(error @ ConnectError::Tls { url, .. })
            if error.is_without_tls() =>
        {
            Some(format!(
                "cannot connect to `{url}`: this port does not speak TLS; try {}",
                url.replacen("wss://", "ws://", 1)
            ))
        }
        ExecServerError::Registry(RegistryConnectError::Registry(RegistryError::Auth {
            registry,
            status: 401,
            message,
        })) => Some(token_refused(
            &format!("the registry {registry}"),
            message,
            token,
            &advice,
        )),
        _ => None,
    };
    let error = anyhow::Error::new(error);
    match explanation {
        Some(text) => error.context(Explanation(environment + &text)),
        None if environment.is_empty() => error,
        None => error.context(format!("environment `{name}`")),
    }
}

/// An error with this text in place of its own and those of its causes.
pub(super) fn explained(error: anyhow::Error, text: &str) -> anyhow::Error {
    error.context(Explanation(text.to_owned()))
}

/// Advice how to give a token for a URL.
const TOKEN_ADVICE: &str = "pass --token-file FILE or set EXEC_SERVER_TOKEN_FILE";

/// Explains status 401: no token was sent, or the server does not accept the token.
fn token_refused(server: &str, reason: &str, token: Option<&str>, advice: &str) -> String {
    match token {
        Some(token) if !reason.starts_with("missing ") => {
            let reason = match reason.starts_with("expired") || reason.contains("not valid yet") {
                true => format!(": {reason}"),
                false => String::new(),
            };
            format!("{token} was not accepted by {server}{reason}")
        }
        _ => format!("a token is needed for {server}: {advice}"),
    }
}

/// Names the source of a refused token in errors of a registry's administration API.
pub(super) fn of_registry(error: anyhow::Error, token: &str) -> anyhow::Error {
    let Some(RegistryError::Auth {
        registry,
        status: 401,
        message,
    }) = error.downcast_ref()
    else {
        return error;
    };
    let server = format!("the registry {registry}");
    let text = token_refused(
        &server,
        message,
        Some(token),
        "pass --admin-token-file FILE",
    );
    error.context(Explanation(text))
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn server(message: &str) -> anyhow::Error {
        let message = message.to_owned();
        anyhow::Error::new(ExecServerError::Server {
            code: -32004,
            message,
        })
    }

    #[test]
    fn error_messages_omit_codes_and_repeated_paths() {
        let missing = "No such file or directory (os error 2): `/srv/a/w`";
        for (error, expected) in [
            (
                server(missing).context("cannot list `a/w`"),
                "cannot list `a/w`: No such file or directory",
            ),
            (
                server(missing).context("cannot list `./w`"),
                "cannot list `./w`: No such file or directory",
            ),
            (
                server(missing).context("cannot list `v`"),
                "cannot list `v`: No such file or directory: `/srv/a/w`",
            ),
            (server("limit (code red)"), "limit (code red)"),
            (
                anyhow!("the cause").context("it failed: the cause"),
                "it failed: the cause",
            ),
        ] {
            assert_eq!(message(&error), expected);
        }
    }

    #[test]
    fn control_characters_of_remote_text_are_escaped() {
        assert_eq!(visible_lines("a\x1b[2J\nb\r"), "a\\u{1b}[2J\nb\\r");
    }
}
