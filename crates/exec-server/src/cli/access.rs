//! Tokens and certificates of servers and clients, loaded from settings and files.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use exec_server_client::RemoteExecServerConnectArgs;
use exec_server_service::auth::{
    Auth, CapabilityToken, DEFAULT_CLOCK_SKEW, MIN_SECRET_BYTES, Scopes, SignedTokens,
};
use exec_server_service::{AdmissionRules, ListenUrl};
use exec_server_transport::Secret;
use exec_server_transport::forwarded::TrustedProxies;
use exec_server_transport::time::parse_utc;
use exec_server_transport::tls::{TlsServer, TlsServerFiles};

use super::args::ServerArgs;
use super::settings::{Settings, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, variable};

/// Name of a token whose setting has no name.
const UNNAMED: &str = "token";

/// What a token file that does not exist, or is empty, means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MissingToken {
    /// A mistake in the settings.
    Error,
    /// The token was revoked, while the server ran.
    Revoked,
}

/// The files with settings and secrets of authentication that a server reads again when they change.
pub(super) fn watched_files(settings: &Settings) -> Vec<PathBuf> {
    let tokens = settings.list("auth.token_files").into_iter();
    let tokens = tokens.map(|given| token_file(given).to_owned());
    tokens
        .chain(settings.path("auth.shared_secret_file"))
        .chain(settings.file.clone())
        // What `/dev/fd` shows can be read only once.
        .filter(|path| !path.starts_with("/dev"))
        .collect()
}

/// The authentication rules for clients. Reads the files that hold secrets.
pub(super) fn rules(settings: &Settings, missing: MissingToken) -> anyhow::Result<AdmissionRules> {
    let allowed_origins = settings.list("auth.allow_origins");
    let trusted_proxies = TrustedProxies::parse(settings.list("auth.trusted_proxies"));
    Ok(AdmissionRules {
        auth: auth(settings, missing)?,
        allowed_origins: allowed_origins.into_iter().map(str::to_owned).collect(),
        trusted_proxies: trusted_proxies.context("`auth.trusted_proxies`")?,
        // Client certificates count as authentication, too.
        danger_any_user: settings.flag("auth.danger_no_auth")
            || settings.path("tls.client_ca").is_some(),
    })
}

fn auth(settings: &Settings, missing: MissingToken) -> anyhow::Result<Auth> {
    let given = |names: &[&str]| names.iter().any(|name| settings.is_set(name));
    let capability = given(&["auth.token_files", "auth.token_sha256"]);
    let signed = given(&[
        "auth.shared_secret_file",
        "auth.issuer",
        "auth.audience",
        "auth.max_clock_skew",
    ]);
    match settings.text("auth.mode") {
        None if capability || signed => bail!(
            "websocket auth flags require `--ws-auth capability-token` or \
             `--ws-auth signed-bearer-token`"
        ),
        None => Ok(Auth::Open),
        Some("capability-token") => {
            if signed {
                bail!(
                    "`--ws-shared-secret-file`, `--ws-issuer`, `--ws-audience`, and \
                     `--ws-max-clock-skew-seconds` require `--ws-auth signed-bearer-token`"
                );
            }
            tokens(settings, missing).map(Auth::Capability)
        }
        Some(_) => {
            if capability {
                bail!(
                    "`--ws-token-file` and `--ws-token-sha256` require `--ws-auth \
                     capability-token`, not `signed-bearer-token`"
                );
            }
            let path = settings.path("auth.shared_secret_file").context(
                "`--ws-shared-secret-file` is required when `--ws-auth signed-bearer-token` is set",
            )?;
            let secret = secret(&path)?;
            if secret.expose().len() < MIN_SECRET_BYTES {
                bail!(
                    "signed websocket bearer secret {} must be at least {MIN_SECRET_BYTES} bytes",
                    path.display()
                );
            }
            let text = |name| settings.text(name).map(str::to_owned);
            Ok(Auth::Signed(SignedTokens {
                secret,
                issuer: text("auth.issuer"),
                audience: text("auth.audience"),
                max_clock_skew: settings
                    .time("auth.max_clock_skew")
                    .unwrap_or(DEFAULT_CLOCK_SKEW),
            }))
        }
    }
}

