//! The record of who ran what, under which policy, with which result.
//!
//! Owns what is written and what must not be; the file is a [`Journal`], for which nothing waits.

use std::io;
use std::path::Path;
use std::sync::Arc;

use exec_server_executor::log::Exit;
use exec_server_network::Decision;
use exec_server_protocol::PathUri;
use exec_server_protocol::http::RequestParams;
use exec_server_protocol::sandbox::EnforcementLevel;
use exec_server_protocol::table::FileChange;
use exec_server_transport::journal::{Journal, now};
use serde_json::json;

use crate::auth::Identity;

/// Bytes of one argument that are written; the rest is told by its length.
const MAX_ARGUMENT_BYTES: usize = 1024;

/// Arguments that are written.
const MAX_ARGUMENTS: usize = 64;

/// What replaces something that must not be written.
const REDACTED: &str = "[redacted]";

/// An audit log; cheap to clone.
#[derive(Debug, Clone)]
pub struct Audit {
    journal: Journal,
    redact: Arc<[String]>,
}

impl Audit {
    /// Appends to this file, which only its owner can read; `redact` are texts that hide the
    /// arguments in which they occur.
    ///
    /// A text that ends with `=` hides what follows it, in the same argument.
    ///
    /// # Errors
    ///
    /// When the file cannot be opened or its thread not be started.
    pub fn open(path: &Path, redact: Vec<String>) -> io::Result<Self> {
        Ok(Self {
            journal: Journal::open(path)?,
            redact: redact.into(),
        })
    }

    /// Somebody came, or was not let in.
    pub(crate) fn connected(&self, peer: &str, outcome: Result<&Identity, &str>) {
        let (event, who, reason) = match outcome {
            Ok(identity) => ("connected", Some(&*identity.name), None),
            Err(reason) => ("refused", None, Some(reason)),
        };
        self.journal.append(&json!({
            "time": now(), "event": event, "peer": peer, "identity": who, "reason": reason,
        }));
    }

    /// Somebody asked for a process; `outcome` is its number, or why there is none.
    pub(crate) fn started(&self, run: &Run<'_>, outcome: Result<i32, &str>) {
        let argv: Vec<_> = run
            .argv
            .iter()
            .take(MAX_ARGUMENTS)
            .map(|argument| self.clean(argument))
            .collect();
        self.journal.append(&json!({
            "time": now(),
            "event": if outcome.is_ok() { "started" } else { "notStarted" },
            "identity": &*run.identity.name,
            "session": run.session,
            "processId": run.process_id,
            "argv": argv,
            "arguments": run.argv.len(),
            "cwd": run.cwd,
            "policy": run.policy,
            "enforcement": run.enforcement,
            "pid": outcome.ok(),
            "reason": outcome.err(),
        }));
    }

    /// A process has ended.
    pub(crate) fn exited(&self, session: &str, process_id: &str, pid: i32, exit: &Exit) {
        self.journal.append(&json!({
            "time": now(),
            "event": "exited",
            "session": session,
            "processId": process_id,
            "pid": pid,
            "exitCode": exit.code,
            "signal": exit.signal,
            "timedOut": exit.timed_out,
        }));
    }

    /// A process wanted to reach somebody.
    pub(crate) fn network(
        &self,
        identity: &Identity,
        session: &str,
        process_id: &str,
        decision: &Decision,
    ) {
        self.journal.append(&json!({
            "time": now(),
            "event": "network",
            "identity": &*identity.name,
            "session": session,
            "processId": process_id,
            "protocol": decision.target.protocol,
            "host": decision.target.host,
            "port": decision.target.port,
            "method": decision.method,
            "decision": decision.outcome,
            "source": decision.source,
            "reason": decision.reason,
        }));
    }

    /// Somebody has this machine make a request. Neither its headers nor what its URL asks for are
    /// written: both hold secrets.
    pub(crate) fn requested(&self, identity: &Identity, params: &RequestParams) {
        let url = url_without_secrets(&params.url);
        self.journal.append(&json!({
            "time": now(), "event": "http", "identity": &*identity.name, "method": params.method,
            "url": self.clean(&url), "requestId": self.clean(&params.request_id),
        }));
    }

    /// A request changes files.
    pub(crate) fn changed(&self, identity: &Identity, method: &str, change: FileChange<'_>) {
        let clean = |path: &PathUri| self.clean(&path.to_string());
        self.journal.append(&json!({
            "time": now(), "event": "file", "identity": &*identity.name, "method": method,
            "path": clean(change.path), "to": change.to.map(clean),
        }));
    }

    /// An argument as it may be written.
    fn clean(&self, argument: &str) -> String {
        let mut cut = argument.len().min(MAX_ARGUMENT_BYTES);
        while !argument.is_char_boundary(cut) {
            cut -= 1;
        }
        for secret in &*self.redact {
            let Some(at) = argument.find(secret.as_str()) else {
                continue;
            };
            if secret.ends_with('=') {
                let kept = at + secret.len();
                return format!("{}{REDACTED}", &argument[..kept.min(cut)]);
            }
            return REDACTED.to_owned();
        }
        match argument.len() - cut {
            0 => argument.to_owned(),
            more => format!("{}[{more} more bytes]", &argument[..cut]),
        }
    }
}

/// Who asked for what.
pub(crate) struct Run<'a> {
    pub(crate) identity: &'a Identity,
    pub(crate) session: &'a str,
    pub(crate) process_id: &'a str,
    pub(crate) argv: &'a [String],
    pub(crate) cwd: String,
    /// The sandbox that was asked for.
    pub(crate) policy: &'a str,
    /// How much of it is enforced, if it runs and there is something to enforce.
    pub(crate) enforcement: Option<EnforcementLevel>,
}

/// A URL without the name and the password of its user, and without its query.
fn url_without_secrets(url: &str) -> String {
    let end = url.find(['?', '#']).unwrap_or(url.len());
    let url = &url[..end];
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority
        .rsplit_once('@')
        .map_or(authority, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_written_without_what_they_hide() {
        for (url, written) in [
            ("https://u:p@h.test:1/a/b?token=x#y", "https://h.test:1/a/b"),
            ("http://h.test", "http://h.test"),
            ("http://h.test?x=/@", "http://h.test"),
            ("nonsense?x", "nonsense"),
        ] {
            assert_eq!(url_without_secrets(url), written);
        }
    }

    #[test]
    fn arguments_are_cleaned() {
        let directory = tempfile::tempdir().unwrap();
        let redact = vec!["password".to_owned(), "TOKEN=".to_owned()];
        let audit = Audit::open(&directory.path().join("audit"), redact).unwrap();
        assert_eq!(audit.clean("ls"), "ls");
        assert_eq!(audit.clean("--password=x"), REDACTED);
        assert_eq!(audit.clean("A=1 TOKEN=abc def"), "A=1 TOKEN=[redacted]");
        let long = "é".repeat(1000);
        let cut = audit.clean(&long);
        assert!(cut.ends_with("[976 more bytes]"), "{cut}");
    }
}
