//! What a call answers, as values, as text and as JSON.

use std::fmt::Write as _;
use std::time::Duration;

use exec_server_protocol::sandbox::Denial;
use serde_json::{Value, json};

/// What became of a command during one call.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Answer {
    /// Names this answer, so that one can speak of it: six hexadecimal digits.
    pub chunk_id: String,
    /// How long the call took.
    pub wall_time: Duration,
    /// Where the command goes on; absent once it has ended.
    pub session_id: Option<u32>,
    /// How it ended; absent while it runs.
    pub exit_code: Option<i32>,
    /// Why it can no longer be followed, if so.
    pub failure: Option<String>,
    /// How many tokens all of the output since the last answer would have been.
    pub original_token_count: u64,
    /// What fits of it, with a marker where something is missing.
    pub output: String,
    /// Bytes that `output` lacks, as its marker says.
    pub omitted_bytes: u64,
    /// Output went missing on its way here, which is stated in its place.
    pub has_gaps: bool,
    /// What became of what was written.
    pub input: InputStatus,
    /// The sandbox was in the way of a command that has ended.
    pub denial: Option<DenialReport>,
}

/// What became of input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum InputStatus {
    /// There was none, or all of it was taken.
    #[default]
    Taken,
    /// The process does not take input any more.
    Closed,
    /// The process has not read all of it yet; the rest goes on waiting.
    Pending,
}

/// What the sandbox was in the way of.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DenialReport {
    /// It was so soon after the start that starting again with other permissions is sensible.
    pub early: bool,
    /// How that is known.
    pub source: DenialSource,
    /// What was refused, where that is known.
    pub denials: Vec<Denial>,
}

/// How a denial is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenialSource {
    /// The executor has said so.
    Executor,
    /// The executor says nothing of it, but the output and the exit code look like it.
    Output,
}

impl Answer {
    /// As models are used to it.
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
        // Writing to a string cannot fail.
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

    /// As an object; what is absent is left out.
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
            DenialSource::Executor => "refused something",
            DenialSource::Output => "probably refused something",
        })?;
        for (number, denial) in self.denials.iter().enumerate() {
            let what = [&denial.path, &denial.address, &denial.syscall];
            let what = what.into_iter().flatten().next();
            let separator = if number == 0 { ": " } else { ", " };
            if let Some(what) = what {
                write!(f, "{separator}{what}")?;
            }
        }
        Ok(())
    }
}
