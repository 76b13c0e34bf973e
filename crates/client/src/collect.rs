//! Helpers that collect all output of a process, within limits.
//!
//! The functions work on any [`ExecProcess`], local or remote.

use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::process::{OutputStream, WaitUntil, WriteStatus};
use tokio::time::Instant;

use crate::backend::ExecProcess;
use crate::error::ExecServerError;
use crate::event::{ExecProcessEvent, ExecProcessEvents, ProcessExit};
use crate::extension;

/// Bytes in one write: enough to keep a pipe full, and few enough to detect early that the process
/// has closed its input.
const WRITE_BYTES: usize = 1 << 20;

/// Limits of collecting output.
///
/// ```
/// use std::time::Duration;
///
/// use exec_server_client::CollectOptions;
///
/// let mut options = CollectOptions::default();
/// options.deadline = Some(Duration::from_secs(60));
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct CollectOptions {
    /// Return with the output so far after this time; the process continues to run.
    pub deadline: Option<Duration>,
    /// Maximum number of bytes to keep, all streams together; further bytes are only counted.
    pub max_bytes: usize,
    /// How long to wait without output after the exit, for servers that never close the output
    /// while a descendant holds it open.
    pub drain: Duration,
}

impl Default for CollectOptions {
    fn default() -> Self {
        Self {
            deadline: None,
            max_bytes: 64 << 20,
            drain: Duration::from_secs(5),
        }
    }
}

/// Collected output of a process and how it ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessOutput {
    /// Bytes from standard output.
    pub stdout: Vec<u8>,
    /// Bytes from standard error.
    pub stderr: Vec<u8>,
    /// Bytes from the terminal.
    pub terminal: Vec<u8>,
    /// How the process ended; absent if the deadline passed first.
    pub exit: Option<ProcessExit>,
    /// Whether all output was received. If not, the deadline passed first, or a descendant still
    /// holds the output open.
    pub closed: bool,
    /// Whether an event reported missing output.
    pub has_gaps: bool,
    /// Bytes over the limit, which were not kept.
    pub omitted_bytes: u64,
}

impl dyn ExecProcess + '_ {
    /// Waits for the process to exit, at most until the deadline; returns `None` if the deadline
    /// passes first.
    ///
    /// # Errors
    ///
    /// When the events of the process cannot be followed to its end.
    pub async fn exited(&self, deadline: Option<Duration>) -> Result<Option<i32>, ExecServerError> {
        Ok(self.wait(WaitUntil::Exited, deadline).await?.exit_code)
    }

    /// Collects everything that the process writes until it has ended.
    ///
    /// ```no_run
    /// use exec_server_client::{CollectOptions, ExecProcess, ExecServerError};
    ///
    /// async fn text(process: &dyn ExecProcess) -> Result<String, ExecServerError> {
    ///     let output = process.output(CollectOptions::default()).await?;
    ///     Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// When the events were taken already, or the process cannot be followed to its end.
    pub async fn output(&self, options: CollectOptions) -> Result<ProcessOutput, ExecServerError> {
        collect(self.events()?, options).await
    }

    /// Writes all of the input, closes standard input, and collects everything that the process
    /// writes.
    ///
    /// A process that exits or closes its input early is not an error.
    ///
    /// # Errors
    ///
    /// Same as for [`output`](#method.output), or [`ExecServerError::Unsupported`], before anything is
    /// written, when the server cannot close the input: the process would wait for its end.
    pub async fn communicate(
        &self,
        input: Bytes,
        options: CollectOptions,
    ) -> Result<ProcessOutput, ExecServerError> {
        if !self.can_close_stdin().await? {
            return Err(ExecServerError::Unsupported(extension::CLOSE_STDIN));
        }
        let collecting = collect(self.events()?, options);
        // Concurrently: a process that blocks on writing its output would not read its input.
        tokio::pin!(collecting);
        tokio::select! {
            output = &mut collecting => output,
            fed = feed(self, input) => {
                fed?;
                collecting.await
            }
        }
    }
}

async fn feed(process: &dyn ExecProcess, mut input: Bytes) -> Result<(), ExecServerError> {
    while !input.is_empty() {
        let piece = input.split_to(input.len().min(WRITE_BYTES));
        if process.write(piece).await? != WriteStatus::Accepted {
            return Ok(());
        }
    }
    process.close_stdin().await?;
    Ok(())
}

async fn collect(
    mut events: ExecProcessEvents,
    options: CollectOptions,
) -> Result<ProcessOutput, ExecServerError> {
    let mut output = ProcessOutput::default();
    let mut room = options.max_bytes;
    let deadline = options
        .deadline
        .and_then(|deadline| Instant::now().checked_add(deadline));
    loop {
        let silence = output
            .exit
            .is_some()
            .then(|| Instant::now() + options.drain);
        let until = [deadline, silence].into_iter().flatten().min();
        let event = match until {
            Some(until) => match tokio::time::timeout_at(until, events.recv()).await {
                Ok(event) => event,
                Err(_) => return Ok(output),
            },
            None => events.recv().await,
        };
        match event {
            Some(ExecProcessEvent::Output { stream, chunk, .. }) => {
                let kept = &chunk[..chunk.len().min(room)];
                room -= kept.len();
                output.omitted_bytes += (chunk.len() - kept.len()) as u64;
                match stream {
                    OutputStream::Stdout => output.stdout.extend_from_slice(kept),
                    OutputStream::Stderr => output.stderr.extend_from_slice(kept),
                    OutputStream::Pty => output.terminal.extend_from_slice(kept),
                }
            }
            Some(ExecProcessEvent::Exited { exit, .. }) => output.exit = Some(exit),
            Some(ExecProcessEvent::Gap { .. }) => output.has_gaps = true,
            Some(ExecProcessEvent::Closed { .. }) => output.closed = true,
            Some(ExecProcessEvent::Failed(failure)) => return Err(failure.into()),
            None => return Ok(output),
        }
    }
}
