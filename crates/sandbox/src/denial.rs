//! Sandbox denial detection: classifies failed commands from exit status and output.
//!
//! The kernel does not report what it refused, except for a death by SIGSYS. Everything else is
//! detected in the command's output: the module searches for the error texts of the C library, and
//! only for errors that this sandbox can cause.

use exec_server_protocol::sandbox::{Denial, DenialKind};

use super::placeholder::LINK_TARGET;
use super::policy::PROTECTED;

/// Properties of a sandbox that determine which errors it can cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DenialFacts {
    /// Whether the sandbox restricts files or the network at all.
    pub confined: bool,
    /// Whether some paths are not writable.
    pub read_only: bool,
    /// Whether some paths are not accessible at all.
    pub refuses_access: bool,
    /// Whether the network is blocked.
    pub network: bool,
    /// Whether placeholders occupy protected names.
    pub occupies_names: bool,
}

/// Error texts, in lower case.
const READ_ONLY: &[&str] = &["read-only file system"];
const ACCESS: &[&str] = &["permission denied"];
const PERMITTED: &[&str] = &["operation not permitted"];
/// Errors of programs that create or open a placeholder.
const OCCUPIED: &[&str] = &[
    "file exists",
    "no such device or address",
    "not a directory",
    "device or resource busy",
    "permission denied",
];
const NETWORK: &[&str] = &[
    "network is unreachable",
    "could not resolve host",
    "temporary failure in name resolution",
    "name or service not known",
];

/// Maximum number of reported denials, enough for a reader.
const MAX_DENIALS: usize = 16;

/// Longest line that is searched, in bytes: error messages are short.
const MAX_LINE: usize = 4096;

/// Returns what the sandbox denied, as far as the output of a failed command shows; `None` if there
/// is no sign of a denial.
pub fn classify<'a>(
    facts: DenialFacts,
    code: i32,
    signal: Option<i32>,
    output: impl Iterator<Item = &'a [u8]>,
) -> Option<Vec<Denial>> {
    if !facts.confined || code == 0 {
        return None;
    }
    // Shells report a child's death by signal as an exit code.
    if signal == Some(libc::SIGSYS) || code == 128 + libc::SIGSYS {
        return Some(vec![denial(DenialKind::Syscall)]);
    }
    let mut found = Vec::new();
    let mut denied = false;
    // Chunks may end inside a line; the lines of one stream are mostly complete.
    let mut line = Vec::new();
    for chunk in output {
        for part in chunk.split_inclusive(|&byte| byte == b'\n') {
            if line.len() < MAX_LINE {
                line.extend_from_slice(&part[..part.len().min(MAX_LINE)]);
            }
            if part.ends_with(b"\n") {
                denied |= classify_line(facts, &line, &mut found);
                line.clear();
            }
        }
    }
    denied |= classify_line(facts, &line, &mut found);
    denied.then_some(found)
}

/// Searches one line for a denial and adds it to `found`; returns whether it contained one.
fn classify_line(facts: DenialFacts, line: &[u8], found: &mut Vec<Denial>) -> bool {
    let lower = String::from_utf8_lossy(line).to_lowercase();
    let has = |texts: &[&str]| texts.iter().any(|text| lower.contains(text));
    let through_link = lower.contains(LINK_TARGET);
    let occupied = facts.occupies_names && (through_link || has(OCCUPIED) && has(&PROTECTED));
    let read_only = facts.read_only && has(READ_ONLY);
    let kind = if read_only || occupied || (facts.refuses_access && has(ACCESS)) {
        DenialKind::FileSystem
    } else if facts.network && has(NETWORK) {
        DenialKind::Network
    } else if has(PERMITTED) {
        // File access fails with other errors; this is the error of system call filters.
        if facts.network {
            DenialKind::Network
        } else {
            DenialKind::Syscall
        }
    } else {
        return false;
    };
    let mut denial = denial(kind);
    if kind == DenialKind::FileSystem && !through_link {
        denial.path = path_in(&String::from_utf8_lossy(line));
    }
    if found.len() < MAX_DENIALS && !found.contains(&denial) {
        found.push(denial);
    }
    true
}

