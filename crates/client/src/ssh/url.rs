//! `ssh://` URLs.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use exec_server_protocol::PathUri;

/// `ssh://[USER@]HOST[:PORT][/PATH]`.
///
/// The host may be any name that the system's ssh knows, aliases of its configuration included. The
/// path is where commands run unless they say otherwise.
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

/// A text that is no `ssh://` URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{url}` is no ssh://[USER@]HOST[:PORT][/PATH]: {reason}")]
#[non_exhaustive]
pub struct SshUrlError {
    /// As given.
    pub url: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl SshUrl {
    /// As whom, if not as the one that ssh chooses.
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Where, without the brackets of an address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Which port, if not the one that ssh chooses.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// Where to work, if that is said; always absolute.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// What ssh calls a destination.
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
    let (user, place) = match authority.rsplit_once('@') {
        Some((user, place)) => (Some(user), place),
        None => (None, authority),
    };
    let (host, port) = match place.strip_prefix('[') {
        Some(bracketed) => {
            let (host, after) = bracketed.split_once(']').ok_or("a bracket is open")?;
            match after.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if after.is_empty() => (host, None),
                None => return Err("something follows the address"),
            }
        }
        None => match place.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
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
        // What begins with a dash would be an option of ssh; the rest could mean something to it,
        // or to the shell that runs a ProxyCommand.
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
    fn urls_are_taken_apart_and_put_together() {
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
    fn what_ssh_could_misunderstand_is_refused() {
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
