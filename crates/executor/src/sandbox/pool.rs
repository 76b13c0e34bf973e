//! Confined processes that do file work, kept for the next request under the same policy.
//!
//! Owns how many there are and how long they stay. A process does one thing at a time; who asks
//! while all of a policy are busy gets another one, or waits. One that fails is not used again.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use exec_server_protocol::sandbox::Sandbox;
use exec_server_sync::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;
use rustix::process::{Signal, WaitId, WaitIdOptions};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::files::Intent;
use super::helper::{self, Frame, Receiving, Reply, Request};
use super::placeholder::Placeholder;
use super::policy::{Answers, Policy};
use super::{Errand, confine};
use crate::executor::Executor;
use crate::fs::{Cancelled, FsError};
use crate::spec::StartError;
use crate::sys::poll;

/// Processes that wait for work.
const MAX_IDLE: usize = 16;

/// Processes at work, all policies together.
const MAX_BUSY: usize = 64;

/// Processes at work under one policy.
const MAX_PER_POLICY: usize = 4;

/// How long one stays without work.
const IDLE: Duration = Duration::from_secs(30);

/// The same for one that holds places on the host's disk, which others can see.
const IDLE_WITH_PLACES: Duration = Duration::from_secs(1);

/// Between two looks at whether anybody still waits for an answer.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long to look for an answer before sleeping: being woken takes as long, where that has to wake
/// a core as well.
const LOOK: Duration = Duration::from_micros(100);

/// How many answers are waited for in the usual way after one that did not come while we looked.
const LOOKS_SKIPPED: u32 = 15;

/// The same after somebody else has had our core for long: everybody here has waited for that.
const LOOKS_SKIPPED_WHEN_BUSY: u32 = 1023;

/// How long one may take to end by itself.
const FAREWELL: Duration = Duration::from_millis(500);

/// How often one is replaced because the host changes what its view is made of.
const ATTEMPTS: usize = 4;

/// What a process is confined by.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// As it is resolved now.
    pub(crate) policy: Policy,
    /// Whether less will do.
    pub(crate) allow_partial: bool,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Helpers {
    shared: Arc<Shared>,
    /// What policies meant, the last one last.
    remembered: Mutex<VecDeque<Remembered>>,
}

/// What a policy meant, and what of the disk made it mean that.
#[derive(Debug)]
pub(super) struct Remembered {
    pub(super) sandbox: Arc<Sandbox>,
    pub(super) intent: Intent,
    pub(super) answers: Arc<Answers>,
    pub(super) key: Arc<Key>,
}

/// How many are remembered.
const MAX_REMEMBERED: usize = 16;

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// One has become idle or gone.
    changed: Condvar,
    /// Answers that are not worth looking for.
    unlooked: AtomicU32,
}

#[derive(Debug, Default)]
struct State {
    /// The least recently used first.
    idle: Vec<(Helper, Instant)>,
    busy: Vec<Arc<Key>>,
    /// Threads that wait for one to become idle or go.
    waiting: usize,
    /// A thread looks after idle ones.
    watched: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// One process, as seen from here.
#[derive(Debug)]
struct Helper {
    key: Arc<Key>,
    socket: Option<Socket>,
    pidfd: OwnedFd,
    /// Held as long as it lives: its view lies on them.
    places: Vec<Placeholder>,
}

/// The way to a process.
#[derive(Debug)]
enum Socket {
    Plain(OwnedFd),
    /// The runtime looks after it, for those who must not block.
    Watched(AsyncFd<OwnedFd>),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(fd) => fd.as_fd(),
            Self::Watched(fd) => fd.get_ref().as_fd(),
        }
    }
}

impl Socket {
    /// The same, looked after by this runtime.
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
        // It ends when nobody can ask any more.
        self.socket = None;
        if !ready(self.pidfd.as_fd(), PollFlags::IN, FAREWELL) {
            let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
        }
        // Someone who reaps orphans may have been faster.
        let _ = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
    }
}

