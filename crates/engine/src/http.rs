//! `http/request`: one exchange, with its limits.
//!
//! [`exec_server_egress::http`] sends requests and decides which hosts are reachable. This module
//! adds the limits of response bodies and the deadline of a whole exchange.

use exec_server_protocol::http::{RequestParams, ResponseHeader};

use exec_server_egress::http::request;
pub use exec_server_egress::http::{
    HostRules, HttpClient, HttpConfig, HttpError, PreparedRequest, ResponseBody, StreamingResponse,
};

use crate::ApiError;

/// A response with its complete body.
#[derive(Debug)]
pub struct WholeResponse<M> {
    /// The status code.
    pub status: u16,
    /// Headers in order, with lower-case names.
    pub headers: Vec<ResponseHeader>,
    /// The body.
    pub body: Vec<u8>,
    /// Memory that was reserved for the body.
    pub reserved: Option<M>,
}

/// Memory budget for bodies of responses.
pub trait BodyBudget {
    /// Memory that was reserved, until it is dropped.
    type Share: Send;

    /// Bytes of a body that need no reservation.
    fn free_bytes(&self) -> usize;

    /// Waits until there is memory for a body of at most `bytes`.
    fn reserve(&self, bytes: usize) -> impl Future<Output = Option<Self::Share>> + Send;
}

/// A budget without a limit.
#[derive(Debug, Clone, Copy)]
pub struct Unlimited;

impl BodyBudget for Unlimited {
    type Share = ();

    fn free_bytes(&self) -> usize {
        usize::MAX
    }

    async fn reserve(&self, _: usize) -> Option<()> {
        None
    }
}

/// Validates `http/request`.
///
/// # Errors
///
/// The error names the method, URL, header or variable that is not valid.
pub fn prepare(client: &HttpClient, params: RequestParams) -> Result<PreparedRequest, ApiError> {
    Ok(request::prepare(params, &client.config().environment)?)
}

/// Sends a request and receives the complete response, of at most `most` bytes and of at most the
/// configured limit. The timeout of the request includes the time spent waiting for memory.
///
/// Dropping the future cancels the request.
///
/// # Errors
///
/// When the host is denied or does not respond in time, or the body is larger than the limit.
pub async fn fetch<B: BodyBudget + Sync>(
    client: &HttpClient,
    request: PreparedRequest,
    most: usize,
    budget: &B,
) -> Result<WholeResponse<B::Share>, HttpError> {
    let timeout = request.timeout();
    let work = async {
        let response = client.send(request).await?;
        let limit = client.config().max_response_bytes.min(most);
        receive(response, limit, budget).await
    };
    match timeout {
        None => work.await,
        Some(timeout) => match tokio::time::timeout(timeout, work).await {
            Ok(received) => received,
            Err(_) => Err(HttpError::TimedOut(timeout)),
        },
    }
}

async fn receive<B: BodyBudget + Sync>(
    response: StreamingResponse,
    limit: usize,
    budget: &B,
) -> Result<WholeResponse<B::Share>, HttpError> {
    let StreamingResponse {
        status,
        headers,
        mut body,
    } = response;
    body.limit(limit as u64)?;
    let known = body
        .known_bytes()
        .and_then(|known| usize::try_from(known).ok());
    let free = budget.free_bytes();
    let mut reserved = None;
    let mut bytes = Vec::with_capacity(known.unwrap_or(0).min(free).min(limit));
    while let Some(piece) = body.chunk().await? {
        if reserved.is_none() && bytes.len() + piece.len() > free {
            // Reserves the maximum size in one step, so that no request waits for more memory while
            // it holds some.
            let largest = known.unwrap_or(limit).max(piece.len());
            reserved = budget.reserve(largest).await;
            bytes.reserve_exact(known.map_or(0, |known| known.saturating_sub(bytes.len())));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(WholeResponse {
        status,
        headers,
        body: bytes,
        reserved,
    })
}

/// Sends a request and receives the headers of its response; the body has the configured limit of
/// streamed bodies.
///
/// # Errors
///
/// When the host is denied or does not respond in time.
pub async fn open(
    client: &HttpClient,
    request: PreparedRequest,
) -> Result<StreamingResponse, HttpError> {
    let mut response = client.send(request).await?;
    if let Some(limit) = client.config().max_stream_bytes {
        response.body.limit(limit)?;
    }
    Ok(response)
}
