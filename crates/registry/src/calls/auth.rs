//! Credentials sent to a registry.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use tokio::sync::watch;

use super::agent::{AgentIdentity, AgentIdentityError};
use exec_server_transport::Secret;

/// Header with the credentials.
const AUTHORIZATION: &str = "authorization";
/// Header with the account of the credentials.
pub(super) const ACCOUNT: &str = "chatgpt-account-id";
/// Header that some accounts require.
pub(super) const FEDRAMP: &str = "x-openai-fedramp";

/// Maximum length of a line of credentials in bytes; real lines have a few hundred.
pub const MAX_LINE_BYTES: usize = 64 << 10;

/// Credentials for a registry.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum RegistryAuth {
    /// No credentials, for registries that do not require any.
    Open,
    /// Bearer token.
    Bearer {
        /// Token.
        token: Secret,
        /// Account of the token, if the registry has accounts.
        account_id: Option<String>,
    },
    /// Bearer token in a file, which is read for each call because the token may be renewed.
    BearerFile(PathBuf),
    /// Bearer token that its owner replaces at runtime.
    Renewed(watch::Receiver<Option<Secret>>),
    /// Bearer token that is replaced at runtime; see [`ScopedCredential`].
    Scoped(watch::Receiver<Option<ScopedCredential>>),
    /// Signatures of an agent.
    Agent(Arc<AgentIdentity>),
}

impl RegistryAuth {
    /// Creates credentials from a bearer token alone.
    pub fn bearer(token: impl Into<Secret>) -> Self {
        Self::Bearer {
            token: token.into(),
            account_id: None,
        }
    }

    /// Returns the credential headers of one call.
    pub(super) async fn headers(&self) -> Result<Vec<(&'static str, Secret)>, CredentialError> {
        match self {
            Self::Open => Ok(Vec::new()),
            Self::Bearer { token, account_id } => {
                let mut headers = vec![bearer(token)];
                if let Some(account) = account_id {
                    headers.push((ACCOUNT, Secret::from(account.as_str())));
                }
                Ok(headers)
            }
            Self::BearerFile(path) => Ok(vec![bearer(&read_token(path)?)]),
            Self::Renewed(newest) => {
                let newest = newest.borrow();
                Ok(vec![bearer(
                    newest.as_ref().ok_or(CredentialError::Missing)?,
                )])
            }
            Self::Scoped(newest) => {
                let newest = newest.borrow();
                let credential = newest.as_ref().ok_or(CredentialError::Missing)?;
                if credential.expires_at <= SystemTime::now() {
                    return Err(CredentialError::Expired);
                }
                Ok(vec![bearer(&credential.token)])
            }
            Self::Agent(agent) => Ok(agent.headers().await?),
        }
    }

    /// Returns whether messages may quote the registry's responses. They may not with a scoped
    /// token: only the program that supplied the token decides who may see what it gives access to.
    pub(super) fn may_show_answers(&self) -> bool {
        !matches!(self, Self::Scoped(_))
    }
}

pub(super) fn authorization(scheme: &str, value: &str) -> (&'static str, Secret) {
    (AUTHORIZATION, Secret::from(format!("{scheme} {value}")))
}

fn bearer(token: &Secret) -> (&'static str, Secret) {
    authorization("Bearer", token.expose())
}

fn read_token(path: &Path) -> Result<Secret, CredentialError> {
    let file = |source| CredentialError::File {
        path: path.to_owned(),
        source,
    };
    let token = Secret::read(path).map_err(file)?;
    if token.expose().is_empty() {
        return Err(file(io::Error::new(
            io::ErrorKind::InvalidData,
            "it is empty",
        )));
    }
    Ok(token)
}

