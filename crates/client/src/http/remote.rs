//! Remote HTTP backend: sends requests through a server, and routes the parts of response bodies.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::ByteChunk;
use exec_server_protocol::http::{Cancel, CancelParams, Request, RequestParams, RequestResult};

use futures_util::future::BoxFuture;

use super::{BodySource, BufferedHttpResponse, ExecutorHttp, HttpBody, HttpRequest, HttpStream};
use crate::client::ExecServerClient;
use crate::error::{ExecServerError, Reply};
use crate::extension;
use crate::http::bodies::BodyQueue;
use crate::options::millis;

impl ExecutorHttp for ExecServerClient {
    fn fetch(&self, request: HttpRequest) -> Reply<'_, BufferedHttpResponse> {
        Box::pin(async move {
            let (params, mut guard) = self.prepare(request, false).await?;
            let (answer, _) = self.send_request(&params).await?;
            guard.over = true;
            Ok(BufferedHttpResponse {
                status: answer.status,
                headers: answer.headers,
                body: answer.body_base64.0,
            })
        })
    }

    fn open(&self, request: HttpRequest) -> Reply<'_, HttpStream> {
        Box::pin(async move {
            let (params, guard) = self.prepare(request, true).await?;
            // The queue is created before the request, because pieces may arrive directly after the
            // response.
            let queue = self.inner.routes.bodies.register(&params.request_id);
            let body = RemoteBody { queue, guard };
            let (answer, generation) = self.send_request(&params).await?;
            let bodies = &self.inner.routes.bodies;
            bodies.begin(&params.request_id, generation);
            Ok(HttpStream {
                status: answer.status,
                headers: answer.headers,
                body: HttpBody::new(body),
            })
        })
    }
}

impl ExecServerClient {
    async fn prepare(
        &self,
        request: HttpRequest,
        stream_response: bool,
    ) -> Result<(RequestParams, CancelGuard), ExecServerError> {
        if request.decompress {
            self.require(extension::HTTP_DECOMPRESS).await?;
        }
        let params = RequestParams {
            method: request.method,
            url: request.url,
            request_id: uuid::Uuid::new_v4().simple().to_string(),
            headers: request.headers,
            body_base64: request.body.map(ByteChunk),
            timeout_ms: request.timeout.map(millis),
            redirect_policy: request.redirect,
            stream_response,
            decompress: request.decompress,
        };
        let guard = CancelGuard {
            client: self.clone(),
            request_id: params.request_id.clone(),
            over: false,
        };
        Ok((params, guard))
    }

    /// The response, and the generation of the connection that delivered it. The body arrives over
    /// the same connection.
    async fn send_request(
        &self,
        params: &RequestParams,
    ) -> Result<(RequestResult, u64), ExecServerError> {
        let caller = &self.inner.caller;
        let wait = params.timeout_ms.map(Duration::from_millis);
        let wait = wait.map(|wait| caller.timeout.saturating_add(wait));
        // The request is sent once only: whether a repetition is harmless depends on the site.
        caller
            .call_with_generation::<Request>(params, wait, false)
            .await
    }
}

/// Cancels a request when its caller drops the body.
#[derive(Debug)]
struct CancelGuard {
    client: ExecServerClient,
    request_id: String,
    /// Whether the request has ended without cancellation.
    over: bool,
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        let client = self.client.clone();
        client.inner.routes.bodies.remove(&self.request_id);
        if self.over {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let request_id = std::mem::take(&mut self.request_id);
            runtime.spawn(async move {
                // A server without `http/cancel` ends the request with its body or the connection.
                if let Ok(true) = client.supports(extension::HTTP_CANCEL).await {
                    let _ = client.call::<Cancel>(&CancelParams { request_id }).await;
                }
            });
        }
    }
}

/// Body that a connection delivers.
#[derive(Debug)]
struct RemoteBody {
    queue: Arc<BodyQueue>,
    guard: CancelGuard,
}

impl BodySource for RemoteBody {
    fn chunk(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, ExecServerError>> {
        Box::pin(async move {
            let piece = self.queue.take().await?;
            self.guard.over |= piece.is_none();
            Ok(piece)
        })
    }
}
