//! Registry client: the calls register, connect and validate.
//!
//! Builds URLs, sends HTTP requests and classifies errors. [`auth`] provides the credentials; the
//! callers interpret the results.

mod agent;
pub mod api;
pub mod auth;
mod http;
mod proxy;

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use exec_server_relay::keys::{Authorization, PublicKey, SECURITY_PROFILE};
use exec_server_relay::registry::{
    ConnectRequest, ConnectResponse, ErrorResponse, RegisterRequest, RegisterResponse,
    ValidateRequest, ValidateResponse,
};
use exec_server_sync::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use url::{Host, Url};

use auth::{CredentialError, RegistryAuth};
use exec_server_transport::Secret;
use exec_server_transport::connect::{ConnectError, ConnectOptions, connect_by};
use exec_server_transport::link::Link;
use exec_server_transport::tls::{TlsClientOptions, TlsError};
use http::RegistryHttp;

pub use agent::{AgentIdentity, AgentIdentityError};
pub use proxy::Proxies;

/// Error code of status 409 while no executor is attached.
pub const ENVIRONMENT_OFFLINE: &str = "environment_offline";

/// Maximum size of a response in bytes; real responses have about 2,000.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// Maximum number of characters of a non-JSON response that an error shows.
const SHOWN_CHARS: usize = 4096;

/// Maximum number of base URLs known for one registry.
const MAX_PLACES: usize = 8;

/// Time limit for one base URL while there is another to try.
const HURRY: Duration = Duration::from_secs(3);

/// Header with the id of the stream that a call belongs to.
const STREAM_ID_HEADER: &str = "x-codex-noise-stream-id";

/// Options of a registry client.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RegistryOptions {
    /// Credentials.
    pub auth: RegistryAuth,
    /// TLS options for `https://` URLs.
    pub tls: TlsClientOptions,
    /// Proxies for the registry and its rendezvous server.
    pub proxies: Proxies,
    /// Time limit of each call, including name lookup and connection.
    pub timeout: Duration,
    /// Whether credentials may be sent to other machines without TLS.
    pub danger_plain_http: bool,
}

impl RegistryOptions {
    /// Creates the default options with these credentials.
    pub fn new(auth: RegistryAuth) -> Self {
        Self {
            auth,
            tls: TlsClientOptions::default(),
            proxies: Proxies::none(),
            timeout: Duration::from_secs(10),
            danger_plain_http: false,
        }
    }
}

/// Reason why a registry call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The URL is not valid for a registry.
    #[error("`{url}` is not the URL of a registry: {reason}")]
    Url {
        /// URL as given, without parts that may be secret.
        url: String,
        /// The reason why the URL is rejected.
        reason: &'static str,
    },
    /// The environment id is invalid.
    #[error("`{0}` is not an environment id: it must not be empty")]
    EnvironmentId(String),
    /// There are no credentials, or they are not valid now.
    #[error(transparent)]
    Credential(#[from] CredentialError),
    /// The configured certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The registry cannot be reached or closed the connection.
    #[error("cannot reach the registry {registry}: {reason}")]
    Unreachable {
        /// Host and port of the registry.
        registry: String,
        /// Cause.
        reason: String,
    },
    /// The registry did not respond in time.
    #[error("no response from the registry {registry} within {timeout:?}")]
    Timeout {
        /// Host and port of the registry.
        registry: String,
        /// Time limit that expired.
        timeout: Duration,
    },
    /// The registry does not accept the credentials.
    #[error("the registry {registry} rejected the credentials: HTTP {status}{}", shown(.message))]
    Auth {
        /// Host and port of the registry.
        registry: String,
        /// Status 401 or 403.
        status: u16,
        /// Message of the registry.
        message: String,
    },
    /// The registry returned another error status.
    #[error("the registry {registry} responded with HTTP {status}{}", shown(.message))]
    Status {
        /// Host and port of the registry.
        registry: String,
        /// HTTP status.
        status: u16,
        /// Machine-readable error code.
        code: Option<String>,
        /// Human-readable message.
        message: String,
    },
    /// The registry's response is invalid.
    #[error("the registry {registry} broke the protocol: {reason}")]
    Protocol {
        /// Host and port of the registry.
        registry: String,
        /// The reason why the response is rejected.
        reason: String,
    },
}

fn shown(message: &str) -> String {
    if message.is_empty() {
        return String::new();
    }
    format!(": {message}")
}

