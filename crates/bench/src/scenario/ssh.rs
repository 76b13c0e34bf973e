//! Commands on a machine behind ssh; skipped if no sshd is installed.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use exec_server_testkit::sshd::{self, Sshd};

use super::{Bench, RowSpec};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::CommandLine;
use crate::stats::median;

/// The second and later `run` on a host, compared with a shared connection of ssh itself.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    if sshd::program().is_none() {
        eprintln!("no sshd here: nothing behind ssh is measured");
        return Vec::new();
    }
    let line = RowSpec {
        name: "ssh run true p50, warm".to_owned(),
        unit: Unit::Seconds,
        base: "ssh, shared",
        goals: vec![Goal::Base {
            limit: 0.5,
            aim: 0.25,
        }],
    };
    let count = bench.pick(15, 7);
    bench.alone(bench.pick(5, 2), vec![line], SshBenchHost::new, |host| {
        let mut seen = [Vec::new(), Vec::new()];
        // In turns, so that a slow moment of the machine affects both.
        for _ in 0..count {
            for (via, seen) in [RunVia::Ours, RunVia::Ssh].into_iter().zip(&mut seen) {
                let began = Instant::now();
                host.run(via)?;
                seen.push(began.elapsed().as_secs_f64());
            }
        }
        let [ours, theirs] = seen.map(|seen| median(&seen));
        Ok(vec![Figure::against(ours, theirs)])
    })
}

#[derive(Debug, Clone, Copy)]
enum RunVia {
    Ours,
    Ssh,
}

/// A machine to which both clients have connected before.
struct SshBenchHost {
    sshd: Sshd,
    program: PathBuf,
}

impl SshBenchHost {
    fn new(command: &CommandLine) -> anyhow::Result<Self> {
        let host = Self {
            sshd: Sshd::start(&[]),
            program: command.executable()?,
        };
        host.run(RunVia::Ours)?;
        let mut master = host.ssh();
        master.args(["-o", "ControlMaster=yes", "-o", "ControlPersist=600", "-fN"]);
        finish(master.arg("127.0.0.1"))?;
        host.run(RunVia::Ssh)?;
        Ok(host)
    }

    fn ssh(&self) -> Command {
        let mut command = Command::new("ssh");
        let port = self.sshd.url();
        let port = port.rsplit(':').next().unwrap_or_default().to_owned();
        let control = self.sshd.path().join("run/ssh.ctl");
        command.args(["-p", &port, "-o"]);
        command.arg(format!("ControlPath={}", control.display()));
        for option in self.sshd.options() {
            command.arg("-o").arg(option);
        }
        command
    }

    fn run(&self, via: RunVia) -> anyhow::Result<()> {
        match via {
            RunVia::Ssh => finish(self.ssh().args(["127.0.0.1", "true"])),
            RunVia::Ours => {
                let mut command = Command::new(&self.program);
                command
                    .env("XDG_RUNTIME_DIR", self.sshd.path().join("run"))
                    .args(["run", "--url", &self.sshd.url(), "--remote-binary"])
                    .arg(&self.program);
                for option in self.sshd.options() {
                    command.arg("--ssh-option").arg(option);
                }
                finish(command.args(["--", "true"]))
            }
        }
    }
}

impl Drop for SshBenchHost {
    fn drop(&mut self) {
        // Ends the daemon on the host, which would otherwise wait for ten minutes.
        let mut command = Command::new(&self.program);
        command
            .args(["daemon", "--stop"])
            .env("HOME", self.sshd.home())
            .env_remove("XDG_CACHE_HOME");
        let _ = finish(&mut command);
    }
}

fn finish(command: &mut Command) -> anyhow::Result<()> {
    let output = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {stderr}");
    Ok(())
}
