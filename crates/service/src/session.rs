//! Sessions: groups of processes, each driven by one connection at a time.
//!
//! ```text
//!            attach                 connection ends
//! (new) ──► attached ◄──────────► detached ── grace over, or end ──► ended, processes killed
//!                       resume
//! ```

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_engine::ProcessInfo;
use exec_server_engine::process::{InputWriteResult, Process, write_status};
use exec_server_engine::snapshot::Snapshots;
use exec_server_protocol::process::WriteStatus;
use exec_server_sync::Mutex;
use subtle::ConstantTimeEq as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::ApiError;
use crate::auth::ClientIdentity;
use crate::follow::{LogFollower, NotificationFamily};
use crate::outbox::Outbox;
use crate::responder::RequestResponder;
use crate::server_requests::ServerRequests;

/// Ids of accepted writes that are remembered, so that a repeated write is not written twice.
const REMEMBERED_WRITES: usize = 4096;

/// A session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: String,
    /// The identity that opened the session; only the same identity can resume it.
    owner: ClientIdentity,
    /// The principal whose share it uses; `None` if the server has one client only.
    principal: Option<Arc<str>>,
    state: Mutex<SessionState>,
    table: Mutex<ProcessRecords>,
    /// When the session was last attached to a connection, or when it ended; `None` while it waits
    /// for its client.
    wait_attached: watch::Sender<Option<Instant>>,
    /// Shell snapshots that its processes may start from.
    pub(crate) snapshots: Snapshots,
}

#[derive(Debug)]
struct SessionState {
    driver: Option<SessionDriver>,
    /// Proves that a client drove the session last. With it, the client can resume the session
    /// while its old connection is still attached: that connection may be dead without the server
    /// having noticed.
    resume_key: String,
    /// Counts attachments, so that a timer can check whether its detachment is still the current
    /// one.
    attachments: u64,
    grace: Duration,
    /// When its connection ended.
    detached: Option<Instant>,
    ended: bool,
}

/// The connection that drives a session.
#[derive(Debug, Clone)]
pub(crate) struct SessionDriver {
    pub(crate) outbox: Arc<Outbox>,
    /// Cancelled to end the connection.
    pub(crate) closed: CancellationToken,
    pub(crate) last_received: Arc<LastActivity>,
    /// Pending server requests of the connection.
    pub(crate) server_requests: Arc<ServerRequests>,
    /// The authenticated client.
    pub(crate) identity: ClientIdentity,
    /// The principal whose share the session uses; `None` if there is no other client.
    pub(crate) principal: Option<Arc<str>>,
}

/// When a connection last received a message.
#[derive(Debug)]
pub(crate) struct LastActivity {
    start: Instant,
    millis: AtomicU64,
}

impl LastActivity {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            millis: AtomicU64::new(0),
        }
    }

    pub(crate) fn now(&self) {
        let millis = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.millis.store(millis, Ordering::Relaxed);
    }

    fn silence(&self) -> Duration {
        let last_received = Duration::from_millis(self.millis.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(last_received)
    }
}

#[derive(Debug, Default)]
struct ProcessRecords {
    slots: HashMap<String, ProcessRecord>,
    /// Number of processes ever started; numbers them in the order of their starts.
    started: u64,
    /// Records of processes whose log has ended, in the order of their ends. They stay readable for
    /// the configured time, unless new processes need their slots or their bytes.
    closed: VecDeque<ClosedProcess>,
    /// Whether a task is removing expired records from `closed`.
    sweeping: bool,
}

/// The record of a process whose log has ended.
#[derive(Debug)]
struct ClosedProcess {
    process: Arc<SessionProcess>,
    at: Instant,
    /// How long the record stays once the log has ended and the session has a connection.
    retention: Duration,
}

enum ProcessRecord {
    Starting(StartingProcess),
    Started(Arc<SessionProcess>),
}

/// A process that is being started.
#[derive(Default)]
struct StartingProcess {
    /// Jobs for this process that have arrived during the start, in order.
    jobs: VecDeque<ProcessJob>,
    /// The client's id of the start request, to recognize a repeated one.
    start_id: Option<String>,
    /// Why the start failed.
    failure: Option<ApiError>,
}

