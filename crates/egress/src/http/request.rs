//! Validation of `http/request` parameters.
//!
//! Contains the checks that do not depend on the caller, and the list of variables whose values may
//! not be sent in a header.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::http::{RedirectPolicy, RequestHeader, RequestParams};
use http::header::{AUTHORIZATION, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use percent_encoding::percent_decode_str;
use url::Url;

use crate::http::client::HttpError;

/// Variables whose values are never sent in a header: credentials of the executor, of the agent
/// inside it, and of its cloud.
const NEVER: &[&str] = &[
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
    "CODEX_ACCESS_TOKEN",
    "CODEX_API_KEY",
    "CODEX_CONNECTORS_TOKEN",
    "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE",
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "EXEC_SERVER_TOKEN",
    "EXEC_SERVER_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "OPENAI_API_KEY",
    "OPENAI_FEDERATION_RULE_ID",
    "OPENAI_IDENTITY_TOKEN_FILE",
    "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
];

/// A valid request.
#[derive(Debug, Clone)]
pub struct PreparedRequest {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) headers: HeaderMap,
    /// Headers with values of variables of this machine; a redirect to another host drops them.
    pub(crate) secret: Vec<HeaderName>,
    pub(crate) body: Bytes,
    pub(crate) timeout: Option<Duration>,
    pub(crate) follow: bool,
    pub(crate) decompress: bool,
}

impl PreparedRequest {
    /// Time limit for the whole exchange.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }
}

/// Validates a request; `environment` provides the values of header variables.
///
/// # Errors
///
/// [`HttpError::Invalid`] names the method, URL, header or variable that is not valid.
pub fn prepare(
    params: RequestParams,
    environment: &BTreeMap<String, String>,
) -> Result<PreparedRequest, HttpError> {
    let method = method(&params.method)?;
    let mut url = url(&params.url)?;
    let mut headers = HeaderMap::new();
    let mut secret = Vec::new();
    for header in &params.headers {
        let (name, value) = entry(header, environment)?;
        if header.value_env_var.is_some() {
            secret.push(name.clone());
        }
        // These headers are derived from the body. A wrong length would let the host read the rest
        // of the body as another request (request smuggling).
        if name != CONTENT_LENGTH && name != TRANSFER_ENCODING {
            let room = headers.try_append(name, value);
            room.map_err(|_| invalid("http/request has too many headers"))?;
        }
    }
    take_credentials(&mut url, &mut headers)?;
    Ok(PreparedRequest {
        method,
        url,
        headers,
        secret,
        body: params.body_base64.map(|body| body.0).unwrap_or_default(),
        timeout: params.timeout_ms.map(Duration::from_millis),
        follow: params.redirect_policy == RedirectPolicy::Follow,
        decompress: params.decompress,
    })
}

fn invalid(message: impl Into<String>) -> HttpError {
    HttpError::Invalid(message.into())
}

fn method(text: &str) -> Result<Method, HttpError> {
    match Method::from_bytes(text.as_bytes()) {
        Ok(Method::CONNECT) => Err(invalid("http/request cannot open tunnels with CONNECT")),
        Ok(method) => Ok(method),
        Err(_) => Err(invalid(format!("http/request method is invalid: {text:?}"))),
    }
}

/// Checks the scheme of a URL; also applied to every redirect.
pub(crate) fn check_scheme(url: &Url) -> Result<(), HttpError> {
    match url.scheme() {
        "http" | "https" => Ok(()),
        other => Err(invalid(format!(
            "http/request only supports http and https URLs, got {other}"
        ))),
    }
}

fn url(text: &str) -> Result<Url, HttpError> {
    let mut url: Url = text
        .parse()
        .map_err(|error| invalid(format!("http/request url is invalid: {error}: `{text}`")))?;
    check_scheme(&url)?;
    url.set_fragment(None);
    Ok(url)
}

