//! A launcher that is there already, and forks the next one.
//!
//! Executing this program costs more than everything else a launcher does until its command runs.
//! So one of them stays, as small as it was at its beginning, and forks on demand; the new process is
//! no child of its own but of whoever asked (`CLONE_PARENT`), who waits for it like for any other.
//!
//! When nobody asks it forks one in advance, which makes namespaces like those that were asked for
//! last, with a first process in them that waits to learn what for.
//!
//! ```text
//! server ──► standby                   one, from the first sandbox on; ends with its socket
//!        ├─► launcher, launcher, …     siblings that it has forked
//!        └─► launcher (exec-spare)     the next one
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

use super::Errand;
use super::launcher::{self, Order};
use super::plan::Base;
use crate::sys::confine::{self, Fork, OneThread};

/// What lists of processes show.
pub(super) const NAME: &CStr = c"exec-standby";

/// What they show of one that waits for its command.
pub(super) const SPARE_NAME: &CStr = c"exec-spare";

/// How long a fork may take before something else is tried.
const PATIENCE: Duration = Duration::from_secs(5);

/// Descriptors that go with one request: streams, an order, two sockets, groups to join.
const MAX_FILES: usize = 16;

/// What a new launcher is to be, before it reads its order.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Birth {
    /// Its resource limits.
    pub(super) limits: Vec<(u32, u64)>,
    /// Whether its standard input becomes its controlling terminal.
    pub(super) terminal: bool,
    /// The namespaces that it is to have.
    pub(super) base: Option<Base>,
    /// How many of the descriptors it keeps, from number 0 on; the others are groups to join.
    pub(super) kept: usize,
}

/// A launcher that is to be forked.
pub(crate) struct Request<'a> {
    pub(crate) streams: [BorrowedFd<'a>; 3],
    pub(crate) errand: &'a Errand,
    pub(crate) limits: &'a [(u32, u64)],
    pub(crate) groups: &'a [BorrowedFd<'a>],
    pub(crate) terminal: bool,
}

/// The one that waits, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Standby(Mutex<Option<Waiting>>);

#[derive(Debug)]
struct Waiting {
    control: OwnedFd,
    pidfd: OwnedFd,
    /// It has answered so far.
    answers: bool,
}

