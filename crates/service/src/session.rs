//! Sessions: processes that belong together, and the connection that drives them.
//!
//! ```text
//!            attach                 connection ends
//! (new) ──► attached ◄──────────► detached ── grace over, or ended ──► gone, processes killed
//!                       resume
//! ```

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use exec_server_executor::Process;
use exec_server_executor::process::Written;
use exec_server_executor::snapshot::Snapshots;
use exec_server_protocol::PathUri;
use exec_server_protocol::process::WriteStatus;
use subtle::ConstantTimeEq as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::asks::Asks;
use crate::auth::Identity;
use crate::connection::Responder;
use crate::error::RpcError;
use crate::follow::{Dialect, Follower};
use crate::outbox::Outbox;

/// Accepted write ids that are remembered, so that a repeated write is not written twice.
const REMEMBERED_WRITES: usize = 4096;

/// A session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: String,
    /// Who opened it; nobody else can take it up again.
    owner: Identity,
    state: Mutex<State>,
    table: Mutex<Table>,
    /// A connection drives it, or it has ended.
    attended: watch::Sender<bool>,
    /// What its shells begin with.
    pub(crate) snapshots: Snapshots,
}

#[derive(Debug)]
struct State {
    driver: Option<Driver>,
    /// With it, whoever drove the session last takes it over from its own connection, which may be
    /// dead without our knowing.
    resume_key: String,
    /// Counts attachments, so that a timer knows whether it is still about the same absence.
    attachments: u64,
    grace: Duration,
    ended: bool,
}

/// The connection that drives a session.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    pub(crate) outbox: Arc<Outbox>,
    /// Ends the connection.
    pub(crate) closed: CancellationToken,
    pub(crate) heard: Arc<Heard>,
    /// What it is asked.
    pub(crate) asks: Arc<Asks>,
    /// On whose behalf.
    pub(crate) identity: Identity,
}

/// When a connection was last heard of.
#[derive(Debug)]
pub(crate) struct Heard {
    start: Instant,
    millis: AtomicU64,
}

impl Heard {
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
        let heard = Duration::from_millis(self.millis.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(heard)
    }
}

#[derive(Debug, Default)]
struct Table {
    slots: HashMap<String, Slot>,
    /// Processes ever started, which orders them.
    started: u64,
}

enum Slot {
    Starting(Starting),
    Started(Arc<Managed>),
}

/// A process that is being started.
#[derive(Default)]
struct Starting {
    /// What arrived meanwhile for its id, in order.
    jobs: VecDeque<Job>,
    /// What the request to start it is called.
    start_id: Option<String>,
    /// Why there will be none.
    failure: Option<RpcError>,
}

/// What a request to start a process met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reserved {
    /// The id was free and is reserved.
    New,
    /// The same request came before.
    Repeat,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Starting(starting) => write!(f, "Starting({} waiting)", starting.jobs.len()),
            Self::Started(managed) => managed.fmt(f),
        }
    }
}

/// Something to do with a process, if there is one.
type Job = Box<dyn FnOnce(Option<&Arc<Managed>>) + Send>;

/// A process of a session.
#[derive(Debug)]
pub(crate) struct Managed {
    pub(crate) id: String,
    pub(crate) process: Process,
    pub(crate) argv: Vec<String>,
    pub(crate) cwd: PathUri,
    pub(crate) dialect: Dialect,
    /// What the request to start it was called.
    start_id: Option<String>,
    /// Its place in the order of starts.
    pub(crate) number: u64,
    input: Mutex<Input>,
    /// The last number acknowledged by reading, for processes whose output is read.
    acknowledged: AtomicU64,
    follower: Mutex<Option<Arc<Follower>>>,
}

/// Writes to one process, in the order they came.
#[derive(Debug, Default)]
struct Input {
    /// Writes that wait for the child to read; a task works on the first.
    waiting: VecDeque<Write>,
    /// Hashes of accepted write ids, oldest first.
    recent: VecDeque<u64>,
    accepted: HashSet<u64>,
    hasher: RandomState,
}

/// A write, or the end of input, and who waits for its outcome.
#[derive(Debug)]
pub(crate) enum Write {
    Data {
        data: Bytes,
        id: Option<u64>,
        responder: Responder,
        status: StatusOf,
    },
    End {
        responder: Responder,
    },
}

