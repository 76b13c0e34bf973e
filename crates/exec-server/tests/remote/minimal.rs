//! Executors where a kernel, a filter of system calls or an image offers less than usual: what still
//! works, and what the program says is missing.

use std::path::Path;
use std::process::Stdio;

use exec_server::protocol::process::{StartParams, TerminateMode};
use exec_server::{CollectOptions, ExecBackend as _, ExecServerClient};
use exec_server_testkit::proc::TIMEOUT;
use rustix::process::Signal;
use tokio::process::Command;
use tokio::time::timeout;

use super::stage::{Deployment, RunningProgram, finished};
use super::{collect, sh};

/// Numbers of system calls, which are the same on all architectures since Linux 5.1.
const PIDFD_SEND_SIGNAL: u32 = 424;
const PIDFD_OPEN: u32 = 434;
const CLONE3: u32 = 435;
const CLOSE_RANGE: u32 = 436;
const OPENAT2: u32 = 437;
const PIDFD_GETFD: u32 = 438;
const LANDLOCK: [u32; 3] = [444, 445, 446];

/// Number of `clone`.
const CLONE: u32 = if cfg!(target_arch = "x86_64") {
    56
} else {
    220
};

/// Runs a program under a filter: its arguments are the filter in hexadecimal digits, and the command.
const FILTERED: &str = r"
import ctypes, os, sys
class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_char_p)]
filter = bytes.fromhex(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
program = Program(len(filter) // 8, filter)
# PR_SET_NO_NEW_PRIVS, then PR_SET_SECCOMP with SECCOMP_MODE_FILTER.
for call in (38, 1, 0, 0, 0), (22, 2, ctypes.byref(program), 0, 0):
    if libc.prctl(*call) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
os.execv(sys.argv[2], sys.argv[2:])
";

/// A filter of system calls.
#[derive(Debug, Clone, Copy)]
struct Filter<'a> {
    /// These do not exist.
    missing: &'a [u32],
    /// Whether `clone` refuses `CLONE_PIDFD`, as the emulator of QEMU 7.2.
    clone_refuses_pidfd: bool,
}

impl Filter<'_> {
    /// The instructions, in hexadecimal digits.
    fn text(self) -> String {
        // Codes of classic BPF.
        const LOAD: u16 = 0x20;
        const IF_EQUAL: u16 = 0x15;
        const IF_BITS: u16 = 0x45;
        const RETURN: u16 = 0x06;
        const ALLOW: u32 = 0x7fff_0000;
        const ERRNO: u32 = 0x0005_0000;
        const NOSYS: u32 = 38;
        const INVAL: u32 = 22;
        const CLONE_PIDFD: u32 = 0x1000;
        // (code, instructions to skip if not, operand)
        let mut program = vec![(LOAD, 0, 0)];
        for number in self.missing {
            program.extend([(IF_EQUAL, 1, *number), (RETURN, 0, ERRNO | NOSYS)]);
        }
        if self.clone_refuses_pidfd {
            // The lower half of the first argument.
            program.extend([
                (IF_EQUAL, 3, CLONE),
                (LOAD, 0, 16),
                (IF_BITS, 1, CLONE_PIDFD),
            ]);
            program.push((RETURN, 0, ERRNO | INVAL));
        }
        program.push((RETURN, 0, ALLOW));
        let bytes = program.into_iter().flat_map(|(code, not, operand)| {
            let [c0, c1] = u16::to_ne_bytes(code);
            let [k0, k1, k2, k3] = u32::to_ne_bytes(operand);
            [c0, c1, 0, not, k0, k1, k2, k3]
        });
        bytes.map(|byte| format!("{byte:02x}")).collect()
    }

    /// The same command under this filter.
    fn apply(self, command: &Command) -> Command {
        let filter = self.text();
        wrapped(command, &["/usr/bin/python3", "-c", FILTERED, &filter])
    }
}

