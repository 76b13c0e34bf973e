//! Table of the processes on this machine, with the tree that each belongs to.
//!
//! Reads all of `/proc` once, and then only the processes with newer pids: new processes get
//! ascending pids, and `/proc/loadavg` contains the latest. The `inspector` decides when the table
//! is read.
//!
//! A process keeps the tree that it was first assigned to. The evidence is checked in this order.
//! Evidence that a process cannot change by itself comes first; its tag, which it can lower, comes
//! last:
//!
//! 1. this server started it and knows its pid
//! 2. its parent belongs to a tree
//! 3. the current or former leader of its session belongs to a tree
//! 4. its tag

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use exec_server_sync::Mutex;
use rustix::process::Pid;

use super::{Leaders, TAG_RESOURCE, TreeTag};
use crate::{local_clients, proc_inspect};
use exec_server_sys::{probe, rlimit};

/// Pids below the latest one that are read again: a process gets its pid a moment before it becomes
/// visible. Each processor can be in that moment once, and so can preempted tasks.
const MARGIN: i32 = 128;

/// Maximum number of passes over new pids before the table is used although processes are still
/// being started.
const MAX_PASSES: usize = 16;

/// If there are more new pids than this, and than known processes, reading all of `/proc` is
/// faster.
const MIN_RANGE: usize = 1024;

/// Minimum time of one process or thread start: on one processor, and on the whole machine, since
/// all processors wait for a few kernel locks. Pids cannot wrap around before this time multiplied
/// by their number.
const SHORTEST_START: (Duration, Duration) = (Duration::from_micros(5), Duration::from_micros(1));

/// Maximum number of times that a process is read again because its parent ended meanwhile.
const MAX_REREADS: usize = 8;

/// Number of reads of the table, and of other parts of `/proc`, by this program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableReads {
    /// Full reads of `/proc`.
    pub scans: u64,
    /// Reads of only the processes that were started since the last read.
    pub updates: u64,
    /// Reads of the children of this program.
    pub children: u64,
    /// Reads of a table of listening sockets.
    pub socket_tables: u64,
    /// Reads of the sockets of all processes.
    pub socket_holders: u64,
}

static SCANS: AtomicU64 = AtomicU64::new(0);
static UPDATES: AtomicU64 = AtomicU64::new(0);

/// Returns how often this program has read the process table since it was started.
pub fn table_reads() -> TableReads {
    TableReads {
        scans: SCANS.load(Ordering::Relaxed),
        updates: UPDATES.load(Ordering::Relaxed),
        children: super::children_reads(),
        socket_tables: proc_inspect::socket_table_reads(),
        socket_holders: local_clients::holder_reads(),
    }
}

/// Fields of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) parent: i32,
    session: i32,
    /// Start time in clock ticks since boot.
    start: u64,
    /// All its threads have ended.
    pub(super) ended: bool,
}

impl Stat {
    pub(super) fn of(pid: i32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        // The command name may contain any byte, including a closing parenthesis; the fields follow
        // the last one.
        let after = text.iter().rposition(|&byte| byte == b')')? + 2;
        let fields = std::str::from_utf8(text.get(after..)?).ok()?;
        let mut fields = fields.split_ascii_whitespace();
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        let threads: u64 = fields.nth(13)?.parse().ok()?;
        let start = fields.nth(1)?.parse().ok()?;
        Some(Self {
            parent,
            session,
            start,
            // The first thread of a process may end before the others.
            ended: matches!(state, "Z" | "X") && threads <= 1,
        })
    }
}

/// The processes that `/proc` lists.
pub(super) fn all_pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Owner of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessOwner {
    /// A tree that this server started.
    Tree(TreeTag),
    /// The server itself: its own process, sandbox launchers on standby and file helpers.
    Server,
    /// A descendant of this server without evidence of its tree.
    Stray,
    /// A process that does not belong to this server.
    Foreign,
}

#[derive(Debug, Clone, Copy)]
struct ProcessEntry {
    parent: i32,
    session: i32,
    start: u64,
    owner: ProcessOwner,
}

