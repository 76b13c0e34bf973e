//! Shell snapshots: captured state of a login shell after its start-up files, reused by later
//! commands.
//!
//! Decides how the state of a shell is captured, how it is restored in another shell, and how many
//! snapshots are kept. Writes nothing to disk: the state is kept in memory and passed to a shell in
//! its environment, which removes it before the command runs. If any step fails, the command runs
//! unchanged.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use exec_server_executor::log::{Log, LogEntryKind, OutputStream, Retention};
use exec_server_executor::process::{Process, TerminationMethod};
use exec_server_executor::{Executor, PrivateNetwork, ProcessSpec, StartError, Stdio};
use exec_server_protocol::process::{EnvPolicy, StartParams};
use exec_server_protocol::sandbox::Sandbox;
use exec_server_protocol::text::shell_quoted;
use exec_server_sync::Mutex;
use tokio::sync::OnceCell;

use crate::env;

/// Maximum number of snapshots of one session; the least recently used is evicted first.
const MAX_SNAPSHOTS: usize = 16;

/// Maximum size of the state and environment of one snapshot.
const MAX_STATE_BYTES: usize = 512 * 1024;

/// Output retention during a capture: the state, and the output before it.
const CAPTURE_RETENTION: Retention = Retention {
    bytes: 2 * MAX_STATE_BYTES,
    chunks: 4096,
};

/// Maximum length of a scope name in bytes.
const MAX_SCOPE_BYTES: usize = 256;

/// Maximum length of one environment string, below the kernel's limit of 128 KiB; excludes its name
/// and terminator.
const MAX_TEXT_BYTES: usize = 120 * 1024;

/// Default timeout of a capture.
pub const CAPTURE_TIME: Duration = Duration::from_secs(10);

/// Prefix of the variables that carry the state; the shell removes them before the command runs.
const VARIABLE: &str = "__EXEC_SERVER_SNAPSHOT_";

/// Variables that describe one shell process and not the effect of its start-up files.
const NOT_STATE: [&str; 4] = ["OLDPWD", "PWD", "SHLVL", "_"];

/// Kind of shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShellKind {
    Bash,
    Zsh,
    Sh,
}

impl ShellKind {
    fn named(name: &str) -> Option<Self> {
        match name {
            "bash" => Some(Self::Bash),
            "zsh" => Some(Self::Zsh),
            "sh" => Some(Self::Sh),
            _ => None,
        }
    }

    /// Options that make the shell run a script text without start-up files.
    fn bare(self) -> &'static str {
        match self {
            Self::Bash => "-pc",
            Self::Zsh => "-fc",
            Self::Sh => "-c",
        }
    }

    /// Commands that print the state as commands. Options that affect the parsing of functions come
    /// first, those that affect error handling last.
    fn state(self) -> &'static str {
        match self {
            // Inside a command substitution bash disables `errexit`.
            Self::Bash => {
                "$(builtin shopt -p; builtin declare -f; builtin declare -Fx; builtin alias -p)\n\
                 $(builtin trap -p)\numask $(builtin umask)\n$(builtin set +o)\n\
                 $(case $- in *e*) builtin echo set -e;; esac)"
            }
            Self::Zsh => {
                "$(builtin set +o; builtin typeset -f; builtin alias -L; builtin alias -sL)\n\
                 umask $(builtin umask)"
            }
            // A shell that cannot print its functions returns none.
            Self::Sh => {
                "$(if command -v typeset >/dev/null 2>&1; then typeset -f; fi\n\
                 alias | while IFS= read -r line; do printf 'alias %s\\n' \"${line#alias }\"; done)\n\
                 umask $(umask)\n$(set +o)"
            }
        }
    }

    /// A script that prints everything, after a marker that no other output contains, with lengths
    /// in bytes.
    ///
    /// The script collects everything before it prints: background processes of start-up files may
    /// write at any time. Their output between the parts makes the lengths wrong, which is
    /// detected.
    fn capture(self, mark: &str) -> String {
        let state = self.state();
        let print = match self {
            Self::Bash | Self::Zsh => "builtin printf",
            Self::Sh => "command printf",
        };
        format!(
            "__env=$(command env -0 | command tr '\\000\\012' '\\012\\001')\n__state=\"{state}\"\n\
             LC_ALL=C\n\
             {print} '\\n%s %s %s\\n%s\\n%s\\n%s end\\n' {mark} \"${{#__env}}\" \"${{#__state}}\" \
             \"$__env\" \"$__state\" {mark}\n"
        )
    }
}

