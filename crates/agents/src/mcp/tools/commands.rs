//! Command tools: `exec_command`, `write_stdin`, `read_output`, `kill`, `list_processes`,
//! `wait_for`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use exec_server_client::{ExecProcess, ReadRequest, WaitForRequest};
use exec_server_protocol::process::{
    Condition, OutputStream, ReadChunk, TerminateMode, WaitForResult,
};

use super::{Room, ToolError, ToolOutcome, ToolResult, cancellable};
use crate::mcp::params::{
    ExecCommandParams, KillParams, ListProcesses, ReadOutput, StreamName, WaitFor, WriteStdinParams,
};
use crate::mcp::results::{
    CommandOutput, ListedCommand, MatchedOutput, ProcessList, RetainedOutput, WaitOutcome,
};
use crate::mcp::server::{ToolCall, environment_of, log_uri};
use crate::unified::{
    self, CommandLaunch, DirectRequest, INTERRUPT, ProcessIo, SessionInfo, UnifiedExecError,
};

/// How long a cancelled command may take to exit after its interrupt.
const CANCEL_GRACE: Duration = Duration::from_secs(2);

/// Maximum wait of `read_output`.
const MAX_READ_WAIT_MS: u64 = 60_000;

/// Default and maximum wait of `wait_for` and `watch_once`.
pub(super) const WAITS: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// Default and maximum time in which `kill` lets a command clean up.
const GRACES_MS: (u64, u64) = (2_000, 30_000);

pub(super) async fn exec_command(call: ToolCall, params: ExecCommandParams) -> ToolResult {
    let (id, environment) = call.environment(params.environment_id.as_deref()).await?;
    let cwd = environment.path(params.workdir.as_deref().unwrap_or("."))?;
    let shell = params.shell.as_deref().unwrap_or(&environment.shell);
    let mut request = DirectRequest::shell(shell, params.login, &params.cmd, cwd);
    request.env.extend(params.env);
    if params.tty {
        request.io = ProcessIo::Terminal(None);
    }
    let direct = CommandLaunch::direct(Arc::clone(&environment.backend), request);
    let mut start = direct.params().clone();
    start.sandbox.clone_from(&environment.sandbox);
    let launch = CommandLaunch::prepared(Arc::clone(&environment.backend), start);
    let command_id = call.command_id(&id);
    let mut command = unified::ExecCommand::new(command_id.clone(), launch);
    command.yield_time = params.yield_time_ms.map(Duration::from_millis);
    command.max_output_tokens = params.max_output_tokens;
    let unified = &call.shared.unified;
    tokio::select! {
        answer = unified.exec_command(command) => outcome_of(&answer?),
        () = call.cancelled.cancelled() => {
            interrupt(&call, &command_id).await;
            Err(ToolError("cancelled".to_owned()))
        }
    }
}

/// Ends the command of a cancelled call, because the client never received its session.
async fn interrupt(call: &ToolCall, command_id: &str) {
    let unified = &call.shared.unified;
    let sessions = unified.sessions();
    let Some(session) = sessions.iter().find(|one| one.call_id == command_id) else {
        // The command was still starting; the task that starts it ends it.
        return;
    };
    let mut stop = unified::WriteStdin::new(command_id, session.session_id, INTERRUPT);
    stop.yield_time = Some(CANCEL_GRACE);
    let stopped = unified.write_stdin(stop).await;
    let goes_on = !matches!(&stopped, Ok(answer) if answer.session_id.is_none());
    if goes_on {
        let ended = unified
            .terminate(session.session_id, TerminateMode::Force, None)
            .await;
        if let Err(error) = ended {
            tracing::warn!(session = session.session_id, %error, "cannot end a cancelled command");
        }
    }
}

