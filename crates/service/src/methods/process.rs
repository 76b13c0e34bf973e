//! `process/*`.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use exec_server_executor::log::{Log, Stream};
use exec_server_executor::process::{End, Scope};
use exec_server_executor::{Size, Spec, Stdio, Timeout, env, host, signal as signals};
use exec_server_protocol::chunk::encoded_len;
use exec_server_protocol::method::Empty;
use exec_server_protocol::process::{
    CloseStdinParams, Delivery, Evicted, ListParams, ListResult, ListedProcess, PerStream,
    ReadChunk, ReadParams, ReadResult, ResizeParams, SandboxType, SignalParams, SignalScope,
    SnapshotParams, SnapshotResult, StartParams, StartResult, Survivor, TerminalSize,
    TerminateMode, TerminateParams, TerminateResult, WaitParams, WaitResult, WaitUntil,
    WriteParams, WriteResult, WriteStatus,
};
use serde_json::Value;

use crate::connection::{Connection, Responder};
use crate::dispatch::Call;
use crate::error::RpcError;
use crate::follow::Dialect;
use crate::session::{Managed, ManagedParts, Session, unknown_session};

/// The family's name in messages of the handshake.
pub(crate) const FAMILY: &str = "exec";

/// From SIGTERM to SIGKILL when a timeout strikes, unless the request says otherwise.
const TIMEOUT_GRACE: Duration = Duration::from_secs(2);

pub(crate) fn start(call: Call<'_>, params: StartParams) {
    let session = match call.phase.ready(FAMILY) {
        Ok(session) => session,
        Err(error) => return call.responder.send_error(error),
    };
    let dialect = match params.delivery.unwrap_or_default() {
        Delivery::Push => Dialect::Process,
        Delivery::Pull => Dialect::ProcessPull,
    };
    let own = &call.connection.server.executor().config().environment;
    let spec = match spec(&params, own) {
        Ok(spec) => spec,
        Err(error) => return call.responder.send_error(error),
    };
    let StartParams {
        process_id,
        argv,
        cwd,
        ..
    } = params;
    let started = StartResult {
        process_id: process_id.clone(),
        sandbox_type: Some(SandboxType::None),
    };
    let description = Description {
        process_id,
        argv,
        cwd,
        dialect,
    };
    launch(
        call.connection,
        session,
        spec,
        description,
        call.responder,
        started,
    );
}

/// What a session remembers of a process.
pub(crate) struct Description {
    pub(crate) process_id: String,
    pub(crate) argv: Vec<String>,
    pub(crate) cwd: exec_server_protocol::PathUri,
    pub(crate) dialect: Dialect,
}

/// Starts a process and answers; goes on even if the connection ends meanwhile.
pub(crate) fn launch<R: serde::Serialize + Send + 'static>(
    connection: &Arc<Connection>,
    session: Arc<Session>,
    spec: Spec,
    description: Description,
    responder: Responder,
    result: R,
) {
    let server = connection.server.clone();
    let limit = server.config().max_processes_per_session;
    if let Err(error) = session.reserve(&description.process_id, limit) {
        return responder.send_error(error);
    }
    tokio::spawn(async move {
        let Description {
            process_id,
            argv,
            cwd,
            dialect,
        } = description;
        let orphan = match server.executor().start(spec).await {
            Ok(process) => {
                tracing::debug!(
                    session = session.id,
                    process_id,
                    pid = process.pid(),
                    "started"
                );
                let parts = ManagedParts {
                    process,
                    argv,
                    cwd,
                    dialect,
                };
                session.fill(&process_id, Some(parts), || responder.send(Ok(result)))
            }
            Err(error) => session.fill(&process_id, None, || responder.send_error(error.into())),
        };
        if let Some(process) = orphan {
            process.terminate(End::Now);
            return;
        }
        // Keeps the id until the log has been closed for a while.
        if let Some(managed) = session.process(&process_id) {
            let retention = server.config().closed_retention;
            managed
                .process
                .wait_for(|log| log.close().map(|_| ()))
                .await;
            tokio::time::sleep(retention).await;
            session.forget(&managed);
        }
    });
}