/// Result of reserving a process id.
#[derive(Debug)]
pub(crate) enum ReserveResult {
    /// The id was free and is now reserved.
    New(StartTicket),
    /// The same start request has reserved the id before.
    Repeat(ProcessInfo),
}

/// Reserved id of a process that is being started. Dropping it frees the id.
#[derive(Debug)]
pub(crate) struct StartTicket {
    session: Arc<Session>,
    pub(crate) info: ProcessInfo,
    dialect: NotificationFamily,
    /// Whether the start has ended.
    completed: bool,
}

impl std::fmt::Debug for ProcessRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Starting(starting) => write!(f, "Starting({} waiting)", starting.jobs.len()),
            Self::Started(managed) => managed.fmt(f),
        }
    }
}

/// A job for a process; gets `None` if the process does not exist.
type ProcessJob = Box<dyn FnOnce(Option<&Arc<SessionProcess>>) + Send>;

/// A process of a session.
#[derive(Debug)]
pub(crate) struct SessionProcess {
    pub(crate) info: ProcessInfo,
    pub(crate) process: Process,
    pub(crate) dialect: NotificationFamily,
    /// Number of the process in the order of starts.
    pub(crate) number: u64,
    input: Mutex<InputQueue>,
    /// Whether a client has read the output to its end.
    read_to_end: AtomicBool,
    /// Whether the client has paused the notifications.
    is_paused: AtomicBool,
    follower: Mutex<Option<Arc<LogFollower>>>,
}

/// Writes to the stdin of one process, in order of arrival.
#[derive(Debug, Default)]
struct InputQueue {
    /// Writes that wait for the child to read; a task processes the first one.
    waiting: VecDeque<InputWrite>,
    /// Hashes of accepted write ids, oldest first.
    recent: VecDeque<u64>,
    accepted: HashSet<u64>,
    hasher: RandomState,
}

/// A write or the end of stdin, with the responder of its request.
#[derive(Debug)]
pub(crate) enum InputWrite {
    Data {
        data: Bytes,
        id: Option<u64>,
        responder: RequestResponder,
        status: WriteResponder,
    },
    End {
        responder: RequestResponder,
        status: WriteResponder,
    },
}

/// Function that sends the outcome of a write as a response.
pub(crate) type WriteResponder = fn(RequestResponder, WriteStatus);

impl Session {
    pub(crate) fn new(grace: Duration, driver: SessionDriver, snapshots: Snapshots) -> Self {
        let (id, resume_key) = new_names();
        let owner = driver.identity.clone();
        let principal = driver.principal.clone();
        let state = SessionState {
            driver: Some(driver),
            resume_key,
            attachments: 1,
            grace,
            detached: None,
            ended: false,
        };
        Self {
            id,
            owner,
            principal,
            state: Mutex::new(state),
            table: Mutex::default(),
            wait_attached: watch::Sender::new(Some(Instant::now())),
            snapshots,
        }
    }

    /// The connection that drives the session, if there is one.
    pub(crate) fn driver(&self) -> Option<SessionDriver> {
        self.state.lock().driver.clone()
    }

    /// The principal whose share the session uses; `None` if the server has one client only.
    pub(crate) fn principal(&self) -> Option<&Arc<str>> {
        self.principal.as_ref()
    }

