//! Stdio MCP server as a process in an environment.
//!
//! Owns the transfer of messages in both directions. Each message is one line of bounded length.
//! Output is joined across chunks and split at line endings; standard error goes to the log. If
//! output is missing, the connection ends, because two halves of different messages must not be
//! joined. Messages are checked to be JSON and not interpreted further.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::{Buf as _, Bytes, BytesMut};
use exec_server_client::{
    ExecBackend, ExecProcess, ExecProcessEvent, ExecProcessEvents, ExecServerError,
};
use exec_server_protocol::PathUri;
use exec_server_protocol::process::{
    EnvPolicy, Inherit, OutputStream, StartParams, TerminateMode, WriteStatus,
};
use exec_server_protocol::sandbox::Sandbox;

/// Maximum length of a message from a server.
pub const MAX_LINE_BYTES: usize = 8 << 20;

/// Maximum length of a log line from a server.
pub const MAX_LOG_LINE_BYTES: usize = 1 << 20;

/// Command and settings to start a server.
#[derive(Debug, Clone)]
pub struct StdioServer {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory; required, so that a server never starts in an arbitrary directory.
    pub cwd: PathUri,
    /// Environment variables to set.
    pub env: BTreeMap<String, String>,
    /// Names of variables to inherit from the environment, in addition to a few harmless ones.
    pub inherit: Vec<String>,
    /// Sandbox policy of the server.
    pub sandbox: Option<Sandbox>,
}

/// Variables that every server inherits from its environment.
const USUAL_VARIABLES: &[&str] = &[
    "HOME", "LOGNAME", "PATH", "SHELL", "USER", "LANG", "LC_ALL", "TERM", "TMPDIR", "TZ",
];

impl StdioServer {
    fn params(self) -> StartParams {
        let (inherit, include_only) = match self.inherit.is_empty() {
            true => (Inherit::Core, Vec::new()),
            false => {
                let usual = USUAL_VARIABLES.iter().map(|&name| name.to_owned());
                (Inherit::All, usual.chain(self.inherit).collect())
            }
        };
        StartParams {
            process_id: format!("mcp-stdio-{}", uuid::Uuid::new_v4()),
            argv: self.argv,
            cwd: self.cwd,
            env: self.env,
            env_policy: Some(EnvPolicy {
                include_only,
                ..EnvPolicy::unfiltered(inherit)
            }),
            pipe_stdin: true,
            sandbox: self.sandbox,
            ..StartParams::default()
        }
    }
}

/// Why a connection to a server has ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StdioError {
    /// The server cannot be started, or its environment is unreachable.
    #[error(transparent)]
    Backend(#[from] ExecServerError),
    /// The server sent a line over the limit.
    #[error("the server sent a line of more than {max} bytes on {stream}")]
    LineTooLong {
        /// The limit.
        max: usize,
        /// The stream that contained the line.
        stream: &'static str,
    },
    /// Output was lost.
    #[error("output of the server is missing after number {after_seq}")]
    Gap {
        /// The last sequence number before the loss.
        after_seq: u64,
    },
    /// The server has closed its standard input.
    #[error("the server has closed its input")]
    Closed,
    /// The message contains a line break.
    #[error("a message must not contain a line end")]
    NotOneLine,
}

/// Starts a server and connects to it. Dropping both halves ends the server.
pub async fn launch(
    backend: &dyn ExecBackend,
    server: StdioServer,
) -> Result<(StdioSender, StdioReceiver), StdioError> {
    let name = server.argv.first().cloned().unwrap_or_default();
    let process = backend.start(server.params()).await?.process;
    let guard = Arc::new(ProcessGuard(process));
    let events = guard.0.events()?;
    let sender = StdioSender {
        process: Arc::clone(&guard),
    };
    let receiver = StdioReceiver {
        name,
        process: guard,
        events,
        stdout: LineBuffer::new(MAX_LINE_BYTES),
        stderr: LineBuffer::new(MAX_LOG_LINE_BYTES),
        exit_code: None,
        ended: false,
    };
    Ok((sender, receiver))
}

/// Handle that ends the process when its last owner drops it.
#[derive(Debug)]
struct ProcessGuard(Arc<dyn ExecProcess>);

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let process = Arc::clone(&self.0);
        // This task ends after one request.
        runtime.spawn(async move {
            if let Err(error) = process.terminate(TerminateMode::Force, false).await {
                tracing::debug!(%error, "cannot end an MCP server");
            }
        });
    }
}

/// Sending half of the connection.
#[derive(Debug)]
pub struct StdioSender {
    process: Arc<ProcessGuard>,
}

impl StdioSender {
    /// Sends one message. Waits until the server has accepted the previous message.
    ///
    /// # Errors
    ///
    /// If the message is more than one line, or if the server accepts no more messages.
    pub async fn send(&mut self, message: Bytes) -> Result<(), StdioError> {
        if message.contains(&b'\n') {
            return Err(StdioError::NotOneLine);
        }
        let mut line = BytesMut::with_capacity(message.len() + 1);
        line.extend_from_slice(&message);
        line.extend_from_slice(b"\n");
        match self.process.0.write(line.freeze()).await? {
            WriteStatus::Accepted => Ok(()),
            _ => Err(StdioError::Closed),
        }
    }

