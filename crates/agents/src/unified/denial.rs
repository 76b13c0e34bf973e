//! Detection of commands that failed because of their sandbox.

use exec_server_client::ProcessExit;
use exec_server_protocol::process::SandboxType;
use exec_server_protocol::sandbox::{Denial, DenialKind};

use super::command_result::{DenialReport, DenialSource};

/// Error messages that a sandbox denial causes in common tools. They are checked only if the
/// executor does not report denials, because a program may print them for other reasons.
const WORDS: &[&str] = &[
    "operation not permitted",
    "permission denied",
    "read-only file system",
    "seccomp",
    "sandbox",
    "landlock",
    "failed to write file",
];

/// Exit code of a process killed by a system call filter: 128 + SIGSYS.
const KILLED_BY_FILTER: i32 = 128 + 31;

/// Reports whether a sandbox denial caused the failure of a command that has ended.
pub(super) fn report(
    exit: &ProcessExit,
    sandbox: Option<SandboxType>,
    transcript: impl FnOnce() -> String,
    early: bool,
) -> Option<DenialReport> {
    let report = |source| DenialReport {
        early,
        source,
        denials: exit.denials.clone(),
    };
    match exit.sandbox_denied {
        Some(true) => return Some(report(DenialSource::Executor)),
        Some(false) => return None,
        None => {}
    }
    if exit.success() || matches!(sandbox, None | Some(SandboxType::None)) {
        return None;
    }
    let denied = exit.exit_code == KILLED_BY_FILTER || {
        let text = transcript().to_lowercase();
        WORDS.iter().any(|word| text.contains(word))
    };
    denied.then(|| report(DenialSource::Output))
}

/// Describes a denied operation, as the object of "denied".
pub fn denied_operation(denial: &Denial) -> String {
    let (unknown, known, name) = match denial.kind {
        DenialKind::FileSystem => ("access to a file", "access to", &denial.path),
        DenialKind::Network => ("network access", "network access to", &denial.address),
        DenialKind::Syscall => ("a system call", "the system call", &denial.syscall),
    };
    match name {
        Some(name) => format!("{known} `{name}`"),
        None => unknown.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(
        code: i32,
        sandbox_denied: Option<bool>,
        sandbox: SandboxType,
        text: &str,
    ) -> Option<DenialSource> {
        let mut exit = ProcessExit::with_code(code);
        exit.sandbox_denied = sandbox_denied;
        report(&exit, Some(sandbox), || text.to_owned(), true).map(|report| report.source)
    }

    #[test]
    fn report_prefers_executor_result_over_output() {
        use SandboxType::{LinuxSeccomp, None as Unconfined};
        let denied = "touch: cannot touch 'x': Read-only file system\n";
        let executor = Some(DenialSource::Executor);
        let output = Some(DenialSource::Output);
        assert_eq!(source(1, Some(true), LinuxSeccomp, ""), executor);
        assert_eq!(source(1, Some(false), LinuxSeccomp, denied), None);
        assert_eq!(source(1, None, LinuxSeccomp, denied), output);
        assert_eq!(source(127, None, LinuxSeccomp, "not found"), None);
        assert_eq!(source(159, None, LinuxSeccomp, ""), output);
        assert_eq!(source(0, None, LinuxSeccomp, denied), None);
        assert_eq!(source(1, None, Unconfined, denied), None);
    }
}
