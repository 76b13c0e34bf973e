//! Limits of concurrent connections: in total and per address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use exec_server_sync::Mutex;

/// Counts connections, including those in their handshake.
#[derive(Debug)]
pub(crate) struct Crowd {
    state: Mutex<State>,
}

/// Limits of a [`Crowd`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct CrowdLimits {
    pub(crate) connections: usize,
    pub(crate) per_address: usize,
}

/// Connections above the limit that get an error response at one time; further ones are closed
/// without a response.
const REFUSALS: usize = 64;

#[derive(Debug)]
struct State {
    limits: CrowdLimits,
    total: usize,
    refusing: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// One counted connection; released on drop.
#[derive(Debug)]
pub(crate) struct Place {
    crowd: Arc<Crowd>,
    address: Option<IpAddr>,
    kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Inside,
    Refused(String),
}

impl Place {
    /// The text of the limit that prevents this connection from being served, for its peer.
    pub(crate) fn refusal(&self) -> Option<&str> {
        match &self.kind {
            Kind::Inside => None,
            Kind::Refused(text) => Some(text),
        }
    }
}

impl Crowd {
    pub(crate) fn new(limits: CrowdLimits) -> Self {
        let state = State {
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
    pub(crate) fn set_limits(&self, limits: CrowdLimits) {
        self.state.lock().limits = limits;
    }

    /// Counts a new connection. Above a limit, returns a [`Place`] with a refusal to send to the
    /// peer; `None` if too many refusals are being sent already.
    pub(crate) fn enter(self: &Arc<Self>, address: Option<IpAddr>) -> Option<Place> {
        let mut state = self.state.lock();
        let CrowdLimits {
            connections,
            per_address,
        } = state.limits;
        let here = address.and_then(|address| state.by_address.get(&address).copied());
        let kind = if state.total >= connections {
            Kind::Refused(format!("limit of {connections} connections reached"))
        } else if here.unwrap_or(0) >= per_address {
            let text = format!("limit of {per_address} connections from one address reached");
            Kind::Refused(text)
        } else {
            Kind::Inside
        };
        if kind == Kind::Inside {
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
        Some(Place {
            crowd: Arc::clone(self),
            address,
            kind,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.crowd.state.lock();
        if self.kind != Kind::Inside {
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
        let crowd = Arc::new(Crowd::new(CrowdLimits {
            connections: 3,
            per_address: 2,
        }));
        let one: Option<IpAddr> = "192.0.2.1".parse().ok();
        let places: Vec<_> = (0..3).map(|_| crowd.enter(one).unwrap()).collect();
        let refusals: Vec<_> = places.iter().map(Place::refusal).collect();
        let text = "limit of 2 connections from one address reached";
        assert_eq!(refusals, [None, None, Some(text)]);
        assert_eq!(crowd.state.lock().total, 2);
        let _local = crowd.enter(None).unwrap();
        let full = crowd.enter(None).unwrap();
        assert_eq!(full.refusal(), Some("limit of 3 connections reached"));
        let refused: Vec<_> = (0..100).map_while(|_| crowd.enter(None)).collect();
        assert_eq!(refused.len(), REFUSALS - 2);
        drop((refused, full, places));
        assert_eq!(crowd.state.lock().total, 1);
        assert_eq!(crowd.enter(one).unwrap().refusal(), None);
        assert!(crowd.state.lock().by_address.is_empty());
    }
}
