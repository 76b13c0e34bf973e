//! Implementation of `process/*`.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use exec_server_engine::snapshot::SnapshotRequest;
use exec_server_engine::{ProcessNetwork, request};
use exec_server_executor::conditions::Conditions;
use exec_server_executor::log::Log;
use exec_server_executor::process::{SignalRecipients, TerminationMethod};
use exec_server_executor::{Process, ProcessSpec, report, signal as signals};
use exec_server_protocol::chunk::encoded_len;
use exec_server_protocol::method::Empty;
use exec_server_protocol::process::{
    CloseStdinParams, Delivery, ListParams, ListResult, ListedProcess, ReadParams, ReadResult,
    ResizeParams, SandboxType, SignalParams, SignalScope, SnapshotParams, StartParams, StartResult,
    Survivor, TerminalSize, TerminateMode, TerminateParams, TerminateResult, WaitForParams,
    WaitParams, WaitUntil, WriteParams, WriteResult, WriteStatus,
};
use exec_server_protocol::sandbox::{
    FilePermissions, NetworkPermission, PathAccess, Permissions, Sandbox,
};

use crate::ApiError;
use crate::connection::{Connection, RequestResponder};
use crate::dispatch::CheckedRequest;
use crate::follow::NotificationFamily;
use crate::network::ClientPolicyDecider;
use crate::process_audit::ProcessAudit;
use crate::server::ExecServer;
use crate::session::{
    ReserveResult, Session, SessionProcess, SessionProcessParts, unknown_session,
};