/// A command whose program is started by another one.
fn wrapped(command: &Command, with: &[&str]) -> Command {
    let command = command.as_std();
    let mut wrapped = Command::new(with[0]);
    wrapped
        .args(&with[1..])
        .arg(command.get_program())
        .args(command.get_args())
        .env_clear()
        .stdin(Stdio::null())
        .kill_on_drop(true);
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            wrapped.env(name, value);
        }
    }
    if let Some(directory) = command.get_current_dir() {
        wrapped.current_dir(directory);
    }
    wrapped
}

/// An executor with its key in the environment, as agent services start it.
fn keyed(deployment: &Deployment) -> Command {
    let mut command = super::stage::program(deployment.directory.path());
    command
        .args(["exec-server", "--remote", &deployment.url()])
        .args(["--environment-id", "box"])
        .env("CODEX_API_KEY", deployment.token("executor"))
        .current_dir("/");
    command
}

/// What every executor must be able to do: output, input, a terminal, signals, and an end of everything.
async fn check_processes(client: &ExecServerClient) {
    let (output, code) = collect(client, "fds", "cd /proc/$$/fd && echo *; exit 7").await;
    let numbers: Vec<u32> = String::from_utf8_lossy(&output)
        .split_whitespace()
        .flat_map(str::parse)
        .collect();
    assert!(
        numbers.starts_with(&[0, 1, 2]) && numbers.len() <= 4,
        "{numbers:?}"
    );
    assert_eq!(code, 7);
    let terminal = StartParams {
        tty: true,
        ..sh("tty", "tty; exit 3")
    };
    let started = client.start(terminal).await.unwrap();
    let output = started.process.output(CollectOptions::default());
    let output = timeout(TIMEOUT, output).await.unwrap().unwrap();
    assert_eq!(output.exit.unwrap().exit_code, 3);
    // The daemon leaves the group and the session of its command.
    let script = "setsid sleep 1000 >/dev/null 2>&1 & echo $!; exec sleep 1000";
    let started = client.start(sh("tree", script)).await.unwrap();
    let process = started.process;
    let ended = process.terminate(TerminateMode::Force, true);
    timeout(TIMEOUT, ended).await.unwrap().unwrap();
}

#[tokio::test]
async fn executor_runs_without_the_newer_system_calls() {
    let missing = [
        &[
            PIDFD_SEND_SIGNAL,
            PIDFD_OPEN,
            CLONE3,
            CLOSE_RANGE,
            OPENAT2,
            PIDFD_GETFD,
        ],
        &LANDLOCK[..],
    ]
    .concat();
    let deployment = Deployment::new().await;
    let filter = Filter {
        missing: &missing,
        clone_refuses_pidfd: false,
    };
    let _running = RunningProgram::start(filter.apply(&keyed(&deployment))).await;
    check_processes(&deployment.connect("box").await).await;
}

#[tokio::test]
async fn executor_runs_where_clone_returns_no_pidfd() {
    let deployment = Deployment::new().await;
    let filter = Filter {
        missing: &[CLONE3],
        clone_refuses_pidfd: true,
    };
    let _running = RunningProgram::start(filter.apply(&keyed(&deployment))).await;
    check_processes(&deployment.connect("box").await).await;
}

#[tokio::test]
async fn start_without_any_pidfd_names_the_kernel_that_is_needed() {
    let deployment = Deployment::new().await;
    let filter = Filter {
        missing: &[CLONE3, PIDFD_OPEN],
        clone_refuses_pidfd: true,
    };
    let _running = RunningProgram::start(filter.apply(&keyed(&deployment))).await;
    let client = deployment.connect("box").await;
    let error = client.start(sh("p", "echo never")).await.err().unwrap();
    let text = format!("{error:#}");
    assert!(text.contains("needs Linux 5.4"), "{text}");
}

