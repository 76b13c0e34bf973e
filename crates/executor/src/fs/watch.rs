//! File-change watches of trees.
//!
//! A [`WatchHub`] has one tree for each distinct target, shared by all its subscribers: one inotify
//! instance and one thread, which end with the last subscription. Until a subscriber takes its
//! changes, changes of the same path are merged; above a limit they are replaced by one overflow
//! flag.

mod missing;
mod pending;
mod rules;
mod scanned;
mod tree;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{FileChanged, WatchIgnore};
use exec_server_protocol::limits::{MAX_CHANGES, MAX_WATCH_DEBOUNCE_MS};
use exec_server_sync::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

pub use self::missing::MissingPathWait;
use self::pending::{PendingChanges, ReportedChange};
use self::rules::IgnoreFilter;
use self::tree::{ChangeReceiver, EventBuffer, WatchTarget, WatchedTree};
use super::{FsError, check_globs};

/// Maximum number of distinct trees. Each uses one of the user's inotify instances; the default
/// limit of the kernel is 128.
const MAX_TREES: usize = 64;

/// Maximum size of the paths in one batch.
const MAX_BATCH_BYTES: usize = 1 << 20;

/// Reasons why a watch fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WatchError {
    /// The path does not exist, or the system returned an error.
    #[error(transparent)]
    Fs(#[from] FsError),
    /// A pattern is not a valid glob.
    #[error("invalid pattern `{pattern}`: {source}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The parse error.
        source: ignore::Error,
    },
    /// The user's limit of watched directories is reached.
    #[error(
        "cannot watch `{path}`: fs.inotify.max_user_watches is {limit} and all are in use; raise it \
         with `sysctl fs.inotify.max_user_watches={more}`, or ignore directories",
        more = limit.saturating_mul(4)
    )]
    Watches {
        /// The directory that could not be registered.
        path: PathBuf,
        /// The limit.
        limit: u64,
    },
    /// The user's limit of inotify instances is reached.
    #[error(
        "cannot watch: fs.inotify.max_user_instances is {limit} and all are in use; raise it with \
         `sysctl fs.inotify.max_user_instances={more}`",
        more = limit.saturating_mul(4)
    )]
    Instances {
        /// The limit.
        limit: u64,
    },
    /// Too many distinct trees are watched.
    #[error("limit of {MAX_TREES} watched trees reached")]
    TooMany,
    /// The request was cancelled.
    #[error("the watch ended")]
    Cancelled,
}

impl WatchError {
    fn register(path: &Path, error: Errno) -> Self {
        match error {
            Errno::NOSPC => Self::Watches {
                path: path.to_owned(),
                limit: max_watches(),
            },
            error => super::at(path)(error).into(),
        }
    }

    fn instance(error: Errno) -> Self {
        match error {
            Errno::MFILE => Self::Instances {
                limit: max_instances(),
            },
            error => super::at(Path::new("inotify"))(error).into(),
        }
    }
}

/// Kernel limits of inotify for this user, across all programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InotifyLimits {
    /// Maximum number of directories: `fs.inotify.max_user_watches`.
    pub watches: u64,
    /// Maximum number of trees: `fs.inotify.max_user_instances`.
    pub instances: u64,
}

/// Returns the limits of this machine; 0 where the kernel does not report one.
pub fn limits() -> InotifyLimits {
    InotifyLimits {
        watches: max_watches(),
        instances: max_instances(),
    }
}

fn max_watches() -> u64 {
    limit("max_user_watches", "max_inotify_watches")
}

fn max_instances() -> u64 {
    limit("max_user_instances", "max_inotify_instances")
}

/// A limit of the user, or that of the user namespace if it is smaller.
fn limit(name: &str, of_namespace: &str) -> u64 {
    let read = |path: String| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limits = [
        read(format!("/proc/sys/fs/inotify/{name}")),
        read(format!("/proc/sys/user/{of_namespace}")),
    ];
    limits.into_iter().flatten().min().unwrap_or(0)
}

/// Key of a shared tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct TreeKey {
    root: PathBuf,
    recursive: bool,
    gitignore: bool,
    patterns: Vec<String>,
}

/// All trees that are watched.
#[derive(Debug, Default)]
pub struct WatchHub {
    /// Locked during registration, so that each tree is registered once.
    trees: Mutex<HashMap<TreeKey, Arc<Mutex<Weak<SharedTree>>>>>,
}

