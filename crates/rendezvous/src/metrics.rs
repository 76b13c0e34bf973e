//! Prometheus metrics of the rendezvous server.

use std::sync::Arc;

use exec_server_transport::metrics::{Counter, PrometheusText, label};

use crate::tenants::UsageCounters;

/// Names of the registry requests, in the order of [`RendezvousMetrics::calls`].
pub(crate) const CALLS: [&str; 9] = [
    "register", "connect", "validate", "list", "remove", "revoke", "permit", "drain", "other",
];

/// Counters of one rendezvous server.
#[derive(Debug, Default)]
pub(crate) struct RendezvousMetrics {
    pub(crate) connections: Counter,
    pub(crate) executors: Counter,
    pub(crate) harnesses: Counter,
    pub(crate) executor_sockets: Counter,
    pub(crate) harness_sockets: Counter,
    /// Refused websocket upgrades.
    pub(crate) upgrades_refused: Counter,
    /// Requests without a valid token.
    pub(crate) unauthorized: Counter,
    /// Sockets closed because the peer violated the protocol.
    pub(crate) violations: Counter,
    /// Harnesses disconnected because of a revocation.
    pub(crate) revoked: Counter,
    /// Handshakes that the registry did not validate.
    pub(crate) invalid: Counter,
    /// Frames that had to wait for room.
    pub(crate) waits: Counter,
    /// Streams ended because the receiver was too slow.
    pub(crate) slow: Counter,
    pub(crate) frames: Counter,
    pub(crate) received_bytes: Counter,
    pub(crate) sent_bytes: Counter,
    /// By request: successful ones and failed ones.
    calls: [[Counter; 2]; CALLS.len()],
}

impl RendezvousMetrics {
    pub(crate) fn received(&self, bytes: usize) {
        self.frames.add(1);
        self.received_bytes.add(bytes as u64);
    }

    pub(crate) fn sent(&self, bytes: usize) {
        self.sent_bytes.add(bytes as u64);
    }

    pub(crate) fn called(&self, call: &str, status: u16) {
        let index = CALLS.iter().position(|name| *name == call);
        let index = index.unwrap_or(CALLS.len() - 1);
        self.calls[index][usize::from(status >= 400)].add(1);
    }

    /// Renders the metrics in the text format of Prometheus.
    pub(crate) fn render(
        &self,
        backlog: usize,
        draining: bool,
        node: &str,
        tenants: &[(Arc<str>, Arc<UsageCounters>)],
    ) -> String {
        let mut page = PrometheusText::new("exec_server_rendezvous_");
        page.family("build_info", "gauge", "Version of the running program.");
        let node = label(node);
        let version = env!("CARGO_PKG_VERSION");
        let labels = format!("{{version=\"{version}\",node=\"{node}\"}}");
        page.sample("build_info", &labels, 1);
        for (name, help, value) in [
            ("connections", "Open connections.", self.connections.value()),
            ("executors", "Attached executors.", self.executors.value()),
            ("harnesses", "Attached harnesses.", self.harnesses.value()),
            (
                "backlog_bytes",
                "Bytes that wait for a socket.",
                backlog as u64,
            ),
            ("draining", "1 while it shuts down.", draining.into()),
        ] {
            page.single(name, "gauge", help, value);
        }
        for (name, help, counter) in [
            (
                "executor_sockets_total",
                "Sockets of executors so far.",
                &self.executor_sockets,
            ),
            (
                "harness_sockets_total",
                "Sockets of harnesses so far.",
                &self.harness_sockets,
            ),
            (
                "sockets_refused_total",
                "Websocket upgrades refused.",
                &self.upgrades_refused,
            ),
            (
                "unauthorized_total",
                "Requests without a valid token.",
                &self.unauthorized,
            ),
            (
                "violations_total",
                "Sockets closed because of a protocol violation.",
                &self.violations,
            ),
            (
                "revoked_total",
                "Harness sockets ended by a revocation.",
                &self.revoked,
            ),
            (
                "invalid_handshakes_total",
                "Handshakes that the registry did not validate.",
                &self.invalid,
            ),
            (
                "frame_waits_total",
                "Frames that had to wait for room.",
                &self.waits,
            ),
            (
                "slow_streams_total",
                "Streams ended because the receiver was too slow.",
                &self.slow,
            ),
            ("frames_total", "Relay frames received.", &self.frames),
            (
                "received_bytes_total",
                "Bytes of relay frames received.",
                &self.received_bytes,
            ),
            (
                "sent_bytes_total",
                "Bytes written to sockets.",
                &self.sent_bytes,
            ),
        ] {
            page.single(name, "counter", help, counter.value());
        }
        page.family("calls_total", "counter", "Registry requests.");
        for (name, counters) in CALLS.iter().zip(&self.calls) {
            for (outcome, counter) in ["ok", "error"].iter().zip(counters) {
                let labels = format!("{{call=\"{name}\",outcome=\"{outcome}\"}}");
                page.sample("calls_total", &labels, counter.value());
            }
        }
        type Of = fn(&UsageCounters) -> &Counter;
        let families: [(&str, &str, &str, Of); 6] = [
            (
                "tenant_executors",
                "gauge",
                "Attached executors of a tenant.",
                |tenant| &tenant.executors,
            ),
            (
                "tenant_streams",
                "gauge",
                "Sockets of a tenant's harnesses.",
                |tenant| &tenant.streams,
            ),
            (
                "tenant_received_bytes_total",
                "counter",
                "Bytes of relay frames received from a tenant.",
                |tenant| &tenant.received_bytes,
            ),
            (
                "tenant_handshakes_total",
                "counter",
                "Handshakes of a tenant's harnesses.",
                |tenant| &tenant.handshakes,
            ),
            (
                "tenant_waits_total",
                "counter",
                "Times a tenant's quota made a socket wait.",
                |tenant| &tenant.waits,
            ),
            (
                "tenant_refused_total",
                "counter",
                "Calls and sockets refused by a tenant's quota.",
                |tenant| &tenant.refused,
            ),
        ];
        for (name, kind, help, of) in families {
            page.family(name, kind, help);
            for (tenant, counters) in tenants {
                let labels = format!("{{node=\"{node}\",tenant=\"{tenant}\"}}");
                page.sample(name, &labels, of(counters).value());
            }
        }
        page.into_text()
    }
}
