//! Implementation of `process/*`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use exec_server_engine::process::{self as requests, OutputMemory};
use exec_server_engine::request;
use exec_server_engine::start::start_result;
use exec_server_engine::{Conditions, NewProcess, PreparedStart, Process, ProcessInfo};
use exec_server_protocol::limits::MAX_MESSAGE_BYTES;
use exec_server_protocol::method::Empty;
use exec_server_protocol::process::{
    CloseStdinParams, Delivery, ListParams, ListResult, PauseOutputParams, ReadParams, ReadResult,
    ResizeParams, SignalParams, SnapshotParams, StartParams, TerminalSize, TerminateParams,
    TerminateResult, WaitForParams, WaitParams, WriteParams, WriteResult, WriteStatus,
};

use serde::Serialize;

use crate::ApiError;
use crate::connection::Connection;
use crate::dispatch::CheckedRequest;
use crate::follow::NotificationFamily;
use crate::network::ClientPolicyDecider;
use crate::output_pieces::EncodedOutput;
use crate::pieces::PIECE_COST;
use crate::process_audit::ProcessAudit;
use crate::responder::RequestResponder;
use crate::server::ExecServer;
use crate::session::{ReserveResult, Session, SessionProcess, StartTicket, unknown_session};

pub(crate) fn start(call: CheckedRequest<'_>, params: StartParams) {
    let prepared = call.connection.server.engine().prepare_start(params);
    let (info, start) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return call.responder.send_error(error),
    };
    let dialect = match info.delivery {
        Delivery::Push => NotificationFamily::Process,
        Delivery::Pull => NotificationFamily::ProcessPull,
    };
    let id = info.process_id.clone();
    launch(call, info, dialect, start, |process| {
        start_result(process, id)
    });
}

/// Starts a process and responds. Continues even if the connection ends. A repeated request with
/// the same start id starts no second process and gets the same response.
pub(crate) fn launch<R: Serialize + Send + 'static>(
    call: CheckedRequest<'_>,
    info: ProcessInfo,
    dialect: NotificationFamily,
    start: PreparedStart,
    result: impl FnOnce(&Process) -> R + Send + 'static,
) {
    let CheckedRequest {
        connection,
        session,
        responder,
    } = call;
    let server = connection.server.clone();
    let limit = server.config().max_processes_per_session;
    let ticket = match session.reserve(info, dialect, limit) {
        Ok(ReserveResult::New(ticket)) => ticket,
        Ok(ReserveResult::Repeat(ProcessInfo { process_id, .. })) => {
            let of = Arc::clone(&session);
            return session.with_process(&process_id.clone(), move |managed| match managed {
                Some(managed) => responder.send(Ok(result(&managed.process))),
                None => responder.send_error(of.failure(&process_id)),
            });
        }
        Err(error) => return responder.send_error(error),
    };
    if let Err(error) = server.accepts_processes(&session) {
        return ticket.fail(error, |error| responder.send_error(error));
    }
    let identity = connection.identity.clone();
    let policy = start.policy_name();
    let process_id = &ticket.info.process_id;
    let record = ProcessAudit::new(&server, &identity, &session.id, process_id, policy);
    tokio::spawn(async move {
        let started = server.engine().start(start, &session.snapshots).await;
        let outcome = started.as_ref().map(|started| &started.process);
        record.started(&ticket.info.argv, &ticket.info.cwd, outcome);
        match started {
            Ok(started) => {
                let result = result(&started.process);
                let answer = || responder.send(Ok(result));
                complete_start(server, session, ticket, started, record, answer);
            }
            Err(error) => ticket.fail(error.into(), |error| responder.send_error(error)),
        }
    });
}

/// Passes a started process to its session, sends the response and serves its network.
fn complete_start(
    server: ExecServer,
    session: Arc<Session>,
    ticket: StartTicket,
    started: NewProcess,
    record: ProcessAudit,
    answer: impl FnOnce(),
) {
    tracing::info!(
        session = session.id,
        process_id = ticket.info.process_id,
        pid = started.process.pid(),
        "process started"
    );
    let managed = match ticket.complete(started.process.clone(), answer) {
        Ok(managed) => managed,
        Err(process) => {
            process.terminate(requests::TerminationMethod::Now);
            return;
        }
    };
    // Runs after the response to the request, because no notification about the process may precede
    // it.
    let timeout = started.decision_timeout().unwrap_or_default();
    let served = started.serve(|| {
        Arc::new(ClientPolicyDecider {
            timeout,
            server: server.clone(),
            session: Arc::clone(&session),
            identity: record.identity().clone(),
            process_id: managed.info.process_id.clone(),
        })
    });
    let proxy = served.unwrap_or_else(|error| {
        let process_id = &managed.info.process_id;
        tracing::error!(process_id, %error, "cannot serve a process's network");
        managed.process.terminate(requests::TerminationMethod::Now);
        None
    });
    // A separate task: the one that started the process would keep the memory that a start needs
    // until the process ends.
    tokio::spawn(watch_end(server, session, managed, record, proxy));
}

