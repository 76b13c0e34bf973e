//! Signed websocket URLs and harness authorizations.
//!
//! Owns one secret. Everything signed contains its expiry time and its holder, so the server need
//! not store it.

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server_relay::keys::{Authorization, Fingerprint, PublicKey};
use exec_server_transport::Secret;
use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::tenants;

/// The peer for which a socket's URL is signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TicketHolder {
    /// The executor of the registration.
    Executor,
    /// A harness.
    Harness {
        /// Name of the token that authorized it.
        token: String,
        /// Fingerprint of its keys.
        key: Fingerprint,
    },
}

/// Content of a signed websocket URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketTicket {
    /// The environment with tenant; see [`tenants::scoped`].
    pub environment: String,
    /// Registration of the executor.
    pub registration: String,
    /// The peer that may use the URL.
    pub holder: TicketHolder,
    /// Expiry time in seconds since 1970.
    pub expires: u64,
    /// Until when a socket that was opened with it may stay open: when the token ends with which it
    /// was asked for. `None` if that has no end.
    pub token_expires: Option<u64>,
}

/// Why a signed URL is not valid. Compatible executors parse these texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each is its text")]
pub enum TicketError {
    #[error("malformed_query")]
    Malformed,
    #[error("extra_query_param")]
    Extra,
    #[error("missing_version")]
    MissingVersion,
    #[error("missing_role")]
    MissingRole,
    #[error("invalid_role")]
    InvalidRole,
    #[error("missing_expiry")]
    MissingExpiry,
    #[error("invalid_expiry")]
    InvalidExpiry,
    #[error("missing_signature")]
    MissingSignature,
    #[error("invalid_signature")]
    InvalidSignature,
    #[error("expired")]
    Expired,
}

/// Serialized authorization of a harness.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Grant {
    /// Name of the token that authorized it.
    token: String,
    /// Expiry time in seconds since 1970.
    expires: u64,
}

/// Signer with one secret key.
#[derive(Debug, Clone)]
pub struct UrlSigner(Secret);

impl UrlSigner {
    /// Minimum length of the secret: the length of a signature.
    pub const MIN_SECRET_BYTES: usize = 32;

    /// Creates a signer. Returns `None` if the secret is shorter than [`Self::MIN_SECRET_BYTES`].
    pub fn new(secret: Secret) -> Option<Self> {
        (secret.expose().len() >= Self::MIN_SECRET_BYTES).then_some(Self(secret))
    }

    /// Prepares the signature of several parts. Each part is preceded by its length, so that no two
    /// lists of parts give the same input.
    fn mac(&self, purpose: &str, parts: &[&str]) -> Mac {
        let mut input = Vec::new();
        for part in [purpose].iter().chain(parts) {
            input.extend((part.len() as u64).to_be_bytes());
            input.extend(part.as_bytes());
        }
        let key = hmac::Key::new(hmac::HMAC_SHA256, self.0.expose().as_bytes());
        Mac { key, input }
    }

    /// Creates the query of a socket's URL.
    pub fn query(&self, ticket: &SocketTicket) -> String {
        let signature = self.ticket_mac(ticket).sign();
        let SocketTicket {
            registration,
            expires,
            ..
        } = ticket;
        // The path contains only the id.
        let tenant = match tenants::split(&ticket.environment) {
            (tenants::DEFAULT, _) => String::new(),
            (tenant, _) => format!("&tenant={tenant}"),
        };
        let until = match ticket.token_expires {
            Some(until) => format!("&until={until}"),
            None => String::new(),
        };
        match &ticket.holder {
            TicketHolder::Executor => format!(
                "v=1&role=environment{tenant}&registration={registration}&exp={expires}{until}\
                 &sig={signature}"
            ),
            TicketHolder::Harness { token, key } => format!(
                "v=1&role=harness{tenant}&registration={registration}&token={token}&key={key}\
                 &exp={expires}{until}&sig={signature}"
            ),
        }
    }

    fn ticket_mac(&self, ticket: &SocketTicket) -> Mac {
        let expires = ticket.expires.to_string();
        let (environment, registration) = (&*ticket.environment, &*ticket.registration);
        let until = ticket.token_expires.map(|until| until.to_string());
        let mut parts = vec![environment, registration, &expires];
        let key;
        let purpose = match &ticket.holder {
            TicketHolder::Executor => "executor socket",
            TicketHolder::Harness { token, key: whose } => {
                key = whose.to_string();
                parts.extend([&**token, &*key]);
                "harness socket"
            }
        };
        parts.extend(until.as_deref());
        self.mac(purpose, &parts)
    }