/// Process table; see the module documentation.
#[derive(Debug)]
pub(super) struct ProcessTable {
    own: i32,
    entries: HashMap<i32, ProcessEntry>,
    /// Pids by tree; some processes may have ended, and some pids may have been reused.
    trees: HashMap<TreeTag, Vec<i32>>,
    /// Processes that may later turn out to belong to a tree: launchers on standby, and newly
    /// forked processes without a tag.
    undecided: Vec<i32>,
    numbers: PidAllocation,
    /// The latest pid when the table was read, if that is known.
    latest: Option<i32>,
    read_at: Option<Instant>,
    /// No process was started on this machine while new pids were read.
    settled: bool,
    /// Number of processes at the last full read.
    scanned: usize,
    /// Orphans of this server's trees become its children.
    adopts_orphans: bool,
}

impl ProcessTable {
    pub(super) fn new() -> Self {
        Self {
            own: rustix::process::getpid().as_raw_nonzero().get(),
            entries: HashMap::new(),
            trees: HashMap::new(),
            undecided: Vec::new(),
            numbers: PidAllocation::new(),
            latest: None,
            read_at: None,
            settled: false,
            scanned: 0,
            adopts_orphans: false,
        }
    }

    /// Updates the table: afterwards it contains every process that exists and existed when this
    /// was called.
    pub(super) fn update(&mut self, leaders: &Mutex<Leaders>) {
        self.adopts_orphans = super::ADOPTS_ORPHANS.load(Ordering::Relaxed);
        let is_old = self.age().is_none_or(|age| age > self.numbers.come_around);
        // Most entries are of processes that have ended.
        let is_large = self.entries.len() > 2 * self.scanned + MIN_RANGE;
        if self.latest.is_none() || is_old || is_large {
            self.scan(leaders);
        }
        UPDATES.fetch_add(1, Ordering::Relaxed);
        self.settled = false;
        for _ in 0..MAX_PASSES {
            self.read_at = Some(Instant::now());
            let (Some(before), Some(latest)) = (self.latest, self.numbers.latest()) else {
                break;
            };
            let enough = self.entries.len().max(MIN_RANGE);
            if usize::try_from(latest - before).is_ok_and(|new| new <= enough) {
                self.read_new(before, latest, leaders);
            } else {
                self.scan(leaders);
                continue;
            }
            if self.is_current() {
                self.settled = true;
                break;
            }
        }
        if self.latest.is_none() {
            // Without the latest pid every read is a full one; the next one finds processes that
            // were not visible yet.
            self.settled = true;
        }
        self.decide_again(leaders);
    }

    /// Time since the last read.
    pub(super) fn age(&self) -> Option<Duration> {
        self.read_at.map(|at| at.elapsed())
    }

    /// Whether no process was started on this machine since the table was read, so that it is
    /// complete.
    pub(super) fn is_current(&self) -> bool {
        self.latest.is_some() && self.numbers.latest() == self.latest
    }

    /// Whether the table contains every process that existed at one moment during the read.
    pub(super) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Frees memory that the next read after a long time cannot use. Keeps the assignment of
    /// processes to trees: they may have lost the evidence of it.
    pub(super) fn shrink(&mut self, leaders: &Mutex<Leaders>) {
        let registered = leaders.lock().tags();
        self.entries.retain(
            |_, entry| matches!(entry.owner, ProcessOwner::Tree(tag) if registered.contains(&tag)),
        );
        self.entries.shrink_to_fit();
        self.trees = HashMap::new();
        self.undecided = Vec::new();
        self.latest = None;
    }

    /// The processes of these trees with their start times; some may have ended. Never includes
    /// this process.
    pub(super) fn processes(&self, tags: &HashSet<TreeTag>) -> Vec<(i32, u64)> {
        let of_tree = |tag: &TreeTag| {
            let pids = self.trees.get(tag).into_iter().flatten();
            let owner = ProcessOwner::Tree(*tag);
            pids.filter_map(move |&pid| {
                let entry = self.entries.get(&pid)?;
                (entry.owner == owner).then_some((pid, entry.start))
            })
        };
        let mut processes: Vec<_> = tags.iter().flat_map(of_tree).collect();
        processes.sort_unstable();
        processes.dedup();
        processes
    }