    /// Closes the server's standard input; a well-behaved server then exits.
    ///
    /// # Errors
    ///
    /// If the request cannot be sent.
    pub async fn finish(&mut self) -> Result<(), StdioError> {
        self.process.0.close_stdin().await?;
        Ok(())
    }
}

/// Receiving half of the connection.
#[derive(Debug)]
pub struct StdioReceiver {
    name: String,
    process: Arc<ProcessGuard>,
    events: ExecProcessEvents,
    stdout: LineBuffer,
    stderr: LineBuffer,
    exit_code: Option<i32>,
    ended: bool,
}

impl StdioReceiver {
    /// Returns the next message, or `None` when the server has exited and all its output was read.
    ///
    /// Lines that are not JSON are logged and skipped. Cancel safe.
    ///
    /// # Errors
    ///
    /// If a line is too long, output was lost, or the server has become unreachable. The connection
    /// has then ended.
    pub async fn recv(&mut self) -> Result<Option<Bytes>, StdioError> {
        loop {
            while let Some(line) = self.stdout.next_line() {
                if let Some(message) = self.message(line) {
                    return Ok(Some(message));
                }
            }
            if self.ended {
                // The last message may lack its line ending.
                let rest = self.stdout.finish();
                return Ok(rest.and_then(|line| self.message(line)));
            }
            let Some(event) = self.events.recv().await else {
                self.ended = true;
                continue;
            };
            if let Err(error) = self.take(event) {
                self.ended = true;
                self.stdout = LineBuffer::new(MAX_LINE_BYTES);
                return Err(error);
            }
        }
    }

    /// Exit code of the server, if it has exited.
    pub fn exit_code(&self) -> Option<i32> {
        self.exit_code
    }

    /// Id of the server's process.
    pub fn process_id(&self) -> &str {
        self.process.0.process_id()
    }

    fn take(&mut self, event: ExecProcessEvent) -> Result<(), StdioError> {
        match event {
            ExecProcessEvent::Output { stream, chunk, .. } => {
                let is_log = stream == OutputStream::Stderr;
                let lines = if is_log {
                    &mut self.stderr
                } else {
                    &mut self.stdout
                };
                lines.push(&chunk).map_err(|max| StdioError::LineTooLong {
                    max,
                    stream: stream.name(),
                })?;
                while is_log && let Some(line) = self.stderr.next_line() {
                    self.log(&line);
                }
            }
            ExecProcessEvent::Exited { exit, .. } => self.exit_code = Some(exit.exit_code),
            ExecProcessEvent::Closed { .. } => {
                self.ended = true;
                if let Some(line) = self.stderr.finish() {
                    self.log(&line);
                }
            }
            ExecProcessEvent::Gap { after_seq, .. } => return Err(StdioError::Gap { after_seq }),
            ExecProcessEvent::Failed(failure) => {
                return Err(StdioError::Backend(failure.into()));
            }
            // Event kinds added in the future are not output.
            _ => {}
        }
        Ok(())
    }

    fn log(&self, line: &[u8]) {
        let text = String::from_utf8_lossy(line);
        tracing::info!(server = self.name, "{text}");
    }

    /// Returns the line if it is JSON.
    fn message(&self, line: Bytes) -> Option<Bytes> {
        if line.is_empty() {
            return None;
        }
        if let Err(error) = serde_json::from_slice::<serde::de::IgnoredAny>(&line) {
            let server = &self.name;
            let start = String::from_utf8_lossy(&line[..line.len().min(200)]).into_owned();
            tracing::warn!(server, %error, start, "ignored a line of an MCP server that is not JSON");
            return None;
        }
        Some(line)
    }
}

/// Joins chunks and splits them at line endings.
#[derive(Debug)]
struct LineBuffer {
    bytes: BytesMut,
    /// The buffer contains no line ending before this offset.
    searched: usize,
    max: usize,
}

impl LineBuffer {
    fn new(max: usize) -> Self {
        Self {
            bytes: BytesMut::new(),
            searched: 0,
            max,
        }
    }

    /// Adds output. Returns the limit as an error if an incomplete line exceeds it.
    fn push(&mut self, chunk: &[u8]) -> Result<(), usize> {
        // Complete lines are taken out before each push, so the buffer holds at most one incomplete
        // line.
        let tail = memchr::memchr(b'\n', chunk).unwrap_or(chunk.len());
        if self.bytes.len() + tail > self.max {
            return Err(self.max);
        }
        self.bytes.extend_from_slice(chunk);
        Ok(())
    }

    /// Returns the next complete line without its ending.
    fn next_line(&mut self) -> Option<Bytes> {
        let found = memchr::memchr(b'\n', &self.bytes[self.searched..]);
        let Some(at) = found.map(|at| self.searched + at) else {
            self.searched = self.bytes.len();
            return None;
        };
        self.searched = 0;
        let line = self.bytes.split_to(at).freeze();
        self.bytes.advance(1);
        Some(without_return(line))
    }

