//! Sandbox of a command: resolves the policy, plans the mechanisms, starts the launcher that
//! enforces them, and reports what is enforced.
//!
//! ```text
//! wire ──► policy ──► plan ──► launcher ──► command
//!            │          │         └ mounts (view), Landlock, seccomp, capabilities
//!            disk       host: what this kernel can enforce
//! ```
//! A policy that cannot be enforced completely is refused, unless the request allows partial
//! enforcement; the response then lists what is missing.

pub mod denial;
mod error;
mod glob;
pub mod host;
pub mod launcher;
pub mod placeholder;
pub mod plan;
pub mod policy;
pub mod seccomp;
mod standby;
mod view;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io::{self, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use exec_server_protocol::sandbox::{
    EnforcementLevel, EnforcementReport, NetworkPermission, PathAccess, Sandbox,
};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketFlags,
    SocketType,
};
use rustix::process::{Pid, PidfdFlags};

use self::denial::DenialFacts;
use self::host::HostFeatures;
use self::launcher::{LaunchFailure, LaunchOrder, LaunchReport, LaunchStep};
use self::placeholder::{HoldResult, Placeholder};
use self::plan::{Confinement, FileService, NamespaceBase, SandboxPlan, SandboxedCommand};
use self::policy::{Disk as _, PathType, PolicyDirectories, RealDisk, ResolvedPolicy};
use self::standby::Standby;
use exec_server_sys::launch::{Launch, launch};
use exec_server_sys::reap::ResourceUsage;
use exec_server_sys::rlimit::Resource;

pub use self::error::SandboxError;
pub use self::plan::PrivateNetwork;
pub use self::standby::ForkRequest;

/// Processes of a sandbox besides the command: the launcher and the first process of its
/// namespaces.
const OWN_PROCESSES: u64 = 2;

/// Prepared confinement of a command, with what to report about it.
#[derive(Debug)]
pub struct PreparedSandbox {
    confinement: Confinement,
    /// The enforcement that is reported to the client.
    pub enforcement: EnforcementReport,
    /// Properties of the sandbox that denial detection uses.
    pub facts: DenialFacts,
    /// Held until the command has ended.
    pub placeholders: Vec<Placeholder>,
    /// Paths that a file helper must not create.
    uncreatable_paths: Vec<PathBuf>,
    /// Whether the command can connect to sockets outside the sandbox.
    connects: bool,
}

/// Kind of process that a sandbox is prepared for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A command: placeholders keep it from creating the paths of rules that do not exist.
    Command,
    /// File requests: the helper itself refuses to create these paths. A placeholder would be seen by
    /// other programs, and creating it would take longer than most requests.
    Files,
}

impl PreparedSandbox {
    /// Returns a sandbox that restricts nothing.
    pub fn open() -> Self {
        Self {
            confinement: Confinement::default(),
            enforcement: EnforcementReport {
                level: EnforcementLevel::None,
                mechanisms: Vec::new(),
                missing: Vec::new(),
            },
            facts: DenialFacts::default(),
            placeholders: Vec::new(),
            uncreatable_paths: Vec::new(),
            connects: false,
        }
    }

    /// Returns whether this sandbox restricts nothing.
    pub fn is_open(&self) -> bool {
        self.confinement == Confinement::default()
    }

    /// Returns whether the command runs in new namespaces, and thus in a separate session and
    /// process group.
    pub fn has_namespaces(&self) -> bool {
        self.confinement.namespaces.is_some()
    }

    /// Returns whether the command can connect to sockets outside the sandbox.
    pub fn connects(&self) -> bool {
        self.connects
    }

    /// Returns the namespaces of the command.
    fn base(&self) -> Option<NamespaceBase> {
        self.confinement.namespaces.as_ref().map(NamespaceBase::of)
    }

    /// Returns the number of processes that count against limits but do not belong to the command.
    pub fn own_processes(&self) -> u64 {
        if self.has_namespaces() {
            OWN_PROCESSES
        } else {
            0
        }
    }
}

