//! TLS for websockets: certificates, keys and pins.
//!
//! Owns how files become configurations of the TLS library. Knows no socket and no listener.

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

pub use client::TlsClientOptions;
pub(crate) use client::connector;
pub use server::{TlsServer, TlsServerFiles};

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file is not there, or not what it should be.
    #[error("cannot read {what} from {}: {reason}", path.display())]
    File {
        /// What was looked for.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Certificate and key do not make an identity.
    #[error("cannot use the certificate {} with the key {}: {source}", cert.display(), key.display())]
    Identity {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What the library said.
        source: rustls::Error,
    },
    /// The machine has no certificate authorities that could be trusted.
    #[error("no system certificate authorities found: {0}")]
    NoSystemRoots(String),
    /// Something in the library's own settings.
    #[error(transparent)]
    Other(#[from] rustls::Error),
}

/// The SHA-256 of a server's public key (its SubjectPublicKeyInfo), as `sha256//BASE64`.
///
/// This is the form that `curl --pinnedpubkey` takes too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pin([u8; 32]);

impl Pin {
    const PREFIX: &'static str = "sha256//";

    /// The pin of a certificate's key.
    ///
    /// # Errors
    ///
    /// When the certificate cannot be understood.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Self, rustls::Error> {
        let key = ParsedCertificate::try_from(certificate)?.subject_public_key_info();
        Ok(Self(Sha256::digest(&key).into()))
    }
}

impl Pin {
    /// The pin of the first certificate of a text in PEM form.
    ///
    /// # Errors
    ///
    /// When there is none, or it cannot be understood.
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

/// Not a pin.
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

/// All certificates of a PEM file; there must be one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    const WHAT: &str = "certificates";
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path)
        .map_err(|error| unreadable(WHAT, path, describe(&error)))?
        .collect();
    match found {
        Ok(found) if found.is_empty() => Err(unreadable(WHAT, path, "there is none in it")),
        Ok(found) => Ok(found),
        Err(error) => Err(unreadable(WHAT, path, describe(&error))),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| match error {
        pem::Error::NoItemsFound => unreadable("a private key", path, "there is none in it"),
        error => unreadable("a private key", path, describe(&error)),
    })
}

fn describe(error: &pem::Error) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        // The library would print what it found, which may be a part of a key.
        pem::Error::MissingSectionEnd { .. } => "a section has no end".to_owned(),
        pem::Error::IllegalSectionStart { .. } => "a section begins strangely".to_owned(),
        pem::Error::Base64Decode(_) => "it is not valid base64".to_owned(),
        _ => "it is not PEM".to_owned(),
    }
}

/// The stamps of the files that a configuration came from; none for those that cannot be read.
type Stamps = Vec<Option<Stamp>>;

fn stamps<'a>(files: impl IntoIterator<Item = &'a Path>) -> Stamps {
    files.into_iter().map(|path| Stamp::of(path).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_read_as_they_are_written() {
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
    fn a_key_file_that_is_none_is_not_quoted() {
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
