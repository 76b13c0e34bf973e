//! Attacks from inside a sandbox: each is refused, and nothing outside has changed.

use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::{SandboxFixture, ServerUser, entry, for_both, read_only};

for_both! {
    attack_writing_outside_the_workspace_fails,
    attack_reading_denied_files_fails,
    attack_on_processes_outside_fails,
    attack_with_mounts_and_namespaces_fails,
    attack_with_privileged_system_calls_fails,
    attack_injecting_terminal_input_fails,
    attack_reading_secrets_of_the_server_fails,
    symlinks_planted_in_the_workspace_do_not_widen_the_policy,
    resource_limits_stop_exhaustion_from_inside,
    attack_on_the_init_process_of_the_sandbox_fails,
    attack_on_the_server_without_a_network_fails,
    attack_by_closing_directories_fails,
}

/// A process outside the sandbox, with the server's user; killed when this value is dropped.
struct OutsideProcess(Child);

impl OutsideProcess {
    fn new(fixture: &SandboxFixture) -> Self {
        let mut command = if fixture.user == ServerUser::Ordinary && crate::is_root() {
            let mut command = Command::new("setpriv");
            let id = crate::NOBODY;
            command
                .arg(format!("--reuid={id}"))
                .arg(format!("--regid={id}"))
                .arg("--clear-groups");
            command.arg("sleep");
            command
        } else {
            Command::new("sleep")
        };
        let child = command
            .arg("600")
            .env("VICTIM", "secret")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    fn lives(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for OutsideProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn attack_writing_outside_the_workspace_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let file = fixture.write("other/file", "o");
    let (other, work) = (fixture.path("other"), fixture.path("work"));
    let script = format!(
        r"
other, work = '{}', '{}'
W = os.O_WRONLY | os.O_CREAT
for name, path in [('plain', other + '/file'), ('new', other + '/new'), ('dots', work + '/../other/file'),
    ('root', '/proc/self/root' + other + '/file'), ('cwd', '/proc/self/cwd/../other/file'),
    ('thread', '/proc/thread-self/root' + other + '/file'), ('first', '/proc/1/root' + other + '/file'),
    ('first cwd', '/proc/1/cwd' + other + '/file'), ('etc', '/etc/exec-server-test'), ('dev', '/dev/exec-server-test'),
    ('sysctl', '/proc/sys/kernel/core_pattern'), ('sysrq', '/proc/sysrq-trigger'),
    ('uevent', '/sys/kernel/uevent_helper'), ('cgroup', '/sys/fs/cgroup/cgroup.procs')]:
    refused(name, lambda: os.open(path, W))
os.symlink(other + '/file', work + '/link')
refused('link', lambda: os.open(work + '/link', os.O_WRONLY))
refused('hard link', lambda: (os.link(other + '/file', work + '/hard'), os.open(work + '/hard', os.O_WRONLY))[1])
refused('rename in', lambda: os.rename(other + '/file', work + '/stolen'))
refused('rename out', lambda: (open(work + '/x', 'w').close(), os.rename(work + '/x', other + '/x'))[1])
refused('unlink', lambda: os.unlink(other + '/file'))
refused('chmod', lambda: os.chmod(other + '/file', 0o777))
refused('times', lambda: os.utime(other + '/file'))
refused('truncate', lambda: os.truncate(other + '/file', 0))
fd = os.open(other + '/file', os.O_RDONLY)
refused('again', lambda: os.open('/proc/self/fd/%d' % fd, os.O_RDWR))
refused('fchmod', lambda: os.fchmod(fd, 0o777))
refused('device', lambda: os.mknod(work + '/disk', 0o060600, os.makedev(8, 0)))
",
        other.display(),
        work.display()
    );
    let before = std::fs::metadata(&file).unwrap();
    let outcome = fixture.python(&fixture.workspace(), &script).await;
    assert_eq!(outcome.stdout.lines().count(), 25, "{outcome:?}");
    for line in outcome.stdout.lines() {
        let refusal = ["EROFS", "EACCES", "EPERM", "EXDEV", "ENOENT"]
            .iter()
            .any(|errno| line.ends_with(errno));
        assert!(refusal, "{line}");
    }
    let after = std::fs::metadata(&file).unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "o");
    assert_eq!(
        (before.permissions(), before.modified().unwrap()),
        (after.permissions(), after.modified().unwrap())
    );
    assert_eq!(std::fs::read_dir(&other).unwrap().count(), 1);
    assert!(!std::path::Path::new("/etc/exec-server-test").exists());
}

async fn attack_reading_denied_files_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/vault");
    let secret = fixture.write("work/vault/secret", "SECRET");
    let sandbox = fixture.workspace_and(&[entry(&fixture.path("work/vault"), "deny")]);
    let script = format!(
        r"
secret = '{}'
work = os.path.dirname(os.path.dirname(secret))
os.symlink(secret, work + '/link')
for name, path in [('path', secret), ('link', work + '/link'), ('root', '/proc/self/root' + secret),
    ('cwd', '/proc/self/cwd/vault/secret'), ('first', '/proc/1/root' + secret)]:
    refused(name, lambda: open(path).read())
refused('list', lambda: os.listdir(work + '/vault'))
refused('hard link', lambda: os.link(secret, work + '/hard'))
refused('move', lambda: os.rename(work + '/vault', work + '/open'))
refused('chmod', lambda: os.chmod(work + '/vault', 0o777))
class H(ctypes.Structure): _fields_ = [('n', ctypes.c_uint), ('t', ctypes.c_int), ('d', ctypes.c_ubyte * 128)]
h = H(128); m = ctypes.c_int()
call(libc.name_to_handle_at, -100, b'/', ctypes.byref(h), ctypes.byref(m), 0)
refused('handle', lambda: call(libc.open_by_handle_at, os.open('/', os.O_RDONLY), ctypes.byref(h), 0))
import glob, stat
for fd in glob.glob('/proc/[0-9]*/fd/*') + glob.glob('/proc/[0-9]*/map_files/*'):
    try:
        if stat.S_ISREG(os.stat(fd).st_mode) and 'SECRET' in open(fd, errors='replace').read(64): print('found in', fd)
    except OSError: pass
disks = [d for d in os.listdir('/dev') if d.startswith(('sd', 'vd', 'nvme', 'mem', 'kmsg', 'dm-', 'loop'))]
print('disks', 'EPERM' if not disks else disks)
",
        secret.display()
    );
    let outcome = fixture.python(&sandbox, &script).await;
    assert_eq!(outcome.stdout.lines().count(), 11, "{outcome:?}");
    for line in outcome.stdout.lines() {
        assert!(!line.contains("SECRET") && !line.contains("OK"), "{line}");
        assert!(
            ["EACCES", "EPERM", "ENOENT", "EBUSY", "EROFS", "EXDEV"]
                .iter()
                .any(|e| line.ends_with(e)),
            "{line}"
        );
    }
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "SECRET");
}

