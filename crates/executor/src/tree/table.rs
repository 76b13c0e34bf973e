//! Table of the processes on this machine, with the tree that each belongs to.
//!
//! Read from `/proc` as a whole once, and brought up to date by the numbers that the kernel has given
//! out since: new processes get ascending numbers, and `/proc/loadavg` has the latest. Who asks for
//! it, and when, is decided in `inspector`.
//!
//! A process keeps the tree that it was first seen in. What decides is what a process cannot change
//! by itself first, and its tag, which it can lower, last:
//!
//! 1. it was started by this server, which knows its number
//! 2. its parent belongs to a tree
//! 3. the process that leads or led its session belongs to a tree
//! 4. its tag

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use exec_server_sync::Mutex;
use rustix::process::Pid;

use super::{Leaders, TAG_RESOURCE, Tag};
use crate::sys::{probe, rlimit};

/// Numbers below the latest one that are looked at again: a process gets its number a moment before
/// it can be seen. Each processor can be in that moment once, and tasks that lost theirs to others.
const MARGIN: i32 = 128;

/// Passes over new numbers before the table is used although processes are started all the time.
const MAX_PASSES: usize = 16;

/// More new numbers than this, and than known processes, are slower than reading all of `/proc`.
const MIN_RANGE: usize = 1024;

/// The time that one start of a process or thread takes at the very least: a processor, and the whole
/// machine, since all of them wait for a few locks of the kernel. Numbers cannot have come around
/// again before they could have been used up.
const SHORTEST_START: (Duration, Duration) = (Duration::from_micros(5), Duration::from_micros(1));

/// How often a process is read again whose parent ended meanwhile.
const MAX_REREADS: usize = 8;

/// Readings of the table by this program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableReads {
    /// Of all of `/proc`.
    pub scans: u64,
    /// Of the processes that were started since the last one, if any.
    pub updates: u64,
}

static SCANS: AtomicU64 = AtomicU64::new(0);
static UPDATES: AtomicU64 = AtomicU64::new(0);

/// How often processes were looked for, since this program was started.
pub fn table_reads() -> TableReads {
    TableReads {
        scans: SCANS.load(Ordering::Relaxed),
        updates: UPDATES.load(Ordering::Relaxed),
    }
}

/// A process as `/proc/PID/stat` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) parent: i32,
    session: i32,
    /// In clock ticks since the machine was booted.
    start: u64,
    /// All its threads have ended.
    pub(super) ended: bool,
}

impl Stat {
    pub(super) fn of(pid: i32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        // The command's name may hold anything, a closing parenthesis included; fields follow the
        // last.
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

/// What a process belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// A tree that this server has started.
    Tree(Tag),
    /// The server's own work: itself, and what waits to launch sandboxes or works on files.
    Server,
    /// A descendant of this server that nothing connects to one of its trees any more.
    Stray,
    /// Something else.
    Foreign,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    parent: i32,
    session: i32,
    start: u64,
    owner: Owner,
}

/// See the module's description.
#[derive(Debug)]
pub(super) struct Table {
    own: i32,
    entries: HashMap<i32, Entry>,
    /// By tree; some may have ended, and some numbers may mean another process by now.
    trees: HashMap<Tag, Vec<i32>>,
    /// Processes that may turn out to belong to a tree: what waits to become a sandbox, and what has
    /// just been forked and has no tag yet.
    undecided: Vec<i32>,
    numbers: Numbers,
    /// The latest number that was given out when the table was read, if that can be known.
    latest: Option<i32>,
    read_at: Option<Instant>,
    /// Nothing was started on this machine while new numbers were looked at.
    settled: bool,
    /// How many processes there were when all of `/proc` was read.
    scanned: usize,
    /// Orphans of this server's trees become its children.
    adopts_orphans: bool,
}

impl Table {
    pub(super) fn new() -> Self {
        Self {
            own: rustix::process::getpid().as_raw_nonzero().get(),
            entries: HashMap::new(),
            trees: HashMap::new(),
            undecided: Vec::new(),
            numbers: Numbers::new(),
            latest: None,
            read_at: None,
            settled: false,
            scanned: 0,
            adopts_orphans: false,
        }
    }