/// Checks a request and turns it into what the executor takes.
fn spec(
    params: &StartParams,
    own: &std::collections::BTreeMap<String, String>,
) -> Result<Spec, RpcError> {
    if params.argv.is_empty() {
        return Err(RpcError::invalid_params("argv must not be empty"));
    }
    let cwd = params.cwd.to_native().map_err(|error| {
        let message = format!(
            "cwd URI `{}` is not valid on this exec-server host: {error}",
            params.cwd
        );
        RpcError::invalid_params(message)
    })?;
    refuse_sandbox(params.sandbox.as_ref())?;
    if params.enforce_managed_network || params.network_proxy.is_some() {
        let message = "managed network cannot be enforced on this executor";
        return Err(RpcError::invalid_params(message));
    }
    let mut env = env::build(own, params.env_policy.as_ref(), &params.env);
    if let Some(metadata) = &params.metadata {
        let ids = [
            ("CODEX_THREAD_ID", &metadata.thread_id),
            ("CODEX_TOOL_CALL_ID", &metadata.tool_call_id),
        ];
        for (name, id) in ids {
            if let Some(id) = id {
                env.insert(name.to_owned(), id.clone());
            }
        }
    }
    let stdio = if params.tty {
        add_shell(&mut env);
        Stdio::Terminal(params.size.map(size).transpose()?.unwrap_or_default())
    } else {
        Stdio::Pipes {
            stdin: params.pipe_stdin,
        }
    };
    Ok(Spec {
        argv: params.argv.clone(),
        cwd,
        env,
        arg0: params.arg0.clone(),
        stdio,
        timeout: params.timeout_ms.map(|millis| Timeout {
            after: Duration::from_millis(millis),
            grace: params.grace_ms.map_or(TIMEOUT_GRACE, Duration::from_millis),
        }),
        limits: params.limits.clone().unwrap_or_default(),
        retention: None,
    })
}

/// Programs on a terminal expect to know the user's shell.
pub(crate) fn add_shell(env: &mut std::collections::BTreeMap<String, String>) {
    if !env.contains_key("SHELL")
        && let Some(account) = host::account()
    {
        env.insert(
            "SHELL".to_owned(),
            account.shell.to_string_lossy().into_owned(),
        );
    }
}

/// Refuses a sandbox that asks for anything: what cannot be enforced does not run.
pub(crate) fn refuse_sandbox(sandbox: Option<&Value>) -> Result<(), RpcError> {
    let Some(sandbox) = sandbox else {
        return Ok(());
    };
    match sandbox.pointer("/permissions/type").and_then(Value::as_str) {
        Some("disabled") => Ok(()),
        _ => Err(RpcError::invalid_params(
            "sandbox intent cannot be enforced on this executor",
        )),
    }
}

fn size(size: TerminalSize) -> Result<Size, RpcError> {
    let cells = |name: &str, value: u32| match u16::try_from(value) {
        Ok(value) if value > 0 => Ok(value),
        _ => {
            let message = format!("terminal {name} must be between 1 and 65535, not {value}");
            Err(RpcError::invalid_params(message))
        }
    };
    Ok(Size {
        rows: cells("rows", size.rows)?,
        cols: cells("cols", size.cols)?,
    })
}

