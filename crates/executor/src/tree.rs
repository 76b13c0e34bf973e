//! Process trees: a process that this server started, with all its descendants.
//!
//! Every process is started with a tag, an unusual but harmless value of a resource limit that
//! descendants inherit. A descendant keeps the tag when it changes its session, process group or
//! parent. A descendant that removes the tag is found through its parent or session. See `table`
//! for the precedence; all requests share the reading of `/proc`, see `inspector`.

mod inspector;
pub(crate) mod table;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use exec_server_sync::Mutex;
use rustix::process::{Pid, Signal};

use self::inspector::{TaskProgress, inspect};
use self::table::{ProcessTable, Stat, all_pids};
use crate::shared_read::SharedRead;
use exec_server_sys::watcher::{self, Watcher};
use exec_server_sys::{probe, rlimit};

/// The resource limit that carries the tag: CPU time of real-time threads. Values around 2^60
/// microseconds (thirty thousand years) limit nothing.
pub(crate) const TAG_RESOURCE: rlimit::Resource = libc::RLIMIT_RTTIME;

/// Maximum time that a newly forked process may be without its tag, on a busy machine.
const FORK_TO_TAG: Duration = Duration::from_secs(1);

/// Shortest and longest pause between two checks of processes that are ending.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(25));

/// Set by [`adopt_orphans`].
static ADOPTS_ORPHANS: AtomicBool = AtomicBool::new(false);

/// Tag of one process and all its descendants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TreeTag(pub(crate) u64);

/// Number of tags assigned, besides the server's.
static GIVEN_OUT: AtomicU64 = AtomicU64::new(0);

impl TreeTag {
    /// Returns an unused tag.
    pub(crate) fn fresh() -> Self {
        Self(Self::of_server().0 - 1 - GIVEN_OUT.fetch_add(1, Ordering::Relaxed))
    }

    /// Tag of processes that do the server's own work. It is higher than all others: these
    /// processes can become part of a tree, and limits can only be lowered.
    pub(crate) fn of_server() -> Self {
        static FIRST: OnceLock<u64> = OnceLock::new();
        Self(*FIRST.get_or_init(|| {
            // A server that runs below another server must stay below that server's tag, and away
            // from the tags that it assigns next.
            let own = rlimit::hard(None, TAG_RESOURCE).unwrap_or(u64::MAX);
            let limit = own.clamp(2, 1 << 61);
            let (random, _) = uuid::Uuid::new_v4().as_u64_pair();
            limit - 1 - random % (limit / 2)
        }))
    }

    /// Whether this program has assigned the tag.
    fn is_assigned(self) -> bool {
        let given_out = GIVEN_OUT.load(Ordering::Relaxed);
        Self::of_server()
            .0
            .checked_sub(self.0)
            .is_some_and(|number| number <= given_out)
    }
}

