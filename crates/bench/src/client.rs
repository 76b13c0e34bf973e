//! Minimal wire client for one connection.
//!
//! One thread, blocking calls and reused buffers: a wake-up is one `read`, without a reactor
//! between socket and clock. Uses the compatible wire only, so that every server gets the same
//! requests.

use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use exec_server_protocol::chunk::encoded_len;
use exec_server_protocol::envelope;
use exec_server_protocol::method::{Empty, Method, NotificationMethod as _};
use exec_server_protocol::process::{Start, StartParams, Terminate, TerminateParams};
use exec_server_protocol::sandbox::Sandbox;
use exec_server_protocol::session::{Initialize, InitializeParams, Initialized};
use exec_server_protocol::{ByteChunk, PathUri, RequestId};
use exec_server_transport::frame::{self, DecodeStep, Decoder, Opcode, WebsocketRole};
use exec_server_transport::{http, tcp};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use serde::Serialize;

use crate::pattern::BytePattern;
use crate::wire::{self, BenchMessage};

/// A connection and its buffers.
pub(crate) struct BenchClient {
    stream: BenchSocket,
    decoder: Decoder,
    /// Received bytes are in `unread`; the rest is free space.
    buffer: Vec<u8>,
    unread: Range<usize>,
    /// Maximum number of bytes per read.
    read_bytes: usize,
    /// Bytes received since the upgrade.
    received: u64,
    /// Whether the last read filled the free space.
    filled: bool,
    /// Frames to be sent.
    out: Vec<u8>,
    next_id: i64,
    next_process: u64,
    atomic: bool,
}

/// An encoded request.
pub(crate) struct Encoded {
    id: i64,
    frames: Vec<u8>,
}

/// Transport of a connection.
enum BenchSocket {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, ReadAhead>>),
}

/// Buffered reader: rustls reads a few KiB at a time, which would make this client the bottleneck.
struct ReadAhead(BufReader<TcpStream>);

impl Read for ReadAhead {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for ReadAhead {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.get_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.get_mut().flush()
    }
}

impl Read for BenchSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for BenchSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

/// Standard streams of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChildStdio {
    /// No input; pipes for output.
    Pipe,
    /// Pipes for input and output.
    PipeWithInput,
    /// A terminal.
    Tty,
}

impl BenchClient {
    /// 256 KiB: beyond the second-level cache larger reads are slower.
    const READ_BYTES: usize = 256 * 1024;
    /// Read timeout: longer than any scenario waits for a message.
    const READ_TIMEOUT: Duration = Duration::from_secs(30);
    /// Any key is valid: it only prevents cached responses.
    const KEY: &str = "ZXhlYy1zZXJ2ZXItYmVuY2g=";
    /// Any mask is valid, and generating one is not measured.
    const MASK: [u8; 4] = [0x5a, 0xc3, 0x96, 0x0f];

