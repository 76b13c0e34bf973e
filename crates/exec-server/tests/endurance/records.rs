//! Records of closed processes: their memory, and when new processes evict them.

use std::collections::BTreeMap;
use std::time::Duration;

use exec_server::protocol::process::{Delivery, StartParams, WaitUntil};
use exec_server::protocol::sandbox::{
    EntryPath, FilePermissions, NetworkPermission, PathAccess, Permissions, Sandbox, SandboxEntry,
    SpecialPath,
};
use exec_server::{CollectOptions, ExecBackend as _, ExecServerConfig, ReadRequest};

use super::{eventually, live_bytes, serially, served};

/// The most that the record of a closed process without output may cost.
const RECORD_BYTES: usize = 5 * 1024;

/// Settings under which records stay until they are evicted.
fn config() -> ExecServerConfig {
    ExecServerConfig {
        closed_retention: Duration::from_secs(3600),
        ..ExecServerConfig::default()
    }
}

fn command(number: usize, argv: &[&str]) -> StartParams {
    StartParams {
        process_id: format!("p{number}"),
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]),
        ..StartParams::default()
    }
}

#[tokio::test]
async fn record_of_a_closed_process_uses_at_most_5_kib() {
    const COUNT: usize = 200;
    let _one = serially().await;
    let (_server, client) = served(config()).await;
    let mut before = 0;
    for number in 0..2 * COUNT {
        if number == COUNT {
            before = live_bytes();
        }
        let process = client
            .start(command(number, &["true"]))
            .await
            .unwrap()
            .process;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.exit.unwrap().exit_code, 0);
    }
    assert_eq!(client.list().await.unwrap().len(), 2 * COUNT);
    eventually("tasks of closed processes end", || {
        let each = live_bytes().saturating_sub(before) / COUNT;
        (each <= RECORD_BYTES).then_some(()).ok_or(each)
    })
    .await;
}

/// A policy that allows reading everything and nothing else.
pub(super) fn read_only() -> Sandbox {
    let entry = SandboxEntry {
        path: EntryPath::Special {
            value: SpecialPath::Root,
        },
        access: PathAccess::Read,
        missing_path_behavior: None,
    };
    Sandbox::new(Permissions::Managed {
        file_system: FilePermissions::Restricted {
            entries: vec![entry],
            glob_scan_max_depth: None,
        },
        network: NetworkPermission::Restricted,
    })
}

/// Open descriptors of this process, the server's included.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test]
async fn records_of_closed_processes_hold_no_descriptors() {
    const COUNT: usize = 60;
    /// Launchers and helpers that are kept for the next sandbox.
    const SLACK: usize = 5;
    let _one = serially().await;
    let config = ExecServerConfig {
        sandbox_launcher: Some(env!("CARGO_BIN_EXE_exec-server").into()),
        ..config()
    };
    let (_server, client) = served(config).await;
    let mut before = 0;
    for number in 0..2 * COUNT {
        if number == COUNT {
            before = descriptors();
        }
        let mut params = command(number, &["true"]);
        match number % 3 {
            0 => params.tty = true,
            1 => params.sandbox = Some(read_only()),
            _ => {}
        }
        let process = client.start(params).await.unwrap().process;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.exit.unwrap().exit_code, 0);
    }
    assert_eq!(client.list().await.unwrap().len(), 2 * COUNT);
    eventually("descriptors of closed processes are closed", || {
        let now = descriptors();
        let allowed = before + SLACK;
        (now <= allowed)
            .then_some(())
            .ok_or(format!("{before} before, {now} now"))
    })
    .await;
}