/// Key of a snapshot: commands with an equal key share one.
#[derive(Debug, Clone, PartialEq)]
struct SnapshotKey {
    scope_id: String,
    kind: ShellKind,
    path: String,
    cwd: PathBuf,
    policy: Option<EnvPolicy>,
    sandbox: Option<Sandbox>,
}

/// A command that may start from a snapshot.
#[derive(Debug, Clone)]
pub struct SnapshotRequest {
    key: SnapshotKey,
    /// Names of the variables of the request, which override those of start-up files.
    requested_variables: BTreeSet<String>,
}

impl SnapshotRequest {
    /// The snapshot request of a command; `None` if a snapshot does not apply to it. `requested_variables` are the
    /// names of the variables of its request.
    ///
    /// # Errors
    ///
    /// When the scope or the shell is invalid.
    pub fn of(
        params: &StartParams,
        spec: &ProcessSpec,
        requested_variables: BTreeSet<String>,
    ) -> Result<Option<Self>, StartError> {
        let Some(request) = &params.shell_snapshot else {
            return Ok(None);
        };
        let length = request.scope_id.len();
        if length == 0 || length > MAX_SCOPE_BYTES {
            return Err(StartError::Refused(format!(
                "shell snapshot scope must be 1 to {MAX_SCOPE_BYTES} bytes, not {length}"
            )));
        }
        let Some(kind) = ShellKind::named(&request.shell.name) else {
            return Err(StartError::Refused(format!(
                "shell snapshots are unsupported for shell `{}`",
                request.shell.name
            )));
        };
        let fits = matches!(&spec.argv[..], [shell, flag, _, ..]
            if *shell == request.shell.path && flag == "-lc");
        Ok(fits.then(|| Self {
            key: SnapshotKey {
                scope_id: request.scope_id.clone(),
                kind,
                path: request.shell.path.clone(),
                cwd: spec.cwd.clone(),
                policy: params.env_policy.clone(),
                sandbox: spec.sandbox.clone(),
            },
            requested_variables,
        }))
    }
}

/// Snapshots of one session.
#[derive(Debug)]
pub struct Snapshots {
    /// Timeout of a capture.
    time: Duration,
    /// Least recently used first.
    kept: Mutex<VecDeque<(SnapshotKey, SnapshotCell)>>,
}

/// Initialized once, by the first command that needs it; `None` if the capture failed.
type SnapshotCell = Arc<OnceCell<Option<Snapshot>>>;

impl Default for Snapshots {
    fn default() -> Self {
        Self::new(CAPTURE_TIME)
    }
}

impl Snapshots {
    /// Creates an empty set, with this timeout of a capture.
    pub fn new(time: Duration) -> Self {
        Self {
            time,
            kept: Mutex::default(),
        }
    }

    /// The same command with the state of its shell restored, or unchanged if there is no snapshot.
    pub async fn restore(
        &self,
        executor: &Executor,
        spec: ProcessSpec,
        request: &SnapshotRequest,
    ) -> ProcessSpec {
        let cell = self.cell(&request.key);
        let take = || async {
            let taken = take(executor, &spec, request, self.time).await;
            if let Err(reason) = &taken {
                tracing::debug!(
                    scope = request.key.scope_id,
                    reason,
                    "cannot take a shell snapshot"
                );
            }
            taken.ok()
        };
        let snapshot = cell.get_or_init(take).await;
        let restored = snapshot
            .as_ref()
            .and_then(|snapshot| snapshot.begin(&spec, request));
        restored.unwrap_or(spec)
    }

    /// Drops all snapshots; returns the shells whose background processes have to be terminated.
    pub fn end(&self) -> Vec<Process> {
        let kept = std::mem::take(&mut *self.kept.lock());
        kept.iter().filter_map(|(_, cell)| left(cell)).collect()
    }

    fn cell(&self, key: &SnapshotKey) -> SnapshotCell {
        let mut kept = self.kept.lock();
        let known = kept.iter().position(|(known, _)| known == key);
        let entry = known.and_then(|at| kept.remove(at));
        let (key, cell) = entry.unwrap_or_else(|| (key.clone(), SnapshotCell::default()));
        kept.push_back((key, Arc::clone(&cell)));
        if kept.len() > MAX_SNAPSHOTS
            && let Some((_, old)) = kept.pop_front()
            && let Some(process) = left(&old)
        {
            // The task ends when all of them have ended.
            tokio::spawn(async move {
                process.terminate_and_wait(TerminationMethod::Now).await;
            });
        }
        cell
    }
}

fn left(cell: &SnapshotCell) -> Option<Process> {
    cell.get()?.as_ref()?.left.clone()
}

