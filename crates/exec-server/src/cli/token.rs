//! `exec-server token`: create, sign and inspect access tokens.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use exec_server_protocol::text::hex;
use exec_server_service::auth::{Auth, AuthError, MIN_SECRET_BYTES, Scopes, SignedTokens};
use exec_server_transport::Secret;
use exec_server_transport::http::HttpHead;
use exec_server_transport::jwt::{self, TokenClaims};
use rustix::rand::{GetRandomFlags, getrandom};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::args::TokenCommand;
use super::{access, print};

pub(super) fn run(command: TokenCommand) -> anyhow::Result<ExitCode> {
    match command {
        TokenCommand::New { out } => create(out.as_deref()),
        TokenCommand::Hash { file } => {
            let token = read(file.as_deref())?;
            if token.expose().is_empty() {
                bail!("there is no token to hash: it is empty");
            }
            print(format!("{}\n", hash(&token)).as_bytes())?;
            Ok(ExitCode::SUCCESS)
        }
        TokenCommand::Sign {
            secret_file,
            expires,
            not_before,
            subject,
            scope,
            issuer,
            audience,
        } => {
            let secret = access::secret(&secret_file)?;
            if secret.expose().len() < MIN_SECRET_BYTES {
                bail!(
                    "the secret in {} must be at least {MIN_SECRET_BYTES} bytes",
                    secret_file.display()
                );
            }
            if subject.as_deref().is_some_and(|it| !jwt::is_subject(it)) {
                bail!("`--subject`: {}", jwt::JwtError::Subject);
            }
            let scope = match scope {
                None => None,
                // Scopes are checked now: a misspelt scope would otherwise appear only as a refused
                // request.
                Some(text) => Some(text.parse::<Scopes>()?.to_string()),
            };
            let now = now();
            let after = |span: Duration| {
                now.saturating_add(i64::try_from(span.as_secs()).unwrap_or(i64::MAX))
            };
            let claims = TokenClaims {
                exp: after(expires),
                nbf: not_before.map(after),
                iat: Some(now),
                iss: issuer,
                aud: audience,
                sub: subject,
                scope,
            };
            let token = jwt::sign(&claims, &secret)?;
            print(format!("{}\n", token.expose()).as_bytes())?;
            Ok(ExitCode::SUCCESS)
        }
        TokenCommand::Inspect { file, secret_file } => {
            let token = read(file.as_deref())?;
            let secret = match secret_file {
                Some(path) => Some(access::secret(&path)?),
                None => None,
            };
            let (report, good) = inspect(&token, secret);
            print(format!("{}\n", serde_json::to_string_pretty(&report)?).as_bytes())?;
            Ok(if good {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
    }
}

/// Creates a token; prints it and its hash, or writes it and prints the hash.
fn create(out: Option<&Path>) -> anyhow::Result<ExitCode> {
    let token = random()?;
    match out {
        Some(path) => {
            access::write_new(path, &format!("{}\n", token.expose()), 0o600)?;
            print(format!("{}\n", hash(&token)).as_bytes())?;
        }
        None => {
            print(format!("{}\n", token.expose()).as_bytes())?;
            eprintln!("sha256: {}", hash(&token));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The token in a file, or on standard input.
fn read(file: Option<&Path>) -> anyhow::Result<Secret> {
    match file {
        Some(path) => Secret::read(path)
            .with_context(|| format!("cannot read the token in {}", path.display())),
        None => Secret::read_from(std::io::stdin()).context("cannot read the token"),
    }
}

/// The SHA-256 of a token, in hex.
pub(super) fn hash(token: &Secret) -> String {
    hex(Sha256::digest(token.expose()))
}

/// 32 random bytes of the system, as text.
pub(super) fn random() -> anyhow::Result<Secret> {
    let mut bytes = [0; 32];
    let got = getrandom(&mut bytes, GetRandomFlags::empty()).context("cannot get random bytes")?;
    if got != bytes.len() {
        bail!("cannot get random bytes: only {got} came");
    }
    Ok(Secret::from(hex(bytes)))
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    i64::try_from(since.unwrap_or_default().as_secs()).unwrap_or(i64::MAX)
}

/// Description of a token, and whether a check failed.
fn inspect(token: &Secret, secret: Option<Secret>) -> (Value, bool) {
    let Ok((header, claims)) = jwt::inspect(token) else {
        // A capability token has no readable content, and it is not printed.
        let report = json!({
            "kind": "capability-token",
            "sha256": hash(token),
        });
        return (report, secret.is_none());
    };
    let mut report = json!({
        "kind": "signed-bearer-token",
        "header": header,
        "claims": claims,
    });
    let seconds = claims["exp"].as_i64();
    if let Some(exp) = seconds {
        report["expiresInSeconds"] = json!(exp.saturating_sub(now()));
    }
    let Some(secret) = secret else {
        return (report, true);
    };
    let check = Auth::Signed(SignedTokens {
        secret,
        issuer: None,
        audience: None,
        max_clock_skew: Duration::ZERO,
    });
    let head = HttpHead {
        headers: vec![(
            "authorization".to_owned(),
            format!("Bearer {}", token.expose()).into(),
        )],
        ..HttpHead::default()
    };
    let verdict = check.check(&head, SystemTime::now());
    let error: Option<AuthError> = verdict.as_ref().err().copied();
    report["valid"] = json!(error.is_none());
    report["problem"] = json!(error.map(|error| error.to_string()));
    report["scopes"] = json!(verdict.ok().map(|identity| identity.scopes.to_string()));
    (report, error.is_none())
}