    /// Returns the incomplete line at the end of the output.
    fn finish(&mut self) -> Option<Bytes> {
        self.searched = 0;
        let rest = self.bytes.split().freeze();
        (!rest.is_empty()).then(|| without_return(rest))
    }
}

fn without_return(line: Bytes) -> Bytes {
    match line.strip_suffix(b"\r") {
        Some(plain) => line.slice(..plain.len()),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use exec_server_client::executor::{Executor, ExecutorConfig};
    use exec_server_client::{BoxFuture, EventSource, LocalBackend};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn line_over_the_limit_ends_the_connection() {
        let mut lines = LineBuffer::new(4);
        assert_eq!(lines.push(b"abcd"), Ok(()));
        assert_eq!(lines.next_line(), None);
        assert_eq!(lines.push(b"\nx"), Ok(()));
        assert_eq!(lines.next_line().unwrap(), "abcd");
        assert_eq!(lines.push(b"yzuv"), Err(4));
        let mut lines = LineBuffer::new(4);
        assert_eq!(lines.push(b"ab\r\n\ncd"), Ok(()));
        assert_eq!(lines.next_line().unwrap(), "ab");
        assert_eq!(lines.next_line().unwrap(), "");
        assert_eq!(lines.next_line(), None);
        assert_eq!(lines.finish().unwrap(), "cd");
        assert_eq!(lines.finish(), None);
    }

    struct StdoutSource(Vec<ExecProcessEvent>);

    impl EventSource for StdoutSource {
        fn recv(&mut self) -> BoxFuture<'_, Option<ExecProcessEvent>> {
            let next = self.0.pop();
            Box::pin(async { next })
        }
    }

    /// Creates a receiver of these events; its process is arbitrary.
    async fn received(mut events: Vec<ExecProcessEvent>) -> StdioReceiver {
        let executor = Executor::new(ExecutorConfig::default()).unwrap();
        let params = StartParams {
            process_id: "p".to_owned(),
            argv: vec!["/bin/cat".to_owned()],
            pipe_stdin: true,
            ..StartParams::default()
        };
        let started = LocalBackend::new(executor).start(params).await.unwrap();
        events.reverse();
        StdioReceiver {
            name: "test".to_owned(),
            process: Arc::new(ProcessGuard(started.process)),
            events: ExecProcessEvents::new(StdoutSource(events)),
            stdout: LineBuffer::new(MAX_LINE_BYTES),
            stderr: LineBuffer::new(MAX_LOG_LINE_BYTES),
            exit_code: None,
            ended: false,
        }
    }

    fn output(seq: u64, stream: OutputStream, text: &'static [u8]) -> ExecProcessEvent {
        ExecProcessEvent::Output {
            seq,
            stream,
            chunk: Bytes::from_static(text),
        }
    }

    #[tokio::test]
    async fn lost_output_ends_the_connection_instead_of_joining_partial_messages() {
        let gap = ExecProcessEvent::Gap {
            after_seq: 2,
            through_seq: 3,
            bytes: Some(10),
        };
        let mut receiver = received(vec![
            output(1, OutputStream::Stdout, b"{\"whole\":1}\n{\"half\":"),
            output(2, OutputStream::Stderr, b"noise"),
            gap,
            output(4, OutputStream::Stdout, b"2}\n{\"next\":3}\n"),
        ])
        .await;
        let whole = receiver.recv().await.unwrap().unwrap();
        assert_eq!(whole, &br#"{"whole":1}"#[..]);
        let error = receiver.recv().await.unwrap_err();
        assert!(matches!(error, StdioError::Gap { after_seq: 2 }), "{error}");
        // The stream ends after the gap, however much output follows.
        assert!(receiver.recv().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn log_line_over_the_limit_ends_the_connection() {
        static LONG: [u8; MAX_LOG_LINE_BYTES] = [b'x'; MAX_LOG_LINE_BYTES];
        let mut receiver = received(vec![
            output(1, OutputStream::Stderr, &LONG),
            output(2, OutputStream::Stderr, b"x"),
        ])
        .await;
        let error = receiver.recv().await.unwrap_err().to_string();
        assert!(error.contains("1048576 bytes on stderr"), "{error}");
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_chunk_boundaries(text in "[ab\r\n]{0,60}", cut in 1usize..9) {
            let mut lines = LineBuffer::new(100);
            let mut found = Vec::new();
            for chunk in text.as_bytes().chunks(cut) {
                lines.push(chunk).unwrap();
                while let Some(line) = lines.next_line() {
                    found.push(line);
                }
            }
            found.extend(lines.finish());
            let expected: Vec<&str> = text.split_terminator('\n')
                .map(|line| line.strip_suffix('\r').unwrap_or(line)).collect();
            // A last line of a single carriage return is a line, as for `split_terminator`.
            prop_assert_eq!(found, expected);
        }
    }
}