/// Waits until something can be said of a descriptor; whether it can.
fn ready(fd: BorrowedFd<'_>, what: PollFlags, patience: Duration) -> bool {
    let until = Instant::now() + patience;
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
    fn start(executor: &Executor, key: Arc<Key>) -> Result<Self, FsError> {
        let told = |error: StartError| match error {
            StartError::Refused(why) => FsError::Unenforceable(why),
            other => FsError::Helper(other.to_string()),
        };
        let host = executor.sandbox_host().map_err(told)?;
        let prison = confine(key.policy.clone(), key.allow_partial, host, None).map_err(told)?;
        let (socket, errand) = Errand::serve(&prison).map_err(failed)?;
        let pidfd = executor.launch_helper(&errand).map_err(told)?;
        let helper = Self {
            key,
            socket: Some(Socket::Plain(socket)),
            pidfd,
            places: prison.placeholders,
        };
        errand.wait_served().map_err(told)?;
        Ok(helper)
    }

    /// Whether it can be asked.
    fn is_alive(&self) -> bool {
        let socket = self.socket.as_ref();
        socket.is_some_and(|socket| !ready(socket.as_fd(), PollFlags::IN, Duration::ZERO))
    }

    fn call(
        &self,
        request: &Request,
        tail: &[u8],
        descriptors: &[BorrowedFd<'_>],
        cancelled: Cancelled<'_>,
    ) -> Result<Frame<Reply>, FsError> {
        let Some(socket) = &self.socket else {
            return Err(FsError::Helper("it has ended".to_owned()));
        };
        helper::send(socket, request, tail, descriptors).map_err(failed)?;
        while !ready(socket.as_fd(), PollFlags::IN, PATIENCE) {
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

    fn lifetime(&self) -> Duration {
        if self.places.is_empty() {
            IDLE
        } else {
            IDLE_WITH_PLACES
        }
    }
}

fn failed(error: io::Error) -> FsError {
    FsError::Helper(error.to_string())
}

impl Helpers {
    /// Has something done under a policy; blocks.
    pub(super) fn call(
        &self,
        executor: &Executor,
        key: &Arc<Key>,
        request: &Request,
        tail: &[u8],
        descriptors: &[BorrowedFd<'_>],
        cancelled: Cancelled<'_>,
    ) -> Result<Frame<Reply>, FsError> {
        for _ in 0..ATTEMPTS {
            let turn = self.turn(key, cancelled)?;
            let helper = match turn.idle {
                Some(helper) => helper,
                None => Helper::start(executor, Arc::clone(key))?,
            };
            // Dropped, and so ended, if it fails.
            let frame = helper.call(request, tail, descriptors, cancelled)?;
            if !matches!(frame.head, Reply::Stale) {
                turn.place.give_back(helper);
                return Ok(frame);
            }
        }
        Err(FsError::Helper(format!(
            "what it may see was replaced {ATTEMPTS} times while it looked"
        )))
    }

    /// What a policy meant, if that is known, and what has to be as it was for it to mean the same;
    /// never waits.
    pub(super) fn remembered(
        &self,
        sandbox: &Sandbox,
        intent: Intent,
    ) -> Option<(Arc<Key>, Arc<Answers>)> {
        let remembered = self.remembered.try_lock()?;
        let found = remembered
            .iter()
            .rfind(|one| one.intent == intent && *one.sandbox == *sandbox)?;
        Some((Arc::clone(&found.key), Arc::clone(&found.answers)))
    }

    /// Keeps what a policy means for the next request under it.
    pub(super) fn remember(&self, new: Remembered) {
        let Some(mut remembered) = self.remembered.try_lock() else {
            return;
        };
        remembered.retain(|one| one.intent != new.intent || one.sandbox != new.sandbox);
        if remembered.len() == MAX_REMEMBERED {
            remembered.pop_front();
        }
        remembered.push_back(new);
    }

    /// Asks one that waits, if there is one and that takes no waiting.
    pub(super) fn ask_soon(&self, key: &Key, request: &Request) -> Option<Asking> {
        let mut state = self.shared.state.try_lock()?;
        let position = state.idle.iter().rposition(|(one, _)| *one.key == *key)?;
        let (helper, _) = state.idle.remove(position);
        let key = Arc::clone(&helper.key);
        state.busy.push(Arc::clone(&key));
        drop(state);
        let mut asking = Asking {
            helper: Some(helper),
            place: Some(Place {
                shared: Arc::clone(&self.shared),
                key,
            }),
        };
        let helper = asking.helper.as_mut()?;
        helper.socket = helper.socket.take().and_then(Socket::watched);
        // One that has ended takes nothing.
        helper::send_at_once(helper.socket.as_ref()?, request).ok()?;
        Some(asking)
    }

    /// Ends those that wait for work.
    pub(crate) fn clear(&self) {
        let idle = std::mem::take(&mut self.shared.state().idle);
        drop(idle);
    }

    /// Takes one that waits, or leave to start one.
    fn turn(&self, key: &Arc<Key>, cancelled: Cancelled<'_>) -> Result<Turn, FsError> {
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
            (state, _) = changed.wait_timeout(state, PATIENCE);
            state.waiting -= 1;
            if cancelled() {
                return Err(FsError::Cancelled);
            }
        }
    }

    fn granted(&self, key: &Arc<Key>, idle: Option<Helper>) -> Turn {
        let place = Place {
            shared: Arc::clone(&self.shared),
            key: Arc::clone(key),
        };
        Turn { idle, place }
    }
}

/// A process that was asked something from where nothing may block.
#[derive(Debug)]
pub(super) struct Asking {
    helper: Option<Helper>,
    place: Option<Place>,
}

impl Drop for Asking {
    fn drop(&mut self) {
        // Whatever it was asked, nobody will hear the answer: it ends, which may take a moment.
        drop_apart(self.helper.take());
    }
}

/// Drops helpers where that may take a moment.
fn drop_apart(helpers: impl IntoIterator<Item = Helper>) {
    let helpers: Vec<_> = helpers.into_iter().collect();
    if helpers.is_empty() {
        return;
    }
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn_blocking(move || drop(helpers));
    }
}

impl Asking {
    /// What it answers; nothing if it does not, or not to this. Whoever has nothing else to do may look
    /// for it for a moment.
    pub(super) async fn answer(mut self, look: bool) -> Option<Frame<Reply>> {
        let frame = self.receive(look).await?;
        if matches!(frame.head, Reply::Stale) {
            return None;
        }
        if let (Some(helper), Some(place)) = (self.helper.take(), self.place.take()) {
            drop_apart(place.keep(helper));
        }
        Some(frame)
    }

    async fn receive(&self, look: bool) -> Option<Frame<Reply>> {
        let Socket::Watched(socket) = self.helper.as_ref()?.socket.as_ref()? else {
            return None;
        };
        let mut receiving = Receiving::new();
        if look && let Some(found) = self.look(&mut receiving, socket.get_ref()) {
            return found.ok()?;
        }
        loop {
            let mut ready = socket.readable().await.ok()?;
            match receiving.receive(socket.get_ref(), RecvFlags::DONTWAIT) {
                Ok(frame) => {
                    // Nothing more comes unless it is asked for.
                    ready.clear_ready();
                    return frame;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(_) => return None,
            }
        }
    }

    /// Looks for an answer for as long as it would take to be woken by it.
    fn look(
        &self,
        receiving: &mut Receiving,
        socket: &OwnedFd,
    ) -> Option<io::Result<Option<Frame<Reply>>>> {
        let unlooked = &self.place.as_ref()?.shared.unlooked;
        let skip = |left: u32| left.checked_sub(1);
        if unlooked
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, skip)
            .is_ok()
        {
            return None;
        }
        let begun = Instant::now();
        // The kernel may have it wait for us to sleep, on this core.
        std::thread::yield_now();
        if begun.elapsed() >= 10 * LOOK {
            unlooked.store(LOOKS_SKIPPED_WHEN_BUSY, Ordering::Relaxed);
        }
        loop {
            match receiving.receive(socket, RecvFlags::DONTWAIT) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return Some(received),
            }
            if begun.elapsed() >= LOOK {
                // It is busy, or waits for the core that we are on.
                unlooked.fetch_max(LOOKS_SKIPPED, Ordering::Relaxed);
                return None;
            }
            std::hint::spin_loop();
        }
    }
}

/// Leave to use a process.
struct Turn {
    idle: Option<Helper>,
    place: Place,
}

/// A place among the busy.
#[derive(Debug)]
struct Place {
    shared: Arc<Shared>,
    key: Arc<Key>,
}

impl Drop for Place {
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

impl Place {
    /// Keeps a process for the next request.
    fn give_back(self, helper: Helper) {
        drop(self.keep(helper));
    }

    /// As [`Place::give_back`]; what has to go for it is left to the caller to drop.
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

/// Has a thread end those that have been idle for too long; it ends with the last of them.
fn start_watch(shared: &Arc<Shared>) -> bool {
    let weak = Arc::downgrade(shared);
    std::thread::Builder::new()
        .name("helpers".to_owned())
        .spawn(move || {
            while sweep(&weak) {
                std::thread::sleep(IDLE_WITH_PLACES / 2);
            }
        })
        .is_ok()
}

/// Ends those that have been idle for too long; whether there are others.
fn sweep(shared: &Weak<Shared>) -> bool {
    let Some(shared) = shared.upgrade() else {
        return false;
    };
    let mut state = shared.state();
    let (old, idle): (Vec<_>, Vec<_>) = std::mem::take(&mut state.idle)
        .into_iter()
        .partition(|(one, since)| since.elapsed() >= one.lifetime() || !one.is_alive());
    state.idle = idle;
    let others = !state.idle.is_empty();
    state.watched = others;
    drop(state);
    drop(old);
    others
}
