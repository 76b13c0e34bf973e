//! Installation on the remote machine: which file, when, and when not.

use std::os::unix::fs::MetadataExt as _;

use super::*;

impl SshFixture {
    /// `run` that has to install the server first.
    fn run_installing(&self, command: &[&str]) -> Command {
        let mut program = self.program();
        program
            .arg("run")
            .args(self.flags(&self.sshd.url()))
            .arg("--")
            .args(command);
        program
    }

    /// The installed files, including incomplete ones.
    fn installed(&self) -> Vec<PathBuf> {
        tree(&self.sshd.home().join(".cache/exec-server/bin"))
    }
}

#[tokio::test]
async fn missing_server_is_installed_once() {
    let fixture = SshFixture::new();
    // Start-up files of the shell may print text.
    fs::write(fixture.sshd.home().join(".bashrc"), "echo welcome\n").unwrap();
    let (out, err, code) = outcome(fixture.run_installing(&["echo", "hi"])).await;
    assert_eq!((out.as_str(), code), ("hi\n", 0), "{err}");
    assert!(err.contains("installing exec-server"), "{err}");
    let installed = fixture.installed();
    let [only] = &installed[..] else {
        panic!("{installed:?}");
    };
    let name = only.file_name().unwrap().to_str().unwrap();
    let version = env!("CARGO_PKG_VERSION");
    assert!(
        name.starts_with(&format!("exec-server-{version}-")),
        "{name}"
    );
    assert_eq!(only.metadata().unwrap().mode() & 0o777, 0o700);
    assert!(fs::read(only).unwrap() == fs::read(BINARY).unwrap());
    // All local state is removed, and nothing on the remote machine.
    for pid in fixture.sshd.masters() {
        proc::signal(u32::try_from(pid).unwrap(), rustix::process::Signal::TERM);
    }
    proc::eventually("ssh to end", || match fixture.sshd.masters() {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    })
    .await;
    fs::remove_dir_all(fixture.sshd.path().join("run")).unwrap();
    let (_, err, code) = outcome(fixture.run_installing(&["true"])).await;
    assert_eq!((err.as_str(), code), ("", 0));
    assert_eq!(fixture.installed(), installed);
}

