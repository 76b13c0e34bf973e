//! Sides of `exec-server cp`: which text names a path on a server, and which server.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use anyhow::bail;

/// One side of a `cp`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CopySide {
    Here(PathBuf),
    /// A path of this environment or of the server of this URL, or else of the target of the
    /// options.
    There(Option<String>, PathBuf),
}

impl CopySide {
    pub(super) fn parse(
        text: &OsStr,
        is_environment: impl Fn(&str) -> bool,
    ) -> anyhow::Result<Self> {
        let bytes = text.as_bytes();
        let there = |url: Option<&[u8]>, path: &[u8]| {
            let url = url.map(|url| String::from_utf8_lossy(url).into_owned());
            // An empty path after the colon means the working directory of the server.
            let path = if path.is_empty() { b"." } else { path };
            Self::There(url, OsString::from_vec(path.to_vec()).into())
        };
        if let Some(path) = bytes.strip_prefix(b":") {
            return Ok(there(None, path));
        }
        if let Some(end) = url_length(bytes) {
            return match bytes.get(end) {
                Some(b':') => Ok(there(Some(&bytes[..end]), &bytes[end + 1..])),
                _ => bail!(
                    "`{0}` names a server but no path on it: write `{0}:PATH`",
                    text.to_string_lossy()
                ),
            };
        }
        let colon = bytes.iter().position(|&byte| byte == b':');
        let slash = bytes.iter().position(|&byte| byte == b'/');
        if let Some(colon) = colon
            && is_environment(&String::from_utf8_lossy(&bytes[..colon]))
        {
            return Ok(there(Some(&bytes[..colon]), &bytes[colon + 1..]));
        }
        match (colon, slash) {
            (Some(colon), slash) if slash.is_none_or(|slash| colon < slash) => bail!(
                "`{0}` looks like a path in an environment `{1}`, which does not exist: write `:PATH` \
                 with --url, or `ws://HOST:PORT:PATH`, or `./{0}` for a file here",
                text.to_string_lossy(),
                String::from_utf8_lossy(&bytes[..colon]),
            ),
            _ => Ok(Self::Here(text.into())),
        }
    }
}

/// The server and the path of an argument of `cp`, if it names a path on a server.
pub(in crate::cli) fn split_side(text: &str) -> Option<(Option<&str>, &str)> {
    if let Some(path) = text.strip_prefix(':') {
        return Some((None, path));
    }
    let end = url_length(text.as_bytes()).or_else(|| text.find(':'))?;
    let path = text[end..].strip_prefix(':')?;
    Some((Some(&text[..end]), path))
}

/// Length of the server's URL at the start of a text, if there is one.
fn url_length(text: &[u8]) -> Option<usize> {
    let until = |from: usize, stops: &[u8]| {
        let stop = text[from..].iter().position(|byte| stops.contains(byte));
        stop.map_or(text.len(), |at| from + at)
    };
    if text.starts_with(b"unix://") {
        return Some(until("unix://".len(), b":"));
    }
    let scheme = [
        b"ws://".as_slice(),
        b"wss://",
        b"ssh://",
        b"registry://",
        b"registry+http://",
        b"registry+https://",
    ]
    .into_iter()
    .find(|scheme| text.starts_with(scheme))?;
    let mut end = match text.get(scheme.len()) {
        Some(b'[') => until(scheme.len(), b"]") + 1,
        _ => until(scheme.len(), b":/"),
    }
    .min(text.len());
    if text.get(end) == Some(&b':') {
        let digits = text[end + 1..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit());
        let port_end = end + 1 + digits.count();
        // Digits up to the end of the text or the next `/` are the port; other text after the colon
        // is a path.
        if port_end > end + 1 && matches!(text.get(port_end), None | Some(b':' | b'/')) {
            end = port_end;
        }
    }
    if text.get(end) == Some(&b'/') {
        end = until(end, b":");
    }
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_arguments_are_classified_as_local_or_remote() {
        let here = |path: &str| CopySide::Here(path.into());
        let there =
            |url: Option<&str>, path: &str| CopySide::There(url.map(Into::into), path.into());
        for (text, side) in [
            ("a/b", here("a/b")),
            ("./a:b", here("./a:b")),
            ("/a:b", here("/a:b")),
            (":", there(None, ".")),
            (":/x:y", there(None, "/x:y")),
            ("ws://h:4600:/x", there(Some("ws://h:4600"), "/x")),
            ("ws://h:4600:x:1", there(Some("ws://h:4600"), "x:1")),
            ("ws://h:/x", there(Some("ws://h"), "/x")),
            ("ws://h:12x", there(Some("ws://h"), "12x")),
            ("ws://h:1/p:q", there(Some("ws://h:1/p"), "q")),
            ("ssh://u@h:22/p:/q", there(Some("ssh://u@h:22/p"), "/q")),
            ("ssh://h:x", there(Some("ssh://h"), "x")),
            ("ws://[::1]:46:", there(Some("ws://[::1]:46"), ".")),
            ("worker:/x", there(Some("worker"), "/x")),
            ("worker:", there(Some("worker"), ".")),
            ("./worker:x", here("./worker:x")),
            (
                "registry://h:47/env:/x",
                there(Some("registry://h:47/env"), "/x"),
            ),
            ("unix:///run/s:rel", there(Some("unix:///run/s"), "rel")),
        ] {
            let parsed = CopySide::parse(text.as_ref(), |name| name == "worker");
            assert_eq!(parsed.unwrap(), side, "{text}");
        }
        for text in ["host:/x", "ws://h:4600", "unix:///run/s", "ws://[::1"] {
            let parsed = CopySide::parse(text.as_ref(), |name| name == "worker");
            assert!(parsed.is_err(), "{text}");
        }
    }
}