    /// The living processes of these trees, parents before children, so that a shell receives its
    /// signal before it detects the end of the child that it waits for.
    pub(super) fn living(&mut self, tags: &HashSet<TreeTag>) -> Vec<Pid> {
        let mut parents = HashMap::new();
        let mut gone = HashSet::new();
        for (pid, start) in self.processes(tags) {
            match Stat::of(pid).filter(|stat| stat.start == start) {
                // The entry of the process stays: it may have led the session of other processes.
                None => _ = gone.insert(pid),
                Some(stat) if stat.ended => {}
                Some(stat) => _ = parents.insert(pid, stat.parent),
            }
        }
        for tag in tags {
            if let Some(pids) = self.trees.get_mut(tag) {
                pids.retain(|pid| !gone.contains(pid));
                if pids.is_empty() {
                    self.trees.remove(tag);
                }
            }
        }
        let mut living: Vec<i32> = parents.keys().copied().collect();
        living.sort_by_key(|&pid| (ancestors(pid, &parents), pid));
        living.into_iter().filter_map(Pid::from_raw).collect()
    }

    /// Living descendants of this server without a known tree that were started at `since` or
    /// later, with their start times.
    pub(super) fn unattributed_orphans(&self, since: u64) -> Vec<(Pid, u64)> {
        if !self.adopts_orphans {
            return Vec::new();
        }
        let unattributed_orphans = self.undecided.iter().filter_map(|pid| {
            let entry = self.entries.get(pid)?;
            (entry.owner == ProcessOwner::Stray && entry.start >= since).then_some(())?;
            let alive = Stat::of(*pid).is_some_and(|stat| stat.start == entry.start && !stat.ended);
            alive.then_some((Pid::from_raw(*pid)?, entry.start))
        });
        unattributed_orphans.collect()
    }

    /// Reads all of `/proc`.
    fn scan(&mut self, leaders: &Mutex<Leaders>) {
        SCANS.fetch_add(1, Ordering::Relaxed);
        let latest = self.numbers.latest();
        let old = std::mem::take(&mut self.entries);
        self.trees.clear();
        self.undecided.clear();
        let mut new = Vec::new();
        for pid in all_pids() {
            let Some(stat) = Stat::of(pid) else { continue };
            let known = old.get(&pid);
            let same = known.filter(|known| known.start == stat.start);
            if let Some(entry) = same
                && matches!(entry.owner, ProcessOwner::Tree(_) | ProcessOwner::Foreign)
            {
                self.insert(pid, stat, entry.owner);
            } else {
                self.insert(pid, stat, ProcessOwner::Stray);
                new.push(pid);
            }
        }
        self.decide(new, leaders);
        self.latest = latest;
        self.scanned = self.entries.len();
    }

    /// Reads processes with pids assigned after `before`, and those just before it that were not
    /// visible yet.
    fn read_new(&mut self, before: i32, latest: i32, leaders: &Mutex<Leaders>) {
        let mut new = Vec::new();
        for number in (before - MARGIN).max(1)..=latest {
            if number > before {
                // The previous process with this pid has ended.
                self.entries.remove(&number);
            } else if self.entries.contains_key(&number) {
                continue;
            }
            if probe::is_process(number)
                && let Some(stat) = Stat::of(number)
            {
                self.insert(number, stat, ProcessOwner::Stray);
                new.push(number);
            }
        }
        self.latest = Some(latest);
        self.decide(new, leaders);
    }

    fn insert(&mut self, pid: i32, stat: Stat, owner: ProcessOwner) {
        let entry = ProcessEntry {
            parent: stat.parent,
            session: stat.session,
            start: stat.start,
            owner,
        };
        self.entries.insert(pid, entry);
        if let ProcessOwner::Tree(tag) = owner {
            self.trees.entry(tag).or_default().push(pid);
        }
    }

    /// Assigns an owner to new processes.
    fn decide(&mut self, new: Vec<i32>, leaders: &Mutex<Leaders>) {
        let mut open: HashSet<i32> = new.iter().copied().collect();
        for pid in new {
            self.decide_one(pid, &mut open, leaders);
        }
    }

