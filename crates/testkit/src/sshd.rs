//! Real sshd on loopback, for the user who runs the tests.

use std::fmt::Write as _;
use std::fs;
use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::proc::TIMEOUT;

/// An sshd with its own keys and home directory. Dropping it ends the daemon and all its
/// connections.
#[derive(Debug)]
pub struct Sshd {
    directory: TempDir,
    child: Child,
    port: u16,
}

/// Locations in distributions; sshd requires to be started by its absolute path.
const PROGRAMS: [&str; 3] = ["/usr/sbin/sshd", "/usr/local/sbin/sshd", "/usr/bin/sshd"];

/// Path of sshd, if it is installed.
#[must_use]
pub fn program() -> Option<&'static Path> {
    PROGRAMS.iter().map(Path::new).find(|path| path.exists())
}

impl Sshd {
    /// Starts an sshd; `lines` are added to its configuration, and override the defaults.
    ///
    /// # Panics
    ///
    /// No sshd is installed, or it does not start.
    #[must_use]
    pub fn start(lines: &[&str]) -> Self {
        let program = program().expect("no sshd: install openssh-server, as scripts/setup does");
        // A short path: unix sockets are created below it.
        let directory = tempfile::Builder::new()
            .prefix("ssh")
            .tempdir_in("/tmp")
            .expect("a directory");
        let path = directory.path();
        for sub in ["home", "bin", "run"] {
            fs::create_dir(path.join(sub)).expect("a directory");
        }
        private(&path.join("run"));
        if rustix::process::geteuid().is_root() {
            // Required by sshd; the distribution's service creates it at boot.
            fs::create_dir_all("/run/sshd").expect("/run/sshd");
        }
        for name in ["host", "id"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(path.join(name))
                .status()
                .expect("ssh-keygen");
            assert!(made.success(), "ssh-keygen: {made}");
        }
        fs::copy(path.join("id.pub"), path.join("authorized")).expect("a key");
        // sshd cannot report its port, so a free port is chosen first. Another process may bind it
        // first: retry.
        for _ in 0..5 {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let port = listener.local_addr().expect("a port").port();
            drop(listener);
            let config = config(path, port, lines);
            fs::write(path.join("config"), config).expect("a configuration");
            let mut child = Command::new(program)
                .args(["-D", "-f"])
                .arg(path.join("config"))
                .arg("-E")
                .arg(path.join("log"))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("sshd to start");
            if sends_banner(&mut child, port) {
                let host = fs::read_to_string(path.join("host.pub")).expect("a key");
                fs::write(path.join("known"), format!("[127.0.0.1]:{port} {host}"))
                    .expect("known hosts");
                return Self {
                    directory,
                    child,
                    port,
                };
            }
        }
        let log = fs::read_to_string(path.join("log")).unwrap_or_default();
        panic!("sshd does not listen: {log}");
    }

    /// URL of the daemon.
    #[must_use]
    pub fn url(&self) -> String {
        format!("ssh://127.0.0.1:{}", self.port)
    }

    /// Options for ssh (after `-o`) that authenticate with the test's key and ignore the user's own
    /// files.
    #[must_use]
    pub fn options(&self) -> Vec<String> {
        let file = |name: &str| self.path().join(name).display().to_string();
        vec![
            format!("IdentityFile={}", file("id")),
            "IdentitiesOnly=yes".to_owned(),
            "IdentityAgent=none".to_owned(),
            format!("UserKnownHostsFile={}", file("known")),
            "GlobalKnownHostsFile=/dev/null".to_owned(),
            "StrictHostKeyChecking=yes".to_owned(),
        ]
    }

    /// Directory of the daemon: `home` is the home directory of sessions, `bin` is first in their
    /// `PATH`, and `run` is for sockets of ssh clients.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Home directory of sessions.
    #[must_use]
    pub fn home(&self) -> PathBuf {
        self.path().join("home")
    }

    /// Creates a script that is first in the `PATH` of sessions.
    ///
    /// # Panics
    ///
    /// The script cannot be written.
    pub fn script(&self, name: &str, text: &str) {
        let path = self.path().join("bin").join(name);
        fs::write(&path, text).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a script");
    }

    /// Log of the daemon.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.path().join("log")).unwrap_or_default()
    }

    /// Process ids of ssh masters that are connected to this daemon.
    #[must_use]
    pub fn masters(&self) -> Vec<i32> {
        let own = self.path().join("run").display().to_string();
        let processes = fs::read_dir("/proc").expect("/proc");
        let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(|pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            line.contains("ssh") && line.contains("ControlMaster=yes") && line.contains(&own)
                // A master that has changed its title contains its socket's path.
                || line.starts_with("ssh: ") && line.contains(&own)
        })
        .collect()
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        for pid in self.masters() {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn private(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).expect("a private directory");
}

fn config(path: &Path, port: u16, lines: &[&str]) -> String {
    let at = path.display();
    let mut text = String::new();
    // The first value of an option applies.
    for line in lines {
        let _ = writeln!(text, "{line}");
    }
    let _ = write!(
        text,
        "Port {port}
ListenAddress 127.0.0.1
HostKey {at}/host
AuthorizedKeysFile {at}/authorized
PidFile none
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
LogLevel VERBOSE
SetEnv HOME={at}/home PATH={at}/bin:/usr/local/bin:/usr/bin:/bin
"
    );
    text
}

/// Whether sshd sends its banner before it exits.
fn sends_banner(child: &mut Child, port: u16) -> bool {
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
            let mut greeting = [0; 4];
            let _ = stream.set_read_timeout(Some(TIMEOUT));
            if stream.read_exact(&mut greeting).is_ok() && &greeting == b"SSH-" {
                return true;
            }
        }
        if child.try_wait().is_ok_and(|ended| ended.is_some()) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}
