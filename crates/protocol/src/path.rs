//! Paths on the wire: `file:` URIs.
//!
//! Parsing follows the WHATWG URL rules, so `.` and `..` are resolved before a file is accessed. A
//! URI may name a path of another platform: parsing succeeds, and conversion to a native path
//! fails.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use base64_turbo::URL_SAFE_NO_PAD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use url::Url;

/// A path as a `file:` URI, in canonical text.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PathUri(String);

/// Why a text is not a valid path URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathUriError {
    /// The text is not a URI.
    #[error("invalid URI: {0}")]
    Invalid(url::ParseError),
    /// The text is a native absolute path, whose URI is given. The compatible protocol refuses it with
    /// the beginning of this message.
    #[error("invalid URI: relative URL without a base; a path is written as a file: URI, `{0}`")]
    NativePath(String),
    /// The scheme is not `file`.
    #[error("unsupported path URI scheme `{0}`")]
    Scheme(String),
    /// The URI has a query.
    #[error("query parameters are not allowed in path URIs")]
    Query,
    /// The URI has a fragment.
    #[error("fragments are not allowed in path URIs")]
    Fragment,
    /// The path is not valid on this platform.
    #[error("'{0}' is invalid on '{os}'", os = std::env::consts::OS)]
    Foreign(String),
}

/// Prefix of the encoding for paths that no ordinary URI can represent.
const OPAQUE_PREFIX: &str = "/%00/bad/path/";

impl PathUri {
    /// Parses a URI.
    ///
    /// # Errors
    ///
    /// The text is not a `file:` URI, has a query or a fragment, or contains an encoded NUL.
    pub fn parse(text: &str) -> Result<Self, PathUriError> {
        if is_canonical(text) {
            return Ok(Self(text.to_owned()));
        }
        Self::parse_any(text)
    }

    /// Like [`PathUri::parse`], by the URL parser.
    fn parse_any(text: &str) -> Result<Self, PathUriError> {
        let url = parse_url(text).map_err(|error| {
            let path = Path::new(text);
            match path.is_absolute().then(|| Self::from_native(path)) {
                Some(Ok(uri)) => PathUriError::NativePath(uri.0),
                _ => PathUriError::Invalid(error),
            }
        })?;
        if url.scheme() != "file" {
            return Err(PathUriError::Scheme(url.scheme().to_owned()));
        }
        if url.query().is_some() {
            return Err(PathUriError::Query);
        }
        if url.fragment().is_some() {
            return Err(PathUriError::Fragment);
        }
        let mut host = url.host_str().unwrap_or("");
        let mut path = String::with_capacity(url.path().len());
        for segment in url.path().split('/').filter(|segment| !segment.is_empty()) {
            path.push('/');
            path.push_str(segment);
        }
        if path.is_empty() {
            path.push('/');
        }
        if decode_percent(&path).contains(&0) && !path.starts_with(OPAQUE_PREFIX) {
            return Err(PathUriError::Foreign(text.to_owned()));
        }
        if has_drive(&path) {
            // The URL parser drops a host before a drive letter, except across an empty segment,
            // and drive letters are case-insensitive. Normalizing both here keeps comparison a
            // comparison of text.
            host = "";
            path[..2].make_ascii_uppercase();
        }
        Ok(Self(format!("file://{host}{path}")))
    }

    /// Creates the URI of a native absolute path.
    ///
    /// # Errors
    ///
    /// The path is relative, or contains NUL and so cannot name a file.
    pub fn from_native(path: &Path) -> Result<Self, PathUriError> {
        let bytes = path.as_os_str().as_bytes();
        if !path.is_absolute() || bytes.contains(&0) {
            return Err(PathUriError::Foreign(path.display().to_string()));
        }
        let mut text = String::with_capacity(bytes.len() + 8);
        text.push_str("file://");
        for segment in bytes
            .split(|&byte| byte == b'/')
            .filter(|s| !s.is_empty() && *s != b".")
        {
            text.push('/');
            push_segment(&mut text, segment);
        }
        if text.len() == "file://".len() {
            text.push('/');
        }
        // An ordinary URI is used only if it converts back to the same path.
        match Self::parse(&text) {
            Ok(uri) if uri.to_native().is_ok_and(|native| same_path(&native, path)) => Ok(uri),
            _ => Ok(Self(format!(
                "file://{OPAQUE_PREFIX}{}",
                URL_SAFE_NO_PAD.encode(bytes)
            ))),
        }
    }

