//! Pool of confined file helpers, reused for requests under the same policy.
//!
//! Limits their number and their idle time. A helper handles one request at a time; while all
//! helpers of a policy are busy, a request starts another one or waits. A helper that fails is not
//! used again.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use exec_server_protocol::sandbox::Sandbox;
use exec_server_sandbox::policy::{RecordedAnswers, ResolvedPolicy};
use exec_server_sandbox::{PendingLaunch, SandboxError, prepare_files};
use exec_server_sync::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;
use rustix::process::{Signal, WaitId, WaitIdOptions};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::files::FileIntent;
use super::helper::{self, HelperFrame, HelperRequest, HelperResponse, IncompleteFrame};
use crate::executor::Executor;
use crate::fs::{CancelCheck, FsError, ProtectedFiles};
use exec_server_sys::poll;

/// Maximum number of idle helpers.
const MAX_IDLE: usize = 16;

/// Maximum number of busy helpers under all policies.
const MAX_BUSY: usize = 64;

/// Maximum number of busy helpers under one policy.
const MAX_PER_POLICY: usize = 4;

/// Idle time after which a helper is ended.
const IDLE: Duration = Duration::from_secs(30);

/// Time between two looks for helpers that have been idle for too long or have died.
const SWEEP: Duration = Duration::from_millis(500);

/// Interval at which a waiting request checks whether it was cancelled.
const TIMEOUT: Duration = Duration::from_millis(100);

/// Time in which a helper may exit by itself before it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// Number of helpers that one request tries, if the host keeps changing mounts below their view.
const ATTEMPTS: usize = 4;

/// Identity of a helper: the confinement that it runs under.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HelperKey {
    /// The policy, resolved against the current disk.
    pub(crate) policy: ResolvedPolicy,
    /// Whether partial enforcement is allowed.
    pub(crate) allow_partial: bool,
    /// Files of the server that the helper must not reach by any name.
    pub(crate) protected: Arc<ProtectedFiles>,
}

/// Pool of all file helpers.
#[derive(Debug, Default)]
pub(crate) struct HelperPool {
    shared: Arc<PoolShared>,
    /// Cached policy resolutions, the latest last.
    remembered: Mutex<VecDeque<CachedResolution>>,
}

/// Cached policy resolution, with the state of the disk that it depends on.
#[derive(Debug)]
pub(super) struct CachedResolution {
    pub(super) sandbox: Arc<Sandbox>,
    pub(super) intent: FileIntent,
    pub(super) answers: Arc<RecordedAnswers>,
    pub(super) key: Arc<HelperKey>,
}

/// Maximum number of cached resolutions.
const MAX_REMEMBERED: usize = 16;

#[derive(Debug, Default)]
struct PoolShared {
    state: Mutex<PoolState>,
    /// Notified when a helper becomes idle or ends.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PoolState {
    /// Least recently used first.
    idle: Vec<(Helper, Instant)>,
    busy: Vec<Arc<HelperKey>>,
    /// Number of threads that wait for a helper to become idle or to end.
    waiting: usize,
    /// Whether a thread ends helpers that are idle for too long.
    watched: bool,
}

impl PoolShared {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock()
    }
}

/// Handle to one helper process.
#[derive(Debug)]
struct Helper {
    key: Arc<HelperKey>,
    socket: Option<HelperSocket>,
    pidfd: OwnedFd,
}

/// Connection to a helper.
#[derive(Debug)]
enum HelperSocket {
    Plain(OwnedFd),
    /// Registered with the runtime, for callers that must not block.
    Watched(AsyncFd<OwnedFd>),
}

impl AsFd for HelperSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(fd) => fd.as_fd(),
            Self::Watched(fd) => fd.get_ref().as_fd(),
        }
    }
}

