//! The calls to a registry: register, connect, validate.
//!
//! Owns URLs, HTTP and what its errors mean. Who we are is in [`auth`]; what the answers are good
//! for is known to whoever asks.

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

use crate::connect::{ConnectError, ConnectOptions, connect_by};
use crate::link::Link;
use crate::secret::Secret;
use crate::tls::{TlsClientOptions, TlsError};
use auth::{CredentialError, RegistryAuth};
use http::Http;

pub use agent::{AgentIdentity, AgentIdentityError};
pub use proxy::Proxies;

/// The code of a 409 while no executor is attached.
pub const ENVIRONMENT_OFFLINE: &str = "environment_offline";

/// Bytes of an answer that are read; real ones have about two thousand.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// Characters of an answer that are shown when it is no JSON.
const SHOWN_CHARS: usize = 4096;

/// Places of one registry that are known at a time.
const MAX_PLACES: usize = 8;

/// How long a place may take while there is another.
const HURRY: Duration = Duration::from_secs(3);

/// The header that tells a registry for which stream it is asked.
const STREAM_ID_HEADER: &str = "x-codex-noise-stream-id";

/// How to reach a registry.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RegistryOptions {
    /// Who we are.
    pub auth: RegistryAuth,
    /// Whom to believe behind an `https://` URL.
    pub tls: TlsClientOptions,
    /// Who stands between us and the registry, or its meeting point.
    pub proxies: Proxies,
    /// For each call, name lookup and connection included.
    pub timeout: Duration,
    /// Whether credentials may go to other machines without TLS.
    pub danger_plain_http: bool,
}