pub(crate) fn start(call: CheckedRequest<'_>, params: StartParams) {
    let session = call.session;
    let dialect = match params.delivery.unwrap_or_default() {
        Delivery::Push => NotificationFamily::Process,
        Delivery::Pull => NotificationFamily::ProcessPull,
    };
    let own = &call.connection.server.executor().config().environment;
    let mut spec = match request::spec(&params, own) {
        Ok(spec) => spec,
        Err(error) => return call.responder.send_error(error.into()),
    };
    let http = call.connection.server.http();
    let network = match ProcessNetwork::prepare(&params, &mut spec, http) {
        Ok(network) => network,
        Err(error) => {
            call.connection.server.metrics().sandbox_refusals.add(1);
            return call.responder.send_error(error.into());
        }
    };
    let snapshot = match SnapshotRequest::of(&params, &spec) {
        Ok(snapshot) => snapshot,
        Err(error) => return call.responder.send_error(error.into()),
    };
    let StartParams {
        process_id,
        argv,
        cwd,
        start_id,
        ..
    } = params;
    let id = process_id.clone();
    let started = |process: &Process| StartResult {
        process_id: id,
        // Reported as in the reference implementation: a process has a sandbox type if its request
        // names a policy, even one that allows everything.
        sandbox_type: Some(match process.enforcement() {
            Some(_) => SandboxType::LinuxSeccomp,
            None => SandboxType::None,
        }),
        enforcement: process.enforcement().cloned(),
    };
    let description = ProcessDescription {
        process_id,
        argv,
        cwd,
        dialect,
        start_id,
        snapshot,
        network,
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

/// Properties of a process that its session stores.
pub(crate) struct ProcessDescription {
    pub(crate) process_id: String,
    pub(crate) argv: Vec<String>,
    pub(crate) cwd: exec_server_protocol::PathUri,
    pub(crate) dialect: NotificationFamily,
    pub(crate) start_id: Option<String>,
    /// The shell snapshot that the process may start from.
    pub(crate) snapshot: Option<SnapshotRequest>,
    /// The managed network of the process.
    pub(crate) network: Option<ProcessNetwork>,
}

/// Starts a process and responds. Continues even if the connection ends. A repeated request with
/// the same start id starts no second process and gets the same response.
pub(crate) fn launch<R: serde::Serialize + Send + 'static>(
    connection: &Arc<Connection>,
    session: Arc<Session>,
    spec: ProcessSpec,
    description: ProcessDescription,
    responder: RequestResponder,
    result: impl FnOnce(&Process) -> R + Send + 'static,
) {
    let server = connection.server.clone();
    let limit = server.config().max_processes_per_session;
    let id = &description.process_id;
    match session.reserve(id, description.start_id.as_deref(), limit) {
        Ok(ReserveResult::New) => {}
        Ok(ReserveResult::Repeat) => {
            let (id, of) = (id.clone(), Arc::clone(&session));
            return session.with_process(&id.clone(), move |managed| match managed {
                Some(managed) => responder.send(Ok(result(&managed.process))),
                None => responder.send_error(of.failure(&id)),
            });
        }
        Err(error) => return responder.send_error(error),
    }
    if let Err(error) = server.accepts_processes(&session) {
        session.note_failure(id, error.clone());
        session.fill(id, None, || responder.send_error(error));
        return;
    }
    let identity = &connection.identity;
    let policy = spec.sandbox.as_ref().map(policy_name);
    let process_id = &description.process_id;
    // A managed network is enforced like a sandbox policy.
    let policy = policy.or(spec.network.as_ref().map(|_| "managed-network"));
    let record = ProcessAudit::new(&server, identity, &session.id, process_id, policy);
    let identity = identity.clone();
    tokio::spawn(async move {
        let ProcessDescription {
            process_id,
            argv,
            cwd,
            dialect,
            start_id,
            snapshot,
            network,
        } = description;
        let spec = match &snapshot {
            Some(wanted) => {
                let snapshots = &session.snapshots;
                snapshots.restore(server.executor(), spec, wanted).await
            }
            None => spec,
        };
        let outcome = server.executor().start(spec).await;
        record.started(&argv, &cwd, outcome.as_ref());
        let orphan = match outcome {
            Ok(process) => {
                tracing::info!(
                    session = session.id,
                    process_id,
                    pid = process.pid(),
                    "process started"
                );
                let result = result(&process);
                let parts = SessionProcessParts {
                    process,
                    argv,
                    cwd,
                    dialect,
                    start_id,
                };
                session.fill(&process_id, Some(parts), || responder.send(Ok(result)))
            }
            Err(error) => {
                let error = ApiError::from(error);
                session.note_failure(&process_id, error.clone());
                session.fill(&process_id, None, || responder.send_error(error))
            }
        };
        if let Some(process) = orphan {
            process.terminate(TerminationMethod::Now);
            return;
        }
        if let Some(managed) = session.process(&process_id) {
            // Runs after the response to the request, because no notification about the process may
            // precede it.
            let proxy = network.and_then(|network| {
                let authority = Arc::new(ClientPolicyDecider {
                    patience: network.decision_timeout().unwrap_or_default(),
                    server: server.clone(),
                    session: Arc::clone(&session),
                    identity,
                    process_id,
                });
                let served = network.serve(&managed.process, authority);
                if let Err(error) = &served {
                    tracing::error!(process_id = managed.id, %error, "cannot serve a process's network");
                    managed.process.terminate(TerminationMethod::Now);
                }
                served.ok()
            });
            // A separate task: this one would keep the memory that a start needs until the process
            // ends.
            tokio::spawn(watch_end(server, session, managed, record, proxy));
        }
    });
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
    session.retire(managed, retention);
}

/// The name of a policy in the audit log; the complete policy is only in the request.
fn policy_name(sandbox: &Sandbox) -> &'static str {
    let (name, network) = match &sandbox.permissions {
        Permissions::Disabled => return "disabled",
        Permissions::External { network } => (["external", "external+network"], network),
        Permissions::Managed {
            file_system: FilePermissions::Unrestricted,
            network,
        } => (["unrestricted", "unrestricted+network"], network),
        Permissions::Managed {
            file_system: FilePermissions::Restricted { entries, .. },
            network,
        } => {
            let writes = entries
                .iter()
                .any(|entry| entry.access == PathAccess::Write);
            let names = if writes {
                ["workspace-write", "workspace-write+network"]
            } else {
                ["read-only", "read-only+network"]
            };
            (names, network)
        }
    };
    name[usize::from(*network == NetworkPermission::Enabled)]
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
        let now = managed.process.with_log(|log| {
            (wait.is_zero() || report::has_news(log, after))
                .then(|| report::read(log, after, max_bytes))
        });
        if let Some(result) = now {
            note_end(managed, own, &result);
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
                .wait_for(|log| report::has_news(log, after).then_some(()));
            let _ = tokio::time::timeout(wait, news).await;
            // The same output may wake many requests; responses are created only as memory for them
            // is available.
            let bytes = managed.process.with_log(|log| log.retained_bytes());
            responder
                .reserve(encoded_len(usize::try_from(bytes).unwrap_or(0)) + 4096)
                .await;
            let result = managed
                .process
                .with_log(|log| report::read(log, after, max_bytes));
            note_end(&managed, own, &result);
            drop(waiting);
            responder.send(Ok(result));
        });
    };
    in_session(call, session.as_deref(), &id, job);
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
            Some(managed) => managed.close_stdin(responder),
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
                    ApiError::invalid_request(format!("process {process_id} {why}"))
                }),
        };
        responder.send(answer);
    });
}

