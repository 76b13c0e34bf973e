//! Process trees: a process that this server started, with all its descendants, wherever they moved.
//!
//! Every process is started with a tag, an unusual but harmless value of a resource limit that
//! descendants inherit. It is not lost with the session, the process group or the parent; what takes
//! it off is found through its parent or session. See `table` for what counts when; reading `/proc`
//! is shared by all requests, see `inspector`.

mod inspector;
pub(crate) mod table;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use exec_server_sync::Mutex;
use rustix::process::{Pid, Signal};

use self::inspector::{Next, inspect};
use self::table::{Stat, Table, all_pids};
use crate::sys::{probe, rlimit};

/// The resource that carries the tag: CPU time of real-time threads. Values around 2^60
/// microseconds (thirty thousand years) limit nothing.
pub(crate) const TAG_RESOURCE: u32 = libc::RLIMIT_RTTIME;

/// How long a process that was just forked may be without its tag, on a machine that is busy.
const FORK_TO_TAG: Duration = Duration::from_secs(1);

/// How soon processes that end are looked at again at first, and at the latest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(25));

/// Set by [`adopt_orphans`].
static ADOPTS_ORPHANS: AtomicBool = AtomicBool::new(false);

/// A mark that one process and all its descendants bear.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tag(pub(crate) u64);

/// How many tags were given out, besides the server's.
static GIVEN_OUT: AtomicU64 = AtomicU64::new(0);

impl Tag {
    /// A tag that no process bears yet.
    pub(crate) fn fresh() -> Self {
        Self(Self::of_server().0 - 1 - GIVEN_OUT.fetch_add(1, Ordering::Relaxed))
    }

    /// The tag of processes that do the server's own work. Above all others: these can become part of
    /// a tree, and limits only go down.
    pub(crate) fn of_server() -> Self {
        static FIRST: OnceLock<u64> = OnceLock::new();
        Self(*FIRST.get_or_init(|| {
            // A server that runs below another one must stay below its tag, and apart from those
            // that the other one gives out next.
            let own = rlimit::hard(None, TAG_RESOURCE).unwrap_or(u64::MAX);
            let limit = own.clamp(2, 1 << 61);
            let (random, _) = uuid::Uuid::new_v4().as_u64_pair();
            limit - 1 - random % (limit / 2)
        }))
    }

    /// Whether a process of this program's bears it, or did.
    fn is_given_out(self) -> bool {
        let given_out = GIVEN_OUT.load(Ordering::Relaxed);
        Self::of_server()
            .0
            .checked_sub(self.0)
            .is_some_and(|number| number <= given_out)
    }
}

/// Processes that this program has started, by their numbers.
#[derive(Debug, Default)]
struct Leaders(BTreeMap<i32, (Tag, Run)>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    /// Not reaped yet: the number is its own.
    Running,
    /// Its session may go on, and then no other process has its number.
    Ended,
}

impl Leaders {
    fn add(&mut self, pid: Pid, tag: Tag) {
        self.0
            .insert(pid.as_raw_nonzero().get(), (tag, Run::Running));
    }

    fn running(&self, pid: i32) -> Option<Tag> {
        let (tag, run) = *self.0.get(&pid)?;
        (run == Run::Running).then_some(tag)
    }

    /// As [`Leaders::running`], for the number of a session.
    fn started(&self, session: i32) -> Option<Tag> {
        self.0.get(&session).map(|(tag, _)| *tag)
    }

    fn tags(&self) -> HashSet<Tag> {
        self.0.values().map(|(tag, _)| *tag).collect()
    }
}

static LEADERS: Mutex<Leaders> = Mutex::new(Leaders(BTreeMap::new()));

/// A process that was started by this program, registered as long as this exists.
#[derive(Debug)]
pub(crate) struct Leader {
    pid: Pid,
    pub(crate) tag: Tag,
    /// Nothing in its tree started before, in clock ticks since the machine was booted.
    since: u64,
}

impl Leader {
    /// Registers a process that was started at `since` or later.
    pub(crate) fn new(pid: Pid, tag: Tag, since: u64) -> Self {
        inspector::start();
        LEADERS.lock().add(pid, tag);
        Self { pid, tag, since }
    }

