//! Encoding of retained output and of discovered files as JSON, in pieces: long results of
//! `process/read`, `process/snapshot` and `capabilityRoots/discoverV1`.

use std::collections::VecDeque;

use bytes::Bytes;
use exec_server_protocol::ByteChunk;
use exec_server_protocol::capability::DiscoverResult;
use exec_server_protocol::chunk::{encode_into, encoded_len};
use exec_server_protocol::process::{ReadResult, SnapshotResult};
use serde::Serialize;

use crate::ApiError;
use crate::pieces::{PIECE_TEXT_BYTES, PieceSource, grow};

/// The text of a result, in which output and contents are not encoded yet.
#[derive(Debug)]
pub(crate) struct EncodedOutput(VecDeque<OutputSegment>);

#[derive(Debug)]
enum OutputSegment {
    Text(Vec<u8>),
    /// Bytes to be encoded as base64.
    Output(Bytes),
    /// The rest of a text to be encoded as JSON, from this byte on.
    Contents(String, usize),
}

impl EncodedOutput {
    pub(crate) fn read(mut result: ReadResult) -> Result<Self, ApiError> {
        let chunks = result.chunks.iter_mut();
        let output = chunks.map(|one| ("chunk", output(&mut one.chunk)));
        let output = output.collect();
        Self::new(&result, output)
    }

    pub(crate) fn snapshot(mut result: SnapshotResult) -> Result<Self, ApiError> {
        let streams = [
            ("stdout", &mut result.stdout),
            ("stderr", &mut result.stderr),
            ("terminal", &mut result.terminal),
        ];
        let output = streams.map(|(name, chunk)| (name, output(chunk)));
        Self::new(&result, output.into())
    }

    pub(crate) fn discovered(mut result: DiscoverResult) -> Result<Self, ApiError> {
        // In the order in which they are serialised.
        let files = result.roots.iter_mut().flat_map(|root| {
            let plugin = root.plugin.iter_mut().flat_map(|plugin| {
                let more = plugin.mcp_config.iter_mut().chain(&mut plugin.apps_config);
                std::iter::once(&mut plugin.manifest).chain(more)
            });
            let skills = root.skills.iter_mut().flat_map(|skill| {
                std::iter::once(&mut skill.instructions).chain(&mut skill.metadata)
            });
            plugin.chain(skills).chain(&mut root.namespace_manifests)
        });
        let contents = files.map(|file| {
            let text = std::mem::take(&mut file.contents);
            ("contents", OutputSegment::Contents(text, 0))
        });
        let contents = contents.collect();
        Self::new(&result, contents)
    }

    /// Creates the text of a `result` in which all output is empty. `output` contains the output of
    /// each member, by the name of the member and in the order of the text.
    fn new(result: &impl Serialize, output: Vec<(&str, OutputSegment)>) -> Result<Self, ApiError> {
        let failed = |what: &str| ApiError::internal(format!("cannot encode the answer: {what}"));
        let text = serde_json::to_vec(result).map_err(|error| failed(&error.to_string()))?;
        let mut segments = VecDeque::with_capacity(2 * output.len() + 1);
        let mut rest = &text[..];
        for (name, segment) in output {
            // Quotes inside other texts are escaped, so only the member itself matches.
            let member = format!("\"{name}\":\"\"");
            let found = rest
                .windows(member.len())
                .position(|window| window == member.as_bytes());
            let begin = found.ok_or_else(|| failed(name))? + member.len() - 1;
            segments.push_back(OutputSegment::Text(rest[..begin].to_vec()));
            segments.push_back(segment);
            rest = &rest[begin..];
        }
        segments.push_back(OutputSegment::Text(rest.to_vec()));
        Ok(Self(segments))
    }
}

/// Takes the output of a member.
fn output(chunk: &mut ByteChunk) -> OutputSegment {
    OutputSegment::Output(std::mem::take(&mut chunk.0))
}

/// Appends at most about `room` bytes of text as JSON without quotes; returns where the rest begins.
fn push_escaped(out: &mut Vec<u8>, text: &str, room: usize) -> Result<usize, ApiError> {
    /// JSON has at most this many bytes for one byte of text.
    const ESCAPED: usize = 6;
    let end = text.floor_char_boundary(room.max(4));
    grow(out, ESCAPED * end + 2)?;
    let quote = out.len();
    let written = serde_json::to_writer(&mut *out, &text[..end]);
    debug_assert!(written.is_ok(), "any text can be written to memory");
    out.remove(quote);
    out.pop();
    Ok(end)
}