    /// Since when the session waits for its client, if it has no live process.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let detached = self.state.lock().detached?;
        (self.live_processes() == 0).then_some(detached)
    }

    /// Number of processes that run or are being started.
    pub(crate) fn live_processes(&self) -> usize {
        let table = self.table.lock();
        let live = table.slots.values().filter(|slot| match slot {
            ProcessRecord::Starting(_) => true,
            ProcessRecord::Started(managed) => {
                managed.process.with_log(|log| log.close().is_none())
            }
        });
        live.count()
    }

    /// Bytes of output that its processes retain.
    pub(crate) fn retained_bytes(&self) -> u64 {
        let processes = self.processes();
        let bytes = processes
            .iter()
            .map(|managed| managed.process.with_log(|log| log.retained_bytes()));
        bytes.sum()
    }

    /// The key that lets the client resume the session while its old connection is attached.
    pub(crate) fn resume_key(&self) -> String {
        self.state.lock().resume_key.clone()
    }

    /// Attaches `driver` to the session if the session has no connection, if its connection has
    /// been silent for `silence`, or if `key` proves that the client is the same.
    pub(crate) fn attach(
        &self,
        driver: SessionDriver,
        key: Option<&str>,
        grace: Option<Duration>,
        silence: Duration,
    ) -> Result<Duration, ApiError> {
        let mut state = self.state.lock();
        let identity = &driver.identity;
        // A client with fewer scopes than the owner could use the session only in part, so it is
        // refused.
        let owned = identity.is_same(&self.owner) && identity.scopes.include(self.owner.scopes);
        if state.ended || !owned {
            return Err(unknown_session(&self.id));
        }
        let same = key.is_some_and(|key| same_key(key, &state.resume_key));
        if let Some(current) = &state.driver {
            if !same && current.last_received.silence() < silence {
                return Err(ApiError::already_attached(&self.id));
            }
            current.closed.cancel();
        }
        if !same {
            // A different client attaches, so the key of the previous one becomes invalid.
            state.resume_key = new_key();
        }
        self.wait_attached.send_replace(Some(Instant::now()));
        state.driver = Some(driver);
        state.detached = None;
        state.attachments += 1;
        state.grace = grace.unwrap_or(state.grace);
        let granted = state.grace;
        drop(state);
        if !same {
            // The other client does not know which processes were paused.
            for managed in self.processes() {
                managed.pause_output(false);
            }
        }
        Ok(granted)
    }

    /// Detaches the session from the connection behind `outbox`; returns how long to wait for the
    /// client, and the number of this detachment. `None` if another connection has taken over.
    pub(crate) fn detach(&self, outbox: &Arc<Outbox>) -> Option<(Duration, u64)> {
        let mut state = self.state.lock();
        // After a takeover, the session belongs to the new connection.
        state
            .driver
            .take_if(|driver| Arc::ptr_eq(&driver.outbox, outbox))?;
        state.detached = Some(Instant::now());
        let absence = (state.grace, state.attachments);
        self.wait_attached.send_replace(None);
        drop(state);
        for managed in self.processes() {
            managed.unfollow();
        }
        Some(absence)
    }

    /// Waits until the session is attached again or has ended.
    pub(crate) async fn wait_attached(&self) {
        // Cannot fail: `self` owns the sender.
        let _ = self
            .wait_attached
            .subscribe()
            .wait_for(Option::is_some)
            .await;
    }

    /// Whether no connection has attached since that detachment.
    pub(crate) fn is_still_absent(&self, absence: u64) -> bool {
        let state = self.state.lock();
        state.driver.is_none() && state.attachments == absence
    }

    /// Marks the session as ended; returns its processes, which the caller must kill. `None` if it
    /// has ended before.
    pub(crate) fn end(&self) -> Option<Vec<Process>> {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.ended, true) {
            return None;
        }
        state.driver = None;
        self.wait_attached.send_replace(Some(Instant::now()));
        drop(state);
        let (slots, closed) = {
            let mut table = self.table.lock();
            let slots: Vec<ProcessRecord> = table.slots.drain().map(|(_, slot)| slot).collect();
            (slots, std::mem::take(&mut table.closed))
        };
        drop(closed);
        let mut processes = self.snapshots.end();
        for slot in slots {
            match slot {
                ProcessRecord::Started(managed) => {
                    managed.unfollow();
                    // Releases the process if it is blocked because its output was not read.
                    managed.process.release();
                    processes.push(managed.process.clone());
                }
                ProcessRecord::Starting(starting) => {
                    starting.jobs.into_iter().for_each(|job| job(None))
                }
            }
        }
        Some(processes)
    }

    /// Sends notifications of all processes to the driver, from now on.
    pub(crate) fn follow_all(&self) {
        let outbox = self
            .state
            .lock()
            .driver
            .as_ref()
            .map(|driver| Arc::clone(&driver.outbox));
        if let Some(outbox) = outbox {
            for managed in self.processes() {
                managed.follow(None, &outbox);
            }
        }
    }

    /// Reserves an id for a process that is about to be started, unless the same request has done
    /// so.
    ///
    /// `limit` bounds live processes together with records of closed ones that the client has not
    /// received completely. Records that it has received are removed as needed, the oldest first.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        info: ProcessInfo,
        dialect: NotificationFamily,
        limit: usize,
    ) -> Result<ReserveResult, ApiError> {
        let removed;
        let (id, start_id) = (&info.process_id, info.start_id.as_deref());
        let mut table = self.table.lock();
        if let Some(slot) = table.slots.get(id) {
            let known = match slot {
                ProcessRecord::Starting(starting) => starting.start_id.as_deref(),
                ProcessRecord::Started(managed) => managed.info.start_id.as_deref(),
            };
            if start_id.is_some() && start_id == known {
                return Ok(ReserveResult::Repeat(info));
            }
            let message = format!("process ID already exists: {id}");
            return Err(ApiError::invalid_request(message));
        }
        removed = if table.slots.len() < limit {
            None
        } else if let Some(oldest) = table.remove_oldest_delivered() {
            Some(oldest)
        } else {
            let message = format!("limit of {limit} processes per session reached");
            return Err(ApiError::invalid_request(message));
        };
        let starting = StartingProcess {
            start_id: start_id.map(str::to_owned),
            ..StartingProcess::default()
        };
        table
            .slots
            .insert(id.clone(), ProcessRecord::Starting(starting));
        drop(table);
        // The log of the removed process is freed after the table was unlocked.
        drop(removed);
        Ok(ReserveResult::New(StartTicket {
            session: Arc::clone(self),
            info,
            dialect,
            completed: false,
        }))
    }

    /// Removes the oldest record of a closed process that the client has received completely;
    /// returns whether there was one.
    pub(crate) fn drop_oldest_delivered(&self) -> bool {
        let removed = self.table.lock().remove_oldest_delivered();
        removed.is_some()
    }

    /// The error for a job whose process could not be started.
    pub(crate) fn failure(&self, id: &str) -> ApiError {
        match self.table.lock().slots.get(id) {
            Some(ProcessRecord::Starting(starting)) => starting.failure.clone(),
            _ => None,
        }
        .unwrap_or_else(|| ApiError::unknown_process(id))
    }

    /// Ends a start: stores the process in its slot and runs the jobs that have waited for it.
    ///
    /// Without a process the id becomes free again. Returns whether the slot still existed: it does
    /// not if the session has ended in the meantime.
    fn end_start(&self, id: &str, managed: Option<&Arc<SessionProcess>>) -> bool {
        let followed = managed.and_then(|managed| self.follow_driver(managed, None));
        loop {
            let mut table = self.table.lock();
            let Some(ProcessRecord::Starting(StartingProcess { jobs, .. })) =
                table.slots.get_mut(id)
            else {
                return false;
            };
            // The slot is filled only when no jobs wait, so that new jobs do not overtake earlier
            // ones.
            let Some(job) = jobs.pop_front() else {
                let Some(managed) = managed else {
                    table.slots.remove(id);
                    return true;
                };
                table
                    .slots
                    .insert(id.to_owned(), ProcessRecord::Started(Arc::clone(managed)));
                drop(table);
                // The connection may have changed in the meantime, before it could follow this
                // process.
                self.follow_driver(managed, followed.as_ref());
                return true;
            };
            drop(table);
            job(managed);
        }
    }

    /// Subscribes the driver's connection to a new process, unless `already` is its outbox.
    /// Returns the outbox of the driver.
    fn follow_driver(
        &self,
        managed: &SessionProcess,
        already: Option<&Arc<Outbox>>,
    ) -> Option<Arc<Outbox>> {
        let state = self.state.lock();
        let current = state
            .driver
            .as_ref()
            .map(|driver| Arc::clone(&driver.outbox));
        match (&current, already) {
            (Some(current), Some(already)) if Arc::ptr_eq(current, already) => {}
            (Some(current), _) => managed.follow(Some(0), current),
            (None, _) => managed.unfollow(),
        }
        current
    }

    /// Runs a job on a process: now, or after the start if the process is being started.
    pub(crate) fn with_process(
        &self,
        id: &str,
        job: impl FnOnce(Option<&Arc<SessionProcess>>) + Send + 'static,
    ) {
        let managed = match self.table.lock().slots.get_mut(id) {
            None => None,
            Some(ProcessRecord::Started(managed)) => Some(Arc::clone(managed)),
            Some(ProcessRecord::Starting(starting)) => {
                starting.jobs.push_back(Box::new(job));
                return;
            }
        };
        job(managed.as_ref());
    }

    /// Keeps the record of a process whose log has ended for `retention`, counted from now or, if
    /// the session is detached, from the next attachment.
    pub(crate) fn keep_closed(self: &Arc<Self>, process: Arc<SessionProcess>, retention: Duration) {
        let mut table = self.table.lock();
        if !table.holds(&process) {
            return;
        }
        table.closed.push_back(ClosedProcess {
            process,
            at: Instant::now(),
            retention,
        });
        if !std::mem::replace(&mut table.sweeping, true) {
            tokio::spawn(Arc::clone(self).sweep());
        }
    }

    /// Removes expired records of closed processes; ends when none is left.
    async fn sweep(self: Arc<Self>) {
        /// Minimum time between two checks, because many records expire together.
        const PAUSE: Duration = Duration::from_millis(50);
        let mut wait_attached = self.wait_attached.subscribe();
        loop {
            let since = *wait_attached.borrow_and_update();
            let (expired, due) = {
                let mut table = self.table.lock();
                let expired = since.map(|since| table.remove_expired(since, Instant::now()));
                let Some(first) = table.closed.front() else {
                    table.sweeping = false;
                    return;
                };
                (expired, since.map(|since| first.due(since)))
            };
            drop(expired);
            let changed = match due {
                Some(due) => {
                    let due = due.max(Instant::now() + PAUSE);
                    tokio::time::timeout_at(due.into(), wait_attached.changed()).await
                }
                None => Ok(wait_attached.changed().await),
            };
            // The sender is dropped with the session, which this task owns.
            debug_assert!(!matches!(changed, Ok(Err(_))));
        }
    }

    /// Returns a started process by its id.
    pub(crate) fn process(&self, id: &str) -> Option<Arc<SessionProcess>> {
        match self.table.lock().slots.get(id) {
            Some(ProcessRecord::Started(managed)) => Some(Arc::clone(managed)),
            _ => None,
        }
    }

    /// Returns the started processes, in the order of their starts.
    pub(crate) fn processes(&self) -> Vec<Arc<SessionProcess>> {
        let table = self.table.lock();
        let mut processes: Vec<Arc<SessionProcess>> = table
            .slots
            .values()
            .filter_map(|slot| match slot {
                ProcessRecord::Started(managed) => Some(Arc::clone(managed)),
                ProcessRecord::Starting(_) => None,
            })
            .collect();
        drop(table);
        processes.sort_by_key(|managed| managed.number);
        processes
    }
}

