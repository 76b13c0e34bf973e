//! TLS server configuration with hot reload.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use exec_server_sync::{Mutex, RwLock};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;

use crate::secret::Secret;

use super::{Pin, Stamps, TlsError, certificates, private_key, provider, stamps, unreadable};

/// Files of a server's TLS identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsServerFiles {
    /// Certificate and its chain (PEM).
    pub cert: PathBuf,
    /// Private key (PEM).
    pub key: PathBuf,
    /// Certificate authorities (PEM). Every client must have a certificate that one of them signed;
    /// if `None`, clients need no certificate.
    pub client_ca: Option<PathBuf>,
}

impl TlsServerFiles {
    fn paths(&self) -> impl Iterator<Item = &Path> {
        let client_ca = self.client_ca.as_deref();
        [self.cert.as_path(), &self.key]
            .into_iter()
            .chain(client_ca)
    }
}

/// TLS server identity that can be replaced at runtime. Existing connections keep the identity they
/// started with.
#[derive(Debug)]
pub struct TlsServer {
    /// `None` if the identity was created in memory.
    files: Option<TlsServerFiles>,
    client_certificates: bool,
    current: RwLock<(Arc<ServerConfig>, Pin)>,
    /// Stamps of the files when they were last read, whether or not loading succeeded.
    seen: Mutex<Stamps>,
}

impl TlsServer {
    /// Loads the files.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or certificate and key do not match.
    pub fn load(files: TlsServerFiles) -> Result<Self, TlsError> {
        let seen = stamps(files.paths());
        let (chain, key) = (certificates(&files.cert)?, private_key(&files.key)?);
        let identity = identity_error(&files);
        let current = RwLock::new(build(chain, key, files.client_ca.as_deref(), identity)?);
        Ok(Self {
            client_certificates: files.client_ca.is_some(),
            files: Some(files),
            current,
            seen: Mutex::new(seen),
        })
    }

    /// Creates an identity from PEM texts, without files.
    ///
    /// # Errors
    ///
    /// If a text is invalid, certificate and key do not match, or the authorities cannot be read.
    pub fn in_memory(cert: &str, key: &Secret, client_ca: Option<&Path>) -> Result<Self, TlsError> {
        let memory = || PathBuf::from("memory");
        let none = |what| unreadable(what, &memory(), "the text contains none");
        let certificate =
            CertificateDer::from_pem_slice(cert.as_bytes()).map_err(|_| none("certificates"))?;
        let key = PrivateKeyDer::from_pem_slice(key.expose().as_bytes())
            .map_err(|_| none("a private key"))?;
        let identity = |source| TlsError::Identity {
            cert: memory(),
            key: memory(),
            source,
        };
        let current = build(vec![certificate], key, client_ca, identity)?;
        Ok(Self {
            client_certificates: client_ca.is_some(),
            files: None,
            current: RwLock::new(current),
            seen: Mutex::default(),
        })
    }

    /// Loads the files again. After an error the previous identity stays in use.
    ///
    /// # Errors
    ///
    /// Same as for [`TlsServer::load`].
    pub fn reload(&self) -> Result<(), TlsError> {
        let Some(files) = &self.files else {
            return Ok(());
        };
        *self.seen.lock() = stamps(files.paths());
        let (chain, key) = (certificates(&files.cert)?, private_key(&files.key)?);
        let fresh = build(
            chain,
            key,
            files.client_ca.as_deref(),
            identity_error(files),
        )?;
        *self.current.write() = fresh;
        Ok(())
    }

    /// Loads the files again if one of them has changed since they were last read.
    ///
    /// # Errors
    ///
    /// Same as for [`TlsServer::load`]; each change is reported once.
    pub fn reload_if_changed(&self) -> Result<bool, TlsError> {
        let Some(files) = &self.files else {
            return Ok(false);
        };
        if *self.seen.lock() == stamps(files.paths()) {
            return Ok(false);
        }
        self.reload().map(|()| true)
    }

    /// Returns the pin of the current key.
    pub fn pin(&self) -> Pin {
        self.current.read().1
    }

    /// Returns whether clients must present a certificate.
    pub fn wants_client_certificates(&self) -> bool {
        self.client_certificates
    }

    /// Returns an acceptor with the current identity.
    pub fn acceptor(&self) -> TlsAcceptor {
        let current = self.current.read();
        TlsAcceptor::from(Arc::clone(&current.0))
    }
}

fn identity_error(files: &TlsServerFiles) -> impl Fn(rustls::Error) -> TlsError {
    let (cert, key) = (files.cert.clone(), files.key.clone());
    move |source| TlsError::Identity {
        cert: cert.clone(),
        key: key.clone(),
        source,
    }
}

fn build(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    client_ca: Option<&Path>,
    identity: impl Fn(rustls::Error) -> TlsError,
) -> Result<(Arc<ServerConfig>, Pin), TlsError> {
    let provider = provider();
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate)?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| unreadable("client authorities", path, error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let pin = match chain.first() {
        Some(certificate) => Pin::of(certificate),
        None => Err(rustls::Error::NoCertificatesPresented),
    };
    let pin = pin.map_err(&identity)?;
    let config = builder.with_single_cert(chain, key).map_err(&identity)?;
    Ok((Arc::new(config), pin))
}
