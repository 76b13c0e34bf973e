//! Find or upload the exec-server binary on the ssh host.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use exec_server_transport::stamp::Stamp;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::process::{Child, Command};

use super::{SshError, SshHost, hex};

/// How often the progress of an installation is reported.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);

/// Time limit for the start of a daemon, including the shutdown of an old one.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Script that executes the installed binary, or reports the OS and architecture if it is missing.
const START: &str = r#"
b="${XDG_CACHE_HOME:-$HOME/.cache}/exec-server/bin/$1"
shift
if [ -x "$b" ]; then exec "$b" daemon "$@"; fi
echo "exec-server-ssh missing $(uname -s) $(uname -m)$(command -v gzip >/dev/null 2>&1 && echo " gzip")"
"#;

/// Script that executes the binary named by the caller.
const START_NAMED: &str = r#"
b=$1
shift
exec "$b" daemon "$@"
"#;

/// Script that executes the binary found in `PATH`, if there is one.
const START_FOUND: &str = r#"
shift
if command -v exec-server >/dev/null 2>&1; then exec exec-server daemon "$@"; fi
echo "exec-server-ssh missing $(uname -s) $(uname -m)"
"#;

/// Script that writes stdin to a file and renames it to its final name, if its hash matches and it
/// runs. On failure it leaves no file behind. It deletes old versions, except the last few that may
/// still be in use.
const INSTALL: &str = r#"
d="${XDG_CACHE_HOME:-$HOME/.cache}/exec-server/bin"
umask 077
mkdir -p "$d" || exit 71
cd "$d" || exit 71
t=".$1.$$"
trap "rm -f \"\$t\"" EXIT
trap "exit 71" HUP INT TERM PIPE
if [ "$4" = gzip ]; then gzip -dc >"$t" || exit 71
else cat >"$t" || exit 71
fi
if [ "$(wc -c <"$t")" -ne "$3" ]; then
    echo "$(wc -c <"$t") of $3 bytes arrived" >&2
    exit 71
fi
if command -v sha256sum >/dev/null 2>&1; then s=$(sha256sum <"$t")
elif command -v shasum >/dev/null 2>&1; then s=$(shasum -a 256 <"$t")
elif command -v openssl >/dev/null 2>&1; then s=$(openssl dgst -sha256 <"$t")
else
    echo "there is neither sha256sum nor shasum nor openssl to check what arrived" >&2
    exit 71
fi
case "$s" in
*"$2"*) ;;
*)
    echo "what arrived has another SHA-256 than what was sent" >&2
    exit 71
    ;;
esac
chmod 700 "$t" || exit 71
v=$("./$t" --version 2>&1) || {
    echo "$v" >&2
    exit 73
}
mv -f "$t" "$1" || exit 71
find . -name ".exec-server-*" -mmin +1440 -exec rm -f {} + 2>/dev/null
ls -t | grep "^exec-server-" | tail -n +4 | while read -r old; do rm -f "./$old"; done
echo "exec-server-ssh installed"
"#;

/// Exit status of the install script if the machine cannot run the binary.
const UNFIT: i32 = 73;

impl SshHost {
    /// The script that starts the daemon, and its arguments.
    pub(super) async fn start_script(
        &self,
        flag: Option<&str>,
    ) -> Result<(&'static str, Vec<String>), SshError> {
        let options = &self.inner.options;
        let (script, first) = match (&options.remote_binary, &options.local_binary) {
            (Some(named), _) => (START_NAMED, named.clone()),
            (None, Some(_)) => (START, self.binary().await?.name.clone()),
            (None, None) => (START_FOUND, String::new()),
        };
        let mut args = vec![first];
        args.extend(flag.map(str::to_owned));
        if let Some(idle) = options.daemon_idle {
            args.push("--idle".to_owned());
            args.push(format!("{}ms", idle.as_millis()));
        }
        Ok((script, args))
    }

