//! /proc inspection of processes that are not children of the test.

use std::fmt::Display;
use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time limit of every wait in tests: generous, because the machine may be busy.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns a text that is unique on this machine.
///
/// Set it as a variable in a process's environment to find the process and all its descendants with
/// [`bearers`].
#[must_use]
pub fn marker() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("exec-server-test-{}-{number};", std::process::id())
}

/// Returns the running processes whose environment contains `marker`, with their command lines.
#[must_use]
pub fn bearers(marker: &str) -> Vec<(i32, String)> {
    pids()
        .filter(|&pid| {
            // Empty for a zombie, which counts as ended.
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

/// Waits until no running process has `marker` in its environment.
///
/// # Panics
///
/// One still does after [`TIMEOUT`].
pub async fn all_gone(marker: &str) {
    eventually("processes that should have ended", || {
        let left = bearers(marker);
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    })
    .await;
}

/// Polls `look` until it succeeds; its error describes the observed state.
///
/// For conditions without a notification, such as the end of another process's child.
///
/// # Panics
///
/// After [`TIMEOUT`], with the last error.
pub async fn eventually<T, E: Display>(what: &str, mut look: impl FnMut() -> Result<T, E>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match look() {
            Ok(found) => return found,
            Err(seen) if Instant::now() >= deadline => panic!("{what}: still {seen}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// Returns the running children of a process.
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

/// Returns the children of a process that have ended and were not reaped.
#[must_use]
pub fn zombies(parent: u32) -> Vec<i32> {
    pids()
        .filter(|&pid| {
            state_and_parent(pid).is_some_and(|(state, of)| of == i64::from(parent) && state == "Z")
        })
        .collect()
}

/// Number of open descriptors of a process.
///
/// # Panics
///
/// The process has ended.
#[must_use]
pub fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("the process's descriptors")
        .count()
}

/// Largest resident size of a process since [`forget_peak`], in bytes.
///
/// # Panics
///
/// The process has ended.
#[must_use]
pub fn peak_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process's status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.expect("VmHWM in the process's status") * 1024
}

/// Resets [`peak_memory`].
///
/// # Panics
///
/// The process has ended.
pub fn forget_peak(pid: u32) {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("the process's peak to be reset");
}

/// Sends a signal.
///
/// # Panics
///
/// The process has ended.
pub fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .expect("a pid");
    kill_process(pid, signal).expect("the process exists");
}

fn pids() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc")
        .expect("/proc")
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the third and fourth field of `/proc/PID/stat`.
fn state_and_parent(pid: i32) -> Option<(String, i64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The preceding field, the name, may contain spaces and parentheses.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}