#[tokio::test]
async fn policies_hold_without_landlock() {
    let deployment = Deployment::new().await;
    let filter = Filter {
        missing: &LANDLOCK,
        clone_refuses_pidfd: false,
    };
    let _running = RunningProgram::start(filter.apply(&deployment.executor("box"))).await;
    let outside = deployment.path("outside");
    let script = format!(
        "echo inside; echo x > {} 2>/dev/null || echo denied",
        outside.display()
    );
    let words = [
        "run",
        "--sandbox",
        "read-only",
        "--",
        "/bin/sh",
        "-c",
        &script,
    ];
    let output = finished(deployment.harness("box", &words)).await;
    let text = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(text, "inside\ndenied\n", "{stderr}");
    assert!(!outside.exists());
}

/// An executor in a mount namespace that a shell script prepares.
fn prepared(command: &Command, script: &str) -> Command {
    let script = format!("{script} && exec \"$@\"");
    wrapped(
        command,
        &[
            "/usr/bin/unshare",
            "--mount",
            "--",
            "/bin/sh",
            "-c",
            &script,
            "sh",
        ],
    )
}

#[tokio::test]
async fn executor_runs_without_proc() {
    let deployment = Deployment::new().await;
    let command = prepared(&keyed(&deployment), "mount -t tmpfs none /proc");
    let running = RunningProgram::start(command).await;
    let client = deployment.connect("box").await;
    let script = "ls /proc; echo ${CODEX_API_KEY-none}; exit 7";
    let (output, code) = collect(&client, "p", script).await;
    assert_eq!((output.as_slice(), code), (&b"none\n"[..], 7));
    drop(client);
    assert_eq!(running.end(Signal::TERM).await, Some(0));
}

/// A root with this program, the libraries that it needs, and nothing else.
fn empty_root(root: &Path) {
    let program = env!("CARGO_BIN_EXE_exec-server");
    let listed = std::process::Command::new("ldd")
        .arg(program)
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let libraries = listed
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(Path::new);
    for library in libraries {
        let copy = root.join(library.strip_prefix("/").unwrap());
        std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
        std::fs::copy(library, copy).unwrap();
    }
    let copy = root.join("exec-server");
    std::fs::hard_link(program, &copy)
        .or_else(|_| std::fs::copy(program, &copy).map(drop))
        .unwrap();
}

/// Our executor in an empty root, which is read-only, after a shell script has prepared it.
fn in_empty_root(deployment: &Deployment, root: &Path, script: &str) -> Command {
    let root = root.display();
    let script = format!(
        "mount --bind {root} {root} && cd {root} && {script} && mount -o remount,bind,ro {root} && \
         exec unshare --root=. -- \"$@\""
    );
    let mut command = Command::new("/exec-server");
    let keyed = keyed(deployment);
    command.args(keyed.as_std().get_args());
    command.env("CODEX_API_KEY", deployment.token("executor"));
    wrapped(
        &command,
        &[
            "/usr/bin/unshare",
            "--mount",
            "--",
            "/bin/sh",
            "-c",
            &script,
            "sh",
        ],
    )
}

#[tokio::test]
async fn executor_runs_in_an_empty_read_only_root() {
    let deployment = Deployment::new().await;
    let root = tempfile::tempdir().unwrap();
    empty_root(root.path());
    std::fs::create_dir(root.path().join("dev")).unwrap();
    // A device of another file system stays writable when the root becomes read-only.
    let script = "mount -t tmpfs none dev && touch dev/null && mount --bind /dev/null dev/null";
    let command = in_empty_root(&deployment, root.path(), script);
    let _running = RunningProgram::start(command).await;
    let client = deployment.connect("box").await;
    let params = StartParams {
        process_id: "p".to_owned(),
        argv: ["/exec-server", "--version"].map(str::to_owned).to_vec(),
        ..StartParams::default()
    };
    let started = client.start(params).await.unwrap();
    let output = started.process.output(CollectOptions::default());
    let output = timeout(TIMEOUT, output).await.unwrap().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with("exec-server "), "{text}");
}

#[tokio::test]
async fn executor_without_dev_null_names_it() {
    let deployment = Deployment::new().await;
    let root = tempfile::tempdir().unwrap();
    empty_root(root.path());
    let output = finished(in_empty_root(&deployment, root.path(), "true")).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("cannot open /dev/null"), "{stderr}");
}