pub(crate) fn signal(call: CheckedRequest<'_>, params: SignalParams) {
    let signal = signals::named(params.signal);
    let scope = match params.scope.unwrap_or_default() {
        SignalScope::Group => SignalRecipients::Group,
        SignalScope::Leader => SignalRecipients::Leader,
        SignalScope::Tree => SignalRecipients::Tree,
    };
    let job = move |connection: Arc<Connection>,
                    managed: Option<&Arc<SessionProcess>>,
                    responder: RequestResponder| {
        let Some(process) = managed.map(|managed| managed.process.clone()) else {
            return responder.send(Ok(Empty {}));
        };
        connection.spawn(async move {
            let sent = process.signal(signal, scope).await;
            let failed = |error| ApiError::internal(format!("failed to signal process: {error}"));
            responder.send(sent.map(|()| Empty {}).map_err(failed));
        });
    };
    in_session(call, params.session_id.as_deref(), &params.process_id, job);
}

/// [`with_process`], or [`elsewhere`] if a session is named.
fn in_session(
    call: CheckedRequest<'_>,
    session_id: Option<&str>,
    process_id: &str,
    job: impl FnOnce(Arc<Connection>, Option<&Arc<SessionProcess>>, RequestResponder) + Send + 'static,
) {
    match session_id {
        None => with_process(call, process_id, job),
        Some(session_id) => elsewhere(call, session_id, process_id, job),
    }
}

/// Like [`with_process`], for a process of any session: a client that may run commands may also end
/// any process, and a client with the scope to observe processes may observe all of them.
fn elsewhere(
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
    let end = match params.mode.unwrap_or_default() {
        TerminateMode::Force => TerminationMethod::Now,
        TerminateMode::Graceful { timeout_ms } => {
            TerminationMethod::Within(Duration::from_millis(timeout_ms))
        }
    };
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
        // This task does not end with the connection: the process is ended in any case.
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
        let done = move |log: &Log| match until {
            WaitUntil::Exited => log.exit().is_some(),
            WaitUntil::Closed => log.close().is_some(),
        };
        let now = managed
            .process
            .with_log(|log| done(log).then(|| report::wait(log, false)));
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
            let result = managed
                .process
                .with_log(|log| report::wait(log, !done(log)));
            responder.send(Ok(result));
        });
    };
    in_session(call, session.as_deref(), &id, job);
}

pub(crate) fn wait_for(call: CheckedRequest<'_>, params: WaitForParams) {
    let conditions = match Conditions::compile(&params.any) {
        Ok(conditions) => conditions,
        Err(error) => return call.responder.send_error(error.into()),
    };
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
            let timeout = params.timeout_ms.map(Duration::from_millis);
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
    let job = move |_, managed: Option<&Arc<SessionProcess>>, responder: RequestResponder| {
        let Some(managed) = managed else {
            return responder.send_error(unknown);
        };
        responder.send(Ok(managed
            .process
            .with_log(|log| report::snapshot(log, params.max_bytes))));
    };
    in_session(call, session.as_deref(), &id, job);
}

pub(crate) fn list(call: CheckedRequest<'_>, params: ListParams) {
    let session = call.session;
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

fn listed_process(managed: &SessionProcess, session_id: Option<String>) -> ListedProcess {
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
