//! ssh invocations: master, forward, script and stdio link; and parsing of their output.

use std::io;
use std::pin::Pin;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use exec_server_protocol::text::shell_quoted;
use exec_server_transport::{ConnectOptions, Link, connect_over};
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};
use tokio::process::{Child, ChildStdout, Command};

use super::{SshError, SshHost};

/// Exit status that ssh uses for its own failures.
const SSH_FAILED: i32 = 255;

/// Maximum number of bytes kept of a command's output; the rest is read and discarded.
const MAX_OUTPUT_BYTES: usize = 64 * 1024;

/// Time to read the remaining output after a command has exited.
const FINAL_OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// Timeout of a request that our own ssh master answers locally.
const MASTER_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for the start of a daemon.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Prefix of each output line that is intended for us. A login shell may print other lines before.
pub(super) const MARK: &str = "exec-server-ssh ";

/// Exit status and output of a finished command.
pub(super) struct SshCommandResult {
    status: ExitStatus,
    pub(super) stdout: String,
    stderr: String,
}

impl SshCommandResult {
    pub(super) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The text after the prefix [`MARK`].
    pub(super) fn marked(&self) -> Option<&str> {
        self.stdout.lines().find_map(|line| line.strip_prefix(MARK))
    }

    /// Reason of the failure, from the command's output.
    pub(super) fn reason(&self) -> String {
        let lines: Vec<&str> = self.stderr.lines().map(str::trim_end).collect();
        let lines: Vec<&str> = lines.into_iter().filter(|line| !line.is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(8)..];
        match last.is_empty() {
            true => format!("it ended with {} and printed nothing", self.status),
            false => last.join("\n"),
        }
    }
}

/// How an ssh command connects to the host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SshConnectMethod {
    /// The command becomes the ssh master (`ControlMaster=yes`).
    Master,
    /// The command uses the connection of the ssh master.
    Through,
    /// The command opens a separate connection.
    Alone,
}

impl SshHost {
    /// ssh command with its options, without the destination and the remote command.
    fn ssh(&self, way: SshConnectMethod) -> Command {
        let options = &self.inner.options;
        let mut command = Command::new(&options.program);
        command.arg("-T");
        let mut set = |option: String| {
            command.arg("-o").arg(option);
        };
        // ssh uses the first value of an option. The order is therefore: required options, options
        // of the caller, defaults.
        match way {
            SshConnectMethod::Master => {
                set("ControlMaster=yes".to_owned());
                set(format!("ControlPersist={}", options.keep.as_secs().max(1)));
                set("ClearAllForwardings=yes".to_owned());
            }
            SshConnectMethod::Through => set("ControlMaster=no".to_owned()),
            SshConnectMethod::Alone => {
                set("ControlPath=none".to_owned());
                set("ClearAllForwardings=yes".to_owned());
            }
        }
        if way != SshConnectMethod::Alone {
            set(format!(
                "ControlPath={}",
                // `%` is the only character that ssh expands in this path.
                self.inner.control.to_string_lossy().replace('%', "%%")
            ));
        }
        set("RemoteCommand=none".to_owned());
        set("RequestTTY=no".to_owned());
        set("PermitLocalCommand=no".to_owned());
        for option in &options.options {
            set(option.clone());
        }
        let asks = options.interactive && !self.inner.connected.load(Ordering::Relaxed);
        // If the master has exited, the command must not open a separate connection, which could
        // prompt.
        if !asks || way == SshConnectMethod::Through {
            set("BatchMode=yes".to_owned());
        }
        set(format!(
            "ConnectTimeout={}",
            options.connect_timeout.as_secs().max(1)
        ));
        set("ServerAliveInterval=15".to_owned());
        set("ServerAliveCountMax=3".to_owned());
        if way != SshConnectMethod::Through && !asks {
            // In its own process group ssh does not read the terminal and does not receive its
            // Ctrl-C.
            command.process_group(0);
        }
        if let Some(port) = options.url.port() {
            command.arg("-p").arg(port.to_string());
        }
        command.stdin(Stdio::null()).kill_on_drop(true);
        if way == SshConnectMethod::Through {
            command.process_group(0);
        }
        command
    }

    fn destination(&self, command: &mut Command) {
        command.arg("--").arg(self.url().destination());
    }

