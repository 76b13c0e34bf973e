//! Who we are to a registry: what goes into the headers of each call.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use tokio::sync::watch;

use super::agent::{AgentIdentity, AgentIdentityError};
use crate::secret::Secret;

/// The header with the credentials.
const AUTHORIZATION: &str = "authorization";
/// The header with the account that they are of.
pub(super) const ACCOUNT: &str = "chatgpt-account-id";
/// The header that some accounts need.
pub(super) const FEDRAMP: &str = "x-openai-fedramp";

/// Bytes of one line of credentials; real ones have a few hundred.
pub const MAX_LINE_BYTES: usize = 64 << 10;

/// Who we are.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum RegistryAuth {
    /// Nobody in particular, for registries that ask for nothing.
    Open,
    /// Whoever has this token.
    Bearer {
        /// The token.
        token: Secret,
        /// The account that it is of, where there are such.
        account_id: Option<String>,
    },
    /// Whoever has the token in this file, which is read for each call: it may be renewed.
    BearerFile(PathBuf),
    /// Whoever was told the newest token; see [`ScopedCredential`].
    Scoped(watch::Receiver<Option<ScopedCredential>>),
    /// Whoever can sign for an agent.
    Agent(Arc<AgentIdentity>),
}

impl RegistryAuth {
    /// A token, and nothing else.
    pub fn bearer(token: impl Into<Secret>) -> Self {
        Self::Bearer {
            token: token.into(),
            account_id: None,
        }
    }

    /// The headers of one call.
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

    /// Whether what a registry answers may be shown: with a token that somebody else handed us, that
    /// somebody decides who sees what it is good for.
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

/// Why there is nothing to show to a registry.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialError {
    /// The file with the token cannot be read.
    #[error("cannot read the token in {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Nobody has told us a token.
    #[error("no executor credential has come")]
    Missing,
    /// The token is too old, and no other has come.
    #[error("the executor credential has expired")]
    Expired,
    /// The agent cannot sign.
    #[error(transparent)]
    Agent(#[from] AgentIdentityError),
}

/// A token for one environment, handed over as a line of JSON: `{"version":1,
/// "environment_id":"…","token":"…","expires_at":UNIX_SECONDS}`.
#[derive(Debug, Clone)]
pub struct ScopedCredential {
    token: Secret,
    expires_at: SystemTime,
}

/// Why a line is not a credential. Never says what is in the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScopedCredentialError {
    /// Not such a line.
    #[error("invalid executor credential frame")]
    Invalid,
    /// Longer than [`MAX_LINE_BYTES`].
    #[error("an executor credential frame is at most {MAX_LINE_BYTES} bytes long")]
    TooLong,
    /// For somebody else.
    #[error("the executor credential is for another environment")]
    Environment,
    /// Of no use any more.
    #[error("the executor credential has expired")]
    Expired,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    version: u32,
    environment_id: String,
    token: String,
    expires_at: u64,
}

impl ScopedCredential {
    /// Reads a line.
    ///
    /// # Errors
    ///
    /// When it is no credential for this environment that is good at this moment.
    pub fn parse(
        line: &str,
        environment_id: &str,
        now: SystemTime,
    ) -> Result<Self, ScopedCredentialError> {
        if line.len() > MAX_LINE_BYTES {
            return Err(ScopedCredentialError::TooLong);
        }
        // What is wrong with it is not told: the text may be a token.
        let line: Line = serde_json::from_str(line).map_err(|_| ScopedCredentialError::Invalid)?;
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
    fn lines_are_exactly_what_they_should_be() {
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
    async fn a_token_that_expired_is_not_sent() {
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
    async fn files_are_read_for_every_call() {
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