async fn attack_on_processes_outside_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let mut outside = OutsideProcess::new(&fixture);
    let pid = outside.0.id();
    let server = fixture.server.server_pid().await;
    let script = format!(
        r"
import signal
for pid in [{pid}, {server}, {}]:
    refused('signal', lambda: os.kill(pid, signal.SIGKILL))
    refused('group', lambda: os.killpg(pid, signal.SIGKILL))
    refused('ptrace', lambda: call(libc.ptrace, 16, pid, 0, 0))
    for name in ['mem', 'environ', 'fd', 'root', 'cwd', 'maps', 'status']:
        refused(name, lambda: os.open('/proc/%d/%s' % (pid, name), os.O_RDONLY))
    refused('pidfd', lambda: os.pidfd_open(pid))
refused('all', lambda: os.kill(-1, 0))
refused('vm', lambda: call(libc.process_vm_readv, {pid}, 0, 0, 0, 0, 0))
# A sibling in the same sandbox cannot be traced either.
child = os.fork()
if child == 0:
    import time; time.sleep(60); os._exit(0)
refused('sibling', lambda: call(libc.ptrace, 16, child, 0, 0))
os.kill(child, 9)
print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 6 and 'few ESRCH')
",
        fixture.server.guardian_pid()
    );
    let outcome = fixture.python(&read_only(), &script).await;
    assert_eq!(outcome.stdout.lines().count(), 37, "{outcome:?}");
    for line in outcome.stdout.lines() {
        assert!(
            ["ESRCH", "ENOENT", "EPERM", "EACCES"]
                .iter()
                .any(|e| line.ends_with(e)),
            "{line}"
        );
    }
    assert!(outside.lives());
    assert_eq!(fixture.sh(&read_only(), "exit 4").await.code, 4);
}

