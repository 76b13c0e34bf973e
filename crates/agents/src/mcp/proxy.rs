//! `mcp-proxy`: carries the messages of a remote stdio MCP server over local standard input and
//! output.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use exec_server_client::ExecBackend;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::time::Instant;

use crate::mcp::stdio::{self, MAX_LINE_BYTES, StdioError, StdioSender, StdioServer};

/// How long a server may take to exit after its client has closed the connection.
const END_GRACE: Duration = Duration::from_secs(5);

/// Why a proxy has failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// The connection to the server failed.
    #[error(transparent)]
    Server(#[from] StdioError),
    /// Reading or writing the client's messages failed.
    #[error("cannot read or write the messages of the client")]
    Client(#[source] io::Error),
    /// The client sent a line over the limit.
    #[error("the client sent a line of more than {MAX_LINE_BYTES} bytes")]
    LineTooLong,
}

/// Starts a server and carries messages until the server or the client ends.
///
/// Returns the exit code of the server if the server ended first.
///
/// # Errors
///
/// If the server cannot be started, or if one side violates the protocol.
pub async fn run(
    backend: &dyn ExecBackend,
    server: StdioServer,
    input: impl AsyncRead + Unpin,
    mut output: impl AsyncWrite + Unpin,
) -> Result<Option<i32>, ProxyError> {
    let (mut sender, mut receiver) = stdio::launch(backend, server).await?;
    let forward = forward(input, &mut sender);
    tokio::pin!(forward);
    let mut client_ended = false;
    // Deadline of the server's exit after the client has closed its side.
    let exit_deadline = tokio::time::sleep(Duration::MAX);
    tokio::pin!(exit_deadline);
    loop {
        tokio::select! {
            outcome = &mut forward, if !client_ended => {
                outcome?;
                client_ended = true;
                exit_deadline.as_mut().reset(Instant::now() + END_GRACE);
            }
            () = &mut exit_deadline, if client_ended => return Ok(None),
            message = receiver.recv() => match message? {
                Some(message) => deliver(&mut output, &message).await.map_err(ProxyError::Client)?,
                None => return Ok(receiver.exit_code()),
            },
        }
    }
}

/// Forwards the client's lines to the server until the input ends.
async fn forward(
    input: impl AsyncRead + Unpin,
    sender: &mut StdioSender,
) -> Result<(), ProxyError> {
    let mut input = BufReader::new(input);
    let mut line = BytesMut::new();
    loop {
        let available = input.fill_buf().await.map_err(ProxyError::Client)?;
        if available.is_empty() {
            break;
        }
        let newline = memchr::memchr(b'\n', available);
        let piece = &available[..newline.unwrap_or(available.len())];
        if line.len() + piece.len() > MAX_LINE_BYTES {
            return Err(ProxyError::LineTooLong);
        }
        line.extend_from_slice(piece);
        let used = piece.len() + usize::from(newline.is_some());
        input.consume(used);
        if newline.is_some() {
            let whole = line.split().freeze();
            send(sender, whole).await?;
        }
    }
    let rest = line.split().freeze();
    send(sender, rest).await?;
    match sender.finish().await {
        // The server has already exited; the receiving direction reports it.
        Err(StdioError::Closed) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn send(sender: &mut StdioSender, line: Bytes) -> Result<(), ProxyError> {
    if line.iter().all(u8::is_ascii_whitespace) {
        return Ok(());
    }
    match sender.send(line).await {
        // Closed input is not an error here: output of the server may still arrive.
        Err(StdioError::Closed) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn deliver(output: &mut (impl AsyncWrite + Unpin), message: &[u8]) -> io::Result<()> {
    output.write_all(message).await?;
    output.write_all(b"\n").await?;
    output.flush().await
}
