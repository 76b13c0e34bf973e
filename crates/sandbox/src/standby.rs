//! Standby launcher: a running process that forks sandbox launchers on demand.
//!
//! Executing this program costs more than all other work of a launcher before its command runs. So
//! one launcher keeps running in its small initial state and forks on demand. The new process is
//! not its child but a child of the server (`CLONE_PARENT`), which waits for it as for any other
//! child.
//!
//! When there are no requests, it forks one spare launcher in advance. The spare creates namespaces
//! of the kind that was last requested, with a first process in them that waits for its task.
//!
//! ```text
//! server ──► standby                   one, started with the first sandbox; ends with its socket
//!        ├─► launcher, launcher, …     siblings that it has forked
//!        └─► launcher (exec-spare)     the spare
//!               └─► first process
//! ```

use std::ffi::CStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use exec_server_sync::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sockopt,
};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions};
use serde::{Deserialize, Serialize};

use super::PendingLaunch;
use super::launcher::{self, LaunchOrder};
use super::plan::NamespaceBase;
use exec_server_sys::confine::{self, ForkSide, OneThread};
use exec_server_sys::rlimit::Resource;

/// Process name of the standby launcher.
pub(super) const NAME: &CStr = c"exec-standby";

/// Process name of a spare launcher.
pub(super) const SPARE_NAME: &CStr = c"exec-spare";

/// Time limit of a fork, after which the caller uses another way.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of descriptors of a request: streams, an order, two sockets, control groups.
const MAX_FILES: usize = 16;

/// Setup of a new launcher before it reads its order.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LauncherSetup {
    /// Resource limits of the launcher.
    pub(super) limits: Vec<(Resource, u64)>,
    /// Whether standard input becomes its controlling terminal.
    pub(super) terminal: bool,
    /// The namespaces to create.
    pub(super) base: Option<NamespaceBase>,
    /// Number of descriptors that it keeps, from number 0 on; the others are control groups to
    /// join.
    pub(super) kept: usize,
}

/// Request to fork a launcher.
#[derive(Debug)]
pub struct ForkRequest<'a> {
    /// Standard streams of the command.
    pub streams: [BorrowedFd<'a>; 3],
    /// The launch that the launcher executes.
    pub pending_launch: &'a PendingLaunch,
    /// Resource limits of the launcher.
    pub limits: &'a [(Resource, u64)],
    /// Control groups to join.
    pub groups: &'a [BorrowedFd<'a>],
    /// Whether the standard input becomes the controlling terminal.
    pub terminal: bool,
}

/// Handle to the standby launcher, if one runs.
#[derive(Debug, Default)]
pub(crate) struct Standby(Mutex<Option<PendingFork>>);

#[derive(Debug)]
struct PendingFork {
    control: OwnedFd,
    pidfd: OwnedFd,
    /// Whether every request so far got a response.
    answers: bool,
}

impl Standby {
    /// Requests a fork; `start` starts the standby launcher if none runs. Blocks.
    ///
    /// # Errors
    ///
    /// If the standby launcher does not respond or cannot fork: the caller then executes a launcher.
    pub(crate) fn fork(
        &self,
        request: &ForkRequest<'_>,
        start: impl FnOnce(&PendingLaunch) -> io::Result<(Pid, OwnedFd)>,
    ) -> io::Result<(Pid, OwnedFd)> {
        let mut waiting = self.0.lock();
        if waiting.is_none() {
            *waiting = Some(PendingFork::start(start)?);
        }
        let Some(current) = &mut *waiting else {
            return Err(io::Error::other("no standby launcher is running"));
        };
        match current.request_fork(request) {
            Ok(ForkResponse { born, ended }) => {
                // The discarded spare has no other user, so it is reaped here.
                if let Some(ended) = ended {
                    reap(ended);
                }
                let pid = born.map_err(io::Error::from_raw_os_error)?;
                // The process is not reaped yet, so no other process has this pid.
                let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
                Ok((pid, pidfd))
            }
            Err(error) => {
                current.answers = false;
                *waiting = None;
                Err(error)
            }
        }
    }

    /// Ends the standby launcher.
    pub(crate) fn end(&self) {
        *self.0.lock() = None;
    }
}