fn tokens(settings: &Settings, missing: MissingToken) -> anyhow::Result<Vec<CapabilityToken>> {
    let files = settings.list("auth.token_files");
    let hashes = settings.list("auth.token_sha256");
    if files.is_empty() && hashes.is_empty() {
        bail!(
            "`--ws-token-file` or `--ws-token-sha256` is required when `--ws-auth \
             capability-token` is set"
        );
    }
    let named = |list: &[&str]| list.iter().all(|given| split(given).0.is_some());
    let both = !files.is_empty() && !hashes.is_empty();
    let all_named = named(&files) && named(&hashes);
    if both && !all_named {
        bail!("`--ws-token-file` and `--ws-token-sha256` are mutually exclusive");
    }
    // Sessions belong to token names: two tokens without a name would share their sessions.
    let all = files.iter().chain(&hashes);
    if all.filter(|given| split(given).0.is_none()).count() > 1 {
        bail!("several tokens need names, as in `--ws-token-file NAME=FILE`");
    }
    let mut tokens = Vec::new();
    for given in files {
        let (name, path, limits) = split(given);
        let token = match secret(Path::new(path)) {
            Ok(token) => token,
            Err(error) if missing == MissingToken::Revoked => {
                tracing::warn!("the token {given} is revoked: {error:#}");
                continue;
            }
            Err(error) => return Err(error),
        };
        let (scopes, expires) = limits_of(given, limits)?;
        let token = CapabilityToken::new(name.unwrap_or(UNNAMED), &token, scopes);
        tokens.push(token.until(expires));
    }
    for given in hashes {
        let (name, hex, limits) = split(given);
        let hash =
            digest(hex).context("--ws-token-sha256 must be a 64-character hex SHA-256 digest")?;
        let (scopes, expires) = limits_of(given, limits)?;
        let token = CapabilityToken::hashed(name.unwrap_or(UNNAMED), hash, scopes);
        tokens.push(token.until(expires));
    }
    Ok(tokens)
}

/// Parses `NAME=VALUE:SCOPES`, `NAME=VALUE`, or a value alone. A `=` after a `/` belongs to the
/// path.
fn split(given: &str) -> (Option<&str>, &str, Option<&str>) {
    match given.split_once('=') {
        Some((name, rest)) if !name.is_empty() && !name.contains('/') => {
            match rest.split_once(':') {
                Some((value, scopes)) => (Some(name), value, Some(scopes)),
                None => (Some(name), rest, None),
            }
        }
        _ => (None, given, None),
    }
}

/// The path of a token file, as given in the settings.
pub(super) fn token_file(given: &str) -> &Path {
    Path::new(split(given).1)
}

/// Scopes and expiry of a token: `SCOPE,SCOPE,until=TIME`, each of which can be left out.
fn limits_of(given: &str, limits: Option<&str>) -> anyhow::Result<(Scopes, Option<SystemTime>)> {
    const UNTIL: &str = "until=";
    let words = limits.unwrap_or_default().split([',', ' ']);
    let (times, scopes): (Vec<&str>, Vec<&str>) = words
        .filter(|word| !word.is_empty())
        .partition(|word| word.starts_with(UNTIL));
    let scopes = match (limits, &scopes[..], &times[..]) {
        (None, _, _) | (_, [], [_, ..]) => Scopes::ALL,
        _ => scopes
            .join(",")
            .parse()
            .with_context(|| format!("`{given}`"))?,
    };
    let expires = match times[..] {
        [] => None,
        [time] => {
            let seconds = parse_utc(&time[UNTIL.len()..]).with_context(|| {
                format!("`{given}`: `{time}` is no time; write 2027-01-31 or 2027-01-31T12:00:00Z")
            })?;
            UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
        }
        _ => bail!("`{given}`: a token has one `until=`"),
    };
    Ok((scopes, expires))
}

