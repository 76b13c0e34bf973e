//! A real nats-server on loopback.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::proc::PATIENCE;

/// A nats-server with JetStream and a directory of its own; ends when dropped.
#[derive(Debug)]
pub struct Nats {
    directory: TempDir,
    address: SocketAddr,
    child: Option<Child>,
    /// Lines of its configuration.
    config: String,
    /// Its files are on a disk of their own.
    mounted: bool,
    /// Its garbage is collected less often.
    tuned: bool,
}

impl Drop for Nats {
    fn drop(&mut self) {
        if self.mounted {
            if let Some(child) = &mut self.child {
                let _ = child.start_kill();
            }
            // Whatever it has open still.
            let mut unmount = std::process::Command::new("umount");
            let _ = unmount.arg("-l").arg(self.store()).status();
        }
    }
}

impl Nats {
    /// Starts one.
    ///
    /// # Panics
    ///
    /// If there is no nats-server, or it does not start.
    pub async fn start() -> Self {
        Self::with("").await
    }

    /// Starts one as docs/fleet.md advises to run it.
    ///
    /// # Panics
    ///
    /// As [`Nats::start`].
    pub async fn tuned() -> Self {
        let mut nats = Self::prepared("").await;
        nats.tuned = true;
        nats.open().await;
        nats
    }

    /// Starts one whose JetStream is configured with these lines besides.
    ///
    /// # Panics
    ///
    /// As [`Nats::start`].
    pub async fn with(jetstream: &str) -> Self {
        let mut nats = Self::prepared(jetstream).await;
        nats.open().await;
        nats
    }

    /// Starts one that is configured with these lines besides, which `lines` makes knowing its
    /// directory.
    ///
    /// # Panics
    ///
    /// As [`Nats::start`].
    pub async fn configured(lines: impl FnOnce(&Path) -> String) -> Self {
        let mut nats = Self::prepared("").await;
        let lines = lines(nats.directory.path());
        nats.config.push_str(&lines);
        nats.open().await;
        nats
    }

    /// Starts one whose files are on a disk of their own, of so many bytes. Only for root.
    ///
    /// # Panics
    ///
    /// As [`Nats::start`], or if the disk cannot be made.
    pub async fn on_disk(bytes: usize) -> Self {
        // By default it would leave a quarter of the disk alone.
        let mut nats = Self::prepared("max_file_store: 1GB").await;
        let store = nats.store();
        std::fs::create_dir(&store).expect("a directory");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(&store)
            .status()
            .await;
        assert!(mounted.expect("mount").success(), "no tmpfs");
        nats.mounted = true;
        nats.open().await;
        nats
    }

    /// One that does not run yet.
    async fn prepared(jetstream: &str) -> Self {
        // The port is free again when it is needed, and stays the same when it comes back.
        let listener = TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a free port");
        let address = listener.local_addr().expect("a port");
        drop(listener);
        let directory = tempfile::tempdir().expect("a directory");
        let mut nats = Self {
            directory,
            address,
            child: None,
            config: String::new(),
            mounted: false,
            tuned: false,
        };
        nats.config = format!(
            "listen: \"{address}\"\njetstream {{\n  store_dir: \"{}\"\n  {jetstream}\n}}\n",
            nats.store().display()
        );
        nats
    }

    /// Where its files are.
    fn store(&self) -> PathBuf {
        self.directory.path().join("store")
    }

    /// Leaves no room on its disk.
    ///
    /// # Panics
    ///
    /// If there is room nevertheless.
    pub fn fill_disk(&self) {
        use std::io::Write as _;
        assert!(self.mounted, "not the disk of others");
        let filler = std::fs::File::create(self.store().join("filler"));
        let mut filler = filler.expect("a file");
        // Byte by byte in the end: not even a short record is to fit.
        for size in [64 << 10, 512, 1] {
            while filler.write_all(&vec![0; size]).is_ok() {}
        }
    }

    /// Makes room on its disk again.
    ///
    /// # Panics
    ///
    /// If it was not filled.
    pub fn free_disk(&self) {
        std::fs::remove_file(self.store().join("filler")).expect("a file");
    }

