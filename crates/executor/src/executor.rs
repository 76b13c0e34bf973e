//! The executor: what all processes of one program share.
//!
//! Owns the defaults, the count of live processes and the list of children that are looked after,
//! so that adopted orphans can be told from them.

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
use exec_server_sync::{Mutex, MutexGuard, RwLock};
use rustix::process::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use crate::fs::{self, FsError};
use crate::limits;
use crate::log::{Meter, Retention};
use crate::process::{self, Process};
use crate::sandbox::files::{Files, Intent};
use crate::sandbox::host::Host;
use crate::sandbox::placeholder::{self, Keeper};
use crate::sandbox::pool::Helpers;
use crate::sandbox::{self, Errand, Launcher};
use crate::spec::{Spec, StartError};
use crate::sys::reap::{self, Reaped};
use crate::sys::{child_ends, poll};

/// Bounds that may change while processes run.
#[derive(Debug, Clone, Copy)]
pub struct ExecutorLimits {
    /// How much output a process retains.
    pub retention: Retention,
    /// Live processes at one time.
    pub max_processes: usize,
    /// How long an ended process's output may be silent before a descendant that holds it open is
    /// no longer waited for.
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

/// What all processes have in common.
#[derive(Debug, Clone, Default)]
pub struct ExecutorConfig {
    /// Bounds to begin with.
    pub limits: ExecutorLimits,
    /// The environment that policies start from: usually this program's own.
    pub environment: BTreeMap<String, String>,
    /// An `exec-server` executable that launches sandboxes; this program's own if it begins its
    /// `main` with [`crate::sandbox::launcher::dispatch`].
    pub launcher: Option<PathBuf>,
    /// Files and directories that no sandbox with a restricted view may see: keys, tokens.
    pub hidden: Vec<PathBuf>,
}

/// Starts processes; cheap to clone.
#[derive(Debug, Clone)]
pub struct Executor {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: ExecutorConfig,
    /// The bounds in force.
    limits: RwLock<ExecutorLimits>,
    /// `/dev/null`, the input of processes without one.
    null: OwnedFd,
    /// What launches sandboxes, and what it can do here.
    launcher: Launcher,
    /// Processes that do file work under a policy.
    helpers: Helpers,
    /// Goes last: what sandboxes have left on the disk goes with it.
    _keeper: Keeper,
    live: Arc<Live>,
    /// What all logs retain.
    retained: Meter,
    /// Children that a supervisor looks after. Reaping happens under this lock, so that a number
    /// that is reused right away is not mistaken for its former owner.
    managed: Mutex<HashSet<Pid>>,
    /// Shared by those who start children, exclusive to whoever reaps orphans: a child that is not
    /// in the list yet must not be taken for one.
    starting: RwLock<()>,
}

#[derive(Debug, Default)]
struct Live {
    count: AtomicUsize,
    /// The last one has ended.
    idle: Notify,
}

/// Notice of children that have ended.
enum ChildEnds {
    Descriptor(AsyncFd<OwnedFd>),
    /// In a program that has not blocked SIGCHLD.
    Signal(tokio::signal::unix::Signal),
}

impl ChildEnds {
    fn new() -> io::Result<Self> {
        Ok(match child_ends::descriptor()? {
            Some(fd) => Self::Descriptor(poll::register(fd, Interest::READABLE)?),
            None => Self::Signal(signal(SignalKind::child())?),
        })
    }

    /// Waits until a child has ended; false when the runtime ends.
    async fn wait(&mut self) -> bool {
        match self {
            Self::Descriptor(fd) => fd.readable().await.is_ok(),
            Self::Signal(signal) => signal.recv().await.is_some(),
        }
    }