fn digest(hex: &str) -> Option<[u8; 32]> {
    let hex = hex.as_bytes();
    if hex.len() != 64 {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(hex.chunks(2)) {
        let digit = |c: u8| char::from(c).to_digit(16);
        *byte = u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok()?;
    }
    Some(bytes)
}

/// Reads a secret from a file that must not be empty.
pub(super) fn secret(path: &Path) -> anyhow::Result<Secret> {
    let secret = Secret::read(path)
        .with_context(|| format!("failed to read websocket auth secret {}", path.display()))?;
    if secret.expose().is_empty() {
        bail!("websocket auth secret {} must not be empty", path.display());
    }
    Ok(secret)
}

/// Loads the TLS identity if there are `wss://` listeners. Inherited sockets use TLS if there is an
/// identity.
pub(super) fn tls(
    settings: &Settings,
    urls: &[ListenUrl],
    inherited: bool,
) -> anyhow::Result<Option<Arc<TlsServer>>> {
    let addresses: Vec<SocketAddr> = urls
        .iter()
        .filter_map(|url| match url {
            ListenUrl::Tls(address) => Some(*address),
            _ => None,
        })
        .collect();
    let (cert, key) = (settings.path("tls.cert"), settings.path("tls.key"));
    let client_ca = settings.path("tls.client_ca");
    let self_signed = settings.flag("tls.self_signed");
    let wanted = cert.is_some() || self_signed;
    if addresses.is_empty() && !(inherited && wanted) {
        if cert.is_some() || key.is_some() || client_ca.is_some() || self_signed {
            bail!("TLS options need a `wss://IP:PORT` listener");
        }
        return Ok(None);
    }
    let files = TlsFiles {
        cert,
        key,
        client_ca,
        self_signed,
    };
    tls_identity(files, &addresses).map(Some)
}

/// Source of a TLS identity: files, or a new self-signed certificate.
pub(super) struct TlsFiles {
    pub(super) cert: Option<PathBuf>,
    pub(super) key: Option<PathBuf>,
    pub(super) client_ca: Option<PathBuf>,
    pub(super) self_signed: bool,
}

/// Loads or creates the identity for these addresses. Prints the pin of a self-signed certificate.
pub(super) fn tls_identity(
    files: TlsFiles,
    addresses: &[SocketAddr],
) -> anyhow::Result<Arc<TlsServer>> {
    let self_signed = files.self_signed;
    let server = make_identity(files, addresses)?;
    if self_signed {
        eprintln!("tls pin: {}", server.pin());
    }
    Ok(Arc::new(server))
}

/// The identity for these addresses, without printing its pin.
pub(super) fn make_identity(
    files: TlsFiles,
    addresses: &[SocketAddr],
) -> anyhow::Result<TlsServer> {
    let TlsFiles {
        cert,
        key,
        client_ca,
        self_signed,
    } = files;
    Ok(match (cert, key) {
        (Some(cert), Some(key)) => {
            if self_signed && !cert.exists() && !key.exists() {
                let (made, secret) = make_certificate(addresses)?;
                write_new(&key, secret.expose(), 0o600)?;
                write_new(&cert, &made, 0o644)?;
            }
            TlsServer::load(TlsServerFiles {
                cert,
                key,
                client_ca,
            })?
        }
        (None, None) if self_signed => {
            let (cert, key) = make_certificate(addresses)?;
            TlsServer::in_memory(&cert, &key, client_ca.as_deref())?
        }
        (None, None) => {
            bail!(
                "a `wss://` or `https://` listener needs `--tls-cert` and `--tls-key`, or `--tls-self-signed`"
            )
        }
        _ => bail!("`--tls-cert` and `--tls-key` belong together"),
    })
}

/// Creates a self-signed certificate for this machine, and its key.
fn make_certificate(addresses: &[SocketAddr]) -> anyhow::Result<(String, Secret)> {
    let mut names = vec!["localhost".to_owned()];
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    if host.is_ascii() && !host.is_empty() && host != "localhost" {
        names.push(host);
    }
    let loopback = ["127.0.0.1", "::1"].map(|text| text.parse::<IpAddr>().ok());
    let given = addresses.iter().map(|address| Some(address.ip()));
    for address in loopback.into_iter().chain(given).flatten() {
        let address = address.to_string();
        if !names.contains(&address) {
            names.push(address);
        }
    }
    let failed = "cannot make a certificate";
    let key = rcgen::KeyPair::generate().context(failed)?;
    let mut params = rcgen::CertificateParams::new(names).context(failed)?;
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "exec-server");
    let certificate = params.self_signed(&key).context(failed)?;
    Ok((certificate.pem(), Secret::from(key.serialize_pem())))
}

