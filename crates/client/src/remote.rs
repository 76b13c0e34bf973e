//! Process backend for a server, over a client session.
//!
//! Translates the traits into requests, and substitutes extensions that a server lacks. `route` and
//! `order` deliver the events.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::process::{
    CloseStdin, CloseStdinParams, Delivery, List, ListParams, ListedProcess, PauseOutput,
    PauseOutputParams, Read, ReadParams, ReadResult, Resize, ResizeParams, SandboxType, Signal,
    SignalName, SignalParams, SignalScope, Snapshot, SnapshotParams, SnapshotResult, Start,
    StartParams, TerminalSize, Terminate, TerminateMode, TerminateParams, TerminateResult, Wait,
    WaitFor, WaitForParams, WaitForResult, WaitParams, WaitResult, WaitUntil, Write, WriteParams,
    WriteResult, WriteStatus,
};
use exec_server_protocol::sandbox::EnforcementReport;
use exec_server_transport::CallError;
use exec_server_transport::peer::FirstCall;
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::backend::{ExecBackend, ExecProcess, ReadRequest, StartedProcess, WaitForRequest};
use crate::caller::{RequestSender, unique};
use crate::client::ExecServerClient;
use crate::error::{ExecServerError, Reply};
use crate::event::{EventSource, ExecProcessEvent, ExecProcessEvents};
use crate::extension;
use crate::follow::OutputReader;
use crate::network::{self, NetworkPolicyDecider};
use crate::options::millis;
use crate::route::{EndStatus, ProcessRoute, RouteRegistration};
use crate::session_connection::SessionConnection;

/// Bytes in one `process/write`; a larger write would delay other requests on the same connection.
const WRITE_BYTES: usize = 128 * 1024;

/// Maximum number of writes in flight, so that a large input does not wait for one response after
/// the other.
const WRITES: usize = 8;

/// Character that a terminal interprets as end of input, unless a program changed the setting.
const TERMINAL_EOF: &[u8] = b"\x04";

impl ExecBackend for ExecServerClient {
    fn start(&self, params: StartParams) -> Reply<'_, StartedProcess> {
        Box::pin(self.start_remote(params, None, None))
    }

    fn start_with_network_policy_decider(
        &self,
        params: StartParams,
        decider: Arc<dyn NetworkPolicyDecider>,
    ) -> Reply<'_, StartedProcess> {
        Box::pin(async move {
            let timeout = network::timeout(&params)?;
            let decider = Some((decider, timeout));
            self.start_remote(params, decider, None).await
        })
    }

    fn list(&self) -> Reply<'_, Vec<ListedProcess>> {
        Box::pin(async move {
            self.require(extension::LIST).await?;
            Ok(self.call::<List>(&ListParams::default()).await?.processes)
        })
    }
}

