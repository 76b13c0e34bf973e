//! Lifecycle of an executor on a machine that is suspended, copied or resumed from outside.
//!
//! Serves HTTP requests of the machine's own scripts, and detects that the machine was stopped for a
//! while. Both replace the connection to the rendezvous server; sessions and processes stay.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, bail};
use exec_server_egress::own_listeners::OwnListener;
use exec_server_service::peer_owner::{self, AcceptedPeers};
use exec_server_service::remote::{Control, RemoteStatus};
use exec_server_transport::http::{HeadKind, HttpHead, read_head};
use rustix::fs::{Mode, OFlags};
use rustix::time::{ClockId, clock_gettime};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// How often the clocks are compared.
const CLOCK_PERIOD: Duration = Duration::from_secs(2);

/// Difference of the clocks above which the machine was stopped, or its clock was set after a stop.
const CLOCK_JUMP: Duration = Duration::from_secs(5);

/// Time limit for one request.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// Maximum number of simultaneous connections: scripts make one at a time.
const MAX_CONNECTIONS: usize = 32;

/// Listener for requests of this machine's scripts.
pub(super) struct Lifecycle {
    listener: TcpListener,
    /// Keeps sandboxed processes of this program from using the listener through a proxy.
    _own: OwnListener,
    requests: LifecycleRequests,
}

/// What the requests read and change.
#[derive(Clone)]
struct LifecycleRequests {
    control: Control,
    status: watch::Receiver<RemoteStatus>,
    terminated: CancellationToken,
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
        let address = listener.local_addr()?;
        eprintln!("lifecycle: http://{address}");
        Ok(Self {
            listener,
            _own: OwnListener::register(address),
            requests: LifecycleRequests {
                control,
                status,
                terminated: CancellationToken::new(),
            },
        })
    }

    /// Cancelled by a request to end the program.
    pub(super) fn terminated(&self) -> CancellationToken {
        self.requests.terminated.clone()
    }

    /// Handles requests until this future is dropped, which closes all connections.
    pub(super) async fn serve(self) {
        let mut tasks = JoinSet::new();
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    // Closes the connection.
                    Ok(_) if tasks.len() >= MAX_CONNECTIONS => {}
                    Ok((stream, peer)) => {
                        let requests = self.requests.clone();
                        tasks.spawn(tokio::time::timeout(REQUEST_LIMIT, async move {
                            requests.serve(stream, peer).await
                        }));
                    }
                    // The process has no free file descriptor.
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                },
                Some(_) = tasks.join_next() => {}
            }
        }
    }
}

impl LifecycleRequests {
    async fn serve(&self, mut stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
        // Other processes are refused before they can occupy a connection for long.
        let local = stream.local_addr();
        let (head, status, body) =
            match peer_owner::admit(peer, local, AcceptedPeers::OwnUser).await {
                Err(reason) => {
                    tracing::warn!(%peer, reason, "lifecycle request refused");
                    (HttpHead::default(), 403, reason)
                }
                Ok(()) => match read_head(&mut stream, HeadKind::Request).await {
                    Ok(head) => {
                        let (status, body) = self.answer(&head);
                        (head, status, body.to_owned())
                    }
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                        (HttpHead::default(), 400, error.to_string())
                    }
                    Err(error) => return Err(error),
                },
            };
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 {status} \r\nConnection: close\r\nContent-Type: text/plain\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        );
        let answer = head.without_needless_body(answer.into_bytes());
        stream.write_all(&answer).await?;
        stream.shutdown().await
    }

    fn answer(&self, head: &HttpHead) -> (u16, &'static str) {
        match (head.method.as_str(), head.path()) {
            // A web page in a browser of this machine must not end the program, whatever name leads
            // it here.
            _ if head.is_of_browser()
                || head.is_of_web_page()
                || !head.headers_named("host").all(is_loopback_host) =>
            {
                (403, "")
            }
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
        }
    }
}

/// Whether a `Host` header names this machine by a loopback address or as `localhost`.
fn is_loopback_host(host: &str) -> bool {
    if let Ok(address) = host.parse::<SocketAddr>() {
        return address.ip().is_loopback();
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    match bare.parse::<IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_) => name.eq_ignore_ascii_case("localhost"),
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
    fn only_loopback_hosts_are_accepted() {
        for (host, expected) in [
            ("127.0.0.1:80", true),
            ("127.9.0.1", true),
            ("[::1]:80", true),
            ("[::1]", true),
            ("localhost", true),
            ("LocalHost:80", true),
            ("", false),
            ("attacker.example", false),
            ("attacker.example:80", false),
            ("localhost.attacker.example", false),
            ("192.0.2.1:80", false),
            ("0.0.0.0", false),
            ("[::]", false),
        ] {
            assert_eq!(is_loopback_host(host), expected, "{host}");
        }
    }

    #[test]
    fn clocks_of_a_running_machine_show_no_suspend() {
        let before = Clocks::now();
        assert_eq!(Clocks::now().jump_since(&before), None);
    }
}