    /// It is about to be reaped; from now on its number may mean another process.
    pub(crate) fn ended(&self) {
        if let Some((tag, run)) = LEADERS.lock().0.get_mut(&self.pid.as_raw_nonzero().get())
            && *tag == self.tag
        {
            *run = Run::Ended;
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

/// Clock ticks since the machine was booted.
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

/// Makes this process the parent of its descendants' orphans, for a program that has no children but
/// those that it starts through this crate.
pub(crate) fn adopt_orphans() -> rustix::io::Result<()> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    ADOPTS_ORPHANS.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether this process bears the tag.
pub(crate) fn is_member(pid: Pid, tag: Tag) -> bool {
    rlimit::hard(Some(pid), TAG_RESOURCE).is_ok_and(|limit| limit == tag.0)
}

/// The living descendants of a process. Reads all of `/proc`.
pub(crate) fn descendants_of(ancestor: Pid) -> Vec<Pid> {
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
        // Taken out: what was read at different moments may go in a circle.
        for (pid, ended) in children.remove(&parent).unwrap_or_default() {
            above.push(pid);
            if !ended {
                descendants.extend(Pid::from_raw(pid));
            }
        }
    }
    descendants
}

/// The trees that a request is about.
#[derive(Debug, Clone)]
pub(crate) struct Trees {
    tags: HashSet<Tag>,
    /// Orphans that were started before cannot be of these trees, in clock ticks since the machine was
    /// booted.
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

    /// The same trees, without the orphans that may be of them.
    pub(crate) fn without_strays(mut self) -> Self {
        self.since = u64::MAX;
        self
    }

    /// The living processes; who started others comes before them.
    pub(crate) async fn members(self) -> Vec<Pid> {
        inspect(move |table, answer| {
            answer(table.living(&self.tags));
            Next::Done
        })
        .await
    }

    /// Sends a signal to every living process; to who started others before them.
    pub(crate) async fn signal(self, signal: Signal) {
        inspect(move |table, answer| {
            send(table, &self.tags, signal, &[]);
            answer(());
            Next::Done
        })
        .await;
    }

    /// Ends every process; returns what is left.
    pub(crate) async fn end(self, how: Ending) -> Left {
        let mut progress = Progress::new(self, how);
        inspect(move |table, answer| progress.step(table, answer)).await
    }

    /// As [`Trees::end`], without waiting for it.
    pub(crate) fn begin_to_end(self, how: Ending) {
        let mut progress = Progress::new(self, how);
        inspector::submit(move |table| progress.step(table, &mut |_| {}));
    }
}

/// A process group that this program has started, and how to signal it as long as it is there.
pub(crate) struct Group {
    pub(crate) id: Pid,
    pub(crate) signal: Box<dyn Fn(Signal) + Send>,
}

/// How trees are ended.
pub(crate) struct Ending {
    /// SIGTERM comes first, and SIGKILL after this time.
    pub(crate) grace: Option<Duration>,
    /// How long to wait after the first SIGKILL.
    pub(crate) patience: Duration,
    /// The groups of the trees' leaders.
    pub(crate) groups: Vec<Group>,
}

/// What could not be ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// Processes of the trees.
    pub(crate) members: Vec<Pid>,
    /// Orphans that this program has, that may come from the trees or from others, and that nothing
    /// connects to any of them.
    pub(crate) strays: Vec<Pid>,
}

/// ```text
/// Ask ──► Grace ──► Stop ◄──► Kill ──► done
///           └──── none left ────────────┘
/// ```
#[derive(Debug, Clone, Copy)]
enum Phase {
    Ask,
    Grace {
        until: Instant,
    },
    /// All are stopped before any is killed, so that none starts another one meanwhile, and none
    /// loses the parent that shows where it belongs.
    Stop,
    /// Until they have ended.
    Kill,
}

/// Trees that are being ended.
struct Progress {
    trees: Trees,
    how: Ending,
    phase: Phase,
    /// Processes that were stopped, with the moment of their start.
    stopped: HashSet<(i32, u64)>,
    rounds: usize,
    deadline: Option<Instant>,
    pause: Duration,
    /// No process of the trees was left when they were last looked at.
    was_empty: bool,
}

impl Progress {
    fn new(trees: Trees, how: Ending) -> Self {
        Self {
            trees,
            phase: match how.grace {
                Some(_) => Phase::Ask,
                None => Phase::Stop,
            },
            how,
            stopped: HashSet::new(),
            rounds: 0,
            deadline: None,
            pause: PAUSES.0,
            was_empty: false,
        }
    }