    /// Assigns an owner to `pid`, and before that to its ancestors in `open`.
    fn decide_one(&mut self, pid: i32, open: &mut HashSet<i32>, leaders: &Mutex<Leaders>) {
        let mut path = vec![pid];
        let mut rereads = 0;
        while let Some(&pid) = path.last() {
            if !open.contains(&pid) {
                path.pop();
                continue;
            }
            let Some(entry) = self.entries.get(&pid).copied() else {
                open.remove(&pid);
                continue;
            };
            let parent = entry.parent;
            // Parents read at different times may form a cycle.
            if open.contains(&parent) && !path.contains(&parent) {
                path.push(parent);
                continue;
            }
            let is_known = parent == 0 || parent == self.own || self.entries.contains_key(&parent);
            if !is_known && rereads < MAX_REREADS {
                // The parent has ended since or is not in the table yet: read the process again for
                // its current parent.
                rereads += 1;
                match Stat::of(pid) {
                    Some(stat) if stat.start == entry.start => {
                        self.insert(pid, stat, ProcessOwner::Stray);
                    }
                    _ => _ = self.entries.remove(&pid),
                }
                continue;
            }
            let owner = self.owner(pid, entry, leaders);
            open.remove(&pid);
            if let Some(entry) = self.entries.get_mut(&pid) {
                entry.owner = owner;
            }
            match owner {
                ProcessOwner::Tree(tag) => self.trees.entry(tag).or_default().push(pid),
                ProcessOwner::Foreign => {}
                ProcessOwner::Server | ProcessOwner::Stray => self.undecided.push(pid),
            }
        }
    }

    fn owner(&self, pid: i32, entry: ProcessEntry, leaders: &Mutex<Leaders>) -> ProcessOwner {
        if pid == self.own {
            return ProcessOwner::Server;
        }
        if let Some(tag) = leaders.lock().running(pid) {
            return ProcessOwner::Tree(tag);
        }
        let parent = match self.entries.get(&entry.parent) {
            _ if entry.parent == self.own => None,
            Some(parent) => Some(parent.owner),
            None => Some(ProcessOwner::Foreign),
        };
        if let Some(ProcessOwner::Tree(tag)) = parent {
            return ProcessOwner::Tree(tag);
        }
        if let Some(tag) = leaders.lock().started(entry.session) {
            return ProcessOwner::Tree(tag);
        }
        // The pid of a session leader is not reused while the session has members.
        if let Some(leader) = self.entries.get(&entry.session)
            && let ProcessOwner::Tree(tag) = leader.owner
        {
            return ProcessOwner::Tree(tag);
        }
        match (tag_of(pid), parent) {
            (Some(tag), _) if tag == TreeTag::of_server() => ProcessOwner::Server,
            (Some(tag), _) => ProcessOwner::Tree(tag),
            // Orphans of this server's trees become its children, if it adopts orphans.
            (None, None) => ProcessOwner::Stray,
            (None, Some(above)) => above,
        }
    }

    /// Checks again the processes that may belong to a tree by now.
    fn decide_again(&mut self, leaders: &Mutex<Leaders>) {
        let grown = super::clock().saturating_sub(super::ticks(super::FORK_TO_TAG));
        let mut new = Vec::new();
        for pid in std::mem::take(&mut self.undecided) {
            let Some(entry) = self.entries.get(&pid).copied() else {
                continue;
            };
            if !self.adopts_orphans && entry.owner == ProcessOwner::Stray && entry.start < grown {
                // A child that this program has started in another way.
                self.entries.insert(
                    pid,
                    ProcessEntry {
                        owner: ProcessOwner::Foreign,
                        ..entry
                    },
                );
                continue;
            }
            let is_own = pid == self.own;
            if is_own
                || entry.owner == ProcessOwner::Server && tag_of(pid) == Some(TreeTag::of_server())
            {
                self.undecided.push(pid);
                continue;
            }
            match Stat::of(pid).filter(|stat| stat.start == entry.start) {
                Some(stat) => {
                    self.insert(pid, stat, ProcessOwner::Stray);
                    new.push(pid);
                }
                None => _ = self.entries.remove(&pid),
            }
        }
        self.decide(new, leaders);
    }
}

/// The tag of a process, if this program has assigned it.
fn tag_of(pid: i32) -> Option<TreeTag> {
    let limit = rlimit::hard(Some(Pid::from_raw(pid)?), TAG_RESOURCE).ok()?;
    Some(TreeTag(limit)).filter(|tag| tag.is_assigned())
}

/// Number of ancestors of a process in the table.
fn ancestors(pid: i32, parents: &HashMap<i32, i32>) -> usize {
    let parent = |pid: &i32| parents.get(pid).copied();
    // Parents read at different times may form a cycle.
    std::iter::successors(parent(&pid), parent)
        .take(parents.len())
        .filter(|above| parents.contains_key(above))
        .count()
}