/// Reason why no credentials can be sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialError {
    /// The token file cannot be read.
    #[error("cannot read the token in {}: {source}", path.display())]
    File {
        /// Path of the token file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// No credential was received yet.
    #[error("no executor credential was received yet")]
    Missing,
    /// The last credential has expired and no new one was received.
    #[error("the executor credential has expired")]
    Expired,
    /// No new credential could be obtained.
    #[error("cannot renew the credential: {0}")]
    Renewal(String),
    /// The agent cannot sign.
    #[error(transparent)]
    Agent(#[from] AgentIdentityError),
}

/// Token for one environment, received as a line of JSON: `{"version":1,
/// "environment_id":"…","token":"…","expires_at":UNIX_SECONDS}`.
#[derive(Debug, Clone)]
pub struct ScopedCredential {
    token: Secret,
    expires_at: SystemTime,
}

/// Reason why a line is not a valid credential. Never quotes the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScopedCredentialError {
    /// The line does not have the required format.
    #[error("invalid executor credential frame")]
    Invalid,
    /// The line is longer than [`MAX_LINE_BYTES`].
    #[error("an executor credential frame is at most {MAX_LINE_BYTES} bytes long")]
    TooLong,
    /// The credential belongs to another environment.
    #[error("the executor credential is for another environment")]
    Environment,
    /// The credential has expired.
    #[error("the executor credential has expired")]
    Expired,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CredentialLine {
    version: u32,
    environment_id: String,
    token: String,
    expires_at: u64,
}

impl ScopedCredential {
    /// Parses a line.
    ///
    /// # Errors
    ///
    /// If the line is not a credential for this environment that is valid now.
    pub fn parse(
        line: &str,
        environment_id: &str,
        now: SystemTime,
    ) -> Result<Self, ScopedCredentialError> {
        if line.len() > MAX_LINE_BYTES {
            return Err(ScopedCredentialError::TooLong);
        }
        // Drop the parser's error: it could quote the token.
        let line: CredentialLine =
            serde_json::from_str(line).map_err(|_| ScopedCredentialError::Invalid)?;
        let token = Secret::from(line.token);
        if line.version != 1 || token.expose().trim().is_empty() {
            return Err(ScopedCredentialError::Invalid);
        }
        if line.environment_id != environment_id {
            return Err(ScopedCredentialError::Environment);
        }
        let expires_at = UNIX_EPOCH
            .checked_add(Duration::from_secs(line.expires_at))
            .ok_or(ScopedCredentialError::Invalid)?;
        if expires_at <= now {
            return Err(ScopedCredentialError::Expired);
        }
        Ok(Self { token, expires_at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credential_lines_are_parsed_strictly() {
        let now = UNIX_EPOCH + Duration::from_secs(1000);
        let parse = |line: &str| ScopedCredential::parse(line, "e", now);
        let good = r#"{"version":1,"environment_id":"e","token":"t","expires_at":1001}"#;
        let credential = parse(good).unwrap();
        assert_eq!(credential.token.expose(), "t");
        assert!(!format!("{credential:?}").contains("\"t\""));
        use ScopedCredentialError as E;
        for (line, expected) in [
            (good.replace("1001", "1000"), E::Expired),
            (good.replace("1001", "\"1001\""), E::Invalid),
            (good.replace("1001", "1e99"), E::Invalid),
            (good.replace("\"version\":1", "\"version\":2"), E::Invalid),
            (
                good.replace("\"token\":\"t\"", "\"token\":\" \""),
                E::Invalid,
            ),
            (good.replace("{", "{\"more\":1,"), E::Invalid),
            (good.replace("\"e\"", "\"other\""), E::Environment),
            ("garbage".to_owned(), E::Invalid),
            ("x".repeat(MAX_LINE_BYTES + 1), E::TooLong),
        ] {
            assert_eq!(parse(&line).unwrap_err(), expected, "{line:.80}");
        }
    }

    #[tokio::test]
    async fn expired_token_is_not_sent() {
        let line = r#"{"version":1,"environment_id":"e","token":"t","expires_at":1}"#;
        let credential = ScopedCredential::parse(line, "e", UNIX_EPOCH).unwrap();
        let (sender, receiver) = watch::channel(None);
        let auth = RegistryAuth::Scoped(receiver);
        assert!(matches!(
            auth.headers().await,
            Err(CredentialError::Missing)
        ));
        sender.send_replace(Some(credential));
        assert!(matches!(
            auth.headers().await,
            Err(CredentialError::Expired)
        ));
        assert!(!auth.may_show_answers());
    }

    #[tokio::test]
    async fn token_file_is_read_for_every_call() {
        let path = std::env::temp_dir().join(format!("exec-server-auth-{}", std::process::id()));
        let auth = RegistryAuth::BearerFile(path.clone());
        let error = auth.headers().await.unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        for token in ["one", "two"] {
            std::fs::write(&path, format!("{token}\n")).unwrap();
            let headers = auth.headers().await.unwrap();
            assert_eq!(headers[0].1.expose(), format!("Bearer {token}"));
        }
        std::fs::write(&path, "\n").unwrap();
        assert!(auth.headers().await.is_err());
        std::fs::remove_file(&path).unwrap();
    }
}