/// Moves credentials of a URL into the `authorization` header, so that the URL can be logged and
/// redirected without them.
pub(crate) fn take_credentials(url: &mut Url, headers: &mut HeaderMap) -> Result<(), HttpError> {
    if url.username().is_empty() && url.password().is_none() {
        return Ok(());
    }
    let mut pair: Vec<u8> = percent_decode_str(url.username()).collect();
    pair.push(b':');
    pair.extend(percent_decode_str(url.password().unwrap_or_default()));
    let text = format!("Basic {}", base64_turbo::STANDARD.encode(&pair));
    // These fail only for URLs without a host, which were rejected before.
    let _ = (url.set_username(""), url.set_password(None));
    if !headers.contains_key(AUTHORIZATION) {
        let value = HeaderValue::try_from(text);
        let mut value = value.map_err(|_| invalid("http/request url has invalid credentials"))?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    Ok(())
}

fn entry(
    header: &RequestHeader,
    environment: &BTreeMap<String, String>,
) -> Result<(HeaderName, HeaderValue), HttpError> {
    let RequestHeader {
        name,
        value,
        value_env_var,
    } = header;
    let wrong = |what: &str| invalid(format!("http/request header {what} is invalid: {name:?}"));
    let key = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong("name"))?;
    let Some(variable) = value_env_var else {
        let value = HeaderValue::from_str(value).map_err(|_| wrong("value of"))?;
        return Ok((key, value));
    };
    if NEVER
        .iter()
        .any(|never| never.eq_ignore_ascii_case(variable))
    {
        return Err(invalid(format!(
            "http/request header {name} cannot use executor environment variable {variable}"
        )));
    }
    let Some(own) = environment.get(variable).filter(|own| !own.is_empty()) else {
        return Err(invalid(format!(
            "http/request header {name} needs executor environment variable {variable}, which is \
             not set"
        )));
    };
    let mut value =
        HeaderValue::try_from(format!("{value}{own}")).map_err(|_| wrong("value of"))?;
    value.set_sensitive(true);
    Ok((key, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(method: &str, url: &str, headers: &[(&str, &str, Option<&str>)]) -> RequestParams {
        RequestParams {
            method: method.to_owned(),
            url: url.to_owned(),
            headers: headers
                .iter()
                .map(|&(name, value, variable)| RequestHeader {
                    name: name.to_owned(),
                    value: value.to_owned(),
                    value_env_var: variable.map(str::to_owned),
                })
                .collect(),
            ..RequestParams::default()
        }
    }

    fn refusal(params: RequestParams) -> String {
        let environment = [("EMPTY", ""), ("openai_api_key", "x"), ("ODD", "a\nb")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
        prepare(params, &environment.into())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn invalid_request_is_rejected_with_the_reason() {
        let get = |url| refusal(params("GET", url, &[]));
        assert!(get("nonsense").starts_with("http/request url is invalid: "));
        assert!(get("http://").starts_with("http/request url is invalid: "));
        assert_eq!(
            get("ftp://x/"),
            "http/request only supports http and https URLs, got ftp"
        );
        assert!(refusal(params("G T", "http://x/", &[])).contains("method is invalid: \"G T\""));
        assert!(refusal(params("CONNECT", "http://x/", &[])).contains("CONNECT"));
        let header =
            |name, value, variable| refusal(params("GET", "http://x/", &[(name, value, variable)]));
        assert!(header("a b", "", None).contains("header name is invalid: \"a b\""));
        assert!(header("a", "x\r\nb: c", None).contains("header value of is invalid: \"a\""));
        assert!(header("a", "", Some("ODD")).contains("header value of"));
        for unset in ["EMPTY", "NOWHERE"] {
            assert!(header("a", "", Some(unset)).contains(&format!("variable {unset}, which")));
        }
        for never in ["OPENAI_API_KEY", "openai_api_key", "Aws_Session_Token"] {
            assert_eq!(
                header("h", "v", Some(never)),
                format!("http/request header h cannot use executor environment variable {never}")
            );
        }
    }

    #[test]
    fn variable_is_appended_to_header_and_dropped_on_redirect_to_other_host() {
        let environment = [("T".to_owned(), "oken".to_owned())].into();
        let headers = [
            ("X-B", "1", None),
            ("Authorization", "Bearer t", Some("T")),
            ("x-a", "2", None),
            ("x-b", "3", None),
            ("content-length", "7", None),
        ];
        let prepared = prepare(params("get", "http://x/", &headers), &environment).unwrap();
        assert_eq!(prepared.method.as_str(), "get");
        let sent: Vec<_> = prepared
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
            .collect();
        assert_eq!(
            sent,
            [
                ("x-b", "1"),
                ("x-b", "3"),
                ("authorization", "Bearer token"),
                ("x-a", "2")
            ]
        );
        assert_eq!(prepared.secret, [AUTHORIZATION]);
    }

    #[test]
    fn url_credentials_become_authorization_header() {
        let prepared = prepare(
            params("GET", "http://a%40b:c%3@x/#f", &[]),
            &BTreeMap::new(),
        );
        let prepared = prepared.unwrap();
        assert_eq!(prepared.url.as_str(), "http://x/");
        let encoded = base64_turbo::STANDARD.encode("a@b:c%3");
        let expected = format!("Basic {encoded}");
        assert_eq!(prepared.headers[AUTHORIZATION], expected.as_str());
    }
}
