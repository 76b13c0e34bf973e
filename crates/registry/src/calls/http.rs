//! HTTP/1.1 client for one host with one kept-alive connection.
//!
//! Follows no redirect, because credentials must be sent only to the configured host.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use exec_server_sync::Mutex;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use url::Url;
use zeroize::Zeroizing;

use super::proxy::Proxies;
use super::{MAX_ANSWER_BYTES, RegistryError};
use exec_server_transport::Secret;
use exec_server_transport::tls::{self, TlsClientOptions, TlsError};

/// HTTP client for one host.
pub(super) struct RegistryHttp {
    secure: bool,
    host: String,
    port: u16,
    name: String,
    proxies: Proxies,
    tls: TlsClientOptions,
    /// TLS connector, created on first use because loading the system certificates takes longer
    /// than a call. Created again after a failed handshake, because the certificate files may have
    /// been replaced.
    connector: Mutex<Option<TlsConnector>>,
    timeout: Duration,
    /// Maximum size of a response body in bytes.
    max_answer: usize,
    /// Idle connection from an earlier call.
    idle: Mutex<Option<SendRequest<Full<Bytes>>>>,
}

impl fmt::Debug for RegistryHttp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistryHttp")
            .field("name", &self.name)
            .field("secure", &self.secure)
            .finish_non_exhaustive()
    }
}

impl RegistryHttp {
    /// Creates a client for the host of a URL; the URL must have a host.
    pub(super) fn new(
        url: &Url,
        tls: TlsClientOptions,
        proxies: Proxies,
        timeout: Duration,
    ) -> Self {
        let secure = url.scheme() == "https";
        let host = url.host_str().unwrap_or("").to_owned();
        let port = url
            .port_or_known_default()
            .unwrap_or(if secure { 443 } else { 80 });
        Self {
            secure,
            name: format!("{host}:{port}"),
            host,
            port,
            tls,
            proxies,
            connector: Mutex::new(None),
            timeout,
            max_answer: MAX_ANSWER_BYTES,
            idle: Mutex::new(None),
        }
    }

    /// Sets the maximum size of a response body.
    pub(super) fn reading(mut self, bytes: usize) -> Self {
        self.max_answer = bytes;
        self
    }

    /// Returns host and port.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sends a POST request with a JSON body; returns status and body of the response.
    pub(super) async fn post(
        &self,
        url: &Url,
        headers: &[(&'static str, Secret)],
        body: Vec<u8>,
    ) -> Result<(u16, Vec<u8>), RegistryError> {
        self.call(Method::POST, url, headers, body).await
    }

    /// Sends a GET request; returns status and body of the response.
    pub(super) async fn get(
        &self,
        url: &Url,
        headers: &[(&'static str, Secret)],
    ) -> Result<(u16, Vec<u8>), RegistryError> {
        self.call(Method::GET, url, headers, Vec::new()).await
    }

    async fn call(
        &self,
        method: Method,
        url: &Url,
        headers: &[(&'static str, Secret)],
        body: Vec<u8>,
    ) -> Result<(u16, Vec<u8>), RegistryError> {
        let call = async {
            let body = Bytes::from(body);
            let idle = self.idle.lock().take();
            if let Some(mut connection) = idle
                && connection.ready().await.is_ok()
                // The server may have closed the idle connection; after an error, retry on a new
                // one.
                && let Ok(answer) = self
                    .send(&mut connection, &method, url, headers, &body)
                    .await
            {
                self.keep(connection);
                return Ok(answer);
            }
            let mut connection = self.open().await?;
            let answer = self
                .send(&mut connection, &method, url, headers, &body)
                .await?;
            self.keep(connection);
            Ok(answer)
        };
        match tokio::time::timeout(self.timeout, call).await {
            Ok(result) => result,
            Err(_) => Err(RegistryError::Timeout {
                registry: self.name.clone(),
                timeout: self.timeout,
            }),
        }
    }

    fn keep(&self, connection: SendRequest<Full<Bytes>>) {
        *self.idle.lock() = Some(connection);
    }

    async fn send(
        &self,
        connection: &mut SendRequest<Full<Bytes>>,
        method: &Method,
        url: &Url,
        headers: &[(&'static str, Secret)],
        body: &Bytes,
    ) -> Result<(u16, Vec<u8>), RegistryError> {
        let target = &url[url::Position::BeforePath..url::Position::AfterQuery];
        let mut request = Request::builder()
            .method(method)
            .uri(target)
            .header(HOST, self.host_header())
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "*/*")
            .body(Full::new(body.clone()))
            .map_err(|error| self.unreachable(error))?;
        for (name, value) in headers {
            let value = Zeroizing::new(value.expose().as_bytes().to_vec());
            let mut value = HeaderValue::from_bytes(&value).map_err(|_| {
                // The value may be a token, so the error contains only the header name.
                RegistryError::Protocol {
                    registry: self.name.clone(),
                    reason: format!("`{name}` would hold characters that no header can carry"),
                }
            })?;
            value.set_sensitive(true);
            let name = HeaderName::from_static(name);
            request.headers_mut().insert(name, value);
        }
        let answer = connection
            .send_request(request)
            .await
            .map_err(|error| self.unreachable(error))?;
        let status = answer.status().as_u16();
        let body = Limited::new(answer.into_body(), self.max_answer)
            .collect()
            .await
            .map_err(|error| self.unreachable(error))?;
        Ok((status, body.to_bytes().to_vec()))
    }

    fn host_header(&self) -> String {
        let usual = if self.secure { 443 } else { 80 };
        match self.port == usual {
            true => self.host.clone(),
            false => self.name.clone(),
        }
    }

    fn unreachable(&self, error: impl fmt::Display) -> RegistryError {
        RegistryError::Unreachable {
            registry: self.name.clone(),
            reason: error.to_string(),
        }
    }

    /// Returns the TLS connector for this host and for the websocket URLs that it returns.
    pub(super) fn connector(&self) -> Result<TlsConnector, TlsError> {
        if let Some(connector) = &*self.connector.lock() {
            return Ok(connector.clone());
        }
        let made = tls::connector(&self.tls)?;
        Ok(self.connector.lock().insert(made).clone())
    }

    /// Discards the TLS connector after a failed handshake; the next call loads the certificates
    /// again.
    pub(super) fn forget_connector(&self) {
        self.connector.lock().take();
    }

    pub(super) fn proxies(&self) -> &Proxies {
        &self.proxies
    }

    async fn open(&self) -> Result<SendRequest<Full<Bytes>>, RegistryError> {
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        let connect = self.proxies.connect(self.secure, bare, self.port);
        if !self.secure {
            let stream = connect.await.map_err(|error| self.unreachable(error))?;
            return self.handshake(stream).await;
        }
        let connector = self.connector()?;
        let name = ServerName::try_from(bare.to_owned())
            .map_err(|_| self.unreachable("its name is not a valid TLS server name"))?;
        let stream = connect.await.map_err(|error| self.unreachable(error))?;
        let stream = connector.connect(name, stream).await;
        let stream = stream.map_err(|error| {
            self.forget_connector();
            self.unreachable(format!("cannot verify the TLS certificate: {error}"))
        })?;
        self.handshake(stream).await
    }

    async fn handshake(
        &self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<SendRequest<Full<Bytes>>, RegistryError> {
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.unreachable(error))?;
        // The task ends when the sender is dropped or the server closes the connection.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the connection to the registry ended");
            }
        });
        Ok(sender)
    }
}