/// A tree as its subscriptions hold it; dropping the last reference ends it.
#[derive(Debug)]
struct SharedTree {
    shared: Arc<TreeShared>,
}

impl Drop for SharedTree {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.wake_subscriber();
    }
}

/// State shared by the thread of a tree and its subscribers.
#[derive(Debug)]
struct TreeShared {
    subscribers: Mutex<Vec<Arc<WatchSubscriber>>>,
    stop: Arc<AtomicBool>,
    /// Event descriptor that wakes the thread.
    wake: OwnedFd,
}

impl TreeShared {
    fn wake_subscriber(&self) {
        // The counter cannot overflow: the thread resets it, and several writes count as one
        // wake-up.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl ChangeReceiver for Arc<TreeShared> {
    fn report(&self, reported: ReportedChange<'_>) {
        for subscriber in &*self.subscribers.lock() {
            subscriber.record(reported);
        }
    }
}

/// State of one subscription.
#[derive(Debug)]
struct WatchSubscriber {
    debounce: Duration,
    state: Mutex<SubscriptionState>,
}

#[derive(Debug, Default)]
struct SubscriptionState {
    pending: PendingChanges,
    /// Time when the pending changes become available.
    due: Option<Instant>,
    /// Changes are available now.
    ready: bool,
    /// Number of the last batch.
    seq: u64,
    waker: Option<Waker>,
}

impl WatchSubscriber {
    fn record(&self, reported: ReportedChange<'_>) {
        let mut state = self.state.lock();
        state.pending.record(reported);
        if state.due.is_none() && !state.ready {
            state.due = Some(Instant::now() + self.debounce);
        }
    }

    /// Makes pending changes available after the debounce time; otherwise returns the time when
    /// they will be.
    fn release_due(&self, now: Instant) -> Option<Instant> {
        let mut state = self.state.lock();
        let due = state.due?;
        if due > now {
            return Some(due);
        }
        state.due = None;
        state.ready = !state.pending.is_empty();
        if state.ready
            && let Some(waker) = state.waker.take()
        {
            drop(state);
            waker.wake();
        }
        None
    }
}

/// Changes that are delivered together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingBatch {
    /// Sequence number, from 1 without gaps.
    pub seq: u64,
    /// The changes, in order.
    pub changes: Vec<FileChanged>,
    /// Changes were lost before these.
    pub overflow: bool,
}

/// A subscription to a tree; it ends when dropped.
#[derive(Debug)]
pub struct WatchSubscription {
    root: PathBuf,
    shared_tree: Arc<SharedTree>,
    subscriber: Arc<WatchSubscriber>,
}

impl WatchSubscription {
    /// The watched path, with links resolved.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Takes the available changes; returns `None` and wakes `waker` later if no change is
    /// available.
    pub fn take(&self, waker: &Waker) -> Option<PendingBatch> {
        let mut state = self.subscriber.state.lock();
        if !state.ready {
            state.waker = Some(waker.clone());
            return None;
        }
        let (delivered, overflow) = state.pending.take(MAX_CHANGES, MAX_BATCH_BYTES);
        state.ready = !state.pending.is_empty();
        if delivered.is_empty() && !overflow {
            // The pending changes cancelled each other out.
            state.waker = Some(waker.clone());
            return None;
        }
        state.seq += 1;
        let seq = state.seq;
        drop(state);
        let uri = |path: &Path| PathUri::from_native(path).ok();
        let changes = delivered.into_iter().filter_map(|change| {
            Some(FileChanged {
                path: uri(&change.path)?,
                kind: change.kind,
                from: change.from.as_deref().and_then(uri),
            })
        });
        Some(PendingBatch {
            seq,
            changes: changes.collect(),
            overflow,
        })
    }
}

impl Drop for WatchSubscription {
    fn drop(&mut self) {
        self.shared_tree
            .shared
            .subscribers
            .lock()
            .retain(|one| !Arc::ptr_eq(one, &self.subscriber));
    }
}

/// Checks the parameters of a watch against their limits.
fn check(ignore: &WatchIgnore, debounce: Duration) -> Result<(), FsError> {
    check_globs("patterns", &ignore.patterns)?;
    let debounce = debounce.as_millis();
    if debounce > u128::from(MAX_WATCH_DEBOUNCE_MS) {
        return Err(FsError::Params(format!(
            "debounceMs {debounce} exceeds the limit of {MAX_WATCH_DEBOUNCE_MS}"
        )));
    }
    Ok(())
}