impl RegistryError {
    /// Returns whether the registry is unavailable: it did not respond, or it reported a timeout, a
    /// rate limit (425, 429) or an internal failure.
    pub fn is_outage(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Timeout { .. } => true,
            Self::Status { status, .. } => matches!(status, 500..|408| 425 | 429),
            _ => false,
        }
    }

    /// Returns whether the same call may succeed later without a change of configuration.
    pub fn is_retryable(&self) -> bool {
        self.is_outage() || self.is_offline()
    }

    /// Returns whether no executor is attached.
    pub fn is_offline(&self) -> bool {
        matches!(self, Self::Status { status: 409, code: Some(code), .. } if code == ENVIRONMENT_OFFLINE)
    }
}

/// One base URL that serves the calls of a registry.
#[derive(Debug)]
struct RegistryBase {
    http: RegistryHttp,
    /// URL that ends in `/cloud/environment/ID/`.
    base: Url,
}

/// Client for one environment of a registry.
#[derive(Debug)]
pub struct Registry {
    /// Base URL from the configuration.
    configured: Arc<RegistryBase>,
    /// Base URLs in the order of use: first the one that responded last, then the others that it
    /// returned.
    places: Mutex<Vec<Arc<RegistryBase>>>,
    environment_id: String,
    options: RegistryOptions,
}

impl RegistryBase {
    fn new(
        url: &str,
        environment_id: &str,
        options: &RegistryOptions,
    ) -> Result<Self, RegistryError> {
        let base = parse_base(url)?;
        // URL parsing removes the path segments `.` and `..`.
        if matches!(environment_id, "" | "." | "..") {
            return Err(RegistryError::EnvironmentId(environment_id.to_owned()));
        }
        check_secrecy(&base, options)?;
        let mut path = base.clone();
        match path.path_segments_mut() {
            Ok(mut segments) => {
                segments
                    .pop_if_empty()
                    .extend(["cloud", "environment", environment_id, ""]);
            }
            Err(()) => {
                return Err(RegistryError::Url {
                    url: public(&base),
                    reason: "it has no path",
                });
            }
        }
        Ok(Self {
            http: RegistryHttp::new(
                &base,
                options.tls.clone(),
                options.proxies.clone(),
                options.timeout,
            ),
            base: path,
        })
    }
}

impl Registry {
    /// Creates a client for an environment of the registry at an `http://` or `https://` URL.
    ///
    /// # Errors
    ///
    /// If the URL has another scheme, the environment id is invalid, or credentials would be sent
    /// to another machine without TLS.
    pub fn new(
        url: &str,
        environment_id: &str,
        options: RegistryOptions,
    ) -> Result<Self, RegistryError> {
        let environment_id = environment_id.trim();
        let configured = Arc::new(RegistryBase::new(url, environment_id, &options)?);
        Ok(Self {
            places: Mutex::new(vec![Arc::clone(&configured)]),
            configured,
            environment_id: environment_id.to_owned(),
            options,
        })
    }

    /// Returns the environment id.
    pub fn environment_id(&self) -> &str {
        &self.environment_id
    }

    /// Returns host and port of the registry, for messages.
    pub fn name(&self) -> &str {
        self.configured.http.name()
    }

    /// Stores the other base URLs that the registry returned. Skips URLs without TLS if the
    /// configured URL uses TLS, because they would receive the credentials.
    fn learn(&self, others: &[String]) {
        let mut places = self.places.lock();
        let mut learned = Vec::new();
        // The first entry has just responded.
        learned.extend(places.first().cloned());
        let mut add = |address: Arc<RegistryBase>| {
            let known = learned.iter().any(|known| known.base == address.base);
            if !known && learned.len() < MAX_PLACES {
                learned.push(address);
            }
        };
        for other in others {
            if let Ok(address) = RegistryBase::new(other, &self.environment_id, &self.options)
                && (address.base.scheme() == "https" || self.configured.base.scheme() == "http")
            {
                let before = places.iter().find(|known| known.base == address.base);
                add(before.cloned().unwrap_or_else(|| Arc::new(address)));
            }
        }
        add(Arc::clone(&self.configured));
        *places = learned;
    }

    /// Moves this base URL to the front.
    fn prefer(&self, address: &Arc<RegistryBase>) {
        let mut places = self.places.lock();
        if let Some(at) = places.iter().position(|known| Arc::ptr_eq(known, address)) {
            places[..=at].rotate_right(1);
        }
    }

