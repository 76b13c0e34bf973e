//! Sandbox launcher: the process between the server and a sandboxed command.
//!
//! The launcher is this same executable, started with a hidden argument, an order in an anonymous
//! file (memfd) and a socket for reports. It executes the steps of a plan, then becomes the command
//! or waits for it:
//! ```text
//! server ──► launcher                     exits as the command does; its death ends the sandbox
//!               └──► first process         of the new namespaces; reaps
//!                       └──► command       leader of a session, a process group and its terminal
//! ```
//!
//! All code here runs in a process with one thread and no secrets. The first process drops every
//! right that the command must not have before it forks the command.

use std::ffi::{CStr, CString, c_int};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use std::process::ExitCode;
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::pipe::PipeFlags;
use rustix::process::{DumpableBehavior, Pid, Signal, WaitOptions, WaitStatus};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use serde::{Deserialize, Serialize};

use super::host::{self, HostFeatures};
use super::plan::{
    Confinement, FileService, LoopbackListeners, NamespaceBase, SandboxPlan, SandboxedCommand,
    SystemText,
};
use super::standby::{self, LauncherSetup, SpareLaunchers};
use super::{OrderFile, view};
use exec_server_sys::confine::{self, ForkSide, OneThread};
use exec_server_sys::reap::ResourceUsage;
use exec_server_sys::rlimit::Resource;
use restrict::confine_self;

mod restrict;

/// First argument that makes an executable a launcher.
pub const ARGUMENT: &CStr = c"--exec-server-sandbox-launcher";

/// Descriptors of the order and of the socket for reports.
pub(super) const ORDER_FD: i32 = 3;
const REPORT_FD: i32 = 4;

/// Descriptor of the socket for file requests, if the order is to serve them.
const WORK_FD: i32 = 5;

/// Maximum number of listeners that are sent to the server.
pub(super) const MAX_LISTENERS: usize = 32;

/// Backlog of a listener; the kernel limits it further.
const BACKLOG: i32 = 4096;

/// Process name of a launcher.
const NAME: &CStr = c"exec-server";

/// Exit status of a launcher that fails; the report contains the reason.
const FAILED: c_int = 125;

/// Serves file requests on a socket, in a process that is confined already; gets the paths of the
/// mounts in its view, and those that no request may create.
pub type RequestLoop = fn(&OwnedFd, &[SystemText], &[SystemText]) -> !;

/// Set if this program called [`dispatch`], so that it can be a launcher.
static REQUEST_LOOP: OnceLock<RequestLoop> = OnceLock::new();

/// Order of a launcher: what it must do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum LaunchOrder {
    /// Run a command.
    Run(Box<SandboxPlan>),
    /// Serve file requests.
    Serve(Box<FileService>),
    /// Report what this machine can enforce.
    Probe,
    /// Keep running, and fork launchers on request.
    StandBy,
}

/// Report of a launcher to the server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum LaunchReport {
    /// The sender is about to execute the command.
    Started,
    /// A step failed.
    Failed(LaunchFailure),
    /// Features that this machine can enforce.
    Host(HostFeatures),
    /// The listeners of the new network are attached.
    Listening,
}

/// Failed step of a launcher, with path and error number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LaunchFailure {
    pub(crate) step: LaunchStep,
    pub(crate) path: SystemText,
    pub(crate) errno: i32,
}

/// Step of a launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LaunchStep {
    /// Decode the order.
    Order,
    /// Create namespaces.
    Namespaces,
    /// Map the user and group.
    Map,
    /// Set up the network.
    Network,
    /// Find a path to mount.
    Find,
    /// Mount a file system.
    Mount,
    /// Drop capabilities.
    Capabilities,
    /// Apply Landlock rules.
    Landlock,
    /// Install system call filters.
    Filter,
    /// Create a session.
    Session,
    /// Fork a process.
    Fork,
    /// Set a resource limit.
    Limit,
    /// Join a control group.
    Group,
    /// Change the working directory.
    Directory,
    /// Execute the command.
    Execute,
}