impl HelperSocket {
    /// Registers the socket with the current runtime.
    fn watched(self) -> Option<Self> {
        match self {
            Self::Plain(fd) => poll::register(fd, Interest::READABLE)
                .ok()
                .map(Self::Watched),
            Self::Watched(_) => Some(self),
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // The helper exits when its socket is closed.
        self.socket = None;
        if !ready(self.pidfd.as_fd(), PollFlags::IN, EXIT_TIMEOUT) {
            let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
        }
        // The orphan reaper may have reaped it already.
        let _ = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
    }
}

/// Waits until a descriptor is ready; returns false on timeout.
fn ready(fd: BorrowedFd<'_>, what: PollFlags, timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::from_borrowed_fd(fd, what)];
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(0),
            tv_nsec: left.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return true,
        }
    }
}

impl Helper {
    fn start(executor: &Executor, key: Arc<HelperKey>) -> Result<Self, FsError> {
        let told = |error: SandboxError| match error {
            SandboxError::Refused(why) => FsError::Unenforceable(why),
            other => FsError::Helper(other.to_string()),
        };
        let host = executor.launcher_host().map_err(told)?;
        let prepared_sandbox =
            prepare_files(key.policy.clone(), key.allow_partial, host).map_err(told)?;
        let (socket, pending_launch) = PendingLaunch::serve(&prepared_sandbox).map_err(failed)?;
        let pidfd = executor.launch_helper(&pending_launch).map_err(told)?;
        let helper = Self {
            key,
            socket: Some(HelperSocket::Plain(socket)),
            pidfd,
        };
        pending_launch.wait_served().map_err(told)?;
        let protect = HelperRequest::Protect(ProtectedFiles::clone(&helper.key.protected));
        helper.call(&protect, &[], &[], &|| false)?;
        Ok(helper)
    }

    /// Returns whether the helper still accepts requests.
    fn is_alive(&self) -> bool {
        let socket = self.socket.as_ref();
        socket.is_some_and(|socket| !ready(socket.as_fd(), PollFlags::IN, Duration::ZERO))
    }