pub(super) async fn write_stdin(call: &ToolCall, params: WriteStdinParams) -> ToolResult {
    let id = call.id.clone();
    let mut write = unified::WriteStdin::new(id, params.session_id, params.chars);
    write.yield_time = params.yield_time_ms.map(Duration::from_millis);
    write.max_output_tokens = params.max_output_tokens;
    cancellable(call, async {
        let answer = call.shared.unified.write_stdin(write).await;
        outcome_of(&answer.map_err(|error| with_end(call, error))?)
    })
    .await
}

pub(super) async fn kill(call: &ToolCall, params: KillParams) -> ToolResult {
    let mode = match params.force {
        true => TerminateMode::Force,
        false => TerminateMode::Graceful {
            timeout_ms: params.grace_ms.unwrap_or(GRACES_MS.0).min(GRACES_MS.1),
        },
    };
    let unified = &call.shared.unified;
    let answer = unified.terminate(params.session_id, mode, params.max_output_tokens);
    outcome_of(&answer.await.map_err(|error| with_end(call, error))?)
}

/// Explains that a command cannot be used any more because its end was reported.
fn with_end(call: &ToolCall, error: UnifiedExecError) -> ToolError {
    if let UnifiedExecError::UnknownSession(id) = error
        && let Some(session) = session(call, id)
    {
        let state = state(&session);
        return ToolError(format!(
            "session_id {id} has ended ({state}); read_output returns its output"
        ));
    }
    error.into()
}

fn session(call: &ToolCall, id: u32) -> Option<SessionInfo> {
    let mut sessions = call.shared.unified.sessions().into_iter();
    sessions.find(|session| session.session_id == id)
}

/// Converts a response of unified exec, and names what returns the output that it leaves out.
fn outcome_of(answer: &unified::CommandResult) -> ToolResult {
    let mut text = answer.text();
    if answer.omitted_bytes > 0 {
        if !text.ends_with('\n') {
            text.push('\n');
        }
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "[{} bytes are left out; all of this output: read_output with session_id {}, cursor {}]",
            answer.omitted_bytes,
            answer.id,
            answer.after_seq.unwrap_or(0)
        );
    }
    ToolOutcome::new(text, &CommandOutput::from(answer))
}

pub(super) async fn read_output(call: &ToolCall, params: ReadOutput) -> ToolResult {
    let process = process(call, params.session_id)?;
    let Room(room) = Room::of(params.max_output_tokens);
    let offset = usize::try_from(params.offset).unwrap_or(usize::MAX);
    let request = ReadRequest {
        after_seq: params.cursor,
        max_bytes: Some(room.saturating_add(offset)),
        wait: Duration::from_millis(params.wait_ms.min(MAX_READ_WAIT_MS)),
    };
    let read = cancellable(call, async { Ok(process.read(request).await?) }).await?;
    // The offset is one in the next event, which may have been evicted.
    let offset = if read.evicted.is_some() { 0 } else { offset };
    let mut page = OutputPage::new(&read.chunks, (params.cursor, offset), room);
    let mut more = page.is_cut;
    if !page.is_cut {
        // Number of the last event that this response covers.
        page.cursor = read.next_seq.saturating_sub(1).max(params.cursor);
        if !read.chunks.is_empty() {
            let request = ReadRequest {
                after_seq: page.cursor,
                max_bytes: Some(1),
                wait: Duration::ZERO,
            };
            more = !process.read(request).await?.chunks.is_empty();
        }
    }
    let output = String::from_utf8_lossy(&page.bytes).into_owned();
    let mut text = format!("Cursor: {}\n", page.cursor);
    // Writing to a string cannot fail.
    if let Some(evicted) = &read.evicted {
        let _ = writeln!(
            text,
            "{} bytes before this are no longer kept",
            evicted.bytes
        );
    }
    match (read.exited, read.exit_code) {
        (true, Some(code)) => drop(writeln!(text, "Process exited with code {code}")),
        (true, None) => text.push_str("Process exited\n"),
        (false, _) => text.push_str("Process running\n"),
    }
    let _ = write!(text, "Output:\n{output}");
    if more {
        let line_end = if output.ends_with('\n') { "" } else { "\n" };
        let offset = match page.offset {
            0 => String::new(),
            offset => format!(", offset {offset}"),
        };
        let _ = writeln!(
            text,
            "{line_end}[more: read_output with session_id {}, cursor {}{offset}]",
            params.session_id, page.cursor
        );
    }
    let structured = RetainedOutput {
        session_id: params.session_id,
        cursor: page.cursor,
        offset: Some(page.offset as u64).filter(|offset| *offset > 0),
        output,
        more,
        running: !read.exited,
        closed: read.closed,
        exit_code: read.exit_code,
        evicted_bytes: read.evicted.map(|evicted| evicted.bytes),
    };
    ToolOutcome::new(text, &structured)
}