impl ProcessRecords {
    /// Whether the slot of this process still contains it.
    fn holds(&self, process: &Arc<SessionProcess>) -> bool {
        matches!(self.slots.get(&process.info.process_id),
            Some(ProcessRecord::Started(managed)) if Arc::ptr_eq(managed, process))
    }

    /// Removes the record at `index` of `closed`, and with it the id of its process.
    fn remove_closed(&mut self, index: usize) -> Option<Arc<SessionProcess>> {
        let process = self.closed.remove(index)?.process;
        if self.holds(&process) {
            self.slots.remove(&process.info.process_id);
        }
        Some(process)
    }

    fn remove_oldest_delivered(&mut self) -> Option<Arc<SessionProcess>> {
        let mut closed = self.closed.iter();
        let index = closed.position(|closed| closed.process.is_delivered())?;
        self.remove_closed(index)
    }

    /// Removes the records that have expired, given that the client attached at `since`.
    fn remove_expired(&mut self, since: Instant, now: Instant) -> Vec<Arc<SessionProcess>> {
        let mut removed = Vec::new();
        for _ in 0..self.closed.len() {
            match self.closed.front_mut() {
                Some(first) if first.due(since) > now => break,
                // The client of a paused process will continue the notifications and get the rest
                // of the output.
                Some(first) if first.process.has_paused_reading() => {
                    first.at = now;
                    self.closed.rotate_left(1);
                }
                _ => removed.extend(self.remove_closed(0)),
            }
        }
        removed
    }
}

