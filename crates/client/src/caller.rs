//! Requests with timeouts over the current connection of a session.
//!
//! Also decides what happens to a request whose connection is lost: idempotent requests are sent
//! again, others fail.

use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::Method;
use exec_server_transport::CallError;
use exec_server_transport::peer::FirstCall;

use crate::error::ExecServerError;
use crate::recovery::is_repeatable;
use crate::session_connection::ConnectionHolder;

/// Maximum number of times one request is sent again. If the connection is lost this often while
/// the same request waits, the request itself may be the cause.
const MAX_REPEATS: u32 = 16;

/// Returns a unique id.
pub(crate) fn unique() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// Sends requests over the current connection; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct RequestSender {
    pub(crate) line: Arc<ConnectionHolder>,
    /// Timeout of requests that the server answers without waiting.
    pub(crate) timeout: Duration,
}

impl RequestSender {
    /// Sends a request that the server answers without waiting, and waits for at most `timeout`.
    pub(crate) async fn call<M: Method>(
        &self,
        params: &M::Params,
    ) -> Result<M::Result, ExecServerError> {
        let repeat = is_repeatable(M::NAME);
        let noted = self.call_with_generation::<M>(params, Some(self.timeout), repeat);
        Ok(noted.await?.0)
    }

    /// Sends a request that by design takes up to `wait`, which is added to the timeout.
    pub(crate) async fn call_waiting<M: Method>(
        &self,
        params: &M::Params,
        wait: Duration,
    ) -> Result<M::Result, ExecServerError> {
        let timeout = self.timeout.saturating_add(wait);
        let repeat = is_repeatable(M::NAME);
        Ok(self
            .call_with_generation::<M>(params, Some(timeout), repeat)
            .await?
            .0)
    }

    /// Sends a request and waits for its response for as long as the session lives.
    pub(crate) async fn call_unbounded<M: Method>(
        &self,
        params: &M::Params,
    ) -> Result<M::Result, ExecServerError> {
        let repeat = is_repeatable(M::NAME);
        Ok(self
            .call_with_generation::<M>(params, None, repeat)
            .await?
            .0)
    }

    /// Sends a request and waits at most `timeout` on each connection that it is sent on. Returns
    /// the result and the generation of the connection that delivered it.
    ///
    /// A request that was not sent is always sent again. A request that the server may have
    /// received is sent again only if `repeat` is set.
    pub(crate) async fn call_with_generation<M: Method>(
        &self,
        params: &M::Params,
        timeout: Option<Duration>,
        repeat: bool,
    ) -> Result<(M::Result, u64), ExecServerError> {
        let mut connection = self.line.ready().await?;
        let mut repeats = 0;
        loop {
            let error = match connection.peer.call::<M>(params, timeout).await {
                Ok(result) => return Ok((result, connection.generation)),
                Err(error) => error,
            };
            match error {
                CallError::Unsent(_) => {}
                CallError::Closed(reason) if !repeat || repeats == MAX_REPEATS => {
                    return Err(self.line.interrupted(M::NAME, reason));
                }
                CallError::Closed(_) => repeats += 1,
                error => return Err(error.into()),
            }
            let generation = connection.generation;
            // Releases the lost connection before waiting for the next one.
            drop(connection);
            connection = self.line.after(generation).await?;
        }
    }

    /// Returns the response to a call that was sent on the first connection before this `RequestSender`
    /// existed.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Interrupted`] if that connection was lost, or the error that the server
    /// returned.
    pub(crate) async fn first_answer<M: Method>(
        &self,
        call: FirstCall,
    ) -> Result<M::Result, ExecServerError> {
        let connection = self.line.ready().await?;
        let answer = connection.peer.first_answer::<M>(call);
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(Err(CallError::Closed(reason))) => Err(self.line.interrupted(M::NAME, reason)),
            Ok(answer) => Ok(answer?),
            Err(_) => Err(ExecServerError::Timeout {
                method: M::NAME,
                timeout: self.timeout,
            }),
        }
    }

    /// Sends a request on the connection of this generation only; fails if it is no longer current.
    pub(crate) async fn call_at<M: Method>(
        &self,
        generation: u64,
        params: &M::Params,
    ) -> Result<M::Result, ExecServerError> {
        let connection = self.line.at(generation, M::NAME)?;
        match connection.peer.call::<M>(params, None).await {
            Err(CallError::Closed(reason) | CallError::Unsent(reason)) => {
                Err(self.line.interrupted(M::NAME, reason))
            }
            answer => Ok(answer?),
        }
    }
}
