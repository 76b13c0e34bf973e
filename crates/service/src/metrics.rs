//! Prometheus metrics of the server: the page and its listener.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use exec_server_engine::OwnListener;
use exec_server_transport::http::{self, HeadKind};
use exec_server_transport::metrics::PrometheusText;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};

use crate::counters::{
    BUCKETS, EXIT_CAUSES, MethodIndex, NETWORK_OUTCOMES, REFUSALS, ServerMetrics,
};
use crate::listen::response;
use crate::peer_owner::{self, AcceptedPeers};
use crate::server::ExecServer;

/// Renders all metrics of a server in the Prometheus text format.
pub(crate) fn render(server: &ExecServer) -> String {
    let metrics = server.metrics();
    let executor = server.executor();
    let mut page = PrometheusText::new("exec_server_");
    let version = concat!("{version=\"", env!("CARGO_PKG_VERSION"), "\"}");
    page.family("build_info", "gauge", "The version that runs.");
    page.sample("build_info", version, 1);
    let gauges: [(&str, &str, u64); 5] = [
        (
            "connections",
            "Connections that are served.",
            server.connections() as u64,
        ),
        (
            "sessions",
            "Sessions, waiting ones included.",
            server.session_count() as u64,
        ),
        ("processes", "Live processes.", executor.live() as u64),
        (
            "retained_bytes",
            "Output that can be read.",
            executor.retained_bytes(),
        ),
        (
            "draining",
            "1 while the server shuts down.",
            server.draining().is_cancelled().into(),
        ),
    ];
    for (name, help, value) in gauges {
        page.single(name, "gauge", help, value);
    }
    page.family(
        "objects",
        "gauge",
        "Objects of clients that exist now, by kind.",
    );
    for (kind, count) in server.live_objects() {
        page.sample("objects", &format!("{{kind=\"{kind}\"}}"), count);
    }
    let table = exec_server_engine::process::table_reads();
    let counters = [
        (
            "connections_total",
            "Connections that were ever served.",
            metrics.connections.value(),
        ),
        (
            "sessions_total",
            "Sessions that were ever opened.",
            metrics.sessions.value(),
        ),
        (
            "processes_started_total",
            "Processes that were started.",
            metrics.started.value(),
        ),
        (
            "process_start_failures_total",
            "Processes that could not be started.",
            metrics.start_failures.value(),
        ),
        (
            "sandbox_refusals_total",
            "Requests whose sandbox could not be enforced.",
            metrics.sandbox_refusals.value(),
        ),
        (
            "network_asks_total",
            "Questions to clients about hosts.",
            metrics.network_asks.value(),
        ),
        (
            "network_decisions_untold_total",
            "Decisions about hosts that were not notified to any client.",
            metrics.network_untold.value(),
        ),
        (
            "received_bytes_total",
            "Bytes that clients sent.",
            metrics.received_bytes.value(),
        ),
        (
            "sent_bytes_total",
            "Bytes that clients were sent.",
            metrics.sent_bytes.value(),
        ),
        (
            "evicted_bytes_total",
            "Output that can no longer be read.",
            executor.evicted_bytes(),
        ),
        (
            "process_table_scans_total",
            "Readings of all of /proc, to find the processes of trees.",
            table.scans,
        ),
        (
            "process_table_updates_total",
            "Readings of the processes that were started since the last one.",
            table.updates,
        ),
    ];
    for (name, help, value) in counters {
        page.single(name, "counter", help, value);
    }
    page.counters(
        "processes_exited_total",
        "Processes that ended, by cause.",
        "cause",
        EXIT_CAUSES.into_iter().zip(&metrics.exits),
    );
    page.counters(
        "network_decisions_total",
        "Attempts of processes to reach hosts, by what became of them.",
        "decision",
        NETWORK_OUTCOMES.into_iter().zip(&metrics.network_decisions),
    );
    page.counters(
        "refusals_total",
        "Refused connections, by cause.",
        "cause",
        REFUSALS.into_iter().zip(&metrics.refusals),
    );
    latencies(&mut page, metrics);
    page.into_text()
}

fn latencies(page: &mut PrometheusText, metrics: &ServerMetrics) {
    const NAME: &str = "request_duration_seconds";
    let used = || {
        (0..MethodIndex::COUNT)
            .map(|index| MethodIndex(index).name())
            .zip(&metrics.latencies)
            .filter(|(_, latency)| latency.counts.iter().any(|count| count.value() > 0))
    };
    page.family(
        NAME,
        "histogram",
        "From a request to its answer, by method; some wait by nature.",
    );
    for (method, latency) in used() {
        let mut total = 0;
        let bounds = BUCKETS.iter().map(|(_, text)| *text).chain(["+Inf"]);
        for (bound, count) in bounds.zip(&latency.counts) {
            total += count.value();
            let labels = format!("{{method=\"{method}\",le=\"{bound}\"}}");
            page.sample(&format!("{NAME}_bucket"), &labels, total);
        }
        let labels = format!("{{method=\"{method}\"}}");
        let seconds = Duration::from_micros(latency.micros.value()).as_secs_f64();
        page.sample(&format!("{NAME}_sum"), &labels, seconds);
        page.sample(&format!("{NAME}_count"), &labels, total);
    }
    page.counters(
        "request_errors_total",
        "Requests that were answered with an error, by method.",
        "method",
        used().map(|(method, latency)| (method, &latency.errors)),
    );
}

