//! Requests with deadlines.
//!
//! Owns how long to wait for an answer. The one place that knows which connection is the current
//! one, so that a later connection can take over from it.

use std::time::Duration;

use exec_server_protocol::{Method, Notification};
use exec_server_transport::Peer;

use crate::error::ExecServerError;

/// Makes requests; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) peer: Peer,
    /// For requests that the server answers at once.
    pub(crate) timeout: Duration,
}

impl Caller {
    /// Waits as long as a request that the server answers at once may take.
    pub(crate) async fn call<M: Method>(
        &self,
        params: &M::Params,
    ) -> Result<M::Result, ExecServerError> {
        Ok(self.peer.call::<M>(params, Some(self.timeout)).await?)
    }

    /// Waits for a request that takes up to `wait` by nature.
    pub(crate) async fn call_waiting<M: Method>(
        &self,
        params: &M::Params,
        wait: Duration,
    ) -> Result<M::Result, ExecServerError> {
        Ok(self
            .peer
            .call::<M>(params, Some(self.timeout.saturating_add(wait)))
            .await?)
    }

    /// Waits for as long as the connection lives.
    pub(crate) async fn call_unbounded<M: Method>(
        &self,
        params: &M::Params,
    ) -> Result<M::Result, ExecServerError> {
        Ok(self.peer.call::<M>(params, None).await?)
    }

    pub(crate) async fn notify<N: Notification>(
        &self,
        params: &N::Params,
    ) -> Result<(), ExecServerError> {
        Ok(self.peer.notify::<N>(params).await?)
    }
}

/// A duration as the wire has it.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
