//! HTTP/1.1 client for single requests, each on a new connection.

use exec_server_transport::http::{HeadKind, read_head};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Sends a request with a bearer token to an `http://` URL; returns the status, and the body as
/// JSON or else as text.
///
/// # Panics
///
/// There is no response.
pub async fn request(method: &str, url: &str, token: Option<&str>, body: &str) -> (u16, Value) {
    let rest = url.strip_prefix("http://").expect("an http:// URL");
    let (host, path) = match rest.find('/') {
        Some(at) => rest.split_at(at),
        None => (rest, "/"),
    };
    let mut stream = TcpStream::connect(host)
        .await
        .unwrap_or_else(|error| panic!("cannot connect to {url}: {error}"));
    let token = token.map_or(String::new(), |token| {
        format!("Authorization: Bearer {token}\r\n")
    });
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{token}\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream
        .write_all(request.as_bytes())
        .await
        .expect("a request can be sent");
    let head = read_head(&mut stream, HeadKind::Response)
        .await
        .unwrap_or_else(|error| panic!("{url} did not answer: {error}"));
    let mut text = head.rest;
    // A server that closes without reading the whole request may have responded nevertheless.
    let _ = stream.read_to_end(&mut text).await;
    let value = serde_json::from_slice(&text)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&text).into_owned()));
    (head.status, value)
}