/// Records the end of a process, then passes its record to the session.
async fn watch_end<P>(
    server: ExecServer,
    session: Arc<Session>,
    managed: Arc<SessionProcess>,
    record: ProcessAudit,
    proxy: Option<P>,
) {
    record.exited(&managed.process).await;
    drop(record);
    managed
        .process
        .wait_for(|log| log.close().map(|_| ()))
        .await;
    // Ends the connections that still use the proxy.
    drop(proxy);
    let retention = server.config().closed_retention;
    session.keep_closed(managed, retention);
}

/// Runs `job` on the process of a request, after earlier jobs for the same process.
fn with_process(
    call: CheckedRequest<'_>,
    process_id: &str,
    job: impl FnOnce(Arc<Connection>, Option<&Arc<SessionProcess>>, RequestResponder) + Send + 'static,
) {
    let (connection, responder) = (Arc::clone(call.connection), call.responder);
    call.session.with_process(process_id, move |managed| {
        job(connection, managed, responder)
    });
}

pub(crate) fn read(call: CheckedRequest<'_>, params: ReadParams) {
    let (id, session) = (params.process_id.clone(), params.session_id.clone());
    let job = move |connection: Arc<Connection>,
                    managed: Option<&Arc<SessionProcess>>,
                    mut responder: RequestResponder| {
        let Some(managed) = managed else {
            return responder.send_error(ApiError::unknown_process(&params.process_id));
        };
        let after = params.after_seq.unwrap_or(0);
        // Only reads of the session's own client free output; reads from other sessions do not.
        if params.session_id.is_none() {
            managed.acknowledge(after);
        }
        let wait = Duration::from_millis(params.wait_ms.unwrap_or(0));
        let max_bytes = params.max_bytes;
        let own = params.session_id.is_none();
        if requests::is_read_ready(&managed.process, after, wait) {
            let memory = requests::read_memory(&managed.process, after, max_bytes);
            let managed = Arc::clone(managed);
            let result = move || {
                let result = requests::read(&managed.process, after, max_bytes);
                note_end(&managed, own, &result);
                result
            };
            return send_output(&connection, responder, memory, result, EncodedOutput::read);
        }
        let waiting = match connection.wait(&mut responder) {
            Ok(waiting) => waiting,
            Err(error) => return responder.send_error(error),
        };
        let managed = Arc::clone(managed);
        let there = Arc::clone(&connection);
        connection.spawn(async move {
            requests::wait_for_new_data(&managed.process, after, wait).await;
            // The same output may wake many requests; responses are created only as memory for them
            // is available.
            let memory = requests::read_memory(&managed.process, after, max_bytes);
            let result = move || {
                let result = requests::read(&managed.process, after, max_bytes);
                note_end(&managed, own, &result);
                drop(waiting);
                result
            };
            send_output(&there, responder, memory, result, EncodedOutput::read);
        });
    };
    in_session(call, session.as_deref(), &id, job);
}

/// Sends a result with output as soon as there is memory for it; in pieces if it is large.
fn send_output<R: Serialize + Send + 'static>(
    connection: &Arc<Connection>,
    responder: RequestResponder,
    memory: OutputMemory,
    result: impl FnOnce() -> R + Send + 'static,
    in_pieces: fn(R) -> Result<EncodedOutput, ApiError>,
) {
    let OutputMemory { whole, output } = memory;
    if !connection.sends_in_pieces(whole as u64) || whole > MAX_MESSAGE_BYTES {
        return connection.with_memory(responder, whole, |responder| responder.send(Ok(result())));
    }
    let there = Arc::clone(connection);
    connection.with_memory(responder, PIECE_COST + output, move |responder| {
        let source = match in_pieces(result()) {
            Ok(source) => Box::new(source),
            Err(error) => return responder.send_error(error),
        };
        let connection = Arc::clone(&there);
        there.file_work(move || {
            responder.send_in_pieces((&connection.lane, &connection.closed), source);
        });
    });
}

