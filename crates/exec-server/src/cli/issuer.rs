//! Keys of an OIDC issuer, read from a file or fetched from a URL.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use exec_server_client::BoxFuture;
use exec_server_registry::{Proxies, api};
use exec_server_rendezvous::oidc::{KeySource, Oidc, OidcConfig};
use exec_server_transport::stamp::Stamp;
use exec_server_transport::tls::TlsClientOptions;
use tokio::time::Instant;

use super::args::RendezvousArgs;
use super::settings::variable;

/// Maximum size of a JWKS document; usual documents have a few thousand bytes.
const MAX_DOCUMENT_BYTES: usize = 1 << 20;

/// Timeout of fetching a document.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Interval at which keys are fetched from a URL, so that removed keys become invalid.
const REFRESH_PERIOD: Duration = Duration::from_secs(300);

/// Source of the keys: a file or a URL.
#[derive(Debug, Clone)]
enum IssuerKeys {
    File(PathBuf),
    Url(String, TlsClientOptions),
}

impl KeySource for IssuerKeys {
    fn fetch(&self) -> BoxFuture<'_, Result<Vec<u8>, String>> {
        Box::pin(async move {
            match self {
                Self::File(path) => {
                    let shown = path.display().to_string();
                    let path = path.clone();
                    let read = tokio::task::spawn_blocking(move || fs::read(path)).await;
                    match read {
                        Ok(Ok(document)) => Ok(document),
                        Ok(Err(error)) => Err(format!("cannot read {shown}: {error}")),
                        Err(error) => Err(format!("cannot read {shown}: {error}")),
                    }
                }
                Self::Url(url, tls) => {
                    let proxies = Proxies::of_variables(variable);
                    api::fetch(url, tls.clone(), proxies, TIMEOUT, MAX_DOCUMENT_BYTES)
                        .await
                        .map_err(|error| error.to_string())
                }
            }
        })
    }
}

/// An OIDC issuer, and the time of the next check of its keys.
pub(super) struct OidcIssuer {
    pub(super) oidc: Arc<Oidc>,
    keys: IssuerKeys,
    stamp: Option<Stamp>,
    due: Instant,
}

impl OidcIssuer {
    /// Creates the issuer of the options, if there is one; keys in a file are loaded.
    pub(super) async fn of(args: &RendezvousArgs) -> anyhow::Result<Option<Self>> {
        let (Some(issuer), Some(audience), Some(jwks)) = (
            &args.oidc.oidc_issuer,
            &args.oidc.oidc_audience,
            &args.oidc.oidc_jwks,
        ) else {
            return Ok(None);
        };
        let keys = if jwks.starts_with("https://") || jwks.starts_with("http://") {
            let mut tls = TlsClientOptions::default();
            tls.ca_file.clone_from(&args.oidc.oidc_ca);
            IssuerKeys::Url(jwks.clone(), tls)
        } else {
            IssuerKeys::File(jwks.into())
        };
        let mut config = OidcConfig::new(issuer, audience);
        config.tenant_claim.clone_from(&args.oidc.oidc_tenant_claim);
        config.role_claim.clone_from(&args.oidc.oidc_role_claim);
        config
            .environments_claim
            .clone_from(&args.oidc.oidc_environments_claim);
        let oidc = Arc::new(Oidc::new(config, Arc::new(keys.clone())));
        let issuer = Self {
            stamp: stamp(&keys),
            oidc,
            keys,
            due: Instant::now() + REFRESH_PERIOD,
        };
        match (issuer.oidc.refresh().await, &issuer.keys) {
            (Ok(count), _) => tracing::debug!(count, "loaded the issuer's keys"),
            // The issuer's server may start later, whereas a file that is missing now is an error.
            (Err(error), IssuerKeys::Url(..)) => {
                tracing::error!(%error, "cannot load the issuer's keys yet")
            }
            (Err(error), IssuerKeys::File(_)) => anyhow::bail!("--oidc-jwks {jwks}: {error}"),
        }
        Ok(Some(issuer))
    }

    /// Reloads the keys if they have changed, in a separate task.
    pub(super) fn upkeep(&mut self, forced: bool) {
        let now = stamp(&self.keys);
        let url = matches!(self.keys, IssuerKeys::Url(..));
        if !forced && now == self.stamp && !(url && Instant::now() >= self.due) {
            return;
        }
        self.stamp = now;
        self.due = Instant::now() + REFRESH_PERIOD;
        let oidc = Arc::clone(&self.oidc);
        // Ends when the document has been read, or after the timeout.
        tokio::spawn(async move {
            match oidc.refresh().await {
                Ok(count) => tracing::info!(count, "reloaded the issuer's keys"),
                Err(error) => tracing::error!(
                    "cannot reload the issuer's keys, keeping the old ones: {error}"
                ),
            }
        });
    }
}

/// Stamp of the key file, which changes when the file is changed or replaced.
fn stamp(keys: &IssuerKeys) -> Option<Stamp> {
    let IssuerKeys::File(path) = keys else {
        return None;
    };
    Stamp::of(path).ok()
}