impl WatchHub {
    /// Subscribes to changes of a path, and optionally of everything below it.
    ///
    /// Blocks until the whole tree is registered; every later change is reported. Stops shortly
    /// after `cancelled` is set.
    ///
    /// # Errors
    ///
    /// When the path does not exist, a pattern is invalid, or a limit is reached.
    pub fn watch(
        &self,
        path: &Path,
        recursive: bool,
        ignore: &WatchIgnore,
        debounce: Duration,
        cancelled: &Arc<AtomicBool>,
    ) -> Result<WatchSubscription, WatchError> {
        check(ignore, debounce)?;
        let root = super::canonicalize(path)?;
        let key = TreeKey {
            root: root.clone(),
            recursive,
            gitignore: ignore.gitignore,
            patterns: ignore.patterns.clone(),
        };
        let slot = self.slot(key)?;
        let mut tree = slot.lock();
        let shared_tree = match tree.upgrade() {
            Some(shared_tree) => shared_tree,
            None => {
                let shared_tree = start(
                    WatchTarget::new(root.clone(), recursive)?,
                    ignore,
                    cancelled,
                )?;
                *tree = Arc::downgrade(&shared_tree);
                shared_tree
            }
        };
        drop(tree);
        let subscriber = Arc::new(WatchSubscriber {
            debounce,
            state: Mutex::default(),
        });
        shared_tree
            .shared
            .subscribers
            .lock()
            .push(Arc::clone(&subscriber));
        Ok(WatchSubscription {
            root,
            shared_tree,
            subscriber,
        })
    }

    /// The entry of a tree in the table, within the limit.
    fn slot(&self, key: TreeKey) -> Result<Arc<Mutex<Weak<SharedTree>>>, WatchError> {
        let mut trees = self.trees.lock();
        trees.retain(|_, slot| match slot.try_lock() {
            Some(tree) => tree.strong_count() > 0 || Arc::strong_count(slot) > 1,
            None => true,
        });
        if trees.len() >= MAX_TREES && !trees.contains_key(&key) {
            return Err(WatchError::TooMany);
        }
        Ok(Arc::clone(trees.entry(key).or_default()))
    }
}

/// Registers a tree and starts its thread.
fn start(
    target: WatchTarget,
    ignore: &WatchIgnore,
    cancelled: &Arc<AtomicBool>,
) -> Result<Arc<SharedTree>, WatchError> {
    let filter = IgnoreFilter::new(target.base(), ignore)?;
    let system = |error: io::Error| super::at(&target.root)(error);
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| system(error.into()))?;
    let shared = Arc::new(TreeShared {
        subscribers: Mutex::default(),
        stop: Arc::default(),
        wake,
    });
    let root = target.root.clone();
    let mut tree = WatchedTree::start(target, filter, Arc::clone(&shared), Arc::clone(cancelled))?;
    if cancelled.load(Ordering::Relaxed) {
        return Err(WatchError::Cancelled);
    }
    tree.stop_with(Arc::clone(&shared.stop));
    // Ends when the last subscription is dropped.
    thread::Builder::new()
        .name("watch".to_owned())
        .stack_size(256 << 10)
        .spawn({
            let shared = Arc::clone(&shared);
            move || run(tree, &shared)
        })
        .map_err(super::at(&root))?;
    Ok(Arc::new(SharedTree { shared }))
}

/// Runs the thread of a tree.
fn run(mut tree: WatchedTree<Arc<TreeShared>>, shared: &Arc<TreeShared>) {
    let mut buffer = EventBuffer::new();
    while !shared.stop.load(Ordering::Relaxed) {
        let more = tree.turn(&mut buffer);
        let now = Instant::now();
        // The lock is not held: woken subscribers may need it.
        let subscribers = shared.subscribers.lock().clone();
        let ripe = subscribers
            .iter()
            .filter_map(|one| one.release_due(now))
            .min();
        drop(subscribers);
        if more {
            continue;
        }
        let until = ripe.into_iter().chain(tree.wakeup()).min();
        let timeout = until.and_then(|until| {
            Timespec::try_from(until.saturating_duration_since(Instant::now())).ok()
        });
        let mut descriptors = [
            PollFd::new(tree.inotify(), PollFlags::IN),
            PollFd::new(&shared.wake, PollFlags::IN),
        ];
        match poll(&mut descriptors, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot wait for events");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