    /// Verifies the query of a socket's URL.
    ///
    /// # Errors
    ///
    /// If this server did not sign it, or if it has expired.
    pub fn ticket(
        &self,
        environment: &str,
        query: &str,
        now: u64,
    ) -> Result<SocketTicket, TicketError> {
        let (mut version, mut role, mut registration, mut token, mut key, mut exp, mut sig) =
            (None, None, None, None, None, None, None);
        let (mut tenant, mut until) = (None, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').ok_or(TicketError::Malformed)?;
            let slot = match name {
                "v" => &mut version,
                "role" => &mut role,
                "tenant" => &mut tenant,
                "registration" => &mut registration,
                "token" => &mut token,
                "key" => &mut key,
                "exp" => &mut exp,
                "until" => &mut until,
                "sig" => &mut sig,
                _ => return Err(TicketError::Extra),
            };
            if slot.replace(value).is_some() {
                return Err(TicketError::Malformed);
            }
        }
        if version != Some("1") {
            return Err(TicketError::MissingVersion);
        }
        let holder = match (role.ok_or(TicketError::MissingRole)?, token, key) {
            ("environment", None, None) => TicketHolder::Executor,
            ("harness", Some(token), Some(key)) => TicketHolder::Harness {
                token: token.to_owned(),
                key: key.parse().map_err(|_| TicketError::Malformed)?,
            },
            ("environment" | "harness", ..) => return Err(TicketError::Malformed),
            _ => return Err(TicketError::InvalidRole),
        };
        let expires = exp.ok_or(TicketError::MissingExpiry)?;
        let expires = expires.parse().map_err(|_| TicketError::InvalidExpiry)?;
        let ticket = SocketTicket {
            environment: tenants::scoped(tenant.unwrap_or(tenants::DEFAULT), environment),
            registration: registration.ok_or(TicketError::Malformed)?.to_owned(),
            holder,
            expires,
            token_expires: until
                .map(str::parse)
                .transpose()
                .map_err(|_| TicketError::InvalidExpiry)?,
        };
        let signature = sig.ok_or(TicketError::MissingSignature)?;
        let signature = URL_SAFE_NO_PAD
            .decode(signature)
            .map_err(|_| TicketError::InvalidSignature)?;
        // Compared in constant time.
        self.ticket_mac(&ticket)
            .verify(&signature)
            .map_err(|_| TicketError::InvalidSignature)?;
        if now > expires {
            return Err(TicketError::Expired);
        }
        Ok(ticket)
    }

    /// Creates the authorization that a harness shows to the executor of a registration. It is
    /// bound to the harness's keys, so no other peer can use it.
    pub fn authorize(
        &self,
        environment: &str,
        registration: &str,
        harness: &PublicKey,
        token: &str,
        expires: u64,
    ) -> Option<Authorization> {
        let grant = Grant {
            token: token.to_owned(),
            expires,
        };
        let claims = URL_SAFE_NO_PAD.encode(serde_json::to_vec(&grant).ok()?);
        let mac = self.grant_mac(environment, registration, harness, &claims);
        let signature = mac.sign();
        Authorization::new(format!("{claims}.{signature}"))
    }

    fn grant_mac(
        &self,
        environment: &str,
        registration: &str,
        harness: &PublicKey,
        claims: &str,
    ) -> Mac {
        let key = harness.fingerprint().to_string();
        self.mac("authorization", &[environment, registration, &key, claims])
    }

    /// Returns the name of the token that authorized a harness. Returns `None` if the authorization
    /// is invalid or expired, or belongs to another environment, executor or harness.
    pub fn authorized(
        &self,
        environment: &str,
        registration: &str,
        harness: &PublicKey,
        authorization: &Authorization,
        now: u64,
    ) -> Option<String> {
        let (claims, signature) = authorization.reveal().split_once('.')?;
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        self.grant_mac(environment, registration, harness, claims)
            .verify(&signature)
            .ok()?;
        let claims = URL_SAFE_NO_PAD.decode(claims).ok()?;
        let grant: Grant = serde_json::from_slice(&claims).ok()?;
        (now <= grant.expires).then_some(grant.token)
    }
}

/// Key and input of a signature.
struct Mac {
    key: hmac::Key,
    input: Vec<u8>,
}

impl Mac {
    /// Returns the signature as text.
    fn sign(&self) -> String {
        URL_SAFE_NO_PAD.encode(hmac::sign(&self.key, &self.input))
    }

    /// Compares a signature in constant time.
    fn verify(&self, signature: &[u8]) -> Result<(), ring::error::Unspecified> {
        hmac::verify(&self.key, &self.input, signature)
    }
}

#[cfg(test)]
mod tests {
    use exec_server_relay::keys::MLKEM768_BYTES;

    use super::*;

    fn signer(byte: &str) -> UrlSigner {
        UrlSigner::new(byte.repeat(32).into()).unwrap()
    }

    fn key(byte: u8) -> PublicKey {
        PublicKey::new([byte; 32], &[byte; MLKEM768_BYTES]).unwrap()
    }

