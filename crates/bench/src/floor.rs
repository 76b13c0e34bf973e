//! Floors: cost of the same operations on this machine without a server.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use exec_server_transport::tcp;
use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;

use crate::client::BenchClient;
use crate::placement::Placement;
use crate::stats::median;

/// Child process of the spawn scenarios.
pub(crate) const TRUE: &str = "/bin/true";

/// Child process of the echo scenarios: a program in a raw terminal that sends each byte back.
///
/// Raw, because shells, editors and agents use raw terminals: the echo comes from the program and
/// not from the kernel, so its wake-up is part of the floor as it is part of the server's figure.
pub(crate) const ECHO: [&str; 3] = ["/bin/sh", "-c", "stty raw -echo; printf R; exec cat"];

/// Median seconds of `count` sequential calls of `posix_spawn` and `wait`.
pub(crate) fn spawn(count: usize) -> anyhow::Result<f64> {
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        spawn_once()?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&samples))
}

/// Spawns per second of four threads.
pub(crate) fn spawn_rate(count: usize) -> anyhow::Result<f64> {
    const THREADS: usize = 4;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| scope.spawn(|| (0..count / THREADS).try_for_each(|_| spawn_once())))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
    })?;
    Ok((count / THREADS * THREADS) as f64 / start.elapsed().as_secs_f64())
}

/// Sets up no pipe and no file: the cheapest possible spawn.
fn spawn_once() -> anyhow::Result<()> {
    let status = Command::new(TRUE).env_clear().status()?;
    ensure!(status.success(), "{TRUE} failed");
    Ok(())
}

/// A terminal whose program, [`ECHO`], sends each byte back.
#[derive(Debug)]
pub(crate) struct TerminalEcho {
    child: Child,
    terminal: File,
}

impl TerminalEcho {
    pub(crate) fn start() -> anyhow::Result<Self> {
        let master =
            rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        rustix::pty::grantpt(&master)?;
        rustix::pty::unlockpt(&master)?;
        let name = rustix::pty::ptsname(&master, Vec::new())?;
        let slave: OwnedFd = rustix::fs::open(
            &*name,
            OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let child = Command::new(ECHO[0])
            .args(&ECHO[1..])
            .stdin(slave.try_clone()?)
            .stdout(slave.try_clone()?)
            .stderr(slave)
            .spawn()?;
        let mut echo = Self {
            child,
            terminal: File::from(master),
        };
        let mut byte = [0];
        while byte != *b"R" {
            echo.terminal.read_exact(&mut byte)?;
        }
        echo.samples(WARM_UP)?;
        Ok(echo)
    }

    /// Seconds from writing a byte to reading its echo, for `count` bytes.
    pub(crate) fn samples(&mut self, count: usize) -> std::io::Result<Vec<f64>> {
        let mut byte = [0];
        samples(count, || {
            self.terminal.write_all(b"x")?;
            self.terminal.read_exact(&mut byte)
        })
    }
}

impl Drop for TerminalEcho {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A loopback TCP connection to a thread that echoes.
#[derive(Debug)]
pub(crate) struct TcpEcho {
    stream: TcpStream,
}

impl TcpEcho {
    /// About the size of a message with one keystroke.
    const BYTES: usize = 128;

    pub(crate) fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        // Ends with the connection.
        std::thread::spawn(move || -> std::io::Result<()> {
            let (mut stream, _) = listener.accept()?;
            tcp::prepare(&stream, stream.peer_addr())?;
            let mut message = [0; Self::BYTES];
            while stream.read_exact(&mut message).is_ok() {
                stream.write_all(&message)?;
            }
            Ok(())
        });
        let stream = TcpStream::connect(address)?;
        tcp::prepare(&stream, stream.peer_addr())?;
        let mut echo = Self { stream };
        echo.samples(WARM_UP)?;
        Ok(echo)
    }