    /// Registers an executor.
    ///
    /// # Errors
    ///
    /// If the registry does not respond, refuses the call, or sends an invalid response.
    pub async fn register(
        &self,
        key: &PublicKey,
        name: Option<&str>,
    ) -> Result<RegisterResponse, RegistryError> {
        let request = RegisterRequest {
            security_profile: SECURITY_PROFILE.to_owned(),
            executor_public_key: key.clone(),
            name: name.map(str::to_owned),
        };
        let answer: RegisterResponse = self.call("register", &[], &request).await?;
        self.check(&answer.environment_id, &answer.security_profile)?;
        self.check_present("url", &answer.url)?;
        self.check_present("executor_registration_id", &answer.executor_registration_id)?;
        self.learn(&answer.registries);
        Ok(answer)
    }

    /// Requests a connection to the executor for a harness; the response is valid for one
    /// connection.
    ///
    /// # Errors
    ///
    /// Same as for [`Registry::register`]; [`RegistryError::is_offline`] while no executor is attached.
    pub async fn connect(&self, key: &PublicKey) -> Result<ConnectResponse, RegistryError> {
        let request = ConnectRequest {
            harness_public_key: key.clone(),
        };
        let answer: ConnectResponse = self.call("connect", &[], &request).await?;
        self.check(&answer.environment_id, &answer.security_profile)?;
        self.check_present("url", &answer.url)?;
        self.check_present("executor_registration_id", &answer.executor_registration_id)?;
        self.learn(&answer.registries);
        Ok(answer)
    }

    /// Asks the registry whether to admit a harness, on behalf of an executor.
    ///
    /// # Errors
    ///
    /// Same as for [`Registry::register`].
    pub async fn validate(
        &self,
        stream_id: &str,
        registration_id: &str,
        harness: &PublicKey,
        authorization: &Authorization,
    ) -> Result<bool, RegistryError> {
        let request = ValidateRequest {
            executor_registration_id: registration_id.to_owned(),
            harness_public_key: harness.clone(),
            harness_key_authorization: authorization.clone(),
        };
        let headers = [(STREAM_ID_HEADER, stream_id)];
        let answer: ValidateResponse = self.call("validate", &headers, &request).await?;
        Ok(answer.valid)
    }

    /// Opens a websocket to a URL that the registry returned, with the same proxies and
    /// certificates. The URL is a credential; errors show it without its query.
    ///
    /// # Errors
    ///
    /// If the URL is not a websocket URL, the server does not respond in time, or it refuses the
    /// websocket.
    pub async fn dial(&self, url: &str, timeout: Duration) -> Result<Link, ConnectError> {
        let shown =
            || Url::parse(url).map_or_else(|_| "(not a URL)".to_owned(), |url| public(&url));
        // A registry must not select a Unix socket of this machine.
        if !url.starts_with("ws://") && !url.starts_with("wss://") {
            return Err(ConnectError::Url {
                url: shown(),
                reason: "the URL of a rendezvous server is ws://HOST or wss://HOST".to_owned(),
            });
        }
        let mut options = ConnectOptions::default();
        options.timeout = timeout;
        let tls = || self.configured.http.connector();
        let tcp = async |secure: bool, host: &str, port: u16| {
            self.configured
                .http
                .proxies()
                .connect(secure, host, port)
                .await
        };
        let mut outcome = connect_by(url, &options, tls, tcp).await;
        if matches!(outcome, Err(ConnectError::Tls { .. })) {
            self.configured.http.forget_connector();
        }
        if let Some(url) = outcome.as_mut().err().and_then(ConnectError::url_mut) {
            *url = shown();
        }
        outcome
    }

    /// Like [`Registry::dial`], for several addresses: returns the first websocket that opens.
    /// Stops at a status 4xx, because every other address would refuse the same request.
    ///
    /// # Errors
    ///
    /// The error of the last address that was tried.
    pub async fn dial_any(
        &self,
        url: &str,
        others: &[String],
        timeout: Duration,
    ) -> Result<Link, ConnectError> {
        let mut rest = others.iter().take(MAX_PLACES).peekable();
        let mut url = url;
        loop {
            // Use a short time limit while there is another address to try.
            let attempt_timeout = match rest.peek() {
                Some(_) => timeout.min(HURRY),
                None => timeout,
            };
            let outcome = self.dial(url, attempt_timeout).await;
            let void = matches!(
                outcome,
                Err(ConnectError::Refused {
                    status: 400..500,
                    ..
                })
            );
            match (&outcome, rest.next()) {
                (Err(error), Some(next)) if !void => {
                    tracing::debug!(%error, "trying the next address");
                    url = next;
                }
                _ => return outcome,
            }
        }
    }