/// How the outcome of a write is told.
pub(crate) type StatusOf = fn(Responder, WriteStatus);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    pub(crate) fn new(grace: Duration, driver: Driver, snapshots: Snapshots) -> Self {
        let (id, resume_key) = new_names();
        let owner = driver.identity.clone();
        let state = State {
            driver: Some(driver),
            resume_key,
            attachments: 1,
            grace,
            ended: false,
        };
        Self {
            id,
            owner,
            state: Mutex::new(state),
            table: Mutex::default(),
            attended: watch::Sender::new(true),
            snapshots,
        }
    }

    /// The connection that drives it, if one does.
    pub(crate) fn driver(&self) -> Option<Driver> {
        lock(&self.state).driver.clone()
    }

    /// What lets the driver take the session over from its own connection.
    pub(crate) fn resume_key(&self) -> String {
        lock(&self.state).resume_key.clone()
    }

    /// Makes `driver` drive the session, if nobody does, whoever does has gone silent, or `key` shows
    /// that it is the same client.
    pub(crate) fn attach(
        &self,
        driver: Driver,
        key: Option<&str>,
        grace: Option<Duration>,
        silence: Duration,
    ) -> Result<Duration, RpcError> {
        let mut state = lock(&self.state);
        let identity = &driver.identity;
        // With less than its owner had, a session could only be disturbed.
        let owned = identity.name == self.owner.name && identity.scopes.include(self.owner.scopes);
        if state.ended || !owned {
            return Err(unknown_session(&self.id));
        }
        let same = key.is_some_and(|key| same_key(key, &state.resume_key));
        if let Some(current) = &state.driver {
            if !same && current.heard.silence() < silence {
                return Err(RpcError::already_attached(&self.id));
            }
            current.closed.cancel();
        }
        if !same {
            // Whoever had it is not the one who drives it now.
            state.resume_key = new_key();
        }
        self.attended.send_replace(true);
        state.driver = Some(driver);
        state.attachments += 1;
        state.grace = grace.unwrap_or(state.grace);
        Ok(state.grace)
    }

    /// The connection behind `outbox` is gone; how long to wait for another, and which absence
    /// this is.
    pub(crate) fn detach(&self, outbox: &Arc<Outbox>) -> Option<(Duration, u64)> {
        let mut state = lock(&self.state);
        // A connection that was taken over has nothing to say any more.
        state
            .driver
            .take_if(|driver| Arc::ptr_eq(&driver.outbox, outbox))?;
        let absence = (state.grace, state.attachments);
        self.attended.send_replace(false);
        drop(state);
        for managed in self.processes() {
            managed.unfollow();
        }
        Some(absence)
    }

    /// Waits for `time` in which the session had a connection, all of it after the last that came.
    pub(crate) async fn attended_for(&self, time: Duration) {
        let mut attended = self.attended.subscribe();
        loop {
            // Neither fails: the sender is ours.
            let _ = attended.wait_for(|attended| *attended).await;
            let left = attended.wait_for(|attended| !attended);
            if tokio::time::timeout(time, left).await.is_err() {
                return;
            }
        }
    }

    /// Whether nobody has come back since that absence began.
    pub(crate) fn is_still_absent(&self, absence: u64) -> bool {
        let state = lock(&self.state);
        state.driver.is_none() && state.attachments == absence
    }

    /// Marks the session as gone; its processes, to be killed. `None` if it is gone already.
    pub(crate) fn end(&self) -> Option<Vec<Process>> {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.ended, true) {
            return None;
        }
        state.driver = None;
        self.attended.send_replace(true);
        drop(state);
        let slots: Vec<Slot> = lock(&self.table)
            .slots
            .drain()
            .map(|(_, slot)| slot)
            .collect();
        let mut processes = self.snapshots.end();
        for slot in slots {
            match slot {
                Slot::Started(managed) => {
                    managed.unfollow();
                    processes.push(managed.process.clone());
                }
                Slot::Starting(starting) => starting.jobs.into_iter().for_each(|job| job(None)),
            }
        }
        Some(processes)
    }

    /// Sends news of every process to the driver, from now on.
    pub(crate) fn follow_all(&self) {
        let outbox = lock(&self.state)
            .driver
            .as_ref()
            .map(|driver| Arc::clone(&driver.outbox));
        if let Some(outbox) = outbox {
            for managed in self.processes() {
                managed.follow(None, &outbox);
            }
        }
    }

    /// Reserves an id for a process that is about to be started, unless the same request did before.
    pub(crate) fn reserve(
        &self,
        id: &str,
        start_id: Option<&str>,
        limit: usize,
    ) -> Result<Reserved, RpcError> {
        let mut table = lock(&self.table);
        if let Some(slot) = table.slots.get(id) {
            let known = match slot {
                Slot::Starting(starting) => starting.start_id.as_deref(),
                Slot::Started(managed) => managed.start_id.as_deref(),
            };
            if start_id.is_some() && start_id == known {
                return Ok(Reserved::Repeat);
            }
            let message = format!("process ID already exists: {id}");
            return Err(RpcError::invalid_request(message));
        }
        if table.slots.len() >= limit {
            let message = format!("limit of {limit} processes per session reached");
            return Err(RpcError::invalid_request(message));
        }
        let starting = Starting {
            start_id: start_id.map(str::to_owned),
            ..Starting::default()
        };
        table.slots.insert(id.to_owned(), Slot::Starting(starting));
        Ok(Reserved::New)
    }

    /// Notes why a process will not be, for those who asked for the same start.
    pub(crate) fn note_failure(&self, id: &str, failure: RpcError) {
        if let Some(Slot::Starting(starting)) = lock(&self.table).slots.get_mut(id) {
            starting.failure = Some(failure);
        }
    }

    /// Why a process is not, from a job that waited for it.
    pub(crate) fn failure(&self, id: &str) -> RpcError {
        match lock(&self.table).slots.get(id) {
            Some(Slot::Starting(starting)) => starting.failure.clone(),
            _ => None,
        }
        .unwrap_or_else(|| RpcError::unknown_process(id))
    }

    /// Puts a started process in its place and does what has been waiting for it.
    ///
    /// `answer` tells the client first. Without a process the id is free again. A process of a
    /// session that ended meanwhile is returned, to be killed.
    pub(crate) fn fill(
        &self,
        id: &str,
        managed: Option<ManagedParts>,
        answer: impl FnOnce(),
    ) -> Option<Process> {
        let managed = managed.map(|parts| {
            let mut table = lock(&self.table);
            table.started += 1;
            Arc::new(parts.build(id, table.started))
        });
        answer();
        let mut followed = None;
        if let Some(managed) = &managed {
            followed = self.follow_driver(managed, None);
        }
        loop {
            let mut table = lock(&self.table);
            let Some(Slot::Starting(Starting { jobs, .. })) = table.slots.get_mut(id) else {
                // The session ended; whoever ended it knows nothing of this process.
                return managed.map(|managed| managed.process.clone());
            };
            // Only when nothing waits does the id become free to all: nothing overtakes.
            let Some(job) = jobs.pop_front() else {
                let Some(managed) = managed else {
                    table.slots.remove(id);
                    return None;
                };
                table
                    .slots
                    .insert(id.to_owned(), Slot::Started(Arc::clone(&managed)));
                drop(table);
                // A connection that came or went meanwhile did not know of this process.
                self.follow_driver(&managed, followed.as_ref());
                return None;
            };
            drop(table);
            job(managed.as_ref());
        }
    }

    /// Sends news of a new process to the driver, unless that is `already` done; returns to whom.
    fn follow_driver(
        &self,
        managed: &Managed,
        already: Option<&Arc<Outbox>>,
    ) -> Option<Arc<Outbox>> {
        let state = lock(&self.state);
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

    /// Does something with a process, now or, if it is being started, when it is.
    pub(crate) fn with_process(
        &self,
        id: &str,
        job: impl FnOnce(Option<&Arc<Managed>>) + Send + 'static,
    ) {
        let managed = match lock(&self.table).slots.get_mut(id) {
            None => None,
            Some(Slot::Started(managed)) => Some(Arc::clone(managed)),
            Some(Slot::Starting(starting)) => {
                starting.jobs.push_back(Box::new(job));
                return;
            }
        };
        job(managed.as_ref());
    }

    /// Frees the id of a process, if it is still this one.
    pub(crate) fn forget(&self, process: &Arc<Managed>) {
        let mut table = lock(&self.table);
        let same = matches!(table.slots.get(&process.id),
            Some(Slot::Started(managed)) if Arc::ptr_eq(managed, process));
        if same {
            table.slots.remove(&process.id);
        }
    }

    /// A started process by its id.
    pub(crate) fn process(&self, id: &str) -> Option<Arc<Managed>> {
        match lock(&self.table).slots.get(id) {
            Some(Slot::Started(managed)) => Some(Arc::clone(managed)),
            _ => None,
        }
    }

    /// The started processes, in the order of their starts.
    pub(crate) fn processes(&self) -> Vec<Arc<Managed>> {
        let table = lock(&self.table);
        let mut processes: Vec<Arc<Managed>> = table
            .slots
            .values()
            .filter_map(|slot| match slot {
                Slot::Started(managed) => Some(Arc::clone(managed)),
                Slot::Starting(_) => None,
            })
            .collect();
        drop(table);
        processes.sort_by_key(|managed| managed.number);
        processes
    }
}

