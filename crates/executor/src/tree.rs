//! Who belongs to a process: its descendants, wherever they moved.
//!
//! Every child is born with a tag, an unusual but harmless value of a resource limit that children
//! inherit and cannot shed by leaving their session, group or parent. A scan of `/proc` finds the
//! bearers; whatever a bearer started under a tag of its own is found through its parent.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::sys::rlimit;

/// The resource that carries the tag: CPU time of real-time threads. Values around 2^60
/// microseconds (thirty thousand years) limit nothing.
pub(crate) const TAG_RESOURCE: u32 = libc::RLIMIT_RTTIME;

/// A mark that one process and all its descendants bear.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tag(pub(crate) u64);

impl Tag {
    /// A tag that nobody bears yet.
    ///
    /// A server inside a tagged process must go below its own tag: limits only go down.
    pub(crate) fn fresh() -> Self {
        /// 0 until the first use; then the value of the next tag, counting down.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut next = NEXT.load(Ordering::Relaxed);
        if next == 0 {
            let own = rlimit::hard(None, TAG_RESOURCE).unwrap_or(u64::MAX);
            let (random, _) = uuid::Uuid::new_v4().as_u64_pair();
            // Between 2^60 and 2^61, or below our own: servers that run side by side differ.
            let start = ((1 << 60) | (random >> 4)).min(own.saturating_sub(1));
            let _ = NEXT.compare_exchange(0, start, Ordering::Relaxed, Ordering::Relaxed);
            next = NEXT.load(Ordering::Relaxed);
        }
        debug_assert!(next > 0);
        Self(NEXT.fetch_sub(1, Ordering::Relaxed))
    }
}

/// A process as `/proc/PID/stat` shows it.
#[derive(Debug, Clone, Copy)]
struct Stat {
    parent: i32,
    zombie: bool,
}

fn stat(pid: i32) -> Option<Stat> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The command's name may hold anything, a closing parenthesis included; fields follow the last.
    let after = text.iter().rposition(|&byte| byte == b')')? + 2;
    let mut fields = text.get(after..)?.split(|&byte| byte == b' ');
    let state = fields.next()?;
    let parent = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    Some(Stat {
        parent,
        zombie: matches!(state, b"Z" | b"X"),
    })
}

fn all_pids() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn bears(pid: i32, tags: &HashSet<Tag>) -> bool {
    Pid::from_raw(pid)
        .and_then(|pid| rlimit::hard(Some(pid), TAG_RESOURCE).ok())
        .is_some_and(|limit| tags.contains(&Tag(limit)))
}

/// Whether this process bears the tag.
pub(crate) fn is_member(pid: Pid, tag: Tag) -> bool {
    rlimit::hard(Some(pid), TAG_RESOURCE).is_ok_and(|limit| limit == tag.0)
}

/// The living children of a process.
pub(crate) fn children_of(parent: Pid) -> Vec<Pid> {
    let parent = parent.as_raw_nonzero().get();
    all_pids()
        .into_iter()
        .filter(|&pid| stat(pid).is_some_and(|stat| stat.parent == parent && !stat.zombie))
        .filter_map(Pid::from_raw)
        .collect()
}

/// Whether it is certain, at little cost, that nobody bears one of `tags`.
///
/// Walks down from this process, which is quick where it has few descendants and the machine many
/// processes. Whatever is not clear, such as a process that ends meanwhile and leaves its children
/// to somebody else, is for a look at all of `/proc`.
fn is_nobody(tags: &HashSet<Tag>) -> bool {
    /// With more of them the other way is no slower.
    const WORTH: usize = 64;
    // Without this, orphans are not below us.
    if !rustix::process::child_subreaper().is_ok_and(|reaper| reaper.is_some()) {
        return false;
    }
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let (mut to_see, mut seen) = (vec![own], 0);
    while let Some(pid) = to_see.pop() {
        seen += 1;
        let Some(children) = children_listed(pid).filter(|_| seen <= WORTH) else {
            return false;
        };
        for &child in &children {
            let limit = Pid::from_raw(child).map(|pid| rlimit::hard(Some(pid), TAG_RESOURCE));
            match limit {
                Some(Ok(limit)) if !tags.contains(&Tag(limit)) => {}
                _ => return false,
            }
        }
        to_see.extend(children);
        // One that has ended had left its children before we asked for them.
        if stat(pid).is_none_or(|stat| stat.zombie) {
            return false;
        }
    }
    true
}

/// The children of all threads of a process, if the kernel lists them and none ended meanwhile.
fn children_listed(pid: i32) -> Option<Vec<i32>> {
    let mut children = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let list = fs::read_to_string(task.ok()?.path().join("children")).ok()?;
        for child in list.split_ascii_whitespace() {
            children.push(child.parse().ok()?);
        }
    }
    Some(children)
}

