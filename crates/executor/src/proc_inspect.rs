//! /proc inspection: listening TCP ports and blocked terminal reads of processes.
//!
//! Only reads `/proc`. Every function blocks and must not run on an async worker. A process that
//! has ended or may not be inspected counts as absent.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use exec_server_sync::Mutex;
use rustix::process::Pid;

use crate::shared_read::SharedRead;

/// Maximum number of threads inspected per process: the threads that read terminals are few and
/// old.
const MAX_THREADS: usize = 64;

/// Maximum number of descriptors inspected per `poll` or `select`.
const MAX_DESCRIPTORS: usize = 1024;

/// The process that listens on a TCP port, and the port; `None` as `wanted` matches any port.
pub(crate) fn listens(pids: &[Pid], wanted: Option<u16>) -> Option<(i32, u16)> {
    for pid in pids {
        let pid = pid.as_raw_nonzero().get();
        let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/net")) else {
            continue;
        };
        let sockets = LISTENING.of(namespace, pid);
        if sockets
            .values()
            .all(|port| wanted.is_some_and(|wanted| wanted != *port))
        {
            continue;
        }
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        let port = descriptors.flatten().find_map(|entry| {
            let link = fs::read_link(entry.path()).ok()?;
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            let port = sockets.get(&inode.parse().ok()?).copied()?;
            wanted.is_none_or(|wanted| wanted == port).then_some(port)
        });
        if let Some(port) = port {
            return Some((pid, port));
        }
    }
    None
}

/// Listening ports of one network namespace, by the inode of the socket.
type ListeningPorts = HashMap<u64, u16>;

/// Listening ports by network namespace: a sandbox may have its own. Shared by all waits, because
/// the kernel's table contains the connections of all processes of a namespace.
#[derive(Debug)]
struct ListeningSockets {
    namespaces: Mutex<BTreeMap<PathBuf, Arc<SharedRead<ListeningPorts>>>>,
    /// Reads of the kernel's tables.
    reads: AtomicU64,
}

static LISTENING: ListeningSockets = ListeningSockets {
    namespaces: Mutex::new(BTreeMap::new()),
    reads: AtomicU64::new(0),
};

/// How often this program has read a table of listening sockets.
pub(crate) fn socket_table_reads() -> u64 {
    LISTENING.reads.load(Ordering::Relaxed)
}

impl ListeningSockets {
    /// Maximum age of a table when it is used: less than the shortest pause between two looks of a
    /// wait.
    const AGE: Duration = Duration::from_millis(4);

    /// Number of namespaces above which all tables are dropped: those of ended sandboxes remain
    /// otherwise.
    const MAX_NAMESPACES: usize = 64;

    /// The table of the namespace that this process is in.
    fn of(&self, namespace: PathBuf, pid: i32) -> Arc<ListeningPorts> {
        let shared = {
            let mut namespaces = self.namespaces.lock();
            if namespaces.len() >= Self::MAX_NAMESPACES && !namespaces.contains_key(&namespace) {
                namespaces.clear();
            }
            let shared = namespaces
                .entry(namespace)
                .or_insert_with(|| Arc::new(SharedRead::new()));
            Arc::clone(shared)
        };
        shared.get(Self::AGE, || {
            self.reads.fetch_add(1, Ordering::Relaxed);
            listening_sockets(pid)
        })
    }
}

fn listening_sockets(pid: i32) -> ListeningPorts {
    let mut sockets = HashMap::new();
    for table in ["tcp", "tcp6"] {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        // The first line is a header.
        for line in text.lines().skip(1) {
            if let Some((inode, port)) = listening(line) {
                sockets.insert(inode, port);
            }
        }
    }
    sockets
}

/// Inode and port, if a line of `/proc/net/tcp` describes a listening socket.
fn listening(line: &str) -> Option<(u64, u16)> {
    const LISTEN: &str = "0A";
    let mut fields = line.split_ascii_whitespace();
    let (_, port) = fields.nth(1)?.rsplit_once(':')?;
    let state = fields.nth(1)?;
    let inode = fields.nth(5)?;
    (state == LISTEN).then_some(())?;
    Some((inode.parse().ok()?, u16::from_str_radix(port, 16).ok()?))
}

/// The process that is blocked on input from its terminal.
///
/// The process must be in the foreground of its terminal, and one of its threads must be blocked in
/// a system call that reads from the terminal (`read`, `readv`, `pread`) or that waits until the
/// terminal is readable (`poll`, `select`, `epoll_wait` and variants, with the terminal among the
/// descriptors). Waits through `io_uring` are not detected.
pub(crate) fn reads_terminal(pids: &[Pid]) -> Option<i32> {
    let mut pids = pids.iter().map(|pid| pid.as_raw_nonzero().get());
    pids.find(|&pid| {
        let threads = || Some(fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten());
        is_in_foreground(pid)
            && threads().is_some_and(|threads| {
                threads.take(MAX_THREADS).any(|thread| {
                    let call = fs::read_to_string(thread.path().join("syscall"));
                    let call = call.ok().and_then(|text| BlockingCall::parse(&text));
                    call.is_some_and(|call| call.waits_for_terminal(pid))
                })
            })
    })
}

