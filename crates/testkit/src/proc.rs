//! What `/proc` tells of processes that are not ours to wait for.

use std::fmt::Display;
use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How long anything that must happen may take on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A text that occurs nowhere else on this machine.
///
/// Put it in the environment of a process to find it and all its descendants with [`bearers`].
#[must_use]
pub fn marker() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("exec-server-test-{}-{number};", std::process::id())
}

/// The living processes whose environment holds `marker`, with their command lines.
#[must_use]
pub fn bearers(marker: &str) -> Vec<(i32, String)> {
    pids()
        .filter(|&pid| {
            // Empty for a zombie, which is dead enough.
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment
                .windows(marker.len())
                .any(|window| window == marker.as_bytes())
        })
        .map(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            (pid, String::from_utf8_lossy(&line).replace('\0', " "))
        })
        .collect()
}

/// Waits until no living process bears `marker`.
///
/// # Panics
///
/// If one still does after [`PATIENCE`].
pub async fn all_gone(marker: &str) {
    eventually("processes that should be gone", || {
        let left = bearers(marker);
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    })
    .await;
}

/// Waits until `look` finds what it wants; its error says what it saw instead.
///
/// For conditions that nobody announces, such as the death of somebody else's child.
///
/// # Panics
///
/// After [`PATIENCE`], with what was seen last.
pub async fn eventually<T, E: Display>(what: &str, mut look: impl FnMut() -> Result<T, E>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match look() {
            Ok(found) => return found,
            Err(seen) if Instant::now() >= deadline => panic!("{what}: still {seen}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// The living children of a process.
#[must_use]
pub fn children(parent: u32) -> Vec<i32> {
    let mut children = Vec::new();
    for pid in pids() {
        if let Some((state, of)) = state_and_parent(pid)
            && of == i64::from(parent)
            && state != "Z"
        {
            children.push(pid);
        }
    }
    children
}

/// The ended children of a process that it has not reaped.
#[must_use]
pub fn zombies(parent: u32) -> Vec<i32> {
    pids()
        .filter(|&pid| {
            state_and_parent(pid).is_some_and(|(state, of)| of == i64::from(parent) && state == "Z")
        })
        .collect()
}

/// Open descriptors of a process.
///
/// # Panics
///
/// If the process is gone.
#[must_use]
pub fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("the process's descriptors")
        .count()
}

/// The largest resident size that a process has had since [`forget_peak`], in bytes.
///
/// # Panics
///
/// If the process is gone.
#[must_use]
pub fn peak_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process's status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.expect("VmHWM in the process's status") * 1024
}

/// Makes [`peak_memory`] begin anew.
///
/// # Panics
///
/// If the process is gone.
pub fn forget_peak(pid: u32) {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("the process's peak to be reset");
}

/// Sends a signal.
///
/// # Panics
///
/// If the process is gone.
pub fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .expect("a pid");
    kill_process(pid, signal).expect("the process to be there");
}

fn pids() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc")
        .expect("/proc")
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The third and fourth field of `/proc/PID/stat`.
fn state_and_parent(pid: i32) -> Option<(String, i64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold spaces and parentheses.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}