    fn call(
        &self,
        request: &HelperRequest,
        tail: &[u8],
        descriptors: &[BorrowedFd<'_>],
        cancelled: CancelCheck<'_>,
    ) -> Result<HelperFrame<HelperResponse>, FsError> {
        let Some(socket) = &self.socket else {
            return Err(FsError::Helper("it has ended".to_owned()));
        };
        helper::send(socket, request, tail, descriptors).map_err(failed)?;
        while !ready(socket.as_fd(), PollFlags::IN, TIMEOUT) {
            if cancelled() {
                return Err(FsError::Cancelled);
            }
        }
        match helper::receive(socket).map_err(failed)? {
            Some(frame) => Ok(frame),
            None => Err(FsError::Helper(
                "it ended before it answered; whether it did what was asked is unknown".to_owned(),
            )),
        }
    }
}

fn failed(error: io::Error) -> FsError {
    FsError::Helper(error.to_string())
}

impl HelperPool {
    /// Runs a request in a helper for this policy. Blocks.
    pub(super) fn call(
        &self,
        executor: &Executor,
        key: &Arc<HelperKey>,
        request: &HelperRequest,
        tail: &[u8],
        descriptors: &[BorrowedFd<'_>],
        cancelled: CancelCheck<'_>,
    ) -> Result<HelperFrame<HelperResponse>, FsError> {
        for _ in 0..ATTEMPTS {
            let turn = self.turn(key, cancelled)?;
            let helper = match turn.idle {
                Some(helper) => helper,
                None => Helper::start(executor, Arc::clone(key))?,
            };
            // On failure the helper is dropped, which ends it.
            let frame = helper.call(request, tail, descriptors, cancelled)?;
            if !matches!(frame.head, HelperResponse::Stale) {
                turn.slot.give_back(helper);
                return Ok(frame);
            }
        }
        Err(FsError::Helper(format!(
            "what it may see was replaced {ATTEMPTS} times while it looked"
        )))
    }

    /// Returns the cached resolution of a policy and the state of the disk that it depends on.
    /// Never waits.
    pub(super) fn remembered(
        &self,
        sandbox: &Sandbox,
        intent: FileIntent,
    ) -> Option<(Arc<HelperKey>, Arc<RecordedAnswers>)> {
        let remembered = self.remembered.try_lock()?;
        let found = remembered
            .iter()
            .rfind(|one| one.intent == intent && *one.sandbox == *sandbox)?;
        Some((Arc::clone(&found.key), Arc::clone(&found.answers)))
    }

    /// Caches the resolution of a policy.
    pub(super) fn remember(&self, new: CachedResolution) {
        let Some(mut remembered) = self.remembered.try_lock() else {
            return;
        };
        remembered.retain(|one| one.intent != new.intent || one.sandbox != new.sandbox);
        if remembered.len() == MAX_REMEMBERED {
            remembered.pop_front();
        }
        remembered.push_back(new);
    }

    /// Sends a request to an idle helper, if there is one and sending does not have to wait.
    pub(super) fn try_request(
        &self,
        key: &HelperKey,
        request: &HelperRequest,
    ) -> Option<PendingHelperRequest> {
        let mut state = self.shared.state.try_lock()?;
        let position = state.idle.iter().rposition(|(one, _)| *one.key == *key)?;
        let (helper, _) = state.idle.remove(position);
        let key = Arc::clone(&helper.key);
        state.busy.push(Arc::clone(&key));
        drop(state);
        let mut asking = PendingHelperRequest {
            helper: Some(helper),
            slot: Some(BusySlot {
                shared: Arc::clone(&self.shared),
                key,
            }),
        };
        let helper = asking.helper.as_mut()?;
        helper.socket = helper.socket.take().and_then(HelperSocket::watched);
        // Sending to a helper that has exited fails.
        helper::send_at_once(helper.socket.as_ref()?, request).ok()?;
        Some(asking)
    }

    /// Ends all idle helpers.
    pub(crate) fn clear(&self) {
        let idle = std::mem::take(&mut self.shared.state().idle);
        drop(idle);
    }

    /// Takes an idle helper, or the permission to start one.
    fn turn(
        &self,
        key: &Arc<HelperKey>,
        cancelled: CancelCheck<'_>,
    ) -> Result<HelperPermit, FsError> {
        let mut state = self.shared.state();
        loop {
            let mut dead = Vec::new();
            while let Some(position) = state.idle.iter().rposition(|(one, _)| one.key == *key) {
                let (helper, _) = state.idle.remove(position);
                if helper.is_alive() {
                    state.busy.push(Arc::clone(key));
                    drop(state);
                    drop(dead);
                    return Ok(self.granted(key, Some(helper)));
                }
                dead.push(helper);
            }
            let of_policy = state.busy.iter().filter(|one| *one == key).count();
            if of_policy < MAX_PER_POLICY && state.busy.len() < MAX_BUSY {
                state.busy.push(Arc::clone(key));
                drop(state);
                drop(dead);
                return Ok(self.granted(key, None));
            }
            if !dead.is_empty() {
                drop(state);
                drop(dead);
                state = self.shared.state();
                continue;
            }
            let changed = &self.shared.changed;
            state.waiting += 1;
            (state, _) = changed.wait_timeout(state, TIMEOUT);
            state.waiting -= 1;
            if cancelled() {
                return Err(FsError::Cancelled);
            }
        }
    }

    fn granted(&self, key: &Arc<HelperKey>, idle: Option<Helper>) -> HelperPermit {
        let slot = BusySlot {
            shared: Arc::clone(&self.shared),
            key: Arc::clone(key),
        };
        HelperPermit { idle, slot }
    }
}

/// Request that an async task has sent to a helper.
#[derive(Debug)]
pub(super) struct PendingHelperRequest {
    helper: Option<Helper>,
    slot: Option<BusySlot>,
}

impl Drop for PendingHelperRequest {
    fn drop(&mut self) {
        // The response of the cancelled request will not be read, so the helper is ended, which may
        // take a moment.
        drop_on_blocking_thread(self.helper.take());
    }
}

/// Drops helpers on a blocking thread, because their end may take a moment.
fn drop_on_blocking_thread(helpers: impl IntoIterator<Item = Helper>) {
    let helpers: Vec<_> = helpers.into_iter().collect();
    if helpers.is_empty() {
        return;
    }
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn_blocking(move || drop(helpers));
    }
}

impl PendingHelperRequest {
    /// Waits for the response. Returns `None` if the helper failed or its view is stale.
    pub(super) async fn answer(mut self) -> Option<HelperFrame<HelperResponse>> {
        let frame = self.receive().await?;
        if matches!(frame.head, HelperResponse::Stale) {
            return None;
        }
        if let (Some(helper), Some(slot)) = (self.helper.take(), self.slot.take()) {
            drop_on_blocking_thread(slot.keep(helper));
        }
        Some(frame)
    }

