//! Seccomp filters: system calls that a sandboxed process must not make.
//!
//! Every call that is not listed is allowed: a filter that rejects unknown calls breaks with every
//! new library. Calls that reach outside the sandbox fail with `EPERM`; calls for which libraries
//! have an older alternative fail with `ENOSYS`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, sock_filter,
};
use serde::{Deserialize, Serialize};

/// Purpose of a filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilterPurpose {
    /// The allowed network access.
    pub traffic: SocketAccess,
    /// Whether file access is restricted: then calls that could change the mount view are rejected.
    pub view_restricted: bool,
    /// Whether the process is in the PID and IPC namespaces of the server: then calls that change
    /// other processes, or share memory with them, are rejected.
    pub sees_processes: bool,
    /// Whether changes of modes, owners, times and attributes of files are rejected.
    pub metadata_frozen: bool,
}

/// Sockets that a process may create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketAccess {
    /// All sockets.
    All,
    /// Only socket pairs inside the sandbox.
    None,
    /// Sockets of a private network namespace, and socket pairs. Not unix sockets, because a socket
    /// file can belong to a process outside; not other families, because they ignore network
    /// namespaces.
    Private,
    /// The same, and unix sockets.
    PrivateAndUnix,
}

/// One BPF instruction, in the kernel's layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instruction(pub u16, pub u8, pub u8, pub u32);

/// Reason why a filter cannot be compiled.
#[derive(Debug, Clone, thiserror::Error)]
#[error("no system call filter for this machine: {0}")]
pub struct FilterError(String);

/// Returns the programs to install, in order.
///
/// # Errors
///
/// On an architecture that the filter compiler does not support.
pub fn programs(filter: FilterPurpose) -> Result<Vec<Vec<Instruction>>, FilterError> {
    type CompiledFilter = Result<Vec<Vec<Instruction>>, FilterError>;
    static PROGRAMS: [OnceLock<CompiledFilter>; 32] = [const { OnceLock::new() }; 32];
    let flags = [
        filter.view_restricted,
        filter.sees_processes,
        filter.metadata_frozen,
    ];
    let index = flags.iter().fold(filter.traffic as usize, |index, &flag| {
        2 * index + usize::from(flag)
    });
    PROGRAMS[index].get_or_init(|| compile(filter)).clone()
}

fn compile(filter: FilterPurpose) -> Result<Vec<Vec<Instruction>>, FilterError> {
    let failed = |error: &dyn std::fmt::Display| FilterError(error.to_string());
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(|error| failed(&error))?;
    let compile = |rules| -> Result<BpfProgram, FilterError> {
        let action = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch)
            .map_err(|error| failed(&error))?;
        BpfProgram::try_from(filter).map_err(|error| failed(&error))
    };
    let mut lines = foreign_numbers();
    if filter.view_restricted {
        lines.extend(missing_clone3()?);
    }
    let mut rules = denied(filter)?;
    while !rules.is_empty() {
        let rest = match rules.keys().nth(SECTION_CALLS) {
            Some(&next) => rules.split_off(&next),
            None => SyscallRules::new(),
        };
        let last = rules.keys().next_back().copied().unwrap_or_default();
        let section = compile(std::mem::replace(&mut rules, rest))?;
        if !rules.is_empty() {
            lines.extend(only_up_to(last, section.len())?);
        }
        lines.extend(section);
    }
    let line = |line: sock_filter| Instruction(line.code, line.jt, line.jf, line.k);
    Ok(vec![lines.into_iter().map(line).collect()])
}

/// Rejects `clone3` as a kernel without it does: its flags are in memory, which a filter cannot read,
/// and libraries fall back to `clone`. Part of the only program, because the kernel compiles each
/// program at every start and runs all of them for every call.
fn missing_clone3() -> Result<[sock_filter; 3], FilterError> {
    let number = u32::try_from(libc::SYS_clone3);
    let number = number.map_err(|_| FilterError("a number is out of range".to_owned()))?;
    let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
    Ok([
        // The call number is the first field.
        line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        line(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number),
        line(libc::BPF_RET | libc::BPF_K, 0, 0, missing),
    ])
}

/// Number of calls in one section of a program. The kernel runs a program for every possible call
/// when it is installed, and the compiler creates code that compares the numbers one by one.
const SECTION_CALLS: usize = 8;