impl PendingFork {
    fn start(start: impl FnOnce(&PendingLaunch) -> io::Result<(Pid, OwnedFd)>) -> io::Result<Self> {
        let mut pending_launch = PendingLaunch::new(&LaunchOrder::StandBy)?;
        let (control, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_socket_timeout(&control, sockopt::Timeout::Recv, Some(TIMEOUT))?;
        sockopt::set_socket_timeout(&control, sockopt::Timeout::Send, Some(TIMEOUT))?;
        pending_launch.work = Some(rustix::io::fcntl_dupfd_cloexec(&theirs, 16)?);
        let (_, pidfd) = start(&pending_launch)?;
        Ok(Self {
            control,
            pidfd,
            answers: true,
        })
    }

    /// Requests a fork and waits for the response.
    fn request_fork(&self, request: &ForkRequest<'_>) -> io::Result<ForkResponse> {
        let mut files = request.streams.to_vec();
        files.extend(request.pending_launch.descriptors());
        let setup = LauncherSetup {
            limits: request.limits.to_vec(),
            terminal: request.terminal,
            base: request.pending_launch.base,
            kept: files.len(),
        };
        files.extend(request.groups);
        send(&self.control, &setup, &files)?;
        self.answer()
    }

    fn answer(&self) -> io::Result<ForkResponse> {
        let mut answer = [0; 8];
        let (length, _) =
            retry(|| rustix::net::recv(&self.control, &mut answer, RecvFlags::empty()))?;
        if length != answer.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let [a, b, c, d, e, f, g, h] = answer;
        let born = i32::from_ne_bytes([a, b, c, d]);
        let pid = |number: i32| (number > 0).then(|| Pid::from_raw(number)).flatten();
        Ok(ForkResponse {
            born: pid(born).ok_or(-born),
            ended: pid(i32::from_ne_bytes([e, f, g, h])),
        })
    }
}

/// Response of the standby launcher.
struct ForkResponse {
    /// The new process, or the error number.
    born: Result<Pid, i32>,
    /// A discarded spare, which the server must reap.
    ended: Option<Pid>,
}

/// Reaps a spare launcher that is about to end. One that does not end in time is left to the orphan
/// reaper, and so is a pid that now belongs to another process.
fn reap(pid: Pid) {
    const ROUNDS: u32 = 100;
    let comm = format!("/proc/{}/comm", pid.as_raw_nonzero());
    for _ in 0..ROUNDS {
        // Ended processes keep their names.
        let name = std::fs::read(&comm).unwrap_or_default();
        let is_spare = [NAME, SPARE_NAME]
            .map(CStr::to_bytes)
            .contains(&name.trim_ascii_end());
        let reaped = || retry(|| rustix::process::waitpid(Some(pid), WaitOptions::NOHANG));
        if !is_spare || !matches!(reaped(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for PendingFork {
    fn drop(&mut self) {
        // The launcher responds with the pid of the spare that it leaves.
        if self.answers
            && send(&self.control, &LauncherSetup::default(), &[]).is_ok()
            && let Ok(ForkResponse {
                ended: Some(ended), ..
            }) = self.answer()
        {
            reap(ended);
        }
        // The launcher exits when its socket is closed; SIGKILL covers one that hangs.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
        let own = WaitId::PidFd(self.pidfd.as_fd());
        let _ = rustix::process::waitid(own, WaitIdOptions::EXITED);
    }
}

/// Creates launchers with namespaces, and keeps one spare in advance.
#[derive(Debug)]
pub(super) struct SpareLaunchers {
    token: OneThread,
    spare: Option<SpareLauncher>,
    /// The namespaces of the last request, if a spare may be created for them.
    wanted: Option<NamespaceBase>,
    /// Reports changes of the mount table. A spare would not see them, and would keep unmounted
    /// file systems busy.
    mounts: Option<OwnedFd>,
    /// Pid of a discarded spare.
    ended: Option<Pid>,
    /// Network without interfaces, for all sandboxes that cannot open a socket; `None` without the
    /// privilege to create it. A separate network is the most expensive part of a sandbox.
    network: Option<OwnedFd>,
}

/// Waiting launcher and the first process of its namespaces.
#[derive(Debug)]
struct SpareLauncher {
    base: NamespaceBase,
    pid: Pid,
    launcher: OwnedFd,
    first: OwnedFd,
}

impl SpareLaunchers {
    pub(super) fn new(token: OneThread) -> Self {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Self {
            token,
            spare: None,
            wanted: None,
            mounts: rustix::fs::open(c"/proc/self/mountinfo", flags, Mode::empty()).ok(),
            ended: None,
            network: launcher::new_network().ok(),
        }
    }

    /// Returns the next request; `None` at the end.
    pub(super) fn next(&mut self, control: &OwnedFd) -> Option<(LauncherSetup, Vec<OwnedFd>)> {
        // Create the spare only while there is no request: the start of the previous launcher comes
        // first.
        if let (Some(base), None) = (self.wanted.take(), &self.spare)
            && is_quiet(control)
        {
            self.mounts_changed();
            self.spare = self.make(base).ok();
        }
        while self.spare.is_some() && self.mounts_change_before(control) {
            self.discard();
        }
        let (setup, files) = receive(control)?;
        if files.is_empty() {
            // The message without files means that the server requests no further launches.
            self.discard();
            self.answer(control, Err(Errno::CANCELED.into()));
            return None;
        }
        Some((setup, files))
    }

    /// Waits for a request or a change of mounts; returns whether mounts have changed.
    fn mounts_change_before(&self, control: &OwnedFd) -> bool {
        let Some(mounts) = &self.mounts else {
            return false;
        };
        let mut fds = [
            PollFd::new(control, PollFlags::IN),
            PollFd::new(mounts, PollFlags::PRI),
        ];
        let _ = retry(|| rustix::event::poll(&mut fds, None));
        // The kernel reports each change once.
        !fds[1].revents().is_empty()
    }

    /// Returns whether mounts have changed since the last call; true if that cannot be determined.
    fn mounts_changed(&self) -> bool {
        let Some(mounts) = &self.mounts else {
            return true;
        };
        let mut fds = [PollFd::new(mounts, PollFlags::PRI)];
        !matches!(
            rustix::event::poll(&mut fds, Some(&Timespec::default())),
            Ok(0)
        )
    }

    /// Assigns a task to a launcher with these namespaces.
    ///
    /// # Errors
    ///
    /// If it cannot be created.
    pub(super) fn assign(
        &mut self,
        base: NamespaceBase,
        setup: &LauncherSetup,
        files: &[OwnedFd],
    ) -> io::Result<Pid> {
        self.wanted = self.mounts.is_some().then_some(base);
        let spare = self.spare.as_ref();
        let is_good = spare.is_some_and(|spare| spare.base == base && spare.is_waiting());
        if !is_good || self.mounts_changed() {
            self.discard();
        }
        let spare = match self.spare.take() {
            Some(spare) => spare,
            None => self.make(base)?,
        };
        let sent = spare.send_task(setup, files);
        if sent.is_err() {
            // The spare exits without a task.
            self.ended = Some(spare.pid);
        }
        sent
    }

    /// Discards the spare. Its pid is reported to the server, unless it has already exited.
    fn discard(&mut self) {
        if let Some(spare) = self.spare.take()
            && spare.is_waiting()
        {
            self.ended = Some(spare.pid);
        }
    }

    fn make(&self, base: NamespaceBase) -> io::Result<SpareLauncher> {
        let pair = || {
            rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            )
        };
        let ((launcher, own), (first, firsts)) = (pair()?, pair()?);
        match confine::fork_sibling(self.token)? {
            ForkSide::Child => {
                drop((launcher, first));
                let shared = self.network.as_ref().filter(|_| base.shared_network);
                let network = shared.and_then(|network| launcher::enter_network(network).ok());
                launcher::run_spare(self.token, base, network, own, firsts)
            }
            ForkSide::Parent(pid) => Ok(SpareLauncher {
                base,
                pid,
                launcher,
                first,
            }),
        }
    }

    /// Sends the pid of a new process, or the error.
    pub(super) fn answer(&mut self, control: &OwnedFd, born: io::Result<Pid>) {
        let number = |pid: Pid| pid.as_raw_nonzero().get();
        let born = match born {
            Ok(pid) => number(pid),
            Err(error) => -error.raw_os_error().unwrap_or(libc::EAGAIN),
        };
        let ended = self.ended.take().map_or(0, number);
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&born.to_ne_bytes());
        bytes[4..].copy_from_slice(&ended.to_ne_bytes());
        // The server may have closed its end.
        let _ = retry(|| rustix::net::send(control, &bytes, SendFlags::NOSIGNAL));
    }
}

impl SpareLauncher {
    /// Returns whether the launcher and the first process of the spare are alive and wait for a task.
    fn is_waiting(&self) -> bool {
        let ends = [&self.launcher, &self.first];
        let mut fds = ends.map(|end| PollFd::new(end, PollFlags::empty()));
        matches!(
            rustix::event::poll(&mut fds, Some(&Timespec::default())),
            Ok(0)
        )
    }

    /// Sends the task to both processes.
    fn send_task(&self, setup: &LauncherSetup, files: &[OwnedFd]) -> io::Result<Pid> {
        let all: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
        // The launcher needs neither streams nor sockets, and readers at the other end would wait
        // until the last process has closed them.
        let (order, groups) = (all.get(launcher::ORDER_FD as usize), &all[setup.kept..]);
        let own: Vec<_> = order.into_iter().chain(groups).copied().collect();
        let own_birth = LauncherSetup {
            limits: setup.limits.clone(),
            kept: 1,
            ..LauncherSetup::default()
        };
        // The process that runs the command receives the task last: after a failure the command has
        // not run, and another launcher can be used.
        send(&self.launcher, &own_birth, &own)?;
        send(&self.first, setup, &all)?;
        Ok(self.pid)
    }
}

/// Returns whether no request arrives for a moment.
fn is_quiet(control: &OwnedFd) -> bool {
    const MOMENT: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 200_000,
    };
    let mut fds = [PollFd::new(control, PollFlags::IN)];
    matches!(rustix::event::poll(&mut fds, Some(&MOMENT)), Ok(0))
}

fn send(socket: &OwnedFd, setup: &LauncherSetup, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    if files.len() > MAX_FILES {
        return Err(Errno::MFILE.into());
    }
    let bytes = postcard::to_allocvec(setup).map_err(io::Error::other)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(files));
    }
    let parts = [IoSlice::new(&bytes)];
    retry(|| rustix::net::sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Returns the next request; `None` at the end.
pub(super) fn receive(control: &OwnedFd) -> Option<(LauncherSetup, Vec<OwnedFd>)> {
    let mut bytes = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(control, &mut parts, &mut ancillary, flags) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    };
    let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
    if received.bytes == 0 || received.flags.intersects(cut) {
        return None;
    }
    let mut files = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    let setup: LauncherSetup = postcard::from_bytes(&bytes[..received.bytes]).ok()?;
    (setup.kept <= files.len()).then_some((setup, files))
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}