    /// Ensures that a daemon runs on the host; returns the path of its socket.
    pub(super) async fn daemon(&self) -> Result<String, SshError> {
        let mut installed = false;
        loop {
            let (script, args) = self.start_script(None).await?;
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let result = self
                .script(script, &args, Stdio::null(), START_TIMEOUT)
                .await?;
            match result.marked() {
                Some(words) => match words.strip_prefix("missing ") {
                    Some(machine) if !installed => {
                        installed = self.install(machine).await?;
                    }
                    _ => return self.take_state(words),
                },
                None => {
                    return Err(SshError::Daemon {
                        url: self.name(),
                        reason: result.reason(),
                    });
                }
            }
        }
    }

    /// Parses the output of the start script; returns the path of the daemon's socket.
    pub(super) fn take_state(&self, words: &str) -> Result<String, SshError> {
        let bad = || SshError::Daemon {
            url: self.name(),
            reason: format!("unexpected output `{}`", words.escape_debug()),
        };
        let state = words.strip_prefix("ready ").ok_or_else(bad)?;
        let state: Value = serde_json::from_str(state).map_err(|_| bad())?;
        if let Some(kept) = state["kept"].as_str() {
            self.notice(&format!("{}: {kept}", self.name()));
        }
        // Accept absolute paths only.
        match state["socket"].as_str() {
            Some(socket) if socket.starts_with('/') => Ok(socket.to_owned()),
            _ => Err(bad()),
        }
    }

    /// Uploads the binary. `machine` is the output of `uname -s` and `uname -m` on the host, and
    /// `gzip` if it has that program.
    ///
    /// Returns false if another binary was chosen instead, for the host's architecture: that one may be
    /// installed there already.
    pub(super) async fn install(&self, machine: &str) -> Result<bool, SshError> {
        let options = &self.inner.options;
        let local_binary = options.local_binary.as_ref();
        let Some(path) = local_binary.filter(|_| options.installs) else {
            return Err(SshError::Missing { url: self.name() });
        };
        let binary = self.binary().await?;
        let there = RemotePlatform::parse_uname(machine);
        if there != binary.machine {
            if self.choose_other(&there).await? {
                return Ok(false);
            }
            return Err(SshError::Architecture {
                url: self.name(),
                there: there.0,
                here: binary.machine.0.clone(),
                binary: path.clone(),
            });
        }
        let path = &binary.path;
        self.notice(&format!(
            "installing exec-server {} ({} MB) on {}",
            self.inner.options.version,
            binary.bytes.div_ceil(1_000_000),
            self.name()
        ));
        let file = File::open(path).map_err(|source| unreadable(path, source))?;
        // The other handle has the same position: it shows how much was read.
        let mut position = file
            .try_clone()
            .map_err(|source| unreadable(path, source))?;
        let size = binary.bytes.to_string();
        let mut args = vec![binary.name.as_str(), &binary.sha256, &size];
        let has_gzip = machine.split_whitespace().any(|word| word == "gzip");
        // Ends with its input, or when ssh does not read its output any more.
        let mut compressing = has_gzip.then(|| compress(&file)).flatten();
        let compressed = compressing.as_mut().and_then(|gzip| gzip.stdout.take());
        let stdin = match compressed.and_then(|output| output.into_owned_fd().ok()) {
            Some(output) => {
                args.push("gzip");
                Stdio::from(output)
            }
            None => Stdio::from(file),
        };
        // No time limit: ssh itself detects a stalled connection.
        let sending = self.script(INSTALL, &args, stdin, Duration::MAX);
        tokio::pin!(sending);
        let mut ticks = tokio::time::interval(PROGRESS_PERIOD);
        let result = loop {
            tokio::select! {
                result = &mut sending => break result,
                _ = ticks.tick() => if let Some(progress) = &options.progress {
                    progress(position.stream_position().unwrap_or(0), binary.bytes);
                },
            }
        };
        if let Some(progress) = &options.progress {
            progress(binary.bytes, binary.bytes);
        }
        let result = result?;
        match (result.code(), result.marked()) {
            (Some(0), Some("installed")) => Ok(true),
            (Some(UNFIT), _) => Err(SshError::Unfit {
                url: self.name(),
                binary: path.clone(),
                reason: result.reason(),
            }),
            _ => Err(SshError::Install {
                url: self.name(),
                reason: result.reason(),
            }),
        }
    }