async fn attack_with_mounts_and_namespaces_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let work = fixture.path("work");
    let script = format!(
        r"
work = b'{}'
refused('bind', lambda: call(libc.mount, b'/', work, None, 4096, None))
refused('remount', lambda: call(libc.mount, None, b'/', None, 32 | 4096, None))
refused('tmpfs', lambda: call(libc.mount, b'none', work, b'tmpfs', 0, None))
refused('umount', lambda: call(libc.umount2, work, 2))
refused('umount root', lambda: call(libc.umount2, b'/', 2))
refused('pivot', lambda: call(libc.syscall, {{'x86_64': 155}}.get(os.uname().machine, 41), work, work))
refused('chroot', lambda: os.chroot('/'))
for name, number in [('open_tree', 428), ('move_mount', 429), ('fsopen', 430), ('fsconfig', 431),
    ('fsmount', 432), ('fspick', 433), ('mount_setattr', 442)]:
    refused(name, lambda: call(libc.syscall, number, -100, b'/', 0, 0, 0))
for name, flag in [('user', 0x10000000), ('mount', 0x20000), ('pid', 0x20000000), ('net', 0x40000000),
    ('user+mount', 0x10020000)]:
    refused(name, lambda: call(libc.unshare, flag))
refused('setns', lambda: call(libc.setns, os.open('/proc/self/ns/user', os.O_RDONLY), 0))
refused('clone', lambda: call(libc.syscall, {{'x86_64': 56}}.get(os.uname().machine, 220), 0x10000000 | 17, 0, 0, 0, 0))
refused('clone3', lambda: call(libc.syscall, 435, (ctypes.c_uint64 * 11)(0x10000000), 88))
for name in ['setuid', 'setgid']:
    refused(name, lambda: getattr(os, name)(1))
",
        work.display()
    );
    let outcome = fixture.python(&fixture.workspace(), &script).await;
    assert_eq!(outcome.stdout.lines().count(), 24, "{outcome:?}");
    for line in outcome.stdout.lines() {
        assert!(
            ["EPERM", "ENOSYS", "EINVAL"]
                .iter()
                .any(|e| line.ends_with(e)),
            "{line}"
        );
        assert!(
            !line.ends_with("EINVAL") || line.starts_with("set"),
            "{line}"
        );
    }
}

async fn attack_with_privileged_system_calls_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let script = r"
for name, number in [('io_uring_setup', 425), ('io_uring_enter', 426), ('io_uring_register', 427), ('pidfd_getfd', 438)]:
    refused(name, lambda: call(libc.syscall, number, 8, 0, 0, 0, 0, 0))
x86 = os.uname().machine == 'x86_64'
for name, number in [('bpf', 321 if x86 else 280), ('perf', 298 if x86 else 241), ('userfaultfd', 323 if x86 else 282),
    ('keyctl', 250 if x86 else 219), ('add_key', 248 if x86 else 217), ('init_module', 175 if x86 else 105),
    ('kexec', 246 if x86 else 104), ('reboot', 169 if x86 else 142), ('syslog', 103 if x86 else 116)]:
    refused(name, lambda: call(libc.syscall, number, 0, 0, 0, 0, 0))
if x86: refused('x32', lambda: call(libc.syscall, 0x40000000 + 41, 2, 1, 0))
else: print('x32 ENOSYS')
";
    let outcome = fixture.python(&read_only(), script).await;
    assert_eq!(outcome.stdout.lines().count(), 14, "{outcome:?}");
    for line in outcome.stdout.lines() {
        assert!(line.ends_with("EPERM") || line == "x32 ENOSYS", "{line}");
    }
}

async fn attack_injecting_terminal_input_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let script = format!(
        "{}\n{}",
        crate::PRELUDE,
        r"
for n in (0x5412, 0x5412 | 1 << 32, 0x541c):
    refused('ioctl', lambda: call(libc.ioctl, 0, ctypes.c_ulong(n), b'x'))
refused('others', lambda: [os.open('/dev/pts/' + n, os.O_RDWR) for n in os.listdir('/dev/pts') if n.isdigit() and '/dev/pts/' + n != os.ttyname(0)] or (0, 'EPERM'))
"
    );
    let start = fixture
        .start_of(&read_only(), &["python3", "-c", &script])
        .tty();
    let seen = fixture.client.run(start).await;
    assert_eq!(
        seen.text("pty"),
        "ioctl EPERM\r\nioctl EPERM\r\nioctl EPERM\r\nothers EPERM\r\n"
    );
}

