//! TLS for websockets: certificates, keys and pins.
//!
//! Builds configurations of the TLS library from files. Does not open sockets.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use base64_turbo::STANDARD;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ParsedCertificate;
use sha2::{Digest as _, Sha256};

use crate::stamp::Stamp;

mod client;
mod server;

pub use client::{TlsClientOptions, connector};
pub use server::{TlsServer, TlsServerFiles};

/// Reason why TLS cannot be configured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read or does not have the expected content.
    #[error("cannot read {what} from {}: {reason}", path.display())]
    File {
        /// Expected content.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The reason why the file is rejected.
        reason: String,
    },
    /// The certificate and the key do not match.
    #[error("cannot use the certificate {} with the key {}: {source}", cert.display(), key.display())]
    Identity {
        /// Path of the certificate file.
        cert: PathBuf,
        /// Path of the key file.
        key: PathBuf,
        /// Error of the TLS library.
        source: rustls::Error,
    },
    /// The system has no trusted certificate authorities.
    #[error("no system certificate authorities found: {0}")]
    NoSystemRoots(String),
    /// The TLS library refused the configuration.
    #[error(transparent)]
    Other(#[from] rustls::Error),
}

/// SHA-256 hash of a server's public key (its SubjectPublicKeyInfo), as `sha256//BASE64`.
///
/// `curl --pinnedpubkey` uses the same format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pin([u8; 32]);

impl Pin {
    const PREFIX: &'static str = "sha256//";

    /// Computes the pin of a certificate's public key.
    ///
    /// # Errors
    ///
    /// If the certificate cannot be parsed.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Self, rustls::Error> {
        let key = ParsedCertificate::try_from(certificate)?.subject_public_key_info();
        Ok(Self(Sha256::digest(&key).into()))
    }
}

impl Pin {
    /// Computes the pin of the first certificate in a PEM text.
    ///
    /// # Errors
    ///
    /// If the text has no certificate, or it cannot be parsed.
    pub fn of_pem(pem: &[u8]) -> Result<Self, rustls::Error> {
        let certificate = CertificateDer::from_pem_slice(pem)
            .map_err(|error| rustls::Error::General(describe(&error)))?;
        Self::of(&certificate)
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", Self::PREFIX, STANDARD.encode(self.0))
    }
}

/// Error for a text that is not a pin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid pin `{0}`; expected `sha256//` and 44 characters of base64")]
pub struct PinParseError(String);

impl FromStr for Pin {
    type Err = PinParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let decoded = text
            .strip_prefix(Self::PREFIX)
            .and_then(|digest| STANDARD.decode(digest).ok())
            .and_then(|bytes| bytes.try_into().ok());
        decoded
            .map(Self)
            .ok_or_else(|| PinParseError(text.to_owned()))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn unreadable(what: &'static str, path: &Path, reason: impl fmt::Display) -> TlsError {
    TlsError::File {
        what,
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

/// Reads all certificates of a PEM file; there must be at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    const WHAT: &str = "certificates";
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path)
        .map_err(|error| unreadable(WHAT, path, describe(&error)))?
        .collect();
    match found {
        Ok(found) if found.is_empty() => Err(unreadable(WHAT, path, "the file contains none")),
        Ok(found) => Ok(found),
        Err(error) => Err(unreadable(WHAT, path, describe(&error))),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| match error {
        pem::Error::NoItemsFound => unreadable("a private key", path, "the file contains none"),
        error => unreadable("a private key", path, describe(&error)),
    })
}

fn describe(error: &pem::Error) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        // Drop the library's error: it quotes the line, which may be a part of a key.
        pem::Error::MissingSectionEnd { .. } => "a section has no end".to_owned(),
        pem::Error::IllegalSectionStart { .. } => "a section begins strangely".to_owned(),
        pem::Error::Base64Decode(_) => "it is not valid base64".to_owned(),
        _ => "it is not PEM".to_owned(),
    }
}

/// Stamps of the files of a configuration; `None` for a file that cannot be read.
type Stamps = Vec<Option<Stamp>>;

fn stamps<'a>(files: impl IntoIterator<Item = &'a Path>) -> Stamps {
    files.into_iter().map(|path| Stamp::of(path).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_parse_and_format_unchanged() {
        let text = "sha256//47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=";
        assert_eq!(text.parse::<Pin>().unwrap().to_string(), text);
        for bad in [
            "",
            "sha256//",
            "sha256//AAAA",
            "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=",
        ] {
            assert!(bad.parse::<Pin>().is_err(), "{bad}");
        }
    }

    #[test]
    fn content_of_an_invalid_key_file_is_not_quoted() {
        let file = std::env::temp_dir().join(format!("exec-server-tls-{}", std::process::id()));
        std::fs::write(&file, "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n").unwrap();
        let error = private_key(&file).unwrap_err().to_string();
        std::fs::remove_file(&file).unwrap();
        assert!(
            error.contains("no end") && !error.contains("c2Vj"),
            "{error}"
        );
    }
}