/// The living processes that bear one of `tags`, or descend from one that does; who started others
/// comes before them, so that a shell hears of its end before it sees that of what it waits for.
///
/// Reads `/proc`: not for an async worker. Never returns this process.
pub(crate) fn members(tags: &HashSet<Tag>) -> Vec<Pid> {
    if is_nobody(tags) {
        return Vec::new();
    }
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let stats: HashMap<i32, Stat> = all_pids()
        .into_iter()
        .filter_map(|pid| Some((pid, stat(pid)?)))
        .collect();
    let mut members: HashSet<i32> = stats
        .keys()
        .copied()
        .filter(|&pid| bears(pid, tags))
        .collect();
    // Descendants under other tags; a pass per generation.
    loop {
        let more: Vec<i32> = stats
            .iter()
            .filter(|(pid, stat)| !members.contains(pid) && members.contains(&stat.parent))
            .map(|(&pid, _)| pid)
            .collect();
        if more.is_empty() {
            break;
        }
        members.extend(more);
    }
    let mut ordered: Vec<i32> = members.iter().copied().collect();
    ordered.sort_by_key(|pid| ancestors(*pid, &members, &stats));
    ordered
        .into_iter()
        .filter(|pid| *pid != own && stats.get(pid).is_some_and(|stat| !stat.zombie))
        .filter_map(Pid::from_raw)
        .collect()
}

/// How many of those above a process are members too.
fn ancestors(pid: i32, members: &HashSet<i32>, stats: &HashMap<i32, Stat>) -> usize {
    let parent = |pid: &i32| stats.get(pid).map(|stat| stat.parent);
    // What was read at different moments may go in a circle.
    std::iter::successors(parent(&pid), parent)
        .take(members.len())
        .filter(|above| members.contains(above))
        .count()
}

/// Sends a signal to every member.
pub(crate) fn signal(tags: &HashSet<Tag>, signal: Signal) {
    for pid in members(tags) {
        if let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            let _ = rustix::process::pidfd_send_signal(&pidfd, signal);
        }
    }
}

/// Sends a signal to every member outside a process group that has it already: a second one may
/// cut short what the first began.
pub(crate) fn signal_outside(tags: &HashSet<Tag>, group: Pid, signal: Signal) {
    for pid in members(tags) {
        if rustix::process::getpgid(Some(pid)) != Ok(group) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

/// Kills every member, those that fork faster than we look included.
///
/// All are stopped before any is killed, so that none can start another meanwhile.
pub(crate) fn kill(tags: &HashSet<Tag>) {
    /// Each round stops at least everything that lived when it began, so a tree that still grows
    /// after this many is held by something we may not signal.
    const ROUNDS: usize = 64;
    let mut stopped: HashMap<Pid, OwnedFd> = HashMap::new();
    for _ in 0..ROUNDS {
        let mut found = false;
        for pid in members(tags) {
            if stopped.contains_key(&pid) {
                continue;
            }
            let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
                continue;
            };
            if rustix::process::pidfd_send_signal(&pidfd, Signal::STOP).is_ok() {
                found = true;
                stopped.insert(pid, pidfd);
            }
        }
        if !found {
            break;
        }
    }
    for pidfd in stopped.values() {
        let _ = rustix::process::pidfd_send_signal(pidfd, Signal::KILL);
    }
}

/// The command line of a process, or its name in brackets, as `ps` has it.
pub(crate) fn command_of(pid: Pid) -> String {
    let pid = pid.as_raw_nonzero();
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line: Vec<&[u8]> = line
        .split(|&b| b == 0)
        .filter(|part| !part.is_empty())
        .collect();
    if line.is_empty() {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
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
    }

    #[test]
    fn sees_this_process_and_its_parent() {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let parent = rustix::process::getppid().unwrap();
        assert_eq!(stat(own).unwrap().parent, parent.as_raw_nonzero().get());
        assert!(
            children_of(parent)
                .iter()
                .any(|pid| pid.as_raw_nonzero().get() == own)
        );
        assert!(members(&HashSet::from([Tag::fresh()])).is_empty());
    }

    #[test]
    fn parents_come_before_children() {
        let stats: HashMap<i32, Stat> = [(9, 1), (8, 9), (5, 8), (7, 9), (2, 3), (3, 2)]
            .map(|(pid, parent)| {
                let stat = Stat {
                    parent,
                    zombie: false,
                };
                (pid, stat)
            })
            .into();
        let members = HashSet::from([9, 8, 5, 7, 2, 3]);
        let above = |pid| ancestors(pid, &members, &stats);
        assert_eq!([9, 8, 7, 5].map(above), [0, 1, 1, 2]);
        // A circle has an end.
        assert_eq!(above(2), members.len());
    }

    #[test]
    fn what_is_listed_as_a_child_is_one() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let pid = i32::try_from(child.id()).unwrap();
        let listed = children_listed(own);
        let limit = rlimit::hard(Pid::from_raw(pid), TAG_RESOURCE).unwrap();
        let bearer = is_nobody(&HashSet::from([Tag(limit)]));
        // Nobody is certain of anything while orphans may be elsewhere.
        let elsewhere = is_nobody(&HashSet::from([Tag::fresh()]));
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
        let adopting = is_nobody(&HashSet::from([Tag::fresh()]));
        let bearer_below = is_nobody(&HashSet::from([Tag(limit)]));
        rustix::process::set_child_subreaper(None).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(listed.is_none_or(|listed| listed.contains(&pid)));
        assert_eq!((bearer, elsewhere, bearer_below), (false, false, false));
        // Where the kernel lists children at all.
        let lists = std::path::Path::new("/proc/self/task").join(format!("{own}/children"));
        assert_eq!(adopting, lists.exists());
    }
}