fn denial(kind: DenialKind) -> Denial {
    Denial {
        kind,
        path: None,
        address: None,
        syscall: None,
    }
}

/// Returns the absolute path that an error message contains.
fn path_in(line: &str) -> Option<String> {
    let quotes = ['\'', '"', '`', '‘', '’'];
    let quoted = line
        .split(quotes)
        .nth(1)
        .filter(|text| text.starts_with('/'));
    // Messages without quotes have the form `sh: 1: cannot create /x: Read-only file system`.
    let plain = || {
        // The first part is the name of the program.
        line.split(": ")
            .skip(1)
            .filter_map(|part| part.split_whitespace().last())
            .find(|word| word.starts_with('/') && word.len() > 1)
    };
    quoted.or_else(plain).map(|path| path.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: DenialFacts = DenialFacts {
        confined: true,
        read_only: true,
        refuses_access: true,
        network: true,
        occupies_names: true,
    };

    fn denials_in(facts: DenialFacts, code: i32, output: &str) -> Option<Vec<Denial>> {
        classify(facts, code, None, std::iter::once(output.as_bytes()))
    }

    #[test]
    fn classify_reports_kind_and_path_of_errors_that_the_sandbox_can_cause() {
        let denials = denials_in(
            ALL,
            1,
            "touch: cannot touch '/etc/x': Read-only file system\n",
        )
        .unwrap();
        assert_eq!(denials[0].kind, DenialKind::FileSystem);
        assert_eq!(denials[0].path.as_deref(), Some("/etc/x"));
        let denials =
            denials_in(ALL, 2, "sh: 1: cannot create /y/z: Read-only file system").unwrap();
        assert_eq!(denials[0].path.as_deref(), Some("/y/z"));
        let denials =
            denials_in(ALL, 2, "/bin/sh: 1: cannot create y: Read-only file system").unwrap();
        assert_eq!(denials[0].path, None);
        let denials = denials_in(ALL, 1, "cat: secret: Permission denied").unwrap();
        assert_eq!(denials[0].path, None);
        let denials = denials_in(ALL, 6, "curl: (6) Could not resolve host: example.com").unwrap();
        assert_eq!(denials[0].kind, DenialKind::Network);
        let denials = denials_in(ALL, 128, "fatal: cannot mkdir /w/.git: File exists").unwrap();
        assert_eq!(denials[0].kind, DenialKind::FileSystem);
        assert!(
            denials_in(
                ALL,
                2,
                "sh: 1: cannot create .codex: No such device or address"
            )
            .is_some()
        );
        assert!(denials_in(ALL, 159, "").is_some());
        assert!(classify(ALL, 159, Some(libc::SIGSYS), std::iter::empty()).is_some());
        // The text is split across two chunks.
        let parts = [&b"x: Read-only"[..], &b" file system"[..]];
        assert!(classify(ALL, 1, None, parts.into_iter()).is_some());
    }

    #[test]
    fn classify_ignores_errors_that_the_sandbox_cannot_cause() {
        let nothing = DenialFacts::default();
        assert_eq!(denials_in(nothing, 1, "Permission denied"), None);
        assert_eq!(denials_in(ALL, 0, "Permission denied"), None);
        assert_eq!(
            denials_in(ALL, 1, "the sandbox is green, seccomp and landlock too"),
            None
        );
        assert_eq!(denials_in(ALL, 127, "sh: nothing: not found"), None);
        let open = DenialFacts {
            refuses_access: false,
            network: false,
            ..ALL
        };
        assert_eq!(denials_in(open, 1, "cat: x: Permission denied"), None);
        assert_eq!(denials_in(open, 1, "Network is unreachable"), None);
        assert_eq!(
            denials_in(ALL, 1, "mkdir: cannot create 'x': File exists"),
            None
        );
        let free = DenialFacts {
            occupies_names: false,
            ..ALL
        };
        assert_eq!(denials_in(free, 1, "cannot mkdir .git: File exists"), None);
    }
}
