//! Requests with deadlines, over whichever connection there is.
//!
//! Owns how long to wait for an answer, and what becomes of a request whose connection is lost: those
//! that may be sent twice are sent again, the others fail.

use std::sync::Arc;
use std::time::Duration;

use exec_server_protocol::Method;
use exec_server_transport::CallError;
use exec_server_transport::peer::FirstCall;

use crate::error::ExecServerError;
use crate::line::Line;
use crate::recovery::is_repeatable;

/// How often one request is sent again. A connection that is lost that often while the same request
/// waits may well be lost because of it.
const MAX_REPEATS: u32 = 16;

/// Makes requests; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) line: Arc<Line>,
    /// For requests that the server answers at once.
    pub(crate) timeout: Duration,
}

impl Caller {
    /// Waits as long as a request that the server answers at once may take.
    pub(crate) async fn call<M: Method>(
        &self,
        params: &M::Params,
    ) -> Result<M::Result, ExecServerError> {
        let repeat = is_repeatable(M::NAME);
        let noted = self.call_noting::<M>(params, Some(self.timeout), repeat);
        Ok(noted.await?.0)
    }

    /// Waits for a request that takes up to `wait` by nature.
    pub(crate) async fn call_waiting<M: Method>(
        &self,
        params: &M::Params,
        wait: Duration,
    ) -> Result<M::Result, ExecServerError> {
        let timeout = self.timeout.saturating_add(wait);
        let repeat = is_repeatable(M::NAME);
        Ok(self
            .call_noting::<M>(params, Some(timeout), repeat)
            .await?
            .0)
    }

    /// Waits for as long as the session lives.
    pub(crate) async fn call_unbounded<M: Method>(
        &self,
        params: &M::Params,
    ) -> Result<M::Result, ExecServerError> {
        let repeat = is_repeatable(M::NAME);
        Ok(self.call_noting::<M>(params, None, repeat).await?.0)
    }

    /// Waits at most `timeout` on each connection that the request is sent on; the result, and the
    /// generation of the connection that it came over.
    ///
    /// A request that could not leave is always sent again, one that may have been heard only if
    /// `repeat` says so.
    pub(crate) async fn call_noting<M: Method>(
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
            // Lets go of what is left of the old one before waiting.
            drop(connection);
            connection = self.line.after(generation).await?;
        }
    }

    /// The answer to a call that was made on the first connection before it was ours.
    ///
    /// # Errors
    ///
    /// [`ExecServerError::Interrupted`] if that connection was lost, or whatever the server answers.
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

    /// Sends a request on the connection of this generation or not at all.
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