impl ClosedProcess {
    /// When the record expires, given that the client attached at `since`.
    fn due(&self, since: Instant) -> Instant {
        self.at.max(since) + self.retention
    }
}

fn new_key() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

/// Creates the id and the resume key of a session, with one call to the random generator.
fn new_names() -> (String, String) {
    let mut random = [[0; 16]; 2];
    getrandom::fill(random.as_flattened_mut()).expect("the system has randomness");
    let [id, key] = random.map(|bytes| uuid::Builder::from_random_bytes(bytes).into_uuid());
    (id.to_string(), key.simple().to_string())
}

/// Compares two keys in constant time.
fn same_key(one: &str, other: &str) -> bool {
    one.as_bytes().ct_eq(other.as_bytes()).into()
}

pub(crate) fn unknown_session(id: &str) -> ApiError {
    ApiError::invalid_request(format!("unknown session id {id}"))
}

impl StartTicket {
    /// Completes a successful start. `answer` sends the response, before any notification about the
    /// process.
    ///
    /// # Errors
    ///
    /// The process, which the caller must end: the session has ended in the meantime.
    pub(crate) fn complete(
        mut self,
        process: Process,
        answer: impl FnOnce(),
    ) -> Result<Arc<SessionProcess>, Process> {
        self.completed = true;
        let number = {
            let mut table = self.session.table.lock();
            table.started += 1;
            table.started
        };
        let id = self.info.process_id.clone();
        let managed = Arc::new(SessionProcess {
            info: std::mem::take(&mut self.info),
            process,
            dialect: self.dialect,
            number,
            input: Mutex::default(),
            read_to_end: AtomicBool::new(false),
            is_paused: AtomicBool::new(false),
            follower: Mutex::default(),
        });
        answer();
        if managed.dialect == NotificationFamily::ProcessPull {
            // Blocks the process when its output buffer is full, until a client reads, even while
            // the session is detached.
            managed.process.hold(0);
        }
        if self.session.end_start(&id, Some(&managed)) {
            Ok(managed)
        } else {
            Err(managed.process.clone())
        }
    }