async fn attack_reading_secrets_of_the_server_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let outcome = fixture
        .sh(&read_only(), "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; echo; cat /proc/1/status | grep -c Name")
        .await;
    assert!(
        !outcome.stdout.contains("only for the server"),
        "{outcome:?}"
    );
    assert!(!outcome.stdout.contains("--listen"), "{outcome:?}");
    // The sandbox policy itself is not readable either.
    let secret = fixture.write("other/hidden-name", "x");
    let sandbox = fixture.workspace_and(&[entry(&secret, "deny")]);
    let outcome = fixture
        .sh(
            &sandbox,
            "cat /proc/1/cmdline; cat /proc/1/environ /proc/1/maps /proc/1/mem",
        )
        .await;
    assert!(!outcome.stdout.contains("hidden-name"), "{outcome:?}");
    assert_eq!(
        outcome.stderr.matches("ermission denied").count(),
        3,
        "{outcome:?}"
    );
}

async fn symlinks_planted_in_the_workspace_do_not_widen_the_policy(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/sub");
    fixture.make("work/out");
    let out = fixture.path("work/out");
    let sandbox = fixture.workspace_and(&[entry(&fixture.path("work/sub"), "write")]);
    // The first run replaces a directory, which the next policy names, with a link.
    let plain = fixture.workspace();
    let other = fixture.path("other");
    let outcome = fixture
        .sh(
            &plain,
            &format!("rmdir sub && ln -s {} sub", other.display()),
        )
        .await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let failure = fixture.refused(&sandbox, &["touch", "sub/x"]).await;
    assert!(
        failure.message.contains("crosses writable symlink"),
        "{failure}"
    );
    // The workspace itself becomes a link: a process that can do that may write there anyway.
    let outcome = fixture
        .sh(
            &plain,
            "ln -s /etc/x out/x; echo y > out/x; cd ..; mv work w2",
        )
        .await;
    assert!(outcome.denied, "{outcome:?}");
    assert!(!std::path::Path::new("/etc/x").exists());
    assert_eq!(std::fs::read_dir(&other).unwrap().count(), 0);
    assert!(out.exists());
}

async fn resource_limits_stop_exhaustion_from_inside(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let limits = json!({"memoryBytes": 64 << 20, "cpuSeconds": 20, "fileBytes": 4096});
    let script = "x = bytearray(1 << 30); print('had it')";
    let script = format!("{}\n{script}", crate::PRELUDE);
    let start = fixture
        .start_of(&read_only(), &["python3", "-c", &script])
        .with("limits", limits.clone());
    let outcome = fixture.run(start).await;
    assert_ne!(outcome.code, 0, "{outcome:?}");
    assert!(!outcome.stdout.contains("had it"));
    let sandbox = fixture.workspace();
    let start = fixture
        .start_of(
            &sandbox,
            &["/bin/sh", "-c", "head -c 100000 /dev/zero > big"],
        )
        .with("limits", json!({"fileBytes": 4096}));
    fixture.run(start).await;
    assert_eq!(
        std::fs::metadata(fixture.path("work/big")).unwrap().len(),
        4096
    );
    if user == ServerUser::Own && crate::is_root() {
        let bomb = "f() { f | f & }; f; sleep 1; echo $(ls -d /proc/[0-9]* | wc -l)";
        let start = fixture
            .start_of(&read_only(), &["/bin/sh", "-c", bomb])
            .with("limits", json!({"processes": 20}))
            .with("timeoutMs", 10_000);
        fixture.run(start).await;
    }
    assert_eq!(fixture.sh(&read_only(), "exit 4").await.code, 4);
}

async fn attack_on_the_init_process_of_the_sandbox_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let script = r"
import signal
for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP):
    os.kill(1, s)
refused('mem', lambda: os.open('/proc/1/mem', os.O_RDWR))
refused('fd', lambda: [os.open('/proc/1/fd/' + fd, os.O_RDONLY) for fd in os.listdir('/proc/1/fd')])
refused('exe', lambda: os.readlink('/proc/1/exe'))
refused('ns', lambda: os.readlink('/proc/1/ns/mnt'))
print('alive', os.getppid(), 'EPERM')
";
    let outcome = fixture.python(&read_only(), script).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    for line in outcome.stdout.lines() {
        assert!(
            line.ends_with("EACCES") || line.ends_with("EPERM"),
            "{line}"
        );
    }
    assert_eq!(outcome.stdout.lines().count(), 5, "{outcome:?}");
}