    /// Converts to a native path.
    ///
    /// # Errors
    ///
    /// The URI contains a host, a drive letter or NUL, or is an opaque path that has an ordinary
    /// URI.
    pub fn to_native(&self) -> Result<PathBuf, PathUriError> {
        let foreign = || PathUriError::Foreign(self.0.clone());
        let path = &self.0["file://".len()..];
        if let Some(encoded) = path.strip_prefix(OPAQUE_PREFIX) {
            let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| foreign())?;
            let native = PathBuf::from(OsString::from_vec(bytes));
            let ordinary = Self::from_native(&native).map_err(|_| foreign())?;
            return if ordinary == *self {
                Ok(native)
            } else {
                Err(foreign())
            };
        }
        if !path.starts_with('/') || has_drive(path) {
            return Err(foreign());
        }
        let bytes = decode_percent(path);
        if bytes.contains(&0) {
            return Err(foreign());
        }
        Ok(PathBuf::from(OsString::from_vec(bytes)))
    }

    /// Returns the URI of an entry of this directory.
    ///
    /// Equals [`PathUri::from_native`] of the joined path, but without parsing, for directories of
    /// many entries. `name` must be a valid file name.
    #[must_use]
    pub fn child(&self, name: &OsStr) -> Self {
        let mut text = String::with_capacity(self.0.len() + 1 + name.len());
        self.push_child(name, &mut text);
        Self(text)
    }

    /// Appends the text of [`PathUri::child`], which needs no escapes in JSON.
    pub fn push_child(&self, name: &OsStr, text: &mut String) {
        let bytes = name.as_bytes();
        let path = &self.0["file://".len()..];
        let odd = match path.as_bytes() {
            // Directly below the root, a name can look like a drive letter.
            [b'/'] => matches!(bytes, [_, b':' | b'|', ..]),
            // This directory is itself a possible drive letter, or opaque.
            [b'/', b'%', ..] | [b'/', _, b'%', ..] => true,
            _ => !path.starts_with('/'),
        };
        if odd {
            let joined = self.to_native().map(|parent| parent.join(name));
            if let Ok(uri) = joined.and_then(|joined| Self::from_native(&joined)) {
                text.push_str(&uri.0);
                return;
            }
        }
        text.push_str(&self.0);
        if path != "/" {
            text.push('/');
        }
        push_segment(text, bytes);
    }

    /// Returns the canonical text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The root directory.
impl Default for PathUri {
    fn default() -> Self {
        Self("file:///".to_owned())
    }
}

/// Parses like the URL parser, except that `c|` is an ordinary name and not a drive letter.
fn parse_url(text: &str) -> Result<Url, url::ParseError> {
    const IGNORED: [char; 3] = ['\t', '\n', '\r'];
    // The parser ignores these characters anywhere, but after a drive letter treats them as a
    // separator.
    if text.contains(IGNORED) {
        return parse_url(&text.replace(IGNORED, ""));
    }
    let url = Url::parse(text)?;
    let drive = matches!(url.path().as_bytes(),
        [b'/', letter, b':' | b'|', rest @ ..]
            if letter.is_ascii_alphabetic() && matches!(rest, [] | [b'/', ..]));
    // Parse again with an escaped pipe. The first result cannot be corrected: the parser has
    // dropped the host before the drive letter and has not let `..` leave the drive.
    if url.scheme() == "file" && drive && text.contains('|') {
        return Url::parse(&text.replace('|', "%7C"));
    }
    Ok(url)
}