/// Whether a process has a terminal and is in its foreground process group.
fn is_in_foreground(pid: i32) -> bool {
    let Ok(text) = fs::read(format!("/proc/{pid}/stat")) else {
        return false;
    };
    // The command name may contain any byte; the fields follow its last parenthesis.
    let Some(after) = text.iter().rposition(|&byte| byte == b')') else {
        return false;
    };
    let fields = String::from_utf8_lossy(&text[after + 1..]);
    let numbers: Vec<i64> = fields
        .split_ascii_whitespace()
        .skip(1)
        .take(5)
        .filter_map(|field| field.parse().ok())
        .collect();
    // Parent, process group, session, terminal, and the terminal's foreground group.
    matches!(numbers[..], [_, group, _, terminal, foreground]
        if terminal != 0 && group == foreground)
}

/// System call in which a thread is blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BlockingCall {
    number: i64,
    arguments: [u64; 3],
}

impl BlockingCall {
    /// Parses `/proc/PID/task/TID/syscall`, which contains `running` for a thread that is not
    /// blocked.
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split_ascii_whitespace();
        let number = fields.next()?.parse().ok()?;
        let mut argument = || u64::from_str_radix(fields.next()?.strip_prefix("0x")?, 16).ok();
        Some(Self {
            number,
            arguments: [argument()?, argument()?, argument()?],
        })
    }

    fn waits_for_terminal(&self, pid: i32) -> bool {
        let [first, second, _] = self.arguments;
        let descriptors = match self.kind() {
            Some(BlockingCallKind::Read) => vec![first],
            Some(BlockingCallKind::Poll) => polled(pid, first, second),
            Some(BlockingCallKind::Select) => selected(pid, first, second),
            Some(BlockingCallKind::Epoll) => watched(pid, first),
            None => return false,
        };
        descriptors.iter().any(|&fd| is_terminal(pid, fd))
    }

    fn kind(&self) -> Option<BlockingCallKind> {
        #[cfg(target_arch = "x86_64")]
        match self.number {
            libc::SYS_poll => return Some(BlockingCallKind::Poll),
            libc::SYS_select => return Some(BlockingCallKind::Select),
            libc::SYS_epoll_wait => return Some(BlockingCallKind::Epoll),
            _ => {}
        }
        match self.number {
            libc::SYS_read | libc::SYS_readv | libc::SYS_pread64 | libc::SYS_preadv => {
                Some(BlockingCallKind::Read)
            }
            libc::SYS_ppoll => Some(BlockingCallKind::Poll),
            libc::SYS_pselect6 => Some(BlockingCallKind::Select),
            libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => Some(BlockingCallKind::Epoll),
            _ => None,
        }
    }
}

/// The kind of event that a system call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockingCallKind {
    Read,
    Poll,
    Select,
    Epoll,
}

/// Reads the memory of a process.
fn memory(pid: i32, address: u64, bytes: usize) -> Option<Vec<u8>> {
    let mut memory = vec![0; bytes];
    let file = File::open(format!("/proc/{pid}/mem")).ok()?;
    file.read_exact_at(&mut memory, address).ok()?;
    Some(memory)
}

/// Descriptors whose input a `poll` waits for.
fn polled(pid: i32, address: u64, count: u64) -> Vec<u64> {
    /// `struct pollfd`: four bytes descriptor, two bytes requested events, two bytes returned
    /// events.
    const SIZE: usize = 8;
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let entries = memory(pid, address, SIZE * count.min(MAX_DESCRIPTORS)).unwrap_or_default();
    entries
        .chunks_exact(SIZE)
        .filter_map(|entry| {
            let fd = i32::from_ne_bytes(entry[..4].try_into().ok()?);
            let awaited = i16::from_ne_bytes(entry[4..6].try_into().ok()?);
            (awaited & libc::POLLIN != 0).then(|| u64::try_from(fd).ok())?
        })
        .collect()
}

/// Descriptors whose input a `select` waits for.
fn selected(pid: i32, count: u64, address: u64) -> Vec<u64> {
    if address == 0 {
        return Vec::new();
    }
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let bits = count.min(MAX_DESCRIPTORS);
    // The kernel reads the set in units of eight bytes.
    let set = memory(pid, address, bits.div_ceil(64) * 8).unwrap_or_default();
    let is_set = |fd: &usize| {
        set.get(fd / 8)
            .is_some_and(|byte| byte >> (fd % 8) & 1 == 1)
    };
    (0..bits).filter(is_set).map(|fd| fd as u64).collect()
}

