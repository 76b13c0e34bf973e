//! Minimal HTTP/1.1 for the websocket handshake: reads one head per direction.
//!
//! Reads a head of bounded size, gives access to its headers and computes the accept key. Does not
//! route requests.

use std::fmt;
use std::io;

use ring::digest::{self, SHA1_FOR_LEGACY_USE_ONLY};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use zeroize::Zeroizing;

/// Maximum size of a request or response head in bytes; browsers and proxies send far less.
pub const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Maximum number of header lines in one head.
pub const MAX_HEADERS: usize = 64;

/// Parsed head, and the bytes that were received after it.
#[derive(Clone, Default)]
pub struct HttpHead {
    /// Method of a request; empty in a response.
    pub method: String,
    /// Target of a request; empty in a response.
    pub target: String,
    /// Status of a response; 0 in a request.
    pub status: u16,
    /// Header names in lower case, with their values, which may be tokens: they are erased from
    /// memory after use.
    pub headers: Vec<(String, Zeroizing<String>)>,
    /// Bytes received after the head.
    pub rest: Vec<u8>,
}

impl fmt::Debug for HttpHead {
    /// Omits header values, because one of them may be a token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("HttpHead")
            .field("method", &self.method)
            .field("target", &self.target)
            .field("status", &self.status)
            .field("headers", &names)
            .field("rest", &self.rest.len())
            .finish()
    }
}

impl HttpHead {
    /// Returns the first header with this (lower-case) name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// Returns all headers with this (lower-case) name.
    pub fn headers_named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.headers
            .iter()
            .filter(move |(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// Returns whether a comma-separated header contains a token; ignores case.
    pub fn has_token(&self, name: &str, token: &str) -> bool {
        self.headers
            .iter()
            .filter(|(key, _)| key == name)
            .flat_map(|(_, value)| value.split(','))
            .any(|part| part.trim().eq_ignore_ascii_case(token))
    }

    /// Returns whether a browser requests a page, as opposed to a program that requests a websocket
    /// or data.
    pub fn is_of_browser(&self) -> bool {
        self.method == "GET"
            && self.header("upgrade").is_none()
            && self
                .header("accept")
                .is_some_and(|accept| accept.contains("text/html"))
    }

    /// Returns whether a web page sent the request: browsers add these headers, and no program
    /// needs them.
    pub fn is_of_web_page(&self) -> bool {
        let mut names = self.headers.iter().map(|(name, _)| name.as_str());
        names.any(|name| name == "origin" || name.starts_with("sec-fetch-"))
    }

    /// Returns the bytes of a response to this request: the response to `HEAD` has no body.
    pub fn without_needless_body(&self, mut response: Vec<u8>) -> Vec<u8> {
        const END: &[u8] = b"\r\n\r\n";
        if self.method == "HEAD"
            && let Some(at) = response.windows(END.len()).position(|part| part == END)
        {
            response.truncate(at + END.len());
        }
        response
    }

    /// Returns the key of a websocket upgrade request.
    ///
    /// # Errors
    ///
    /// A text for the client that says what is missing in the request.
    pub fn websocket_key(&self) -> Result<&str, &'static str> {
        if !self.has_token("connection", "upgrade") {
            return Err("Connection header did not include 'upgrade'");
        }
        if !self.has_token("upgrade", "websocket") {
            return Err("Upgrade header did not include 'websocket'");
        }
        if self.header("sec-websocket-version") != Some("13") {
            return Err("Sec-WebSocket-Version header did not include '13'");
        }
        self.header("sec-websocket-key")
            .ok_or("Sec-WebSocket-Key header is missing")
    }

    /// Returns the target without its query.
    pub fn path(&self) -> &str {
        self.target.split(['?', '#']).next().unwrap_or("")
    }
}

/// Kind of head: request or response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// Head sent by a client.
    Request,
    /// Head sent by a server.
    Response,
}

/// Reads one head.
///
/// # Errors
///
/// `InvalidData` if the head is not HTTP or too large, `UnexpectedEof` if the peer closes the
/// connection before its end.
pub async fn read_head(
    reader: &mut (impl AsyncRead + Unpin),
    kind: HeadKind,
) -> io::Result<HttpHead> {
    read_next_head(reader, kind, Vec::new()).await
}

