//! Child modes of this program: what it does as a child of a scenario or of a floor.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::ensure;
use exec_server_transport::frame::{self, DecodeStep, Decoder, Opcode, WebsocketRole};
use exec_server_transport::{http, tcp};
use rustix::io::Errno;

use crate::pattern::{BytePattern, WRITE_BYTES};
use crate::stats::median;
use crate::wire;

/// Writes `total` bytes of the pattern to standard output.
pub(crate) fn emit(total: u64) -> anyhow::Result<()> {
    let pattern = BytePattern::new();
    let stdout = rustix::stdio::stdout();
    let mut offset = 0;
    while offset < total {
        match rustix::io::write(stdout, pattern.window(offset, total - offset)) {
            Ok(written) => offset += written as u64,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Writes `total` bytes to standard output, one every 100 µs.
pub(crate) fn emit_slowly(total: u64) -> anyhow::Result<()> {
    const PAUSE: Duration = Duration::from_micros(100);
    let stdout = rustix::stdio::stdout();
    let begun = Instant::now();
    for number in 0..total {
        rustix::io::write(stdout, b"x")?;
        // The time of the next byte does not depend on how late the timer was before.
        let due = PAUSE * u32::try_from(number + 1)?;
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    Ok(())
}

/// Reads `total` bytes of the pattern from standard input; fails if one differs.
pub(crate) fn check(total: u64) -> anyhow::Result<()> {
    let pattern = BytePattern::new();
    let stdin = rustix::stdio::stdin();
    let mut buffer = vec![0; WRITE_BYTES];
    let mut offset = 0;
    while offset < total {
        let read = match rustix::io::read(stdin, &mut buffer) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        ensure!(read > 0, "the input ended after {offset} of {total} bytes");
        ensure!(
            pattern.matches(offset, &buffer[..read]),
            "wrong bytes after {offset}"
        );
        offset += read as u64;
    }
    Ok(())
}

/// Prints an address and responds to websocket handshakes there, one after the other.
///
/// After each handshake it sends `push` bytes of the pattern, in messages like those of a process.
pub(crate) fn answer_websockets(push: u64) -> anyhow::Result<()> {
    let pattern = BytePattern::new();
    serve(|stream| {
        if push > 0 {
            push_frames(stream, &pattern, push)?;
        }
        while stream.read(&mut [0; 1024])? > 0 {}
        Ok(())
    })
}

/// Prints an address and responds to every message with one as long as a metadata response.
pub(crate) fn echo_websockets() -> anyhow::Result<()> {
    const ANSWER: &str = r#"{"id":1,"result":{"isDirectory":false,"isFile":true,"isSymlink":false,"size":4096,"createdAtMs":1700000000000,"modifiedAtMs":1700000000000}}"#;
    serve(|stream| {
        let mut decoder = Decoder::new(WebsocketRole::Server);
        let mut buffer = vec![0; 64 * 1024];
        let (mut filled, mut at, mut out) = (0, 0, Vec::new());
        loop {
            match decoder.step(&mut buffer[..filled], &mut at)? {
                DecodeStep::NeedMore(_) => {
                    buffer.copy_within(at..filled, 0);
                    (filled, at) = (filled - at, 0);
                    match stream.read(&mut buffer[filled..])? {
                        0 => return Ok(()),
                        read => filled += read,
                    }
                }
                DecodeStep::Whole { .. } => {
                    out.clear();
                    frame::push_frame(&mut out, Opcode::Text, None, ANSWER.as_bytes());
                    stream.write_all(&out)?;
                }
                _ => {}
            }
        }
    })
}

/// Address of the proxy in this process's environment, as `HOST:PORT`.
pub(crate) fn proxy() -> Option<String> {
    let url = std::env::var("HTTP_PROXY").ok()?;
    Some(url.strip_prefix("http://")?.to_owned())
}

/// Prints a figure.
pub(crate) fn print_figure(figure: anyhow::Result<f64>) -> anyhow::Result<()> {
    let figure = figure?;
    Ok(writeln!(std::io::stdout(), "{figure}")?)
}

/// Median seconds of one small request on an open connection, directly or through a proxy.
pub(crate) fn requests(site: &str, proxy: Option<&str>, count: usize) -> anyhow::Result<f64> {
    let mut stream = TcpStream::connect(proxy.unwrap_or(site))?;
    stream.set_nodelay(true)?;
    let before = if proxy.is_some() {
        format!("http://{site}")
    } else {
        String::new()
    };
    let request = format!("GET {before}/small HTTP/1.1\r\nhost: {site}\r\n\r\n");
    let mut buffer = vec![0; 4096];
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        stream.write_all(request.as_bytes())?;
        let mut received = 0;
        // The head and the body of 1 KiB.
        while received < 1024 || !is_complete(&buffer[..received]) {
            let read = stream.read(&mut buffer[received..])?;
            ensure!(read > 0, "the connection was closed");
            received += read;
        }
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&samples))
}

/// Whether a response with a small body is complete.
fn is_complete(answer: &[u8]) -> bool {
    let text = answer.windows(4).position(|four| four == b"\r\n\r\n");
    text.is_some_and(|head| answer.len() >= head + 4 + 1024)
}

/// Bytes per second of many concurrent connections, directly or through a proxy.
pub(crate) fn streams(
    site: &str,
    proxy: Option<&str>,
    count: usize,
    total: u64,
) -> anyhow::Result<f64> {
    let start = Instant::now();
    let one = || -> anyhow::Result<u64> {
        let mut stream = TcpStream::connect(proxy.unwrap_or(site))?;
        if proxy.is_some() {
            write!(stream, "CONNECT {site} HTTP/1.1\r\nhost: {site}\r\n\r\n")?;
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte)?;
                head.extend(byte);
            }
            ensure!(head.starts_with(b"HTTP/1.1 200"), "the proxy refuses");
        }
        write!(stream, "GET /large HTTP/1.1\r\nhost: {site}\r\n\r\n")?;
        let mut buffer = vec![0; 64 * 1024];
        let mut received = 0;
        // The rest of the first head counts as body, which changes nothing at this size.
        while received < total {
            let read = stream.read(&mut buffer)?;
            ensure!(read > 0, "the connection was closed");
            received += read as u64;
        }
        Ok(received)
    };
    let received = std::thread::scope(|scope| -> anyhow::Result<u64> {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(one)).collect();
        let mut sum = 0;
        for thread in threads {
            let joined = thread.join().map_err(|_| anyhow::anyhow!("a stream broke"));
            sum += joined??;
        }
        Ok(sum)
    })?;
    #[allow(
        clippy::cast_precision_loss,
        reason = "the exact value does not matter"
    )]
    Ok(received as f64 / start.elapsed().as_secs_f64())
}