    /// Where it listens, without the scheme.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts it again, with what it has kept.
    ///
    /// # Panics
    ///
    /// If it does not start.
    pub async fn open(&mut self) {
        let config = self.directory.path().join("nats.conf");
        std::fs::write(&config, &self.config).expect("a configuration");
        let program = match Path::new("/usr/sbin/nats-server") {
            path if path.exists() => path,
            _ => Path::new("nats-server"),
        };
        let log = std::fs::File::create(self.directory.path().join("log")).expect("a log");
        let mut command = Command::new(program);
        if self.tuned {
            command.env("GOGC", "400").env("GOMAXPROCS", "1");
        }
        let child = command
            .arg("-c")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .expect("no nats-server: install it, as scripts/setup does");
        self.child = Some(child);
        let up = async {
            while TcpStream::connect(self.address).await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, up).await.expect("nats-server to listen");
    }

    /// Ends it without a word, and waits for its end.
    ///
    /// # Panics
    ///
    /// If it does not run.
    pub async fn die(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.start_kill().expect("it runs");
        let _ = child.wait().await;
    }

    /// Where it listens.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// Sends it a signal.
    ///
    /// # Panics
    ///
    /// If it does not run.
    pub fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().and_then(Child::id).expect("it runs");
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), signal).expect("it runs");
    }

    /// Asks something over the raw protocol; the answer, as JSON.
    ///
    /// # Panics
    ///
    /// If there is no answer.
    pub async fn ask(&self, subject: &str, body: &str) -> Value {
        let exchange = async {
            let mut stream = BufReader::new(TcpStream::connect(self.address).await?);
            let request = format!(
                "CONNECT {{\"verbose\":false}}\r\nSUB answer 1\r\nPUB {subject} answer {}\r\n{body}\r\n",
                body.len()
            );
            stream.write_all(request.as_bytes()).await?;
            let mut line = String::new();
            // The line before the body says how long it is; one line is enough for these.
            while !line.starts_with("MSG answer") {
                line.clear();
                stream.read_line(&mut line).await?;
            }
            line.clear();
            stream.read_line(&mut line).await?;
            std::io::Result::Ok(line)
        };
        let answer = timeout(PATIENCE, exchange)
            .await
            .expect("an answer in time");
        let answer = answer.expect("an answer");
        serde_json::from_str(&answer).unwrap_or_else(|_| panic!("no JSON: {answer}"))
    }

    /// Tells whoever listens to a subject something.
    ///
    /// # Panics
    ///
    /// If it cannot be told.
    pub async fn tell(&self, subject: &str, body: &str) {
        self.publish(subject, "", body).await;
    }

    /// Whether anybody listens to a subject. Whoever does is told nothing at all.
    ///
    /// # Panics
    ///
    /// If it cannot be asked.
    pub async fn is_heard(&self, subject: &str) -> bool {
        self.publish(subject, "answer ", "").await
    }

    /// Says something in such a way that the server tells if nobody hears it; whether somebody did.
    async fn publish(&self, subject: &str, answer: &str, body: &str) -> bool {
        let exchange = async {
            let mut stream = BufReader::new(TcpStream::connect(self.address).await?);
            let request = format!(
                "CONNECT {{\"verbose\":false,\"headers\":true,\"no_responders\":true}}\r\n\
                 SUB answer 1\r\nPUB {subject} {answer}{}\r\n{body}\r\nPING\r\n",
                body.len()
            );
            stream.write_all(request.as_bytes()).await?;
            let (mut line, mut heard) = (String::new(), true);
            // What comes before the pong is all there is.
            while !line.starts_with("PONG") {
                line.clear();
                if stream.read_line(&mut line).await? == 0 {
                    return Err(std::io::ErrorKind::UnexpectedEof.into());
                }
                heard &= !line.contains("503");
            }
            std::io::Result::Ok(heard)
        };
        let told = timeout(PATIENCE, exchange).await.expect("to be told");
        told.expect("a server that listens")
    }
}