/// Like [`read_head`], for a second head; `received` are the bytes that were received after the
/// first.
///
/// # Errors
///
/// Same as for [`read_head`].
pub async fn read_next_head(
    reader: &mut (impl AsyncRead + Unpin),
    kind: HeadKind,
    received: Vec<u8>,
) -> io::Result<HttpHead> {
    /// 2 KiB: enough for a head with a short body, and small enough to keep for an idle connection.
    const READ_BYTES: usize = 2048;
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    // May contain a token.
    let mut buffer = Zeroizing::new(received);
    loop {
        if let Some(head) = parse_head(&buffer, kind).map_err(invalid)? {
            return Ok(head);
        }
        if buffer.len() >= MAX_HEAD_BYTES {
            return Err(invalid(format!("HTTP head exceeds {MAX_HEAD_BYTES} bytes")));
        }
        if buffer.capacity() - buffer.len() < READ_BYTES {
            // Growing in place would leave a copy.
            let mut larger = Vec::with_capacity(buffer.len() + 2 * READ_BYTES);
            larger.extend_from_slice(&buffer);
            buffer = Zeroizing::new(larger);
        }
        if reader.read_buf(&mut *buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

fn parse_head(bytes: &[u8], kind: HeadKind) -> Result<Option<HttpHead>, String> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = HttpHead::default();
    let (used, parsed) = match kind {
        HeadKind::Request => {
            let mut request = httparse::Request::new(&mut headers);
            let httparse::Status::Complete(used) =
                request.parse(bytes).map_err(|e| e.to_string())?
            else {
                return Ok(None);
            };
            head.method = request.method.unwrap_or("").to_owned();
            head.target = request.path.unwrap_or("").to_owned();
            (used, request.headers)
        }
        HeadKind::Response => {
            let mut response = httparse::Response::new(&mut headers);
            let httparse::Status::Complete(used) =
                response.parse(bytes).map_err(|e| e.to_string())?
            else {
                return Ok(None);
            };
            head.status = response.code.unwrap_or(0);
            (used, response.headers)
        }
    };
    head.headers = parsed
        .iter()
        .map(|header| {
            let value = String::from_utf8_lossy(header.value).into_owned();
            (header.name.to_ascii_lowercase(), value.into())
        })
        .collect();
    if kind == HeadKind::Request {
        check_request(&head, &bytes[..used])?;
    }
    head.rest = bytes[used..].to_vec();
    Ok(Some(head))
}

/// Rejects a request that another HTTP program, such as a reverse proxy in front of this one, could
/// understand differently.
fn check_request(head: &HttpHead, bytes: &[u8]) -> Result<(), String> {
    let mut before = 0;
    for &byte in bytes {
        if (before == b'\r') != (byte == b'\n') {
            return Err("a line does not end with CR LF".to_owned());
        }
        before = byte;
    }
    if head.headers_named("host").count() > 1 {
        return Err("more than one Host header".to_owned());
    }
    let mut lengths = head.headers_named("content-length");
    if let Some(length) = lengths.next() {
        let is_number = !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number || lengths.next().is_some() || head.header("transfer-encoding").is_some() {
            return Err("invalid Content-Length".to_owned());
        }
    }
    Ok(())
}

/// Returns the `Sec-WebSocket-Accept` value for a key.
pub fn accept_key(key: &str) -> String {
    const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    // RFC 6455 prescribes SHA-1; nothing depends on its strength.
    let mut hash = digest::Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(key.trim().as_bytes());
    hash.update(GUID.as_bytes());
    base64(hash.finish().as_ref())
}

/// Standard base64 for short inputs. The library would first detect CPU features with `cpuid`,
/// which takes longer than the whole encoding, and in a virtual machine as long as a network round
/// trip.
pub(crate) fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= group.len() {
                letter.into()
            } else {
                '='
            });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_short_inputs_equals_the_library() {
        for len in 0..64 {
            let bytes: Vec<u8> = (0..len).map(|at| (at * 37 + len) as u8).collect();
            assert_eq!(base64(&bytes), base64_turbo::STANDARD.encode(&bytes));
        }
    }

    #[test]
    fn accept_key_matches_the_example_of_the_rfc() {
        assert_eq!(
            accept_key("dGhlIHNhbXBsZSBub25jZQ=="),
            "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        );
    }

    #[tokio::test]
    async fn read_head_keeps_the_bytes_after_the_head() {
        let mut bytes: &[u8] =
            b"GET /a?b HTTP/1.1\r\nConnection: keep-alive, Upgrade\r\nX: y\r\n\r\nrest";
        let head = read_head(&mut bytes, HeadKind::Request).await.unwrap();
        assert_eq!((head.method.as_str(), head.path()), ("GET", "/a"));
        assert!(head.has_token("connection", "upgrade"));
        assert_eq!(
            (head.header("x"), head.rest.as_slice()),
            (Some("y"), &b"rest"[..])
        );
    }

    #[tokio::test]
    async fn requests_with_two_meanings_are_refused() {
        let read = async |text: &str| {
            let head = read_head(&mut text.as_bytes(), HeadKind::Request).await;
            head.map(|head| head.path().to_owned())
        };
        for text in [
            "GET / HTTP/1.1\n\n",
            "GET / HTTP/1.1\r\nHost: a\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\n\n",
            "GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: +4\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 0x4\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: \r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
            "POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        ] {
            let error = read(text).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{text:?}");
        }
        for text in [
            "GET / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0004\r\n\r\nbody\n",
        ] {
            assert_eq!(read(text).await.unwrap(), "/", "{text:?}");
        }
        // Responses of other programs may be less strict.
        let mut response = b"HTTP/1.1 200 OK\n\n".as_slice();
        let head = read_head(&mut response, HeadKind::Response).await.unwrap();
        assert_eq!(head.status, 200);
    }

    #[test]
    fn response_to_head_has_no_body() {
        let response = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody";
        for (method, length) in [("HEAD", response.len() - 4), ("GET", response.len())] {
            let method = method.to_owned();
            let head = HttpHead {
                method,
                ..HttpHead::default()
            };
            assert_eq!(head.without_needless_body(response.to_vec()).len(), length);
        }
    }

    #[tokio::test]
    async fn read_head_refuses_endless_heads() {
        let long = vec![b'a'; MAX_HEAD_BYTES + 10];
        let mut bytes = [b"GET /".as_slice(), &long].concat();
        let error = read_head(&mut bytes.as_slice(), HeadKind::Request)
            .await
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        bytes.truncate(20);
        let error = read_head(&mut bytes.as_slice(), HeadKind::Request)
            .await
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