/// Captured state of a shell.
#[derive(Debug)]
struct Snapshot {
    /// Commands that restore the state.
    state: String,
    /// Variables that its start-up files set or changed.
    set: BTreeMap<String, String>,
    /// Variables that they removed.
    removed: Vec<String>,
    /// The shell, if it left a background process, like an agent, that the state may refer to.
    left: Option<Process>,
}

impl Snapshot {
    /// The same command in a shell that restores the state; `None` if the state is too long for
    /// that.
    fn begin(&self, spec: &ProcessSpec, request: &SnapshotRequest) -> Option<ProcessSpec> {
        let [shell, _, command, rest @ ..] = &spec.argv[..] else {
            return None;
        };
        let mut env = spec.env.clone();
        for (name, value) in &self.set {
            if !request.requested_variables.contains(name) {
                env.insert(name.clone(), value.clone());
            }
        }
        for name in &self.removed {
            if !request.requested_variables.contains(name) {
                env.remove(name);
            }
        }
        let mut names = Vec::new();
        for (number, part) in parts(&self.state).enumerate() {
            let name = format!("{VARIABLE}{number}");
            env.insert(name.clone(), part.to_owned());
            names.push(name);
        }
        let values: String = names.iter().map(|name| format!("${{{name}}}")).collect();
        let names = names.join(" ");
        // Errors of the restore, for example about read-only variables, are not shown.
        let text = format!(
            "{{ eval \"{values}\"; }} 2>/dev/null\nunset {names}\neval {}",
            shell_quoted(command)
        );
        if text.len() > MAX_TEXT_BYTES {
            return None;
        }
        let bare = request.key.kind.bare().to_owned();
        let argv = [shell.clone(), bare, text];
        Some(ProcessSpec {
            argv: argv.into_iter().chain(rest.iter().cloned()).collect(),
            env,
            ..spec.clone()
        })
    }
}

/// Parts of a text that each fit into a variable; at least one.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let mut end = text.len().min(MAX_TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let (part, more) = text.split_at(end);
        rest = (!more.is_empty()).then_some(more);
        Some(part)
    })
}

/// Captures the state of a shell, and verifies that another shell can restore it.
async fn take(
    executor: &Executor,
    spec: &ProcessSpec,
    request: &SnapshotRequest,
    time: Duration,
) -> Result<Snapshot, String> {
    let deadline = tokio::time::Instant::now() + time;
    let mark = format!("exec-server-{}", uuid::Uuid::new_v4().simple());
    let key = &request.key;
    let script = key.kind.capture(&mark);
    let argv = vec![key.path.clone(), "-lc".to_owned(), script];
    let end = format!("\n{mark} end\n");
    let (output, process) = run_until(executor, spec, argv, &end, deadline).await?;
    let mut snapshot = parse_shell_output(&output, &mark, spec, key.policy.as_ref())?;
    snapshot.left = process;
    // Background processes of start-up files may have written in between.
    let mut trial = ProcessSpec {
        argv: spec.argv.clone(),
        ..spec.clone()
    };
    trial.argv[2] = format!("printf '\\n%s end\\n' {mark}");
    let trial = snapshot.begin(&trial, request).ok_or("too long")?;
    let (argv, spec) = (trial.argv.clone(), trial);
    let run_result = run_until(executor, &spec, argv, &end, deadline).await;
    let outcome = match run_result {
        Ok((output, _)) if output.starts_with(end.as_bytes()) => Ok(snapshot),
        Ok(_) => Err((snapshot, "its state cannot be given to another".to_owned())),
        Err(reason) => Err((snapshot, reason)),
    };
    match outcome {
        Ok(snapshot) => Ok(snapshot),
        Err((snapshot, reason)) => {
            if let Some(process) = snapshot.left {
                process.terminate_and_wait(TerminationMethod::Now).await;
            }
            Err(reason)
        }
    }
}