impl ExecServerClient {
    /// Starts a process, unless its start was sent already.
    pub(crate) async fn start_remote(
        &self,
        mut params: StartParams,
        decider: Option<(Arc<dyn NetworkPolicyDecider>, Duration)>,
        early_start: Option<(RouteRegistration, FirstCall)>,
    ) -> Result<StartedProcess, ExecServerError> {
        let (registration, early_start) = match early_start {
            Some((registration, early_start)) => (registration, Some(early_start)),
            None => (self.inner.routes.register(&params.process_id, 0)?, None),
        };
        if let Some(decider) = decider {
            registration.route.decided_by(decider);
        }
        let generation = self.inner.caller.line.generation();
        // With a start id the server can distinguish a repeated request from a new start, so a
        // start whose connection was lost can be sent again.
        match self.supports(extension::START_ID).await? {
            true => drop(params.start_id.get_or_insert_with(unique)),
            false => params.start_id = None,
        }
        let pull =
            params.delivery == Some(Delivery::Pull) && self.supports(extension::DELIVERY).await?;
        let states_evicted = self.supports(extension::READ_EVICTED).await?;
        let can_pause = self.supports(extension::PAUSE_OUTPUT).await?;
        registration.route.set_can_pause(can_pause);
        let (sender, receiver) = oneshot::channel();
        let client = self.clone();
        // Runs in a task that ends with its request: if the caller drops its future, the client
        // must still learn that a process was started, in order to terminate it.
        tokio::spawn(async move {
            let RequestSender { timeout, .. } = client.inner.caller;
            let repeat = params.start_id.is_some();
            let caller = &client.inner.caller;
            let result = async {
                if let Some(early_start) = early_start {
                    match caller.first_answer::<Start>(early_start).await {
                        // Sent again below, with the same start id.
                        Err(ExecServerError::Interrupted { .. }) if repeat => {}
                        answer => return answer,
                    }
                }
                let answer = caller.call_with_generation::<Start>(&params, Some(timeout), repeat);
                answer.await.map(|(started, _)| started)
            };
            let started = match result.await {
                Ok(started) => started,
                Err(error) => {
                    let may_have_started = matches!(
                        error,
                        ExecServerError::Timeout { .. } | ExecServerError::Interrupted { .. }
                    );
                    let _ = sender.send(Err(error));
                    if may_have_started {
                        terminate(&client, params.process_id).await;
                    }
                    return;
                }
            };
            let process = RemoteProcess::new(
                client,
                registration,
                ProcessDetails {
                    delivery: if pull { Delivery::Pull } else { Delivery::Push },
                    states_evicted,
                    tty: params.tty,
                    write_ids: WriteIds::of_new_process(),
                },
                generation,
            );
            let unclaimed = UnclaimedProcess {
                process: Some(process),
                sandbox_type: started.sandbox_type,
                enforcement: started.enforcement,
            };
            let _ = sender.send(Ok(unclaimed));
        });
        match receiver.await {
            Ok(answer) => answer?.claim(),
            Err(_) => Err(ExecServerError::Closed(
                "the runtime is shutting down".into(),
            )),
        }
    }

    /// Returns a handle of a process that already runs in this session, for example after resuming
    /// it.
    ///
    /// # Errors
    ///
    /// When there is no such process, or this client already has a handle of it.
    pub async fn attach(
        &self,
        request: AttachRequest,
    ) -> Result<Arc<dyn ExecProcess>, ExecServerError> {
        let AttachRequest {
            process_id,
            after_seq,
            delivery,
            tty,
        } = request;
        let registration = self.inner.routes.register(&process_id, after_seq)?;
        let generation = self.inner.caller.line.generation();
        let states_evicted = self.supports(extension::READ_EVICTED).await?;
        let can_pause = self.supports(extension::PAUSE_OUTPUT).await?;
        registration.route.set_can_pause(can_pause);
        let process = RemoteProcess::new(
            self.clone(),
            registration,
            ProcessDetails {
                delivery,
                states_evicted,
                tty,
                write_ids: WriteIds::of_attached_process(),
            },
            generation,
        );
        let follower = process.inner.follower();
        let read = follower.read(after_seq, Duration::ZERO).await?;
        follower.fill(after_seq, read, true);
        Ok(Arc::new(process))
    }
}

/// Parameters of [`ExecServerClient::attach`]: the process, and how it was started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttachRequest {
    /// Id of the process.
    pub process_id: String,
    /// Events continue after this sequence number; 0 for everything that is still retained.
    pub after_seq: u64,
    /// Whether the process was started with pushed or pulled output.
    pub delivery: Delivery,
    /// Whether the process was started with a terminal.
    pub tty: bool,
}

async fn terminate(client: &ExecServerClient, process_id: String) {
    let params = TerminateParams {
        process_id,
        ..TerminateParams::default()
    };
    if let Err(error) = client.call::<Terminate>(&params).await {
        tracing::warn!(process_id = params.process_id, %error, "cannot terminate a process");
    }
}

/// Started process that was not yet returned to the caller of `start`; dropping it terminates the
/// process.
struct UnclaimedProcess {
    process: Option<RemoteProcess>,
    sandbox_type: Option<SandboxType>,
    enforcement: Option<EnforcementReport>,
}

impl UnclaimedProcess {
    fn claim(mut self) -> Result<StartedProcess, ExecServerError> {
        let sandbox_type = self.sandbox_type;
        let enforcement = self.enforcement.take();
        match self.process.take() {
            Some(process) => Ok(StartedProcess {
                process: Arc::new(process),
                sandbox_type,
                enforcement,
            }),
            None => Err(ExecServerError::Closed("the process was abandoned".into())),
        }
    }
}