impl LaunchStep {
    /// Returns the step as text that follows "cannot" in a message.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::Order => "understand its order",
            Self::Namespaces => "enter new namespaces",
            Self::Map => "map the user",
            Self::Network => "set up its network",
            Self::Find => "find, without following links,",
            Self::Mount => "mount",
            Self::Capabilities => "give up capabilities",
            Self::Landlock => "apply Landlock rules",
            Self::Filter => "install system call filters",
            Self::Session => "start a session",
            Self::Fork => "fork",
            Self::Limit => "set a resource limit",
            Self::Group => "join a control group",
            Self::Directory => "enter the working directory",
            Self::Execute => "execute",
        }
    }
}

/// Creates the failure of a step from a system error.
pub(crate) fn failed(
    step: LaunchStep,
    path: impl AsRef<[u8]>,
    error: impl Into<io::Error>,
) -> LaunchFailure {
    LaunchFailure {
        step,
        path: path.as_ref().to_vec(),
        errno: error.into().raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Runs the launcher if this program was started as one; returns `None` otherwise.
///
/// Call it at the beginning of `main`, before any thread is started. A program that calls it can
/// start sandboxed processes with its own executable. `serve` is run by launchers whose order is to
/// serve file requests.
pub fn dispatch(serve: RequestLoop) -> Option<ExitCode> {
    let _ = REQUEST_LOOP.set(serve);
    let requested = std::env::args_os()
        .nth(1)
        .is_some_and(|argument| argument.as_bytes() == ARGUMENT.to_bytes());
    requested.then(|| {
        let Some(token) = OneThread::check() else {
            eprintln!("exec-server: the sandbox launcher needs /proc and a single thread");
            return ExitCode::from(125);
        };
        run(token)
    })
}

/// Returns whether [`dispatch`] was called in this program.
pub(crate) fn is_dispatched() -> bool {
    REQUEST_LOOP.get().is_some()
}

fn run(token: OneThread) -> ! {
    let (Ok(order), Ok(report)) = (
        confine::inherited(token, ORDER_FD),
        confine::inherited(token, REPORT_FD),
    ) else {
        eprintln!("exec-server: this argument is not for people");
        confine::exit(FAILED)
    };
    match read_order(&order) {
        Ok(LaunchOrder::Probe) => {
            send_report(&report, &LaunchReport::Host(probe(token)));
            confine::exit(0)
        }
        Ok(LaunchOrder::StandBy) => match confine::inherited(token, WORK_FD) {
            Ok(control) => run_standby(token, control, report),
            Err(error) => report_and_exit(&report, failed(LaunchStep::Order, b"", error)),
        },
        Ok(requested) => {
            let socket = confine::inherited(token, WORK_FD).ok();
            begin(token, LauncherTask::new(requested, order, socket, report))
        }
        Err(error) => report_and_exit(&report, failed(LaunchStep::Order, b"", error)),
    }
}

/// Forks launchers until the server closes the control socket.
fn run_standby(token: OneThread, control: OwnedFd, report: OwnedFd) -> ! {
    drop(report);
    // Other processes must not read this memory.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let _ = rustix::thread::set_name(standby::NAME);
    // Once here, for all forked launchers.
    confine::default_signals(token);
    let mut spares = SpareLaunchers::new(token);
    while let Some((setup, files)) = spares.next(&control) {
        let born = match setup.base {
            Some(base) => spares.assign(base, &setup, &files),
            None => match confine::fork_sibling(token) {
                Ok(ForkSide::Child) => {
                    drop((control, spares));
                    set_up_launcher(token, &setup, files)
                }
                Ok(ForkSide::Parent(pid)) => Ok(pid),
                Err(error) => Err(error),
            },
        };
        // Close the command's streams: readers at the other end wait until the last process closes
        // them.
        drop(files);
        spares.answer(&control, born);
    }
    confine::exit(0)
}

/// Runs as a launcher with the same state as an executed one: session, streams, limits, order.
fn set_up_launcher(token: OneThread, setup: &LauncherSetup, mut files: Vec<OwnedFd>) -> ! {
    let groups = files.split_off(setup.kept);
    let prepared = || -> Result<(), LaunchFailure> {
        begin_session(NAME)?;
        if let (true, Some(terminal)) = (setup.terminal, files.first()) {
            rustix::process::ioctl_tiocsctty(terminal)
                .map_err(|error| failed(LaunchStep::Session, b"", error))?;
        }
        submit(&groups, &setup.limits)
    };
    let prepared = prepared();
    if let (Err(failure), Some(report)) = (prepared, files.get(REPORT_FD as usize)) {
        report_and_exit(report, failure)
    }
    match confine::only(token, files) {
        Ok(()) => run(token),
        // The report socket may be closed, so exit without a report; the server treats that as an
        // error.
        Err(_) => confine::exit(FAILED),
    }
}

/// Turns a process that the standby launcher forked into a launcher with a new session.
fn begin_session(name: &CStr) -> Result<(), LaunchFailure> {
    let _ = rustix::thread::set_name(name);
    // Makes this process the owner of its files in `/proc` again.
    let attached = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)
        .and_then(|()| rustix::process::setsid());
    attached.map_err(|error| failed(LaunchStep::Session, b"", error))?;
    Ok(())
}

/// Joins control groups and sets limits, for this process and its future children.
fn submit(groups: &[OwnedFd], limits: &[(Resource, u64)]) -> Result<(), LaunchFailure> {
    for group in groups {
        rustix::io::write(group, b"0").map_err(|error| failed(LaunchStep::Group, b"", error))?;
    }
    for &(resource, value) in limits {
        confine::limit(resource, value).map_err(|error| failed(LaunchStep::Limit, b"", error))?;
    }
    Ok(())
}

/// Runs as a spare launcher, whose namespaces exist before a request needs them.
///
/// The launcher and the first process receive their task separately, at the same time. They exit
/// when the other ends of their sockets are closed.
///
/// `network` is the network in which it already is.
pub(super) fn run_spare(
    token: OneThread,
    base: NamespaceBase,
    network: Option<NetworkNamespace>,
    own: OwnedFd,
    firsts: OwnedFd,
) -> ! {
    let files = confine::streams().map(|streams| streams.into_iter().chain([own, firsts]));
    let kept = files.and_then(|files| confine::only(token, files.collect()));
    let (Ok(()), Ok(own), Ok(firsts), Ok(())) = (
        kept,
        confine::inherited(token, 3),
        confine::inherited(token, 4),
        begin_session(standby::SPARE_NAME),
    ) else {
        confine::exit(FAILED)
    };
    let mut split = split(token, base, network);
    let mut told = None;
    if split.is_err() {
        // The step may succeed at the time of the request; otherwise the failure is reported then.
        told = standby::receive(&own);
        split = self::split(token, base, network);
    }
    match split {
        Ok(SplitSide::First { ids, end, network }) => {
            drop(own);
            first(token, base, (ids, network), end, || {
                let (setup, mut files) = standby::receive(&firsts)?;
                let _ = rustix::thread::set_name(NAME);
                let groups = files.split_off(setup.kept);
                let mut files = files.into_iter();
                confine::take_streams(token, &mut files).ok()?;
                let (order, report) = (files.next()?, files.next()?);
                let read = submit(&groups, &setup.limits).and_then(|()| {
                    read_order(&order).map_err(|error| failed(LaunchStep::Order, b"", error))
                });
                match read {
                    Ok(requested) => {
                        Some(LauncherTask::new(requested, order, files.next(), report))
                    }
                    Err(failure) => report_and_exit(&report, failure),
                }
            })
        }
        Ok(SplitSide::Launcher { first, end }) => {
            drop(firsts);
            let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
            let Some((setup, mut files)) = told.or_else(|| standby::receive(&own)) else {
                confine::exit(FAILED)
            };
            let _ = rustix::thread::set_name(NAME);
            let groups = files.split_off(setup.kept);
            // The first process reports the same failure.
            let (Ok(()), Some(order)) = (submit(&groups, &setup.limits), files.pop()) else {
                confine::exit(FAILED)
            };
            drop((groups, own));
            watch(token, first, end, Some(OrderFile(order)))
        }
        Err(failure) => {
            if let Some((_, files)) = standby::receive(&firsts)
                && let Some(report) = files.get(REPORT_FD as usize)
            {
                report_and_exit(report, failure)
            }
            confine::exit(FAILED)
        }
    }
}

fn read_order(order: &OwnedFd) -> io::Result<LaunchOrder> {
    let length = usize::try_from(rustix::fs::fstat(order)?.st_size).unwrap_or(0);
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < length {
        match rustix::io::pread(order, &mut bytes[filled..], filled as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    postcard::from_bytes(&bytes).map_err(|_| io::Error::from_raw_os_error(libc::EBADMSG))
}

/// Sends a report; errors are ignored, because the server may have closed its end.
fn send_report(report: &OwnedFd, what: &LaunchReport) {
    if let Ok(bytes) = postcard::to_allocvec(what) {
        let _ = rustix::net::send(report, &bytes, SendFlags::NOSIGNAL);
    }
}

/// Opens the listeners of a new network and sends them to the server.
fn listen(report: &OwnedFd, listeners: &LoopbackListeners) -> Result<(), LaunchFailure> {
    if listeners.count() == 0 {
        return Ok(());
    }
    let failed =
        |port: u16| move |error: Errno| failed(LaunchStep::Network, port.to_string(), error);
    let mut files = Vec::with_capacity(listeners.count());
    let kinds = [
        (&listeners.tcp, SocketType::STREAM),
        (&listeners.udp, SocketType::DGRAM),
    ];
    for (ports, kind) in kinds {
        for &port in ports {
            let failed = failed(port);
            let flags = SocketFlags::CLOEXEC;
            let socket =
                rustix::net::socket_with(AddressFamily::INET, kind, flags, None).map_err(failed)?;
            let at = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
            rustix::net::bind(&socket, &at).map_err(failed)?;
            if kind == SocketType::STREAM {
                rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
            }
            files.push(socket);
        }
    }
    let files: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
    let bytes =
        postcard::to_allocvec(&LaunchReport::Listening).map_err(|_| failed(0)(Errno::INVAL))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_LISTENERS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(failed(0)(Errno::MFILE));
    }
    let parts = [io::IoSlice::new(&bytes)];
    rustix::net::sendmsg(report, &parts, &mut ancillary, SendFlags::NOSIGNAL).map_err(failed(0))?;
    Ok(())
}

fn report_and_exit(report: &OwnedFd, failure: LaunchFailure) -> ! {
    send_report(report, &LaunchReport::Failed(failure));
    confine::exit(FAILED)
}

/// Work that begins after the confinement is complete.
enum LaunchWork {
    /// Run a command, and write its usage to this file.
    Command(SandboxedCommand, OrderFile),
    /// Serve file requests on this socket, which create none of these paths.
    Files(OwnedFd, Vec<SystemText>),
}

impl LaunchWork {
    fn has_terminal(&self) -> bool {
        matches!(self, Self::Command(command, _) if command.terminal)
    }
}

/// Task of a launcher: confinement, work and the socket for reports.
struct LauncherTask {
    confinement: Confinement,
    work: LaunchWork,
    report: OwnedFd,
}

impl LauncherTask {
    /// Creates the task from a decoded order; reports a failure and exits if the order is not
    /// valid.
    fn new(
        requested: LaunchOrder,
        order: OwnedFd,
        socket: Option<OwnedFd>,
        report: OwnedFd,
    ) -> Self {
        let (confinement, work) = match (requested, socket) {
            (LaunchOrder::Run(plan), _) => {
                let order_file = OrderFile(order);
                if let Err(error) = order_file.clear() {
                    report_and_exit(&report, failed(LaunchStep::Order, b"", error))
                }
                (
                    plan.confinement,
                    LaunchWork::Command(plan.command, order_file),
                )
            }
            (LaunchOrder::Serve(service), Some(socket)) => (
                service.confinement,
                LaunchWork::Files(socket, service.uncreatable_paths),
            ),
            _ => report_and_exit(&report, failed(LaunchStep::Order, b"", Errno::BADF)),
        };
        Self {
            confinement,
            work,
            report,
        }
    }
}

fn begin(token: OneThread, charge: LauncherTask) -> ! {
    if let Some(namespaces) = &charge.confinement.namespaces {
        let base = NamespaceBase::of(namespaces);
        match split(token, base, None) {
            Ok(SplitSide::First { ids, end, network }) => {
                first(token, base, (ids, network), end, || Some(charge))
            }
            Ok(SplitSide::Launcher { first, end }) => {
                let LauncherTask { work, report, .. } = charge;
                drop(report);
                let order_file = match work {
                    LaunchWork::Command(_, order_file) => Some(order_file),
                    LaunchWork::Files(..) => None,
                };
                watch(token, first, end, order_file)
            }
            Err(failure) => report_and_exit(&charge.report, failure),
        }
    }
    let LauncherTask {
        confinement,
        work,
        report,
    } = charge;
    if let Err(failure) = confine_self(&confinement) {
        report_and_exit(&report, failure)
    }
    match work {
        LaunchWork::Command(command, _) => execute(token, &command, &report),
        LaunchWork::Files(socket, uncreatable_paths) => {
            serve(&confinement, &socket, &uncreatable_paths, report)
        }
    }
}

/// Serves file requests in this process, which is already confined.
fn serve(
    confinement: &Confinement,
    socket: &OwnedFd,
    uncreatable_paths: &[SystemText],
    report: OwnedFd,
) -> ! {
    let _ = confine::limit(libc::RLIMIT_CORE, 0);
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    send_report(&report, &LaunchReport::Started);
    drop(report);
    let mounts = confinement.namespaces.iter().flat_map(|view| &view.mounts);
    let laid: Vec<SystemText> = mounts.map(|mount| mount.path.clone()).collect();
    match REQUEST_LOOP.get() {
        Some(serve) => serve(socket, &laid, uncreatable_paths),
        None => confine::exit(FAILED),
    }
}

/// Final message of the first process, sent after the command and all other processes of the
/// namespaces have ended.
#[derive(Debug, Serialize, Deserialize)]
struct FinalMessage {
    /// Status as `wait` returns it.
    status: i32,
    usage: ResourceUsage,
}

impl FinalMessage {
    /// Waits for the message; `None` if the first process ended without one.
    fn read(pipe: OwnedFd) -> Option<Self> {
        let mut bytes = Vec::new();
        File::from(pipe).read_to_end(&mut bytes).ok()?;
        postcard::from_bytes(&bytes).ok()
    }

    /// Sends the message; the launcher can read it before this process has exited.
    fn write(&self, pipe: OwnedFd) {
        if let Ok(bytes) = postcard::to_allocvec(self) {
            let _ = rustix::io::write(&pipe, &bytes);
        }
    }
}

/// Network namespace of the first process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NetworkNamespace {
    /// The server's network, or a new one over which this process has privileges.
    Given,
    /// A separate network without other processes, over which no process inside has privileges.
    Own,
}

/// The process in which [`split`] returned.
enum SplitSide {
    /// The first process of the new namespaces.
    First {
        ids: OuterIds,
        end: OwnedFd,
        network: NetworkNamespace,
    },
    /// The launcher, which reads the final message from `end`.
    Launcher { first: Pid, end: OwnedFd },
}

/// Creates a network without interfaces that are up; returns a descriptor of it, and leaves this
/// process in the network in which it was.
pub(super) fn new_network() -> io::Result<OwnedFd> {
    let own = || {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open(c"/proc/self/ns/net", flags, Mode::empty())
    };
    let before = own()?;
    match try_unshare(UnshareFlags::NEWNET) {
        0 => {}
        errno => return Err(io::Error::from_raw_os_error(errno)),
    }
    let network = own();
    if enter_network(&before).is_err() {
        // This process would create launchers without the server's network.
        confine::exit(FAILED)
    }
    Ok(network?)
}

/// Moves this process to a network of [`new_network`], over which no process of a sandbox has
/// privileges.
pub(super) fn enter_network(network: &OwnedFd) -> io::Result<NetworkNamespace> {
    let kind = LinkNameSpaceType::Network;
    rustix::thread::move_into_link_name_space(network.as_fd(), Some(kind))?;
    Ok(NetworkNamespace::Own)
}

/// Forks the first process of new namespaces. `network` is the network in which this process is,
/// if it is that of the sandbox.
fn split(
    token: OneThread,
    base: NamespaceBase,
    network: Option<NetworkNamespace>,
) -> Result<SplitSide, LaunchFailure> {
    let (end, first_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
        .map_err(|error| failed(LaunchStep::Fork, b"", error))?;
    let ids = OuterIds::own();
    let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC;
    if base.user {
        flags |= libc::CLONE_NEWUSER;
    }
    let entered = network.is_some();
    let mut network = network.unwrap_or(NetworkNamespace::Given);
    // Without the privilege for this call, the network is created together with the user namespace,
    // which grants it.
    if base.network && !entered && try_unshare(UnshareFlags::NEWNET) == 0 {
        network = NetworkNamespace::Own;
        if base.loopback {
            confine::loopback_up().map_err(|error| failed(LaunchStep::Network, b"", error))?;
        }
    } else if base.network && !entered {
        flags |= libc::CLONE_NEWNET;
    }
    // Signals to the whole process tree are meant for the command, which starts with default
    // actions and no blocked signals. The launcher only reports how the command ended.
    confine::default_signals(token);
    confine::hold_signals(token);
    match confine::fork(token, flags) {
        Ok(ForkSide::Child) => Ok(SplitSide::First {
            ids,
            end: first_end,
            network,
        }),
        Ok(ForkSide::Parent(first)) => Ok(SplitSide::Launcher { first, end }),
        Err(error) => Err(failed(LaunchStep::Namespaces, b"", error)),
    }
}

/// Waits for the command and exits with the same status or signal.
fn watch(token: OneThread, first: Pid, end: OwnedFd, order_file: Option<OrderFile>) -> ! {
    confine::close_streams(token);
    // Read the final message instead of waiting for the first process: the kernel takes a while to
    // remove the namespaces. When the message arrives, no other process is left in them.
    let status = match FinalMessage::read(end) {
        Some(told) => {
            if let Some(order_file) = order_file {
                order_file.write_usage(&told.usage);
            }
            told.status
        }
        None => wait_for(first),
    };
    if libc::WIFSIGNALED(status) {
        // This process must not dump core: the command has already dumped its own core if it had
        // to.
        let _ = confine::limit(libc::RLIMIT_CORE, 0);
        confine::exit_by_signal(token, libc::WTERMSIG(status))
    }
    confine::exit(libc::WEXITSTATUS(status))
}

fn wait_for(pid: Pid) -> i32 {
    loop {
        match rustix::process::waitpid(Some(pid), WaitOptions::empty()) {
            Ok(Some((_, status))) => return raw(status),
            Ok(None) | Err(Errno::INTR) => {}
            Err(_) => confine::exit(FAILED),
        }
    }
}

fn raw(status: WaitStatus) -> i32 {
    status.as_raw()
}

/// User and group of this process outside the namespaces.
#[derive(Clone, Copy)]
struct OuterIds {
    user: u32,
    group: u32,
}

impl OuterIds {
    fn own() -> Self {
        Self {
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
        }
    }

    /// Maps this user and group to the same ids in a new user namespace.
    fn map(self) -> Result<(), LaunchFailure> {
        let Self { user, group } = self;
        for (path, text) in [
            ("/proc/self/setgroups", "deny".to_owned()),
            ("/proc/self/uid_map", format!("{user} {user} 1")),
            ("/proc/self/gid_map", format!("{group} {group} 1")),
        ] {
            let written = File::options()
                .write(true)
                .open(path)
                .and_then(|mut file| file.write_all(text.as_bytes()));
            written.map_err(|error| failed(LaunchStep::Map, path, error))?;
        }
        Ok(())
    }
}

/// Main function of the first process of new namespaces: prepares the namespaces, receives the
/// task, builds the view, confines itself, then forks the command or serves file requests.
fn first(
    token: OneThread,
    base: NamespaceBase,
    (ids, network): (OuterIds, NetworkNamespace),
    end: OwnedFd,
    record_filesystem: impl FnOnce() -> Option<LauncherTask>,
) -> ! {
    // If the launcher dies, this process must die too, and with it every process in its namespaces.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    if launcher_is_gone(&end) {
        confine::exit(FAILED)
    }
    let entered = || -> Result<(), LaunchFailure> {
        if base.user {
            ids.map()?;
        }
        if network == NetworkNamespace::Given && base.loopback {
            confine::loopback_up().map_err(|error| failed(LaunchStep::Network, b"", error))?;
        }
        Ok(())
    };
    let entered = entered();
    let parts = view::DetachedMounts::make(base);
    // Other processes must not read this memory; the command is a new program with its own setting.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let Some(charge) = record_filesystem() else {
        confine::exit(FAILED)
    };
    let LauncherTask {
        confinement,
        work,
        report,
    } = charge;
    let built = || -> Result<view::HeldDescriptors, LaunchFailure> {
        entered?;
        // A step that failed in advance may succeed now.
        let parts = parts.or_else(|_| view::DetachedMounts::make(base))?;
        let Some(namespaces) = &confinement.namespaces else {
            return Err(failed(LaunchStep::Order, b"", Errno::BADMSG));
        };
        listen(&report, &namespaces.listeners)?;
        let kept = view::build(namespaces, parts, work.has_terminal())?;
        confine_self(&confinement)?;
        Ok(kept)
    };
    let kept = match built() {
        Ok(kept) => kept,
        Err(failure) => report_and_exit(&report, failure),
    };
    let command = match work {
        LaunchWork::Command(command, _) => command,
        LaunchWork::Files(socket, uncreatable_paths) => {
            serve(&confinement, &socket, &uncreatable_paths, report)
        }
    };
    let command = match confine::lend(token, || lead_session(token, &command, &report)) {
        Ok(pid) => pid,
        Err(error) => report_and_exit(&report, failed(LaunchStep::Fork, b"", error)),
    };
    // The server waits until the report socket is closed, also by this process.
    drop(report);
    confine::close_streams(token);
    let mut status = None;
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, ended))) if pid == command => {
                status = Some(raw(ended));
                // Processes that the command left running end with it.
                confine::end_namespace(token);
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => break,
        }
    }
    drop(kept);
    let Some(status) = status else {
        confine::exit(FAILED)
    };
    let usage = confine::used_by_children();
    FinalMessage { status, usage }.write(end);
    confine::exit(0)
}