    /// Seconds of `count` round trips.
    pub(crate) fn samples(&mut self, count: usize) -> std::io::Result<Vec<f64>> {
        let mut message = [0; Self::BYTES];
        samples(count, || {
            self.stream.write_all(&message)?;
            self.stream.read_exact(&mut message)
        })
    }
}

/// Initial runs that are not counted.
const WARM_UP: usize = 20;

/// Measures `count` runs of `round`.
fn samples(
    count: usize,
    mut round: impl FnMut() -> std::io::Result<()>,
) -> std::io::Result<Vec<f64>> {
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        round()?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(samples)
}

/// Bytes per second from the emitter through a pipe to this process, which discards them.
///
/// The better of two placements: chosen by the scheduler, and both ends on one core. Where waking
/// another core is slow, as in a small virtual machine, the two differ by a factor of three, and
/// chance would otherwise decide which of them is the base of every ratio.
pub(crate) fn pipe(bench: &Path, total: u64) -> anyhow::Result<f64> {
    let placed = pipe_once(bench, total)?;
    let _placement = Placement::one_core()?;
    let pinned = pipe_once(bench, total)?;
    Ok(placed.max(pinned))
}

fn pipe_once(bench: &Path, total: u64) -> anyhow::Result<f64> {
    let start = Instant::now();
    let mut child = Command::new(bench)
        .args(["--emit-pattern", &total.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut stdout = child.stdout.take().context("no standard output")?;
    let mut buffer = vec![0; 64 * 1024];
    let mut seen = 0;
    loop {
        match stdout.read(&mut buffer)? {
            0 => break,
            read => seen += read as u64,
        }
    }
    ensure!(
        child.wait()?.success() && seen == total,
        "the emitter wrote {seen} of {total} bytes"
    );
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

/// A process that responds to websocket handshakes and optionally pushes frames.
pub(crate) struct WebsocketResponder {
    child: Child,
    /// Address of its listener.
    pub(crate) address: SocketAddr,
}

impl WebsocketResponder {
    /// Starts it; after each handshake it sends `push` bytes of the pattern.
    pub(crate) fn start(bench: &Path, push: Option<u64>) -> anyhow::Result<Self> {
        let push = push.unwrap_or(0).to_string();
        Self::spawn(bench, &["--answer-websockets", &push])
    }

    /// Starts one that responds to every message.
    pub(crate) fn start_echo(bench: &Path) -> anyhow::Result<Self> {
        Self::spawn(bench, &["--echo-websockets"])
    }

    fn spawn(bench: &Path, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut child = Command::new(bench)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("no standard output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let address = line
            .trim()
            .parse()
            .context("the responder did not print its address");
        if address.is_err() {
            let _ = child.kill();
        }
        Ok(Self {
            child,
            address: address?,
        })
    }

    /// Median seconds of a connection and its websocket upgrade.
    pub(crate) fn handshake(&self, count: usize) -> anyhow::Result<f64> {
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            let client = BenchClient::connect(self.address)?;
            samples.push(start.elapsed().as_secs_f64());
            drop(client);
            pause();
        }
        Ok(median(&samples))
    }
}

/// Median seconds of a message and its response over a websocket, both short JSON.
pub(crate) fn round_trip(bench: &Path, count: usize) -> anyhow::Result<f64> {
    let responder = WebsocketResponder::start_echo(bench)?;
    let mut client = BenchClient::connect(responder.address)?;
    let mut round = || -> anyhow::Result<f64> {
        let start = Instant::now();
        client.ask("fs/getMetadata", r#"{"path":"file:///tmp/some/path"}"#)?;
        client.receive()?;
        Ok(start.elapsed().as_secs_f64())
    };
    for _ in 0..20 {
        round()?;
    }
    let samples: Vec<f64> = (0..count).map(|_| round()).collect::<Result<_, _>>()?;
    Ok(median(&samples))
}

impl Drop for WebsocketResponder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Gives the peer time to see the closed connection before the next measurement.
pub(crate) fn pause() {
    std::thread::sleep(Duration::from_micros(200));
}
