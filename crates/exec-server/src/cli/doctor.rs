//! `exec-server doctor`: which sandbox features this machine has, and how to enable the rest.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use exec_server_client::{CollectOptions, ExecBackend as _};
use exec_server_executor::fs::watch::{self, InotifyLimits};
use exec_server_protocol::process::{EnvPolicy, Inherit, StartParams};
use exec_server_sandbox::host::{self, HostFeatures};
use serde_json::json;

use super::args::DoctorArgs;
use super::on::{self, CommandLocation, RemoteMachine};
use super::table::visible;
use super::{print, runtime};

/// One feature that was checked.
struct Finding {
    name: &'static str,
    /// The purpose of the feature.
    purpose: &'static str,
    /// The version or limit that was found; an error is a reason why something will not work.
    state: Result<String, String>,
    /// Whether policies can do without it.
    optional: bool,
    fixes: Vec<String>,
}

/// Finds the program on another machine, as its server, in `PATH` or installed by `ssh://`, and runs it.
const REMOTE: &str = r#"
for b in "/proc/$PPID/exe" "$(command -v exec-server)" \
    $(ls -t "${XDG_CACHE_HOME:-$HOME/.cache}"/exec-server/bin/exec-server-* 2>/dev/null); do
    if [ -x "$b" ]; then exec "$b" doctor "$@"; fi
done
exit 127
"#;

