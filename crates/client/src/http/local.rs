//! Requests that this machine makes.

use bytes::{Bytes, BytesMut};
use exec_server_egress::http::{HttpClient, ResponseBody, StreamingResponse, request};
use exec_server_protocol::ByteChunk;
use exec_server_protocol::http::RequestParams;
use futures_util::future::BoxFuture;

use super::{BodySource, BufferedHttpResponse, ExecutorHttp, HttpBody, HttpRequest, HttpStream};
use crate::error::{ExecServerError, Reply};
use crate::options::millis;

/// Makes requests from this machine, under the same rules as a server would.
#[derive(Debug, Clone)]
pub struct LocalHttp {
    client: HttpClient,
}

impl LocalHttp {
    /// Requests through this client.
    pub fn new(client: HttpClient) -> Self {
        Self { client }
    }

    async fn send(&self, asked: HttpRequest) -> Result<StreamingResponse, ExecServerError> {
        let params = RequestParams {
            method: asked.method,
            url: asked.url,
            request_id: String::new(),
            headers: asked.headers,
            body_base64: asked.body.map(ByteChunk),
            timeout_ms: asked.timeout.map(millis),
            redirect_policy: asked.redirect,
            stream_response: false,
            decompress: asked.decompress,
        };
        let prepared = request::prepare(params, &self.client.config().environment)?;
        Ok(self.client.send(prepared).await?)
    }
}

impl ExecutorHttp for LocalHttp {
    fn fetch(&self, request: HttpRequest) -> Reply<'_, BufferedHttpResponse> {
        Box::pin(async move {
            let StreamingResponse {
                status,
                headers,
                mut body,
            } = self.send(request).await?;
            body.limit(self.client.config().max_response_bytes as u64)?;
            let mut bytes = BytesMut::new();
            while let Some(piece) = body.chunk().await? {
                bytes.extend_from_slice(&piece);
            }
            Ok(BufferedHttpResponse {
                status,
                headers,
                body: bytes.freeze(),
            })
        })
    }

    fn open(&self, request: HttpRequest) -> Reply<'_, HttpStream> {
        Box::pin(async move {
            let StreamingResponse {
                status,
                headers,
                mut body,
            } = self.send(request).await?;
            if let Some(limit) = self.client.config().max_stream_bytes {
                body.limit(limit)?;
            }
            Ok(HttpStream {
                status,
                headers,
                body: HttpBody::new(LocalBody(body)),
            })
        })
    }
}

#[derive(Debug)]
struct LocalBody(ResponseBody);

impl BodySource for LocalBody {
    fn chunk(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, ExecServerError>> {
        Box::pin(async move { Ok(self.0.chunk().await?) })
    }
}