/// Skips a section of this many lines if the call number is higher than its last one.
fn only_up_to(last: i64, lines: usize) -> Result<[sock_filter; 3], FilterError> {
    let number = |_| FilterError("a number is out of range".to_owned());
    let (last, lines) = (
        u32::try_from(last).map_err(number)?,
        u32::try_from(lines).map_err(number)?,
    );
    Ok([
        // The call number is the first field.
        line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        line(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 0, 1, last),
        line(libc::BPF_JMP | libc::BPF_JA, 0, 0, lines),
    ])
}

fn line(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter {
        code: u16::try_from(code).unwrap_or_default(),
        jt,
        jf,
        k,
    }
}

/// Rejects x32 calls, which have different numbers on the same architecture: no rule would match
/// them. On kernels without x32 this changes nothing.
fn foreign_numbers() -> Vec<sock_filter> {
    if !cfg!(target_arch = "x86_64") {
        return Vec::new();
    }
    const X32_BIT: u32 = 0x4000_0000;
    vec![
        // The call number is the first field.
        line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        line(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, X32_BIT),
        line(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs(),
        ),
    ]
}

type SyscallRules = BTreeMap<i64, Vec<SeccompRule>>;

fn denied(filter: FilterPurpose) -> Result<SyscallRules, FilterError> {
    let mut rules = SyscallRules::new();
    // Calls that access the memory of other processes, and io_uring, which bypasses filters.
    for call in [
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_getfd,
        libc::SYS_kcmp,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
    ] {
        rules.insert(call, Vec::new());
    }
    if filter.view_restricted {
        for &call in KERNEL {
            rules.insert(call, Vec::new());
        }
        // A user namespace would grant capabilities, and with them mounts.
        let user_namespace = condition(
            0,
            Len::Qword,
            Op::MaskedEq(libc::CLONE_NEWUSER as u64),
            libc::CLONE_NEWUSER as u64,
        )?;
        for call in [libc::SYS_clone, libc::SYS_unshare] {
            rules.insert(call, vec![rule(vec![user_namespace.clone()])?]);
        }
    }
    // Injection of terminal input, and the clipboard of the console.
    let mut requests = Vec::new();
    for request in [libc::TIOCSTI, libc::TIOCLINUX] {
        #[allow(
            clippy::unnecessary_cast,
            reason = "the type differs between C libraries"
        )]
        let request = request as u64;
        requests.push(request);
    }
    if filter.metadata_frozen {
        for &call in METADATA {
            rules.insert(call, Vec::new());
        }
        requests.extend(ATTRIBUTE_REQUESTS);
    }
    let requests = requests
        .into_iter()
        .map(|request| rule(vec![condition(1, Len::Dword, Op::Eq, request)?]));
    rules.insert(libc::SYS_ioctl, requests.collect::<Result<_, _>>()?);
    if filter.sees_processes {
        // Limits of other processes, the server included: 0 is the caller.
        let other = condition(0, Len::Dword, Op::Ne, 0)?;
        rules.insert(libc::SYS_prlimit64, vec![rule(vec![other])?]);
        // Programs in the kernel could read the memory of every process.
        for call in [libc::SYS_bpf, libc::SYS_perf_event_open] {
            rules.insert(call, Vec::new());
        }
        if filter.view_restricted {
            for &call in SHARED_MEMORY {
                rules.insert(call, Vec::new());
            }
        }
    }
    deny_sockets(filter.traffic, &mut rules)?;
    Ok(rules)
}

/// Denies the calls that reach more of the network than the filter leaves.
fn deny_sockets(traffic: SocketAccess, rules: &mut SyscallRules) -> Result<(), FilterError> {
    if matches!(
        traffic,
        SocketAccess::Private | SocketAccess::PrivateAndUnix
    ) {
        let mut families = vec![libc::AF_INET, libc::AF_INET6];
        if traffic == SocketAccess::PrivateAndUnix {
            families.push(libc::AF_UNIX);
        }
        let other = |family: &libc::c_int| {
            condition(0, Len::Dword, Op::Ne, u64::from(family.unsigned_abs()))
        };
        let others = families.iter().map(other).collect::<Result<_, _>>()?;
        rules.insert(libc::SYS_socket, vec![rule(others)?]);
        let mut pairs = vec![rule(vec![other(&libc::AF_UNIX)?])?];
        if traffic == SocketAccess::Private {
            pairs.extend(datagram_kinds()?);
        }
        rules.insert(libc::SYS_socketpair, pairs);
    }
    if traffic == SocketAccess::None {
        for call in [
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_accept,
            libc::SYS_accept4,
        ] {
            rules.insert(call, Vec::new());
        }
        let unix = u64::from(libc::AF_UNIX.unsigned_abs());
        for call in [libc::SYS_socket, libc::SYS_socketpair] {
            let mut each = vec![rule(vec![condition(0, Len::Dword, Op::Ne, unix)?])?];
            each.extend(datagram_kinds()?);
            rules.insert(call, each);
        }
        // `send` is `sendto` without an address.
        let address = condition(4, Len::Qword, Op::Ne, 0)?;
        rules.insert(libc::SYS_sendto, vec![rule(vec![address])?]);
    }
    Ok(())
}

