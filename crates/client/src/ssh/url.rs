//! `ssh://` URL parser.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use exec_server_protocol::PathUri;

/// Parsed `ssh://[USER@]HOST[:PORT][/PATH]` URL.
///
/// The host may be any name that the system's ssh accepts, including aliases of its configuration.
/// The path is the default working directory of commands.
///
/// ```
/// use exec_server_client::ssh::SshUrl;
///
/// let url: SshUrl = "ssh://me@build:2222/srv/app".parse()?;
/// assert_eq!((url.user(), url.host(), url.port()), (Some("me"), "build", Some(2222)));
/// assert_eq!(url.path(), Some("/srv/app".as_ref()));
/// # Ok::<_, exec_server_client::ssh::SshUrlError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SshUrl {
    user: Option<String>,
    host: String,
    port: Option<u16>,
    path: Option<PathBuf>,
}

/// Error of a text that is not a valid `ssh://` URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{url}` is not of the form ssh://[USER@]HOST[:PORT][/PATH]: {reason}")]
#[non_exhaustive]
pub struct SshUrlError {
    /// The text as given.
    pub url: String,
    /// The reason why the text is not an ssh URL.
    pub reason: &'static str,
}

impl SshUrl {
    /// User name; `None` if ssh chooses it.
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Host name or address, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port; `None` if ssh chooses it.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// Default working directory, if given; always absolute.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The destination argument of ssh.
    pub(super) fn destination(&self) -> String {
        match &self.user {
            Some(user) => format!("{user}@{}", self.host),
            None => self.host.clone(),
        }
    }
}

impl FromStr for SshUrl {
    type Err = SshUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map_err(|reason| SshUrlError {
            url: text.to_owned(),
            reason,
        })
    }
}

fn parse(text: &str) -> Result<SshUrl, &'static str> {
    let rest = text
        .strip_prefix("ssh://")
        .ok_or("it begins with something else")?;
    let (authority, path) = match rest.find('/') {
        Some(slash) => rest.split_at(slash),
        None => (rest, ""),
    };
    let (user, host_and_port) = match authority.rsplit_once('@') {
        Some((user, host_and_port)) => (Some(user), host_and_port),
        None => (None, authority),
    };
    let (host, port) = match host_and_port.strip_prefix('[') {
        Some(bracketed) => {
            let (host, after) = bracketed.split_once(']').ok_or("a bracket is open")?;
            match after.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if after.is_empty() => (host, None),
                None => return Err("something follows the address"),
            }
        }
        None => match host_and_port.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (host_and_port, None),
        },
    };
    let port = match port {
        None => None,
        Some(port) => match port.parse() {
            Ok(0) | Err(_) => return Err("the port is no number from 1 to 65535"),
            Ok(port) => Some(port),
        },
    };
    if host.is_empty() {
        return Err("the host is missing");
    }
    if user.is_some_and(|user| user.contains(':')) {
        return Err("a password has no place in it");
    }
    for name in [user, Some(host)].into_iter().flatten() {
        // ssh would parse a leading dash as an option. Other characters may have a meaning for ssh,
        // or for the shell that runs a ProxyCommand.
        let safe = |c: char| c.is_alphanumeric() || "._-+:%\\@".contains(c);
        if name.is_empty() || name.starts_with('-') || !name.chars().all(safe) {
            return Err("user and host are names");
        }
    }
    let path = match path {
        "" | "/" => None,
        path => {
            let uri =
                PathUri::parse(&format!("file://{path}")).map_err(|_| "the path is no path")?;
            Some(uri.to_native().map_err(|_| "the path is no path")?)
        }
    };
    Ok(SshUrl {
        user: user.map(str::to_owned),
        host: host.to_owned(),
        port,
        path,
    })
}

impl fmt::Display for SshUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ssh://")?;
        if let Some(user) = &self.user {
            write!(f, "{user}@")?;
        }
        match self.host.contains(':') {
            true => write!(f, "[{}]", self.host)?,
            false => f.write_str(&self.host)?,
        }
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        if let Some(path) = &self.path
            && let Ok(uri) = PathUri::from_native(path)
        {
            f.write_str(uri.as_str().trim_start_matches("file://"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ssh_url_parses_and_formats_all_parts() {
        for (text, user, host, port, path) in [
            ("ssh://h", None, "h", None, None),
            ("ssh://u@h:22", Some("u"), "h", Some(22), None),
            (
                "ssh://[::1]:2200/srv",
                None,
                "::1",
                Some(2200),
                Some("/srv"),
            ),
            (
                "ssh://u@d@h/a%20b/c",
                Some("u@d"),
                "h",
                None,
                Some("/a b/c"),
            ),
        ] {
            let url: SshUrl = text.parse().unwrap();
            assert_eq!(
                (url.user(), url.host(), url.port()),
                (user, host, port),
                "{text}"
            );
            assert_eq!(url.path(), path.map(Path::new), "{text}");
            assert_eq!(url.to_string(), text);
        }
        let slash: SshUrl = "ssh://h/".parse().unwrap();
        assert_eq!(slash.path(), None);
    }

    #[test]
    fn ssh_url_rejects_text_that_ssh_could_misinterpret() {
        for text in [
            "h",
            "ws://h",
            "ssh://",
            "ssh:///p",
            "ssh://@h",
            "ssh://u:secret@h",
            "ssh://h:0",
            "ssh://h:70000",
            "ssh://h:",
            "ssh://[::1",
            "ssh://[::1]x",
            "ssh://-oProxyCommand=x",
            "ssh://-l@h",
            "ssh://a b",
            "ssh://$(x)",
            "ssh://h\n",
        ] {
            assert!(text.parse::<SshUrl>().is_err(), "{text:?}");
        }
    }
}