/// Processes that this program has started, by pid.
#[derive(Debug, Default)]
struct Leaders(BTreeMap<i32, (TreeTag, LeaderState)>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaderState {
    /// The process is not reaped yet, so its pid cannot be reused.
    Running,
    /// Reaped. Its session may still exist, and then no other process has its number.
    Ended,
}

impl Leaders {
    fn add(&mut self, pid: Pid, tag: TreeTag) {
        self.0
            .insert(pid.as_raw_nonzero().get(), (tag, LeaderState::Running));
    }

    fn running(&self, pid: i32) -> Option<TreeTag> {
        let (tag, run) = *self.0.get(&pid)?;
        (run == LeaderState::Running).then_some(tag)
    }

    /// Tag of the process that leads or led this session, even if the process has ended.
    fn started(&self, session: i32) -> Option<TreeTag> {
        self.0.get(&session).map(|(tag, _)| *tag)
    }

    fn tags(&self) -> HashSet<TreeTag> {
        self.0.values().map(|(tag, _)| *tag).collect()
    }
}

static LEADERS: Mutex<Leaders> = Mutex::new(Leaders(BTreeMap::new()));

/// Registration of a process that this program started; dropped to unregister.
#[derive(Debug)]
pub(crate) struct Leader {
    pid: Pid,
    pub(crate) tag: TreeTag,
    /// Earliest start time of its tree, in clock ticks since boot.
    since: u64,
}

impl Leader {
    /// Registers a process that was started at `since` or later.
    pub(crate) fn new(pid: Pid, tag: TreeTag, since: u64) -> Self {
        inspector::start();
        LEADERS.lock().add(pid, tag);
        Self { pid, tag, since }
    }

    /// Call before it is reaped; from then on its pid may mean another process.
    pub(crate) fn ended(&self) {
        if let Some((tag, run)) = LEADERS.lock().0.get_mut(&self.pid.as_raw_nonzero().get())
            && *tag == self.tag
        {
            *run = LeaderState::Ended;
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        let mut leaders = LEADERS.lock();
        if let Some(tag) = leaders.started(self.pid.as_raw_nonzero().get())
            && tag == self.tag
        {
            leaders.0.remove(&self.pid.as_raw_nonzero().get());
        }
    }
}

/// Clock ticks since boot.
pub(crate) fn clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(
        u64::try_from(now.tv_sec).unwrap_or(0),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    );
    ticks(now)
}

fn ticks(time: Duration) -> u64 {
    let ticks = time.as_nanos() * u128::from(probe::ticks_per_second()) / 1_000_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

/// Makes this process the parent of its descendants' orphans, for a program whose children are all
/// started through this crate.
pub(crate) fn adopt_orphans() -> rustix::io::Result<()> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    ADOPTS_ORPHANS.store(true, Ordering::Relaxed);
    Ok(())
}

/// Tags of the children of this program; `None` if the kernel has no list of them.
static TAGS_OF_CHILDREN: SharedRead<Option<HashSet<u64>>> = SharedRead::new();

/// Whether descendants of a process that has ended and was reaped may still run. Blocks.
///
/// Reads the children of this process only: it adopts the orphans of its processes. Without that, or
/// without the kernel's list of children, the result is true. Processes that end together share one
/// read.
pub(crate) fn may_have_orphans(tag: TreeTag) -> bool {
    if !ADOPTS_ORPHANS.load(Ordering::Relaxed) {
        return true;
    }
    let tags = TAGS_OF_CHILDREN.get(Duration::ZERO, || {
        let tag = |pid: i32| rlimit::hard(Some(Pid::from_raw(pid)?), TAG_RESOURCE).ok();
        Some(probe::children()?.into_iter().filter_map(tag).collect())
    });
    tags.as_ref()
        .as_ref()
        .is_none_or(|tags| tags.contains(&tag.0))
}

/// How often this program has read the list of its children.
pub(crate) fn children_reads() -> u64 {
    TAGS_OF_CHILDREN.reads()
}

/// Starts a watcher process: when this program is killed, it ends every process that the program has
/// started, with all descendants.
///
/// # Errors
///
/// If the process cannot fork.
///
/// # Panics
///
/// If this program has more than one thread.
pub fn start_watcher() -> io::Result<Watcher> {
    // The watcher must know the tag, which is chosen at first use.
    TreeTag::of_server();
    watcher::start(end_all_tagged)
}

/// Ends every process that has a tag of this program, with all descendants. With `gives_time`, they
/// have some seconds to end by themselves.
fn end_all_tagged(gives_time: bool) {
    /// Time until SIGKILL, for processes that have got SIGTERM.
    const GRACE: Duration = Duration::from_secs(5);
    let begin = Instant::now();
    let mut pause = PAUSES.0;
    let mut was_empty = false;
    loop {
        let found = tagged();
        if found.is_empty() && was_empty {
            return;
        }
        was_empty = found.is_empty();
        if !gives_time || begin.elapsed() >= GRACE {
            // All are stopped before any is killed, so that none starts another one meanwhile, and
            // none loses the parent that shows its tree.
            for signal in [Signal::STOP, Signal::KILL] {
                for &pid in &found {
                    kill(pid, signal);
                }
            }
        }
        if begin.elapsed() >= 2 * GRACE {
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// The living processes with a tag of this program, and their descendants, without this process.
fn tagged() -> Vec<i32> {
    /// More processes than one client starts.
    const TAGS: u64 = 1 << 20;
    let first = TreeTag::of_server().0;
    let tags = first.saturating_sub(TAGS)..=first;
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let all: Vec<(i32, Stat)> = all_pids()
        .filter(|&pid| pid != own)
        .filter_map(|pid| Some((pid, Stat::of(pid)?)))
        .collect();
    let has_tag = |pid: i32| {
        let limit = rlimit::hard(Pid::from_raw(pid), TAG_RESOURCE);
        limit.is_ok_and(|limit| tags.contains(&limit))
    };
    let mut found: HashSet<i32> = all
        .iter()
        .map(|(pid, _)| *pid)
        .filter(|&pid| has_tag(pid))
        .collect();
    loop {
        let before = found.len();
        for (pid, stat) in &all {
            if found.contains(&stat.parent) {
                found.insert(*pid);
            }
        }
        if found.len() == before {
            break;
        }
    }
    let living = all
        .iter()
        .filter(|(pid, stat)| !stat.ended && found.contains(pid));
    living.map(|(pid, _)| *pid).collect()
}

/// Whether this is the pid of a running process that this program has started.
pub(crate) fn is_leader(pid: i32) -> bool {
    LEADERS.lock().running(pid).is_some()
}

/// Whether this process has the tag.
pub(crate) fn is_member(pid: Pid, tag: TreeTag) -> bool {
    rlimit::hard(Some(pid), TAG_RESOURCE).is_ok_and(|limit| limit == tag.0)
}

/// Returns the living descendants of a process. Reads all of `/proc`.
pub fn descendants_of(ancestor: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<(i32, bool)>> = HashMap::new();
    for pid in all_pids() {
        if let Some(stat) = Stat::of(pid) {
            let siblings = children.entry(stat.parent).or_default();
            siblings.push((pid, stat.ended));
        }
    }
    let mut descendants = Vec::new();
    let mut above = vec![ancestor.as_raw_nonzero().get()];
    while let Some(parent) = above.pop() {
        // Entries are removed as they are visited: parents read at different times may form a
        // cycle.
        for (pid, ended) in children.remove(&parent).unwrap_or_default() {
            above.push(pid);
            if !ended {
                descendants.extend(Pid::from_raw(pid));
            }
        }
    }
    descendants
}

/// The trees of a request.
#[derive(Debug, Clone)]
pub(crate) struct Trees {
    tags: HashSet<TreeTag>,
    /// Orphans that were started earlier cannot belong to these trees, in clock ticks since boot.
    since: u64,
}

impl Trees {
    pub(crate) fn of<'a>(leaders: impl IntoIterator<Item = &'a Leader>) -> Self {
        let mut trees = Self {
            tags: HashSet::new(),
            since: u64::MAX,
        };
        for leader in leaders {
            trees.tags.insert(leader.tag);
            trees.since = trees.since.min(leader.since);
        }
        trees
    }

    /// The same trees, without the orphans that only may belong to them.
    pub(crate) fn without_orphans(mut self) -> Self {
        self.since = u64::MAX;
        self
    }

    /// The living processes, parents before children.
    pub(crate) async fn members(self) -> Vec<Pid> {
        inspect(move |table, answer| {
            answer(table.living(&self.tags));
            TaskProgress::Done
        })
        .await
    }

    /// Sends a signal to every living process, parents before children.
    pub(crate) async fn signal(self, signal: Signal) {
        inspect(move |table, answer| {
            send(table, &self.tags, signal, &[]);
            answer(());
            TaskProgress::Done
        })
        .await;
    }

    /// Terminates every process; returns the processes that are left.
    pub(crate) async fn end(self, how: TreeTermination) -> RemainingProcesses {
        let mut progress = TerminationProgress::new(self, how);
        inspect(move |table, answer| progress.step(table, answer)).await
    }

    /// Same as [`Trees::end`], without waiting.
    pub(crate) fn begin_to_end(self, how: TreeTermination) {
        let mut progress = TerminationProgress::new(self, how);
        inspector::submit(move |table| progress.step(table, &mut |_| {}));
    }
}

/// A process group that this program started, and how to signal it while it exists.
pub(crate) struct ProcessGroup {
    pub(crate) id: Pid,
    pub(crate) signal: Box<dyn Fn(Signal) + Send>,
}

/// Method of terminating trees.
pub(crate) struct TreeTermination {
    /// If set, SIGTERM is sent first, and SIGKILL after this time.
    pub(crate) grace: Option<Duration>,
    /// How long to wait after the first SIGKILL.
    pub(crate) timeout: Duration,
    /// The process groups of the trees' leaders.
    pub(crate) groups: Vec<ProcessGroup>,
}

/// Processes that could not be terminated.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RemainingProcesses {
    /// Processes of the trees.
    pub(crate) members: Vec<Pid>,
    /// Orphaned descendants of this program that may belong to these trees or to others; nothing
    /// connects them to any tree.
    pub(crate) unattributed_orphans: Vec<Pid>,
}

/// ```text
/// Ask ──► Grace ──► Stop ◄──► Kill ──► done
///           └──── none left ────────────┘
/// ```
#[derive(Debug, Clone, Copy)]
enum TerminationPhase {
    Ask,
    Grace {
        until: Instant,
    },
    /// All processes are stopped before any is killed, so that none starts another one meanwhile,
    /// and none loses the parent that shows its tree.
    Stop,
    /// Kill until all have ended.
    Kill,
}

/// State of the termination of trees.
struct TerminationProgress {
    trees: Trees,
    how: TreeTermination,
    phase: TerminationPhase,
    /// Stopped processes, with their start times.
    stopped: HashSet<(i32, u64)>,
    rounds: usize,
    deadline: Option<Instant>,
    pause: Duration,
    /// The last check found no process of the trees.
    was_empty: bool,
}

impl TerminationProgress {
    fn new(trees: Trees, how: TreeTermination) -> Self {
        Self {
            trees,
            phase: match how.grace {
                Some(_) => TerminationPhase::Ask,
                None => TerminationPhase::Stop,
            },
            how,
            stopped: HashSet::new(),
            rounds: 0,
            deadline: None,
            pause: PAUSES.0,
            was_empty: false,
        }
    }

    fn step(
        &mut self,
        table: &mut ProcessTable,
        answer: &mut dyn FnMut(RemainingProcesses),
    ) -> TaskProgress {
        let tags = &self.trees.tags;
        match self.phase {
            TerminationPhase::Ask => {
                let grace = self.how.grace.unwrap_or_default();
                for group in &self.how.groups {
                    (group.signal)(Signal::TERM);
                }
                send(table, tags, Signal::TERM, &self.how.groups);
                let until = Instant::now() + grace;
                self.phase = TerminationPhase::Grace { until };
                self.again()
            }
            TerminationPhase::Grace { until } => self.wait_for_end(until, table, answer),
            TerminationPhase::Stop => self.stop_round(table, answer),
            TerminationPhase::Kill => self.kill_round(table, answer),
        }
    }

    /// Waits for the processes to end by themselves.
    fn wait_for_end(
        &mut self,
        until: Instant,
        table: &mut ProcessTable,
        answer: &mut dyn FnMut(RemainingProcesses),
    ) -> TaskProgress {
        if self.living_or_done(table, answer).is_none() {
            return TaskProgress::Done;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.phase = TerminationPhase::Stop;
            self.pause = PAUSES.0;
            return TaskProgress::Again(Duration::ZERO);
        }
        let TaskProgress::Again(pause) = self.again() else {
            return TaskProgress::Done;
        };
        TaskProgress::Again(pause.min(left))
    }

    /// Stops the processes that were started since the last round, or kills all if none were.
    fn stop_round(
        &mut self,
        table: &mut ProcessTable,
        answer: &mut dyn FnMut(RemainingProcesses),
    ) -> TaskProgress {
        /// Each round stops at least every process that existed when it began. A tree that still
        /// grows after 64 rounds contains a process that may not be signalled.
        const ROUNDS: usize = 64;
        let tags = &self.trees.tags;
        let mut found = false;
        for process in table.processes(tags) {
            if self.stopped.insert(process) {
                found |= kill(process.0, Signal::STOP);
            }
        }
        self.rounds += 1;
        if found && self.rounds < ROUNDS {
            return TaskProgress::Again(Duration::ZERO);
        }
        for group in &self.how.groups {
            (group.signal)(Signal::KILL);
        }
        let killed = table.processes(tags);
        for &(pid, _) in &killed {
            kill(pid, Signal::KILL);
        }
        self.phase = TerminationPhase::Kill;
        let timeout = self.how.timeout;
        self.deadline
            .get_or_insert_with(|| Instant::now() + timeout);
        if killed.is_empty() {
            return self.step(table, answer);
        }
        self.again()
    }

    /// Waits for the killed processes, and stops those that were started meanwhile.
    fn kill_round(
        &mut self,
        table: &mut ProcessTable,
        answer: &mut dyn FnMut(RemainingProcesses),
    ) -> TaskProgress {
        let Some(members) = self.living_or_done(table, answer) else {
            return TaskProgress::Done;
        };
        if self
            .deadline
            .is_none_or(|deadline| Instant::now() >= deadline)
        {
            let unattributed_orphans = table.unattributed_orphans(self.trees.since);
            answer(RemainingProcesses {
                members,
                unattributed_orphans: unattributed_orphans
                    .into_iter()
                    .map(|(pid, _)| pid)
                    .collect(),
            });
            return TaskProgress::Done;
        }
        let processes = table.processes(&self.trees.tags);
        if processes
            .iter()
            .any(|process| !self.stopped.contains(process))
        {
            // The process was started before its parent was stopped.
            self.phase = TerminationPhase::Stop;
            return self.step(table, answer);
        }
        self.again()
    }

    /// The living processes; sends the result and returns `None` if it is certain that there are
    /// none.
    fn living_or_done(
        &mut self,
        table: &mut ProcessTable,
        answer: &mut dyn FnMut(RemainingProcesses),
    ) -> Option<Vec<Pid>> {
        let living = table.living(&self.trees.tags);
        let Some(unattributed_orphans) = self.none_left(&living, table) else {
            return Some(living);
        };
        let members = Vec::new();
        answer(RemainingProcesses {
            members,
            unattributed_orphans,
        });
        None
    }

    /// Checks again, after a slightly longer pause than last time.
    fn again(&mut self) -> TaskProgress {
        let pause = self.pause;
        self.pause = (self.pause * 2).min(PAUSES.1);
        TaskProgress::Again(pause)
    }

    /// Returns the strays that may belong to the trees, if it is certain that none of the trees'
    /// processes is left.
    fn none_left(&mut self, living: &[Pid], table: &ProcessTable) -> Option<Vec<Pid>> {
        if !living.is_empty() {
            self.was_empty = false;
            return None;
        }
        // Either all known processes had ended before the table was read the last time, or no
        // process has been started since: a process that was not known is in the table in both
        // cases.
        let is_certain = table.is_current() || self.was_empty && table.is_settled();
        self.was_empty = true;
        if !is_certain {
            return None;
        }
        let unattributed_orphans = table.unattributed_orphans(self.trees.since);
        let now = clock();
        // A process that this program just forked gets its tag soon.
        let is_young = |start: u64| now.saturating_sub(start) <= ticks(FORK_TO_TAG);
        if unattributed_orphans
            .iter()
            .any(|&(_, start)| is_young(start))
        {
            return None;
        }
        Some(
            unattributed_orphans
                .into_iter()
                .map(|(pid, _)| pid)
                .collect(),
        )
    }
}

/// Sends a signal to every process of the trees that is not in these groups.
fn send(
    table: &mut ProcessTable,
    tags: &HashSet<TreeTag>,
    signal: Signal,
    outside: &[ProcessGroup],
) {
    for pid in table.living(tags) {
        let group = rustix::process::getpgid(Some(pid));
        if !outside.iter().any(|outside| Ok(outside.id) == group) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

/// Returns whether the process existed. The table guarantees that the pid was not reused.
fn kill(pid: i32, signal: Signal) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::kill_process(pid, signal).is_ok())
}

/// The command line of a process, or its name in brackets, as `ps` prints it. Reads `/proc` and may
/// block: must not run on an async worker.
pub(crate) fn command_of(pid: Pid) -> String {
    let pid = pid.as_raw_nonzero();
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line: Vec<&[u8]> = line
        .split(|&b| b == 0)
        .filter(|part| !part.is_empty())
        .collect();
    if line.is_empty() {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        return format!("[{}]", name.trim());
    }
    String::from_utf8_lossy(&line.join(&b' ')).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_unique_and_limit_nothing() {
        let (one, other) = (TreeTag::fresh(), TreeTag::fresh());
        assert_ne!(one, other);
        assert!(one.0 > 1 << 59, "{one:?}");
        assert!(one.0 < TreeTag::of_server().0, "a limit only goes down");
        assert!(one.is_assigned() && TreeTag::of_server().is_assigned());
        assert!(!TreeTag(one.0 - 1000).is_assigned());
    }

    #[test]
    fn leader_pid_is_valid_until_reaped() {
        let pid = rustix::process::getpid();
        let number = pid.as_raw_nonzero().get();
        let (first, second) = (TreeTag::fresh(), TreeTag::fresh());
        let leader = Leader::new(pid, first, 0);
        assert_eq!(LEADERS.lock().running(number), Some(first));
        leader.ended();
        assert_eq!(LEADERS.lock().running(number), None);
        assert_eq!(LEADERS.lock().started(number), Some(first));
        let next = Leader::new(pid, second, 0);
        leader.ended();
        drop(leader);
        assert_eq!(LEADERS.lock().running(number), Some(second));
        drop(next);
        assert_eq!(LEADERS.lock().started(number), None);
    }

    #[test]
    fn descendants_include_grandchildren() {
        let script = "sleep 60 & echo up; wait";
        let mut child = std::process::Command::new("setsid")
            .args(["sh", "-c", script])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut up = [0; 3];
        let output = child.stdout.as_mut().unwrap();
        io::Read::read_exact(output, &mut up).unwrap();
        let descendants = descendants_of(rustix::process::getpid());
        for &pid in &descendants {
            kill(pid.as_raw_nonzero().get(), Signal::KILL);
        }
        child.wait().unwrap();
        assert!(descendants.len() >= 2, "{descendants:?}");
        let own = i32::try_from(child.id()).unwrap();
        assert!(descendants.contains(&Pid::from_raw(own).unwrap()));
    }
}
