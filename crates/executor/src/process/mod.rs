//! Process handle: input, output, signals and termination of one started process.
//!
//! A task per process (`supervise`) reads output and detects the exit; handles share its state and
//! may be used from any thread. Dropping the last handle kills the process.

mod pace;
mod scratch;
pub(crate) mod start;
pub(crate) mod stdin;
mod supervise;
pub(crate) mod terminal;

use std::io;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use exec_server_protocol::sandbox::EnforcementReport;
use exec_server_sync::Mutex;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, pidfd_send_signal};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use crate::limits::{self, ControlGroup};
use crate::log::{Exit, Log};
use crate::process::stdin::{PushResult, StdinQueue};
use crate::spec::{PrivateNetwork, PtySize, StartError};
use crate::tree::{self, Leader, RemainingProcesses, TreeTermination, Trees};

pub use crate::tree::table::{TableReads, table_reads};

/// 1 MiB: pipe capacity for a process that transfers a lot of data.
const LARGE_PIPE_BYTES: usize = 1 << 20;

/// How long to wait for a killed tree to end before the remaining processes are reported as
/// survivors.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// A started process; cheap to clone.
#[derive(Debug, Clone)]
pub struct Process {
    shared: Arc<ProcessShared>,
    _owner: Arc<LastHandle>,
}

#[derive(Debug)]
struct ProcessShared {
    pid: Pid,
    /// The command itself, where `pid` is the sandbox's first process, which waits for it.
    inside: Option<Pid>,
    /// Refers to `inside`, until the log is closed: a record of a closed process holds no descriptor.
    inside_pidfd: Mutex<Option<OwnedFd>>,
    /// How much of a sandbox's policy is enforced.
    enforcement: Option<EnforcementReport>,
    /// Listeners in the process's own network, until a caller takes them.
    listeners: Mutex<Option<ProcessListeners>>,
    /// The leader of its process tree.
    leader: Leader,
    started_at: SystemTime,
    /// The log and its follower.
    output: Mutex<OutputState>,
    /// Notified of every new entry.
    changed: Notify,
    /// Whether `pid` may still be signalled.
    life: Mutex<ProcessLife>,
    stdin: Mutex<StdinQueue>,
    /// Number of writes to the input so far.
    input: AtomicU64,
    /// The supervisor waits for more output before it reads; input ends that wait.
    is_paced: AtomicBool,
    /// Notified when a full input queue has space again.
    stdin_room: Notify,
    /// The server's end of the terminal, used to resize it; dropped when the log is closed.
    terminal: Mutex<Option<Arc<AsyncFd<OwnedFd>>>>,
    has_terminal: bool,
    /// Wakes the supervisor.
    wake: Notify,
    orders: Mutex<SupervisorRequests>,
    /// Bytes that arrived after the log was closed.
    discarded: AtomicU64,
    /// Control groups that enforce the limits of the tree.
    groups: Mutex<Vec<ControlGroup>>,
    /// Whether the end of the log lists the descendants that still run.
    list_descendants: bool,
}

/// Listeners in a process's own network, in the order of the request.
#[derive(Debug, Default)]
pub struct ProcessListeners {
    /// TCP listeners.
    pub tcp: Vec<TcpListener>,
    /// UDP sockets.
    pub udp: Vec<UdpSocket>,
}

impl ProcessListeners {
    fn new(network: &PrivateNetwork, mut files: Vec<OwnedFd>) -> Result<Self, StartError> {
        if files.len() != network.tcp.len() + network.udp.len() {
            return Err(StartError::System {
                action: "set up the network of a process",
                source: io::Error::other("the child sent the wrong number of listening sockets"),
            });
        }
        let udp = files.split_off(network.tcp.len());
        Ok(Self {
            tcp: files.into_iter().map(TcpListener::from).collect(),
            udp: udp.into_iter().map(UdpSocket::from).collect(),
        })
    }
}

#[derive(Debug)]
struct OutputState {
    log: Log,
    /// Woken once at the next entry.
    follower: Option<Waker>,
}

/// ```text
/// Running ── reaped ──► Ended
/// ```
///
/// A pid may be reused once it is reaped, so signals are sent under the same lock as reaping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessLife {
    Running,
    Ended,
}

/// Requests to the supervisor.
#[derive(Debug, Default)]
struct SupervisorRequests {
    /// The last handle was dropped.
    abandoned: bool,
}

/// Recipients of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalRecipients {
    /// The process group that the process was started in.
    Group,
    /// The process alone.
    Leader,
    /// The process and every descendant.
    Tree,
}

/// Method of termination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TerminationMethod {
    /// SIGKILL to the whole tree.
    Now,
    /// SIGTERM to the whole tree, and SIGKILL to the remaining processes after this time.
    Within(Duration),
}