/// Whether an ELF file names no interpreter, so that it needs no shared library.
fn is_static(elf: &[u8]) -> bool {
    let number = |at: usize, size: usize| {
        let bytes = &elf[at..at + size];
        bytes
            .iter()
            .rev()
            .fold(0, |number, &byte| number << 8 | usize::from(byte))
    };
    assert_eq!(&elf[..6], b"\x7fELF\x02\x01", "64 bits, little end first");
    let (table, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    assert!(count > 0);
    const PT_INTERP: usize = 3;
    (0..count).all(|index| number(table + index * size, 4) != PT_INTERP)
}

/// Another executable than the local one is sent and runs there: a static stand-in that records its
/// path and executes the server of these tests, because a static server takes long to build.
#[tokio::test]
async fn static_executable_is_sent_and_run() {
    let fixture = SshFixture::new();
    let (source, built) = (
        fixture.sshd.path().join("stand-in.rs"),
        fixture.sshd.path().join("stand-in"),
    );
    let ran = fixture.sshd.path().join("ran");
    let program = format!(
        r##"use std::{{env, fs, io::Write, os::unix::process::CommandExt, process::Command}};
        fn main() {{
            let mut ran = fs::File::options().create(true).append(true).open(r#"{ran}"#).unwrap();
            writeln!(ran, "{{}}", env::current_exe().unwrap().display()).unwrap();
            panic!("{{}}", Command::new(r#"{BINARY}"#).args(env::args_os().skip(1)).exec());
        }}"##,
        ran = ran.display()
    );
    fs::write(&source, program).unwrap();
    let compiled = Command::new("rustc")
        .args(["--edition=2024", "-C", "target-feature=+crt-static", "-o"])
        .args([&built, &source])
        .output()
        .await
        .unwrap();
    let complaints = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{complaints}");
    assert!(is_static(&fs::read(&built).unwrap()));
    assert!(!is_static(&fs::read(BINARY).unwrap()));

    let run = |command: &[&str]| {
        let mut program = fixture.program();
        program
            .arg("run")
            .args(fixture.flags(&fixture.sshd.url()))
            .arg("--local-binary")
            .arg(&built)
            .arg("--")
            .args(command);
        program
    };
    let (out, err, code) = outcome(run(&["echo", "hi"])).await;
    assert_eq!((out.as_str(), code), ("hi\n", 0), "{err}");
    assert!(err.contains("installing exec-server"), "{err}");
    let installed = fixture.installed();
    let [only] = &installed[..] else {
        panic!("{installed:?}");
    };
    assert!(fs::read(only).unwrap() == fs::read(&built).unwrap());
    assert_eq!(only.metadata().unwrap().mode() & 0o777, 0o700);
    // The executable was tested under a temporary name before it was renamed.
    let printed = fs::read_to_string(&ran).unwrap();
    let (directory, name) = (only.parent().unwrap(), only.file_name().unwrap());
    let tried = format!("{}/.{}.", directory.display(), name.display());
    let lines: Vec<_> = printed.lines().collect();
    let [first, .., last] = lines[..] else {
        panic!("{printed}");
    };
    assert!(first.starts_with(&tried), "{printed}");
    assert_eq!(Path::new(last), only, "{printed}");
    let (_, err, code) = outcome(run(&["true"])).await;
    assert_eq!((err.as_str(), code), ("", 0));
    assert_eq!(fixture.installed(), installed);
}

#[tokio::test]
async fn unsupported_machine_type_is_named() {
    let fixture = SshFixture::new();
    fixture.sshd.script(
        "uname",
        "#!/bin/sh\n[ \"$1\" = -s ] && echo Linux || echo riscv64\n",
    );
    let (_, err, code) = outcome(fixture.run_installing(&["true"])).await;
    assert_eq!(code, 125, "{err}");
    let own = format!("Linux {}", std::env::consts::ARCH);
    for part in [
        &fixture.sshd.url(),
        "Linux riscv64",
        own.as_str(),
        "--remote-binary",
    ] {
        assert!(err.contains(part), "{part} is not in: {err}");
    }
    assert_eq!(fixture.installed(), [] as [PathBuf; 0]);
}

/// What arrived is the same with and without a program that compresses.
#[tokio::test]
async fn executable_is_compressed_on_the_way_where_both_sides_can() {
    for has_gzip in [true, false] {
        let fixture = SshFixture::new();
        let sent = fixture.sshd.path().join("sent");
        if has_gzip {
            // Records what it was given, and does its work.
            let script = format!(
                "#!/bin/sh\ntee {} | /usr/bin/env -i PATH=/usr/bin:/bin gzip \"$@\"\n",
                sent.display()
            );
            fixture.sshd.script("gzip", &script);
        }
        let mut program = fixture.run_installing(&["echo", "hi"]);
        if !has_gzip {
            let bin = fixture.sshd.path().join("only-ssh");
            fs::create_dir(&bin).unwrap();
            std::os::unix::fs::symlink("/usr/bin/ssh", bin.join("ssh")).unwrap();
            program.env("PATH", &bin);
        }
        let (out, err, code) = outcome(program).await;
        assert_eq!((out.as_str(), code), ("hi\n", 0), "{err}");
        let installed = fixture.installed();
        let [only] = &installed[..] else {
            panic!("{installed:?}");
        };
        assert!(fs::read(only).unwrap() == fs::read(BINARY).unwrap());
        if has_gzip {
            let (sent, all) = (
                sent.metadata().unwrap().len(),
                only.metadata().unwrap().len(),
            );
            assert!(sent < all / 2, "{sent} of {all} bytes were sent");
        }
    }
}

#[tokio::test]
async fn executable_for_the_architecture_of_the_host_is_chosen() {
    let fixture = SshFixture::new();
    let directory = fixture.sshd.path().join("binaries");
    fs::create_dir(&directory).unwrap();
    // The header of an executable for another machine: RISC-V.
    let mut other = fs::read(BINARY).unwrap();
    other.truncate(4096);
    other[18..20].copy_from_slice(&243u16.to_le_bytes());
    fs::write(directory.join("exec-server"), other).unwrap();
    let own = format!("exec-server-{}", std::env::consts::ARCH);
    std::os::unix::fs::symlink(BINARY, directory.join(own)).unwrap();
    let run = |command: &[&str]| {
        let mut program = fixture.program();
        program
            .arg("run")
            .args(fixture.flags(&fixture.sshd.url()))
            .arg("--local-binary")
            .arg(directory.join("exec-server"))
            .arg("--")
            .args(command);
        program
    };
    let (out, err, code) = outcome(run(&["echo", "hi"])).await;
    assert_eq!((out.as_str(), code), ("hi\n", 0), "{err}");
    assert!(err.contains("installing exec-server"), "{err}");
    let installed = fixture.installed();
    assert!(fs::read(&installed[0]).unwrap() == fs::read(BINARY).unwrap());
    // It is found again.
    let (_, err, code) = outcome(run(&["true"])).await;
    assert_eq!((err.as_str(), code), ("", 0));
    assert_eq!(fixture.installed(), installed);
}

#[tokio::test]
async fn full_disk_leaves_no_partial_installation() {
    // A limit on the size of files ends the writer as a full disk does, and needs no privilege.
    let fixture = SshFixture::with(&[
        "ForceCommand ulimit -f 2000; trap '' XFSZ; eval \"$SSH_ORIGINAL_COMMAND\"",
    ]);
    let (_, err, code) = outcome(fixture.run_installing(&["true"])).await;
    assert_eq!(code, 125, "{err}");
    assert!(
        err.contains("cannot install exec-server") && err.contains("File too large"),
        "{err}"
    );
    assert_eq!(fixture.installed(), [] as [PathBuf; 0]);
}

#[tokio::test]
async fn error_of_a_full_file_system_is_shown() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("only root can mount a small file system; the limit on files stands in for it");
        return;
    }
    let fixture = SshFixture::new();
    let cache = fixture.sshd.home().join(".cache");
    fs::create_dir(&cache).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=2m", "tmpfs"])
        .arg(&cache)
        .status()
        .unwrap();
    if !mounted.success() {
        eprintln!("this container does not let root mount; the limit on files stands in for it");
        return;
    }
    let (_, err, code) = outcome(fixture.run_installing(&["true"])).await;
    let left = fixture.installed();
    let unmounted = std::process::Command::new("umount")
        .arg("-l")
        .arg(&cache)
        .status()
        .unwrap();
    assert!(unmounted.success());
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("No space left on device"), "{err}");
    assert_eq!(left, [] as [PathBuf; 0]);
}

#[tokio::test]
async fn installation_with_a_wrong_checksum_is_rejected() {
    let fixture = SshFixture::new();
    fixture.sshd.script(
        "sha256sum",
        "#!/bin/sh\nexec /usr/bin/sha256sum /dev/null\n",
    );
    let (_, err, code) = outcome(fixture.run_installing(&["true"])).await;
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("another SHA-256"), "{err}");
    assert_eq!(fixture.installed(), [] as [PathBuf; 0]);
}

#[tokio::test]
async fn executable_that_does_not_run_is_removed() {
    let fixture = SshFixture::new();
    // An executable of the right kind that no kernel accepts.
    let broken = fixture.sshd.path().join("broken");
    let mut head = fs::read(BINARY).unwrap();
    head.truncate(64);
    fs::write(&broken, head).unwrap();
    let mut program = fixture.program();
    program
        .arg("run")
        .args(fixture.flags(&fixture.sshd.url()))
        .arg("--local-binary")
        .arg(&broken)
        .args(["--", "true"]);
    let (_, err, code) = outcome(program).await;
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("make static"), "{err}");
    assert_eq!(fixture.installed(), [] as [PathBuf; 0]);
}

#[tokio::test]
async fn missing_remote_binary_is_named() {
    let fixture = SshFixture::new();
    let mut program = fixture.program();
    program
        .arg("run")
        .args(fixture.flags(&fixture.sshd.url()))
        .args(["--remote-binary", "/nowhere/exec-server", "--", "true"]);
    let (_, err, code) = outcome(program).await;
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("/nowhere/exec-server"), "{err}");
}
