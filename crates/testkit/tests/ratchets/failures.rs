//! Errors that code for sandboxes, authentication, scopes and limits does not pass on.
//!
//! Each line with `Err(_) =>`, `.ok()`, `let _ =` or `unwrap_or(true)` could skip a check. `failures.txt` beside this
//! file lists all of them with what happens then. A line that is not listed fails the test: write down why it does not
//! allow more than it should, or pass the error on.

use std::fs;
use std::path::{Path, PathBuf};

/// Files and directories below `crates` that decide what is allowed.
const SECURITY_CODE: &[&str] = &[
    "agents/src/mcp/http.rs",
    "egress/src/network/access.rs",
    "egress/src/network/policy.rs",
    "egress/src/own_listeners.rs",
    "exec-server/src/cli/access.rs",
    "exec-server/src/cli/lifecycle.rs",
    "executor/src/fs/open.rs",
    "executor/src/fs/protected.rs",
    "executor/src/limits.rs",
    "executor/src/local_clients.rs",
    "executor/src/patterns.rs",
    "executor/src/sandbox",
    "executor/src/slots.rs",
    "rendezvous/src/oidc.rs",
    "rendezvous/src/signature.rs",
    "rendezvous/src/tenants.rs",
    "rendezvous/src/tokens.rs",
    "sandbox/src",
    "service/src/auth.rs",
    "service/src/budget.rs",
    "service/src/dispatch.rs",
    "service/src/guard.rs",
    "service/src/listen.rs",
    "service/src/peer_owner.rs",
    "service/src/scope.rs",
    "service/src/shares.rs",
    "sys/src/local_peer.rs",
    "sys/src/range_lock.rs",
    "transport/src/connection_limits.rs",
    "transport/src/forwarded.rs",
    "transport/src/jwt.rs",
    "transport/src/throttle.rs",
];

/// What discards an error.
const DISCARDS: &[&str] = &[
    "Err(_) =>",
    ".ok()",
    "let _ =",
    "unwrap_or(false)",
    "unwrap_or(true)",
];

#[test]
fn every_error_that_security_code_discards_has_a_decision() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    for code in SECURITY_CODE {
        let path = crates.join(code);
        assert!(path.exists(), "{code} does not exist: correct the list");
        collect(&crates, &path, &mut found);
    }
    found.sort();
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ratchets/failures.txt");
    let list = fs::read_to_string(list).expect("failures.txt");
    let mut listed = Vec::new();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let (entry, decision) = line.rsplit_once(" | ").expect("file | line | decision");
        assert!(decision.len() > 3, "no decision: {line}");
        listed.push(entry.to_owned());
    }
    listed.sort();
    assert!(listed.len() > 50, "the list is read");
    assert_eq!(
        without(&found, &listed),
        Vec::<String>::new(),
        "add these lines with decisions"
    );
    assert_eq!(
        without(&listed, &found),
        Vec::<String>::new(),
        "remove these lines"
    );
}

/// The entries of one list that the other does not have as often.
fn without(one: &[String], other: &[String]) -> Vec<String> {
    let mut rest = other.to_vec();
    let mut missing = Vec::new();
    for entry in one {
        match rest.iter().position(|known| known == entry) {
            Some(at) => drop(rest.swap_remove(at)),
            None => missing.push(entry.clone()),
        }
    }
    missing
}

/// Appends the lines of a file or directory that discard an error, without those of tests.
fn collect(crates: &Path, path: &Path, found: &mut Vec<String>) {
    if path.is_dir() {
        let entries = fs::read_dir(path).expect("directory");
        let mut below: Vec<PathBuf> = entries.map(|entry| entry.expect("entry").path()).collect();
        below.sort();
        for path in below {
            collect(crates, &path, found);
        }
        return;
    }
    let name = path.file_name().and_then(|name| name.to_str());
    if path.extension().is_none_or(|extension| extension != "rs") || name == Some("tests.rs") {
        return;
    }
    let text = fs::read_to_string(path).expect("source");
    let product = text.split("#[cfg(test)]\n").next().unwrap_or_default();
    let file = path
        .strip_prefix(crates)
        .expect("below crates")
        .display()
        .to_string();
    let lines = product.lines().map(str::trim);
    let lines = lines.filter(|line| !line.starts_with("//"));
    let discards = lines.filter(|line| DISCARDS.iter().any(|part| line.contains(part)));
    found.extend(discards.map(|line| format!("{file} | {line}")));
}