/// Whether a text is certainly canonical already, so that parsing would not change it. Nearly every path
/// is, and this check takes a fraction of the time of the URL parser.
fn is_canonical(text: &str) -> bool {
    let Some(path) = text.strip_prefix("file:///") else {
        return false;
    };
    // Drives, and what the URL parser folds or keeps apart, are left to it.
    let plain = |byte: u8| PLAIN[usize::from(byte)] && !matches!(byte, b':' | b'|');
    path.split('/').all(|segment| {
        !segment.is_empty()
            && segment.bytes().all(plain)
            && !segment.bytes().all(|byte| byte == b'.')
    })
}

fn has_drive(path: &str) -> bool {
    match path.as_bytes() {
        [b'/', letter, b':'] => letter.is_ascii_alphabetic(),
        [b'/', letter, b':', b'/', ..] => letter.is_ascii_alphabetic(),
        _ => false,
    }
}

fn same_path(one: &Path, other: &Path) -> bool {
    // Compares components: repeated and trailing separators do not matter, but `..` does.
    one.components().eq(other.components())
}

/// Bytes that the URL parser leaves unescaped in a file path, so that text built here is canonical.
const PLAIN: [bool; 256] = {
    let mut plain = [false; 256];
    let mut byte = b'!';
    while byte <= b'~' {
        plain[byte as usize] = !matches!(
            byte,
            b'%' | b'?' | b'#' | b'"' | b'<' | b'>' | b'`' | b'{' | b'}' | b'\\' | b'^'
        );
        byte += 1;
    }
    plain
};

fn push_segment(text: &mut String, mut segment: &[u8]) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    loop {
        let plain = segment
            .iter()
            .position(|&byte| !PLAIN[usize::from(byte)])
            .unwrap_or(segment.len());
        let (head, rest) = segment.split_at(plain);
        // Plain bytes are ASCII.
        text.push_str(std::str::from_utf8(head).unwrap_or_default());
        let [byte, rest @ ..] = rest else {
            return;
        };
        text.push('%');
        text.push(HEX[usize::from(byte >> 4)] as char);
        text.push(HEX[usize::from(byte & 15)] as char);
        segment = rest;
    }
}

/// Decodes `%XX`; other text after a percent sign is literal.
fn decode_percent(text: &str) -> Vec<u8> {
    let digit = |byte: Option<&u8>| byte.and_then(|&b| (b as char).to_digit(16));
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%'
            && let (Some(high), Some(low)) = (digit(bytes.get(at + 1)), digit(bytes.get(at + 2)))
        {
            // Two hexadecimal digits are at most 255.
            out.push((high * 16 + low) as u8);
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    out
}

impl fmt::Display for PathUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PathUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PathUri({})", self.0)
    }
}

impl FromStr for PathUri {
    type Err = PathUriError;
    fn from_str(text: &str) -> Result<Self, PathUriError> {
        Self::parse(text)
    }
}

impl Serialize for PathUri {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for PathUri {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'_, str>::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn native(uri: &str) -> Result<String, String> {
        let uri = PathUri::parse(uri).map_err(|error| format!("parse: {error}"))?;
        let path = uri.to_native().map_err(|error| format!("use: {error}"))?;
        Ok(path.to_string_lossy().into_owned())
    }

