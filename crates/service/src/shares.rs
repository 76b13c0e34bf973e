//! Shares of principals in the server's sessions.
//!
//! A principal is a client by its name, or by its address if it has none. Each may hold at most half
//! of a resource, so that others find room whatever it does.

use std::collections::HashMap;
use std::sync::Arc;

use crate::ApiError;
use crate::session::Session;

type Sessions = HashMap<String, Arc<Session>>;

/// The share of one principal.
pub(crate) fn of(limit: usize) -> usize {
    limit.div_ceil(2)
}

/// Checks whether a principal may open a session; returns the session to evict for it, if any.
///
/// Above its share, a principal loses the session that waits for its client for the longest time and
/// has no live process. If all sessions are in use, the principal with most of them does.
pub(crate) fn make_room(
    sessions: &Sessions,
    principal: Option<&Arc<str>>,
    limit: usize,
) -> Result<Option<Arc<Session>>, ApiError> {
    let is_full = sessions.len() >= limit;
    let reached = |text: String| ApiError::invalid_request(text);
    let Some(principal) = principal else {
        return match is_full {
            true => Err(reached(format!("limit of {limit} sessions reached"))),
            false => Ok(None),
        };
    };
    let share = of(limit);
    // With fewer sessions in use than a share, no principal exceeds its share.
    if sessions.len() < share {
        return Ok(None);
    }
    let own = count(sessions, principal);
    if own >= share {
        return match oldest_idle(sessions, principal) {
            Some(evicted) => Ok(Some(evicted)),
            // The share of a limit of one is all of it.
            None if is_full && share == limit => {
                Err(reached(format!("limit of {limit} sessions reached")))
            }
            None => Err(reached(format!(
                "limit of {share} sessions of one client reached"
            ))),
        };
    }
    if !is_full {
        return Ok(None);
    }
    let mut counts: HashMap<&Arc<str>, usize> = HashMap::new();
    for principal in sessions.values().filter_map(|session| session.principal()) {
        *counts.entry(principal).or_default() += 1;
    }
    let largest = counts.into_iter().max_by_key(|(_, count)| *count);
    largest
        .filter(|(_, count)| *count > own)
        .and_then(|(other, _)| oldest_idle(sessions, other))
        .map(Some)
        .ok_or_else(|| reached(format!("limit of {limit} sessions reached")))
}

fn count(sessions: &Sessions, principal: &Arc<str>) -> usize {
    let own = sessions.values();
    own.filter(|session| session.principal() == Some(principal))
        .count()
}

/// The session of a principal that waits for its client for the longest time, of those without live
/// processes.
fn oldest_idle(sessions: &Sessions, principal: &Arc<str>) -> Option<Arc<Session>> {
    let own = sessions.values();
    let own = own.filter(|session| session.principal() == Some(principal));
    let idle = own.filter_map(|session| Some((session.idle_since()?, session)));
    idle.min_by_key(|(since, _)| *since)
        .map(|(_, session)| Arc::clone(session))
}