/// Runs a shell until it has printed `end`; returns its output, and the shell if it left background
/// processes.
async fn run_until(
    executor: &Executor,
    spec: &ProcessSpec,
    argv: Vec<String>,
    end: &str,
    deadline: tokio::time::Instant,
) -> Result<(Vec<u8>, Option<Process>), String> {
    let spec = ProcessSpec {
        argv,
        stdio: Stdio::Pipes { stdin: false },
        timeout: None,
        retention: Some(CAPTURE_RETENTION),
        // The listeners of a managed network are not served during a capture: it has none.
        network: spec.network.as_ref().map(|_| PrivateNetwork::default()),
        ..spec.clone()
    };
    let process = executor
        .start(spec)
        .await
        .map_err(|error| error.to_string())?;
    let mut search = MarkerSearch::new(end);
    let marker_found = process.wait_for(|log| search.find_end(log));
    let outcome = match tokio::time::timeout_at(deadline, marker_found).await {
        Ok(true) => {
            let exited = process.wait_for(|log| log.exit().map(|_| ()));
            match tokio::time::timeout_at(deadline, exited).await {
                Ok(()) => Ok(process.with_log(output)),
                Err(_) => Err("the shell does not end"),
            }
        }
        Ok(false) => Err("the shell ended before it printed its state"),
        Err(_) => Err("the shell took too long"),
    };
    match outcome {
        Ok(output) if process.is_alone().await => Ok((output, None)),
        Ok(output) => Ok((output, Some(process))),
        Err(reason) => {
            process.terminate_and_wait(TerminationMethod::Now).await;
            Err(reason.to_owned())
        }
    }
}

/// Incremental search for a text in output.
struct MarkerSearch {
    text: Vec<u8>,
    cursor: u64,
    /// The end of the searched output, shorter than the text.
    tail: Vec<u8>,
}

impl MarkerSearch {
    fn new(text: &str) -> Self {
        Self {
            text: text.as_bytes().to_vec(),
            cursor: 0,
            tail: Vec::new(),
        }
    }

    /// Whether the text was printed, once that is known.
    fn find_end(&mut self, log: &Log) -> Option<bool> {
        while let Some(entry) = log.entry_after(self.cursor) {
            self.cursor = entry.seq;
            let LogEntryKind::Output(OutputStream::Stdout, bytes) = &entry.kind else {
                continue;
            };
            self.tail.extend_from_slice(bytes);
            let found = self.tail.windows(self.text.len());
            if found.into_iter().any(|window| window == self.text) {
                return Some(true);
            }
            let spare = self.tail.len().saturating_sub(self.text.len() - 1);
            self.tail.drain(..spare);
        }
        log.close().map(|_| false)
    }
}

/// Retained standard output.
fn output(log: &Log) -> Vec<u8> {
    let mut all = Vec::new();
    let mut cursor = 0;
    while let Some(entry) = log.entry_after(cursor) {
        cursor = entry.seq;
        if let LogEntryKind::Output(OutputStream::Stdout, bytes) = &entry.kind {
            all.extend_from_slice(bytes);
        }
    }
    all
}

/// Parses the output of a shell.
fn parse_shell_output(
    output: &[u8],
    mark: &str,
    spec: &ProcessSpec,
    policy: Option<&EnvPolicy>,
) -> Result<Snapshot, String> {
    let incomplete = || "the output of the shell is incomplete".to_owned();
    let (variables, state) = sections(output, mark).ok_or_else(incomplete)?;
    if variables.len() + state.len() > MAX_STATE_BYTES {
        return Err(format!(
            "its state exceeds the limit of {MAX_STATE_BYTES} bytes"
        ));
    }
    let odd = |_| "its state is not UTF-8".to_owned();
    let state = std::str::from_utf8(state).map_err(odd)?.to_owned();
    let variables = std::str::from_utf8(variables).map_err(odd)?;
    let after: BTreeMap<String, String> = variables
        .lines()
        .filter_map(|pair| pair.split_once('='))
        .filter(|(name, _)| !name.is_empty())
        .map(|(name, value)| (name.to_owned(), value.replace('\x01', "\n")))
        .collect();
    if after.is_empty() {
        return Err("its environment could not be listed".to_owned());
    }
    // The list of functions contains exported functions, too.
    let is_state =
        |name: &String| !NOT_STATE.contains(&name.as_str()) && !name.starts_with("BASH_FUNC_");
    let set = after
        .iter()
        .filter(|(name, value)| is_state(name) && spec.env.get(*name) != Some(*value))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let removed = spec.env.keys();
    let removed = removed.filter(|name| is_state(name) && !after.contains_key(*name));
    Ok(Snapshot {
        state,
        set: env::filter(set, policy),
        removed: removed.cloned().collect(),
        left: None,
    })
}

