//! Process start: from a `ProcessSpec` to a running, supervised process.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, SystemTime};

use exec_server_protocol::sandbox::{EnforcementReport, Permissions};
use exec_server_sandbox::{
    self as sandbox, OrderFile, PendingLaunch, PreparedSandbox, Program, SandboxedChild, launcher,
};
use exec_server_sync::Mutex;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use super::stdin::StdinQueue;
use super::supervise::{OutputSource, SandboxGuard, Supervisor};
use super::{
    LastHandle, OutputState, Process, ProcessLife, ProcessListeners, ProcessShared,
    SupervisorRequests, terminal,
};
use crate::executor::{Executor, ProcessSlot};
use crate::limits::{self, ChildLimits};
use crate::local_clients::ConnectingProcess;
use crate::log::{Log, OutputStream, Retention};
use crate::spec::{PreparedSpec, ProcessSpec, StartError, Stdio, Timeout};
use crate::tree::{self, Leader, TAG_RESOURCE, TreeTag};
use exec_server_sys::launch::{Launch, SpawnError, SpawnStep, launch};
use exec_server_sys::poll;
use exec_server_sys::rlimit::Resource;

/// A running child process and everything that its supervisor needs.
///
/// The launch creates it; a process that another server handed over would be represented the same
/// way.
struct RunningChild {
    child: OwnedChild,
    leader: Leader,
    ends: ServerEnds,
    applied: ChildLimits,
    sandbox: Option<SandboxState>,
    listeners: Option<ProcessListeners>,
}

/// Additional state of a sandboxed process.
struct SandboxState {
    prepared_sandbox: PreparedSandbox,
    inside: Option<SandboxedChild>,
    order_file: Option<OrderFile>,
    connecting: Option<ConnectingProcess>,
}