impl Standby {
    /// Has a launcher forked; `start` starts the one that forks, if there is none. Blocks.
    ///
    /// # Errors
    ///
    /// When it does not answer or cannot fork: a launcher is to be executed then.
    pub(crate) fn fork(
        &self,
        request: &Request<'_>,
        start: impl FnOnce(&Errand) -> io::Result<(Pid, OwnedFd)>,
    ) -> io::Result<(Pid, OwnedFd)> {
        let mut waiting = self.0.lock();
        if waiting.is_none() {
            *waiting = Some(Waiting::start(start)?);
        }
        let Some(current) = &mut *waiting else {
            return Err(io::Error::other("nobody stands by"));
        };
        match current.ask(request) {
            Ok(Answer { born, ended }) => {
                // It has nothing more to do, and nobody else knows of it.
                if let Some(ended) = ended {
                    reap(ended);
                }
                let pid = born.map_err(io::Error::from_raw_os_error)?;
                // Nobody has reaped it: it is not known to anybody else yet.
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

    /// Ends the one that waits.
    pub(crate) fn end(&self) {
        *self.0.lock() = None;
    }
}

impl Waiting {
    fn start(start: impl FnOnce(&Errand) -> io::Result<(Pid, OwnedFd)>) -> io::Result<Self> {
        let mut errand = Errand::new(&Order::StandBy)?;
        let (control, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_socket_timeout(&control, sockopt::Timeout::Recv, Some(PATIENCE))?;
        sockopt::set_socket_timeout(&control, sockopt::Timeout::Send, Some(PATIENCE))?;
        errand.work = Some(rustix::io::fcntl_dupfd_cloexec(&theirs, 16)?);
        let (_, pidfd) = start(&errand)?;
        Ok(Self {
            control,
            pidfd,
            answers: true,
        })
    }

    /// Has one forked.
    fn ask(&self, request: &Request<'_>) -> io::Result<Answer> {
        let mut files = request.streams.to_vec();
        files.extend(request.errand.descriptors());
        let birth = Birth {
            limits: request.limits.to_vec(),
            terminal: request.terminal,
            base: request.errand.base,
            kept: files.len(),
        };
        files.extend(request.groups);
        send(&self.control, &birth, &files)?;
        self.answer()
    }

    fn answer(&self) -> io::Result<Answer> {
        let mut answer = [0; 8];
        let (length, _) =
            retry(|| rustix::net::recv(&self.control, &mut answer, RecvFlags::empty()))?;
        if length != answer.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let [a, b, c, d, e, f, g, h] = answer;
        let born = i32::from_ne_bytes([a, b, c, d]);
        let pid = |number: i32| (number > 0).then(|| Pid::from_raw(number)).flatten();
        Ok(Answer {
            born: pid(born).ok_or(-born),
            ended: pid(i32::from_ne_bytes([e, f, g, h])),
        })
    }
}

/// What the one that stands by says.
struct Answer {
    /// The new process, or why there is none.
    born: Result<Pid, i32>,
    /// One that is not needed any more, and is ours to reap.
    ended: Option<Pid>,
}

/// Reaps a spare launcher that is about to end. One that does not is left to whoever reaps orphans,
/// and so is a number that is somebody else's by now.
fn reap(pid: Pid) {
    const ROUNDS: u32 = 100;
    let comm = format!("/proc/{}/comm", pid.as_raw_nonzero());
    for _ in 0..ROUNDS {
        // Those who have ended keep their names.
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

impl Drop for Waiting {
    fn drop(&mut self) {
        // It says what it leaves behind.
        if self.answers
            && send(&self.control, &Birth::default(), &[]).is_ok()
            && let Ok(Answer {
                ended: Some(ended), ..
            }) = self.answer()
        {
            reap(ended);
        }
        // It ends by itself when its socket does; one that hangs would not.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
        let own = WaitId::PidFd(self.pidfd.as_fd());
        let _ = rustix::process::waitid(own, WaitIdOptions::EXITED);
    }
}

/// Makes launchers with namespaces, and has one more than is asked for.
#[derive(Debug)]
pub(super) struct Spares {
    token: OneThread,
    spare: Option<Spare>,
    /// What was asked for last, if there will be one like it.
    wanted: Option<Base>,
    /// Tells of changes to what is mounted where. A spare would not show them, and would hold on to
    /// what was unmounted.
    mounts: Option<OwnedFd>,
    /// One that is not needed any more.
    ended: Option<Pid>,
}

/// A launcher that waits, and the first process of its namespaces.
#[derive(Debug)]
struct Spare {
    base: Base,
    pid: Pid,
    launcher: OwnedFd,
    first: OwnedFd,
}

impl Spares {
    pub(super) fn new(token: OneThread) -> Self {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Self {
            token,
            spare: None,
            wanted: None,
            mounts: rustix::fs::open(c"/proc/self/mountinfo", flags, Mode::empty()).ok(),
            ended: None,
        }
    }

    /// The next request; `None` when there will be no more.
    pub(super) fn next(&mut self, control: &OwnedFd) -> Option<(Birth, Vec<OwnedFd>)> {
        // For the next one, when nobody waits: not while the last one is still being born.
        if let (Some(base), None) = (self.wanted.take(), &self.spare)
            && is_quiet(control)
        {
            self.mounts_changed();
            self.spare = self.make(base).ok();
        }
        while self.spare.is_some() && self.mounts_change_before(control) {
            self.discard();
        }
        let (birth, files) = receive(control)?;
        if files.is_empty() {
            // No more will be asked for.
            self.discard();
            self.answer(control, Err(Errno::CANCELED.into()));
            return None;
        }
        Some((birth, files))
    }

    /// Waits for a request or a change of mounts; whether it was a change.
    fn mounts_change_before(&self, control: &OwnedFd) -> bool {
        let Some(mounts) = &self.mounts else {
            return false;
        };
        let mut fds = [
            PollFd::new(control, PollFlags::IN),
            PollFd::new(mounts, PollFlags::PRI),
        ];
        let _ = retry(|| rustix::event::poll(&mut fds, None));
        // Told once.
        !fds[1].revents().is_empty()
    }

    /// Whether mounts have changed since the last call, as far as anybody can tell.
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

    /// Has a launcher with these namespaces do what it is told.
    ///
    /// # Errors
    ///
    /// When it cannot be made.
    pub(super) fn assign(
        &mut self,
        base: Base,
        birth: &Birth,
        files: &[OwnedFd],
    ) -> io::Result<Pid> {
        self.wanted = self.mounts.is_some().then_some(base);
        let spare = self.spare.as_ref();
        let is_good = spare.is_some_and(|spare| spare.base == base && spare.is_there());
        if !is_good || self.mounts_changed() {
            self.discard();
        }
        let spare = match self.spare.take() {
            Some(spare) => spare,
            None => self.make(base)?,
        };
        let told = spare.tell(birth, files);
        if told.is_err() {
            // It ends without us.
            self.ended = Some(spare.pid);
        }
        told
    }

    /// Ends the spare; its parent will be told, unless it has ended by itself.
    fn discard(&mut self) {
        if let Some(spare) = self.spare.take()
            && spare.is_there()
        {
            self.ended = Some(spare.pid);
        }
    }

    fn make(&self, base: Base) -> io::Result<Spare> {
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
            Fork::Child => {
                drop((launcher, first));
                launcher::attend(self.token, base, own, firsts)
            }
            Fork::Parent(pid) => Ok(Spare {
                base,
                pid,
                launcher,
                first,
            }),
        }
    }

    /// Tells of a new process, or why there is none.
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
        // Whoever asked may be gone.
        let _ = retry(|| rustix::net::send(control, &bytes, SendFlags::NOSIGNAL));
    }
}

impl Spare {
    /// Whether both processes wait.
    fn is_there(&self) -> bool {
        let ends = [&self.launcher, &self.first];
        let mut fds = ends.map(|end| PollFd::new(end, PollFlags::empty()));
        matches!(
            rustix::event::poll(&mut fds, Some(&Timespec::default())),
            Ok(0)
        )
    }

    /// Tells both processes what they need to know.
    fn tell(&self, birth: &Birth, files: &[OwnedFd]) -> io::Result<Pid> {
        let all: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
        // The launcher has no use for streams and sockets, and others wait for the last who has them
        // to let go.
        let (order, groups) = (all.get(launcher::ORDER_FD as usize), &all[birth.kept..]);
        let own: Vec<_> = order.into_iter().chain(groups).copied().collect();
        let own_birth = Birth {
            limits: birth.limits.clone(),
            kept: 1,
            ..Birth::default()
        };
        // In this order: the one that runs the command knows last, so that after a failure it has
        // not been run, and somebody else can be asked.
        send(&self.launcher, &own_birth, &own)?;
        send(&self.first, birth, &all)?;
        Ok(self.pid)
    }
}

/// Whether nobody asks for a moment.
fn is_quiet(control: &OwnedFd) -> bool {
    const MOMENT: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 200_000,
    };
    let mut fds = [PollFd::new(control, PollFlags::IN)];
    matches!(rustix::event::poll(&mut fds, Some(&MOMENT)), Ok(0))
}

fn send(socket: &OwnedFd, birth: &Birth, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    if files.len() > MAX_FILES {
        return Err(Errno::MFILE.into());
    }
    let bytes = postcard::to_allocvec(birth).map_err(io::Error::other)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(files));
    }
    let parts = [IoSlice::new(&bytes)];
    retry(|| rustix::net::sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// The next request; `None` when there will be no more.
pub(super) fn receive(control: &OwnedFd) -> Option<(Birth, Vec<OwnedFd>)> {
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
    let birth: Birth = postcard::from_bytes(&bytes[..received.bytes]).ok()?;
    (birth.kept <= files.len()).then_some((birth, files))
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}
