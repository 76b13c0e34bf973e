//! Scripted HTTP server on loopback; a test can make it send invalid responses, too.
//!
//! Reads and records requests. The test writes the bytes of each response to the socket.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use exec_server_sync::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A received request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedRequest {
    /// The request line.
    pub line: String,
    /// Headers in order, as received.
    pub headers: Vec<(String, String)>,
    /// The body, according to `content-length`.
    pub body: Vec<u8>,
}

impl ReceivedRequest {
    /// Returns the value of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let same = |(key, _): &&(String, String)| key.eq_ignore_ascii_case(name);
        self.headers.iter().find(same).map(|(_, value)| &**value)
    }

    /// Returns the target of the request line.
    #[must_use]
    pub fn path(&self) -> &str {
        self.line.split(' ').nth(1).unwrap_or_default()
    }
}

/// A running server; dropping it ends it.
pub struct HttpSite {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
    task: JoinHandle<()>,
}

impl fmt::Debug for HttpSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpSite")
            .field("at", &self.address)
            .finish()
    }
}

impl Drop for HttpSite {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl HttpSite {
    /// Starts a server; `answer` is called with the first request of each connection and the
    /// connection.
    ///
    /// # Panics
    ///
    /// No port is available.
    pub async fn start<F, A>(answer: F) -> Self
    where
        F: Fn(ReceivedRequest, TcpStream) -> A + Send + Sync + 'static,
        A: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener
            .local_addr()
            .expect("a bound socket has an address");
        let requests: Arc<Mutex<Vec<ReceivedRequest>>> = Arc::default();
        let (record, answer) = (Arc::clone(&requests), Arc::new(answer));
        // Ends when the site is dropped.
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let (record, answer) = (Arc::clone(&record), Arc::clone(&answer));
                tokio::spawn(async move {
                    let _ = stream.set_nodelay(true);
                    if let Some(request) = read(&mut stream).await {
                        note(&record, &request);
                        answer(request, stream).await;
                    }
                });
            }
        });
        Self {
            address,
            requests,
            task,
        }
    }

    /// Starts a server that sends the same bytes as response to every request and closes.
    ///
    /// # Panics
    ///
    /// Same as [`HttpSite::start`].
    pub async fn saying(answer: impl Into<Vec<u8>>) -> Self {
        let answer: Arc<[u8]> = answer.into().into();
        Self::start(move |_, mut stream| {
            let answer = Arc::clone(&answer);
            async move { say(&mut stream, &answer).await }
        })
        .await
    }

    /// Address of the server.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// URL of a path, which begins with a slash.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Returns the requests so far.
    #[must_use]
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.requests.lock().clone()
    }
}

fn note(record: &Mutex<Vec<ReceivedRequest>>, request: &ReceivedRequest) {
    let mut seen = record.lock();
    seen.push(request.clone());
}

/// Writes to a peer that may have closed.
pub async fn say(stream: &mut TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes).await;
}

/// Returns a whole response with these headers (lines with their ends) and this body.
#[must_use]
pub fn answer(status: &str, headers: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

async fn read(stream: &mut TcpStream) -> Option<ReceivedRequest> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = head.split("\r\n");
    let line = lines.next().unwrap_or_default().to_owned();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let mut request = ReceivedRequest {
        line,
        headers,
        body: bytes[end + 4..].to_vec(),
    };
    let length = request.header("content-length");
    let length: usize = length.and_then(|text| text.parse().ok()).unwrap_or(0);
    while request.body.len() < length {
        if stream.read_buf(&mut request.body).await.ok()? == 0 {
            return None;
        }
    }
    Some(request)
}