/// A child process that is killed and reaped on drop, unless it was adopted.
struct OwnedChild {
    executor: Executor,
    pid: Pid,
    /// `None` once adopted.
    pidfd: Option<OwnedFd>,
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        if self.pidfd.take().is_some() {
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
            // The process is dying, so the wait is short, and this runs on a blocking thread.
            while matches!(self.executor.reap(self.pid), Ok(None)) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// The server's ends of a child's standard streams.
enum ServerEnds {
    Pipes {
        stdin: Option<OwnedFd>,
        stdout: OwnedFd,
        stderr: OwnedFd,
    },
    Terminal(OwnedFd),
}

pub(crate) async fn start(
    executor: &Executor,
    slot: ProcessSlot,
    spec: ProcessSpec,
) -> Result<Process, StartError> {
    let retention = spec.retention.unwrap_or(executor.limits().retention);
    let timeout = spec.timeout;
    let list_descendants = spec.list_descendants;
    let inner = executor.clone();
    let running = super::blocking(move || launch_child(&inner, &spec)).await?;
    let ends = (timeout, list_descendants);
    adopt(executor, slot, running, retention, ends).map_err(|source| StartError::System {
        action: "watch the new process",
        source,
    })
}

/// Starts the child; blocks until it has executed its program.
fn launch_child(executor: &Executor, spec: &ProcessSpec) -> Result<RunningChild, StartError> {
    let prepared = PreparedSpec::new(spec)?;
    let prepared_sandbox = prepare_sandbox(executor, spec)?;
    let confining = prepared_sandbox
        .as_ref()
        .filter(|prepared_sandbox| !prepared_sandbox.is_open());
    let own_processes = prepared_sandbox
        .as_ref()
        .map_or(0, PreparedSandbox::own_processes);
    let applied = limits::prepare(&spec.limits, own_processes)?;
    let tag = TreeTag::fresh();
    let since = tree::clock();
    let mut rlimits = vec![(TAG_RESOURCE, tag.0)];
    if confining.is_none() {
        rlimits.extend(&applied.rlimits);
    }
    // The child's ends are closed when they go out of scope, after the launch.
    let (ends, streams) = ChildStreams::open(spec.stdio)?;
    let terminal = matches!(ends, ServerEnds::Terminal(_));
    let pending_launch = match confining {
        Some(sandbox) => Some(order_launcher(sandbox, &prepared, &applied, terminal)?),
        None => None,
    };
    let mut connecting = prepared_sandbox
        .as_ref()
        .filter(|prepared_sandbox| prepared_sandbox.connects())
        .map(|prepared_sandbox| ConnectingProcess::announce(prepared_sandbox.has_namespaces()));
    let own_session = prepared_sandbox
        .as_ref()
        .is_some_and(PreparedSandbox::has_namespaces);
    let fork = ChildFork {
        prepared: &prepared,
        pending_launch: pending_launch.as_ref(),
        streams: &streams,
        controlling_terminal: terminal && !own_session,
        rlimits: &rlimits,
        applied: &applied,
    };
    let (pid, pidfd) = fork.run(executor, spec)?;
    drop(streams);
    if let Some(connecting) = &mut connecting {
        connecting.started(pid);
    }
    let registered = Leader::new(pid, tag, since);
    let child = OwnedChild {
        executor: executor.clone(),
        pid,
        pidfd: Some(pidfd),
    };
    let (leader, listeners, order_file) = match pending_launch {
        Some(pending_launch) => {
            let ready = pending_launch
                .wait()
                .map_err(|error| StartError::of_sandbox(error, spec))?;
            (ready.leader, ready.listeners, Some(ready.order_file))
        }
        None => (None, Vec::new(), None),
    };
    let listeners = match &spec.network {
        None => None,
        Some(network) => Some(ProcessListeners::new(network, listeners)?),
    };
    let sandbox = prepared_sandbox.map(|prepared_sandbox| SandboxState {
        inside: leader
            .filter(|_| own_session)
            .and_then(|pid| sandbox::inside(pid, |pid| tree::is_member(pid, tag))),
        order_file: order_file.filter(|_| own_session),
        prepared_sandbox,
        connecting,
    });
    Ok(RunningChild {
        child,
        leader: registered,
        ends,
        applied,
        sandbox,
        listeners,
    })
}

/// Resolves and plans the policy of a spec, if it has one.
fn prepare_sandbox(
    executor: &Executor,
    spec: &ProcessSpec,
) -> Result<Option<PreparedSandbox>, StartError> {
    let of_sandbox = |error| StartError::of_sandbox(error, spec);
    Ok(match (&spec.sandbox, &spec.network) {
        (Some(sandbox), _) if sandbox.permissions != Permissions::Disabled => {
            let host = executor.sandbox_host()?;
            let hidden = &executor.config().hidden;
            let network = spec.network.as_ref();
            let prepared = sandbox::prepare(sandbox, &spec.env, network, host, hidden);
            Some(prepared.map_err(of_sandbox)?)
        }
        (_, Some(network)) => {
            let host = executor.sandbox_host()?;
            Some(sandbox::prepare_network(network, host).map_err(of_sandbox)?)
        }
        (Some(_), None) => Some(PreparedSandbox::open()),
        (None, None) => None,
    })
}

/// Prepares the message for the launcher: the arguments and the environment of the launcher do not
/// contain the command.
fn order_launcher(
    sandbox: &PreparedSandbox,
    prepared: &PreparedSpec,
    applied: &ChildLimits,
    terminal: bool,
) -> Result<PendingLaunch, StartError> {
    let program = Program {
        candidates: &prepared.candidates,
        argv: &prepared.argv,
        env: &prepared.env,
        cwd: &prepared.cwd,
    };
    PendingLaunch::run(sandbox, &program, &applied.rlimits, terminal)
        .map_err(system("prepare the sandbox launcher"))
}

fn system(action: &'static str) -> impl Fn(io::Error) -> StartError {
    move |source| StartError::System { action, source }
}

/// The child's ends of its standard streams; `None` is the null device, and for output the same as
/// the input.
struct ChildStreams {
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

impl ChildStreams {
    fn open(stdio: Stdio) -> Result<(ServerEnds, Self), StartError> {
        match stdio {
            Stdio::Pipes { stdin: piped } => {
                let (stdout, child_stdout) = pipe().map_err(system("make a pipe"))?;
                let (stderr, child_stderr) = pipe().map_err(system("make a pipe"))?;
                let (child_stdin, stdin) = if piped {
                    let (read, write) = pipe().map_err(system("make a pipe"))?;
                    (Some(read), Some(write))
                } else {
                    (None, None)
                };
                let child = Self {
                    stdin: child_stdin,
                    stdout: Some(child_stdout),
                    stderr: Some(child_stderr),
                };
                let ends = ServerEnds::Pipes {
                    stdin,
                    stdout,
                    stderr,
                };
                Ok((ends, child))
            }
            Stdio::Terminal(size) => {
                let open = || -> io::Result<(OwnedFd, OwnedFd)> {
                    let (master, child) = terminal::open(size)?;
                    Ok((high(master)?, high(child)?))
                };
                let (master, child) = open().map_err(system("open a terminal"))?;
                let child = Self {
                    stdin: Some(child),
                    stdout: None,
                    stderr: None,
                };
                Ok((ServerEnds::Terminal(master), child))
            }
        }
    }
}

/// What forking the child, or the launcher of a confined child, needs.
struct ChildFork<'a> {
    prepared: &'a PreparedSpec,
    pending_launch: Option<&'a PendingLaunch>,
    streams: &'a ChildStreams,
    controlling_terminal: bool,
    rlimits: &'a [(Resource, u64)],
    applied: &'a ChildLimits,
}

impl ChildFork<'_> {
    fn run(&self, executor: &Executor, spec: &ProcessSpec) -> Result<(Pid, OwnedFd), StartError> {
        let launcher;
        let (candidates, argv, env, cwd) = match self.pending_launch {
            Some(_) => {
                let path = executor.launcher().path();
                launcher = path.map_err(|error| StartError::of_sandbox(error, spec))?;
                let argv = vec![c"exec-server", launcher::ARGUMENT];
                (vec![launcher], argv, Vec::new(), c"/")
            }
            None => (
                pointers(&self.prepared.candidates),
                pointers(&self.prepared.argv),
                pointers(&self.prepared.env),
                self.prepared.cwd.as_c_str(),
            ),
        };
        let streams = self.streams;
        let input = streams
            .stdin
            .as_ref()
            .map_or(executor.null(), |fd| fd.as_fd());
        let stdout = streams.stdout.as_ref().map_or(input, |fd| fd.as_fd());
        let stderr = streams.stderr.as_ref().map_or(input, |fd| fd.as_fd());
        let groups = self.applied.groups.iter();
        let groups: Vec<_> = groups.map(|group| group.procs.as_fd()).collect();
        let extra = self.pending_launch.map(PendingLaunch::descriptors);
        let forked = executor.register(|| {
            if let Some(pending_launch) = self.pending_launch {
                let request = sandbox::ForkRequest {
                    streams: [input, stdout, stderr],
                    pending_launch,
                    limits: self.rlimits,
                    groups: &groups,
                    terminal: self.controlling_terminal,
                };
                // If forking from the standby fails, fall through: exec reports a more precise
                // error.
                if let Ok(forked) = executor.launcher().fork(executor.null(), &request) {
                    return Ok(forked);
                }
            }
            launch(&Launch {
                candidates: &candidates,
                argv: &argv,
                env: &env,
                cwd,
                stdin: input,
                stdout,
                stderr,
                controlling_terminal: self.controlling_terminal,
                limits: self.rlimits,
                groups: &groups,
                extra: extra.as_ref().map_or(&[], |extra| extra.as_slice()),
            })
        });
        forked.map_err(|error| explain(error, spec, self.pending_launch.is_some()))
    }
}

fn pointers(texts: &[CString]) -> Vec<&CStr> {
    texts.iter().map(CString::as_c_str).collect()
}

fn explain(
    SpawnError { step, source }: SpawnError,
    spec: &ProcessSpec,
    launcher: bool,
) -> StartError {
    match step {
        SpawnStep::Execute | SpawnStep::Directory if launcher => StartError::System {
            action: "execute the sandbox launcher",
            source,
        },
        SpawnStep::Directory => StartError::WorkingDirectory {
            path: spec.cwd.clone(),
            source,
        },
        SpawnStep::Execute => StartError::Program {
            program: spec.argv.first().cloned().unwrap_or_default(),
            source,
        },
        SpawnStep::Clone => StartError::System {
            action: "start a process",
            source,
        },
        SpawnStep::Terminal => StartError::System {
            action: "set the controlling terminal",
            source,
        },
        SpawnStep::Descriptors => StartError::System {
            action: "set up standard streams",
            source,
        },
        SpawnStep::Limit(TAG_RESOURCE) => StartError::System {
            action: "tag the process",
            source,
        },
        SpawnStep::Limit(_) => StartError::System {
            action: "set a resource limit",
            source,
        },
        SpawnStep::Group => StartError::System {
            action: "join a control group",
            source,
        },
    }
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    Ok((high(read)?, high(write)?))
}

/// Moves a descriptor above 0, 1 and 2, which the child's dup2 overwrites.
fn high(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() > 2 {
        return Ok(fd);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?)
}

/// Creates the handle and the supervisor of a running child.
fn adopt(
    executor: &Executor,
    slot: ProcessSlot,
    running: RunningChild,
    retention: Retention,
    (timeout, list_descendants): (Option<Timeout>, bool),
) -> io::Result<Process> {
    let RunningChild {
        mut child,
        leader,
        ends,
        applied,
        sandbox,
        listeners,
    } = running;
    let pid = child.pid;
    let ServerStreams {
        sources,
        stdin,
        master,
    } = ServerStreams::register(ends)?;
    let (inside, enforcement, guard) = match sandbox {
        Some(sandbox) => sandbox.into_parts(),
        None => Default::default(),
    };
    let (inside, inside_pidfd) = inside
        .map(|SandboxedChild { pid, pidfd }| (pid, pidfd))
        .unzip();
    let shared = Arc::new(ProcessShared {
        pid,
        inside,
        inside_pidfd: Mutex::new(inside_pidfd),
        enforcement,
        listeners: Mutex::new(listeners),
        leader,
        started_at: SystemTime::now(),
        output: Mutex::new(OutputState {
            log: Log::metered(retention, executor.meter()),
            follower: None,
        }),
        changed: Notify::new(),
        life: Mutex::new(ProcessLife::Running),
        stdin: Mutex::new(stdin),
        input: AtomicU64::new(0),
        is_paced: AtomicBool::new(false),
        stdin_room: Notify::new(),
        has_terminal: master.is_some(),
        terminal: Mutex::new(master),
        wake: Notify::new(),
        orders: Mutex::new(SupervisorRequests::default()),
        discarded: AtomicU64::new(0),
        groups: Mutex::new(applied.groups),
        list_descendants,
    });
    let pidfd = child.pidfd.take().ok_or(io::ErrorKind::NotFound)?;
    let pidfd = poll::register(pidfd, Interest::READABLE)?;
    let supervisor = Supervisor::new(
        Arc::clone(&shared),
        executor.clone(),
        slot,
        pidfd,
        sources,
        timeout,
        guard,
    );
    // The task holds the process state: it ends when the process has ended, or when the last handle
    // is dropped.
    tokio::spawn(supervisor.run());
    let owner = Arc::new(LastHandle(Arc::clone(&shared)));
    Ok(Process {
        shared,
        _owner: owner,
    })
}

impl SandboxState {
    /// The process inside, what is enforced, and what lasts as long as the process.
    fn into_parts(
        self,
    ) -> (
        Option<SandboxedChild>,
        Option<EnforcementReport>,
        SandboxGuard,
    ) {
        let PreparedSandbox {
            enforcement,
            facts,
            placeholders,
            ..
        } = self.prepared_sandbox;
        let guard = SandboxGuard {
            facts,
            placeholders,
            order_file: self.order_file,
            _connecting: self.connecting,
        };
        (self.inside, Some(enforcement), guard)
    }
}

/// The server's ends, registered with the runtime.
struct ServerStreams {
    sources: Vec<OutputSource>,
    stdin: StdinQueue,
    /// The terminal, if there is one.
    master: Option<Arc<AsyncFd<OwnedFd>>>,
}

impl ServerStreams {
    fn register(ends: ServerEnds) -> io::Result<Self> {
        let readable = |fd: OwnedFd, interest| -> io::Result<Arc<AsyncFd<OwnedFd>>> {
            rustix::io::ioctl_fionbio(&fd, true)?;
            Ok(Arc::new(poll::register(fd, interest)?))
        };
        match ends {
            ServerEnds::Pipes {
                stdin,
                stdout,
                stderr,
            } => {
                let stdout = readable(stdout, Interest::READABLE)?;
                let stderr = readable(stderr, Interest::READABLE)?;
                let stdin = stdin
                    .map(|fd| readable(fd, Interest::WRITABLE))
                    .transpose()?;
                Ok(Self {
                    sources: vec![
                        OutputSource::new(stdout, OutputStream::Stdout),
                        OutputSource::new(stderr, OutputStream::Stderr),
                    ],
                    stdin: StdinQueue::new(stdin, false),
                    master: None,
                })
            }
            ServerEnds::Terminal(fd) => {
                let fd = readable(fd, Interest::READABLE | Interest::WRITABLE)?;
                Ok(Self {
                    sources: vec![OutputSource::new(Arc::clone(&fd), OutputStream::Pty)],
                    stdin: StdinQueue::new(Some(Arc::clone(&fd)), true),
                    master: Some(fd),
                })
            }
        }
    }
}