/// Returns the rules that match datagram sockets of any family.
///
/// A datagram socket accepts an address with each message in memory that a filter cannot read, so a
/// unix one could reach sockets of the host. Raw unix sockets are datagram sockets.
fn datagram_kinds() -> Result<[SeccompRule; 2], FilterError> {
    let kind = |kind: libc::c_int| {
        let kind = u64::from(kind.unsigned_abs());
        rule(vec![condition(1, Len::Dword, Op::MaskedEq(0xf), kind)?])
    };
    Ok([kind(libc::SOCK_DGRAM)?, kind(libc::SOCK_RAW)?])
}

/// Calls that change the mode, owner, times or attributes of a file.
const METADATA: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_futimesat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    SETXATTRAT,
    REMOVEXATTRAT,
    FILE_SETATTR,
];

/// Calls that the C library does not name yet; the numbers are the same on all architectures.
const SETXATTRAT: i64 = 463;
const REMOVEXATTRAT: i64 = 466;
const FILE_SETATTR: i64 = 469;

/// Requests of `ioctl` that change attributes of a file, also through a descriptor for reading:
/// `FS_IOC_SETFLAGS` for both sizes of a word, `FS_IOC_FSSETXATTR`, `FS_IOC_SETVERSION`.
const ATTRIBUTE_REQUESTS: [u64; 4] = [0x4008_6602, 0x4004_6602, 0x401c_5820, 0x4008_7602];

/// Memory, semaphores and queues that are shared by name with all processes of the user.
const SHARED_MEMORY: &[i64] = &[
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
];

/// Calls that change the machine or its mounts. Most need a capability that the process does not
/// have; the filter is a second barrier, and keeps rarely used kernel code out of reach.
const KERNEL: &[i64] = &[
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_quotactl,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_reboot,
    libc::SYS_kexec_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    libc::SYS_lookup_dcookie,
];

fn condition(index: u8, length: Len, op: Op, value: u64) -> Result<SeccompCondition, FilterError> {
    SeccompCondition::new(index, length, op, value).map_err(|error| FilterError(error.to_string()))
}

