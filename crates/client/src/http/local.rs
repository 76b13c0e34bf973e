//! Local HTTP backend: sends requests from this machine.

use bytes::Bytes;
use exec_server_engine::http::{
    self as exchange, HttpClient, PreparedRequest, ResponseBody, StreamingResponse, Unlimited,
    WholeResponse,
};
use exec_server_protocol::ByteChunk;
use exec_server_protocol::http::RequestParams;
use futures_util::future::BoxFuture;

use super::{BodySource, BufferedHttpResponse, ExecutorHttp, HttpBody, HttpRequest, HttpStream};
use crate::error::{ExecServerError, Reply};
use crate::options::millis;

/// HTTP client of this machine, with the same rules as a server.
#[derive(Debug, Clone)]
pub struct LocalHttp {
    client: HttpClient,
}

impl LocalHttp {
    /// Creates a backend that uses this HTTP client.
    pub fn new(client: HttpClient) -> Self {
        Self { client }
    }

    fn prepare(&self, asked: HttpRequest) -> Result<PreparedRequest, ExecServerError> {
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
        Ok(exchange::prepare(&self.client, params)?)
    }
}

impl ExecutorHttp for LocalHttp {
    fn fetch(&self, request: HttpRequest) -> Reply<'_, BufferedHttpResponse> {
        Box::pin(async move {
            let prepared = self.prepare(request)?;
            let WholeResponse {
                status,
                headers,
                body,
                ..
            } = exchange::fetch(&self.client, prepared, usize::MAX, &Unlimited).await?;
            Ok(BufferedHttpResponse {
                status,
                headers,
                body: body.into(),
            })
        })
    }

    fn open(&self, request: HttpRequest) -> Reply<'_, HttpStream> {
        Box::pin(async move {
            let prepared = self.prepare(request)?;
            let StreamingResponse {
                status,
                headers,
                body,
            } = exchange::open(&self.client, prepared).await?;
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