    async fn receive(&self) -> Option<HelperFrame<HelperResponse>> {
        let HelperSocket::Watched(socket) = self.helper.as_ref()?.socket.as_ref()? else {
            return None;
        };
        let mut receiving = IncompleteFrame::new();
        loop {
            let mut ready = socket.readable().await.ok()?;
            match receiving.receive(socket.get_ref(), RecvFlags::DONTWAIT) {
                Ok(frame) => {
                    // The helper sends nothing more until the next request.
                    ready.clear_ready();
                    return frame;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(_) => return None,
            }
        }
    }
}

/// Permission to use a helper: an idle one, or one to be started.
struct HelperPermit {
    idle: Option<Helper>,
    slot: BusySlot,
}

/// Slot among the busy helpers.
#[derive(Debug)]
struct BusySlot {
    shared: Arc<PoolShared>,
    key: Arc<HelperKey>,
}

impl Drop for BusySlot {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        let position = state
            .busy
            .iter()
            .position(|one| Arc::ptr_eq(one, &self.key));
        if let Some(position) = position {
            state.busy.swap_remove(position);
        }
        let waiting = state.waiting > 0;
        drop(state);
        if waiting {
            self.shared.changed.notify_all();
        }
    }
}

impl BusySlot {
    /// Returns a helper to the pool.
    fn give_back(self, helper: Helper) {
        drop(self.keep(helper));
    }

    /// Like [`BusySlot::give_back`], but returns the evicted helpers, which the caller must drop.
    fn keep(self, helper: Helper) -> Vec<Helper> {
        let mut state = self.shared.state();
        state.idle.push((helper, Instant::now()));
        let too_many = state.idle.len().saturating_sub(MAX_IDLE);
        let evicted = state.idle.drain(..too_many);
        let mut evicted: Vec<_> = evicted.map(|(helper, _)| helper).collect();
        let watch = !std::mem::replace(&mut state.watched, true);
        drop(state);
        if watch && !start_watch(&self.shared) {
            let mut state = self.shared.state();
            state.watched = false;
            evicted.extend(state.idle.drain(..).map(|(helper, _)| helper));
        }
        evicted
    }
}

/// Starts a thread that ends helpers after their idle time. The thread exits when no helper is
/// idle.
fn start_watch(shared: &Arc<PoolShared>) -> bool {
    let weak = Arc::downgrade(shared);
    std::thread::Builder::new()
        .name("helpers".to_owned())
        .spawn(move || {
            while sweep(&weak) {
                std::thread::sleep(SWEEP);
            }
        })
        .is_ok()
}

/// Ends helpers that were idle for too long; returns whether others are still idle.
fn sweep(shared: &Weak<PoolShared>) -> bool {
    let Some(shared) = shared.upgrade() else {
        return false;
    };
    let mut state = shared.state();
    let (old, idle): (Vec<_>, Vec<_>) = std::mem::take(&mut state.idle)
        .into_iter()
        .partition(|(one, since)| since.elapsed() >= IDLE || !one.is_alive());
    state.idle = idle;
    let others = !state.idle.is_empty();
    state.watched = others;
    drop(state);
    drop(old);
    others
}