/// Returns whether the launcher has closed its end of the pipe for the final message.
fn launcher_is_gone(end: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(end, PollFlags::empty())];
    let now = rustix::event::Timespec::default();
    let _ = rustix::event::poll(&mut fds, Some(&now));
    fds[0].revents().contains(PollFlags::ERR)
}

fn lead_session(token: OneThread, command: &SandboxedCommand, report: &OwnedFd) -> ! {
    let session = || -> io::Result<()> {
        rustix::process::setsid()?;
        if command.terminal {
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
        }
        Ok(())
    };
    if let Err(error) = session() {
        report_and_exit(report, failed(LaunchStep::Session, b"", error))
    }
    execute(token, command, report)
}

/// Executes the command in this process.
fn execute(token: OneThread, command: &SandboxedCommand, report: &OwnedFd) -> ! {
    for &(resource, value) in &command.limits {
        if let Err(error) = confine::limit(resource, value) {
            report_and_exit(
                report,
                failed(LaunchStep::Limit, resource.to_string(), error),
            )
        }
    }
    if let Err(error) = rustix::process::chdir(command.cwd.as_slice()) {
        report_and_exit(report, failed(LaunchStep::Directory, &command.cwd, error))
    }
    let strings = |texts: &[SystemText]| -> Vec<CString> {
        let each = texts.iter().cloned().map(CString::new);
        each.collect::<Result<_, _>>().unwrap_or_default()
    };
    let candidates = strings(&command.candidates);
    let (argv, env) = (strings(&command.argv), strings(&command.env));
    confine::default_signals(token);
    confine::release_signals(token);
    confine::close_on_exec();
    send_report(report, &LaunchReport::Started);
    let error = confine::execute(&candidates, &argv, &env);
    report_and_exit(report, failed(LaunchStep::Execute, b"", error))
}

