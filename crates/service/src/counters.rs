//! Counters of the server.
//!
//! [`metrics`](crate::metrics) renders them. Numbers that can be read on demand (sessions,
//! processes, bytes) have no counter.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use exec_server_engine::log::Exit;
use exec_server_protocol::MethodId;
use exec_server_protocol::network::PolicyOutcome;
use exec_server_protocol::table::RequestedMethod;
use exec_server_transport::metrics::Counter;

use crate::auth::AuthError;

/// Upper bounds of the latency buckets: in microseconds, and as the text of the label.
pub(crate) const BUCKETS: [(u64, &str); 7] = [
    (100, "0.0001"),
    (500, "0.0005"),
    (2_000, "0.002"),
    (10_000, "0.01"),
    (100_000, "0.1"),
    (1_000_000, "1"),
    (10_000_000, "10"),
];

/// Latency histogram of one method.
#[derive(Debug, Default)]
pub(crate) struct LatencyHistogram {
    /// Responses by bucket; the last one counts those above all bounds.
    pub(crate) counts: [Counter; BUCKETS.len() + 1],
    pub(crate) micros: Counter,
    pub(crate) errors: Counter,
}

/// Index of a method in the counters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MethodIndex(pub(crate) usize);

impl MethodIndex {
    /// Number of counters: one for each served method, and one for all other names, so that a peer
    /// cannot create more.
    pub(crate) const COUNT: usize = MethodId::ALL.len() + 1;

    pub(crate) fn name(self) -> &'static str {
        let served = MethodId::ALL.get(self.0);
        served.map_or("~other", |method| method.row().name)
    }
}

impl From<RequestedMethod<'_>> for MethodIndex {
    fn from(named: RequestedMethod<'_>) -> Self {
        Self(match named {
            RequestedMethod::Served(method) => method as usize,
            RequestedMethod::Unknown(_) => Self::COUNT - 1,
        })
    }
}

/// Labels for how a process ended.
pub(crate) const EXIT_CAUSES: [&str; 4] = ["success", "failure", "signal", "timeout"];

/// Labels for the outcome of a network policy decision.
pub(crate) const NETWORK_OUTCOMES: [&str; 3] = ["allow", "deny", "ask"];

/// Labels for why a connection was refused.
pub(crate) const REFUSALS: [&str; 7] = [
    "token",
    "header",
    "throttled",
    "origin",
    "limit",
    "sandbox",
    "user",
];

/// The check that refused a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RefusalCause {
    Token,
    Header,
    Throttled,
    Origin,
    Limit,
    Sandbox,
    User,
}

impl From<AuthError> for RefusalCause {
    fn from(error: AuthError) -> Self {
        match error {
            AuthError::Missing | AuthError::Header => Self::Header,
            _ => Self::Token,
        }
    }
}

/// Number of the objects of one kind that exist.
#[derive(Debug, Clone, Default)]
pub(crate) struct LiveCounter(Arc<AtomicUsize>);

/// Membership of one object in a [`LiveCounter`]; a field of the object, so that it is counted as
/// long as it exists.
#[derive(Debug)]
pub(crate) struct LiveObject(LiveCounter);

impl LiveCounter {
    pub(crate) fn object(&self) -> LiveObject {
        self.0.fetch_add(1, Ordering::Relaxed);
        LiveObject(self.clone())
    }

    fn value(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for LiveObject {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Numbers of objects that exist now, by kind.
#[derive(Debug, Default)]
pub(crate) struct LiveObjects {
    pub(crate) watches: LiveCounter,
    pub(crate) file_handles: LiveCounter,
    pub(crate) waiting_requests: LiveCounter,
    pub(crate) server_requests: LiveCounter,
    pub(crate) http_requests: LiveCounter,
    pub(crate) relay_streams: LiveCounter,
}

impl LiveObjects {
    /// Each kind with its number.
    pub(crate) fn all(&self) -> [(&'static str, usize); 6] {
        [
            ("watches", &self.watches),
            ("file_handles", &self.file_handles),
            ("waiting_requests", &self.waiting_requests),
            ("server_requests", &self.server_requests),
            ("http_requests", &self.http_requests),
            ("relay_streams", &self.relay_streams),
        ]
        .map(|(kind, counter)| (kind, counter.value()))
    }
}

/// The counters of one server.
#[derive(Debug)]
pub(crate) struct ServerMetrics {
    pub(crate) connections: Counter,
    pub(crate) sessions: Counter,
    pub(crate) received_bytes: Counter,
    pub(crate) sent_bytes: Counter,
    pub(crate) started: Counter,
    pub(crate) start_failures: Counter,
    pub(crate) sandbox_refusals: Counter,
    /// Network policy requests that were sent to clients.
    pub(crate) network_asks: Counter,
    /// Network policy decisions that could not be reported to a client.
    pub(crate) network_untold: Counter,
    pub(crate) network_decisions: [Counter; NETWORK_OUTCOMES.len()],
    pub(crate) exits: [Counter; EXIT_CAUSES.len()],
    pub(crate) refusals: [Counter; REFUSALS.len()],
    pub(crate) latencies: Vec<LatencyHistogram>,
    pub(crate) live: LiveObjects,
}

impl Default for ServerMetrics {
    fn default() -> Self {
        Self {
            connections: Counter::default(),
            sessions: Counter::default(),
            received_bytes: Counter::default(),
            sent_bytes: Counter::default(),
            started: Counter::default(),
            start_failures: Counter::default(),
            sandbox_refusals: Counter::default(),
            network_asks: Counter::default(),
            network_untold: Counter::default(),
            network_decisions: Default::default(),
            exits: Default::default(),
            refusals: Default::default(),
            latencies: (0..MethodIndex::COUNT)
                .map(|_| LatencyHistogram::default())
                .collect(),
            live: LiveObjects::default(),
        }
    }
}

impl ServerMetrics {
    pub(crate) fn refused(&self, cause: RefusalCause) {
        self.refusals[cause as usize].add(1);
    }

    pub(crate) fn network_decided(&self, outcome: PolicyOutcome) {
        let index = match outcome {
            PolicyOutcome::Allow => 0,
            PolicyOutcome::Deny => 1,
            PolicyOutcome::Ask => 2,
        };
        self.network_decisions[index].add(1);
    }

    pub(crate) fn exited(&self, exit: &Exit) {
        let cause = if exit.timed_out {
            3
        } else if exit.signal.is_some() {
            2
        } else {
            usize::from(exit.code != 0)
        };
        self.exits[cause].add(1);
    }

    pub(crate) fn record_response(&self, method: MethodIndex, took: Duration, failed: bool) {
        let latency = &self.latencies[method.0];
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BUCKETS
            .iter()
            .position(|(bound, _)| micros <= *bound)
            .unwrap_or(BUCKETS.len());
        latency.counts[bucket].add(1);
        latency.micros.add(micros);
        if failed {
            latency.errors.add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_methods_are_counted_by_name_and_all_others_as_one() {
        let name = |method| MethodIndex::from(RequestedMethod::of(method)).name();
        for method in ["capabilities/discoverV2", "initialize", "session/end"] {
            assert_eq!(name(method), method);
        }
        assert_eq!((name("made/up"), name("zzz")), ("~other", "~other"));
        let names = (0..MethodIndex::COUNT).map(|index| MethodIndex(index).name());
        let names: std::collections::HashSet<_> = names.collect();
        assert_eq!(names.len(), MethodIndex::COUNT);
    }
}