/// Result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputWriteResult {
    /// The data was written or queued.
    Accepted,
    /// The input is closed.
    Closed,
}

/// Detects that the last handle was dropped.
#[derive(Debug)]
struct LastHandle(Arc<ProcessShared>);

impl Drop for LastHandle {
    fn drop(&mut self) {
        if !self.0.is_closed() {
            self.0.signal_group(Signal::KILL);
        }
        self.0.orders.lock().abandoned = true;
        self.0.wake.notify_one();
    }
}

impl Process {
    /// The pid; may be reused once the process has ended.
    pub fn pid(&self) -> i32 {
        self.shared.pid.as_raw_nonzero().get()
    }

    /// Enforcement level of its sandbox policy, if it has one.
    pub fn enforcement(&self) -> Option<&EnforcementReport> {
        self.shared.enforcement.as_ref()
    }

    /// Takes the listeners of its private network; `None` if it has no network or they were taken
    /// before.
    pub fn take_listeners(&self) -> Option<ProcessListeners> {
        self.shared.listeners.lock().take()
    }

    /// Start time.
    pub fn started_at(&self) -> SystemTime {
        self.shared.started_at
    }

    /// Whether it has a terminal.
    pub fn has_terminal(&self) -> bool {
        self.shared.has_terminal
    }

    /// The exit, once the process has ended.
    pub fn exit(&self) -> Option<Exit> {
        self.with_log(|log| log.exit().cloned())
    }

    /// Bytes that descendants wrote after the log was closed.
    pub fn discarded_bytes(&self) -> u64 {
        self.shared.discarded.load(Ordering::Relaxed)
    }

    /// Calls `read` with the log.
    pub fn with_log<R>(&self, read: impl FnOnce(&Log) -> R) -> R {
        read(&self.shared.output.lock().log)
    }

    /// Runs `take` on the log; if it returns `None`, wakes `waker` at the next entry.
    ///
    /// There is one follower at a time; the latest waker replaces an earlier one. `take` may call
    /// [`Log::advance`]. A closed log keeps no waker, because no entry will follow.
    ///
    /// The log keeps `waker` until then, so a waker that owned this process would keep it alive.
    pub fn follow<R>(&self, waker: &Waker, take: impl FnOnce(&mut Log) -> Option<R>) -> Option<R> {
        let mut output = self.shared.output.lock();
        let had_room = output.log.has_room();
        let taken = take(&mut output.log);
        if taken.is_none() && output.log.close().is_none() {
            output.follower = Some(waker.clone());
        }
        let room = !had_room && output.log.has_room();
        drop(output);
        if room {
            self.shared.wake.notify_one();
        }
        taken
    }

    /// Applies backpressure for a consumer at `cursor`: the process waits instead of losing output
    /// that the consumer has not taken.
    pub fn hold(&self, cursor: u64) {
        self.shared.output.lock().log.hold(cursor);
    }

    /// The consumer that applies backpressure has taken everything up to `cursor`.
    pub fn advance(&self, cursor: u64) {
        self.shared.output.lock().log.advance(cursor);
        self.shared.wake.notify_one();
    }

    /// Ends the backpressure and removes the follower.
    pub fn release(&self) {
        let mut output = self.shared.output.lock();
        output.log.release();
        output.follower = None;
        drop(output);
        self.shared.wake.notify_one();
    }

    /// Prevents eviction of output that was not searched yet; see [`OutputWatch`].
    pub(crate) fn watch(&self, cursor: u64) -> OutputWatch {
        let watcher = self.shared.output.lock().log.watch(cursor);
        OutputWatch {
            process: self.clone(),
            watcher,
        }
    }

