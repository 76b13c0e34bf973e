//! Real nats-server on loopback.

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

use crate::proc::TIMEOUT;

/// A nats-server with JetStream and its own directory. Dropping it ends the server.
#[derive(Debug)]
pub struct Nats {
    directory: TempDir,
    address: SocketAddr,
    child: Option<Child>,
    /// Configuration text.
    config: String,
    /// Whether its storage is a separate filesystem.
    mounted: bool,
    /// Whether to start it with less frequent garbage collection.
    tuned: bool,
}

impl Drop for Nats {
    fn drop(&mut self) {
        if self.mounted {
            if let Some(child) = &mut self.child {
                let _ = child.start_kill();
            }
            // Unmounts lazily: the server may still have open files.
            let mut unmount = std::process::Command::new("umount");
            let _ = unmount.arg("-l").arg(self.store()).status();
        }
    }
}

impl Nats {
    /// Starts a server.
    ///
    /// # Panics
    ///
    /// No nats-server is installed, or it does not start.
    pub async fn start() -> Self {
        Self::with("").await
    }

    /// Starts a server with the settings that docs/fleet.md recommends.
    ///
    /// # Panics
    ///
    /// Same as [`Nats::start`].
    pub async fn tuned() -> Self {
        let mut nats = Self::prepared("").await;
        nats.tuned = true;
        nats.open().await;
        nats
    }

    /// Starts a server with these lines in its JetStream configuration.
    ///
    /// # Panics
    ///
    /// Same as [`Nats::start`].
    pub async fn with(jetstream: &str) -> Self {
        let mut nats = Self::prepared(jetstream).await;
        nats.open().await;
        nats
    }

    /// Starts a server with additional configuration; `lines` gets the server's directory and
    /// returns the text.
    ///
    /// # Panics
    ///
    /// Same as [`Nats::start`].
    pub async fn configured(lines: impl FnOnce(&Path) -> String) -> Self {
        let mut nats = Self::prepared("").await;
        let lines = lines(nats.directory.path());
        nats.config.push_str(&lines);
        nats.open().await;
        nats
    }

    /// Starts a server whose storage is a separate filesystem of this size. Requires root.
    ///
    /// # Panics
    ///
    /// Like [`Nats::start`], or if the filesystem cannot be created.
    pub async fn on_disk(bytes: usize) -> Self {
        // By default the server leaves a quarter of the disk unused.
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

    /// Creates a server without starting it.
    async fn prepared(jetstream: &str) -> Self {
        // The port is released here and bound by the server; it stays the same after a restart.
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

    /// Directory of its storage.
    fn store(&self) -> PathBuf {
        self.directory.path().join("store")
    }

    /// Fills its filesystem.
    ///
    /// # Panics
    ///
    /// The filesystem still has space.
    pub fn fill_disk(&self) {
        use std::io::Write as _;
        assert!(self.mounted, "never fill the disk of the machine");
        let filler = std::fs::File::create(self.store().join("filler"));
        let mut filler = filler.expect("a file");
        // Writes down to single bytes, so that not even a short record fits.
        for size in [64 << 10, 512, 1] {
            while filler.write_all(&vec![0; size]).is_ok() {}
        }
    }

    /// Frees the space that [`Nats::fill_disk`] used.
    ///
    /// # Panics
    ///
    /// The filesystem was not filled.
    pub fn free_disk(&self) {
        std::fs::remove_file(self.store().join("filler")).expect("a file");
    }

    /// Address of the server.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts the server again with its stored data.
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
        timeout(TIMEOUT, up).await.expect("nats-server to listen");
    }

    /// Kills the server and waits for its end.
    ///
    /// # Panics
    ///
    /// If it is not running.
    pub async fn die(&mut self) {
        let mut child = self.child.take().expect("the server is running");
        child.start_kill().expect("the server is running");
        let _ = child.wait().await;
    }

    /// URL of the server.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// Sends a signal to the server.
    ///
    /// # Panics
    ///
    /// If it is not running.
    pub fn signal(&self, signal: Signal) {
        let pid = self
            .child
            .as_ref()
            .and_then(Child::id)
            .expect("the server is running");
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), signal).expect("the server is running");
    }

    /// Sends a request over the raw NATS protocol; returns the response as JSON.
    ///
    /// # Panics
    ///
    /// There is no response.
    pub async fn request(&self, subject: &str, body: &str) -> Value {
        let exchange = async {
            let mut stream = BufReader::new(TcpStream::connect(self.address).await?);
            let request = format!(
                "CONNECT {{\"verbose\":false}}\r\nSUB answer 1\r\nPUB {subject} answer {}\r\n{body}\r\n",
                body.len()
            );
            stream.write_all(request.as_bytes()).await?;
            let mut line = String::new();
            // The line before the body contains its length; these bodies are single lines.
            while !line.starts_with("MSG answer") {
                line.clear();
                stream.read_line(&mut line).await?;
            }
            line.clear();
            stream.read_line(&mut line).await?;
            std::io::Result::Ok(line)
        };
        let answer = timeout(TIMEOUT, exchange).await.expect("an answer in time");
        let answer = answer.expect("an answer");
        serde_json::from_str(&answer).unwrap_or_else(|_| panic!("no JSON: {answer}"))
    }

    /// Publishes a message to the subscribers of a subject.
    ///
    /// # Panics
    ///
    /// The message cannot be published.
    pub async fn publish_message(&self, subject: &str, body: &str) {
        self.publish(subject, "", body).await;
    }

    /// Whether a subject has a subscriber. Subscribers receive an empty message.
    ///
    /// # Panics
    ///
    /// The server does not respond.
    pub async fn has_subscriber(&self, subject: &str) -> bool {
        self.publish(subject, "answer ", "").await
    }

    /// Publishes a message so that the server reports if it has no subscriber; returns whether it
    /// has one.
    async fn publish(&self, subject: &str, answer: &str, body: &str) -> bool {
        let exchange = async {
            let mut stream = BufReader::new(TcpStream::connect(self.address).await?);
            let request = format!(
                "CONNECT {{\"verbose\":false,\"headers\":true,\"no_responders\":true}}\r\n\
                 SUB answer 1\r\nPUB {subject} {answer}{}\r\n{body}\r\nPING\r\n",
                body.len()
            );
            stream.write_all(request.as_bytes()).await?;
            let (mut line, mut has_responder) = (String::new(), true);
            // All responses arrive before the pong.
            while !line.starts_with("PONG") {
                line.clear();
                if stream.read_line(&mut line).await? == 0 {
                    return Err(std::io::ErrorKind::UnexpectedEof.into());
                }
                has_responder &= !line.contains("503");
            }
            std::io::Result::Ok(has_responder)
        };
        let response = timeout(TIMEOUT, exchange)
            .await
            .expect("a response in time");
        response.expect("a running server")
    }
}