#[tokio::test]
async fn oldest_delivered_records_are_evicted_for_new_processes() {
    let _one = serially().await;
    let config = ExecServerConfig {
        max_processes_per_session: 4,
        ..config()
    };
    let (_server, client) = served(config).await;
    let live = client
        .start(command(0, &["sleep", "600"]))
        .await
        .unwrap()
        .process;
    for number in 1..40 {
        let delivery = if number % 2 == 0 {
            Delivery::Push
        } else {
            Delivery::Pull
        };
        let params = StartParams {
            delivery: Some(delivery),
            ..command(number, &["echo", "hello"])
        };
        let process = client.start(params).await.unwrap().process;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.stdout, b"hello\n");
    }
    let mut left: Vec<String> = client
        .list()
        .await
        .unwrap()
        .into_iter()
        .map(|listed| listed.process_id)
        .collect();
    left.sort();
    assert_eq!(left, ["p0", "p37", "p38", "p39"]);
    assert_eq!(live.process_id(), "p0");
}

#[tokio::test]
async fn live_processes_per_session_are_limited() {
    let _one = serially().await;
    let config = ExecServerConfig {
        max_processes_per_session: 2,
        ..config()
    };
    let (_server, client) = served(config).await;
    for number in 0..2 {
        client
            .start(command(number, &["sleep", "600"]))
            .await
            .unwrap();
    }
    let refused = client.start(command(2, &["true"])).await.unwrap_err();
    let wanted = "limit of 2 processes per session reached";
    assert!(refused.to_string().contains(wanted), "{refused}");
}

#[tokio::test]
async fn records_with_unread_output_are_not_evicted() {
    let _one = serially().await;
    let config = ExecServerConfig {
        max_processes_per_session: 2,
        ..config()
    };
    let (_server, client) = served(config).await;
    let mut processes = Vec::new();
    for number in 0..2 {
        let params = StartParams {
            delivery: Some(Delivery::Pull),
            ..command(number, &["echo", "hello"])
        };
        let process = client.start(params).await.unwrap().process;
        process.wait(WaitUntil::Closed, None).await.unwrap();
        processes.push(process);
    }
    let refused = client.start(command(2, &["true"])).await.unwrap_err();
    let wanted = "limit of 2 processes per session reached";
    assert!(refused.to_string().contains(wanted), "{refused}");
    // Read to its end, the first is evicted; the other stays.
    let read = processes[0].read(ReadRequest::default()).await.unwrap();
    assert!(read.closed && read.chunks.len() == 1, "{read:?}");
    client.start(command(3, &["true"])).await.unwrap();
    let gone = processes[0].read(ReadRequest::default()).await;
    let gone = gone.unwrap_err().to_string();
    assert!(gone.contains("unknown process id p0"), "{gone}");
    let kept = processes[1].read(ReadRequest::default()).await.unwrap();
    assert_eq!(kept.chunks.len(), 1);
}

#[tokio::test]
async fn delivered_output_is_evicted_at_the_retained_output_limit() {
    let _one = serially().await;
    let config = ExecServerConfig {
        max_retained_bytes: 1 << 20,
        ..config()
    };
    let (server, client) = served(config).await;
    for number in 0..20 {
        let params = command(number, &["head", "-c", "500000", "/dev/zero"]);
        let process = client.start(params).await.unwrap().process;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.stdout.len(), 500_000);
    }
    assert!(server.executor().retained_bytes() <= 2 << 20);
    // Output of live processes stays, and beyond the limit no process is started.
    for number in 20..23 {
        let script = "head -c 500000 /dev/zero; exec sleep 600";
        let params = command(number, &["sh", "-c", script]);
        let process = client.start(params).await.unwrap().process;
        assert_eq!(process.process_id(), format!("p{number}"));
    }
    let live_bytes = async || -> u64 {
        let listed = client.list().await.unwrap();
        let live = listed.iter().filter(|listed| listed.running);
        live.map(|listed| listed.retained_bytes).sum()
    };
    while live_bytes().await < 1_500_000 {}
    let refused = client.start(command(23, &["true"])).await.unwrap_err();
    let wanted = "limit of 1048576 bytes of retained output reached";
    assert!(refused.to_string().contains(wanted), "{refused}");
}