/// Finds the process of a request and does something with it, in its turn.
fn with_process(
    call: Call<'_>,
    process_id: &str,
    job: impl FnOnce(Arc<Connection>, Option<&Arc<Managed>>, Responder) + Send + 'static,
) {
    match call.phase.ready(FAMILY) {
        Ok(session) => {
            let (connection, responder) = (Arc::clone(call.connection), call.responder);
            session.with_process(process_id, move |managed| {
                job(connection, managed, responder)
            });
        }
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn read(call: Call<'_>, params: ReadParams) {
    let id = params.process_id.clone();
    with_process(call, &id, move |connection, managed, mut responder| {
        let Some(managed) = managed else {
            return responder.send_error(RpcError::unknown_process(&params.process_id));
        };
        let after = params.after_seq.unwrap_or(0);
        managed.acknowledge(after);
        let wait = Duration::from_millis(params.wait_ms.unwrap_or(0));
        let max_bytes = params.max_bytes;
        let now = managed.process.with_log(|log| {
            (wait.is_zero() || has_news(log, after)).then(|| read_result(log, after, max_bytes))
        });
        if let Some(result) = now {
            return responder.send(Ok(result));
        }
        let waiting = match connection.wait(&mut responder) {
            Ok(waiting) => waiting,
            Err(error) => return responder.send_error(error),
        };
        let managed = Arc::clone(managed);
        connection.spawn(async move {
            let news = managed
                .process
                .wait_for(|log| has_news(log, after).then_some(()));
            let _ = tokio::time::timeout(wait, news).await;
            // Many may be woken by the same output; only as many answers as fit are made at once.
            let bytes = managed.process.with_log(|log| log.retained_bytes());
            responder
                .reserve(encoded_len(usize::try_from(bytes).unwrap_or(0)) + 4096)
                .await;
            let result = managed
                .process
                .with_log(|log| read_result(log, after, max_bytes));
            drop(waiting);
            responder.send(Ok(result));
        });
    });
}

/// Whether a long poll after this number has something to say.
fn has_news(log: &Log, after: u64) -> bool {
    let output = !log.read(after, Some(0)).chunks.is_empty();
    output || log.close().is_some() || (log.exit().is_some() && after < log.next_seq() - 1)
}

fn read_result(log: &Log, after: u64, max_bytes: Option<usize>) -> ReadResult {
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
        sandbox_denied: false,
        evicted: slice.lost.map(|lost| Evicted {
            through_seq: lost.through_seq,
            bytes: lost.bytes,
        }),
        exit_signal: exit.and_then(|exit| exit.signal).map(signals::name),
        timed_out: exit.is_some_and(|exit| exit.timed_out),
    }
}

pub(crate) fn write(call: Call<'_>, params: WriteParams) {
    if params.write_id.is_empty() {
        let error = RpcError::invalid_params("writeId must not be empty");
        return call.responder.send_error(error);
    }
    let WriteParams {
        process_id,
        chunk,
        write_id,
    } = params;
    with_process(
        call,
        &process_id,
        move |_, managed, responder| match managed {
            Some(managed) => managed.write(chunk.0, Some(&write_id), responder, write_status),
            None => write_status(responder, WriteStatus::UnknownProcess),
        },
    );
}

pub(crate) fn write_status(responder: Responder, status: WriteStatus) {
    responder.send(Ok(WriteResult { status }));
}

pub(crate) fn close_stdin(call: Call<'_>, params: CloseStdinParams) {
    with_process(
        call,
        &params.process_id,
        |_, managed, responder| match managed {
            Some(managed) => managed.close_stdin(responder),
            None => write_status(responder, WriteStatus::UnknownProcess),
        },
    );
}

pub(crate) fn resize(call: Call<'_>, params: ResizeParams) {
    let ResizeParams {
        process_id,
        rows,
        cols,
    } = params;
    let size = match size(TerminalSize { rows, cols }) {
        Ok(size) => size,
        Err(error) => return call.responder.send_error(error),
    };
    with_process(call, &process_id.clone(), move |_, managed, responder| {
        let answer = match managed {
            None => Err(RpcError::unknown_process(&process_id)),
            Some(managed) => managed
                .process
                .resize(size)
                .map(|()| Empty {})
                .map_err(|_| {
                    let why = if managed.process.has_terminal() {
                        "has ended"
                    } else {
                        "is not a tty"
                    };
                    RpcError::invalid_request(format!("process {process_id} {why}"))
                }),
        };
        responder.send(answer);
    });
}

pub(crate) fn signal(call: Call<'_>, params: SignalParams) {
    let signal = signals::named(params.signal);
    let scope = match params.scope.unwrap_or_default() {
        SignalScope::Group => Scope::Group,
        SignalScope::Leader => Scope::Leader,
        SignalScope::Tree => Scope::Tree,
    };
    let job = move |connection: Arc<Connection>,
                    managed: Option<&Arc<Managed>>,
                    responder: Responder| {
        let Some(process) = managed.map(|managed| managed.process.clone()) else {
            return responder.send(Ok(Empty {}));
        };
        connection.spawn(async move {
            let sent = process.signal(signal, scope).await;
            let failed = |error| RpcError::internal(format!("failed to signal process: {error}"));
            responder.send(sent.map(|()| Empty {}).map_err(failed));
        });
    };
    match params.session_id {
        None => with_process(call, &params.process_id, job),
        Some(session) => elsewhere(call, &session, &params.process_id, job),
    }
}

/// As [`with_process`], for a process of any session: whoever may run anything here may end it too.
fn elsewhere(
    call: Call<'_>,
    session_id: &str,
    process_id: &str,
    job: impl FnOnce(Arc<Connection>, Option<&Arc<Managed>>, Responder) + Send + 'static,
) {
    let found = call.phase.ready(FAMILY).and_then(|_| {
        let session = call.connection.server.session(session_id);
        session.ok_or_else(|| unknown_session(session_id))
    });
    match found {
        Ok(session) => {
            let managed = session.process(process_id);
            job(
                Arc::clone(call.connection),
                managed.as_ref(),
                call.responder,
            );
        }
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn terminate(call: Call<'_>, params: TerminateParams) {
    let end = match params.mode.unwrap_or_default() {
        TerminateMode::Force => End::Now,
        TerminateMode::Graceful { timeout_ms } => End::Within(Duration::from_millis(timeout_ms)),
    };
    let wait = params.wait;
    let job = move |connection: Arc<Connection>,
                    managed: Option<&Arc<Managed>>,
                    mut responder: Responder| {
        let Some(managed) = managed else {
            let nothing = wait.then(Vec::new);
            let result = TerminateResult {
                running: false,
                gone: wait.then_some(true),
                survivors: nothing,
            };
            return responder.send(Ok(result));
        };
        if !wait {
            let running = managed.process.terminate(end);
            return responder.send(Ok(TerminateResult {
                running,
                ..TerminateResult::default()
            }));
        }
        let waiting = match connection.wait(&mut responder) {
            Ok(waiting) => waiting,
            Err(error) => return responder.send_error(error),
        };
        let process = managed.process.clone();
        // Not tied to the connection: what was to be ended ends.
        tokio::spawn(async move {
            let (running, left) = process.terminate_and_wait(end).await;
            drop(waiting);
            let survivors: Vec<_> = left
                .into_iter()
                .map(|(pid, command)| Survivor { pid, command })
                .collect();
            responder.send(Ok(TerminateResult {
                running,
                gone: Some(survivors.is_empty()),
                survivors: Some(survivors),
            }));
        });
    };
    match params.session_id {
        None => with_process(call, &params.process_id, job),
        Some(session) => elsewhere(call, &session, &params.process_id, job),
    }
}

pub(crate) fn wait(call: Call<'_>, params: WaitParams) {
    let id = params.process_id.clone();
    with_process(call, &id, move |connection, managed, mut responder| {
        let Some(managed) = managed else {
            return responder.send_error(RpcError::unknown_process(&params.process_id));
        };
        let until = params.until.unwrap_or_default();
        let done = move |log: &Log| match until {
            WaitUntil::Exited => log.exit().is_some(),
            WaitUntil::Closed => log.close().is_some(),
        };
        let now = managed
            .process
            .with_log(|log| done(log).then(|| wait_result(log, false)));
        if let Some(result) = now {
            return responder.send(Ok(result));
        }
        let waiting = match connection.wait(&mut responder) {
            Ok(waiting) => waiting,
            Err(error) => return responder.send_error(error),
        };
        let managed = Arc::clone(managed);
        connection.spawn(async move {
            let finished = managed.process.wait_for(|log| done(log).then_some(()));
            match params.timeout_ms.map(Duration::from_millis) {
                Some(limit) => drop(tokio::time::timeout(limit, finished).await),
                None => finished.await,
            }
            drop(waiting);
            let result = managed.process.with_log(|log| wait_result(log, !done(log)));
            responder.send(Ok(result));
        });
    });
}

fn wait_result(log: &Log, wait_timed_out: bool) -> WaitResult {
    let exit = log.exit();
    WaitResult {
        exited: exit.is_some(),
        exit_code: exit.map(|exit| exit.code),
        signal: exit.and_then(|exit| exit.signal).map(signals::name),
        closed: log.close().is_some(),
        timed_out: exit.is_some_and(|exit| exit.timed_out),
        sandbox_denied: false,
        wait_timed_out,
    }
}

pub(crate) fn snapshot(call: Call<'_>, params: SnapshotParams) {
    let id = params.process_id.clone();
    with_process(call, &id, move |_, managed, responder| {
        let Some(managed) = managed else {
            return responder.send_error(RpcError::unknown_process(&params.process_id));
        };
        responder.send(Ok(managed
            .process
            .with_log(|log| snapshot_result(log, params.max_bytes))));
    });
}

fn snapshot_result(log: &Log, max_bytes: Option<u64>) -> SnapshotResult {
    let [stdout, stderr, terminal] =
        [Stream::Stdout, Stream::Stderr, Stream::Pty].map(|stream| log.cut(stream, max_bytes));
    let omitted_bytes = PerStream {
        stdout: stdout.omitted,
        stderr: stderr.omitted,
        terminal: terminal.omitted,
    };
    let head_bytes = PerStream {
        stdout: stdout.head,
        stderr: stderr.head,
        terminal: terminal.head,
    };
    SnapshotResult {
        truncated: omitted_bytes != PerStream::default(),
        stdout: stdout.bytes.into(),
        stderr: stderr.bytes.into(),
        terminal: terminal.bytes.into(),
        omitted_bytes,
        head_bytes,
        running: log.exit().is_none(),
        exit_code: log.exit().map(|exit| exit.code),
    }
}

pub(crate) fn list(call: Call<'_>, params: ListParams) {
    let session = match call.phase.ready(FAMILY) {
        Ok(session) => session,
        Err(error) => return call.responder.send_error(error),
    };
    let sessions = if params.all {
        call.connection.server.all_sessions()
    } else {
        vec![session]
    };
    let mut processes = Vec::new();
    for session in sessions {
        let shown = params.all.then(|| session.id.clone());
        let listed = session.processes();
        processes.extend(
            listed
                .iter()
                .map(|managed| listed_process(managed, shown.clone())),
        );
    }
    call.responder.send(Ok(ListResult { processes }));
}

fn listed_process(managed: &Managed, session_id: Option<String>) -> ListedProcess {
    let process = &managed.process;
    let since = process
        .started_at()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    process.with_log(|log| ListedProcess {
        process_id: managed.id.clone(),
        argv: managed.argv.clone(),
        cwd: managed.cwd.clone(),
        tty: process.has_terminal(),
        pid: process.pid(),
        started_at_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        running: log.exit().is_none(),
        exit_code: log.exit().map(|exit| exit.code),
        next_seq: log.next_seq(),
        retained_bytes: log.retained_bytes(),
        evicted_bytes: log.evicted_bytes(),
        discarded_bytes: process.discarded_bytes(),
        session_id,
    })
}