    /// Completes a failed start: jobs that wait for the process, and repeated start requests, get
    /// this error. `answer` sends it as the response first.
    pub(crate) fn fail(mut self, error: ApiError, answer: impl FnOnce(ApiError)) {
        self.completed = true;
        let id = &self.info.process_id;
        if let Some(ProcessRecord::Starting(starting)) = self.session.table.lock().slots.get_mut(id)
        {
            starting.failure = Some(error.clone());
        }
        answer(error);
        self.session.end_start(id, None);
    }
}

impl Drop for StartTicket {
    fn drop(&mut self) {
        if !self.completed {
            self.session.end_start(&self.info.process_id, None);
        }
    }
}

impl SessionProcess {
    /// Sends notifications of the process to a connection, after `cursor` or from now on.
    fn follow(&self, cursor: Option<u64>, outbox: &Arc<Outbox>) {
        let (process, id) = (self.process.clone(), self.info.process_id.clone());
        let mut follower = self.follower.lock();
        let paused = self.is_paused.load(Ordering::Relaxed);
        let next = LogFollower::start(process, id, self.dialect, cursor, outbox, paused);
        *follower = Some(next);
    }

    /// Stops sending notifications, because the connection has ended.
    ///
    /// If output is pushed, the process continues and the oldest output is evicted from the log. If
    /// output is read by request, it waits for the client to reconnect, and the process is still
    /// slowed down.
    fn unfollow(&self) {
        let follower = self.follower.lock().take();
        if follower.is_some() && self.dialect != NotificationFamily::ProcessPull {
            self.process.release();
        }
    }

    /// Records that the client has received everything up to `seq`, which unblocks a process whose
    /// output is read by request.
    pub(crate) fn acknowledge(&self, seq: u64) {
        if self.dialect == NotificationFamily::ProcessPull {
            self.process.advance(seq);
        }
    }

    /// Pauses the notifications of the process, or continues with the next one. While they are
    /// paused, output that was not sent slows the process down, as if the connection were slow.
    pub(crate) fn pause_output(&self, paused: bool) {
        // The lock orders this after a follower that is being started with the previous value.
        let follower = self.follower.lock();
        self.is_paused.store(paused, Ordering::Relaxed);
        if let Some(follower) = &*follower {
            follower.pause(paused);
        }
    }

