//! Helpers on top of a process: everything it writes, with an end in sight.
//!
//! Owns the bounds of collecting. Works on any [`ExecProcess`], wherever it runs.

use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::process::{Stream, WaitUntil, WriteStatus};
use tokio::time::Instant;

use crate::backend::ExecProcess;
use crate::error::ExecServerError;
use crate::event::{ExecProcessEvent, ExecProcessEvents, ProcessExit};

/// Bytes handed over in one write: enough to keep a pipe busy, little enough to notice soon when
/// the process has had enough.
const WRITE_BYTES: usize = 1 << 20;

/// The bounds of collecting.
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
    /// When to return with what there is; the process goes on.
    pub deadline: Option<Duration>,
    /// Bytes to keep of all streams together; the rest is counted.
    pub max_bytes: usize,
    /// How much silence after the exit ends the collecting, for servers that never close the output
    /// while a descendant holds it.
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

/// What was collected of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessOutput {
    /// What came on standard output.
    pub stdout: Vec<u8>,
    /// What came on standard error.
    pub stderr: Vec<u8>,
    /// What came on the terminal.
    pub terminal: Vec<u8>,
    /// How the process ended; absent if the deadline came first.
    pub exit: Option<ProcessExit>,
    /// All output has come. Otherwise the deadline came first, or a descendant holds it open.
    pub closed: bool,
    /// Events stated that output is missing.
    pub has_gaps: bool,
    /// Bytes beyond the limit, which were not kept.
    pub omitted_bytes: u64,
}

impl dyn ExecProcess + '_ {
    /// Waits for the process to exit, at most until the deadline; `None` if that came first.
    ///
    /// # Errors
    ///
    /// When the process cannot be followed to its end.
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

    /// Writes all of the input, ends it, and collects everything that the process writes meanwhile.
    ///
    /// A process that ends or closes its input early is no error.
    ///
    /// # Errors
    ///
    /// As for [`output`](#method.output), or when the input cannot be ended.
    pub async fn communicate(
        &self,
        input: Bytes,
        options: CollectOptions,
    ) -> Result<ProcessOutput, ExecServerError> {
        let collecting = collect(self.events()?, options);
        // Side by side: a process that waits for us to read would not read what we write.
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
                    Stream::Stdout => output.stdout.extend_from_slice(kept),
                    Stream::Stderr => output.stderr.extend_from_slice(kept),
                    Stream::Pty => output.terminal.extend_from_slice(kept),
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
