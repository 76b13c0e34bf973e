//! What README says to type first, and `scripts/start` on a machine that lacks something.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::{BINARY, text};

const TOP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Runs `scripts/start` where only these programs exist, besides those of every system.
fn start_with(bin: &Path, programs: &[(&str, &str)]) -> Output {
    for name in ["bash", "dirname", "sed", "env"] {
        let found = Command::new("sh")
            .args(["-c", &format!("command -v {name}")])
            .output();
        let found = text(&found.unwrap().stdout);
        symlink(found.trim(), bin.join(name)).unwrap();
    }
    for (name, script) in programs {
        std::fs::write(bin.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(bin.join(name), mode).unwrap();
    }
    Command::new("/bin/bash")
        .arg(format!("{TOP}/scripts/start"))
        .env_clear()
        .env("PATH", bin)
        .env("HOME", bin)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

#[test]
fn start_says_what_is_missing_and_asks_for_no_more() {
    let bin = tempfile::tempdir().unwrap();
    let output = start_with(bin.path(), &[]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let version = include_str!("../../../../Cargo.toml")
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = "))
        .unwrap()
        .trim_matches('"');
    let says = format!("cargo is missing: install Rust {version} or later from https://rustup.rs");
    assert!(error.contains(&says), "{error}");
    // README names the same version.
    assert!(include_str!("../../../../README.md").contains(&format!("Rust {version} or later")));

    let bin = tempfile::tempdir().unwrap();
    let output = start_with(bin.path(), &[("cargo", "exit 7")]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("gcc libc6-dev"), "{error}");
    for unneeded in ["ssh", "nats", "zsh", "npm", "python"] {
        assert!(!error.contains(unneeded), "{error}");
    }

    // With both it builds.
    let bin = tempfile::tempdir().unwrap();
    let output = start_with(bin.path(), &[("cargo", "exit 7"), ("cc", "")]);
    assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
}

#[tokio::test]
async fn first_commands_of_the_readme_work_as_typed() {
    let home = tempfile::tempdir().unwrap();
    let bin = home.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::create_dir(home.path().join("run")).unwrap();
    std::fs::create_dir(home.path().join("served")).unwrap();
    symlink(BINARY, bin.join("exec-server")).unwrap();
    std::fs::write(home.path().join("notes.txt"), "notes\n").unwrap();
    let shell = |line: &str, directory: &Path| {
        let mut command = tokio::process::Command::new("bash");
        command
            .args(["-c", line])
            .env_clear()
            .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
            .env("HOME", home.path())
            .env("XDG_RUNTIME_DIR", home.path().join("run"))
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    };
    let readme = include_str!("../../../../README.md");
    let command = |part: &str| {
        let mut lines = readme
            .lines()
            .filter(|line| line.starts_with("    exec-server "));
        let line = lines.find(|line| line.contains(part));
        let line = line.unwrap_or_else(|| panic!("README has no {part}"));
        line.split("  #").next().unwrap().trim().to_owned()
    };
    let serve = command("exec-server serve");
    let mut server = shell(&format!("exec {serve}"), &home.path().join("served"));
    let mut server = server.spawn().unwrap();
    let mut url = [0; 7];
    let stdout = server.stdout.as_mut().unwrap();
    tokio::io::AsyncReadExt::read_exact(stdout, &mut url)
        .await
        .unwrap();
    assert_eq!(&url, b"unix://");
    for (line, expected) in [
        (command("run -- uname -a"), "Linux"),
        (command("run --on serve -- uname -a"), "Linux"),
        (command("exec-server ps"), "SESSION"),
        (command("cp notes.txt :"), ""),
    ] {
        let output = shell(&line, home.path()).output().await.unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
        assert!(
            text(&output.stdout).starts_with(expected),
            "{line}: {output:?}"
        );
    }
    let copied = std::fs::read_to_string(home.path().join("served/notes.txt")).unwrap();
    assert_eq!(copied, "notes\n");
}