impl PieceSource for EncodedOutput {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        let end = out.len() + PIECE_TEXT_BYTES;
        while out.len() < end
            && let Some(segment) = self.0.front_mut()
        {
            match segment {
                OutputSegment::Text(text) => {
                    grow(out, text.len())?;
                    out.append(text);
                }
                OutputSegment::Output(bytes) => {
                    // Base64 can be continued after a multiple of three bytes.
                    let room = ((end - out.len()) / 4 * 3).max(3);
                    let part = bytes.split_to(room.min(bytes.len()));
                    grow(out, encoded_len(part.len()))?;
                    encode_into(&part, out);
                    if !bytes.is_empty() {
                        continue;
                    }
                }
                OutputSegment::Contents(text, begin) => {
                    // Little of it, because its text may be longer.
                    const PART_BYTES: usize = 16 * 1024;
                    let part = push_escaped(out, &text[*begin..], PART_BYTES)?;
                    *begin += part;
                    if *begin < text.len() {
                        continue;
                    }
                }
            }
            self.0.pop_front();
        }
        Ok(self.0.is_empty())
    }

    fn fail(&mut self, _: &mut Vec<u8>, _: &ApiError) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use exec_server_protocol::PathUri;
    use exec_server_protocol::capability::{DiscoveredRoot, Plugin, Skill, TextFile};
    use exec_server_protocol::process::{OutputStream, PerStream, ReadChunk};
    use serde_json::Value;

    use super::*;

    /// The JSON text, and the number of its pieces.
    fn encoded(mut source: EncodedOutput) -> (Value, usize) {
        let (mut text, mut pieces) = (Vec::new(), 1);
        while !source.next(&mut text).unwrap() {
            pieces += 1;
            assert!(text.len() <= pieces * (PIECE_TEXT_BYTES + 128 * 1024));
        }
        (serde_json::from_slice(&text).unwrap(), pieces)
    }

    #[test]
    fn pieces_of_discovered_files_are_the_whole_response() {
        let path = PathUri::default();
        let file = |len: usize| TextFile {
            path: path.clone(),
            contents: "a\u{e9}\"\u{1}\n\u{1f600}".repeat(len),
        };
        let mut root = DiscoveredRoot::empty("\"contents\":\"\"".to_owned(), path.clone());
        root.warnings = vec!["\"contents\":\"\"".to_owned()];
        let empty = root.clone();
        root.plugin = Some(Plugin {
            manifest: file(1),
            mcp_config: None,
            apps_config: Some(file(20_000)),
        });
        root.skills = (0..5)
            .map(|number| Skill {
                instructions: file(number * 5_000),
                metadata: (number % 2 == 0).then(|| file(number)),
            })
            .collect();
        root.namespace_manifests = vec![file(3), file(0)];
        let roots = vec![empty.clone(), root.clone(), empty, root];
        let result = DiscoverResult { roots };
        let whole = serde_json::to_value(&result).unwrap();
        let (found, pieces) = encoded(EncodedOutput::discovered(result).unwrap());
        assert!(found == whole);
        assert!(pieces > 3, "{pieces}");
    }

    fn bytes(len: usize) -> Bytes {
        (0..len).map(|n| (n / 7) as u8).collect()
    }

    #[test]
    fn pieces_of_output_are_the_whole_response() {
        for lengths in [&[][..], &[0, 1], &[500_001, 3, 200_000, 2], &[1; 10_000]] {
            let chunks = lengths.iter().zip(1..).map(|(len, seq)| ReadChunk {
                seq,
                stream: OutputStream::Stderr,
                chunk: bytes(*len).into(),
            });
            let result = ReadResult {
                chunks: chunks.collect(),
                next_seq: 9,
                exited: true,
                exit_code: Some(1),
                closed: false,
                failure: Some("\"chunk\":\"\"".to_owned()),
                sandbox_denied: false,
                evicted: None,
                exit_signal: Some("KILL".to_owned()),
                timed_out: false,
            };
            let whole = serde_json::to_value(&result).unwrap();
            let (found, pieces) = encoded(EncodedOutput::read(result).unwrap());
            assert_eq!(found, whole);
            assert_eq!(pieces > 1, lengths.len() > 2);
            let each = PerStream {
                stdout: 1,
                stderr: 2,
                terminal: 3,
            };
            let of = |at: usize| bytes(*lengths.get(at).unwrap_or(&0)).into();
            let result = SnapshotResult {
                stdout: of(0),
                stderr: of(1),
                terminal: of(2),
                truncated: true,
                omitted_bytes: each,
                head_bytes: each,
                running: true,
                exit_code: None,
            };
            let whole = serde_json::to_value(&result).unwrap();
            let (found, _) = encoded(EncodedOutput::snapshot(result).unwrap());
            assert_eq!(found, whole);
        }
    }
}
