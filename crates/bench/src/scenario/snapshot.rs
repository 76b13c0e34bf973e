//! Commands of a login shell with slow start-up files, restored from a shell snapshot.

use std::time::Instant;

use serde_json::json;

use super::spawn::wait_closed;
use super::{Bench, RowSpec};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::stats::median;

/// Start-up files as slow as those of long-time users can be.
const PROFILE: &str = "sleep 0.3\nf() { echo f; }\nexport FOO=bar\n";

/// The second and later commands of a scope.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let line = RowSpec {
        name: "snapshot of a 300 ms login shell: later commands p50".to_owned(),
        unit: Unit::Seconds,
        base: "",
        goals: vec![Goal::Value {
            limit: 15e-3,
            aim: 6e-3,
        }],
    };
    let count = bench.pick(40, 15);
    let home = tempfile::tempdir().and_then(|home| {
        std::fs::write(home.path().join(".bash_profile"), PROFILE)?;
        Ok(home)
    });
    let mut scope = 0;
    bench.rounds(
        bench.pick(3, 2),
        vec![line],
        || Ok(()),
        |server, ()| {
            let home = home.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
            let mut client = server.client()?;
            scope += 1;
            let mut run = |number: usize| {
                let params = json!({
                    "processId": format!("bench-{number}"),
                    "argv": ["/bin/bash", "-lc", "true"],
                    "cwd": "file:///",
                    "env": {"HOME": home.path(), "PATH": "/usr/local/bin:/usr/bin:/bin"},
                    "tty": false,
                    "shellSnapshot": {
                        "scopeId": scope.to_string(),
                        "shell": {"name": "bash", "path": "/bin/bash"},
                    },
                });
                client.ask("process/start", &params.to_string())?;
                wait_closed(&mut client, 1)
            };
            run(0)?;
            let mut samples = Vec::with_capacity(count);
            for number in 1..=count {
                let start = Instant::now();
                run(number)?;
                samples.push(start.elapsed().as_secs_f64());
            }
            Ok(vec![Figure::plain(median(&samples))])
        },
    )
}