    /// Ensures that an ssh master is running.
    pub(super) async fn master(&self) -> Result<(), SshError> {
        if self.has_master().await {
            return Ok(());
        }
        // The control socket is a remnant: the master has exited or does not respond.
        let _ = std::fs::remove_file(&self.inner.control);
        let mut command = self.ssh(SshConnectMethod::Master);
        command.args(["-f", "-N"]);
        self.destination(&mut command);
        let options = &self.inner.options;
        let timeout = match options.interactive {
            true => Duration::MAX,
            // `ConnectTimeout` limits only the connection setup. Allow twice as long for
            // authentication.
            false => options.connect_timeout * 3,
        };
        let result = self.finish(command, timeout, "authenticate").await?;
        match result.status.success() {
            true => Ok(()),
            false => Err(SshError::Connect {
                url: self.name(),
                reason: result.reason(),
            }),
        }
    }

    /// Stops a master whose connection no longer works.
    pub(super) async fn end_master(&self) {
        self.control("exit", None).await;
        let _ = std::fs::remove_file(&self.inner.control);
    }

    /// Forwards our local socket to a remote one. Whether the remote socket accepts connections
    /// shows only when the forwarding is used.
    pub(super) async fn forward(&self, remote_command: &str) -> bool {
        // ssh would treat a colon as the end of the path.
        if remote_command.contains(':') {
            return false;
        }
        let _ = std::fs::remove_file(&self.inner.socket);
        let pair = format!("{}:{remote_command}", self.inner.socket.display());
        // The master may still have the forwarding whose socket file was removed above.
        self.control("cancel", Some(&pair)).await;
        self.control("forward", Some(&pair)).await
    }

    /// Whether an ssh master responds.
    pub(super) async fn has_master(&self) -> bool {
        self.control("check", None).await
    }

    /// Sends a control command (`ssh -O`) to the master; returns whether it succeeded.
    async fn control(&self, what: &str, forward: Option<&str>) -> bool {
        if !self.inner.control.exists() {
            return false;
        }
        let mut command = self.ssh(SshConnectMethod::Through);
        command.args(["-o", "StreamLocalBindUnlink=yes", "-O", what]);
        if let Some(pair) = forward {
            command.args(["-L", pair]);
        }
        self.destination(&mut command);
        let result = self.finish(command, MASTER_TIMEOUT, "respond").await;
        result.is_ok_and(|result| result.status.success())
    }

    /// Runs a script on the host in a POSIX `sh`, independent of the user's login shell.
    pub(super) async fn script(
        &self,
        script: &str,
        args: &[&str],
        stdin: Stdio,
        timeout: Duration,
    ) -> Result<SshCommandResult, SshError> {
        let mut command = self.remote_command(script, args);
        command.stdin(stdin);
        let result = self.finish(command, timeout, "respond").await?;
        match result.code() {
            Some(SSH_FAILED) => Err(SshError::Connect {
                url: self.name(),
                reason: result.reason(),
            }),
            _ => Ok(result),
        }
    }

    fn remote_command(&self, script: &str, args: &[&str]) -> Command {
        let way = match self.inner.options.share {
            true => SshConnectMethod::Through,
            false => SshConnectMethod::Alone,
        };
        let mut command = self.ssh(way);
        self.destination(&mut command);
        let mut line = format!("exec sh -c {} exec-server", shell_quoted(script));
        for arg in args {
            line.push(' ');
            line.push_str(&shell_quoted(arg));
        }
        command.arg(line);
        command
    }