/// Decides how to enforce a policy on this machine, and creates the placeholders that it needs.
///
/// Reads the disk, so it must not run on an async worker.
///
/// # Errors
///
/// If the policy is not valid, or this machine cannot enforce it.
pub fn prepare(
    sandbox: &Sandbox,
    env: &BTreeMap<String, String>,
    network: Option<&PrivateNetwork>,
    host: &HostFeatures,
    hidden: &[PathBuf],
) -> Result<PreparedSandbox, SandboxError> {
    let refused = |error: &dyn std::fmt::Display| SandboxError::Refused(error.to_string());
    let disk = RealDisk;
    let context = PolicyDirectories {
        env,
        disk: &disk,
        hidden,
        reads_only: false,
    };
    let policy = policy::resolve(sandbox, &context).map_err(|error| refused(&error))?;
    let allow_partial = sandbox.allow_partial_enforcement;
    confine(policy, allow_partial, host, network, Purpose::Command)
}

/// Decides how to give a command a private network, without other restrictions.
///
/// # Errors
///
/// If this machine cannot create one.
pub fn prepare_network(
    network: &PrivateNetwork,
    host: &HostFeatures,
) -> Result<PreparedSandbox, SandboxError> {
    let policy = ResolvedPolicy {
        view: None,
        network: NetworkPermission::Enabled,
    };
    confine(policy, false, host, Some(network), Purpose::Command)
}

/// Decides how to enforce a resolved policy for a process that serves file requests.
///
/// # Errors
///
/// If this machine cannot enforce it.
pub fn prepare_files(
    policy: ResolvedPolicy,
    allow_partial: bool,
    host: &HostFeatures,
) -> Result<PreparedSandbox, SandboxError> {
    confine(policy, allow_partial, host, None, Purpose::Files)
}

/// Decides how to enforce a resolved policy, and creates the placeholders that a command needs.
fn confine(
    mut policy: ResolvedPolicy,
    allow_partial: bool,
    host: &HostFeatures,
    network: Option<&PrivateNetwork>,
    purpose: Purpose,
) -> Result<PreparedSandbox, SandboxError> {
    let refused = |error: &dyn std::fmt::Display| SandboxError::Refused(error.to_string());
    let disk = RealDisk;
    let mut placeholders = Vec::new();
    let mut uncreatable_paths = Vec::new();
    let root = rustix::process::geteuid().is_root();
    if let Some(view) = &mut policy.view
        && host.mounts().is_ok()
    {
        for path in std::mem::take(&mut view.missing) {
            if purpose == Purpose::Files {
                view.rules.remove(&path);
                uncreatable_paths.push(path);
                continue;
            }
            match placeholder::hold(&path) {
                Ok(HoldResult::Held(held, is_link)) => {
                    placeholders.push(held);
                    if is_link {
                        view.pins.insert(path.clone());
                    }
                    view.missing.insert(path);
                }
                Ok(HoldResult::Exists) => {}
                Ok(HoldResult::Impossible) => {
                    view.rules.remove(&path);
                }
                Err(error) => {
                    let path = path.display();
                    let message = format!(
                        "failed to prepare process sandbox: cannot protect `{path}`: {error}"
                    );
                    return Err(SandboxError::Refused(message));
                }
            }
        }
    }
    let is_directory = |path: &Path| matches!(disk.kind(path), Ok(Some(PathType::Directory)));
    let options = plan::PlanOptions {
        root,
        allow_partial,
        is_directory: &is_directory,
        network,
    };
    let (confinement, enforcement) =
        plan::build(&policy, host, options).map_err(|error| refused(&error))?;
    let facts = DenialFacts {
        confined: confinement != Confinement::default(),
        read_only: policy
            .view
            .as_ref()
            .is_some_and(|view| view.access(Path::new("/")) != PathAccess::Write),
        // Without capabilities, even root is denied access to files.
        refuses_access: policy
            .view
            .as_ref()
            .is_some_and(|view| view.hides() || root)
            || confinement.namespaces.is_none() && confinement.landlock.is_some(),
        network: policy.network == NetworkPermission::Restricted || network.is_some(),
        occupies_names: !placeholders.is_empty(),
    };
    let connects = facts.confined
        && network.map_or(policy.network == NetworkPermission::Enabled, |network| {
            network.unix_sockets
        });
    Ok(PreparedSandbox {
        confinement,
        enforcement,
        facts,
        placeholders,
        uncreatable_paths,
        connects,
    })
}

/// A program to execute, as the kernel takes it.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// Paths to execute, in order, until one exists.
    pub candidates: &'a [CString],
    /// Arguments, with the name of the program.
    pub argv: &'a [CString],
    /// The complete environment.
    pub env: &'a [CString],
    /// Working directory.
    pub cwd: &'a CStr,
}