    fn clear(&mut self) {
        if let Self::Descriptor(fd) = self {
            // As long as one `signalfd_siginfo`; what it says of one child is of no interest.
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

/// What became of orphans that have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Orphans {
    Reaped,
    /// A supervisor is about to reap its child, and there may be others behind it.
    Waiting,
}

/// The place of one live process.
#[derive(Debug)]
pub(crate) struct Slot(Arc<Live>);

impl Drop for Slot {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

impl Executor {
    /// An executor with these settings.
    ///
    /// # Errors
    ///
    /// When `/dev/null` cannot be opened.
    pub fn new(config: ExecutorConfig) -> io::Result<Self> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let launcher = Launcher::new(config.launcher.as_deref());
        Ok(Self {
            inner: Arc::new(Inner {
                limits: RwLock::new(config.limits),
                config,
                null: null.into(),
                launcher,
                helpers: Helpers::default(),
                _keeper: Keeper::new(),
                live: Arc::default(),
                retained: Meter::default(),
                managed: Mutex::default(),
                starting: RwLock::default(),
            }),
        })
    }

    /// The settings.
    pub fn config(&self) -> &ExecutorConfig {
        &self.inner.config
    }

    /// The bounds in force.
    pub fn limits(&self) -> ExecutorLimits {
        *self.inner.limits.read()
    }

    /// Sets other bounds, for what is started from now on.
    pub fn set_limits(&self, limits: ExecutorLimits) {
        let mut current = self.inner.limits.write();
        *current = limits;
    }

    /// Live processes right now.
    pub fn live(&self) -> usize {
        self.inner.live.count.load(Ordering::Relaxed)
    }

    /// Bytes of output that all processes retain together.
    pub fn retained_bytes(&self) -> u64 {
        self.inner.retained.bytes()
    }

    /// Bytes of output that were ever evicted.
    pub fn evicted_bytes(&self) -> u64 {
        self.inner.retained.evicted()
    }

    pub(crate) fn meter(&self) -> Meter {
        self.inner.retained.clone()
    }

    /// Waits until no process is live.
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
    /// Needs a tokio runtime. If this future is dropped, a process that is just being started is
    /// killed.
    ///
    /// # Errors
    ///
    /// Says what is missing or refused; nothing is left behind.
    pub async fn start(&self, spec: Spec) -> Result<Process, StartError> {
        let live = &self.inner.live;
        let slot = Slot(Arc::clone(live));
        let limit = self.limits().max_processes;
        if live.count.fetch_add(1, Ordering::Relaxed) >= limit {
            return Err(StartError::TooMany(limit));
        }
        process::start::start(self, slot, spec).await
    }

    /// Makes this process the parent of its descendants' orphans and reaps them as they end.
    ///
    /// For programs that have no other children, like a server: it waits for any child. The task
    /// that does it lives as long as the runtime.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or signals cannot be waited for.
    pub fn adopt_orphans(&self) -> io::Result<()> {
        /// How long an orphan may stay a zombie, and control groups that could not be removed.
        const PERIOD: Duration = Duration::from_millis(250);
        crate::tree::adopt_orphans()?;
        let mut ended = ChildEnds::new()?;
        let this = self.clone();
        tokio::spawn(async move {
            // Signals of children that have ended before do not come again.
            let mut again = true;
            loop {
                if !again && !ended.wait().await {
                    return;
                }
                // Children that end together are reaped together.
                tokio::time::sleep(PERIOD).await;
                // What ends from now on is noticed again.
                ended.clear();
                let waits = this.reap_orphans() == Orphans::Waiting;
                again = limits::sweep() || waits;
            }
        });
        Ok(())
    }

    /// Reaps ended orphans.
    fn reap_orphans(&self) -> Orphans {
        while let Some(pid) = reap::any_ended() {
            let _alone = self.inner.starting.write();
            if self.managed().contains(&pid) {
                return Orphans::Waiting;
            }
            let _ = reap::try_reap(pid);
        }
        Orphans::Reaped
    }

    pub(crate) fn null(&self) -> BorrowedFd<'_> {
        self.inner.null.as_fd()
    }

    pub(crate) fn launcher(&self) -> &Launcher {
        &self.inner.launcher
    }

    pub(crate) fn helpers(&self) -> &Helpers {
        &self.inner.helpers
    }

    /// Where file work under this policy is done.
    ///
    /// # Errors
    ///
    /// [`FsError::Params`] when the policy depends on a directory and names none.
    pub fn files(&self, sandbox: Option<Sandbox>, intent: Intent) -> Result<Files, FsError> {
        Files::new(self, sandbox, intent)
    }

    /// Where a file request is done, according to its policy, which is taken out of it. Checks its
    /// params; touches no file.
    ///
    /// # Errors
    ///
    /// [`FsError::Params`] when they are not allowed, as for [`Executor::files`].
    pub fn admit(&self, request: &mut FsRequest) -> Result<Files, FsError> {
        fs::check(request)?;
        let intent = Intent::of(request);
        self.files(request.sandbox_mut().take(), intent)
    }

    /// Ends processes that wait for file work, with what they hold on the disk; blocks.
    pub fn end_helpers(&self) {
        self.inner.helpers.clear();
        self.inner.launcher.end_standby();
        placeholder::clear();
    }

    /// Starts a process that does file work.
    pub(crate) fn launch_helper(&self, errand: &Errand) -> Result<OwnedFd, StartError> {
        let path = self.inner.launcher.path()?;
        let null = self.null();
        // A launcher that was forked is found by its number, which nobody may reap meanwhile.
        let _shared = self.inner.starting.read();
        let request = sandbox::Request {
            streams: [null; 3],
            errand,
            limits: &[],
            groups: &[],
            terminal: false,
        };
        let launched = self
            .inner
            .launcher
            .fork(null, &request)
            .or_else(|_| sandbox::launch_alone(path, null, errand));
        let (_, pidfd) = launched.map_err(|source| StartError::System {
            action: "execute the sandbox launcher",
            source,
        })?;
        Ok(pidfd)
    }

    /// What this machine can enforce on sandboxed processes.
    ///
    /// Blocks the first time, while it is found out.
    ///
    /// # Errors
    ///
    /// When there is no launcher, or it cannot be run.
    pub fn sandbox_host(&self) -> Result<&Host, StartError> {
        let _shared = self.inner.starting.read();
        self.inner.launcher.host(&self.inner.null)
    }

    /// Runs `launch` such that its child is never taken for an orphan.
    pub(crate) fn register<T, E>(
        &self,
        launch: impl FnOnce() -> Result<(Pid, T), E>,
    ) -> Result<(Pid, T), E> {
        let _shared = self.inner.starting.read();
        let (pid, rest) = launch()?;
        self.managed().insert(pid);
        Ok((pid, rest))
    }

    /// Reaps a managed child if it has ended.
    pub(crate) fn reap(&self, pid: Pid) -> io::Result<Option<Reaped>> {
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