    /// Runs ssh until it exits. ssh is killed after the time limit, or when this future is dropped.
    async fn finish(
        &self,
        mut command: Command,
        timeout: Duration,
        what: &'static str,
    ) -> Result<SshCommandResult, SshError> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.spawn(&mut command)?;
        let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        let run = async {
            let status = {
                let reading = async {
                    tokio::join!(
                        gather(&mut stdout, &mut output),
                        gather(&mut stderr, &mut errors)
                    )
                };
                tokio::pin!(reading);
                tokio::select! {
                    status = child.wait() => {
                        // Background processes of the command may keep the streams open
                        // indefinitely.
                        let _ = tokio::time::timeout(FINAL_OUTPUT_TIMEOUT, reading).await;
                        status
                    }
                    _ = &mut reading => child.wait().await,
                }
            };
            status.map_err(|source| self.cannot_run(source))
        };
        let late = |_| SshError::Timeout {
            url: self.name(),
            what,
            timeout,
        };
        let status = tokio::time::timeout(timeout, run).await.map_err(late)??;
        Ok(SshCommandResult {
            status,
            stdout: String::from_utf8_lossy(&output).into_owned(),
            stderr: String::from_utf8_lossy(&errors).into_owned(),
        })
    }

    fn spawn(&self, command: &mut Command) -> Result<Child, SshError> {
        command.spawn().map_err(|source| self.cannot_run(source))
    }

    fn cannot_run(&self, source: io::Error) -> SshError {
        SshError::Spawn {
            program: self.inner.options.program.display().to_string(),
            source,
        }
    }

    /// Opens a link over stdin and stdout of a remote command. Installs the server if it is
    /// missing.
    pub(super) async fn stdio(&self) -> Result<Link, SshError> {
        let mut installed = false;
        loop {
            let (script, args) = self.start_script(Some("--stdio")).await?;
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let mut command = self.remote_command(script, &args);
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut child = self.spawn(&mut command)?;
            let (Some(stdin), Some(mut stdout), Some(stderr)) =
                (child.stdin.take(), child.stdout.take(), child.stderr.take())
            else {
                return Err(self.cannot_run(io::Error::other("it has no streams")));
            };
            let mut complaints = Some(stderr);
            let timeout = self.inner.options.connect_timeout * 3 + START_TIMEOUT;
            let first = tokio::time::timeout(timeout, marked_line(&mut stdout)).await;
            let first = first.map_err(|_| SshError::Timeout {
                url: self.name(),
                what: "start exec-server",
                timeout,
            })?;
            let Some(first) = first else {
                // stdout ended before the expected line: the command has failed.
                let mut stderr = Vec::new();
                gather(&mut complaints, &mut stderr).await;
                let status = child.wait().await.map_err(|error| self.cannot_run(error))?;
                let result = SshCommandResult {
                    status,
                    stdout: String::new(),
                    stderr: String::from_utf8_lossy(&stderr).into_owned(),
                };
                return Err(match result.code() {
                    Some(SSH_FAILED) => SshError::Connect {
                        url: self.name(),
                        reason: result.reason(),
                    },
                    _ => SshError::Daemon {
                        url: self.name(),
                        reason: result.reason(),
                    },
                });
            };
            if let Some(machine) = first.strip_prefix("missing ")
                && !installed
            {
                installed = self.install(machine).await?;
                continue;
            }
            self.take_state(&first)?;
            // Keep reading stderr, so that ssh never blocks on a full pipe. The task ends with the
            // child.
            tokio::spawn(async move { gather(&mut complaints, &mut Vec::new()).await });
            let reader = OwnedChildStdout {
                stdout,
                _child: child,
            };
            let options = ConnectOptions::default();
            return Ok(connect_over(&self.name(), &options, &[], reader, stdin).await?);
        }
    }
}

/// stdout of a child process that is killed when the reader is dropped.
struct OwnedChildStdout {
    stdout: ChildStdout,
    _child: Child,
}

impl AsyncRead for OwnedChildStdout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stdout).poll_read(context, buffer)
    }
}

/// The text of the first line with our prefix. Reads no byte after that line. `None` if the stream
/// ends before.
async fn marked_line(stream: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut total = 0;
    let mut line = Vec::new();
    while total < MAX_OUTPUT_BYTES {
        let byte = stream.read_u8().await.ok()?;
        total += 1;
        if byte != b'\n' {
            line.push(byte);
            continue;
        }
        let text = String::from_utf8_lossy(&line);
        if let Some(words) = text.strip_prefix(MARK) {
            return Some(words.trim_end().to_owned());
        }
        line.clear();
    }
    None
}

/// Reads a stream to its end and keeps the first [`MAX_OUTPUT_BYTES`] bytes.
async fn gather(stream: &mut Option<impl AsyncRead + Unpin>, kept: &mut Vec<u8>) {
    let Some(stream) = stream else { return };
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = stream.read(&mut buffer).await {
        let room = MAX_OUTPUT_BYTES.saturating_sub(kept.len());
        kept.extend_from_slice(&buffer[..read.min(room)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn marked_line_skips_shell_output_before_the_prefix() {
        let mut text = &b"Welcome!\nnot exec-server-ssh x\nexec-server-ssh ready {}\nGET"[..];
        assert_eq!(marked_line(&mut text).await.unwrap(), "ready {}");
        assert_eq!(text, b"GET", "nothing after it is taken");
        assert_eq!(marked_line(&mut &b"exec-server-ssh cut"[..]).await, None);
        let flood = b"x\n".repeat(MAX_OUTPUT_BYTES);
        assert_eq!(marked_line(&mut &flood[..]).await, None);
    }

    #[test]
    fn shell_quoted_text_reaches_the_shell_unchanged() {
        let output = std::process::Command::new("sh")
            .arg("-c")
            .arg(format!(
                "printf %s {}",
                shell_quoted("it's $HOME; `x` \"y\"\n")
            ))
            .output()
            .unwrap();
        assert_eq!(output.stdout, b"it's $HOME; `x` \"y\"\n");
    }
}
