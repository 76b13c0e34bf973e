//! Command tools: `exec_command`, `write_stdin`, `read_output`, `kill`, `list_processes`,
//! `wait_for`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use exec_server_client::{ExecProcess, ReadRequest, WaitForRequest};
use exec_server_protocol::process::{Condition, OutputStream, TerminateMode, WaitForResult};
use serde_json::{Value, json};

use super::{ToolError, ToolOutcome, ToolResult, budget, cancellable, fitted};
use crate::mcp::params::{
    ExecCommandParams, KillParams, ListProcesses, ReadOutput, StreamName, WaitFor, WriteStdinParams,
};
use crate::mcp::server::{ToolCall, environment_of, log_uri};
use crate::unified::{
    self, BYTES_PER_TOKEN, CommandLaunch, DirectRequest, INTERRUPT, ProcessIo, SessionInfo,
    UnifiedExecError,
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
        answer = unified.exec_command(command) => Ok(outcome_of(&answer?)),
        () = call.cancelled.cancelled() => {
            interrupt(&call, &command_id).await;
            Err(ToolError::Failed("cancelled".to_owned()))
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
        Ok(outcome_of(&call.shared.unified.write_stdin(write).await?))
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
    Ok(outcome_of(&answer.await?))
}

/// Converts a response of unified exec.
fn outcome_of(answer: &unified::CommandResult) -> ToolOutcome {
    ToolOutcome {
        text: answer.text(),
        structured: answer.json(),
    }
}

pub(super) async fn read_output(call: &ToolCall, params: ReadOutput) -> ToolResult {
    let process = process(call, params.session_id)?;
    let tokens = budget(params.max_output_tokens);
    let request = ReadRequest {
        after_seq: params.cursor,
        max_bytes: Some(tokens.saturating_mul(BYTES_PER_TOKEN)),
        wait: Duration::from_millis(params.wait_ms.min(MAX_READ_WAIT_MS)),
    };
    let read = cancellable(call, async { Ok(process.read(request).await?) }).await?;
    let mut bytes = Vec::new();
    for chunk in &read.chunks {
        bytes.extend_from_slice(&chunk.chunk.0);
    }
    let output = fitted(&String::from_utf8_lossy(&bytes), tokens);
    // Number of the last event that this response covers.
    let cursor = read.next_seq.saturating_sub(1).max(params.cursor);
    let mut text = format!("Cursor: {cursor}\n");
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
    let mut structured = json!({
        "session_id": params.session_id,
        "cursor": cursor,
        "output": output,
        "running": !read.exited,
        "closed": read.closed,
    });
    if let Some(code) = read.exit_code {
        structured["exit_code"] = code.into();
    }
    if let Some(evicted) = read.evicted {
        structured["evicted_bytes"] = evicted.bytes.into();
    }
    Ok(ToolOutcome { text, structured })
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
    let processes: Vec<Value> = sessions.iter().map(listed).collect();
    let structured = json!({ "processes": processes });
    Ok(ToolOutcome { text, structured })
}

fn state(session: &SessionInfo) -> String {
    let age = session.age.as_secs();
    match (&session.failure, session.exit_code) {
        (Some(failure), _) => format!("lost: {failure}"),
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => format!("running for {age} s, {} bytes", session.output_bytes),
    }
}

fn listed(session: &SessionInfo) -> Value {
    json!({
        "session_id": session.session_id,
        "environment_id": environment_of(session),
        "command": session.argv.last(),
        "argv": session.argv,
        "cwd": session.cwd,
        "tty": session.tty,
        "age_seconds": session.age.as_secs_f64(),
        "running": session.running,
        "exit_code": session.exit_code,
        "failure": session.failure,
        "output_bytes": session.output_bytes,
        "log": log_uri(session.session_id),
    })
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
    let mut structured = json!({
        "session_id": params.session_id,
        "fired": fired,
        "timed_out": result.wait_timed_out,
        "cursor": result.cursor,
        "exited": result.exited,
        "exit_code": result.exit_code,
        "closed": result.closed,
    });
    if let Some(found) = &result.found {
        structured["match"] = json!({ "text": found.text, "stream": found.stream });
    }
    if let Some(port) = result.port {
        structured["port"] = port.into();
    }
    if let Some(pid) = result.pid {
        structured["pid"] = pid.into();
    }
    Ok(ToolOutcome { text, structured })
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