impl Drop for UnclaimedProcess {
    fn drop(&mut self) {
        if let Some(process) = self.process.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                terminate(&process.inner.client, process.process_id().to_owned()).await;
            });
        }
    }
}

/// Handle of a process on a server.
#[derive(Debug)]
struct RemoteProcess {
    /// Shared with the consumer of the events; each of the two keeps the process in the table.
    inner: Arc<RemoteShared>,
}

struct RemoteShared {
    client: ExecServerClient,
    registration: RouteRegistration,
    details: ProcessDetails,
    /// Locked while a write is in flight, which keeps writes in the order of their calls.
    writes: tokio::sync::Mutex<WriteIds>,
    /// Aborted when the process's last handle is dropped.
    _follower: AbortOnDropHandle<()>,
}

impl fmt::Debug for RemoteShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteShared")
            .field("process_id", &self.route().process_id())
            .field("details", &self.details)
            .finish_non_exhaustive()
    }
}

impl Drop for RemoteShared {
    fn drop(&mut self) {
        if self.route().is_paused()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (client, process_id) = (self.client.clone(), self.process_id());
            // This task ends with its request. Without the request, the process could not write its
            // output any more.
            runtime.spawn(async move {
                let params = PauseOutputParams {
                    process_id,
                    paused: false,
                };
                if let Err(error) = client.call::<PauseOutput>(&params).await {
                    tracing::debug!(process_id = params.process_id, %error, "cannot continue a process's output");
                }
            });
        }
    }
}

/// Facts about a process that follow from how it was started and from the server's extensions.
#[derive(Debug, Clone)]
struct ProcessDetails {
    delivery: Delivery,
    /// Whether the server reports evicted output in `evicted`.
    states_evicted: bool,
    tty: bool,
    write_ids: WriteIds,
}

/// Generator of write ids: a write that is repeated after a lost connection is not executed twice.
#[derive(Debug, Clone)]
struct WriteIds {
    prefix: String,
    next: u64,
}

impl WriteIds {
    fn of_new_process() -> Self {
        Self {
            prefix: String::new(),
            next: 1,
        }
    }

    /// The ids used by earlier handles are unknown, so the random prefix makes these ids distinct
    /// from them.
    fn of_attached_process() -> Self {
        Self {
            prefix: format!("{}-", uuid::Uuid::new_v4()),
            next: 1,
        }
    }

    fn draw(&mut self) -> String {
        let id = format!("{}{}", self.prefix, self.next);
        self.next += 1;
        id
    }
}

/// Writes in flight, in their order.
#[derive(Default)]
struct WritesInFlight(VecDeque<PendingWrite>);

type WriteOutcome = (WriteParams, Result<WriteResult, CallError>);

enum PendingWrite {
    Yet(BoxFuture<'static, WriteOutcome>),
    Done(Option<WriteOutcome>),
}

impl WritesInFlight {
    /// Sends a write after the others, without a timeout: the response may wait until the process
    /// reads its input.
    fn begin(&mut self, connection: &SessionConnection, params: WriteParams) {
        let peer = connection.peer.clone();
        self.0.push_back(PendingWrite::Yet(Box::pin(async move {
            let result = peer.call::<Write>(&params, None).await;
            (params, result)
        })));
    }

    /// Waits for the response to the oldest write.
    async fn next(&mut self) -> Option<WriteOutcome> {
        poll_fn(|context| {
            // Polls each future from the front: the first poll of a future sends its request.
            for waiting in &mut self.0 {
                if let PendingWrite::Yet(future) = waiting
                    && let Poll::Ready(written) = future.as_mut().poll(context)
                {
                    *waiting = PendingWrite::Done(Some(written));
                }
            }
            match self.0.front_mut() {
                None => Poll::Ready(None),
                Some(PendingWrite::Yet(_)) => Poll::Pending,
                Some(PendingWrite::Done(written)) => {
                    let written = written.take();
                    self.0.pop_front();
                    Poll::Ready(written)
                }
            }
        })
        .await
    }
}

impl RemoteShared {
    fn route(&self) -> &Arc<ProcessRoute> {
        &self.registration.route
    }