    #[test]
    fn parse_and_to_native_match_the_table() {
        for (uri, path) in [
            ("file:/a", "/a"),
            ("file:///a", "/a"),
            ("FILE:///a", "/a"),
            ("file://localhost/a", "/a"),
            ("file:", "/"),
            ("file:///", "/"),
            ("file:///a/../b/./c/%2e%2e/d", "/b/d"),
            ("file:///a//b///c/", "/a/b/c"),
            ("file:///a%2Fb", "/a/b"),
            ("file:///a%zz", "/a%zz"),
            ("file:///a%20b[1]", "/a b[1]"),
            ("file:///c|/x", "/c|/x"),
            ("file:///%00/bad/path/L0M6L3g", "/C:/x"),
        ] {
            assert_eq!(native(uri).as_deref(), Ok(path), "{uri}");
        }
        for (uri, error) in [
            (
                "/abs/a b",
                "parse: invalid URI: relative URL without a base; a path is written as a file: URI, \
                 `file:///abs/a%20b`",
            ),
            ("", "parse: invalid URI: relative URL without a base"),
            ("http://x/y", "parse: unsupported path URI scheme `http`"),
            (
                "file:///a?q",
                "parse: query parameters are not allowed in path URIs",
            ),
            (
                "file:///a#f",
                "parse: fragments are not allowed in path URIs",
            ),
            (
                "file:///a%00b",
                "parse: 'file:///a%00b' is invalid on 'linux'",
            ),
            (
                "file://server/x",
                "use: 'file://server/x' is invalid on 'linux'",
            ),
            ("file:///c:/x", "use: 'file:///C:/x' is invalid on 'linux'"),
            ("file:///C:/x", "use: 'file:///C:/x' is invalid on 'linux'"),
            (
                "file:///%00/bad/path/L2E",
                "use: 'file:///%00/bad/path/L2E' is invalid on 'linux'",
            ),
        ] {
            assert_eq!(native(uri).err().as_deref(), Some(error), "{uri}");
        }
        for uri in ["file://u:p@host/x", "file://host:80/x", "relative"] {
            assert!(
                native(uri).is_err_and(|error| error.starts_with("parse")),
                "{uri}"
            );
        }
    }

    #[test]
    fn from_native_writes_canonical_text() {
        for (path, uri) in [
            ("/", "file:///"),
            ("/a b", "file:///a%20b"),
            ("/100%", "file:///100%25"),
            ("/q?#", "file:///q%3F%23"),
            ("/é", "file:///%C3%A9"),
            ("/[x]", "file:///[x]"),
            ("/C:/x", "file:///%00/bad/path/L0M6L3g"),
            ("/a/../b", "file:///%00/bad/path/L2EvLi4vYg"),
        ] {
            assert_eq!(PathUri::from_native(Path::new(path)).unwrap().as_str(), uri);
        }
        assert!(PathUri::from_native(Path::new("a")).is_err());
    }

    #[test]
    fn child_of_root_drive_and_opaque_directory_equals_joined_path() {
        for (parent, name) in [
            ("/", "C:"),
            ("/", "c|"),
            ("/", "c"),
            ("/c|", "a|b"),
            ("/C:", "x"),
            ("/é", "x"),
            ("/a", "c:"),
        ] {
            let joined = PathUri::from_native(&Path::new(parent).join(name)).unwrap();
            let parent = PathUri::from_native(Path::new(parent)).unwrap();
            assert_eq!(parent.child(OsStr::new(name)), joined);
        }
    }

    #[test]
    fn pipe_is_not_a_drive_separator() {
        for (uri, path) in [
            ("file:///c|/a|b", "/c|/a|b"),
            ("file:////c|/x", "/c|/x"),
            ("file:\\\\\\c|\\x", "/c|/x"),
            ("file:///c\t|/x", "/c|/x"),
            ("file:///c|/../x", "/x"),
            ("file:///c|/d/c:", "/c|/d/c:"),
        ] {
            assert_eq!(native(uri).as_deref(), Ok(path), "{uri}");
            let uri = PathUri::parse(uri).unwrap();
            assert_eq!(PathUri::parse(uri.as_str()), Ok(uri));
        }
        let hosted = PathUri::parse("file://server/c|/x").unwrap();
        assert_eq!(hosted.as_str(), "file://server/c%7C/x");
        assert!(hosted.to_native().is_err());
    }

    #[test]
    fn drive_letter_drops_host_and_is_upper_case() {
        for uri in [
            "file:///c:/x",
            "file:////C:/x",
            "file://host/c:/x",
            "file://host//c:/x",
        ] {
            assert_eq!(
                PathUri::parse(uri).unwrap().as_str(),
                "file:///C:/x",
                "{uri}"
            );
        }
    }

    #[test]
    fn line_breaks_and_tabs_are_ignored() {
        for uri in ["file:///t:\n.", "file:///t:\t.", "file:///\rt:.\n"] {
            assert_eq!(
                PathUri::parse(uri).unwrap().as_str(),
                "file:///t:.",
                "{uri}"
            );
        }
    }