/// The environment and the state, if both have the announced lengths.
fn sections<'a>(output: &'a [u8], mark: &str) -> Option<(&'a [u8], &'a [u8])> {
    let begin = format!("\n{mark} ");
    let at = output
        .windows(begin.len())
        .position(|window| window == begin.as_bytes())?;
    let rest = &output[at + begin.len()..];
    let line = rest.iter().position(|&byte| byte == b'\n')?;
    let (lengths, rest) = (std::str::from_utf8(&rest[..line]).ok()?, &rest[line + 1..]);
    let (first, second) = lengths.split_once(' ')?;
    let (first, second): (usize, usize) = (first.parse().ok()?, second.parse().ok()?);
    let (variables, rest) = (rest.get(..first)?, rest.get(first..)?.strip_prefix(b"\n")?);
    let (state, rest) = (rest.get(..second)?, rest.get(second..)?);
    let end = format!("\n{mark} end\n");
    rest.starts_with(end.as_bytes())
        .then_some((variables, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(env: &[(&str, &str)]) -> ProcessSpec {
        ProcessSpec {
            argv: ["/bin/sh", "-lc", "it's"].map(str::to_owned).to_vec(),
            env: env
                .iter()
                .map(|&(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
            ..ProcessSpec::default()
        }
    }

    #[test]
    fn snapshot_contains_only_changes_of_start_up_files() {
        let output =
            "noise\n\nM 30 10\nSAME=1\nCHANGED=new\nADDED=a=b\u{1}c\nf() { :; }\nM end\nbye";
        let before = spec(&[
            ("SAME", "1"),
            ("CHANGED", "old"),
            ("GONE", "x"),
            ("OLDPWD", "/"),
        ]);
        let taken = parse_shell_output(output.as_bytes(), "M", &before, None).unwrap();
        assert_eq!(taken.state, "f() { :; }");
        let set: Vec<_> = taken.set.iter().map(|(n, v)| (&**n, &**v)).collect();
        assert_eq!(set, [("ADDED", "a=b\nc"), ("CHANGED", "new")]);
        assert_eq!(taken.removed, ["GONE"]);
        for broken in [
            &b"\nM 3 1\nA=1\nx"[..],
            b"\nM 3 1\nA=noise\n1\nx\nM end\n",
            b"\nM 3 1\nA=1\nnoise\nx\nM end\n",
            b"\nM 0 1\n\nx\nM end\n",
            b"\nM 3 1\nA=\xff\nx\nM end\n",
            b"\nM 3\nA=1\nx\nM end\n",
            b"",
        ] {
            assert!(parse_shell_output(broken, "M", &before, None).is_err());
        }
    }

    #[test]
    fn request_environment_overrides_snapshot() {
        let snapshot = Snapshot {
            state: "x".repeat(MAX_TEXT_BYTES + 1),
            set: [("A", "snapshot"), ("B", "snapshot")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            removed: vec!["C".to_owned(), "D".to_owned()],
            left: None,
        };
        let spec = spec(&[("A", "asked"), ("C", "asked"), ("D", "policy")]);
        let request = SnapshotRequest {
            key: SnapshotKey {
                scope_id: "s".to_owned(),
                kind: ShellKind::Sh,
                path: "/bin/sh".to_owned(),
                cwd: PathBuf::new(),
                policy: None,
                sandbox: None,
            },
            requested_variables: ["A", "C"].map(str::to_owned).into(),
        };
        let restored_spec = snapshot.begin(&spec, &request).unwrap();
        let env: Vec<_> = restored_spec
            .env
            .iter()
            .map(|(n, v)| (&**n, v.len()))
            .collect();
        assert_eq!(
            env,
            [
                ("A", 5),
                ("B", 8),
                ("C", 5),
                ("__EXEC_SERVER_SNAPSHOT_0", MAX_TEXT_BYTES),
                ("__EXEC_SERVER_SNAPSHOT_1", 1)
            ]
        );
        assert_eq!(restored_spec.argv[1], "-c");
        assert!(
            restored_spec.argv[2].ends_with("\neval 'it'\\''s'"),
            "{}",
            restored_spec.argv[2]
        );
        let mut long = spec;
        long.argv[2] = "x".repeat(MAX_TEXT_BYTES);
        assert!(snapshot.begin(&long, &request).is_none());
    }

    #[test]
    fn least_recently_used_snapshot_is_evicted() {
        let snapshots = Snapshots::default();
        let key = |n: usize| SnapshotKey {
            scope_id: n.to_string(),
            kind: ShellKind::Bash,
            path: String::new(),
            cwd: PathBuf::new(),
            policy: None,
            sandbox: None,
        };
        let first = snapshots.cell(&key(0));
        for n in 1..MAX_SNAPSHOTS {
            snapshots.cell(&key(n));
        }
        assert!(Arc::ptr_eq(&first, &snapshots.cell(&key(0))));
        snapshots.cell(&key(99));
        assert!(Arc::ptr_eq(&first, &snapshots.cell(&key(0))));
        assert!(
            snapshots
                .kept
                .lock()
                .iter()
                .all(|(kept, _)| *kept != key(1))
        );
        assert_eq!(snapshots.kept.lock().len(), MAX_SNAPSHOTS);
    }
}