    /// Whether a client has paused notifications that it has not received yet.
    fn has_paused_reading(&self) -> bool {
        let follower = self.follower.lock();
        self.is_paused.load(Ordering::Relaxed)
            && follower
                .as_ref()
                .is_some_and(|follower| !follower.is_finished())
    }

    /// Records that a response to the client has contained the output to its end.
    pub(crate) fn note_read_to_end(&self) {
        self.read_to_end.store(true, Ordering::Relaxed);
    }

    /// Whether the client has been sent the whole log.
    fn is_delivered(&self) -> bool {
        let follower = self.follower.lock();
        let notified = follower
            .as_ref()
            .is_some_and(|follower| follower.is_finished());
        let pushed = notified && self.dialect != NotificationFamily::ProcessPull;
        pushed || self.read_to_end.load(Ordering::Relaxed)
    }

    /// Writes once per `write_id`, after all earlier writes; responds when the write is accepted.
    pub(crate) fn write(
        self: &Arc<Self>,
        data: Bytes,
        write_id: Option<&str>,
        mut responder: RequestResponder,
        status: WriteResponder,
    ) {
        let mut input = self.input.lock();
        let id = write_id.map(|id| input.hasher.hash_one(id));
        if id.is_some_and(|id| input.accepted.contains(&id)) {
            drop(input);
            return status(responder, WriteStatus::Accepted);
        }
        if let Some(id) = id {
            input.remember(id);
        }
        let first = input.waiting.is_empty();
        let written = if first {
            self.process.try_write(data)
        } else {
            Err(data)
        };
        match written {
            Ok(written) => {
                input.settle(id, written);
                drop(input);
                status(responder, write_status(written));
            }
            Err(data) => {
                responder.wait_for_input(data.len());
                input.waiting.push_back(InputWrite::Data {
                    data,
                    id,
                    responder,
                    status,
                });
                drop(input);
                if first {
                    self.work();
                }
            }
        }
    }

    /// Closes stdin after all earlier writes.
    pub(crate) fn close_stdin(
        self: &Arc<Self>,
        mut responder: RequestResponder,
        status: WriteResponder,
    ) {
        let mut input = self.input.lock();
        responder.wait_for_input(0);
        input
            .waiting
            .push_back(InputWrite::End { responder, status });
        let first = input.waiting.len() == 1;
        drop(input);
        if first {
            self.work();
        }
    }

    /// Processes waiting writes one after the other. Ends when none is left, at the latest when the
    /// process ends and its stdin is closed.
    fn work(self: &Arc<Self>) {
        let this = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                // The first write stays in the queue while it is processed, so that later ones
                // queue behind it.
                let data = match this.input.lock().waiting.front_mut() {
                    Some(InputWrite::Data { data, .. }) => Some(std::mem::take(data)),
                    Some(InputWrite::End { .. }) => None,
                    None => return,
                };
                let written = match data {
                    Some(data) => this.process.write(data).await,
                    None => this.process.close_stdin().await,
                };
                let mut input = this.input.lock();
                let done = input.waiting.pop_front();
                let last = input.waiting.is_empty();
                if let Some(InputWrite::Data { id, .. }) = &done {
                    input.settle(*id, written);
                }
                drop(input);
                match done {
                    Some(
                        InputWrite::Data {
                            responder, status, ..
                        }
                        | InputWrite::End { responder, status },
                    ) => status(responder, write_status(written)),
                    None => {}
                }
                if last {
                    return;
                }
            }
        });
    }
}

impl InputQueue {
    /// Marks the id as seen, so that a second write is a repeat even while the first one waits.
    fn remember(&mut self, id: u64) {
        if self.recent.len() == REMEMBERED_WRITES
            && let Some(oldest) = self.recent.pop_front()
        {
            self.accepted.remove(&oldest);
        }
        self.recent.push_back(id);
        self.accepted.insert(id);
    }

    /// Removes the id of a write that was not accepted.
    fn settle(&mut self, id: Option<u64>, written: InputWriteResult) {
        if written == InputWriteResult::Closed
            && let Some(id) = id
            && self.accepted.remove(&id)
        {
            self.recent.retain(|&recent| recent != id);
        }
    }
}