/// Order for a launcher, with the socket on which its reports arrive.
#[derive(Debug)]
pub struct PendingLaunch {
    order: OwnedFd,
    theirs: OwnedFd,
    ours: OwnedFd,
    /// The launcher's end of the socket for file requests.
    work: Option<OwnedFd>,
    /// The namespaces that the launcher creates.
    base: Option<NamespaceBase>,
}

/// Process of a sandboxed command, identified in the server's PID namespace.
#[derive(Debug)]
pub struct SandboxedChild {
    /// Leader of a separate session and process group.
    pub pid: Pid,
    /// Still refers to this process if its pid is used again.
    pub pidfd: OwnedFd,
}

impl PendingLaunch {
    fn new(order: &LaunchOrder) -> io::Result<Self> {
        let bytes = postcard::to_allocvec(order).map_err(io::Error::other)?;
        let file = rustix::fs::memfd_create(c"exec-server-order", MemfdFlags::CLOEXEC)?;
        let mut file = File::from(file);
        file.write_all(&bytes)?;
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::sockopt::set_socket_passcred(&ours, true)?;
        // Above the descriptor numbers that they get in the launcher.
        let high = |fd: OwnedFd| rustix::io::fcntl_dupfd_cloexec(&fd, 16);
        Ok(Self {
            order: high(file.into())?,
            theirs: high(theirs)?,
            ours,
            work: None,
            base: None,
        })
    }

    /// Creates an order to serve file requests, and the server's end of the socket for them.
    pub fn serve(prepared_sandbox: &PreparedSandbox) -> io::Result<(OwnedFd, Self)> {
        let text = |path: &PathBuf| path.as_os_str().as_bytes().to_vec();
        let mut pending_launch = Self::new(&LaunchOrder::Serve(Box::new(FileService {
            confinement: prepared_sandbox.confinement.clone(),
            uncreatable_paths: prepared_sandbox
                .uncreatable_paths
                .iter()
                .map(text)
                .collect(),
        })))?;
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        pending_launch.work = Some(rustix::io::fcntl_dupfd_cloexec(&theirs, 16)?);
        pending_launch.base = prepared_sandbox.base();
        Ok((ours, pending_launch))
    }

    /// Creates an order to run a command.
    pub fn run(
        prepared_sandbox: &PreparedSandbox,
        program: &Program<'_>,
        limits: &[(Resource, u64)],
        terminal: bool,
    ) -> io::Result<Self> {
        let texts = |list: &[CString]| list.iter().map(|text| text.to_bytes().to_vec()).collect();
        let mut limits = limits.to_vec();
        if prepared_sandbox.confinement.drop_capabilities {
            limits.push((libc::RLIMIT_CORE, 0));
        }
        let pending_launch = Self::new(&LaunchOrder::Run(Box::new(SandboxPlan {
            command: SandboxedCommand {
                candidates: texts(program.candidates),
                argv: texts(program.argv),
                env: texts(program.env),
                cwd: program.cwd.to_bytes().to_vec(),
                limits,
                terminal: terminal && prepared_sandbox.has_namespaces(),
            },
            confinement: prepared_sandbox.confinement.clone(),
        })))?;
        Ok(Self {
            base: prepared_sandbox.base(),
            ..pending_launch
        })
    }

    /// Returns the descriptors that the launcher expects, in order.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let work = self.work.as_ref().map(OwnedFd::as_fd);
        [self.order.as_fd(), self.theirs.as_fd()]
            .into_iter()
            .chain(work)
            .collect()
    }

    /// Waits until a process that serves file requests is ready. Blocks.
    pub fn wait_served(self) -> Result<(), SandboxError> {
        self.wait().map(drop)
    }

    /// Waits until the command runs. Blocks.
    ///
    /// # Errors
    ///
    /// The failure that prevented the start. The launcher has ended then, or is about to end.
    pub fn wait(self) -> Result<StartedLaunch, SandboxError> {
        let Self {
            theirs,
            ours,
            order,
            work,
            base: _,
        } = self;
        drop((theirs, work));
        let mut started = None;
        let mut listeners = Vec::new();
        loop {
            match receive(&ours) {
                Ok(Some(ReceivedReport {
                    report,
                    from,
                    files,
                })) => match report {
                    LaunchReport::Started => started = Some(from),
                    LaunchReport::Failed(failure) => return Err(explain(failure)),
                    LaunchReport::Listening => listeners = files,
                    LaunchReport::Host(_) => {}
                },
                Ok(None) => {
                    let ended = || io::Error::other("the sandbox launcher ended early");
                    let order_file = OrderFile(order);
                    let started_launch = started.map(|leader| StartedLaunch {
                        leader,
                        listeners,
                        order_file,
                    });
                    return started_launch.ok_or_else(|| SandboxError::System {
                        action: "start a sandboxed process",
                        source: ended(),
                    });
                }
                Err(source) => {
                    return Err(SandboxError::System {
                        action: "listen to the sandbox launcher",
                        source,
                    });
                }
            }
        }
    }
}