pub(super) fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    // Without these options this machine is meant, also if there is a default environment.
    if args.server.on.is_some() || args.server.url.is_some() {
        let place = on::resolve(&args.server)?;
        if let CommandLocation::There(there) = place {
            return runtime()?.block_on(examine_remote(args, &there));
        }
    }
    let host =
        exec_server_executor::sandbox::examine(None).context("cannot examine this machine")?;
    let mut findings = findings(&host);
    findings.extend(inotify(watch::limits()));
    let summary = summary(&host);
    let text = if args.json {
        let list: Vec<_> = findings.iter().map(Finding::json).collect();
        let report = json!({
            "kernel": host.kernel, "enforcement": summary.0, "summary": summary.1, "findings": list,
        });
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        let mut text = format!("Linux {}\n\n", host.kernel);
        for finding in &findings {
            text += &finding.text();
        }
        text + "\n" + summary.1 + "\n"
    };
    print(text.as_bytes())?;
    Ok(if summary.0 == "full" {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs this command on another machine.
async fn examine_remote(args: &DoctorArgs, there: &RemoteMachine) -> anyhow::Result<ExitCode> {
    let client = there.connect().await?;
    let cwd = match client.environment_info().await {
        Ok(info) => info.cwd.clone(),
        Err(_) => None,
    };
    let mut argv = ["sh", "-c", REMOTE, "exec-server"]
        .map(str::to_owned)
        .to_vec();
    argv.extend(args.json.then(|| "--json".to_owned()));
    let params = StartParams {
        process_id: format!("doctor-{}", std::process::id()),
        argv,
        cwd: cwd.unwrap_or_default(),
        env_policy: Some(EnvPolicy::unfiltered(Inherit::All)),
        ..StartParams::default()
    };
    let started = client.start(params).await?;
    let output = started.process.output(CollectOptions::default()).await?;
    let _ = client.leave().await;
    let code = output.exit.map_or(1, |exit| exit.exit_code);
    if code == 127 {
        bail!(
            "there is no exec-server program on `{}` that this user of it can run",
            visible(&there.name)
        );
    }
    print(&output.stdout)?;
    let _ = std::io::stderr().write_all(&output.stderr);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// Which policies this machine can enforce, as one word and as a sentence.
fn summary(host: &HostFeatures) -> (&'static str, &'static str) {
    match (host.mounts().is_ok(), host.landlock > 0, host.seccomp) {
        (true, _, true) => ("full", "Every policy can be enforced."),
        (false, true, true) => (
            "partial",
            "Only policies without exceptions inside what they allow can be enforced: reading, but \
             not a workspace with protected names.",
        ),
        _ => ("none", "No policy that restricts files can be enforced."),
    }
}

fn findings(host: &HostFeatures) -> Vec<Finding> {
    let yes = |result: &Result<(), String>| result.clone().map(|()| "yes".to_owned());
    let obstacles = || {
        let found = host::namespace_obstacles();
        found
            .into_iter()
            .map(|(what, fix)| format!("{what}: {fix}"))
            .collect()
    };
    let newer = |version: &str| vec![format!("a kernel of version {version} or later has it")];
    let mut findings = vec![
        Finding {
            name: "user namespaces",
            purpose: "sandboxes without root",
            state: match (&host.user_namespaces, &host.privileged_mounts) {
                (Ok(()), _) => Ok("yes".to_owned()),
                (Err(_), Ok(())) => Ok("no, but this user may mount".to_owned()),
                (Err(why), Err(_)) => Err(why.clone()),
            },
            optional: false,
            fixes: if host.user_namespaces.is_err() {
                obstacles()
            } else {
                Vec::new()
            },
        },
        Finding {
            name: "mounts as a whole",
            purpose: "mounting a sandbox's view of files in one step",
            state: yes(&host.mount_api),
            optional: false,
            fixes: if host.mount_api.is_err() {
                newer("5.12")
            } else {
                Vec::new()
            },
        },
        Finding {
            name: "network namespaces",
            purpose: "a separate network for a command",
            state: yes(&host.network_namespaces),
            optional: false,
            fixes: if host.network_namespaces.is_err() {
                obstacles()
            } else {
                Vec::new()
            },
        },
        Finding {
            name: "fresh /proc",
            purpose: "hiding the host's processes by name",
            state: if host.proc_mountable {
                Ok("yes".to_owned())
            } else {
                Err("a part of /proc is covered, as in containers".to_owned())
            },
            optional: true,
            fixes: if host.proc_mountable {
                Vec::new()
            } else {
                vec!["docker: --security-opt systempaths=unconfined".to_owned()]
            },
        },
    ];
    findings.extend(filter_findings(host));
    findings
}

/// What restricts a command without namespaces too.
fn filter_findings(host: &HostFeatures) -> [Finding; 2] {
    let landlock = match host.landlock {
        0 => Err("not available".to_owned()),
        version => Ok(format!("version {version}")),
    };
    let landlock_fixes = match host.landlock {
        0 => vec![
            "a kernel of version 5.13 or later has it, if `landlock` is among its lsm= list"
                .to_owned(),
        ],
        1..=5 => vec![
            "version 6, of Linux 6.12, also keeps signals and abstract sockets inside".to_owned(),
        ],
        _ => Vec::new(),
    };
    [
        Finding {
            name: "Landlock",
            purpose: "restricting file access, in addition to namespaces or alone",
            state: landlock,
            optional: true,
            fixes: landlock_fixes,
        },
        Finding {
            name: "seccomp filters",
            purpose: "restricting network access and system calls",
            state: if host.seccomp {
                Ok("yes".to_owned())
            } else {
                Err("not available".to_owned())
            },
            optional: false,
            fixes: if host.seccomp {
                Vec::new()
            } else {
                vec!["a kernel with CONFIG_SECCOMP_FILTER has them".to_owned()]
            },
        },
    ]
}

/// The inotify limits, which `fs/watch` shares with all other programs of the user.
fn inotify(limits: InotifyLimits) -> [Finding; 2] {
    // A large checkout has tens of thousands of directories. Each watched tree uses one instance;
    // the kernel's default limit is 128 instances.
    let InotifyLimits { watches, instances } = limits;
    [
        limited(
            "inotify watches",
            "max_user_watches",
            watches,
            65_536,
            524_288,
        ),
        limited(
            "inotify instances",
            "max_user_instances",
            instances,
            128,
            1_024,
        ),
    ]
}

fn limited(name: &'static str, setting: &str, found: u64, few: u64, enough: u64) -> Finding {
    let is_low = found < few;
    let state = found.to_string();
    Finding {
        name,
        purpose: "watching trees for changes",
        state: if is_low {
            Err(format!("{state}, which is low"))
        } else {
            Ok(state)
        },
        optional: true,
        fixes: if is_low {
            vec![format!("sysctl -w fs.inotify.{setting}={enough}")]
        } else {
            Vec::new()
        },
    }
}

impl Finding {
    fn text(&self) -> String {
        let Self { name, purpose, .. } = self;
        let (mark, state) = match &self.state {
            Ok(state) => ("ok", state),
            Err(why) if self.optional => ("--", why),
            Err(why) => ("NO", why),
        };
        let mut text = format!("{mark}  {name:<20} {state}  ({purpose})\n");
        for fix in &self.fixes {
            text += &format!("    fix: {fix}\n");
        }
        text
    }

    fn json(&self) -> serde_json::Value {
        let (ok, detail) = match &self.state {
            Ok(state) => (true, state),
            Err(why) => (false, why),
        };
        json!({
            "name": self.name, "purpose": self.purpose, "ok": ok, "optional": self.optional,
            "detail": detail, "fixes": self.fixes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_explains_how_to_raise_low_limits() {
        let text = |watches, instances| {
            let findings = inotify(InotifyLimits { watches, instances });
            findings.iter().map(Finding::text).collect::<String>()
        };
        let low = text(8192, 16);
        for part in [
            "--  inotify watches      8192, which is low",
            "fix: sysctl -w fs.inotify.max_user_watches=524288",
            "--  inotify instances    16, which is low",
            "fix: sysctl -w fs.inotify.max_user_instances=1024",
        ] {
            assert!(low.contains(part), "no {part:?} in {low}");
        }
        let enough = text(65_536, 128);
        assert!(
            enough.contains("ok  inotify watches      65536") && !enough.contains("fix"),
            "{enough}"
        );
        let [watches, _] = inotify(InotifyLimits {
            watches: 8192,
            instances: 128,
        });
        let json = watches.json();
        assert_eq!(
            (&json["ok"], &json["optional"]),
            (&false.into(), &true.into())
        );
        assert_eq!(json["fixes"].as_array().map(Vec::len), Some(1));
    }
}