/// Descriptors whose input an epoll instance waits for.
fn watched(pid: i32, epoll: u64) -> Vec<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{epoll}")).unwrap_or_default();
    text.lines().filter_map(watched_descriptor).collect()
}

/// Descriptor number in a line like `tfd:        0 events:       19 data: …`.
fn watched_descriptor(line: &str) -> Option<u64> {
    let mut fields = line.strip_prefix("tfd:")?.split_ascii_whitespace();
    let fd = fields.next()?.parse().ok()?;
    (fields.next()? == "events:").then_some(())?;
    let events = u32::from_str_radix(fields.next()?, 16).ok()?;
    (events & libc::EPOLLIN.cast_unsigned() != 0).then_some(fd)
}

/// Whether a descriptor of a process is a terminal. Checks the device: the path may mean another
/// file in that process's mount namespace.
fn is_terminal(pid: i32, fd: u64) -> bool {
    /// Device majors of consoles, of `/dev/tty` and similar, and of pseudoterminals.
    const MAJORS: [std::ops::RangeInclusive<u32>; 3] = [4..=4, 5..=5, 136..=143];
    fs::metadata(format!("/proc/{pid}/fd/{fd}")).is_ok_and(|found| {
        let major = libc::major(found.rdev());
        found.file_type().is_char_device() && MAJORS.iter().any(|range| range.contains(&major))
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn own_processes() -> Vec<Pid> {
        vec![rustix::process::getpid()]
    }

    #[test]
    fn listens_finds_ports_of_this_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let pid = own_processes()[0].as_raw_nonzero().get();
        assert_eq!(listens(&own_processes(), Some(port)), Some((pid, port)));
        assert_eq!(listens(&own_processes(), None).unwrap().0, pid);
        assert_eq!(listens(&[], Some(port)), None);
        drop(listener);
        assert_eq!(listens(&own_processes(), Some(port)), None);
        let six = TcpListener::bind("[::1]:0");
        if let Ok(six) = six {
            let port = six.local_addr().unwrap().port();
            assert_eq!(listens(&own_processes(), Some(port)), Some((pid, port)));
        }
    }

    #[test]
    fn listening_parses_socket_lines() {
        let listens = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0000000000000000 100 0 0 10 0";
        assert_eq!(listening(listens), Some((4711, 8080)));
        assert_eq!(listening(&listens.replace(" 0A ", " 01 ")), None);
        for odd in [
            "",
            "0:",
            "0: x:y z 0A",
            "0: 0100007F:ZZZZ 0:0 0A 0 0 0 0 0 1",
        ] {
            assert_eq!(listening(odd), None, "{odd}");
        }
    }

    #[test]
    fn syscall_and_descriptor_lines_are_parsed() {
        let call = BlockingCall::parse("0 0x3 0x7ffe 0x400 0x0 0x0 0x0 0x7ffd 0x7f4b\n").unwrap();
        assert_eq!(call.arguments, [3, 0x7ffe, 0x400]);
        #[cfg(target_arch = "x86_64")]
        assert_eq!(call.kind(), Some(BlockingCallKind::Read));
        for odd in ["running\n", "", "-1 0x7ffd 0x7f4b\n", "0 3 4 5"] {
            assert_eq!(BlockingCall::parse(odd), None, "{odd}");
        }
        let line = "tfd:        5 events:       19 data:                5  pos:0 ino:3 sdev:18";
        assert_eq!(watched_descriptor(line), Some(5));
        assert_eq!(watched_descriptor(&line.replace("19", "1c")), None);
        assert_eq!(watched_descriptor("pos:\t0"), None);
    }

    #[test]
    fn memory_of_this_process_is_read() {
        let pid = own_processes()[0].as_raw_nonzero().get();
        let set: [u64; 2] = [0b101, 0b1];
        let address = set.as_ptr() as u64;
        assert_eq!(selected(pid, 65, address), [0, 2, 64]);
        assert_eq!(selected(pid, 2, address), [0]);
        let mut polls = Vec::new();
        for (fd, awaited) in [(0i32, libc::POLLIN), (1, libc::POLLOUT), (-1, libc::POLLIN)] {
            polls.extend_from_slice(&fd.to_ne_bytes());
            polls.extend_from_slice(&awaited.to_ne_bytes());
            polls.extend_from_slice(&[0; 2]);
        }
        assert_eq!(polled(pid, polls.as_ptr() as u64, 3), [0]);
        assert_eq!(polled(pid, 8, 1), [0u64; 0]);
    }
}
