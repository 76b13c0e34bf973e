//! Executor: the state that all processes of one program share.
//!
//! Holds the defaults, the number of live processes, and the set of child processes that have a
//! supervisor, which distinguishes them from adopted orphans.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use exec_server_protocol::fs::FsRequest;
use exec_server_protocol::sandbox::Sandbox;
use exec_server_sandbox::host::HostFeatures;
use exec_server_sandbox::{ForkRequest, Launcher, PendingLaunch, SandboxError};
use exec_server_sync::{Mutex, MutexGuard, RwLock};
use rustix::process::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use crate::fs::{self, FsError};
use crate::limits;
use crate::log::{OutputMeter, Retention};
use crate::process::{self, Process};
use crate::sandbox;
use crate::sandbox::files::{FileIntent, PolicyFiles};
use crate::sandbox::pool::HelperPool;
use crate::spec::{ProcessSpec, StartError};
use exec_server_sys::reap::{self, ReapedChild};
use exec_server_sys::{child_ends, poll};

/// Limits that may change while processes run.
#[derive(Debug, Clone, Copy)]
pub struct ExecutorLimits {
    /// How much output each process retains.
    pub retention: Retention,
    /// Maximum number of live processes.
    pub max_processes: usize,
    /// Time without output after which the executor stops waiting for a descendant that keeps the
    /// output of an exited process open.
    pub inherited_output_grace: Duration,
}

impl Default for ExecutorLimits {
    fn default() -> Self {
        Self {
            retention: Retention::default(),
            max_processes: 4096,
            inherited_output_grace: Duration::from_secs(2),
        }
    }
}

/// Settings of an executor.
#[derive(Debug, Clone, Default)]
pub struct ExecutorConfig {
    /// Initial limits.
    pub limits: ExecutorLimits,
    /// The environment that policies start from: usually this program's own.
    pub environment: BTreeMap<String, String>,
    /// Path of an `exec-server` executable that launches sandboxes. May be this program's own path
    /// if its `main` begins with [`crate::sandbox::dispatch`].
    pub launcher: Option<PathBuf>,
    /// Files and directories that are hidden in every sandbox with a restricted view: keys, tokens.
    pub hidden: Vec<PathBuf>,
}

/// Starts processes. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Executor {
    inner: Arc<ExecutorShared>,
}

#[derive(Debug)]
struct ExecutorShared {
    config: ExecutorConfig,
    /// The current limits.
    limits: RwLock<ExecutorLimits>,
    /// `/dev/null`, used as stdin of processes without input.
    null: OwnedFd,
    /// Launches sandboxes, and knows the sandbox features of this machine.
    launcher: Launcher,
    /// Helper processes that run file operations under a policy.
    helpers: HelperPool,
    /// Dropped last: removes the files that sandboxes left on disk.
    live: Arc<LiveProcesses>,
    /// Counts the output retained by all logs.
    retained: OutputMeter,
    /// Child processes that have a supervisor. Reaping happens under this lock, so that a pid that
    /// is reused immediately is not mistaken for its former owner.
    managed: Mutex<HashSet<Pid>>,
    /// Held shared while a child is started and exclusively while orphans are reaped: a child that
    /// is not in the set yet must not be taken for an orphan.
    starting: RwLock<()>,
}

#[derive(Debug, Default)]
struct LiveProcesses {
    count: AtomicUsize,
    /// Notified when the last process has ended.
    idle: Notify,
}

/// Source of notifications that child processes ended.
enum ChildEnds {
    Descriptor(AsyncFd<OwnedFd>),
    /// For a program that has not blocked SIGCHLD.
    Signal(tokio::signal::unix::Signal),
}

impl ChildEnds {
    fn new() -> io::Result<Self> {
        Ok(match child_ends::descriptor()? {
            Some(fd) => Self::Descriptor(poll::register(fd, Interest::READABLE)?),
            None => Self::Signal(signal(SignalKind::child())?),
        })
    }

    /// Waits until a child process has ended; returns false when the runtime shuts down.
    async fn wait(&mut self) -> bool {
        match self {
            Self::Descriptor(fd) => fd.readable().await.is_ok(),
            Self::Signal(signal) => signal.recv().await.is_some(),
        }
    }