    /// Chooses the binary for another architecture, if there is one.
    async fn choose_other(&self, there: &RemotePlatform) -> Result<bool, SshError> {
        let options = &self.inner.options;
        let Some(directory) = &options.other_binaries else {
            return Ok(false);
        };
        let Some(architecture) = there.0.strip_prefix("Linux ") else {
            return Ok(false);
        };
        let path = directory.join(format!("exec-server-{architecture}"));
        let version = options.version.clone();
        let read = tokio::task::spawn_blocking({
            let path = path.clone();
            move || InstallBinary::read(&path, &version)
        });
        match read.await.map_err(io::Error::other).and_then(|read| read) {
            // Only once: what was chosen is not replaced.
            Ok(binary) => {
                Ok(binary.machine == *there && self.inner.other_binary.set(binary).is_ok())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(unreadable(&path, source)),
        }
    }

    /// The binary to install; read once.
    async fn binary(&self) -> Result<&InstallBinary, SshError> {
        if let Some(other) = self.inner.other_binary.get() {
            return Ok(other);
        }
        let find_binary = async || {
            let (path, version) = match &self.inner.options.local_binary {
                Some(path) => (path.clone(), self.inner.options.version.clone()),
                None => return Err(SshError::Missing { url: self.name() }),
            };
            let read = tokio::task::spawn_blocking({
                let path = path.clone();
                move || InstallBinary::read(&path, &version)
            });
            read.await
                .map_err(io::Error::other)
                .and_then(|read| read)
                .map_err(|source| unreadable(&path, source))
        };
        self.inner.binary.get_or_try_init(find_binary).await
    }
}

/// Starts `gzip` on a file; `None` if this machine has none.
fn compress(file: &File) -> Option<Child> {
    let input = file.try_clone().ok()?;
    let mut gzip = Command::new("gzip");
    gzip.args(["-c", "-3"])
        .stdin(input)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    gzip.spawn().ok()
}

fn unreadable(path: &Path, source: io::Error) -> SshError {
    SshError::LocalBinary {
        path: path.to_owned(),
        source,
    }
}

/// Stamp of a file's metadata that changes with the binary, obtained without reading its content.
pub(super) fn stamp(path: Option<&Path>) -> Result<String, SshError> {
    let Some(path) = path else {
        return Ok(String::new());
    };
    let stamp = Stamp::of(path).map_err(|source| unreadable(path, source))?;
    Ok(stamp.to_string())
}

/// Binary to install.
#[derive(Debug)]
pub(super) struct InstallBinary {
    path: PathBuf,
    /// File name on the host, unique for the content.
    name: String,
    sha256: String,
    bytes: u64,
    machine: RemotePlatform,
}

impl InstallBinary {
    fn read(path: &Path, version: &str) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let mut hash = Sha256::new();
        let mut bytes = 0;
        let mut machine = None;
        let mut buffer = vec![0; 256 * 1024];
        loop {
            let read = file.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            let piece = &buffer[..read];
            machine.get_or_insert_with(|| RemotePlatform::of_executable(piece));
            hash.update(piece);
            bytes += read as u64;
        }
        let sha256 = hex(hash.finalize());
        // The version also becomes part of a shell command, so only a few characters are kept.
        let version: String = version
            .chars()
            .filter(|c| c.is_ascii_alphanumeric() || ".-+".contains(*c))
            .collect();
        Ok(Self {
            path: path.to_owned(),
            name: format!("exec-server-{version}-{}", &sha256[..16]),
            sha256,
            bytes,
            machine: machine.unwrap_or_else(|| RemotePlatform::of_executable(&[])),
        })
    }
}

