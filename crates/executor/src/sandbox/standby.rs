//! A launcher that is there already, and forks the next one.
//!
//! Executing this program costs more than everything else a launcher does until its command runs.
//! So one of them stays, as small as it was at its beginning, and forks on demand; the new process is
//! no child of its own but of whoever asked (`CLONE_PARENT`), who waits for it like for any other.
//!
//! ```text
//! server ──► standby                   one, from the first sandbox on; ends with its socket
//!        └─► launcher, launcher, …     siblings that it has forked
//! ```

use std::ffi::CStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sockopt,
};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use super::Errand;
use super::launcher::Order;

/// What lists of processes show.
pub(super) const NAME: &CStr = c"exec-standby";

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
    /// Whether it is to have a network of its own.
    pub(super) network: bool,
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
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.is_none() {
            *waiting = Some(Waiting::start(start)?);
        }
        let Some(current) = &*waiting else {
            return Err(io::Error::other("nobody stands by"));
        };
        match current.ask(request) {
            Ok(answer) => {
                let pid = answer.map_err(io::Error::from_raw_os_error)?;
                // Nobody has reaped it: it is not known to anybody else yet.
                let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
                Ok((pid, pidfd))
            }
            Err(error) => {
                *waiting = None;
                Err(error)
            }
        }
    }

    /// Ends the one that waits.
    pub(crate) fn end(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
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
        Ok(Self { control, pidfd })
    }

    /// The new process, or why there is none.
    fn ask(&self, request: &Request<'_>) -> io::Result<Result<Pid, i32>> {
        let mut files = request.streams.to_vec();
        files.extend(request.errand.descriptors());
        let birth = Birth {
            limits: request.limits.to_vec(),
            terminal: request.terminal,
            network: request.errand.network,
            kept: files.len(),
        };
        files.extend(request.groups);
        if files.len() > MAX_FILES {
            return Ok(Err(Errno::MFILE.raw_os_error()));
        }
        let bytes = postcard::to_allocvec(&birth).map_err(io::Error::other)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        let parts = [IoSlice::new(&bytes)];
        rustix::net::sendmsg(&self.control, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
        let mut answer = [0; 4];
        let (length, _) =
            retry(|| rustix::net::recv(&self.control, &mut answer, RecvFlags::empty()))?;
        if length != answer.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let answer = i32::from_ne_bytes(answer);
        Ok(match Pid::from_raw(answer) {
            Some(pid) if answer > 0 => Ok(pid),
            _ => Err(-answer),
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // It ends by itself when its socket does; one that hangs would not.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
        let own = WaitId::PidFd(self.pidfd.as_fd());
        let _ = rustix::process::waitid(own, WaitIdOptions::EXITED);
    }
}

/// A network that nobody has used, made before it is asked for: making one takes the kernel longer
/// than everything else that namespaces need.
///
/// Only who may enter it afterwards can make it like this. For others it is made with their user
/// namespace, when it is needed.
#[derive(Debug, Default)]
pub(super) struct Spare {
    network: Option<OwnedFd>,
    /// It cannot be made here.
    refused: bool,
}

impl Spare {
    /// Makes one, unless there is one.
    ///
    /// # Errors
    ///
    /// If this process is in the wrong network afterwards.
    pub(super) fn make(&mut self) -> io::Result<()> {
        if self.refused || self.network.is_some() {
            return Ok(());
        }
        let own = network()?;
        #[allow(
            deprecated,
            reason = "its replacement is for programs that share descriptors"
        )]
        if rustix::thread::unshare(UnshareFlags::NEWNET).is_err() {
            self.refused = true;
            return Ok(());
        }
        self.network = network().ok();
        enter(&own)?;
        Ok(())
    }

    /// Enters it, which it is good for once; whether there was one.
    pub(super) fn enter(self) -> bool {
        self.network.is_some_and(|network| enter(&network).is_ok())
    }

    /// Somebody else has entered it.
    pub(super) fn forget(&mut self) {
        self.network = None;
    }
}

fn network() -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::fs::open(c"/proc/self/ns/net", flags, Mode::empty())
}

fn enter(network: &OwnedFd) -> rustix::io::Result<()> {
    move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
}

/// Whether nobody asks for a moment.
pub(super) fn is_quiet(control: &OwnedFd) -> bool {
    const MOMENT: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    let mut fds = [PollFd::new(control, PollFlags::IN)];
    matches!(rustix::event::poll(&mut fds, Some(&MOMENT)), Ok(0))
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

/// Tells of a new process, or of an error as a negative number.
pub(super) fn answer(control: &OwnedFd, answer: i32) {
    // Whoever asked may be gone.
    let _ = retry(|| rustix::net::send(control, &answer.to_ne_bytes(), SendFlags::NOSIGNAL));
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}