    /// Brings the table up to date: afterwards it has every process that is there and was there when
    /// this was called.
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
            // All of `/proc` is read each time; processes that had no time to show are in the next.
            self.settled = true;
        }
        self.decide_again(leaders);
    }

    /// How long ago it was read.
    pub(super) fn age(&self) -> Option<Duration> {
        self.read_at.map(|at| at.elapsed())
    }

    /// Whether nothing at all was started on this machine since the table was read, so that it lacks
    /// no process.
    pub(super) fn is_current(&self) -> bool {
        self.latest.is_some() && self.numbers.latest() == self.latest
    }

    /// Whether it had every process that was there at one moment while it was read.
    pub(super) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Frees what is of no use to the next reading after a long time. Which processes belong to
    /// which tree is of use: they may have shed what shows it.
    pub(super) fn shrink(&mut self, leaders: &Mutex<Leaders>) {
        let registered = leaders.lock().tags();
        self.entries.retain(
            |_, entry| matches!(entry.owner, Owner::Tree(tag) if registered.contains(&tag)),
        );
        self.entries.shrink_to_fit();
        self.trees = HashMap::new();
        self.undecided = Vec::new();
        self.latest = None;
    }

    /// The processes of these trees, some of which may have ended, with the moment of their start.
    /// Never this process.
    pub(super) fn processes(&self, tags: &HashSet<Tag>) -> Vec<(i32, u64)> {
        let of_tree = |tag: &Tag| {
            let pids = self.trees.get(tag).into_iter().flatten();
            let owner = Owner::Tree(*tag);
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

    /// The living processes of these trees; who started others comes before them, so that a shell
    /// hears of its end before it sees that of what it waits for.
    pub(super) fn living(&mut self, tags: &HashSet<Tag>) -> Vec<Pid> {
        let mut parents = HashMap::new();
        let mut gone = HashSet::new();
        for (pid, start) in self.processes(tags) {
            match Stat::of(pid).filter(|stat| stat.start == start) {
                // Its entry stays: others may be in a session that it has led.
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

    /// Living descendants of this server that belong to none of its trees as far as can be told, and
    /// were started at `since` or later, with the moment of their start.
    pub(super) fn strays(&self, since: u64) -> Vec<(Pid, u64)> {
        if !self.adopts_orphans {
            return Vec::new();
        }
        let strays = self.undecided.iter().filter_map(|pid| {
            let entry = self.entries.get(pid)?;
            (entry.owner == Owner::Stray && entry.start >= since).then_some(())?;
            let alive = Stat::of(*pid).is_some_and(|stat| stat.start == entry.start && !stat.ended);
            alive.then_some((Pid::from_raw(*pid)?, entry.start))
        });
        strays.collect()
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
                && matches!(entry.owner, Owner::Tree(_) | Owner::Foreign)
            {
                self.insert(pid, stat, entry.owner);
            } else {
                self.insert(pid, stat, Owner::Stray);
                new.push(pid);
            }
        }
        self.decide(new, leaders);
        self.latest = latest;
        self.scanned = self.entries.len();
    }

    /// Reads processes with numbers that were given out after `before`, and those of just before
    /// that were not to be seen.
    fn read_new(&mut self, before: i32, latest: i32, leaders: &Mutex<Leaders>) {
        let mut new = Vec::new();
        for number in (before - MARGIN).max(1)..=latest {
            if number > before {
                // What had this number has ended.
                self.entries.remove(&number);
            } else if self.entries.contains_key(&number) {
                continue;
            }
            if probe::is_process(number)
                && let Some(stat) = Stat::of(number)
            {
                self.insert(number, stat, Owner::Stray);
                new.push(number);
            }
        }
        self.latest = Some(latest);
        self.decide(new, leaders);
    }

    fn insert(&mut self, pid: i32, stat: Stat, owner: Owner) {
        let entry = Entry {
            parent: stat.parent,
            session: stat.session,
            start: stat.start,
            owner,
        };
        self.entries.insert(pid, entry);
        if let Owner::Tree(tag) = owner {
            self.trees.entry(tag).or_default().push(pid);
        }
    }

    /// Decides what new processes belong to.
    fn decide(&mut self, new: Vec<i32>, leaders: &Mutex<Leaders>) {
        let mut open: HashSet<i32> = new.iter().copied().collect();
        for pid in new {
            self.decide_one(pid, &mut open, leaders);
        }
    }

    /// Decides for `pid`, and before that for those above it that are in `open`.
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
            // What was read at different moments may go in a circle.
            if open.contains(&parent) && !path.contains(&parent) {
                path.push(parent);
                continue;
            }
            let is_known = parent == 0 || parent == self.own || self.entries.contains_key(&parent);
            if !is_known && rereads < MAX_REREADS {
                // Its parent has ended since, or is too new: it has another one, or soon will.
                rereads += 1;
                match Stat::of(pid) {
                    Some(stat) if stat.start == entry.start => {
                        self.insert(pid, stat, Owner::Stray);
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
                Owner::Tree(tag) => self.trees.entry(tag).or_default().push(pid),
                Owner::Foreign => {}
                Owner::Server | Owner::Stray => self.undecided.push(pid),
            }
        }
    }

    fn owner(&self, pid: i32, entry: Entry, leaders: &Mutex<Leaders>) -> Owner {
        if pid == self.own {
            return Owner::Server;
        }
        if let Some(tag) = leaders.lock().running(pid) {
            return Owner::Tree(tag);
        }
        let parent = match self.entries.get(&entry.parent) {
            _ if entry.parent == self.own => None,
            Some(parent) => Some(parent.owner),
            None => Some(Owner::Foreign),
        };
        if let Some(Owner::Tree(tag)) = parent {
            return Owner::Tree(tag);
        }
        if let Some(tag) = leaders.lock().started(entry.session) {
            return Owner::Tree(tag);
        }
        // The number of a session's leader is not given out again as long as the session has members.
        if let Some(leader) = self.entries.get(&entry.session)
            && let Owner::Tree(tag) = leader.owner
        {
            return Owner::Tree(tag);
        }
        match (tag_of(pid), parent) {
            (Some(tag), _) if tag == Tag::of_server() => Owner::Server,
            (Some(tag), _) => Owner::Tree(tag),
            // Orphans of this server's trees come to it, if it adopts them.
            (None, None) => Owner::Stray,
            (None, Some(above)) => above,
        }
    }

    /// Looks again at processes that may belong to a tree by now.
    fn decide_again(&mut self, leaders: &Mutex<Leaders>) {
        let grown = super::clock().saturating_sub(super::ticks(super::FORK_TO_TAG));
        let mut new = Vec::new();
        for pid in std::mem::take(&mut self.undecided) {
            let Some(entry) = self.entries.get(&pid).copied() else {
                continue;
            };
            if !self.adopts_orphans && entry.owner == Owner::Stray && entry.start < grown {
                // A child that this program has started in another way.
                self.entries.insert(
                    pid,
                    Entry {
                        owner: Owner::Foreign,
                        ..entry
                    },
                );
                continue;
            }
            let is_own = pid == self.own;
            if is_own || entry.owner == Owner::Server && tag_of(pid) == Some(Tag::of_server()) {
                self.undecided.push(pid);
                continue;
            }
            match Stat::of(pid).filter(|stat| stat.start == entry.start) {
                Some(stat) => {
                    self.insert(pid, stat, Owner::Stray);
                    new.push(pid);
                }
                None => _ = self.entries.remove(&pid),
            }
        }
        self.decide(new, leaders);
    }
}

/// The tag of a process, if it has one that this program has given out.
fn tag_of(pid: i32) -> Option<Tag> {
    let limit = rlimit::hard(Some(Pid::from_raw(pid)?), TAG_RESOURCE).ok()?;
    Some(Tag(limit)).filter(|tag| tag.is_given_out())
}

/// How many of those above a process are in the table too.
fn ancestors(pid: i32, parents: &HashMap<i32, i32>) -> usize {
    let parent = |pid: &i32| parents.get(pid).copied();
    // What was read at different moments may go in a circle.
    std::iter::successors(parent(&pid), parent)
        .take(parents.len())
        .filter(|above| parents.contains_key(above))
        .count()
}

/// The numbers that the kernel gives to processes and threads.
#[derive(Debug)]
struct Numbers {
    /// `/proc/loadavg`, if it is the kernel's own and has what is needed.
    file: Option<File>,
    /// How long it takes at least until a number is given out again.
    come_around: Duration,
}

impl Numbers {
    fn new() -> Self {
        let most = fs::read_to_string("/proc/sys/kernel/pid_max");
        let most = most.ok().and_then(|text| text.trim().parse::<u32>().ok());
        // The kernel's default.
        let most = most.unwrap_or(32_768);
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let processors = u32::try_from(processors).unwrap_or(u32::MAX);
        // Some containers have a file of their own there.
        let file = File::open("/proc/loadavg").ok().filter(|file| {
            let kind = rustix::fs::fstatfs(file).map(|found| found.f_type);
            kind == Ok(rustix::fs::PROC_SUPER_MAGIC)
        });
        Self {
            file,
            come_around: (SHORTEST_START.0 * most / processors).max(SHORTEST_START.1 * most),
        }
    }

    /// The latest one that was given out.
    fn latest(&self) -> Option<i32> {
        let mut text = [0; 128];
        let length = self.file.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..length)?).ok()?;
        let latest = text.trim_end().rsplit(' ').next()?.parse().ok()?;
        // Some kernels say 0, which means that they do not say it.
        (latest > 0).then_some(latest)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Run;
    use super::*;

    #[test]
    fn stat_of_a_process_with_an_odd_name() {
        let text = b"17 (a) Z (b) S 1 2 3 0 -1 4194560 0 0 0 0 1 2 3 4 20 0 5 0 9876 1 2 3";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.parent, stat.session, stat.start), (1, 3, 9876));
        assert!(!stat.ended);
        let ended = |text: &str| Stat::parse(text.as_bytes()).unwrap().ended;
        assert!(ended(
            "1 (x) Z 1 2 3 0 -1 0 0 0 0 0 1 2 3 4 20 0 1 0 9876 1"
        ));
        // Other threads go on.
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
        // A circle has an end.
        assert_eq!(above(2), parents.len());
    }

    #[test]
    fn update_after_scan_finds_new_processes_without_another_scan() {
        let mut table = Table::new();
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
        assert_eq!((found.parent, found.owner), (table.own, Owner::Stray));
        if table.numbers.file.is_some() {
            assert!(table.is_settled());
            assert_eq!(table_reads().scans, scans);
        }
    }

    #[test]
    fn process_keeps_its_tree_when_nothing_shows_it_any_more() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let tags = HashSet::from([Tag::fresh()]);
        let leaders = Mutex::<Leaders>::default();
        leaders.lock().add(pid, *tags.iter().next().unwrap());
        let mut table = Table::new();
        table.update(&leaders);
        let first = table.living(&tags);
        leaders
            .lock()
            .0
            .values_mut()
            .for_each(|(_, run)| *run = Run::Ended);
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
