//! Server under measurement: command line, lifecycle and memory statistics.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::client::BenchClient;

/// Command that starts a server: words, optionally preceded by `NAME=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandLine {
    environment: Vec<(String, String)>,
    words: Vec<String>,
}

impl CommandLine {
    /// Splits at white space; single and double quotes keep words together.
    ///
    /// No shell on purpose: its start would be counted as the server's.
    pub(crate) fn parse(text: &str) -> anyhow::Result<Self> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
        for c in text.chars() {
            match quote {
                Some(mark) if c == mark => quote = None,
                Some(_) => word.get_or_insert_default().push(c),
                None if c == '\'' || c == '"' => {
                    word.get_or_insert_default();
                    quote = Some(c);
                }
                None if c.is_whitespace() => words.extend(word.take()),
                None => word.get_or_insert_default().push(c),
            }
        }
        ensure!(quote.is_none(), "unbalanced quote in `{text}`");
        words.extend(word);
        let mut environment = Vec::new();
        while let Some((name, value)) = words.first().and_then(|word| word.split_once('=')) {
            if name.is_empty() || name.contains('/') {
                break;
            }
            environment.push((name.to_owned(), value.to_owned()));
            words.remove(0);
        }
        ensure!(!words.is_empty(), "no command in `{text}`");
        Ok(Self { environment, words })
    }

    /// Creates the command that runs only this program.
    pub(crate) fn program(path: &Path) -> Self {
        Self {
            environment: Vec::new(),
            words: vec![path.display().to_string()],
        }
    }

    /// Runs the command with these arguments instead of serving, with pipes.
    pub(crate) fn piped(&self, arguments: &[&str]) -> anyhow::Result<Child> {
        let [program, own @ ..] = self.words.as_slice() else {
            bail!("no command")
        };
        Command::new(program)
            .args(own)
            .args(arguments)
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start `{program}`"))
    }

    /// Returns a command that has this command as its arguments.
    pub(crate) fn behind(&self, words: &[&str]) -> Self {
        let words = words.iter().map(|&word| word.to_owned());
        Self {
            environment: self.environment.clone(),
            words: words.chain(self.words.iter().cloned()).collect(),
        }
    }

    /// Returns the same command with one more variable.
    pub(crate) fn with_variable(&self, name: &str, value: &str) -> Self {
        let mut command = self.clone();
        command
            .environment
            .push((name.to_owned(), value.to_owned()));
        command
    }

    /// Absolute path of the executable.
    pub(crate) fn executable(&self) -> anyhow::Result<PathBuf> {
        let program = self.words.first().context("no command")?;
        std::path::absolute(program).with_context(|| format!("no path `{program}`"))
    }

    /// Returns what the command prints with these arguments instead of serving.
    pub(crate) fn output(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let [program, own @ ..] = self.words.as_slice() else {
            bail!("no command")
        };
        let output = Command::new(program)
            .args(own)
            .args(arguments)
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start `{program}`"))?;
        ensure!(
            output.status.success(),
            "`{program} {}` failed: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// A program that prints one line when it is ready; dropping it ends the process.
pub(crate) struct StartedProgram {
    child: Child,
    /// The line that it printed.
    pub(crate) line: String,
    /// Kept open, as for a server.
    _stdout: Option<BufReader<ChildStdout>>,
}

impl StartedProgram {
    /// Starts the command with these arguments and waits for its line.
    pub(crate) fn start(command: &CommandLine, arguments: &[&str]) -> anyhow::Result<Self> {
        let [program, own @ ..] = command.words.as_slice() else {
            bail!("no command")
        };
        let stderr = tempfile::tempfile()?;
        let mut child = Command::new(program)
            .args(own)
            .args(arguments)
            .envs(command.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot start `{program}`"))?;
        let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        let program = Self {
            child,
            line: line.trim().to_owned(),
            _stdout: Some(stdout),
        };
        ensure!(
            !program.line.is_empty(),
            "`{}` printed nothing: {}",
            arguments.join(" "),
            read_all(Some(&stderr))
        );
        Ok(program)
    }
}

impl StartedProgram {
    /// Starts the command with these arguments; what it prints is discarded.
    pub(crate) fn start_silent(command: &CommandLine, arguments: &[&str]) -> anyhow::Result<Self> {
        let [program, own @ ..] = command.words.as_slice() else {
            bail!("no command")
        };
        let child = Command::new(program)
            .args(own)
            .args(arguments)
            .envs(command.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start `{program}`"))?;
        Ok(Self {
            child,
            line: String::new(),
            _stdout: None,
        })
    }

    /// Resident memory in bytes, after a pause in which it can settle.
    pub(crate) fn resident_at_rest(&self) -> anyhow::Result<u64> {
        std::thread::sleep(Duration::from_millis(300));
        let path = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        resident(&status).with_context(|| format!("{path} says nothing of VmRSS"))
    }

    /// Peak resident memory in bytes.
    pub(crate) fn peak(&self) -> anyhow::Result<u64> {
        let path = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        memory(&status, "VmHWM:").with_context(|| format!("{path} says nothing of VmHWM"))
    }

    /// Process id of the started process.
    pub(crate) fn own_pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Kills the process.
    pub(crate) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for StartedProgram {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

/// A running server; dropping it ends the process.
pub(crate) struct BenchServer {
    child: Child,
    /// Kept open: a server may react to the closed pipe.
    stdout: BufReader<ChildStdout>,
    /// Standard error of the server, if it is kept.
    stderr: Option<File>,
    /// Address of its listener.
    pub(crate) address: SocketAddr,
    /// The process that owns the listener; not the child if that is a launcher.
    pid: Pid,
}

impl BenchServer {
    /// Starts a server and waits for the line with its URL.
    pub(crate) fn start(command: &CommandLine) -> anyhow::Result<Self> {
        Self::launch(command, &[], None)
    }

    /// Like [`BenchServer::start`], with more options; its standard error is kept.
    pub(crate) fn start_with(command: &CommandLine, options: &[&str]) -> anyhow::Result<Self> {
        Self::launch(command, options, Some(tempfile::tempfile()?))
    }

    fn launch(
        command: &CommandLine,
        options: &[&str],
        stderr: Option<File>,
    ) -> anyhow::Result<Self> {
        let [program, arguments @ ..] = command.words.as_slice() else {
            bail!("no command")
        };
        let mut child = Command::new(program)
            .args(arguments)
            .args(["--listen", "ws://127.0.0.1:0"])
            .args(options)
            .envs(command.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(match &stderr {
                Some(file) => file.try_clone()?.into(),
                None => Stdio::inherit(),
            })
            .spawn()
            .with_context(|| format!("cannot start `{program}`"))?;
        let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        let address: Option<SocketAddr> = line
            .trim()
            .strip_prefix("ws://")
            .and_then(|text| text.trim_end_matches('/').parse().ok());
        let pid = Pid::from_child(&child);
        let Some(address) = address else {
            let _ = child.kill();
            let _ = child.wait();
            bail!(
                "`{program}` printed `{}` instead of its ws:// URL {}",
                line.trim(),
                read_all(stderr.as_ref())
            );
        };
        Ok(Self {
            child,
            stdout,
            stderr,
            address,
            pid,
        })
    }

    /// Like [`BenchServer::start`], with memory statistics available.
    pub(crate) fn start_observed(command: &CommandLine) -> anyhow::Result<Self> {
        Self::start(command)?.observed()
    }

    /// Makes memory statistics available.
    pub(crate) fn observed(mut self) -> anyhow::Result<Self> {
        self.pid = listener(self.pid, self.address.port())?;
        Ok(self)
    }

    /// Reads the address of its next listener, after `scheme`.
    pub(crate) fn next_address(&mut self, scheme: &str) -> anyhow::Result<SocketAddr> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        let address = line.trim().strip_prefix(scheme);
        let address = address.and_then(|text| text.trim_end_matches('/').parse().ok());
        address.with_context(|| format!("expected a {scheme} URL instead of `{}`", line.trim()))
    }

    /// Returns the address between two texts on standard error.
    pub(crate) fn logged_address(&self, before: &str, after: &str) -> anyhow::Result<SocketAddr> {
        let text = read_all(self.stderr.as_ref());
        let mut lines = text.lines();
        let found = lines.find_map(|line| line.strip_prefix(before)?.strip_suffix(after));
        let address = found.and_then(|text| text.parse().ok());
        address.with_context(|| format!("no `{before}ADDRESS{after}` in `{text}`"))
    }

    /// Process id of the started process.
    pub(crate) fn own_pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Opens a connection and completes the handshake.
    pub(crate) fn client(&self) -> anyhow::Result<BenchClient> {
        BenchClient::open(self.address)
    }

    /// Resident memory in bytes.
    pub(crate) fn resident(&self) -> anyhow::Result<u64> {
        let path = format!("/proc/{}/status", self.pid.as_raw_nonzero());
        let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        resident(&status).with_context(|| format!("{path} says nothing of VmRSS"))
    }

    /// Resident memory in bytes, after a pause in which the server can settle.
    pub(crate) fn resident_at_rest(&self) -> anyhow::Result<u64> {
        std::thread::sleep(Duration::from_millis(300));
        self.resident()
    }

    /// The process that owns the listener, after [`BenchServer::observed`].
    pub(crate) fn serving_pid(&self) -> Pid {
        self.pid
    }

    /// Proportional set in bytes of all processes of the server's command: pages that several
    /// processes share count in parts.
    pub(crate) fn proportional(&self) -> anyhow::Result<u64> {
        proportional(self.all_pids())
    }

    /// Memory in bytes that the processes of the server's command have written to and share with no
    /// other process.
    pub(crate) fn own_of_all(&self) -> anyhow::Result<u64> {
        sum_of(self.all_pids(), "Private_Dirty:")
    }

    /// The started process, and the one that owns the listener if that is another.
    fn all_pids(&self) -> Vec<Pid> {
        let (own, serving) = (self.own_pid(), self.pid);
        match own == serving {
            true => vec![own],
            false => vec![own, serving],
        }
    }
}

/// Proportional set in bytes of several processes.
pub(crate) fn proportional(pids: impl IntoIterator<Item = Pid>) -> anyhow::Result<u64> {
    sum_of(pids, "Pss:")
}

/// Sum of a statistic in `smaps_rollup` over several processes, in bytes.
fn sum_of(pids: impl IntoIterator<Item = Pid>, name: &str) -> anyhow::Result<u64> {
    let each = pids.into_iter().map(|pid| {
        let path = format!("/proc/{}/smaps_rollup", pid.as_raw_nonzero());
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        memory(&text, name).with_context(|| format!("{path} says nothing of {name}"))
    });
    each.sum()
}

/// Resident anonymous memory of a process in bytes.
pub(crate) fn own_memory(pid: Pid) -> anyhow::Result<u64> {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    memory(&status, "RssAnon:").with_context(|| format!("{path} says nothing of RssAnon"))
}

/// Returns the content of a file without moving its offset, which the server shares and writes at.
fn read_all(file: Option<&File>) -> String {
    let read = |file: &File| {
        let mut bytes = vec![0; file.metadata()?.len() as usize];
        file.read_exact_at(&mut bytes, 0)?;
        std::io::Result::Ok(bytes)
    };
    // A read error is ignored: the text only explains another failure.
    let bytes = file.and_then(|file| read(file).ok()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        /// 5 s: enough to end hundreds of processes.
        const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
        let own = Pid::from_child(&self.child);
        let _ = kill_process(self.pid, Signal::TERM);
        if own != self.pid {
            let _ = kill_process(own, Signal::TERM);
        }
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn resident(status: &str) -> Option<u64> {
    memory(status, "VmRSS:")
}

/// Returns one memory statistic of a process, in bytes.
fn memory(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Returns the process among `root` and its descendants that owns the listener of `port`.
fn listener(root: Pid, port: u16) -> anyhow::Result<Pid> {
    let mut inodes = HashSet::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        inodes.extend(listening(
            &fs::read_to_string(table).unwrap_or_default(),
            port,
        ));
    }
    let mut candidates = vec![root];
    while let Some(pid) = candidates.pop() {
        if owns_socket(pid, &inodes) {
            return Ok(pid);
        }
        candidates.extend(children(pid));
    }
    bail!("no process of the server's command listens on port {port}")
}

/// Returns the inodes of the sockets that listen on a port, from `/proc/net/tcp`.
fn listening(table: &str, port: u16) -> Vec<u64> {
    const LISTEN: &str = "0A";
    let port = format!(":{port:04X}");
    let row = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let matches = fields.get(1)?.ends_with(&port) && *fields.get(3)? == LISTEN;
        matches.then(|| fields.get(9)?.parse().ok()).flatten()
    };
    table.lines().skip(1).filter_map(row).collect()
}

fn owns_socket(pid: Pid, inodes: &HashSet<u64>) -> bool {
    let Ok(entries) = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())) else {
        return false;
    };
    entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|target| {
            let target = target.to_string_lossy();
            let inode = target
                .strip_prefix("socket:[")
                .and_then(|rest| rest.strip_suffix(']'));
            inode
                .and_then(|inode| inode.parse().ok())
                .is_some_and(|inode| inodes.contains(&inode))
        })
}

/// Returns the server's process: the child of the guardian that was started.
pub(crate) fn serving_process(guardian: Pid) -> anyhow::Result<Pid> {
    let child = children(guardian)
        .into_iter()
        .min_by_key(|pid| pid.as_raw_nonzero());
    child.with_context(|| format!("process {} has no child", guardian.as_raw_nonzero()))
}

fn children(parent: Pid) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let child = |name: &str| {
        let pid = Pid::from_raw(name.parse().ok()?)?;
        let stat = fs::read_to_string(format!("/proc/{name}/stat")).ok()?;
        // The name in parentheses may contain anything; the parent is the second field after it.
        let ppid = stat
            .rsplit_once(')')?
            .1
            .split_whitespace()
            .nth(1)?
            .parse()
            .ok()?;
        (Pid::from_raw(ppid)? == parent).then_some(pid)
    };
    entries
        .flatten()
        .filter_map(|entry| child(entry.file_name().to_str()?))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_splits_words_quotes_and_environment() {
        let parsed = CommandLine::parse("A=1 B='x y' 'my server' --flag=2 \"\" ").unwrap();
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(parsed.environment, [pair("A", "1"), pair("B", "x y")]);
        assert_eq!(parsed.words, ["my server", "--flag=2", ""]);
        assert!(CommandLine::parse(" A=1 ").is_err());
        assert!(CommandLine::parse("a 'b").is_err());
    }

    #[test]
    fn statistics_are_parsed_from_proc_files() {
        let tcp = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0\n   1: 0100007F:1F90 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0\n";
        assert_eq!(listening(tcp, 8080), [4711]);
        assert_eq!(listening(tcp, 8081), [0; 0]);
        assert_eq!(
            resident("Name:\tx\nVmRSS:\t    1234 kB\n"),
            Some(1234 * 1024)
        );
        assert_eq!(resident("Name:\tx\n"), None);
    }

    #[test]
    fn owner_of_a_listener_is_found() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let own = rustix::process::getpid();
        assert_eq!(
            listener(own, socket.local_addr().unwrap().port()).unwrap(),
            own
        );
    }
}
