//! The keys of an OIDC issuer, from a file or from where it publishes them.

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

/// Bytes of a document; real ones have a few thousand.
const MAX_DOCUMENT_BYTES: usize = 1 << 20;

/// How long fetching one may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// How often keys are fetched from a URL, so that those that were taken away are forgotten.
const REFRESH_PERIOD: Duration = Duration::from_secs(300);

/// Where keys come from.
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

/// An OIDC issuer, and when its keys are to be checked again.
pub(super) struct OidcIssuer {
    pub(super) oidc: Arc<Oidc>,
    keys: IssuerKeys,
    stamp: Option<Stamp>,
    due: Instant,
}

impl OidcIssuer {
    /// The issuer that was named, if one was; its keys are there if they come from a file.
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

/// Changes when a file of keys does.
fn stamp(keys: &IssuerKeys) -> Option<Stamp> {
    let IssuerKeys::File(path) = keys else {
        return None;
    };
    Stamp::of(path).ok()
}