/// Part of the retained output, and where it ends.
#[derive(Debug, PartialEq)]
struct OutputPage {
    bytes: Vec<u8>,
    /// Number of the last event that was returned completely.
    cursor: u64,
    /// Bytes of the next event that were returned.
    offset: usize,
    /// Whether an event was cut.
    is_cut: bool,
}

impl OutputPage {
    /// Takes output of at most `room` bytes after a cursor and an offset. A character is not cut.
    fn new(chunks: &[ReadChunk], (cursor, offset): (u64, usize), room: usize) -> Self {
        let mut page = Self {
            bytes: Vec::new(),
            cursor,
            offset,
            is_cut: false,
        };
        for ReadChunk { seq, chunk, .. } in chunks {
            let rest = chunk.0.get(page.offset..).unwrap_or_default();
            let room = room - page.bytes.len();
            if rest.len() > room {
                let is_inside = |at: &usize| rest[*at] & 0xC0 == 0x80;
                // A character has at most three such bytes.
                let mut cuts = (room.saturating_sub(3)..=room).rev();
                let cut = cuts.find(|at| !is_inside(at)).unwrap_or(room);
                page.bytes.extend_from_slice(&rest[..cut]);
                page.offset += cut;
                page.is_cut = true;
                break;
            }
            page.bytes.extend_from_slice(rest);
            (page.cursor, page.offset) = (*seq, 0);
        }
        page
    }
}

fn process(call: &ToolCall, session: u32) -> Result<Arc<dyn ExecProcess>, ToolError> {
    let process = call.shared.unified.process(session);
    process.ok_or_else(|| UnifiedExecError::UnknownSession(session).into())
}

pub(super) fn list_processes(call: &ToolCall, params: &ListProcesses) -> ToolResult {
    let mut sessions = call.shared.unified.sessions();
    sessions.retain(|session| params.all || session.running);
    let mut text = String::new();
    for session in &sessions {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{}  {}  {}",
            session.session_id,
            state(session),
            session.argv.last().map_or("", String::as_str)
        );
    }
    if sessions.is_empty() {
        text.push_str("no commands are running\n");
    }
    let processes = sessions.iter().map(listed).collect();
    ToolOutcome::new(text, &ProcessList { processes })
}

fn state(session: &SessionInfo) -> String {
    let age = session.age.as_secs();
    match (&session.failure, session.exit_code) {
        (Some(failure), _) => format!("lost: {failure}"),
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => format!("running for {age} s, {} bytes", session.output_bytes),
    }
}

fn listed(session: &SessionInfo) -> ListedCommand {
    ListedCommand {
        session_id: session.session_id,
        environment_id: environment_of(session).to_owned(),
        command: session.argv.last().cloned().unwrap_or_default(),
        argv: session.argv.clone(),
        cwd: session.cwd.clone(),
        tty: session.tty,
        age_seconds: session.age.as_secs_f64(),
        running: session.running,
        exit_code: session.exit_code,
        failure: session.failure.clone(),
        output_bytes: session.output_bytes,
        log: log_uri(session.session_id),
    }
}