    /// Completes at the next entry of the log after it was enabled.
    pub(crate) fn changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.shared.changed.notified()
    }

    /// The process and its living descendants.
    pub(crate) async fn members(&self) -> Vec<Pid> {
        self.tree().members().await
    }

    fn tree(&self) -> Trees {
        Trees::of([&self.shared.leader])
    }

    /// Waits until `done` returns a value for the log.
    ///
    /// Cancel safe.
    pub async fn wait_for<R>(&self, mut done: impl FnMut(&Log) -> Option<R>) -> R {
        loop {
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(found) = self.with_log(&mut done) {
                return found;
            }
            changed.await;
        }
    }

    /// Writes to the process's input without waiting; returns the data as `Err` if it would have to
    /// wait.
    ///
    /// # Errors
    ///
    /// The data, when the input queue is full.
    pub fn try_write(&self, data: Bytes) -> Result<InputWriteResult, Bytes> {
        // Count the write before the process can respond to it.
        self.shared.input.fetch_add(1, Ordering::SeqCst);
        let mut stdin = self.shared.stdin.lock();
        let pushed = stdin.push(data);
        let waiting = stdin.waiting().is_some();
        drop(stdin);
        if waiting || self.shared.is_paced.load(Ordering::SeqCst) {
            self.shared.wake.notify_one();
        }
        match pushed {
            PushResult::Accepted => Ok(InputWriteResult::Accepted),
            PushResult::Closed => Ok(InputWriteResult::Closed),
            PushResult::Full(data) => Err(data),
        }
    }

    /// Writes to the process's input; waits while the input queue is full.
    ///
    /// Cancel safe: a cancelled write has not been made.
    pub async fn write(&self, mut data: Bytes) -> InputWriteResult {
        loop {
            let room = self.shared.stdin_room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
            match self.try_write(data) {
                Ok(written) => return written,
                Err(back) => data = back,
            }
            room.await;
        }
    }

    /// Ends the process's input after the data written before: a pipe is closed, a terminal
    /// receives its end-of-input character.
    pub async fn close_stdin(&self) -> InputWriteResult {
        if self.shared.has_terminal {
            let end = self
                .shared
                .terminal
                .lock()
                .as_ref()
                .map(terminal::end_of_input);
            return match end {
                Some(end) => self.write(Bytes::copy_from_slice(&[end])).await,
                None => InputWriteResult::Closed,
            };
        }
        let mut stdin = self.shared.stdin.lock();
        let open = stdin.finish();
        drop(stdin);
        self.shared.wake.notify_one();
        if open {
            InputWriteResult::Accepted
        } else {
            InputWriteResult::Closed
        }
    }

    /// Resizes the terminal.
    ///
    /// # Errors
    ///
    /// `NotConnected` when there is no terminal (any more).
    pub fn resize(&self, size: PtySize) -> io::Result<()> {
        match self.shared.terminal.lock().as_ref() {
            Some(master) => terminal::resize(master, size),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Sends a signal; has no effect on a process that has ended.
    ///
    /// # Errors
    ///
    /// Any IO error, when the process exists but may not be signalled.
    pub async fn signal(&self, signal: Signal, scope: SignalRecipients) -> io::Result<()> {
        match scope {
            SignalRecipients::Group => self.shared.signal_group(signal),
            SignalRecipients::Leader => {
                let life = self.shared.life.lock();
                if *life == ProcessLife::Running {
                    match (&*self.shared.inside_pidfd.lock(), self.shared.inside) {
                        (Some(pidfd), _) => match pidfd_send_signal(pidfd, signal) {
                            // The command has ended, and the sandbox's first process is about to.
                            Err(Errno::SRCH) => {}
                            // A filter of system calls; the pid is not reused before it is reaped.
                            Err(Errno::NOSYS) if is_unreaped(pidfd) => {
                                kill_process(
                                    self.shared.inside.unwrap_or(self.shared.pid),
                                    signal,
                                )?;
                            }
                            sent => sent?,
                        },
                        (None, Some(_)) => {}
                        (None, None) => kill_process(self.shared.pid, signal)?,
                    }
                }
            }
            SignalRecipients::Tree => self.tree().signal(signal).await,
        }
        Ok(())
    }

    /// Begins to terminate the process and its whole tree; returns true if it was still running.
    ///
    /// Has no effect once the log is closed: processes that outlive the log do not belong to it.
    pub fn terminate(&self, end: TerminationMethod) -> bool {
        let running = self.is_running();
        if !self.shared.is_closed() {
            self.shared.begin_to_end(end);
        }
        running
    }

    /// Terminates the process and its whole tree; returns the processes that are left with their
    /// command lines.
    ///
    /// This includes orphans that only may belong to its tree, because no evidence shows where they
    /// belong. Unlike [`Process::terminate`] this also terminates processes that outlived the
    /// closed log.
    pub async fn terminate_and_wait(&self, end: TerminationMethod) -> (bool, Vec<(i32, String)>) {
        let running = self.is_running();
        let how = self.shared.ending(end);
        let RemainingProcesses {
            members,
            unattributed_orphans,
        } = self.tree().end(how).await;
        if running && members.is_empty() {
            // The tree has ended, so the supervisor is about to detect the exit of its leader.
            let exited = self.wait_for(|log| log.exit().map(|_| ()));
            let _ = tokio::time::timeout(KILL_TIMEOUT, exited).await;
        }
        let left: Vec<Pid> = members.into_iter().chain(unattributed_orphans).collect();
        if left.is_empty() {
            return (running, Vec::new());
        }
        let name = |pid: Pid| (pid.as_raw_nonzero().get(), tree::command_of(pid));
        let named = move || left.into_iter().map(name).collect();
        (running, blocking(named).await)
    }

    /// Whether all its descendants have ended.
    pub async fn is_alone(&self) -> bool {
        self.members().await.is_empty()
    }

    fn is_running(&self) -> bool {
        *self.shared.life.lock() == ProcessLife::Running
    }
}

/// A search of a process's output; applies backpressure until dropped.
#[derive(Debug)]
pub(crate) struct OutputWatch {
    process: Process,
    watcher: u64,
}

impl OutputWatch {
    /// Everything up to `cursor` was searched.
    pub(crate) fn advance(&self, cursor: u64) {
        let shared = &self.process.shared;
        shared.output.lock().log.watched(self.watcher, cursor);
        shared.wake.notify_one();
    }
}

impl Drop for OutputWatch {
    fn drop(&mut self) {
        let shared = &self.process.shared;
        shared.output.lock().log.unwatch(self.watcher);
        shared.wake.notify_one();
    }
}

impl ProcessShared {
    /// The descendants that still run after the process itself has ended, with their command lines.
    async fn descendants(&self) -> Vec<(i32, String)> {
        let tag = self.leader.tag;
        // All processes in a separate PID namespace end with the first process of that namespace.
        if self.inside.is_some() || !blocking(move || tree::may_have_orphans(tag)).await {
            return Vec::new();
        }
        let members = Trees::of([&self.leader]).without_orphans().members().await;
        let name = |pid: Pid| (pid.as_raw_nonzero().get(), tree::command_of(pid));
        // A process without a command line is about to end.
        let is_running = |(_, command): &(i32, String)| !command.starts_with('[');
        blocking(move || members.into_iter().map(name).filter(is_running).collect()).await
    }

    /// Signals the process group, unless its leader was reaped and the number may mean another
    /// group.
    fn signal_group(&self, signal: Signal) {
        let life = self.life.lock();
        if *life != ProcessLife::Running {
            return;
        }
        // Fails only if the group is gone already, which is fine.
        match self.inside {
            // All processes in the namespace end with its first process.
            Some(_) if signal == Signal::KILL => {
                let _ = rustix::process::kill_process_group(self.pid, signal);
            }
            // The pid cannot be reused before the guardian reaps the process.
            Some(inside) => {
                if self.inside_pidfd.lock().as_ref().is_some_and(is_unreaped) {
                    let _ = rustix::process::kill_process_group(inside, signal);
                }
            }
            None => {
                let _ = rustix::process::kill_process_group(self.pid, signal);
            }
        }
    }

    /// The process group in which the command was started.
    fn group(self: &Arc<Self>) -> tree::ProcessGroup {
        let shared = Arc::clone(self);
        tree::ProcessGroup {
            id: self.inside.unwrap_or(self.pid),
            signal: Box::new(move |signal| shared.signal_group(signal)),
        }
    }

    fn ending(self: &Arc<Self>, end: TerminationMethod) -> TreeTermination {
        TreeTermination {
            grace: match end {
                TerminationMethod::Now => None,
                TerminationMethod::Within(grace) => Some(grace),
            },
            timeout: KILL_TIMEOUT,
            groups: vec![self.group()],
        }
    }

    /// Begins to terminate the process and its tree, without waiting.
    fn begin_to_end(self: &Arc<Self>, end: TerminationMethod) {
        let trees = Trees::of([&self.leader]).without_orphans();
        trees.begin_to_end(self.ending(end));
    }

    fn is_closed(&self) -> bool {
        self.output.lock().log.close().is_some()
    }

    /// Appends to the log and wakes the waiting tasks.
    fn append(&self, append: impl FnOnce(&mut Log)) {
        let mut output = self.output.lock();
        append(&mut output.log);
        let follower = output.follower.take();
        drop(output);
        if let Some(follower) = follower {
            follower.wake();
        }
        self.changed.notify_waiters();
    }
}

/// Whether a process has not been reaped yet.
fn is_unreaped(pidfd: &OwnedFd) -> bool {
    // A descriptor of a process that was reaped has no number any more.
    let number = pidfd.as_raw_fd();
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"));
    info.is_ok_and(|info| !info.contains("Pid:\t-1"))
}

/// Terminates several processes together: SIGTERM, then SIGKILL to the rest of their trees.
pub async fn end_all(processes: &[Process], grace: Duration) {
    if processes.is_empty() {
        return;
    }
    let how = TreeTermination {
        grace: (!grace.is_zero()).then_some(grace),
        timeout: KILL_TIMEOUT,
        groups: processes.iter().map(|one| one.shared.group()).collect(),
    };
    let trees = Trees::of(processes.iter().map(|process| &process.shared.leader));
    trees.without_orphans().end(how).await;
    limits::sweep();
}

/// Sleeps until this time, or forever without one.
pub(crate) async fn sleep_until(moment: Option<tokio::time::Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// Runs blocking work outside the async workers.
pub(crate) async fn blocking<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}