/// Prints an address and calls `exchange` after each websocket handshake there, one after the
/// other.
fn serve(mut exchange: impl FnMut(&mut TcpStream) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    writeln!(std::io::stdout(), "{}", listener.local_addr()?)?;
    loop {
        let mut stream = listener.accept()?.0;
        // A client that disconnects early affects only its own connection.
        let _ = accept_handshake(&mut stream).and_then(|()| exchange(&mut stream));
    }
}

fn accept_handshake(stream: &mut TcpStream) -> anyhow::Result<()> {
    tcp::prepare(&*stream, stream.peer_addr())?;
    let mut buffer = [0; 2 * 1024];
    let mut filled = 0;
    while !buffer[..filled].ends_with(b"\r\n\r\n") {
        let read = stream.read(&mut buffer[filled..])?;
        ensure!(read > 0, "the request ended early");
        filled += read;
    }
    let request = String::from_utf8_lossy(&buffer[..filled]);
    let key = request
        .lines()
        .find_map(|line| line.strip_prefix("Sec-WebSocket-Key: "));
    let response = format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: {}\r\n\r\n",
        http::accept_key(key.unwrap_or(""))
    );
    stream.write_all(response.as_bytes())?;
    Ok(())
}

fn push_frames(stream: &mut TcpStream, pattern: &BytePattern, total: u64) -> anyhow::Result<()> {
    let id = wire::process_id(0);
    let (mut out, mut offset, mut seq) = (Vec::new(), 0, 0);
    while offset < total {
        let len = (total - offset).min(WRITE_BYTES as u64) as usize;
        seq += 1;
        out.clear();
        frame::push_message(&mut out, None, WRITE_BYTES * 2, |out| {
            let head = format!(
                r#"{{"method":"process/output","params":{{"processId":"{id}","seq":{seq},"stream":"stdout","chunk":""#
            );
            out.extend_from_slice(head.as_bytes());
            pattern.push_text(offset, len, out);
            out.extend_from_slice(b"\"}}");
        });
        stream.write_all(&out)?;
        offset += len as u64;
    }
    let (exited, closed) = (seq + 1, seq + 2);
    let messages = [
        format!(
            r#"{{"method":"process/exited","params":{{"processId":"{id}","seq":{exited},"exitCode":0}}}}"#
        ),
        format!(r#"{{"method":"process/closed","params":{{"processId":"{id}","seq":{closed}}}}}"#),
    ];
    out.clear();
    for message in messages {
        frame::push_frame(&mut out, Opcode::Text, None, message.as_bytes());
    }
    stream.write_all(&out)?;
    Ok(())
}