impl RegistryOptions {
    /// The defaults, for these credentials.
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

/// Why a call to a registry has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The URL cannot be one of a registry.
    #[error("`{url}` is no registry: {reason}")]
    Url {
        /// As given, without what may be secret in it.
        url: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// No environment can have this id.
    #[error("`{0}` is no environment id: it must not be empty")]
    EnvironmentId(String),
    /// There are no credentials, or none that are good now.
    #[error(transparent)]
    Credential(#[from] CredentialError),
    /// Our own certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The registry cannot be reached, or hung up.
    #[error("cannot reach the registry {registry}: {reason}")]
    Unreachable {
        /// Its host and port.
        registry: String,
        /// What went wrong.
        reason: String,
    },
    /// No answer came in time.
    #[error("no answer from the registry {registry} within {timeout:?}")]
    Timeout {
        /// Its host and port.
        registry: String,
        /// How long we waited.
        timeout: Duration,
    },
    /// The registry does not accept our credentials.
    #[error("the registry {registry} refused us: HTTP {status}{}", shown(.message))]
    Auth {
        /// Its host and port.
        registry: String,
        /// 401 or 403.
        status: u16,
        /// What it said.
        message: String,
    },
    /// The registry answered with an error.
    #[error("the registry {registry} answered HTTP {status}{}", shown(.message))]
    Status {
        /// Its host and port.
        registry: String,
        /// The HTTP status.
        status: u16,
        /// For programs.
        code: Option<String>,
        /// For people.
        message: String,
    },
    /// The registry's answer makes no sense.
    #[error("the registry {registry} broke the protocol: {reason}")]
    Protocol {
        /// Its host and port.
        registry: String,
        /// What is wrong.
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
    /// Whether the registry is away rather than of another opinion: nobody answered, or somebody who
    /// could not.
    pub fn is_outage(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Timeout { .. } => true,
            Self::Status { status, .. } => matches!(status, 500..|408| 429),
            _ => false,
        }
    }

    /// Whether the same call may succeed a little later without anyone's help.
    pub fn is_retryable(&self) -> bool {
        self.is_outage() || self.is_offline()
    }

    /// Whether no executor is attached.
    pub fn is_offline(&self) -> bool {
        matches!(self, Self::Status { status: 409, code: Some(code), .. } if code == ENVIRONMENT_OFFLINE)
    }
}

/// One place that answers the calls of a registry.
#[derive(Debug)]
struct Place {
    http: Http,
    /// `…/cloud/environment/ID/`.
    base: Url,
}

/// One environment of a registry.
#[derive(Debug)]
pub struct Registry {
    /// The one that we were told.
    told: Arc<Place>,
    /// Where to ask, the best first: the one that answered last, then the others that it named.
    places: Mutex<Vec<Arc<Place>>>,
    environment_id: String,
    options: RegistryOptions,
}

impl Place {
    fn new(
        url: &str,
        environment_id: &str,
        options: &RegistryOptions,
    ) -> Result<Self, RegistryError> {
        let base = parse_base(url)?;
        // The two that a URL would make something else of.
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
            http: Http::new(
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
    /// An environment of the registry at an `http://` or `https://` URL.
    ///
    /// # Errors
    ///
    /// When the URL is of another kind, or our credentials would go to another machine in the clear.
    pub fn new(
        url: &str,
        environment_id: &str,
        options: RegistryOptions,
    ) -> Result<Self, RegistryError> {
        let environment_id = environment_id.trim();
        let told = Arc::new(Place::new(url, environment_id, &options)?);
        Ok(Self {
            places: Mutex::new(vec![Arc::clone(&told)]),
            told,
            environment_id: environment_id.to_owned(),
            options,
        })
    }

    /// The environment.
    pub fn environment_id(&self) -> &str {
        &self.environment_id
    }

    /// The registry, for messages: its host and port.
    pub fn name(&self) -> &str {
        self.told.http.name()
    }

    /// Takes note of the other places that the registry named. One that would get our credentials
    /// with less protection is left out.
    fn learn(&self, others: &[String]) {
        let mut places = self.places.lock();
        let mut learned = Vec::new();
        // The one that named them has just answered.
        learned.extend(places.first().cloned());
        let mut add = |place: Arc<Place>| {
            let known = learned.iter().any(|known| known.base == place.base);
            if !known && learned.len() < MAX_PLACES {
                learned.push(place);
            }
        };
        for other in others {
            if let Ok(place) = Place::new(other, &self.environment_id, &self.options)
                && (place.base.scheme() == "https" || self.told.base.scheme() == "http")
            {
                let before = places.iter().find(|known| known.base == place.base);
                add(before.cloned().unwrap_or_else(|| Arc::new(place)));
            }
        }
        add(Arc::clone(&self.told));
        *places = learned;
    }

    /// Asks this place first from now on.
    fn prefer(&self, place: &Arc<Place>) {
        let mut places = self.places.lock();
        if let Some(at) = places.iter().position(|known| Arc::ptr_eq(known, place)) {
            places[..=at].rotate_right(1);
        }
    }

    /// An executor says that it is there.
    ///
    /// # Errors
    ///
    /// When the registry does not answer, does not want to, or answers nonsense.
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

    /// A harness asks for a way to the executor; the answer is good for one connection.
    ///
    /// # Errors
    ///
    /// As [`Registry::register`]; [`RegistryError::is_offline`] while no executor is there.
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

    /// An executor asks whether a harness may come in.
    ///
    /// # Errors
    ///
    /// As [`Registry::register`].
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

    /// Opens a websocket to where the registry said, by the same proxies and with the same
    /// certificates. The URL is a credential; errors show it without its query.
    ///
    /// # Errors
    ///
    /// When it is none of a websocket, nobody answers in time, or the websocket is refused.
    pub async fn dial(&self, url: &str, timeout: Duration) -> Result<Link, ConnectError> {
        let shown =
            || Url::parse(url).map_or_else(|_| "(not a URL)".to_owned(), |url| public(&url));
        // A registry must not choose a socket of this machine.
        if !url.starts_with("ws://") && !url.starts_with("wss://") {
            return Err(ConnectError::Url {
                url: shown(),
                reason: "the URL of a rendezvous server is ws://HOST or wss://HOST".to_owned(),
            });
        }
        let options = ConnectOptions {
            timeout,
            ..ConnectOptions::default()
        };
        let tls = || self.told.http.connector();
        let tcp = async |secure: bool, host: &str, port: u16| {
            self.told.http.proxies().connect(secure, host, port).await
        };
        let mut outcome = connect_by(url, &options, tls, tcp).await;
        if matches!(outcome, Err(ConnectError::Tls { .. })) {
            self.told.http.forget_connector();
        }
        match &mut outcome {
            Err(
                ConnectError::Url { url, .. }
                | ConnectError::Timeout { url, .. }
                | ConnectError::Io { url, .. }
                | ConnectError::Tls { url, .. }
                | ConnectError::Token { url }
                | ConnectError::Refused { url, .. },
            ) => *url = shown(),
            Ok(_) | Err(ConnectError::TlsSetup(_)) => {}
        }
        outcome
    }

    /// As [`Registry::dial`], at the first of several addresses behind which somebody takes us in. An
    /// address that is refused for what it is (4xx) would be refused elsewhere too.
    ///
    /// # Errors
    ///
    /// Of the last that was tried.
    pub async fn dial_any(
        &self,
        url: &str,
        others: &[String],
        timeout: Duration,
    ) -> Result<Link, ConnectError> {
        let mut rest = others.iter().take(MAX_PLACES).peekable();
        let mut url = url;
        loop {
            // With another to try, nobody is waited for long.
            let patience = match rest.peek() {
                Some(_) => timeout.min(HURRY),
                None => timeout,
            };
            let outcome = self.dial(url, patience).await;
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
            // A stream id may be any text, a header may not; without it the call means the same.
            if value.bytes().all(|byte| byte.is_ascii_graphic()) {
                all.push((name, Secret::from(value)));
            }
        }
        let body = serde_json::to_vec(body).map_err(|error| RegistryError::Protocol {
            registry: self.name().to_owned(),
            reason: format!("cannot encode the request: {error}"),
        })?;
        let (place, status, answer) = self.post(action, &all, &body).await?;
        let registry = || place.http.name().to_owned();
        if (200..300).contains(&status) {
            return serde_json::from_slice(&answer).map_err(|error| RegistryError::Protocol {
                registry: registry(),
                reason: format!("cannot understand the answer to `{action}`: {error}"),
            });
        }
        let (name, auth) = (place.http.name(), &self.options.auth);
        Err(refusal(name, auth, status, &answer))
    }

    /// Asks one place after the other until one answers that is not in trouble itself.
    async fn post(
        &self,
        action: &str,
        headers: &[(&'static str, Secret)],
        body: &[u8],
    ) -> Result<(Arc<Place>, u16, Vec<u8>), RegistryError> {
        let places = self.places.lock().clone();
        let mut rest = places.into_iter();
        let mut place = rest.next().unwrap_or_else(|| Arc::clone(&self.told));
        loop {
            let url = place.base.join(action).map_err(|_| RegistryError::Url {
                url: public(&place.base),
                reason: "it has no path",
            })?;
            let next = rest.next();
            let post = place.http.post(&url, headers, body.to_vec());
            let outcome = match &next {
                None => post.await,
                // With another to ask, nobody is waited for long.
                Some(_) => match tokio::time::timeout(HURRY, post).await {
                    Ok(outcome) => outcome,
                    Err(_) => Err(RegistryError::Timeout {
                        registry: place.http.name().to_owned(),
                        timeout: HURRY,
                    }),
                },
            };
            let trouble = match &outcome {
                Ok((status, _)) => matches!(status, 500..=504),
                Err(error) => error.is_outage(),
            };
            match next {
                Some(next) if trouble => place = next,
                _ => {
                    let (status, answer) = outcome?;
                    self.prefer(&place);
                    return Ok((place, status, answer));
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

/// What an answer means that is not a result.
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

/// Credentials go to other machines in the clear only when that was wanted.
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

/// What another machine said, without what a terminal would obey.
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

/// A URL that can be shown: without its query, which may be a signature, and without passwords.
pub fn public(url: &Url) -> String {
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

/// An environment by one text: `registry://HOST[:PORT][/PREFIX]/ENVIRONMENT`.
///
/// `registry:` means TLS, except on this machine itself; `registry+http:` and `registry+https:` say
/// it.
///
/// ```
/// use exec_server_transport::registry::RegistryUrl;
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

/// Not an environment's URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` names no environment; expected registry://HOST[:PORT]/ENVIRONMENT")]
pub struct RegistryUrlParseError(String);

impl RegistryUrl {
    /// An environment of the registry at an `http://` or `https://` URL.
    ///
    /// # Errors
    ///
    /// When the URL is no registry's, or no environment can have this id.
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

    /// Whether a text looks like one, right or wrong.
    pub fn matches(text: &str) -> bool {
        ["registry://", "registry+http://", "registry+https://"]
            .iter()
            .any(|scheme| text.starts_with(scheme))
    }

    /// Where the registry is: `http://…` or `https://…`.
    pub fn registry_url(&self) -> &str {
        &self.registry_url
    }

    /// The environment.
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
