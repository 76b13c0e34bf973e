//! Result of an `exec_command`/`write_stdin` call as value, text and JSON.

use std::fmt::Write as _;
use std::time::Duration;

use exec_server_protocol::sandbox::Denial;
use serde_json::{Value, json};

use super::denial::denied_operation;

/// Result of one call: output, state and exit code of its command.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CommandResult {
    /// Id of this result, for references to it: six hexadecimal digits.
    pub chunk_id: String,
    /// Duration of the call.
    pub wall_time: Duration,
    /// Id of the command's session, also after its end.
    pub id: u32,
    /// Id of the session in which the command continues; absent after it has ended.
    pub session_id: Option<u32>,
    /// Exit code; absent while the command runs.
    pub exit_code: Option<i32>,
    /// Reason why the process is lost, if its connection failed.
    pub failure: Option<String>,
    /// Number of tokens of all output since the last result.
    pub original_token_count: u64,
    /// Output since the last result, truncated to the token limit with a marker for omitted bytes.
    pub output: String,
    /// Number of bytes omitted from `output`, as its marker states.
    pub omitted_bytes: u64,
    /// Sequence number before the first event of this output: reading the process from it on returns
    /// also what is omitted. Absent if there is no output.
    pub after_seq: Option<u64>,
    /// Whether output was lost on the connection. A marker in `output` shows where.
    pub has_gaps: bool,
    /// Result of the write.
    pub input: InputStatus,
    /// Set if a command has ended and its sandbox denied an operation.
    pub denial: Option<DenialReport>,
}

/// Result of a write to stdin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum InputStatus {
    /// There was no input, or the process accepted all of it.
    #[default]
    Taken,
    /// The process has closed its stdin.
    Closed,
    /// The process has not read all of the input yet; the rest stays queued.
    Pending,
}

/// Sandbox denial of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DenialReport {
    /// Whether the command ended soon after its start, so that a restart with other permissions is
    /// reasonable.
    pub early: bool,
    /// How the denial was detected.
    pub source: DenialSource,
    /// The denied operations, if known.
    pub denials: Vec<Denial>,
}

/// Source of a sandbox denial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenialSource {
    /// The executor reported it.
    Executor,
    /// The executor reported nothing, but the output or the exit code indicate a denial.
    Output,
}

impl CommandResult {
    /// Formats the result as text, in the form that models expect:
    ///
    /// ```text
    /// Chunk ID: 3f2a1b
    /// Wall time: 0.0031 seconds
    /// Process exited with code 0
    /// Original token count: 2
    /// Output:
    /// hello
    /// ```
    pub fn text(&self) -> String {
        let mut text = format!(
            "Chunk ID: {}\nWall time: {:.4} seconds\n",
            self.chunk_id,
            self.wall_time.as_secs_f64()
        );
        // Writing to a `String` cannot fail.
        if let Some(code) = self.exit_code {
            let _ = writeln!(text, "Process exited with code {code}");
        }
        if let Some(session) = self.session_id {
            let _ = writeln!(text, "Process running with session ID {session}");
        }
        if let Some(failure) = &self.failure {
            let _ = writeln!(text, "Process lost: {failure}");
        }
        match self.input {
            InputStatus::Taken => {}
            InputStatus::Closed => text.push_str("Input: the process takes no more\n"),
            InputStatus::Pending => text.push_str("Input: not all of it has been read yet\n"),
        }
        if let Some(denial) = &self.denial {
            let _ = writeln!(text, "Sandbox: {denial}");
        }
        let _ = write!(
            text,
            "Original token count: {}\nOutput:\n{}",
            self.original_token_count, self.output
        );
        text
    }

    /// Formats the result as a JSON object without absent fields.
    pub fn json(&self) -> Value {
        let mut object = json!({
            "chunk_id": self.chunk_id,
            "wall_time_seconds": self.wall_time.as_secs_f64(),
            "original_token_count": self.original_token_count,
            "output": self.output,
        });
        let mut add = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                object[name] = value;
            }
        };
        add("exit_code", self.exit_code.map(Value::from));
        add("session_id", self.session_id.map(Value::from));
        add("failure", self.failure.clone().map(Value::from));
        let omitted = Some(self.omitted_bytes).filter(|bytes| *bytes > 0);
        add("omitted_bytes", omitted.map(Value::from));
        add("has_gaps", self.has_gaps.then(|| Value::from(true)));
        let input = match self.input {
            InputStatus::Taken => None,
            InputStatus::Closed => Some("closed"),
            InputStatus::Pending => Some("pending"),
        };
        add("input", input.map(Value::from));
        let denial = self.denial.as_ref().map(|denial| {
            json!({
                "early": denial.early,
                "source": match denial.source {
                    DenialSource::Executor => "executor",
                    DenialSource::Output => "output",
                },
                "denials": denial.denials,
            })
        });
        add("denial", denial);
        object
    }
}

impl std::fmt::Display for DenialReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.source {
            DenialSource::Executor => "denied ",
            DenialSource::Output => "probably denied ",
        })?;
        let mut operations: Vec<String> = Vec::new();
        for denial in &self.denials {
            let operation = denied_operation(denial);
            if !operations.contains(&operation) {
                operations.push(operation);
            }
        }
        match operations.as_slice() {
            [] => f.write_str("something"),
            [one] => f.write_str(one),
            [first @ .., last] => write!(f, "{} and {last}", first.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::sandbox::DenialKind;

    use super::*;

    #[test]
    fn denial_report_names_each_operation_once() {
        let denial = |kind, path: Option<&str>| Denial {
            kind,
            path: path.map(str::to_owned),
            address: None,
            syscall: None,
        };
        let text = |source, denials: &[Denial]| {
            let denials = denials.to_vec();
            DenialReport {
                early: true,
                source,
                denials,
            }
            .to_string()
        };
        let file = denial(DenialKind::FileSystem, Some("/x"));
        let unknown = denial(DenialKind::FileSystem, None);
        let network = denial(DenialKind::Network, None);
        let call = denial(DenialKind::Syscall, None);
        let executor = DenialSource::Executor;
        assert_eq!(text(executor, &[]), "denied something");
        assert_eq!(text(DenialSource::Output, &[]), "probably denied something");
        assert_eq!(
            text(executor, std::slice::from_ref(&file)),
            "denied access to `/x`"
        );
        assert_eq!(
            text(executor, &[unknown.clone(), file, unknown, network]),
            "denied access to a file, access to `/x` and network access"
        );
        assert_eq!(text(executor, &[call]), "denied a system call");
    }
}