    /// Connects and performs the websocket upgrade only.
    pub(crate) fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        Self::upgrade(TcpStream::connect(address)?, "")
    }

    /// Like [`BenchClient::connect`], with a token.
    pub(crate) fn connect_as(address: SocketAddr, token: &str) -> anyhow::Result<Self> {
        let header = format!("Authorization: Bearer {token}\r\n");
        Self::upgrade(TcpStream::connect(address)?, &header)
    }

    /// Like [`BenchClient::connect`], over TLS.
    pub(crate) fn connect_tls(
        address: SocketAddr,
        config: &Arc<ClientConfig>,
    ) -> anyhow::Result<Self> {
        let name = ServerName::from(address.ip());
        let session = ClientConnection::new(Arc::clone(config), name)?;
        let stream = Self::prepare(TcpStream::connect(address)?)?;
        let stream = ReadAhead(BufReader::with_capacity(Self::READ_BYTES, stream));
        let stream = Box::new(StreamOwned::new(session, stream));
        Self::upgrade_over(BenchSocket::Tls(stream), "")
    }

    /// Connects with a fixed receive buffer instead of one that grows with the traffic. Reads are
    /// limited to the same size.
    pub(crate) fn connect_with_buffer(address: SocketAddr, bytes: usize) -> anyhow::Result<Self> {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let socket: OwnedFd =
            rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_recv_buffer_size(&socket, bytes)?;
        rustix::net::connect(&socket, &address)?;
        let mut client = Self::upgrade(socket.into(), "")?;
        client.read_bytes = bytes;
        Ok(client)
    }

    fn prepare(stream: TcpStream) -> io::Result<TcpStream> {
        tcp::prepare(&stream, stream.peer_addr())?;
        stream.set_read_timeout(Some(Self::READ_TIMEOUT))?;
        Ok(stream)
    }

    /// `headers` are complete lines.
    fn upgrade(stream: TcpStream, headers: &str) -> anyhow::Result<Self> {
        Self::upgrade_over(BenchSocket::Plain(Self::prepare(stream)?), headers)
    }

    fn upgrade_over(mut stream: BenchSocket, headers: &str) -> anyhow::Result<Self> {
        let request = format!(
            "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {}\r\n{headers}\r\n",
            Self::KEY
        );
        stream.write_all(request.as_bytes())?;
        let mut buffer = vec![0; 4 * 1024];
        let mut filled = 0;
        let head = loop {
            let read = stream
                .read(&mut buffer[filled..])
                .context("no answer to the upgrade")?;
            ensure!(
                read > 0,
                "the server closed the connection during the upgrade"
            );
            filled += read;
            if let Some(at) = buffer[..filled]
                .windows(4)
                .position(|four| four == b"\r\n\r\n")
            {
                break at + 4;
            }
        };
        let text = String::from_utf8_lossy(&buffer[..head]);
        ensure!(
            text.starts_with("HTTP/1.1 101") && text.contains(&http::accept_key(Self::KEY)),
            "the upgrade was answered with {text}"
        );
        Ok(Self {
            stream,
            decoder: Decoder::new(WebsocketRole::Client),
            buffer,
            unread: head..filled,
            read_bytes: Self::READ_BYTES,
            received: 0,
            filled: false,
            out: Vec::new(),
            next_id: 1,
            next_process: 1,
            atomic: false,
        })
    }

    /// Sends `initialize` and waits for its response; [`BenchClient::initialized`] completes the
    /// handshake.
    pub(crate) fn initialize(&mut self) -> anyhow::Result<()> {
        let params = InitializeParams {
            client_name: "bench".to_owned(),
            ..Default::default()
        };
        let id = self.request::<Initialize>(&params)?;
        loop {
            if let BenchMessage::Response {
                id: answered,
                result,
            } = self.receive()?
                && answered == id
            {
                self.atomic = result.contains("\"fs/open#atomic\"");
                return Ok(());
            }
        }
    }

    /// Whether the server supports atomic replacement of a file that is written in blocks.
    pub(crate) fn has_atomic_writes(&self) -> bool {
        self.atomic
    }

    /// Sends `initialized`, which has no response.
    pub(crate) fn initialized(&mut self) -> anyhow::Result<()> {
        self.send(|out| envelope::encode_notification(out, Initialized::NAME, &Empty {}))
    }

    /// Opens a connection and completes the handshake.
    pub(crate) fn open(address: SocketAddr) -> anyhow::Result<Self> {
        Self::connect(address)?.ready()
    }

    /// Performs the handshake of the protocol.
    pub(crate) fn ready(mut self) -> anyhow::Result<Self> {
        self.initialize()?;
        self.initialized()?;
        Ok(self)
    }

    /// Sends `process/start`; returns the ids of the request and the process.
    pub(crate) fn start(&mut self, argv: &[&str], stdio: ChildStdio) -> anyhow::Result<(i64, u64)> {
        self.start_in(None, argv, stdio)
    }

    /// Like [`BenchClient::start`], under a policy.
    pub(crate) fn start_in(
        &mut self,
        sandbox: Option<&Sandbox>,
        argv: &[&str],
        stdio: ChildStdio,
    ) -> anyhow::Result<(i64, u64)> {
        self.start_with(sandbox, argv, stdio, |_| {})
    }

    /// Same as [`BenchClient::start_in`]; `set` can change the params.
    pub(crate) fn start_with(
        &mut self,
        sandbox: Option<&Sandbox>,
        argv: &[&str],
        stdio: ChildStdio,
        set: impl FnOnce(&mut StartParams),
    ) -> anyhow::Result<(i64, u64)> {
        let process = self.next_process;
        self.next_process += 1;
        let mut params = StartParams {
            process_id: wire::process_id(process),
            argv: argv.iter().map(|&word| word.to_owned()).collect(),
            cwd: PathUri::parse("file:///")?,
            env: [("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned())].into(),
            tty: stdio == ChildStdio::Tty,
            pipe_stdin: stdio == ChildStdio::PipeWithInput,
            sandbox: sandbox.cloned(),
            ..Default::default()
        };
        set(&mut params);
        Ok((self.request::<Start>(&params)?, process))
    }

    /// Encodes `process/write` with `len` bytes of the pattern from `offset`.
    pub(crate) fn write_pattern(
        &mut self,
        process: u64,
        pattern: &BytePattern,
        offset: u64,
        len: usize,
    ) -> anyhow::Result<Encoded> {
        let id = self.take_id();
        self.queue_long(encoded_len(len), |out| {
            // Written by hand: the text of the chunk exists already and is only copied.
            write!(
                out,
                "{{\"id\":{id},\"method\":\"process/write\",\"params\":{{\"processId\":\"{}\",\"writeId\":\"{id}\",\"chunk\":\"",
                wire::process_id(process)
            )?;
            pattern.push_text(offset, len, out);
            out.extend_from_slice(b"\"}}");
            anyhow::Ok(())
        })?;
        Ok(self.encoded(id))
    }

    /// Sends `process/write` with a few bytes.
    pub(crate) fn write(&mut self, process: u64, bytes: &[u8]) -> anyhow::Result<()> {
        use exec_server_protocol::process::{Write, WriteParams};
        let params = WriteParams {
            process_id: wire::process_id(process),
            chunk: ByteChunk::from(bytes),
            write_id: self.next_id.to_string(),
        };
        self.request::<Write>(&params).map(drop)
    }

    /// Sends a request with encoded params.
    pub(crate) fn ask(&mut self, method: &str, params: &str) -> anyhow::Result<i64> {
        let id = self.take_id();
        self.send(|out| {
            write!(
                out,
                "{{\"id\":{id},\"method\":\"{method}\",\"params\":{params}}}"
            )
        })?;
        Ok(id)
    }

    /// Sends the same request several times with one write.
    pub(crate) fn ask_batch(
        &mut self,
        method: &str,
        params: &str,
        count: usize,
    ) -> anyhow::Result<()> {
        for _ in 0..count {
            let id = self.take_id();
            self.queue(|out| {
                write!(
                    out,
                    "{{\"id\":{id},\"method\":\"{method}\",\"params\":{params}}}"
                )
            })?;
        }
        self.flush()
    }

    /// Whether a received message is still in the buffer.
    pub(crate) fn has_buffered(&self) -> bool {
        !self.unread.is_empty()
    }

    /// Encodes `fs/writeFile` with `len` bytes of the pattern, to be sent by [`BenchClient::flush`].
    pub(crate) fn queue_file(
        &mut self,
        path: &str,
        pattern: &BytePattern,
        len: usize,
    ) -> anyhow::Result<i64> {
        let id = self.take_id();
        self.queue_long(encoded_len(len), |out| {
            write!(
                out,
                "{{\"id\":{id},\"method\":\"fs/writeFile\",\"params\":{{\"path\":\"{path}\",\"dataBase64\":\""
            )?;
            pattern.push_text(0, len, out);
            out.extend_from_slice(b"\"}}");
            anyhow::Ok(())
        })?;
        Ok(id)
    }

    /// Encodes `fs/writeBlock` with `len` bytes of the pattern from `offset`.
    pub(crate) fn write_block(
        &mut self,
        handle: &str,
        pattern: &BytePattern,
        offset: u64,
        len: usize,
    ) -> anyhow::Result<Encoded> {
        let id = self.take_id();
        self.queue_long(encoded_len(len), |out| {
            write!(
                out,
                "{{\"id\":{id},\"method\":\"fs/writeBlock\",\"params\":{{\"handleId\":\"{handle}\",\"offset\":{offset},\"chunk\":\""
            )?;
            pattern.push_text(offset, len, out);
            out.extend_from_slice(b"\"}}");
            anyhow::Ok(())
        })?;
        Ok(self.encoded(id))
    }

    /// Takes the last encoded request, to be sent later: the cost of encoding is not measured.
    fn encoded(&mut self, id: i64) -> Encoded {
        let frames = std::mem::take(&mut self.out);
        Encoded { id, frames }
    }

    /// Sends an encoded request.
    pub(crate) fn send_encoded(&mut self, message: &Encoded) -> anyhow::Result<i64> {
        self.stream
            .write_all(&message.frames)
            .context("cannot send to the server")?;
        Ok(message.id)
    }

    /// Sends `process/terminate`.
    pub(crate) fn terminate(&mut self, process: u64) -> anyhow::Result<()> {
        let params = TerminateParams {
            process_id: wire::process_id(process),
            ..Default::default()
        };
        self.request::<Terminate>(&params).map(drop)
    }

    /// Waits for the response to one request and skips everything before it.
    pub(crate) fn answer(&mut self, request: i64) -> anyhow::Result<()> {
        loop {
            if matches!(self.receive()?, BenchMessage::Response { id, .. } if id == request) {
                return Ok(());
            }
        }
    }

    /// Waits for `count` responses in any order and skips everything between them.
    pub(crate) fn answers(&mut self, mut count: usize) -> anyhow::Result<()> {
        while count > 0 {
            count -= usize::from(matches!(self.receive()?, BenchMessage::Response { .. }));
        }
        Ok(())
    }

    /// Waits for `process/closed` and skips everything before it.
    pub(crate) fn closed(&mut self, process: u64) -> anyhow::Result<()> {
        loop {
            if matches!(self.receive()?, BenchMessage::Closed { process: p, .. } if p == process) {
                return Ok(());
            }
        }
    }

    /// Bytes received since the upgrade.
    pub(crate) fn received_bytes(&self) -> u64 {
        self.received
    }

    /// Waits until some bytes of the next message have been received.
    pub(crate) fn await_first_bytes(&mut self) -> anyhow::Result<()> {
        match self.has_buffered() {
            true => Ok(()),
            false => self.fill(1),
        }
    }

    /// Receives the next message.
    pub(crate) fn receive(&mut self) -> anyhow::Result<BenchMessage<'_>> {
        loop {
            let Range { start, end } = self.unread.clone();
            let mut at = start;
            let step = self.decoder.step(&mut self.buffer[..end], &mut at)?;
            self.unread.start = at;
            match step {
                DecodeStep::Whole { payload, .. } => {
                    return BenchMessage::decode(&self.buffer[payload]);
                }
                DecodeStep::Assembled { .. } => {
                    return BenchMessage::decode(self.decoder.assembled());
                }
                DecodeStep::Fragment => {}
                DecodeStep::NeedMore(missing) => self.fill(missing)?,
                DecodeStep::Control(Opcode::Ping, payload) => {
                    let payload = self.buffer[payload].to_vec();
                    frame::push_frame(&mut self.out, Opcode::Pong, Some(Self::MASK), &payload);
                    self.flush()?;
                }
                DecodeStep::Control(Opcode::Close, _) => bail!("the server closed the connection"),
                DecodeStep::Control(..) => {}
            }
        }
    }

    fn fill(&mut self, missing: usize) -> anyhow::Result<()> {
        let Range { start, end } = self.unread.clone();
        if start == end {
            self.unread = 0..0;
            if let Some((rest, most)) = self.decoder.room(self.read_bytes)? {
                let read = (&mut self.stream).take(most as u64).read_to_end(rest)?;
                ensure!(read > 0, "the server closed the connection");
                self.decoder.record_received(read);
                self.received += read as u64;
                return Ok(());
            }
        } else if self.buffer.len() - end < missing {
            self.buffer.copy_within(start..end, 0);
            self.unread = 0..end - start;
        }
        // Grows with the traffic: touching the pages of a large buffer would dominate the cost of a
        // short connection.
        let full = self.buffer.len() - self.unread.end < missing;
        if full || self.filled {
            let needed = (self.unread.end + missing).max(self.read_bytes);
            self.buffer.resize(self.buffer.len().max(needed), 0);
        }
        let read = loop {
            match self.stream.read(&mut self.buffer[self.unread.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other.context("nothing came from the server")?,
            }
        };
        ensure!(read > 0, "the server closed the connection");
        self.unread.end += read;
        self.received += read as u64;
        self.filled = self.unread.end == self.buffer.len();
        Ok(())
    }

    fn take_id(&mut self) -> i64 {
        self.next_id += 1;
        self.next_id - 1
    }

    fn request<M: Method>(&mut self, params: &M::Params) -> anyhow::Result<i64>
    where
        M::Params: Serialize,
    {
        let id = self.take_id();
        self.send(|out| envelope::encode_request(out, &RequestId::Number(id), M::NAME, params))?;
        Ok(id)
    }

    fn send<E>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> anyhow::Result<()>
    where
        anyhow::Error: From<E>,
    {
        self.queue(write)?;
        self.flush()
    }

    /// Encodes a message, to be sent by [`BenchClient::flush`].
    fn queue<E>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> anyhow::Result<()>
    where
        anyhow::Error: From<E>,
    {
        /// Expected length, which determines the reserved frame header: that of a short payload.
        const HINT: usize = 200;
        self.queue_long(HINT, write)
    }

    /// Like [`BenchClient::queue`], with an expected length: if it is wrong, the payload is moved once
    /// more.
    fn queue_long<E>(
        &mut self,
        hint: usize,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> anyhow::Result<()>
    where
        anyhow::Error: From<E>,
    {
        let mut written = Ok(());
        frame::push_message(&mut self.out, Some(Self::MASK), hint, |out| {
            written = write(out)
        });
        Ok(written?)
    }

    /// Sends all encoded messages.
    pub(crate) fn flush(&mut self) -> anyhow::Result<()> {
        self.stream
            .write_all(&self.out)
            .context("cannot send to the server")?;
        self.out.clear();
        Ok(())
    }
}
