//! Process start: from a `ProcessSpec` to a running, supervised process.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, SystemTime};

use exec_server_protocol::sandbox::Permissions;
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
    let system = |action| move |source| StartError::System { action, source };
    let of_sandbox = |error| StartError::of_sandbox(error, spec);
    let prepared = PreparedSpec::new(spec)?;
    let prepared_sandbox = match (&spec.sandbox, &spec.network) {
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
    };
    let is_confined = prepared_sandbox
        .as_ref()
        .is_some_and(|prepared_sandbox| !prepared_sandbox.is_open());
    let own_processes = prepared_sandbox
        .as_ref()
        .map_or(0, PreparedSandbox::own_processes);
    let applied = limits::prepare(&spec.limits, own_processes)?;
    let tag = TreeTag::fresh();
    let since = tree::clock();
    let mut rlimits = vec![(TAG_RESOURCE, tag.0)];
    if !is_confined {
        rlimits.extend(&applied.rlimits);
    }

    // The child's ends are closed when they go out of scope, after the launch.
    let (ends, stdin, stdout, stderr);
    match spec.stdio {
        Stdio::Pipes { stdin: piped } => {
            let (out_read, out_write) = pipe().map_err(system("make a pipe"))?;
            let (err_read, err_write) = pipe().map_err(system("make a pipe"))?;
            let (input, ours) = if piped {
                let (read, write) = pipe().map_err(system("make a pipe"))?;
                (Some(read), Some(write))
            } else {
                (None, None)
            };
            stdin = input;
            stdout = Some(out_write);
            stderr = Some(err_write);
            ends = ServerEnds::Pipes {
                stdin: ours,
                stdout: out_read,
                stderr: err_read,
            };
        }
        Stdio::Terminal(size) => {
            let (master, child) = terminal::open(size).map_err(system("open a terminal"))?;
            stdin = Some(high(child).map_err(system("open a terminal"))?);
            stdout = None;
            stderr = None;
            ends = ServerEnds::Terminal(high(master).map_err(system("open a terminal"))?);
        }
    }
    let input = stdin.as_ref().map_or(executor.null(), |fd| fd.as_fd());
    let groups: Vec<_> = applied
        .groups
        .iter()
        .map(|group| group.procs.as_fd())
        .collect();
    let terminal = matches!(ends, ServerEnds::Terminal(_));
    let strings = |texts: &'_ [CString]| -> Vec<_> { texts.to_vec() };
    // In a sandbox, the command is sent to the launcher in a message; the arguments and the
    // environment of the launcher do not contain it.
    let pending_launch = match &prepared_sandbox {
        Some(prepared_sandbox) if is_confined => {
            let program = Program {
                candidates: &prepared.candidates,
                argv: &prepared.argv,
                env: &prepared.env,
                cwd: &prepared.cwd,
            };
            let pending_launch =
                PendingLaunch::run(prepared_sandbox, &program, &applied.rlimits, terminal);
            Some(pending_launch.map_err(system("prepare the sandbox launcher"))?)
        }
        _ => None,
    };
    let (candidates, argv, env, cwd) = match &pending_launch {
        Some(_) => (
            vec![executor.launcher().path().map_err(of_sandbox)?.to_owned()],
            strings(&[c"exec-server".to_owned(), launcher::ARGUMENT.to_owned()]),
            Vec::new(),
            c"/",
        ),
        None => (
            strings(&prepared.candidates),
            strings(&prepared.argv),
            strings(&prepared.env),
            prepared.cwd.as_c_str(),
        ),
    };
    let mut connecting = prepared_sandbox
        .as_ref()
        .filter(|prepared_sandbox| prepared_sandbox.connects())
        .map(|prepared_sandbox| ConnectingProcess::announce(prepared_sandbox.has_namespaces()));
    let own_session = prepared_sandbox
        .as_ref()
        .is_some_and(PreparedSandbox::has_namespaces);
    let extra = pending_launch.as_ref().map(PendingLaunch::descriptors);
    let (pid, pidfd) = executor
        .register(|| {
            let stdout = stdout.as_ref().map_or(input, |fd| fd.as_fd());
            let stderr = stderr.as_ref().map_or(input, |fd| fd.as_fd());
            let controlling_terminal = terminal && !own_session;
            if let Some(pending_launch) = &pending_launch {
                let request = sandbox::ForkRequest {
                    streams: [input, stdout, stderr],
                    pending_launch,
                    limits: &rlimits,
                    groups: &groups,
                    terminal: controlling_terminal,
                };
                // If forking from the standby fails, fall through: exec reports a more precise
                // error.
                if let Ok(forked) = executor.launcher().fork(executor.null(), &request) {
                    return Ok(forked);
                }
            }
            launch(&Launch {
                candidates: &pointers(&candidates),
                argv: &pointers(&argv),
                env: &pointers(&env),
                cwd,
                stdin: input,
                stdout,
                stderr,
                controlling_terminal,
                limits: &rlimits,
                groups: &groups,
                extra: extra.as_ref().map_or(&[], |extra| extra.as_slice()),
            })
        })
        .map_err(|error| explain(error, spec, pending_launch.is_some()))?;
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
            let launched = pending_launch.wait().map_err(of_sandbox)?;
            (
                launched.leader,
                launched.listeners,
                Some(launched.order_file),
            )
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
    let readable = |fd: OwnedFd, interest| -> io::Result<Arc<AsyncFd<OwnedFd>>> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Arc::new(poll::register(fd, interest)?))
    };
    let mut sources = Vec::with_capacity(2);
    let mut master = None;
    let stdin = match ends {
        ServerEnds::Pipes {
            stdin,
            stdout,
            stderr,
        } => {
            for (fd, stream) in [
                (stdout, OutputStream::Stdout),
                (stderr, OutputStream::Stderr),
            ] {
                sources.push(OutputSource::new(readable(fd, Interest::READABLE)?, stream));
            }
            let stdin = stdin
                .map(|fd| readable(fd, Interest::WRITABLE))
                .transpose()?;
            StdinQueue::new(stdin, false)
        }
        ServerEnds::Terminal(fd) => {
            let fd = readable(fd, Interest::READABLE | Interest::WRITABLE)?;
            sources.push(OutputSource::new(Arc::clone(&fd), OutputStream::Pty));
            master = Some(Arc::clone(&fd));
            StdinQueue::new(Some(fd), true)
        }
    };
    let (inside, enforcement, facts, placeholders, order_file, connecting) = match sandbox {
        Some(SandboxState {
            prepared_sandbox,
            inside,
            order_file,
            connecting,
        }) => {
            let PreparedSandbox {
                enforcement,
                facts,
                placeholders,
                ..
            } = prepared_sandbox;
            let enforcement = Some(enforcement);
            (
                inside,
                enforcement,
                facts,
                placeholders,
                order_file,
                connecting,
            )
        }
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
        SandboxGuard {
            facts,
            placeholders,
            order_file,
            _connecting: connecting,
        },
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
