//! Test for leaked descriptors and zombies after many processes; alone in its program, so that it
//! can count them.

use std::collections::BTreeMap;
use std::time::Duration;

use exec_server_executor::{Executor, ExecutorConfig, ProcessSpec, PtySize, Stdio};

#[tokio::test]
async fn three_hundred_processes_leak_no_descriptor_or_zombie() {
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let executor = Executor::new(ExecutorConfig::default()).unwrap();
    let first = executor.start(echo(Stdio::default())).await.unwrap();
    first.wait_for(|log| log.close().cloned()).await;
    let before = count();
    let mut kept = Vec::new();
    for n in 0..300 {
        let stdio = match n % 3 {
            0 => Stdio::Pipes { stdin: false },
            1 => Stdio::Pipes { stdin: true },
            _ => Stdio::Terminal(PtySize::default()),
        };
        let process = executor.start(echo(stdio)).await.unwrap();
        process.wait_for(|log| log.close().cloned()).await;
        kept.push(process);
    }
    // Terminals and pipes are closed with the log, not with the handle; a supervisor may still be
    // ending.
    for _ in 0..200 {
        if count() <= before {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(
        count() <= before + 1,
        "{} descriptors before, {} after",
        before,
        count()
    );
    let own = std::process::id().to_string();
    let zombies = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(|entry| {
            let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            stat.contains(&format!(") Z {own} "))
        });
    assert_eq!(zombies.count(), 0);
    assert_eq!(executor.live(), 0);
}

fn echo(stdio: Stdio) -> ProcessSpec {
    ProcessSpec {
        argv: ["/bin/sh", "-c", "echo x"].map(str::to_owned).to_vec(),
        cwd: "/".into(),
        env: BTreeMap::new(),
        stdio,
        ..ProcessSpec::default()
    }
}