/// Serves `/metrics`, `/healthz` and `/readyz` until the server has shut down.
pub async fn serve(listener: TcpListener, server: ExecServer) {
    /// Maximum number of concurrent scrapers; a few are usual.
    const SCRAPERS: usize = 32;
    let slots = std::sync::Arc::new(tokio::sync::Semaphore::new(SCRAPERS));
    let _own = listener.local_addr().map(OwnListener::register);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = server.ended().cancelled() => return,
        };
        let (Ok((stream, peer)), Ok(slot)) = (accepted, slots.clone().try_acquire_owned()) else {
            // The process has no free file descriptor, or all slots for scrapers are in use.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let server = server.clone();
        // The task ends within the handshake timeout.
        tokio::spawn(async move {
            let limit = server.config().handshake_timeout;
            let _ = tokio::time::timeout(limit, answer(stream, peer, &server)).await;
            drop(slot);
        });
    }
}

async fn answer(mut stream: TcpStream, peer: SocketAddr, server: &ExecServer) -> io::Result<()> {
    let admitted = peer_owner::admit(peer, stream.local_addr(), AcceptedPeers::Unsandboxed).await;
    let head = match http::read_head(&mut stream, HeadKind::Request).await {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            let answer = response(400, &error.to_string(), None);
            stream.write_all(&answer).await?;
            return stream.shutdown().await;
        }
        head => head?,
    };
    let readable = head.method == "GET" || head.method == "HEAD";
    let (status, body) = match (admitted, head.path()) {
        (Err(reason), _) => (403, reason),
        // Requests from web pages are refused here too.
        _ if head.is_of_web_page() => (403, String::new()),
        (_, "/metrics" | "/healthz" | "/readyz") if !readable => (405, String::new()),
        (_, "/metrics") => (200, render(server)),
        (_, "/healthz") => (200, String::new()),
        (_, "/readyz") if server.draining().is_cancelled() => (503, String::new()),
        (_, "/readyz") => (200, String::new()),
        _ => (404, String::new()),
    };
    let answer = head.without_needless_body(response(status, &body, None));
    stream.write_all(&answer).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::table::RequestedMethod;

    use super::*;
    use crate::auth::AuthError;
    use crate::config::ExecServerConfig;

    #[tokio::test]
    async fn rendered_page_is_valid_prometheus_text() {
        let server = ExecServer::new(ExecServerConfig::default()).unwrap();
        let method = MethodIndex::from(RequestedMethod::of("process/list"));
        let metrics = server.metrics();
        metrics.record_response(method, Duration::from_micros(50), false);
        metrics.record_response(method, Duration::from_secs(60), true);
        metrics.refused(AuthError::Expired.into());
        let page = render(&server);
        for line in [
            "exec_server_connections 0",
            "exec_server_objects{kind=\"watches\"} 0",
            "exec_server_refusals_total{cause=\"token\"} 1",
            "exec_server_request_duration_seconds_bucket{method=\"process/list\",le=\"0.0001\"} 1",
            "exec_server_request_duration_seconds_bucket{method=\"process/list\",le=\"10\"} 1",
            "exec_server_request_duration_seconds_bucket{method=\"process/list\",le=\"+Inf\"} 2",
            "exec_server_request_duration_seconds_sum{method=\"process/list\"} 60.00005",
            "exec_server_request_duration_seconds_count{method=\"process/list\"} 2",
            "exec_server_request_errors_total{method=\"process/list\"} 1",
        ] {
            assert!(page.lines().any(|other| other == line), "{line}\n{page}");
        }
        assert!(!page.contains("process/start"), "{page}");
        // The `TYPE` line of each family appears once, before its samples.
        let mut announced = std::collections::HashSet::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                assert!(announced.insert(rest.split(' ').next().unwrap().to_owned()));
            } else if !line.starts_with('#') {
                let name = line.split(['{', ' ']).next().unwrap();
                let family = ["_bucket", "_sum", "_count"]
                    .iter()
                    .find_map(|end| name.strip_suffix(end))
                    .filter(|family| announced.contains(*family))
                    .unwrap_or(name);
                assert!(announced.contains(family), "{line}");
            }
        }
    }
}