    #[test]
    fn opaque_uri_without_path_is_rejected() {
        for uri in ["file:///%00/bad/path/", "file:///%00/bad/path"] {
            assert!(PathUri::parse(uri).is_err(), "{uri}");
        }
    }

    #[test]
    fn path_with_nul_is_rejected() {
        let path = "/a\0b";
        assert!(PathUri::from_native(Path::new(path)).is_err());
        let opaque = format!("file:///%00/bad/path/{}", URL_SAFE_NO_PAD.encode(path));
        assert!(PathUri::parse(&opaque).unwrap().to_native().is_err());
    }

    #[test]
    fn only_paths_without_special_characters_are_recognised_as_canonical() {
        for usual in [
            "file:///a",
            "file:///home/user/x.y/.z",
            "file:///a/[b]~'(c)@1,2;3=4&5$6*7+!",
        ] {
            assert!(is_canonical(usual), "{usual}");
            assert_eq!(PathUri::parse_any(usual).unwrap().as_str(), usual);
        }
        for unusual in [
            "file:///",
            "file:///a/",
            "file:///a//b",
            "file:///a/../b",
            "file:///./a",
            "file:///C:",
            "file:///c|/a",
            "file:///a%20b",
            "file:///a?b",
            "file:///a#b",
            "file:///a b",
            "file://h/a",
            "FILE:///a",
            "file:///\u{e9}",
            "file:///a\\b",
            "file:///a\tb",
        ] {
            assert!(!is_canonical(unusual), "{unusual}");
        }
    }

    proptest! {
        #[test]
        fn native_paths_round_trip(segments in prop::collection::vec(
            prop::collection::vec(1u8..=255, 1..12), 0..6)) {
            let mut bytes = Vec::new();
            for segment in &segments {
                bytes.push(b'/');
                bytes.extend(segment.iter().map(|&b| if b == b'/' { b'_' } else { b }));
            }
            if bytes.is_empty() {
                bytes.push(b'/');
            }
            let path = PathBuf::from(OsString::from_vec(bytes));
            let uri = PathUri::from_native(&path).unwrap();
            prop_assert!(same_path(&uri.to_native().unwrap(), &path), "{uri}");
            prop_assert_eq!(PathUri::parse(uri.as_str()).unwrap(), uri);
        }

        #[test]
        fn child_equals_uri_of_joined_path(
            segments in prop::collection::vec("[a-cC:|%. é\\\\\"]{1,3}", 0..4),
            name in prop::collection::vec(1u8..=255, 1..6),
        ) {
            let mut parent = PathBuf::from("/");
            parent.extend(segments.iter().filter(|one| !matches!(one.as_str(), "." | "..")));
            let name: Vec<u8> = name.iter().map(|&b| if b == b'/' { b':' } else { b }).collect();
            prop_assume!(!matches!(&name[..], b"." | b".."));
            let name = OsStr::from_bytes(&name);
            let child = PathUri::from_native(&parent).unwrap().child(name);
            prop_assert_eq!(PathUri::from_native(&parent.join(name)).unwrap(), child);
        }

        #[test]
        fn text_recognised_as_canonical_parses_to_itself(
            text in "file:///([!-~]{0,4}/){0,3}[!-~]{0,6}",
        ) {
            if is_canonical(&text) {
                let parsed = PathUri::parse_any(&text).unwrap();
                prop_assert_eq!(parsed.as_str(), text);
            }
        }

        #[test]
        fn parsing_is_idempotent(text in "file:/{0,3}[a-zA-Z0-9:|%./\\\\ ]{0,24}") {
            if let Ok(uri) = PathUri::parse(&text) {
                prop_assert_eq!(PathUri::parse(uri.as_str()).unwrap(), uri);
            }
        }

        #[test]
        fn arbitrary_text_never_panics(text: String) {
            if let Ok(uri) = PathUri::parse(&text) {
                let _ = uri.to_native();
            }
        }
    }
}