fn new_key() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

/// The id and the resume key of a session, with one call for their randomness.
fn new_names() -> (String, String) {
    let mut random = [[0; 16]; 2];
    getrandom::fill(random.as_flattened_mut()).expect("the system has randomness");
    let [id, key] = random.map(|bytes| uuid::Builder::from_random_bytes(bytes).into_uuid());
    (id.to_string(), key.simple().to_string())
}

/// Compares without telling by its time how much of it was right.
fn same_key(one: &str, other: &str) -> bool {
    one.as_bytes().ct_eq(other.as_bytes()).into()
}

pub(crate) fn unknown_session(id: &str) -> RpcError {
    RpcError::invalid_request(format!("unknown session id {id}"))
}

/// What a process is made of besides its id and number.
pub(crate) struct ManagedParts {
    pub(crate) process: Process,
    pub(crate) argv: Vec<String>,
    pub(crate) cwd: PathUri,
    pub(crate) dialect: Dialect,
    pub(crate) start_id: Option<String>,
}

impl ManagedParts {
    fn build(self, id: &str, number: u64) -> Managed {
        Managed {
            id: id.to_owned(),
            process: self.process,
            argv: self.argv,
            cwd: self.cwd,
            dialect: self.dialect,
            start_id: self.start_id,
            number,
            input: Mutex::default(),
            acknowledged: AtomicU64::new(0),
            follower: Mutex::default(),
        }
    }
}