/// Writes a new file; fails if it exists.
pub(super) fn write_new(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Adds a client's token, certificate and trusted keys to its connection arguments.
pub(super) fn introduce(
    server: &ServerArgs,
    args: &mut RemoteExecServerConnectArgs,
) -> anyhow::Result<()> {
    let given =
        |flag: &Option<PathBuf>, name| flag.clone().or_else(|| set(name).map(PathBuf::from));
    let token_file = given(&server.token_file, TOKEN_FILE_VARIABLE);
    args.bearer_token = match (&token_file, variable(TOKEN_VARIABLE)) {
        (Some(path), _) => {
            let token = Secret::read(path).with_context(|| {
                let by = match server.token_file {
                    Some(_) => "--token-file",
                    None => TOKEN_FILE_VARIABLE,
                };
                format!("{by}: cannot read the token in {}", path.display())
            })?;
            if token.expose().is_empty() {
                bail!("the token in {} is empty", path.display());
            }
            Some(token)
        }
        (None, Some(token)) if !token.trim().is_empty() => Some(Secret::from(token.trim())),
        _ => None,
    };
    args.tls.pin = match server
        .tls_pin
        .clone()
        .or_else(|| set("EXEC_SERVER_TLS_PIN"))
    {
        Some(pin) => Some(pin.parse()?),
        None => None,
    };
    args.tls.ca_file = given(&server.tls_ca, "EXEC_SERVER_TLS_CA");
    args.tls.identity = server
        .tls_client_cert
        .clone()
        .zip(server.tls_client_key.clone());
    Ok(())
}

/// Description of the source of a client's token, for messages; `None` without a token.
pub(super) fn token_origin(server: &ServerArgs) -> Option<String> {
    let file = server.token_file.clone();
    match file.or_else(|| set(TOKEN_FILE_VARIABLE).map(PathBuf::from)) {
        Some(path) => Some(format!("the token in {}", path.display())),
        None => {
            set(TOKEN_VARIABLE).filter(|token| !token.trim().is_empty())?;
            Some(format!("the token in {TOKEN_VARIABLE}"))
        }
    }
}

/// Value of a variable that is set and not empty.
fn set(name: &str) -> Option<String> {
    variable(name).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use exec_server_service::auth::Scope;

    use super::*;

    #[test]
    fn tokens_have_names_and_scopes() {
        assert_eq!(split("/run/token"), (None, "/run/token", None));
        assert_eq!(split("./a=b"), (None, "./a=b", None));
        assert_eq!(split("ci=/run/ci"), (Some("ci"), "/run/ci", None));
        assert_eq!(
            split("ci=/run/ci:exec,fs:read"),
            (Some("ci"), "/run/ci", Some("exec,fs:read"))
        );
        assert!(limits_of("x", Some("exec,root")).is_err());
        let until = Some(UNIX_EPOCH + Duration::from_secs(1_800_000_000));
        let exec = Scopes::NONE.with(Scope::Exec);
        for (limits, expected) in [
            (None, (Scopes::ALL, None)),
            (Some("until=2027-01-15T08:00:00Z"), (Scopes::ALL, until)),
            (Some("exec,until=2027-01-15T08:00:00Z"), (exec, until)),
            (Some("exec"), (exec, None)),
            (Some(""), (Scopes::NONE, None)),
        ] {
            assert_eq!(limits_of("x", limits).unwrap(), expected, "{limits:?}");
        }
        for limits in ["until=tomorrow", "until=2027-01-15,until=2027-01-16"] {
            assert!(limits_of("x", Some(limits)).is_err(), "{limits}");
        }
    }

    #[test]
    fn digests_are_hex_in_any_case() {
        let text = "Ab".repeat(32);
        assert_eq!(digest(&text), Some([0xab; 32]));
        for bad in [
            "",
            "ab",
            &"zz".repeat(32),
            &"ab".repeat(33),
            &"é".repeat(32),
        ] {
            assert_eq!(digest(bad), None, "{bad}");
        }
    }
}