    fn follower(&self) -> OutputReader {
        let generation = self.client.inner.caller.line.generation();
        follower(
            &self.client,
            self.route(),
            self.details.states_evicted,
            generation,
        )
    }

    fn process_id(&self) -> String {
        self.route().process_id().to_owned()
    }

    async fn write(&self, bytes: Bytes) -> Result<WriteStatus, ExecServerError> {
        let mut ids = self.writes.lock().await;
        let caller = &self.client.inner.caller;
        let mut rest = bytes;
        let mut draw = || {
            let chunk = rest.split_to(rest.len().min(WRITE_BYTES));
            let params = WriteParams {
                process_id: self.process_id(),
                chunk: chunk.into(),
                write_id: ids.draw(),
            };
            (params, rest.is_empty())
        };
        let mut last = false;
        while !last {
            let connection = caller.line.ready().await?;
            let mut under_way = WritesInFlight::default();
            let mut again = Vec::new();
            loop {
                while !last && again.is_empty() && under_way.0.len() < WRITES {
                    let (params, is_last) = draw();
                    last = is_last;
                    under_way.begin(&connection, params);
                }
                match under_way.next().await {
                    None => break,
                    Some((_, Ok(result))) if result.status == WriteStatus::Accepted => {}
                    Some((_, Ok(result))) => return Ok(result.status),
                    // The server may or may not have received this write, and the same holds for
                    // the writes after it.
                    Some((params, Err(CallError::Closed(_) | CallError::Unsent(_)))) => {
                        again.push(params);
                    }
                    Some((_, Err(error))) => return Err(error.into()),
                }
            }
            // Sends the writes again in order and with the same ids, by which the server recognizes
            // those that it has executed.
            for params in again {
                let result = caller.call_unbounded::<Write>(&params).await?;
                if result.status != WriteStatus::Accepted {
                    return Ok(result.status);
                }
            }
        }
        Ok(WriteStatus::Accepted)
    }

    async fn can_close_stdin(&self) -> Result<bool, ExecServerError> {
        Ok(self.details.tty || self.client.supports(extension::CLOSE_STDIN).await?)
    }

    async fn close_stdin(&self) -> Result<WriteStatus, ExecServerError> {
        if !self.client.supports(extension::CLOSE_STDIN).await? {
            if self.details.tty {
                return self.write(Bytes::from_static(TERMINAL_EOF)).await;
            }
            return Err(ExecServerError::Unsupported(extension::CLOSE_STDIN));
        }
        // Waits for all earlier writes.
        let _writes = self.writes.lock().await;
        let params = CloseStdinParams {
            process_id: self.process_id(),
        };
        let caller = &self.client.inner.caller;
        let before = caller.line.generation();
        let closing = caller.call_with_generation::<CloseStdin>(&params, None, true);
        let (result, generation) = closing.await?;
        // If the request was repeated, the first one may have closed standard input.
        let repeated = generation != before;
        Ok(match result.status {
            WriteStatus::StdinClosed if repeated => WriteStatus::Accepted,
            status => status,
        })
    }

    async fn signal(&self, signal: SignalName, scope: SignalScope) -> Result<(), ExecServerError> {
        let plain = signal == SignalName::Interrupt && scope == SignalScope::Group;
        if !plain && !self.client.supports(extension::SIGNAL_SCOPE).await? {
            if signal == SignalName::Kill && scope == SignalScope::Group {
                // `process/terminate` kills the group on servers without this extension.
                let process_id = self.process_id();
                let params = TerminateParams {
                    process_id,
                    ..TerminateParams::default()
                };
                self.client.call::<Terminate>(&params).await?;
                return Ok(());
            }
            return Err(ExecServerError::Unsupported(extension::SIGNAL_SCOPE));
        }
        let params = SignalParams {
            process_id: self.process_id(),
            signal,
            scope: (scope != SignalScope::Group).then_some(scope),
            session_id: None,
        };
        // Programs count most signals, so sending them twice is not harmless; these three are
        // idempotent.
        let repeat = matches!(
            signal,
            SignalName::Kill | SignalName::Stop | SignalName::Continue
        );
        let RequestSender { timeout, .. } = self.client.inner.caller;
        let caller = &self.client.inner.caller;
        caller
            .call_with_generation::<Signal>(&params, Some(timeout), repeat)
            .await?;
        Ok(())
    }

