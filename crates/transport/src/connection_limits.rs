//! Limits of concurrent connections: in total and per address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use exec_server_sync::Mutex;

/// Counts connections, including those in their handshake.
#[derive(Debug)]
pub struct ConnectionCounter {
    state: Mutex<CounterState>,
}

/// Limits of a [`ConnectionCounter`].
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// Connections in total.
    pub connections: usize,
    /// Connections of one address.
    pub per_address: usize,
}

/// Connections above the limit that get an error response at one time; further ones are closed
/// without a response.
const REFUSALS: usize = 64;

#[derive(Debug)]
struct CounterState {
    limits: ConnectionLimits,
    total: usize,
    refusing: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// One counted connection; released on drop.
#[derive(Debug)]
pub struct CountedConnection {
    connection_counter: Arc<ConnectionCounter>,
    address: Option<IpAddr>,
    kind: CountResult,
}

#[derive(Debug, PartialEq, Eq)]
enum CountResult {
    Inside,
    Refused(String),
}

impl CountedConnection {
    /// The text of the limit that prevents this connection from being served, for its peer.
    pub fn refusal(&self) -> Option<&str> {
        match &self.kind {
            CountResult::Inside => None,
            CountResult::Refused(text) => Some(text),
        }
    }
}

impl ConnectionCounter {
    /// Creates a counter.
    #[must_use]
    pub fn new(limits: ConnectionLimits) -> Self {
        let state = CounterState {
            limits,
            total: 0,
            refusing: 0,
            by_address: HashMap::new(),
        };
        Self {
            state: Mutex::new(state),
        }
    }

    /// Changes the limits for new connections.
    pub fn set_limits(&self, limits: ConnectionLimits) {
        self.state.lock().limits = limits;
    }

    /// Counts a new connection. Above a limit, returns a [`CountedConnection`] with a refusal to send to the
    /// peer; `None` if too many refusals are being sent already.
    pub fn enter(self: &Arc<Self>, address: Option<IpAddr>) -> Option<CountedConnection> {
        let mut state = self.state.lock();
        let ConnectionLimits {
            connections,
            per_address,
        } = state.limits;
        let here = address.and_then(|address| state.by_address.get(&address).copied());
        let kind = if state.total >= connections {
            CountResult::Refused(format!("limit of {connections} connections reached"))
        } else if here.unwrap_or(0) >= per_address {
            let text = format!("limit of {per_address} connections from one address reached");
            CountResult::Refused(text)
        } else {
            CountResult::Inside
        };
        if kind == CountResult::Inside {
            state.total += 1;
            if let Some(address) = address {
                *state.by_address.entry(address).or_default() += 1;
            }
        } else if state.refusing < REFUSALS {
            state.refusing += 1;
        } else {
            return None;
        }
        drop(state);
        Some(CountedConnection {
            connection_counter: Arc::clone(self),
            address,
            kind,
        })
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        let mut state = self.connection_counter.state.lock();
        if self.kind != CountResult::Inside {
            state.refusing -= 1;
            return;
        }
        state.total -= 1;
        if let Some(address) = self.address
            && let Some(count) = state.by_address.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                state.by_address.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_above_limits_are_refused_and_dropped_ones_are_released() {
        let connection_counter = Arc::new(ConnectionCounter::new(ConnectionLimits {
            connections: 3,
            per_address: 2,
        }));
        let one: Option<IpAddr> = "192.0.2.1".parse().ok();
        let places: Vec<_> = (0..3)
            .map(|_| connection_counter.enter(one).unwrap())
            .collect();
        let refusals: Vec<_> = places.iter().map(CountedConnection::refusal).collect();
        let text = "limit of 2 connections from one address reached";
        assert_eq!(refusals, [None, None, Some(text)]);
        assert_eq!(connection_counter.state.lock().total, 2);
        let _local = connection_counter.enter(None).unwrap();
        let full = connection_counter.enter(None).unwrap();
        assert_eq!(full.refusal(), Some("limit of 3 connections reached"));
        let refused: Vec<_> = (0..100)
            .map_while(|_| connection_counter.enter(None))
            .collect();
        assert_eq!(refused.len(), REFUSALS - 2);
        drop((refused, full, places));
        assert_eq!(connection_counter.state.lock().total, 1);
        assert_eq!(connection_counter.enter(one).unwrap().refusal(), None);
        assert!(connection_counter.state.lock().by_address.is_empty());
    }
}
