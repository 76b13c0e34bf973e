//! Conversion of log state to results of `process/read`, `wait`, `snapshot`, and to the exit and
//! close notifications.

use exec_server_protocol::process::{
    ClosedParams, Evicted, ExitedParams, PerStream, ProcessUsage, ReadChunk, ReadResult,
    SnapshotResult, Survivor, WaitResult,
};

use crate::log::{Exit, Log, LogEnd, OutputStream};
use crate::signal;

/// Whether a read after `after` would return new data.
pub fn has_new_data(log: &Log, after: u64) -> bool {
    log.has_output_after(after)
        || log.close().is_some()
        || (log.exit().is_some() && after < log.next_seq() - 1)
}

/// Retained output after a number, and the state of the process.
pub fn read(log: &Log, after: u64, max_bytes: Option<usize>) -> ReadResult {
    let slice = log.read(after, max_bytes);
    let exit = log.exit();
    ReadResult {
        chunks: slice
            .chunks
            .into_iter()
            .map(|(seq, stream, chunk)| ReadChunk {
                seq,
                stream,
                chunk: chunk.into(),
            })
            .collect(),
        next_seq: slice.next_seq,
        exited: exit.is_some(),
        exit_code: exit.map(|exit| exit.code),
        closed: log.close().is_some(),
        failure: None,
        sandbox_denied: exit.is_some_and(|exit| exit.denials.is_some()),
        evicted: slice.lost.map(|lost| Evicted {
            through_seq: lost.through_seq,
            bytes: lost.bytes,
        }),
        exit_signal: exit.and_then(|exit| exit.signal).map(signal::name),
        timed_out: exit.is_some_and(|exit| exit.timed_out),
    }
}

/// The state of the process as the result of a wait.
pub fn wait(log: &Log, wait_timed_out: bool) -> WaitResult {
    let exit = log.exit();
    WaitResult {
        exited: exit.is_some(),
        exit_code: exit.map(|exit| exit.code),
        signal: exit.and_then(|exit| exit.signal).map(signal::name),
        closed: log.close().is_some(),
        timed_out: exit.is_some_and(|exit| exit.timed_out),
        sandbox_denied: exit.is_some_and(|exit| exit.denials.is_some()),
        wait_timed_out,
    }
}

/// Head and tail of each stream.
pub fn snapshot(log: &Log, max_bytes: Option<u64>) -> SnapshotResult {
    let [stdout, stderr, terminal] = [
        OutputStream::Stdout,
        OutputStream::Stderr,
        OutputStream::Pty,
    ]
    .map(|stream| log.cut(stream, max_bytes));
    let omitted_bytes = PerStream {
        stdout: stdout.omitted,
        stderr: stderr.omitted,
        terminal: terminal.omitted,
    };
    SnapshotResult {
        truncated: omitted_bytes != PerStream::default(),
        head_bytes: PerStream {
            stdout: stdout.head,
            stderr: stderr.head,
            terminal: terminal.head,
        },
        stdout: stdout.bytes.into(),
        stderr: stderr.bytes.into(),
        terminal: terminal.bytes.into(),
        omitted_bytes,
        running: log.exit().is_none(),
        exit_code: log.exit().map(|exit| exit.code),
    }
}

/// The exit of a process.
pub fn exited(process_id: &str, seq: u64, exit: &Exit) -> ExitedParams {
    ExitedParams {
        process_id: process_id.to_owned(),
        seq,
        exit_code: exit.code,
        sandbox_denied: Some(exit.denials.is_some()),
        denials: exit.denials.clone().filter(|denials| !denials.is_empty()),
        signal: exit.signal.map(signal::name),
        timed_out: exit.timed_out,
        usage: Some(ProcessUsage {
            user_ms: exit.user_micros / 1000,
            system_ms: exit.system_micros / 1000,
            max_rss_bytes: exit.max_rss_bytes,
        }),
    }
}

/// The close of a log.
pub fn closed(process_id: &str, seq: u64, close: &LogEnd) -> ClosedParams {
    ClosedParams {
        process_id: process_id.to_owned(),
        seq,
        inherited_output: close.inherited_output,
        discarded_bytes: close.discarded_bytes,
        descendants: survivors(&close.descendants),
    }
}

/// Converts processes that still run.
pub fn survivors(processes: &[(i32, String)]) -> Vec<Survivor> {
    let survivor = |(pid, command): &(i32, String)| Survivor {
        pid: *pid,
        command: command.clone(),
    };
    processes.iter().map(survivor).collect()
}