    async fn terminate(
        &self,
        mode: TerminateMode,
        wait: bool,
    ) -> Result<TerminateResult, ExecServerError> {
        let grace = match mode {
            TerminateMode::Graceful { timeout_ms } => Some(Duration::from_millis(timeout_ms)),
            TerminateMode::Force => None,
        };
        let mut was_running = false;
        let mut params = TerminateParams {
            process_id: self.process_id(),
            ..TerminateParams::default()
        };
        if let Some(grace) = grace {
            if self.client.supports(extension::TERMINATE_MODE).await? {
                params.mode = Some(mode);
            } else if self.route().status().borrow().exit.is_none() {
                // Servers without graceful termination can still send an interrupt.
                self.signal(SignalName::Interrupt, SignalScope::Group)
                    .await?;
                was_running = true;
                self.wait_for_notifications(WaitUntil::Exited, Some(grace))
                    .await?;
            }
        }
        params.wait = wait && self.client.supports(extension::TERMINATE_WAIT).await?;
        let mut result = self
            .client
            .call_waiting::<Terminate>(&params, grace.unwrap_or_default())
            .await?;
        result.running |= was_running;
        if wait && !params.wait {
            // The server cannot report that the process tree has ended. The close of the output is
            // the closest substitute; `gone` stays unset.
            self.wait_for_notifications(WaitUntil::Closed, Some(self.client.inner.caller.timeout))
                .await?;
        }
        Ok(result)
    }

    async fn wait(
        &self,
        until: WaitUntil,
        timeout: Option<Duration>,
    ) -> Result<WaitResult, ExecServerError> {
        let known = is_over(&self.route().status().borrow(), until);
        if known || !self.client.supports(extension::WAIT).await? {
            return self.wait_for_notifications(until, timeout).await;
        }
        let caller = &self.client.inner.caller;
        let end = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let params = WaitParams {
                process_id: self.process_id(),
                until: Some(until),
                timeout_ms: left.map(millis),
                session_id: None,
            };
            let limit = left.map(|left| caller.timeout.saturating_add(left));
            match caller
                .call_with_generation::<Wait>(&params, limit, false)
                .await
            {
                // The request is sent again with the remaining time.
                Err(ExecServerError::Interrupted { .. }) => {}
                answer => return Ok(answer?.0),
            }
        }
    }

    /// Waits for notifications of the process instead of sending a request.
    async fn wait_for_notifications(
        &self,
        until: WaitUntil,
        timeout: Option<Duration>,
    ) -> Result<WaitResult, ExecServerError> {
        let mut status = self.route().status();
        let finished = status.wait_for(|status| is_over(status, until) || status.failure.is_some());
        match timeout {
            Some(timeout) => drop(tokio::time::timeout(timeout, finished).await),
            None => drop(finished.await),
        }
        let status = self.route().status().borrow().clone();
        let over = is_over(&status, until);
        if let Some(failure) = status.failure.filter(|_| !over) {
            return Err(failure.into());
        }
        let exited = status.exit.is_some();
        let exit = status.exit.unwrap_or_default();
        Ok(WaitResult {
            exited,
            exit_code: exited.then_some(exit.exit_code),
            signal: exit.signal,
            closed: status.closed,
            timed_out: exit.timed_out,
            sandbox_denied: exit.sandbox_denied.unwrap_or(false),
            wait_timed_out: !over,
        })
    }
}

fn is_over(status: &EndStatus, until: WaitUntil) -> bool {
    status.closed || (until == WaitUntil::Exited && status.exit.is_some())
}

fn follower(
    client: &ExecServerClient,
    route: &Arc<ProcessRoute>,
    states_evicted: bool,
    generation: u64,
) -> OutputReader {
    OutputReader {
        generation,
        route: Arc::clone(route),
        caller: client.inner.caller.clone(),
        repair_delay: client.inner.repair_delay,
        states_evicted,
    }
}

