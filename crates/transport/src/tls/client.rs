//! TLS client configuration: roots, CA file, pin, client certificate.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_rustls::TlsConnector;

use super::{Pin, TlsError, certificates, private_key, provider};

/// TLS options for `wss://` connections: trusted servers and the client's own certificate.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct TlsClientOptions {
    /// Required public key of the server. Without `ca_file`, nothing else of its certificate is
    /// checked, neither the name nor the dates.
    pub pin: Option<Pin>,
    /// Certificate authorities (PEM) to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Client certificate (PEM, with its chain) and its key, for servers that require one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Creates a TLS connector with these options.
///
/// # Errors
///
/// When a file cannot be read, or the TLS library refuses its content.
pub fn connector(options: &TlsClientOptions) -> Result<TlsConnector, TlsError> {
    let provider = provider();
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?;
    let authorities = match (&options.ca_file, options.pin) {
        (None, Some(_)) => None,
        (Some(path), _) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate)?;
            }
            Some(roots)
        }
        (None, None) => Some(system_roots()?),
    };
    let builder = match (options.pin, authorities) {
        (None, Some(roots)) => builder.with_root_certificates(roots),
        (None, None) => builder.with_root_certificates(RootCertStore::empty()),
        (Some(pin), roots) => {
            let inner = match roots {
                Some(roots) => {
                    let built = WebPkiServerVerifier::builder_with_provider(
                        Arc::new(roots),
                        Arc::clone(&provider),
                    )
                    .build();
                    Some(built.map_err(|error| rustls::Error::General(error.to_string()))?)
                }
                None => None,
            };
            let verifier = Pinned {
                pin,
                inner,
                provider,
            };
            builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
        }
    };
    let config = match &options.identity {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder
            .with_client_auth_cert(certificates(cert)?, private_key(key)?)
            .map_err(|source| TlsError::Identity {
                cert: cert.clone(),
                key: key.clone(),
                source,
            })?,
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

fn system_roots() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let reason = found.errors.first().map_or_else(
            || "install them, or name one with a CA file or a pin".to_owned(),
            ToString::to_string,
        );
        return Err(TlsError::NoSystemRoots(reason));
    }
    Ok(roots)
}

/// Certificate verifier that accepts only the pinned public key.
#[derive(Debug)]
struct Pinned {
    pin: Pin,
    /// Verifier for the certificate chain, if one is configured.
    inner: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let seen = Pin::of(end_entity)?;
        if seen != self.pin {
            let expected = self.pin;
            return Err(rustls::Error::General(format!(
                "the server's key has the pin {seen}, not {expected}"
            )));
        }
        match &self.inner {
            Some(inner) => {
                inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            }
            None => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
