//! Confinement of the launcher itself: capabilities, Landlock and seccomp.
//!
//! The steps come from the plan; each either succeeds or is named in the report.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use exec_server_sys::confine;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use super::{LaunchFailure, LaunchStep, failed};
use crate::plan::{Confinement, Landlock};
use crate::view;

/// Drops, for this process and all its future children, every right that the command must not have.
pub(super) fn confine_self(confinement: &Confinement) -> Result<(), LaunchFailure> {
    if confinement.drop_capabilities {
        let dropped = || -> io::Result<()> {
            // Without the privilege to do so, this process has no capabilities to drop.
            if let Err(error) = confine::empty_bounding_set()
                && error.raw_os_error() != Some(libc::EPERM)
            {
                return Err(error);
            }
            rustix::thread::clear_ambient_capability_set()?;
            let none = rustix::thread::CapabilitySets {
                effective: CapabilitySet::empty(),
                permitted: CapabilitySet::empty(),
                inheritable: CapabilitySet::empty(),
            };
            rustix::thread::set_capabilities(None, none)?;
            Ok(())
        };
        dropped().map_err(|error| failed(LaunchStep::Capabilities, b"", error))?;
    }
    if confinement.drop_machine_capabilities {
        drop_machine_capabilities()
            .map_err(|error| failed(LaunchStep::Capabilities, b"", error))?;
    }
    rustix::thread::set_no_new_privs(true)
        .map_err(|error| failed(LaunchStep::Capabilities, b"", error))?;
    if let Some(landlock) = &confinement.landlock {
        restrict(landlock)?;
    }
    for program in &confinement.seccomp {
        let program: Vec<_> = program
            .iter()
            .map(|line| seccompiler::sock_filter {
                code: line.0,
                jt: line.1,
                jf: line.2,
                k: line.3,
            })
            .collect();
        seccompiler::apply_filter(&program).map_err(|error| {
            let errno = match error {
                seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
                _ => io::Error::from_raw_os_error(libc::EINVAL),
            };
            failed(LaunchStep::Filter, b"", errno)
        })?;
    }
    Ok(())
}

/// Drops the capabilities with which root could reach the memory of other processes, the kernel or
/// the network. Those for files stay.
fn drop_machine_capabilities() -> io::Result<()> {
    const DROPPED: CapabilitySet = CapabilitySet::SYS_ADMIN
        .union(CapabilitySet::SYS_PTRACE)
        .union(CapabilitySet::SYS_MODULE)
        .union(CapabilitySet::SYS_RAWIO)
        .union(CapabilitySet::SYS_BOOT)
        .union(CapabilitySet::SYSLOG)
        .union(CapabilitySet::PERFMON)
        .union(CapabilitySet::BPF)
        .union(CapabilitySet::CHECKPOINT_RESTORE)
        .union(CapabilitySet::NET_ADMIN)
        .union(CapabilitySet::NET_RAW);
    for capability in DROPPED.iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // Without the privilege to do so, this process has no capabilities to drop. Older
            // kernels do not know the newest ones.
            Ok(()) | Err(Errno::PERM | Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    rustix::thread::clear_ambient_capability_set()?;
    let own = rustix::thread::capabilities(None)?;
    let kept = rustix::thread::CapabilitySets {
        effective: own.effective.difference(DROPPED),
        permitted: own.permitted.difference(DROPPED),
        inheritable: own.inheritable.difference(DROPPED),
    };
    rustix::thread::set_capabilities(None, kept)?;
    Ok(())
}

/// Applies Landlock rules as far as this kernel supports them. The plan has already refused the
/// policy or reported the rest as missing.
fn restrict(plan: &Landlock) -> Result<(), LaunchFailure> {
    use landlock::{
        ABI, Access as _, AccessFs, BitFlags, CompatLevel, Compatible as _, PathBeneath, Ruleset,
        RulesetAttr as _, RulesetCreatedAttr as _, Scope,
    };
    let other = |error: landlock::RulesetError| {
        failed(
            LaunchStep::Landlock,
            b"",
            io::Error::other(error.to_string()),
        )
    };
    let abi = ABI::V6;
    let write = AccessFs::from_write(abi);
    let read = AccessFs::from_read(abi);
    let mut handled = BitFlags::EMPTY;
    if plan.handle_write {
        handled |= write;
    }
    if plan.handle_read {
        handled |= read;
    }
    let mut ruleset = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
    if !handled.is_empty() {
        ruleset = ruleset.handle_access(handled).map_err(other)?;
    }
    if plan.scoped {
        ruleset = ruleset.scope(Scope::from_all(abi)).map_err(other)?;
    }
    let mut ruleset = ruleset.create().map_err(other)?.no_new_privs(false);
    let on_files = AccessFs::from_file(abi);
    let grants = |is_directory: bool, writable: bool| -> BitFlags<AccessFs> {
        let all = if writable { write | read } else { read } & handled;
        if is_directory { all } else { all & on_files }
    };
    for (path, writable) in &plan.rules {
        let failed = |error: io::Error| failed(LaunchStep::Landlock, path, error);
        let fd = match view::find_existing(Path::new(OsStr::from_bytes(path))) {
            Ok(fd) => fd,
            // A path that does not exist needs no rule, and neither does one that this process may
            // not reach.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => continue,
            // The system may provide a device as a link; only root can replace it.
            Err(Errno::LOOP) if path == b"/dev/ptmx" => {
                rustix::fs::open(c"/dev/ptmx", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
                    .map_err(|error| failed(error.into()))?
            }
            // A link has replaced the path since the policy was resolved.
            Err(error) => return Err(failed(error.into())),
        };
        ruleset =
            add(ruleset, fd, |is_directory| grants(is_directory, *writable)).map_err(failed)?;
    }
    // The terminal was opened outside; programs open it again through `/dev/stderr`.
    if rustix::termios::isatty(rustix::stdio::stdin()) {
        let terminal = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)
            .map_err(|error| failed(LaunchStep::Landlock, b"", error))?;
        ruleset = add(ruleset, terminal, |is_directory| grants(is_directory, true))
            .map_err(|error| failed(LaunchStep::Landlock, b"", error))?;
    }
    ruleset.restrict_self().map_err(other)?;
    return Ok(());

    fn add(
        ruleset: landlock::RulesetCreated,
        fd: OwnedFd,
        grants: impl Fn(bool) -> BitFlags<AccessFs>,
    ) -> io::Result<landlock::RulesetCreated> {
        let stat = rustix::fs::fstat(&fd)?;
        let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
        let access = grants(kind == rustix::fs::FileType::Directory);
        if access.is_empty() {
            return Ok(ruleset);
        }
        ruleset
            .add_rule(PathBeneath::new(fd, access))
            .map_err(|error| io::Error::other(error.to_string()))
    }
}