fn rule(conditions: Vec<SeccompCondition>) -> Result<SeccompRule, FilterError> {
    SeccompRule::new(conditions).map_err(|error| FilterError(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const EPERM: u32 = libc::SECCOMP_RET_ERRNO | 1;
    const ENOSYS: u32 = libc::SECCOMP_RET_ERRNO | 38;
    const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

    #[cfg(target_arch = "x86_64")]
    const ARCH: u32 = 0xc000_003e;
    #[cfg(target_arch = "aarch64")]
    const ARCH: u32 = 0xc000_00b7;

    /// Interprets a program for one call and returns its result.
    fn run(program: &[Instruction], arch: u32, call: u32, args: [u64; 6]) -> u32 {
        let mut data = vec![call, arch, 0, 0];
        for arg in args {
            #[allow(clippy::cast_possible_truncation, reason = "the low half is meant")]
            data.extend([arg as u32, (arg >> 32) as u32]);
        }
        let (mut at, mut a) = (0, 0u32);
        loop {
            let Instruction(code, jt, jf, k) = program[at];
            at += 1;
            let code = u32::from(code);
            match code & 0x07 {
                libc::BPF_LD => a = data[k as usize / 4],
                libc::BPF_ALU => a &= k,
                libc::BPF_JMP => {
                    let taken = match code & 0xf0 {
                        libc::BPF_JA => {
                            at += k as usize;
                            continue;
                        }
                        libc::BPF_JEQ => a == k,
                        libc::BPF_JGT => a > k,
                        libc::BPF_JGE => a >= k,
                        libc::BPF_JSET => a & k != 0,
                        other => panic!("jump {other:x}"),
                    };
                    at += usize::from(if taken { jt } else { jf });
                }
                libc::BPF_RET => return k,
                other => panic!("class {other:x}"),
            }
        }
    }

    /// Returns the strictest result of all programs.
    fn verdict(filter: FilterPurpose, arch: u32, call: u32, args: [u64; 6]) -> u32 {
        let programs = programs(filter).unwrap();
        let answers = programs
            .iter()
            .map(|program| run(program, arch, call, args));
        let answers: Vec<u32> = answers.collect();
        let strict = answers.iter().copied().find(|&answer| answer != ALLOW);
        strict.unwrap_or(ALLOW)
    }

    const STRICT: FilterPurpose = FilterPurpose {
        traffic: SocketAccess::None,
        view_restricted: true,
        sees_processes: false,
        metadata_frozen: false,
    };
    const OPEN: FilterPurpose = FilterPurpose {
        traffic: SocketAccess::All,
        ..STRICT
    };

    fn strict(call: i64, args: [u64; 6]) -> u32 {
        verdict(STRICT, ARCH, u32::try_from(call).unwrap(), args)
    }

    #[test]
    fn filter_without_network_allows_only_unix_stream_sockets_and_pairs() {
        let unix = 1;
        for (call, args, expected) in [
            (libc::SYS_socket, [unix, 1, 0, 0, 0, 0], ALLOW),
            (libc::SYS_socket, [unix, 1 | 0o2_000_000, 0, 0, 0, 0], ALLOW),
            (libc::SYS_socket, [unix, 2, 0, 0, 0, 0], EPERM),
            (libc::SYS_socket, [unix, 3 | 0o4000, 0, 0, 0, 0], EPERM),
            (libc::SYS_socket, [2, 1, 0, 0, 0, 0], EPERM),
            (libc::SYS_socket, [10, 2, 0, 0, 0, 0], EPERM),
            (libc::SYS_socket, [16, 3, 0, 0, 0, 0], EPERM),
            (libc::SYS_socket, [40, 1, 0, 0, 0, 0], EPERM),
            // The kernel uses only the lower 32 bits as the family.
            (libc::SYS_socket, [unix | 1 << 32, 1, 0, 0, 0, 0], ALLOW),
            (libc::SYS_socketpair, [unix, 1, 0, 0, 0, 0], ALLOW),
            (libc::SYS_socketpair, [unix, 5, 0, 0, 0, 0], ALLOW),
            (libc::SYS_socketpair, [unix, 2, 0, 0, 0, 0], EPERM),
            (libc::SYS_sendto, [3, 0, 0, 0, 0, 0], ALLOW),
            (libc::SYS_sendto, [3, 0, 0, 0, 0x7f00_0000_0000, 16], EPERM),
            (libc::SYS_sendto, [3, 0, 0, 0, 1, 16], EPERM),
            (libc::SYS_connect, [3, 0, 0, 0, 0, 0], EPERM),
            (libc::SYS_bind, [3, 0, 0, 0, 0, 0], EPERM),
            (libc::SYS_recvfrom, [3, 0, 0, 0, 0, 0], ALLOW),
            (libc::SYS_setsockopt, [3, 0, 0, 0, 0, 0], ALLOW),
        ] {
            assert_eq!(strict(call, args), expected, "{call} {args:x?}");
            let call = u32::try_from(call).unwrap();
            assert_eq!(verdict(OPEN, ARCH, call, args), ALLOW, "{call} {args:x?}");
        }
    }

    #[test]
    fn filter_for_private_network_allows_only_namespaced_socket_families() {
        let pair = libc::SYS_socketpair;
        for (call, family, private, and_unix) in [
            (libc::SYS_socket, 2, ALLOW, ALLOW),
            (libc::SYS_socket, 10, ALLOW, ALLOW),
            (libc::SYS_socket, 1, EPERM, ALLOW),
            (libc::SYS_socket, 16, EPERM, EPERM),
            (libc::SYS_socket, 17, EPERM, EPERM),
            (libc::SYS_socket, 40, EPERM, EPERM),
            (pair, 1, ALLOW, ALLOW),
            (pair, 2, EPERM, EPERM),
            (libc::SYS_connect, 3, ALLOW, ALLOW),
            (libc::SYS_setns, 3, EPERM, EPERM),
        ] {
            for (traffic, expected) in [
                (SocketAccess::Private, private),
                (SocketAccess::PrivateAndUnix, and_unix),
            ] {
                let filter = FilterPurpose { traffic, ..STRICT };
                let number = u32::try_from(call).unwrap();
                let actual = verdict(filter, ARCH, number, [family, 1, 0, 0, 0, 0]);
                assert_eq!(actual, expected, "{call} {family} {traffic:?}");
            }
        }
        // Unix datagram pairs carry addresses, which could be those of the host's sockets.
        for kind in [2, 3, 2 | 0o2_000_000, 3 | 0o4000] {
            for (traffic, expected) in [
                (SocketAccess::Private, EPERM),
                (SocketAccess::PrivateAndUnix, ALLOW),
                (SocketAccess::None, EPERM),
            ] {
                let filter = FilterPurpose { traffic, ..STRICT };
                let number = u32::try_from(pair).unwrap();
                let actual = verdict(filter, ARCH, number, [1, kind, 0, 0, 0, 0]);
                assert_eq!(actual, expected, "{kind:o} {traffic:?}");
            }
        }
        let number = u32::try_from(libc::SYS_socket).unwrap();
        let private = FilterPurpose {
            traffic: SocketAccess::Private,
            ..STRICT
        };
        assert_eq!(verdict(private, ARCH, number, [2, 2, 0, 0, 0, 0]), ALLOW);
    }

    #[test]
    fn filter_beside_other_processes_rejects_changes_of_them() {
        let filter = FilterPurpose {
            sees_processes: true,
            ..STRICT
        };
        for (call, args, expected) in [
            (libc::SYS_prlimit64, [0, 7, 1, 0, 0, 0], ALLOW),
            (libc::SYS_prlimit64, [1, 7, 1, 0, 0, 0], EPERM),
            (libc::SYS_prlimit64, [1 << 32, 7, 1, 0, 0, 0], ALLOW),
            (libc::SYS_shmget, [0; 6], EPERM),
            (libc::SYS_mq_open, [0; 6], EPERM),
            (libc::SYS_fchmodat, [0; 6], ALLOW),
        ] {
            let number = u32::try_from(call).unwrap();
            assert_eq!(verdict(filter, ARCH, number, args), expected, "{call}");
        }
        assert_eq!(strict(libc::SYS_prlimit64, [1, 7, 1, 0, 0, 0]), ALLOW);
        assert_eq!(strict(libc::SYS_shmget, [0; 6]), ALLOW);
    }

    #[test]
    fn filter_with_frozen_metadata_rejects_every_way_to_change_it() {
        let filter = FilterPurpose {
            metadata_frozen: true,
            ..STRICT
        };
        for &call in METADATA {
            let number = u32::try_from(call).unwrap();
            assert_eq!(verdict(filter, ARCH, number, [0; 6]), EPERM, "{call}");
            assert_eq!(strict(call, [0; 6]), ALLOW, "{call}");
        }
        let ioctl = u32::try_from(libc::SYS_ioctl).unwrap();
        for request in ATTRIBUTE_REQUESTS {
            let args = [3, request, 0, 0, 0, 0];
            assert_eq!(verdict(filter, ARCH, ioctl, args), EPERM, "{request:x}");
        }
    }

    #[test]
    fn filter_rejects_calls_that_reach_outside_the_sandbox() {
        let newuser = libc::CLONE_NEWUSER as u64;
        for (call, args, expected) in [
            (libc::SYS_ptrace, [0; 6], EPERM),
            (libc::SYS_io_uring_setup, [0; 6], EPERM),
            (libc::SYS_process_vm_readv, [0; 6], EPERM),
            (libc::SYS_mount, [0; 6], EPERM),
            (libc::SYS_clone, [newuser | 17, 0, 0, 0, 0, 0], EPERM),
            (libc::SYS_clone, [17, 0, 0, 0, 0, 0], ALLOW),
            (libc::SYS_unshare, [newuser, 0, 0, 0, 0, 0], EPERM),
            (libc::SYS_clone3, [0; 6], ENOSYS),
            (libc::SYS_ioctl, [0, 0x5412, 0, 0, 0, 0], EPERM),
            (libc::SYS_ioctl, [0, 0x5412 | 1 << 32, 0, 0, 0, 0], EPERM),
            (libc::SYS_ioctl, [0, 0x5413, 0, 0, 0, 0], ALLOW),
            (libc::SYS_read, [0; 6], ALLOW),
            (libc::SYS_execve, [0; 6], ALLOW),
        ] {
            assert_eq!(strict(call, args), expected, "{call} {args:x?}");
        }
    }

    #[test]
    fn filter_rejects_x32_and_32_bit_call_numbers() {
        #[cfg(target_arch = "x86_64")]
        {
            let x32 = 0x4000_0000 + u32::try_from(libc::SYS_connect).unwrap();
            assert_eq!(verdict(STRICT, ARCH, x32, [0; 6]), ENOSYS);
            assert_eq!(verdict(STRICT, ARCH, u32::MAX, [0; 6]), ENOSYS);
        }
        // A 32-bit call is not compared with the rules; the kernel kills the process.
        assert_eq!(verdict(STRICT, 0x4000_0003, 11, [0; 6]), KILL);
    }
}
