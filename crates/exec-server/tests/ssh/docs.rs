//! The commands in docs/ssh.md.

use super::*;

/// The commands of the page, as typed; `…` stands for a value that the reader fills in.
fn commands() -> Vec<String> {
    let page = include_str!("../../../../docs/ssh.md");
    let lines = page
        .lines()
        .filter_map(|line| line.strip_prefix("    ").map(str::trim_start));
    let commands: Vec<String> = lines
        .filter(|line| line.starts_with("exec-server "))
        .map(|line| line.split("   #").next().unwrap_or(line).trim().to_owned())
        .collect();
    assert!(commands.len() >= 6, "{commands:?}");
    commands
}

#[tokio::test]
async fn commands_of_the_ssh_page_work() {
    let fixture = SshFixture::new();
    let work = fixture.sshd.path().join("app");
    let (srv, here) = (fixture.sshd.home().join("srv/app"), work.join("src"));
    fs::create_dir_all(&srv).unwrap();
    fs::create_dir_all(&here).unwrap();
    fs::write(here.join("main.c"), "TODO\n").unwrap();
    fs::create_dir_all(srv.join("src")).unwrap();
    fs::write(srv.join("Makefile"), "test:\n\t@echo tested\n").unwrap();
    fixture.sshd.script("make", "#!/bin/sh\necho tested\n");
    let flags: Vec<String> = fixture.flags("").into_iter().skip(2).collect();
    for command in commands() {
        let line = command
            .replace("ssh://build", &fixture.sshd.url())
            .replace("/srv/app", srv.to_str().unwrap())
            .replace("~/app", work.to_str().unwrap())
            .replace("/opt/exec-server", BINARY);
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let (subcommand, rest) = words.split_first().unwrap();
        let mut program = fixture.program();
        program.arg(subcommand);
        if *subcommand == "env" {
            program
                .args(&rest[..1])
                .args(&flags)
                .args(["--remote-binary", BINARY]);
            program.args(&rest[1..]).current_dir(&work);
            let (out, err, code) = outcome(program).await;
            assert_eq!(code, 0, "{command}: {out}{err}");
            continue;
        }
        if line.contains("--on build") {
            // The environment stores the options that it needs.
        } else if *subcommand != "daemon" {
            program.args(&flags);
            if !line.contains("--remote-binary") {
                program.args(["--remote-binary", BINARY]);
            }
        } else {
            program.arg("--directory").arg(fixture.daemon_directory());
        }
        program.args(rest).current_dir(&work);
        let (out, err, code) = outcome(program).await;
        assert_eq!(code, 0, "{command}: {out}{err}");
    }
}
