//! Lifecycle of an executor on a machine that is suspended, copied or resumed from outside.
//!
//! Serves HTTP requests of the machine's own scripts, and detects that the machine was stopped for a
//! while. Both replace the connection to the rendezvous server; sessions and processes stay.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use exec_server_service::remote::{Control, RemoteStatus};
use exec_server_transport::http::{HeadKind, read_head};
use rustix::fs::{Mode, OFlags};
use rustix::time::{ClockId, clock_gettime};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How often the clocks are compared.
const CLOCK_PERIOD: Duration = Duration::from_secs(2);

/// Difference of the clocks above which the machine was stopped, or its clock was set after a stop.
const CLOCK_JUMP: Duration = Duration::from_secs(5);

/// Time limit for one request.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// Listener for requests of this machine's scripts.
pub(super) struct Lifecycle {
    listener: TcpListener,
    control: Control,
    status: watch::Receiver<RemoteStatus>,
    /// Cancelled by a request to end the program.
    pub(super) terminated: CancellationToken,
}

impl Lifecycle {
    /// Listens on a loopback address, and prints it on standard error.
    pub(super) async fn listen(
        address: &str,
        control: Control,
        status: watch::Receiver<RemoteStatus>,
    ) -> anyhow::Result<Self> {
        let address: SocketAddr = address.parse().with_context(|| {
            format!("`remote.lifecycle_listen` is `{address}`; expected IP:PORT")
        })?;
        if !address.ip().is_loopback() {
            bail!(
                "`remote.lifecycle_listen` is `{address}`: only loopback addresses are allowed, \
                 because every peer could end this program"
            );
        }
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {address} for lifecycle requests"))?;
        eprintln!("lifecycle: http://{}", listener.local_addr()?);
        Ok(Self {
            listener,
            control,
            status,
            terminated: CancellationToken::new(),
        })
    }

    /// Handles requests one after the other: they are few and short.
    pub(super) async fn serve(self) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let _ = tokio::time::timeout(REQUEST_LIMIT, self.answer(stream)).await;
                }
                // The process has no free file descriptor.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    async fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let head = read_head(&mut stream, HeadKind::Request).await?;
        let (status, body) = match (head.method.as_str(), head.path()) {
            // A web page in a browser of this machine must not end the program.
            _ if head.is_of_browser() => (403, ""),
            ("GET" | "HEAD", "/ready") => match *self.status.borrow() {
                RemoteStatus::Attached => (200, "attached\n"),
                RemoteStatus::Connecting => (503, "not attached\n"),
            },
            ("POST", "/suspend") => {
                tracing::info!("suspended by a lifecycle request");
                self.control.suspend();
                (200, "suspended\n")
            }
            ("POST", "/resume") => {
                tracing::info!("resumed by a lifecycle request");
                self.control.resume();
                (200, "resumed\n")
            }
            ("POST", "/terminate") => {
                self.terminated.cancel();
                (200, "terminating\n")
            }
            (_, "/ready" | "/suspend" | "/resume" | "/terminate") => (405, ""),
            _ => (404, ""),
        };
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 {status} \r\nConnection: close\r\nContent-Type: text/plain\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    }
}

/// Replaces the connection whenever the machine was stopped for a while. The other end has closed
/// it by then; without this check, a missing pong would show that only after a minute.
pub(super) async fn watch_clocks(control: Control) {
    let mut before = Clocks::now();
    loop {
        tokio::time::sleep(CLOCK_PERIOD).await;
        let now = Clocks::now();
        if let Some(jump) = now.jump_since(&before) {
            tracing::warn!(
                ?jump,
                other_boot = now.boot != before.boot,
                "this machine was stopped; replacing the connection to the rendezvous server"
            );
            control.reconnect();
        }
        before = now;
    }
}

/// Readings of the machine's clocks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Clocks {
    /// Stops while the machine is suspended.
    running: Duration,
    /// Continues while the machine is suspended.
    since_boot: Duration,
    /// Wall clock; set after a virtual machine was restored.
    wall: Duration,
    /// Id of this boot of the kernel, if the kernel shows it.
    boot: Option<[u8; 36]>,
}

impl Clocks {
    fn now() -> Self {
        let read = |clock| {
            let time = clock_gettime(clock);
            let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
            let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
            Duration::new(seconds, nanos)
        };
        Self {
            running: read(ClockId::Monotonic),
            since_boot: read(ClockId::Boottime),
            wall: read(ClockId::Realtime),
            boot: boot_id(),
        }
    }

    /// Returns for how long the machine was stopped between two readings, if it was.
    fn jump_since(&self, before: &Self) -> Option<Duration> {
        let ran = self.running.saturating_sub(before.running);
        let passed = [
            self.since_boot.saturating_sub(before.since_boot),
            self.wall.saturating_sub(before.wall),
        ];
        let stopped = passed.into_iter().max().unwrap_or_default();
        let stopped = stopped.saturating_sub(ran);
        (stopped > CLOCK_JUMP || self.boot != before.boot).then_some(stopped)
    }
}

/// Reads the id of this boot. Minimal containers do not show it.
fn boot_id() -> Option<[u8; 36]> {
    let path = "/proc/sys/kernel/random/boot_id";
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut id = [0; 36];
    let read = rustix::io::read(&file, &mut id).ok()?;
    (read == id.len()).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspended_machine_is_detected_by_clock_difference_or_boot_id() {
        let seconds = Duration::from_secs;
        let before = Clocks {
            running: seconds(1000),
            since_boot: seconds(2000),
            wall: seconds(3_000_000),
            boot: Some([1; 36]),
        };
        let later = |running, since_boot, wall| Clocks {
            running: before.running + seconds(running),
            since_boot: before.since_boot + seconds(since_boot),
            wall: before.wall + seconds(wall),
            boot: before.boot,
        };
        // The process itself may have been stopped: all clocks continued.
        for (now, expected) in [
            (later(2, 2, 2), None),
            (later(60, 60, 60), None),
            (later(2, 2, 6), None),
            (later(2, 62, 62), Some(seconds(60))),
            (later(2, 2, 602), Some(seconds(600))),
            (later(2, 12, 2), Some(seconds(10))),
        ] {
            assert_eq!(now.jump_since(&before), expected, "{now:?}");
        }
        let mut earlier = later(2, 2, 2);
        earlier.wall = seconds(1);
        assert_eq!(earlier.jump_since(&before), None, "the clock was set back");
        let mut other = later(2, 2, 2);
        other.boot = Some([2; 36]);
        assert_eq!(other.jump_since(&before), Some(Duration::ZERO));
    }

    #[test]
    fn clocks_of_a_running_machine_show_no_suspend() {
        let before = Clocks::now();
        assert_eq!(Clocks::now().jump_since(&before), None);
    }
}
