//! Audit log: which client ran which command, under which policy, with which result.
//!
//! Decides what is written and what is redacted; a [`Journal`] writes the file, and no caller waits
//! for it.

use std::io;
use std::path::Path;
use std::sync::Arc;

use exec_server_engine::log::Exit;
use exec_server_engine::network::Decision;
use exec_server_protocol::PathUri;
use exec_server_protocol::http::RequestParams;
use exec_server_protocol::sandbox::EnforcementLevel;
use exec_server_protocol::table::FileChange;
use exec_server_transport::journal::{Journal, now};
use serde_json::json;

use crate::auth::ClientIdentity;

/// Bytes of one argument that are written; of the rest only the length is written.
const MAX_ARGUMENT_BYTES: usize = 1024;

/// Arguments of one command that are written.
const MAX_ARGUMENTS: usize = 64;

/// Text that replaces an argument or a part of it that must not be written.
const REDACTED: &str = "[redacted]";

/// Audit log; cheap to clone.
#[derive(Debug, Clone)]
pub struct Audit {
    journal: Journal,
    redact: Arc<[String]>,
}

impl Audit {
    /// Opens the log file for appending; only its owner can read the file. `redact` contains texts:
    /// an argument that contains one of them is not written.
    ///
    /// If a text ends with `=`, only the part of the argument behind it is replaced.
    ///
    /// # Errors
    ///
    /// When the file cannot be opened or the writer thread cannot be started.
    pub fn open(path: &Path, redact: Vec<String>) -> io::Result<Self> {
        Ok(Self {
            journal: Journal::open(path)?,
            redact: redact.into(),
        })
    }

    /// Records an accepted connection, or a refused one with the reason.
    pub(crate) fn connected(&self, peer: &str, outcome: Result<&ClientIdentity, &str>) {
        let (event, who, reason) = match outcome {
            Ok(identity) => ("connected", Some(&*identity.name), None),
            Err(reason) => ("refused", None, Some(reason)),
        };
        self.journal.append(&json!({
            "time": now(), "event": event, "peer": peer, "identity": who, "reason": reason,
        }));
    }

    /// Records a request to start a process; `outcome` is the process id, or why the start failed.
    pub(crate) fn started(&self, run: &AuditedCommand<'_>, outcome: Result<i32, &str>) {
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

    /// Records the end of a process.
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

    /// Records the decision on an attempt of a process to connect to a host.
    pub(crate) fn network(
        &self,
        identity: &ClientIdentity,
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

    /// Records an HTTP request that this machine makes for a client. Neither the headers nor the
    /// query of the URL are written: both can hold secrets.
    pub(crate) fn requested(&self, identity: &ClientIdentity, params: &RequestParams) {
        let url = url_without_secrets(&params.url);
        self.journal.append(&json!({
            "time": now(), "event": "http", "identity": &*identity.name, "method": params.method,
            "url": self.clean(&url), "requestId": self.clean(&params.request_id),
        }));
    }

    /// Records a request that changes files.
    pub(crate) fn changed(&self, identity: &ClientIdentity, method: &str, change: FileChange<'_>) {
        let clean = |path: &PathUri| self.clean(&path.to_string());
        self.journal.append(&json!({
            "time": now(), "event": "file", "identity": &*identity.name, "method": method,
            "path": clean(change.path), "to": change.to.map(clean),
        }));
    }

    /// Records a file request that was refused because of its policy or its path.
    pub(crate) fn file_refused(&self, identity: &ClientIdentity, reason: &str) {
        self.journal.append(&json!({
            "time": now(), "event": "fileRefused", "identity": &*identity.name,
            "reason": self.clean(reason),
        }));
    }

    /// Returns an argument as it may be written: shortened and redacted.
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

/// A request to run a command, with the client that sent it.
pub(crate) struct AuditedCommand<'a> {
    pub(crate) identity: &'a ClientIdentity,
    pub(crate) session: &'a str,
    pub(crate) process_id: &'a str,
    pub(crate) argv: &'a [String],
    pub(crate) cwd: String,
    /// The sandbox policy that the request names.
    pub(crate) policy: &'a str,
    /// How much of the policy is enforced, if the process runs and the policy restricts it.
    pub(crate) enforcement: Option<EnforcementLevel>,
}

/// Returns the URL without user name, password and query.
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
    fn urls_are_logged_without_credentials_and_query() {
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
    fn arguments_are_redacted_and_shortened() {
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