/// OS and architecture, with the names that Linux uses.
#[derive(Debug, PartialEq, Eq)]
struct RemotePlatform(String);

impl RemotePlatform {
    /// Parses the output of `uname -s` and `uname -m`.
    fn parse_uname(words: &str) -> Self {
        let mut words = words.split_whitespace();
        let system = words.next().unwrap_or("unknown");
        let machine = match words.next().unwrap_or("unknown") {
            "amd64" => "x86_64",
            "arm64" => "aarch64",
            "i386" | "i486" | "i586" | "i686" => "x86",
            arm if arm.starts_with("armv") => "arm",
            other => other,
        };
        Self(format!("{system} {machine}"))
    }

    /// Parses the ELF header of an executable.
    fn of_executable(head: &[u8]) -> Self {
        let [0x7f, b'E', b'L', b'F', class, order, ..] = head else {
            return Self("no Linux machine".to_owned());
        };
        let Some(&[low, high]) = head.get(18..20) else {
            return Self("no Linux machine".to_owned());
        };
        let little = *order == 1;
        let code = match little {
            true => u16::from_le_bytes([low, high]),
            false => u16::from_be_bytes([low, high]),
        };
        let name = match (code, class) {
            (3, _) => "x86",
            (20, _) => "ppc",
            (21, _) if little => "ppc64le",
            (21, _) => "ppc64",
            (22, 2) => "s390x",
            (40, _) => "arm",
            (62, _) => "x86_64",
            (183, _) => "aarch64",
            (243, 2) => "riscv64",
            (243, _) => "riscv32",
            (258, _) => "loongarch64",
            _ => return Self(format!("Linux with ELF machine {code}")),
        };
        Self(format!("Linux {name}"))
    }
}

/// Executable of the current process, for programs that contain the server.
///
/// Uses `/proc/self/exe` if it exists. This path stays valid after an update has replaced the file.
///
/// # Errors
///
/// When the path cannot be determined.
pub fn own_executable() -> io::Result<PathBuf> {
    let kernel = PathBuf::from("/proc/self/exe");
    match kernel.exists() {
        true => Ok(kernel),
        false => std::env::current_exe(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_normalizes_uname_output_and_elf_headers() {
        for (parse_uname, name) in [
            ("Linux x86_64", "Linux x86_64"),
            ("Linux amd64", "Linux x86_64"),
            ("Linux arm64\r", "Linux aarch64"),
            ("Linux armv7l", "Linux arm"),
            ("Darwin arm64", "Darwin aarch64"),
            ("", "unknown unknown"),
        ] {
            assert_eq!(
                RemotePlatform::parse_uname(parse_uname).0,
                name,
                "{parse_uname}"
            );
        }
        let own = InstallBinary::read(&own_executable().unwrap(), "1.0 $(x)").unwrap();
        let arch = std::env::consts::ARCH;
        assert_eq!(own.machine.0, format!("Linux {arch}"));
        assert_eq!(own.name, format!("exec-server-1.0x-{}", &own.sha256[..16]));
        assert_eq!(
            RemotePlatform::of_executable(b"#!/bin/sh\n").0,
            "no Linux machine"
        );
        assert_eq!(
            RemotePlatform::of_executable(b"\x7fELF").0,
            "no Linux machine"
        );
        let mut arm = b"\x7fELF\x02\x01\x01".to_vec();
        arm.resize(18, 0);
        arm.extend([183, 0]);
        assert_eq!(RemotePlatform::of_executable(&arm).0, "Linux aarch64");
    }

    #[test]
    fn scripts_are_valid_sh_and_safe_to_quote() {
        for script in [START, START_NAMED, START_FOUND, INSTALL] {
            // Some login shells interpret both characters inside quotes.
            assert!(!script.contains(['\'', '!']), "{script}");
            let checked = std::process::Command::new("sh")
                .args(["-n", "-c", script])
                .status()
                .unwrap();
            assert!(checked.success(), "{script}");
        }
    }
}