/// Result of a successful start by a launcher.
#[derive(Debug)]
pub struct StartedLaunch {
    /// Pid of the command in the server's PID namespace.
    pub leader: Option<Pid>,
    /// Listeners in the command's network namespace, in the order of the plan.
    pub listeners: Vec<OwnedFd>,
    /// File with the resource usage of the command after its end.
    pub order_file: OrderFile,
}

/// File that contains the order, and later the resource usage of the command. The launcher
/// overwrites the order with the usage after the command has ended.
#[derive(Debug)]
pub struct OrderFile(OwnedFd);

impl OrderFile {
    /// Larger than any encoded usage.
    const MAX_BYTES: usize = 64;

    /// Returns the usage; `None` if the launcher ended before it wrote it.
    pub fn usage(&self) -> Option<ResourceUsage> {
        let mut bytes = [0; Self::MAX_BYTES];
        let read = rustix::io::pread(&self.0, &mut bytes, 0).ok()?;
        postcard::from_bytes(&bytes[..read]).ok()
    }

    /// Deletes the order, so that the usage can be written.
    fn clear(&self) -> rustix::io::Result<()> {
        rustix::fs::ftruncate(&self.0, 0)
    }

    fn write_usage(&self, usage: &ResourceUsage) {
        let mut bytes = [0; Self::MAX_BYTES];
        if let Ok(bytes) = postcard::to_slice(usage, &mut bytes) {
            // A failed write cannot be reported anywhere.
            let _ = rustix::io::pwrite(&self.0, bytes, 0);
        }
    }
}

/// Report of a launcher, with its sender and the attached descriptors.
struct ReceivedReport {
    report: LaunchReport,
    from: Option<Pid>,
    files: Vec<OwnedFd>,
}