impl RemoteProcess {
    /// Follows a process, starting with the connection of `generation`.
    fn new(
        client: ExecServerClient,
        registration: RouteRegistration,
        details: ProcessDetails,
        generation: u64,
    ) -> Self {
        let route = &registration.route;
        let follower = follower(&client, route, details.states_evicted, generation);
        let task = match details.delivery {
            Delivery::Push => tokio::spawn(follower.repair()),
            Delivery::Pull => tokio::spawn(follower.pull()),
        };
        let writes = tokio::sync::Mutex::new(details.write_ids.clone());
        let _follower = AbortOnDropHandle::new(task);
        Self {
            inner: Arc::new(RemoteShared {
                client,
                registration,
                details,
                writes,
                _follower,
            }),
        }
    }
}

impl ExecProcess for RemoteProcess {
    fn process_id(&self) -> &str {
        self.inner.route().process_id()
    }

    fn events(&self) -> Result<ExecProcessEvents, ExecServerError> {
        if !self.inner.route().attach() {
            return Err(ExecServerError::EventsTaken(self.inner.process_id()));
        }
        Ok(ExecProcessEvents::new(RemoteEvents(Arc::clone(
            &self.inner,
        ))))
    }

    fn read(&self, request: ReadRequest) -> Reply<'_, ReadResult> {
        Box::pin(async move {
            let params = ReadParams {
                process_id: self.inner.process_id(),
                after_seq: Some(request.after_seq),
                max_bytes: request.max_bytes,
                wait_ms: Some(millis(request.wait)),
                session_id: None,
            };
            self.inner
                .client
                .call_waiting::<Read>(&params, request.wait)
                .await
        })
    }

    fn write(&self, bytes: Bytes) -> Reply<'_, WriteStatus> {
        Box::pin(self.inner.write(bytes))
    }

    fn can_close_stdin(&self) -> Reply<'_, bool> {
        Box::pin(self.inner.can_close_stdin())
    }

    fn close_stdin(&self) -> Reply<'_, WriteStatus> {
        Box::pin(self.inner.close_stdin())
    }

    fn resize(&self, size: TerminalSize) -> Reply<'_, ()> {
        Box::pin(async move {
            let client = &self.inner.client;
            client.require(extension::RESIZE).await?;
            let TerminalSize { rows, cols } = size;
            let params = ResizeParams {
                process_id: self.inner.process_id(),
                rows,
                cols,
            };
            client.call::<Resize>(&params).await?;
            Ok(())
        })
    }

    fn signal(&self, signal: SignalName, scope: SignalScope) -> Reply<'_, ()> {
        Box::pin(self.inner.signal(signal, scope))
    }

    fn terminate(&self, mode: TerminateMode, wait: bool) -> Reply<'_, TerminateResult> {
        Box::pin(self.inner.terminate(mode, wait))
    }

    fn wait(&self, until: WaitUntil, timeout: Option<Duration>) -> Reply<'_, WaitResult> {
        Box::pin(self.inner.wait(until, timeout))
    }

    fn wait_for(&self, request: WaitForRequest) -> Reply<'_, WaitForResult> {
        Box::pin(async move {
            let client = &self.inner.client;
            client.require(extension::WAIT_FOR).await?;
            let params = WaitForParams {
                process_id: self.inner.process_id(),
                any: request.any,
                after_seq: Some(request.after_seq),
                timeout_ms: request.timeout.map(millis),
                session_id: None,
            };
            match request.timeout {
                Some(timeout) => client.call_waiting::<WaitFor>(&params, timeout).await,
                None => client.inner.caller.call_unbounded::<WaitFor>(&params).await,
            }
        })
    }

    fn snapshot(&self, max_bytes: Option<u64>) -> Reply<'_, SnapshotResult> {
        Box::pin(async move {
            let client = &self.inner.client;
            client.require(extension::SNAPSHOT).await?;
            let params = SnapshotParams {
                process_id: self.inner.process_id(),
                max_bytes,
                session_id: None,
            };
            client.call::<Snapshot>(&params).await
        })
    }
}

/// Event source of the consumer.
#[derive(Debug)]
struct RemoteEvents(Arc<RemoteShared>);

impl EventSource for RemoteEvents {
    fn recv(&mut self) -> BoxFuture<'_, Option<ExecProcessEvent>> {
        Box::pin(self.0.route().recv())
    }
}

impl Drop for RemoteEvents {
    fn drop(&mut self) {
        self.0.route().detach();
    }
}
