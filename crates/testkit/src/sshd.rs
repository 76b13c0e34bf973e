//! A real sshd on loopback, for the user who runs the tests.

use std::fmt::Write as _;
use std::fs;
use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::proc::PATIENCE;

/// An sshd with keys and a home of its own. Ends with all its connections when dropped.
#[derive(Debug)]
pub struct Sshd {
    directory: TempDir,
    child: Child,
    port: u16,
}

/// Where distributions put it; it insists on being called by its whole path.
const PROGRAMS: [&str; 3] = ["/usr/sbin/sshd", "/usr/local/sbin/sshd", "/usr/bin/sshd"];

/// Where sshd is, if it is installed.
#[must_use]
pub fn program() -> Option<&'static Path> {
    PROGRAMS.iter().map(Path::new).find(|path| path.exists())
}

impl Sshd {
    /// Starts one; `lines` are added to its configuration, and win over what is usual.
    ///
    /// # Panics
    ///
    /// If there is no sshd, or it does not start.
    #[must_use]
    pub fn start(lines: &[&str]) -> Self {
        let program = program().expect("no sshd: install openssh-server, as scripts/setup does");
        // Short: sockets are kept below it.
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
            // What the package's service makes at every boot, and sshd insists on.
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
        // Taken and given back: sshd cannot say which port it was given.
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
            if answers(&mut child, port) {
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

    /// Where it listens.
    #[must_use]
    pub fn url(&self) -> String {
        format!("ssh://127.0.0.1:{}", self.port)
    }

    /// Options for ssh, as after `-o`, that let it in and leave the user's own files alone.
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

    /// Its directory: `home` is that of those who come, `bin` comes first in their `PATH`, and `run`
    /// is for sockets of those who go.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The home of those who come.
    #[must_use]
    pub fn home(&self) -> PathBuf {
        self.path().join("home")
    }

    /// Puts a script first in the `PATH` of those who come.
    ///
    /// # Panics
    ///
    /// If it cannot be written.
    pub fn script(&self, name: &str, text: &str) {
        let path = self.path().join("bin").join(name);
        fs::write(&path, text).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a script");
    }

    /// What it logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.path().join("log")).unwrap_or_default()
    }

    /// The processes of ssh that keep connections to it.
    #[must_use]
    pub fn masters(&self) -> Vec<i32> {
        let own = self.path().join("run").display().to_string();
        let processes = fs::read_dir("/proc").expect("/proc");
        let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(|pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            line.contains("ssh") && line.contains("ControlMaster=yes") && line.contains(&own)
                // One that has retitled itself names its socket.
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
    // The first value counts.
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

/// Whether it greets before it ends.
fn answers(child: &mut Child, port: u16) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
            let mut greeting = [0; 4];
            let _ = stream.set_read_timeout(Some(PATIENCE));
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