/// Determines what this machine can enforce, by trying it.
fn probe(token: OneThread) -> HostFeatures {
    let mut found = HostFeatures {
        kernel: host::kernel_release(),
        landlock: confine::landlock_version(),
        seccomp: confine::has_seccomp(),
        ..HostFeatures::nothing("not tried")
    };
    let (user, tried) = try_namespaces(token, true);
    found.user_namespaces = user;
    let tried = match found.user_namespaces {
        Ok(()) => tried,
        Err(_) => {
            let (privileged, tried) = try_namespaces(token, false);
            found.privileged_mounts = privileged;
            tried
        }
    };
    let [api, proc, network, loopback] = tried;
    let told = |errno: i32| match errno {
        0 => Ok(()),
        libc::ENOSYS => Err("the kernel is older than 5.12".to_owned()),
        errno => Err(io::Error::from_raw_os_error(errno).to_string()),
    };
    found.mount_api = told(api);
    found.proc_mountable = proc == 0;
    found.network_namespaces = told(network);
    found.private_networks = told(loopback);
    found
}

/// Tries to create namespaces, and then each operation in them; returns the error numbers.
fn try_namespaces(token: OneThread, user: bool) -> (Result<(), String>, [i32; 4]) {
    let nothing = [libc::EPERM; 4];
    let Ok((read, write)) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC) else {
        return (Err("out of descriptors".to_owned()), nothing);
    };
    let ids = OuterIds::own();
    let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC;
    if user {
        flags |= libc::CLONE_NEWUSER;
    }
    let child = match confine::fork(token, flags) {
        Ok(ForkSide::Child) => {
            let errno =
                |result: Result<(), LaunchFailure>| result.err().map_or(0, |failure| failure.errno);
            let mapped = errno(if user { ids.map() } else { Ok(()) });
            let api = errno(view::try_attributes());
            let proc = errno(view::try_proc());
            let network = try_unshare(UnshareFlags::NEWNET);
            let loopback = match network {
                0 => confine::loopback_up()
                    .err()
                    .and_then(|error| error.raw_os_error()),
                errno => Some(errno),
            };
            let all = [mapped, api, proc, network, loopback.unwrap_or(0)];
            let bytes: Vec<u8> = all.iter().flat_map(|errno| errno.to_ne_bytes()).collect();
            let _ = File::from(write).write_all(&bytes);
            confine::exit(0)
        }
        Ok(ForkSide::Parent(pid)) => pid,
        Err(error) => return (Err(error.to_string()), nothing),
    };
    drop(write);
    let mut bytes = [0; 20];
    let told = File::from(read).read_exact(&mut bytes);
    wait_for(child);
    if told.is_err() {
        return (Err("the attempt was cut short".to_owned()), nothing);
    }
    let mut numbers = bytes
        .chunks_exact(4)
        .map(|chunk| i32::from_ne_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]));
    let mut next = || numbers.next().unwrap_or(libc::EPERM);
    let mapped = match next() {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno).to_string()),
    };
    (mapped, [next(), next(), next(), next()])
}

#[allow(
    deprecated,
    reason = "its replacement is for programs that share descriptors"
)]
fn try_unshare(flags: UnshareFlags) -> i32 {
    rustix::thread::unshare(flags)
        .err()
        .map_or(0, Errno::raw_os_error)
}

/// Returns `AT_FDCWD` as a borrowed descriptor, for functions that require one.
pub(crate) fn here() -> BorrowedFd<'static> {
    rustix::fs::CWD.as_fd()
}