    fn clear(&mut self) {
        if let Self::Descriptor(fd) = self {
            // Size of one `signalfd_siginfo`; its content is not used.
            let mut signal = [0; 128];
            let mut read = || {
                fd.try_io(Interest::READABLE, |fd| {
                    Ok(rustix::io::read(fd, &mut signal)?)
                })
            };
            while read().is_ok() {}
        }
    }
}

/// Result of reaping orphans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OrphanReaping {
    Reaped,
    /// A supervisor is about to reap its child; orphans may be queued behind that child.
    Waiting,
}

/// One live process in the count of live processes.
#[derive(Debug)]
pub(crate) struct ProcessSlot(Arc<LiveProcesses>);

impl Drop for ProcessSlot {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

impl Executor {
    /// Creates an executor with these settings.
    ///
    /// # Errors
    ///
    /// When `/dev/null` cannot be opened.
    pub fn new(config: ExecutorConfig) -> io::Result<Self> {
        let null = File::options().read(true).write(true).open("/dev/null");
        let null = null.map_err(|error| {
            let message = format!(
                "cannot open /dev/null, which processes without input get: {error}; mount /dev, or \
                 create it by `mknod -m 666 /dev/null c 1 3`"
            );
            io::Error::new(error.kind(), message)
        })?;
        let launcher = Launcher::new(config.launcher.as_deref(), sandbox::server_tag());
        Ok(Self {
            inner: Arc::new(ExecutorShared {
                limits: RwLock::new(config.limits),
                config,
                null: null.into(),
                launcher,
                helpers: HelperPool::default(),
                live: Arc::default(),
                retained: OutputMeter::default(),
                managed: Mutex::default(),
                starting: RwLock::default(),
            }),
        })
    }

    /// Returns the settings.
    pub fn config(&self) -> &ExecutorConfig {
        &self.inner.config
    }

    /// Returns the current limits.
    pub fn limits(&self) -> ExecutorLimits {
        *self.inner.limits.read()
    }

    /// Replaces the limits for processes that are started from now on.
    pub fn set_limits(&self, limits: ExecutorLimits) {
        let mut current = self.inner.limits.write();
        *current = limits;
    }

    /// Number of live processes.
    pub fn live(&self) -> usize {
        self.inner.live.count.load(Ordering::Relaxed)
    }

    /// Bytes of output that all processes retain together.
    pub fn retained_bytes(&self) -> u64 {
        self.inner.retained.bytes()
    }

    /// Total bytes of output evicted so far.
    pub fn evicted_bytes(&self) -> u64 {
        self.inner.retained.evicted()
    }

    pub(crate) fn meter(&self) -> OutputMeter {
        self.inner.retained.clone()
    }

    /// Waits until there is no live process.
    pub async fn idle(&self) {
        loop {
            let idle = self.inner.live.idle.notified();
            if self.live() == 0 {
                return;
            }
            idle.await;
        }
    }

    /// Starts a process.
    ///
    /// Needs a tokio runtime. If this future is dropped, a process that is being started is killed.
    ///
    /// # Errors
    ///
    /// The error names what is missing or was refused; no process or resource is left behind.
    pub async fn start(&self, spec: ProcessSpec) -> Result<Process, StartError> {
        let live = &self.inner.live;
        let slot = ProcessSlot(Arc::clone(live));
        let limit = self.limits().max_processes;
        if live.count.fetch_add(1, Ordering::Relaxed) >= limit {
            return Err(StartError::TooMany(limit));
        }
        process::start::start(self, slot, spec).await
    }

    /// Makes this process the parent of its descendants' orphans and reaps them when they end.
    ///
    /// For programs that have no other child processes, like a server: it waits for any child. The
    /// task that does this runs as long as the runtime.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or signals cannot be awaited.
    pub fn adopt_orphans(&self) -> io::Result<()> {
        /// Maximum time that an orphan remains a zombie, and the interval between two attempts to
        /// remove control groups.
        const PERIOD: Duration = Duration::from_millis(250);
        crate::tree::adopt_orphans()?;
        let mut ended = ChildEnds::new()?;
        let this = self.clone();
        tokio::spawn(async move {
            // Signals of children that ended earlier are not repeated, so the first round runs
            // immediately.
            let mut again = true;
            loop {
                if !again && !ended.wait().await {
                    return;
                }
                // Reaps children that end together in one round.
                tokio::time::sleep(PERIOD).await;
                // Children that end after this call are reported again.
                ended.clear();
                let waits = this.reap_orphans() == OrphanReaping::Waiting;
                again = limits::sweep() || waits;
            }
        });
        Ok(())
    }