/// State of the kernel's pid allocation.
#[derive(Debug)]
struct PidAllocation {
    /// `/proc/loadavg`, if it is the kernel's own file and has the needed field.
    file: Option<File>,
    /// Minimum time until a pid is reused.
    come_around: Duration,
}

impl PidAllocation {
    fn new() -> Self {
        let most = fs::read_to_string("/proc/sys/kernel/pid_max");
        let most = most.ok().and_then(|text| text.trim().parse::<u32>().ok());
        // The kernel's default.
        let most = most.unwrap_or(32_768);
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let processors = u32::try_from(processors).unwrap_or(u32::MAX);
        // Some containers mount their own file there.
        let file = File::open("/proc/loadavg").ok().filter(|file| {
            let kind = rustix::fs::fstatfs(file).map(|found| found.f_type);
            kind == Ok(rustix::fs::PROC_SUPER_MAGIC)
        });
        Self {
            file,
            come_around: (SHORTEST_START.0 * most / processors).max(SHORTEST_START.1 * most),
        }
    }

    /// The latest pid.
    fn latest(&self) -> Option<i32> {
        let mut text = [0; 128];
        let length = self.file.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..length)?).ok()?;
        let latest = text.trim_end().rsplit(' ').next()?.parse().ok()?;
        // Some kernels report 0, which means unknown.
        (latest > 0).then_some(latest)
    }
}

#[cfg(test)]
mod tests {
    use super::super::LeaderState;
    use super::*;

    #[test]
    fn stat_parses_command_name_with_parentheses() {
        let text = b"17 (a) Z (b) S 1 2 3 0 -1 4194560 0 0 0 0 1 2 3 4 20 0 5 0 9876 1 2 3";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.parent, stat.session, stat.start), (1, 3, 9876));
        assert!(!stat.ended);
        let ended = |text: &str| Stat::parse(text.as_bytes()).unwrap().ended;
        assert!(ended(
            "1 (x) Z 1 2 3 0 -1 0 0 0 0 0 1 2 3 4 20 0 1 0 9876 1"
        ));
        // Other threads are still running.
        assert!(!ended(
            "1 (x) Z 1 2 3 0 -1 0 0 0 0 0 1 2 3 4 20 0 2 0 9876 1"
        ));
        for odd in ["", "1 (x", "1 (x)", "1 (x) S", "1 (x) S a b c"] {
            assert_eq!(Stat::parse(odd.as_bytes()), None, "{odd}");
        }
    }

    #[test]
    fn parents_come_before_children() {
        let parents = HashMap::from([(9, 1), (8, 9), (5, 8), (7, 9), (2, 3), (3, 2)]);
        let above = |pid| ancestors(pid, &parents);
        assert_eq!([9, 8, 7, 5].map(above), [0, 1, 1, 2]);
        // A cycle terminates.
        assert_eq!(above(2), parents.len());
    }

    #[test]
    fn update_after_scan_finds_new_processes_without_another_scan() {
        let mut table = ProcessTable::new();
        let leaders = Mutex::<Leaders>::default();
        table.update(&leaders);
        let scans = table_reads().scans;
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        table.read_at = Some(Instant::now());
        table.update(&leaders);
        let found = table.entries.get(&pid).copied();
        child.kill().unwrap();
        child.wait().unwrap();
        let found = found.unwrap();
        assert_eq!(
            (found.parent, found.owner),
            (table.own, ProcessOwner::Stray)
        );
        if table.numbers.file.is_some() {
            assert!(table.is_settled());
            assert_eq!(table_reads().scans, scans);
        }
    }

    #[test]
    fn process_keeps_its_known_tree_after_the_leader_ended() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let tags = HashSet::from([TreeTag::fresh()]);
        let leaders = Mutex::<Leaders>::default();
        leaders.lock().add(pid, *tags.iter().next().unwrap());
        let mut table = ProcessTable::new();
        table.update(&leaders);
        let first = table.living(&tags);
        leaders
            .lock()
            .0
            .values_mut()
            .for_each(|(_, run)| *run = LeaderState::Ended);
        table.update(&leaders);
        table.shrink(&leaders);
        table.update(&leaders);
        let later = table.living(&tags);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((first, later), (vec![pid], vec![pid]));
        assert!(table.living(&tags).is_empty());
    }
}