    fn ticket() -> SocketTicket {
        SocketTicket {
            environment: "env-1".to_owned(),
            registration: "r".to_owned(),
            holder: TicketHolder::Harness {
                token: "alice".to_owned(),
                key: key(1).fingerprint(),
            },
            expires: 100,
            token_expires: None,
        }
    }

    #[test]
    fn signer_rejects_short_secrets() {
        assert!(UrlSigner::new("s".repeat(31).into()).is_none());
    }

    #[test]
    fn ticket_rejects_changed_expired_and_unsigned_queries() {
        let (signer, stranger) = (signer("s"), signer("t"));
        for (holder, token_expires) in [
            (TicketHolder::Executor, None),
            (ticket().holder, None),
            (TicketHolder::Executor, Some(200)),
            (ticket().holder, Some(200)),
        ] {
            let ticket = SocketTicket {
                holder,
                token_expires,
                ..ticket()
            };
            let query = signer.query(&ticket);
            assert_eq!(signer.ticket("env-1", &query, 100), Ok(ticket));
            assert_eq!(
                signer.ticket("env-1", &query, 101),
                Err(TicketError::Expired)
            );
            let forged = Err(TicketError::InvalidSignature);
            assert_eq!(signer.ticket("env-2", &query, 1), forged);
            assert_eq!(stranger.ticket("env-1", &query, 1), forged);
            let later = query.replace("exp=100", "exp=101");
            assert_eq!(signer.ticket("env-1", &later, 1), forged);
            let other = query.replace("registration=r", "registration=q");
            assert_eq!(signer.ticket("env-1", &other, 1), forged);
            // The end of the token's validity cannot be moved, removed or added, either.
            let longer = match token_expires {
                Some(_) => ["&until=201", ""].map(|to| query.replace("&until=200", to)),
                None => ["&until=200&sig", "&until=1&sig"].map(|to| query.replace("&sig", to)),
            };
            for longer in longer {
                assert_eq!(signer.ticket("env-1", &longer, 1), forged, "{longer}");
            }
        }
        let query = signer.query(&ticket());
        for (from, to, error) in [
            ("token=alice", "token=bob", TicketError::InvalidSignature),
            ("role=harness", "role=environment", TicketError::Malformed),
            ("role=harness", "role=admin", TicketError::InvalidRole),
            ("role=harness&", "", TicketError::MissingRole),
            ("exp=100&", "", TicketError::MissingExpiry),
            ("exp=100", "exp=x", TicketError::InvalidExpiry),
            ("v=1", "v=2", TicketError::MissingVersion),
            ("v=1", "v=1&v=1", TicketError::Malformed),
            ("v=1", "v=1&x=1", TicketError::Extra),
            ("v=1", "v", TicketError::Malformed),
        ] {
            let query = query.replace(from, to);
            assert_eq!(signer.ticket("env-1", &query, 1), Err(error), "{query}");
        }
        let unsigned = query.split("&sig=").next().unwrap();
        let missing = Err(TicketError::MissingSignature);
        assert_eq!(signer.ticket("env-1", unsigned, 1), missing);
    }

    #[test]
    fn ticket_of_one_tenant_is_invalid_for_another() {
        let signer = signer("s");
        for holder in [TicketHolder::Executor, ticket().holder] {
            let ticket = SocketTicket {
                environment: "acme/env-1".to_owned(),
                holder,
                ..ticket()
            };
            let query = signer.query(&ticket);
            assert_eq!(signer.ticket("env-1", &query, 1), Ok(ticket));
            let forged = Err(TicketError::InvalidSignature);
            let other = query.replace("tenant=acme", "tenant=b");
            assert_eq!(signer.ticket("env-1", &other, 1), forged);
            let none = query.replace("&tenant=acme", "");
            assert_eq!(signer.ticket("env-1", &none, 1), forged);
        }
    }

    #[test]
    fn authorization_is_bound_to_environment_registration_key_and_expiry() {
        let signer = signer("s");
        let authorization = signer.authorize("e", "r", &key(1), "alice", 50).unwrap();
        let check = |environment: &str, registration: &str, harness, now| {
            signer.authorized(
                environment,
                registration,
                &key(harness),
                &authorization,
                now,
            )
        };
        assert_eq!(check("e", "r", 1, 50).as_deref(), Some("alice"));
        assert_eq!(check("e", "r", 1, 51), None);
        assert_eq!(check("f", "r", 1, 1), None);
        assert_eq!(check("e", "q", 1, 1), None);
        assert_eq!(check("e", "r", 2, 1), None);
        for text in ["x", ".", "e30.", "e30.AAAA"] {
            let made_up = Authorization::new(text).unwrap();
            assert_eq!(signer.authorized("e", "r", &key(1), &made_up, 1), None);
        }
    }
}