    /// Reaps orphans that have ended.
    fn reap_orphans(&self) -> OrphanReaping {
        while let Some(pid) = reap::any_ended() {
            let _alone = self.inner.starting.write();
            if self.managed().contains(&pid) {
                return OrphanReaping::Waiting;
            }
            let _ = reap::try_reap(pid);
        }
        OrphanReaping::Reaped
    }

    pub(crate) fn null(&self) -> BorrowedFd<'_> {
        self.inner.null.as_fd()
    }

    pub(crate) fn launcher(&self) -> &Launcher {
        &self.inner.launcher
    }

    pub(crate) fn helpers(&self) -> &HelperPool {
        &self.inner.helpers
    }

    /// File operations under this policy.
    ///
    /// # Errors
    ///
    /// [`FsError::Params`] when the policy depends on a directory and does not name one.
    pub fn files(
        &self,
        sandbox: Option<Sandbox>,
        intent: FileIntent,
    ) -> Result<PolicyFiles, FsError> {
        PolicyFiles::new(self, sandbox, intent)
    }

    /// Selects where a file request runs, according to its policy, and takes the policy out of the
    /// request. Checks the parameters; accesses no file.
    ///
    /// # Errors
    ///
    /// [`FsError::Params`] when they are not allowed, as for [`Executor::files`].
    pub fn admit(&self, request: &mut FsRequest) -> Result<PolicyFiles, FsError> {
        fs::check(request)?;
        let intent = FileIntent::of(request);
        self.files(request.sandbox_mut().take(), intent)
    }

    /// Stops idle file helper processes. Blocks.
    pub fn end_helpers(&self) {
        self.inner.helpers.clear();
        self.inner.launcher.end_standby();
    }

    /// Starts a file helper process.
    pub(crate) fn launch_helper(
        &self,
        pending_launch: &PendingLaunch,
    ) -> Result<OwnedFd, SandboxError> {
        self.inner.launcher.path()?;
        let null = self.null();
        // A forked launcher is identified by its pid, which must not be reaped meanwhile.
        let _shared = self.inner.starting.read();
        let request = ForkRequest {
            streams: [null; 3],
            pending_launch,
            limits: &[],
            groups: &[],
            terminal: false,
        };
        let launched = self
            .inner
            .launcher
            .fork(null, &request)
            .or_else(|_| self.inner.launcher.launch_alone(null, pending_launch));
        let (_, pidfd) = launched.map_err(|source| SandboxError::System {
            action: "execute the sandbox launcher",
            source,
        })?;
        Ok(pidfd)
    }

    /// Returns which sandbox features this machine supports.
    ///
    /// The first call blocks while it runs the probes.
    ///
    /// # Errors
    ///
    /// When there is no launcher, or it cannot be run.
    pub fn sandbox_host(&self) -> Result<&HostFeatures, StartError> {
        let host = self.launcher_host();
        host.map_err(|error| StartError::of_sandbox(error, &ProcessSpec::default()))
    }

    /// Like [`Executor::sandbox_host`], with the error of the sandbox.
    pub(crate) fn launcher_host(&self) -> Result<&HostFeatures, SandboxError> {
        let _shared = self.inner.starting.read();
        self.inner.launcher.host(&self.inner.null)
    }

    /// Runs `launch` so that its child process is never taken for an orphan.
    pub(crate) fn register<T, E>(
        &self,
        launch: impl FnOnce() -> Result<(Pid, T), E>,
    ) -> Result<(Pid, T), E> {
        let _shared = self.inner.starting.read();
        let (pid, rest) = launch()?;
        self.managed().insert(pid);
        Ok((pid, rest))
    }

    /// Reaps a supervised child process if it has ended.
    pub(crate) fn reap(&self, pid: Pid) -> io::Result<Option<ReapedChild>> {
        let mut managed = self.managed();
        let reaped = reap::try_reap(pid);
        if !matches!(reaped, Ok(None)) {
            managed.remove(&pid);
        }
        reaped
    }

    fn managed(&self) -> MutexGuard<'_, HashSet<Pid>> {
        self.inner.managed.lock()
    }
}