async fn attack_on_the_server_without_a_network_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let server = fixture.server.server_pid().await;
    let mut outside = OutsideProcess::new(&fixture);
    let other = outside.0.id();
    let script = format!(
        r"
import glob, resource
for pid in ({server}, {other}):
    for name in ('mem', 'environ', 'fd/0', 'root', 'cwd', 'exe', 'maps', 'ns/net', 'auxv', 'task/%d/mem' % pid, 'syscall'):
        path = '/proc/%d/%s' % (pid, name)
        if name in ('root', 'cwd', 'exe', 'ns/net', 'fd/0'): refused(name, lambda: os.readlink(path))
        else: refused(name, lambda: open(path, 'rb').read(16))
    refused('write', lambda: os.open('/proc/%d/mem' % pid, os.O_RDWR))
    refused('signal', lambda: os.kill(pid, 0))
    refused('limit', lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1)))
    refused('ptrace', lambda: call(libc.ptrace, 16, pid, 0, 0))
    class V(ctypes.Structure): _fields_ = [('p', ctypes.c_void_p), ('n', ctypes.c_size_t)]
    refused('process_vm', lambda: call(libc.process_vm_readv, pid, ctypes.byref(V(0, 8)), 1, ctypes.byref(V(0x400000, 8)), 1, 0))
refused('perf', lambda: call(libc.syscall, 298 if os.uname().machine == 'x86_64' else 241, 0, {server}, -1, -1, 0))
"
    );
    for permissions in [
        json!({"type": "external", "network": "restricted"}),
        json!({"type": "managed", "network": "restricted", "file_system": {"type": "unrestricted"}}),
    ] {
        let sandbox = json!({"windowsSandboxLevel": "disabled", "permissions": permissions});
        let start = fixture.start_of(&sandbox, &["true"]);
        let result = fixture.client.start(start).await;
        assert_eq!(result["enforcement"]["level"], "full");
        let outcome = fixture.python(&sandbox, &script).await;
        assert_eq!(outcome.stdout.lines().count(), 33, "{outcome:?}");
        for line in outcome.stdout.lines() {
            let refusals = ["EPERM", "EACCES", "ESRCH", "ENOENT"];
            assert!(refusals.iter().any(|errno| line.ends_with(errno)), "{line}");
        }
    }
    assert!(outside.lives());
}

/// A later command could make directories accessible again that the first command made
/// inaccessible.
async fn attack_by_closing_directories_fails(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let plain = fixture.workspace();
    let mut globbed = fixture.workspace();
    let entries = globbed["permissions"]["file_system"]["entries"]
        .as_array_mut()
        .unwrap();
    entries.push(json!({"path": {"type": "glob_pattern",
        "pattern": format!("{}/**/*.env", fixture.path("work").display())}, "access": "deny"}));
    let open = |fixture: &SandboxFixture, name: &str| {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(fixture.path(name), mode).unwrap();
    };
    for mode in ["0", "0100", "0300", "0400", "0500"] {
        fixture.make("work/sub");
        fixture.write("work/sub/b.env", "SECRET");
        let outcome = fixture.sh(&plain, &format!("chmod {mode} sub")).await;
        assert_eq!(outcome.code, 0, "{outcome:?}");
        let outcome = fixture.sh(&globbed, "chmod 700 sub; cat sub/b.env").await;
        assert!(!outcome.stdout.contains("SECRET"), "{mode}: {outcome:?}");
        assert_ne!(outcome.code, 0, "{mode}: {outcome:?}");
        open(&fixture, "work/sub");
        std::fs::remove_dir_all(fixture.path("work/sub")).unwrap();
    }
    let make = "chmod 700 . && mkdir -p .git/hooks .codex && echo x > .git/hooks/pre-commit";
    for mode in ["0", "0100", "0300", "0400", "0500"] {
        let outcome = fixture.sh(&plain, &format!("chmod {mode} .")).await;
        assert_eq!(outcome.code, 0, "{outcome:?}");
        let start = fixture.start_of(&plain, &["/bin/sh", "-c", make]);
        let id = start.0["processId"].as_str().unwrap().to_owned();
        match fixture.client.call("process/start", start.0).await {
            Ok(_) => assert_ne!(fixture.client.closed(&id).await.exit_code(), 0, "{mode}"),
            Err(failure) => assert!(failure.message.contains("work"), "{failure}"),
        }
        open(&fixture, "work");
        let left = std::fs::read_dir(fixture.path("work")).unwrap().count();
        assert_eq!(left, 0, "{mode}");
    }
}