impl Managed {
    /// Sends news of the process to a connection, after `cursor` or from now on.
    fn follow(&self, cursor: Option<u64>, outbox: &Arc<Outbox>) {
        if self.dialect == Dialect::ProcessPull {
            self.process.hold(self.acknowledged.load(Ordering::Relaxed));
        }
        let (process, id) = (self.process.clone(), self.id.clone());
        let follower = Follower::start(process, id, self.dialect, cursor, outbox);
        *lock(&self.follower) = Some(follower);
    }

    fn unfollow(&self) {
        if let Some(follower) = lock(&self.follower).take() {
            follower.stop();
        }
    }

    /// A reader has everything up to `seq`, which lets a process whose output is read go on.
    pub(crate) fn acknowledge(&self, seq: u64) {
        if self.dialect == Dialect::ProcessPull {
            self.acknowledged.fetch_max(seq, Ordering::Relaxed);
            self.process.advance(seq);
        }
    }

    /// Writes once per `write_id`, after all earlier writes; answers when it is accepted.
    pub(crate) fn write(
        self: &Arc<Self>,
        data: Bytes,
        write_id: Option<&str>,
        mut responder: Responder,
        status: StatusOf,
    ) {
        let mut input = lock(&self.input);
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
                status(responder, status_of(written));
            }
            Err(data) => {
                responder.wait_for_input(data.len());
                input.waiting.push_back(Write::Data {
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

    /// Ends the input after all earlier writes.
    pub(crate) fn close_stdin(self: &Arc<Self>, mut responder: Responder) {
        let mut input = lock(&self.input);
        responder.wait_for_input(0);
        input.waiting.push_back(Write::End { responder });
        let first = input.waiting.len() == 1;
        drop(input);
        if first {
            self.work();
        }
    }

    /// Works on waiting writes, one after the other. Ends when none is left, which at the latest
    /// is when the process ends and its input with it.
    fn work(self: &Arc<Self>) {
        let this = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                // The first stays in the queue while it is worked on: others line up behind it.
                let data = match lock(&this.input).waiting.front_mut() {
                    Some(Write::Data { data, .. }) => Some(std::mem::take(data)),
                    Some(Write::End { .. }) => None,
                    None => return,
                };
                let written = match data {
                    Some(data) => this.process.write(data).await,
                    None => this.process.close_stdin().await,
                };
                let mut input = lock(&this.input);
                let done = input.waiting.pop_front();
                let last = input.waiting.is_empty();
                if let Some(Write::Data { id, .. }) = &done {
                    input.settle(*id, written);
                }
                drop(input);
                match done {
                    Some(Write::Data {
                        responder, status, ..
                    }) => {
                        status(responder, status_of(written));
                    }
                    Some(Write::End { responder }) => {
                        crate::methods::process::write_status(responder, status_of(written));
                    }
                    None => {}
                }
                if last {
                    return;
                }
            }
        });
    }
}

impl Input {
    /// From now on a write of this id is a repeat, even while the first still waits.
    fn remember(&mut self, id: u64) {
        if self.recent.len() == REMEMBERED_WRITES
            && let Some(oldest) = self.recent.pop_front()
        {
            self.accepted.remove(&oldest);
        }
        self.recent.push_back(id);
        self.accepted.insert(id);
    }

    /// Only accepted writes are remembered.
    fn settle(&mut self, id: Option<u64>, written: Written) {
        if written == Written::Closed
            && let Some(id) = id
            && self.accepted.remove(&id)
        {
            self.recent.retain(|&recent| recent != id);
        }
    }
}

fn status_of(written: Written) -> WriteStatus {
    match written {
        Written::Accepted => WriteStatus::Accepted,
        Written::Closed => WriteStatus::StdinClosed,
    }
}