    async fn call<T: DeserializeOwned>(
        &self,
        action: &str,
        headers: &[(&'static str, &str)],
        body: &impl Serialize,
    ) -> Result<T, RegistryError> {
        let mut all = self.options.auth.headers().await?;
        for &(name, value) in headers {
            // A stream id may be any text, a header value may not. The header is optional, so omit
            // it then.
            if value.bytes().all(|byte| byte.is_ascii_graphic()) {
                all.push((name, Secret::from(value)));
            }
        }
        let body = serde_json::to_vec(body).map_err(|error| RegistryError::Protocol {
            registry: self.name().to_owned(),
            reason: format!("cannot encode the request: {error}"),
        })?;
        let (address, status, answer) = self.post(action, &all, &body).await?;
        let registry = || address.http.name().to_owned();
        if (200..300).contains(&status) {
            return serde_json::from_slice(&answer).map_err(|error| RegistryError::Protocol {
                registry: registry(),
                reason: format!("cannot understand the answer to `{action}`: {error}"),
            });
        }
        let (name, auth) = (address.http.name(), &self.options.auth);
        Err(refusal(name, auth, status, &answer))
    }

    /// Sends a call to one base URL after another until one responds without a server error.
    async fn post(
        &self,
        action: &str,
        headers: &[(&'static str, Secret)],
        body: &[u8],
    ) -> Result<(Arc<RegistryBase>, u16, Vec<u8>), RegistryError> {
        let places = self.places.lock().clone();
        let mut rest = places.into_iter();
        let mut address = rest.next().unwrap_or_else(|| Arc::clone(&self.configured));
        loop {
            let url = address.base.join(action).map_err(|_| RegistryError::Url {
                url: public(&address.base),
                reason: "it has no path",
            })?;
            let next = rest.next();
            let post = address.http.post(&url, headers, body.to_vec());
            let outcome = match &next {
                None => post.await,
                // Use a short time limit while there is another base URL to try.
                Some(_) => match tokio::time::timeout(HURRY, post).await {
                    Ok(outcome) => outcome,
                    Err(_) => Err(RegistryError::Timeout {
                        registry: address.http.name().to_owned(),
                        timeout: HURRY,
                    }),
                },
            };
            let trouble = match &outcome {
                Ok((status, _)) => matches!(status, 500..=504),
                Err(error) => error.is_outage(),
            };
            match next {
                Some(next) if trouble => address = next,
                _ => {
                    let (status, answer) = outcome?;
                    self.prefer(&address);
                    return Ok((address, status, answer));
                }
            }
        }
    }

    fn check(&self, environment_id: &str, profile: &str) -> Result<(), RegistryError> {
        let reason = if environment_id != self.environment_id {
            format!(
                "asked for environment `{}`, got `{}`",
                self.environment_id,
                visible(environment_id)
            )
        } else if profile != SECURITY_PROFILE {
            format!(
                "expected the security profile `{SECURITY_PROFILE}`, got `{}`",
                visible(profile)
            )
        } else {
            return Ok(());
        };
        Err(RegistryError::Protocol {
            registry: self.name().to_owned(),
            reason,
        })
    }

    fn check_present(&self, name: &str, value: &str) -> Result<(), RegistryError> {
        if !value.trim().is_empty() {
            return Ok(());
        }
        Err(RegistryError::Protocol {
            registry: self.name().to_owned(),
            reason: format!("`{name}` is blank"),
        })
    }
}

/// Converts a response with an error status into an error.
fn refusal(registry: &str, auth: &RegistryAuth, status: u16, answer: &[u8]) -> RegistryError {
    let registry = registry.to_owned();
    let (code, mut message) = match serde_json::from_slice::<ErrorResponse>(answer) {
        Ok(ErrorResponse { error }) => (error.code, error.message.unwrap_or_default()),
        Err(_) => (None, String::from_utf8_lossy(answer).into_owned()),
    };
    if !auth.may_show_answers() {
        message.clear();
    }
    if let Some(code) = &code
        && message.is_empty()
    {
        message.clone_from(code);
    }
    let message = visible(&message);
    match status {
        401 | 403 => RegistryError::Auth {
            registry,
            status,
            message,
        },
        _ => RegistryError::Status {
            registry,
            status,
            code,
            message,
        },
    }
}

/// Refuses to send credentials to another machine without TLS, unless the options allow it.
fn check_secrecy(base: &Url, options: &RegistryOptions) -> Result<(), RegistryError> {
    if base.scheme() == "http"
        && !is_loopback(base)
        && !matches!(options.auth, RegistryAuth::Open)
        && !options.danger_plain_http
    {
        return Err(RegistryError::Url {
            url: public(base),
            reason: "credentials would travel in the clear; use https",
        });
    }
    Ok(())
}

/// Replaces control characters, which a terminal would interpret, in a text from another machine.
fn visible(text: &str) -> String {
    text.trim()
        .chars()
        .take(SHOWN_CHARS)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

fn parse_base(text: &str) -> Result<Url, RegistryError> {
    let bad = |url: String, reason| RegistryError::Url { url, reason };
    let url = Url::parse(text.trim()).map_err(|_| bad(text.trim().to_owned(), "not a URL"))?;
    let shown = public(&url);
    if !matches!(url.scheme(), "http" | "https") {
        return Err(bad(shown, "expected http://HOST or https://HOST"));
    }
    if url.host().is_none() {
        return Err(bad(shown, "no host"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(bad(shown, "a registry's URL has no query"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(bad(shown, "credentials do not belong into a URL"));
    }
    Ok(url)
}

/// Formats a URL for display: without its query, which may be a signature, and without passwords.
fn public(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    let _ = url.set_password(None);
    let _ = url.set_username("");
    url.into()
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name.eq_ignore_ascii_case("localhost"),
        Some(Host::Ipv4(address)) => IpAddr::from(address).is_loopback(),
        Some(Host::Ipv6(address)) => IpAddr::from(address).is_loopback(),
        None => false,
    }
}

/// URL of an environment: `registry://HOST[:PORT][/PREFIX]/ENVIRONMENT`.
///
/// `registry:` uses TLS, except for this machine itself; `registry+http:` and `registry+https:`
/// select the protocol.
///
/// ```
/// use exec_server_registry::RegistryUrl;
///
/// let url: RegistryUrl = "registry://meet.example/build-7".parse().unwrap();
/// assert_eq!(url.registry_url(), "https://meet.example");
/// assert_eq!(url.environment_id(), "build-7");
/// assert_eq!(url.to_string(), "registry://meet.example/build-7");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryUrl {
    registry_url: String,
    environment_id: String,
}

/// Error for a text that is not the URL of an environment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not the URL of an environment; expected registry://HOST[:PORT]/ENVIRONMENT")]
pub struct RegistryUrlParseError(String);

impl RegistryUrl {
    /// Creates the URL of an environment from its registry's `http://` or `https://` URL.
    ///
    /// # Errors
    ///
    /// If the URL is not valid for a registry, or the environment id is invalid.
    pub fn new(registry_url: &str, environment_id: &str) -> Result<Self, RegistryError> {
        let base = parse_base(registry_url)?;
        let environment_id = environment_id.trim();
        if environment_id.is_empty() {
            return Err(RegistryError::EnvironmentId(String::new()));
        }
        Ok(Self {
            registry_url: base.as_str().trim_end_matches('/').to_owned(),
            environment_id: environment_id.to_owned(),
        })
    }

    /// Returns whether a text has the scheme of an environment URL, valid or not.
    pub fn matches(text: &str) -> bool {
        ["registry://", "registry+http://", "registry+https://"]
            .iter()
            .any(|scheme| text.starts_with(scheme))
    }

    /// Returns the URL of the registry: `http://…` or `https://…`.
    pub fn registry_url(&self) -> &str {
        &self.registry_url
    }

    /// Returns the environment id.
    pub fn environment_id(&self) -> &str {
        &self.environment_id
    }
}

impl FromStr for RegistryUrl {
    type Err = RegistryUrlParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || RegistryUrlParseError(text.to_owned());
        let (scheme, rest) = text.split_once("://").ok_or_else(bad)?;
        let scheme = match scheme {
            "registry" => None,
            "registry+http" => Some("http"),
            "registry+https" => Some("https"),
            _ => return Err(bad()),
        };
        let (base, environment_id) = rest
            .trim_end_matches('/')
            .rsplit_once('/')
            .ok_or_else(bad)?;
        let parse = |scheme: &str| parse_base(&format!("{scheme}://{base}"));
        let mut url = parse(scheme.unwrap_or("https")).map_err(|_| bad())?;
        if scheme.is_none() && is_loopback(&url) {
            url = parse("http").map_err(|_| bad())?;
        }
        Self::new(url.as_str(), environment_id).map_err(|_| bad())
    }
}

impl fmt::Display for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = &self.registry_url;
        let plain = Url::parse(url).is_ok_and(|url| (url.scheme() == "http") == is_loopback(&url));
        let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
        let prefix = match plain {
            true => "registry".to_owned(),
            false => format!("registry+{scheme}"),
        };
        write!(f, "{prefix}://{rest}/{}", self.environment_id)
    }
}

#[cfg(test)]
mod tests;