/// Marks a closed process as read to its end, if its own client has read all output.
fn note_end(managed: &SessionProcess, own: bool, result: &ReadResult) {
    let read = result.next_seq.saturating_sub(1);
    if own && result.closed && !managed.process.with_log(|log| log.has_output_after(read)) {
        managed.note_read_to_end();
    }
}

pub(crate) fn write(call: CheckedRequest<'_>, params: WriteParams) {
    if params.write_id.is_empty() {
        let error = ApiError::invalid_params("writeId must not be empty");
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

pub(crate) fn write_status(responder: RequestResponder, status: WriteStatus) {
    responder.send(Ok(WriteResult { status }));
}

pub(crate) fn close_stdin(call: CheckedRequest<'_>, params: CloseStdinParams) {
    with_process(
        call,
        &params.process_id,
        |_, managed, responder| match managed {
            Some(managed) => managed.close_stdin(responder, write_status),
            None => write_status(responder, WriteStatus::UnknownProcess),
        },
    );
}

pub(crate) fn resize(call: CheckedRequest<'_>, params: ResizeParams) {
    let ResizeParams {
        process_id,
        rows,
        cols,
    } = params;
    let size = match request::size(TerminalSize { rows, cols }) {
        Ok(size) => size,
        Err(error) => return call.responder.send_error(error.into()),
    };
    with_process(call, &process_id.clone(), move |_, managed, responder| {
        let answer = match managed {
            None => Err(ApiError::unknown_process(&process_id)),
            Some(managed) => requests::resize(&managed.process, &process_id, size),
        };
        responder.send(answer);
    });
}

pub(crate) fn signal(call: CheckedRequest<'_>, params: SignalParams) {
    let (signal, scope) = (params.signal, params.scope.unwrap_or_default());
    let job = move |connection: Arc<Connection>,
                    managed: Option<&Arc<SessionProcess>>,
                    responder: RequestResponder| {
        let Some(process) = managed.map(|managed| managed.process.clone()) else {
            return responder.send(Ok(Empty {}));
        };
        connection.spawn(async move {
            responder.send(requests::signal(&process, signal, scope).await);
        });
    };
    in_session(call, params.session_id.as_deref(), &params.process_id, job);
}

/// [`with_process`], or [`with_process_of_any_session`] if a session is named.
fn in_session(
    call: CheckedRequest<'_>,
    session_id: Option<&str>,
    process_id: &str,
    job: impl FnOnce(Arc<Connection>, Option<&Arc<SessionProcess>>, RequestResponder) + Send + 'static,
) {
    match session_id {
        None => with_process(call, process_id, job),
        Some(session_id) => with_process_of_any_session(call, session_id, process_id, job),
    }
}

/// Like [`with_process`], for a process of any session: a client that may run commands may also end
/// any process, and a client with the scope to observe processes may observe all of them.
fn with_process_of_any_session(
    call: CheckedRequest<'_>,
    session_id: &str,
    process_id: &str,
    job: impl FnOnce(Arc<Connection>, Option<&Arc<SessionProcess>>, RequestResponder) + Send + 'static,
) {
    match call.connection.server.session(session_id) {
        Some(session) => {
            let managed = session.process(process_id);
            job(
                Arc::clone(call.connection),
                managed.as_ref(),
                call.responder,
            );
        }
        None => call.responder.send_error(unknown_session(session_id)),
    }
}

pub(crate) fn terminate(call: CheckedRequest<'_>, params: TerminateParams) {
    let mode = params.mode.unwrap_or_default();
    let wait = params.wait;
    let job = move |connection: Arc<Connection>,
                    managed: Option<&Arc<SessionProcess>>,
                    mut responder: RequestResponder| {
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
            return responder.send(Ok(requests::terminate(&managed.process, mode)));
        }
        let waiting = match connection.wait(&mut responder) {
            Ok(waiting) => waiting,
            Err(error) => return responder.send_error(error),
        };
        let process = managed.process.clone();
        // This task does not end with the connection: the process is ended in any case.
        tokio::spawn(async move {
            let result = requests::terminate_and_wait(&process, mode).await;
            drop(waiting);
            responder.send(Ok(result));
        });
    };
    in_session(call, params.session_id.as_deref(), &params.process_id, job);
}

pub(crate) fn wait(call: CheckedRequest<'_>, params: WaitParams) {
    let (id, session) = (params.process_id.clone(), params.session_id.clone());
    let job = move |connection: Arc<Connection>,
                    managed: Option<&Arc<SessionProcess>>,
                    mut responder: RequestResponder| {
        let Some(managed) = managed else {
            return responder.send_error(ApiError::unknown_process(&params.process_id));
        };
        let until = params.until.unwrap_or_default();
        let now = requests::wait_now(&managed.process, until);
        if let Some(result) = now {
            return responder.send(Ok(result));
        }
        let waiting = match connection.wait(&mut responder) {
            Ok(waiting) => waiting,
            Err(error) => return responder.send_error(error),
        };
        let managed = Arc::clone(managed);
        connection.spawn(async move {
            let timeout = params.timeout_ms.map(Duration::from_millis);
            let result = requests::wait(&managed.process, until, timeout).await;
            drop(waiting);
            responder.send(Ok(result));
        });
    };
    in_session(call, session.as_deref(), &id, job);
}

pub(crate) fn wait_for(call: CheckedRequest<'_>, params: WaitForParams) {
    let principal = Arc::clone(&call.connection.principal);
    let (id, session) = (params.process_id.clone(), params.session_id.clone());
    let job = move |connection: Arc<Connection>,
                    managed: Option<&Arc<SessionProcess>>,
                    mut responder: RequestResponder| {
        let Some(managed) = managed else {
            return responder.send_error(ApiError::unknown_process(&params.process_id));
        };
        let waiting = match connection.wait(&mut responder) {
            Ok(waiting) => waiting,
            Err(error) => return responder.send_error(error),
        };
        let managed = Arc::clone(managed);
        // The task ends with the connection.
        connection.spawn(async move {
            let after = params.after_seq.unwrap_or(0);
            let began = Instant::now();
            let conditions = match Conditions::prepare(params.any, &principal).await {
                Ok(conditions) => conditions,
                Err(error) => return responder.send_error(error.into()),
            };
            let timeout = params.timeout_ms.map(Duration::from_millis);
            let timeout = timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
            let result = conditions.wait(&managed.process, after, timeout).await;
            drop(waiting);
            responder.send(Ok(result));
        });
    };
    in_session(call, session.as_deref(), &id, job);
}

pub(crate) fn snapshot(call: CheckedRequest<'_>, params: SnapshotParams) {
    let (id, session) = (params.process_id, params.session_id);
    let unknown = ApiError::unknown_process(&id);
    let job = move |connection: Arc<Connection>,
                    managed: Option<&Arc<SessionProcess>>,
                    responder: RequestResponder| {
        let Some(managed) = managed else {
            return responder.send_error(unknown);
        };
        let process = managed.process.clone();
        let memory = requests::snapshot_memory(&process, params.max_bytes);
        let result = move || requests::snapshot(&process, params.max_bytes);
        send_output(
            &connection,
            responder,
            memory,
            result,
            EncodedOutput::snapshot,
        );
    };
    in_session(call, session.as_deref(), &id, job);
}

pub(crate) fn pause_output(call: CheckedRequest<'_>, params: PauseOutputParams) {
    let PauseOutputParams { process_id, paused } = params;
    with_process(call, &process_id.clone(), move |_, managed, responder| {
        let Some(managed) = managed else {
            return responder.send_error(ApiError::unknown_process(&process_id));
        };
        // The response comes first: a client that continues gets it before the next notification.
        responder.send(Ok(Empty {}));
        managed.pause_output(paused);
    });
}

pub(crate) fn list(call: CheckedRequest<'_>, params: ListParams) {
    let session = call.session;
    let sessions = if params.all {
        call.connection.server.all_sessions()
    } else {
        vec![session]
    };
    let mut listed = Vec::new();
    for session in sessions {
        let shown = params.all.then(|| session.id.clone());
        let processes = session.processes().into_iter();
        listed.extend(processes.map(|managed| (managed, shown.clone())));
    }
    let bytes = listed
        .iter()
        .map(|(managed, _)| requests::listed_bytes(&managed.info))
        .sum();
    let connection = call.connection;
    connection.with_memory(call.responder, bytes, move |responder| {
        let processes = listed
            .into_iter()
            .map(|(managed, shown)| requests::listed(&managed.info, &managed.process, shown))
            .collect();
        responder.send(Ok(ListResult { processes }));
    });
}