/// Returns the next report; `None` at the end of the stream.
fn receive(socket: &OwnedFd) -> io::Result<Option<ReceivedReport>> {
    const SPACE: usize = rustix::cmsg_space!(ScmCredentials(1), ScmRights(launcher::MAX_LISTENERS));
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [io::IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = match rustix::net::recvmsg(socket, &mut parts, &mut ancillary, flags) {
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            // The launcher closed its end without a report.
            Err(Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if received.bytes == 0 {
            return Ok(None);
        }
        let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
        if received.flags.intersects(cut) {
            return Err(io::Error::other("report too long"));
        }
        let mut from = None;
        let mut files = Vec::new();
        for message in ancillary.drain() {
            match message {
                RecvAncillaryMessage::ScmCredentials(credentials) => from = Some(credentials.pid),
                RecvAncillaryMessage::ScmRights(received) => files.extend(received),
                _ => {}
            }
        }
        let report = postcard::from_bytes(&bytes[..received.bytes])
            .map_err(|error| io::Error::other(format!("odd report: {error}")))?;
        return Ok(Some(ReceivedReport {
            report,
            from,
            files,
        }));
    }
}

fn explain(failure: LaunchFailure) -> SandboxError {
    let source = io::Error::from_raw_os_error(failure.errno);
    match failure.step {
        LaunchStep::Directory => SandboxError::WorkingDirectory(source),
        LaunchStep::Execute => SandboxError::Program(source),
        step => {
            let path = Path::new(OsStr::from_bytes(&failure.path)).display();
            let what = if failure.path.is_empty() {
                String::new()
            } else {
                format!(" `{path}`")
            };
            let description = step.description();
            SandboxError::Refused(format!(
                "failed to prepare process sandbox: cannot {description}{what}: {source}"
            ))
        }
    }
}

/// Opens a pidfd and then checks the identity of the process: the pid may have been used again.
pub fn inside(pid: Pid, is_ours: impl FnOnce(Pid) -> bool) -> Option<SandboxedChild> {
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
    is_ours(pid).then_some(SandboxedChild { pid, pidfd })
}

/// Executable that launches sandboxes.
#[derive(Debug)]
pub struct Launcher {
    path: Option<CString>,
    /// Resource limit of launchers that belong to no command, which tags them.
    tag: (Resource, u64),
    host: OnceLock<Result<HostFeatures, String>>,
    standby: Standby,
}

impl Launcher {
    /// Uses the given executable, or this program if it called [`launcher::dispatch`]. Launchers that
    /// belong to no command get `tag`, a resource limit that identifies them.
    pub fn new(path: Option<&Path>, tag: (Resource, u64)) -> Self {
        let path = match path {
            Some(path) => CString::new(path.as_os_str().as_bytes()).ok(),
            // The executable is not opened by path: the file at that path may have been replaced by
            // another version.
            None => launcher::is_dispatched().then(|| c"/proc/self/exe".to_owned()),
        };
        Self {
            path,
            tag,
            host: OnceLock::new(),
            standby: Standby::default(),
        }
    }

    /// Requests a launcher from the standby process. Blocks.
    ///
    /// # Errors
    ///
    /// If that fails; executing a launcher may still succeed.
    pub fn fork(
        &self,
        null: BorrowedFd<'_>,
        request: &ForkRequest<'_>,
    ) -> io::Result<(Pid, OwnedFd)> {
        self.standby.fork(request, |pending_launch| {
            self.launch_alone(null, pending_launch)
        })
    }

    /// Ends the standby process; the next sandbox starts another one.
    pub fn end_standby(&self) {
        self.standby.end();
    }

    /// Returns the path of the executable.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn path(&self) -> Result<&CStr, SandboxError> {
        self.path.as_deref().ok_or_else(|| {
            SandboxError::Refused(
                "sandbox intent cannot be enforced on this executor: it was given no launcher \
                 (the path of an exec-server executable)"
                    .to_owned(),
            )
        })
    }

    /// Returns what this machine can enforce. The first call probes the kernel and blocks.
    ///
    /// # Errors
    ///
    /// If there is no executable, or it cannot be run.
    pub fn host(&self, null: &OwnedFd) -> Result<&HostFeatures, SandboxError> {
        self.path()?;
        let found = self.host.get_or_init(|| {
            self.probe(null)
                .map_err(|error| format!("cannot run the sandbox launcher: {error}"))
        });
        found.as_ref().map_err(|why| {
            let message = format!("sandbox intent cannot be enforced on this executor: {why}");
            SandboxError::Refused(message)
        })
    }

    /// Starts a launcher that belongs to no command.
    ///
    /// # Errors
    ///
    /// If there is no executable, or it cannot be run.
    pub fn launch_alone(
        &self,
        null: BorrowedFd<'_>,
        pending_launch: &PendingLaunch,
    ) -> io::Result<(Pid, OwnedFd)> {
        let path = self.path.as_deref().ok_or(io::ErrorKind::NotFound)?;
        launch(&Launch {
            candidates: &[path],
            argv: &[c"exec-server", launcher::ARGUMENT],
            env: &[],
            cwd: c"/",
            stdin: null,
            stdout: null,
            stderr: null,
            controlling_terminal: false,
            // The tag separates the launcher from descendants of commands. A launcher that later runs a
            // command gets the tag of that command.
            limits: &[self.tag],
            groups: &[],
            extra: &pending_launch.descriptors(),
        })
        .map_err(|error| error.source)
    }

    /// Runs a launcher that reports what this machine can enforce.
    fn probe(&self, null: &OwnedFd) -> io::Result<HostFeatures> {
        let pending_launch = PendingLaunch::new(&LaunchOrder::Probe)?;
        let (pid, _pidfd) = self.launch_alone(null.as_fd(), &pending_launch)?;
        let PendingLaunch { ours, theirs, .. } = pending_launch;
        drop(theirs);
        let report = receive(&ours);
        // The launcher exits after the report.
        let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        match report? {
            Some(ReceivedReport {
                report: LaunchReport::Host(host),
                ..
            }) => Ok(host),
            _ => Err(io::Error::other("it does not answer")),
        }
    }
}

/// Returns what this machine can enforce, as a launcher reports it; without a path, this program is
/// the launcher.
///
/// # Errors
///
/// If there is no launcher or it cannot be run.
pub fn examine(path: Option<&Path>, tag: (Resource, u64)) -> io::Result<HostFeatures> {
    let launcher = Launcher::new(path, tag);
    let null: OwnedFd = File::options()
        .read(true)
        .write(true)
        .open("/dev/null")?
        .into();
    let host = launcher.host(&null).map_err(io::Error::other)?;
    Ok(host.clone())
}