pub(super) async fn wait_for(call: &ToolCall, params: WaitFor) -> ToolResult {
    let process = process(call, params.session_id)?;
    let mut any = Vec::new();
    let mut names = Vec::new();
    let mut add = |name, condition| {
        names.push(name);
        any.push(condition);
    };
    if let Some(regex) = params.regex {
        let stream = params.stream.map(stream);
        add("regex", Condition::Regex { regex, stream });
    }
    if let Some(port) = params.port {
        add("port", Condition::Port { port });
    }
    if params.tty_read {
        add("tty_read", Condition::TtyRead);
    }
    if let Some(quiet_ms) = params.quiet_ms {
        add("quiet", Condition::Quiet { quiet_ms });
    }
    add("exit", Condition::Exit);
    let timeout = params.timeout_ms.map(Duration::from_millis);
    let request = WaitForRequest {
        any,
        after_seq: params.cursor,
        timeout: Some(timeout.unwrap_or(WAITS.0).min(WAITS.1)),
    };
    let result = cancellable(call, async { Ok(process.wait_for(request).await?) }).await?;
    let fired = result.fired.and_then(|index| names.get(index)).copied();
    let text = fired_text(fired, &result);
    let structured = WaitOutcome {
        session_id: params.session_id,
        fired,
        timed_out: result.wait_timed_out,
        cursor: result.cursor,
        exited: result.exited,
        exit_code: result.exit_code,
        closed: result.closed,
        found: result.found.map(|found| MatchedOutput {
            stream: found.stream.name(),
            text: found.text,
        }),
        port: result.port,
        pid: result.pid,
    };
    ToolOutcome::new(text, &structured)
}

fn fired_text(fired: Option<&str>, result: &WaitForResult) -> String {
    let what = match (fired, &result.found, result.port) {
        (Some("regex"), Some(found), _) => {
            format!("{} matched: {}", found.stream.name(), found.text)
        }
        (Some("port"), _, Some(port)) => format!("port {port} is listened on"),
        (Some("tty_read"), ..) => "the command waits for input".to_owned(),
        (Some("quiet"), ..) => "the command is silent".to_owned(),
        (Some(_), ..) => "the command has exited".to_owned(),
        (None, ..) if result.wait_timed_out => "nothing happened in time".to_owned(),
        (None, ..) => "the command has ended, and nothing else can happen".to_owned(),
    };
    let mut text = format!("{what}\nCursor: {}\n", result.cursor);
    if let Some(code) = result.exit_code {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "Process exited with code {code}");
    }
    text
}

fn stream(name: StreamName) -> OutputStream {
    match name {
        StreamName::Stdout => OutputStream::Stdout,
        StreamName::Stderr => OutputStream::Stderr,
        StreamName::Pty => OutputStream::Pty,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(seq: u64, text: &str) -> ReadChunk {
        ReadChunk {
            seq,
            stream: OutputStream::Stdout,
            chunk: text.as_bytes().to_vec().into(),
        }
    }

    #[test]
    fn pages_of_any_size_return_all_output_without_cutting_characters() {
        let chunks = [chunk(3, "aé€"), chunk(4, ""), chunk(7, "😀b\n")];
        for room in 4..20 {
            let (mut all, mut cursor, mut offset) = (String::new(), 2, 0);
            loop {
                let left: Vec<ReadChunk> = chunks
                    .iter()
                    .filter(|chunk| chunk.seq > cursor)
                    .cloned()
                    .collect();
                let page = OutputPage::new(&left, (cursor, offset), room);
                assert!(page.bytes.len() <= room);
                all += std::str::from_utf8(&page.bytes).unwrap();
                (cursor, offset) = (page.cursor, page.offset);
                if !page.is_cut {
                    break;
                }
            }
            assert_eq!((all.as_str(), cursor, offset), ("aé€😀b\n", 7, 0), "{room}");
        }
    }

    #[test]
    fn offset_beyond_the_event_continues_after_it() {
        let page = OutputPage::new(&[chunk(1, "abc"), chunk(2, "d")], (0, 9), 10);
        assert_eq!(
            (page.bytes, page.cursor, page.offset),
            (b"d".to_vec(), 2, 0)
        );
    }
}
