//! Registry calls of administrators (list, revoke, drain).

use std::time::Duration;

use serde_json::Value;
use url::Url;

use super::auth::RegistryAuth;
use super::http::RegistryHttp;
use super::proxy::Proxies;
use super::{RegistryError, RegistryOptions, check_secrecy, parse_base, public, refusal};
use exec_server_transport::tls::TlsClientOptions;

/// Maximum size of a response in bytes: a list of 100,000 environments.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Registry client for administrators.
#[derive(Debug)]
pub struct RegistryApi {
    http: RegistryHttp,
    base: Url,
    auth: RegistryAuth,
}

impl RegistryApi {
    /// Creates a client for the registry at an `http://` or `https://` URL.
    ///
    /// # Errors
    ///
    /// If the URL has another scheme, or credentials would be sent to another machine without TLS.
    pub fn new(url: &str, options: RegistryOptions) -> Result<Self, RegistryError> {
        let base = parse_base(url)?;
        check_secrecy(&base, &options)?;
        Ok(Self {
            http: RegistryHttp::new(&base, options.tls, options.proxies, options.timeout)
                .reading(MAX_ANSWER_BYTES),
            base,
            auth: options.auth,
        })
    }

    /// Returns host and port of the registry, for messages.
    pub fn name(&self) -> &str {
        self.http.name()
    }

    /// Sends a GET request for a path below the registry's URL, such as `cloud/environments`.
    ///
    /// # Errors
    ///
    /// If the registry does not respond, refuses the request, or sends an invalid response.
    pub async fn get(&self, path: &str) -> Result<Value, RegistryError> {
        let (url, headers) = (self.url(path)?, self.auth.headers().await?);
        self.read(path, self.http.get(&url, &headers).await?)
    }

    /// Sends a POST request with a JSON body.
    ///
    /// # Errors
    ///
    /// Same as for [`RegistryApi::get`].
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, RegistryError> {
        let (url, headers) = (self.url(path)?, self.auth.headers().await?);
        let body = body.to_string().into_bytes();
        self.read(path, self.http.post(&url, &headers, body).await?)
    }

    fn url(&self, path: &str) -> Result<Url, RegistryError> {
        let base = self.base.as_str().trim_end_matches('/');
        Url::parse(&format!("{base}/{path}")).map_err(|_| RegistryError::Url {
            url: public(&self.base),
            reason: "it has no path",
        })
    }

    fn read(&self, path: &str, (status, answer): (u16, Vec<u8>)) -> Result<Value, RegistryError> {
        if !(200..300).contains(&status) {
            return Err(refusal(self.name(), &self.auth, status, &answer));
        }
        serde_json::from_slice(&answer).map_err(|error| RegistryError::Protocol {
            registry: self.name().to_owned(),
            reason: format!("cannot understand the answer to `{path}`: {error}"),
        })
    }
}

/// Downloads a public document from an `http://` or `https://` URL; does not follow redirects.
///
/// # Errors
///
/// If the server does not respond in time, does not return the document, or the document is longer
/// than `limit` bytes.
pub async fn fetch(
    url: &str,
    tls: TlsClientOptions,
    proxies: Proxies,
    timeout: Duration,
    limit: usize,
) -> Result<Vec<u8>, RegistryError> {
    let bad = |reason| RegistryError::Url {
        url: url.to_owned(),
        reason,
    };
    let parsed = Url::parse(url).map_err(|_| bad("not a URL"))?;
    if !matches!(parsed.scheme(), "http" | "https") || parsed.host().is_none() {
        return Err(bad("expected http://HOST/… or https://HOST/…"));
    }
    let http = RegistryHttp::new(&parsed, tls, proxies, timeout).reading(limit);
    let (status, answer) = http.get(&parsed, &[]).await?;
    if status != 200 {
        return Err(refusal(http.name(), &RegistryAuth::Open, status, &answer));
    }
    Ok(answer)
}