    fn step(&mut self, table: &mut Table, answer: &mut dyn FnMut(Left)) -> Next {
        /// Each round stops at least everything that was there when it began, so a tree that still
        /// grows after this many is held by something that may not be signalled.
        const ROUNDS: usize = 64;
        let tags = &self.trees.tags;
        match self.phase {
            Phase::Ask => {
                let grace = self.how.grace.unwrap_or_default();
                for group in &self.how.groups {
                    (group.signal)(Signal::TERM);
                }
                send(table, tags, Signal::TERM, &self.how.groups);
                let until = Instant::now() + grace;
                self.phase = Phase::Grace { until };
                self.again()
            }
            Phase::Grace { until } => {
                if self.living_or_done(table, answer).is_none() {
                    return Next::Done;
                }
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    self.phase = Phase::Stop;
                    self.pause = PAUSES.0;
                    return Next::Again(Duration::ZERO);
                }
                let Next::Again(pause) = self.again() else {
                    return Next::Done;
                };
                Next::Again(pause.min(left))
            }
            Phase::Stop => {
                let mut found = false;
                for process in table.processes(tags) {
                    if self.stopped.insert(process) {
                        found |= kill(process.0, Signal::STOP);
                    }
                }
                self.rounds += 1;
                if found && self.rounds < ROUNDS {
                    return Next::Again(Duration::ZERO);
                }
                for group in &self.how.groups {
                    (group.signal)(Signal::KILL);
                }
                let killed = table.processes(tags);
                for &(pid, _) in &killed {
                    kill(pid, Signal::KILL);
                }
                self.phase = Phase::Kill;
                let patience = self.how.patience;
                self.deadline
                    .get_or_insert_with(|| Instant::now() + patience);
                if killed.is_empty() {
                    return self.step(table, answer);
                }
                self.again()
            }
            Phase::Kill => {
                let Some(members) = self.living_or_done(table, answer) else {
                    return Next::Done;
                };
                if self
                    .deadline
                    .is_none_or(|deadline| Instant::now() >= deadline)
                {
                    let strays = table.strays(self.trees.since);
                    answer(Left {
                        members,
                        strays: strays.into_iter().map(|(pid, _)| pid).collect(),
                    });
                    return Next::Done;
                }
                let processes = table.processes(&self.trees.tags);
                if processes
                    .iter()
                    .any(|process| !self.stopped.contains(process))
                {
                    // Started before its parent was stopped.
                    self.phase = Phase::Stop;
                    return self.step(table, answer);
                }
                self.again()
            }
        }
    }

    /// The living processes; answers and returns `None` if it is certain that there are none.
    fn living_or_done(
        &mut self,
        table: &mut Table,
        answer: &mut dyn FnMut(Left),
    ) -> Option<Vec<Pid>> {
        let living = table.living(&self.trees.tags);
        let Some(strays) = self.none_left(&living, table) else {
            return Some(living);
        };
        let members = Vec::new();
        answer(Left { members, strays });
        None
    }

    /// Looks again a little later than the last time.
    fn again(&mut self) -> Next {
        let pause = self.pause;
        self.pause = (self.pause * 2).min(PAUSES.1);
        Next::Again(pause)
    }

    /// If it is certain that none of the trees' processes is left: strays that may be of them.
    fn none_left(&mut self, living: &[Pid], table: &Table) -> Option<Vec<Pid>> {
        if !living.is_empty() {
            self.was_empty = false;
            return None;
        }
        // All that were known had ended before the table was read the last time, or nothing has been
        // started since: one that was not known is in the table either way.
        let is_certain = table.is_current() || self.was_empty && table.is_settled();
        self.was_empty = true;
        if !is_certain {
            return None;
        }
        let strays = table.strays(self.trees.since);
        let now = clock();
        // One that was just forked by this program gets its tag soon.
        let is_young = |start: u64| now.saturating_sub(start) <= ticks(FORK_TO_TAG);
        if strays.iter().any(|&(_, start)| is_young(start)) {
            return None;
        }
        Some(strays.into_iter().map(|(pid, _)| pid).collect())
    }
}

/// Sends a signal to every process of the trees outside of these groups.
fn send(table: &mut Table, tags: &HashSet<Tag>, signal: Signal, outside: &[Group]) {
    for pid in table.living(tags) {
        let group = rustix::process::getpgid(Some(pid));
        if !outside.iter().any(|outside| Ok(outside.id) == group) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

/// Whether the process was there. The table says that the number is still its own.
fn kill(pid: i32, signal: Signal) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| rustix::process::kill_process(pid, signal).is_ok())
}

/// The command line of a process, or its name in brackets, as `ps` has it. Reads `/proc`, and may
/// block: not for an async worker.
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
    fn tags_differ_and_limit_nothing() {
        let (one, other) = (Tag::fresh(), Tag::fresh());
        assert_ne!(one, other);
        assert!(one.0 > 1 << 59, "{one:?}");
        assert!(one.0 < Tag::of_server().0, "a limit only goes down");
        assert!(one.is_given_out() && Tag::of_server().is_given_out());
        assert!(!Tag(one.0 - 1000).is_given_out());
    }

    #[test]
    fn leaders_number_is_its_own_until_it_is_reaped() {
        let pid = rustix::process::getpid();
        let number = pid.as_raw_nonzero().get();
        let (first, second) = (Tag::fresh(), Tag::fresh());
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
        std::io::Read::read_exact(output, &mut up).unwrap();
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
